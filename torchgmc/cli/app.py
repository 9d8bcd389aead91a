"""The list of commands, and how errors leave: one line, no traceback."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import torchgmc
from torchgmc.cli import demo, reproduce

__all__ = ["app", "run"]

# Base of every usage error: click's own class, or that of the copy of click which newer versions of typer carry.
UsageErrors: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(
    name="torchgmc", help="Promises that hold for every group, for PyTorch models.", add_completion=False, rich_markup_mode=None
)
app.command("demo")(demo.demo)
app.command("reproduce")(reproduce.reproduce)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torchgmc {torchgmc.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Promises that hold for every group, for PyTorch models."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    try:
        words = None if arguments is None else list(arguments)
        code = typer.main.get_command(app).main(words, prog_name="torchgmc", standalone_mode=False)
        return _fail("interrupted", 130) if code == 130 else code if isinstance(code, int) else 0
    except UsageErrors as error:
        return _fail(error.format_message() if isinstance(error, typer.BadParameter) else str(error))
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
        return _fail(str(error) or type(error).__name__)


def _fail(message: str, code: int = 2) -> int:
    print(f"torchgmc: {' '.join(message.split())}", file=sys.stderr)
    return code
