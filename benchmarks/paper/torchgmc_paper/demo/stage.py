"""What the demos share: a result that becomes JSON, a table and a page, the run around their own work, and
their table on a terminal of 80 columns, where every mark is readable without colour."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

import torchgmc as gmc
from torchgmc.engine.extras import require
from torchgmc.engine.files import plain, write_file, write_json
from torchgmc.engine.modes import calm
from torchgmc.heads.base import Head
from torchgmc.report import write
from torchgmc_paper.demo.progress import Bar, progress_bar

T = TypeVar("T")
Same = TypeVar("Same", bound="Result")
Page = tuple[dict[str, bytes], dict[str, Any]]


class Found(NamedTuple):
    """What a demo's own work returns: the head to save, audits by method, more fields of its result, and its page: a
    function of the result that returns PNG files by name and options of :func:`torchgmc.report.write`."""

    head: Head
    audits: dict[str, gmc.Audit]
    fields: dict[str, Any]
    page: Callable[[Any], Page]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a demonstration found; printed with rich it shows a table.

    Attributes:
        out: folder of the files.
        audits: by method, on the test examples.
        report: of the fitted head.
        seconds: time of each stage.
        files: name and path of each file written.
    """

    demo: ClassVar[str]
    ours: ClassVar[str] = "GMC"
    standard: ClassVar[Any]  # the setting of a run
    quick: ClassVar[Any]  # of a trial run
    needs: ClassVar[Mapping[str, str]] = {}  # packages, and the extra of each
    out: Path
    seed: int
    setting: Any
    audits: dict[str, gmc.Audit]
    report: gmc.Report
    seconds: dict[str, float]
    files: dict[str, Path] = field(default_factory=dict)

    @classmethod
    def run(
        cls: type[Same],
        out: str | Path = "torchgmc-demo",
        *,
        seed: int = 0,
        progress: bool = True,
        setting: Any = None,
        **more: Any,
    ) -> Same:
        """Trains, calibrates, audits and writes the report.

        Args:
            out: folder for ``report.html``, ``results.json``, ``head.safetensors`` and the figures.
            seed: of the examples and of the model.
            progress: shows a progress bar; never when the output is not a terminal.
            setting: sizes; the module's ``QUICK`` for a trial run.
            more: further options of :meth:`work`.

        Example:
            >>> from torchgmc_paper.demo import fnr
            >>> result = fnr.run("torchgmc-demo")  # doctest: +SKIP
            >>> result.audits["GMC"].max_violation  # doctest: +SKIP
            0.0021
        """
        for package, extra in {**cls.needs, "matplotlib": "report", "rich": "cli"}.items():
            require(package, extra=extra)  # raise before the work, not after it
        path = Path(out)
        path.mkdir(parents=True, exist_ok=True)
        setting = cls.standard if setting is None else setting
        with calm(), progress_bar(progress) as bar:
            found = cls.work(setting, seed, bar, **more)
            fit = found.head.report
            assert fit is not None
            common = {"out": path, "seed": seed, "setting": setting, "audits": found.audits, "report": fit}
            with bar.clock("write"):
                return cls(**common, seconds=bar.seconds, **found.fields).written(found, quick=setting == cls.quick)

    @staticmethod
    def work(setting: Any, seed: int, bar: Bar) -> Found:
        """Draws, trains, calibrates and audits; the clock of the bar times its stages."""
        raise NotImplementedError  # each demo's own

    @property
    def certificate(self) -> str:
        """One line about the calibrated model."""
        return self.audits[self.ours].certificate

    def by_method(self, key: str, groups: Iterable[str], **columns: str) -> list[dict[str, Any]]:
        """One row per group, by method: mass, deviation, interval, verdict; ``columns``: others of the audit, ``new="old"``."""
        columns = {"mass": "mass", **columns, "deviation": "estimate", "low": "low", "high": "high", "verdict": "verdict"}
        audits = {name: {row["group"]: row for row in audit.rows()} for name, audit in self.audits.items()}
        return [
            {key: group} | {new: {name: audits[name][group][old] for name in audits} for new, old in columns.items()}
            for group in groups
        ]

    def written(self: Same, found: Found, quick: bool) -> Same:
        """Writes every file, each completely or not at all; ``results.json`` is the last."""
        images, page = found.page(self)
        names = ("report.html", *images, "results.json", "head.safetensors")
        result = replace(self, files={name: self.out / name for name in names})
        gmc.save(found.head, result.files["head.safetensors"])
        for name, image in images.items():
            write_file(result.files[name], image)
        command = f"torchgmc demo {self.demo} --seed {self.seed}{' --quick' if quick else ''}"
        settings = {"command": command, "seed": self.seed} | {k.replace("_", " "): v for k, v in asdict(self.setting).items()}
        write(result.files["report.html"], self.audits, found.head, settings=settings, **page)
        write_json(result.files["results.json"], result.to_dict())
        return result

    def findings(self) -> dict[str, Any]:
        """What belongs only to this demo, as JSON types."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON types; what is not finite, as the risk of an empty group, becomes null."""
        content = {
            "demo": self.demo,
            "torchgmc": gmc.__version__,
            "torch": torch.__version__,
            "seed": self.seed,
            "setting": asdict(self.setting),
            "certificate": self.certificate,
            "worst_deviation": {name: audit.max_violation for name, audit in self.audits.items()},
            "holds": {name: audit.holds for name, audit in self.audits.items()},
            "violated": {name: audit.violated for name, audit in self.audits.items()},
            **self.findings(),
            "fit": {name: getattr(self.report, name) for name in ("converged", "iterations", "seconds", "message")},
            "seconds": self.seconds,
            "files": {name: str(path) for name, path in self.files.items()},
        }
        return plain(content)


