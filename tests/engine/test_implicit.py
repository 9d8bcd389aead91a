"""The optimum as a function of its inputs: one linear system, and a problem of one's own."""

import torch
from hypothesis import assume, given, settings, strategies as st

from torchgmc.engine import implicit
from torchgmc.engine.implicit import CellProblem, optimum

SEEDS = st.integers(0, 2**16)


@given(seed=SEEDS, size=st.integers(1, 8), rank=st.integers(1, 8))
@settings(deadline=None, max_examples=30, derandomize=True)
def test_solve_is_the_pseudo_inverse_on_the_active_set(seed: int, size: int, rank: int):
    rng = torch.Generator().manual_seed(seed)
    root = torch.randn(size, min(rank, size), generator=rng, dtype=torch.float64)
    matrix, right = root @ root.T, torch.randn(size, generator=rng, dtype=torch.float64)
    active = torch.rand(size, generator=rng) < 0.7
    values = torch.linalg.eigvalsh(matrix[active][:, active]).abs()
    assume(not len(values) or not bool(((values > 1e-13 * values.max()) & (values < 1e-6 * values.max())).any()))
    got = implicit._solve(matrix, active, right)
    want = torch.zeros(size, dtype=torch.float64)
    want[active] = torch.linalg.pinv(matrix[active][:, active], rtol=1e-10) @ right[active]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_problem_of_your_own():
    """CellProblem is an interface: a quadratic with a known solution, soft thresholding."""

    class Quadratic(CellProblem):
        def measure(self, shift, *inputs):
            return 0.5 * (shift - inputs[0]).square().sum(), shift - inputs[0]

        def spread(self, shift, *inputs):
            return torch.ones_like(shift)[:, :, None]

    x = torch.tensor([[2.0], [-0.5], [-3.0]], dtype=torch.float64, requires_grad=True)
    slack = torch.ones(3, 1, dtype=torch.float64, requires_grad=True)
    theta = optimum(Quadratic(torch.eye(3, dtype=torch.float64), 1), slack, x)
    torch.testing.assert_close(theta, torch.tensor([[1.0], [0.0], [-2.0]], dtype=torch.float64))
    theta.sum().backward()
    assert x.grad.flatten().tolist() == [1.0, 0.0, 1.0]
    assert slack.grad.flatten().tolist() == [-1.0, 0.0, 1.0]
