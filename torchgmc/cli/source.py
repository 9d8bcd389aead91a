"""The rows of a file, block by block, as the arguments of a head: which arrays are read, and what is made of them.

The head is new, or comes from its own file (:func:`load_head`), whose notes say how to read other data in the same way.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torchgmc as gmc
from torchgmc.cli import options
from torchgmc.cli.membership import Membership
from torchgmc.cli.tables import Array, Block, Table, check_input, check_names, listing, open_table, to_numbers
from torchgmc.deploy.io import known_heads, load, read_notes
from torchgmc.engine import checks
from torchgmc.engine.clusters import check as check_clusters
from torchgmc.groups.groups import Groups
from torchgmc.heads.task import Task

#: Help for the option of the same name.
CLUSTERS = "Column that says which rows belong together, e.g. the patient: a cluster counts as one independent draw."


def tasks() -> dict[str, type[gmc.Head]]:
    """The head of every task."""
    kinds = [kind for kind in known_heads().values() if vars(kind).get("task") is not None]
    return dict(sorted((task_of(kind).name, kind) for kind in kinds))


def task_of(kind: type[gmc.Head]) -> Task:
    """The task of a head, baselines included."""
    if kind.task is None:
        raise ValueError(f"a {kind.__name__} has no command-line task; use it from Python.")
    return kind.task


def further_arrays() -> dict[str, str]:
    """Arrays that some task reads in addition to scores, truth and weights, and a line of help for each."""
    found: dict[str, list[str]] = {}
    for task in map(task_of, tasks().values()):
        for role, text in task.arrays.items():
            found.setdefault(role, [text.rstrip(".")]).append(task.name)
    return {role: f"{text} ({', '.join(names)})." for role, (text, *names) in found.items()}


def audited_arrays() -> dict[str, str]:
    """All arrays that an audit reads."""
    truth = {"scores": "Array of scores.", "labels": "Array of true labels.", "weight": "Array of weights."}
    return truth | {"clusters": CLUSTERS} | further_arrays()


def find_arrays(
    table: Table, task: Task, given: Mapping[str, str | None], stored: Mapping[str, str], wanted: Sequence[str]
) -> dict[str, str]:
    """Names of the arrays to read, by role: as given, as at the calibration, or under a usual name.

    ``table``: the file. ``task``: of the head. ``given``: on the command line: "scores", "labels", "weight", "clusters", and
    those of ``task.arrays``. ``stored``: at the calibration. ``wanted``: roles that must be there; other roles are read if they
    were named, or if the file has them.
    """
    found = {role: name for role, name in given.items() if name is not None}
    for role in found:
        if role not in ("scores", "weight", "clusters", *task.arrays) and not (role == "labels" and task.labels):
            raise ValueError(f"--{role} is not used by the task {task.name!r}.")
    for role, usual in (("scores", task.scores), ("labels", task.labels)):
        names = list(dict.fromkeys([*([stored[role]] if role in stored else []), *usual]))
        name = next((name for name in names if name in table.names), None)
        if role not in found and name is not None:
            found[role] = name
        elif role not in found and role in wanted:
            raise ValueError(
                f"{str(table.path)!r} has no array {' or '.join(map(repr, names))}; it has {listing(table.names)}. Say which "
                f"with --{role} NAME"
                + (" (columns NAME[0], NAME[1], ... make a matrix)." if table.path.suffix in (".csv", ".parquet") else ".")
            )
    found |= {role: stored[role] for role in task.arrays if role in stored and role not in found}
    for role, otherwise in (("weight", "all rows get the same weight"), ("clusters", "all rows count as independent")):
        if role not in found and role in stored:
            if stored[role] in table.names:
                found[role] = stored[role]
            else:
                warnings.warn(f"no array {stored[role]!r} in {str(table.path)!r}; {otherwise}.", stacklevel=2)
    check_names(table, list(found.values()))
    return found


@dataclass(frozen=True)
class Source:
    """The rows of a file for a kind of head. A :class:`~torchgmc.heads.task.Task` may ask it for what else the file holds.

    ``table``: the file. ``kind``: of head. ``arrays``: what is read from the file, by role. ``membership``: the groups; None
    without. ``rows``: in a block; chosen by size if None. ``unknown``: "error", or "none": a value of a group column that was
    never seen is in no group.
    """

    table: Table
    kind: type[gmc.Head]
    arrays: Mapping[str, str]
    membership: Membership | None = None
    rows: int | None = None
    unknown: str = "error"

    @property
    def task(self) -> Task:
        """Of the head."""
        return task_of(self.kind)

    @property
    def columns(self) -> tuple[list[str], list[str]]:
        """What is read as numbers, and what as labels; an error if the file lacks one."""
        numbers, texts = dict(self.arrays), ("clusters",) if self.task.label_names is None else ("labels", "clusters")
        labels = [numbers.pop(role) for role in texts if role in numbers]
        member = self.membership
        matrices, plain = ([], []) if member is None else (list(member.matrices), member.columns)
        check_names(self.table, [*numbers.values(), *matrices, *labels, *plain])
        return list(dict.fromkeys([*numbers.values(), *matrices])), list(dict.fromkeys([*labels, *plain]))

    @cached_property
    def count(self) -> int:
        """Number of rows; an error if there are none. Of a text file, one pass."""
        numbers, labels = self.columns
        if not numbers and not labels:
            raise ValueError(f"{str(self.path)!r} has none of the required arrays; it has {listing(self.names)}.")
        total = self.table.count([*numbers, *labels])
        if total <= 0:
            raise ValueError(f"{str(self.path)!r} has no rows.")
        return total

    @property
    def named(self) -> Groups | None:
        """The groups, if all are made of columns: a head's file then keeps how."""
        return None if self.membership is None or self.membership.matrices else self.membership.groups

    def notes(self) -> dict[str, Any]:
        """What `audit`, `apply` and `export` need, besides the groups, to read another file in the same way."""
        scores = {"shape": list(self.row), "dtype": str(self.example.dtype)}
        found: dict[str, Any] = {"arrays": dict(self.arrays), "scores": scores}
        if self.membership is not None and self.membership.matrices:
            found["groups"] = self.membership.to_dict()
        return found

    def without(self, *roles: str) -> Source:
        """The same source without some arrays."""
        return replace(self, arrays={role: name for role, name in self.arrays.items() if role not in roles})

    @property
    def path(self) -> Path:
        """Of the file."""
        return self.table.path

    @property
    def names(self) -> list[str]:
        """Of the arrays in the file."""
        return self.table.names

    @property
    def row(self) -> tuple[int, ...]:
        """Shape of the scores of one example."""
        return self.example.shape[1:]

    @cached_property
    def example(self) -> Array:
        """The first scores, as the head gets them."""
        name = self.arrays["scores"]
        for block in self.table.blocks([name], [], 1):
            return _floats(block.arrays[name])
        raise ValueError(f"{str(self.path)!r} has no rows.")

    def integers(self, name: str) -> list[int]:
        """A whole array of integers."""
        return [v for block in self.table.blocks([name]) for v in _whole(name, block.arrays[name], block.start).tolist()]

    def texts(self, name: str) -> list[str]:
        """A whole array of text."""
        return [str(value) for block in self.table.blocks([], [name]) for value in block.arrays[name].tolist()]

    def token_ids(self, tokenizer: str, words: Mapping[str, Sequence[str]]) -> dict[str, list[int]]:
        """Lists of words as lists of token ids."""
        from torchgmc.engine.extras import require
        from torchgmc.text import attributes_from_words

        return attributes_from_words(require("transformers", extra="text").AutoTokenizer.from_pretrained(tokenizer), words)

    def blocks(self, head: gmc.Head) -> Iterator[tuple[Block, dict[str, Tensor]]]:
        """Blocks of rows, and what they give the head: tensors by the names of its arguments."""
        for block in self.table.blocks(*self.columns, self.rows):
            yield block, self._arguments(block, head)

    def _arguments(self, block: Block, head: gmc.Head) -> dict[str, Tensor]:
        """Arguments of ``observe`` and ``audit`` from a block."""
        found: dict[str, Tensor] = {}
        for role, name in self.arrays.items():
            if role == "scores":
                found[head.arguments[0]] = _tensor(_floats(block.arrays[name]))
            elif role == "labels":
                found[head.truth or head.audit_only[0]] = _tensor(self._labels(block, name, head))
            elif role == "clusters":
                found[role] = _clusters(name, block.arrays[name], block.start)
            else:
                found[role] = _tensor(block.arrays[name].astype(np.float64))
        if self.membership is not None:
            found[head.member_argument] = self.membership.of(block, self.unknown)
        return found

    def _labels(self, block: Block, name: str, head: gmc.Head) -> Array:
        values, task = block.arrays[name], self.task
        if task.label_names is not None:
            values = _ids(name, values, task.label_names(head), block.start)
        values = to_numbers(name, values, block.start)
        if task.label_kind in ("class", "tokens") and not head.one_event:
            return _whole(name, values, block.start)
        return values.astype(np.int64) if values.dtype.kind in "iu" else values

    def locate(self, block: Block, error: Exception) -> ValueError:
        """The error of a head about a block, with the file's name and, if there are other blocks, the rows."""
        rows = f", rows {block.start} to {block.stop - 1}" if block.start or block.stop < self.count else ""
        return ValueError(f"{str(self.path)!r}{rows}: {error}")


