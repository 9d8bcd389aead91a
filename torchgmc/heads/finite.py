r"""Thresholds with a finite-sample guarantee for every overlapping group, one per membership pattern.

Let c be a pattern of membership. Add one example of that pattern with the worst loss there is (never covered; all of its
pixels missed), solve the problem of all groups on the n + 1 examples without any slack, and keep the threshold of pattern c.
Then, over the draw of the calibration set and of a new example,

.. math:: E\big[1_A(X') \big(L'(\lambda(X')) - \sigma\big)\big] \le 0 \quad \text{for every group } A, \text{ and for everyone}

*Why.* With the new example's own loss in place of the worst one, the n + 1 examples are exchangeable, and the optimality
condition of A says that their losses over target sum to at most 0 (on the safe side of a jump): so does the expectation of the
last. Raising the loss of the added example can only move the threshold of its pattern to the safe side: the potential along
:math:`\theta \cdot x_c = u` is convex in u, and a larger slope moves its minimum down. A new example's threshold depends on its
pattern only, so a table holds all answers. A pattern that no finite threshold serves (a group with too few examples, a pattern
outside the span of those seen) gets the safe end. The proof in full is in ``notebooks/paper.md``.
"""

import math
from typing import Any

import torch
from torch import Tensor

from torchgmc.engine.offsets import Folded, crossing
from torchgmc.engine.path import thresholds_with_one_more
from torchgmc.engine.pinball import Pinball, solve
from torchgmc.engine.solver import Report
from torchgmc.groups.cells import pattern_ids

#: All patterns of membership are tabulated up to this many.
ALL = 256
#: Of all minima the one with the pattern's smallest (or largest) threshold: so much of the added example is left out.
TIE = 1e-6
#: A threshold farther out than so many ranges of the scores has no finite value.
FAR = 4.0


def all_patterns(groups: int) -> Tensor | None:
    """Every pattern of membership, bool ``(2^a, a)``; None if there are too many."""
    if 2**groups > ALL:
        return None
    return torch.as_tensor((torch.arange(2**groups)[:, None] >> torch.arange(groups)) & 1) > 0


def wanted_patterns(names: list[str], seen: Tensor, asked: Any) -> Tensor:
    """Patterns to tabulate: all while they are few, else those seen and those asked for, bool ``(P, a)``.

    ``names``: of the groups. ``seen``: patterns of the calibration data, bool ``(c, a)``. ``asked``: lists of group names, one
    per pattern, or None.
    """
    every = all_patterns(len(names))
    if every is not None:
        return every.to(seen.device)
    rows = torch.tensor([[name in pattern for name in names] for pattern in asked or ()], dtype=torch.bool, device=seen.device)
    return pattern_ids(torch.cat([seen, rows.view(-1, len(names))]))[1]


def phantom_thresholds(data: Folded, target: float, patterns: Tensor, covers: bool, safe: bool = False) -> Tensor:
    """Threshold of each pattern, float64 ``(P,)``; infinite on the safe side where none is finite.

    ``data``: scores in cells, each example with the weight 1 in all. ``target``: of the risk that rises with the threshold.
    ``patterns``: membership, bool ``(P, a)``. ``covers``: the worst example is never at or below its threshold (coverage), so
    the safe side is up; else it always is (missed pixels), and the safe side is down. ``safe``: of several minima the one that
    is safest for the pattern; else the one with its smallest threshold, which for coverage is the rank of split conformal.
    Either way data decide, not where a search began.
    """
    order = data.cell.argsort(stable=True)
    order = order[data.scores[order].argsort(stable=True)]  # the same rows in any order are one problem, to the last bit
    scores, cell, weight, mass = data.scores[order], data.cell[order], data.weight.sum(0)[order], data.mass.sum(0)
    design, rows = (torch.cat([torch.ones_like(m[:, :1]), m], 1).double() for m in (data.member, patterns))
    low, high = float(scores[0]), float(scores[-1])
    width = max(high - low, abs(high) * 1e-9, 1e-290)
    problem = Pinball(scores, cell, design)
    linear = target * (mass @ design)
    start = torch.zeros(1, design.shape[1], dtype=torch.float64, device=design.device)
    start[0, 0] = crossing(scores, weight, target * float(mass.sum()), alone=True)[0]
    near = min(0.1, 1.0 / float(mass.sum()))  # to about one example: the rest is a short walk
    begin = solve(problem, weight[None], linear[None], torch.zeros_like(start), start, enough=near).theta[0]
    # Never covered, it adds to b only; always missed, it is below its threshold too.
    gain = target - (not covers) + (TIE if covers and safe else -TIE)
    lam = _onto_scores(thresholds_with_one_more(problem, weight, linear, begin, rows, gain), scores, width)
    far = lam > high + FAR * width if covers else lam < low - FAR * width
    return torch.where(far, math.inf if covers else -math.inf, lam)


