"""``torchgmc audit``: is the promise kept on other data?

    $ torchgmc audit head.safetensors test.npz --delta 0.05 --report audit.html

Exit code 0: the audit meets ``--require``. 1: it does not. 2: bad input.

================  ==========================================================================================
``--require``     exit code 1 if
================  ==========================================================================================
``unviolated``    some group is certainly off: beyond alpha with confidence 1 - delta, all groups at once (default)
``holds``         some estimate on these data lies beyond alpha, certain or not
``certified``     the promise is not proved for every group with confidence 1 - delta
``nothing``       never
================  ==========================================================================================
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

import torchgmc as gmc
from torchgmc import report as reports
from torchgmc.audits.intervals import METHODS
from torchgmc.cli import fitting, options, show
from torchgmc.cli.source import audited_arrays, load_head, open_source
from torchgmc.cli.writers import check_file
from torchgmc.engine import checks

REQUIREMENTS = ("unviolated", "holds", "certified", "nothing")
FAILURES = {
    "unviolated": "the promise is violated.",
    "holds": "the promise does not hold on these data.",
    "certified": "the promise is not certified by these data.",
}


@dataclass(frozen=True)
class Judging:
    """By what the data are judged; see :func:`torchgmc.audit`."""

    alpha: Annotated[float | None, options.told("Use this alpha instead of the head's.", "NUMBER")] = None
    conditional: options.Conditional = None
    method: Annotated[
        str, options.told("Intervals: exact for any number of examples, or asymptotic for many.", "|".join(METHODS))
    ] = "exact"
    cluster_size: options.ClusterSize = None
    delta: options.Delta = 0.05


def audit(
    head: options.Head,
    data: options.Data,
    *,
    own: dict[str, Any],
    require: Annotated[
        str, options.told("Fail (exit code 1) unless the audit is this; `nothing` never fails.", "|".join(REQUIREMENTS))
    ] = "unviolated",
    judging: Judging,
    groups: options.GroupColumns = None,
    unknown: options.Unknown = "error",
    chunk: options.Chunk = None,
    report: options.Report = None,
    measures: Annotated[
        bool, options.told("Add measures by group with intervals: ECE, FNR, precision, coverage, ...", None, "--measures")
    ] = False,
    showing: options.Showing,
) -> None:
    """Measure a head's promise on held-out data; exit code 1 if it is violated.

    Example: torchgmc audit head.safetensors test.npz --delta 0.05 --report audit.html
    """
    checks.option("--require", require, REQUIREMENTS)
    checks.fraction("--delta", judging.delta)
    checks.option("--method", judging.method, METHODS)
    check_file("--report", report, head, data, suffixes=(".html", ".htm"))
    fitted, notes = load_head(head)
    if fitted.alpha is None and judging.alpha is None and require != "nothing":
        raise ValueError("this head was made with alpha=None: say what to judge it by with --alpha, or use --require nothing.")
    wanted = ("scores", "labels") if fitted.truth else ("scores",)
    source = open_source(fitted, notes, data, own, groups, wanted, chunk, unknown)
    found = fitting.audit(fitted, source, **asdict(judging))
    needed = None if found.alpha is None else found.examples_needed()
    if report is not None:
        reports.write(report, found, fitted, settings={"command": show.command(), "head": head.name, "data": data.name})
    kept = require == "nothing" or (not found.violated if require == "unviolated" else getattr(found, require))
    if showing.as_json:
        files = {} if report is None else {"report": str(report)}
        figures = None if needed is None else {"examples": int(needed), **vars(needed)}
        more = {"require": require, "passed": kept, "examples_needed": figures, "files": files}
        if measures:
            more["measures"] = found.measures().to_dict()
        show.print_json({"torchgmc": gmc.__version__} | found.to_dict() | more)
    else:
        show.print_audit(found, showing.most, needed)
        if measures:
            show.print_measures(found.measures(), showing.most)
        if report is not None:
            typer.echo(f"report: {report}")
        if not kept:
            show.say(FAILURES[require])
    if not kept:
        raise typer.Exit(1)


def command() -> Callable[..., None]:
    """With an option for each array that some head takes."""
    return options.command(audit, options.arrays(audited_arrays()))
