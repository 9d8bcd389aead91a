"""One line of the table that ``python -m benchmarks`` prints, and the table as text, Markdown and JSON."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.timing import header

COLUMNS = ("work", "ours", "naive", "peer", "limit", "target", "reached")


@dataclass(frozen=True)
class Row:
    """One row of the speed table.

    Attributes:
        benchmark: name of the benchmark.
        work: what was done, with its size.
        unit: of the figures, where possible a ratio measured in the same run ("passes over the scores").
        ours: the figure; None if it could not be measured here.
        target: the figure to reach, as text.
        reached: whether it was; None if that cannot be said (small sizes: the targets are for the full ones).
        naive: the same work done plainly.
        peers: other packages: a figure, or a word ("not installed", "> 600 s").
        limit: what no method can go below in these units, usually plain reading of the data.
        note: what else was found.
        spread: least and largest figure of ours, over runs that take turns with the unit; None if there was one run.
    """

    benchmark: str
    work: str
    unit: str
    ours: float | None
    target: str
    reached: bool | None = None
    naive: float | None = None
    peers: dict[str, float | str] = field(default_factory=dict)
    limit: float | None = None
    note: str = ""
    spread: Sequence[float] | None = None

    def cells(self) -> list[str]:
        """The line as words, in the order of the columns."""
        peers = "; ".join(f"{name}: {number(value)}" for name, value in self.peers.items())
        reached = {True: "yes", False: "NO", None: "-"}[self.reached]
        ends = f" ({number(self.spread[0])} to {number(self.spread[1])})" if self.spread else ""
        ours = f"{number(self.ours)}{ends} {self.unit}" if self.ours is not None else "not measured"
        return [self.work, ours, number(self.naive), peers or "-", number(self.limit), self.target, reached]


def number(value: float | str | None) -> str:
    """Three digits, no exponent where it can be avoided."""
    if value is None or isinstance(value, str):
        return value or "-"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:.1e}"


def as_text(rows: Sequence[Row]) -> str:
    """The table for a terminal, one block a row: peers make lines long."""
    lines = []
    for row in rows:
        work, *cells = row.cells()
        lines.append(f"{row.benchmark}: {work}")
        for name, cell in zip(COLUMNS[1:], cells, strict=True):
            if cell != "-" or name == "reached":
                lines.append(f"    {name:8s} {cell}")
        if row.note:
            lines.append(f"    {'note':8s} {row.note}")
    return "\n".join(lines)


def as_markdown(rows: Sequence[Row]) -> str:
    """The table for a page."""
    titles = ("work", "ours", "naive", "peer", "physical limit", "target", "reached?")
    lines = ["| " + " | ".join(titles) + " |", "|" + " --- |" * len(titles)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row.cells()) + " |" for row in rows]
    notes = [f"- {row.work}: {row.note}" for row in rows if row.note]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def print_table(run: Callable[[bool], Sequence[Row]], description: str | None) -> None:
    """The command line of a benchmark that has no option but ``--small``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small
    print(header())
    print(as_text(run(small)))
