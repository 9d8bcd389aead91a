"""Write the speed table of the README from a run of the benchmarks.

    python -m benchmarks --json benchmarks/results/speed.json --markdown benchmarks/results/speed.md
    python -m benchmarks.readme benchmarks/results/speed.json

The table stands between two comments, ``<!-- speed -->`` and ``<!-- /speed -->``; the rest of the file is left as it is.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.rows import Row

README = Path(__file__).parents[1] / "README.md"
START, END = "<!-- speed -->\n", "<!-- /speed -->\n"
#: Benchmarks whose rows are shown; the page has the others too.
SHOWN = ("fnr", "text", "multicalibration", "search", "calibrate", "overhead")


def table(rows: Sequence[Row], machine: dict[str, Any]) -> str:
    """The rows without targets, and where they were measured."""
    titles = ("work", "ours (least to largest)", "physical limit", "naive version", "other packages (same unit)")
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    notes = []
    for row in rows:
        if row.benchmark in SHOWN and row.ours is not None:
            row = replace(row, peers={name: value for name, value in row.peers.items() if value != "not installed"})
            work, ours, naive, peers, limit, *_ = (cell.replace("|", "\\|") for cell in row.cells())
            lines.append(f"| {work} | {ours} | {limit} | {naive} | {peers} |")
            notes += [f"- {work}: {row.note}."] if row.peers else []  # faster at what quality
    where = [str(machine[name]) for name in ("processor", "system", "date") if name in machine]
    found = [peer for peer in str(machine.get("peers", "")).split(", ") if peer and not peer.endswith("not installed")]
    versions = [f"torch {machine['torch']}", *found]
    return "\n".join([*lines, "", *notes, *([""] if notes else []), f"Measured on: {'; '.join([*where, *versions])}.", ""])


def rewrite(text: str, new: str) -> str:
    """The README with another table."""
    before, rest = text.split(START)
    _, after = rest.split(END)
    return before + START + new + END + after


def main(arguments: list[str] | None = None) -> int:
    """Read the run, write the README."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.readme", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="JSON of `python -m benchmarks --json`")
    parser.add_argument("--readme", type=Path, default=README, help="the file to change")
    options = parser.parse_args(arguments)
    run = json.loads(options.run.read_text(encoding="utf-8"))
    if run.get("small"):
        parser.error(f"{options.run} is a run of small sizes; the README shows full ones.")
    rows = [Row(**row) for row in run["rows"]]
    options.readme.write_text(rewrite(options.readme.read_text(encoding="utf-8"), table(rows, run["machine"])), encoding="utf-8")
    print(f"{options.readme}: {sum(row.benchmark in SHOWN for row in rows)} rows")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
