"""The command line against the Python interface: every task, every format, the same state."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchgmc as gmc
from gmctest import subprocess_env
from gmctest.cli_files import CASES, FORMATS, N, command, groups, program, read_array, side_files, tensors, write
from torchgmc.cli import main


def head_words(folder: Path, name: str, data: Path) -> list[str]:
    return [*command(name, folder, CASES[name].words), str(data), "--groups", "sex,site"]


# -- the same state as the Python interface ------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_every_task_in_every_format(name: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    case, head_file = CASES[name], tmp_path / "head.safetensors"
    side_files(tmp_path)
    arrays, fresh = case.data(N, 0), case.data(N, 1)
    data, test = write(tmp_path / f"data.{suffix}", arrays), write(tmp_path / f"test.{suffix}", fresh)

    code = main(["calibrate", *head_words(tmp_path, name, data), "--out", str(head_file), "--chunk", "70", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert code == 0 and printed["groups"] == list(groups(arrays).names)
    if suffix == "csv":  # text holds float64
        arrays |= {key: value.astype(np.float64) for key, value in arrays.items() if value.dtype.kind == "f"}
        fresh |= {key: value.astype(np.float64) for key, value in fresh.items() if value.dtype.kind == "f"}
        read = {key: read_array(data, key) for key in case.observe}
        assert all(np.array_equal(read[key], arrays[key]) for key in read)
    made = case.make(list(groups(arrays).names)).fit(*tensors(arrays, case.observe), groups(arrays).membership)
    head = gmc.load(head_file)
    for key, value in made.state_dict().items():
        torch.testing.assert_close(head.state_dict()[key], value, rtol=1e-9, atol=1e-12, msg=key)
    assert printed["fit"]["iterations"] == made.report.iterations
    assert printed["fit"]["worst_after"] == pytest.approx(float(made.report.violations_after.abs().max()))

    assert main(["audit", str(head_file), str(test), "--chunk", "64", "--json", "--require", "nothing"]) == 0
    found = json.loads(capsys.readouterr().out)
    labels = ("labels",) if name == "text" else ()
    batch = dict(zip((*case.observe, *labels), tensors(fresh, (*case.observe, *labels)), strict=True))
    expected = gmc.audit(made, {**batch, "groups": groups(fresh).membership})
    assert found["max_violation"] == pytest.approx(expected.max_violation)
    assert found["table"]["group"] == expected.table["group"] and found["cost"] == pytest.approx(expected.cost)

    out = tmp_path / f"out.{suffix}"
    assert main(["apply", str(head_file), str(test), "--out", str(out), "--chunk", "64"]) == 0
    assert capsys.readouterr().out == f"{case.output} {(N, *expected_shape(name, fresh))}: {out}\n"
    given = [groups(fresh).membership] if name == "quantile" else [*tensors(fresh, case.observe[:1]), groups(fresh).membership]
    result = read_array(out, case.output)
    torch.testing.assert_close(torch.from_numpy(result).double(), made(*given).double(), rtol=1e-6, atol=1e-6)


def expected_shape(name: str, arrays: dict[str, Any]) -> tuple[int, ...]:
    return {"fnr": (12,), "tree": (), "text": (20,), "probability": (), "quantile": ()}[name]


@pytest.mark.parametrize(("name", "suffix"), [("fnr", "npz"), ("text", "csv")])
def test_the_program_itself(name: str, suffix: str, tmp_path: Path) -> None:
    """A real process: warnings are errors, a pipe gets no progress bar, JSON is alone on stdout."""
    side_files(tmp_path)
    case = CASES[name]
    data = write(tmp_path / f"data.{suffix}", case.data(N, 0))
    words = [*head_words(tmp_path, name, data), "--no-noise-floor"]  # so that alpha is reached, and nothing need be said
    done = program(
        "calibrate", *words, "--out", "head.safetensors", "--holdout", "0.3", "--report", "r.html", "--json", cwd=tmp_path
    )
    assert done.stderr == "", done.stderr
    content = json.loads(done.stdout)
    assert content["files"] == {"head": "head.safetensors", "report": "r.html"}
    assert content["audit"]["num_examples"] == 72 and done.returncode == int(content["audit"]["violated"])
    page = (tmp_path / "r.html").read_text()
    assert content["audit"]["certificate"] in page and "torchgmc calibrate" in page
    assert content["head"] == type(gmc.load(tmp_path / "head.safetensors")).__name__


# -- what is shown -------------------------------------------------------------------------------------------------------------


def test_every_command_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name in ("calibrate", "observe", "merge", "audit", "apply", "export", "demo"):
        assert name in listed
        assert main([name, "--help"]) == 0
        assert f"Example: torchgmc {name} " in " ".join(capsys.readouterr().out.split())


def test_the_list_of_commands_is_not_cut_off(capsys):
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out.split("Commands:")[1].strip().splitlines()
    assert len(listed) == 9 and not any(line.endswith("...") for line in listed)
    assert [line.split()[0] for line in listed] == [
        *("calibrate", "observe", "merge", "audit", "monitor", "apply", "export", "demo", "reproduce"),
    ]


ENV = subprocess_env()


PEAK = """
import resource, sys
import torchgmc.cli.app as app
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
code = app.run(sys.argv[1:])
print(code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, file=sys.stderr)
"""


def test_a_command_needs_less_memory_than_its_input(tmp_path: Path) -> None:
    """160 MB of scores (a few once compressed) are calibrated on, audited and applied; the process grows by far less."""
    rng = np.random.default_rng(0)
    scores, masks = rng.random((100, 100, 200), dtype=np.float32), rng.random((100, 100, 200)) < 0.3
    for name, times in (("one", 1), ("all", 20)):
        tiled = {
            "scores": np.tile(scores, (times, 1, 1)),
            "masks": np.tile(masks, (times, 1, 1)),
            "site": np.tile(np.arange(100) % 3, times),
        }
        np.savez(tmp_path / f"{name}.npz", **tiled)
    options = ["fnr", "--target", "0.1", "--alpha", "0.01", "--groups", "site", "--chunk", "50"]
    grown = {}
    for name in ("one", "all"):
        words = ["calibrate", *options, f"{name}.npz", "--out", f"{name}.safetensors", "--json"]
        done = subprocess.run([sys.executable, "-c", PEAK, *words], capture_output=True, text=True, cwd=tmp_path, env=ENV)
        code, grown[name] = map(int, done.stderr.split())
        assert code == 0
    size = 20 * scores.nbytes // 1024
    assert grown["all"] - grown["one"] < 0.2 * size, (grown, size)
    # Twenty times the same images: the same thresholds.
    small, large = (gmc.load(tmp_path / f"{name}.safetensors").state_dict()["offsets"] for name in ("one", "all"))
    torch.testing.assert_close(small, large)


CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}


def test_an_interrupted_command_leaves_the_old_file(tmp_path: Path) -> None:
    """Ctrl-C, kill and kill -9, each while the output is being written, row by row."""
    n = 400_000
    scores, site = np.random.default_rng(0).random(n), np.arange(n) % 2
    np.savez(tmp_path / "d.npz", scores=scores, site=site)
    words = ["quantile", "--target", "0.9", "--alpha", "0.01", "--groups", "site"]
    assert main(["calibrate", *words, str(tmp_path / "d.npz"), "--out", str(tmp_path / "h.safetensors")]) == 0
    started = {}
    for number in CODES:
        folder = tmp_path / number.name
        folder.mkdir()
        (folder / "o.npz").write_bytes(b"old")
        line = [
            sys.executable,
            "-m",
            "torchgmc",
            "apply",
            "h.safetensors",
            "d.npz",
            "--out",
            str(folder / "o.npz"),
            "--chunk",
            "1",
        ]
        started[number] = subprocess.Popen(
            line,
            cwd=tmp_path,
            env=ENV,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
        )
    for number, process in started.items():
        folder, deadline = tmp_path / number.name, time.monotonic() + 240
        while not any(path.name.endswith(".part") and path.stat().st_size for path in folder.iterdir()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
    for number, process in started.items():
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (CODES[number], "")
        folder = tmp_path / number.name
        assert (folder / "o.npz").read_bytes() == b"old"
        if number != signal.SIGKILL:  # nobody can clean up after kill -9; the name of the rest begins with a dot
            assert [path.name for path in folder.iterdir()] == ["o.npz"]
            assert err.count("\n") == 1 and err.startswith("torchgmc: ")


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"torchgmc {gmc.__version__}\n"
    assert main([]) == 0 and main(["demo", "--help"]) == 0
    assert "Example: torchgmc demo" in capsys.readouterr().out


HOOK = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl+C, in the middle of the imports
            exec("for _ in range(10**6): pass")  # as of a dataclass: Python would remember the interrupt

sys.meta_path.insert(0, Interrupt())
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


def test_interrupted_while_it_imports(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    env = dict(ENV)
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    script = "import sys; from torchgmc.cli import main; sys.exit(main())"  # as pip installs it
    for line in (["-m", "torchgmc"], ["-m", "torchgmc.cli"], ["-c", script]):
        done = subprocess.run([sys.executable, *line, "audit"], capture_output=True, text=True, env=env)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "torchgmc: interrupted\n")
