"""Level sets: the incremental search, merged logs, exact sums, and the small lasso."""

import torch
from hypothesis import given, settings, strategies as st

from torchgmc.heads.levelsets import steps as levelsets
from torchgmc.heads.levelsets.steps import (
    apply_log,
    apply_tables,
    equal_width,
    exact_product,
    levels,
    merge_log,
    snap,
)


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.floats(-0.5, 0.5)), max_size=30),
    euclidean=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_a_merged_log_is_the_log_for_every_input(steps, euclidean, seed):
    g = torch.Generator().manual_seed(seed)
    z = snap(torch.rand(300, 1, generator=g, dtype=torch.float64))
    z[:30] = torch.linspace(0, 1, 30, dtype=torch.float64)[:, None]
    member = (torch.rand(300, 3, generator=g) < 0.5).double()
    edges = equal_width(5, True, True)
    who = torch.tensor([s[0] for s in steps], dtype=torch.int64)
    level = torch.tensor([s[1] for s in steps], dtype=torch.int64)
    step = snap(torch.tensor([s[2] for s in steps], dtype=torch.float64), levelsets.UNIT)
    column = torch.zeros_like(who)
    rounds = merge_log(who, level, column, step, edges)
    expected = z[:, 0].clone()
    for j, k, length in zip(who.tolist(), level.tolist(), step.tolist(), strict=True):
        inside = (member[:, j] > 0) & (torch.bucketize(expected, edges, right=True) == k)
        expected = torch.where(inside, expected - length, expected)
        expected = expected.clamp(0, 1) if euclidean else expected
    found = apply_log(z, member, *rounds, edges, euclidean) if euclidean else apply_log(z, member, *rounds, edges, False)
    assert torch.equal(found[:, 0], expected)
    assert len(rounds[0]) <= len(steps)


def test_steps_on_far_level_sets_share_a_round():
    edges = equal_width(10, True, True)
    level, step = torch.tensor([0, 3, 6, 9]), torch.full((4,), 0.05, dtype=torch.float64)
    who, _, _ = merge_log(torch.arange(4), level, torch.zeros(4, dtype=torch.int64), step, edges)
    assert len(who) == 1
    near, _, _ = merge_log(torch.arange(4), torch.tensor([3, 2, 3, 2]), torch.zeros(4, dtype=torch.int64), step, edges)
    assert len(near) == 4


@settings(deadline=None, max_examples=30)
@given(n=st.integers(0, 40), a=st.integers(1, 60), seed=st.integers(0, 2**16), size=st.sampled_from([1e-6, 1.0, 200.0]))
def test_sums_in_float32_pieces_are_exact(n, a, seed, size):
    g = torch.Generator().manual_seed(seed)
    member = torch.rand(n, a, generator=g) < 0.6
    table = snap(size * torch.randn(a, 3, generator=g, dtype=torch.float64).clamp(-2.5, 2.5), levelsets.UNIT)
    assert torch.equal(exact_product(member.float(), table), member.double() @ table)


def test_sums_are_exact_in_pieces_of_many_examples():
    g = torch.Generator().manual_seed(0)
    member, table = torch.rand(2 * levelsets.ROWS + 5, 7, generator=g) < 0.5, snap(torch.randn(7, 3, generator=g).double())
    assert torch.equal(exact_product(member.float(), table), member.double() @ table)


def test_tables_are_rounds_on_a_snapshot():
    g = torch.Generator().manual_seed(0)
    z = snap(torch.randn(50, 1, generator=g, dtype=torch.float64))
    member = (torch.rand(50, 2, generator=g) < 0.5).double()
    edges = equal_width(4, True, False)
    tables = snap(torch.randn(3, 2, 4, 1, generator=g, dtype=torch.float64), levelsets.UNIT)
    found = apply_tables(z, member, tables, edges, False)
    for i in range(50):
        value = float(z[i])
        for t in range(3):
            k = sum(float(e) <= value for e in edges)
            value -= sum(float(tables[t, j, k, 0]) for j in range(2) if member[i, j])
        assert float(found[i]) == value


def test_level_sets_are_closed_below():
    edges = equal_width(10, True, False)
    probs = torch.tensor([[0.0], [0.1], [0.25], [0.5], [0.7], [1.0]], dtype=torch.float64)
    assert levels(levelsets.coordinates(probs, False), edges, False)[:, 0].tolist() == [0, 1, 2, 5, 7, 9]
    assert levels(levelsets.coordinates(probs, True), equal_width(10, True, True), True)[:, 0].tolist() == [0, 1, 2, 5, 7, 9]
