"""Offsets and slopes of all groups at once: the optimum that scipy finds, also behind models that are far too sure."""

import math

import pytest
import scipy.optimize
import torch

import torchgmc as gmc
from torchgmc.heads.probability import static


def sure(n, scale, slope, seed=0):
    """Logits ``scale`` times a normal, outcomes whose logit is ``slope`` times theirs plus offsets of two groups."""
    draw = torch.Generator().manual_seed(seed)
    z = (scale * torch.randn(n, generator=draw, dtype=torch.float64)).clamp(-14, 14)
    member = torch.rand(n, 2, generator=draw) < 0.4
    truth = torch.sigmoid(slope * z + member.double() @ torch.tensor([0.8, -0.5], dtype=torch.float64))
    return z, (torch.rand(n, generator=draw) < truth).double(), member


def minimum(z, y, design, ridge, centre):
    """Plain minimisation of the mean log loss plus ridges; ``design`` and z are the columns."""

    def objective(theta):
        theta = torch.tensor(theta, requires_grad=True)
        moved = z * (1 - design @ theta[design.shape[1] :]) - design @ theta[: design.shape[1]]
        value = (torch.nn.functional.softplus(moved) - y * moved).mean() + 0.5 * (ridge * (theta - centre) ** 2).sum()
        value.backward()
        return value.item(), theta.grad.numpy()

    start = torch.zeros(2 * design.shape[1], dtype=torch.float64).numpy()
    start[design.shape[1]] = 0.9  # a slope of 0.1: far from the flat ends of the loss
    found = scipy.optimize.minimize(objective, start, jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-10})
    return torch.tensor(found.x)


@pytest.mark.parametrize("scale, slope", [(1.0, 1.0), (8.0, 0.05), (30.0, 0.02)])
def test_everyone_is_platt_scaling_however_sure_the_model(scale, slope):
    z, y, _ = sure(1500, scale, slope)
    head = gmc.ProbabilityHead(None, bins=None).fit(torch.sigmoid(z), y)
    z = torch.sigmoid(z).logit()
    ones = torch.ones(len(z), 1, dtype=torch.float64)
    ridge = torch.tensor([0.0, static.COMMON_RIDGE / len(z)], dtype=torch.float64)
    best = minimum(z, y, ones, ridge, torch.zeros(2, dtype=torch.float64))
    torch.testing.assert_close(torch.cat([head.offsets.sum(0), head.slopes.sum(0)]), best, rtol=0, atol=2e-3)


@pytest.mark.parametrize("scale, slope", [(1.0, 1.0), (30.0, 0.02)])
def test_groups_with_a_ridge_are_at_the_optimum(scale, slope):
    z, y, member = sure(1500, scale, slope)
    design = torch.cat([torch.ones(len(z), 1), member], 1).double()
    ridge = torch.tensor([[0.0, 4.0, 4.0], [1.0, 52.0, 52.0]], dtype=torch.float64) / len(z)
    share = torch.full((len(z), 1), 1 / len(z), dtype=torch.float64)
    columns = static.Columns(design, z[:, None], y[:, None], share, False, True, ridge[:, :, None])
    zero = torch.zeros(columns.shape, dtype=torch.float64)
    found, optimal = static._solve(columns, zero, zero)
    best = minimum(z, y, design, ridge.flatten(), torch.zeros(6, dtype=torch.float64))
    assert optimal
    torch.testing.assert_close(found.flatten(), best, rtol=0, atol=1e-3)


@pytest.mark.parametrize("classes", [None, 3])
def test_a_model_that_is_right_less_often_the_surer_it_is_gets_slope_0(classes):
    z, y, member = sure(4000, 2.0, -0.7)
    probs = torch.sigmoid(z)
    if classes is not None:
        probs, y = torch.stack([0.9 * probs, 0.9 * (1 - probs), torch.full_like(probs, 0.1)], 1), (1 - y).long()
    head = gmc.ProbabilityHead(None, ["a", "b"], num_classes=classes).fit(probs, y, member)
    assert bool((head.slopes[0] <= 1).all()) and bool((head.slopes[0] == 1).any())
    f = head(probs, member)
    hit = torch.nn.functional.one_hot(y, 3).double() if classes is not None else y
    assert (f.mean(0) - hit.mean(0)).abs().max() < 1e-3
    for group in member.T:
        off = (f - hit)[group].mean(0).abs().max()
        assert off < 3 * math.sqrt(0.25 / int(group.sum()))


def test_fits_without_slopes_of_groups_are_among_the_averaged():
    """Where slopes of groups do not differ the head is as good on fresh data as the regression that knows it."""
    sklearn = pytest.importorskip("sklearn.linear_model")
    gap = []
    for seed in range(8):
        z, y, member = sure(6000, 2.0, 0.5, seed)
        now, fresh = slice(0, 1500), slice(1500, None)
        head = gmc.ProbabilityHead(None, ["a", "b"]).fit(torch.sigmoid(z[now]), y[now], member[now])
        table = torch.cat([z[:, None], member.double()], 1).numpy()
        model = sklearn.LogisticRegression().fit(table[now], y[now].numpy())
        theirs = torch.tensor(model.predict_proba(table[fresh])[:, 1])
        ours = head(torch.sigmoid(z[fresh]), member[fresh])
        gap.append(float(((ours - y[fresh]) ** 2).mean() - ((theirs - y[fresh]) ** 2).mean()))
    gap = torch.tensor(gap)
    assert gap.mean() < 2e-4 and gap.mean() < 2 * gap.std() / math.sqrt(len(gap)) + 1e-4
