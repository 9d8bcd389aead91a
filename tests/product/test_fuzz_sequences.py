"""Sequences of calls of a head, chosen by hypothesis, against a plain list of what was observed.

Whatever the order of observe, calibrate, merge, forget, save, load, forward, copies, resets and refused calls: a head's state
is that of a new head which sees the same examples once, and a refused call changes nothing.
"""

import contextlib
import copy
import math
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from torch import nn

import torchgmc as gmc
from gmctest.fuzz_inputs import FOLDER, TALLY
from gmctest.heads_zoo import ENTRIES, Entry

#: One head of every kind, small enough to be fitted many times.
NAMES = ("threshold", "threshold-noise", "probability-bins", "quantile-noise", "distribution", "tree-groups", "gmc")
SIZES = (40, 60)
#: Number of examples, seed and weight of a batch.
Seen = tuple[int, int, float]


class Sequences(RuleBasedStateMachine):
    """The head under test, and the oracle: which batches it has seen, and which of them its state comes from."""

    name = "threshold"

    def __init__(self) -> None:
        super().__init__()
        self.entry: Entry = ENTRIES[self.name]
        self.seen: list[Seen] = []
        self.fitted_on: list[Seen] | None = None
        self.lost = False  # were the examples of the fitted state left behind?
        self.folder = FOLDER

    @initialize()
    def begin(self) -> None:
        self.head = self.entry.make()
        self.head.prepare("exact", None, None)

    def batch(self, n: int, seed: int) -> tuple[torch.Tensor, ...]:
        return self.entry.data(n, seed).observe

    def whole(self, batches: list[Seen]) -> dict[str, torch.Tensor]:
        parts = [(*self.batch(n, seed), torch.full((n,), w, dtype=torch.float64)) for n, seed, w in batches]
        *data, weight = (torch.cat(part) for part in zip(*parts, strict=True))
        return self.head.bind(*data, weight=weight)

    def count(self) -> None:
        TALLY[f"sequences {self.name}"]["right"] += 1

    # -- calls that go well ------------------------------------------------------------------------------------------

    @rule(n=st.sampled_from(SIZES), seed=st.integers(0, 4))
    def observe(self, n: int, seed: int) -> None:
        self.head.observe(*self.batch(n, seed))
        self.seen.append((n, seed, 1.0))
        self.count()

    @rule(seed=st.integers(5, 8))
    def observe_in_threads(self, seed: int) -> None:
        parts = [tuple(t[k::4] for t in self.batch(40, seed)) for k in range(4)]
        threads = [threading.Thread(target=self.head.observe, args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.seen.append((40, seed, 1.0))
        self.count()

    @precondition(lambda self: self.seen)
    @rule()
    def calibrate(self) -> None:
        """A head that lacks the examples of its state says that it fits the new ones only."""
        with pytest.warns(UserWarning, match="fits those observed since") if self.lost else contextlib.nullcontext():
            self.head.calibrate()
        self.fitted_on, self.lost = list(self.seen), False
        self.count()

    @rule(seed=st.integers(10, 12), file=st.booleans(), swap=st.booleans())
    def merge(self, seed: int, file: bool, swap: bool) -> None:
        """Another head's examples, from memory or a file, in either order."""
        other = self.entry.make()
        other.prepare("exact", None, None)
        other.observe(*self.batch(40, seed))
        other = self.stored(other) if file else other
        if swap and not self.head.is_fitted:
            self.head, other = other, self.head
        assert self.head.merge(other) is self.head
        self.seen.append((40, seed, 1.0))
        self.count()

    @precondition(lambda self: self.seen)
    @rule(factor=st.sampled_from([0.5, 0.9]))
    def forget(self, factor: float) -> None:
        self.head.forget(factor)
        self.seen = [(n, seed, weight * factor) for n, seed, weight in self.seen]
        self.count()

    def stored(self, head: gmc.Head) -> gmc.Head:
        path = Path(self.folder.name) / "kept.safetensors"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*row of statistics")
            gmc.save(head, path, statistics=True)
        return gmc.load(path, **self.entry.loading)

    @rule()
    def save_and_load_with_statistics(self) -> None:
        """Nothing changes, but the report stays behind."""
        self.head = self.stored(self.head)
        self.count()

    @rule(n=st.sampled_from(SIZES), seed=st.integers(0, 4))
    def fit(self, n: int, seed: int) -> None:
        self.head.fit(*self.batch(n, seed))
        self.seen, self.fitted_on, self.lost = [(n, seed, 1.0)], [(n, seed, 1.0)], False
        self.count()

    @rule()
    def save_and_load(self) -> None:
        """The file has the state and no examples."""
        path = gmc.save(self.head, Path(self.folder.name) / "head.safetensors")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.head = gmc.load(path, **self.entry.loading)
        self.head.prepare("exact", None, None)
        self.seen, self.lost = [], self.fitted_on is not None
        self.count()

    @rule()
    def state_dict(self) -> None:
        other = self.entry.make()
        other.load_state_dict(self.head.state_dict())
        self.head, self.seen, self.lost = other, [], self.fitted_on is not None
        self.head.prepare("exact", None, None)
        self.count()

    @rule()
    def copy(self) -> None:
        self.head = copy.deepcopy(self.head)
        self.count()

    @rule()
    def reset(self) -> None:
        self.head.reset()
        self.head.prepare("exact", None, None)
        self.seen, self.fitted_on, self.lost = [], None, False
        self.count()

    # -- calls that are refused --------------------------------------------------------------------------------------

    @rule(kind=st.sampled_from(["255", "nan membership", "strangers", "nan", "a row less"]), door=st.sampled_from(range(3)))
    def refused(self, kind: str, door: int) -> None:
        data = list(self.batch(40, 9))
        member = data[-1]
        if kind == "nan":
            data[0] = data[0].clone()
            data[0].view(-1)[5] = math.nan
        else:
            data[-1] = {
                "255": member.to(torch.uint8) * 255,
                "nan membership": torch.where(member, math.nan, 0.0),
                "strangers": gmc.Groups.from_columns({"z": [f"u{i % member.shape[1]}" for i in range(40)]}),
                "a row less": member[1:],
            }[kind]
        before = self.head.statistics, self.head.report, {k: v.clone() for k, v in self.head.state_dict().items()}
        call = (self.head.observe, self.head.fit, self.head.audit)[door]
        with pytest.raises((ValueError, TypeError) if door < 2 or self.head.is_fitted else (ValueError, TypeError, RuntimeError)):
            call(*data)
        assert self.head.statistics is before[0] and self.head.report is before[1]
        assert all(torch.equal(self.head.state_dict()[k], v) for k, v in before[2].items())
        TALLY[f"sequences {self.name}"]["error"] += 1

    @rule()
    def forward_refused(self) -> None:
        inputs = self.entry.data(12, 3).inputs
        wrong = (*inputs[:-1], inputs[-1].to(torch.uint8) * 255)
        with pytest.raises((ValueError, RuntimeError), match="0 or 1|not fitted"):
            self.head(*wrong)
        TALLY[f"sequences {self.name}"]["error"] += 1

    # -- what must always be so --------------------------------------------------------------------------------------

    @invariant()
    def the_examples_are_those_observed(self) -> None:
        statistics = self.head.statistics if hasattr(self, "head") else None
        if not self.seen:
            assert statistics is None
            return
        fresh = self.entry.make()
        fresh.prepare("exact", None, None)
        fresh.observe(**self.whole(self.seen))
        rows = getattr(statistics, "rows", None)
        assert rows == getattr(fresh.statistics, "rows", None)
        if rows is None:
            assert int(statistics.examples) == int(fresh.statistics.examples)

    @invariant()
    def the_answers_are_those_of_one_fit_on_the_same_examples(self) -> None:
        if not hasattr(self, "head"):
            return
        assert self.head.is_fitted == (self.fitted_on is not None)
        inputs = self.entry.data(12, 3).inputs
        model = gmc.attach(nn.Identity(), self.head, adapter=gmc.Adapter(activation="none"))
        if self.fitted_on is None:
            with pytest.raises(RuntimeError, match="not fitted"):
                self.head(*inputs)
            return
        want = self.oracle(tuple(sorted(self.fitted_on)))
        found = self.head(*inputs)
        if want.is_floating_point():
            torch.testing.assert_close(found, want, rtol=0, atol=1e-5)
        else:
            assert (found != want).double().mean() <= 0.02  # sums in another order may move a threshold by one step
        if self.head.takes != "groups":
            assert torch.equal(model(*inputs), found)

    cache: dict[Any, torch.Tensor] = {}  # noqa: RUF012  # shared by all runs on purpose

    def oracle(self, batches: tuple[Seen, ...]) -> torch.Tensor:
        if (self.name, batches) not in self.cache:
            head = self.entry.make().fit(**self.whole(list(batches)))
            self.cache[self.name, batches] = head(*self.entry.data(12, 3).inputs)
        return self.cache[self.name, batches]


def machine(name: str, examples: int, steps: int) -> None:
    kind = type(f"Sequences_{name}", (Sequences,), {"name": name})
    how = settings(
        max_examples=examples,
        stateful_step_count=steps,
        phases=[Phase.generate, Phase.shrink],
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(kind, settings=how)


@pytest.mark.parametrize("name", NAMES)
def test_sequences_of_calls(name: str) -> None:
    machine(name, 4, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_sequences_of_calls(name: str) -> None:
    machine(name, 60, 15)
