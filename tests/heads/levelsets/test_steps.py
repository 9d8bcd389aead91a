"""Level sets: the incremental search, merged logs, exact sums, and the small lasso."""

import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchgmc.engine.lasso import _split, solve_lasso
from torchgmc.engine.solver import run
from torchgmc.heads.levelsets import steps as levelsets
from torchgmc.heads.levelsets.problem import ResidualProblem
from torchgmc.heads.levelsets.steps import (
    apply_log,
    apply_tables,
    cell_sums,
    equal_width,
    exact_product,
    levels,
    merge_log,
    snap,
)
from torchgmc.heads.quantile.problem import QuantileProblem


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
        names=[str(j) for j in range(a)],
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
        full = cell_sums(p.member, *p.read(None), p.bins)
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


@settings(deadline=None, max_examples=40)
@given(a=st.integers(1, 12), rank=st.integers(1, 12), slack=st.floats(0, 2), seed=st.integers(0, 2**16))
def test_lasso_meets_its_optimality_conditions(a, rank, slack, seed):
    g = torch.Generator().manual_seed(seed)
    root = torch.randn(2, a, rank, generator=g, dtype=torch.float64)
    hessian = root @ root.mT
    gradient = (hessian @ torch.randn(2, a, 1, generator=g, dtype=torch.float64))[..., 0]
    lam = torch.full((2, a), slack, dtype=torch.float64)
    x = solve_lasso(hessian, gradient, lam)
    rest = gradient - (hessian @ x[..., None])[..., 0]
    scale = 1 + gradient.abs().max()
    assert bool((rest.abs() <= lam + 1e-4 * scale).all())
    assert bool(((rest - lam * x.sign()).abs() <= 1e-4 * scale)[x.abs() > 1e-7 * scale].all())


def test_lasso_and_splitting_agree_with_scipy():
    g = torch.Generator().manual_seed(0)
    root = torch.randn(6, 20, generator=g, dtype=torch.float64)
    hessian, gradient = root @ root.T / 20, torch.randn(6, generator=g, dtype=torch.float64)
    lam = torch.full((6,), 0.3, dtype=torch.float64)

    def objective(parts):
        x = torch.from_numpy(parts[:6] - parts[6:])
        return float(0.5 * x @ hessian @ x - gradient @ x + 0.3 * parts.sum())

    best = scipy.optimize.minimize(objective, [0.1] * 12, bounds=[(0, None)] * 12, method="L-BFGS-B", options={"ftol": 1e-15})
    expected = torch.from_numpy(best.x[:6] - best.x[6:])
    torch.testing.assert_close(solve_lasso(hessian, gradient, lam), expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(_split(hessian, gradient, lam, torch.zeros_like(gradient)), expected, rtol=0, atol=1e-3)


def test_quantile_line_search_reaches_the_best_coverage():
    """Against every possible shift of one cell."""
    g = torch.Generator().manual_seed(0)
    scores = torch.rand(60, generator=g, dtype=torch.float64)
    member = torch.rand(60, 2, generator=g) < 0.7
    p = QuantileProblem(
        scores,
        0.8,
        z=torch.full((60, 1), 0.5, dtype=torch.float64),
        member=member,
        weight=torch.rand(60, generator=g, dtype=torch.float64),
        edges=torch.zeros(0, dtype=torch.float64),
        names=["a", "b"],
        conditional=False,
        euclidean=None,
        unit=2.0**-40,
    )
    who, what = torch.tensor(0), torch.tensor(0)
    step = p.line_search(who, what, p.violations()[0, 0])
    inside = member[:, 0]
    candidates = [
        abs(float(((scores[inside] <= 0.5 + d).double() - 0.8) @ p.share[inside]))
        for d in [*(scores[inside] - 0.5 + 1e-9).tolist(), -1.0]
    ]
    p.move(who, what, step)
    assert abs(float(p.violations()[0, 0])) <= min(candidates) + 1e-12


def test_calm_gives_the_threads_back():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with levelsets.calm(torch.ones(3, 2)):
            assert torch.get_num_threads() == 1
        with pytest.raises(ValueError, match="inside"), levelsets.calm(torch.ones(3, 2)):
            raise ValueError("inside")
        assert torch.get_num_threads() == 2
        with levelsets.calm(torch.ones(1, 1).expand(levelsets.ONE_THREAD + 1, 1)):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
