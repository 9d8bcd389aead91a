"""Newton steps with an l1 term: the optimality conditions, checked offset by offset, and what happens without an optimum."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from torchgmc.engine.orthant import Point, minimise


def soft_maximum(design, slope):
    """Phi(theta) = sum_i log(1 + exp(x_i theta)) - slope theta: smooth, convex, not quadratic."""

    def look(theta):
        x = design @ theta.flatten()
        value = torch.nn.functional.softplus(x).sum() - slope @ theta.flatten()
        return Point(value, (design.T @ x.sigmoid() - slope).view_as(theta), x)

    def hessian(x):
        return design.T @ (design * (x.sigmoid() * (-x).sigmoid())[:, None])

    return look, hessian


def draw(seed, size, singular):
    g = torch.Generator().manual_seed(seed)
    design = torch.randn(30, size, generator=g, dtype=torch.float64)
    if singular and size > 1:
        design[:, 0] = design[:, 1]  # two offsets that do the same
    slope = design.T @ torch.rand(30, generator=g, dtype=torch.float64)  # inside the range of the gradient: a finite optimum
    slack = 4 * torch.rand(size, 1, generator=g, dtype=torch.float64)
    return design, slope, torch.where(torch.rand(size, 1, generator=g) < 0.3, 0.0, slack)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), size=st.integers(1, 12), singular=st.booleans(), warm=st.booleans())
def test_every_condition_holds(seed, size, singular, warm):
    design, slope, slack = draw(seed, size, singular)
    look, hessian = soft_maximum(design, slope)
    start = torch.randn_like(slack) if warm else torch.zeros_like(slack)
    found = minimise(look, hessian, slack, start, 1e-9, 200)
    gradient = design.T @ (design @ found.theta.flatten()).sigmoid() - slope
    for theta, g, lam in zip(found.theta.flatten().tolist(), gradient.tolist(), slack.flatten().tolist(), strict=True):
        if theta == 0.0:
            assert abs(g) <= lam + 1e-8
        else:
            assert abs(g + lam * (1 if theta > 0 else -1)) <= 1e-8
    assert not found.stalled and float(found.missed) <= 1e-9
    assert float(found.history[-1]) == float(found.point.gradient.abs().max())


def test_no_step_where_nothing_is_to_be_gained():
    design, slope, slack = draw(0, 4, False)
    found = minimise(*soft_maximum(design, slope), slack + 1e3, torch.zeros_like(slack), 1e-9, 10)
    assert len(found.history) == 1 and not found.theta.any()


def test_an_infinite_slack_holds_an_offset_at_0():
    design, slope, slack = draw(1, 6, False)
    held = torch.arange(6)[:, None] % 2 == 0
    found = minimise(*soft_maximum(design, slope), torch.where(held, torch.inf, slack / 100), torch.zeros_like(slack), 1e-9, 50)
    free = ~held[:, 0]
    few = minimise(*soft_maximum(design[:, free], slope[free]), slack[free] / 100, torch.zeros_like(slack[free]), 1e-9, 50)
    assert not found.theta[held].any() and bool(found.theta[~held].any())
    torch.testing.assert_close(found.theta[free], few.theta)


@pytest.mark.parametrize("cap", [1, 2])
def test_the_cap_counts_steps(cap):
    design, slope, slack = draw(0, 6, False)
    found = minimise(*soft_maximum(design, slope), slack / 100, torch.zeros_like(slack), 1e-12, cap)
    assert len(found.history) == cap + 1 and float(found.missed) > 1e-12 and not found.stalled


def test_a_slope_without_an_end_is_said():
    """Without curvature there is no optimum: the steps end at the cap or where none is left, never in a claim."""
    look, hessian = (lambda t: Point(-t.sum(), -torch.ones_like(t), t)), (lambda t: torch.zeros(2, 2, dtype=torch.float64))
    found = minimise(look, hessian, torch.zeros(2, 1, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64), 1e-9, 5)
    assert float(found.missed) == 1.0


def test_a_long_step_is_halved():
    """With next to no curvature a step is cut to the longest allowed one, and its halves must be shorter."""

    def look(theta):  # |x - 600| with a rounded corner: flat second derivative far from it
        gap = theta - 600.0
        return Point((gap.square() + 1).sqrt().sum(), gap / (gap.square() + 1).sqrt(), gap)

    found = minimise(
        look, lambda gap: torch.diag((gap.square() + 1).pow(-1.5).flatten() ** 8), torch.zeros(1, 1).double(),
        torch.zeros(1, 1).double(), 1e-6, 200,
    )  # fmt: skip
    assert abs(float(found.theta) - 600.0) < 1e-3


def test_what_ends_early_is_the_best_that_was_seen():
    seen = []

    def look(theta):
        seen.append(theta)
        return Point((theta - 3.0).square().sum() / 2, theta - 3.0, None)

    found = minimise(look, lambda _: torch.eye(1).double(), torch.zeros(1, 1).double(), torch.zeros(1, 1).double(), 0.0, 1)
    assert float(found.missed) == min(float((one - 3.0).abs().max()) for one in seen)
