"""Search over intersections of columns by counting, against the membership table and plain loops."""

import itertools
import math
import random
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import torchgmc as gmc
from gmctest.fake_device import AWAY
from torchgmc.engine.search import Structured, masses, sums
from torchgmc.groups import sums as _tables
from torchgmc.groups.groups import Groups


def sums_by_loop(groups: Groups, values: list[list[float]]) -> list[list[float]]:
    """Row by row and group by group, from the terms alone; sums without rounding."""
    codes = groups.codes.tolist()
    width = len(values[0]) if values else 0
    found = []
    for term in groups.terms:
        rows = [i for i, code in enumerate(codes) if all(code[column] == level for column, level in term)]
        found.append([math.fsum(values[i][k] for i in rows) for k in range(width)])
    return found


@st.composite
def structured(draw: st.DrawFn) -> Groups:
    """Groups of up to five columns: any number of levels, dropped terms, everybody, rows without a level, no rows."""
    k = draw(st.integers(1, 5))
    n = draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    levels = [draw(st.integers(1, 6)) for _ in range(k)]
    columns = {f"c{j}": rng.integers(0, size, n) for j, size in enumerate(levels)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what was left out
        groups = Groups.from_columns(
            columns,
            intersections=draw(st.integers(1, k)),
            min_size=draw(st.integers(0, min(3, n // max(levels)))),
            small="drop",
            overall=draw(st.booleans()),
        )
    if draw(st.booleans()):
        m = draw(st.integers(0, 40))
        new = {name: rng.integers(0, size + 2, m) for name, size in zip(columns, levels, strict=True)}
        groups = groups.transform(new, unknown="none")
    return groups


@settings(deadline=None, max_examples=200)
@given(groups=structured(), u=st.integers(1, 3), seed=st.integers(0, 2**16), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_sums_match_loop(groups: Groups, u: int, seed: int, dtype: torch.dtype) -> None:
    values = torch.randn(groups.num_rows, u, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    expected = torch.tensor(sums_by_loop(groups, values.tolist()), dtype=dtype).reshape(len(groups), -1)
    found = sums(groups, values)
    assert found.dtype == dtype and found.shape == (len(groups), u)
    if groups.num_rows:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 if dtype == torch.float32 else 1e-12)
    assert torch.equal(groups.sizes, groups.membership.sum(0))
    for index in range(len(groups)):
        assert torch.equal(groups.member(index), groups.membership[:, index])
        assert torch.equal(groups.member(torch.tensor(index)), groups.membership[:, index])
        assert groups.name(index) == groups.names[index]


@settings(deadline=None)
@given(groups=structured(), data=st.data())
def test_violations_and_masses_match_the_membership(groups: Groups, data: st.DataObject) -> None:
    n, l, u = groups.num_rows, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    s = torch.randn(n, l, generator=generator, dtype=torch.float64)
    what = data.draw(st.sampled_from([None, torch.randn(u, l, generator=generator, dtype=torch.float64)]))
    wide = l if what is None else u
    weight = data.draw(
        st.sampled_from([None, torch.rand(n, generator=generator).double(), torch.rand(n, wide, generator=generator).double()])
    )
    dense = groups.membership
    found = gmc.violations(groups, s, what, weight)
    torch.testing.assert_close(found, gmc.violations(dense, s, what, weight), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(masses(groups, weight), masses(dense, weight), rtol=1e-10, atol=1e-12)
    order = torch.randperm(n, generator=generator)  # the order of the examples does not matter
    codes = groups.codes[order]
    shuffled = Groups(groups.columns, codes, groups._blocks, (codes < 0).any(0).tolist())
    again = gmc.violations(shuffled, s[order], what, weight if weight is None else weight[order])
    torch.testing.assert_close(again, found, rtol=1e-10, atol=1e-12)


@settings(deadline=None)
@given(
    radices=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    order=st.integers(1, 4),
    n=st.sampled_from([1, 100, 10**6]),
    seed=st.integers(0, 2**16),
)
def test_cover_holds_every_combination_once(radices: list[int], order: int, n: int, seed: int) -> None:
    combos = [c for o in range(min(order, len(radices)) + 1) for c in itertools.combinations(range(len(radices)), o)]
    combos = random.Random(seed).sample(combos, max(1, len(combos) // 2))
    plan = _tables.cover(combos, radices, n)
    assert sorted([c for joint in plan.joints for c in joint.combos] + list(plan.large)) == sorted(combos)
    for joint in plan.joints:
        assert all(set(combo) <= set(joint.columns) for combo in joint.combos)
        assert len(joint.steps) < 2 * len(joint.combos)
        alone = any(set(combo) == set(joint.columns) for combo in joint.combos)
        assert alone or math.prod(radices[j] for j in joint.columns) <= _tables.JOINT


def test_one_joint_table_for_few_columns_and_few_tables_for_many() -> None:
    triples = list(itertools.combinations(range(8), 3))
    assert len(_tables.cover(triples, [2] * 8, 10**6).joints) == 1
    triples = list(itertools.combinations(range(12), 3))
    assert len(_tables.cover(triples, [8] * 12, 10**6).joints) < len(triples) / 3


@pytest.mark.parametrize("limit", [1, 30])
def test_tables_that_would_not_fit(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Combinations beyond the size of any table are found by bisection, many values are added up in turn."""
    monkeypatch.setattr(_tables, "JOINT", limit)
    monkeypatch.setattr(_tables, "SINGLE", limit)
    monkeypatch.setattr(_tables, "ELEMENTS", 50)
    monkeypatch.setattr(_tables, "ROWS", 64)
    rng = np.random.default_rng(0)
    columns = {f"c{j}": rng.integers(0, 5, 300) for j in range(4)}
    groups = Groups.from_columns(columns, intersections=3, overall=True)
    new = groups.transform({name: rng.integers(0, 7, 250) for name in columns}, unknown="none")
    for some in (groups, new):
        values = torch.randn(some.num_rows, 4, dtype=torch.float64)
        assert some._tables.large
        torch.testing.assert_close(some.sums(values), some.membership.double().T @ values)
        assert torch.equal(some.to("cpu").sizes, some.membership.sum(0))
    monkeypatch.undo()
    plain = Groups.from_columns(columns, intersections=3, overall=True)
    assert plain.names == groups.names and torch.equal(plain.sizes, groups.sizes)


def test_no_membership_table_is_made() -> None:
    rng = np.random.default_rng(0)
    columns = {f"c{j}": rng.integers(0, 10, 5000) for j in range(8)}
    groups = Groups.from_columns(columns, intersections=3)
    assert len(groups) > 50_000
    s = torch.randn(5000, dtype=torch.float64)
    table = gmc.violations(groups, s)
    for index in (0, 100, len(groups) - 1):
        member = groups.member(index)
        torch.testing.assert_close(table[index, 0], s[member].sum() / 5000)
    solution = gmc.solve(torch.zeros(5000), lambda f: f - s[:, None], groups, alpha=0.001, max_iter=3)
    assert solution.report.iterations == 3
    assert not {"membership", "names", "terms"} & groups.__dict__.keys()


def test_gradients_pass() -> None:
    groups = Groups.from_columns({"a": [0, 1, 0, 2], "b": [1, 1, 0, 0]}, intersections=2, overall=True)
    s = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gmc.violations(groups, x), (s,))


@pytest.mark.parametrize("gaps", [False, True])
def test_nothing_is_read_back_from_the_device(gaps: bool) -> None:
    """Fake CUDA tensors have no values: a host sync, or a tensor left on the CPU, would raise."""
    rng = np.random.default_rng(0)
    columns = {f"c{j}": rng.integers(0, 4, 100) for j in range(4)}
    groups = Groups.from_columns(columns, intersections=2, overall=True)
    if gaps:
        groups = groups.transform({name: rng.integers(0, 6, 100) for name in columns}, unknown="none")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        groups.codes = mode.from_tensor(groups.codes)
        fake = groups.to(AWAY)
        s = torch.empty(100, 2, device=AWAY)
        table = gmc.violations(fake, s)
        assert table.device == AWAY and table.shape == (len(groups), 2)
        assert masses(fake).shape == (len(groups),)
        assert fake.member(torch.empty((), dtype=torch.int64, device=AWAY)).device == AWAY
        assert fake.member(3).shape == (100,)


def test_only_everybody() -> None:
    groups = Groups.from_columns({"x": [1, 2]}, overall=True)
    only = Groups(groups.columns, groups.codes, groups._blocks[:1], groups._gaps)
    assert only.names == ("all",) and only.member(0).all() and only.name(0) == "all"
    assert only.sums(torch.tensor([[1.0], [2.0]])).tolist() == [[3.0]]


def test_one_column_and_no_rows() -> None:
    groups = Groups.from_columns({"x": ["a", "b", "a"]})
    assert isinstance(groups, Structured)
    assert gmc.violations(groups, torch.tensor([1.5, 3.0, 4.5])).tolist() == [[2.0], [1.0]]
    empty = groups.transform({"x": []})
    assert gmc.violations(empty, torch.zeros(0, 3)).tolist() == [[0.0] * 3] * 2
    assert masses(empty).tolist() == [0.0, 0.0]
    assert groups.sums(torch.zeros(3, 0)).shape == (2, 0)


def test_float32_sums_keep_their_digits() -> None:
    """A running sum in float32 would be wrong in the fourth digit here."""
    n = 200_000
    groups = Groups.from_columns({"x": np.arange(n) % 2, "y": np.arange(n) % 3}, intersections=2)
    values = torch.full((n, 1), 0.1) + 1000
    exact = groups.sums(values.double())
    torch.testing.assert_close(groups.sums(values).double(), exact, rtol=1e-7, atol=0)


def test_bad_rows_and_indices() -> None:
    groups = Groups.from_columns({"x": ["a", "b", "a"]})
    with pytest.raises(ValueError, match="`who` has 3 rows but `s` has 2"):
        gmc.violations(groups, torch.zeros(2))
    with pytest.raises(ValueError, match=r"`values` must have shape \(3, u\), .* got \(2, 1\)"):
        groups.sums(torch.zeros(2, 1))
    with pytest.raises(ValueError, match="`who` is on cpu but `s` is on meta"):
        gmc.violations(groups, torch.zeros(3, device="meta"))
    with pytest.raises(TypeError, match="`who` must be a tensor, Cells or Groups, got list"):
        gmc.violations([[True]], torch.zeros(1))  # type: ignore[arg-type]
    for index in (-1, 2):
        with pytest.raises(ValueError, match=f"`index` must be a group from 0 to 1, got {index}"):
            groups.member(index)
