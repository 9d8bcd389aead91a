"""What commands print: tables on stdout, progress and warnings on stderr, only JSON with ``--json``."""

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

import torchgmc as gmc
from torchgmc.audits.measures import Measures
from torchgmc.audits.tabular import row_name
from torchgmc.engine import checks
from torchgmc.engine.files import plain


def print_json(content: dict[str, Any]) -> None:
    """Strict JSON on stdout."""
    typer.echo(json.dumps(content, indent=2, allow_nan=False))


def say(message: str) -> None:
    """One line on stderr."""
    print(f"torchgmc: {checks.printable(' '.join(message.split()))}", file=sys.stderr)


def console() -> Any:
    """Where tables go: as wide as the terminal, and wide enough for any table in a pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200, highlight=False, soft_wrap=False)


@contextmanager
def progress(text: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal (on stderr), nothing in a pipe; yields what moves it on."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(text, total=total)
        yield lambda steps: bars.advance(task, steps)


def fit_content(head: gmc.Head) -> dict[str, Any]:
    """What a fit did, as JSON types; worst violation first."""
    fit = head.report
    assert fit is not None
    before, after = (table.flatten().tolist() for table in (fit.violations_before, fit.violations_after))
    named = zip(head.test_functions().all(), before, after, strict=True)
    rows = plain({"rows": [dict(zip(("name", "before", "after"), row, strict=True)) for row in named]})["rows"]
    found = {name: getattr(fit, name) for name in ("converged", "reached", "iterations", "seconds", "message")}
    found |= {f"worst_{when}": max(map(abs, one), default=0.0) for when, one in (("before", before), ("after", after))}
    return found | {"violations": sorted(rows, key=lambda row: -max(abs(row["before"] or 0.0), abs(row["after"] or 0.0)))}


def print_fit(head: gmc.Head, audit: gmc.Audit | None, files: dict[str, Path], most: int) -> None:
    """Violations before and after, the audit of the rows held out, and where the files are."""
    page, fit = console(), fit_content(head)
    table = _table(numeric=("before", "after"))
    for row in fit["violations"][:most]:
        table.add_row(_plain(row["name"]), *("-" if row[k] is None else f"{row[k]:+.4f}" for k in ("before", "after")))
    _print_table(page, "Violations on the calibration data", table, len(fit["violations"]) - most)
    page.print(_plain(fit["message"]), soft_wrap=True)
    if audit is not None:
        print_audit(audit, most)
    for name, path in files.items():
        page.print(f"{name}: {_plain(str(path))}", soft_wrap=True)


def print_audit(audit: gmc.Audit, most: int, needed: Any = None) -> None:
    """The worst g, the certificate and how many examples it would take; every mark is readable without colour."""
    page = console()
    table = _table(numeric=("mass", "estimate", "interval"))
    table.add_column("verdict", no_wrap=True)
    colours = {"holds": "green", "violated": "bold red", "undecided": "yellow"}
    for row in audit.rows()[:most]:
        numbers = f"{row['mass']:.4f}", f"{row['estimate']:+.4f}", f"{row['low']:+.4f} to {row['high']:+.4f}"
        verdict = f"[{colours[row['verdict']]}]{row['verdict']}[/]"
        table.add_row(_plain(row_name(row["group"], row["what"])), *numbers, verdict)
    _print_table(page, f"{audit.name}, audited on {audit.num_examples} examples", table, len(audit.table["group"]) - most)
    cost = ", ".join(f"{name} {value:.4f}" for name, value in audit.cost.items())
    short = needed is not None and not audit.certified
    need = f"Examples like these that would certify {audit.alpha:g}: {needed or 'no number is enough'}." if short else ""
    for text in filter(None, (audit.certificate, audit.explanation, cost, audit.note, need)):
        page.print(_plain(text), soft_wrap=True)


def print_measures(measures: Measures, most: int) -> None:
    """Each measure: its span over the groups, and the groups."""
    page = console()
    for name, (found, apart, _) in measures.spans().items():
        table = _table(numeric=("value", "interval"))
        values = {group: value for group, value in found.items() if value == value}
        for group, e in sorted(values.items(), key=lambda item: -item[1])[:most]:
            table.add_row(_plain(group), f"{e:.4g}", f"{e.low:.4f} to {e.high:.4f}" if e.low == e.low else "-")
        span = f": groups differ by {apart!r}" if apart is not None and len(values) > 1 else ""
        _print_table(page, name + span, table, len(values) - most)


def command() -> str:
    """The words that the program was called with."""
    return shlex.join(["torchgmc", *sys.argv[1:]])


def _print_table(page: Any, title: str, table: Any, more: int) -> None:
    page.print(_plain(title), table, sep="\n")
    if more > 0:
        page.print(f"... and {more} more; --rows N shows them, --json and --report hold all.")


def _table(numeric: tuple[str, ...]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("group", overflow="fold")
    for name in numeric:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(checks.printable(text))
