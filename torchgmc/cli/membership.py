"""Groups from columns of a file, block by block, and the same groups again from another file.

A column of text, integers or booleans gives one group per value (``sex=f``); a column of numbers is cut at edges; a matrix of
booleans ``(n, a)`` is a membership as it is. How groups are computed from columns is written into the head's file
(:meth:`torchgmc.Groups.to_dict`), so ``audit`` and ``apply`` need only the same columns.

Values are compared by how they are written: 3 in an ``.npz`` is 3 in a ``.csv``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchgmc.cli import options
from torchgmc.cli.tables import Block, Table, check_names, to_numbers
from torchgmc.groups.columns import ColumnError
from torchgmc.groups.groups import Groups

#: What to do about a column, as options of the command line.
_REMEDIES = {
    "floats": "bin it with --cut {0}=EDGE,EDGE",
    "missing": "fill it in, or make a group '{0}=missing' of such rows with --missing level",
    "unknown": "with --unknown none (`observe` has none: --like must know all values) such rows are in no group of this column",
}


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except ColumnError as error:
        remedy = _REMEDIES[error.kind].format(error.column)
        raise ValueError(f"group column `{error.column}` {error.problem}; {remedy}.") from error


@dataclass(frozen=True)
class Membership:
    """Named groups, and how they follow from the columns of a file.

    ``groups``: those made of columns, on no rows; None if there are none. ``matrices``: name of each membership matrix, and the
    names of its groups.
    """

    groups: Groups | None
    matrices: Mapping[str, Sequence[str]] = field(default_factory=dict)

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
    def learn(cls, table: Table, how: options.Grouping, rows: int | None = None) -> Membership | None:
        """One pass over the group columns; None without any."""
        columns, bins = options.words(how.groups), options.cuts(how.cut or ())
        if not columns:
            return None
        check_names(table, columns)
        if foreign := [name for name in bins if name not in columns]:
            raise ValueError(f"--cut names {foreign[0]!r}, which is not among --groups {','.join(columns)}.")
        if not table.count(columns):
            raise ValueError(f"{str(table.path)!r} has no rows.")
        matrices = {name: width for name in columns if (width := _width(table, name)) is not None}
        given = options.words(how.group_names)
        named = {name: _matrix_names(name, width, given, len(matrices)) for name, width in matrices.items()}
        plain = [name for name in columns if name not in matrices]
        if not plain:
            return cls(None, named)
        blocks = ({name: block.arrays[name] for name in plain} for block in table.blocks([], plain, rows))
        with _told(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `small` was asked for; the groups kept are shown
            asked = {name: getattr(how, name) for name in ("intersections", "min_size", "small", "missing", "overall")}
            groups = Groups.learn(blocks, bins=bins, spelled=True, **asked)
            groups.to_dict()  # a label that no file can hold raises before the fit
        return cls(groups, named)

    def of(self, block: Block, unknown: str = "error") -> Tensor:
        """Membership of the rows of a block, bool ``(n, a)``."""
        parts = []
        if self.groups is not None:
            with _told():
                parts.append(self.groups.transform(block.arrays, unknown, block.start).membership)
        for name, names in self.matrices.items():
            table = to_numbers(name, block.arrays[name], block.start)
            if table.ndim == 1 and len(names) == 1:
                table = table[:, None]
            if table.ndim != 2 or table.shape[1] != len(names):
                raise ValueError(f"{name!r} must be a membership of shape (n, {len(names)}), got {table.shape}.")
            wrong = np.argwhere((table != 0) & (table != 1))
            if len(wrong):
                row, column = wrong[0].tolist()
                raise ValueError(
                    f"{name!r} must hold memberships, True and False or 1 and 0, but has {table[row, column]} in row "
                    f"{block.start + row}, column {column}."
                )
            parts.append(torch.from_numpy(table != 0))
        return torch.cat(parts, 1)

    def to_dict(self) -> dict[str, Any]:
        """What the notes of a file keep of groups that are not all made of columns."""
        return ({} if self.groups is None else self.groups.to_dict()) | {"matrices": {k: list(v) for k, v in self.matrices.items()}}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Membership:
        """The groups that :meth:`to_dict` describes, or the notes of a file of version 0.1."""
        return cls(Groups.from_dict(found).as_spelled() if found.get("columns") else None, found.get("matrices", {}))


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
