"""Tables of columns, read by pyarrow in batches of rows (extra ``tables``): ``.parquet`` and ``.csv``."""

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from torchgmc.cli.tables import MAX_ROWS, Array, Block, array_names, block_rows, columns_of, reading, to_numbers
from torchgmc.engine.extras import require

#: Bytes of a csv file that are parsed at once; pyarrow reads up to 32 times as many ahead.
CSV_BLOCK = 1 << 20


class ArrowTable:
    """A header of columns, and batches of some of them. ``path``: of the file. ``row_bytes``: of a row in memory, about."""

    path: Path
    header: list[str]
    row_bytes: int

    def _batches(self, columns: list[str], rows: int) -> Iterator[Any]:
        """Record batches of about as many rows; a csv file has text in them."""
        raise NotImplementedError  # abstract

    @property
    def names(self) -> list[str]:
        """Of the columns, and of the matrices that numbered columns make."""
        return array_names(self.header)

    def count(self, names: Sequence[str]) -> int:
        """The number of rows."""
        with reading(self.path):
            return sum(batch.num_rows for batch in self._batches(self.header[:1], MAX_ROWS))

    def blocks(self, numbers: Sequence[str], labels: Sequence[str] = (), rows: int | None = None) -> Iterator[Block]:
        """The rows in order; a missing label is None, a missing number an error."""
        places = {name: columns_of(name, self.header) for name in (*numbers, *labels)}
        used = {j: k for k, j in enumerate(dict.fromkeys(j for found in places.values() for j in found))}
        columns = [self.header[j] for j in used]
        start, size = 0, block_rows(self.row_bytes, rows)
        with reading(self.path):
            for part in _in_parts(self._batches(columns, size), size):
                arrays: dict[str, Array] = {}
                for name, found in places.items():
                    parts = [part.column(used[j]).combine_chunks() for j in found]
                    values = [_values(name, c, start) if name in numbers else _labels(c) for c in parts]
                    arrays[name] = values[0] if name in self.header else np.stack(values, 1)
                yield Block(start, start + part.num_rows, arrays)
                start += part.num_rows


def _in_parts(batches: Iterator[Any], rows: int) -> Iterator[Any]:
    """Tables of as many rows each; the last may have fewer."""
    table = require("pyarrow", extra="tables").Table
    held: list[Any] = []
    missing = rows
    for batch in batches:
        while batch.num_rows >= missing:
            yield table.from_batches([*held, batch.slice(0, missing)])
            batch, held, missing = batch.slice(missing), [], rows
        if batch.num_rows:
            held.append(batch)
            missing -= batch.num_rows
    if held:
        yield table.from_batches(held)


def _labels(column: Any) -> Array:
    return np.array(column.to_pylist(), dtype=object)


def _values(name: str, column: Any, start: int) -> Array:
    """A column as numbers, nested lists as further dimensions."""
    arrow = require("pyarrow", extra="tables")
    types = arrow.types
    if column.null_count:
        row = column.is_null().to_pylist().index(True)
        raise ValueError(f"{name!r} has no value in row {start + row}; it must hold numbers.")
    if types.is_string(column.type):
        try:
            return np.asarray(column.cast(arrow.float64()))
        except arrow.ArrowInvalid:  # " 1", "true", or no number
            return to_numbers(name, _labels(column), start)
    shape = [len(column)]
    while types.is_list(kind := column.type) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = column.flatten()
        ragged = not types.is_fixed_size_list(kind) and len({*column.value_lengths().to_pylist()}) > 1
        if ragged or len(inner) % max(1, len(column)):
            raise ValueError(f"{name!r} holds lists of different lengths; every row must have the same length.")
        shape.append(len(inner) // max(1, len(column)))
        column = inner
    return to_numbers(name, np.asarray(column.to_numpy(zero_copy_only=False)).reshape(shape), start)


class ParquetTable(ArrowTable):
    """Columns of a ``.parquet`` file; lists of equal length make a matrix."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            self.header = list(file.schema_arrow.names)
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            self._count = int(file.metadata.num_rows)
            self.row_bytes = int(sum(group.total_byte_size for group in groups) // max(1, self._count))

    def _open(self) -> Any:
        return require("pyarrow.parquet", extra="tables").ParquetFile(self.path, pre_buffer=False)  # or the file is kept

    def count(self, names: Sequence[str]) -> int:
        """The number of rows, which the file states."""
        return self._count

    def _batches(self, columns: list[str], rows: int) -> Iterator[Any]:
        with self._open() as file:
            yield from file.iter_batches(batch_size=rows, columns=columns)


class CsvTable(ArrowTable):
    """Columns of a text file, under a line of names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, strict=True)
            self.header = [name.strip() for name in next(lines, [])]
            self._skip, self.row_bytes = lines.line_num, 64 * len(self.header)
            line = file.readline()
        self._empty = not line
        self._block = max(CSV_BLOCK, 4 * len(line.encode()))  # a line must fit in
        twice = sorted(name for name, times in Counter(self.header).items() if times > 1)
        if not any(self.header):
            raise ValueError(f"{str(path)!r} is empty; its first line must name the columns.")
        if twice:
            raise ValueError(f"{str(path)!r} has two columns named {twice[0]!r}.")

    def _batches(self, columns: list[str], rows: int) -> Iterator[Any]:
        if self._empty:
            return
        arrow, reader = require("pyarrow", extra="tables"), require("pyarrow.csv", extra="tables")
        lines = reader.ReadOptions(use_threads=False, block_size=self._block, column_names=self.header, skip_rows=self._skip)
        cells = reader.ConvertOptions(
            column_types=dict.fromkeys(columns, arrow.string()), include_columns=columns, null_values=[""], strings_can_be_null=True
        )
        how = reader.ParseOptions(newlines_in_values=True)  # a handler of bad rows may end the process when Python exits
        try:
            with closing(reader.open_csv(self.path, lines, how, cells)) as batches:
                yield from batches
        except arrow.ArrowInvalid as error:
            wrong = f"has a line longer than {self._block} bytes; write .parquet or .npz" if "straddling" in str(error) else ""
            if row := re.match(r"CSV parse error: Row #(\d+): Expected (\d+) columns, got (\d+)", str(error)):
                wrong = f"has {row[3]} cells in row {int(row[1]) - self._skip - 1}, but {row[2]} columns"
            if not wrong:
                raise
            raise ValueError(f"{str(self.path)!r} {wrong}.") from error
