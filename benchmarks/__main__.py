"""Every benchmark in one table: our cost, that of the naive way and of other packages, and the physical limit.

    python -m benchmarks                        # all, at full size: some minutes (more with peers)
    python -m benchmarks --small                # small sizes, at most 3 minutes on two quiet cores
    python -m benchmarks --only fnr --only text
    python -m benchmarks --json speed.json --markdown benchmarks/results/speed.md
    python -m benchmarks --kept                 # twice: also in a process whose allocator keeps the memory that is freed

Figures are ratios within one run. A benchmark checks that its results agree with a plain version before it takes a time, and
one that fails does not keep the others from running; the exit code is then 1.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import Row, as_markdown, as_text, number
from benchmarks.timing import machine

#: For a process that keeps what is freed, without peers: no page of a temporary tensor is asked of the system twice (glibc).
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 28)}
KEPT["TORCHGMC_BENCHMARKS"] = "ours"
BENCHMARKS = ("fnr", "text", "multicalibration", "search", "calibrate", "overhead", "processes", "audit")


def collect(names: Sequence[str], small: bool, tiny: bool = False) -> tuple[list[Row], dict[str, str], dict[str, float]]:
    """Rows, errors by benchmark, and seconds that each benchmark took in all."""
    rows: list[Row] = []
    errors: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for name in names:
        print(f"{name} ...", end=" ", file=sys.stderr, flush=True)
        start = time.perf_counter()
        try:
            rows += importlib.import_module(f"benchmarks.{name}").run(small=small, tiny=tiny)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        seconds[name] = time.perf_counter() - start
        print(f"{seconds[name]:.0f} s", file=sys.stderr, flush=True)
    return rows, errors, seconds


def command(arguments: Sequence[str]) -> str:
    """What to type to have this again."""
    return " ".join(["python -m benchmarks", *arguments])


def again(arguments: Sequence[str]) -> dict[str, float]:
    """Our figures by work, from another process that keeps its memory."""
    left = [word for word in arguments if word != "--kept"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kept.json"
        command = [sys.executable, "-m", "benchmarks", *left, "--json", str(file), "--markdown", str(file.with_suffix(".md"))]
        subprocess.run(command, env=os.environ | KEPT, check=False, stdout=subprocess.DEVNULL)
        return {row["work"]: row["ours"] for row in json.loads(file.read_text(encoding="utf-8"))["rows"]}


def beside(rows: Sequence[Row], kept: dict[str, float]) -> list[str]:
    """Our figures of both runs, as Markdown."""
    text = """
## With an allocator that keeps its memory

A large tensor that is freed goes back to the system, and the pages of the next one are made again: time that says nothing of the
work. Here all was run a second time with glibc told to keep them (`--kept`): what changes was due to that. Units are made in
blocks, in memory that is used again, so nearly all of a change is our own.

| work | ours | with memory kept | |
|---|---|---|---|"""
    return text.splitlines() + [
        f"| {row.work} | {number(row.ours)} | {number(kept[row.work])} | {row.unit} |" for row in rows if row.work in kept
    ]


def page(rows: Sequence[Row], errors: dict[str, str], where: dict[str, str], small: bool) -> str:
    """The Markdown page: command, machine and versions, table, notes."""
    lines = ["# Speed", "", *(f"- {name}: {value}" for name, value in where.items()), ""]
    if small:
        lines += ["Small sizes: the targets are for the full ones, so most are not judged.", ""]
    lines.append(as_markdown(rows))
    lines += ["", *(f"- **{name} failed**: {error}" for name, error in errors.items())] if errors else []
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write; 0 if every benchmark ran."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="small sizes, at most 3 minutes")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # for the tests: no time worth reading
    parser.add_argument("--only", action="append", choices=BENCHMARKS, metavar="NAME", help=f"one of {', '.join(BENCHMARKS)}")
    parser.add_argument("--kept", action="store_true", help="run a second time in a process that keeps the memory it frees")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--markdown", type=Path, help="write the page to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    where = {"command": command(arguments), **machine()}
    for name, value in where.items():
        print(f"{name}: {value}")
    rows, errors, seconds = collect(options.only or BENCHMARKS, options.small, options.tiny)
    where["took"] = f"{sum(seconds.values()):.0f} s"
    print(f"took: {where['took']}\n")
    print(as_text(rows))
    for name, error in errors.items():
        print(f"{name} FAILED: {error}")
    kept = beside(rows, again(arguments)) if options.kept else []
    print(*kept, sep="\n")
    content: dict[str, Any] = {"machine": where, "small": options.small, "rows": [asdict(row) for row in rows]}
    content |= {"errors": errors, "seconds": seconds}
    for path, text in (
        (options.json, json.dumps(content, indent=1) + "\n"),
        (options.markdown, "\n".join([page(rows, errors, where, options.small).rstrip("\n"), *kept]) + "\n"),
    ):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return 1 if errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
