"""The folder of all data: a data set found, or downloaded and converted; how its tables are read and written."""

import csv
import gzip
import json
import operator
import os
import sys
import threading
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from torchgmc.engine.extras import require
from torchgmc.engine.files import harmless, write_atomically

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
    """Columns of a CSV file with a line of names, as strings (see :func:`typed`), without the guards of formulas."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        names = next(rows, [])
        values = [list(map(_bare, column)) for column in zip(*rows, strict=True)] or [[] for _ in names]
    return dict(zip(map(_bare, names), values, strict=True))


def _bare(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and harmless(cell[1:]) == cell else cell


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
            table.writerow(map(harmless, columns))
            table.writerows(map(harmless, row) for row in zip(*columns.values(), strict=True))

    write_atomically(path, write)


def place(index: Any, size: int) -> int:
    """A whole number, also of numpy or a tensor, that counts ``size`` examples from 0, or from the end.

    Raises:
        IndexError: for an example out of range; it ends a Python loop over a data set.
    """
    try:
        number = operator.index(index)
    except TypeError:
        raise TypeError(f"`index` must be a whole number, got {type(index).__name__}.") from None
    if not -size <= number < size:
        raise IndexError(f"`index` must be from 0 to {size - 1}, got {number}.")
    return number


class Texts(Dataset[tuple[Any, Any]]):
    """A data set of texts with columns, in one file of JSON lines."""

    root: Path
    transform: Callable[[str], Any] | None

    def _read(self, name: str) -> None:
        """The texts, and the other columns; a key that a row lacks becomes None."""
        rows = read_lines(self.root / f"{name}.jsonl.gz")
        names = list(dict.fromkeys(name for row in rows for name in row))
        self.metadata: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in names}
        self.texts: list[str] = self.metadata.pop("text")

    def _text(self, index: int) -> tuple[Any, int]:
        """A text, transformed, and its place from the beginning or the end."""
        at = place(index, len(self))
        text = self.texts[at]
        return text if self.transform is None else self.transform(text), at

    def __len__(self) -> int:
        return len(self.texts)


#: Name, sha256 and address of every published file that is needed, as pooch reads them.
REGISTRY = Path(__file__).with_name("registry.txt")
#: Further attempts at a file, after 1, 2, ... seconds.
RETRIES = 3


class DownloadError(OSError):
    """A file could not be fetched; the message says what to do instead."""


def locate(
    root: Path,
    folder: str,
    needed: Sequence[str],
    original: Sequence[str],
    convert: Callable[[], None],
    what: str,
    download: bool,
    packages: Sequence[str] = (),
) -> Path:
    """The folder of the compact layout, made from the published files if only these are there, or can be fetched.

    Args:
        root: the user's argument: the folder of all data, or of this data set.
        folder: name of the compact layout's folder below ``root``.
        needed: files it must have.
        original: the published files, or their folders, below ``root``.
        convert: writes the compact layout from them.
        what: name of the data, for messages.
        download: fetch the published files.
        packages: what ``convert`` needs; checked before the download.
    """
    for place in (root / folder, root):
        if all((place / name).is_file() for name in needed):
            return place
    if not download and not all((root / name).exists() for name in original):
        raise FileNotFoundError(
            f"no {what} in {str(root)!r}: neither {folder}/{{{','.join(needed)}}} (compact) nor {' and '.join(original)} (as "
            f"published) is there; pass `download=True` to fetch it, or point `root` or {VARIABLE} to a folder that has it."
        )
    for package in packages:
        require(package, extra="datasets")
    if download:
        fetch(root, what, original)
    convert()
    return root / folder


def fetch(root: Path, what: str, places: Sequence[str]) -> None:
    """The files of the registry at or below these places; good copies are kept, and a file is in place only when whole.

    The first error ends it; what has come stays.

    Raises:
        DownloadError: a file cannot be reached, is not there, or has another hash.
    """
    pooch, tqdm = (require(name, extra="datasets") for name in ("pooch", "tqdm"))
    store = pooch.create(root, base_url="", retry_if_failed=RETRIES)
    store.load_registry(REGISTRY)
    names = [name for name in store.registry_files if any(Path(name).is_relative_to(place) for place in places)]
    for folder in {(root / name).parent for name in names}:
        folder.mkdir(parents=True, exist_ok=True)  # pooch's threads would race for it
    alone = len(names) == 1  # then the bar counts bytes, not files
    load = pooch.HTTPDownloader(progressbar=alone and sys.stderr.isatty(), chunk_size=1 << 16)

    failed = threading.Event()

    def one(name: str) -> None:
        if failed.is_set():
            return
        try:
            store.fetch(name, downloader=load)
        except (OSError, ValueError) as error:  # requests raises the one, a wrong hash the other
            failed.set()
            reason = str(error).rstrip(".")
            raise DownloadError(
                f"could not fetch {store.get_url(name)}: {reason}. If this machine has no network, download it by hand to "
                f"{str(root / name)!r}, or point `root` or {VARIABLE} to a folder that has the data."
            ) from error

    logger = pooch.get_logger()
    with ThreadPoolExecutor(8) as pool, ExitStack() as after:
        after.callback(logger.setLevel, logger.level)
        logger.setLevel("WARNING")  # not a line for every file
        list(tqdm.tqdm(pool.map(one, names), what, len(names), disable=alone or None))  # None: only on a terminal
