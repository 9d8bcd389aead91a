"""What the demonstrations share: a result that becomes JSON and a table, progress bars, clocks."""

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

import torchgmc as gmc
from torchgmc.engine.extras import require
from torchgmc.report import write_file

__all__ = ["Bar", "Result", "clock", "folder", "one_thread", "percent", "progress_bar", "remake"]


Same = TypeVar("Same", bound="Result")


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
    out: Path
    seed: int
    setting: Any
    audits: dict[str, gmc.Audit]
    report: gmc.Report
    seconds: dict[str, float]
    files: dict[str, Path] = field(default_factory=dict)

    @property
    def certificate(self) -> str:
        """One line about the calibrated model."""
        return self.audits[self.ours].certificate

    def by_method(self, key: str, groups: Iterable[str], **columns: str) -> list[dict[str, Any]]:
        """One row a group, by method: mass, deviation, interval, verdict; ``columns``: others of the audit, ``new="old"``."""
        columns = {"mass": "mass", **columns, "deviation": "estimate", "low": "low", "high": "high", "verdict": "verdict"}
        audits = {name: {row["group"]: row for row in audit.rows()} for name, audit in self.audits.items()}
        return [
            {key: group} | {new: {name: audits[name][group][old] for name in audits} for new, old in columns.items()}
            for group in groups
        ]

    def placed(self: Same, *names: str) -> Same:
        """With the paths of the files to be written."""
        return replace(self, files={name: self.out / name for name in names})

    def saved(self: Same) -> Same:
        """Writes ``results.json``, the last of the files."""
        write_file(self.files["results.json"], (json.dumps(self.to_dict(), indent=2) + "\n").encode())
        return self

    def findings(self) -> dict[str, Any]:
        """What belongs to this demonstration alone, as JSON types."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON types."""
        fit = self.report
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
            "fit": {
                "converged": fit.converged,
                "iterations": fit.iterations,
                "seconds": fit.seconds,
                "message": fit.message,
            },
            "seconds": self.seconds,
            "files": {name: str(path) for name, path in self.files.items()},
        }
        finite: dict[str, Any] = _finite(content)
        return finite


def remake(result: Result, quick: bool = False) -> dict[str, Any]:
    """The command and the settings that make a result again."""
    command = f"torchgmc demo {result.demo} --seed {result.seed}{' --quick' if quick else ''}"
    return {"command": command, "seed": result.seed} | {k.replace("_", " "): v for k, v in asdict(result.setting).items()}


def folder(out: str | Path, *extras: tuple[str, str]) -> Path:
    """The output folder, made after the packages of the extras ``(package, extra)`` were found."""
    for package, extra in (*extras, ("matplotlib", "report"), ("rich", "cli")):
        require(package, extra=extra)  # say so before the work, not after it
    path = Path(out)
    path.mkdir(parents=True, exist_ok=True)
    return path


def percent(value: float, digits: int = 1) -> str:
    """0.075 -> 7.5 %."""
    return f"{100 * value:.{digits}f}\N{NO-BREAK SPACE}%"


class Bar:
    """A progress bar, or nothing with the same face."""

    def __init__(self, bars: Any) -> None:
        self.bars = bars

    def track(self, items: Iterable[Any], text: str) -> Iterable[Any]:
        """The items, one after the other."""
        items = list(items)
        tracked: Iterable[Any] = items if self.bars is None else self.bars.track(items, description=text)
        return tracked


@contextmanager
def progress_bar(wanted: bool) -> Iterator[Bar]:
    """A bar on the terminal; none when the output goes elsewhere."""
    if not (wanted and sys.stdout.isatty()):
        yield Bar(None)
        return
    console = require("rich.console", extra="cli").Console(stderr=True)
    with require("rich.progress", extra="cli").Progress(console=console) as bars:
        yield Bar(bars)


@contextmanager
def clock(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Notes how long the block took."""
    start = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - start


@contextmanager
def one_thread() -> Iterator[None]:
    """Operations this small gain nothing from a second thread, and lose much to it on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _finite(value: Any) -> Any:
    """JSON has no NaN: the risk of an empty group becomes null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
