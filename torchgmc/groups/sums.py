"""Sums over every combination of levels of many columns: joint tables first, then their margins.

A sum over the groups "level a of column 1 and level b of column 2 and ..." for all combinations of columns at once needs no
membership table. Rows are added up in a few *joint tables*, each over several columns, chosen so that every combination
lies inside one of them; a combination's own table is a margin of that joint table, found without touching the rows
again. C(k, 3) passes over the rows become a few dozen.
"""

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Combo = tuple[int, ...]
Keys = npt.NDArray[np.int64]

#: Cells of a joint table of several combinations: it stays in the processor's cache, and torch sums it without waking threads.
JOINT = 2**15 - 1
#: Cells of the table of a single combination; above, its groups are found by bisection.
SINGLE = 2**22
#: Rows added at once on the CPU: their keys stay in cache, below the size from which torch wakes threads.
ROWS = 2**15
#: Elements of the largest table that sums make at once (128 MB in float64).
ELEMENTS = 2**24


class Step(NamedTuple):
    """One margin: table ``source``, seen in this ``shape``, summed over these axes (the first axis is u)."""

    source: int
    shape: tuple[int, ...]
    axes: tuple[int, ...]


class Joint(NamedTuple):
    """A joint table, and the combinations read from it.

    ``columns``: of the table, the one with most levels first: it is summed away first. ``combos``: the combinations. ``steps``:
    each adds one table to a list that begins with the joint table. ``leaves``: for each combination the place of its table in
    that list.
    """

    columns: Combo
    combos: tuple[Combo, ...]
    steps: tuple[Step, ...]
    leaves: tuple[int, ...]


class Cover(NamedTuple):
    """Joint tables that hold every combination, and the combinations too large for any table."""

    joints: tuple[Joint, ...]
    large: tuple[Combo, ...]


