"""Reliability of probabilities, group by group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchgmc.audits.audit import Audit
from torchgmc.audits.binomial import Counts
from torchgmc.engine import checks
from torchgmc.plots.style import DARK, LIGHT, SMALL, finished, folded, new_figure, safe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 10


def reliability(audit: Audit, *, top: int = 6, title: str | None = None, dark: bool = False) -> Figure:
    """Observed frequency against predicted probability, before and after the head, in the groups that deviate most.

    Bars are 95 % intervals of each frequency by itself (independent examples of equal weight); bins without examples are left
    out. Of several classes, the events are those of all classes.

    Args:
        audit: of a ``ProbabilityHead``.
        top: number of groups.
        title: of the figure.
        dark: draw for a dark page.

    Example:
        >>> p, groups = torch.rand(1000), torch.rand(1000, 2) < 0.5
        >>> head = gmc.ProbabilityHead(alpha=0.05, groups=["a", "b"]).fit(p, torch.rand(1000) < p, groups)
        >>> figure = gmc.plots.reliability(head.audit(torch.rand(500), torch.rand(500) < 0.5, groups[:500]))
        >>> sorted(axes.get_title() for axes in figure.axes)
        ['a', 'b', 'everyone']
    """
    if not isinstance(audit, Audit) or audit.source is None or "p" not in audit.source[1].rows:
        raise TypeError("`audit` must be an audit of a ProbabilityHead, made by `gmc.audit`.")
    checks.count("top", top, 6)
    tally = audit.source[1]
    names = audit.source[0].test_functions().who
    shown = list(dict.fromkeys(audit.table["group"]))[:top]
    theme = DARK if dark else LIGHT
    columns = min(len(shown), 3)
    rows = -(-len(shown) // columns)
    figure, panels = new_figure(theme, (10, 3.6 * rows + 0.9), rows, columns)
    y = tally.rows["y"].flatten().double()
    for axes, group in zip(panels, shown, strict=False):
        m = tally.who[:, names.index(group), None].double().expand_as(tally.rows["y"]).flatten()
        inside = m > 0
        axes.plot([0, 1], [0, 1], color=theme.ink, lw=1, label="as promised")
        for k, (key, label) in enumerate((("before", "before"), ("p", "after"))):
            p = tally.rows[key].flatten().double()[inside]
            bins = (p * BINS).long().clamp(0, BINS - 1)
            sums = p.new_zeros(3, BINS).index_add_(1, bins, torch.stack([torch.ones_like(p), p, y[inside]]) * m[inside]).cpu()
            count, predicted, events = sums[:, sums[0] > 0]
            low, high = Counts(events, count).ends(torch.tensor([0.025]))[:, :, 0]
            mean, at = events / count, predicted / count
            reach = torch.stack([mean - low, high - mean]).clamp_min(0.0)
            colour, marker = (theme.series[0], "o") if k == 0 else (theme.series[2], "D")
            axes.errorbar(at.tolist(), mean.tolist(), reach.tolist(), fmt=marker, color=colour, ms=6, elinewidth=1.4, label=label)
        axes.set_title(safe(folded(group, 28)), fontsize=13, color=theme.ink)
        axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
        axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        axes.set_yticks([0, 0.5, 1], ["0", "0.5", "1"])
        axes.tick_params(labelsize=SMALL)
        axes.grid(color=theme.faint, lw=0.8)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    for axes in panels[::columns]:
        axes.set_ylabel("observed")
    for axes in panels[max(0, len(shown) - columns) : len(shown)]:
        axes.set_xlabel("predicted")
    return finished(figure, panels[0], theme, title)
