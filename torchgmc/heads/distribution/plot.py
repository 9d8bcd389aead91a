"""Words whose probability a head moved most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchgmc.engine import checks
from torchgmc.heads.distribution.head import DistributionHead
from torchgmc.plots.style import DARK, LIGHT, SMALL, finished, new_figure, safe, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Numbers of a block of prompts x vocabulary (64 MB in float32).
CHUNK = 1 << 24


def words(
    head: DistributionHead,
    logits: Tensor,
    groups: Any,
    names: Any = None,
    *,
    top: int = 10,
    title: str | None = None,
    dark: bool = False,
) -> Figure:
    """Words whose mean probability moved most in any group: a panel for each group, an arrow from before to after.

    All panels show the same words, so that one sees the groups come together.

    Args:
        head: the fitted head.
        logits: of prompts, ``(n, vocabulary)``.
        groups: membership of the prompts, ``(n, a)``.
        names: of the tokens: a tokenizer of transformers, a sequence, or a mapping from ids; ids if omitted.
        top: number of words.
        title, dark: of the figure; draw it for a dark page.

    Example:
        >>> female = torch.arange(400) % 2 == 0
        >>> logits = torch.randn(400, 5)
        >>> logits[female, 3] += 2.0
        >>> groups = torch.stack([female, ~female], dim=1)
        >>> head = gmc.DistributionHead({"jobs": [3]}, alpha=0.001, groups=["female", "male"]).fit(logits, groups)
        >>> figure = gmc.plots.words(head, logits, groups, ["the", "a", "she", "nurse", "he"], top=1)
        >>> [tick.get_text() for tick in figure.axes[0].get_yticklabels()], [axes.get_title() for axes in figure.axes]
        (['nurse'], ['female', 'male'])
    """
    checks.kind("head", head, DistributionHead, "a DistributionHead")
    checks.count("top", top, 10)
    before, after = mean_probabilities(head, logits, groups)  # (a, vocabulary)
    moved = (after - before).abs().amax(0)
    chosen = moved.topk(min(top, len(moved))).indices.tolist()
    labels = token_names(names, chosen)
    theme = DARK if dark else LIGHT
    columns = min(head.num_groups, 3)
    rows = -(-head.num_groups // columns)
    figure, panels = new_figure(theme, (10, rows * max(2.6, 1.0 + 0.36 * len(chosen)) + 0.9), rows, columns)
    colours = theme.series[0], theme.series[2]
    high = 1.08 * max(float(torch.maximum(before, after)[:, chosen].max()), 1e-9)
    for k, axes in enumerate(panels):
        if k >= head.num_groups:
            axes.set_visible(False)
            continue
        one, two = before[k, chosen].tolist(), after[k, chosen].tolist()
        place = list(range(len(chosen)))
        axes.hlines(place, one, two, color=theme.ink, lw=1.6, alpha=0.6, zorder=1)
        look: dict[str, Any] = {"ls": "none", "markeredgecolor": theme.paper, "zorder": 2}
        axes.plot(one, place, marker="o", ms=9, color=colours[0], label="before", **look)
        axes.plot(two, place, marker="D", ms=8, color=colours[1], label="after", **look)
        axes.set_title(safe(shorten(head.groups[k], 30)), fontsize=15, color=theme.ink)
        axes.set_yticks(place, [safe(shorten(name, 18)) for name in labels] if k % columns == 0 else [""] * len(place))
        axes.set_ylim(len(place) - 0.5, -0.5)
        axes.set_xlim(-0.04 * high, high)
        axes.locator_params(axis="x", nbins=4, prune="upper")  # the last tick would touch the next panel's first
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=SMALL)
        axes.grid(axis="x", color=theme.faint, lw=0.8)
        if k >= head.num_groups - columns:
            axes.set_xlabel("mean probability")
    return finished(figure, panels[0], theme, title, "x")


@torch.no_grad()
def mean_probabilities(head: DistributionHead, logits: Tensor, groups: Any) -> tuple[Tensor, Tensor]:
    """Mean probability of every token in each group before and after the head, ``(a, vocabulary)`` each, on the CPU."""
    logits, member = head.check_batch(logits, groups)[:2]
    count = member.sum(0)
    if not bool((count > 0).all()):
        empty = head.groups[int((count == 0).nonzero()[0])]
        raise ValueError(f"group {empty!r} has no prompts in `groups`; pass prompts from every group.")
    sums = [logits.new_zeros(head.num_groups, logits.shape[1], dtype=torch.float64) for _ in range(2)]
    rows = max(1, CHUNK // logits.shape[1])
    for part, inside in zip(torch.split(logits, rows), torch.split(member, rows), strict=True):
        before = head.start(part)
        after = head(part, inside).to(before.dtype).exp()
        for total, p in zip(sums, (before, after), strict=True):
            total += (inside.to(p.dtype).T @ p).double()
    return tuple((total / count[:, None]).cpu() for total in sums)  # type: ignore[return-value]  # two of them


def token_names(names: Any, ids: Sequence[int]) -> list[str]:
    """Names of tokens by a tokenizer, a sequence or a mapping; the ids themselves if there are none."""
    if names is None:
        return [f"token {i}" for i in ids]
    if hasattr(names, "convert_ids_to_tokens"):
        found = names.convert_ids_to_tokens(list(ids))
    elif isinstance(names, Mapping):
        found = [names.get(i, f"token {i}") for i in ids]
    elif isinstance(names, Sequence) and not isinstance(names, str):
        if max(ids) >= len(names):
            raise ValueError(f"`names` has {len(names)} names, but token {max(ids)} is shown; pass one name per token.")
        found = [names[i] for i in ids]
    else:
        raise TypeError(f"`names` must be a tokenizer, a sequence or a mapping from ids, got {type(names).__name__}.")
    # Pieces of words begin with special marks: "Ġ" (GPT) and "▁" (sentencepiece) stand for a blank.
    return [str(name).lstrip("Ġ▁") or str(name) for name in found]
