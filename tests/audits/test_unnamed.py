"""Groups named in the audit only: what features explain of their deviation, and what remains."""

import math

import pytest
import torch

import torchgmc as gmc


def draw(n, seed, leak=1.5):
    """Outcomes depend on a group; a feature is related to it."""
    g = torch.Generator().manual_seed(seed)
    group = torch.rand(n, 2, generator=g) < 0.5
    x = leak * group[:, :1] + torch.randn(n, 1, generator=g)
    probs = 0.2 + 0.4 * torch.rand(n, generator=g)
    y = torch.rand(n, generator=g) < probs - 0.15 + 0.3 * group[:, 0]
    return {"probs": probs, "y": y, "features": x}, group


@pytest.fixture(scope="module")
def head():
    return gmc.ProbabilityHead(alpha=None, learn=gmc.Trees(depth=1)).fit(**draw(4000, 0)[0])


def test_the_table_is_that_of_plain_means(head):
    data, group = draw(1500, 1)
    found = gmc.audit_named(head, data, group, ["a", "b"])
    f = head(data["probs"], features=data["features"])
    for row in found.rows():
        inside = group[:, ["a", "b"].index(row["group"])]
        before, after = (float((p - data["y"].float())[inside].mean()) for p in (data["probs"], f))
        assert row["before"] == pytest.approx(before, abs=1e-6) and row["after"] == pytest.approx(after, abs=1e-6)
        assert row["count"] == int(inside.sum()) and row["before low"] < before < row["before high"]
        if row["group"] == "a":
            assert row["explained"] == pytest.approx(1 - after / before, abs=1e-4)
            assert row["explained low"] < row["explained"] < row["explained high"]
        else:  # nothing to explain
            assert math.isnan(row["explained"])
    assert [row["group"] for row in found.rows()] == ["a", "b"]
    text = str(found)
    assert "a " in text and " %" in text and "1500 examples" in text


def test_the_intervals_hold_for_all_at_once(head):
    data, group = draw(400_000, 99)
    s = [p - data["y"].float() for p in (data["probs"], head(data["probs"], features=data["features"]))]
    means = [[float(one[group[:, k]].mean()) for one in s] for k in range(2)]
    truth = [
        {"group": name, "before": b, "after": a, "explained": 1 - a / b} for name, (b, a) in zip(("a", "b"), means, strict=True)
    ]
    missed = 0
    for seed in range(20):
        rows = {r["group"]: r for r in gmc.audit_named(head, *draw(400, 10 + seed), ["a", "b"], delta=0.2).rows()}
        bad = False
        for true in truth:
            row = rows[true["group"]]
            bad |= any(not row[f"{k} low"] <= true[k] <= row[f"{k} high"] for k in ("before", "after"))
            if not math.isnan(row["explained low"]):
                bad |= not row["explained low"] <= true["explained"] <= row["explained high"]
        missed += bad
    assert missed <= 8  # of 20, at 20 %
    assert 0.2 < next(r for r in truth if r["group"] == "a")["explained"] < 0.9


def test_features_that_know_nothing_explain_nothing():
    data, _ = draw(3000, 3, leak=0.0)
    blind = gmc.ProbabilityHead(alpha=None, learn=gmc.Trees(depth=1)).fit(**data)
    row = next(r for r in gmc.audit_named(blind, *draw(3000, 4, leak=0.0), ["a", "b"]).rows() if r["group"] == "a")
    assert abs(row["explained"]) < 0.2 and row["explained low"] < 0.05 and row["after low"] < row["after"] < -0.1


def test_thresholds_are_compared_with_a_baseline():
    def scores(n, seed):
        g = torch.Generator().manual_seed(seed)
        group = torch.rand(n, 1, generator=g) < 0.5
        return {"scores": torch.randn(n, generator=g).abs() * (1 + 2 * group[:, 0]), "features": group + 0.1}, group

    data, group = scores(2000, 0)
    head = gmc.QuantileHead(target=0.8, alpha=None, learn=gmc.Trees(depth=1)).fit(**data)
    with pytest.raises(ValueError, match="before"):
        gmc.audit_named(head, data, group)
    plain = gmc.baselines.SplitConformal(target=0.8).fit(data["scores"])
    fresh, who = scores(2000, 1)
    (row,) = gmc.audit_named(head, fresh, torch.rand(2000, 1) * who, before=plain).rows()  # fractional
    assert row["group"] == "0" and row["before"] < -0.08 and abs(row["after"]) < 0.05 and row["explained"] > 0.5


def test_level_sets_and_classes():
    g = torch.Generator().manual_seed(0)
    probs, y = torch.rand(600, 3, generator=g).softmax(1), torch.randint(3, (600,), generator=g)
    head = gmc.ProbabilityHead(alpha=None, num_classes=3, bins=4).fit(probs[:300], y[:300])
    group = torch.rand(300, 1, generator=g) < 0.5
    found = gmc.audit_named(head, (probs[300:], y[300:]), gmc.Groups.from_columns({"sex": group[:, 0].tolist()}))
    assert {r["what"] for r in found.rows()} == {"class 0", "class 1", "class 2"} and len(found.rows()) == 6


def test_errors(head):
    data, group = draw(100, 5)
    with pytest.raises(ValueError, match="no examples"):
        gmc.audit_named(head, data, group & False)
    with pytest.raises(ValueError, match="names"):
        gmc.audit_named(head, data, group, ["a"])
    with pytest.raises(ValueError, match="from 0 to 1"):
        gmc.audit_named(head, data, 3 * group.float())
    with pytest.raises(ValueError, match="same"):
        other = gmc.ProbabilityHead(alpha=None, num_classes=2).fit(torch.rand(50, 2).softmax(1), torch.randint(2, (50,)))
        gmc.audit_named(head, data, group, before=other)
    with pytest.warns(UserWarning, match="calibrat"):
        assert gmc.audit_named(head, *draw(4000, 0)).note
