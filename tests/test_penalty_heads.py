"""The penalty of a head's own promise: soft violations tend to the hard ones, and have derivatives."""

import pytest
import torch
from torch import Tensor, nn

import torchgmc as gmc
from torchgmc.engine.values import Values
from torchgmc.heads.threshold.risks import RISKS
from torchgmc.penalty import residual


def test_soft_risk_tends_to_the_risk():
    rng = torch.Generator().manual_seed(0)
    scores, masks = torch.rand(6, 2, 30, generator=rng, dtype=torch.float64), torch.rand(6, 2, 30, generator=rng) < 0.5
    masks[0, 0] = False
    lam = torch.rand(6, 2, generator=rng, dtype=torch.float64)
    for name in ("fnr", "fpr"):
        hard = RISKS[name].values(scores, masks, lam)
        soft = RISKS[name].soft(scores, masks, lam, 1e-6)
        torch.testing.assert_close(soft, hard, atol=1e-4, rtol=0, equal_nan=True)


def head_cases() -> dict[str, tuple]:
    """Head, batch as for `observe`, and the index of the tensor that a model gives."""
    rng = torch.Generator().manual_seed(0)
    n, names = 400, ["a", "b", "c"]
    groups = torch.rand(n, 3, generator=rng) < 0.5
    double = {"generator": rng, "dtype": torch.float64}
    masks = torch.rand(n, 2, 12, generator=rng) < 0.5
    scores = torch.sigmoid(2 * masks - 1 + torch.randn(n, 2, 12, **double) - groups[:, :1, None].double())
    p = torch.rand(n, **double)
    y = torch.rand(n, generator=rng) < (p + 0.2 * groups[:, 0].double()).clamp(0, 1)
    classes, labels = torch.randn(n, 4, **double).softmax(1), torch.randint(4, (n,), generator=rng)
    logits = torch.randn(n, 8, **double) + groups[:, :1].double() * torch.eye(8, dtype=torch.float64)[2]
    tree = {"x": ["p", "q"], "y": ["r", "s"]}
    return {
        "fnr": (gmc.ThresholdHead(0.1, 0.01, names, num_classes=2), (scores, masks, groups)),
        "fpr conditional": (
            gmc.ThresholdHead(0.1, 0.02, names, risk="fpr", conditional=True),
            (scores[:, 0], masks[:, 0], groups),
        ),
        "kl": (gmc.DistributionHead({"u": [2, 3], "v": [3, 5]}, 0.005, names), (logits, groups)),
        "multiaccuracy": (gmc.ProbabilityHead(0.01, names, bins=None), (p, y, groups)),
        "multicalibration": (gmc.ProbabilityHead(0.01, names, bins=4, conditional=True), (p, y, groups)),
        "classes": (gmc.ProbabilityHead(0.01, names, bins=2, num_classes=4), (classes, labels, groups)),
        "quantile": (gmc.QuantileHead(0.8, 0.01, names, init=0.6), (p, groups)),
        "quantile bins": (gmc.QuantileHead(0.8, 0.02, names, init=0.6, bins=3, range=(0.0, 1.0)), (p, groups)),
        "tree": (gmc.TreeHead(tree, 0.8, 0.05, jitter=0.0), (classes, labels)),
        "tree groups conditional": (
            gmc.TreeHead(tree, 0.8, 0.05, groups=names, jitter=0.0, conditional=True),
            (classes, labels, groups),
        ),
    }


def tree_violations(head, probs: Tensor, labels: Tensor, groups: Tensor | None = None) -> Tensor:
    """Coverage - target of the hard answers, by group and set, one at a time."""
    nodes = head(probs, groups)
    covered = head.leaves(nodes)[torch.arange(len(labels)), labels].double() - head.target
    found = []
    for group in [torch.ones(len(labels)).bool()] if groups is None else groups.T:
        for inside in head.sets.values():
            chosen = group & torch.isin(nodes, torch.tensor(inside))
            found.append(covered[chosen].mean() if head.conditional else (covered * chosen).mean())
    return torch.stack(found)