def three(setting: Any, seed: int, bar: Bar, draw: Callable[[int, int, bool], T]) -> list[T]:
    """Examples to train on, calibrate on and test on: ``draw(num, seed, used)``, where only the first are not as in use."""
    sizes = (setting.num_train, setting.num_calibration, setting.num_test)
    return [draw(num, 3 * seed + k, k > 0) for k, num in enumerate(bar.track(sizes, "draw"))]


def trained(
    setting: Any, seed: int, bar: Bar, draw: Callable[[int, int, bool], T], train: Callable[[T, Any, int, Bar], nn.Module]
) -> tuple[nn.Module, T, T]:
    """A model trained on the first of :func:`three` sets of examples, and the two others."""
    with bar.clock("draw"):
        archive, calibration, test = three(setting, seed, bar, draw)
    with bar.clock("train"):
        return train(archive, setting, seed, bar), calibration, test


def fit_and_audit(
    heads: Mapping[str, Head], known: Sequence[Tensor], fresh: Sequence[Tensor], delta: float, bar: Bar
) -> dict[str, gmc.Audit]:
    """Every head fitted on the one, and its audit on the other; both as ``fit`` and ``audit`` take them."""
    for head in bar.track(heads.values(), "calibrate"):
        head.fit(*known)
    return {name: head.audit(*fresh, delta=delta) for name, head in bar.track(heads.items(), "audit")}


def percent(value: float, digits: int = 1) -> str:
    """0.075 -> 7.5 %."""
    return f"{100 * value:.{digits}f}\N{NO-BREAK SPACE}%"


# -- the table on a terminal ------------------------------------------------------------------------------------------------


def marked(numbers: str, deviation: float, alpha: float, verdict: str = "") -> tuple[Any, Any]:
    """A cell and its mark: ``!`` beyond alpha on these data, ``!!`` beyond it with confidence."""
    mark, style = "", "green"
    if verdict == "violated":
        mark, style = "!!", "red"
    elif abs(deviation) > alpha:
        mark, style = "!", "yellow"
    text = require("rich.text", extra="cli").Text
    return text(numbers, style=style), text(mark, style=style)


def by_method(
    row: dict[str, Any], alpha: float, numbers: Callable[[dict[str, Any], str], str], of: str = "deviation"
) -> list[tuple[Any, Any]]:
    """The :func:`marked` cells of a row, one per method: its ``numbers``, and the mark of what it has ``of``."""
    return [marked(numbers(row, name), row[of][name], alpha, row["verdict"][name]) for name in row[of]]


def meaning(data: str, delta: float) -> str:
    """What the marks mean."""
    return f"!  beyond it on {data}   !! beyond it with confidence {100 * (1 - delta):g} %"


def show(
    title: str,
    names: Sequence[str],
    numbers: Sequence[str],
    rows: Sequence[tuple[Sequence[str], Sequence[tuple[Any, Any]]]],
    footer: Sequence[Sequence[str]],
    legend: str,
    certificate: str,
) -> Any:
    """Title, table, what the marks mean, and the line about the calibrated model.

    Args:
        names, numbers: titles of the columns on the left, and of those aligned to the right.
        rows: names, and the :func:`marked` numbers.
        footer: lines below a rule: one name, numbers without marks.
    """
    console, tables, text, box = (require(f"rich.{name}", extra="cli") for name in ("console", "table", "text", "box"))
    table = tables.Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", min_width=2)  # a separate column, so that the numbers stay aligned
    for left, right in rows:
        table.add_row(*left, *(part for cell in right for part in cell))
    table.add_section()
    for name, *cells in footer:
        table.add_row(name, *[""] * (len(names) - 1), *(part for cell in cells for part in (cell, "")))
    return console.Group(table, text.Text(legend + "\n", style="dim"), text.Text(certificate))
