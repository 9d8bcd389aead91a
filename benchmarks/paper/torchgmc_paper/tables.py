"""Summary of all seeds, as CSV and Markdown.

The deviation of a group is |deviation| on test, its mean taken over the seeds, as in the paper. Standard errors are
sd / sqrt(K). The K seeds are K splits of the same examples, so they say how well the mean over splits is known, not how other
examples would come out.
"""

import csv
import io
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchgmc as gmc
from torchgmc.engine.files import harmless, write_file
from torchgmc_paper.measures import MEASURES

WORST = "(worst)"
"""The group that stands for the worst of all, in each seed by itself."""


@dataclass(frozen=True)
class Summary:
    """Lists of plain rows.

    Attributes:
        groups: by part, measure, method and group (and :data:`WORST`): ``seeds`` with a value, ``mean``, ``sd`` and ``se`` of
            |deviation|, ``signed`` mean deviation, ``risk``, ``mass``, |violation| on ``calibration``, ``noise`` of an oracle
            and ``noise_fitted`` (:mod:`torchgmc_paper.measures`), ``alpha``, ``beyond``: share of seeds with |deviation| >
            alpha.
        pairs: by part, measure, one of ours and another method: mean over seeds of (other's worst - our worst), ``se``, and the
            ``verdict`` at two standard errors.
        costs: by part, method and cost: ``mean``, ``sd``, ``se``.
    """

    groups: list[dict[str, Any]]
    pairs: list[dict[str, Any]]
    costs: list[dict[str, Any]]

    def find(self, **wanted: Any) -> list[dict[str, Any]]:
        """Rows of ``groups`` with these values."""
        return [row for row in self.groups if all(row[key] == value for key, value in wanted.items())]

    def alpha(self, part: str) -> float:
        """Tolerance of a part."""
        return float(self.find(part=part)[0]["alpha"])

    def parts(self) -> list[str]:
        """Parts, in order."""
        return list(dict.fromkeys(row["part"] for row in self.groups))


def summarize(rows: Sequence[Mapping[str, Any]], methods: Sequence[str], ours: Sequence[str], alpha: float) -> Summary:
    """Means, standard deviations and errors over the seeds, the worst group of each seed, paired differences.

    Args:
        rows: of all seeds, each with ``seed``; those of a part with its own tolerance have ``alpha``.
        methods: in the order to show.
        ours: those compared with every other one.
        alpha: the tolerance that ``beyond`` counts against.
    """
    by: dict[tuple[str, str, str], dict[str, dict[int, Mapping[str, Any]]]] = {}
    costs: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in rows:
        by.setdefault((row["part"], row["measure"], row["method"]), {}).setdefault(row["group"], {})[row["seed"]] = row
        for name, value in row["cost"].items():
            if value is not None:
                costs.setdefault((row["part"], row["method"], name), {})[row["seed"]] = value
    parts = list(dict.fromkeys(part for part, _, _ in by))
    groups: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    for part in parts:
        for measure in MEASURES:
            worst = {}
            for method in methods:
                found = by.get((part, measure, method))
                if found is None:
                    continue
                key = {"part": part, "measure": measure, "method": method}
                limit = next(iter(next(iter(found.values())).values())).get("alpha", alpha)
                groups += [{**key, "group": name, **_group(list(seeds.values()), limit)} for name, seeds in found.items()]
                worst[method] = _worst(found)
                groups.append({**key, "group": WORST, **_group(list(worst[method].values()), limit)})
            pairs += [
                {"part": part, "measure": measure, **_pair(mine, other, worst)}
                for mine in ours
                for other in methods
                if mine in worst and other in worst and other not in ours
            ]
    spread = [
        {"part": part, "method": method, "cost": name, **_spread(list(values.values()))}
        for (part, method, name), values in costs.items()
    ]
    return Summary(groups, pairs, spread)


def _spread(values: Sequence[float]) -> dict[str, Any]:
    """Number, mean, standard deviation (n - 1) and standard error."""
    n = len(values)
    sd = float(np.std(values, ddof=1)) if n > 1 else None
    mean = float(np.mean(values)) if n else None
    return {"seeds": n, "mean": mean, "sd": sd, "se": None if sd is None else sd / n**0.5}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _group(rows: Sequence[Mapping[str, Any]], alpha: float) -> dict[str, Any]:
    deviation = [row["deviation"] for row in rows if row["deviation"] is not None]
    columns = ("risk", "mass", "noise", "noise_fitted")
    calibration = _mean(None if row["calibration"] is None else abs(row["calibration"]) for row in rows)
    return {
        **_spread([abs(value) for value in deviation]),
        "signed": _mean(deviation),
        "alpha": alpha,
        "beyond": _mean(float(abs(value) > alpha) for value in deviation),
        "calibration": calibration,
        **{name: _mean(row[name] for row in rows) for name in columns},
    }


