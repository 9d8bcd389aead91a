"""Audits side by side."""

import pytest

import torchgmc as gmc
from gmctest.examples import cameras, threshold_data, two_audits


def test_audits_judged_by_different_alphas_say_so():
    probs, _, groups = cameras()
    heads = [gmc.QuantileHead(0.9, alpha, groups.names).fit(probs[:, 0], groups) for alpha in (0.01, 1.0)]
    ours, asis = (head.audit(probs[:, 0], groups) for head in heads)
    assert "promised alpha" in str(gmc.compare({"ours": ours, "as it is": asis})).replace("\n", " ")
    same = gmc.compare({"ours": ours, "as it is": gmc.audit(heads[1], (probs[:, 0], groups), alpha=0.01)})
    assert "promised alpha" not in str(same)


def test_the_top_of_a_page_with_several_heads_says_whose_certificate_it_shows(tmp_path):
    probs, _, groups = cameras()
    audits = {
        name: gmc.QuantileHead(0.9, 0.01, groups.names, init=init).fit(probs[:, 0], groups).audit(probs[:, 1], groups)
        for name, init in (("theirs", 0.1), ("ours", None))
    }
    page = gmc.compare(audits).to_html(tmp_path / "p.html").read_text()
    assert f"ours: {audits['ours'].certificate}" in page and f"theirs: {audits['theirs'].certificate}" not in page
    assert "ours: With" not in audits["ours"].to_html(tmp_path / "q.html").read_text()


def test_compare_side_by_side():
    audits = two_audits()
    both = gmc.compare(audits)
    assert set(both.table["group"]) == {"old", "<b>new</b>", "everyone"}
    for name, audit in audits.items():
        assert sorted(both.table[f"{name} estimate"]) == sorted(audit.table["estimate"])
        assert both.summary[name]["worst deviation"] == audit.max_violation
        assert both.summary[name]["accuracy after"] == audit.cost["accuracy after"]
    text = str(both)
    assert "conformal" in text and "old" in text and "certified alpha" in text and "accuracy after" in text
    assert "GMC" in both._repr_html_()
    with pytest.raises(ValueError, match="all conditional or all mass-weighted"):
        gmc.compare(audits | {"other": audits["GMC"].view("conditional")})
    with pytest.raises(TypeError, match="map names to audits"):
        gmc.compare([audits["GMC"]])


def test_compare_of_different_groups_leaves_gaps():
    data = threshold_data()
    alone = gmc.ThresholdHead(0.1, 0.01).fit(*data[:2])
    both = gmc.compare(two_audits() | {"everyone": alone.audit(*data[:2])})
    assert both.table["everyone estimate"].count(None) == 3 and "-" in str(both)
