"""The theorems' constants: by hand, by their monotonicity, and against runs of the algorithms written out in NumPy."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from torchgmc.theory import (
    distribution_constants,
    iteration_bound,
    sample_size,
    split_size,
    step_size,
    threshold_constants,
)

positive = st.floats(1e-3, 1e3)


def quadratic_problem(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outcomes y (n, 2), curvatures (2,), overlapping groups (n, 5), for s = curvature * (f - y)."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 60))
    groups = rng.random((n, 5)) < rng.random(5)
    return rng.normal(size=(n, 2)) + groups[:, :2], rng.uniform(0.2, 3.0, size=2), groups.astype(float)


def algorithm_1(y: np.ndarray, curvature: np.ndarray, groups: np.ndarray, alpha: float, eta: float) -> tuple[int, np.ndarray]:
    f = np.zeros_like(y)
    for t in range(100_000):
        violation = groups.T @ (curvature * (f - y)) / len(y)  # (a, 2)
        a, k = np.unravel_index(np.abs(violation).argmax(), violation.shape)
        if abs(violation[a, k]) <= alpha:
            return t, violation
        f[:, k] -= eta * np.sign(violation[a, k]) * groups[:, a]
    raise AssertionError("no end")


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**16), alpha=st.sampled_from([0.03, 0.1, 0.3]))
def test_algorithm_1_stops_within_the_bound(seed: int, alpha: float) -> None:
    y, curvature, groups = quadratic_problem(seed)
    smoothness, bound = curvature.max(), max(groups.mean(0).max(), 1e-3)
    gap = (curvature * y**2).sum(1).mean() / 2  # L(0) - 0
    steps, violation = algorithm_1(y, curvature, groups, alpha, step_size(alpha, smoothness, bound))
    assert np.abs(violation).max() <= alpha
    assert steps <= iteration_bound(alpha, smoothness, bound, gap)


def algorithm_2(y: np.ndarray, groups: np.ndarray, alpha: float, delta: float, rng: np.random.Generator) -> tuple[bool, float]:
    """s = f - y on a population of len(y) atoms; returns whether it stopped and the true worst violation."""
    bound, gap = groups.mean(0).max(), (y**2).mean() / 2
    limit = iteration_bound(alpha, 1.0, bound, gap, finite_sample=True)
    magnitude = 2 * np.abs(y).max()
    size = split_size(alpha, delta, groups.shape[1], limit, magnitude)
    f = np.zeros_like(y)
    for _ in range(limit):
        count = np.bincount(rng.integers(0, len(y), size), minlength=len(y)) / size
        violation = groups.T @ (count * (f - y))
        a = np.abs(violation).argmax()
        if abs(violation[a]) <= 0.75 * alpha:
            return True, float(np.abs(groups.T @ (f - y)).max() / len(y))
        f = f - step_size(alpha, 1.0, bound, finite_sample=True) * np.sign(violation[a]) * groups[:, a]
    return False, math.inf


def test_algorithm_2_keeps_its_promise_on_fresh_samples() -> None:
    rng = np.random.default_rng(0)
    groups = (rng.random((30, 4)) < 0.5).astype(float)
    y = rng.uniform(-1, 1, size=30) * 0.3 + 0.7 * groups[:, 0] - 0.5 * groups[:, 1]
    runs = [algorithm_2(y, groups, 0.1, 0.05, rng) for _ in range(20)]
    assert all(stopped and worst <= 0.1 for stopped, worst in runs)


def test_split_size_of_a_functional_covers_both_splits() -> None:
    rng = np.random.default_rng(0)
    p, member, alpha, delta = rng.random(500), rng.random(500) < 0.5, 0.4, 0.2
    truth = (member * (p - p.mean())).mean()
    size = split_size(alpha, delta, 1, functional=True)
    first, second = rng.integers(0, 500, (2, 1000, size))
    measured = (member[first] * (p[first] - p[second].mean(1, keepdims=True))).mean(1)
    assert (np.abs(measured - truth) > alpha / 4).mean() <= delta


def test_by_hand() -> None:
    assert step_size(0.1, 2.0, 0.5) == pytest.approx(0.1)
    assert iteration_bound(0.1, 2.0, 0.5, 1.0) == 200  # an exact quotient stays as it is
    assert iteration_bound(0.1, 2.0, 0.5, 0.0) == 0
    assert iteration_bound(0.1, 2.0, 0.5, 0.0, finite_sample=True) == 1
    assert split_size(0.4, 0.1, 3, iterations=5) == math.ceil(200 * math.log(300))
    assert split_size(0.4, 0.1, 3, iterations=5, functional=True) == math.ceil(400 * math.log(300))
    assert sample_size(0.4, 0.1, 3, iterations=5, magnitude=2.0) == 10 * math.ceil(800 * math.log(300))
    assert iteration_bound(0.002, *distribution_constants(20, mass=0.5)) == 2_500_000  # B / alpha^2
    assert threshold_constants(0.075, density=5.0, span=1.0).gap == 0.925


@given(alpha=st.floats(1e-3, 1.0), smoothness=positive, bound=positive, gap=positive)
def test_one_update_gains_what_the_bound_counts_on(alpha: float, smoothness: float, bound: float, gap: float) -> None:
    for finite_sample, violation in ((False, alpha), (True, alpha / 2)):
        eta = step_size(alpha, smoothness, bound, finite_sample)
        gain = eta * violation - eta**2 * smoothness * bound / 2
        assert iteration_bound(alpha, smoothness, bound, gap, finite_sample) >= gap / gain * (1 - 1e-9)


@given(alpha=st.floats(1e-3, 0.5), delta=st.floats(1e-3, 0.4), functions=st.integers(1, 1000), steps=st.integers(1, 1000))
def test_monotonicity(alpha: float, delta: float, functions: int, steps: int) -> None:
    size = sample_size(alpha, delta, functions, steps)
    assert sample_size(2 * alpha, delta, functions, steps) <= size
    assert sample_size(alpha, 2 * delta, functions, steps) <= size
    assert sample_size(alpha, delta, functions + 1, steps) >= size
    assert sample_size(alpha, delta, functions, steps + 1) > size
    assert sample_size(alpha, delta, functions, steps, magnitude=2.0) >= size
    assert sample_size(alpha, delta, functions, steps, functional=True) >= size
    assert iteration_bound(2 * alpha, 1.0, 1.0, 1.0) <= iteration_bound(alpha, 1.0, 1.0, 1.0)
    assert step_size(2 * alpha, 1.0, 1.0) > step_size(alpha, 1.0, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: step_size(0.0, 1.0, 1.0), "`alpha` must be positive and finite, got 0.0"),
        (lambda: step_size(0.1, -1.0, 1.0), "`smoothness` must be positive and finite, got -1.0"),
        (lambda: step_size(0.1, 1.0, math.nan), "`bound` must be positive and finite, got nan"),
        (lambda: iteration_bound(0.1, 1.0, 1.0, -1.0), "`gap` must be C_u - C_l >= 0 and finite, got -1.0"),
        (lambda: sample_size(0.1, 1.0, 1), r"`delta` must be a probability in \(0, 1\), got 1.0"),
        (lambda: sample_size(0.1, 0.1, 0), "`num_functions` must be a whole number >= 1, got 0"),
        (lambda: sample_size(0.1, 0.1, 1, iterations=0), "`iterations` must be a whole number >= 1, got 0"),
        (lambda: split_size(0.1, 0.1, 1, magnitude=0.0), "`magnitude` must be positive and finite, got 0.0"),
        (lambda: threshold_constants(1.0, 1.0, 1.0), r"`target` must be a rate in \(0, 1\), got 1.0"),
        (lambda: threshold_constants(0.1, 0.0, 1.0), "`density` must be positive and finite, got 0.0"),
        (lambda: distribution_constants(3, mass=1.5), r"`mass` must be .* in \(0, 1\], got 1.5"),
        (lambda: distribution_constants(0), "`list_size` must be positive and finite, got 0"),
    ],
)
def test_errors(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
