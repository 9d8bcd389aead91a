"""``torchgmc apply``: a fitted head on new rows, block by block, into a file.

    $ torchgmc apply head.safetensors new.npz --out calibrated.npz

=============  ===============  ========================================================================
task           array written
=============  ===============  ========================================================================
fnr            ``masks``        bool, of the shape of the scores
tree           ``nodes``        node ids; leaves come first, and ``head.names(nodes)`` are their names
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

import torch
import typer

import torchgmc as gmc
from torchgmc import checks
from torchgmc.cli import options, show
from torchgmc.cli.loading import load_head, open_source
from torchgmc.cli.tables import SUFFIXES, Array
from torchgmc.cli.tasks import Arrays, Source
from torchgmc.cli.writers import check_file, write_rows

__all__ = ["apply"]


def apply(
    head: options.Head,
    data: options.Data,
    out: Annotated[Path, typer.Option(help=f"File to write: {', '.join(SUFFIXES)}.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="Name of the array written.", show_default=False)] = None,
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
    check_file("--out", out, head, data, suffixes=SUFFIXES)
    fitted, notes = load_head(head)
    # Thresholds of quantiles need no scores; but somebody must say how many rows there are.
    counted = isinstance(fitted, gmc.QuantileHead) and (fitted.grouped or base is not None)
    stored = {role: array for role, array in notes.get("arrays", {}).items() if role in ("scores", "base")}
    arrays = Arrays(scores, base=base)
    source = open_source(
        fitted, notes | {"arrays": stored}, data, arrays, groups, () if counted else ("scores",), chunk, unknown
    )
    source = source.without("labels", *(("scores",) if counted else ()))
    total, name = source.count(), name or source.task.output
    shape = write_rows(out, name, _results(fitted, source, total), total)
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
