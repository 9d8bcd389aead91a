"""``torchgmc reproduce``: the frame (resuming, refusing, processes), and what it makes of the rows."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from gmctest import made_up_data, subprocess_env

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from torchgmc.cli import main
from torchgmc_paper import EXPERIMENTS, frame, tree


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return made_up_data.hierarchy(tmp_path_factory.mktemp("data"))


LOOSE = ["--set", "alpha=0.1", "--set", "tight=0.08", "--set", "steps=10"]  # fits of a few steps


def command(data, out, *words, seeds=3):
    return ["reproduce", "tree", "--data", str(data), "--out", str(out), "--quick", *LOOSE, "--seeds", str(seeds), *words]


def run(data, out, *words, seeds=3):
    return main(command(data, out, *words, seeds=seeds))


def kept(out, name="tree"):
    return {path.name: path.read_text() for path in sorted((out / name / "seeds").glob("seed-*.json"))}


@pytest.fixture(scope="module")
def done(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("done")
    assert run(data, out) == 0
    return out


# -- the command ---------------------------------------------------------------------------------------------------------


def test_page_and_tables_hold_what_the_seeds_hold(done):
    page = (done / "tree.md").read_text()
    assert "torchgmc reproduce tree --data DIR --seeds 3 --quick --set alpha=0.1" in page and "torch " in page and "cores" in page
    assert "/tmp" not in page and str(done) not in page and os.uname().nodename not in page
    with (done / "tree.csv").open() as file:
        table = list(csv.DictReader(file))
    rows = [row for text in kept(done).values() for row in json.loads(text)["rows"]]
    for line in (table[0], table[-2]):
        same = [r for r in rows if all(r[k] == line[k] for k in ("part", "measure", "method", "group"))]
        size = np.abs([r["deviation"] for r in same])
        assert len(same) == 3
        np.testing.assert_allclose([float(line["mean"]), float(line["sd"])], [size.mean(), size.std(ddof=1)], rtol=1e-4)
        np.testing.assert_allclose(float(line["se"]), size.std(ddof=1) / 3**0.5, rtol=1e-4)
    png = (done / "tree.png").read_bytes()
    assert png[:4] == b"\x89PNG" and len(png) < 200_000
    assert {row["method"] for row in table} == set(tree.METHODS)


def test_finished_seeds_are_kept_and_missing_ones_run_again(data, done, tmp_path):
    out = tmp_path
    assert run(data, out, seeds=2) == 0
    before = kept(out)
    stamp = (out / "tree/seeds/seed-0000.json").stat().st_mtime_ns
    (out / "tree/seeds/seed-0001.json").unlink()
    assert run(data, out, seeds=3) == 0
    assert (out / "tree/seeds/seed-0000.json").stat().st_mtime_ns == stamp
    assert kept(out) == kept(done) and kept(out).items() >= before.items()


def test_processes_find_what_one_process_finds(data, done, tmp_path):
    assert run(data, tmp_path, "--jobs", "2") == 0
    assert kept(tmp_path) == kept(done)
    assert (tmp_path / "tree.csv").read_text() == (done / "tree.csv").read_text()


def test_other_settings_are_refused_not_mixed(data, tmp_path, capsys):
    assert run(data, tmp_path, seeds=1) == 0
    before = kept(tmp_path)
    assert run(data, tmp_path, "--set", "alpha=0.05", seeds=1) == 2
    error = capsys.readouterr().err
    assert "setting.alpha" in error and "--redo" in error and kept(tmp_path) == before
    other = made_up_data.hierarchy(tmp_path / "other", seed=1)
    assert run(other, tmp_path, seeds=1) == 2
    assert "data.wos" in capsys.readouterr().err
    assert run(data, tmp_path, "--set", "alpha=0.05", "--redo", seeds=2) == 0
    assert len(kept(tmp_path)) == 2 and kept(tmp_path)["seed-0000.json"] != before["seed-0000.json"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["reproduce", "weather"], "choose from fnr, tree, text"),
        (["reproduce", "tree", "--data", "nowhere"], "does not exist"),
        (["reproduce", "tree"], "TORCHGMC_DATA"),
        (["reproduce", "tree", "--set", "alpha"], "NAME=VALUE"),
        (["reproduce", "tree", "--set", "steps=many"], "is not a valid int"),
        (["reproduce", "tree", "--set", "target=true"], "is not a valid float"),
        (["reproduce", "all", "--set", "alpha=1"], "one experiment"),
    ],
)
def test_mistakes_are_one_line(words, hint, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHGMC_DATA", raising=False)
    if "--set" in words:
        monkeypatch.setenv("TORCHGMC_DATA", str(data))
    assert main(words) == 2
    error = capsys.readouterr().err
    assert hint in error and error.count("\n") == 1


def test_settings_change_by_name():
    changed = frame._changed(tree.Setting(), ["alpha=1", 'parts=["wos"]', "kind=crossfit", "limit=7"])
    assert (changed.alpha, changed.parts, changed.kind, changed.limit) == (1.0, ("wos",), "crossfit", 7)
    assert isinstance(changed.alpha, float)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGINT])
def test_a_blow_in_the_middle_costs_nothing_but_time(blow, data, done, tmp_path):
    words = command(data, tmp_path, "--jobs", "2", seeds=400)
    environment = subprocess_env()
    process = subprocess.Popen(
        [sys.executable, "-m", "torchgmc.cli", *words],
        env=environment,
        start_new_session=True,
        stderr=subprocess.PIPE,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    try:
        while len(kept(tmp_path)) < 2:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        workers = _children(process.pid)
        assert len(workers) >= 2
        process.send_signal(blow)
        process.communicate(timeout=60)
        assert process.returncode == (-signal.SIGKILL if blow == signal.SIGKILL else 130)
        end = time.monotonic() + 30
        while any(map(_alive, workers)) and time.monotonic() < end:
            time.sleep(0.05)
        assert not any(map(_alive, workers)), "a worker outlived its parent"
    finally:
        if process.poll() is None:
            process.kill()
    assert 2 <= len(kept(tmp_path)) < 400
    assert run(data, tmp_path) == 0
    assert {name: kept(tmp_path)[name] for name in kept(done)} == kept(done)
    assert not list(tmp_path.rglob("*.part")) or blow == signal.SIGKILL


def _children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=True)
    return [int(word) for word in found.stdout.split()]


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_every_experiment_keeps_the_contract():
    for name in EXPERIMENTS:
        module = frame.load(name)
        assert name == module.NAME and module.SEEDS in (10, 50) and set(module.OURS) < set(module.METHODS)
        assert isinstance(module.QUICK, module.Setting) and isinstance(module.Setting().alpha, float)


def test_cache_survives_nothing_half_written(tmp_path):
    path = tmp_path / "scores.safetensors"
    with pytest.raises(RuntimeError, match="power"):
        frame.cached(path, {"a": 1}, _no_power)
    assert not list(tmp_path.iterdir())
    assert torch.equal(frame.cached(path, {"a": 1}, lambda: {"x": torch.arange(3)})["x"], torch.arange(3))
    assert torch.equal(frame.cached(path, {"a": 1}, _no_power)["x"], torch.arange(3))
    with pytest.raises(RuntimeError, match="power"):
        frame.cached(path, {"a": 2}, _no_power)


def _no_power():
    raise RuntimeError("power failed")
