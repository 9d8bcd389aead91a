"""How many files of the package a call walks through, and the hops that a reader follows from one file to another.

$ python -m benchmarks.walks            # the table
$ python -m benchmarks.walks fit        # the hops of one leg, in order

- A hop is a step from one file into a function of another; one that is taken again, in a loop or for the next group, is the
  same hop.
- It is a return if that file is open further up: methods of a head and those of its base class, a report that reads an audit.
- It is a way up if it calls a function of a higher layer of CONTRIBUTING by name. Methods of an object that was handed
  down (the head that is audited) and functions that were (the batches of a fit) are called by contract, not by name.

Files, hops and returns when the house was reviewed (commit 16fa66e), and now. The last column has the hops of fits to alpha on
the sample (``noise_floor=False``), which is what a fit did then: that option is not where the hops come from. They come from what
a call does today and did not then: learned groups, clusters, memberships as bits, devices without float64, frames and arrays as
input, the pinball solver, intervals by betting, measures in the report. Calls of `observe`, `calibrate` and `values` pass
through one function of engine/float64.py, which takes them to the CPU where a device lacks float64: 2 hops of a fit. The fit of
level sets has 18 more hops since its offsets and slopes, 774 lines in one file, are two: the problem with its optimum, and the
choice of a ridge.

| leg | files | hops | returns | hops, noise_floor=False |
|---|---|---|---|---|
| init | 4 -> 6 | 9 -> 14 | 0 -> 0 | 14 |
| fit | 11 -> 25 | 39 -> 80 | 9 -> 9 | 78 |
| forward | 4 -> 7 | 5 -> 11 | 0 -> 3 | 11 |
| audit | 10 -> 23 | 23 -> 61 | 1 -> 5 | 61 |
| to_html | 9 -> 19 | 28 -> 49 | 7 -> 7 | 49 |
| levels | 11 -> 26 | 41 -> 100 | 9 -> 12 | 87 |
| export | 11 -> 18 | 26 -> 49 | 2 -> 9 | 49 |
| calibrate | 26 -> 43 | 94 -> 177 | 0 -> 10 | 176 |
"""

import contextlib
import inspect
import io
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

import torchgmc as gmc
from torchgmc.cli import main as command

PACKAGE = str(Path(gmc.__file__).parent)


class Call(NamedTuple):
    """The file of the nearest caller in the package, the file called, the function; was it handed down; is the file open?"""

    caller: str
    file: str
    function: str
    handed: bool
    open: bool


def walk(leg: Callable[[], Any]) -> list[Call]:
    """Every call inside the package."""
    calls = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            above, open_files = frame.f_back, []
            while above is not None:
                name = above.f_code.co_filename
                open_files += [name[len(PACKAGE) + 1 :]] if name.startswith(PACKAGE) else []
                above = above.f_back
            file = code.co_filename[len(PACKAGE) + 1 :]
            handed = bool(code.co_flags & inspect.CO_NESTED) or code.co_varnames[:1] in (("self",), ("cls",))
            calls.append(Call("".join(open_files[:1]), file, code.co_name, handed, file in open_files))

    sys.setprofile(note)
    try:
        leg()
    finally:
        sys.setprofile(None)
    return calls


def layer(file: str) -> int:
    """Of CONTRIBUTING's drawing, the top one first."""
    page = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawing = page[page.index(" front ") : page.index("```", page.index(" front "))]
    room = "plots" if file.endswith("/plot.py") else file.split("/")[0].removesuffix(".py")
    rows = [" ".join(line[12:52] for line in part.splitlines()) for part in re.split(r"^ ---.*$", drawing, flags=re.M)]
    return next(k for k, row in enumerate(rows) if room in row.split())


def hops(calls: list[Call]) -> list[Call]:
    """Steps between files, each once, in order."""
    found: dict[tuple[str, str, str], Call] = {}
    for call in calls:
        if call.caller != call.file:
            found.setdefault((call.caller, call.file, call.function), call)
    return list(found.values())


def ways_up(calls: list[Call]) -> list[Call]:
    """Functions of higher layers that are called by name; `to_html` is a door to the report, which CONTRIBUTING allows."""
    up = [call for call in hops(calls) if call.caller and not call.handed and layer(call.file) < layer(call.caller)]
    return [call for call in up if call[:3] != ("audits/audit.py", "report.py", "write")]


def counts(calls: list[Call]) -> tuple[int, int, int]:
    """Files, hops and returns."""
    found = hops(calls)
    return len({call.file for call in calls}), len(found), sum(call.open for call in found)


def legs(folder: Path, noise_floor: bool = True) -> dict[str, Callable[[], Any]]:
    """The calls, each to be made in this order; imports and the first call's caches are made before.

    ``noise_floor``: False for fits to alpha on the sample, which is what they did at the review.
    """
    torch.manual_seed(0)
    scores, masks, groups = torch.rand(200, 8), torch.rand(200, 8) < 0.5, torch.rand(200, 2) < 0.5
    head, fresh = (
        gmc.ThresholdHead(0.1, 0.05, ["a", "b"], noise_floor=noise_floor),
        [part[100:] for part in (scores, masks, groups)],
    )
    level = gmc.ProbabilityHead(0.05, ["a", "b"], bins=5, noise_floor=noise_floor)
    data, out = folder / "data.npz", str(folder / "head.safetensors")
    words = ["calibrate", "fnr", str(data), "--target", "0.1", "--alpha", "0.05", "--groups", "site", "--out", out]
    words += [] if noise_floor else ["--no-noise-floor"]
    np.savez(data, scores=scores.numpy(), masks=masks.numpy(), site=np.where(groups[:, 0], "north", "south"))
    found: dict[str, Any] = {}

    def audit() -> None:
        found["audit"] = head.audit(*fresh)

    model = gmc.attach(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sigmoid()), head)
    return {
        "init": lambda: gmc.ThresholdHead(0.1, 0.05, ["a", "b"]),
        "fit": lambda: head.fit(scores[:100], masks[:100], groups[:100]),
        "forward": lambda: head(scores, groups),
        "audit": audit,
        "to_html": lambda: found["audit"].to_html(folder / "page.html"),
        "levels": lambda: level.fit(scores[:, 0], masks[:, 0], groups),
        "export": lambda: model.export(folder / "model.pt", example_inputs=(scores[:4], groups[:4])),
        "calibrate": lambda: command(words),
    }


def measure(noise_floor: bool = True) -> dict[str, list[Call]]:
    """The calls of each leg, after one round that imports all."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        for leg in legs(Path(scratch), noise_floor).values():
            leg()
        return {name: walk(leg) for name, leg in legs(Path(scratch), noise_floor).items()}


if __name__ == "__main__":
    plain = measure(noise_floor=False)
    for name, calls in measure().items():
        files, steps, returns = counts(calls)
        shown = f"{name:10} {files:4} files {steps:4} hops {returns:3} returns {len(ways_up(calls)):3} ways up"
        print(f"{shown}; noise_floor=False: {' '.join(f'{number:3}' for number in counts(plain[name]))}")
        if name in sys.argv[1:]:
            print(*(f"    {call.caller or '-'} -> {call.file}:{call.function}" for call in hops(calls)), sep="\n")
