"""The folder of all data, and how its tables are read and written."""

import csv
import gzip
import json
import os
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from torchgmc.engine import checks
from torchgmc.engine.files import write_atomically

#: The data folder when a class gets no ``root``.
VARIABLE = "TORCHGMC_DATA"


def data_root(root: str | os.PathLike[str] | None) -> Path:
    """The folder named by ``root``, or else by the environment variable ``TORCHGMC_DATA``."""
    if root is None:
        named = os.environ.get(VARIABLE, "")
        if not named:
            raise ValueError(
                f"`root` is missing and {VARIABLE} is not set; set one to the folder that holds (or will hold) the data."
            )
        root = named
    if not isinstance(root, str | os.PathLike):
        raise TypeError(f"`root` must be a path, got {type(root).__name__}.")
    return Path(root).expanduser()


def read_npz(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All arrays of an .npz file; nothing is unpickled."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except FileNotFoundError:
        raise FileNotFoundError(f"no file {str(path)!r}.") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{str(path)!r} is not a readable .npz file (truncated or damaged?): {error}") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """One JSON object per line, gzipped."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            return [json.loads(line) for line in lines if line.strip()]
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{str(path)!r} is not a readable JSON Lines file (truncated or damaged?): {error}") from error


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """The reverse of :func:`read_lines`; the same rows give the same bytes."""

    def write(part: Path) -> None:
        with part.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as file:
            file.writelines((json.dumps(row, ensure_ascii=False) + "\n").encode() for row in rows)

    write_atomically(path, write)


def read_table(path: Path) -> dict[str, list[str]]:
    """Columns of a CSV file with a line of names, as strings (see :func:`typed`)."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        names = next(rows, [])
        values = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in names]
    return dict(zip(names, values, strict=True))


def typed(column: list[str]) -> list[Any]:
    """The strings of a column: int if every one is, float if every one is or is empty (NaN), else strings.

    Example:
        >>> typed(["1", "2"]), typed(["1.5", ""]), typed(["a", "2"])
        ([1, 2], [1.5, nan], ['a', '2'])
    """
    try:
        return [int(value) for value in column]
    except ValueError:
        pass
    try:
        return [float(value) if value else float("nan") for value in column] if any(column) else column
    except ValueError:
        return column


def write_table(path: Path, columns: dict[str, list[Any]]) -> None:
    """The reverse of :func:`read_table`."""

    def write(part: Path) -> None:
        with part.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(columns)
            table.writerows(zip(*columns.values(), strict=True))

    write_atomically(path, write)


class Texts(Dataset[tuple[Any, Any]]):
    """A data set of texts with columns, in one file of JSON lines."""

    root: Path
    transform: Callable[[str], Any] | None

    def _read(self, file: str) -> None:
        """The texts, and the other columns; a key that a row lacks becomes None."""
        rows = read_lines(self.root / file)
        names = list(dict.fromkeys(name for row in rows for name in row))
        self.metadata: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in names}
        self.texts: list[str] = self.metadata.pop("text")

    def _text(self, index: int) -> tuple[Any, int]:
        """A text, transformed, and its place from the beginning or the end."""
        place = checks.place("index", index, len(self))
        text = self.texts[place]
        return text if self.transform is None else self.transform(text), place

    def __len__(self) -> int:
        return len(self.texts)
