"""Figures with a row for each group: deviations, and thresholds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchgmc.audits.audit import Audit
from torchgmc.audits.comparison import Comparison, by_name
from torchgmc.audits.tabular import row_name
from torchgmc.engine import checks
from torchgmc.engine.extras import require
from torchgmc.heads.base import Head
from torchgmc.heads.combinations import combination_names, combinations
from torchgmc.plots.style import DARK, LIGHT, MARKERS, SMALL, finished, folded, new_figure, safe, share, signed, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def deviation(
    audits: Mapping[str, Audit] | Audit | Comparison,
    alpha: float | None = None,
    *,
    top: int | None = 30,
    title: str | None = None,
    dark: bool = False,
) -> Figure:
    """Deviation of every group with its interval, for one or several heads, against the promised band.

    Args:
        audits: an audit, a comparison, or a name for each of several audits, drawn in this order; groups of one name share a
            row. Largest group first.
        alpha: half-width of the band; the first audit's if omitted.
        top: number of rows to show, those that are worst in any audit; None for all.
        title, dark: of the figure; draw it for a dark page.

    Example:
        >>> masks = torch.rand(60, 8, 8) < 0.5
        >>> scores = torch.sigmoid(2 * masks + torch.randn(60, 8, 8))
        >>> audit = gmc.ThresholdHead(target=0.1, alpha=0.01).fit(scores, masks).audit(scores, masks)
        >>> figure = gmc.plots.deviation(audit)  # or audit.plot()
        >>> [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
        ['all  (100 %)']
    """
    audits = by_name(audits)
    first = next(iter(audits.values()))
    alpha = first.alpha if alpha is None else checks.positive("alpha", alpha, "It is the half-width of the band.")
    top = None if top is None else checks.count("top", top, 1)
    rows = {  # by group and what, without groups that have no examples
        name: {(row["group"], row["what"]): row for row in audit.rows() if math.isfinite(row["estimate"])}
        for name, audit in audits.items()
    }
    mass = {key: row["mass"] for found in rows.values() for key, row in found.items()}
    worst = {key: max(abs(found[key]["estimate"]) for found in rows.values() if key in found) for key in mass}
    kept = sorted(worst, key=lambda key: -worst[key])[:top]
    order = sorted(kept, key=lambda key: (key[1], -mass[key], key[0]))  # largest group first, whoever is shown
    left_out = len(worst) - len(kept)
    theme = DARK if dark else LIGHT
    labels = [f"{safe(folded(row_name(*key)))}  ({share(mass[key])})" for key in order]
    at, tall = _places(labels)
    figure, (axes,) = new_figure(theme, (10, max(3.4, 1.7 + tall * (0.30 + 0.15 * len(audits)))))
    if alpha is not None:
        axes.axvspan(-alpha, alpha, color=theme.band, alpha=0.32 if dark else 0.16, lw=0, label=f"promised: within {alpha:g}")
    axes.axvline(0, color=theme.ink, lw=1)
    for k, (name, found) in enumerate(rows.items()):
        place = [y + 0.22 * (k - (len(rows) - 1) / 2) for y, key in zip(at, order, strict=True) if key in found]
        value = [found[key] for key in order if key in found]
        bars = [[max(v["estimate"] - v["low"], 0.0) for v in value], [max(v["high"] - v["estimate"], 0.0) for v in value]]
        look: dict[str, Any] = {"fmt": MARKERS[k % len(MARKERS)], "color": theme.series[k % len(theme.series)], "markersize": 8}
        look |= {"markeredgecolor": theme.paper, "markeredgewidth": 0.8, "elinewidth": 2.2}
        axes.errorbar([v["estimate"] for v in value], place, xerr=bars, label=safe(name), **look)
    _row_names(axes, labels, at, tall)
    own = "the group's own" if first.conditional else "weighted by the group's share"
    relative = first.evidence is not None and first.evidence.rows.relative
    axes.set_xlabel(
        f"deviation from {'the mean over all' if relative else 'the target'} ({own})"
        + (f"\n{left_out} more rows deviate less" if left_out else "")
    )
    axes.xaxis.set_major_formatter(require("matplotlib.ticker", extra="report").FuncFormatter(signed))
    axes.xaxis.set_major_locator(require("matplotlib.ticker", extra="report").MaxNLocator(5))
    return finished(figure, axes, theme, title, "x")


def thresholds(
    heads: Head | Mapping[str, Head], groups: Any = None, *, top: int = 12, title: str | None = None, dark: bool = False
) -> Figure:
    """Threshold of each combination of groups, for one or several heads.

    Groups overlap, so each combination of groups has its own threshold: "female + site 2". A head's dashed line is its
    starting threshold.

    Args:
        heads: a fitted :class:`~torchgmc.ThresholdHead` (baselines are such) or :class:`~torchgmc.QuantileHead`, or a name and
            one of these for each of several; all with the same groups.
        groups: membership ``(n, a)`` of examples; their combinations are shown, the most frequent first. If omitted, those of
            the calibration examples, or each group by itself if the (first) head no longer has them.
        top: number of combinations to show.
        title, dark: of the figure; draw it for a dark page.

    Example:
        >>> groups = torch.rand(600, 2) < torch.tensor([0.3, 0.6])
        >>> scores = (torch.randn(600) * (1 + 2 * groups[:, 0])).abs()
        >>> head = gmc.QuantileHead(target=0.9, alpha=0.02, groups=["wide", "other"]).fit(scores, groups)
        >>> figure = gmc.plots.thresholds(head)
        >>> sorted(tick.get_text().split("  ")[0] for tick in figure.axes[0].get_yticklabels())
        ['none of the groups', 'other', 'wide', 'wide + other']
    """
    named: Mapping[str, Any] = heads if isinstance(heads, Mapping) else {"threshold": heads}
    for name, head in named.items():
        if not isinstance(head, Head) or type(head).group_thresholds is Head.group_thresholds:
            raise TypeError(
                f"`heads`[{name!r}] must be a head with a threshold per combination of groups (of masks, of quantiles), got "
                f"{type(head).__name__}."
            )
    if not named:
        raise ValueError("`heads` must have at least one head, as in {'GMC': head}, got none.")
    first, top = next(iter(named.values())), checks.count("top", top, 12)
    other = [name for name, head in named.items() if head.groups != first.groups]
    if other:
        raise ValueError(f"`heads` must have the same groups, but those of {other[0]!r} differ.")
    patterns, mass = combinations(first, groups)
    left_out = max(len(patterns) - top, 0)
    patterns, mass = patterns[:top], mass[:top]
    values = {name: head.group_thresholds(patterns) for name, head in named.items()}  # (rows, C) each
    classes = max(v.shape[1] for v in values.values())
    theme = DARK if dark else LIGHT
    names = [f"{t} / class {c}" if classes > 1 else t for t in combination_names(first, patterns) for c in range(classes)]
    shares = mass.repeat_interleave(classes).tolist()
    labels = [safe(folded(t)) + (f"  ({share(s)})" if math.isfinite(s) else "") for t, s in zip(names, shares, strict=True)]
    at, tall = _places(labels)
    figure, (axes,) = new_figure(theme, (10, max(3.4, 1.7 + tall * (0.36 + 0.14 * len(named)))))
    start = float(first.group_thresholds(patterns[:1], fitted=False)[0, 0]) if classes == len(named) == 1 else math.nan
    every = [start, *(v for table in values.values() for v in table.flatten().tolist())]
    low, high = spread([v for v in every if math.isfinite(v)] or [0.0, 1.0])
    for k, (name, table) in enumerate(values.items()):
        colour = theme.series[(k + 2 if len(named) == 1 else k) % len(theme.series)]
        where = [y + 0.2 * (k - (len(named) - 1) / 2) for y in at]
        inside = [min(max(v, low), high) for v in table.flatten().tolist()]
        look: dict[str, Any] = {"marker": MARKERS[k % len(MARKERS)], "ms": 9, "ls": "none", "markeredgecolor": theme.paper}
        axes.plot(inside, where, color=colour, label=safe(name), **look)
        for x, y, v in zip(inside, where, table.flatten().tolist(), strict=True):
            text = f"{v:.3g}" if math.isfinite(v) else ("∞" if v > 0 else "\N{MINUS SIGN}∞")
            if len(named) == 1 or not math.isfinite(v):
                axes.annotate(text, (x, y), (9, 0), textcoords="offset points", va="center", fontsize=SMALL, color=theme.ink)
    if math.isfinite(start):
        axes.axvline(start, color=theme.ink, lw=1.2, ls="--", label="before calibration")
    _row_names(axes, labels, at, tall)
    axes.set_xlim(low, high + 0.06 * (high - low))
    axes.set_xlabel("threshold on the score" + (f"; {left_out} rarer combinations not shown" if left_out else ""))
    return finished(figure, axes, theme, title, "x")


def _places(names: list[str]) -> tuple[list[float], float]:
    """Where each row is, one of two lines or fewer being 1 tall, and how tall all are."""
    sizes = [max(1.0, 0.55 * (1 + name.count("\n"))) for name in names]
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    return [end - size / 2 - 0.5 for end, size in zip(ends, sizes, strict=True)], sum(sizes)


def _row_names(axes: Any, names: list[str], at: list[float], tall: float) -> None:
    axes.set(yticks=at, yticklabels=names, ylim=(tall - 0.5, -0.5))
    axes.tick_params(axis="y", length=0)
