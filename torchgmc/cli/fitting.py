"""A head from the options of the command line, fitted and audited block by block."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import torchgmc as gmc
from torchgmc.cli import show
from torchgmc.cli.tables import Block
from torchgmc.cli.tasks import Source

__all__ = ["audit", "fit", "make", "notes"]

Rows = npt.NDArray[np.bool_]


def make(source: Source, alpha: float, given: dict[str, Any], more: dict[str, Any]) -> gmc.Head:
    """The head of the task, from the options that were given; others keep the head's own defaults.

    Args:
        source: of the task.
        alpha: largest violation allowed.
        given: options of the constructor, None where not given.
        more: arguments read from files.
    """
    task = source.task
    known = inspect.signature(task.head).parameters
    given = {name: value for name, value in given.items() if value is not None}
    flags = {"num_classes": "classes", "noise_floor": "no-noise-floor"}
    for name in given:
        if name not in known or (name == "num_classes" and task.name != "fnr"):
            raise ValueError(f"--{flags.get(name, name)} is not an option of the task {task.name!r}.")
    if "target" in known and "target" not in given:
        raise ValueError(f"the task {task.name!r} needs --target.")
    if given.get("bins") == 0:
        given["bins"] = None
    if task.name == "probability" and len(shape := source.example().shape) == 2:
        given["num_classes"] = shape[1]
    names = None if source.membership is None else source.membership.names
    if task.name == "text" and names is None:
        raise ValueError("the task 'text' needs --groups: with one group of everyone there is no bias to remove.")
    return task.head(alpha=alpha, groups=names, **given, **more)


def fit(
    head: gmc.Head, source: Source, solver: str, eta: float | None, max_iter: int | None, holdout: float, seed: int
) -> Rows | None:
    """``head.fit`` block by block; returns which rows were held out, if any."""
    head.check_solver(solver, eta, max_iter)
    total = source.count()
    held = None
    if holdout:
        held = np.zeros(total, dtype=bool)
        held[np.random.default_rng(seed).permutation(total)[: round(total * holdout)]] = True
        if held.all() or not held.any():
            raise ValueError(f"--holdout {holdout:g} of {total} rows leaves none to fit on or none to audit.")
    with show.progress("observe", total) as advance, _located(source) as looking_at:

        def batches() -> Iterator[dict[str, Tensor]]:
            for block, arguments in source.blocks(head):
                looking_at(block)
                batch = {name: value for name, value in arguments.items() if name in head.arguments}
                yield batch if held is None else _pick(batch, ~held[block.start : block.stop])
                looking_at(None)
                advance(block.stop - block.start)

        head.fit_batches(batches(), solver, eta, max_iter)
    return held


@contextmanager
def _located(source: Source) -> Iterator[Callable[[Block | None], None]]:
    """An error raised while the head looks at a block says which rows these are."""
    here: Block | None = None

    def look(block: Block | None) -> None:
        nonlocal here
        here = block

    try:
        yield look
    except (ValueError, TypeError) as error:
        raise error if here is None else source.locate(here, error) from error


def audit(head: gmc.Head, source: Source, delta: float, held: Rows | None = None, **view: Any) -> gmc.Audit:
    """``gmc.audit`` of a file, or of the rows of it that were held out.

    Args:
        head: fitted.
        source: of the rows.
        delta: 1 - confidence.
        held: rows to audit; all if None.
        view: ``alpha`` and ``conditional`` of :func:`torchgmc.audit`.
    """
    total = source.count()
    with show.progress("audit", total) as advance, _located(source) as looking_at:

        def batches() -> Iterator[dict[str, Tensor]]:
            for block, arguments in source.blocks(head):
                rows = None if held is None else held[block.start : block.stop]
                if rows is None or rows.any():
                    looking_at(block)
                    yield arguments if rows is None else _pick(arguments, rows)
                    looking_at(None)
                advance(block.stop - block.start)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*also used to calibrate")  # it is the note of the audit, shown
            return gmc.audit(head, batches(), delta, **view)


def _pick(batch: dict[str, Tensor], rows: Rows) -> dict[str, Tensor]:
    keep = torch.from_numpy(rows)
    return {name: value[keep] for name, value in batch.items()}


def notes(source: Source) -> dict[str, Any]:
    """What `audit`, `apply` and `export` need in order to read another file in the same way."""
    values = source.example()
    found: dict[str, Any] = {
        "arrays": {role: name for role, name in vars(source.arrays).items() if name is not None},
        "scores": {"shape": list(values.shape[1:]), "dtype": str(values.dtype)},
    }
    if source.membership is not None:
        found["groups"] = source.membership.to_json()
    return found
