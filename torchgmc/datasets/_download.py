"""Files from the network: resumed where they broke off, tried again, checked, and in place only when whole."""

import hashlib
import http.client
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchgmc.datasets._files import VARIABLE

GITHUB_API = "https://api.github.com"
GITHUB_RAW = "https://raw.githubusercontent.com"
CHUNK = 1 << 16
#: Seconds before the second, third, ... attempt.
PAUSES = (0.5, 2.0, 5.0)
TIMEOUT = 30.0


class DownloadError(OSError):
    """A file could not be had; the message says what to do instead."""


@dataclass(frozen=True)
class Remote:
    """A file on the network and what is known of it.

    Attributes:
        url: its address.
        path: where it goes below the root.
        size: in bytes.
        sha256: of its content.
        blob: its git blob id, sha1("blob <size>\\0" + content).
    """

    url: str
    path: str
    size: int | None = None
    sha256: str | None = None
    blob: str | None = None

    def problem(self, file: Path) -> str | None:
        """What is wrong with a file that should be this one; None if nothing is (or nothing is known)."""
        size = file.stat().st_size
        if self.size is not None and size != self.size:
            return f"it has {size} bytes instead of {self.size}"
        digests = {"sha256": hashlib.sha256(), "blob": hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)}
        for name, digest in digests.items():
            wanted = getattr(self, name)
            if wanted is None:
                continue
            with file.open("rb") as content:
                while chunk := content.read(1 << 20):
                    digest.update(chunk)
            if digest.hexdigest() != wanted:
                return f"its {name} is {digest.hexdigest()} instead of {wanted}"
        return None


class Progress:
    """One line on the terminal: megabytes so far; silent when nobody looks."""

    def __init__(self, what: str, total: int | None, wanted: bool = True) -> None:
        self.what, self.total, self.done = what, total, 0
        self.shown = wanted and sys.stderr.isatty()
        self._lock, self._last = threading.Lock(), 0.0

    def add(self, size: int) -> None:
        """More bytes have come (or, negative, were thrown away)."""
        with self._lock:
            self.done += size
            if self.shown and time.monotonic() - self._last > 0.1:
                self._last = time.monotonic()
                self._draw()

    def _draw(self) -> None:
        text = f"{self.done / 1e6:.1f} MB"
        if self.total:
            part = min(self.done / self.total, 1.0)
            text = f"[{'#' * int(30 * part):30s}] {100 * part:3.0f} %, {text} of {self.total / 1e6:.1f} MB"
        sys.stderr.write(f"\r{self.what}: {text} ")
        sys.stderr.flush()

    def close(self) -> None:
        """The line as it is in the end."""
        if self.shown:
            self._draw()
            sys.stderr.write("\n")


def fetch(remote: Remote, root: Path, progress: Progress | None = None) -> Path:
    """The file, downloaded unless a good copy is there.

    What has come is kept in ``<name>.part`` and continued with an HTTP Range request, in this call and in later ones. The
    file gets its name when it is whole and right.

    Raises:
        DownloadError: it cannot be reached, is not there, or is not what it should be.
    """
    if ".." in Path(remote.path).parts or Path(remote.path).is_absolute():
        raise DownloadError(f"{remote.url} would be written outside of the folder: {remote.path!r}.")
    target = root / remote.path
    if target.is_file() and remote.problem(target) is None:
        if progress:
            progress.add(target.stat().st_size)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    own = progress or Progress(target.name, remote.size)
    resumed = part.is_file() and part.stat().st_size > 0
    try:
        _complete(remote, part, target, own)
        problem = remote.problem(part)
        if problem is not None and resumed:  # what was left from an earlier run may be of another file
            own.add(-part.stat().st_size)
            part.unlink()
            _complete(remote, part, target, own)
            problem = remote.problem(part)
    finally:
        if progress is None:
            own.close()
    if problem is not None:
        part.unlink()
        raise DownloadError(f"{remote.url} is not what it should be: {problem}; it was thrown away. {_by_hand(target)}")
    os.replace(part, target)
    return target


def _complete(remote: Remote, part: Path, target: Path, progress: Progress) -> None:
    """Bring the partial file to its end, over several attempts if need be."""
    if part.is_file():
        progress.add(part.stat().st_size)
    for pause in (*PAUSES, None):
        try:
            if _attempt(remote, part, progress):
                return
            reason = "the connection broke off"
        except urllib.error.HTTPError as error:
            error.close()
            reason = f"the server says {error.code} {error.reason}"
            if error.code < 500 and error.code not in (408, 416, 429):
                raise DownloadError(f"could not fetch {remote.url}: {reason}. {_by_hand(target)}") from None
        except (OSError, http.client.HTTPException) as error:  # URLError and time-outs are OSErrors
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        if pause is not None:
            time.sleep(pause)
    host = urllib.parse.urlsplit(remote.url).netloc
    raise DownloadError(f"could not reach {host} for {remote.url}: {reason}. {_by_hand(target)}")


