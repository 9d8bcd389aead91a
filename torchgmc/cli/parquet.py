"""Parquet files, in batches of rows (extra ``tables``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchgmc.cli.tables import Array, Block, array_names, block_rows, columns_of, reading, to_numbers
from torchgmc.engine.extras import require

__all__ = ["ParquetTable"]


class ParquetTable:
    """Columns of a ``.parquet`` file; lists of equal length make a matrix."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            self.header = list(file.schema_arrow.names)
            self.num_rows = int(file.metadata.num_rows)
        self.names = array_names(self.header)

    def _open(self) -> Any:
        return require("pyarrow.parquet", extra="tables").ParquetFile(self.path)

    def count(self, names: Sequence[str]) -> int:
        """The number of rows."""
        return self.num_rows

    def blocks(self, numbers: Sequence[str], labels: Sequence[str] = (), rows: int | None = None) -> Iterator[Block]:
        """The rows in order, batch by batch."""
        places = {name: columns_of(name, self.header) for name in (*numbers, *labels)}
        columns = [self.header[j] for j in dict.fromkeys(j for found in places.values() for j in found)]
        start = 0
        with reading(self.path), self._open() as file:
            size = (
                file.metadata.num_rows
                and sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
                // file.metadata.num_rows
            )
            for batch in file.iter_batches(batch_size=block_rows(size, rows), columns=columns):
                stop = start + batch.num_rows
                arrays: dict[str, Array] = {}
                for name in labels:
                    values = [batch.column(self.header[j]).to_pylist() for j in places[name]]
                    arrays[name] = np.array(values[0] if name in self.header else list(zip(*values, strict=True)), dtype=object)
                for name in numbers:
                    parts = [_values(name, batch.column(self.header[j]), start) for j in places[name]]
                    arrays[name] = parts[0] if name in self.header else np.stack(parts, 1)
                yield Block(start, stop, arrays)
                start = stop


def _values(name: str, column: Any, start: int) -> Array:
    """A column as numbers, nested lists as further dimensions."""
    types = require("pyarrow", extra="tables").types
    if column.null_count:
        row = column.is_null().to_pylist().index(True)
        raise ValueError(f"{name!r} has no value in row {start + row}, where a number belongs.")
    kind, width = column.type, len(column)
    shape = [width]
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = column.flatten()
        if width and len(inner) % width:
            raise ValueError(f"{name!r} holds lists of different lengths; every row must have the same.")
        if not types.is_fixed_size_list(kind) and len({*column.value_lengths().to_pylist()}) > 1:
            raise ValueError(f"{name!r} holds lists of different lengths; every row must have the same.")
        shape.append(len(inner) // width if width else 0)
        column, kind, width = inner, inner.type, len(inner)
    values = np.asarray(column.to_numpy(zero_copy_only=False))
    return to_numbers(name, values.reshape(shape), start)
