"""Bad input: one clear line on stderr, exit code 2, nothing written. A few through a real process, all through `main`."""

import json
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchgmc as gmc
from gmctest import subprocess_env
from gmctest.cli_files import CASES, groups, images, side_files, tensors, write
from torchgmc.cli import main

N = 40
GOOD = ("fnr", "--target", "0.1", "--alpha", "0.05", "--groups", "sex,site", "--out", "head.safetensors")


def changed(**arrays: Any) -> Callable[[Path], Path]:
    """The good file with some arrays replaced, or left out if None."""

    def make(folder: Path) -> Path:
        data = images(N, 0) | arrays
        return write(folder / "bad.npz", {name: value for name, value in data.items() if value is not None})

    return make


def with_nan() -> Any:
    scores = images(N, 0)["scores"]
    scores[7, 3] = np.nan
    return scores


def objects(folder: Path) -> Path:
    data = images(N, 0)
    data["sex"] = np.array([{"a": 1}] * N, dtype=object)
    np.savez(folder / "bad.npz", **data)
    return folder / "bad.npz"


def renamed_pickle(folder: Path) -> Path:
    (folder / "bad.npz").write_bytes(pickle.dumps(images(N, 0)))
    return folder / "bad.npz"


def renamed_torch_file(folder: Path) -> Path:
    torch.save({"scores": torch.zeros(3)}, folder / "bad.npz")
    return folder / "bad.npz"


def a_pickle(folder: Path) -> Path:
    (folder / "bad.pt").write_bytes(b"anything")
    return folder / "bad.pt"


def truncated(suffix: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = write(folder / f"bad.{suffix}", images(N, 0))
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        return path

    return make


def damaged_member(folder: Path) -> Path:
    """A good directory of the archive, but a byte of an array has changed."""
    path = folder / "bad.npz"
    np.savez(path, **images(N, 0))
    with zipfile.ZipFile(path) as archive:
        place = archive.getinfo("scores.npy").header_offset + 600
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    path.write_bytes(content)
    return path


def a_folder(folder: Path) -> Path:
    (folder / "bad.npz").mkdir()
    return folder / "bad.npz"


def text_in_a_csv(folder: Path) -> Path:
    path = write(folder / "bad.csv", images(N, 0))
    lines = path.read_text().splitlines()
    lines[6] = "abc" + lines[6][lines[6].index(",") :]
    path.write_text("\n".join(lines))
    return path


def ragged_csv(folder: Path) -> Path:
    path = write(folder / "bad.csv", images(N, 0))
    path.write_text(path.read_text() + "1,2\n")
    return path


def empty_csv(folder: Path) -> Path:
    (folder / "bad.csv").write_text("")
    return folder / "bad.csv"


def no_rows(folder: Path) -> Path:
    return write(folder / "bad.npz", {name: value[:0] for name, value in images(N, 0).items()})


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing array": (changed(masks=None), "has no array 'masks' or 'mask' or 'labels' or 'y'; it has 'scores', 'sex', 'site'"),
    "missing group": (changed(sex=None), "has no array 'sex'"),
    "wrong shape": (
        changed(masks=np.zeros((N, 5), dtype=bool)),
        "`masks` must have the shape of `scores`, (40, 12), got (40, 5)",
    ),
    "wrong length": (changed(masks=np.zeros((N + 1, 12), dtype=bool)), "their lengths differ: 'scores' 40, 'masks' 41"),
    "wrong length of a group": (changed(site=np.zeros(3, dtype=int)), "their lengths differ: 'sex' 40, 'site' 3"),
    "a single number": (changed(masks=np.array(1)), "'masks' of"),
    "NaN": (changed(scores=with_nan()), "`scores` must be finite, but scores[7, 3] is nan"),
    "logits": (changed(scores=images(N, 0)["scores"] * 9), "must be probabilities in [0, 1]"),
    "no mask": (changed(masks=np.full((N, 12), 3)), "hold only 0 and 1, but it holds 3"),
    "text": (changed(scores=np.full((N, 12), "high")), "'scores' has 'high' in row 0; it must hold numbers"),
    "floats as groups": (
        changed(sex=np.linspace(0, 1, N)),
        "group column `sex` holds decimal numbers, which are not labels; bin it with --cut sex=EDGE,EDGE.",
    ),
    "objects": (objects, "holds Python objects (a pickle), which we never load"),
    "a pickle named npz": (renamed_pickle, "is a pickle"),
    "a torch file named npz": (renamed_torch_file, "holds a pickle, which we never load"),
    "a pickle": (a_pickle, "is a pickle"),
    "truncated npz": (truncated("npz"), "cannot be read (truncated or damaged?)"),
    "truncated safetensors": (truncated("safetensors"), "cannot be read (truncated or damaged?)"),
    "truncated parquet": (truncated("parquet"), "cannot be read (truncated or damaged?)"),
    "truncated csv": (truncated("csv"), "cells in row"),
    "damaged npz": (damaged_member, "cannot be read (truncated or damaged?)"),
    "a folder": (a_folder, "is a folder; pass a file"),
    "no file": (lambda folder: folder / "none.npz", "there is no file"),
    "another ending": (lambda folder: Path(__file__), "ends in '.py'; files that can be read: .npz"),
    "text in a csv": (text_in_a_csv, "'scores' has 'abc' in row 5; it must hold numbers"),
    "ragged csv": (ragged_csv, "has 2 cells in row 40, but 26 columns"),
    "empty csv": (empty_csv, "is empty"),
    "no rows": (no_rows, "has no rows"),
}


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.rglob("*"))}


