"""Every bad input says what was wrong, where, and what to do."""

import math

import pytest
import torch

import torchgmc as gmc
from torchgmc.heads.threshold.risks import MonotoneRisk

SCORES, MASKS = torch.rand(6, 4), torch.ones(6, 4, dtype=torch.bool)
GROUPS = torch.tensor([[1, 0], [1, 0], [1, 1], [0, 1], [0, 1], [1, 1]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"target": 0.0}, ValueError, "`target` must lie strictly between 0 and 1, got 0.0"),
        ({"target": 7.5}, ValueError, "`target`"),
        ({"target": [0.1, 0.2]}, ValueError, "`target` must be one number or 1 of them"),
        ({"alpha": 0.0}, ValueError, "`alpha` must be a finite number above 0, got 0.0"),
        ({"alpha": math.nan}, ValueError, "`alpha`.*nan"),
        ({"alpha": True}, ValueError, "`alpha`"),
        ({"groups": "women"}, TypeError, r"write \['women'\]"),
        ({"groups": []}, TypeError, "non-empty list of names"),
        ({"groups": GROUPS}, TypeError, "pass the membership itself to `fit`"),
        ({"groups": ["a", "a"]}, ValueError, "repeated names: 'a'"),
        ({"risk": "dice"}, ValueError, r"`risk` must be one of \['fnr', 'fpr'\] or a MonotoneRisk"),
        ({"num_classes": 0}, ValueError, "`num_classes` must be a whole number of at least 1"),
        ({"range": (1.0, 0.0)}, ValueError, "`range` must be .* low < high"),
        ({"resolution": -1.0}, ValueError, "`resolution` must be a finite number above 0"),
        ({"resolution": 1e-9}, ValueError, "would need .* thresholds; use resolution='exact'"),
        ({"resolution": "exact", "risk": MonotoneRisk(lambda s, m, t: t)}, ValueError, "for a custom risk, pass a step"),
        ({"init": math.inf}, ValueError, "`init` must be a finite threshold"),
        ({"jitter": -0.1}, ValueError, "`jitter` must be a finite half-width"),
    ],
)
def test_construction(options, error, message):
    with pytest.raises(error, match=message):
        gmc.ThresholdHead(**({"target": 0.1, "alpha": 0.01} | options))


@pytest.mark.parametrize(
    ("scores", "masks", "groups", "options", "error", "message"),
    [
        ([[0.1]], MASKS, GROUPS, {}, TypeError, "`scores` must be a tensor, got list"),
        (SCORES.long(), MASKS, GROUPS, {}, TypeError, "`scores` must be floating point, got torch.int64"),
        (torch.tensor(0.5), MASKS, GROUPS, {}, ValueError, "one entry per example"),
        (SCORES.clone().index_fill_(0, torch.tensor(2), math.nan), MASKS, GROUPS, {}, ValueError, r"scores\[2, 0\] is nan"),
        (SCORES.clone().index_fill_(1, torch.tensor(3), math.inf), MASKS, GROUPS, {}, ValueError, r"scores\[0, 3\] is inf"),
        (SCORES + 1, MASKS, GROUPS, {}, ValueError, "probabilities in .* pass logits=True for logits"),
        (SCORES, MASKS[:, :3], GROUPS, {}, ValueError, r"`masks` must have the shape of `scores`, \(6, 4\), got \(6, 3\)"),
        (SCORES[:, None], MASKS, GROUPS, {}, ValueError, r"drop the channel with `scores.squeeze\(1\)`"),
        (SCORES, MASKS.long() * 255, GROUPS, {}, ValueError, "hold only 0 and 1, but it holds 255"),
        (SCORES, None, GROUPS, {}, TypeError, "`masks` must be a tensor"),
        (SCORES, MASKS, None, {}, ValueError, r"`groups` is missing: this head was made for 2 groups \(x, y\)"),
        (SCORES, MASKS, GROUPS[:, :1], {}, ValueError, r"`groups` must have shape \(n, 2\) with n = 6"),
        (SCORES, MASKS, GROUPS[:5], {}, ValueError, r"got \(5, 2\)"),
        (SCORES, MASKS, GROUPS.float() * 0.5, {}, ValueError, "memberships, True or False"),
        (SCORES, MASKS, [["f", "m"]] * 6, {}, TypeError, "Groups.from_columns"),
        (SCORES, MASKS, GROUPS & torch.tensor([True, False]), {}, ValueError, "group 'y' has no examples with a fnr"),
        (SCORES, ~MASKS, GROUPS, {}, ValueError, "6 of 6 images have no relevant pixel"),
        (SCORES, MASKS, GROUPS, {"weight": torch.ones(5)}, ValueError, r"`weight` must have shape \(6,\)"),
        (
            SCORES,
            MASKS,
            GROUPS,
            {"weight": -torch.ones(6)},
            ValueError,
            "`weight` must be non-negative and not all zero; smallest value: -1.0",
        ),
        (SCORES, MASKS, GROUPS, {"weight": torch.zeros(6)}, ValueError, "not all zero; smallest value: 0.0"),
        (SCORES, MASKS, GROUPS, {"weight": torch.full((6,), math.nan)}, ValueError, r"weight\[0\] is nan"),
        (SCORES, MASKS, GROUPS, {"solver": "newton"}, ValueError, "`solver` must be one of 'exact', 'paper', 'fresh'"),
        (SCORES, MASKS, GROUPS, {"eta": 0.1}, ValueError, "solver='exact' finds its own"),
        (SCORES, MASKS, GROUPS, {"solver": "paper", "eta": -1.0}, ValueError, "`eta` must be a finite number above 0"),
        (SCORES, MASKS, GROUPS, {"max_iter": 0}, ValueError, "`max_iter` must be a whole number of at least 1"),
        (SCORES, MASKS, GROUPS, {"solver": "fresh", "max_iter": 50}, ValueError, "2 T = 100 splits, but there are 6 examples"),
    ],
)
def test_fit(scores, masks, groups, options, error, message):
    head = gmc.ThresholdHead(0.1, 0.01, ["x", "y"])
    with pytest.raises(error, match=message):
        head.fit(scores, masks, groups, **options)
    assert not head.is_fitted and head.statistics is None  # nothing changed


