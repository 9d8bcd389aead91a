"""What a fit of thresholds tells audits."""

import pytest
import torch

import torchgmc as gmc


@pytest.mark.parametrize("classes", [None, 2])
def test_the_tail_bounds_the_largest_deviation_in_calibration(classes: int | None):
    g = torch.Generator().manual_seed(0)
    shape = (400, 12, 12) if classes is None else (400, classes, 12, 12)
    dark, masks = torch.rand(400, generator=g) < 0.3, torch.rand(shape, generator=g) < 0.5
    shift = dark.view(-1, *[1] * (len(shape) - 1)).float()
    scores = torch.sigmoid(3 * masks + torch.randn(shape, generator=g) - 1.5 - shift)
    groups = torch.stack([dark, ~dark], 1)
    head = gmc.ThresholdHead(0.1, 0.01, ["dark", "bright"], num_classes=classes).fit(scores, masks, groups)
    found = scores <= head.threshold(groups).view(400, *([1] if classes is None else [classes]), 1, 1).view(*shape[:-2], 1, 1)
    risk = (found & masks).flatten(-2).sum(-1) / masks.flatten(-2).sum(-1)
    largest = (risk - 0.1).abs().amax(0).reshape(-1)
    assert head.tail.shape == (classes or 1,)
    assert bool((head.tail >= largest).all()) and bool((head.tail <= 1.6 * largest).all())
    again = gmc.ThresholdHead(0.1, 0.01, ["dark", "bright"], num_classes=classes)
    again.load_state_dict(head.state_dict())
    assert torch.equal(again.tail, head.tail) and len(head.reset() or head.tail) == 0


def images(n: int, seed: int, classes: int = 2) -> dict[str, torch.Tensor]:
    """Weighted images, some without a pixel, whose scores are lower in groups that have some of them in part."""
    g = torch.Generator().manual_seed(seed)
    groups, masks = torch.randint(3, (n, 3), generator=g) / 2, torch.rand(n, classes, 9, generator=g) < 0.3
    scores = torch.sigmoid(2.0 * masks + torch.randn(n, classes, 9, generator=g) - groups[:, :1, None]).double()
    return {"scores": scores, "masks": masks, "groups": groups, "weight": torch.rand(n, generator=g).double()}


@pytest.mark.parametrize("seed", range(4))
def test_few_scores_near_the_thresholds_say_what_all_say(seed: int, monkeypatch):
    """As of more than 32,768 images: those far from a threshold are counted, and the thresholds are those of all scores."""
    options = {"resolution": "exact", "fractional": True, "noise_floor": False, "num_classes": 2}
    every = gmc.ThresholdHead(0.2, 0.01, ["a", "b", "c"], **options).fit(**images(700, seed))
    monkeypatch.setattr("torchgmc.engine.folds.EXACT", 100)
    monkeypatch.setattr("torchgmc.engine.offsets.NEAR", 64)
    near = gmc.ThresholdHead(0.2, 0.01, ["a", "b", "c"], **options).fit(**images(700, seed))
    for name, want in every.state_dict().items():
        torch.testing.assert_close(near.state_dict()[name], want, rtol=0, atol=1e-9)
    torch.testing.assert_close(near.report.violations_after, every.report.violations_after, rtol=0, atol=1e-9)


def test_nobody_adds_nothing():
    head = gmc.ThresholdHead(0.2, 0.01, ["a", "b", "c"], num_classes=2, fractional=True, learn=gmc.Trees())
    head.observe(**images(20, 0), features=torch.randn(20, 2))
    seen = head.statistics
    none = seen.nobody()
    assert none.rows == int(none.examples) == int(none.excluded.sum()) == 0 and none.features.shape == (0, 2)
    for both in (vars(seen + none), vars(none + seen)):
        assert all(torch.equal(both[k], v) if isinstance(v, torch.Tensor) else both[k] == v for k, v in vars(seen).items())


def test_what_trees_see_of_an_image_does_not_depend_on_the_others():
    scores, masks = torch.rand(20_000, 48, generator=torch.Generator().manual_seed(0)), torch.ones(20_000, 48, dtype=torch.bool)
    found = []
    for some in (slice(None), slice(-500, None)):
        head = gmc.ThresholdHead(0.2, 0.01, resolution="exact")
        head.observe(scores[some], masks[some], weight=torch.linspace(0, 1, 20_000)[some].double())
        found.append([part[-500:] for part in head.statistics.sketch(32)])
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("resolution", [None, "exact"])
def test_the_variance_told_to_audits_counts_images_that_have_a_risk_whatever_they_weigh(resolution):
    data = images(600, 0)
    masks, groups, options = data["masks"], data["groups"] > 0, {"num_classes": 2, "resolution": resolution}
    masks[:200] = False  # these have none
    heads = {}
    for weight in (1.0, 100.0, 0.01):
        heads[weight] = gmc.ThresholdHead(0.2, 0.01, ["a", "b", "c"], **options)
        heads[weight].fit(data["scores"], masks, groups, torch.full((600,), weight))
        torch.testing.assert_close(heads[weight].variance, heads[1.0].variance, rtol=1e-5, atol=0)
    seen = masks.any(2)
    missed = (data["scores"] <= heads[1.0].threshold(groups)[..., None]) & masks
    s = missed.sum(2).double() / masks.sum(2) - 0.2
    want = [[float((s[:, k].square() * inside)[seen[:, k]].mean()) for k in range(2)] for inside in (*groups.T, torch.ones(600))]
    torch.testing.assert_close(heads[1.0].variance, torch.tensor(want).double().flatten(), rtol=0.25, atol=0)
    torch.testing.assert_close(heads[1.0].forget(0.5).calibrate().variance, heads[0.01].variance, rtol=1e-5, atol=0)
