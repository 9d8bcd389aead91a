"""Groups from columns of a file, block by block, and the same groups again from another file.

A column of text, integers or booleans gives one group per value (``sex=f``); a column of numbers is cut at edges; a matrix of
booleans ``(n, a)`` is a membership as it is. What was found, the levels of each column and the combinations that occur, is
written into the head's file under ``notes``: so ``audit`` and ``apply`` need the same columns and no more.

Values are compared by how they are written: 3 in an ``.npz`` is 3 in a ``.csv``.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchgmc.cli.tables import Array, Block, Table, to_numbers
from torchgmc.groups.columns import factorize
from torchgmc.groups.groups import Column, Groups

__all__ = ["Membership", "Options"]


@dataclass(frozen=True)
class Options:
    """How groups are made of columns; see :meth:`torchgmc.Groups.from_columns`."""

    intersections: int = 1
    cuts: Mapping[str, Sequence[float]] = field(default_factory=dict)
    min_size: int = 1
    small: str = "error"
    missing: str = "error"
    overall: bool = False
    names: Sequence[str] = ()


@dataclass(frozen=True)
class Membership:
    """Named groups, and how they follow from the columns of a file.

    Attributes:
        groups: those made of columns, on no rows; None if there are none.
        matrices: name of each membership matrix, and the names of its groups.
    """

    groups: Groups | None
    matrices: Mapping[str, Sequence[str]]

    @property
    def names(self) -> list[str]:
        """Of all groups, in the order of the membership."""
        first = [] if self.groups is None else list(self.groups.names)
        return first + [name for names in self.matrices.values() for name in names]

    @property
    def columns(self) -> list[str]:
        """Columns needed as they are: a value may be missing, also in one that is cut."""
        return [] if self.groups is None else [c.name for c in self.groups.columns]

    @classmethod
    def learn(cls, table: Table, columns: Sequence[str], options: Options, rows: int | None = None) -> Membership:
        """One pass over the group columns: which values occur, and together with which others."""
        matrices, plain, cut = {}, [], [name for name in columns if name in options.cuts]
        foreign = [name for name in options.cuts if name not in columns]
        if foreign:
            raise ValueError(f"--cut names {foreign[0]!r}, which is not among --groups {','.join(columns)}.")
        for name in columns:
            width = _width(table, name)
            if width is not None:
                matrices[name] = _matrix_names(name, width, options.names, sum(_width(table, c) is not None for c in columns))
            elif name not in cut:
                plain.append(name)
        names = [name for name in columns if name not in matrices]
        if not names:
            return cls(None, matrices)
        seen: Counter[tuple[Any, ...]] = Counter()
        for block in table.blocks([], [*cut, *plain], rows):
            coded = [
                _bins(name, block, options.cuts[name]) if name in cut else factorize(name, _labels(name, block.arrays[name]))
                for name in names
            ]
            if options.missing == "error":
                _check_missing(names, coded, block.start)
            found, counts = np.unique(np.stack([codes for _, codes in coded], 1), axis=0, return_counts=True)
            for row, count in zip(found.tolist(), counts.tolist(), strict=True):
                seen[tuple(values[code] for (values, _), code in zip(coded, row, strict=True))] += count
        if not seen:
            raise ValueError(f"{str(table.path)!r} has no rows.")
        # Groups are sums of these combinations, so min_size rows of each tell as much as all of them.
        often = [(row, min(count, max(1, options.min_size))) for row, count in seen.items()]
        data = {
            name: _typed(name, [row[j] for row, count in often for _ in range(count)], name in cut)
            for j, name in enumerate(names)
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `small` was asked for; the groups kept are shown
            groups = Groups.from_columns(
                data,
                intersections=options.intersections,
                bins={name: options.cuts[name] for name in cut},
                min_size=options.min_size,
                small=options.small,
                missing=options.missing,
                overall=options.overall,
            )
        return cls(_without_rows(groups.columns, groups._blocks), matrices)

    def of(self, block: Block, unknown: str = "error") -> Tensor:
        """Membership of the rows of a block, bool ``(n, a)``."""
        parts = []
        if self.groups is not None:
            data = {c.name: block.arrays[c.name] for c in self.groups.columns}
            for c in self.groups.columns:
                cut = c.edges is not None
                data[c.name] = _floats(c.name, data[c.name], block.start) if cut else _labels(c.name, data[c.name])
            groups = self._spelled.transform(data, unknown="none")
            if unknown == "error":
                self._check_known(groups.codes, data, block.start)
            parts.append(groups.membership)
        for name, names in self.matrices.items():
            table = to_numbers(name, block.arrays[name], block.start)
            if table.ndim == 1 and len(names) == 1:
                table = table[:, None]
            if table.ndim != 2 or table.shape[1] != len(names):
                raise ValueError(
                    f"{name!r} must be a membership of shape (n, {len(names)}), one column per group, got {table.shape}."
                )
            wrong = np.argwhere((table != 0) & (table != 1))
            if len(wrong):
                row, column = wrong[0].tolist()
                raise ValueError(
                    f"{name!r} must hold memberships, True and False or 1 and 0, but has {table[row, column]} in row "
                    f"{block.start + row}, column {column}."
                )
            parts.append(torch.from_numpy(table != 0))
        return torch.cat(parts, 1)

    @cached_property
    def _spelled(self) -> Groups:
        """The groups with every label also as text, or as the number that a text writes."""
        assert self.groups is not None
        columns = tuple(replace(c, labels=_spellings(c.labels)) for c in self.groups.columns)
        return _without_rows(columns, self.groups._blocks)

    def _check_known(self, codes: Tensor, data: Mapping[str, Array], start: int) -> None:
        assert self.groups is not None
        lost = (codes < 0).nonzero()
        if len(lost):
            row, place = lost[0].tolist()
            column = self.groups.columns[place]
            value = data[column.name][row]
            shown = "no value" if value is None or value != value else repr(value.item() if hasattr(value, "item") else value)
            levels = ", ".join(map(str, list(column.labels)[:12])) + (", ..." if len(column.labels) > 12 else "")
            raise ValueError(
                f"group column {column.name!r} has {shown} in row {start + row}, which the calibration data did not have; "
                f"known: {levels or 'numbers'}. With --unknown none such rows are in no group of this column."
            )

    def to_json(self) -> dict[str, Any]:
        """What a file keeps."""
        columns, blocks = [], []
        if self.groups is not None:
            for c in self.groups.columns:
                columns.append({"name": c.name, "levels": c.levels, "labels": list(c.labels.items()), "edges": c.edges})
            blocks = [[list(combo), keys.tolist()] for combo, keys in self.groups._blocks]
        return {"columns": columns, "combinations": blocks, "matrices": {k: list(v) for k, v in self.matrices.items()}}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Membership:
        """The groups that :meth:`to_json` describes."""
        columns = tuple(
            Column(
                c["name"], tuple(c["levels"]), {label: level for label, level in c["labels"]}, c["edges"] and tuple(c["edges"])
            )
            for c in found["columns"]
        )
        blocks = [(tuple(combo), np.array(keys, dtype=np.int64)) for combo, keys in found["combinations"]]
        return cls(_without_rows(columns, blocks) if columns else None, found["matrices"])


def _without_rows(columns: tuple[Column, ...], blocks: Any) -> Groups:
    codes = torch.empty(len(columns), 0, dtype=torch.int32).T
    return Groups(columns, codes, blocks, [False] * len(columns))


def _width(table: Table, name: str) -> int | None:
    """Columns of a matrix; None for a column."""
    first = next(iter(table.blocks([], [name], 1)), None)
    if first is None or first.arrays[name].ndim == 1:
        return None
    if first.arrays[name].ndim > 2:
        raise ValueError(f"group column {name!r} must have shape (n,) or (n, groups), got {first.arrays[name].shape} per row.")
    return int(first.arrays[name].shape[1])


def _matrix_names(name: str, width: int, given: Sequence[str], matrices: int) -> list[str]:
    if not given:
        return [f"{name}[{k}]" for k in range(width)]
    if matrices > 1:
        raise ValueError("--group-names names the columns of one membership matrix, but --groups has several.")
    if len(given) != width:
        raise ValueError(f"--group-names must name the {width} columns of {name!r}, got {len(given)} names.")
    return list(given)


def _bins(name: str, block: Block, edges: Sequence[float]) -> tuple[list[Any], Array]:
    """One value for each bin, and the bin of each row: which bins occur is all that matters. None is a missing value."""
    numbers = _floats(name, block.arrays[name], block.start)
    codes = np.searchsorted(np.asarray(edges, dtype=np.float64), numbers, side="right")
    return [-np.inf, *edges, None], np.where(np.isnan(numbers), len(edges) + 1, codes)


def _floats(name: str, values: Array, start: int) -> Array:
    """Numbers of a column that is cut, float64; NaN where one is missing."""
    try:
        return np.asarray(values.astype(np.float64))  # of None it makes NaN
    except (TypeError, ValueError):
        known = np.array(["nan" if value is None else value for value in values.tolist()], dtype=object)
        return np.asarray(to_numbers(name, known, start).astype(np.float64))


def _check_missing(names: Sequence[str], coded: Sequence[tuple[Sequence[Any], Array]], start: int) -> None:
    """No value is missing; says where the first one is, in the words of the command line."""
    for name, (values, codes) in zip(names, coded, strict=True):
        absent = np.isin(codes, [code for code, value in enumerate(values) if value is None])
        if absent.any():
            raise ValueError(
                f"group column `{name}` has no value in row {start + int(absent.argmax())}; fill it in, or make a group "
                f"'{name}=missing' of such rows with --missing level."
            )


def _labels(name: str, values: Array) -> Array:
    """Labels as text, integers or booleans; None where one is missing."""
    if values.dtype.kind == "f" or (values.dtype.kind == "O" and any(isinstance(v, float) for v in values)):
        raise ValueError(f"group column {name!r} holds numbers with a point; cut it: --cut {name}=EDGE,EDGE.")
    if values.dtype.kind == "S":
        return np.char.decode(values, "utf-8")
    if values.dtype.kind not in "biuUO" or not all(v is None or isinstance(v, str | int) for v in values.tolist()):
        raise ValueError(f"group column {name!r} holds {values.dtype}; labels are text, integers or booleans.")
    return values


def _typed(name: str, labels: list[Any], cut: bool) -> list[Any]:
    """Text that is all integers, or all True and False, is that: a csv gives the groups that an npz gives."""
    if cut:
        return [np.nan if label is None else label for label in labels]
    texts = {label for label in labels if isinstance(label, str)}
    if not texts or any(label is not None and not isinstance(label, str) for label in labels):
        return labels
    if all(_is_integer(text) for text in texts):
        return [label if label is None else int(label) for label in labels]
    if texts <= {"True", "False"}:
        return [label if label is None else label == "True" for label in labels]
    if all(_is_number(text) for text in texts):
        raise ValueError(f"group column {name!r} holds numbers with a point; cut it: --cut {name}=EDGE,EDGE.")
    return labels


def _is_integer(text: str) -> bool:
    return text.lstrip("-").isascii() and text.lstrip("-").isdigit() and str(int(text)) == text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _spellings(labels: dict[Any, int]) -> dict[Any, int]:
    texts = {str(label): level for label, level in labels.items() if label is not None}
    numbers = {int(label): level for label, level in texts.items() if _is_integer(label)}
    return numbers | texts | labels
