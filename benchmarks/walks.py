"""How many files of the package a call walks through, and how often it crosses from one to another.

$ python -m benchmarks.walks            # the table
$ python -m benchmarks.walks fit        # the hops of one leg, in order
"""

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

import torchgmc as gmc
from torchgmc.cli import main as command

PACKAGE = str(Path(gmc.__file__).parent)


def walk(leg: Callable[[], Any]) -> list[tuple[str, str, str]]:
    """Every call inside the package: the file of the nearest caller there, the file called, and the function."""
    calls = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            above = frame.f_back
            while above is not None and not above.f_code.co_filename.startswith(PACKAGE):
                above = above.f_back
            caller = above.f_code.co_filename if above is not None else ""
            calls.append((caller[len(PACKAGE) + 1 :], code.co_filename[len(PACKAGE) + 1 :], code.co_name))

    sys.setprofile(note)
    try:
        leg()
    finally:
        sys.setprofile(None)
    return calls


def legs(folder: Path) -> dict[str, Callable[[], Any]]:
    """The calls, each to be made in this order; imports and the first call's caches are made before."""
    torch.manual_seed(0)
    scores, masks, groups = torch.rand(200, 8), torch.rand(200, 8) < 0.5, torch.rand(200, 2) < 0.5
    head, fresh = gmc.ThresholdHead(0.1, 0.05, ["a", "b"]), [part[100:] for part in (scores, masks, groups)]
    level = gmc.ProbabilityHead(0.05, ["a", "b"], bins=5)
    data, out = folder / "data.npz", str(folder / "head.safetensors")
    words = ["calibrate", "fnr", str(data), "--target", "0.1", "--alpha", "0.05", "--groups", "site", "--out", out]
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


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for leg in legs(Path(scratch)).values():
            with contextlib.redirect_stdout(io.StringIO()):
                leg()  # imports
        for name, leg in legs(Path(scratch)).items():
            with contextlib.redirect_stdout(io.StringIO()):
                calls = walk(leg)
            crossing = [call for call in calls if call[0] != call[1]]
            kinds, files = len(set(crossing)), len({call[1] for call in calls})
            print(f"{name:10} {files:4} files {len(calls):5} calls {len(crossing):5} between files, {kinds:4} different")
            if name in sys.argv[1:]:
                print(*(f"    {before or '-'} -> {after}:{function}" for before, after, function in crossing), sep="\n")
