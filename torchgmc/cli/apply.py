"""``torchgmc apply``: a fitted head on new rows, block by block, into a file.

    $ torchgmc apply head.safetensors new.npz --out calibrated.npz

=============  ===============  ========================================================================
task           array written
=============  ===============  ========================================================================
fnr            ``masks``        bool, of the shape of the scores
tree           ``nodes``        node ids, leaves first; with ``--node-names`` their names
text           ``log_probs``    calibrated log-probabilities, of the shape of the logits
probability    ``probs``        calibrated probabilities, of the shape of those given
quantile       ``thresholds``   one per row
=============  ===============  ========================================================================

The ending of ``--out`` chooses the format. The file appears whole or not at all, also when the command is interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

import torchgmc as gmc
from torchgmc.cli import options, show
from torchgmc.cli.loading import load_head, open_source
from torchgmc.cli.tables import SUFFIXES, Array
from torchgmc.cli.tasks import Arrays, Source
from torchgmc.cli.writers import check_file, write_rows
from torchgmc.engine import checks

__all__ = ["apply"]


def apply(
    head: options.Head,
    data: options.Data,
    out: Annotated[Path, typer.Option(help=f"File to write: {', '.join(SUFFIXES)}.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="Name of the array written.", show_default=False)] = None,
    node_names: Annotated[
        bool, typer.Option("--node-names", help="For tree: write the names of the nodes, not their ids (.csv, .npz).")
    ] = False,
    groups: options.Groups = None,
    unknown: options.Unknown = "error",
    scores: options.Scores = None,
    base: options.Base = None,
    chunk: options.Chunk = None,
    as_json: options.Json = False,
) -> None:
    """Apply a fitted head to new data: masks, nodes, log-probabilities, probabilities or thresholds.

    Example: torchgmc apply head.safetensors new.npz --out calibrated.npz
    """
    check_file("--out", out, head, data, suffixes=(".npz", ".csv") if node_names else SUFFIXES)
    fitted, notes = load_head(head)
    if node_names and not isinstance(fitted, gmc.TreeHead):
        raise ValueError(f"--node-names is for a tree, and {str(head)!r} holds a {type(fitted).__name__}.")
    # Thresholds of quantiles need no scores; but somebody must say how many rows there are.
    counted = isinstance(fitted, gmc.QuantileHead) and (fitted.grouped or base is not None)
    stored = {role: array for role, array in notes.get("arrays", {}).items() if role in ("scores", "base")}
    arrays = Arrays(scores, base=base)
    source = open_source(
        fitted, notes | {"arrays": stored}, data, arrays, groups, () if counted else ("scores",), chunk, unknown
    )
    source = source.without("labels", *(("scores",) if counted else ()))
    total, name = source.count(), name or source.task.output
    results = _results(fitted, source, total)
    if node_names and isinstance(fitted, gmc.TreeHead):
        known = np.array(fitted.tree.names)  # one width for all, whatever a block holds
        results = (known[nodes] for nodes in results)
    shape = write_rows(out, name, results, total)
    if as_json:
        show.print_json({"torchgmc": gmc.__version__, "array": name, "shape": list(shape), "files": {"out": str(out)}})
    else:
        typer.echo(f"{name} {tuple(shape)}: {out}")


@torch.inference_mode()
def _results(head: gmc.Head, source: Source, total: int) -> Iterator[Array]:
    with show.progress("apply", total) as advance:
        for block, arguments in source.blocks(head):
            try:
                if isinstance(head, gmc.QuantileHead):
                    result = head(arguments.get("groups"), arguments.get("base")).expand(block.stop - block.start)
                else:
                    scores = arguments[source.task.scores[0]]
                    # A token that cannot occur has the logit -inf; nothing else may be infinite.
                    checks.finite(source.task.scores[0], scores if source.task.name != "text" else scores.clamp_min(-1e30))
                    result = head(scores, arguments.get("groups"))
            except (ValueError, TypeError, RuntimeError) as error:
                raise source.locate(block, error) from error
            yield result.numpy()
            advance(block.stop - block.start)
