"""The report of a head and its audit: one self-contained HTML file.

The certificate is on top, then the deviations and what they cost, what was fitted, every interval, and the settings that
reproduce it. Figures need the extra ``report``; without it the tables show the same.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchgmc import plots
from torchgmc.audits.audit import Audit
from torchgmc.audits.comparison import Comparison, by_name
from torchgmc.audits.measures import Measures
from torchgmc.audits.page import Picture, Section, write_html
from torchgmc.audits.tabular import Table, row_name, shown
from torchgmc.engine import checks
from torchgmc.engine.files import write_file
from torchgmc.heads.base import Head

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Picture", "Section", "Table", "fitted", "picture", "remake", "write", "write_file", "write_html"]

#: Rows of a table; what is beyond is in the JSON file of the audit.
MOST_ROWS = 200
#: Length of a setting in the table of settings; the whole is below it.
MOST_LETTERS = 160


def write(
    path: str | Path,
    audit: Audit | Comparison | Mapping[str, Audit] | None,
    head: Head | None = None,
    *,
    ours: str | None = None,
    title: str = "",
    lead: str = "",
    certificate: str = "",
    sections: Sequence[Section] = (),
    figures: Mapping[str, Picture | Callable[[bool], Figure]] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write the full report of a head of any kind; returns its path.

    Args:
        path: of the file; written completely or not at all.
        audit: of the head on held-out data; a comparison or a mapping from names for several heads side by side. None
            says that nothing was audited, and shows the calibration data.
        head: the fitted head: adds what was fitted, its figures and its settings.
        ours: name of the head's own audit among several; the last if omitted.
        title, lead: the title, and a paragraph under it.
        certificate: replaces the audit's own line.
        sections: your own sections, shown first.
        figures: more figures by caption: a :class:`Picture`, or a function of ``dark`` that draws one, e.g.
            ``{"Words that moved most": lambda dark: plots.words(head, logits, groups, dark=dark)}``.
        settings: what else is needed to reproduce it: command, seed, files, solver.

    Example:
        >>> import tempfile
        >>> probs, y = torch.rand(400), torch.rand(400) < 0.5
        >>> head = gmc.ProbabilityHead(alpha=0.05, bins=2).fit(probs[:200], y[:200])
        >>> audit = head.audit(probs[200:], y[200:])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = gmc.report.write(f"{folder}/report.html", audit, head, settings={"seed": 0}).read_text()
        >>> audit.certificate in page
        True
    """
    audits = {} if audit is None else by_name(audit, "audit")
    checks.kind("head", head, Head | None, "the head that was audited, or None")
    for name, value in {"title": title, "lead": lead, "certificate": certificate}.items():
        checks.text(name, value)
    for name, mapping in {"settings": settings, "figures": figures}.items():
        checks.kind(name, mapping, Mapping | None, "a mapping from names")
    if not isinstance(sections, Sequence) or not all(isinstance(part, Section) for part in sections):
        raise TypeError(f"`sections` must be a list of Section, got {sections!r:.80}.")
    target = checks.path("path", path)
    ours = checks.text("ours", ours) if ours is not None else next(reversed(audits), "")
    if audits and ours not in audits:
        raise ValueError(f"`ours` must be one of {', '.join(map(repr, audits))}, got {ours!r}.")
    if not audits and head is None:
        raise ValueError("`audit` and `head` are both None: there is nothing to report.")
    main = audits.get(ours)
    kind = (main.name if main is not None else "") or (type(head).__name__ if head is not None else "a head")
    parts = [*sections]
    if audits:
        parts.append(_deviations(audits))
    if figures:
        parts.append(Section("Figures", pictures=[picture(draw, text) for text, draw in figures.items()]))
    if head is not None and head.is_fitted:
        parts.append(fitted(head, main))
    if main is not None and main.source is not None and (found := main.measures()).names:
        parts.append(_measures(found))
    parts += [_intervals(name, one, len(audits) > 1) for name, one in audits.items()]
    parts.append(remake(head, audits, settings or {}))
    return write_html(
        target,
        title or (f"Calibration of {kind}" if main is None else f"Audit of {kind}"),
        certificate or (f"{ours}: " if len(audits) > 1 else "") + (_unaudited(head) if main is None else main.certificate),
        parts,
        lead=lead,
        verdict="" if main is None else _verdict(main),
        facts=[] if main is None else _facts(main),
        notes=list(dict.fromkeys(one.note for one in audits.values() if one.note)),
        answer="" if main is None or certificate else main.answer,
    )


def picture(draw: Picture | Callable[[bool], Figure], text: str) -> Picture:
    """A figure for light and for dark pages, with its caption."""
    if isinstance(draw, Picture):
        return draw
    light, dark = (plots.png(draw(dark)) for dark in (False, True))
    return Picture(light, text, dark)


