"""The small lasso: optimality conditions and SciPy."""

import scipy.optimize
import torch
from hypothesis import given, settings, strategies as st

from torchgmc.engine.lasso import _split, solve_lasso


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
