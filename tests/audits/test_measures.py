"""Named measures against plain loops, against mcgrad and its published cases, and how often their intervals hold."""

import math

import pytest
import torch

import torchgmc as gmc
from torchgmc.audits import measures
from torchgmc.audits.measures import Estimate, calibration_errors, ecce_pvalue, range_quantile

#: Scores, labels, weights, ECCE and ECCE in sigmas, as published with mcgrad's tests.
PUBLISHED = [
    ([0.6, 0.8, 0.2, 0.4], [0, 1, 0, 1], None, 0.15, 0.67082),
    ([0.6, 0.8, 0.2, 0.4], [1, 1, 1, 1], None, 0.5, 2.23607),
    ([0.6, 0.8, 0.2, 0.4], [0, 1, 0, 0], None, 0.3, 1.34164),
    ([0.6, 0.8, 0.2, 0.4], [0, 1, 0, 0], [0.4, 0.3, 0.2, 0.1], 0.32, 1.289317),
    ([0.0, 0.0, 0.0, 0.0], [0, 1, 0, 0], None, 0.25, math.inf),
    ([1.0, 1.0, 1.0, 1.0], [0, 1, 0, 0], None, 0.75, math.inf),
]


def errors(p, y, who=None, weight=None, cluster=None, delta=0.05):
    p, y = (torch.as_tensor(v, dtype=torch.float64) for v in (p, y))
    who = torch.ones(len(p), 1) if who is None else who
    weight = torch.ones(len(p)).double() if weight is None else torch.as_tensor(weight, dtype=torch.float64)
    cluster = torch.zeros(len(p), 0, dtype=torch.int64) if cluster is None else cluster[:, None]
    return calibration_errors(p, y, who, weight, cluster, delta)


@pytest.mark.parametrize("scores, labels, weight, ecce, sigma", PUBLISHED)
def test_ecce_is_the_worst_violation_over_intervals_of_p_and_as_published(scores, labels, weight, ecce, sigma):
    found = errors(scores, labels, weight=weight)[0]
    assert float(found["ECCE"][0]) == pytest.approx(ecce, abs=1e-12)
    assert float(found["ECCE in sigmas"][0]) == pytest.approx(sigma, abs=1e-5)
    p = torch.tensor(scores, dtype=torch.float64)
    s = p - torch.tensor(labels)
    ends = [-1.0, *sorted(set(scores))]
    intervals = [(p > a) & (p <= b) for i, a in enumerate(ends) for b in ends[i + 1 :]]
    w = None if weight is None else torch.tensor(weight, dtype=torch.float64)
    worst = gmc.violations(torch.stack(intervals, 1), s[:, None], weight=w).abs().max()  # the search kernel itself
    assert float(worst) == pytest.approx(ecce, abs=1e-12)


def test_mcgrad_says_the_same():
    mcgrad = pytest.importorskip("mcgrad.metrics")
    g = torch.Generator().manual_seed(0)
    p, w = torch.rand(500, generator=g).double(), torch.rand(500, generator=g).double() + 0.5
    y, who = torch.rand(500, generator=g) < p**1.3, torch.rand(500, 2, generator=g) < 0.4
    found, overall = errors(p, y, torch.cat([torch.ones(500, 1).bool(), who], 1), w)
    for k, rows in enumerate([torch.ones(500).bool(), who[:, 0], who[:, 1]]):
        theirs = y[rows].double().numpy(), p[rows].numpy(), w[rows].numpy()
        assert float(found["ECCE"][0, k]) == pytest.approx(mcgrad.ecce(*theirs), rel=1e-9)
        assert float(found["ECCE in sigmas"][0, k]) == pytest.approx(mcgrad.ecce_sigma(*theirs), rel=1e-9)
        assert float(found["ECCE p-value"][0, k]) == pytest.approx(mcgrad.ecce_pvalue(*theirs), rel=1e-6, abs=1e-12)
    everyone = mcgrad._ecce_standard_deviation(p.numpy(), sample_weight=w.numpy())
    assert overall["detectable"] == pytest.approx(5 * everyone) and overall["sigma"] == float(found["ECCE in sigmas"][0].max())
    assert overall["absolute"] == pytest.approx(overall["sigma"] * everyone)


def test_the_range_of_brownian_motion():
    steps = torch.randn(20_000, 2000, generator=torch.Generator().manual_seed(0)) / 2000**0.5
    walk = steps.cumsum(1)
    ranges = walk.amax(1).clamp_min(0) - walk.amin(1).clamp_max(0)
    for x in (1.0, 1.6, 2.4):
        assert ecce_pvalue(x) == pytest.approx(float((ranges > x - 0.02).double().mean()), abs=0.02)
    assert ecce_pvalue(range_quantile(0.01)) == pytest.approx(0.01) and ecce_pvalue(9.0) < 1e-12 < 1 == ecce_pvalue(0.0)


