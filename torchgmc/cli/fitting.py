"""A head fitted and audited block by block."""

import warnings
from collections.abc import Iterator
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
    kept = None if held is None else ~held
    with blocks(head, source, "observe") as found:
        batches = (_observed(head, _pick(arguments, kept, block)) for block, arguments in found)
        head.fit_batches(batches, how.solver, how.eta, how.max_iter)


def observe(head: gmc.Head, source: Source, how: options.Steps) -> None:
    """``head.observe`` of every block of a file."""
    head.prepare(how.solver, how.eta, how.max_iter)
    with blocks(head, source, "observe") as found:
        for _, arguments in found:
            head.observe(**_observed(head, arguments))


def audit(head: gmc.Head, source: Source, delta: float, held: Rows | None = None, **view: Any) -> gmc.Audit:
    """``gmc.audit`` of a file, or of the rows of it that were held out.

    ``head``: fitted. ``source``: of the rows. ``delta``: 1 - confidence. ``held``: rows to audit; all if None. ``view``:
    ``alpha``, ``conditional`` and ``method`` of :func:`torchgmc.audit`.
    """
    with blocks(head, source, "audit") as found, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*also used to calibrate")  # it is the note of the audit, shown
        some = (part for part in found if held is None or held[part[0].start : part[0].stop].any())
        return gmc.audit(head, (_pick(arguments, held, block) for block, arguments in some), delta, **view)


@contextmanager
def blocks(head: gmc.Head, source: Source, task: str) -> Iterator[Iterator[tuple[Block, dict[str, Tensor]]]]:
    """Blocks of a file and what they give the head, with a bar; an error raised while one is looked at says which rows it has."""
    here: Block | None = None

    def each() -> Iterator[tuple[Block, dict[str, Tensor]]]:
        nonlocal here
        for block, arguments in source.blocks(head):
            here = block
            yield block, arguments
            here = None
            advance(block.stop - block.start)

    try:
        with show.progress(task, source.count) as advance:
            yield each()
    except (ValueError, TypeError, RuntimeError) as error:
        if here is None:
            raise
        raise source.locate(here, error) from error


def _observed(head: gmc.Head, arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those that ``observe`` takes."""
    return {name: value for name, value in arguments.items() if name in head.arguments}


def _pick(batch: dict[str, Tensor], rows: Rows | None, block: Block) -> dict[str, Tensor]:
    """The rows of a block that are among these rows of the file; all if None."""
    if rows is None:
        return batch
    keep = torch.from_numpy(rows[block.start : block.stop])
    return {name: value[keep] for name, value in batch.items()}
