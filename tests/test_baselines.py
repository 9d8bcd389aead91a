"""Conformal risk control and the unprocessed threshold, against their definitions."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

import torchgmc as gmc
from gmctest.examples import cameras
from gmctest.oracles import false_alarm_rate, miss_rate


def make(n, seed, m=20):
    rng = torch.Generator().manual_seed(seed)
    masks = torch.rand(n, m, generator=rng) < 0.4
    masks[:, 0], masks[:, 1] = True, False
    return torch.sigmoid(2 * masks + torch.randn(n, m, generator=rng).double() - 1), masks


@settings(deadline=None, max_examples=20)
@given(n=st.integers(20, 60), seed=st.integers(0, 1000), risk=st.sampled_from(["fnr", "fpr"]))
def test_conformal_by_its_definition(n, seed, risk):
    """The supremum (infimum) over the lattice of thresholds, by a loop over thresholds, images and pixels."""
    scores, masks = make(n, seed)
    head = gmc.baselines.ConformalRiskControl(0.2, risk=risk, resolution=1 / 64).fit(scores, masks)
    rate = miss_rate if risk == "fnr" else false_alarm_rate
    points = head.lattice.points().tolist()
    valid = []
    for point in points:
        risks = [rate(h, y, point) for h, y in zip(scores.tolist(), masks.tolist(), strict=True)]
        if n / (n + 1) * (sum(risks) / n) + 1 / (n + 1) <= 0.2:
            valid.append(point)
    assert float(head.threshold()[0]) == pytest.approx(max(valid) if risk == "fnr" else min(valid))


def test_conformal_controls_the_risk_on_average():
    """E[risk] <= target over 200 draws of calibration and test data: mean below target + 3 standard errors (0.1 %)."""
    tests = []
    for seed in range(200):
        scores, masks = make(60, seed)
        head = gmc.baselines.ConformalRiskControl(0.15).fit(scores[:30], masks[:30])
        missed = (masks[30:] & ~head(scores[30:])).sum(1) / masks[30:].sum(1)
        tests.append(missed.double().mean())
    values = torch.stack(tests)
    assert values.mean() <= 0.15 + 3 * values.std() / 200**0.5


def test_conformal_refuses_when_no_threshold_is_valid():
    scores, masks = make(5, 0)
    with pytest.raises(ValueError, match="no threshold keeps the fnr .* It needs n >= 9"):
        gmc.baselines.ConformalRiskControl(0.1).fit(scores, masks)


def test_same_calling_convention():
    scores, masks = make(80, 1)
    groups = torch.rand(80, 2, generator=torch.Generator().manual_seed(1)) < 0.5
    for head in (
        gmc.baselines.ConformalRiskControl(0.1, alpha=0.01, groups=["a", "b"]),
        gmc.baselines.MondrianRiskControl(0.1, alpha=0.01, groups=["a", "b"]),
        gmc.baselines.Unprocessed(0.1, alpha=0.01, groups=["a", "b"], threshold=0.6),
        gmc.ThresholdHead(0.1, 0.01, ["a", "b"]),
    ):
        head.fit(scores, masks, groups)
        assert head(scores, groups).dtype == torch.bool
        assert head.threshold(groups).shape == (80,)
        assert set(head.audit(scores, masks, groups).table["group"]) == {"a", "b", "everyone"}
        assert head.report.violations_after.shape == (3, 1)
    one = gmc.baselines.ConformalRiskControl(0.1, groups=["a", "b"]).fit(scores, masks, groups).threshold(groups)
    assert one.unique().numel() == 1


@settings(deadline=None, max_examples=10)
@given(n=st.integers(20, 80), seed=st.integers(0, 1000), risk=st.sampled_from(["fnr", "fpr"]))
def test_mondrian_is_conformal_risk_control_in_each_combination(n, seed, risk):
    scores, masks = make(n, seed)
    groups = torch.rand(n, 2, generator=torch.Generator().manual_seed(seed)) < 0.5
    groups[:2] = torch.tensor([[True, False], [False, True]])
    options = {"target": 0.3, "risk": risk, "resolution": 1 / 64}
    head = gmc.baselines.MondrianRiskControl(groups=["a", "b"], **options).fit(scores, masks, groups)
    for pattern in groups.unique(dim=0):
        own = (groups == pattern).all(1)
        try:
            alone = gmc.baselines.ConformalRiskControl(**options).fit(scores[own], masks[own]).threshold()
        except ValueError:
            alone = torch.tensor([-torch.inf if risk == "fnr" else torch.inf])
        assert head.threshold(pattern[None]).tolist() == alone.tolist()
    nobody = head.threshold(torch.tensor([[False, False]]))
    if not bool((~groups).all(1).any()):  # a combination never seen gets the safe end
        assert torch.isinf(nobody).all()


def test_unprocessed_keeps_its_threshold():
    scores, masks = make(40, 2)
    head = gmc.baselines.Unprocessed(0.1, threshold=0.37).fit(scores, masks)
    assert head.threshold().item() == 0.37
    assert torch.equal(head(scores), scores > 0.37)
    missed = [miss_rate(h, y, 0.37) for h, y in zip(scores.tolist(), masks.tolist(), strict=True)]
    assert float(head.report.violations_after) == pytest.approx(sum(missed) / 40 - 0.1)


def test_conformal_with_classes_has_one_threshold_for_each():
    scores, masks = make(60, 3)
    pair = torch.stack([scores, scores**2], 1), torch.stack([masks, masks], 1)
    head = gmc.baselines.ConformalRiskControl([0.1, 0.3], num_classes=2).fit(*pair)
    single = gmc.baselines.ConformalRiskControl(0.3).fit(scores**2, masks)
    assert head.threshold()[0, 1] == single.threshold()[0]


def test_a_baseline_without_groups_says_how_to_audit_it_by_groups():
    probs, y, groups = cameras()
    scores, masks = probs[:, None], torch.nn.functional.one_hot(y, 3)[:, None].bool()
    baseline = gmc.baselines.ConformalRiskControl(target=0.4).fit(scores, masks)
    with pytest.raises(ValueError, match=r"has camera=front, .*made without groups; make it with groups=groups.names"):
        baseline.audit(scores, masks, groups)
    again = gmc.baselines.ConformalRiskControl(target=0.4, groups=groups.names).fit(scores, masks, groups)
    assert len(again.audit(scores, masks, groups).rows()) == len(groups) + 1 and torch.equal(
        again.threshold(groups.membership).unique(), baseline.threshold().unique()
    )


@pytest.mark.parametrize("unit", [0.2, 10.0])
def test_the_unit_of_weights_does_not_matter(unit):
    """A combination's weight is not its number of images: with weights x 0.2 it had no threshold, x 10 a less safe one."""
    masks, groups = torch.rand(120, 8, 8) < 0.4, torch.rand(120, 2) < 0.5
    data = (torch.sigmoid(2.0 * masks + torch.randn(120, 8, 8)), masks, groups)
    for kind in (gmc.baselines.MondrianRiskControl, gmc.baselines.ConformalRiskControl):
        plain = kind(0.2, alpha=0.01, groups=["a", "b"]).fit(*data)
        other = kind(0.2, alpha=0.01, groups=["a", "b"]).fit(*data, weight=torch.full((120,), unit))
        assert torch.equal(plain.threshold(groups), other.threshold(groups)) and plain.threshold(groups).isfinite().all()
