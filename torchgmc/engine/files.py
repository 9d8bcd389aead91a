"""Files that appear whole or not at all."""

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["write_atomically"]


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Call ``write`` on a temporary file in the same folder, then rename it to ``path``.

    A link stays: the file that it points to is replaced. A file that is there keeps its permissions.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder; give a file name.")
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise ValueError(f"{str(path)!r} is a device or a pipe, which cannot be replaced; give a file name.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(path.parent)!r} does not exist; make it first.")
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
    finally:
        part.unlink(missing_ok=True)
