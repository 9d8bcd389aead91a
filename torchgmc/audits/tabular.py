"""Results that are a table, and tables for display."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchgmc.engine.extras import require


def row_name(group: str, what: str) -> str:
    """Name of a row: the group, with what it is about if that is one of several things."""
    return f"{group} / {what}" if what else group


def shown(value: Any) -> str:
    """A number, a yes or a no for a table; "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        value = 0.0 if abs(value) < 1e-9 else value  # rounding, of either sign
        return f"{value:.3g}" if 0 < abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


class Tabular:
    """Something with a ``table``: columns by name, all of one length."""

    table: dict[str, list[Any]]

    def rows(self) -> list[dict[str, Any]]:
        """The table as one dict per row."""
        return [dict(zip(self.table, row, strict=True)) for row in zip(*self.table.values(), strict=True)]

    def to_pandas(self) -> Any:
        """The table as a pandas frame, if pandas is installed."""
        return require("pandas").DataFrame(self.table)


@dataclass(frozen=True)
class Table:
    """Rows of text under column names; columns named in ``numeric`` are set flush right, those in ``wrapped`` may break lines.

    A cell that begins with one of the verdicts holds / violated / undecided is coloured. ``caption`` is a line above;
    ``beneath`` has a name and a table for each row, to unfold under it.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[str] = ()
    wrapped: Sequence[str] = ()
    caption: str = ""
    beneath: "Sequence[tuple[str, Table]]" = ()

    def __str__(self) -> str:
        widths = [max(map(len, cells)) for cells in zip(self.columns, *self.rows, strict=True)]
        right = [column in self.numeric for column in self.columns]
        lines = [zip(line, widths, right, strict=True) for line in (self.columns, *self.rows)]
        texts = ["  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in line).rstrip() for line in lines]
        return "\n".join([*filter(None, [self.caption]), *texts])
