"""``torchgmc demo``: whole applications (of the package ``torchgmc_paper``), no download, a report at the end of each.

    $ torchgmc demo fnr --out torchgmc-demo --seed 1
    $ torchgmc demo all --out torchgmc-demo

``all`` runs each in its own folder below ``--out``.
"""

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from torchgmc.cli import show
from torchgmc.engine.extras import find_paper


def demo(
    name: Annotated[str, typer.Argument(help="Which demo: fnr, text, probability, tree, or all.")] = "fnr",
    out: Annotated[Path, typer.Option(help="Folder for the report, the figures and the fitted head.")] = Path("torchgmc-demo"),
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the pictures and the model.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes, a few seconds: check that it runs here.")] = False,
    model: Annotated[
        Path | None, typer.Option(help="For `text`: the folder of your own masked language model.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of a table.")] = False,
) -> None:
    """Train a small model on drawn data, calibrate it, audit it, write a report.

    Example: torchgmc demo fnr --out torchgmc-demo --seed 1
    """
    find_paper()
    from torchgmc_paper.demo import DEMOS

    if name not in (*DEMOS, "all"):
        raise ValueError(f"there is no demo {name!r}; choose from {', '.join(DEMOS)} or all.")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {str(out)!r} is a file; pass a folder.")
    if model is not None and name not in ("text", "all"):
        raise typer.BadParameter(f"--model only applies to the demo 'text', not to {name!r}.")
    found: dict[str, Any] = {}
    for one in DEMOS if name == "all" else [name]:
        module = import_module(DEMOS[one])
        more = {"model": model} if model is not None and one == "text" else {}
        result = module.run(out / one if name == "all" else out, seed=seed, setting=module.QUICK if quick else None, **more)
        found[one] = result.to_dict()
        if not as_json:
            _print(result)
    if as_json:
        show.print_json(found if name == "all" else found[name])


def _print(result: Any) -> None:
    from rich.console import Console

    console = Console()
    console.print(result)
    console.print(f"\nreport: {result.files['report.html']}", soft_wrap=True, highlight=False)
