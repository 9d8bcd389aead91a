"""Input files: named arrays with one row per example, read a block of rows at a time, whatever their size.

=================  =======================================================================================
``.npz``           arrays as ``numpy.savez`` or ``savez_compressed`` writes them; decompressed as rows are needed
``.safetensors``   numbers only (a group column holds integers)
``.parquet``       columns; a matrix is a column of lists, or columns ``probs[0]``, ``probs[1]``, ... (extra ``tables``);
                   a row group at a time is in memory
``.csv``           columns under a header line, UTF-8; a matrix is columns ``probs[0]``, ``probs[1]``, ... (extra ``tables``)
=================  =======================================================================================

Pickles are never read: not ``.pkl``, ``.pt`` or ``.pth``, nor arrays of Python objects inside an ``.npz``.
"""

import contextlib
import csv
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, takewhile
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
#: Bytes of a block of rows, about.
BLOCK = 1 << 25
#: Rows of a block of a file whose rows have no fixed size, or a tiny one.
MAX_ROWS = 1 << 18

SUFFIXES = (".npz", ".safetensors", ".parquet", ".csv")
PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib", ".dill", ".p")


class Block(NamedTuple):
    """Rows ``start`` to ``stop - 1`` of some arrays; numbers come as numpy numbers, labels as numpy arrays or lists."""

    start: int
    stop: int
    arrays: dict[str, Array]


class Table(Protocol):
    """A file of arrays. ``path``: of the file. ``names``: of the arrays."""

    path: Path

    @property
    def names(self) -> list[str]: ...

    def count(self, names: Sequence[str]) -> int:
        """The number of rows that these arrays share; one pass over a text file."""
        ...

    def blocks(self, numbers: Sequence[str], labels: Sequence[str] = (), rows: int | None = None) -> Iterator[Block]:
        """The rows in order: ``numbers`` as numbers, ``labels`` as they are (None where a value is missing)."""
        ...


def check_input(path: Path, wanted: str) -> None:
    """Raise unless there is a file."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file {str(path)!r}.")
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder; pass {wanted}.")


def check_names(table: Table, names: Sequence[str]) -> None:
    """Every array is in the file."""
    for name in names:
        if name not in table.names:
            raise ValueError(f"{str(table.path)!r} has no array {name!r}; it has {listing(table.names)}.")


def listing(names: Sequence[str], most: int = 12) -> str:
    """Names for a message."""
    return (", ".join(map(repr, names[:most])) or "none") + (", ..." if len(names) > most else "")


def open_table(path: Path) -> Table:
    """The table in a file, by the ending of its name."""
    suffix = path.suffix.lower()
    check_input(path, f"a file ({', '.join(SUFFIXES)})")
    with path.open("rb") as file:
        first = file.read(2)
    if suffix in PICKLES or (suffix in SUFFIXES and first[:1] == b"\x80" and first[1:] in (b"\x02", b"\x03", b"\x04", b"\x05")):
        raise ValueError(f"{str(path)!r} is a pickle, which could run code when loaded; save arrays as {', '.join(SUFFIXES)}.")
    if suffix not in SUFFIXES:
        raise ValueError(f"{str(path)!r} ends in {suffix or 'nothing'!r}; files that can be read: {', '.join(SUFFIXES)}.")
    with reading(path):
        if suffix in (".npz", ".safetensors"):
            return NpzTable(path) if suffix == ".npz" else TensorTable(path)
        from torchgmc.cli.arrow import CsvTable, ParquetTable

        return CsvTable(path) if suffix == ".csv" else ParquetTable(path)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What the many readers raise for a damaged file, as one kind of error that names the file."""
    damaged = (zipfile.BadZipFile, zlib.error, EOFError, struct.error, csv.Error, NotImplementedError)
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not UTF-8 text: {error}") from error
    except Exception as error:
        if isinstance(error, damaged) or type(error).__module__.split(".")[0] in ("safetensors", "safetensors_rust", "pyarrow"):
            raise ValueError(f"{str(path)!r} cannot be read (truncated or damaged?): {error}") from error
        raise


