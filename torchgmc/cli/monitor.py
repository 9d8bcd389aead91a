"""``torchgmc monitor``: is the promise still kept, batch after batch?

    $ torchgmc monitor head.safetensors labelled/ --state monitor.safetensors

Reads the files of a folder in the order of their names (or one file, or with ``-`` the file names on stdin), skips those that the
state has seen before, by name and content, and writes the state after each. Exit code 0: no alarm. 1: alarm, also of an earlier
call. 2: bad input. However many calls there are, the probability that a false alarm is ever raised is at most ``--delta``.
"""

import json
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import safetensors
import torch
import typer
from safetensors.torch import load_file, save

import torchgmc as gmc
from torchgmc.cli import fitting, options, show
from torchgmc.cli.source import CLUSTERS, Source, audited_arrays, load_head, open_source
from torchgmc.cli.tables import SUFFIXES
from torchgmc.cli.writers import check_file
from torchgmc.engine.files import write_file


def monitor(
    head: options.Head,
    data: Annotated[Path, typer.Argument(help="Folder of labelled batches, one file, or - for file names on stdin.")],
    *,
    own: dict[str, Any],
    state: Annotated[Path | None, options.told("Evidence so far: read if it exists, and written.", "FILE")] = None,
    alpha: Annotated[float | None, options.told("Largest deviation allowed; the head's if omitted.", "NUMBER")] = None,
    conditional: options.Conditional = None,
    cluster_size: options.ClusterSize = None,
    delta: Annotated[float, options.told("Probability that a false alarm is ever raised.", "NUMBER")] = 0.01,
    groups: options.GroupColumns = None,
    unknown: options.Unknown = "error",
    chunk: options.Chunk = None,
    plot: Annotated[Path | None, options.told("Write the evidence over time, .png.", "FILE")] = None,
    showing: options.Showing,
) -> None:
    """Add batches of labelled data to the evidence; exit code 1 if there is an alarm.

    Example: torchgmc monitor head.safetensors labelled/ --state monitor.safetensors
    """
    check_file("--state", state, head, suffixes=(".safetensors",))
    check_file("--plot", plot, head, suffixes=(".png",))
    fitted, notes = load_head(head)
    if fitted.alpha is None and alpha is None:
        raise ValueError("this head was made with alpha=None; pass the deviation that is allowed with --alpha.")
    watch = gmc.Monitor(fitted, delta, alpha, conditional, cluster_size)
    seen = {} if state is None or not state.exists() else _read(watch, state)
    known = 0
    wanted = ("scores", "labels") if fitted.truth else ("scores",)
    for file in _files(data):
        if state is not None and state.exists() and file.samefile(state):
            continue
        content = _content(file)
        if content in seen.get(file.name, ()):
            known += 1
            continue
        _add(watch, open_source(fitted, notes, file, own, groups, wanted, chunk, unknown), fitted)
        seen.setdefault(file.name, []).append(content)
        if state is not None:
            _write(watch, state, seen)
    if plot is not None:
        from torchgmc import plots

        write_file(plot, plots.png(watch.plot()))
    if showing.as_json:
        found = {"torchgmc": gmc.__version__, "examples": int(watch.examples), "message": watch.message}
        found["files"] = [name for name, parts in seen.items() for _ in parts]
        show.print_json(found | watch.compute() | {"table": watch.table})
    else:
        for line in str(watch).splitlines()[:-1][: showing.most + 1]:
            typer.echo(line)
        typer.echo(watch.message + f" {known} files had been counted before." * (known > 0))
    if watch.alarm:
        raise typer.Exit(1)


def _add(watch: gmc.Monitor, source: Source, head: gmc.Head) -> None:
    """The evidence of a file."""
    held: list[dict[str, Any]] = []  # a cluster must not be cut: with clusters a file is one batch
    with fitting.blocks(head, source, "monitor") as found:
        for _, arguments in found:
            if "clusters" in arguments:
                held.append(arguments)
            else:
                watch.update(**arguments)
    if held:
        watch.update(**{name: torch.cat([part[name] for part in held]) for name in held[0]})


def _files(data: Path) -> Iterator[Path]:
    """Files of batches, in order."""
    if str(data) == "-":
        yield from (Path(line.strip()) for line in sys.stdin if line.strip())
    elif data.is_dir():
        yield from sorted(path for path in data.iterdir() if path.suffix in SUFFIXES and not path.name.startswith("."))
    elif data.exists():
        yield data
    else:
        raise FileNotFoundError(f"there is no file or folder {str(data)!r}.")


def _content(file: Path) -> int:
    """Tells a file that was counted from a new one of the same name; 16 bits, too few to tell whose data are in it."""
    found = 0
    with file.open("rb") as content:
        while block := content.read(1 << 20):
            found = zlib.crc32(block, found)
    return found & 0xFFFF


def _read(watch: gmc.Monitor, path: Path) -> dict[str, list[int]]:
    """The evidence of earlier calls, and the files it is from: of each name their contents."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["monitor"])
        if not isinstance(about["files"], dict):
            raise ValueError("it knows files by their names only, as an earlier version did; begin another file.")
        seen = {str(name): [int(part) for part in parts] for name, parts in about["files"].items()}
        if about["config"] == watch.config():
            watch.load_state_dict(load_file(path))
    except (safetensors.SafetensorError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"--state {str(path)!r} does not hold a monitor's evidence: {str(error).splitlines()[0]}") from error
    for name, value in watch.config().items():
        if about["config"].get(name) != value:
            raise ValueError(
                f"--state {str(path)!r} is evidence for {name} = {about['config'].get(name)!r}, not {value!r}: use its "
                "options, or another file."
            )
    return seen


def _write(watch: gmc.Monitor, path: Path, seen: dict[str, list[int]]) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in watch.state_dict().items()}
    write_file(path, save(tensors, {"monitor": json.dumps({"config": watch.config(), "files": seen})}))


def command() -> Callable[..., None]:
    """With an option for each array that some head takes."""
    whole = {"clusters": f"{CLUSTERS} A cluster must be whole within one file."}
    return options.command(monitor, options.arrays(audited_arrays() | whole))
