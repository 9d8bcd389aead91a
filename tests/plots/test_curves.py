"""Convergence and trade-offs: what is drawn, what is refused."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchgmc as gmc
from gmctest.figures import is_png, legend
from gmctest.heads_zoo import ENTRIES, GROUPS, events
from torchgmc import plots

pytestmark = pytest.mark.usefixtures("no_pyplot")


def test_tradeoff_marks_infinite_cost():
    figure = plots.tradeoff({"a": [(0.1, 1.0), (0.01, float("inf"))], "b": [(0.1, 1.0)]}, (0.2, 1.0), title="x", dark=True)
    assert len(plots.png(figure)) > 1000
    assert "a: infinite" in figure.axes[0].get_legend_handles_labels()[1]
    with pytest.raises(ValueError, match="`series`"):
        plots.tradeoff({})


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


@pytest.mark.parametrize(
    "name, cost",
    [
        ("threshold", "accuracy after"),
        ("tree", "mean set size"),
        ("distribution", "mean KL"),
        ("probability-bins", "Brier score after"),
    ],
)
def test_tradeoff_of_a_sweep(name: str, cost: str) -> None:
    entry = ENTRIES[name]
    fresh = entry.data(60, 1).observe
    audits = [gmc.audit(head, fresh) for head in gmc.func.sweep(entry.fitted(60), [0.2, 0.01])]
    axes = plots.tradeoff({"GMC": audits}, start=audits[0]).axes[0]
    assert axes.get_ylabel().split(" (")[0] == cost.removesuffix(" after")
    assert axes.lines[0].get_xdata().tolist() == [a.max_violation for a in audits]
    assert axes.lines[0].get_ydata().tolist() == [a.cost[cost] for a in audits]
    assert axes.lines[1].get_ydata().tolist() == [audits[0].cost[cost]]


def test_what_a_tradeoff_refuses() -> None:
    known = events(50, 0).observe
    audits = [gmc.audit(gmc.ProbabilityHead(0.1, GROUPS).fit(*known), known)]
    with pytest.raises(ValueError, match=r"`cost` must be one of 'Brier score before'.*got 'price'"):
        plots.tradeoff(audits, cost="price")
    with pytest.raises(ValueError, match="at least one method"):
        plots.tradeoff({})


def test_a_violation_of_zero_has_a_linear_axis() -> None:
    assert plots.tradeoff({"x": [(0.0, 1.0), (0.1, 2.0)]}).axes[0].get_xscale() == "linear"


def test_convergence_of_heads_and_of_their_reports() -> None:
    head = ENTRIES["threshold"].fitted()
    assert head.report is not None
    figure = plots.convergence({"head": head})
    assert figure.axes[0].lines[0].get_ydata().tolist() == pytest.approx(head.report.history.tolist())
    assert figure.axes[0].lines[1].get_ydata()[0] == head.alpha
    assert [line.get_label() for line in head.report.plot(title="Title").axes[0].lines] == ["worst violation"]
    fresh = ENTRIES["threshold"].make()
    with pytest.raises(ValueError, match="fit the head first"):
        plots.convergence(fresh)
