"""``torchgmc demo``: a whole application, no download, a report at the end."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from torchgmc.demo import DEMOS

__all__ = ["demo"]


def demo(
    name: Annotated[str, typer.Argument(help=f"Which one: {', '.join(DEMOS)}.")] = "fnr",
    out: Annotated[Path, typer.Option(help="Folder for the report, the figures and the fitted head.")] = Path("torchgmc-demo"),
    seed: Annotated[int, typer.Option(min=0, help="Of the pictures and of the model.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes, seconds: does it run here?")] = False,
    model: Annotated[
        Path | None, typer.Option(help="For `text`: the folder of a masked language model of your own.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of a table.")] = False,
) -> None:
    """Train a small model on drawn data, calibrate it, audit it, write a report.

    Example: torchgmc demo fnr --out torchgmc-demo --seed 1
    """
    from rich.console import Console

    if name not in DEMOS:
        raise ValueError(f"there is no demo {name!r}; there is {', '.join(DEMOS)}.")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {str(out)!r} is a file; give a folder.")
    if model is not None and name != "text":
        raise typer.BadParameter(f"--model belongs to the demo 'text', not to {name!r}.")
    module = import_module(DEMOS[name])
    result = module.run(out, seed=seed, setting=module.QUICK if quick else None, **({"model": model} if model else {}))
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
        return
    console = Console()
    console.print(result)
    console.print(f"\nreport: {result.files['report.html']}", soft_wrap=True, highlight=False)
