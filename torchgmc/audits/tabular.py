"""Results that are a table."""

from typing import Any

from torchgmc.engine.extras import require

__all__ = ["Tabular"]


class Tabular:
    """Something with a ``table``: columns by name, all of one length."""

    table: dict[str, list[Any]]

    def rows(self) -> list[dict[str, Any]]:
        """The table as one dict per row."""
        return [dict(zip(self.table, row, strict=True)) for row in zip(*self.table.values(), strict=True)]

    def to_pandas(self) -> Any:
        """The table as a pandas frame, if pandas is installed."""
        return require("pandas").DataFrame(self.table)