def cover(combos: Sequence[Combo], radices: Sequence[int], n: int) -> Cover:
    """Few joint tables of at most :data:`JOINT` cells such that each combination lies in one of them.

    Greedy: start from the longest combination left, add the column that completes the most combinations for the cells it
    costs, until no column fits. A combination above the limit has a separate table up to ``8 n`` (:data:`SINGLE` at
    most) cells.

    ``combos``: distinct sets of columns, each increasing; the empty one is everybody. ``radices``: number of levels of each
    column. ``n``: number of rows.
    """
    limit = min(JOINT, max(256, n // 4))
    single = min(SINGLE, max(JOINT, 8 * n))
    # A column with no level has no rows in it either; a radix of at least 2 keeps the logarithm positive.
    price = np.log([max(radix, 2) for radix in radices])
    ordered = sorted(combos, key=lambda combo: (-len(combo), combo))
    size = [math.prod(radices[j] for j in combo) for combo in ordered]
    large = tuple(combo for combo, cells in zip(ordered, size, strict=True) if cells > single)
    ordered = [combo for combo, cells in zip(ordered, size, strict=True) if cells <= single]
    width, k = max(map(len, ordered), default=0), len(radices)
    members = np.full((len(ordered), width), k)  # column k does not exist: padding
    for i, combo in enumerate(ordered):
        members[i, : len(combo)] = combo
    order = (members < k).sum(1)
    touching = [(members == j).any(1).nonzero()[0] for j in range(k)]
    worth = np.r_[0.0, 0.125 ** np.arange(max(width, 1))]  # of a combination that still lacks so many columns
    left = np.ones(len(ordered), dtype=bool)

    joints = []
    for first, combo in enumerate(ordered):
        if not left[first]:
            continue
        lacking = order.copy()
        score = np.bincount(members[left].ravel(), np.repeat(worth[lacking[left]], width), minlength=k + 1)
        columns: list[int] = []
        cells, waiting = 1, list(combo)
        while waiting:
            column = waiting.pop(0)
            columns.append(column)
            cells *= radices[column]
            hit = touching[column][left[touching[column]]]
            gain = worth[lacking[hit] - 1] - worth[lacking[hit]]
            lacking[hit] -= 1
            score += np.bincount(members[hit].ravel(), np.repeat(gain, width), minlength=k + 1)
            if not waiting:
                fits = np.array([cells * radix <= limit for radix in radices])
                fits[columns] = False
                rate = np.where(fits, score[:k] / price, 0.0)
                if rate.max(initial=0.0) > 1e-9:
                    waiting.append(int(rate.argmax()))
        done = left & (lacking == 0)
        left &= ~done
        joints.append(arrange(columns, [ordered[i] for i in done.nonzero()[0]], radices))
    return Cover(tuple(joints), large)


def arrange(columns: Sequence[int], combos: Sequence[Combo], radices: Sequence[int]) -> Joint:
    """The margins of one joint table in an order that shares work: fewer than two sums per combination.

    A table serves a set of combinations. Columns that none of them has are summed away at once; then a column that some
    have and some lack divides the set in two. The widest columns go first, so tables shrink fast.
    """
    columns = tuple(sorted(columns, key=lambda j: (-radices[j], j)))
    steps: list[Step] = []
    leaves = [0] * len(combos)
    bits = [sum(1 << j for j in combo) for combo in combos]
    stack = [(0, columns, list(range(len(combos))))]
    while stack:
        source, axes, served = stack.pop()
        union = functools.reduce(operator.or_, (bits[i] for i in served))
        if any(not union >> j & 1 for j in axes):
            steps.append(_step(source, axes, union, radices))
            source, axes = len(steps), tuple(j for j in axes if union >> j & 1)
        if len(served) == 1:
            leaves[served[0]] = source
            continue
        common = functools.reduce(operator.and_, (bits[i] for i in served))
        column = next(j for j in axes if not common >> j & 1)
        stack.append((source, axes, [i for i in served if bits[i] >> column & 1]))
        stack.append((source, axes, [i for i in served if not bits[i] >> column & 1]))
    return Joint(columns, tuple(combos), tuple(steps), tuple(leaves))


def _step(source: int, axes: Combo, kept: int, radices: Sequence[int]) -> Step:
    """Sum away the columns that are not among the bits of ``kept``; neighbours of one fate are one axis."""
    runs = [(fate, math.prod(radices[j] for j in run)) for fate, run in itertools.groupby(axes, lambda j: kept >> j & 1)]
    return Step(source, tuple(size for _, size in runs), tuple(k for k, (fate, _) in enumerate(runs, 1) if not fate))


def tabulate(codes: Tensor, radices: Sequence[int], joint: Joint, values: Tensor) -> list[Tensor]:
    """Sums of ``values`` over the cells of each combination of one joint table.

    ``codes``: the cell of each row in each column, integers from 0 to ``radix - 1``, shape ``(k, n)``. ``radices``: number of
    cells of each column. ``joint``: from :func:`cover`. ``values``: shape ``(u, n)``, floating point. Returns: For each
    combination its table, flattened to shape ``(u, cells)``; its axes are in the order of ``joint.columns``.
    """
    u = values.shape[0]
    tables = [_joint(codes, joint.columns, [radices[j] for j in joint.columns], values)]
    for source, shape, axes in joint.steps:
        tables.append(tables[source].view(u, *shape).sum(axes).view(u, -1))
    return [tables[leaf] for leaf in joint.leaves]


def _joint(codes: Tensor, columns: Combo, sizes: list[int], values: Tensor) -> Tensor:
    """Sum of the values in each cell of the joint table, ``(u, cells)``, one pass over the rows."""
    (u, n), cells = values.shape, math.prod(sizes)
    table = values.new_zeros(u * cells)
    index = torch.int32 if u * cells < 2**31 else torch.int64
    offset = torch.arange(u, dtype=index, device=values.device)[:, None] * cells
    rows = max(1024, ROWS // u) if values.device.type == "cpu" else max(n, 1)
    digits = [codes[j] for j in columns] or [codes.new_zeros(n)]
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        key = digits[0][part]
        for digit, size in zip(digits[1:], sizes[1:], strict=True):
            key = torch.add(digit[part], key, alpha=size)
        if u > 1:
            key = (key + offset).flatten()
        table.index_add_(0, key, values[:, part].flatten())
    return table.view(u, cells)


def positions(keys: Keys, combo: Combo, levels: Sequence[int], axes: Combo, radices: Sequence[int]) -> Keys:
    """Where the groups of a combination stand in its flattened table.

    ``keys``: of the groups: their levels as digits, in the order of ``combo``. ``combo``: the columns. ``levels``: number of
    levels of each column. ``axes``: the columns in the order of the table. ``radices``: number of cells of each column in the
    table: one more than its levels, the first, if rows may have none.
    """
    if not combo:
        return np.zeros_like(keys)
    digits = dict(zip(combo, np.unravel_index(keys, [levels[j] for j in combo]), strict=True))
    shifted = [digits[j] + (radices[j] - levels[j]) for j in axes]
    return np.ravel_multi_index(shifted, [radices[j] for j in axes]).astype(np.int64)


class Tables:
    """The joint tables of given groups on given rows, ready to be filled again and again.

    ``codes``: level of each row in each column, -1 for none, shape ``(k, n)``. ``levels``: number of levels of each column.
    ``gaps``: whether a column may hold -1. ``blocks``: the groups: combinations of columns, and the sorted keys of each.
    ``plan``: of :func:`cover` for at least these combinations, if there is one already.
    """

    def __init__(
        self,
        codes: Tensor,
        levels: Sequence[int],
        gaps: Sequence[bool],
        blocks: Sequence[tuple[Combo, Keys]],
        plan: Cover | None = None,
    ) -> None:
        self.codes, self.levels, self.gaps, self.blocks = codes, levels, gaps, blocks
        self.place = {combo: i for i, (combo, _) in enumerate(blocks)}
        # Rows without a level go to a separate cell, the first of the column.
        self.radices = [size + gap for size, gap in zip(levels, gaps, strict=True)]
        self.cells = codes + torch.tensor(gaps, dtype=codes.dtype, device=codes.device)[:, None] if any(gaps) else codes
        plan = plan or cover(list(self.place), self.radices, codes.shape[1])
        self.joints = [joint for joint in map(self._needed, plan.joints) if joint.combos]
        self.large = [combo for combo in plan.large if combo in self.place]
        sizes = [math.prod(self.radices[j] for j in joint.columns) for joint in self.joints]
        self.largest = max([*sizes, *[len(blocks[self.place[combo]][1]) for combo in self.large]], default=1)
        self.num_groups = sum(len(keys) for _, keys in blocks)
        # The groups in the order in which they are found, and for each joint table where they stand in its margins.
        found = [self.place[combo] for joint in self.joints for combo in joint.combos]
        found += [self.place[combo] for combo in self.large]
        starts = np.cumsum([0] + [len(keys) for _, keys in blocks])
        order = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in found])
        self.order = torch.from_numpy(np.argsort(order)).to(codes.device)
        self.reads = [torch.from_numpy(self._read(joint)).to(codes.device) for joint in self.joints]

    def _needed(self, joint: Joint) -> Joint:
        """The same table for the combinations that have a group."""
        combos = [combo for combo in joint.combos if combo in self.place]
        if len(combos) == len(joint.combos):
            return joint
        columns = [j for j in joint.columns if any(j in combo for combo in combos)]
        return arrange(columns, combos, self.radices) if combos else joint._replace(combos=())

    def _read(self, joint: Joint) -> Keys:
        """Where the groups of a joint table stand in its margins, put one after the other."""
        found, start = [], 0
        for combo in joint.combos:
            axes = tuple(j for j in joint.columns if j in combo)
            found.append(start + positions(self.blocks[self.place[combo]][1], combo, self.levels, axes, self.radices))
            start += math.prod(self.radices[j] for j in axes)
        return np.concatenate(found)

    def sums(self, values: Tensor) -> Tensor:
        """Sum of the values ``(u, n)`` over the rows of each group, ``(u, a)``."""
        if not len(values):
            return values.new_zeros(0, self.num_groups)
        return torch.cat([self._sums(some) for some in torch.split(values, max(1, ELEMENTS // self.largest))])

    def _sums(self, values: Tensor) -> Tensor:
        parts = []
        for joint, read in zip(self.joints, self.reads, strict=True):
            parts.append(torch.cat(tabulate(self.cells, self.radices, joint, values), 1).index_select(1, read))
        for combo in self.large:
            keys = self.blocks[self.place[combo]][1]
            ids = self.ids(self.codes, combo, keys) + 1  # 0: rows in none of the groups
            parts.append(values.new_zeros(len(values), len(keys) + 1).index_add_(1, ids, values)[:, 1:])
        return torch.cat(parts, 1).index_select(1, self.order)

    def ids(self, codes: Tensor, combo: Combo, keys: Keys) -> Tensor:
        """Which of the groups of one combination each row of ``codes`` (k, n) is in, -1 for none."""
        radices = [self.levels[j] for j in combo]
        rows = torch.zeros(codes.shape[1], dtype=torch.int64, device=codes.device)
        for j, radix in zip(combo, radices, strict=True):
            rows = torch.add(codes[j], rows, alpha=radix)
        for j in combo:
            if self.gaps[j]:  # a negative key would read another group's entry
                rows = rows.where(codes[j] >= 0, -1)
        known, size = torch.from_numpy(keys).to(codes.device), math.prod(radices)
        if size <= SINGLE:  # one entry more, which the row -1 finds
            position = torch.arange(len(keys), device=codes.device)
            return position.new_full((size + 1,), -1).scatter_(0, known, position)[rows]
        found = torch.searchsorted(known, rows).clamp(max=len(keys) - 1)
        return torch.where(known[found] == rows, found, -1)


def occurring(codes: Tensor, levels: list[int], combos: list[Combo]) -> tuple[Cover, dict[Combo, tuple[Keys, Keys]]]:
    """Keys of the level combinations that occur and their counts; of a single column, of all its levels.

    ``codes``: the level of each row in each column, shape ``(num_columns, n)``. ``levels``: number of levels of each column.
    ``combos``: the combinations of columns.
    """
    found = {}
    plan = cover(combos, levels, codes.shape[1])
    ones = torch.ones(1, codes.shape[1], dtype=torch.float64)
    for joint in plan.joints:
        for combo, table in zip(joint.combos, tabulate(codes, levels, joint, ones), strict=True):
            axes = [j for j in joint.columns if j in combo]
            cells = table.numpy().reshape([levels[j] for j in axes])
            counts = cells.transpose([axes.index(j) for j in combo]).ravel().astype(np.int64)
            keys = np.arange(len(counts), dtype=np.int64) if len(combo) == 1 else counts.nonzero()[0]
            found[combo] = keys, counts[keys]
    for combo in plan.large:
        radices = [levels[j] for j in combo]
        if math.prod(radices) >= 2**62:
            raise ValueError(f"`intersections` of {len(combo)} columns with {radices} levels are too many; merge levels first.")
        rows = np.ravel_multi_index([codes[j].numpy() for j in combo], radices).astype(np.int64)
        keys, counts = np.unique(rows, return_counts=True)
        found[combo] = keys, counts.astype(np.int64)
    return plan, found
