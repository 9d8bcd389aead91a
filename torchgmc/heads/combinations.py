"""Combinations of groups: groups overlap, so each combination has its own threshold."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchgmc.audits.tabular import Table
from torchgmc.engine import checks
from torchgmc.groups.cells import pattern_ids
from torchgmc.groups.groups import Groups, check_groups

if TYPE_CHECKING:
    from torchgmc.heads.base import Head

#: Rows of a table of thresholds; the head's file has all.
MOST_THRESHOLDS = 24


def combinations(head: "Head", groups: Any = None) -> tuple[Tensor, Tensor]:
    """Combinations of groups ``(c, a)``, most frequent first, and the share of each ``(c,)`` (NaN if nobody was counted).

    ``head``: whose groups they are. ``groups``: membership of examples to count; those of the calibration if omitted, each
    group by itself if unknown.
    """
    if not head.grouped:
        return torch.ones(1, 1, dtype=torch.bool), torch.ones(1)
    if groups is not None:
        rows = groups.num_rows if isinstance(groups, Groups) else _length(groups)
        member = checks.ordinary("groups", check_groups(groups, rows, head.groups))
        if not rows:
            raise ValueError("`groups` must have at least one row.")
        weight = torch.ones(len(member))
    elif head.statistics is not None:
        member, weight = head.statistics.cells()
    else:
        return torch.eye(head.num_groups, dtype=torch.bool), torch.full((head.num_groups,), math.nan)
    place, patterns = pattern_ids(member.cpu())
    total = torch.zeros(len(patterns), dtype=torch.float64).index_add_(0, place, weight.double().cpu())
    order = total.argsort(descending=True, stable=True)
    return patterns[order], (total / total.sum())[order]


def _length(table: Any) -> int:
    return len(table) if hasattr(table, "__len__") and getattr(table, "shape", True) != () else 0


def combination_names(head: "Head", patterns: Tensor) -> list[str]:
    """Name of each combination; a group that all of them belong to is named only where there is no other."""
    common = patterns.all(0).tolist() if len(patterns) > 1 else [False] * head.num_groups
    names = []
    for pattern in patterns.tolist():
        inside = [name for name, member in zip(head.groups, pattern, strict=True) if member]
        own = [name for name, member, shared in zip(head.groups, pattern, common, strict=True) if member and not shared]
        names.append(" + ".join(own or inside) or "none of the groups")
    return names


def threshold_figures(head: "Head") -> dict[str, Any]:
    """The report's figure of a head whose threshold depends on the groups only."""
    from torchgmc import plots

    caption = "Threshold of each combination of groups, most frequent first"
    return {caption: lambda dark: plots.thresholds(head, dark=dark)}


def threshold_tables(head: "Head") -> list[Table]:
    """The same as a table."""
    patterns, mass = (part[:MOST_THRESHOLDS] for part in combinations(head))
    values = head.group_thresholds(patterns)
    names = [f"threshold, class {c}" for c in range(values.shape[1])] if values.shape[1] > 1 else ["threshold"]
    rows = [
        [name, f"{100 * part:.1f} %" if part == part else "-", *(f"{v:.5g}" for v in row)]
        for name, part, row in zip(combination_names(head, patterns), mass.tolist(), values.tolist(), strict=True)
    ]
    return [Table(["groups", "share", *names], rows, ["share", *names], wrapped=["groups"])]
