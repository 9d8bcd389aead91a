"""Figures for slides and reports (extra ``report``).

Every function returns a :class:`matplotlib.figure.Figure` of its own and never touches pyplot, so no backend is chosen, no
window opens and nothing leaks between threads. Colours are those of Okabe and Ito, which colour-blind readers can tell
apart, and each series has a marker of its own as well. ``dark=True`` draws for a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchgmc._extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from torchgmc.audit import Audit
    from torchgmc.solver import Report

__all__ = ["convergence", "deviation", "masks", "png", "tradeoff"]

ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILLION, PURPLE = (
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
MARKERS = ("o", "s", "D", "^", "v", "P")
FOUND, MISSED, EXTRA = SKY, VERMILLION, YELLOW


@dataclass(frozen=True)
class Theme:
    """Colours of a page; ``series`` are Okabe-Ito colours that stand out on it."""

    paper: str
    ink: str
    faint: str
    band: str
    series: tuple[str, ...]


LIGHT = Theme("#FFFFFF", "#1F2430", "#D9DDE5", GREEN, (ORANGE, VERMILLION, BLUE, PURPLE, GREEN, SKY))
DARK = Theme("#14171F", "#E8EAF0", "#3A4152", GREEN, (ORANGE, VERMILLION, SKY, PURPLE, GREEN, YELLOW))


def deviation(
    audits: Mapping[str, Audit], alpha: float | None = None, *, title: str | None = None, dark: bool = False
) -> Figure:
    """Deviation of every group with its interval, for one or several heads, beside the band of what was promised.

    Args:
        audits: a name for each audit, drawn in this order; groups of one name share a row.
        alpha: half-width of the band; the first audit's if omitted.
        title: of the figure.
        dark: draw for a dark page.

    Example:
        >>> figure = deviation({"GMC": audit}, alpha=0.005)  # doctest: +SKIP
        >>> figure.savefig("deviation.png")  # doctest: +SKIP
    """
    if not audits:
        raise ValueError("`audits` must have at least one audit, as in {'GMC': head.audit(...)}, got none.")
    first = next(iter(audits.values()))
    alpha = first.alpha if alpha is None else alpha
    rows = {name: _rows(audit) for name, audit in audits.items()}
    order = _order(audits)
    theme = DARK if dark else LIGHT
    height = max(3.4, 1.7 + len(order) * (0.34 + 0.17 * len(audits)))
    figure, (axes,) = _figure(theme, (10, height))
    axes.axvspan(-alpha, alpha, color=theme.band, alpha=0.32 if dark else 0.16, lw=0, label=f"promised: within {alpha:g}")
    axes.axvline(0, color=theme.ink, lw=1)
    for k, (name, found) in enumerate(rows.items()):
        shift = 0.22 * (k - (len(rows) - 1) / 2)
        place = [i + shift for i, key in enumerate(order) if key in found]
        value = [found[key] for key in order if key in found]
        middle = [v["estimate"] for v in value]
        reach = [[v["estimate"] - v["low"] for v in value], [v["high"] - v["estimate"] for v in value]]
        axes.errorbar(
            middle,
            place,
            xerr=reach,
            fmt=MARKERS[k % len(MARKERS)],
            color=theme.series[k % len(theme.series)],
            markersize=8,
            markeredgecolor=theme.paper,
            markeredgewidth=0.8,
            elinewidth=2.2,
            label=name,
        )
    mass = {key: value["mass"] for found in rows.values() for key, value in found.items()}
    axes.set_yticks(range(len(order)), [f"{_label(key)}  ({100 * mass[key]:.0f} %)" for key in order])
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.grid(axis="x", color=theme.faint, lw=0.8)
    axes.tick_params(axis="y", length=0)
    own = "the group's own risk" if first.conditional else "risk, weighted by the group's share"
    axes.set_xlabel(f"deviation from the target ({own})")
    axes.xaxis.set_major_formatter(require("matplotlib.ticker", extra="report").FuncFormatter(_signed))
    _title(figure, title, theme)
    _legend(figure, axes, theme)
    return figure


def masks(
    images: Tensor,
    truth: Tensor,
    predictions: Mapping[str, Tensor],
    *,
    captions: Sequence[str] | None = None,
    title: str | None = None,
    dark: bool = False,
) -> Figure:
    """Pictures with the masks of one or several heads: found, missed and falsely marked pixels.

    Args:
        images: shape ``(n, 3, height, width)`` or ``(n, 1, height, width)`` in [0, 1]; one column each.
        truth: shape ``(n, height, width)``, bool.
        predictions: a name and masks like ``truth`` for each head; one row each.
        captions: a line over each column.
        title: of the figure.
        dark: draw for a dark page.
    """
    num = len(images)
    if num == 0 or not predictions:
        raise ValueError("`images` and `predictions` must not be empty.")
    for name, mask in {"truth": truth, **predictions}.items():
        if mask.shape != (num, *images.shape[2:]):
            raise ValueError(f"`{name}` must have shape {(num, *images.shape[2:])}, got {tuple(mask.shape)}.")
    theme = DARK if dark else LIGHT
    rows = len(predictions) + 1
    figure, panels = _figure(theme, (1.0 + 1.72 * num, 1.15 + 1.9 * rows), rows, num)
    pictures = images.detach().float().cpu().expand(-1, 3, -1, -1).permute(0, 2, 3, 1).clamp(0, 1)  # (n, H, W, 3)
    truth = truth.detach().bool().cpu()
    for column in range(num):
        _picture(panels[column], pictures[column], theme)
        if captions is not None:
            panels[column].set_title(captions[column], fontsize=11, color=theme.ink)
    panels[0].set_ylabel("picture", fontsize=13)
    for row, (name, mask) in enumerate(predictions.items(), start=1):
        mask = mask.detach().bool().cpu()
        for column in range(num):
            panel = panels[row * num + column]
            marked, missed = _mark(pictures[column], truth[column], mask[column])
            _picture(panel, marked, theme)
            panel.set_xlabel(f"misses {100 * missed:.0f} %", fontsize=12, labelpad=3)
        panels[row * num].set_ylabel(name, fontsize=13)
    patches = require("matplotlib.patches", extra="report")
    keys = {"found": FOUND, "missed": MISSED, "false alarm": EXTRA}
    figure.legend(
        handles=[patches.Patch(color=colour, label=name) for name, colour in keys.items()],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=13,
        labelcolor=theme.ink,
    )
    _title(figure, title, theme)
    return figure


def convergence(
    report: Report | Mapping[str, Report], alpha: float | None = None, *, title: str | None = None, dark: bool = False
) -> Figure:
    """Worst violation after each step of the solver.

    Args:
        report: of a fitted head, or a name and a report for each of several fits.
        alpha: draws the level to reach.
        title: of the figure.
        dark: draw for a dark page.
    """
    reports: Mapping[str, Any] = report if isinstance(report, Mapping) else {"worst violation": report}
    theme = DARK if dark else LIGHT
    figure, (axes,) = _figure(theme, (10, 4.6))
    for k, (name, one) in enumerate(reports.items()):
        history = torch.as_tensor(one.history).double().cpu().tolist()
        axes.plot(
            range(len(history)),
            [value if value > 0 else math.nan for value in history],
            color=theme.series[(k + 2) % len(theme.series)],
            marker=MARKERS[k % len(MARKERS)] if len(history) <= 60 else None,
            markersize=7,
            lw=2.4,
            label=name,
        )
    axes.set_yscale("log")
    ticker = require("matplotlib.ticker", extra="report")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    if alpha is not None:
        axes.axhline(alpha, color=theme.band, lw=2, ls="--", label=f"promised: {alpha:g}")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("worst |violation|")
    axes.grid(color=theme.faint, lw=0.8)
    _title(figure, title, theme)
    _legend(figure, axes, theme)
    return figure


def tradeoff(
    series: Mapping[str, Sequence[tuple[float, float]]],
    start: tuple[float, float] | None = None,
    *,
    bias: str = "worst |bias|",
    cost: str = "NLL of masked words (nats)",
    title: str | None = None,
    dark: bool = False,
) -> Figure:
    """What fairness costs: a point for every alpha, from large to small, of one or several methods.

    Args:
        series: a name and its points (bias, cost); a cost that is infinite is drawn as an open mark at the upper edge.
        start: bias and cost of the unprocessed model.
        bias, cost: names of the axes.
        title: of the figure.
        dark: draw for a dark page.
    """
    if not series:
        raise ValueError("`series` must have at least one method, as in {'kl': [(0.002, 4.15), ...]}, got none.")
    theme = DARK if dark else LIGHT
    figure, (axes,) = _figure(theme, (10, 5.2))
    known = [c for points in series.values() for _, c in points if math.isfinite(c)] + ([start[1]] if start else [])
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    room = max(high - low, 1e-3 * max(abs(high), 1e-12))
    top = high + 0.18 * room
    for k, (name, points) in enumerate(series.items()):
        colour, marker = theme.series[(k + 1) % len(theme.series)], MARKERS[k % len(MARKERS)]
        inside = [(b, c) for b, c in points if math.isfinite(c)]
        beyond = [b for b, c in points if not math.isfinite(c)]
        axes.plot(*zip(*inside, strict=True) if inside else ([], []), color=colour, marker=marker, ms=8, lw=2.2, label=name)
        if beyond:
            axes.plot(
                beyond, [top] * len(beyond), color=colour, marker=marker, ms=8, ls="none", mfc="none", label=f"{name}: infinite"
            )
    if start is not None:
        axes.plot([start[0]], [start[1]], color=theme.ink, marker="*", ms=15, ls="none", label="unprocessed")
    axes.set_xscale("log")
    ticker = require("matplotlib.ticker", extra="report")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    levels = [y for y in axes.get_yticks() if low - 0.12 * room <= y <= high + 0.02 * room]
    names = [f"{y:.6g}" for y in levels]
    if any(not math.isfinite(c) for points in series.values() for _, c in points):
        axes.set_yticks([*levels, top], [*names, "∞"])
    axes.set_ylim(low - 0.12 * room, top + 0.1 * room)
    axes.set_xlabel(bias)
    axes.set_ylabel(cost)
    axes.grid(color=theme.faint, lw=0.8)
    _title(figure, title, theme)
    _legend(figure, axes, theme)
    return figure


def png(figure: Figure, *, dpi: int = 144) -> bytes:
    """The figure as a PNG file in memory."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor=figure.get_facecolor())
    return buffer.getvalue()


