"""``torchgmc calibrate``: arrays of a file in, a fitted head out.

    $ torchgmc calibrate scores.npz --task fnr --target 0.075 --alpha 0.005 --groups sex,site --out head.safetensors \
          --holdout 0.3 --report report.html

The file is read in blocks of rows, each turned into statistics and forgotten, so it may be larger than memory: once for the
values of the group columns, once for the fit, once for the audit of the rows held out. The head is that of the Python
interface; its file also keeps, under ``notes``, which arrays were read and how groups follow from columns
(:mod:`torchgmc.cli.membership`).

Exit code 0: the head was written (a fit that did not reach alpha is said on stderr; ``--strict`` makes it 1). 1: it was
written, and the audit of the rows held out found a violation. 2: nothing was written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import torchgmc as gmc
from torchgmc import report as reports
from torchgmc.cli import fitting, options, show
from torchgmc.cli.membership import Membership, Options
from torchgmc.cli.tables import open_table
from torchgmc.cli.tasks import TASKS, Arrays, Source, check_names, find_arrays, read_attributes, read_tree
from torchgmc.cli.writers import check_file
from torchgmc.engine import checks

__all__ = ["calibrate"]

Text = str | None
Number = float | None


def calibrate(
    data: options.Data,
    task: Annotated[str, typer.Option(help=f"The promise: {', '.join(TASKS)}.", show_default=False)],
    out: Annotated[Path, typer.Option(help="File of the fitted head, .safetensors.", show_default=False)],
    alpha: Annotated[float, typer.Option(help="Largest violation allowed.", show_default=False)],
    target: Annotated[
        Text, typer.Option(help="Risk or coverage to hold (fnr, tree, quantile); fnr: one per class.", show_default=False)
    ] = None,
    groups: options.Groups = None,
    group_names: Annotated[Text, typer.Option(help="Names of the columns of a membership matrix.", show_default=False)] = None,
    intersections: Annotated[int, typer.Option(min=1, help="Up to how many group columns a group combines.")] = 1,
    cut: Annotated[
        list[str], typer.Option(help="Edges of a group column of numbers: age=30,50. Repeatable.", show_default=False)
    ] = [],  # noqa: B006  # typer wants a list
    min_size: Annotated[int, typer.Option(min=1, help="Groups with fewer rows are too small.")] = 1,
    small: Annotated[str, typer.Option(help="What becomes of them: error, drop or merge.")] = "error",
    missing: Annotated[str, typer.Option(help="Missing values of a group column: error, or level for a group.")] = "error",
    overall: Annotated[bool, typer.Option("--overall", help="Add a group of everyone.")] = False,
    scores: options.Scores = None,
    labels: options.Labels = None,
    weight: options.Weight = None,
    base: options.Base = None,
    tree: Annotated[
        Path | None, typer.Option(help="For tree: JSON of nested names, paths or parents.", show_default=False)
    ] = None,
    attributes: Annotated[
        Path | None, typer.Option(help="For text: JSON, name of each list and its token ids (or words).", show_default=False)
    ] = None,
    tokenizer: Annotated[
        Text, typer.Option(help="For text: turns words into token ids (a folder).", show_default=False)
    ] = None,
    conditional: Annotated[bool, typer.Option("--conditional", help="Alpha bounds each group's own deviation.")] = False,
    bins: Annotated[
        int | None, typer.Option(min=0, help="Level sets (probability, quantile); 0: none.", show_default=False)
    ] = None,
    geometry: Annotated[Text, typer.Option(help="kl or euclidean (text, probability).", show_default=False)] = None,
    risk: Annotated[Text, typer.Option(help="For fnr: fnr or fpr.", show_default=False)] = None,
    classes: Annotated[
        int | None, typer.Option("--classes", min=1, help="For fnr: scores are (n, C, ...).", show_default=False)
    ] = None,
    logits: Annotated[bool, typer.Option("--logits", help="For fnr: scores are logits.")] = False,
    range_: Annotated[
        Text, typer.Option("--range", help="LOW,HIGH of scores, outcomes or level sets.", show_default=False)
    ] = None,
    resolution: Annotated[Text, typer.Option(help="For fnr: step between thresholds, or exact.", show_default=False)] = None,
    init: Annotated[Number, typer.Option(help="Threshold to start from (fnr, tree, quantile).", show_default=False)] = None,
    jitter: Annotated[Number, typer.Option(help="Half-width of tie-breaking noise (fnr, tree).", show_default=False)] = None,
    temperature: Annotated[Number, typer.Option(help="For text: divides the logits.", show_default=False)] = None,
    sets: Annotated[Text, typer.Option(help="For tree: `nodes`, every node by itself.", show_default=False)] = None,
    no_noise_floor: Annotated[
        bool, typer.Option("--no-noise-floor", help="For probability: go on below the noise of each cell.")
    ] = False,
    solver: Annotated[str, typer.Option(help="exact, paper (Algorithm 1) or fresh (Algorithm 2).")] = "exact",
    eta: Annotated[Number, typer.Option(help="Fixed step of paper and fresh.", show_default=False)] = None,
    max_iter: Annotated[int | None, typer.Option(min=1, help="Cap on the steps.", show_default=False)] = None,
    holdout: Annotated[float, typer.Option(help="Share of the rows kept back and audited.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Which rows are kept back.")] = 0,
    delta: options.Delta = 0.05,
    report: options.Report = None,
    remember: Annotated[
        bool,
        typer.Option(
            "--remember",
            help="Keep keys of the calibration rows in the file: an audit can then warn of them.",
        ),
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 if the fit does not reach alpha.")] = False,
    chunk: options.Chunk = None,
    most: options.Most = 20,
    as_json: options.Json = False,
) -> None:
    """Fit a head on the arrays of a file and save it.

    Example: torchgmc calibrate scores.npz --task fnr --target 0.075 --alpha 0.005 --groups sex,site --out head.safetensors
    --holdout 0.3 --report report.html
    """
    kind = TASKS[checks.option("--task", task, tuple(TASKS))]
    check_file("--out", out, data, suffixes=(".safetensors",))
    check_file("--report", report, data, out, suffixes=(".html", ".htm"))
    if holdout:
        checks.fraction("--holdout", holdout)
    checks.fraction("--delta", delta)
    given = {
        "target": None if target is None else _target(target),
        "conditional": conditional or None,
        "bins": bins,
        "geometry": geometry,
        "risk": risk,
        "num_classes": classes,
        "logits": logits or None,
        "range": None if range_ is None else _pair(range_),
        "resolution": resolution if resolution in (None, "exact") else options.numbers("--resolution", resolution)[0],
        "init": init,
        "jitter": jitter,
        "temperature": temperature,
        "sets": sets,
        "noise_floor": False if no_noise_floor else None,
    }
    if (tree is not None and task != "tree") or ((attributes or tokenizer) and task != "text"):
        raise ValueError("--tree belongs to the task 'tree', --attributes and --tokenizer to 'text'.")
    table = open_table(data)
    wanted = ("scores", *(("labels",) if kind.kind != "tokens" else ()))
    arrays = find_arrays(table, kind, Arrays(scores, labels, weight, base), {}, wanted)
    if base is not None and task != "quantile":
        raise ValueError("--base belongs to the task 'quantile'.")
    columns = options.words(groups)
    check_names(table, columns)
    more: dict[str, Any] = {}
    if task == "tree":
        more["parents"], more["names"] = read_tree(table, tree)
    if task == "text":
        more["attributes"] = read_attributes(attributes, tokenizer)
    how = Options(intersections, options.cuts(cut), min_size, small, missing, overall, options.words(group_names))
    if columns:
        table.count(columns)
    member = Membership.learn(table, columns, how, chunk) if columns else None
    source = Source(table, kind, arrays, member, chunk)
    head = fitting.make(source, alpha, given, more)
    held = fitting.fit(head, source, solver, eta, max_iter, holdout, seed)
    audit = None if held is None else fitting.audit(head, source, delta, held)
    gmc.save(head, out, notes=fitting.notes(source), remember=remember)
    files = {"head": out}
    if report is not None:
        settings = {"command": show.command(), "data": data.name}
        files["report"] = reports.write(report, audit, head, settings=settings)
    fit = head.report
    assert fit is not None
    if not fit.converged:
        show.say(f"warning: alpha was not reached: {fit.message}")
    if as_json:
        show.print_json(_content(head, source, audit, files))
    else:
        show.print_fit(head, audit, files, most)
    if (audit is not None and audit.violated) or (strict and not fit.converged):
        raise typer.Exit(1)


def _content(head: gmc.Head, source: Source, audit: gmc.Audit | None, files: dict[str, Path]) -> dict[str, Any]:
    """The result as JSON types."""
    return {
        "torchgmc": gmc.__version__,
        "task": source.task.name,
        "head": type(head).__name__,
        "groups": head.groups if head.grouped else None,
        "fit": show.fit_content(head),
        "audit": None if audit is None else audit.to_dict(),
        "files": {name: str(path) for name, path in files.items()},
    }


def _target(text: str) -> float | list[float]:
    values = options.numbers("--target", text)
    if not values:
        raise ValueError(f"--target must be a number, got {text!r}.")
    return values[0] if len(values) == 1 else values


def _pair(text: str) -> tuple[float, float]:
    values = options.numbers("--range", text)
    if len(values) != 2:
        raise ValueError(f"--range must be LOW,HIGH, got {text!r}.")
    return values[0], values[1]