def test_binned_and_smooth_errors_by_the_loop():
    g = torch.Generator().manual_seed(1)
    p = torch.rand(300, generator=g).double()
    y = (torch.rand(300, generator=g) < p**2).double()
    found = errors(p, y)[0]
    binned = sum(abs(float(((y - p) * ((p * 10).long() == b)).sum())) for b in range(10)) / 300
    assert float(found["ECE"][0]) == pytest.approx(binned)
    h, t = float(found["smooth ECE"][0]), torch.linspace(0, 1, 801).double()
    kernel = sum(torch.exp(-0.5 * ((t[:, None] - image) / h) ** 2) / (h * math.sqrt(2 * math.pi)) for image in (p, -p, 2 - p))
    smooth = float(torch.trapezoid((kernel * (y - p)).mean(1).abs(), t))
    assert smooth == pytest.approx(h, rel=0.02)  # the error at its own width is that width


def test_intervals_hold():
    """Of a model that is off by 4 points in the middle; with clusters of five equal outcomes too."""
    g = torch.Generator().manual_seed(2)
    missed, draws = {"ECE": 0, "smooth ECE": 0, "ECCE": 0}, 60

    def population(n, groups):
        p = torch.rand(n, generator=g).double()
        chance = p + 0.08 * ((p > 0.3) & (p < 0.8))
        y = (torch.rand(n, generator=g) < chance).double()
        return (v.repeat_interleave(groups) for v in (p, y))

    truth = {"ECE": 0.04, "ECCE": 0.04, "smooth ECE": float(errors(*population(400_000, 1))[0]["smooth ECE"][0])}
    for draw in range(draws):
        groups = 5 if draw % 2 else 1
        p, y = population(500, groups)
        found = errors(p, y, cluster=torch.arange(500).repeat_interleave(groups) if groups > 1 else None, delta=0.1)[0]
        for name in missed:
            _, low, high = found[name][:, 0].tolist()
            missed[name] += not low <= truth[name] <= high
    assert max(missed.values()) <= 12  # expected at most 6; 12 has probability 0.01


def test_measures_of_heads_by_group():
    g = torch.Generator().manual_seed(3)
    p, groups = torch.rand(2000, generator=g), torch.rand(2000, 2, generator=g) < 0.5
    y = torch.rand(2000, generator=g) < p
    head = gmc.ProbabilityHead(0.05, groups=["a", "b"], bins=None).fit(p[:1000], y[:1000], groups[:1000])
    audit = head.audit(p[1000:], y[1000:], groups[1000:])
    found = audit.measures()
    f, t, a = head(p[1000:], groups[1000:]) >= 0.5, y[1000:], groups[1000:, 0]
    assert found["recall"]["a"] == pytest.approx(float(f[a & t].double().mean()))
    assert found["precision"]["a"] == pytest.approx(float(t[a & f].double().mean()))
    assert found["FPR"]["b"] == pytest.approx(float(f[groups[1000:, 1] & ~t].double().mean()))
    assert all(e.low <= e <= e.high for e in found["FNR"].values()) and set(found["ECE"]) == {"a", "b", "everyone"}
    recalls = found["recall"].values()
    difference = found.difference()["recall"]
    assert difference == pytest.approx(max(recalls) - min(recalls)) and difference.low <= difference <= difference.high
    assert found.ratio()["recall"] == pytest.approx(min(recalls) / max(recalls)) and "ECCE p-value" not in found.ratio()
    assert audit.difference().low <= audit.difference() <= audit.difference().high <= 1.0 and audit.ratio().high <= 1.0
    assert found.mce[""]["sigma"] == max(found["ECCE in sigmas"].values())
    with pytest.raises(ValueError, match="must be one of"):
        found["F1"]
    masks = torch.rand(60, 6, 6, generator=g) < 0.4
    scores = torch.sigmoid(2.0 * masks + torch.randn(60, 6, 6, generator=g))
    threshold = gmc.ThresholdHead(0.1, 0.05).fit(scores[:30], masks[:30])
    seen = threshold.audit(scores[30:], masks[30:])
    drawn = threshold(scores[30:])
    share = [float((m & d).sum() / d.sum()) for m, d in zip(masks[30:], drawn, strict=True)]
    assert seen.measures()["precision"]["all"] == pytest.approx(sum(share) / 30)
    assert seen.measures()["FNR"]["all"] == pytest.approx(seen.table["risk"][0])
    quantile = gmc.QuantileHead(0.9, 0.05).fit(torch.rand(100, generator=g))
    assert set(quantile.audit(torch.rand(50, generator=g)).measures().names) == {"coverage", "threshold"}
    tree = gmc.TreeHead([4, 4, 5, 5, 6, 6, -1], 0.8, 0.05)
    probs, labels = torch.rand(80, 4, generator=g).softmax(1), torch.randint(0, 4, (80,), generator=g)
    sizes = tree.fit(probs, labels).audit(probs + 1e-6 * torch.rand(80, 4, generator=g), labels).measures()["set size"]
    assert all(1.0 <= e.low <= e.high <= 4.0 for e in sizes.values() if e == e)


def test_ends_of_differences_and_ratios():
    found = [Estimate(0.2, 0.1, 0.3), Estimate(0.5, 0.4, 0.6)]
    low, value, high = measures.difference(found).low, measures.difference(found), measures.difference(found).high
    assert (low, value, high) == pytest.approx((0.1, 0.3, 0.5))
    share = measures.ratio(found)
    assert (share.low, share, share.high) == pytest.approx((0.1 / 0.6, 0.4, 0.75))