@pytest.mark.parametrize("name", head_cases())
def test_violations_tend_to_those_the_head_reports(name: str):
    head, batch = head_cases()[name]
    penalty = gmc.GMCPenalty.for_head(head, softness=1e-7)
    x = batch[0].clone().requires_grad_()
    penalty(x, *batch[1:])
    head.fit(*batch)
    before = head.report.violations_before
    torch.testing.assert_close(penalty.violations().reshape(before.shape), before.double(), rtol=0, atol=2e-3)
    after = head.report.violations_after
    if name.startswith("tree"):  # fitted thresholds lie on levels exactly, where a soft step is 1/2: move them off
        head.base.sub_(1e-5)
        after = tree_violations(head, *batch).view_as(after)
    fitted = gmc.GMCPenalty.for_head(head, softness=1e-7)  # the promise after the fit
    loss = fitted(x, *batch[1:])
    torch.testing.assert_close(fitted.violations().reshape(after.shape), after.double(), rtol=0, atol=2e-2)
    assert loss.requires_grad
    assert fitted.groups == (head.groups if head.grouped else ["all"]) and len(list(fitted.parameters())) == 0


@pytest.mark.parametrize("name", head_cases())
@pytest.mark.parametrize("fitted", [False, True])
def test_derivative_in_what_the_model_gives(name: str, fitted: bool):
    head, batch = head_cases()[name]
    if fitted and name in ("multicalibration", "classes", "quantile bins"):
        pytest.skip("rounds on level sets jump; their derivative is that inside a level set")
    if fitted:
        head.fit(*batch)
    few = [t[:30] for t in batch]
    penalty = gmc.GMCPenalty.for_head(head, kind="smooth_max", temperature=0.05, softness=0.05, decay=0.0)
    rng = torch.Generator().manual_seed(1)
    along = 1e-3 * torch.randn(2, *few[0].shape, generator=rng, dtype=torch.float64)

    def function(weights: Tensor) -> Tensor:
        x = few[0] + torch.tensordot(weights, along, 1)
        return penalty(x.abs() if name.startswith("tree") else x, *few[1:])

    weights = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, weights, atol=1e-6, rtol=1e-4)
    grad = torch.autograd.grad(function(weights), weights)[0]
    assert bool((grad != 0).any())


def test_own_promise_with_sets_that_depend_on_f():
    x = torch.rand(300, dtype=torch.float64)
    y = x + 0.2

    def squared(y):
        return lambda f: f - y

    def halves(f, x):
        return torch.cat([f < 0.5, f >= 0.5], 1)

    head = gmc.GMCHead(squared, 0.01, who=halves)
    penalty = gmc.GMCPenalty.for_head(head, kind="squared", decay=0.0)
    f = x.clone().requires_grad_()
    loss = penalty(f, y)
    share = (x < 0.5).double().mean()
    torch.testing.assert_close(loss.detach(), 0.04 * (share**2 + (1 - share) ** 2))
    loss.backward()
    assert bool((f.grad < 0).all())  # up, towards y
    head.fit(x, y)
    assert float(gmc.GMCPenalty.for_head(head, kind="hinge")(x, y)) < 1e-3

    general = gmc.GMCHead(squared, 0.01, who=lambda f, x: torch.stack([f, 1 - f], 1))  # (n, 2, 1)
    penalty = gmc.GMCPenalty.for_head(general, kind="squared")
    penalty(x, y)
    torch.testing.assert_close(penalty.violations()[0], gmc.violations(torch.stack([x, 1 - x], 1)[:, :, None], x - y)[:, 0])


def test_heads_that_cannot_be_softened_say_so():
    with pytest.raises(TypeError, match="Linear"):
        gmc.GMCPenalty.for_head(nn.Linear(1, 1))
    risk = gmc.MonotoneRisk(lambda s, m, t: (s <= t[..., None]).double().mean(-1), name="mine")
    with pytest.raises(ValueError, match="'mine'"):
        gmc.GMCPenalty.for_head(gmc.ThresholdHead(0.1, 0.1, risk=risk))


def test_residual_takes_class_ids_and_values_carry_sets():
    assert residual(torch.rand(2, 3), torch.tensor([0, 2])).shape == (2, 3)
    penalty = gmc.GMCPenalty(
        lambda s: Values(s, torch.ones(len(s), 1), inside=torch.full_like(s, 0.5)), conditional=True, kind="squared"
    )
    assert float(penalty(torch.full((4, 1), 0.25))) == pytest.approx(0.25)  # (0.25 / 0.5)^2
    assert "residual, kind=hinge, alpha=0.1" in repr(gmc.GMCPenalty(kind="hinge", alpha=0.1))
