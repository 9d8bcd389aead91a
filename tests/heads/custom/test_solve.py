"""gmc.solve, the algorithm on a user's own problem."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import torchgmc as gmc
from torchgmc.engine.folds import deal
from torchgmc.engine.search import Cells
from torchgmc.groups.groups import Groups
from torchgmc.mappings import Centered, Pinball, Residual


def problem(n=60, a=3, l=2, seed=0):
    rng = torch.Generator().manual_seed(seed)
    who = torch.rand(n, a, generator=rng) < 0.5
    who[:a] |= torch.eye(a, dtype=torch.bool)
    return torch.rand(n, l, generator=rng).double(), torch.rand(n, l, generator=rng).double().round(), who


def algorithm_1(f, s, who, what, alpha, eta, projection=None, max_iter=500):
    """Plain loop over g and examples; `who` is a list of lists or a function of f."""
    f, steps = [row[:] for row in f], 0
    while steps < max_iter:
        member, values = (who(f) if callable(who) else who), s(f)
        n, best = len(f), (0.0, 0, 0)
        for j in range(len(member[0])):
            for k, v in enumerate(what):
                total = sum(sum(x * y for x, y in zip(values[i], v, strict=True)) for i in range(n) if member[i][j]) / n
                if abs(total) > abs(best[0]) + 1e-15:
                    best = (total, j, k)
        if abs(best[0]) <= alpha:
            break
        sign = 1.0 if best[0] > 0 else -1.0
        for i in range(n):
            if member[i][best[1]]:
                f[i] = [x - sign * eta * d for x, d in zip(f[i], what[best[2]], strict=True)]
            f[i] = projection(f[i]) if projection else f[i]
        steps += 1
    return f, steps


@pytest.mark.parametrize("seed", range(3))
def test_paper_equals_the_loop(seed):
    f0, y, who = problem(seed=seed)
    what = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]).double()
    solution = gmc.solve(f0, Residual(y), who, what, alpha=0.02, solver="paper", eta=0.05, projection=lambda f: f.clamp(0, 1))
    target = y.tolist()

    def s(f):
        return [[a - b for a, b in zip(p, q, strict=True)] for p, q in zip(f, target, strict=True)]

    f, steps = algorithm_1(
        f0.tolist(), s, who.tolist(), what.tolist(), 0.02, 0.05, lambda row: [min(max(x, 0.0), 1.0) for x in row]
    )
    assert solution.report.iterations == steps > 0
    torch.testing.assert_close(solution.f, torch.tensor(f, dtype=torch.float64))


def test_paper_equals_the_loop_with_level_sets():
    f0, y, _ = problem(l=1, seed=4)

    def levels(f):
        return torch.cat([f < 0.3, (f >= 0.3) & (f < 0.7), f >= 0.7], 1)

    solution = gmc.solve(f0, Residual(y), levels, alpha=0.01, solver="paper", eta=0.02, max_iter=400)
    target = y.tolist()
    f, steps = algorithm_1(
        f0.tolist(),
        lambda f: [[p[0] - q[0]] for p, q in zip(f, target, strict=True)],
        lambda f: [[p[0] < 0.3, 0.3 <= p[0] < 0.7, p[0] >= 0.7] for p in f],
        [[1.0]],
        0.01,
        0.02,
        max_iter=400,
    )
    assert solution.report.iterations == steps > 0
    torch.testing.assert_close(solution.f, torch.tensor(f, dtype=torch.float64))
    torch.testing.assert_close(gmc.replay(solution, f0, levels), solution.f, rtol=0, atol=0)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), conditional=st.booleans(), kind=st.sampled_from(["residual", "pinball", "centered"]))
def test_exact_reaches_alpha_and_lowers_the_potential(seed, conditional, kind):
    f0, y, who = problem(n=120, seed=seed)
    scores = torch.rand(120, 2, generator=torch.Generator().manual_seed(seed)).double()
    mapping = {"residual": Residual(y), "pinball": Pinball(scores, 0.8), "centered": Centered()}[kind]
    alpha = 0.05 if kind == "pinball" else 0.005
    solution = gmc.solve(f0, mapping, who, alpha=alpha, conditional=conditional)
    ones = torch.ones(120).double()
    s = mapping.value(solution.f, ones)
    table = gmc.violations(who, s)
    if conditional:
        table = table / who.double().mean(0)[:, None]
    assert solution.report.converged and table.abs().max() <= alpha + 1e-12
    assert mapping.potential(solution.f, ones) <= mapping.potential(f0, ones) + 1e-12
    torch.testing.assert_close(solution.report.violations_after, table)


def test_general_test_functions():
    f0, y, who = problem(seed=5)
    g = torch.stack([torch.sin(3 * f0), torch.cos(5 * f0), who[:, :1] * torch.ones_like(f0)], 1)  # (n, 3, l)
    solution = gmc.solve(f0, Residual(y), lambda f: g, alpha=0.003)
    assert solution.report.converged
    assert torch.einsum("nal,nl->a", g, solution.f - y).abs().max() / len(y) <= 0.003 + 1e-12
    with pytest.raises(ValueError, match="have no P"):
        gmc.solve(f0, Residual(y), g, alpha=0.1, conditional=True)


def test_cells_and_a_plain_function():
    f0, y, who = problem(seed=6)
    patterns, ids = torch.unique(who, dim=0, return_inverse=True)
    one = gmc.solve(f0, Residual(y), who, alpha=0.01)
    two = gmc.solve(f0, lambda f: f - y, Cells(ids, patterns), alpha=0.01)
    torch.testing.assert_close(one.f, two.f, atol=1e-6, rtol=1e-6)


def test_fresh_uses_a_new_pair_of_splits_for_each_step():
    n = 40_000
    rng = torch.Generator().manual_seed(0)
    who = torch.rand(n, 2, generator=rng) < 0.5
    f0 = torch.rand(n, 1, generator=rng).double()
    solution = gmc.solve(f0 + 0.3 * who[:, :1], Centered(), who, alpha=0.02, solver="fresh", eta=0.05, max_iter=20)
    assert solution.report.converged and "3/4 alpha" in solution.report.message
    assert gmc.violations(who, solution.f - solution.f.mean(0)).abs().max() <= 0.02


@pytest.mark.parametrize("seed", range(3))
def test_fresh_equals_a_loop_over_the_splits(seed):
    f0, y, who = problem(n=80, l=1, seed=seed)
    solution = gmc.solve(f0, Residual(y), who, alpha=0.05, solver="fresh", eta=0.1, max_iter=4, seed=seed)
    split = deal(8, f0.double(), f0.double() - y, torch.ones(80).double(), seed=seed)
    f, steps = f0.clone(), 0
    for t in range(4):
        rows = split == 2 * t
        table = gmc.violations(who[rows], (f - y)[rows])[:, 0]
        worst = int(table.abs().argmax())
        if abs(float(table[worst])) <= 0.75 * 0.05:
            break
        f = f - 0.1 * float(table[worst].sign()) * who[:, worst : worst + 1]
        steps += 1
    assert solution.report.iterations == steps
    torch.testing.assert_close(solution.f, f)


def test_never_worse_than_the_start_when_sets_move_with_f():
    for seed in range(5):
        f0, y, _ = problem(n=30, l=1, seed=seed)
        solution = gmc.solve(f0, Residual(y), lambda f: torch.cat([f < 0.5, f >= 0.5], 1), alpha=1e-6, max_iter=60)
        report = solution.report
        assert report.violations_after.abs().max() <= report.violations_before.abs().max()
        assert len(report.history) == report.iterations + 1


def test_unreachable_and_stuck_are_said():
    f0 = torch.zeros(10, 1).double()
    flat = gmc.solve(f0, lambda f: torch.full_like(f, 0.5), torch.ones(10, 1).bool(), alpha=0.1)
    assert not flat.report.converged and "unreachable" in flat.report.message
    jump = gmc.solve(f0, Pinball(torch.full((10, 1), 0.3).double(), 0.5), torch.ones(10, 1).bool(), alpha=0.1, names=["everyone"])
    assert not jump.report.converged and "'everyone'" in jump.report.message and "ties" in jump.report.message


def test_cycle_is_said():
    scores = torch.full((10, 1), 0.3).double()
    solution = gmc.solve(
        torch.zeros(10, 1).double(), Pinball(scores, 0.4), torch.ones(10, 1).bool(), alpha=0.1, solver="paper", eta=0.5
    )
    assert not solution.report.converged and "returns to the same f every 2 steps" in solution.report.message
    assert solution.report.iterations < 10


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"f0": torch.zeros(0, 2)}, ValueError, "`f0` has no rows"),
        ({"f0": torch.zeros(60, 2, 2)}, ValueError, r"`f0` must have shape \(n, m\) or \(n,\)"),
        ({"f0": torch.full((60, 2), float("nan"))}, ValueError, r"f0\[0, 0\] is nan"),
        ({"alpha": -1.0}, ValueError, "`alpha`"),
        ({"solver": "sgd"}, ValueError, "`solver` must be one of"),
        ({"eta": 0.1}, ValueError, "solver='exact' finds its own"),
        ({"what": torch.ones(2, 3)}, ValueError, r"`what` must have shape \(u, 2\)"),
        ({"mapping": lambda f: f[:, :1]}, ValueError, r"`mapping` must return shape \(60, 2\)"),
        ({"mapping": lambda f: f / 0}, ValueError, "finite row per example"),
        ({"who": torch.ones(59, 2).bool()}, ValueError, "59 rows but `s` has 60"),
        ({"weight": torch.ones(3)}, ValueError, "`weight` must have shape"),
        ({"solver": "fresh", "max_iter": 1000}, ValueError, "2 T = 2000 splits, but there are 60 examples"),
        ({"conditional": True, "who": torch.zeros(60, 1).bool()}, ValueError, "set 0 has no examples"),
    ],
)
def test_errors(change, error, message):
    f0, y, who = problem()
    arguments = {"f0": f0, "mapping": Residual(y), "who": who, "alpha": 0.01} | change
    with pytest.raises(error, match=message):
        gmc.solve(**arguments)


@pytest.mark.parametrize("solver", ["exact", "paper", "fresh"])
@pytest.mark.parametrize("conditional", [False, True])
def test_solve_with_groups_is_solve_with_their_membership(solver: str, conditional: bool) -> None:
    rng = np.random.default_rng(1)
    n = 400
    columns = {"a": rng.integers(0, 3, n), "b": rng.integers(0, 2, n), "c": rng.integers(0, 2, n)}
    groups = Groups.from_columns(columns, intersections=2, overall=True)
    y = torch.from_numpy(rng.normal(size=(n, 2)) + columns["a"][:, None])
    weight = torch.from_numpy(rng.uniform(0.5, 2.0, n))
    options = {"alpha": 0.02, "solver": solver, "weight": weight, "conditional": conditional, "max_iter": 60}
    f0 = torch.zeros(n, 2, dtype=torch.float64)
    ours = gmc.solve(f0, Residual(y), groups, **options)  # type: ignore[arg-type]
    theirs = gmc.solve(f0, Residual(y), groups.membership, names=groups.names, **options)  # type: ignore[arg-type]
    assert ours.report.iterations > 0
    assert ours.report.message == theirs.report.message
    assert torch.equal(ours.log.who, theirs.log.who) and torch.equal(ours.log.what, theirs.log.what)
    torch.testing.assert_close(ours.f, theirs.f)
    torch.testing.assert_close(ours.report.violations_after, theirs.report.violations_after)
    new = groups.transform({name: values[::-1].copy() for name, values in columns.items()})
    replayed: Tensor = gmc.replay(ours, f0, new)
    torch.testing.assert_close(replayed, gmc.replay(theirs, f0, new.membership))
    assert torch.equal(gmc.replay(ours, f0, groups), ours.f)


def test_sets_that_depend_on_f_may_be_groups() -> None:
    y = torch.tensor([[0.0], [1.0], [1.0], [0.0]], dtype=torch.float64)
    groups = Groups.from_columns({"a": [0, 0, 1, 1]})
    dense = groups.membership
    f0 = torch.full((4, 1), 0.3, dtype=torch.float64)
    ours = gmc.solve(f0, Residual(y), lambda f: groups, alpha=0.01)
    theirs = gmc.solve(f0, Residual(y), lambda f: dense, alpha=0.01)
    torch.testing.assert_close(ours.f, theirs.f)
