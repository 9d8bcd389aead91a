"""What each task reads from a file, which head it fits, and how blocks of rows become the arguments of that head."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torchgmc as gmc
from torchgmc.cli.membership import Membership
from torchgmc.cli.tables import Array, Block, Table, to_numbers

__all__ = ["TASKS", "Arrays", "Source", "Task", "find_arrays", "task_of"]


@dataclass(frozen=True)
class Task:
    """A kind of promise.

    Attributes:
        name: on the command line.
        head: that is fitted.
        scores, labels: argument of the head, and usual names of the array, the first that the file has is taken.
        kind: what the labels are: "mask", "class" or "value"; "tokens" are needed for the cost of an audit alone.
        output: name of the result of ``apply``.
    """

    name: str
    head: type[gmc.Head]
    scores: tuple[str, tuple[str, ...]]
    labels: tuple[str, tuple[str, ...]] | None
    kind: str
    output: str


TASKS = {
    task.name: task
    for task in (
        Task(
            "fnr",
            gmc.ThresholdHead,
            ("scores", ("scores", "probs", "logits")),
            ("masks", ("masks", "mask", "labels", "y")),
            "mask",
            "masks",
        ),
        Task("tree", gmc.TreeHead, ("probs", ("probs", "scores")), ("labels", ("labels", "label", "y")), "class", "nodes"),
        Task("text", gmc.DistributionHead, ("logits", ("logits", "scores")), ("labels", ("labels",)), "tokens", "log_probs"),
        Task("probability", gmc.ProbabilityHead, ("probs", ("probs", "scores", "p")), ("y", ("y", "labels")), "value", "probs"),
        Task("quantile", gmc.QuantileHead, ("scores", ("scores",)), None, "", "thresholds"),
    )
}


def task_of(head: gmc.Head) -> Task:
    """The task of a head from a file, baselines included."""
    for task in TASKS.values():
        if isinstance(head, task.head):
            return task
    raise ValueError(f"the command line does not know how to use a {type(head).__name__}; use it from Python.")


@dataclass(frozen=True)
class Arrays:
    """Names of the arrays in a file; None for those that are not used."""

    scores: str | None = None
    labels: str | None = None
    weight: str | None = None
    base: str | None = None

    def used(self) -> list[str]:
        """The names there are."""
        return [name for name in (self.scores, self.labels, self.weight, self.base) if name is not None]


def find_arrays(table: Table, task: Task, given: Arrays, stored: Mapping[str, str], wanted: Sequence[str]) -> Arrays:
    """The arrays to read: as given, as at the calibration, or under a usual name.

    Args:
        table: the file.
        task: of the head.
        given: names on the command line.
        stored: names at the calibration.
        wanted: roles that must be there; other roles are read if they were named, or if the file has them.
    """
    found: dict[str, str | None] = {"scores": None, "labels": None, "weight": given.weight, "base": given.base}
    for role in ("scores", "labels"):
        usual = getattr(task, role)
        if usual is None:
            if getattr(given, role):
                raise ValueError(f"--{role} is not used by the task {task.name!r}.")
            continue
        explicit = getattr(given, role)
        names = [explicit] if explicit else [*([stored[role]] if role in stored else []), *usual[1]]
        found[role] = next((name for name in names if name in table.names), explicit)
        if found[role] is None and role in wanted:
            raise ValueError(
                f"{str(table.path)!r} has no array {' or '.join(map(repr, dict.fromkeys(names)))}; it has "
                f"{listing(table.names)}. Say which with --{role} NAME"
                + (" (columns NAME[0], NAME[1], ... make a matrix)." if table.path.suffix in (".csv", ".parquet") else ".")
            )
    found["base"] = found["base"] or stored.get("base")
    if found["weight"] is None and "weight" in stored:
        if stored["weight"] in table.names:
            found["weight"] = stored["weight"]
        else:
            warnings.warn(f"no array {stored['weight']!r} in {str(table.path)!r}: all rows weigh the same.", stacklevel=2)
    arrays = Arrays(**found)
    check_names(table, arrays.used())
    return arrays


def check_names(table: Table, names: Sequence[str]) -> None:
    """Every array is in the file."""
    for name in names:
        if name not in table.names:
            raise ValueError(f"{str(table.path)!r} has no array {name!r}; it has {listing(table.names)}.")


def listing(names: Sequence[str], most: int = 12) -> str:
    """Names for a message."""
    return (", ".join(map(repr, names[:most])) or "none") + (", ..." if len(names) > most else "")


@dataclass(frozen=True)
class Source:
    """The rows of a file as arguments of a head.

    Attributes:
        table, task, arrays: the file, and what is read from it.
        membership: the groups; None without.
        rows: in a block; chosen by size if None.
        unknown: "error", or "none": a value of a group column that was never seen is in no group.
    """

    table: Table
    task: Task
    arrays: Arrays
    membership: Membership | None = None
    rows: int | None = None
    unknown: str = "error"

    @property
    def columns(self) -> tuple[list[str], list[str]]:
        """What is read as numbers, and what as labels."""
        member = self.membership
        names = [] if self.arrays.labels is None or not self._named_classes else [self.arrays.labels]
        numbers = [name for name in self.arrays.used() if name not in names] + ([] if member is None else list(member.matrices))
        return list(dict.fromkeys(numbers)), list(dict.fromkeys(names + ([] if member is None else member.columns)))

    @property
    def _named_classes(self) -> bool:
        return self.task.kind == "class"  # text is looked up among the leaves of the tree

    def count(self) -> int:
        """Number of rows; an error if there are none."""
        numbers, labels = self.columns
        if not numbers and not labels:
            raise ValueError(f"{str(self.table.path)!r} has none of the arrays needed; it has {listing(self.table.names)}.")
        check_names(self.table, [*numbers, *labels])
        total = self.table.count([*numbers, *labels])
        if total <= 0:
            raise ValueError(f"{str(self.table.path)!r} has no rows.")
        return total

    def without(self, *roles: str) -> Source:
        """The same without some arrays."""
        return replace(self, arrays=replace(self.arrays, **dict.fromkeys(roles)))

    def example(self, rows: int = 1) -> Array:
        """The first scores, as the head gets them."""
        assert self.arrays.scores is not None
        for block in self.table.blocks([self.arrays.scores], [], rows):
            return _floats(block.arrays[self.arrays.scores])
        raise ValueError(f"{str(self.table.path)!r} has no rows.")

    def blocks(self, head: gmc.Head | None = None) -> Iterator[tuple[Block, dict[str, Tensor]]]:
        """Blocks of rows, and what they give the head: tensors by the names of its arguments."""
        numbers, labels = self.columns
        check_names(self.table, [*numbers, *labels])
        for block in self.table.blocks(numbers, labels, self.rows):
            yield block, self.arguments(block, head)

    def arguments(self, block: Block, head: gmc.Head | None = None) -> dict[str, Tensor]:
        """Arguments of ``observe`` and ``audit`` from a block."""
        found: dict[str, Tensor] = {}
        names, task = self.arrays, self.task
        if names.scores is not None:
            found[task.scores[0]] = tensor(_floats(block.arrays[names.scores]))
        if names.labels is not None and task.labels is not None:
            found[task.labels[0]] = self._labels(block, head)
        if self.membership is not None:
            found["groups"] = self.membership.of(block, self.unknown)
        for role in ("weight", "base"):
            name = getattr(names, role)
            if name is not None:
                found[role] = tensor(block.arrays[name].astype(np.float64))
        return found

    def _labels(self, block: Block, head: gmc.Head | None) -> Tensor:
        name = self.arrays.labels
        assert name is not None
        values, kind = block.arrays[name], self.task.kind
        if kind == "class" and isinstance(head, gmc.TreeHead) and _is_text(values, head):
            values = _leaves(name, values, head.tree, block.start)
        values = to_numbers(name, values, block.start)
        if kind in ("class", "tokens") or (kind == "value" and getattr(head, "num_classes", None) is not None):
            values = _whole(name, values, block.start)
        elif values.dtype.kind in "iu":
            values = values.astype(np.int64)
        return tensor(values)

    def locate(self, block: Block, error: Exception) -> ValueError:
        """The error of a head about a block, with the file's name and, if there are other blocks, the rows."""
        place = f"{str(self.table.path)!r}"
        if block.start or block.stop < self.table.count(self.columns[0] or self.columns[1]):
            place += f", rows {block.start} to {block.stop - 1}"
        return ValueError(f"{place}: {error}")