def assert_refused(
    words: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``...`` in the message stands for anything: versions of click word their errors in several ways."""
    monkeypatch.chdir(folder)
    before = listing(folder)
    capsys.readouterr()
    assert main(words) == 2
    printed = capsys.readouterr()
    assert all(part in printed.err for part in message.split(" ... ")), printed.err
    assert printed.out == "" and printed.err.startswith("torchgmc: ") and printed.err.count("\n") == 1
    assert listing(folder) == before


@pytest.mark.parametrize("case", BAD)
def test_bad_files(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if "parquet" in case:
        pytest.importorskip("pyarrow")
    make, message = BAD[case]
    (tmp_path / "head.safetensors").write_bytes(b"the old file")  # it must stay
    data = make(tmp_path)
    assert_refused(["calibrate", *GOOD, str(data)], message, tmp_path, monkeypatch, capsys)


#: One that the reader finds, one that the head finds; `test_bad_files` has all of them, in this process.
REAL = ["truncated npz", "NaN"]


@pytest.mark.parametrize("case", REAL)
def test_bad_files_through_the_program(case: str, tmp_path: Path) -> None:
    make, message = BAD[case]
    data = make(tmp_path)
    before = listing(tmp_path)
    line = [sys.executable, "-m", "torchgmc.cli", "calibrate", *GOOD, str(data)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=subprocess_env())
    assert done.returncode == 2 and done.stdout == "" and message in done.stderr
    assert done.stderr.startswith("torchgmc: ") and done.stderr.count("\n") == 1
    assert listing(tmp_path) == before


CHANGES = [
    (["--out", "none/head.safetensors"], "--out: the folder 'none' does not exist"),
    (["--out", "folder.safetensors"], "is a folder; pass a file name"),
    (["--out", "head.npz"], "must end in .safetensors"),
    (["--out", "good.npz", "--report", "x.html"], "must end in .safetensors"),
    (["--report", "none/x.html"], "--report: the folder 'none' does not exist"),
    (["--report", "x.pdf"], "must end in .html"),
    (["--task", "fnr"], "No such option ... --task ... ; see torchgmc calibrate fnr --help."),
    (["--target", "2"], "`target` must lie strictly between 0 and 1, got 2.0"),
    (["--target", "much"], "--target must be numbers separated by commas, got 'much'"),
    (["--alpha", "-1"], "`alpha` must be a finite number above 0, got -1.0"),
    (["--alpha", "small"], "'--alpha'"),
    (["--groups", "sex,nobody"], "has no array 'nobody'; it has 'scores', 'masks', 'sex', 'site'"),
    (["--groups", "scores"], "must hold memberships, True and False or 1 and 0"),
    (["--cut", "age=30"], "--cut names 'age', which is not among --groups sex,site"),
    (["--cut", "site"], "--cut must be a column and its edges"),
    (["--intersections", "3"], "`intersections` must be a whole number from 1 to the number of columns, 2, got 3"),
    (["--min-size", "1000"], "groups with fewer than `min_size` = 1000 rows"),
    (["--small", "forget"], "`small` must be 'error', 'drop' or 'merge', got 'forget'"),
    (["--bins", "3"], "No such option ... --bins ... ; see torchgmc calibrate fnr --help."),
    (["--tree", "tree.json"], "No such option ... --tree"),
    (["--base", "site"], "No such option ... --base"),
    (["--solver", "magic"], "`solver` must be one of 'exact', 'paper', 'fresh', got 'magic'"),
    (["--eta", "0.1"], "`eta` is the fixed step of solver='paper' or 'fresh'"),
    (["--holdout", "1"], "`--holdout` must lie strictly between 0 and 1"),
    (["--holdout", "0.001"], "leaves none to fit on or none to audit"),
    (["--delta", "0"], "`--delta` must lie strictly between 0 and 1"),
    (["--scores", "probs"], "has no array 'probs'"),
    (["--weight", "sex2"], "has no array 'sex2'"),
    (["--range", "1"], "--range must be LOW,HIGH, got '1'"),
    (["--nothing"], "--nothing"),
]


@pytest.mark.parametrize(("words", "message"), CHANGES, ids=[" ".join(words) for words, _ in CHANGES])
def test_bad_options(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    side_files(tmp_path)
    (tmp_path / "folder.safetensors").mkdir()
    data = write(tmp_path / "good.npz", images(N, 0))
    assert_refused(["calibrate", *GOOD, str(data), *words], message, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("task", "words", "message"),
    [
        ("fnr", ["--alpha", "0.05"], "Missing option '--target'; see torchgmc calibrate fnr --help."),
        ("tree", ["--alpha", "0.05", "--target", "0.9"], "needs the tree: an array 'parents'"),
        ("tree", ["--alpha", "0.05", "--target", "0.9", "--tree", "no.json"], "--tree: there is no file 'no.json'"),
        ("tree", ["--alpha", "0.05", "--target", "0.9", "--tree", "bad.json"], "--tree: 'bad.json' is not JSON"),
        ("tree", ["--alpha", "0.05", "--target", "0.9", "--tree", "words.json"], "`parents` as nested names may hold"),
        ("text", ["--alpha", "0.05", "--groups", "sex"], "Missing option '--attributes'"),
        ("text", ["--alpha", "0.05", "--attributes", "words.json"], "Missing option '--groups'"),
        ("text", ["--alpha", "0.05", "--groups", "sex", "--attributes", "real.json"], "holds words; name the tokenizer"),
        ("text", ["--alpha", "0.05", "--groups", "sex", "--attributes", "list.json"], "must map the name of each list"),
        (
            "probability",
            ["--alpha", "0.05", "--target", "0.1"],
            "No such option ... --target ... ; see torchgmc calibrate probability --help.",
        ),
        ("probability", ["--alpha", "0.05", "--labels", "probs"], "`y` must be bool or hold only 0 and 1"),
        ("quantile", ["--alpha", "0.05", "--target", "0.9", "--labels", "sex"], "No such option ... --labels"),
    ],
)
def test_bad_options_of_other_tasks(
    task: str,
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    side_files(tmp_path)
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "real.json").write_text(json.dumps({"jobs": ["doctor"]}))
    data = write(tmp_path / "good.npz", CASES[task].data(N, 0))
    line = ["calibrate", task, str(data), *words, "--out", "head.safetensors"]
    assert_refused(line, message, tmp_path, monkeypatch, capsys)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    arrays = images(200, 0)
    head = gmc.ThresholdHead(0.1, 0.05, groups(arrays).names).fit(*tensors(arrays, ("scores", "masks")), groups(arrays))
    return gmc.save(head, tmp_path / "head.safetensors")


@pytest.mark.parametrize("command", ["audit", "apply", "export"])
@pytest.mark.parametrize("case", ["none", "truncated", "folder", "data", "unfitted", "pickle"])
def test_bad_heads(
    command: str, case: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, bad = write(tmp_path / "d.npz", images(N, 0)), tmp_path / "bad.safetensors"
    message = {"none": "there is no file", "folder": "is a folder", "unfitted": "is not fitted"}.get(case, "bad.safetensors'")
    if case == "truncated":
        bad.write_bytes(saved.read_bytes()[:-20])
    elif case == "folder":
        bad.mkdir()
    elif case == "data":
        write(bad, {"scores": np.zeros(3)})
    elif case == "unfitted":
        gmc.save(gmc.ThresholdHead(0.1, 0.05), bad)
    elif case == "pickle":
        bad.write_bytes(pickle.dumps({"a": 1}))
    words = {"audit": [str(data)], "apply": [str(data), "--out", "o.npz"], "export": ["--out", "o.pt"]}[command]
    assert_refused([command, str(bad), *words], message, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["audit", "head.safetensors", "d.npz"], "its file does not say how they follow from columns"),
        (["audit", "head.safetensors", "d.npz", "--groups", "sex"], "must be a membership of shape (n, 5)"),
        (["audit", "head.safetensors", "d.npz", "--require", "luck"], "`--require` must be one of"),
        (["audit", "head.safetensors", "d.npz", "--delta", "1.5"], "`--delta` must lie strictly between 0 and 1"),
        (["audit", "head.safetensors", "d.npz", "--unknown", "guess"], "--unknown must be error or none"),
        (["audit", "head.safetensors", "d.npz", "--report", "head.safetensors"], "must end in .html"),
        (["audit", "head.safetensors"], "Missing argument"),
        (["apply", "head.safetensors", "d.npz", "--groups", "sex,site", "--out", "d.npz"], "is also an input"),
        (["apply", "head.safetensors", "d.npz", "--out", "o.txt"], "must end in .npz or .safetensors or .parquet or .csv"),
        (["apply", "head.safetensors", "m.npz", "--out", "none/o.npz"], "the folder 'none' does not exist"),
        (["apply", "head.safetensors", "nan.npz", "--out", "o.npz"], "`scores` must be finite"),
        (["apply", "head.safetensors", "image.npz", "--out", "o.csv"], "a .csv holds columns"),
        (["export", "head.safetensors", "--format", "tflite", "--out", "o.x"], "`--format` must be one of"),
        (["export", "head.safetensors", "--out", "none/o.pt"], "the folder 'none' does not exist"),
        (["export", "head.safetensors", "--out", "o.pt", "--example", "d.npz"], "its file does not say how they follow"),
    ],
)
def test_bad_words_of_other_commands(
    words: list[str],
    message: str,
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arrays = images(N, 0)
    write(tmp_path / "d.npz", arrays)
    member = groups(images(N, 0)).membership.numpy()
    write(tmp_path / "m.npz", {"scores": arrays["scores"], "groups": member})
    write(tmp_path / "nan.npz", {"scores": with_nan(), "groups": member})
    write(tmp_path / "image.npz", {"scores": arrays["scores"].reshape(N, 3, 4), "groups": member})
    assert_refused(words, message, tmp_path, monkeypatch, capsys)


def test_an_unexpected_group_value_in_a_later_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "d.npz", images(N, 0))
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *GOOD, str(data)]) == 0
    other = images(N, 1)
    other["sex"][33] = 5
    write(tmp_path / "new.npz", other)
    message = "group column `sex` has 5 in row 33, which did not occur when the groups were made; known: 0, 1; with --unknown none"
    words = ["apply", "head.safetensors", "new.npz", "--out", "o.npz", "--chunk", "10"]
    assert_refused(words, message, tmp_path, monkeypatch, capsys)
    assert_refused(["audit", "head.safetensors", "new.npz", "--chunk", "10"], message, tmp_path, monkeypatch, capsys)
    write(tmp_path / "nan.npz", images(N, 0) | {"scores": with_nan()})
    message = "'nan.npz', rows 5 to 9: `scores` must be finite, but scores[2, 3] is nan"
    assert_refused(["audit", "head.safetensors", "nan.npz", "--chunk", "5"], message, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo", "nothing"], "there is no demo 'nothing'; choose from fnr"),
        (["demo", "--seed", "one"], "'--seed'"),
        (["demo", "--seed", "-1"], "'--seed'"),
        (["demo", "--out"], "--out"),
        (["demo", "--out", __file__], "is a file; pass a folder"),
        (["--unknown"], "--unknown"),
        (["unknown"], "unknown"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and message in printed.err
    assert printed.err.startswith("torchgmc: ") and printed.err.count("\n") == 1


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_package_of_the_command_line_names_the_extra(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("torchgmc.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["--version"]) == 2
    assert capsys.readouterr().err == f'torchgmc: `{package}` is needed here and is not installed: pip install "torchgmc[cli]"\n'