def conformal_rank(count: Tensor, target: float) -> Tensor:
    """ceil((n + 1) target), int64; a product that is an integer but for rounding is one."""
    return torch.ceil((count.double() + 1.0) * target - 1e-9).long()


def _onto_scores(lam: Tensor, ordered: Tensor, width: float) -> Tensor:
    """Thresholds that equal a score but for rounding, made equal to it."""
    place = torch.searchsorted(ordered, lam).clamp(1, max(len(ordered) - 1, 1))
    sides = torch.stack([ordered[(place - 1).clamp_max(len(ordered) - 1)], ordered[place.clamp_max(len(ordered) - 1)]])
    nearest = sides.gather(0, (sides - lam).abs().argmin(0, keepdim=True))[0]
    rounding = 1e-11 * width + 1e-15 * ordered.abs().max()
    return torch.where((nearest - lam).abs() <= rounding, nearest, lam)


def check_patterns(patterns: Any, groups: list[str]) -> list[list[str]] | None:
    """Patterns asked for: lists of group names."""
    if patterns is None:
        return None
    if not isinstance(patterns, list | tuple) or not all(isinstance(one, list | tuple) for one in patterns):
        raise TypeError(f"`patterns` must be a list of lists of group names, one per combination, got {patterns!r:.80}.")
    unknown = [name for one in patterns for name in one if name not in groups]
    if unknown:
        raise ValueError(f"`patterns` names {unknown[0]!r}, which is not one of the groups.")
    return [list(one) for one in patterns]


def needed(target: float, covers: bool) -> int:
    """Examples that a group must have for a finite threshold."""
    return math.ceil(1.0 / (1.0 - target if covers else target) - 1e-9) - 1


def check_fit(solver: str, equal: bool, clusters: bool) -> None:
    """The guarantee rests on examples that may be exchanged."""
    if solver != "exact":
        raise ValueError(f"`finite_sample` has its own fit; solver={solver!r} cannot be used with it.")
    if not equal or clusters:
        raise ValueError(
            "`finite_sample` assumes exchangeable examples, so it cannot be used with weights or clusters. Keep one "
            "example per cluster, or pass finite_sample=False."
        )


def report(
    who: tuple[list[str], Tensor, float, bool],
    violations: tuple[Tensor, Tensor, float | None],
    fitted: tuple[Tensor, Tensor],
    seconds: float,
) -> Report:
    """What was fitted: ``who`` are names, sizes, target and whether it covers; ``fitted`` the patterns and their thresholds."""
    names, sizes, target, covers = who
    before, after, alpha = violations
    least = needed(target, covers)
    small = [name for name, size in zip(names, sizes.tolist(), strict=True) if size < least]
    infinite = int(fitted[1].isinf().reshape(len(fitted[0]), -1).any(1).sum())
    text = f"{len(fitted[0])} combinations of groups, each with a guarantee on average over calibration sets of this size."
    if infinite:
        text += f" {infinite} of them have no finite threshold and get the safe end."
    if small:
        shown = ", ".join(map(repr, small[:4])) + (", ..." if len(small) > 4 else "")
        text += f" Too small for a finite threshold: {shown}; a group needs at least {least} examples."
    state = "alpha" if alpha is not None and bool((after.abs() <= alpha).all()) else "noise"
    history = torch.stack([before.abs().max(), after.abs().max()]).cpu()
    details = {"examples": None, "patterns": len(fitted[0]), "infinite": infinite, "small": small, "needed": least}
    return Report(state == "alpha", 1, before, after, history, seconds, text, details, state)


def look_up(member: Tensor, patterns: Tensor, table: Tensor, otherwise: float) -> Tensor:
    """Row of the table that each membership belongs to, ``(n, C)``; ``otherwise`` where its pattern is not there.

    ``member``: 0 and 1, float64 ``(n, a)``. ``patterns``: bool ``(P, a)``; ``table``: ``(P, C)``.
    """
    known = patterns.to(member.dtype)
    same = member @ known.t() + (1.0 - member) @ (1.0 - known).t()  # columns that agree, (n, P)
    match = same > member.shape[1] - 0.5
    rows = table.index_select(0, match.to(torch.int64).argmax(1))
    return torch.where(match.any(1, keepdim=True), rows, torch.full_like(rows, otherwise))