def block_rows(bytes_per_row: int, rows: int | None) -> int:
    """Rows of a block."""
    return rows or max(1, min(MAX_ROWS, BLOCK // max(1, bytes_per_row)))


def to_numbers(name: str, values: Array, start: int = 0) -> Array:
    """Numbers in the machine's own byte order, or an error that shows the first value that is not a number."""
    if values.dtype.kind in "biuf":
        return np.ascontiguousarray(values.astype(values.dtype.newbyteorder("="), copy=False))
    words: dict[str, Any] = {"true": 1.0, "false": 0.0}
    found: list[bytes | float] = []
    for row, cells in enumerate(values.reshape(len(values), -1).tolist()):
        for cell in cells:
            try:
                found.append(cell if isinstance(cell, bytes) else float(words.get(str(cell).strip().lower(), cell)))
            except (TypeError, ValueError):
                shown = "no value" if cell is None or cell == "" else repr(cell)
                raise ValueError(f"{name!r} has {shown} in row {start + row}; it must hold numbers.") from None
    if values.dtype.kind not in "OU":
        raise ValueError(f"{name!r} holds {values.dtype}; it must hold numbers.")
    return np.array(found, dtype=np.float64).reshape(values.shape)


def same_length(path: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """The number of rows that the arrays share."""
    for name, shape in shapes.items():
        if not shape:
            raise ValueError(f"{name!r} of {str(path)!r} is a single number; it must have one entry per example.")
    lengths = {name: shape[0] for name, shape in shapes.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name!r} {length}" for name, length in lengths.items())
        raise ValueError(f"the arrays of {str(path)!r} must each have one row per example, but their lengths differ: {listed}.")
    return next(iter(lengths.values()), 0)


def columns_of(name: str, header: Sequence[str]) -> list[int]:
    """Places of the columns that make an array: ``name``, or ``name[0]``, ``name[1]``, ... (also ``name.0``, ``name_0``)."""
    known = {column: place for place, column in enumerate(header)}
    if name in known:
        return [known[name]]
    for form in ("{}[{}]", "{}.{}", "{}_{}"):
        places = [known[column] for column in takewhile(known.__contains__, (form.format(name, k) for k in count()))]
        if places:
            return places
    raise KeyError(name)


def array_names(header: Sequence[str]) -> list[str]:
    """Names of columns, and of the matrices that numbered columns make."""
    found = dict.fromkeys(header)
    for column in header:
        match = re.fullmatch(r"(.+?)(?:\[0\]|\.0|_0)", column)
        if match:
            found[match.group(1)] = None
    return list(found)


class NpzTable:
    """Arrays of an ``.npz``, each decompressed from its beginning as rows are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
            if any(member.endswith(".pkl") for member in members):
                raise ValueError(f"{str(path)!r} of torch.save holds a pickle, which we never load; use .safetensors.")
            self.names = list(dict.fromkeys(member.removesuffix(".npy") for member in members if member.endswith(".npy")))
            self._headers = {name: _read_header(archive.open(f"{name}.npy")) for name in self.names}

    def count(self, names: Sequence[str]) -> int:
        """The number of rows that these arrays share."""
        for name in names:
            if self._headers[name][2].hasobject:
                raise ValueError(
                    f"array {name!r} of {str(self.path)!r} holds Python objects (a pickle), which we never load; save "
                    "numbers or strings."
                )
        return same_length(self.path, {name: self._headers[name][0] for name in names})

    def blocks(self, numbers: Sequence[str], labels: Sequence[str] = (), rows: int | None = None) -> Iterator[Block]:
        """The rows in order."""
        names = list(dict.fromkeys([*numbers, *labels]))
        total = self.count(names)
        headers = [self._headers[name] for name in names]
        step = block_rows(sum(math.prod(shape[1:]) * dtype.itemsize for shape, _, dtype in headers), rows)
        with reading(self.path), contextlib.ExitStack() as opened:
            archive = opened.enter_context(zipfile.ZipFile(self.path))
            streams = {name: _Rows(opened.enter_context(archive.open(f"{name}.npy"))) for name in names}
            for start in range(0, total, step):
                stop = min(start + step, total)
                arrays = {name: stream.take(stop - start) for name, stream in streams.items()}
                for name in numbers:
                    arrays[name] = to_numbers(name, arrays[name], start)
                yield Block(start, stop, arrays)


def _read_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        return read(file)
    except ValueError as error:
        raise zipfile.BadZipFile(f"a member is not an array: {error}") from error


class _Rows:
    """The next rows of one member of the archive, without the others in memory."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.shape, fortran, self.dtype = _read_header(file)
        self.whole: Array | None = None
        self.done = 0
        if fortran and len(self.shape) > 1:  # rows are scattered over the file, so it must be read at once
            self.whole = self._read(self.shape[::-1]).T

    def take(self, rows: int) -> Array:
        self.done += rows
        if self.whole is not None:
            return self.whole[self.done - rows : self.done]
        block = self._read((rows, *self.shape[1:]))
        if self.done == self.shape[0]:
            self.file.read(1)  # the end: now the archive compares its checksum
        return block

    def _read(self, shape: tuple[int, ...]) -> Array:
        block = np.empty(shape, dtype=self.dtype)
        view, filled = block.reshape(-1).view(np.uint8).data if block.nbytes else memoryview(b""), 0
        while filled < block.nbytes:
            got = self.file.readinto(view[filled : filled + (1 << 20)])
            if not got:
                raise EOFError("an array ends early")
            filled += got
        return block


class TensorTable:
    """Tensors of a ``.safetensors`` file, mapped into memory and sliced."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self.path = path
        with safe_open(str(path), framework="pt") as file:
            self.names = list(file.keys())
            self._shapes = {name: tuple(file.get_slice(name).get_shape()) for name in self.names}

    def count(self, names: Sequence[str]) -> int:
        """The number of rows that these tensors share."""
        return same_length(self.path, {name: self._shapes[name] for name in names})

    def blocks(self, numbers: Sequence[str], labels: Sequence[str] = (), rows: int | None = None) -> Iterator[Block]:
        """The rows in order; bfloat16, which numpy does not know, becomes float32."""
        import torch
        from safetensors import safe_open

        names = list(dict.fromkeys([*numbers, *labels]))
        total = self.count(names)
        step = block_rows(sum(4 * math.prod(self._shapes[name][1:]) for name in names), rows)
        with reading(self.path), safe_open(str(self.path), framework="pt") as file:
            slices = {name: file.get_slice(name) for name in names}
            for start in range(0, total, step):
                stop = min(start + step, total)
                tensors = {name: source[start:stop].clone() for name, source in slices.items()}
                arrays = {name: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for name, t in tensors.items()}
                yield Block(start, stop, arrays)
