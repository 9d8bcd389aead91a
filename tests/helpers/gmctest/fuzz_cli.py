"""Fuzz entries of the command line, run inside this process: the right numbers, or one line that says what is wrong."""

import contextlib
import functools
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchgmc as gmc
from gmctest import cli_files
from gmctest.fuzz_functions import HERE
from gmctest.fuzz_inputs import Arguments, Entry

Answer = tuple[int, str]


def run(*words: Any) -> Answer:
    """Exit code and what was printed; an error must be one line, and never a traceback."""
    from torchgmc.cli import main

    said, printed = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
        code = main([str(word) for word in words])
    told = said.getvalue().splitlines()
    assert code in (0, 1, 2), (code, told)
    assert "Traceback" not in said.getvalue() and all(line.startswith("torchgmc: ") for line in told), told
    assert code != 2 or len([line for line in told if "warning" not in line]) == 1, told
    return code, printed.getvalue()


@functools.cache
def files() -> tuple[Path, Path, Path]:
    """A fitted head, the data it was fitted on, and other data."""
    data, test, head = (HERE / name for name in ("cli_fit.npz", "cli_test.npz", "cli_head.safetensors"))
    cli_files.write(data, cli_files.events(60, 0))
    cli_files.write(test, cli_files.events(60, 1))
    words = ["calibrate", "probability", data, "--alpha", 0.02, "--bins", 0, "--groups", "sex", "--out", head]
    assert run(*words)[0] == 0
    return head, data, test


def options(arguments: Arguments) -> list[Any]:
    """``--name value`` of every argument that is not None."""
    return [word for name, value in arguments.items() if value is not None for word in (f"--{name}", value)]


# -- the commands -------------------------------------------------------------------------------------------------------------


def calibrate(data: Any, task: Any, **more: Any) -> Answer:
    return run("calibrate", task, data, *options(more), "--out", HERE / "cli_new.safetensors", "--json")


def calibrate_data(n: int, seed: int) -> Arguments:
    data = {"data": files()[1], "task": "probability", "alpha": 0.05, "groups": "sex", "bins": 2, "geometry": "kl"}
    return data | {"holdout": 0.3, "seed": 1, "delta": 0.1, "solver": "exact", "max-iter": 20, "scores": "probs", "range": None}


def check_calibrate(data: Arguments, answer: Answer) -> None:
    code, printed = answer
    if code < 2:
        assert gmc.load(HERE / "cli_new.safetensors").is_fitted and json.loads(printed)["task"] == data["task"]


def audit(head: Any, data: Any, **more: Any) -> Answer:
    return run("audit", head, data, *options(more), "--json")


def audit_data(n: int, seed: int) -> Arguments:
    head, _, test = files()
    need = ("unviolated", "holds", "certified", "nothing")[seed % 4]
    return {"head": head, "data": test, "delta": 0.1, "alpha": 0.05, "require": need, "groups": None, "chunk": 16}


def monitor(head: Any, data: Any, **more: Any) -> Answer:
    return run("monitor", head, data, *options(more), "--json")


def monitor_data(n: int, seed: int) -> Arguments:
    head, _, test = files()
    return {"head": head, "data": test, "delta": 0.1, "alpha": 0.05, "groups": None, "chunk": 16}


def check_monitor(data: Arguments, answer: Answer) -> None:
    code, printed = answer
    assert code == 2 or json.loads(printed)["alarm"] is (code == 1)


def member(arrays: cli_files.Arrays) -> torch.Tensor:
    return torch.from_numpy(np.stack([arrays["sex"] == 0, arrays["sex"] == 1], 1))


def check_audit(data: Arguments, answer: Answer) -> None:
    code, printed = answer
    if code == 2:
        return
    found = json.loads(printed)
    assert found["passed"] == (code == 0)
    if data["data"] == files()[2]:
        arrays = cli_files.events(60, 1)
        probs = gmc.load(files()[0])(torch.from_numpy(arrays["probs"]), member(arrays)).double().numpy()
        worst = max(abs(float(((probs - arrays["y"]) * (arrays["sex"] == k)).mean())) for k in (0, 1))
        assert abs(found["max_violation"] - worst) < 1e-6


def apply(head: Any, data: Any, out: Any, **more: Any) -> Answer:
    return run("apply", head, data, "--out", out, *options(more))


def apply_data(n: int, seed: int) -> Arguments:
    head, _, test = files()
    return {"head": head, "data": test, "out": HERE / "cli_out.npz", "name": "found", "chunk": 16, "scores": None}


def check_apply(data: Arguments, answer: Answer) -> None:
    if answer[0] == 0 and data["data"] == files()[2] and data["out"] == HERE / "cli_out.npz":
        arrays = cli_files.events(60, 1)
        expected = gmc.load(files()[0])(torch.from_numpy(arrays["probs"]), member(arrays))
        with np.load(data["out"]) as written:
            np.testing.assert_allclose(written["probs" if data["name"] is None else str(data["name"])], expected.numpy(), atol=1e-7)


def export(head: Any, out: Any, **more: Any) -> Answer:
    return run("export", head, "--out", out, *options(more))


def export_data(n: int, seed: int) -> Arguments:
    return {"head": files()[0], "out": HERE / "cli.pt", "format": "torchscript", "example": None, "scores": None}


def check_export(data: Arguments, answer: Answer) -> None:
    if answer[0] == 0:
        from torchgmc.export import metadata

        assert metadata(str(data["out"]))["head"] == "ProbabilityHead"


def demo(name: Any, out: Any, **more: Any) -> Answer:
    return run("demo", name, "--out", out, *options(more))


def reproduce(name: Any, **more: Any) -> Answer:
    return run("reproduce", name, *options(more), "--quick")


def refused(data: Arguments, answer: Answer) -> None:
    """Nothing is run here (tests/paper does): the folder given is a file, or has no data."""
    assert answer[0] == 2


ENTRIES = [
    Entry("cli calibrate probability", calibrate_data, calibrate, check_calibrate, share=0.5),
    Entry("cli audit", audit_data, audit, check_audit, share=0.3),
    Entry("cli monitor", monitor_data, monitor, check_monitor, share=0.3),
    Entry("cli apply", apply_data, apply, check_apply, share=0.5),
    Entry("cli export", export_data, export, check_export, share=0.3),
    Entry("cli demo", lambda n, s: {"name": "fnr", "out": files()[0], "seed": 1, "model": None}, demo, refused, ("out",)),
    Entry(
        "cli reproduce",
        lambda n, s: {"name": "tree", "data": HERE, "out": HERE / "cli_results", "seeds": 1, "jobs": 1, "set": None},
        reproduce,
        refused,
        ("data", "out"),
    ),
]
