"""`gmc.audit` over batches, both views, examples needed, side by side, files."""

import json
import sys

import pytest
import torch

import torchgmc as gmc
from gmctest.examples import cameras, threshold_data, two_audits
from gmctest.heads_zoo import ZOO
from gmctest.tables import rows_of, summarize
from torchgmc.audits.audit import Audit

ENTRIES = list(ZOO)


def cut(tensors, sizes):
    return list(zip(*(t.split(sizes) for t in tensors), strict=True))


def same(one, two):
    """Equal to rounding, g by g; rows of equal |estimate| may come in another order."""
    assert (one.alpha, one.delta, one.conditional, one.num_examples, one.excluded, one.name, one.note) == (
        two.alpha,
        two.delta,
        two.conditional,
        two.num_examples,
        two.excluded,
        two.name,
        two.note,
    )
    assert one.cost == pytest.approx(two.cost, abs=1e-9, nan_ok=True)
    first, second = ({(r["group"], r["what"]): r for r in audit.rows()} for audit in (one, two))
    assert first.keys() == second.keys()
    for key, row in first.items():
        assert row.keys() == second[key].keys()
        for name, value in row.items():
            expected = second[key][name]
            assert value == (expected if isinstance(expected, str) else pytest.approx(expected, abs=1e-9, nan_ok=True)), name


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.name for entry in ENTRIES])
def test_batches_are_the_whole(entry):
    head = entry.fitted()
    data = entry.data(90, 5).observe
    whole = head.audit(*data)
    same(gmc.audit(head, cut(data, [40, 1, 49])), whole)
    same(gmc.audit(head, iter(cut(data, [30, 30, 30]))), whole)
    same(gmc.audit(head, data), whole)
    same(gmc.audit(head, list(data)), whole)
    other = gmc.audit(head, data, conditional=not whole.conditional, alpha=0.5)
    assert other.conditional is not whole.conditional and other.alpha == 0.5
    kind = "conditional" if whole.conditional else "mass-weighted"
    same(other.view(kind, whole.alpha), whole if whole.alpha else whole.view(kind, 0.5))


def test_a_group_absent_from_one_batch_is_fine_and_absent_from_all_is_refused():
    scores, masks, groups = threshold_data(60)
    head = gmc.ThresholdHead(0.1, 0.01, ["a", "b"]).fit(scores, masks, groups)
    groups = groups.clone()
    groups[:30, 1] = False
    groups[30:, 1] = True
    same(gmc.audit(head, cut((scores, masks, groups), 30)), head.audit(scores, masks, groups))
    with pytest.raises(ValueError, match="group 'b' has no examples"):
        gmc.audit(head, cut((scores[:30], masks[:30], groups[:30]), 15))


def test_weights_and_names_of_arguments():
    scores, masks, groups = threshold_data(60)
    weight = torch.rand(60) + 0.1
    head = gmc.ThresholdHead(0.1, 0.01, ["a", "b"]).fit(scores, masks, groups)
    whole = head.audit(scores, masks, groups, weight=weight)
    same(gmc.audit(head, cut((scores, masks, groups, weight), 25)), whole)
    same(gmc.audit(head, {"scores": scores, "masks": masks, "groups": groups, "weight": weight}), whole)


def test_the_views_by_the_loop():
    data = threshold_data()
    head = gmc.ThresholdHead(0.1, 0.01, ["old", "new"]).fit(*data)
    audit = gmc.audit(head, data)
    missed = (data[1] & ~head(data[0], data[2])).sum((1, 2)) / data[1].sum((1, 2))
    member = torch.cat([data[2], torch.ones_like(data[2][:, :1])], 1)
    for row in audit.view("conditional").rows():
        inside = member[:, ["old", "new", "everyone"].index(row["group"])]
        own = sum(float(r) - 0.1 for r, is_in in zip(missed, inside, strict=True) if is_in) / int(inside.sum())
        assert row["estimate"] == pytest.approx(own, abs=1e-6)
        weighted = next(r for r in audit.rows() if r["group"] == row["group"])
        assert weighted["estimate"] == pytest.approx(own * float(inside.double().mean()), abs=1e-6)


