"""Offsets and slopes of all groups at once: the optimum that scipy finds, also behind models that are far too sure."""

import math

import pytest
import scipy.optimize
import torch

import torchgmc as gmc
from torchgmc.heads.probability import problem, static


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
    columns = problem.Columns(design, z[:, None], y[:, None], share, False, True).but(ridge=ridge[:, :, None])
    zero = torch.zeros(columns.shape, dtype=torch.float64)
    found, optimal = problem.solve(columns, zero, zero)
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


def between(n, within, seed):
    """A model that is right about four groups' means, and within groups surer than it should be."""
    draw = torch.Generator().manual_seed(seed)
    group = torch.randint(4, (n,), generator=draw)
    mean = torch.tensor([-2.0, -0.7, 0.7, 2.0], dtype=torch.float64)[group]
    around = 1.5 * torch.randn(n, generator=draw, dtype=torch.float64)
    truth = torch.sigmoid(mean + within * around)
    return mean + around, (torch.rand(n, generator=draw) < truth).double(), group[:, None] == torch.arange(4), truth


def test_slopes_within_and_between_groups_are_at_the_optimum():
    z, y, member, _ = between(800, 0.2, 0)
    share = torch.full((800, 1), 1 / 800, dtype=torch.float64)
    design = torch.cat([torch.ones(800, 1), member], 1).double()
    columns = problem.Columns(design, z[:, None], y[:, None], share, False, True)
    paid = static.MEANS_RIDGE / 800 * torch.eye(5, dtype=torch.float64)
    paid[0, 0] = 0.0
    means = static._between(columns, 1 / 800)
    root = torch.cat([design / 800**0.5, paid.sqrt()])  # the ridge as more rows of a least-squares problem
    aim = torch.cat([z / 800**0.5, z.new_zeros(5)])[:, None]
    torch.testing.assert_close(means, torch.linalg.lstsq(root, aim).solution)
    middle = (design @ means)[:, 0]

    def objective(b):
        b = torch.tensor(b, requires_grad=True)
        moved = z - b[0] - b[1] * (z - middle) - b[2] * middle
        value = (torch.nn.functional.softplus(moved) - y * moved).mean()
        paid = static.COMMON_RIDGE * b[1] ** 2 + static.BETWEEN_RIDGE * b[2] ** 2 + static.APART_RIDGE * (b[1] - b[2]) ** 2
        value = value + 0.5 * paid / 800
        value.backward()
        return value.item(), b.grad.numpy()

    best = scipy.optimize.minimize(objective, [0.0, 0.0, 0.0], jac=True, method="BFGS", options={"gtol": 1e-9}).x
    held, static.RIDGES = static.RIDGES, ((1e9, math.inf),)  # no group differs
    try:
        found = static.fit_static(columns, member.sum(0), torch.zeros(800, 0, dtype=torch.int64), None).theta
    finally:
        static.RIDGES = held
    expected = z * (1 - best[1]) - best[0] - (best[2] - best[1]) * middle
    torch.testing.assert_close(columns.at(found, design, z[:, None])[:, 0], expected, rtol=0, atol=5e-3)


def test_a_model_too_sure_within_groups_keeps_the_means_of_groups():
    """On fresh data: no worse than Platt anywhere, and far closer to the truth where groups have few examples."""
    ours, platt = [], []
    for seed in range(3):
        z, y, member, truth = between(2000, 0.2, seed)
        p, now = torch.sigmoid(z), slice(0, 100)
        head = gmc.ProbabilityHead(None, list("abcd")).fit(p[now], y[now], member[now])
        plain = gmc.ProbabilityHead(None).fit(p[now], y[now])
        ours.append(float((head(p[100:], member[100:]) - truth[100:]).square().mean()))
        platt.append(float((plain(p[100:]) - truth[100:]).square().mean()))
    assert sum(ours) < 0.5 * sum(platt)


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


