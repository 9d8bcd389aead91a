"""One example more, from vertex to vertex: the thresholds that a linear program gives."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.optimize import linprog

from torchgmc.engine import path
from torchgmc.engine.pinball import Pinball

FINE = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}  # of the linear programs
TARGET = 0.7937  # never a whole number of examples of a group: most minima are one point


def draw(n, groups, seed, ties, heavy):
    rng = torch.Generator().manual_seed(seed)
    member = torch.rand(n, groups, generator=rng) < 0.45
    scores = torch.randn(n, generator=rng).double() + member.double() @ torch.arange(groups).double()
    scores = (scores * 2).round() / 2 if ties else scores
    weight = 0.5 + torch.rand(n, generator=rng).double() if heavy else torch.ones(n).double()
    return Pinball(scores, torch.arange(n), torch.cat([torch.ones(n, 1), member], 1).double()), weight


def by_linear_program(one, weight, linear, row, gain):
    """min sum w u - (b + gain x)^T theta with u >= lambda - h, u >= 0: the threshold at x, None if it is not bounded."""
    x, h = one.design[one.cell].numpy(), one.scores.numpy()
    cost = np.r_[-(linear + gain * row).numpy(), weight.numpy()]
    bounds = [(None, None)] * x.shape[1] + [(0, None)] * len(h)
    found = linprog(cost, np.c_[x, -np.eye(len(h))], h, bounds=bounds, method="highs", options=FINE)
    return float(found.x[: x.shape[1]] @ row.numpy()) if found.status == 0 else None


@settings(deadline=None, max_examples=25)
@given(
    n=st.integers(30, 90),
    groups=st.integers(1, 3),
    seed=st.integers(0, 999),
    ties=st.booleans(),
    heavy=st.booleans(),
    covers=st.booleans(),
)
def test_thresholds_are_those_of_a_linear_program(n, groups, seed, ties, heavy, covers):
    one, weight = draw(n, groups, seed, ties, heavy)
    target = TARGET if covers else 1 - TARGET
    linear, gain = target * weight @ one.design, target - (not covers)
    rows = torch.cat([torch.ones(2**groups, 1), (torch.arange(2**groups)[:, None] >> torch.arange(groups)) & 1], 1).double()
    start = torch.zeros(groups + 1).double()  # far from the minimum: the way is longer, its end the same
    found = path.thresholds_with_one_more(one, weight, linear, start, rows, gain)
    width = float(one.scores.max() - one.scores.min())
    for row, lam in zip(rows, found.tolist(), strict=True):
        direct = by_linear_program(one, weight, linear, row, gain)
        if direct is None:
            assert (lam - one.scores.mean()) * (1 if covers else -1) > 4 * width
        elif lam != pytest.approx(direct, abs=1e-7):  # minima may lie side by side, as with groups of equal size
            values = [objective(one, weight, linear, row, gain, v) for v in (lam, direct)]
            assert values[0] == pytest.approx(values[1], abs=1e-9)


def objective(one, weight, linear, row, gain, lam):
    """The smallest objective with this threshold at the row."""
    x, h = one.design[one.cell].numpy(), one.scores.numpy()
    cost = np.r_[-(linear + gain * row).numpy(), weight.numpy()]
    bounds = [(None, None)] * x.shape[1] + [(0, None)] * len(h)
    fixed = {"A_eq": np.r_[row.numpy(), np.zeros(len(h))][None], "b_eq": [lam]}
    return linprog(cost, np.c_[x, -np.eye(len(h))], h, bounds=bounds, method="highs", options=FINE, **fixed).fun


def test_windows_that_a_threshold_leaves_grow(monkeypatch):
    one, weight = draw(400, 3, 5, False, False)
    linear = TARGET * weight @ one.design
    rows = one.design[:20]
    theta = torch.zeros(4).double()
    whole = path.thresholds_with_one_more(one, weight, linear, theta, rows, TARGET)
    sizes = []
    monkeypatch.setattr(path, "WINDOW", 12)
    monkeypatch.setattr(path, "_begin", lambda *args, begin=path._begin: sizes.append(len(args[1])) or begin(*args))
    torch.testing.assert_close(path.thresholds_with_one_more(one, weight, linear, theta, rows, TARGET), whole)
    assert len(sizes) >= 2 and sizes[1] > sizes[0]


def test_columns_that_repeat_each_other_and_patterns_outside_their_span():
    one, weight = draw(60, 1, 0, False, False)
    twice = Pinball(one.scores, one.cell, torch.cat([one.design, 1 - one.design[:, 1:]], 1))  # a, and not a
    rows = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 0, 0], [1, 1, 1]]).double()
    found = path.thresholds_with_one_more(twice, weight, TARGET * weight @ twice.design, torch.zeros(3).double(), rows, TARGET)
    once = path.thresholds_with_one_more(one, weight, TARGET * weight @ one.design, torch.zeros(2).double(), rows[:2, :2], TARGET)
    torch.testing.assert_close(found[:2], once)
    assert bool(found[2:].isposinf().all())
