"""Promises on fresh data: verdicts by their definition, a tiny run that resumes, and pages that are what was measured."""

import json
import math

import pytest

pytest.importorskip("pandas")
from benchmarks import fresh
from gmctest import ROOT


def test_verdicts_are_at_two_standard_errors_of_paired_differences():
    ours = {str(s): {"worst group": 0.1 + 0.01 * s} for s in range(4)}
    other = {str(s): {"worst group": 0.1 + 0.01 * s + (0.02 if s % 2 else 0.03)} for s in range(4)} | {"9": {"worst group": 0.0}}
    difference, error, seeds = fresh.paired(ours, other, "worst group")
    assert seeds == 4 and difference == pytest.approx(-0.025)
    assert error == pytest.approx(math.sqrt(4 * 0.005**2 / 3) / 2)
    assert fresh.verdict(difference, error) == "better" and fresh.verdict(-difference, error) == "WORSE"
    assert fresh.verdict(difference, 0.02) == "level" and fresh.verdict(0.1, math.nan) == "?"


def test_the_page_and_the_readme_show_the_figures_that_are_kept():
    done = json.loads(fresh.RESULTS.read_text(encoding="utf-8"))
    assert fresh.RESULTS.with_suffix(".md").read_text(encoding="utf-8") == fresh.page(done)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert fresh.in_readme(done, readme) == readme


def test_a_run_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    made = []

    def make(name, seed):
        made.append(seed)
        rows = {"member": [[True]] * 8, "value": [seed] * 8}
        return fresh.Split(rows, rows)

    def method(shift):
        return lambda rows: lambda new: new["value"][0] + shift

    methods = {"ours": method(0.0), "simple": method(1.0)}
    part = fresh.Part("T", "about", ("a",), make, methods, lambda rows, out: {"x": out}, ("x",), ("simple",), {}, (4,))
    monkeypatch.setattr(fresh, "PARTS", {"t": part})
    monkeypatch.setattr(fresh, "SECTIONS", {})
    path = tmp_path / "fresh.json"
    for seeds in ("2", "3", "3"):
        assert fresh.main(["--seeds", seeds, "--results", str(path)]) == 0
    assert made == [0, 1, 2]  # each split once
    kept = json.loads(path.read_text())["t"]["a"]["4"]
    assert [kept["ours"][s]["x"] for s in "012"] == [0.0, 1.0, 2.0] and kept["simple"]["2"]["x"] == 3.0
    fresh.main(["--seeds", "3", "--results", str(path), "--again", "ours"])
    assert made == [0, 1, 2, 0, 1, 2]
    page = path.with_suffix(".md").read_text()
    assert "| t | x | untouched | best simple | 2 | 0 | 0 |" in page  # n = 4, and all 8
    assert "| simple | 2 / 0 / 0 | 2 / 0 / 0 |" in page and "| every other | 2 / 0 / 0 | 2 / 0 / 0 |" in page


def test_a_cell_is_as_good_as_its_worst_verdict():
    seeds = [str(s) for s in range(5)]

    def cell(**shifts):
        noise = {"a": 0.0, "b": 0.1, "c": 0.0}
        return {m: {s: {"x": v + noise.get(m, 0.0) * (-1) ** int(s)} for s in seeds} for m, v in shifts.items()}

    part = fresh.Part("T", "", ("one", "two"), None, dict.fromkeys(("ours", "ours, b", "a", "b", "c")), None, ("x",), ("a",), {})
    kept = {
        "one": {"all": cell(ours=1.0, a=2.0, b=1.0) | {"ours, b": cell(a=0.0)["a"]}},  # behind its own kind: that is no peer
        "two": {"100": cell(ours=1.0, a=2.0, b=3.0), "all": cell(ours=1.0, a=2.0, c=0.5)},
    }
    counts = fresh.part_page(part, kept)[1]
    assert counts[True, "x", fresh.EVERY] == ["level", "better", "WORSE"]
    assert counts[True, "x", "best simple"] == ["better"] * 3 and counts[True, "x", "ours, b"] == ["WORSE"]
    assert fresh.tally(counts[True, "x", fresh.EVERY]) == ["1", "1", "1"]


def test_group_tables():
    import numpy as np

    member = np.array([[True, True], [True, False], [False, False]] * 60)
    values = np.array([0.3, -0.1, 0.1] * 60)
    assert fresh.worst(values, member) == pytest.approx(0.1)  # the second group is too small to be measured
    assert fresh.worst(values, member, mass=True) == pytest.approx(0.1)
    assert fresh.some_groups(np.array([[True, False, True], [True, False, False]])).tolist() == [2]