def _figure(theme: Theme, size: tuple[float, float], rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure in the theme's colours, and its axes row by row."""
    figure: Figure = require("matplotlib.figure", extra="report").Figure(
        figsize=size, layout="constrained", facecolor=theme.paper
    )
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    panels: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).ravel())
    for axes in panels:
        axes.set_facecolor(theme.paper)
        axes.set_axisbelow(True)
        axes.tick_params(which="both", colors=theme.ink, labelsize=13)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set(color=theme.ink, fontsize=13)
        for name, spine in axes.spines.items():
            spine.set_color(theme.ink)
            spine.set_visible(name == "bottom")
    return figure, panels


def _title(figure: Figure, title: str | None, theme: Theme) -> None:
    if title:
        figure.suptitle(title, fontsize=17, color=theme.ink, fontweight="bold")


def _legend(figure: Figure, axes: Axes, theme: Theme) -> None:
    handles, names = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        names,
        loc="outside lower center",
        ncols=min(len(names), 4),
        frameon=False,
        fontsize=13,
        labelcolor=theme.ink,
    )


def _rows(audit: Audit) -> dict[tuple[str, str], dict[str, float]]:
    """Rows of an audit's table by (group, what); groups without examples are left out."""
    table = audit.table
    numbers = {name: table[name] for name in ("mass", "estimate", "low", "high")}
    rows = {
        (group, what): {name: float(column[i]) for name, column in numbers.items()}
        for i, (group, what) in enumerate(zip(table["group"], table["what"], strict=True))
    }
    return {key: row for key, row in rows.items() if math.isfinite(row["estimate"])}