@pytest.mark.parametrize("euclidean", [False, True])
def test_folds_side_by_side_are_the_fits_without_each_fold(euclidean: bool) -> None:
    g = torch.Generator().manual_seed(0)
    member = torch.cat([torch.ones(400, 1), (torch.rand(400, 3, generator=g) < 0.4).float()], 1).double()
    z, y = torch.randn(400, 1, generator=g).double(), (torch.rand(400, 1, generator=g) < 0.5).double()
    share = torch.full((400, 1), 1 / 400).double()
    whole = problem.Columns(member, torch.sigmoid(z) if euclidean else z, y, share, euclidean, not euclidean)
    fold, zero = torch.arange(400) % 5, torch.zeros(whole.shape).double()
    ridge = torch.full_like(zero, 0.01)
    every, start = whole.folds(fold, 5, ridge), zero.expand(-1, -1, 5)
    found = problem.minimise(every, start, torch.zeros_like(start), None, 50, 1e-3)
    for k in range(5):
        one = whole.pick((fold != k).nonzero()[:, 0], ridge)
        torch.testing.assert_close(every.hessian(start)[k], one.hessian(zero)[0])
        torch.testing.assert_close(every.slope(start)[0][..., k], one.slope(zero)[0][..., 0])
        alone = problem.minimise(one, zero, zero.clone(), None, 50, 1e-3)
        torch.testing.assert_close(found[..., k], alone[..., 0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("slopes", "many"), [(True, 1 << 12), (False, 1 << 12), (True, 0)])
def test_all_ridges_and_folds_at_once_are_plain_loops_of_fits(slopes: bool, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out losses and fits of ``_at_once`` against one Newton fit per ridge and fold, and losses from their formula."""
    monkeypatch.setattr(problem, "MANY", many)  # 0: folds in float32
    g = torch.Generator().manual_seed(1)
    member = torch.cat([torch.ones(500, 1), (torch.rand(500, 4, generator=g) < 0.3).float()], 1).double()
    z = 2 * torch.randn(500, 1, generator=g).double()
    y = (torch.rand(500, 1, generator=g).double() < torch.sigmoid(0.6 * z + member[:, 1:2] - 0.5)).double()
    share = torch.rand(500, 1, generator=g).double() + 0.5
    columns = problem.Columns(member, z, y, share / share.sum(), False, slopes)
    fold, theta = (torch.arange(500) % 5).to(torch.uint8), torch.zeros(columns.shape).double()
    free, shut = torch.zeros_like(theta), torch.zeros_like(theta)
    shut[1:, 1:] = math.inf  # no slopes of groups
    ridges = [torch.full_like(theta, strength) for strength in (0.05, 0.01, 0.002)]
    found = static._at_once(columns, theta, ridges, [shut, free, shut], fold)
    assert found is not None
    heads, losses, fine = found
    assert fine and heads.shape == (3, *theta.shape) and losses.shape == (3, 5)
    for k, (ridge, price) in enumerate(zip(ridges, [shut, free, shut], strict=True)):
        alone = problem.minimise(columns.but(ridge=ridge), theta, price, None, 50, 1e-3)
        torch.testing.assert_close(heads[k], alone, rtol=0, atol=2e-4)
        for part in range(5):
            rest, out = (fold != part).nonzero()[:, 0], (fold == part).nonzero()[:, 0]
            fitted = problem.minimise(columns.pick(rest, ridge * 1.25), theta, price, None, 50, 1e-3)
            offset = member[out] @ fitted[0]
            moved = z[out] * (1 - member[out] @ fitted[1]).clamp_min(0) - offset if slopes else z[out] - offset
            weight = share[out] / share[out].sum()
            plain = (weight * torch.nn.functional.binary_cross_entropy_with_logits(moved, y[out], reduction="none")).sum()
            assert abs(float(losses[k, part] - plain)) < 5e-6


def test_hessians_of_parts_sum_to_that_of_all() -> None:
    g = torch.Generator().manual_seed(5)
    member = torch.cat([torch.ones(300, 1), (torch.rand(300, 3, generator=g) < 0.4).float()], 1).double()
    z, y = torch.randn(300, 1, generator=g).double(), (torch.rand(300, 1, generator=g) < 0.5).double()
    columns = problem.Columns(member, z, y, torch.full_like(z, 1 / 300), False, True)
    theta, fold = 0.1 * torch.randn(columns.shape, generator=g).double(), (torch.arange(300) * 7 % 11 % 5).to(torch.uint8)
    parts = columns.hessians(theta, fold, 5)
    torch.testing.assert_close(parts.sum(0, keepdim=True), columns.hessian(theta))
    rows = (fold == 3).nonzero()[:, 0]
    torch.testing.assert_close(parts[3], columns.pick(rows).hessian(theta)[0] * len(rows) / 300)


def test_steps_at_once_that_do_not_end_leave_the_fit_to_plainer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    z, y, member = sure(600, 2.0, 0.5)
    probs = torch.sigmoid(z)
    usual = gmc.ProbabilityHead(None, ["a", "b"]).fit(probs, y, member)(probs, member)
    monkeypatch.setattr(problem, "CHORDS", 1)
    other = gmc.ProbabilityHead(None, ["a", "b"]).fit(probs, y, member)(probs, member)
    torch.testing.assert_close(usual, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_some_examples_choose_the_ridge_of_very_many(shift, monkeypatch):
    """The fits with it see all: nearly the same as with every ridge on all, whether groups differ or not."""
    generator = torch.Generator().manual_seed(0)
    member = torch.rand(40_000, 8, generator=generator) < 0.3
    z = 1.5 * torch.randn(40_000, generator=generator)
    truth = torch.sigmoid(0.8 * z + shift * (member[:, 0].float() - member[:, 1].float() + 0.5 * z * member[:, 2]))
    y = torch.rand(40_000, generator=generator) < truth
    whole = gmc.ProbabilityHead(None, list("abcdefgh"), bins=None).fit(torch.sigmoid(z), y, member)
    monkeypatch.setattr(static, "CHOICES", 4096)
    some = gmc.ProbabilityHead(None, list("abcdefgh"), bins=None).fit(torch.sigmoid(z), y, member)
    assert not some.offsets.equal(whole.offsets)  # another way, and the same end
    found = [head(torch.sigmoid(z), member) for head in (whole, some)]
    errors = [float((f - truth).square().mean()) for f in found]
    assert errors[1] < errors[0] + 2e-6 and float((found[0] - found[1]).abs().max()) < 0.005
    assert (some.report.details["alike"] > 0.5) == (whole.report.details["alike"] > 0.5) == (shift == 0.0)


def test_fits_side_by_side_are_those_with_each_ridge_by_itself():
    generator = torch.Generator().manual_seed(3)
    n = 9000
    member = torch.cat([torch.ones(n, 1), (torch.rand(n, 4, generator=generator) < 0.4).float()], 1).double()
    z = 1.5 * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    y = (torch.rand(n, 1, generator=generator) < torch.sigmoid(0.7 * z + 0.5 * member[:, 1:2])).double()
    columns = problem.Columns(member, z, y, torch.full_like(z, 1 / n), False, True)
    none = torch.zeros(columns.shape, dtype=torch.float64)
    prices = [none.clone(), none.clone(), none.clone()]
    prices[0][:, 1:] = math.inf
    prices[2][1, 1:] = math.inf
    ridges = [torch.full_like(none, strength / n) for strength in (1.0, 16.0, 4.0)]
    plain = columns.thin(problem.SAMPLE).hessian(none)
    found, met = static._side_by_side(columns, none, ridges, prices, plain)
    assert met
    for theta, ridge, price in zip(found, ridges, prices, strict=True):
        alone = problem.minimise(columns.but(ridge=ridge), none, price, None, 50, 1e-4)
        assert bool((theta[price.isinf()] == 0).all())
        torch.testing.assert_close(theta, alone, atol=2e-4, rtol=0)
