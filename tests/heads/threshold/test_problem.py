"""Curves of many combinations of groups: the points at which they rise, against tables and plain loops."""

import math

import pytest
import torch

import torchgmc as gmc
from torchgmc.groups.cells import shared_patterns
from torchgmc.heads.threshold.problem import CurveStatistics, RiseStatistics

NAMES = ["a", "b", "c", "d"]


def images(n=60, pixels=(12,), seed=0):
    g = torch.Generator().manual_seed(seed)
    masks = torch.rand(n, *pixels, generator=g) < 0.5
    masks[3] = False  # an image without a relevant pixel
    groups = torch.rand(n, 4, generator=g) < 0.5
    return torch.randn(n, *pixels, generator=g) * 3 + masks * 2, masks, groups


def parts(head, *data, size=17):
    """A head that saw the data in batches."""
    for batch in zip(*(t.split(size) for t in data), strict=True):
        head.observe(*batch)
    return head


@pytest.mark.parametrize(
    ("options", "pixels", "more"),
    [
        ({}, (12,), {}),
        ({"noise_floor": False, "conditional": True}, (12,), {}),
        ({"risk": "fpr"}, (3, 4), {}),
        ({"num_classes": 2}, (2, 9), {}),
        ({"finite_sample": True}, (12,), {}),
        ({"noise_floor": False, "resolution": 1.0}, (50,), {}),  # more pixels than points of the lattice
        ({"noise_floor": False}, (12,), {"solver": "paper", "max_iter": 40, "eta": 0.5}),
    ],
)
def test_points_are_the_table(monkeypatch, options, pixels, more):
    data = images(pixels=pixels)
    options = {"target": 0.2, "alpha": 0.03, "groups": NAMES, "range": (-4.0, 4.0)} | options  # some scores lie beyond
    monkeypatch.setattr("torchgmc.heads.threshold.sums.TABLE", 1 << 30)
    table = gmc.ThresholdHead(**options).fit(*data, **more)
    assert type(table.statistics) is CurveStatistics
    monkeypatch.setattr("torchgmc.heads.threshold.problem.MAX_ELEMENTS", 1)
    points = gmc.ThresholdHead(**options).fit(*data, **more)
    assert type(points.statistics) is RiseStatistics
    for name, want in table.state_dict().items():
        torch.testing.assert_close(points.state_dict()[name], want, rtol=0, atol=1e-12)
    for name in ("violations_before", "violations_after"):
        torch.testing.assert_close(getattr(points.report, name), getattr(table.report, name), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("pixels", "step"), [((12,), 0.5), ((50,), 0.5), ((200,), 0.05)])
@pytest.mark.parametrize("kind", ["probabilities", "equal", "weights"])
def test_statistics_are_those_of_plain_loops(pixels, step, kind):
    scores, masks, groups = images(n=30, pixels=pixels)
    weight = torch.rand(30, generator=torch.Generator().manual_seed(1)).double() + 0.5
    weight[5] = 0.0  # seen, and left out
    weight = weight if kind == "weights" else weight.new_ones(30)
    scores, span = (scores, (-4.0, 4.0)) if kind != "probabilities" else (torch.sigmoid(scores), None)
    step = step if span else step / 8
    head = gmc.ThresholdHead(0.2, 0.03, NAMES, range=span, resolution=step, noise_floor=False)
    head.observe(scores, masks, groups, weight)
    found, points = head.statistics, head.lattice.points().tolist()
    steps, moments = torch.zeros(found.steps[0, :, 0].shape).double(), torch.zeros(5, 5).double()
    for i in range(30):
        relevant = [float(h) for h, positive in zip(scores[i], masks[i], strict=True) if positive]
        cell = next(k for k in range(len(found.member)) if torch.equal(found.member[k], groups[i]))
        for h in relevant:
            for k, point in enumerate(points):
                if h <= point and (k == 0 or h > points[k - 1]):
                    steps[cell, k] += float(weight[i]) / len(relevant)
        if relevant:
            middle = head.lattice.points()[torch.linspace(0, len(points) - 1, 65).round().long()][40]
            risk = sum(h <= middle for h in relevant) / len(relevant)
            for place, power in enumerate((0, 1, 2, 3, 16)):
                moments[place] += float(weight[i]) ** 2 * risk**power * torch.tensor([*groups[i].tolist(), True])
    torch.testing.assert_close(found.steps[0, :, 0], steps)
    torch.testing.assert_close(found.moments[:, :, 0, 40], moments)


