"""``torchgmc reproduce``: the paper's experiments on real data, which are in a second package, ``torchgmc_paper``."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from torchgmc.engine.extras import find_paper, require


def reproduce(
    name: Annotated[str, typer.Argument(help="Which experiment: fnr, tree, text or all.")],
    data: Annotated[Path | None, typer.Option(help="Data folder; TORCHGMC_DATA by default.", show_default=False)] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of random splits; by default the paper's 50, 50 and 10.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for tables, figures and what is kept between runs.")] = Path("results"),
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes that run seeds, one thread each.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes and two seeds: check that it runs here.")] = False,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting. Repeatable.")
    ] = None,
    redo: Annotated[bool, typer.Option("--redo", help="Discard seeds that were run with other settings.")] = False,
) -> None:
    """Train what is needed once, run every seed, and write tables and figures next to the paper's.

    Run it again after an interruption: finished seeds are kept.

    Example: torchgmc reproduce tree --data data --seeds 50 --out results
    """
    from rich.console import Console

    find_paper()
    from torchgmc_paper import EXPERIMENTS, figures, frame, tables

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
        results = frame.reproduce(
            one, data=data, out=out, seeds=seeds, jobs=jobs, quick=quick, changes=changes or (), redo=redo
        )
        module = results.module
        summary = tables.summarize(results.rows, module.METHODS, module.OURS, results.setting.alpha)
        words = ["torchgmc", "reproduce", one, "--data", "DIR", "--seeds", str(results.seeds)]
        words += ["--quick"] * quick + [word for change in changes or () for word in ("--set", change)]
        command = " ".join(words[:4] + [shlex.quote(word) for word in words[4:]])
        files = tables.write(out, results, summary, command, figures.draw(results, summary))
        console.print(tables.brief(summary, module.TITLE), soft_wrap=True, highlight=False, markup=False)
        console.print(f"page: {files[f'{one}.md']}\n", soft_wrap=True, highlight=False, markup=False)
