"""Files that are written completely or not at all."""

import json
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from torchgmc.engine import checks


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Call ``write`` on a temporary file in the same folder, then rename it to ``path``.

    A link stays: the file that it points to is replaced. A file that is there keeps its permissions.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder; pass a file name.")
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise ValueError(f"{str(path)!r} is a device or a pipe, which cannot be replaced; pass a file name.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(path.parent)!r} does not exist; create it first.")
    umask = os.umask(0)
    os.umask(umask)
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666 & ~umask
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    part = Path(name)
    try:
        write(part)
        part.chmod(mode)  # mkstemp makes private files
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:  # a full disk does not say which file
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise
    finally:
        part.unlink(missing_ok=True)


def write_file(path: str | os.PathLike[str], data: bytes) -> Path:
    """Writes a file so that readers see the old or the new one, never half of it; returns its path."""
    target = checks.path("path", path)
    write_atomically(target, lambda part: part.write_bytes(data))
    return target


def write_json(path: str | os.PathLike[str], content: Any, indent: int | None = 2) -> Path:
    """:func:`write_file` with strict JSON: a number that is not finite is an error, see :func:`plain`."""
    return write_file(path, (json.dumps(content, indent=indent, allow_nan=False) + "\n").encode())


def plain(content: dict[str, Any]) -> dict[str, Any]:
    """The same as JSON types: tensors are lists; NaN and infinity, which JSON does not have, become None.

    Example:
        >>> plain({"risk": (0.5, float("nan"))})
        {'risk': [0.5, None]}
    """
    return json.loads(json.dumps(content, default=Tensor.tolist), parse_constant=lambda name: None)  # type: ignore[no-any-return]


def harmless(cell: Any) -> Any:
    """A cell of a CSV file: text that a spreadsheet takes for a formula gets a quotation mark, so that it is shown, not run.

    Example:
        >>> [harmless(cell) for cell in ("=1+1", "@now", "-0.5", -0.5, "a-b", "-x")]
        ["'=1+1", "'@now", '-0.5', -0.5, 'a-b', "'-x"]
    """
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@", "\t", "\r")):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell if cell[0] in "+-" else f"'{cell}"  # float ignores a tab before a number
