"""Figures: what is drawn, what is refused, and that pyplot is never touched."""

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchgmc as gmc

pytest.importorskip("matplotlib")
from torchgmc import plots
from torchgmc.plots.pictures import _mark


@pytest.fixture(autouse=True)
def no_pyplot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it now fails


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


def labels(figure: Any) -> list[str]:
    return [tick.get_text() for tick in figure.axes[0].get_yticklabels()]


def legend(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def is_png(figure: Any) -> bool:
    return plots.png(figure, dpi=40).startswith(b"\x89PNG")


@pytest.mark.parametrize("dark", [False, True])
def test_deviation_aligns_audits_whose_rows_are_in_another_order(dark: bool) -> None:
    one = audit(["a", "b"], [0.02, 0.01], [0.2, 0.9])
    two = audit(["b", "a"], [0.0, -0.003], [0.9, 0.2])
    figure = plots.deviation({"conformal": one, "GMC": two}, alpha=0.004, title="Title", dark=dark)
    assert labels(figure) == ["b  (90 %)", "a  (20 %)"]
    assert legend(figure) == ["promised: within 0.004", "conformal", "GMC"]
    points = {c.get_label(): c.lines[0].get_xdata().tolist() for c in figure.axes[0].containers}
    assert points == {"conformal": [0.01, 0.02], "GMC": [0.0, -0.003]}
    assert is_png(figure)


def test_deviation_of_one_audit_takes_its_alpha_and_leaves_out_empty_groups() -> None:
    figure = audit(["a", "none"], [0.02, math.nan], [0.2, 0.0]).plot()
    assert labels(figure) == ["a  (20 %)"]
    assert "promised: within 0.005" in legend(figure)


def test_deviation_names_classes() -> None:
    figure = plots.deviation({"x": audit(["a", "a"], [0.0, 0.1], [0.5, 0.5], ["cat", "dog"])})
    assert labels(figure) == ["a / cat  (50 %)", "a / dog  (50 %)"]


def test_deviation_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one audit"):
        plots.deviation({})


@pytest.mark.parametrize("channels", [1, 3])
def test_masks_say_what_share_is_missed(channels: int) -> None:
    truth = torch.zeros(2, 8, 8, dtype=torch.bool)
    truth[:, :4] = True
    half = truth.clone()
    half[:, :2] = False
    figure = plots.masks(
        torch.rand(2, channels, 8, 8), truth, {"all": truth, "half": half}, captions=["first", "second"], title="Title"
    )
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", *["misses 0 %"] * 2, *["misses 50 %"] * 2]
    assert [axes.get_title() for axes in figure.axes[:2]] == ["first", "second"]
    assert [axes.get_ylabel() for axes in figure.axes[::2]] == ["picture", "all", "half"]
    assert is_png(figure)


def test_masks_of_an_empty_truth_miss_nothing() -> None:
    none = torch.zeros(1, 8, 8, dtype=torch.bool)
    assert plots.masks(torch.rand(1, 3, 8, 8), none, {"x": ~none}).axes[1].get_xlabel() == "misses 0 %"


def test_marked_pixels_have_their_colours() -> None:
    truth, mask = torch.tensor([[True, True, False, False]]), torch.tensor([[True, False, True, False]])
    marked, missed = _mark(torch.full((1, 4, 3), 0.5), truth, mask)
    found, lost, extra, plain = marked[0]
    assert missed == 0.5
    assert found[2] > found[0] and lost[0] > lost[2] and extra[:2].min() > extra[2]
    assert plain.unique().numel() == 1


def test_masks_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`truth` must have shape \(1, 8, 8\), got \(1, 8, 9\)"):
        plots.masks(torch.rand(1, 3, 8, 8), torch.zeros(1, 8, 9).bool(), {"x": torch.zeros(1, 8, 8).bool()})
    with pytest.raises(ValueError, match="must not be empty"):
        plots.masks(torch.rand(1, 3, 8, 8), torch.zeros(1, 8, 8).bool(), {})


@pytest.mark.parametrize("dark", [False, True])
def test_convergence_draws_one_or_several_reports(dark: bool) -> None:
    report: Any = SimpleNamespace(history=torch.tensor([0.1, 0.01, 0.0]))
    one = plots.convergence(report, alpha=0.005, dark=dark)
    assert legend(one) == ["worst violation", "promised: 0.005"]
    assert math.isnan(one.axes[0].lines[0].get_ydata()[2])  # 0 has no place on a logarithmic axis
    assert is_png(one)
    assert legend(plots.convergence({"exact": report, "paper": report})) == ["exact", "paper"]


def test_convergence_of_a_fitted_head() -> None:
    masks = torch.rand(60, 8, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    scores = torch.where(masks, 0.7, 0.3) + 0.2 * torch.rand(60, 8, 8, generator=torch.Generator().manual_seed(1))
    head = gmc.ThresholdHead(target=0.1, alpha=0.01).fit(scores, masks)
    assert is_png(plots.convergence(head.report, head.alpha))


def test_a_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "torchgmc\[report\]"'):
        plots.deviation({"x": audit(["a"], [0.0], [1.0])})