def fitted(head: Head, audit: Audit | None = None) -> Section:
    """What was fitted: the head's message, its own figures and tables, and the steps."""
    paragraphs: list[str] = []
    drawings = dict(head.figures(audit))
    fit = head.report
    if fit is not None:
        unit = "step" if fit.iterations == 1 else "steps"
        state = "" if fit.converged else "Alpha was not reached on the calibration data. "
        paragraphs.append(f"{state}{fit.iterations} {unit} in {fit.seconds:.2f} s: {fit.message}")
        if len(fit.history) > 2:
            caption = "Worst violation on the calibration data after each step"
            drawings[caption] = lambda dark: plots.convergence(fit, head.alpha, dark=dark)
    pictures = [picture(draw, text) for text, draw in drawings.items()] if _can_draw() else []
    return Section("What was fitted", paragraphs, head.tables(audit), pictures)


def remake(head: Head | None, audits: Mapping[str, Audit], settings: Mapping[str, Any]) -> Section:
    """The settings that reproduce a report: those passed, the head's configuration, sizes and versions."""
    import torchgmc

    rows = [[str(name), _setting(value)] for name, value in settings.items()]
    long = None
    if head is not None:
        config = head.config()
        rows.append(["head", type(head).__name__])
        rows += [[name, _setting(value)] for name, value in config.items()]
        if head.report is not None and "examples" in head.report.details:
            rows.append(["calibration examples", str(head.report.details["examples"])])
        text = json.dumps({"head": type(head).__name__, "config": config}, indent=1, default=str)
        long = ("The head's configuration as JSON", text)
    sizes = sorted({one.num_examples for one in audits.values()})
    if sizes:
        rows.append(["audited examples", ", ".join(map(str, sizes))])
        rows.append(["confidence", ", ".join(sorted({f"{100 * (1 - one.delta):g} %" for one in audits.values()}))])
    rows.append(["versions", f"torchgmc {torchgmc.__version__}, torch {torch.__version__}, Python {platform.python_version()}"])
    return Section("How to reproduce this report", tables=[Table(["setting", "value"], rows, wrapped=["value"])], long=long)


def _unaudited(head: Head | None) -> str:
    text = "Nothing was audited: there were no held-out data."
    if head is None or head.report is None:
        return text
    worst = float(head.report.violations_after.abs().max())
    level = "" if head.alpha is None else f" (alpha {head.alpha:g})"
    return f"{text} On the calibration data, which the head has seen, the worst violation is {worst:.4g}{level}."


def _verdict(audit: Audit) -> str:
    if audit.alpha is None:
        return "undecided"
    return "holds" if audit.certified else "violated" if audit.violated else "undecided"


def _facts(audit: Audit) -> list[tuple[str, str]]:
    words = {
        "holds": "holds for the population",
        "violated": "violated for at least one group",
        "undecided": "none: there is no alpha" if audit.alpha is None else "undecided: more examples would tell",
    }
    need: list[tuple[str, str]] = []
    if audit.evidence is not None and audit.alpha is not None and not audit.certified:
        number = audit.examples_needed()
        if number is None:
            words["undecided"] = "undecided: not within alpha here, but this may be chance"
        need = [(f"examples to certify {audit.alpha:g}", str(number or "no number, if the population is as measured here"))]
    return [
        ("verdict", words[_verdict(audit)]),
        ("alpha", "-" if audit.alpha is None else f"{audit.alpha:g}"),
        ("measured, worst", f"{audit.max_violation:.4f}"),
        ("certified", f"{audit.certified_alpha:.4f}"),
        ("examples audited", f"{audit.num_examples:,}"),
        *need,
    ]