@pytest.mark.slow
def test_examples_needed_certify_with_the_chance_they_say():
    """60 draws of so many examples from the audited rows themselves: about 80 % of them certify."""
    rng = torch.Generator().manual_seed(0)
    who = torch.rand(3000, 3, generator=rng) < torch.tensor([1.0, 0.5, 0.2])
    s = 0.3 * torch.rand(3000, generator=rng).double() ** 3 - 0.074
    audit = summarize(who, s, 0.01, bounds=(-0.075, 0.925))
    need = audit.examples_needed(0.008)
    assert need is not None and need.chance == 0.8 and need.low <= need and (need.high is None or need <= need.high)
    found = 0
    for _ in range(60):
        rows = torch.randint(3000, (int(need),), generator=rng)
        found += summarize(who[rows], s[rows], 0.008, bounds=(-0.075, 0.925)).certified
    assert 38 <= found <= 60, (need, found)


def test_examples_needed_rise_with_the_wish_and_with_the_chance():
    data = threshold_data()
    head = gmc.ThresholdHead(0.1, 0.2, ["old", "new"]).fit(*data)
    audit = gmc.audit(head, data)
    wish = audit.max_violation + 0.8 * (audit.certified_alpha - audit.max_violation)
    need = audit.examples_needed(wish)
    assert need is not None and need > 300 and audit.examples_needed(audit.max_violation / 2) is None
    assert audit.examples_needed(2 * wish) < need < audit.examples_needed(wish, chance=0.95)
    assert "chance of 80 %" in str(need) and f"{need:d}" == str(int(need))
    with pytest.raises(ValueError, match="`chance`"):
        audit.examples_needed(wish, chance=1.5)


@pytest.mark.parametrize("solver", ["exact", "paper"])
def test_level_sets_have_a_row_for_all_of_them_together(solver):
    """Whatever the solver: level sets that are off a little each make a group that is far off."""
    rng = torch.Generator().manual_seed(0)
    scores, groups = torch.rand(800, generator=rng), torch.rand(800, 2, generator=rng) < 0.5
    options = {"solver": solver, **({} if solver == "exact" else {"eta": 0.05, "max_iter": 5})}
    heads = [
        (gmc.QuantileHead(0.8, 0.05, ["a", "b"], bins=3), (scores, groups)),
        (gmc.ProbabilityHead(0.05, ["a", "b"], bins=4), (scores, torch.rand(800, generator=rng) < scores, groups)),
        (
            gmc.ProbabilityHead(0.05, ["a", "b"], bins=2, num_classes=3),
            (torch.rand(800, 3, generator=rng).softmax(1), torch.randint(3, (800,), generator=rng), groups),
        ),
    ]
    for head, data in heads:
        audit = head.fit(*(t[:400] for t in data), **options).audit(*(t[400:] for t in data))
        for name in {row["group"] for row in audit.rows()}:
            rows = [row for row in audit.rows() if row["group"] == name]
            means = [row for row in rows if "all levels" in row["what"]]
            assert len(means) == (3 if isinstance(head, gmc.ProbabilityHead) and head.per_class else 1)
            for mean in means:
                parts = [r for r in rows if r not in means and r["what"].split(", class")[1:] == mean["what"].split(", class")[1:]]
                assert mean["estimate"] == pytest.approx(sum(r["estimate"] for r in parts), abs=1e-9)


def test_difference_and_ratio_of_the_risks():
    who = torch.tensor([[True, False, False], [True, False, False], [False, True, False], [False, True, False]])
    audit = summarize(who, torch.tensor([0.1, 0.3, 0.4, 0.6]).double(), 0.1)  # risks 0.2, 0.5, and nobody
    assert audit.difference() == pytest.approx(0.3) and audit.ratio() == pytest.approx(0.4)


