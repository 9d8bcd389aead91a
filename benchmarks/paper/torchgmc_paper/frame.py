"""Runs an experiment: prepare once, then its seeds, in any number of processes, any number of times until all are there.

Every seed is one file, written completely or not at all, so an interruption of any kind (Ctrl-C, ``kill -9``, power) costs at
most the seeds under way; running the same command again does the rest. Files made with other settings are never mixed in: the
run stops and says what differs.
"""

import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import torchgmc as gmc
from torchgmc.engine.files import write_atomically, write_json
from torchgmc.engine.modes import calm
from torchgmc_paper import EXPERIMENTS
from torchgmc_paper.demo.progress import Bar, progress_bar

#: Version of the rows; files of another version are not mixed in.
ROWS = 1


@dataclass(frozen=True)
class Prepared:
    """What every seed of an experiment needs.

    Attributes:
        settings: all that the rows depend on, as JSON types: the setting, checksums of the data, ...
        tensors: scores, labels, ...
        notes: sentences for the page of results: what was trained, how good it is, what is missing in the data.
        extra: anything else, not part of the fingerprint (names of groups, trees, ...).
    """

    settings: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    notes: Sequence[str] = ()
    extra: dict[str, Any] = field(default_factory=dict)


class Experiment(Protocol):
    """What a module of an experiment holds.

    Attributes:
        NAME: of the experiment and its files.
        TITLE: of its page.
        SEEDS: the paper's number of them.
        METHODS: in the order of tables and figures.
        OURS: the methods that are compared with the others.
        PAPER: the paper's own mean deviations (mass-weighted) by part, method and group; shown beside ours.
        QUICK: the setting of ``--quick``.
    """

    NAME: str
    TITLE: str
    SEEDS: int
    METHODS: Sequence[str]
    OURS: Sequence[str]
    PAPER: Mapping[str, Mapping[str, Mapping[str, float]]]
    QUICK: Any

    def Setting(self, **options: Any) -> Any:
        """A frozen dataclass with ``alpha``; its fields are what ``--set NAME=VALUE`` may change."""

    def prepare(self, data: Path, out: Path, bar: Bar, setting: Any) -> Prepared:
        """Trains what is needed once (see :func:`cached`); with everything cached it takes a moment: each process calls it."""

    def run_seed(self, prepared: Prepared, seed: int) -> list[dict[str, Any]]:
        """Rows of one seed, see :func:`torchgmc_paper.measures.measure`; the same on every call."""

    # Optional: ``figures(summary, setting) -> dict[str, Figure]``, a name and a figure each; bars of the deviations if missing.


@dataclass(frozen=True)
class Results:
    """Rows of all seeds of one experiment, and what belongs on its page."""

    module: Any
    setting: Any
    seeds: int
    prepared: Prepared
    rows: list[dict[str, Any]]


def load(name: str) -> Any:
    """Module of an experiment."""
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment {name!r}; choose from {', '.join(EXPERIMENTS)} or all.")
    return import_module(EXPERIMENTS[name])


def data_root(given: str | Path | None) -> Path:
    """The data folder: the argument, else TORCHGMC_DATA."""
    found = given or os.environ.get("TORCHGMC_DATA")
    if not found:
        raise ValueError("which folder holds the data? Pass --data DIR or set TORCHGMC_DATA.")
    path = Path(found)
    if not path.is_dir():
        raise ValueError(f"the data folder {str(path)!r} does not exist; pass another with --data.")
    return path


