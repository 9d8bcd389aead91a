"""What is made of the rows of all seeds, against NumPy."""

import csv
import io

import numpy as np
import pytest

from torchgmc_paper import tables
from torchgmc_paper.tables import WORST, summarize


def made_up_rows(seeds=8, part=""):
    random = np.random.default_rng(0)
    rows = []
    for seed in range(seeds):
        for method, size in (("GMC", 0.01), ("conformal", 0.1)):
            for measure_ in ("mass", "conditional"):
                for group in ("a", "b"):
                    value = float(random.normal(scale=size))
                    missing = measure_ == "conditional" and group == "b" and seed == 0
                    rows.append(
                        {
                            "seed": seed,
                            "part": part,
                            "method": method,
                            "measure": measure_,
                            "group": group,
                            "deviation": None if missing else value,
                            "risk": 0.5,
                            "mass": 0.4,
                            "calibration": 0.001,
                            "noise": 0.002,
                            "noise_fitted": 0.003,
                            "worst_noise": 0.004,
                            "cost": {"accuracy": 0.9 + 0.001 * seed},
                        }
                    )
    return rows


def test_summary_is_numpys():
    rows = made_up_rows()
    summary = summarize(rows, ["GMC", "conformal"], ["GMC"], alpha=0.02)

    def values(method, measure_, group):
        found = [r["deviation"] for r in rows if (r["method"], r["measure"], r["group"]) == (method, measure_, group)]
        return np.array([np.nan if v is None else v for v in found])

    for row in summary.groups:
        if row["group"] == WORST:
            both = np.abs([values(row["method"], row["measure"], g) for g in "ab"])
            size = np.nanmax(both, 0)
            assert row["noise"] == pytest.approx(0.004)
        else:
            signed = values(row["method"], row["measure"], row["group"])
            size = np.abs(signed[~np.isnan(signed)])
            assert row["signed"] == pytest.approx(np.nanmean(signed))
        expected = [len(size), size.mean(), size.std(ddof=1), size.std(ddof=1) / len(size) ** 0.5, (size > 0.02).mean()]
        assert [row[k] for k in ("seeds", "mean", "sd", "se", "beyond")] == pytest.approx(expected)
    pair = next(row for row in summary.pairs if row["measure"] == "mass")
    worst = {m: np.max(np.abs([values(m, "mass", g) for g in "ab"]), 0) for m in ("GMC", "conformal")}
    difference = worst["conformal"] - worst["GMC"]
    assert pair["mean"] == pytest.approx(difference.mean())
    assert pair["se"] == pytest.approx(difference.std(ddof=1) / 8**0.5)
    assert (pair["ours"], pair["other"], pair["verdict"]) == ("GMC", "conformal", "ours smaller")
    cost = summary.costs[0]
    assert cost["mean"] == pytest.approx(0.9035) and cost["seeds"] == 8


def test_a_difference_within_two_standard_errors_is_undecided():
    rows = [dict(row, deviation=0.01 * (1 + (row["seed"] + (row["method"] == "GMC")) % 2)) for row in made_up_rows()]
    (mass, _) = summarize(rows, ["GMC", "conformal"], ["GMC"], 0.02).pairs
    assert mass["mean"] == pytest.approx(0) and mass["verdict"] == "undecided"
    rows = [
        dict(row, deviation=row["deviation"] and row["deviation"] * (9 if row["method"] == "GMC" else 0.1))
        for row in made_up_rows()
    ]
    assert summarize(rows, ["GMC", "conformal"], ["GMC"], 0.02).pairs[0]["verdict"] == "ours larger"


def test_one_seed_has_no_standard_error():
    summary = summarize(made_up_rows(1), ["GMC", "conformal"], ["GMC"], 0.02)
    assert all(row["se"] is None for row in summary.groups) and summary.pairs[0]["verdict"] == "undecided"
    assert "GMC" in tables.brief(summary, "title")


def test_cells_of_csv_files_are_not_formulas():
    """Names of groups come from data; a spreadsheet runs what begins with =, +, -, @ or a tab."""
    names = ["=1+1", "+a", "-b", "@c", "\td", "-1+2", "f"]
    text = tables._csv([{"group": name, "estimate": -0.25, "count": -3} for name in names]).decode()
    rows = list(csv.reader(io.StringIO(text, newline="")))[1:]
    assert [row[0] for row in rows] == [f"'{name}" for name in names[:-1]] + ["f"]
    assert all(row[1:] == ["-0.25", "-3"] for row in rows)  # numbers stay numbers
