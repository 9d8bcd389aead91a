"""The table of a demonstration on a terminal of 80 columns; every mark is readable without colour."""

from collections.abc import Callable, Sequence
from typing import Any

from torchgmc.engine.extras import require

__all__ = ["by_method", "marked", "meaning", "show"]


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