def test_merging_parts_gives_the_whole_and_refuses_others():
    data, names = threshold_data(200, 3), ["old", "new"]
    head = gmc.ThresholdHead(0.1, 0.05, names).fit(*threshold_data())
    parts = [head.audit(*part) for part in cut(data, [50, 80, 70])]
    same(parts[0].merge(*parts[1:]), head.audit(*data))
    same(parts[0].view("conditional", 0.2).merge(*parts[1:]), head.audit(*data).view("conditional", 0.2))
    other = gmc.ThresholdHead(0.1, 0.05, names).fit(*threshold_data(120, 9)).audit(*data)
    with pytest.raises(ValueError, match="same fitted head"):
        parts[0].merge(other)
    with pytest.raises(ValueError, match="same delta"):
        parts[0].merge(head.audit(*data, delta=0.2))
    with pytest.raises(TypeError, match="must be audits, got dict"):
        parts[0].merge({})
    with pytest.raises(ValueError, match="from a table"):
        parts[0].merge(Audit(parts[0].table, 0.05, 0.05, False, 50))


def test_clusters_count_once():
    data = threshold_data(200, 3)
    head = gmc.ThresholdHead(0.1, 0.05, ["old", "new"]).fit(*threshold_data())
    ids = [f"patient {k // 4}" for k in range(200)]
    plain, counted = head.audit(*data), head.audit(*data, clusters=ids, cluster_size=4)
    assert counted.table["estimate"] == pytest.approx(plain.table["estimate"]) and counted.note == plain.note
    assert counted.certified_alpha > plain.certified_alpha * 1.05  # 50 draws, not 200
    alone = head.audit(*data, clusters=list(range(200)), cluster_size=1)
    assert alone.table["estimate"] == pytest.approx(plain.table["estimate"])
    guess = head.audit(*data, clusters=ids)
    assert "largest cluster was taken from these data" in guess.note and guess.certified_alpha == counted.certified_alpha
    with pytest.raises(ValueError, match="`cluster_size` must bound every cluster, got 3, but one has 4"):
        head.audit(*data, clusters=ids, cluster_size=3)
    with pytest.raises(ValueError, match="with every batch"):
        whole = dict(zip(("scores", "masks", "groups"), data, strict=True))
        gmc.audit(head, [whole, whole | {"clusters": ids}])


def test_values_beyond_their_range_are_refused():
    who, s = torch.ones(5, 1).bool(), torch.tensor([0.0, 0.1, 0.2, 0.3, 0.9]).double()
    rows = rows_of(who, s, (-0.4, 0.6))
    with pytest.raises(ValueError, match="s must lie in its range, -0.4 to 0.6, but it is 0.9"):
        rows.check_range()


def test_files(tmp_path):
    audits = two_audits()
    audit = audits["GMC"]
    found = json.loads(audit.to_json(tmp_path / "a.json").read_text())
    assert found["table"] == json.loads(json.dumps(audit.table)) and found["certificate"] == audit.certificate
    assert found["cost"] == audit.cost and found["certified"] is audit.certified
    page = audit.to_html(tmp_path / "a.html").read_text()
    assert audit.certificate in page and "&lt;b&gt;new" in page and "<b>" not in page
    both = gmc.compare(audits)
    assert json.loads(both.to_json(tmp_path / "b.json").read_text()).keys() == audits.keys()
    page = both.to_html(tmp_path / "b.html").read_text()
    assert "Side by side" in page and "conformal" in page and "certified alpha" in page
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.html", "a.json", "b.html", "b.json"]


