"""Find a data set in the compact layout, or convert the published files to it, downloaded on request."""

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from torchgmc.datasets._files import VARIABLE
from torchgmc.engine.extras import require

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
