"""``torchgmc calibrate TASK``: arrays of a file in, a fitted head out.

    $ torchgmc calibrate fnr scores.npz --target 0.075 --alpha 0.005 --groups sex,site --out head.safetensors \
          --holdout 0.3 --report report.html

One subcommand for each head that has a :class:`~torchgmc.heads.task.Task`, with the options of that head and those that all
share. The file is read in blocks of rows, each turned into statistics and forgotten, so it may be larger than memory: once for
the values of the group columns, once for the fit, once for the audit of the rows held out. The head is the same as from the
Python interface; its file also keeps how groups follow from columns, and under ``notes`` which arrays were read.

Exit code 0: the head was written (a warning on stderr says if the fit did not reach alpha; with ``--strict`` that is exit code
1). 1: it was written, and the audit of the rows held out found a violation. 2: nothing was written.
"""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import torchgmc as gmc
from torchgmc import report as reports
from torchgmc.cli import fitting, options, show
from torchgmc.cli.membership import Membership
from torchgmc.cli.source import CLUSTERS, Source, find_arrays, load_head, membership_of, task_of, tasks
from torchgmc.cli.tables import open_table
from torchgmc.cli.writers import check_file
from torchgmc.engine import checks
from torchgmc.heads.task import Task

UNGATED = "--strict compares the fit with alpha, and none was given; pass --alpha NUMBER, or omit --strict."


def calibrate(
    kind: type[gmc.Head],
    data: options.Data,
    out: Annotated[Path, options.told("File of the fitted head, .safetensors.", "FILE")],
    *,
    alpha: options.Alpha = None,
    own: dict[str, Any],
    grouping: options.Grouping,
    solving: options.Solving,
    checking: options.HoldingOut,
    showing: options.Showing,
    chunk: options.Chunk = None,
) -> None:
    """Fit a head on the arrays of a file and save it."""
    check_file("--out", out, data, suffixes=(".safetensors",))
    check_file("--report", checking.report, data, out, suffixes=(".html", ".htm"))
    if checking.holdout:
        checks.fraction("--holdout", checking.holdout)
    checks.fraction("--delta", checking.delta)
    if solving.strict and alpha is None:
        raise ValueError(UNGATED)
    head, source = begin(kind, data, alpha, own, grouping, chunk)
    held = fitting.held_out(source.count, checking)
    fitting.fit(head, source, solving, held)
    audit = None if held is None else fitting.audit(head, source, checking.delta, held)
    gmc.save(head, out, source.notes(), checking.remember, source.named)
    files = {"head": out}
    if checking.report is not None:
        files["report"] = reports.write(checking.report, audit, head, settings={"command": show.command(), "data": data.name})
    finish(head, audit, files, solving.strict, showing)


def begin(
    kind: type[gmc.Head],
    data: Path,
    alpha: float | None,
    own: dict[str, Any],
    grouping: options.Grouping,
    chunk: int | None,
    like: Path | None = None,
) -> tuple[gmc.Head, Source]:
    """The head that the options describe, and the rows of the file for it; ``like``: groups as in another head's file."""
    task = task_of(kind)
    given = {o.argument: o.read(own[o.argument]) for o in task.options if own[o.argument] is not None}
    table = open_table(data)
    roles = {role: own[role] for role in roles_of(kind)}
    arrays = find_arrays(table, task, roles, {}, ("scores", "labels") if kind.truth else ("scores",))
    if like is not None:
        if grouping != options.Grouping():
            raise ValueError("--like takes the groups from the other part; omit --groups and what belongs to it.")
        member = membership_of(*load_head(like, fitted=False), table, [])
    else:
        member = Membership.learn(table, grouping, chunk)
    source = Source(table, kind, arrays, member, chunk)
    return kind(alpha=alpha, groups=None if member is None else member.names, **task.complete(given, source)), source


def finish(head: gmc.Head, audit: gmc.Audit | None, files: dict[str, Path], strict: bool, showing: options.Showing) -> None:
    """What is printed, and the exit code."""
    fit = head.report
    assert fit is not None
    if not fit.converged and (head.alpha is not None or fit.reached == "no"):
        show.say(f"warning: {'the noise level' if head.alpha is None else 'alpha'} was not reached: {fit.message}")
    if not showing.as_json:
        show.print_fit(head, audit, files, showing.most)
    else:
        show.print_json(
            {
                "torchgmc": gmc.__version__,
                "task": task_of(type(head)).name,
                "head": type(head).__name__,
                "groups": head.groups if head.grouped else None,
                "fit": show.fit_content(head),
                "audit": None if audit is None else audit.to_dict(),
                "files": {name: str(path) for name, path in files.items()},
            }
        )
    if (audit is not None and audit.violated) or (strict and not fit.converged):
        raise typer.Exit(1)


def roles_of(kind: type[gmc.Head]) -> dict[str, str]:
    """Arrays that a task reads, and a line of help for each."""
    task = task_of(kind)
    found = {"scores": f"Array of scores; by default {_one_of(task.scores)}."}
    if task.labels:
        why = "" if kind.truth else ", to measure what the promise costs"
        found["labels"] = f"Array of true labels{why}; by default {_one_of(task.labels)}."
    return found | {"weight": "Array of weights.", "clusters": CLUSTERS} | dict(task.arrays)


def _one_of(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


class Tasks(TyperGroup):
    """The tasks; the form of version 0.1, ``calibrate DATA --task TASK``, still works for a while."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Words of the new form."""
        return super().parse_args(ctx, _translated(args, list(self.commands)))


def _translated(words: list[str], known: list[str]) -> list[str]:
    if not words or words[0] in known or words[0] in ("--help", "--"):
        return words
    rest, task = [], None
    given = iter(words)
    for word in given:
        if word == "--task" or word.startswith("--task="):
            task = word.partition("=")[2] or next(given, "")
        else:
            rest.append(word)
    if task is None:
        raise ValueError(f"calibrate needs a task: {', '.join(known)}; for example torchgmc calibrate {known[0]} DATA ...")
    checks.option("--task", task, known)
    show.say(f"warning: --task is deprecated; write: torchgmc calibrate {shlex.join([task, *rest])}")
    return [task, *rest]


def by_task(function: Callable[..., None], help: str, text: Callable[[Task], str], **more: Any) -> typer.Typer:
    """A command that has, for each task, the function as a subcommand, with the options of the task's head."""
    app = typer.Typer(rich_markup_mode=None, invoke_without_command=True, subcommand_metavar="TASK DATA [OPTIONS]", **more)
    for name, kind in tasks().items():
        task = task_of(kind)
        own = [options.option(o.argument, o.flag, o.help, o.kind.metavar, o.required) for o in task.options]
        if task.groups_required and "like" not in function.__annotations__:
            own.append(options.option("groups", "--groups", "Group columns.", "NAME[,...]", True, "Groups"))
        made = options.command(function, own + options.arrays(roles_of(kind)), kind=kind)
        app.command(name, cls=options.Command, help=text(task), short_help=task.promise)(made)

    @app.callback(help=help)
    def root(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    return app


def commands() -> typer.Typer:
    """``calibrate`` and its subcommands."""
    words = "torchgmc calibrate"
    example = f"{words} fnr scores.npz --target 0.075 --alpha 0.005 --groups sex,site --out head.safetensors"
    help = f"Fit a head on the arrays of a file and save it: one task for each promise.\n\nExample: {example}"
    return by_task(calibrate, help, lambda task: f"{task.promise}\n\nExample: {words} {task.name} {task.example}", cls=Tasks)
