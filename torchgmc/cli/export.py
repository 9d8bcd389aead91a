"""``torchgmc export``: a fitted head without a model, as a file that runs where torchgmc is not installed.

    $ torchgmc export head.safetensors --format onnx --out head.onnx

The file maps scores, a membership ``(n, groups)`` if the head has groups, and features if it learned from them, to its result
(quantiles: to scores and thresholds). With a model, a head is exported from Python: ``gmc.attach(model, head).export(...)``.
"""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

import torchgmc as gmc
from torchgmc.cli import options, show
from torchgmc.cli.source import load_head, open_source, task_of
from torchgmc.cli.writers import check_file
from torchgmc.engine import checks
from torchgmc.export import FORMATS

#: Rows of the example.
ROWS = 3


def export(
    head: options.Head,
    out: Annotated[Path, options.told("File to write.", "FILE")],
    format: Annotated[str, options.told("Format of the file.", "|".join(FORMATS))] = "torchscript",
    example: Annotated[
        Path | None, options.told("Example scores that set the input shape; by default that of the fit.", "FILE")
    ] = None,
    scores: Annotated[str | None, options.told("Array of scores in the example.", "NAME")] = None,
    groups: options.GroupColumns = None,
    keep_checks: Annotated[
        bool, options.told("Keep checks of values in the file (not onnx): memberships of 0 or 1, no NaN.", None, "--checks")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Write a fitted head to a file that runs without torchgmc; it is read back and compared.

    Example: torchgmc export head.safetensors --format onnx --out head.onnx
    """
    checks.option("--format", format, FORMATS)
    check_file("--out", out, *(path for path in (head, example) if path is not None))
    fitted, notes = load_head(head)
    inputs = _from_file(fitted, notes, example, scores, groups) if example is not None else _made_up(fitted, notes)
    adapter = gmc.Adapter(activation="none")
    gmc.attach(nn.Identity(), fitted, adapter=adapter).export(out, format=format, example_inputs=inputs, checks=keep_checks)
    shapes = [list(value.shape[1:]) for value in inputs]
    if as_json:
        show.print_json({"torchgmc": gmc.__version__, "format": format, "inputs": shapes, "files": {"out": str(out)}})
    else:
        typer.echo(f"{format}: {checks.printable(str(out))}")


def _from_file(head: gmc.Head, notes: dict[str, Any], example: Path, scores: str | None, groups: str | None) -> tuple[Tensor, ...]:
    source = open_source(head, notes, example, {"scores": scores}, groups, ("scores",), ROWS)
    for _, found in source.without("labels", "weight", "clusters").blocks(head):
        features = (found["features"].float(),) if "features" in found else ()
        return (*(found[key] for key in (head.arguments[0], head.member_argument) if key in found), *features)
    raise ValueError(f"{str(example)!r} has no rows.")


def _made_up(head: gmc.Head, notes: dict[str, Any]) -> tuple[Tensor, ...]:
    """Scores of the shape and type that the head was fitted on."""
    if not (about := notes.get("scores")):
        raise ValueError(f"the file of this {type(head).__name__} does not say what its scores look like; pass --example FILE.")
    values = torch.rand(ROWS, *about["shape"], generator=torch.Generator().manual_seed(0)).to(getattr(torch, about["dtype"]))
    if values.dim() == 2 and task_of(type(head)).label_kind == "class":  # a distribution over classes
        values = values / values.sum(1, keepdim=True)
    member = torch.eye(head.num_groups, dtype=torch.bool)[torch.arange(ROWS) % head.num_groups]
    features = [torch.zeros(ROWS, getattr(head, "num_features", 0))] if getattr(head, "learns", False) else []
    return (values, *([member] if head.grouped else []), *features)
