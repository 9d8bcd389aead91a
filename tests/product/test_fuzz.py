"""Every public entry, called well and badly: a right answer by an oracle, or a ValueError / TypeError that says what is wrong.

``pytest tests/product/test_fuzz.py -s`` prints the table of entries, cases and outcomes. A few cases of each entry run every
time; the slow run has 10,000 of them.
"""

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from gmctest import fuzz_around, fuzz_cli, fuzz_functions, fuzz_heads, fuzz_inputs, fuzz_methods, fuzz_surface, fuzz_text

ENTRIES = {
    entry.name: entry
    for module in (fuzz_heads, fuzz_functions, fuzz_methods, fuzz_around, fuzz_text, fuzz_cli)
    for entry in module.ENTRIES
}
SLOW_CASES = 10_000 / sum(entry.share for entry in ENTRIES.values())
CASES = st.tuples(
    st.sampled_from([16, 24]),
    st.integers(0, 999),
    st.lists(st.tuples(st.integers(0, 11), st.sampled_from(fuzz_inputs.BREAKS)), max_size=2),
)


def run(name: str, cases: int) -> None:
    entry = ENTRIES[name]

    @settings(
        max_examples=cases,
        phases=[Phase.generate, Phase.shrink],
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(CASES)
    def one(case: tuple[int, int, list[tuple[int, str]]]) -> None:
        n, seed, places = case
        good = entry.make(n, seed)
        fuzz_inputs.judge(entry, fuzz_inputs.broken(good, entry.fixed, places), spoiled=bool(places))

    one()


@pytest.mark.parametrize("name", ENTRIES)
def test_a_right_answer_or_a_clear_error(name: str) -> None:
    run(name, max(1, round(8 * ENTRIES[name].share)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
def test_ten_thousand_cases(name: str) -> None:
    run(name, math.ceil(SLOW_CASES * ENTRIES[name].share))


def test_every_public_callable_has_an_entry() -> None:
    """By watching what the entries call; what is exempt is named, with its reason, and is really called by none."""

    def good_call(entry: fuzz_inputs.Entry) -> Any:
        return lambda: fuzz_inputs.judge(entry, entry.make(16, 1), False)

    lacking = fuzz_surface.not_called(fuzz_surface.public(), map(good_call, ENTRIES.values()))
    exempt = {name for names in fuzz_surface.EXEMPT.values() for name in names.split()}
    of_heads = {name for name in lacking if name.split(".")[-1] in fuzz_surface.CONTRACT.split()}
    assert lacking - of_heads == exempt


def test_the_judge_sees_faults() -> None:
    def entry(call: Any, check: Any = lambda *_: None) -> fuzz_inputs.Entry:
        return fuzz_inputs.Entry("judged", lambda n, seed: {}, call, check)

    def fails(error: Exception) -> Any:
        def call() -> None:
            raise error

        return call

    assert fuzz_inputs._judge(entry(lambda: 1), {}, True) == "right"
    for call in (fails(IndexError("x")), fails(ValueError("`x` from the test"))):
        with pytest.raises(fuzz_inputs.Fault):
            fuzz_inputs._judge(entry(call), {}, True)

    def wrong(*_: Any) -> None:
        raise AssertionError

    with pytest.raises(fuzz_inputs.Fault, match="wrong answer"):
        fuzz_inputs._judge(entry(lambda: 1, wrong), {}, True)