def test_batches_merges_files_and_clusters(monkeypatch, tmp_path):
    data = (*images(n=80, seed=2), torch.ones(80), torch.arange(80) // 2)
    options = {"target": 0.2, "alpha": 0.03, "groups": NAMES, "logits": True}
    want = gmc.ThresholdHead(**options).fit(*data)
    monkeypatch.setattr("torchgmc.heads.threshold.problem.MAX_ELEMENTS", 5 * 10 * 4098)  # tables of up to 10 combinations
    monkeypatch.setattr("torchgmc.heads.threshold.sums.TABLE", 5 * 4 * 4098)
    late = parts(gmc.ThresholdHead(**options), *(t[43:] for t in data), size=4)
    with pytest.warns(UserWarning, match="a row of statistics"):
        gmc.save(late, tmp_path / "late.safetensors", statistics=True)
    head = parts(gmc.ThresholdHead(**options), *(t[:43] for t in data)).merge(gmc.load(tmp_path / "late.safetensors"))
    assert isinstance(head.statistics, RiseStatistics) and head.statistics.clusters is not None
    torch.testing.assert_close(head.calibrate().state_dict(), want.state_dict(), rtol=0, atol=1e-12)
    half = gmc.ThresholdHead(**options).fit(*data[:3], data[3] / 2, data[4])
    torch.testing.assert_close(head.forget(0.5).calibrate().state_dict(), half.state_dict(), rtol=0, atol=1e-12)
    broken = head.statistics
    broken.place[-1] = 1 << 40
    with pytest.warns(UserWarning):
        gmc.save(head, tmp_path / "broken.safetensors", statistics=True)
    with pytest.raises(ValueError, match="place"):
        gmc.load(tmp_path / "broken.safetensors")


def test_memory_of_many_combinations_grows_with_scores_not_with_tables():
    g = torch.Generator().manual_seed(0)
    n, names = 2000, [f"g{k}" for k in range(50)]
    masks, groups = torch.rand(n, 8, generator=g) < 0.5, torch.rand(n, 50, generator=g) < 0.5
    head = parts(gmc.ThresholdHead(0.1, 0.05, names), torch.rand(n, 8, generator=g), masks, groups, size=200)
    kept = sum(getattr(head.statistics, name).nbytes for name in ("member", "steps", "mass", "place"))
    assert len(head.statistics.member) == n and kept <= n * (50 + 5 * 8 + 16 * 8)  # a table has 164 kB an image


def scattered(n, classes, dtype, seed=0):
    """Scores with ties and ends at infinity; an image without a pixel, one of many; a combination and a class without scores."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(-4, 5, (n, classes, 6), generator=g).to(dtype) / 4
    scores[0, :, 0], scores[1, :, :2] = 8.0, -8.0  # see `endless`
    masks = torch.rand(n, classes, 6, generator=g) < 0.5
    masks[2], masks[:, -1] = False, masks[:, -1] & (torch.arange(n) > n - 4)[:, None]
    groups = torch.rand(n, 2, generator=g) < 0.5
    groups[2], groups[groups.all(1)] = True, torch.tensor([True, False])  # nobody else is in both
    return scores, masks, groups, torch.rand(n, generator=g).double()


def endless(statistics):
    """With infinity in place of 8, in place: heads check that scores are finite."""
    statistics.scores[statistics.scores.abs() == 8] *= math.inf
    return statistics


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float64, False), (torch.float32, False), (torch.float64, True)])
def test_risks_of_every_score_are_those_of_plain_loops(dtype, apart, monkeypatch):
    scores, masks, groups, weight = scattered(40, 2, dtype)
    data, options = (scores, masks, groups, weight), {"num_classes": 2, "resolution": "exact", "range": (-9.0, 9.0)}
    head = gmc.ThresholdHead(0.3, 0.05, ["a", "b"], **options)
    head.observe(*data)
    cell, patterns = (torch.arange(40), groups) if apart else shared_patterns(groups)
    head.keeps_apart = apart
    problem = head.problem_of(endless(head.statistics))
    scores = torch.where(scores.abs() == 8, scores * math.inf, scores)
    tables = [torch.full((len(patterns), 2), at, dtype=torch.float64) for at in (-math.inf, -1.0, 0.1, 0.25, 1.0, math.inf)]
    tables.append(torch.arange(2.0 * len(patterns)).double().view(-1, 2).remainder(9).sub(4) / 4)
    for at in tables:
        want = torch.zeros(len(patterns), 2).double()
        for i in range(40):
            for k in range(2):
                mine = [float(h) for h, positive in zip(scores[i, k], masks[i, k], strict=True) if positive]
                below = sum(h <= float(at[cell[i], k]) for h in mine)
                want[cell[i], k] += float(weight[i]) * below / max(len(mine), 1)
        torch.testing.assert_close(problem.risk_at(at), want, rtol=0, atol=1e-12)
    if not apart:  # sums of ranks, one of which has no score
        total = torch.zeros_like(want)
        for rows in (slice(0, 2), slice(2, 3), slice(3, 40)):
            part = gmc.ThresholdHead(0.3, 0.05, ["a", "b"], **options)
            part.observe(*(t[rows] for t in data))
            monkeypatch.setattr("torchgmc.heads.threshold.problem.shared_patterns", lambda _, rows=rows: (cell[rows], patterns))
            total += part.problem_of(endless(part.statistics)).risk_at(tables[-1])
        torch.testing.assert_close(total, want, rtol=0, atol=1e-12)


def test_one_large_image_does_not_make_the_cells_of_all_others_large():
    groups = torch.arange(500)[:, None] >> torch.arange(9) & 1 > 0  # 500 combinations
    head = gmc.ThresholdHead(0.1, 0.05, [f"g{k}" for k in range(9)], resolution="exact")
    for pixels in (3, 20_000):  # the last of them once more, larger
        rows = slice(0 if pixels == 3 else 499, 500)
        scores = torch.rand(len(groups[rows]), pixels, generator=torch.Generator().manual_seed(0))
        head.observe(scores, torch.ones_like(scores) > 0, groups[rows])
    problem = head.problem_of(head.statistics)
    kept = sum(part.nbytes for part in vars(problem).values() if isinstance(part, torch.Tensor))
    assert kept < 1e6  # a table of cells x pixels has 80 MB, twice