def test_two_step_fits_that_the_statistics_do_not_support():
    head = gmc.ThresholdHead(0.1, 0.01, ["x", "y"])
    head.observe(SCORES, MASKS, GROUPS)
    with pytest.raises(ValueError, match="`eta` = 0.01 is not a multiple of the step .* resolution=0.01"):
        head.calibrate("paper", eta=0.01)
    with pytest.raises(ValueError, match="needs the individual examples: use `fit` or `fit_batches`"):
        head.calibrate("fresh", max_iter=5)
    conditional = gmc.ThresholdHead(0.1, 0.01, ["x", "y"], conditional=True)
    conditional.observe(SCORES, MASKS, GROUPS)
    with pytest.raises(ValueError, match="fits no grid of thresholds; use `fit` or `fit_batches`.*resolution='exact'"):
        conditional.calibrate("paper")
    head.calibrate("paper", eta=1 / 1024)
    assert head.is_fitted


def test_use_before_fit_and_with_wrong_groups():
    head = gmc.ThresholdHead(0.1, 0.5, ["x", "y"])
    with pytest.raises(RuntimeError, match="not fitted; call `fit`"):
        head(SCORES, GROUPS)
    with pytest.raises(RuntimeError, match="not fitted"):
        head.audit(SCORES, MASKS, GROUPS)
    with pytest.raises(ValueError, match="no examples observed"):
        head.calibrate()
    head.fit(SCORES, MASKS, GROUPS)
    with pytest.raises(ValueError, match="`groups` is missing"):
        head(SCORES)
    with pytest.raises(ValueError, match=r"`groups` must have shape \(n, 2\)"):
        head(SCORES, GROUPS[:, :1])


def test_classes_and_devices():
    head = gmc.ThresholdHead(0.1, 0.01, num_classes=3)
    with pytest.raises(ValueError, match=r"`scores` must have shape \(n, 3, ...\)"):
        head.fit(SCORES, MASKS)
    other = gmc.ThresholdHead(0.1, 0.01, ["x", "y"])
    with pytest.raises(ValueError, match="`groups` is on meta but `scores` is on cpu"):
        other.fit(SCORES, MASKS, GROUPS.to("meta"))
    with pytest.raises(ValueError, match="`masks` is on the meta device"):
        other.fit(SCORES, MASKS.to("meta"), GROUPS)


def test_a_groups_object_must_have_the_heads_names():
    groups = gmc.Groups.from_columns({"sex": ["f", "m"] * 3})
    head = gmc.ThresholdHead(0.1, 0.5, groups)
    assert head.groups == ["sex=f", "sex=m"]
    assert head.fit(SCORES, MASKS, groups).is_fitted
    with pytest.raises(ValueError, match="must be the groups the head was made for, x, y"):
        gmc.ThresholdHead(0.1, 0.5, ["x", "y"]).fit(SCORES, MASKS, groups)


def test_audit_errors():
    head = gmc.ThresholdHead(0.1, 0.5, ["x", "y"]).fit(SCORES, MASKS, GROUPS)
    with pytest.raises(ValueError, match="`delta` must lie strictly between 0 and 1"):
        head.audit(SCORES, MASKS, GROUPS, delta=1.0)
    with pytest.raises(ValueError, match="has no examples to audit"):
        head.audit(SCORES[:0], MASKS[:0], GROUPS[:0])
    with pytest.raises(ValueError, match="group 'y' has no examples to audit"):
        head.audit(SCORES[:2], MASKS[:2], GROUPS[:2])


def test_masks_of_another_shape_or_of_0_and_255():
    head, scores, masks = gmc.ThresholdHead(0.1, 0.05), torch.rand(9, 1, 4, 4), (torch.rand(9, 1, 4, 4) < 0.5).float()
    for wrong in (255 * masks, (255 * masks).byte()):
        with pytest.raises(ValueError, match=r"it holds 255(.0)?; compare it .* `masks == 255`.*ignore_index=255") as caught:
            head.fit(scores, wrong)
        assert "> 0" not in str(caught.value)  # 255 often marks pixels without a label
    for s, m, advice in (
        (scores[:, 0], masks, r"`masks.squeeze\(1\)`"),
        (scores, masks[:, 0], r"`scores.squeeze\(1\)`"),
        (scores.expand(9, 2, 4, 4), masks, r"`scores\[:, 1:2\]`, or make the head with `num_classes`"),
        (scores.expand(9, 2, 4, 4), masks[:, 0], r"`scores\[:, 1\]`, or make the head with `num_classes`"),
        (scores[:, 0], masks[:8, 0], r"got \(8, 4, 4\)\."),
    ):
        with pytest.raises(ValueError, match=advice):
            head.fit(s, m)