def test_json_has_no_nan(tmp_path):
    who = torch.tensor([[True, False]] * 5)
    audit = summarize(who, torch.zeros(5), 0.1, conditional=True, bounds=(0.0, 1.0))
    found = json.loads(audit.to_json(tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert None in found["table"]["risk"] and audit.examples_needed() is None
    empty = audit.rows()[1]
    assert empty["verdict"] == "undecided" and (empty["low"], empty["high"]) == (0.0, 1.0) and audit.certified_alpha == 1.0


def test_pandas():
    pandas = pytest.importorskip("pandas")
    audits = two_audits()
    frame = audits["GMC"].to_pandas()
    assert isinstance(frame, pandas.DataFrame) and list(frame["group"]) == audits["GMC"].table["group"]
    assert len(gmc.compare(audits).to_pandas()) == 3


def test_without_pandas_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    audits = two_audits()
    for table in (audits["GMC"], gmc.compare(audits)):
        with pytest.raises(ImportError, match="not installed: pip install pandas$"):
            table.to_pandas()


def test_what_is_refused():
    data = threshold_data(40)
    head = gmc.ThresholdHead(0.1, 0.01, ["a", "b"]).fit(*data)
    with pytest.raises(TypeError, match="`head` must be a head or a baseline, got Tensor"):
        gmc.audit(data[0], data)
    with pytest.raises(ValueError, match="no batch"):
        gmc.audit(head, [])
    with pytest.raises(TypeError, match="`batches` must be an iterable of batches.*got Tensor"):
        gmc.audit(head, data[0])
    with pytest.raises(TypeError, match="batch 0 of `batches` must be a tuple"):
        gmc.audit(head, iter([data[0]]))
    with pytest.raises(ValueError, match="`delta`"):
        gmc.audit(head, data, delta=2)
    audit = gmc.audit(head, data)
    with pytest.raises(ValueError, match="`kind` must be one of"):
        audit.view("own")
    with pytest.raises(ValueError, match="`alpha`"):
        audit.examples_needed(-1.0)
    with pytest.raises(ValueError, match="only from a table"):
        Audit(audit.table, 0.1, 0.05, False, 40).view("conditional")


def test_short_on_a_terminal():
    audits = two_audits()
    text = repr(audits["GMC"])
    assert text.startswith("Audit(") and len(text) < 200 and f"n = {audits['GMC'].num_examples}" in text
    assert text in repr(gmc.compare(audits))


def test_a_long_audit_prints_its_worst_rows_with_names_one_can_tell_apart():
    probs, y, groups = cameras()
    audit = gmc.ProbabilityHead(alpha=0.01, groups=groups.names, num_classes=3).fit(probs, y, groups).audit(probs, y, groups)
    lines = str(audit).splitlines()
    assert len(audit.rows()) > 100 and len(lines) < 50
    assert any("more with smaller estimates: all are in `audit.table`" in line for line in lines)
    names = [line.split("  ")[0] for line in lines[1:40]]
    assert len(set(names)) == len(names) and any("camera=front & hour=night / all levels" in name for name in names)


def test_an_audit_names_target_and_risk_and_counts_promises():
    probs, y, groups = cameras()
    thresholds = gmc.QuantileHead(0.9, 0.05, groups.names).fit(probs[:, 0], groups).audit(probs[:, 1], groups)
    assert "of each of 9 groups is within" in thresholds.certificate and "of the target 0.9 in" in thresholds.certificate
    head, first, *_ = str(thresholds).splitlines()
    assert head.split()[:4] == ["group", "mass", "risk", "estimate"] and f" {thresholds.table['risk'][0]:.4f} " in first
    events = gmc.ProbabilityHead(0.01, groups.names, bins=3).fit(probs[:, 0], y == 0, groups)
    assert "of each of 36 promises is within" in events.audit(probs[:, 0], y == 0, groups).certificate


def test_audit_of_a_head_and_how_it_reads():
    rng = torch.Generator().manual_seed(2)
    masks = torch.rand(300, 8, 8, generator=rng) < 0.4
    scores = torch.sigmoid(2 * masks + torch.randn(300, 8, 8, generator=rng) - 1)
    groups = torch.rand(300, 2, generator=rng) < 0.5
    head = gmc.ThresholdHead(0.1, 0.01, ["old", "<b>new</b>"]).fit(scores, masks, groups)
    audit = head.audit(scores, masks, groups)
    assert audit.holds and set(audit.cost) == {"accuracy before", "accuracy after"}
    predicted = head(scores, groups)
    assert audit.cost["accuracy after"] == pytest.approx(float((predicted == masks).double().mean()))
    assert audit.cost["accuracy before"] == pytest.approx(float(((scores > 0.5) == masks).double().mean()))
    missed = (masks & ~predicted).sum((1, 2)) / masks.sum((1, 2))
    assert dict(zip(audit.table["group"], audit.table["risk"], strict=True))["old"] == pytest.approx(
        float(missed[groups[:, 0]].double().mean())
    )
    text, html = str(audit), audit._repr_html_()
    assert "old" in text and "undecided" in text and "accuracy after" in text
    assert "&lt;b&gt;" in html and "<b>" not in html and "undecided" in html
    assert audit.rows()[0]["group"] == audit.table["group"][0]
