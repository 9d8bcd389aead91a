"""A head from its file, and another file's rows as it needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torchgmc as gmc
from torchgmc.cli import options
from torchgmc.cli.membership import Membership
from torchgmc.cli.source import Source, find_arrays, listing, task_of
from torchgmc.cli.tables import Table, open_table
from torchgmc.deploy.io import load, read_notes

__all__ = ["load_head", "open_source"]


def load_head(path: Path) -> tuple[gmc.Head, dict[str, Any]]:
    """The fitted head, and the notes that `calibrate` left in its file."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file {str(path)!r}.")
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder; pass the file of a head.")
    head = load(path)
    task_of(type(head))  # or say that there is none
    if not head.is_fitted:
        raise ValueError(f"the head in {str(path)!r} is not fitted.")
    return head, read_notes(path)


def open_source(
    head: gmc.Head,
    notes: dict[str, Any],
    data: Path,
    given: Mapping[str, str | None],
    groups: str | None,
    wanted: Sequence[str],
    rows: int | None = None,
    unknown: str = "error",
) -> Source:
    """The rows of a file for a head.

    Args:
        head, notes: from :func:`load_head`.
        data: the file.
        given: names of arrays on the command line, by role.
        groups: of group columns, for a head that was saved without notes.
        wanted: roles that must be there.
        rows, unknown: as in :class:`~torchgmc.cli.source.Source`.
    """
    if unknown not in ("error", "none"):
        raise ValueError(f"--unknown must be error or none, got {unknown!r}.")
    kind, task, table = type(head), task_of(type(head)), open_table(data)
    arrays = find_arrays(table, task, given, notes.get("arrays", {}), wanted)
    return Source(table, kind, arrays, _membership(head, notes, table, options.words(groups)), rows, unknown)


def _membership(head: gmc.Head, notes: dict[str, Any], table: Table, given: list[str]) -> Membership | None:
    if not head.grouped:
        if given:
            raise ValueError("--groups: this head was made without groups.")
        return None
    if not given and head.named_groups is not None:
        return Membership(head.named_groups.as_spelled())
    if not given and "groups" in notes:
        return Membership.from_dict(notes["groups"])
    if len(given) == 1 or (not given and "groups" in table.names):  # a matrix
        return Membership(None, {given[0] if given else "groups": head.groups})
    columns = given or head.groups  # a column of True and False for each group
    if len(columns) != len(head.groups) or any(name not in table.names for name in columns):
        raise ValueError(
            f"the head has {len(head.groups)} groups ({listing(head.groups, 4)}), and its file does not say how they follow "
            f"from columns: {str(table.path)!r}, which has {listing(table.names)}, must hold a membership matrix "
            f"(n, {len(head.groups)}) named with --groups NAME, or a column of 0 and 1 for each group."
        )
    return Membership(None, {column: [name] for column, name in zip(columns, head.groups, strict=True)})
