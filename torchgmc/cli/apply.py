"""``torchgmc apply``: a fitted head on new rows, block by block, into a file.

    $ torchgmc apply head.safetensors new.npz --out calibrated.npz

The head's task decides which array is written; ``torchgmc apply --help`` lists them. The suffix of ``--out`` chooses the
format. The file is written completely or not at all, also when the command is interrupted.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

import torchgmc as gmc
from torchgmc.cli import fitting, options, show
from torchgmc.cli.source import Source, further_arrays, load_head, open_source, task_of, tasks
from torchgmc.cli.tables import SUFFIXES, Array
from torchgmc.cli.writers import check_file, write_rows
from torchgmc.engine import checks


def apply(
    head: options.Head,
    data: options.Data,
    out: Annotated[Path, options.told(f"File to write: {', '.join(SUFFIXES)}.", "FILE")],
    own: dict[str, Any],
    name: Annotated[str | None, options.told("Name of the array written.", "NAME")] = None,
    names: Annotated[bool, options.told("Write names instead of ids (tree; .csv, .npz).", None, "--names", "--node-names")] = False,
    groups: options.GroupColumns = None,
    unknown: options.Unknown = "error",
    chunk: options.Chunk = None,
    as_json: options.Json = False,
) -> None:
    """Apply a fitted head to new data.

    Example: torchgmc apply head.safetensors new.npz --out calibrated.npz
    """
    check_file("--out", out, head, data, suffixes=(".npz", ".csv") if names else SUFFIXES)
    if name is not None and not re.fullmatch(r"\w[\w.-]*", name):  # in an archive, that of a member, which may be unpacked
        raise ValueError(f"--name must be letters, digits, `_`, `-` and `.`, got {name!r}.")
    fitted, notes = load_head(head)
    task = task_of(type(fitted))
    if names and task.result_names is None:
        raise ValueError(f"--names: {str(head)!r} holds a {type(fitted).__name__}, whose results have no names.")
    stored = {role: array for role, array in notes.get("arrays", {}).items() if role in ("scores", *task.in_use)}
    # Thresholds by groups need no scores, but something must say how many rows there are.
    counted = fitted.takes == "groups" and (fitted.grouped or any(own[role] for role in task.in_use))
    source = open_source(fitted, notes | {"arrays": stored}, data, own, groups, () if counted else ("scores",), chunk, unknown)
    source = source.without("labels", *set(task.arrays).difference(task.in_use), *(["scores"] if counted else []))
    name = name or task.output
    results = _results(fitted, source)
    if names and task.result_names is not None:
        known = np.array(task.result_names(fitted))  # one width for all, whatever a block holds
        results = (known[ids] for ids in results)
    shape = write_rows(out, name, results, source.count)
    if as_json:
        show.print_json({"torchgmc": gmc.__version__, "array": name, "shape": list(shape), "files": {"out": str(out)}})
    else:
        typer.echo(f"{name} {tuple(shape)}: {checks.printable(str(out))}")


def command() -> Callable[..., None]:
    """With an option for each array that some head takes, and a line for what each task writes."""
    made = options.command(apply, options.arrays({"scores": "Array of scores."} | further_arrays()))
    lines = [f"{name}: `{task_of(kind).output}`, {task_of(kind).written}" for name, kind in tasks().items()]
    made.__doc__ = "\n".join([inspect.cleandoc(apply.__doc__ or ""), "", "\b", "What is written:", *lines])
    return made


@torch.inference_mode()
def _results(head: gmc.Head, source: Source) -> Iterator[Array]:
    scores = head.arguments[0]
    with fitting.blocks(head, source, "apply") as found:
        for block, batch in found:
            member = batch.get(head.member_argument)
            more = {role: batch[role] for role in source.task.in_use if role in batch}
            if head.takes == "groups":
                result = head(member, **more).expand(block.stop - block.start)
            else:
                # A token that cannot occur has the logit -inf; nothing else may be infinite.
                checks.finite(scores, batch[scores].clamp_min(-1e30) if head.takes == "logits" else batch[scores])
                result = head(batch[scores], member, **more)
            yield result.numpy()
