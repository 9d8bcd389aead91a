"""What a figure says, read back from it."""

from typing import Any

import pytest
import torch

import torchgmc as gmc

pytest.importorskip("matplotlib")
from torchgmc import plots


def ticks(axes: Any) -> list[str]:
    return [tick.get_text() for tick in axes.get_yticklabels()]


def legend(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def is_png(figure: Any) -> bool:
    return plots.png(figure, dpi=40).startswith(b"\x89PNG")


def texts(figure: Any) -> list[Any]:
    from matplotlib.text import Text

    figure.draw_without_rendering()
    axis = [a for axes in figure.axes for a in (axes.xaxis, axes.yaxis)]
    ticks = {t for a in axis for which in (a.majorTicks, a.minorTicks) for tick in which for t in (tick.label1, tick.label2)}
    drawn = {tick.label1 for a in axis for tick in a._update_ticks()}  # ticks beyond the limits exist and are not drawn
    found = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and (t not in ticks or t in drawn)]
    return [t for t in found if t.axes is None or t.axes.get_visible()]


SHELVES = {"x": {"x1": ["x1a", "x1b"], "x2": None}, "y": ["y1", "y2", "y3"]}


def tree_head(n: int = 400) -> tuple[gmc.TreeHead, gmc.Audit, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(6, (n,), generator=g)
    probs = (torch.randn(n, 6, generator=g) + 2 * torch.nn.functional.one_hot(labels, 6)).softmax(1)
    head = gmc.TreeHead(SHELVES, 0.9, 0.02).fit(probs, labels)
    return head, head.audit(probs, labels), head(probs), labels
