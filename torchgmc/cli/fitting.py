"""A head fitted and audited block by block, and what its file keeps about the data."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import torchgmc as gmc
from torchgmc.cli import options, show
from torchgmc.cli.source import Source
from torchgmc.cli.tables import Block

Rows = npt.NDArray[np.bool_]


def held_out(total: int, how: options.HoldingOut) -> Rows | None:
    """Which rows are held out; None for none."""
    if not how.holdout:
        return None
    held = np.zeros(total, dtype=bool)
    held[np.random.default_rng(how.seed).permutation(total)[: round(total * how.holdout)]] = True
    if held.all() or not held.any():
        raise ValueError(f"--holdout {how.holdout:g} of {total} rows leaves none to fit on or none to audit.")
    return held


def fit(head: gmc.Head, source: Source, how: options.Solving, held: Rows | None) -> None:
    """``head.fit_batches`` of a file, without the rows held out."""
    with show.progress("observe", source.count()) as advance, _located(source) as looking_at:

        def batches() -> Iterator[dict[str, Tensor]]:
            for block, arguments in source.blocks(head):
                looking_at(block)
                batch = {name: value for name, value in arguments.items() if name in head.arguments}
                yield batch if held is None else _pick(batch, ~held[block.start : block.stop])
                looking_at(None)
                advance(block.stop - block.start)

        head.fit_batches(batches(), how.solver, how.eta, how.max_iter)


def observe(head: gmc.Head, source: Source, how: options.Steps) -> None:
    """``head.observe`` of every block of a file."""
    head.prepare(how.solver, how.eta, how.max_iter)
    with show.progress("observe", source.count()) as advance, _located(source) as looking_at:
        for block, arguments in source.blocks(head):
            looking_at(block)
            head.observe(**{name: value for name, value in arguments.items() if name in head.arguments})
            looking_at(None)
            advance(block.stop - block.start)


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
        view: ``alpha``, ``conditional`` and ``method`` of :func:`torchgmc.audit`.
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
    """What `audit`, `apply` and `export` need, besides the groups, to read another file in the same way."""
    found: dict[str, Any] = {
        "arrays": dict(source.arrays),
        "scores": {"shape": list(source.row), "dtype": str(source.example.dtype)},
    }
    if source.membership is not None and source.membership.matrices:
        found["groups"] = source.membership.to_dict()
    return found
