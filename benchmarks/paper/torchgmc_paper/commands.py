"""``torchgmc demo`` and ``torchgmc reproduce``: whole applications on drawn data, and the paper's experiments on real data.

$ torchgmc demo fnr --out torchgmc-demo --seed 1
$ torchgmc demo all --out torchgmc-demo          # each in its own folder below --out
$ torchgmc reproduce tree --data data --seeds 50 --out results
"""

import shlex
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from torchgmc.cli import show
from torchgmc.engine.extras import require
from torchgmc_paper import EXPERIMENTS, frame
from torchgmc_paper.demo import DEMOS


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


def reproduce(
    name: Annotated[str, typer.Argument(help="Which experiment: fnr, tree, text or all.")],
    data: Annotated[Path | None, typer.Option(help="Data folder; TORCHGMC_DATA by default.", show_default=False)] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of random splits; by default the paper's 50, 50 and 10.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for tables, figures and what is kept between runs.")] = Path("results"),
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes that run seeds, one thread each.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes and two seeds: check that it runs here.")] = False,
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting. Repeatable.")] = None,
    redo: Annotated[bool, typer.Option("--redo", help="Discard seeds that were run with other settings.")] = False,
) -> None:
    """Train what is needed once, run every seed, and write tables and figures next to the paper's.

    Run it again after an interruption: finished seeds are kept.

    Example: torchgmc reproduce tree --data data --seeds 50 --out results
    """
    from rich.console import Console

    from torchgmc_paper import figures, tables

    require("matplotlib", extra="report")  # raise before the work, not after it
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {str(out)!r} is a file; pass a folder.")
    if name == "all" and changes:
        raise typer.BadParameter("--set applies to one experiment, not to all.")
    names = list(EXPERIMENTS) if name == "all" else [name]
    for one in names:
        frame.load(one)  # a wrong name stops everything at once
    console = Console()
    for one in names:
        results = frame.reproduce(one, data=data, out=out, seeds=seeds, jobs=jobs, quick=quick, changes=changes or (), redo=redo)
        module = results.module
        summary = tables.summarize(results.rows, module.METHODS, module.OURS, results.setting.alpha)
        words = ["torchgmc", "reproduce", one, "--data", "DIR", "--seeds", str(results.seeds)]
        words += ["--quick"] * quick + [word for change in changes or () for word in ("--set", change)]
        command = " ".join(words[:4] + [shlex.quote(word) for word in words[4:]])
        files = tables.write(out, results, summary, command, figures.draw(results, summary))
        console.print(tables.brief(summary, module.TITLE), soft_wrap=True, highlight=False, markup=False)
        console.print(f"page: {files[f'{one}.md']}\n", soft_wrap=True, highlight=False, markup=False)
