"""The list of commands, and how errors are shown: one line, no traceback."""

import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import torchgmc
from torchgmc.cli import apply, audit, calibrate, export, merge, monitor, options, show
from torchgmc.cli.source import tasks
from torchgmc.engine.extras import find_paper

# Base of every usage error: click's own class, or that of the copy of click which newer versions of typer carry.
UsageErrors: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


class Commands(TyperGroup):
    """In the order of work."""

    def list_commands(self, ctx: Any) -> list[str]:
        """``calibrate`` and ``observe`` first, which typer, as they have subcommands, would put last."""
        return sorted(self.commands, key=lambda name: ("calibrate", "observe", name).index(name))


def application(wanted: str = "") -> typer.Typer:
    """Every command, or only the one that is wanted; some are made from the heads there are."""
    app = typer.Typer(name="torchgmc", cls=Commands, add_completion=False, rich_markup_mode=None, invoke_without_command=True)
    app.callback()(root)
    known: dict[str, tuple[Callable[[], Any], str]] = {
        "calibrate": (calibrate.commands, "Fit a head on the arrays of a file and save it."),
        "observe": (merge.observing, "Write what a head keeps of a file, for merge."),
        "merge": (lambda: options.command(merge.merge), "Add up the statistics of several files and fit the head."),
        "audit": (audit.command, "Measure a head's promise on held-out data: a gate for CI."),
        "monitor": (monitor.command, "Watch a head's promise over batches after deployment: an alarm."),
        "apply": (apply.command, "Apply a fitted head to new data."),
        "export": (lambda: export.export, "Write a fitted head to a file that runs without torchgmc."),
        "demo": (lambda: of_paper("demo"), "Train a small model on drawn data, calibrate it, write a report."),
        "reproduce": (lambda: of_paper("reproduce"), "Run the paper's experiments and compare with its figures."),
    }
    for name in [wanted] if wanted in known else known:
        make, line = known[name]
        made = make()
        if isinstance(made, typer.Typer):  # a command for each task
            app.add_typer(made, name=name, short_help=line)
        else:
            app.command(name, cls=options.Command, short_help=line)(made)
    return app


def of_paper(name: str) -> Callable[..., None]:
    """A command of the second package."""
    find_paper()
    from torchgmc_paper import commands

    return getattr(commands, name)  # type: ignore[no-any-return]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torchgmc {torchgmc.__version__}")
        raise typer.Exit


def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Promises that hold for every group, for PyTorch models."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@lru_cache(maxsize=16)
def _program(wanted: str, _: tuple[type[Any], ...]) -> Any:
    """Made once for the heads there are: a program that calls a command often need not wait for it each time."""
    return typer.main.get_command(application(wanted))


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        with _ended_gently(), warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = lambda message, *_, **__: show.say(f"warning: {message}")
            program = _program("".join(words[:1]), tuple(tasks().values()))
            code = program.main(words, prog_name="torchgmc", standalone_mode=False)
        return _fail("interrupted", 130) if code == 130 else code if isinstance(code, int) else 0
    except UsageErrors as error:
        return _fail(_explained(error))
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    except _Ended as error:
        return _fail("stopped by a signal", 128 + error.number)
    except MemoryError:
        return _fail("not enough memory; read fewer rows at a time with --chunk.")
    except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
        return _fail(str(error) or type(error).__name__)


class _Ended(BaseException):
    """A signal that ends the process: an exception, so that files half written are removed on the way out."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def _ended_gently() -> Iterator[None]:
    def end(number: int, _: object) -> None:
        raise _Ended(number)

    names = ("SIGTERM", "SIGHUP") if threading.current_thread() is threading.main_thread() else ()  # no other gets signals
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _explained(error: Exception) -> str:
    """A usage error, and where to look."""
    message = error.format_message() if isinstance(error, typer.BadParameter) else str(error)
    path = getattr(getattr(error, "ctx", None), "command_path", None)
    return message if path is None else f"{message.rstrip('.')}; see {path} --help."


def _fail(message: str, code: int = 2) -> int:
    show.say(message)
    return code
