"""Pinball problems at their optimum: against all vertices by brute force, and by the conditions of the optimum."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from torchgmc.engine import pinball
from torchgmc.engine.pinball import Pinball, solve


def problem(n, groups, seed, ties=False):
    rng = torch.Generator().manual_seed(seed)
    member = torch.rand(n, groups, generator=rng) < 0.5
    scores = torch.randn(n, generator=rng).double()
    scores = (scores * 3).round() if ties else scores
    design = torch.cat([torch.ones(n, 1), member], 1).double()
    return Pinball(scores, torch.arange(n), design)


def optimum(one, weight, linear, slack):
    """Smallest objective over all points where K of the kinks (scores met, offsets of 0) are met: the vertices."""
    k = one.design.shape[1]
    rows = torch.cat([one.design[one.cell], torch.eye(k).double()[slack > 0]])
    goals = torch.cat([one.scores, torch.zeros(int((slack > 0).sum())).double()])
    best = float("inf")
    for chosen in combinations(range(len(rows)), k):
        matrix = rows[list(chosen)]
        if abs(float(torch.linalg.det(matrix))) > 1e-9:
            theta = torch.linalg.solve(matrix, goals[list(chosen)])
            best = min(best, float(one.objective(weight, linear, slack, theta)))
    return best


@settings(deadline=None, max_examples=25)
@given(n=st.integers(5, 11), groups=st.integers(1, 2), seed=st.integers(0, 999), ties=st.booleans(), slack=st.booleans())
def test_the_minimum_of_all_vertices(n, groups, seed, ties, slack):
    one = problem(n, groups, seed, ties)
    if int(torch.linalg.matrix_rank(one.design)) < groups + 1:
        return
    weight = torch.full((n,), 1 / n).double()
    linear = 0.7 * weight @ one.design
    price = torch.tensor([0.0, *[0.02 * slack] * groups]).double()
    start = torch.zeros(1, groups + 1).double()
    found = solve(one, weight[None], linear[None], price[None], start, exact=1).theta[0]
    got = float(one.objective(weight, linear, price, found))
    assert got == pytest.approx(optimum(one, weight, linear, price), abs=1e-9)


@pytest.mark.parametrize("n", [300, 3000, 20_000])
def test_conditions_of_the_optimum(n):
    """11 columns: every group's coverage is at its target, up to the scores that are met exactly; large ones by windows too."""
    one = problem(n, 10, 3)
    weight = torch.full((n,), 1 / n).double()
    linear, zero = 0.9 * weight @ one.design, torch.zeros(1, 11).double()
    found = solve(one, weight[None], linear[None], zero, zero.clone(), exact=1).theta[0]
    rest = one.scores - one.thresholds(found)[one.cell]
    met = rest.abs() <= 1e-9
    assert 1 <= int(met.sum()) <= 11
    below = weight * (rest < -1e-9)
    short = linear - below @ one.design  # what the scores that are met must make up, each between 0 and its weight
    part = torch.linalg.lstsq(one.design[met].T, short[:, None]).solution[:, 0]
    torch.testing.assert_close(one.design[met].T @ part, short, atol=1e-9, rtol=0)
    assert bool((part >= -1e-9).all()) and bool((part <= 1 / n + 1e-9).all())


@pytest.mark.parametrize("seed", range(4))
def test_windows_that_a_threshold_runs_into_the_edge_of(seed):
    """Few cells, whose thresholds lie far from where the search begins: coverage is that of the optimum all the same."""
    rng = torch.Generator().manual_seed(seed)
    member = torch.rand(30_000, 3, generator=rng) < torch.tensor([0.25, 0.35, 0.3])
    cell = member.long() @ torch.tensor([1, 2, 4])
    spread = torch.tensor([1.5, 2.5, 3.0, 7.0, 0.5, 2.5, 2.0, 7.0]).double()
    scores = (spread[cell] * torch.randn(30_000, generator=rng).double()).abs()
    pairs = torch.tensor([[1, a, b, a & b, c] for c in (0, 1) for b in (0, 1) for a in (0, 1)]).double()
    one = Pinball(scores, cell, pairs)
    weight, zero = torch.full((1, 30_000), 1 / 30_000).double(), torch.zeros(1, 5).double()
    linear = 0.9 * weight @ pairs[cell]
    found = solve(one, weight, linear, zero, zero.clone(), exact=1).theta
    missed = (weight[0] * (scores <= one.thresholds(found)[0][cell] + 1e-12)) @ pairs[cell] - linear[0]
    assert float(missed.abs().max()) <= 6 / 30_000


def test_many_problems_side_by_side_are_each_by_itself():
    one = problem(400, 4, 1)
    rng = torch.Generator().manual_seed(2)
    weight = torch.rand(6, 400, generator=rng).double() / 400
    weight[0, ::3] = 0.0
    linear = torch.stack([0.8 * w @ one.design for w in weight])
    slack = 0.01 * torch.rand(6, 5, generator=rng).double()
    slack[:, 0] = 0.0
    together = solve(one, weight, linear, slack, torch.zeros(6, 5).double()).theta
    for k in range(6):
        part = slice(k, k + 1)
        alone = solve(one, weight[part], linear[part], slack[part], torch.zeros(1, 5).double()).theta
        both = [float(one.objective(weight[k], linear[k], slack[k], t)) for t in (together[k], alone[0])]
        assert both[0] == pytest.approx(both[1], abs=1e-9)


def test_a_system_without_a_factor_is_said_to_have_none():
    assert np.isnan(pinball._system(np.array([[[0.0, 1.0], [1.0, 0.0]]]))).all()
    assert np.isnan(pinball._system(np.stack([np.full((2, 2), np.nan), np.eye(2)]))[0]).all()
    flat = pinball._system(np.ones((1, 2, 2)))  # collinear columns
    assert np.isfinite(pinball._solve(flat, np.ones((1, 2)))).all()
