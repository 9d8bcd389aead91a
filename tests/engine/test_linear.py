"""Linear functions by boosting: where they end, against least squares."""

import torch

from torchgmc.engine import linear
from torchgmc.engine.trees import Loss


def squares(y: torch.Tensor) -> Loss:
    """Half the squared distance to y."""
    return Loss(lambda z, rows: (z - y[rows], torch.ones_like(z)), lambda z, rows: (z - y[rows]).square().sum(1) / 2)


def problem(n: int, noise: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=g) * torch.tensor([1.0, 5.0, 1.0, 0.2, 1.0, 1.0]) + 3
    truth = torch.zeros(6, 2).double()
    truth[1, 0], truth[4, 1] = 1.0, -2.0
    standard = linear.standard(x)[0]
    return x, standard, standard @ truth + noise * torch.randn(n, 2, generator=g).double()


def test_many_steps_end_at_least_squares() -> None:
    _, x, y = problem(200, 1.0)
    line = linear.descend(x, torch.zeros_like(y), squares(y), 0, 400, 1.0, False)
    torch.testing.assert_close(-line.weight, torch.linalg.lstsq(x, y).solution, rtol=0, atol=1e-6)


def test_features_are_standardised_and_missing_ones_are_their_mean() -> None:
    x, _, _ = problem(50, 0.0)
    x[::7, 2] = torch.nan
    x[:, 5] = 4.0
    found, mean, deviation = linear.standard(x)
    for j in range(6):
        known = x[~x[:, j].isnan(), j].double()
        assert abs(float(mean[j] - known.mean())) < 1e-12
        assert float(deviation[j]) == 1.0 if j == 5 else abs(float(deviation[j] - known.std(unbiased=False))) < 1e-9
    assert bool((found[::7, 2] == 0).all()) and bool((found[:, 5] == 0).all())


def test_held_out_rows_stop_it_and_l1_leaves_zeros() -> None:
    _, x, y = problem(400, 1.0)
    start = torch.zeros_like(y)
    few = linear.fit(x, start, start, squares(y), 80, 200, 1.0, True)
    assert -few.weight[1, 0] > 0.8 and few.weight[4, 1] > 1.6 and int((few.weight.abs().amax(1) == 0).sum()) >= 1
    noise = torch.randn(400, 2, generator=torch.Generator().manual_seed(3)).double()
    none = linear.fit(x, start, start, squares(noise), 80, 200, 1.0, False)
    assert none.steps == 0 and bool((none.weight == 0).all())
