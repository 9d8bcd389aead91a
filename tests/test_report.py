"""The HTML report of every head, with and without figures."""

import re
from pathlib import Path

import pytest
import torch

import torchgmc as gmc
from gmctest.heads_zoo import ENTRIES, NAMES
from gmctest.pages import NASTY, Balance
from torchgmc import report
from torchgmc.report import write, write_html


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without matplotlib: tables alone."""
    monkeypatch.setattr(report, "_can_draw", lambda: False)


def read(path: Path) -> Balance:
    parser = Balance()
    parser.feed(path.read_text(encoding="utf-8"))
    assert parser.open == [] and "script" not in parser.tags
    return parser


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("name", NAMES)
def test_every_head_has_a_report(name: str, tmp_path: Path) -> None:
    entry = ENTRIES[name]
    head = entry.fitted(80)
    audit = head.audit(*entry.data(90, 4).observe)
    path = audit.to_html(tmp_path / "r.html", head=head, settings={"command": "torchgmc calibrate", "seed": 7})
    text = read(path).text
    assert audit.certificate in text and type(head).__name__ in text
    for row in audit.rows():
        assert row["group"] in text and row["verdict"] in text
    for setting in ("command", "torchgmc calibrate", "seed", "versions", torch.__version__, "audited examples", *head.config()):
        assert setting in text, setting
    assert head.report is not None and head.report.message in text
    assert all(key in text for key in audit.cost)


def test_figures_are_there_in_both_themes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    entry = ENTRIES["tree"]
    head = entry.fitted(80)
    audit = head.audit(*entry.data(90, 4).observe)
    page = audit.to_html(tmp_path / "r.html", head=head, figures={"my own": lambda dark: audit.plot(dark=dark)}).read_text()
    assert page.count("<img") == page.count("(prefers-color-scheme: dark)") - 1 == 4  # deviation, own, tree, convergence
    for light, dark in zip(
        re.findall(r'<img src="([^"]+)"', page), re.findall(r'<source [^>]*srcset="([^"]+)"', page), strict=True
    ):
        assert light != dark and light.startswith("data:image/png;base64,iVBOR")


@pytest.mark.usefixtures("plain")
def test_names_of_groups_are_escaped(tmp_path: Path) -> None:
    entry = ENTRIES["threshold"]
    names = ["<script>alert(1)</script>", "a & b", '"quoted"']
    head = gmc.ThresholdHead(0.1, 0.02, names).fit(*entry.data(80, 0).observe)
    audits = {"<img src=x>": head.audit(*entry.data(80, 1).observe), "two": head.audit(*entry.data(80, 2).observe)}
    path = gmc.compare(audits).to_html(tmp_path / "r.html", head=head, settings={"<b>": "<i>"}, title=NASTY, lead=NASTY)
    parser = read(path)
    assert "img" not in parser.tags and "b" not in parser.tags and "i" not in parser.tags
    assert all(name in parser.text for name in (*names, *audits, "<b>", "<i>"))


@pytest.mark.usefixtures("plain")
def test_without_an_audit_the_page_says_so(tmp_path: Path) -> None:
    head = ENTRIES["quantile"].fitted(80)
    text = read(write(tmp_path / "r.html", None, head)).text
    assert "Nothing was audited" in text and "Calibration of QuantileHead" in text and "Every interval" not in text
    with pytest.raises(ValueError, match="nothing to report"):
        write(tmp_path / "n.html", None)
    assert not (tmp_path / "n.html").exists()


@pytest.mark.usefixtures("plain")
def test_the_card_follows_the_verdict_and_notes_are_shown(tmp_path: Path) -> None:
    from dataclasses import replace

    entry = ENTRIES["threshold"]
    audit = replace(entry.fitted(80).audit(*entry.data(200, 4).observe), note="mind the <gap>")
    for alpha, verdict in ((0.9, "holds"), (audit.max_violation, "undecided"), (1e-4, "violated")):
        page = audit.view("mass-weighted", alpha).to_html(tmp_path / "r.html").read_text()
        assert f'<div class="card {verdict}">' in page and '<p class="note">mind the &lt;gap&gt;</p>' in page
        assert "more examples would tell" not in page  # where no number would certify it, this is not said
        assert ("this may be chance" in page) == (verdict == "undecided")
        assert ("no number, if the population is as measured here" in page) == (verdict != "holds")
    within = audit.view("mass-weighted", (audit.max_violation + audit.certified_alpha) / 2)
    assert "undecided: more examples would tell" in within.to_html(tmp_path / "r.html").read_text()
    far = {**audit.table, "low": [0.5] * 3, "high": [0.6] * 3, "verdict": ["violated"] * 3}
    assert '<div class="card violated">' in replace(audit, table=far).to_html(tmp_path / "r.html").read_text()


@pytest.mark.usefixtures("plain")
def test_long_tables_and_settings_are_shortened_and_the_whole_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MOST_ROWS", 2)
    head = gmc.DistributionHead({"list": list(range(100))}, 0.01, ["a", "b", "c"])
    head.fit(torch.randn(40, 120), torch.rand(40, 3) < 0.7)
    audit = head.audit(torch.randn(40, 120), torch.rand(40, 3) < 0.7)
    text = read(audit.to_html(tmp_path / "r.html", head=head)).text
    assert "1 groups that deviate less are not shown" in text
    assert "see below" in text and " 99\n" in text  # the JSON has every token


@pytest.mark.usefixtures("plain")
def test_level_sets_are_folded_beneath_their_group_and_a_sentence_is_on_top(tmp_path: Path) -> None:
    probs, groups = torch.rand(400), torch.rand(400, 2) < 0.5
    y = torch.rand(400) < probs
    head = gmc.ProbabilityHead(0.9, ["a", "b"], bins=4).fit(probs[:200], y[:200], groups[:200])
    audit = head.audit(probs[200:], y[200:], groups[200:])
    page = audit.to_html(tmp_path / "r.html", head=head).read_text()
    measures = audit.measures()
    assert page.count("<details><summary>") == 4 + len(measures.names)  # and JSON
    beneath = re.findall(r'</td></tr><tr class="more"><td colspan="\d+"><details><summary>all 5 rows: 5 holds</summary>', page)
    assert len(beneath) == 3  # each group's level sets under its own row
    assert "<h2>Measures by group</h2>" in page and "<summary>ECCE of every group</summary>" in page
    assert f"{measures.mce['']['sigma']:.3g} sigmas" in page and f"{measures.difference()['recall']:.4f} (" in page
    assert "<strong>The promise is kept for all 3 groups: none is off by more than 0.9.</strong>" in page
    wrong = audit.view("mass-weighted", 1e-6)
    assert "too few to tell" in wrong.answer or "broken" in wrong.answer
    off = head.audit(probs[200:], torch.zeros(200, dtype=torch.bool), groups[200:]).view("mass-weighted", 0.05)
    assert off.answer.startswith("The promise is broken for 3 of 3 groups, most of all for 'everyone'")


def test_what_the_report_refuses(tmp_path: Path) -> None:
    audit = ENTRIES["quantile"].fitted(80).audit(*ENTRIES["quantile"].data(50, 1).observe)
    with pytest.raises(ValueError, match="`ours` must be one of 'x', got 'y'"):
        write(tmp_path / "r.html", {"x": audit}, ours="y")
    with pytest.raises(TypeError, match="an audit, a comparison or a mapping"):
        write(tmp_path / "r.html", [audit])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`verdict` must be one of"):
        write_html(tmp_path / "r.html", "t", "c", [], verdict="perhaps")
    assert list(tmp_path.iterdir()) == []
