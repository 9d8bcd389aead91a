"""Files and names made to mislead: one line, no traceback, and nothing that a terminal obeys."""

import itertools
from pathlib import Path

import numpy as np
import pytest

import torchgmc as gmc
from gmctest import cli_files
from gmctest.crafted import crafted
from gmctest.fuzz_cli import run
from gmctest.fuzz_inputs import TALLY

#: One crafted file in so many is tried every time, every second one in the slow run; test_io_crafted.py opens all of them.
SHARE = 60


def try_all(task: str, folder: Path, share: int) -> int:
    cli_files.side_files(folder)
    case, head = cli_files.CASES[task], folder / "head.safetensors"
    data = cli_files.write(folder / "data.npz", case.data(60, 0))
    words = cli_files.command(task, folder, case.words)
    assert run("calibrate", *words, data, "--groups", "sex", "--out", head)[0] == 0
    tried = 0
    for place, one in enumerate(itertools.islice(crafted(head), len(task), None, share)):
        bad = folder / "crafted.safetensors"
        bad.write_bytes(one.data)
        apply, export = ("apply", bad, data, "--out", folder / "out.npz"), ("export", bad, "--out", folder / "out.pt")
        lines = [("audit", bad, data)]
        for line in lines:
            try:
                code, _ = run(*line)
            except Exception as error:  # `run` refuses tracebacks and more than one line
                raise AssertionError(f"{line[0]} with {one.name}: {type(error).__name__}: {error}") from error
            TALLY[f"crafted cli {task}"]["error" if code == 2 else "right"] += 1
            if line[0] == "audit":  # all commands open a file in the same way: after one refused it, the others try one in five
                lines += [apply] * (code != 2 or place % 5 == 0) + [export] * (place % 10 == 0)
        tried += 1
    return tried


@pytest.mark.parametrize("task", cli_files.CASES)
def test_crafted_heads_are_one_line(task: str, tmp_path: Path) -> None:
    assert try_all(task, tmp_path, SHARE) > 5


@pytest.mark.slow
@pytest.mark.parametrize("task", cli_files.CASES)
def test_many_crafted_heads(task: str, tmp_path: Path) -> None:
    assert try_all(task, tmp_path, 2) > 150


@pytest.mark.parametrize("scores", [{}, {"dtype": "float32"}, {"shape": [3]}, {"shape": [10**9], "dtype": "float32"}, {"shape": 3}])
def test_notes_of_scores_that_cannot_be(scores: dict[str, object], tmp_path: Path) -> None:
    code, head = cli_files.calibrated(tmp_path, cli_files.images(60, 0), *cli_files.FNR, "--groups", "sex")
    assert code in (0, 1)
    gmc.save(head, tmp_path / "bad.safetensors", notes={"scores": scores})
    assert run("export", tmp_path / "bad.safetensors", "--out", tmp_path / "o.pt")[0] == 2


@pytest.mark.parametrize("trick", ["\x1b[31mred\x1b[0m", "a\nsex=g  +0.0000", "x\ry", "\ud800", "\u202eturned"], ids=range(5))
def test_a_label_cannot_write_to_the_terminal(trick: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torchgmc.cli import main

    arrays = cli_files.images(120, 0)
    arrays["sex"] = np.where(arrays["sex"] == 0, "f", trick)
    data, head = cli_files.write(tmp_path / "d.npz", arrays), tmp_path / "h.safetensors"
    line = ["calibrate", *cli_files.FNR, str(data), "--groups", "sex", "--out", str(head), "--report", str(tmp_path / "c.html")]
    assert main(line) in (0, 1)
    assert main(["audit", str(head), str(data), "--report", str(tmp_path / "r.html")]) in (0, 1)
    told = capsys.readouterr()
    for text in (told.out, told.err):
        assert all(one.isprintable() for one in text.splitlines()) and "\r" not in text
    assert "sex=g" not in [one.split("  ")[0].strip() for one in told.out.splitlines()]
    for page in ("c.html", "r.html"):
        assert trick not in (tmp_path / page).read_text(encoding="utf-8")
    assert gmc.load(head).groups == [name for name in gmc.load(head).groups if name.isprintable()]


def test_an_error_cannot_either(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torchgmc.cli import main

    name = "\x1b[2Jgone"
    data = cli_files.write(tmp_path / "d.npz", cli_files.images(20, 0) | {name: np.zeros(20)})
    assert main(["calibrate", *cli_files.FNR, str(data), "--groups", "none", "--out", str(tmp_path / "h.safetensors")]) == 2
    assert main(["audit", str(tmp_path / name), str(data)]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_matrices_keep_their_order_in_a_file(tmp_path: Path) -> None:
    """Written in alphabetical order, they gave each group the other's threshold."""
    arrays = cli_files.images(120, 0)
    sex, site = arrays.pop("sex"), arrays.pop("site")
    arrays |= {"zeta": np.stack([sex == 0, sex == 1], 1), "alpha": np.stack([site == k for k in (1, 2, 3)], 1)}
    code, head = cli_files.calibrated(tmp_path, arrays, *cli_files.FNR, "--groups", "zeta,alpha")
    assert code in (0, 1) and head.groups[:2] == ["zeta[0]", "zeta[1]"]
    out = tmp_path / "o.npz"
    assert run("apply", tmp_path / "h.safetensors", tmp_path / "d.npz", "--out", out)[0] == 0
    member = np.concatenate([arrays["zeta"], arrays["alpha"]], 1)
    want = head(*cli_files.tensors({"s": arrays["scores"], "m": member}, ("s", "m"))).numpy()
    assert np.array_equal(cli_files.read_array(out, "masks"), want)
