"""Example pictures with their masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchgmc.engine import checks
from torchgmc.engine.extras import require
from torchgmc.plots.style import DARK, LIGHT, SKY, SMALL, VERMILLION, YELLOW, Theme, new_figure, safe, set_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOUND, MISSED, EXTRA = SKY, VERMILLION, YELLOW


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
        title, dark: of the figure; draw it for a dark page.

    Example:
        >>> truth = torch.zeros(1, 8, 8, dtype=torch.bool)
        >>> truth[:, 2:6] = True
        >>> figure = gmc.plots.masks(torch.rand(1, 3, 8, 8), truth, {"head": truth.roll(2, 1)})
        >>> figure.axes[1].get_xlabel()
        'misses 50 %'
    """
    if isinstance(predictions, Mapping) and not predictions:
        raise ValueError("`images` and `predictions` must not be empty.")
    if not isinstance(predictions, Mapping):
        raise TypeError(f"`predictions` must map names to masks, as in {{'head': masks}}, got {predictions!r:.80}.")
    checks.ordinary("images", images)
    if checks.numbers("images", images).dim() != 4 or images.shape[1] not in (1, 3) or not images.numel():
        raise ValueError(f"`images` must have shape (n, 3, height, width) or (n, 1, ...), got {tuple(images.shape)}.")
    checks.finite("images", images)
    num = len(images)
    if captions is not None and (isinstance(captions, str) or not isinstance(captions, Sequence) or len(captions) != num):
        raise ValueError(f"`captions` must be {num} strings, one per picture, got {captions!r:.80}.")
    for name, mask in {"truth": truth, **predictions}.items():
        checks.ordinary(name, mask)
        if mask.shape != (num, *images.shape[2:]):
            raise ValueError(f"`{name}` must have shape {(num, *images.shape[2:])}, got {tuple(mask.shape)}.")
    theme = DARK if dark else LIGHT
    rows = len(predictions) + 1
    figure, panels = new_figure(theme, (1.0 + 1.72 * num, 1.15 + 1.9 * rows), rows, num)
    pictures = images.detach().float().cpu().expand(-1, 3, -1, -1).permute(0, 2, 3, 1).clamp(0, 1)  # (n, H, W, 3)
    truth = truth.detach().bool().cpu()
    for column in range(num):
        _picture(panels[column], pictures[column], theme)
        if captions is not None:
            panels[column].set_title(safe(checks.text("captions", captions[column])), fontsize=SMALL, color=theme.ink)
    panels[0].set_ylabel("picture", fontsize=13)
    for row, (name, mask) in enumerate(predictions.items(), start=1):
        mask = mask.detach().bool().cpu()
        for column in range(num):
            panel = panels[row * num + column]
            marked, missed = _mark(pictures[column], truth[column], mask[column])
            _picture(panel, marked, theme)
            panel.set_xlabel(f"misses {100 * missed:.0f} %", fontsize=SMALL, labelpad=3)
        panels[row * num].set_ylabel(safe(name), fontsize=13)
    patches = require("matplotlib.patches", extra="report")
    keys = {"found": FOUND, "missed": MISSED, "false alarm": EXTRA}
    handles = [patches.Patch(color=colour, label=name) for name, colour in keys.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=13, labelcolor=theme.ink)
    set_title(figure, title, theme)
    return figure


def _picture(axes: Axes, pixels: Tensor, theme: Theme) -> None:
    axes.imshow(pixels.numpy(), interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    axes.spines["bottom"].set_visible(False)
    axes.yaxis.label.set_color(theme.ink)


def _mark(picture: Tensor, truth: Tensor, mask: Tensor) -> tuple[Tensor, float]:
    """The picture in grey with its pixels marked, shape ``(H, W, 3)``, and the share of missed pixels."""
    grey = picture.mean(-1, keepdim=True).expand_as(picture) * 0.75 + 0.10
    marked = grey.clone()
    for where, colour, weight in ((truth & mask, FOUND, 0.42), (truth & ~mask, MISSED, 0.92), (~truth & mask, EXTRA, 0.72)):
        tone = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        marked[where] = (1 - weight) * grey[where] + weight * tone
    return marked, float((truth & ~mask).sum() / truth.sum().clamp_min(1))