def _floats(values: Array) -> Array:
    """Floating point of a kind that torch has."""
    return values if values.dtype.kind == "f" and values.dtype.itemsize <= 8 else values.astype(np.float64)


def _tensor(values: Array) -> Tensor:
    """The array as a tensor that may be written to."""
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def _whole(name: str, values: Array, start: int) -> Array:
    if values.dtype.kind == "f":
        wrong = np.flatnonzero(values != np.floor(values))  # NaN too
        if len(wrong):
            raise ValueError(f"{name!r} must hold whole numbers, but has {values.flat[wrong[0]]} in row {start + int(wrong[0])}.")
    return values.astype(np.int64)


def _clusters(name: str, values: Array, start: int) -> Tensor:
    """An id per row: whole numbers as they are, anything else by its text."""
    if values.dtype.kind in "fO":
        missing = [place for place, value in enumerate(values.tolist()) if value is None or value != value]
        if missing:
            raise ValueError(f"{name!r} must name a cluster in every row, but row {start + missing[0]} has none.")
    whole = values.dtype.kind in "iu" or (values.dtype.kind == "f" and bool((values == np.floor(values)).all()))
    return check_clusters(values.astype(np.int64 if whole else str), len(values), torch.device("cpu"))[:, 0]


def _ids(name: str, values: Array, names: Sequence[str], start: int) -> Array:
    """Ids of names; values that are not text, or start with no known name, are taken as ids."""
    if values.dtype.kind not in "OU" or values.tolist()[:1][0] not in names:
        return values
    ids = {known: k for k, known in enumerate(names)}
    try:
        return np.array([ids[value] for value in values.tolist()], dtype=np.int64)
    except KeyError as error:
        row = values.tolist().index(error.args[0])
        raise ValueError(f"{name!r} has {error.args[0]!r} in row {start + row}, not one of {listing(list(ids), 6)}.") from None


