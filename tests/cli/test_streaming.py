"""Files larger than memory are read in blocks; an interrupted command leaves the old file or the new one."""

import signal
import subprocess
import sys
import time
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchgmc as gmc
from gmctest import subprocess_env
from gmctest.cli_files import FORMATS, images, write

pytest.importorskip("typer")
pytest.importorskip("rich")
from torchgmc.cli import main, tables
from torchgmc.cli.membership import Membership, Options
from torchgmc.cli.tables import open_table
from torchgmc.cli.writers import write_rows

ENV = subprocess_env()


# -- blocks --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", FORMATS)
def test_blocks_are_small_and_add_up_to_the_file(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    arrays = images(500, 0)
    table = open_table(write(tmp_path / f"d.{suffix}", arrays))
    monkeypatch.setattr(tables, "BLOCK", 3000)
    names = ["scores", "masks", "site"]
    assert table.count(names) == 500 and set(names) <= set(table.names)
    for rows in (None, 1, 7, 500, 1000):
        blocks = list(table.blocks(names, [], rows))
        assert [block.start for block in blocks[1:]] == [block.stop for block in blocks[:-1]]
        assert (blocks[0].start, blocks[-1].stop) == (0, 500)
        largest = max(block.stop - block.start for block in blocks)
        assert largest <= (rows or 200)
        for name in names:
            joined = np.concatenate([block.arrays[name] for block in blocks])
            assert joined.shape == arrays[name].shape
            np.testing.assert_array_equal(joined.astype(np.float64), arrays[name].astype(np.float64))


@pytest.mark.parametrize("how", [np.savez, np.savez_compressed])
def test_reading_an_npz_does_not_hold_it_in_memory(how: Any, tmp_path: Path) -> None:
    values = np.tile(np.arange(1000, dtype=np.float32), (5000, 1))  # 20 MB
    how(tmp_path / "d.npz", values=values)
    del values
    table = open_table(tmp_path / "d.npz")
    tracemalloc.start()  # numpy reports to it
    total = sum(float(block.arrays["values"].sum(dtype=np.float64)) for block in table.blocks(["values"], [], 100))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 5000 * 1000 * 999 / 2
    assert peak < 4e6  # blocks are 0.4 MB; one is made while another is looked at


def test_arrays_in_fortran_order_and_of_foreign_bytes(tmp_path: Path) -> None:
    values = np.arange(60.0).reshape(20, 3)
    np.savez(tmp_path / "d.npz", f=np.asfortranarray(values), big=values.astype(">f4"), half=values.astype(np.float16))
    for block in open_table(tmp_path / "d.npz").blocks(["f", "big", "half"], [], 6):
        for name in ("f", "big", "half"):
            np.testing.assert_array_equal(block.arrays[name].astype(np.float64), values[block.start : block.stop])
            torch.from_numpy(block.arrays[name])  # the machine's own bytes


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
    options = ["--task", "fnr", "--target", "0.1", "--alpha", "0.01", "--groups", "site", "--chunk", "50"]
    grown = {}
    for name in ("one", "all"):
        words = ["calibrate", f"{name}.npz", *options, "--out", f"{name}.safetensors", "--json"]
        done = subprocess.run([sys.executable, "-c", PEAK, *words], capture_output=True, text=True, cwd=tmp_path, env=ENV)
        code, grown[name] = map(int, done.stderr.split())
        assert code == 0
    size = 20 * scores.nbytes // 1024
    assert grown["all"] - grown["one"] < 0.2 * size, (grown, size)
    # Twenty times the same images: the same thresholds.
    small, large = (gmc.load(tmp_path / f"{name}.safetensors").state_dict()["offsets"] for name in ("one", "all"))
    torch.testing.assert_close(small, large)


# -- groups --------------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(data=st.data(), n=st.integers(1, 30), rows=st.integers(1, 8), seed=st.integers(0, 2**16))
def test_groups_learned_in_blocks_are_those_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, n: int, rows: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    columns = {
        "sex": rng.choice(np.array(["f", "m", "x"]), n),
        "site": rng.integers(-1, 12, n),
        "old": rng.random(n) < 0.5,
        "age": rng.integers(20, 80, n).astype(np.float64),
    }
    intersections = data.draw(st.integers(1, 4))
    options = Options(intersections, {"age": [40.0, 60.0]}, min_size=0, overall=data.draw(st.booleans()))
    expected = gmc.Groups.from_columns(
        columns, intersections=intersections, bins={"age": [40.0, 60.0]}, min_size=0, overall=options.overall
    )
    suffix = data.draw(st.sampled_from(["npz", "csv"]))
    table = open_table(write(tmp_path_factory.mktemp("groups") / f"d.{suffix}", columns))
    learned = Membership.learn(table, list(columns), options, rows)
    again = Membership.from_json(_through_json(learned.to_json()))
    for member in (learned, again):
        assert member.names == list(expected.names)
        found = [member.of(block) for block in table.blocks(list(member.matrices), member.columns, rows)]
        assert torch.cat(found).equal(expected.membership)


def _through_json(content: Any) -> Any:
    import json

    return json.loads(json.dumps(content))


@pytest.mark.parametrize("suffix", ["npz", "safetensors", "parquet", "csv"])
def test_what_is_written_in_blocks_is_read_back(suffix: str, tmp_path: Path) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    rng = np.random.default_rng(0)
    for values in (rng.random((50, 3)).astype(np.float32), rng.integers(0, 9, 50), rng.random(50), rng.random((50, 2)) < 0.5):
        path = tmp_path / f"o.{suffix}"
        assert write_rows(path, "out", np.array_split(values, 7), 50) == values.shape
        joined = np.concatenate([block.arrays["out"] for block in open_table(path).blocks(["out"])])
        np.testing.assert_array_equal(joined.astype(values.dtype), values)
        assert suffix == "csv" or joined.dtype == values.dtype
    if suffix == "npz":
        np.testing.assert_array_equal(np.load(path)["out"], values)
    if suffix == "safetensors":
        from safetensors.numpy import load_file

        np.testing.assert_array_equal(load_file(path)["out"], values)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "o.npz"
    path.write_bytes(b"old")

    def broken() -> Any:
        yield np.zeros(3)
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        write_rows(path, "out", broken(), 6)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


# -- interruptions -------------------------------------------------------------------------------------------------------------

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}


def test_an_interrupted_command_leaves_the_old_file(tmp_path: Path) -> None:
    """Ctrl-C, kill and kill -9, each while the output is being written, row by row."""
    n = 400_000
    scores, site = np.random.default_rng(0).random(n), np.arange(n) % 2
    np.savez(tmp_path / "d.npz", scores=scores, site=site)
    words = ["--task", "quantile", "--target", "0.9", "--alpha", "0.01", "--groups", "site"]
    assert main(["calibrate", str(tmp_path / "d.npz"), *words, "--out", str(tmp_path / "h.safetensors")]) == 0
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
