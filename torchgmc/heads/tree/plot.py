"""A label tree with the coverage of the answers at each node."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchgmc.audits.audit import Audit
from torchgmc.engine import checks
from torchgmc.engine.extras import require
from torchgmc.heads.tree.head import TreeHead
from torchgmc.plots import DARK, LIGHT, Theme, new_figure, set_title
from torchgmc.plots.style import BLUE, SKY, SMALL, VERMILLION, safe, share, shorten, signed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from torchgmc.heads.tree.tree import Tree

#: Levels below the root that still leave room for names.
LEVELS = 4


def tree(
    head: TreeHead, audit: Audit, *, below: bool = True, rows: int = 24, title: str | None = None, dark: bool = False
) -> Figure:
    """The tree from the root on the left to the leaves: colour shows how far the coverage is from the target, size how often.

    A thick edge marks a node whose promise the audit finds beyond alpha; a node that nobody answers with is a dot.
    Levels that would need more than ``rows`` rows (or lie more than four below the root) are folded into the level above, whose
    nodes stand for all below them; if the root has more children than that, the most used are shown.

    Args:
        head: the fitted head.
        audit: its audit, which has counted the answers at each node.
        below: a node stands for itself and everything below it, as the promises do by default; False: only for itself.
        rows: most rows to draw.
        title: of the figure.
        dark: draw for a dark page.

    Example:
        >>> shelves = {"Civil": ["Bridges", "Water"], "Medical": ["Cancer", "Asthma"]}
        >>> labels = torch.randint(4, (1000,))
        >>> probs = (torch.randn(1000, 4) + 2 * torch.nn.functional.one_hot(labels, 4)).softmax(1)
        >>> head = gmc.TreeHead(shelves, target=0.9, alpha=0.03).fit(probs, labels)
        >>> figure = gmc.plots.tree(head, head.audit(probs, labels))
        >>> [text.get_text().split("  ")[0] for text in figure.axes[0].texts]
        ['Bridges', 'Water', 'Cancer', 'Asthma', 'all', 'Civil', 'Medical']
    """
    checks.kind("head", head, TreeHead, "a TreeHead")
    checks.kind("audit", audit, Audit, "an audit of this head")
    rows = checks.count("rows", rows, 24)
    if "answered" not in audit.details or len(audit.details["answered"]) != head.num_nodes:
        raise ValueError("`audit` must be an audit of this head (head.audit or gmc.audit), which counts its answers by node.")
    shape = head.tree
    mass, coverage = node_coverage(shape, audit, below)
    shown, left_out = _shown(shape, mass if below else node_coverage(shape, audit, True)[0], rows)
    places = _places(shape, shown)
    tips = {v for v in shown if not any(c in places for c in shape.children[v])}
    levels = max(x for x, _ in places.values())
    theme = DARK if dark else LIGHT
    figure, (axes,) = new_figure(theme, (10, min(max(3.8, 1.3 + 0.36 * len(tips)), 11.0)))
    for v in shown:
        if v != shape.root:
            (x0, y0), (x1, y1) = places[shape.parents[v]], places[v]
            axes.plot([x0, x1], [y0, y1], color=theme.faint, lw=1.4, zorder=1)
    used = [v for v in shown if mass[v] > 0]
    far = max([2 * (audit.alpha or 0.01), *(abs(float(coverage[v]) - head.target) for v in used if mass[v] >= 0.01)])
    colours = require("matplotlib.colors", extra="report")
    ends = (VERMILLION, theme.faint, SKY if dark else BLUE)
    scale = colours.LinearSegmentedColormap.from_list("deviation", ends)
    beyond = _beyond(head, audit, below)
    points = axes.scatter(
        [places[v][0] for v in used],
        [places[v][1] for v in used],
        s=[70 + 900 * math.sqrt(float(mass[v])) for v in used],
        c=[float(coverage[v]) - head.target for v in used],
        cmap=scale,
        norm=colours.Normalize(-far, far),
        edgecolors=theme.ink,
        linewidths=[3.2 if v in beyond else 0.8 for v in used],
        zorder=2,
    )
    unused = [v for v in shown if mass[v] <= 0]
    axes.scatter([places[v][0] for v in unused], [places[v][1] for v in unused], s=14, color=theme.ink, zorder=2)
    wide = _names(axes, shape, places, shown, tips, mass, coverage, theme)
    # The root a little inside, the last level where the longest name still fits: shares of the width.
    left, right = 0.09, max(0.4, 1.0 - wide / 8.6)
    axes.set_xlim(-levels * left / (right - left), levels + levels * (1.0 - right) / (right - left))
    axes.set_ylim(max(y for _, y in places.values()) + 0.8, -1.0)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines["bottom"].set_visible(False)
    figure.supxlabel(_caption(below, left_out, shape, shown, audit.alpha), color=theme.ink, fontsize=13)
    bar = figure.colorbar(points, ax=axes, shrink=0.75, pad=0.01, aspect=28)
    bar.set_label(f"coverage - {head.target:g}", color=theme.ink, fontsize=13)
    bar.ax.tick_params(colors=theme.ink, labelsize=SMALL)
    bar.ax.yaxis.set_major_formatter(require("matplotlib.ticker", extra="report").FuncFormatter(signed))
    bar.outline.set_visible(False)
    set_title(figure, title, theme)
    return figure


def node_coverage(shape: Tree, audit: Audit, below: bool = True) -> tuple[Tensor, Tensor]:
    """Share of the answers at each node (or at it and below), ``(V,)``, and their coverage (NaN where there are none)."""
    answered, covered = (audit.details[name].detach().double().cpu() for name in ("answered", "covered"))
    total = answered.sum()
    if below:
        up = torch.tensor(shape.parents)
        for depth in range(shape.height, 0, -1):
            level = (shape.depths == depth).nonzero().flatten()
            answered, covered = (t.index_add(0, up[level], t[level]) for t in (answered, covered))
    return answered / total, covered / answered


def _shown(shape: Tree, mass: Tensor, rows: int) -> tuple[list[int], int]:
    """Nodes to draw, and how many children of the root were left out."""
    leaf = torch.arange(shape.num_nodes) < shape.num_leaves
    depth = 1
    while depth < min(shape.height, LEVELS):
        tips = int(((shape.depths == depth + 1) | (leaf & (shape.depths <= depth))).sum())
        if tips > rows:
            break
        depth += 1
    shown = (shape.depths <= depth).nonzero().flatten().tolist()
    if depth == 1 and len(shown) - 1 > rows:
        children = sorted(shape.children[shape.root], key=lambda v: -float(mass[v]))[:rows]
        return [shape.root, *children], len(shown) - 1 - rows
    return shown, 0


def _places(shape: Tree, shown: list[int]) -> dict[int, tuple[float, float]]:
    """Level and height of each node: tips one below the other, every other node in the middle of its children."""
    kept, found = set(shown), dict[int, tuple[float, float]]()
    tip, stack = 0.0, [(shape.root, False)]
    while stack:
        node, done = stack.pop()
        inside = [child for child in shape.children[node] if child in kept]
        if not inside:
            found[node] = (float(shape.depths[node]), tip)
            tip += 1.0
        elif done:
            found[node] = (float(shape.depths[node]), (found[inside[0]][1] + found[inside[-1]][1]) / 2)
        else:
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(inside))
    return found


def _names(
    axes: Any,
    shape: Tree,
    places: dict[int, tuple[float, float]],
    shown: list[int],
    tips: set[int],
    mass: Tensor,
    coverage: Tensor,
    theme: Theme,
) -> float:
    """Tips are named to the right, with their share; the others above their node. Returns the inches that the tips need."""
    longest = 0
    look: dict[str, Any] = {"textcoords": "offset points", "fontsize": SMALL, "color": theme.ink, "zorder": 3}
    for v in shown:
        radius = math.sqrt(70 + 900 * math.sqrt(float(mass[v]))) / 2 if mass[v] > 0 else 2.0
        right = f"{100 * float(coverage[v]):.1f} %" if mass[v] > 0 else "not used"
        name = "all" if v == shape.root else shorten(shape.names[v], 26)
        if v in tips:
            inside = int(shape.sizes[v])
            more = f" ({inside} leaves)" if inside > 1 else ""
            text = f"{safe(name)}{more}  {right}" + (f"  ({share(float(mass[v]))})" if mass[v] > 0 else "")
            longest = max(longest, len(text))
            axes.annotate(text, places[v], (radius + 5, 0), va="center", **look)
        else:
            text = f"{safe(name)}  {right}"
            axes.annotate(text, places[v], (0, radius + 3), va="bottom", ha="center", **look)
    return 0.45 + 0.095 * longest


def _beyond(head: TreeHead, audit: Audit, below: bool) -> set[int]:
    """Nodes that are a promised set by themselves (with all below them), and beyond alpha in the audit for some group."""
    worst: dict[str, float] = {}
    for row in audit.rows():
        name = row["group"].split(" & ", 1)[1] if head.grouped else row["group"]
        worst[name] = max(worst.get(name, 0.0), abs(row["estimate"]))
    alpha = math.inf if audit.alpha is None else audit.alpha
    far = {tuple(sorted(nodes)) for name, nodes in head.sets.items() if worst.get(name, 0.0) > alpha}
    return {v for v in range(head.num_nodes) if (tuple(head.tree.below(v)) if below else (v,)) in far}


def _caption(below: bool, left_out: int, shape: Tree, shown: list[int], alpha: float | None) -> str:
    parts = ["each node with all below it" if below else "each node by itself"]
    parts.append("its share of the answers in brackets")
    if alpha is not None:
        parts.append(f"thick edge: beyond {alpha:g}")
    if left_out:
        parts.append(f"{left_out} rarer ones not shown")
    elif len(shown) < shape.num_nodes:
        parts.append("deeper levels folded in" if below else "deeper levels not shown")
    return "; ".join(parts[:2]) + "\n" + "; ".join(parts[2:])
