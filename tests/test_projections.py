"""Projections against bisection and a general-purpose optimiser, their properties, derivatives and exported forms."""

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from torch import Tensor

from torchgmc.projections import box, simplex

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
rows = arrays(np.float64, array_shapes(min_dims=1, max_dims=3, max_side=6), elements=st.floats(-20, 20))


def simplex_by_bisection(f: np.ndarray, total: float) -> np.ndarray:
    """One row: the tau at which the clipped sum is `total`, by halving an interval that holds it."""
    low, high = f.min() - total, f.max()
    for _ in range(200):
        tau = (low + high) / 2
        if np.maximum(f - tau, 0).sum() > total:
            low = tau
        else:
            high = tau
    return np.maximum(f - high, 0)


@settings(deadline=None)
@given(f=rows, total=st.sampled_from([1.0, 0.1, 3.0]))
def test_simplex_matches_bisection(f: np.ndarray, total: float) -> None:
    expected = np.apply_along_axis(simplex_by_bisection, -1, f, total)
    np.testing.assert_allclose(simplex(torch.from_numpy(f), total).numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_simplex_matches_a_quadratic_programme(seed: int) -> None:
    f = np.random.default_rng(seed).normal(size=5)
    solution = scipy.optimize.minimize(
        lambda p: 0.5 * ((p - f) ** 2).sum(),
        np.full(5, 0.2),
        jac=lambda p: p - f,
        bounds=[(0, None)] * 5,
        constraints={"type": "eq", "fun": lambda p: p.sum() - 1, "jac": lambda p: np.ones(5)},
        options={"ftol": 1e-14},
        method="SLSQP",
    )
    np.testing.assert_allclose(simplex(torch.from_numpy(f)).numpy(), solution.x, atol=1e-6)


@settings(deadline=None)
@given(f=rows, shift=st.floats(-5, 5), seed=st.integers(0, 2**16))
def test_simplex_properties(f: np.ndarray, shift: float, seed: int) -> None:
    f = torch.from_numpy(f)
    other = f + torch.randn(f.shape, generator=torch.Generator().manual_seed(seed), dtype=f.dtype)
    order = torch.randperm(f.shape[-1], generator=torch.Generator().manual_seed(seed))
    p = simplex(f)
    close = dict(atol=1e-12, rtol=0.0)
    assert p.min() >= 0
    torch.testing.assert_close(p.sum(-1), torch.ones_like(p[..., 0]), **close)
    torch.testing.assert_close(simplex(p), p, **close)
    torch.testing.assert_close(simplex(f + shift), p, **close)
    torch.testing.assert_close(simplex(f[..., order]), p[..., order], **close)
    assert ((p - simplex(other)).norm(dim=-1) <= (f - other).norm(dim=-1) + 1e-12).all()


@settings(deadline=None)
@given(f=rows, low=st.floats(-3, 3), width=st.floats(0, 3))
def test_box_properties(f: np.ndarray, low: float, width: float) -> None:
    p = box(torch.from_numpy(f), low, low + width)
    np.testing.assert_array_equal(p.numpy(), np.minimum(np.maximum(f, low), low + width))
    assert torch.equal(box(p, low, low + width), p)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(7,), (0, 3), (4, 1), (2, 3, 5)])
def test_dtype_and_shape_are_kept(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    f = torch.randn(shape).to(dtype)
    p = simplex(f)
    assert (p.dtype, p.shape) == (dtype, f.shape)
    assert (box(f, 0.0, 1.0).dtype, box(f, 0.0, 1.0).shape) == (dtype, f.shape)
    exact = simplex(f.double())
    torch.testing.assert_close(p.double(), exact, atol=4 * torch.finfo(dtype).eps, rtol=0.0)


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_simplex_over_a_vocabulary_sums_to_one_in_float32(offset: float) -> None:
    f = torch.rand(4, 30522) * 1e-3 + offset
    assert (simplex(f).double().sum(-1) - 1).abs().max() < 1e-5


def test_simplex_of_values_that_are_not_finite() -> None:
    f = torch.tensor([[0.0, float("-inf"), 0.0], [0.0, float("nan"), 1.0], [0.0, float("inf"), 1.0], [0.2, 0.3, 0.5]])
    p = simplex(f)
    torch.testing.assert_close(p[0], torch.tensor([0.5, 0.0, 0.5]))
    assert p[1:3].isnan().all()
    torch.testing.assert_close(p[3], f[3])


def test_simplex_derivatives() -> None:
    f = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(simplex, (f,))
    assert torch.autograd.gradgradcheck(simplex, (f,))
    row = torch.tensor([0.9, 0.8, -1.0], dtype=torch.float64)  # support {0, 1}
    expected = torch.tensor([[0.5, -0.5, 0.0], [-0.5, 0.5, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.functional.jacobian(simplex, row), expected)


def test_simplex_gradient_with_a_masked_entry_is_finite() -> None:
    f = torch.tensor([0.1, float("-inf"), 0.4], requires_grad=True)
    simplex(f)[0].backward()
    torch.testing.assert_close(f.grad, torch.tensor([0.5, 0.0, -0.5]))


def test_box_derivatives() -> None:
    f = torch.tensor([-1.5, -0.3, 0.2, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: box(x, -1.0, 1.0), (f,))
    assert torch.autograd.gradgradcheck(lambda x: box(x, -1.0, 1.0), (f,))


class Both(torch.nn.Module):
    def forward(self, f: Tensor) -> Tensor:
        return simplex(box(f, -0.5, 0.5), 2.0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_script_equals_eager_equals_export(dtype: torch.dtype) -> None:
    f = torch.randn(3, 4).to(dtype)
    exported = torch.export.export(Both(), (f,), dynamic_shapes=({0: torch.export.Dim("n", min=1, max=10_000)},))
    for g in (f, torch.randn(9, 4).to(dtype)):
        expected = Both()(g)
        assert torch.equal(torch.jit.script(Both())(g), expected)
        assert torch.equal(exported.module()(g), expected)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: simplex(torch.tensor([1, 2])), TypeError, "`f` must be a floating point tensor, got torch.int64"),
        (lambda: simplex(torch.tensor(1.0)), ValueError, r"`f` must have shape \(..., k\) with k >= 1"),
        (lambda: simplex(torch.zeros(3, 0)), ValueError, r"`f` must have shape \(..., k\).*\[3, 0\]"),
        (lambda: simplex(torch.zeros(3), 0.0), ValueError, "`total` must be positive and finite, got 0.0"),
        (lambda: box(torch.tensor([1]), 0.0, 1.0), TypeError, "`f` must be a floating point tensor"),
        (
            lambda: box(torch.zeros(3), 1.0, 0.0),
            ValueError,
            "`low` must be at most `high`, got low = 1.0 and high = 0.0",
        ),
        (lambda: box(torch.zeros(3), float("nan"), 0.0), ValueError, "`low` must be at most `high`"),
    ],
)
def test_errors(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()  # type: ignore[operator]
