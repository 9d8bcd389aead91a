"""Level sets as the solver sees them: the incremental search is the full one."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from torchgmc.engine.solver import run
from torchgmc.engine.values import Names
from torchgmc.heads.levelsets import steps as levelsets
from torchgmc.heads.levelsets.problem import ResidualProblem
from torchgmc.heads.levelsets.steps import (
    cell_sums,
    equal_width,
)


def problem(n=200, a=3, bins=4, columns=1, euclidean=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    member = torch.rand(n, a, generator=g) < 0.5
    member[:1] = True
    probs = torch.rand(n, 1, generator=g, dtype=torch.float64)
    y = (torch.rand(n, 1, generator=g, dtype=torch.float64) < probs**2).double()
    if columns > 1:
        probs = torch.randn(n, columns, generator=g, dtype=torch.float64).softmax(1)
        y = torch.eye(columns, dtype=torch.float64)[torch.randint(0, columns, (n,), generator=g)]
    return ResidualProblem(
        y,
        1.0 if euclidean else 0.5,
        z=levelsets.coordinates(probs, euclidean),
        member=member,
        weight=torch.rand(n, generator=g, dtype=torch.float64),
        edges=equal_width(bins, columns == 1, euclidean),
        names=Names([str(j) for j in range(a)], [str(k) for k in range(40)]),
        conditional=False,
        euclidean=euclidean,
        unit=levelsets.UNIT,
    )


@settings(deadline=None, max_examples=40)
@given(
    columns=st.sampled_from([1, 3]),
    euclidean=st.booleans(),
    moves=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.floats(-0.3, 0.3)), min_size=1, max_size=25),
    seed=st.integers(0, 2**16),
)
def test_incremental_search_is_the_full_one(columns, euclidean, moves, seed):
    p = problem(columns=columns, euclidean=euclidean, seed=seed)
    for who, level, step in moves:
        p.move(torch.tensor(who), torch.tensor(level * columns), torch.tensor(step, dtype=torch.float64))
        full = cell_sums(p.member, *p.read(slice(None)), p.bins)
        torch.testing.assert_close(p.table.sums, full, rtol=0, atol=1e-13)


def test_the_table_is_made_anew_now_and_then():
    p = problem()
    made = []
    fresh = p.table.recompute
    p.table.recompute = lambda: (made.append(1), fresh())
    step = torch.tensor(1e-4, dtype=torch.float64)
    for t in range(2 * p.table.REFRESH):
        p.move(torch.tensor(t % 3), torch.tensor(t % 4), step * (-1) ** t)
    assert len(made) >= 2


def test_dense_moves_of_other_devices_are_the_sparse_ones():
    """Without a CPU no rows are picked (that would wait for the device); the result is the same."""
    for columns in (1, 3):
        sparse, dense = (problem(columns=columns) for _ in range(2))
        dense.sparse = False
        g = torch.Generator().manual_seed(0)
        for _ in range(20):
            who, what = torch.randint(0, 3, (), generator=g), torch.randint(0, 4 * columns, (), generator=g)
            step = 0.2 * torch.randn((), generator=g, dtype=torch.float64)
            sparse.move(who, what, step)
            dense.move(who, what, step)
            assert torch.equal(sparse.z, dense.z)
            torch.testing.assert_close(sparse.violations(), dense.violations(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("euclidean", [True, False])
def test_greedy_steps_of_the_smooth_bound_converge(euclidean):
    p = problem(n=500, euclidean=euclidean)
    report, _ = run(p, 0.005, "exact", None, 500)
    assert report.converged and report.iterations > 2