#: Numbers of one example's scores.
MOST = 10**8


def load_head(path: Path, fitted: bool = True) -> tuple[gmc.Head, dict[str, Any]]:
    """The head, fitted if it must be, and the notes that `calibrate` left in its file."""
    check_input(path, "the file of a head")
    head = load(path)
    task_of(type(head))  # or say that there is none
    if fitted and not head.is_fitted:
        raise ValueError(f"the head in {str(path)!r} is not fitted.")
    return head, _checked_notes(path)


def _checked_notes(path: Path) -> dict[str, Any]:
    """The notes of a file; an error unless they are such as `calibrate` writes."""
    notes = read_notes(path)
    arrays, scores, groups = notes.get("arrays", {}), notes.get("scores", {}), notes.get("groups", {})
    matrices = groups.get("matrices", {}) if isinstance(groups, dict) else {}
    parts = {"arrays": arrays, "scores": scores, "groups": groups, "matrices": matrices}
    wrong = [name for name, part in parts.items() if not isinstance(part, dict)]
    if not wrong:
        shape, names = scores.get("shape") if scores else [], matrices.values()
        wrong += ["arrays"] * any(not isinstance(name, str) for name in arrays.values())
        wrong += ["scores"] * (not isinstance(shape, list) or any(type(size) is not int or not 0 < size <= MOST for size in shape))
        wrong += ["scores"] * (bool(scores) and scores.get("dtype") not in ("float16", "bfloat16", "float32", "float64"))
        wrong += ["matrices"] * any(not isinstance(part, list) or any(not isinstance(x, str) for x in part) for part in names)
    if wrong or math.prod(scores.get("shape") or []) > MOST:
        raise ValueError(f"{str(path)!r} has notes that cannot be used ({(wrong or ['scores'])[0]}); calibrate again.")
    return notes


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

    ``head``, ``notes``: from :func:`load_head`. ``data``: the file. ``given``: names of arrays on the command line, by role.
    ``groups``: of group columns, for a head that was saved without notes. ``wanted``: roles that must be there. ``rows``,
    ``unknown``: as in :class:`~torchgmc.cli.source.Source`.
    """
    if unknown not in ("error", "none"):
        raise ValueError(f"--unknown must be error or none, got {unknown!r}.")
    table = open_table(data)
    arrays = find_arrays(table, task_of(type(head)), given, notes.get("arrays", {}), wanted)
    return Source(table, type(head), arrays, membership_of(head, notes, table, options.words(groups)), rows, unknown)


def membership_of(head: gmc.Head, notes: dict[str, Any], table: Table, given: list[str]) -> Membership | None:
    """The groups of a head's file, or as the columns given say."""
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
