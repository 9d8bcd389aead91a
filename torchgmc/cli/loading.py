"""A head from its file, and another file's rows as it needs them."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torchgmc as gmc
from torchgmc.cli import options
from torchgmc.cli.membership import Membership
from torchgmc.cli.source import Source, find_arrays, listing, task_of
from torchgmc.cli.tables import Table, open_table
from torchgmc.deploy.io import load, read_notes
from torchgmc.engine import checks

#: Numbers of one example's scores.
MOST = 10**8


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
    notes = read_notes(path)
    _check_notes(path, notes)
    return head, notes


def _check_notes(path: Path, notes: dict[str, Any]) -> None:
    """Raise unless the notes are such as `calibrate` writes."""
    arrays, scores, groups = notes.get("arrays", {}), notes.get("scores", {}), notes.get("groups", {})
    parts = {"arrays": arrays, "scores": scores, "groups": groups, "matrices": {}}
    if isinstance(groups, dict):
        parts["matrices"] = groups.get("matrices", {})
    wrong = [name for name, part in parts.items() if not isinstance(part, dict)]
    if not wrong:
        shape, names = scores.get("shape") if scores else [], parts["matrices"].values()
        wrong += ["arrays"] * any(not isinstance(name, str) for name in arrays.values())
        wrong += ["scores"] * (
            not isinstance(shape, list) or any(type(size) is not int or not 0 < size <= MOST for size in shape)
        )
        wrong += ["scores"] * (bool(scores) and scores.get("dtype") not in ("float16", "bfloat16", "float32", "float64"))
        wrong += ["matrices"] * any(not isinstance(part, list) or any(not isinstance(x, str) for x in part) for part in names)
    if wrong or math.prod(scores.get("shape") or []) > MOST:
        raise ValueError(f"{str(path)!r} has notes that cannot be used ({(wrong or ['scores'])[0]}); calibrate again.")


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
        found = Membership.from_dict(notes["groups"])
        if [checks.printable(name) for name in found.names] != head.groups:
            raise ValueError(
                f"the notes of the head's file describe the groups {listing(found.names, 4)}, and the head was fitted for "
                f"{listing(head.groups, 4)}; name the columns with --groups, or calibrate again."
            )
        return found
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
