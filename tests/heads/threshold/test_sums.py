"""Sums over small images against plain loops, and statistics that are added in place."""

import copy
import pickle

import pytest
import torch

import torchgmc as gmc
from torchgmc.engine.clusters import parts_of
from torchgmc.heads.threshold import problem as curves, sums


def plain(head, scores, masks, member, weight, pixels, keys):
    """Table of steps, masses and moments: one image, class and pixel after the other."""
    n, classes, m = scores.shape
    patterns = sorted({tuple(row) for row in member.tolist()})
    points, fold = head.lattice.points().to(scores.dtype), parts_of(keys, head.folds).tolist()
    coarse = curves.coarse(len(points), scores.device)[0].tolist()
    steps = torch.zeros(head.folds, len(patterns), classes, len(points), dtype=torch.float64)
    mass = torch.zeros(head.folds, len(patterns), classes, dtype=torch.float64)
    moments = torch.zeros(5, member.shape[1] + 1, classes, len(coarse), dtype=torch.float64)
    for i in range(n):
        cell, sets = patterns.index(tuple(member[i].tolist())), [*member[i].tolist(), True]
        for c in range(classes):
            wanted = [k for k in range(m) if bool(masks[i, c, k]) == head.risk.of_positives and pixels[i, c, k] > 0]
            total = sum(float(pixels[i, c, k]) for k in wanted)
            if not wanted:
                continue
            mass[fold[i], cell, c] += weight[i]
            curve = torch.zeros(len(points), dtype=torch.float64)
            for k in wanted:
                above = (points >= scores[i, c, k]).nonzero()
                if len(above):
                    curve[int(above[0])] += float(pixels[i, c, k]) / total
            steps[fold[i], cell, c] += weight[i] * curve
            risk = curve.cumsum(0)[coarse]
            for a in [a for a, inside in enumerate(sets) if inside]:
                for place, power in enumerate((0, 1, 2, 3, curves.LARGE)):
                    moments[place, a, c] += weight[i] ** 2 * risk**power
    return steps, mass, moments


@pytest.mark.parametrize(
    ("m", "classes", "options", "weighted"),
    [
        (9, 2, {}, False),
        (64, 1, {"risk": "fpr"}, False),
        (300, 1, {"resolution": 2.0**-9}, False),  # more than a byte counts
        (20, 3, {"logits": True, "range": (-1.0, 1.0), "resolution": 2.0**-6}, False),  # scores beyond the lattice
        (12, 2, {}, True),
        (40_000, 1, {"resolution": 2.0**-16}, False),  # more than 15 bits count
    ],
)
def test_sums_of_small_images_are_those_of_plain_loops(m, classes, options, weighted, monkeypatch):
    monkeypatch.setattr(sums, "RISKS", 65 * 4)  # several blocks
    n, g = 3 if m > 1000 else 60, torch.Generator().manual_seed(m)
    member, masks = torch.rand(n, 2, generator=g) < 0.5, torch.rand(n, classes, m, generator=g) < 0.3
    masks[0], masks[1] = False, True
    scores = torch.randn(n, classes, m, generator=g)
    scores = scores if options.get("logits") else scores.sigmoid()
    weight = torch.rand(n, generator=g, dtype=torch.float64) if weighted else torch.ones(n, dtype=torch.float64)
    pixels = (
        (3 * torch.rand(n, classes, m, generator=g, dtype=torch.float64)).floor() if weighted else torch.ones_like(scores).double()
    )
    if m > 1000:
        masks[:, :, 50:-50] = False  # few to loop over
        masks[2] = True
        scores[2] = 0.25
        masks[2, :, ::2] = False
    head = gmc.ThresholdHead(0.1, 0.01, ["a", "b"], num_classes=classes, **options)
    given = {"weight": weight, "pixel_weight": pixels} if weighted else {}
    batch = head.check_batch(scores, masks, member, **given)
    keys = torch.arange(n) * 12345
    if m > 1000:
        found = sums.sum_curves(head, batch._replace(scores=scores, masks=masks), head.lattice, keys)
        counts = masks.sum(-1)
        assert torch.equal(found.excluded, (counts == 0).sum(0))
        coarse = curves.coarse(head.lattice.size, scores.device)[0]
        points = head.lattice.points()[coarse].float()
        below = ((scores[..., None] <= points) & masks[..., None]).sum(2) / counts.clamp_min(1)[..., None].double()
        assert torch.allclose(found.moments[3, -1], (below**3).sum(0), rtol=1e-12, atol=0)
        return
    pixel = pixels if weighted else None
    found = sums.sum_curves(head, batch._replace(scores=scores, masks=masks, pixels=pixel), head.lattice, keys)
    steps, mass, moments = plain(head, scores, masks, member, weight, pixels, keys)
    if isinstance(found, curves.RiseStatistics):
        flat = torch.zeros(steps.numel(), dtype=torch.float64).index_add_(0, found.place, found.steps)
        assert torch.allclose(flat.view(steps.shape[-1], *steps.shape[:-1]).permute(1, 2, 3, 0), steps, rtol=0, atol=1e-12)
    else:
        assert torch.allclose(found.steps, steps, rtol=0, atol=1e-12)
    assert torch.allclose(found.mass, mass, rtol=1e-12, atol=0)
    assert torch.allclose(found.moments, moments, rtol=1e-12, atol=1e-15)


def batches(count):
    g = torch.Generator().manual_seed(0)
    member = (torch.arange(64)[:, None] >> torch.arange(2)) % 2 > 0
    return [(torch.rand(64, 4, 4, generator=g), torch.rand(64, 4, 4, generator=g) < 0.5, member) for _ in range(count)]


def test_batches_are_added_in_place_only_where_nobody_looks():
    head, data = gmc.ThresholdHead(0.1, 0.05, ["a", "b"]), batches(9)
    for one in data[:3]:
        head.observe(*one)
    table = head._parts[0].steps
    head.observe(*data[3])
    assert head._parts[0].steps is table  # nobody has seen it
    shared = {
        "statistics": lambda: head.statistics,
        "twin": lambda: head.twin()._parts[0],
        "now": lambda: head.now()._parts[0],
        "copy": lambda: copy.copy(head)._parts[0],
        "pickle": lambda: pickle.loads(pickle.dumps(head))._parts[0],
    }
    for one, look in zip(data[4:], shared.values(), strict=True):
        seen = look()
        before = copy.deepcopy(seen)
        head.observe(*one)
        head.observe(*one)
        head.observe(*one)
        for name in curves.CurveStatistics.layout:
            assert torch.equal(getattr(seen, name), getattr(before, name))
    again = gmc.ThresholdHead(0.1, 0.05, ["a", "b"])
    for one in [*data[:4], *(one for one in data[4:] for _ in range(3))]:
        again.observe(*one)
        assert again.statistics is not None  # so that nothing is added in place
    for name in curves.CurveStatistics.layout:
        assert torch.equal(getattr(head.statistics, name), getattr(again.statistics, name))


def test_batches_observed_in_inference_mode_and_outside():
    head, data = gmc.ThresholdHead(0.1, 0.05, ["a", "b"]), batches(9)
    for place, one in enumerate(data):
        with torch.inference_mode(place in (1, 2, 3, 6)):
            head.observe(*one)
    whole = gmc.ThresholdHead(0.1, 0.05, ["a", "b"])
    whole.observe(*(torch.cat(part) for part in zip(*data, strict=True)))
    assert torch.allclose(head.statistics.steps, whole.statistics.steps, rtol=0, atol=1e-12)
    assert torch.equal(head.calibrate().offsets, whole.calibrate().offsets)
