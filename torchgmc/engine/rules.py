"""Trees in words."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchgmc.engine import trees


def raw(grown: Sequence[trees.Grown], coded: trees.Coded, lacking: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Column, cut and kind of each split ``(T, N)``, as :func:`torchgmc.engine.trees.walk` takes them; ``lacking``: has NaN."""
    column, code, missing = np.stack([np.stack(tree[:3]) for tree in grown], 1)
    cuts = np.pad(coded.cuts.astype(np.float64), ((0, 0), (0, 1)), constant_values=math.inf)[column, code]
    kind = coded.equal[column] + 2 * missing + 4 * lacking.cpu().numpy()[column]
    found = [torch.from_numpy(part).to(lacking.device) for part in (column, cuts, kind)]
    return found[0], found[1], found[2]


def words(
    column: Tensor,
    cut: Tensor,
    kind: Tensor,
    leaf: int,
    name: Callable[[int], str],
    level: Callable[[int, float], str],
    plain: Callable[[int], bool] = lambda j: False,
) -> str:
    """The conditions of a leaf, joined by "and", in the order of the columns; those on one column are merged.

    ``column``, ``cut``, ``kind``: of each split of one tree ``(N,)``, see :func:`torchgmc.engine.trees.walk`. ``leaf``: which.
    ``name``: of a column; ``level``: of a value in it; ``plain``: the column is a group, in it or not.
    """
    node, path = leaf + len(column), []
    while node:
        path.append(((node - 1) // 2, node % 2 == 0))
        node = (node - 1) // 2
    ends: dict[int, list[Any]] = {}  # of numbers: low, high, may be missing
    other: set[tuple[int, str]] = set()
    splits = list(zip(column.tolist(), cut.tolist(), kind.tolist(), strict=True))
    for at, right in reversed(path):
        j, value, how = splits[at]
        lacking = how >= 4 and (how // 2 % 2 == 1) == right
        if math.isinf(value):
            if how // 2 % 2:  # else nobody goes right
                other.add((j, f"{name(j)} is {'' if right else 'not '}missing"))
        elif how % 2:
            other.add((j, f"{name(j)} {'=' if right else '!='} {level(j, value)}" + " (or missing)" * lacking))
        elif plain(j):
            other.add((j, ("" if right else "not ") + name(j)))
        else:
            low, high, both = ends.get(j, [-math.inf, math.inf, True])
            ends[j] = [max(low, value), high, both and lacking] if right else [low, min(high, value), both and lacking]
    parts = []
    for j, (low, high, lacking) in sorted(ends.items()):
        text = f"{name(j)} >= {level(j, low)}" if math.isinf(high) else f"{name(j)} < {level(j, high)}"
        if not math.isinf(low) and not math.isinf(high):
            text = f"{level(j, low)} <= {name(j)} < {level(j, high)}"
        parts.append(text + " (or missing)" * lacking)
    return " and ".join([*parts, *(text for _, text in sorted(other))])
