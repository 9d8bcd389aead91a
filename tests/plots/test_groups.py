"""Figures by group: what is drawn is a plain recount, what is refused is named."""

import math
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch

import torchgmc as gmc
from gmctest.figures import is_png, legend, ticks
from gmctest.heads_zoo import ENTRIES, GROUPS
from torchgmc import plots

pytestmark = pytest.mark.usefixtures("no_pyplot")


def audit(groups: list[str], estimates: list[float], mass: list[float], what: list[str] | None = None) -> gmc.Audit:
    table: dict[str, list[Any]] = {
        "group": groups,
        "what": what or [""] * len(groups),
        "mass": mass,
        "count": [10] * len(groups),
        "risk": [0.1] * len(groups),
        "estimate": estimates,
        "low": [v - 0.01 for v in estimates],
        "high": [v + 0.01 for v in estimates],
        "verdict": ["undecided"] * len(groups),
    }
    return gmc.Audit(table, alpha=0.005, delta=0.05, conditional=False, num_examples=10)


@pytest.mark.parametrize("dark", [False, True])
def test_deviation_aligns_audits_whose_rows_are_in_another_order(dark: bool) -> None:
    one = audit(["a", "b"], [0.02, 0.01], [0.2, 0.9])
    two = audit(["b", "a"], [0.0, -0.003], [0.9, 0.2])
    figure = plots.deviation({"conformal": one, "GMC": two}, alpha=0.004, title="Title", dark=dark)
    assert ticks(figure.axes[0]) == ["b  (90 %)", "a  (20 %)"]
    assert legend(figure) == ["promised: within 0.004", "conformal", "GMC"]
    points = {c.get_label(): c.lines[0].get_xdata().tolist() for c in figure.axes[0].containers}
    assert points == {"conformal": [0.01, 0.02], "GMC": [0.0, -0.003]}
    assert is_png(figure)


def test_deviation_of_one_audit_takes_its_alpha_and_leaves_out_empty_groups() -> None:
    figure = audit(["a", "none"], [0.02, math.nan], [0.2, 0.0]).plot()
    assert ticks(figure.axes[0]) == ["a  (20 %)"]
    assert "promised: within 0.005" in legend(figure)


def test_deviation_names_classes() -> None:
    figure = plots.deviation({"x": audit(["a", "a"], [0.0, 0.1], [0.5, 0.5], ["cat", "dog"])})
    assert ticks(figure.axes[0]) == ["a / cat  (50 %)", "a / dog  (50 %)"]


def test_deviation_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one audit"):
        plots.deviation({})


def test_a_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "torchgmc\[report\]"'):
        plots.deviation({"x": audit(["a"], [0.0], [1.0])})


@pytest.mark.parametrize("name", ["threshold", "threshold-exact", "conformal", "quantile", "quantile-bins"])
def test_thresholds_are_those_of_the_head_by_combination(name: str) -> None:
    entry = ENTRIES[name]
    head: Any = entry.fitted()
    member = entry.data(80, 0).observe[-1]
    counts: dict[tuple[bool, ...], int] = {}
    for row in member.tolist():
        counts[tuple(row)] = counts.get(tuple(row), 0) + 1
    axes = plots.thresholds(head).axes[0]
    shown = dict(zip(ticks(axes), axes.lines[0].get_xdata().tolist(), strict=True))
    assert len(shown) == len(counts)
    find = head.threshold if hasattr(head, "threshold") else head
    for row, count in counts.items():
        label = " + ".join(g for g, inside in zip(GROUPS, row, strict=True) if inside and g != "a") or "a"  # all are in "a"
        value = float(find(torch.tensor([row]))[0])
        assert shown[f"{label}  ({100 * count / 80:.0f} %)"] == pytest.approx(value)
    assert sorted(counts.values(), reverse=True) == [
        counts[(True, *(g in tick.split("  ")[0].split(" + ") for g in GROUPS[1:]))] for tick in ticks(axes)
    ]


def test_thresholds_of_given_examples_of_a_loaded_head_and_of_several() -> None:
    entry = ENTRIES["threshold"]
    head: Any = entry.fitted()
    groups = torch.tensor([[True, True, False]] * 3 + [[True, False, False]])
    axes = plots.thresholds(head, groups).axes[0]
    assert ticks(axes) == ["b  (75 %)", "a  (25 %)"]
    assert ticks(plots.thresholds(head, groups, top=1).axes[0]) == ["a + b  (75 %)"]
    assert "1 rarer" in plots.thresholds(head, groups, top=1).axes[0].get_xlabel()
    fresh = gmc.ThresholdHead(0.1, 0.02, GROUPS)
    fresh.load_state_dict(head.state_dict())
    assert ticks(plots.thresholds(fresh).axes[0]) == GROUPS  # no examples known: each group by itself
    figure = plots.thresholds({"one": head, "two": fresh}, groups)
    assert [line.get_label() for line in figure.axes[0].lines] == ["one", "two"]
    assert figure.axes[0].lines[0].get_xdata().tolist() == figure.axes[0].lines[1].get_xdata().tolist()


def test_thresholds_of_classes_have_a_row_each() -> None:
    head: Any = ENTRIES["threshold-classes"].fitted()
    groups = torch.tensor([[True, False, False]])
    axes = plots.thresholds(head, groups).axes[0]
    assert ticks(axes) == ["a / class 0  (100 %)", "a / class 1  (100 %)"]
    assert axes.lines[0].get_xdata().tolist() == pytest.approx(head.threshold(groups)[0].tolist())


def test_an_infinite_threshold_is_named() -> None:
    head = gmc.QuantileHead(0.9, 0.05).fit(torch.rand(50))
    head.base.fill_(math.inf)
    assert "∞" in [t.get_text() for t in plots.thresholds(head).axes[0].texts]


def test_thresholds_of_another_head_are_refused() -> None:
    with pytest.raises(TypeError, match="of masks, of quantiles\\), got ProbabilityHead"):
        plots.thresholds(gmc.ProbabilityHead(0.1))
    with pytest.raises(ValueError, match="at least one head"):
        plots.thresholds({})


def test_deviation_shows_the_worst_rows_and_says_what_is_left_out() -> None:
    entry = ENTRIES["probability-bins"]
    audit = entry.fitted(80).audit(*entry.data(200, 1).observe)
    rows = audit.rows()
    figure = plots.deviation(audit, top=3)
    assert {t.split("  (")[0] for t in ticks(figure.axes[0])} == {f"{r['group']} / {r['what']}" for r in rows[:3]}
    assert f"{len(rows) - 3} more rows" in figure.axes[0].get_xlabel()
    assert len(ticks(gmc.compare({"x": audit}).plot(top=None).axes[0])) == len(rows)


def test_long_names_are_shown_whole_and_rows_do_not_touch() -> None:
    names = [f"site={k} & insurance=statutory, with supplement {k} & age=[{k}, {k + 10}) & region=north-west" for k in range(3)]
    figure = plots.deviation(audit(names, [0.01, 0.02, 0.03], [0.3, 0.2, 0.1]))
    assert [tick.replace("\n", " ").rsplit("  ", 1)[0] for tick in ticks(figure.axes[0])] == names
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert all(upper.y0 >= lower.y1 - 1 for upper, lower in pairwise(boxes))