def _order(audits: Mapping[str, Audit]) -> list[tuple[str, str]]:
    """Every (group, what) of the audits, largest group first: the order does not depend on who is shown."""
    mass = {key: row["mass"] for audit in audits.values() for key, row in _rows(audit).items()}
    return sorted(mass, key=lambda key: (key[1], -mass[key], key[0]))


def _signed(value: float, _: int | None = None) -> str:
    """A tick's label; rounding leaves no -0."""
    return f"{value:+.3g}".replace("-", "\N{MINUS SIGN}") if abs(value) > 1e-12 else "0"


def _label(key: tuple[str, str]) -> str:
    return key[0] if not key[1] else f"{key[0]} / {key[1]}"


def _picture(axes: Axes, pixels: Tensor, theme: Theme) -> None:
    axes.imshow(pixels.numpy(), interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines["bottom"].set_visible(False)
    axes.yaxis.label.set_color(theme.ink)


def _mark(picture: Tensor, truth: Tensor, mask: Tensor) -> tuple[Tensor, float]:
    """The picture in grey with its pixels marked, shape ``(H, W, 3)``, and the share of missed pixels."""
    grey = picture.mean(-1, keepdim=True).expand_as(picture) * 0.75 + 0.10
    marked = grey.clone()
    for where, colour, weight in ((truth & mask, FOUND, 0.42), (truth & ~mask, MISSED, 0.92), (~truth & mask, EXTRA, 0.72)):
        tone = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        marked[where] = (1 - weight) * grey[where] + weight * tone
    missed = (truth & ~mask).sum() / truth.sum().clamp_min(1)
    return marked, float(missed)
