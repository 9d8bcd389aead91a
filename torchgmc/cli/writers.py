"""Output files: one array, written block by block; the file is written completely or not at all."""

import csv
import json
import struct
import zipfile
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from torchgmc.cli.tables import SUFFIXES, Array
from torchgmc.engine.extras import require
from torchgmc.engine.files import harmless, write_atomically

#: Names of types in a safetensors file.
_TYPES = {"b1": "BOOL", "i8": "I64", "f8": "F64", "f4": "F32", "f2": "F16"}


def check_file(option: str, path: Path | None, *inputs: Path, suffixes: tuple[str, ...] = ()) -> None:
    """Check before any work that a file can be written there."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} {str(path)!r} is a folder; pass a file name.")
    if not path.parent.is_dir():
        raise ValueError(f"{option}: the folder {str(path.parent)!r} does not exist; create it first.")
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{option} {str(path)!r} must end in {' or '.join(suffixes)}.")
    if any(path.resolve() == other.resolve() for other in inputs):
        raise ValueError(f"{option} {str(path)!r} is also an input; choose another name.")


def write_rows(path: Path, name: str, blocks: Iterable[Array], num_rows: int) -> tuple[int, ...]:
    """Writes ``(num_rows, ...)`` from its blocks; returns the shape."""
    blocks = iter(blocks)
    first = next(blocks)
    shape = (num_rows, *first.shape[1:])
    write = dict(zip(SUFFIXES, (_write_npz, _write_tensor, _write_parquet, _write_csv), strict=True))[path.suffix.lower()]
    write_atomically(path, lambda part: write(part, name, chain([first], blocks), shape, first.dtype))
    return shape


def _write_npz(part: Path, name: str, blocks: Iterator[Array], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with zipfile.ZipFile(part, "w") as archive, archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array_header_2_0(file, header)
        file.writelines(block.tobytes() for block in blocks)


def _write_tensor(part: Path, name: str, blocks: Iterator[Array], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    size = int(np.prod(shape)) * dtype.itemsize
    text = json.dumps({name: {"dtype": _TYPES[dtype.str[1:]], "shape": list(shape), "data_offsets": [0, size]}})
    header = text.encode() + b" " * (-len(text.encode()) % 8)
    with part.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.writelines(block.tobytes() for block in blocks)


def _write_parquet(part: Path, name: str, blocks: Iterator[Array], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    arrow, parquet = require("pyarrow", extra="tables"), require("pyarrow.parquet", extra="tables")
    kind = arrow.from_numpy_dtype(dtype)
    for width in reversed(shape[1:]):
        kind = arrow.list_(kind, width)
    schema = arrow.schema([(name, kind)])
    with parquet.ParquetWriter(part, schema) as writer:
        for block in blocks:
            column = arrow.array(np.ascontiguousarray(block).reshape(-1))
            for width in reversed(shape[1:]):
                column = arrow.FixedSizeListArray.from_arrays(column, width)
            writer.write_table(arrow.table([column], schema=schema))


def _write_csv(part: Path, name: str, blocks: Iterator[Array], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if len(shape) > 2:
        raise ValueError(f"a .csv holds columns, but {name!r} has shape {shape}; write .npz, .safetensors or .parquet.")
    with part.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow([name] if len(shape) == 1 else [f"{name}[{k}]" for k in range(shape[1])])
        for block in blocks:
            values = block.astype(np.int8) if dtype.kind == "b" else block
            # Written in the precision of their type: 0.1 stays 0.1 in float32.
            cells = values.astype(str) if dtype.kind == "f" else values
            if dtype.kind == "U":
                cells = np.array([harmless(cell) for cell in values.ravel().tolist()])
            lines.writerows(cells.reshape(len(block), -1).tolist())