def _worst(found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> dict[int, dict[str, Any]]:
    """By seed: the largest |deviation| of any group."""
    worst: dict[int, dict[str, Any]] = {}
    for seed in sorted({seed for seeds in found.values() for seed in seeds}):
        rows = [seeds[seed] for seeds in found.values() if seed in seeds]
        size = [abs(row["deviation"]) for row in rows if row["deviation"] is not None]
        known = [abs(row["calibration"]) for row in rows if row["calibration"] is not None]
        worst[seed] = {
            "deviation": max(size) if size else None,
            "calibration": max(known) if known else None,
            "noise": rows[0]["worst_noise"],
            **dict.fromkeys(("risk", "mass", "noise_fitted")),
        }
    return worst


def _pair(mine: str, other: str, worst: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Difference of the worst deviations, seed by seed: positive when ours is smaller."""
    difference = [
        worst[other][seed]["deviation"] - worst[mine][seed]["deviation"]
        for seed in worst[mine]
        if seed in worst[other] and worst[other][seed]["deviation"] is not None and worst[mine][seed]["deviation"] is not None
    ]
    found = _spread(difference)
    verdict = "undecided"
    if found["se"] is not None and abs(found["mean"]) > 2 * found["se"]:
        verdict = "ours smaller" if found["mean"] > 0 else "ours larger"
    return {"ours": mine, "other": other, **found, "verdict": verdict}


# -- files -------------------------------------------------------------------------------------------------------------


def write(folder: Path, results: Any, summary: Summary, command: str, figures: Mapping[str, bytes]) -> dict[str, Path]:
    """Writes ``NAME.md``, ``NAME.csv``, ``NAME_pairs.csv``, ``NAME_costs.csv`` and the figures; returns them by name."""
    name = results.module.NAME
    files = {
        f"{name}.md": page(results, summary, command, list(figures)).encode(),
        f"{name}.csv": _csv(summary.groups),
        f"{name}_pairs.csv": _csv(summary.pairs),
        f"{name}_costs.csv": _csv(summary.costs),
        **figures,
    }
    for file, content in files.items():
        write_file(folder / file, content)
    return {file: folder / file for file in files}


def _csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    text = io.StringIO()
    if rows:
        table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows({k: f"{v:.6g}" if isinstance(v, float) else harmless(v) for k, v in row.items()} for row in rows)
    return text.getvalue().encode()


def page(results: Any, summary: Summary, command: str, figures: Sequence[str] = ()) -> str:
    """The page of an experiment in Markdown."""
    module = results.module
    lines = [f"# {module.TITLE}", "", *_header(results, command), ""]
    lines += [f"- {note}" for note in results.prepared.notes] + [""] * bool(results.prepared.notes)
    lines += [
        "Deviation: mean |deviation| on test over the seeds ± its standard error / standard deviation. "
        "Seeds are splits of the same examples: the standard error is that of the mean over splits. "
        "Mass: share of the group times (its risk - target), the paper's measure. Conditional: the group's own risk - target. "
        f"The last row is the worst group of each seed. Tolerance alpha = {_alphas(summary)}.",
        "",
    ]
    for part in summary.parts():
        lines += [f"## {part}", ""] if part else []
        lines += [f"![deviations]({name})" for name in figures if _belongs(name, part, summary)] + [""]
        for measure in MEASURES:
            lines += [f"### {part + ': ' if part else ''}{measure}", "", *_deviations(summary, part, measure, module), ""]
            lines += _pairs(summary, part, measure)
            lines += _excess(summary, part, measure, summary.alpha(part))
        lines += _costs(summary, part, module.METHODS)
    return "\n".join(lines).rstrip() + "\n"


def _alphas(summary: Summary) -> str:
    """One number if all parts have the same, else each part's."""
    found = {part: f"{summary.alpha(part):g}" for part in summary.parts()}
    return next(iter(found.values())) if len(set(found.values())) == 1 else "; ".join(f"{a} ({p})" for p, a in found.items())


def _belongs(name: str, part: str, summary: Summary) -> bool:
    return len(summary.parts()) == 1 or slug(part) in name


def slug(text: str) -> str:
    """A part as a piece of a file's name."""
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")


def _header(results: Any, command: str) -> list[str]:
    packages = ["numpy", "safetensors", *getattr(results.module, "PACKAGES", ())]
    versions = [f"torchgmc {gmc.__version__}", f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    versions += [f"{name} {_version(name)}" for name in packages]
    setting = ", ".join(f"{key} {value}" for key, value in asdict(results.setting).items())
    return [
        f"- command: `{command}`",
        f"- versions: {', '.join(versions)}",
        f"- machine: {_processor()}, {os.cpu_count()} cores, {platform.system()}",
        f"- date: {datetime.now(timezone.utc):%Y-%m-%d}",
        f"- setting: {setting}; {results.seeds} seeds",
    ]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _number(value: float | None, sign: bool = False) -> str:
    """Four decimals, or two digits of a number that has fewer there."""
    if value is None:
        return ""
    return f"{value:{'+' if sign else ''}{'.4f' if value == 0 or abs(value) >= 0.001 else '.2g'}}"


def _cell(row: Mapping[str, Any]) -> str:
    return f"{_number(row['mean'])} ± {_number(row['se'])} / {_number(row['sd'])}"


def _deviations(summary: Summary, part: str, measure: str, module: Any) -> list[str]:
    table = {(row["group"], row["method"]): row for row in summary.find(part=part, measure=measure)}
    names = list(dict.fromkeys(group for group, _ in table))
    names = [*(name for name in names if name != WORST), WORST]
    methods = [method for method in module.METHODS if any((name, method) in table for name in names)]
    paper = module.PAPER.get(part, {}) if measure == "mass" else {}
    shared = [method for method, values in paper.items() if set(values) & set(names)]
    rows = [
        [
            name,
            *(_cell(table[name, method]) if (name, method) in table else "" for method in methods),
            *(_number(paper[method].get(name)) for method in shared),
        ]
        for name in names
    ]
    lines = markdown(["group", *methods, *(f"paper: {method}" for method in shared)], rows)
    if paper and not shared:
        groups = list(dict.fromkeys(group for values in paper.values() for group in values))
        cells = [[method, *(_number(values.get(group)) for group in groups)] for method, values in paper.items()]
        lines += ["", "The paper's own figures, for its own groups:", "", *markdown(["method", *groups], cells)]
    return lines


def _pairs(summary: Summary, part: str, measure: str) -> list[str]:
    rows = [
        [row["ours"], row["other"], f"{_number(row['mean'], True)} ± {_number(row['se'])}", row["verdict"]]
        for row in summary.pairs
        if row["part"] == part and row["measure"] == measure
    ]
    title = "Worst group, paired by seed: other - ours ± standard error; the verdict is at two standard errors."
    return [title, "", *markdown(["ours", "other", "difference", "verdict"], rows), ""] if rows else []


def _excess(summary: Summary, part: str, measure: str, alpha: float) -> list[str]:
    """Where the mean deviation exceeds alpha: how much of it sampling alone explains."""
    rows = [
        [
            row["method"],
            row["group"],
            _number(row["mean"]),
            _number(row["calibration"]),
            _number(row["noise"]),
            _number(row["noise_fitted"]),
        ]
        for row in summary.find(part=part, measure=measure)
        if row["mean"] is not None and row["mean"] > alpha
    ]
    if not rows:
        return [f"No mean deviation exceeds {alpha:g}.", ""]
    return [
        f"Where the mean deviation exceeds {alpha:g}: its size on the calibration examples, that of an oracle that "
        "knows the true distribution (test noise alone), and of a predictor exact on the calibration examples (noise of both).",
        "",
        *markdown(["method", "group", "test", "calibration", "oracle's noise", "noise of both"], rows),
        "",
    ]


def _costs(summary: Summary, part: str, methods: Sequence[str]) -> list[str]:
    found = {(row["method"], row["cost"]): row for row in summary.costs if row["part"] == part}
    names = list(dict.fromkeys(name for _, name in found))
    shown = [method for method in methods if any((method, name) in found for name in names)]
    if not names:
        return []
    cells = [[method, *(_cell(found[method, name]) if (method, name) in found else "" for name in names)] for method in shown]
    return [f"### {part + ': ' if part else ''}cost", "", *markdown(["method", *names], cells), ""]


def brief(summary: Summary, title: str) -> str:
    """The worst group of each method, for a terminal."""
    lines = [title]
    for part in summary.parts():
        for measure in MEASURES:
            rows = summary.find(part=part, measure=measure, group=WORST)
            width = max(map(len, (row["method"] for row in rows)), default=0)
            lines.append(f"  {part + ', ' if part else ''}{measure}: worst group, mean over seeds (standard error)")
            lines += [f"    {row['method']:{width}}  {_number(row['mean'])} ({_number(row['se'])})" for row in rows]
    return "\n".join(lines)