def digest(*items: Path | Tensor) -> str:
    """Checksum of files and tensors, for a fingerprint: other data are other settings."""
    total = hashlib.sha256()
    for item in items:
        if isinstance(item, Tensor):
            total.update(f"{item.dtype} {tuple(item.shape)}".encode())
            total.update(item.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            continue
        with item.open("rb") as file:
            while block := file.read(1 << 20):
                total.update(block)
    return total.hexdigest()[:16]


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Checksum of settings, whatever their order."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def cached(path: Path, settings: Mapping[str, Any], make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of a safetensors file made with these settings; made, and written completely or not at all, if it is not there.

    A file made with other settings is rebuilt.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "scores.safetensors"
        >>> cached(path, {"seed": 0}, lambda: {"x": torch.ones(2)})["x"]
        tensor([1., 1.])
        >>> cached(path, {"seed": 0}, lambda: {"x": torch.zeros(2)})["x"]
        tensor([1., 1.])
        >>> cached(path, {"seed": 1}, lambda: {"x": torch.zeros(2)})["x"]
        tensor([0., 0.])
    """
    mark = fingerprint(settings)
    if path.is_file():
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("fingerprint") == mark:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    tensors = {name: value.contiguous() for name, value in make().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda part: save_file(tensors, part, {"fingerprint": mark}))
    return tensors


def reproduce(
    name: str,
    *,
    data: str | Path | None = None,
    out: str | Path = "results",
    seeds: int | None = None,
    jobs: int = 1,
    quick: bool = False,
    changes: Sequence[str] = (),
    redo: bool = False,
    progress: bool = True,
) -> Results:
    """Runs an experiment, or what is missing of it, and returns the rows of all its seeds.

    Args:
        name: of the experiment.
        data: folder of the data; TORCHGMC_DATA if omitted.
        out: folder for what is kept between runs; the experiment's files are in a folder of its name.
        seeds: number of seeds, 0 to seeds - 1; the paper's number if omitted (2 with ``quick``).
        jobs: processes that run seeds, one thread each.
        quick: tiny sizes.
        changes: settings to change, each ``NAME=VALUE``.
        redo: discard the seeds that were run with other settings, instead of stopping.
        progress: shows a bar on a terminal.
    """
    module = load(name)
    root, folder = data_root(data), Path(out) / name
    seeds = seeds if seeds is not None else 2 if quick else int(module.SEEDS)
    if seeds < 1 or jobs < 1:
        raise ValueError(f"seeds and jobs must be at least 1, got {seeds} and {jobs}.")
    setting = _changed(module.QUICK if quick else module.Setting(), changes)
    (folder / "seeds").mkdir(parents=True, exist_ok=True)
    with calm(), progress_bar(progress) as bar:
        prepared = module.prepare(root, folder, bar, setting)
        settings = {**prepared.settings, "setting": asdict(setting), "experiment": name, "rows": ROWS}
        settings |= {"torchgmc": gmc.__version__, "torch": torch.__version__}
        _same_settings(folder, json.loads(json.dumps(settings)), redo)
        mark = fingerprint(settings)
        missing = [seed for seed in range(seeds) if _rows(folder, seed, mark) is None]
        done = _serial(module, prepared, missing) if jobs == 1 else _parallel(name, root, folder, setting, missing, jobs)
        for seed, rows in bar.track(done, f"{name}: seeds", len(missing)):
            write_json(_seed_file(folder, seed), {"fingerprint": mark, "seed": seed, "rows": rows}, indent=None)
    rows = [{"seed": seed, **row} for seed in range(seeds) for row in _rows(folder, seed, mark) or ()]
    return Results(module, setting, seeds, prepared, rows)


def _changed(setting: Any, changes: Sequence[str]) -> Any:
    """The setting with ``NAME=VALUE`` in place of what was there, of the same type."""
    known = {f.name: getattr(setting, f.name) for f in fields(setting)}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals or name not in known:
            raise ValueError(f"--set {change!r}: write NAME=VALUE with one of the names {', '.join(known)}.")
        kind = type(known[name])
        try:
            new = value if kind is str else json.loads(value)
            new = tuple(new) if kind is tuple else float(new) if kind is float and type(new) is int else new
        except (ValueError, TypeError) as error:
            raise ValueError(f"--set {change!r}: {value!r} is not a valid {kind.__name__}.") from error
        if not isinstance(new, kind) or isinstance(new, bool) != (kind is bool):
            raise ValueError(f"--set {change!r}: {value!r} is not a valid {kind.__name__}.")
        setting = replace(setting, **{name: new})
    return setting


def _same_settings(folder: Path, settings: dict[str, Any], redo: bool) -> None:
    """Stops if the folder holds seeds of other settings; notes the settings of a new one."""
    path = folder / "settings.json"
    kept = list((folder / "seeds").glob("seed-*.json"))
    if path.is_file() and kept:
        old = json.loads(path.read_text())
        different = sorted(key for key in {*_flat(old), *_flat(settings)} if _flat(old).get(key) != _flat(settings).get(key))
        if different and not redo:
            raise ValueError(
                f"{str(folder)!r} holds {len(kept)} seeds run with other settings ({', '.join(different)} differ), and "
                "results are never mixed. Use another --out, the same settings, or --redo to discard those seeds."
            )
        if different:
            for file in kept:
                file.unlink()
    write_json(path, settings)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _seed_file(folder: Path, seed: int) -> Path:
    return folder / "seeds" / f"seed-{seed:04d}.json"


def _rows(folder: Path, seed: int, mark: str) -> list[dict[str, Any]] | None:
    """Rows of a seed that was finished with these settings."""
    path = _seed_file(folder, seed)
    if not path.is_file():
        return None
    content = json.loads(path.read_text())
    return cast("list[dict[str, Any]]", content["rows"]) if content["fingerprint"] == mark else None


def _serial(module: Any, prepared: Prepared, seeds: Sequence[int]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    for seed in seeds:
        yield seed, _one_seed(module, prepared, seed)


def _one_seed(module: Any, prepared: Prepared, seed: int) -> list[dict[str, Any]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return cast("list[dict[str, Any]]", module.run_seed(prepared, seed))


# -- processes -----------------------------------------------------------------------------------------------------------

_work: tuple[Any, Prepared]  # of a worker process


def _parallel(
    name: str, root: Path, folder: Path, setting: Any, seeds: Sequence[int], jobs: int
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    if not seeds:
        return
    start = (name, root, folder, setting)
    with _pool(min(jobs, len(seeds)), start) as pool:
        work = {pool.submit(_worker_seed, seed): seed for seed in seeds}
        for future in as_completed(work):
            yield work[future], future.result()


@contextmanager
def _pool(jobs: int, start: tuple[Any, ...]) -> Iterator[ProcessPoolExecutor]:
    """Worker processes; after an error or Ctrl-C the ones under way are ended, not waited for."""
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # read when a worker starts
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_start_worker, initargs=start)
    try:
        yield pool
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = threads


def _start_worker(name: str, root: Path, folder: Path, setting: Any) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    module = load(name)
    _work = module, module.prepare(root, folder, Bar(), setting)


def _end_with_parent() -> None:
    """A worker must not outlive a parent that was killed."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _worker_seed(seed: int) -> list[dict[str, Any]]:
    return _one_seed(*_work, seed)
