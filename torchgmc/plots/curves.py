"""Curves: convergence of a fit, and what a smaller alpha costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchgmc.audits.audit import Audit
from torchgmc.engine import checks
from torchgmc.engine.extras import require
from torchgmc.plots.style import DARK, LIGHT, MARKERS, finished, new_figure, safe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from torchgmc.engine.solver import Report
    from torchgmc.heads.base import Head
    from torchgmc.monitor import Watch

#: Costs that are better when they are large.
GAINS = ("accuracy", "dice", "coverage")


def convergence(
    report: Report | Head | Mapping[str, Report | Head], alpha: float | None = None, *, title: str | None = None, dark: bool = False
) -> Figure:
    """Worst violation after each step of the solver.

    Args:
        report: a fitted head or its report, or a name and one of these for each of several fits.
        alpha: draw this target level; by default that of the (first) head.
        title, dark: of the figure; draw it for a dark page.

    Example:
        >>> masks = torch.rand(60, 8, 8) < 0.5
        >>> scores = torch.sigmoid(2 * masks + torch.randn(60, 8, 8))
        >>> head = gmc.ThresholdHead(target=0.1, alpha=0.01).fit(scores, masks)
        >>> figure = gmc.plots.convergence(head)  # or head.report.plot(alpha=0.01)
        >>> len(figure.axes[0].lines[0].get_xdata()) == head.report.iterations + 1
        True
    """
    given: Mapping[str, Any] = report if isinstance(report, Mapping) else {"worst violation": report}
    alpha = None if alpha is None else checks.positive("alpha", alpha, "It is the level to reach.")
    if alpha is not None and not 1e-100 < alpha < 1e100:
        raise ValueError(f"`alpha` must lie between 1e-100 and 1e100 to fit on the axis, got {alpha!r}.")
    theme = DARK if dark else LIGHT
    figure, (axes,) = new_figure(theme, (10, 4.6))
    for k, (name, one) in enumerate(given.items()):
        if alpha is None:
            alpha = getattr(one, "alpha", None)
        one = getattr(one, "report", one)
        if one is None:
            raise ValueError(f"`report` of {name!r} is None: fit the head first; a head loaded from a file has no report.")
        if not isinstance(getattr(one, "history", None), Tensor | Sequence):
            raise TypeError(f"`report` must be a fitted head or its report, got {type(one).__name__}.")
        history = [value if value > 0 else math.nan for value in torch.as_tensor(one.history).double().cpu().tolist()]
        marker = MARKERS[k % len(MARKERS)] if len(history) <= 60 else None
        colour = theme.series[(k + 2) % len(theme.series)]
        axes.plot(range(len(history)), history, color=colour, marker=marker, markersize=7, lw=2.4, label=safe(name))
    axes.set_yscale("log")
    if alpha is not None:
        axes.axhline(alpha, color=theme.band, lw=2, ls="--", label=f"promised: {alpha:g}")
    _logarithmic(axes.yaxis, *axes.get_ylim())
    axes.xaxis.set_major_locator(require("matplotlib.ticker", extra="report").MaxNLocator(integer=True))
    axes.set(xlabel="step", ylabel="worst |violation|")
    return finished(figure, axes, theme, title)


def evidence(monitor: Watch, *, title: str | None = None, dark: bool = False) -> Figure:
    """Evidence of a monitor after each batch, and the line at which it raises the alarm.

    Args:
        monitor: a :class:`torchgmc.Monitor`, or one of shifts, that has seen a batch.
        title, dark: of the figure; draw it for a dark page.

    Example:
        >>> watch = gmc.ShiftMonitor(torch.rand(500))
        >>> watch.update(torch.rand(50))
        >>> len(gmc.plots.evidence(watch).axes[0].lines)
        2
    """
    if not hasattr(monitor, "log_evidence"):
        raise TypeError(f"`monitor` must be a Monitor, got {type(monitor).__name__}.")
    history = monitor.history.cpu().tolist()
    if not history:
        raise ValueError("`monitor` has seen no batch yet: call `update`.")
    theme = DARK if dark else LIGHT
    figure, (axes,) = new_figure(theme, (10, 4.6))
    bar = -math.log10(monitor.delta)
    values = [min(value / math.log(10.0), 3.0 * bar) for _, value in history]
    marker = MARKERS[0] if len(history) <= 60 else None
    axes.plot([n for n, _ in history], values, color=theme.series[2], lw=2.4, marker=marker, label="evidence")
    axes.axhline(bar, color=theme.band, lw=2, ls="--", label=f"alarm (at most {100 * monitor.delta:g} % false, ever)")
    if monitor.alarm:
        axes.axvline(float(monitor.alarmed), color=theme.series[1], lw=1.6, ls=":")
    axes.set(xlabel="examples", ylabel="evidence, log10")
    return finished(figure, axes, theme, title)


def tradeoff(
    series: Mapping[str, Sequence[tuple[float, float] | Audit]] | Sequence[Audit],
    start: tuple[float, float] | Audit | None = None,
    *,
    bias: str = "worst |violation|",
    cost: str | None = None,
    title: str | None = None,
    dark: bool = False,
) -> Figure:
    """The cost of a smaller alpha: a point for every alpha, from large to small, for one or several methods.

    Args:
        series: names and their points, or just points: audits of the heads of :func:`torchgmc.func.sweep`, or pairs (worst
            violation, cost). A cost that is infinite is drawn as an open mark at the upper edge.
        start: the unprocessed model: its audit, or its worst violation and cost.
        bias: name of the horizontal axis.
        cost: which of the audits' costs, e.g. ``"accuracy after"``, ``"mean set size"``, ``"NLL after"``; the first that is
            measured after calibration if omitted. For pairs the name of the axis.
        title, dark: of the figure; draw it for a dark page.

    Example:
        >>> probs, y = torch.rand(400), torch.rand(400) < 0.5
        >>> head = gmc.ProbabilityHead(0.1, bins=2).fit(probs, y)
        >>> audits = [gmc.audit(one, (probs, y)) for one in gmc.func.sweep(head, [0.1, 0.05, 0.02])]
        >>> figure = gmc.plots.tradeoff({"GMC": audits})
        >>> figure.axes[0].get_ylabel()
        'Brier score'
    """
    if not isinstance(series, Mapping | Sequence) or isinstance(series, str) or not series:
        raise ValueError(f"`series` must have at least one method, as in {{'kl': [(0.002, 4.15), ...]}}, got {series!r:.80}.")
    checks.text("bias", bias)
    checks.kind("cost", cost, str | None, "a string")
    named: Mapping[str, Sequence[Any]] = series if isinstance(series, Mapping) else {"GMC": series}
    cost = cost or _cost([a for points in named.values() for a in points if isinstance(a, Audit)])
    lines = {name: [_point(point, cost) for point in points] for name, points in named.items()}
    first = None if start is None else _point(start, cost)
    theme = DARK if dark else LIGHT
    figure, (axes,) = new_figure(theme, (10, 5.2))
    known = [c for points in lines.values() for _, c in points if math.isfinite(c)] + ([first[1]] if first else [])
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    room = max(high - low, 1e-3 * max(abs(high), 1e-12))
    top = high + 0.18 * room
    for k, (name, points) in enumerate(lines.items()):
        look: dict[str, Any] = {"color": theme.series[(k + 1) % len(theme.series)], "marker": MARKERS[k % len(MARKERS)], "ms": 8}
        inside, beyond = [(b, c) for b, c in points if math.isfinite(c)], [b for b, c in points if not math.isfinite(c)]
        axes.plot(*zip(*inside, strict=True) if inside else ([], []), lw=2.2, label=safe(name), **look)
        if beyond:
            axes.plot(beyond, [top] * len(beyond), ls="none", mfc="none", label=safe(f"{name}: infinite"), **look)
    if first is not None:
        axes.plot([first[0]], [first[1]], color=theme.ink, marker="*", ms=15, ls="none", label="unprocessed")
    biases = [b for points in lines.values() for b, _ in points] + ([first[0]] if first else [])
    if biases and min(biases) > 0:
        axes.set(xscale="log", xlim=(min(biases) / 1.25, max(biases) * 1.25))
        _logarithmic(axes.xaxis, *axes.get_xlim())
    levels = [y for y in axes.get_yticks() if low - 0.12 * room <= y <= high + 0.02 * room]
    if any(not math.isfinite(c) for points in lines.values() for _, c in points):
        axes.set_yticks([*levels, top], [*(f"{y:.6g}" for y in levels), "∞"])
    axes.set_ylim(low - 0.12 * room, top + 0.1 * room)
    axes.set(xlabel=safe(bias), ylabel=safe(_short(cost)))
    return finished(figure, axes, theme, title)


def _logarithmic(axis: Any, low: float, high: float) -> None:
    """Readable ticks of a logarithmic axis."""
    ticker = require("matplotlib.ticker", extra="report")
    axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:.3g}"))
    axis.set_minor_locator(ticker.NullLocator())


def _cost(audits: Sequence[Audit]) -> str:
    """The cost that is shown: the first one measured after calibration, else the first."""
    names = [name for audit in audits for name in audit.cost]
    if not audits:
        return "cost"
    if not names:
        raise ValueError("the audits have no cost; pass pairs (worst violation, cost) instead.")
    return next((name for name in names if name.endswith(" after") or name == "mean set size"), names[0])


def _point(point: Any, cost: str) -> tuple[float, float]:
    if not isinstance(point, Audit):
        pair = list(point) if isinstance(point, Sequence) and not isinstance(point, str) else []
        if len(pair) != 2 or not all(isinstance(v, int | float) for v in pair) or not math.isfinite(pair[0]):
            raise TypeError(f"a point must be an audit, or a pair (worst violation, cost), got {point!r:.80}.")
        return float(pair[0]), float(pair[1])
    if cost not in point.cost:
        raise ValueError(f"`cost` must be one of {', '.join(map(repr, point.cost))}, got {cost!r}.")
    return point.max_violation, point.cost[cost]


def _short(cost: str) -> str:
    name = cost.removesuffix(" after")
    return f"{name} (more is better)" if name.lower().endswith(GAINS) else name