def _deviations(audits: Mapping[str, Audit]) -> Section:
    first = next(iter(audits.values()))
    own = "the group's own risk minus the target" if first.conditional else "the group's share times (its risk - the target)"
    if first.evidence is not None and first.evidence.rows.relative:
        own = own.replace("risk", "probability").replace("the target", "that of all")
    promised = "there is no alpha." if first.alpha is None else f"at most {first.alpha:g} is promised."
    text = [
        f"The deviation is {own}; {promised} {first.explanation} "
        '"undecided" means that these data neither confirm nor refute the promise; more examples would.'
    ]
    caption = "Points: measured on the held-out examples. Lines: intervals that all hold at once. Band: the promise."
    rows = max(10, 36 // len(audits))  # a figure that fits a screen or two; the tables have every row
    pictures = [picture(lambda dark: plots.deviation(audits, top=rows, dark=dark), caption)] if _can_draw() else []
    return Section("Side by side" if len(audits) > 1 else "Deviation from the promise", text, [_summary(audits)], pictures)


def _summary(audits: Mapping[str, Audit]) -> Table:
    """Worst deviation, certified alpha, costs and verdict: one column per head, so that many costs fit a narrow page."""
    costs = list(dict.fromkeys(name for audit in audits.values() for name in audit.cost))
    rows = [
        ["worst deviation", *(shown(audit.max_violation) for audit in audits.values())],
        ["certified alpha", *(shown(audit.certified_alpha) for audit in audits.values())],
        *([cost, *(shown(audit.cost.get(cost)) for audit in audits.values())] for cost in costs),
        ["verdict", *map(_verdict, audits.values())],
    ]
    return Table(["", *audits], rows, list(audits), wrapped=[""])


def _intervals(name: str, audit: Audit, several: bool) -> Section:
    """Every row; where a group has several, one row per group, worst first, and all of its own to unfold beneath."""
    first = ["estimate", "low", "high", "bound"]
    columns = [*first, *(key for key in audit.table if key not in (*first, "group", "what", "verdict"))]
    heads = ["verdict", *columns]
    digits = max(4, 2 - math.floor(math.log10(audit.alpha or 0.01)))  # two figures of alpha

    def cells(label: str, r: Mapping[str, Any]) -> list[str]:
        signed = {k: f"{r[k]:+.{digits}f}" for k in ("estimate", "low", "high")}
        signed = {k: text if float(text) != 0 else text[1:] for k, text in signed.items()}
        return [label, r["verdict"], *(signed[k] if k in signed else shown(r[k]) for k in columns)]

    text = [f"Worst first. {audit.certificate}" if several else "Worst first."]
    if audit.excluded:
        text.append(f"{audit.excluded} examples have no risk and were ignored.")
    heading = f"Every interval: {name}" if several else "Every interval"
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in audit.rows():
        groups.setdefault(row["group"], []).append(row)
    most = dict(list(groups.items())[:MOST_ROWS])
    if len(most) < len(groups):
        text.append(f"{len(groups) - len(most)} groups that deviate less are not shown; `audit.to_json` writes all.")
    tops = [cells(row_name(group, r["what"]), r) for group, (r, *_) in most.items()]
    beneath: list[tuple[str, Table]] = []
    if any(len(found) > 1 for found in groups.values()):
        text.append("The row of each group that deviates most; unfold all of its rows beneath it.")
        beneath = [
            (f"all {len(found)} rows: {_counts(found)}", Table(["", *heads], [cells(r["what"], r) for r in found], columns))
            for found in most.values()
        ]
    return Section(heading, text, [Table(["group", *heads], tops, columns, wrapped=["group"], beneath=beneath)])


def _measures(found: Measures) -> Section:
    """Measures over the groups: where each is lowest and highest, how far these are apart, and every group to unfold."""
    text = [
        f"All intervals hold at once with {100 * (1 - found.delta):g} % confidence, those of calibration errors (ECE, ECCE) "
        "for many examples. A difference or ratio has no interval where single groups have none."
    ]
    for name, mce in found.mce.items():
        text.append(
            f"Multicalibration error{f' of {name}' * bool(name)} (the largest ECCE of any group): {shown(mce['absolute'])}, "
            f"{mce['sigma']:.3g} sigmas, p-value {mce['pvalue']:.2g}; {shown(mce['detectable'])} would be detected."
        )
    rows, folds = [], []
    for name, (values, *known) in found.spans().items():
        groups = sorted(((e, g) for g, e in values.items() if e == e), reverse=True)
        if not groups:
            continue
        ends = [f"{shown(float(e))} ({g})" for e, g in (groups[-1], groups[0])]
        spans = ["-" if e is None else f"{shown(float(e))} ({shown(e.low)} to {shown(e.high)})" for e in known]
        rows.append([name, *spans, *ends])
        listed = [[g, shown(float(e)), *(shown(v) if v == v else "-" for v in (e.low, e.high))] for e, g in groups]
        columns = ["value", "low", "high"]
        folds.append((f"{name} of every group", Table(["group", *columns], listed[:MOST_ROWS], columns, wrapped=["group"])))
    heads = ["measure", "difference", "ratio", "lowest", "highest"]
    return Section("Measures by group", text, [Table(heads, rows, wrapped=heads[1:])], folds=folds)


def _counts(rows: Sequence[Mapping[str, Any]]) -> str:
    verdicts = [row["verdict"] for row in rows]
    return ", ".join(f"{verdicts.count(v)} {v}" for v in ("violated", "undecided", "holds") if v in verdicts)


def _setting(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]} ... ({len(text)} letters, see below)"


def _can_draw() -> bool:
    return find_spec("matplotlib") is not None