def _attempt(remote: Remote, part: Path, progress: Progress) -> bool:
    """One request; whether the file is complete after it."""
    start = part.stat().st_size if part.is_file() else 0
    if remote.size is not None and start >= remote.size:
        if start == remote.size:
            return True
        progress.add(-start)
        part.unlink()
        start = 0
    headers = {"User-Agent": "torchgmc", "Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    request = urllib.request.Request(remote.url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # no bytes beyond what we have: the part is whole, or not of this file
            whole = (error.headers.get("Content-Range") or "").rpartition("/")[2]
            if whole == str(start):
                error.close()
                return True
            progress.add(-start)
            part.unlink()
        raise
    with response:
        if start and not _continues(response, start):  # the server sends everything from the beginning
            progress.add(-start)
            start = 0
        length = response.headers.get("Content-Length")
        with part.open("ab" if start else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                progress.add(len(chunk))
            got = file.tell()
    return got == start + int(length) if length is not None else remote.size in (None, got)


def _continues(response: Any, start: int) -> bool:
    if response.status != 206:
        return False
    if not (response.headers.get("Content-Range") or "").startswith(f"bytes {start}-"):
        raise OSError("the server continued at the wrong place")
    return True


def _by_hand(target: Path) -> str:
    return (
        f"If this machine has no network, download it by hand to {str(target)!r}, or point `root` or {VARIABLE} to a folder "
        "that has the data."
    )


def fetch_all(remotes: Sequence[Remote], root: Path, what: str, workers: int = 8) -> None:
    """Several files at once; the first error ends it, and what has come stays."""
    sizes = [remote.size for remote in remotes]
    progress = Progress(what, sum(s for s in sizes if s is not None) if None not in sizes else None)
    with ThreadPoolExecutor(workers) as pool:
        jobs = [pool.submit(fetch, remote, root, progress) for remote in remotes]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        finally:
            progress.close()


def github_files(repository: str, commit: str, folder: str, root: Path, select: Callable[[str], bool]) -> list[Remote]:
    """The files of a GitHub repository at a commit, with their sizes and git blob ids.

    What this proves: GitHub's answer about the commit names the hash of its tree; the hash computed from the listing must
    be that one, and every file must have the blob id listed. So damage and mixed-up versions are found. That the commit
    itself is the one meant rests on GitHub (an abbreviated id has 7 digits).

    Args:
        repository: ``owner/name``.
        commit: its id, possibly abbreviated.
        folder: where the files go below ``root``.
        root: the folder of all data.
        select: which paths are wanted.
    """
    at = f"{GITHUB_API}/repos/{repository}"
    answers = [root / folder / f".{kind}-{commit}.json" for kind in ("commit", "tree")]
    try:
        full, entries = _listing(at, commit, folder, root)
    except DownloadError:
        for path in answers:  # ask again next time
            path.unlink(missing_ok=True)
        raise
    return [
        Remote(
            f"{GITHUB_RAW}/{repository}/{full}/{urllib.parse.quote(entry['path'])}",
            f"{folder}/{entry['path']}",
            size=int(entry["size"]),
            blob=entry["sha"],
        )
        for entry in entries
        if entry["type"] == "blob" and select(entry["path"])
    ]


def _listing(at: str, commit: str, folder: str, root: Path) -> tuple[str, list[dict[str, Any]]]:
    """The full id of a commit and all entries of its tree."""
    known = _json(Remote(f"{at}/commits/{commit}", f"{folder}/.commit-{commit}.json"), root)
    full, tree = str(known["sha"]), str(known["commit"]["tree"]["sha"])
    if not full.startswith(commit):
        raise DownloadError(f"asked {at} for commit {commit}, got {full}.")
    listing = _json(Remote(f"{at}/git/trees/{tree}?recursive=1", f"{folder}/.tree-{commit}.json"), root)
    if listing.get("truncated"):
        raise DownloadError(f"the listing of {at} at {commit} is truncated; clone it by hand to {str(root / folder)!r}.")
    if tree_id(listing["tree"]) != tree:
        raise DownloadError(f"the listing of {at} at {commit} does not have the hash {tree} of its tree; try again later.")
    return full, list(listing["tree"])


def _json(remote: Remote, root: Path) -> dict[str, Any]:
    path = root / remote.path
    if not path.is_file():
        fetch(remote, root)
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        path.unlink()
        raise DownloadError(f"{remote.url} did not answer with JSON ({error}); try again later.") from None
    return content


def tree_id(entries: Sequence[dict[str, Any]], below: str = "") -> str:
    """The git hash of a tree from its recursive listing (``path``, ``mode``, ``type``, ``sha``).

    Example:
        >>> tree_id([])  # git's well-known empty tree
        '4b825dc642cb6eb9a060e54bf8d69288fbee4904'
    """
    children: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        children.setdefault(entry["path"].rpartition("/")[0], []).append(entry)

    def of(folder: str) -> str:
        lines = []
        for entry in children.get(folder, []):
            is_tree = entry["type"] == "tree"
            name = entry["path"].rpartition("/")[2]
            identity = of(entry["path"]) if is_tree else entry["sha"]
            mode = "40000" if is_tree else entry["mode"]
            lines.append((name + "/" * is_tree, f"{mode} {name}\0".encode() + bytes.fromhex(identity)))  # git sorts so
        body = b"".join(line for _, line in sorted(lines, key=lambda pair: pair[0].encode()))
        return hashlib.sha1(b"tree %d\0" % len(body) + body, usedforsecurity=False).hexdigest()

    return of(below)
