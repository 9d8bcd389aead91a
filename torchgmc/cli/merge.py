"""``torchgmc observe`` and ``torchgmc merge``: one fit from many files, on as many machines.

    $ torchgmc observe fnr part0.parquet --target 0.075 --alpha 0.005 --groups sex,site --out part0.stats
    $ torchgmc observe fnr part1.parquet --target 0.075 --alpha 0.005 --like part0.stats --out part1.stats
    $ torchgmc merge part*.stats --out head.safetensors

``observe`` takes the options of ``calibrate`` and writes what the head keeps of a file; ``merge`` adds parts up and fits the
head, which is the same as from ``calibrate`` on all rows at once. Parts must have the same groups: with ``--like`` they are
those of another part's file, whatever values occur in this one.
"""

import hashlib
from pathlib import Path
from typing import Annotated, Any

import typer

import torchgmc as gmc
from torchgmc.cli import fitting, options, show
from torchgmc.cli.calibrate import UNGATED, begin, by_task, finish
from torchgmc.cli.source import load_head
from torchgmc.cli.writers import check_file

STATISTICS = "Keep the statistics in the file, so that more can be merged with it later. Treat it as you treat the data."


def observe(
    kind: type[gmc.Head],
    data: options.Data,
    out: Annotated[Path, options.told("File of the statistics, .stats.", "FILE")],
    *,
    alpha: options.Alpha = None,
    own: dict[str, Any],
    grouping: options.Grouping,
    solving: options.Steps,
    like: Annotated[
        Path | None, options.told("Take the groups from this file, of another part.", "FILE", rich_help_panel="Groups")
    ] = None,
    chunk: options.Chunk = None,
) -> None:
    """Write what a head keeps of the arrays of a file, for `merge`."""
    check_file("--out", out, data, suffixes=(".stats",))
    head, source = begin(kind, data, alpha, own, grouping, chunk, like)
    fitting.observe(head, source, solving)
    gmc.save(head, out, source.notes(), groups=source.named, statistics=True)
    show.say(f"{source.count} rows of {str(data)!r} observed, written to {str(out)!r}.")


def merge(
    parts: Annotated[list[Path], typer.Argument(help="Files of `torchgmc observe`, or of heads with their statistics.")],
    out: Annotated[Path, options.told("File of the fitted head, .safetensors.", "FILE")],
    showing: options.Showing,
    statistics: Annotated[bool, options.told(STATISTICS, None, "--statistics")] = False,
    strict: Annotated[bool, options.told("Exit code 1 if the fit does not reach alpha.", None, "--strict")] = False,
) -> None:
    """Add up the statistics of several files and fit the head.

    Example: torchgmc merge part*.stats --out head.safetensors
    """
    check_file("--out", out, *parts, suffixes=(".safetensors",))
    head, notes = _part(parts[0])
    known = {hashlib.sha256(parts[0].read_bytes()).digest(): parts[0]}
    for path in parts[1:]:
        other = _part(path)[0]
        same = known.setdefault(hashlib.sha256(path.read_bytes()).digest(), path)
        if same is not path and other.statistics is not None:
            raise ValueError(f"{str(path)!r} is {str(same)!r} again, or a copy: its examples would count twice.")
        try:
            head.merge(other)
        except ValueError as error:
            why, groups, _ = str(error).removeprefix("head 0 cannot be merged: ").partition("; make the groups of")
            why += "; observe all parts with --like one of them." if groups else ""
            raise ValueError(f"{str(path)!r} cannot be merged with {str(parts[0])!r}: {why}") from error
    if strict and head.alpha is None:
        raise ValueError(UNGATED)
    head.calibrate(*head.prepared_for)
    gmc.save(head, out, notes, statistics=statistics)
    finish(head, None, {"head": out}, strict, showing)


def _part(path: Path) -> tuple[gmc.Head, dict[str, Any]]:
    head, notes = load_head(path, fitted=False)
    if head.lacks_statistics:
        raise ValueError(f"{str(path)!r} holds a fitted head without its statistics; merge files of `torchgmc observe`.")
    return head, notes


def observing() -> typer.Typer:
    """``observe`` and its subcommands."""
    example = "torchgmc observe fnr part0.npz --target 0.075 --alpha 0.005 --groups sex,site --out part0.stats"
    help = f"Write what a head keeps of a file, to be merged with others: one task for each promise.\n\nExample: {example}"
    return by_task(observe, help, lambda task: f"Statistics of a file, for `torchgmc merge`. {task.promise}")
