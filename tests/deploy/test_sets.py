"""Prediction sets and intervals as modules: against plain loops, per group and per class, and as files."""

import math

import pytest
import torch

import torchgmc as gmc
from torchgmc.conformity import SCORES, class_scores, covgap, sscv
from torchgmc.deploy.sets import similar_classes

FORMATS = ["torchscript", "torch.export", "onnx"]


def classes(n, count, seed=0):
    """A classifier that is better at some classes than at others; two groups that overlap, the second of them harder."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(count, (n,), generator=g)
    groups = torch.rand(n, 2, generator=g) < 0.5
    gain = torch.linspace(1.0, 5.0, count)[labels] - 1.0 * groups[:, 1]
    logits = torch.randn(n, count, generator=g) + gain[:, None] * torch.nn.functional.one_hot(labels, count)
    return logits, labels, groups


def head(**options):
    return gmc.QuantileHead(0.9, None, **({"groups": ["a", "b"], "finite_sample": True} | options))


@pytest.mark.parametrize("score", SCORES)
def test_scores_of_classes_against_a_loop(score):
    probs = classes(20, 6)[0].double().softmax(1)
    found = class_scores(probs, score, penalty=0.2, free=2)
    for row, got in zip(probs.tolist(), found.tolist(), strict=True):
        order = sorted(range(6), key=lambda c: -row[c])
        for rank, c in enumerate(order, 1):
            mass = sum(row[k] for k in order[:rank])
            want = {"lac": 1 - row[c], "aps": mass, "raps": mass + 0.2 * max(rank - 2, 0), "topk": rank}
            want["saps"] = row[order[0]] + 0.2 * (rank - 1)
            assert got[c] == pytest.approx(want[score])
    random = class_scores(probs, score, randomized=True, penalty=0.2, free=2)
    assert bool((random <= found).all()) and (score == "lac") == torch.equal(random, found)


@pytest.mark.parametrize("score", SCORES)
def test_sets_per_group(score):
    logits, labels, groups = classes(3000, 6)
    net = torch.nn.Softmax(1)
    sets = gmc.PredictionSets(net, head(), score=score).fit(logits[:1000], labels[:1000], groups[:1000])
    by_hand = head().fit(class_scores(net(logits[:1000]), score).gather(1, labels[:1000, None])[:, 0], groups[:1000])
    found = sets(logits[1000:], groups[1000:])
    assert found.dtype == torch.bool and found.shape == (2000, 6)
    assert torch.equal(found, class_scores(net(logits[1000:]), score).double() <= by_hand(groups[1000:])[:, None])
    assert torch.equal(gmc.PredictionSets(net, by_hand, score=score)(logits[1000:], groups[1000:]), found)  # a fitted head
    measures = sets.measure(logits[1000:], labels[1000:], groups[1000:])
    covered = found.gather(1, labels[1000:, None])[:, 0]
    assert measures["coverage"] == pytest.approx(float(covered.double().mean()))
    assert measures["mean size"] == pytest.approx(float(found.sum(1).double().mean()))
    for k, name in enumerate("ab"):
        assert measures["coverage by group"][name] == pytest.approx(float(covered[groups[1000:, k]].double().mean()))
        assert measures["coverage by group"][name] > 0.87
    assert sets.audit(logits[1000:], labels[1000:], groups[1000:]).num_examples == 2000


def test_measures_against_loops():
    labels = classes(500, 6)[1]
    covered, size = torch.rand(500) < 0.8, torch.randint(0, 12, (500,)).double()
    gaps = [abs(float(covered[labels == c].double().mean()) - 0.9) for c in range(6)]
    assert covgap(covered, labels, 0.9) == pytest.approx(sum(gaps) / 6)
    strata = [(-1, 1), (1, 3), (3, 10), (10, 100)]
    worst = max(abs(float(covered[(size > low) & (size <= high)].double().mean()) - 0.9) for low, high in strata)
    assert sscv(covered, size, 0.9) == pytest.approx(worst)


def test_class_conditional_is_split_conformal_in_every_class():
    logits, labels, _ = classes(600, 4)
    probs = logits.softmax(1)
    sets = gmc.PredictionSets(None, head(groups=None), score="lac", class_conditional=True).fit(probs, labels)
    for c in range(4):
        own = (1 - probs[labels == c, c]).double().sort().values
        q = own[math.ceil((len(own) + 1) * 0.9) - 1]
        assert torch.equal(sets(probs)[:, c], (1 - probs[:, c]).double() <= q)
    assert sets.head.groups == ["class 0", "class 1", "class 2", "class 3"]


def test_coverage_of_each_of_100_classes():
    """LAC leaves hard classes behind; thresholds per class, or per cluster of classes, do not."""
    logits, labels, _ = classes(20000, 100)
    probs, known, fresh = logits.softmax(1), slice(0, 8000), slice(8000, None)
    gap, least = {}, {}
    for name, options in {"LAC": {}, "classes": {}, "clusters": {"clusters": 8}}.items():
        sets = gmc.PredictionSets(None, head(groups=None), score="lac", class_conditional=name != "LAC", **options)
        covered = sets.fit(probs[known], labels[known])(probs[fresh]).gather(1, labels[fresh, None])[:, 0].double()
        gap[name] = sets.measure(probs[fresh], labels[fresh])["CovGap"]
        least[name] = min(float(covered[labels[fresh] == c].mean()) for c in range(100))
    assert gap["LAC"] > 0.06 and least["LAC"] < 0.7, (gap, least)
    assert all(gap[name] < 0.6 * gap["LAC"] and least[name] > least["LAC"] + 0.05 for name in ("classes", "clusters")), (
        gap,
        least,
    )


def test_classes_and_groups_at_once(tmp_path):
    logits, labels, groups = classes(6000, 10)
    probs, known, fresh = logits.softmax(1), slice(0, 3000), slice(3000, None)
    sets = gmc.PredictionSets(None, head(), score="lac", class_conditional=True)
    found = sets.fit(probs[known], labels[known], groups[known])(probs[fresh], groups[fresh])
    covered = found.gather(1, labels[fresh, None])[:, 0].double()
    member = torch.cat([groups[fresh], labels[fresh, None] == torch.arange(10)], 1).double()
    # A class has 300 examples in each half: a standard error of 0.017 for the fit and for the measurement, 0.025 together.
    assert float(((covered @ member) / member.sum(0)).min()) > 0.9 - 3.5 * 0.025
    plain = gmc.PredictionSets(None, head(), score="lac").fit(probs[known], labels[known], groups[known])
    missed = ~plain(probs[fresh], groups[fresh]).gather(1, labels[fresh, None])[:, 0]
    assert float(missed[labels[fresh] == 0].double().mean()) > 0.25
    again = gmc.load(gmc.save(sets.head, tmp_path / "h.safetensors"))  # the head brings the sets back
    again = gmc.PredictionSets(None, again, score="lac", class_conditional=True)
    assert torch.equal(again(probs[fresh], groups[fresh]), found)
    whole = torch.nn.ModuleDict({"sets": gmc.PredictionSets(None, head(), score="lac", class_conditional=True)})
    whole.load_state_dict(torch.nn.ModuleDict({"sets": sets}).state_dict())  # and so does a state dict
    assert torch.equal(whole["sets"](probs[fresh], groups[fresh]), found)
    broken = {name: v * torch.nan if v.is_floating_point() else v for name, v in whole.state_dict().items()}
    with pytest.raises(RuntimeError, match="cannot be loaded"):
        whole.load_state_dict(broken)
    assert torch.equal(whole["sets"](probs[fresh], groups[fresh]), found)


def test_clusters_of_classes_and_classes_without_examples():
    logits, labels, _ = classes(2000, 8)
    probs, labels = logits.softmax(1), labels.clamp_max(5)  # classes 6 and 7 do not occur
    given = gmc.PredictionSets(None, head(groups=None), class_conditional=True, clusters=[0, 0, 1, 1, 1, 2, 2, 0])
    given.fit(probs, labels)
    assert given.head.groups == ["classes 0, 1, 7", "classes 2, 3, 4", "classes 5, 6"]
    plain = gmc.PredictionSets(None, head(groups=None), class_conditional=True).fit(probs, labels)
    assert bool(plain(probs)[:, 6:].all()) and not bool(plain(probs)[:, :6].all())
    scores = torch.cat([torch.rand(50) + 5 * (c >= 2) for c in range(4)])
    assert similar_classes(scores, torch.arange(4).repeat_interleave(50), 5, 2).tolist() == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("torchscript", {"score": "raps"}),
        ("torch.export", {"score": "aps", "randomized": True}),
        *((format, {"score": "saps", "class_conditional": True}) for format in FORMATS),
    ],
)
def test_sets_as_files(format, options, tmp_path):
    logits, labels, groups = classes(400, 5)
    net = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Softmax(1)).eval()
    sets = gmc.PredictionSets(net, head(), **options).fit(logits, labels, groups)
    path = sets.export(tmp_path / "sets.bin", format=format, example_inputs=(logits[:3], groups[:3]))
    assert gmc.export.metadata(path)["outputs"] == ["sets"]


@pytest.mark.parametrize("format", FORMATS)
def test_intervals(format, tmp_path):
    g = torch.Generator().manual_seed(0)
    x, groups = torch.randn(3000, 2, generator=g), torch.rand(3000, 2, generator=g) < 0.5
    y = x[:, 0] + torch.randn(3000, generator=g) * (0.5 + groups[:, 1])
    nets = {"absolute": torch.nn.Linear(2, 1), "normalised": torch.nn.Linear(2, 2), "cqr": torch.nn.Linear(2, 2)}
    with torch.no_grad():
        for net in nets.values():
            net.weight.copy_(torch.tensor([[1.0, 0.0]]).expand(net.out_features, 2))
            net.bias.zero_()
        nets["normalised"].weight[1].zero_()
        nets["normalised"].bias[1] = 2.0
        nets["cqr"].bias.copy_(torch.tensor([-0.5, 0.5]))
    for kind, net in nets.items():
        module = gmc.Intervals(net, head(), score=kind).fit(x[:1000], y[:1000], groups[:1000])
        ends = module(x[1000:], groups[1000:])
        q = module.head(groups[1000:])
        scale = {"absolute": q, "normalised": 2 * q, "cqr": q + 0.5}[kind].float()
        torch.testing.assert_close(ends, torch.stack([x[1000:, 0] - scale, x[1000:, 0] + scale], 1))
        measures = module.measure(x[1000:], y[1000:], groups[1000:])
        assert min(measures["coverage by group"].values()) > 0.87 and measures["mean width"] > 1
        assert 0 <= measures["SSCV"] < 1
    auto = gmc.Intervals(nets["cqr"], head()).fit(x[:1000], y[:1000], groups[:1000])
    torch.testing.assert_close(auto(x[1000:], groups[1000:]), ends)
    path = auto.export(tmp_path / "intervals.bin", format=format, example_inputs=(x[:3], groups[:3]))
    assert gmc.export.metadata(path)["outputs"] == ["interval"]


@pytest.mark.parametrize("by_class", [False, True])
def test_one_row_of_groups_for_each_output(by_class):
    logits, labels, groups = classes(400, 3)
    probs = logits.softmax(1)
    sets = gmc.PredictionSets(None, head(), class_conditional=by_class).fit(probs, labels, groups)
    ends = gmc.Intervals(None, head()).fit(logits[:, 0], labels, groups)
    beside = gmc.attach(torch.nn.Identity(), head().fit(probs[:, 0], groups))
    for model, given in ((sets, probs), (ends, logits[:, 0]), (beside, probs[:, 0])):
        for wrong in (groups[:1], groups[:-1], torch.cat([groups, groups[:1]])):
            with pytest.raises(ValueError, match=f"`groups` has {len(wrong)} rows"):
                model(given, wrong)


@pytest.mark.parametrize("outputs", [1, 2])
def test_intervals_of_no_rows_and_outcomes_that_do_not_fit(outputs, tmp_path):
    net, x, y = torch.nn.Linear(2, outputs), torch.randn(200, 2), torch.randn(200)
    module = gmc.Intervals(net, gmc.QuantileHead(0.9, None)).fit(x, y[:, None])
    assert module(x[:0]).shape == (0, 2) and module.measure(x, y[:, None]) == module.measure(x, y)
    path = module.export(tmp_path / "intervals.pt", example_inputs=(x[:3],))
    assert torch.jit.load(path)(x[:0]).shape == (0, 2)
    missing = y.clone()
    missing[3] = math.nan
    for wrong in (missing, y[:-1], torch.randn(200, 2), torch.randn(1, 200)):
        for work in (module.fit, module.measure):
            with pytest.raises(ValueError, match=r"`y` must hold 200 outcomes, .* and no NaN, got shape"):
                work(x, wrong)


def test_errors():
    logits, labels, groups = classes(50, 5)
    probs = logits.softmax(1)
    for make, message in (
        (lambda: gmc.PredictionSets(None, gmc.ProbabilityHead(0.1)), "`head` must be a QuantileHead"),
        (lambda: gmc.PredictionSets("net", head()), "`model` must be an nn.Module"),
        (lambda: gmc.PredictionSets(None, head(finite_sample=False, bins=3)), "without `bins`"),
        (lambda: gmc.PredictionSets(None, head(), score="best"), "`score` must be one of 'lac'"),
        (lambda: gmc.PredictionSets(None, head(), clusters=3), "pass class_conditional=True"),
        (lambda: gmc.PredictionSets(None, head()).fit(logits, labels, groups), "rows that sum to 1.*softmax"),
        (lambda: gmc.PredictionSets(None, head()).fit(logits.sigmoid(), labels, groups), "multilabel=True"),
        (lambda: gmc.PredictionSets(None, head())(probs, groups), "not fitted"),
        (lambda: gmc.PredictionSets(None, head(), class_conditional=True)(probs, groups), "not fitted"),
        (
            lambda: gmc.PredictionSets(None, head().fit(probs[:, 0], groups), class_conditional=True),
            "class_conditional=True needs a head that is not fitted yet",
        ),
        (lambda: gmc.Intervals(None, head(), score="absolute").fit(probs, labels, groups), r"shape \(n, 1\)"),
        (lambda: gmc.Intervals(None, head(), "normalised").fit(-probs[:, :2], labels, groups), "must be above 0"),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
            make()


def test_clusters_of_classes_whose_rows_are_equal(monkeypatch):
    """A quarter of the equal rows of a class finds the clusters, the others the thresholds; their order does not matter."""
    labels = torch.arange(12).repeat_interleave(100)
    probs = (3.0 * torch.nn.functional.one_hot(labels, 12)).softmax(1)
    groups, order = torch.arange(1200)[:, None] % 7 < torch.tensor([3, 5]), torch.arange(1200).flip(0)
    seen = []
    monkeypatch.setattr("torchgmc.deploy.sets.similar_classes", lambda *a: seen.append(a[1]) or similar_classes(*a))
    sets, again = (gmc.PredictionSets(None, head(), score="lac", class_conditional=True, clusters=3) for _ in range(2))
    sets.fit(probs, labels, groups)
    counts = torch.bincount(seen[0], minlength=12)
    assert int(counts.sum()) == 300 and int(counts.min()) >= 12 and int(counts.max()) <= 38  # 25, and three of its deviations
    again.fit(probs[order], labels[order], groups[order])
    assert again.head.groups == sets.head.groups and torch.equal(again.by_class.table, sets.by_class.table)
