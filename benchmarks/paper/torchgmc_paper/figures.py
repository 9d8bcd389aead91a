"""Bars of the deviation per group and method, in the paper's form, with the paper's own figures beside (extra ``report``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchgmc import plots
from torchgmc.plots import LIGHT
from torchgmc_paper.measures import MEASURES
from torchgmc_paper.tables import WORST, Summary, slug

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 90
COLOURS = ("#0072B2", "#56B4E9", "#CC79A7", "#F0E442", "#D55E00", "#E69F00", "#009E73", "#999999")  # Okabe and Ito's
LABELS = {"mass": "mass-weighted, the paper's measure", "conditional": "inside the group"}


def draw(results: Any, summary: Summary) -> dict[str, bytes]:
    """PNG files of an experiment by name: its own ``figures``, or bars for each part."""
    module, parts = results.module, summary.parts()
    if hasattr(module, "figures"):
        found = module.figures(summary, results.setting)
    else:
        found = {
            f"{module.NAME}{'' if len(parts) == 1 else '-' + slug(part)}.png": bars(
                summary, part, module.METHODS, summary.alpha(part), module.PAPER.get(part), module.TITLE
            )
            for part in parts
        }
    return {file: plots.png(figure, dpi=DPI) for file, figure in found.items()}


def bars(
    summary: Summary,
    part: str,
    methods: Sequence[str],
    alpha: float,
    paper: Mapping[str, Mapping[str, float]] | None = None,
    title: str = "",
) -> Figure:
    """Mean |deviation| of each group and method, with one standard deviation over the seeds; a panel per measure.

    Args:
        summary: of all seeds.
        part: which data.
        methods: in order; those without rows are left out.
        alpha: drawn as a line.
        paper: the paper's own mean deviations by method and group, drawn in a separate panel.
        title: of the figure.
    """
    panels = []
    for measure in MEASURES:
        found = {(row["method"], row["group"]): row for row in summary.find(part=part, measure=measure)}
        if found:
            panels.append((LABELS[measure], {m: {g: r for (n, g), r in found.items() if n == m} for m in methods}))
    if paper:
        cells = {m: {g: {"mean": v, "sd": None, "noise": None} for g, v in values.items()} for m, values in paper.items()}
        panels.insert(1, ("the paper's own figures (mass-weighted, its data and model)", cells))
    return stacked(panels, methods, alpha, f"{title}: {part}" if part else title)


def stacked(
    panels: Sequence[tuple[str, Mapping[str, Mapping[str, Any]]]], methods: Sequence[str], alpha: float, title: str = ""
) -> Figure:
    """Panels of bars below each other with one legend.

    Args:
        panels: a label, and by method and group ``mean``, ``sd`` and ``noise`` (None: not drawn).
        methods: ours, in order; a method has the same colour in every panel.
        alpha: drawn as a line.
        title: of the figure.
    """
    widest = max(sum(map(len, table.values())) for _, table in panels)
    size = (max(8.0, min(14.0, 2.5 + 0.2 * widest)), 3.1 * len(panels) + 0.7)
    figure, panes = plots.new_figure(LIGHT, size, rows=len(panels))
    colours = {method: COLOURS[k % len(COLOURS)] for k, method in enumerate(methods)}
    for name in (name for _, table in panels for name in table):  # the paper's "GMC": as the first of ours that begins so
        colours.setdefault(name, next((colours[m] for m in methods if m.startswith(name)), COLOURS[-1]))
    seen: dict[str, Any] = {}
    for place, (label, table) in zip(panes, panels, strict=True):
        seen |= _panel(place, label, {m: table[m] for m in (*methods, *colours) if table.get(m)}, colours, alpha)
    last = [name for name in seen if name not in colours]  # lines after bars
    shown = {name: seen[name] for name in (*(n for n in methods if n in seen), *last)}
    figure.suptitle(title, fontsize=12, color=LIGHT.ink)
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=min(5, len(shown)), frameon=False, fontsize=9)
    return figure


def _panel(
    axes: Any, label: str, table: Mapping[str, Mapping[str, Any]], colours: Mapping[str, str], alpha: float
) -> dict[str, Any]:
    groups = list(dict.fromkeys(group for values in table.values() for group in values if group != WORST))
    groups += [WORST] * any(WORST in values for values in table.values())
    width = 0.82 / len(table)
    seen: dict[str, Any] = {}
    for k, (method, values) in enumerate(table.items()):
        at = [i + (k - (len(table) - 1) / 2) * width for i, group in enumerate(groups) if group in values]
        rows = [values[group] for group in groups if group in values]
        height = [row["mean"] or 0.0 for row in rows]
        seen[method] = axes.bar(at, height, width * 0.92, color=colours[method])
        known = [(x, h, row["sd"]) for x, h, row in zip(at, height, rows, strict=True) if row["sd"]]
        if known:
            x, h, sd = zip(*known, strict=True)
            low = [min(a, b) for a, b in zip(h, sd, strict=True)]  # no bar reaches below 0
            axes.errorbar(x, h, yerr=[low, sd], fmt="none", ecolor=LIGHT.ink, elinewidth=0.8, capsize=1.5)
        still = [(x, row["noise"]) for x, row in zip(at, rows, strict=True) if row["noise"]]
        if still:
            x, y = zip(*still, strict=True)
            mark = axes.hlines(y, [v - width * 0.46 for v in x], [v + width * 0.46 for v in x], color=LIGHT.ink, lw=1.6)
            seen["an oracle's sampling noise"] = mark
    seen[f"alpha = {alpha:g}"] = axes.axhline(alpha, color=LIGHT.band, lw=1.3, ls="--")
    axes.set_xticks(range(len(groups)), groups, fontsize=9, rotation=0 if len(groups) < 10 else 20)
    axes.set_ylabel("|deviation|", fontsize=9)
    axes.set_title(label, fontsize=10, loc="left", color=LIGHT.ink)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=LIGHT.faint, lw=0.8)
    axes.tick_params(labelsize=9)
    axes.spines["left"].set_visible(True)
    return seen
