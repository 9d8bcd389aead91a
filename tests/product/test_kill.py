"""kill -9 at random moments of a command: what is on disk is the old file or the new one, and the command run again completes.

One process, this file run as a script, imports everything once and forks a child for every kill.
"""

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gmctest import subprocess_env

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork") or sys.platform == "darwin", reason="children are forked"),
]


def ask(folder: Path, name: str, kills: int) -> dict[str, int]:
    """What the process below found."""
    line = [sys.executable, __file__, str(folder), name, str(kills)]
    done = subprocess.run(line, env=subprocess_env(), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("name", "kills"), [("calibrate", 12), ("torchscript", 8), ("torch.export", 5), ("reproduce", 5)])
def test_killed_at_random_moments(name: str, kills: int, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    if name == "reproduce":
        pytest.importorskip("matplotlib")
    found = ask(tmp_path, name, kills)
    assert found["killed"] + found["finished"] == kills and found["killed"] > 0


# -- the process that kills ---------------------------------------------------------------------------------------------------


def child(work: Callable[[], int], delay: float | None) -> bool:
    """Do the work in a forked process; killed after the delay. Was it killed before it ended?"""
    process = os.fork()
    if process == 0:
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            code = work()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            code = 99
        os._exit(code)
    if delay is not None:
        time.sleep(delay)
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0, os.WEXITSTATUS(status)
    return False


def torture(folder: Path, name: str, kills: int) -> dict[str, int]:
    import torch

    torch.set_num_threads(1)
    work, check = commands(folder, name)[name]
    assert not child(work, None)
    expected = check(True)  # imports here what a forked child then has already
    started = time.monotonic()
    assert not child(work, None)
    whole = time.monotonic() - started
    dice = random.Random(name)
    found = {"killed": 0, "finished": 0}
    for _ in range(kills):
        found["killed" if child(work, dice.uniform(0.02, 1.0) * whole) else "finished"] += 1
        check(False)
    assert not child(work, None)
    assert check(True) == expected, "a run after kills gives another result"
    return found


def commands(folder: Path, name: str) -> dict[str, tuple[Callable[[], int], Callable[[bool], object]]]:
    """Each command, and what looks at its files: raises if one is damaged, returns what a whole run gives."""
    import torch

    import torchgmc as gmc
    from gmctest import cli_files, made_up_data
    from torchgmc.cli import main

    importlib.import_module("torchgmc.cli.app")  # here once, not in every child
    head, data = folder / "head.safetensors", folder / "data.npz"
    cli_files.write(data, cli_files.images(1000, 0))
    words = ["calibrate", "fnr", str(data), "--groups", "sex", "--alpha", "0.01", "--target", "0.1", "--chunk", "50"]
    assert not child(lambda: main([*words, "--out", str(head)]), None)
    probe = torch.from_numpy(cli_files.images(5, 1)["scores"])
    member = torch.eye(2, dtype=torch.bool)[torch.arange(5) % 2]

    def heads(whole: bool) -> object:
        return gmc.load(head)(probe, member).tolist()

    def exported(kind: str) -> tuple[Callable[[], int], Callable[[bool], object]]:
        path = folder / ("model.pt" if kind == "torchscript" else "model.pt2")

        def look(whole: bool) -> object:
            import warnings

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = torch.jit.load(path) if kind == "torchscript" else torch.export.load(path).module()
            return model(probe, member).tolist()

        return lambda: main(["export", str(head), "--format", kind, "--out", str(path)]), look

    out, texts = folder / "results", folder / "texts"

    def reproduce() -> int:
        loose = ["--set", "alpha=0.1", "--set", "tight=0.08", "--set", "steps=10"]  # fits of a few steps
        return main(["reproduce", "tree", "--data", str(texts), "--out", str(out), "--quick", *loose, "--seeds", "2"])

    def results(whole: bool) -> object:
        for path in out.rglob("*.json") if out.exists() else ():
            json.loads(path.read_text())  # no half of a file under its final name
        for path in out.rglob("*.jsonl") if out.exists() else ():
            lines = path.read_text().splitlines()
            assert all(json.loads(line) is not None for line in lines[:-1])
        names = [str(path.relative_to(out)) for path in out.iterdir() if path.is_file()]
        return sorted(name for name in names if not name.endswith(".part")) if whole else None  # a kill may leave one

    if not texts.exists():
        texts.mkdir()
        made_up_data.hierarchy(texts)
    for module in ("matplotlib.pyplot", "torchgmc_paper.figures", "torchgmc_paper.tree") if name == "reproduce" else ():
        importlib.import_module(module)  # here once, not in every child
    return {
        "calibrate": (lambda: main([*words, "--out", str(head)]), heads),
        "torchscript": exported("torchscript"),
        "torch.export": exported("torch.export"),
        "reproduce": (reproduce, results),
    }


if __name__ == "__main__":
    print(json.dumps(torture(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