def _floats(values: Array) -> Array:
    """Floating point of a kind that torch has."""
    return values if values.dtype.kind == "f" and values.dtype.itemsize <= 8 else values.astype(np.float64)


def tensor(values: Array) -> Tensor:
    """The array as a tensor that may be written to."""
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def _whole(name: str, values: Array, start: int) -> Array:
    if values.dtype.kind == "f":
        wrong = np.flatnonzero(values != np.floor(values))  # NaN too
        if len(wrong):
            raise ValueError(
                f"{name!r} must hold whole numbers, but has {values.flat[wrong[0]]} in row {start + int(wrong[0])}."
            )
    return values.astype(np.int64)


def _is_text(values: Array, head: gmc.TreeHead) -> bool:
    return values.dtype.kind in "OU" and any(isinstance(v, str) and v in head.tree.names for v in values.tolist()[:1])


def _leaves(name: str, values: Array, tree: Any, start: int) -> Array:
    ids = {leaf: k for k, leaf in enumerate(tree.names[: tree.num_leaves])}
    try:
        return np.array([ids[value] for value in values.tolist()], dtype=np.int64)
    except KeyError as error:
        row = values.tolist().index(error.args[0])
        known = listing(list(ids), 6)
        raise ValueError(
            f"{name!r} has {error.args[0]!r} in row {start + row}, which is no leaf of the tree; leaves: {known}."
        ) from None


# -- what a file of its own holds ----------------------------------------------------------------------------------------------


def read_json(path: Path, option: str) -> Any:
    """A JSON file named by an option."""
    if not path.is_file():
        raise FileNotFoundError(f"{option}: there is no file {str(path)!r}.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{option}: {str(path)!r} is no JSON: {error}") from error


def read_tree(table: Table, tree: Path | None) -> tuple[Any, list[str] | None]:
    """The tree as ``TreeHead`` takes it, and names of its nodes: from JSON, or from the arrays ``parents`` and ``names``."""
    if tree is not None:
        return read_json(tree, "--tree"), None
    if "parents" not in table.names:
        raise ValueError(
            f"the task 'tree' needs the tree: an array 'parents' (parent of every node, root -1) in {str(table.path)!r}, which "
            f"has {listing(table.names)}, or --tree FILE.json."
        )
    parents = [value for block in table.blocks(["parents"]) for value in _whole("parents", block.arrays["parents"], 0).tolist()]
    names = None
    if "names" in table.names:
        names = [str(value) for block in table.blocks([], ["names"]) for value in block.arrays["names"].tolist()]
    return parents, names


def read_attributes(path: Path | None, tokenizer: str | None) -> dict[str, list[int]]:
    """Lists of token ids; words become ids with a tokenizer."""
    if path is None:
        raise ValueError("the task 'text' needs --attributes FILE.json: the name of each list and its token ids (or words).")
    lists = read_json(path, "--attributes")
    if not isinstance(lists, dict) or not lists or not all(isinstance(v, list) and v for v in lists.values()):
        raise ValueError(f"--attributes: {str(path)!r} must map the name of each list to a list of token ids (or words).")
    if tokenizer is None:
        if any(isinstance(v, str) for values in lists.values() for v in values):
            raise ValueError(
                f"--attributes: {str(path)!r} holds words; name the tokenizer with --tokenizer, or give token ids."
            )
        return lists
    from torchgmc.engine.extras import require
    from torchgmc.text import attributes_from_words

    found = require("transformers", extra="text").AutoTokenizer.from_pretrained(tokenizer)
    return attributes_from_words(found, lists)
