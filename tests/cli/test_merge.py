"""`torchgmc observe` and `merge`: many files give the head of one."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchgmc as gmc
from gmctest.cli_files import CASES, FNR, N, command, groups, images, side_files, write
from torchgmc.cli import main
from torchgmc.cli.source import load_head


def cut(arrays: dict[str, Any], pieces: int) -> list[dict[str, Any]]:
    return [
        {name: part for name, part in zip(arrays, parts, strict=True)}
        for parts in zip(*(np.array_split(value, pieces) for value in arrays.values()), strict=True)
    ]


@pytest.mark.parametrize("name", CASES)
def test_parts_give_the_head_of_the_whole_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case, words = CASES[name], ["--groups", "sex,site"]
    arrays = case.data(N, 0) | {"patient": np.arange(N) % 60}
    more = [*command(name, tmp_path, case.words), "--clusters", "patient"]
    side_files(tmp_path)
    whole = write(tmp_path / "whole.parquet", arrays)
    assert main(["calibrate", *more, *words, str(whole), "--out", str(tmp_path / "whole.safetensors")]) == 0
    files = []
    for place, part in enumerate(cut(arrays, 3)):
        path = write(tmp_path / f"{place}.parquet", part)
        files.append(str(tmp_path / f"{place}.stats"))
        like = ["--like", files[0]] if place else words
        assert main(["observe", *more, *like, str(path), "--out", files[-1], "--chunk", "30"]) == 0
    capsys.readouterr()
    assert main(["merge", *files[::-1], "--out", str(tmp_path / "head.safetensors"), "--json"]) == 0
    assert f'"task": "{name}"' in capsys.readouterr().out
    (want, about), (found, notes) = (load_head(tmp_path / f"{stem}.safetensors") for stem in ("whole", "head"))
    assert found.config() == want.config() and notes == about and found.statistics is None
    assert found.named_groups is not None and found.named_groups.to_dict() == want.named_groups.to_dict()
    for one, two in zip(found.buffers(), want.buffers(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6)


def test_solvers_and_what_can_be_merged_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays, files = images(N, 0), []
    step = ["--solver", "paper", "--eta", "0.0078125"]
    for place, part in enumerate(cut(arrays, 3)):
        path = write(tmp_path / f"{place}.npz", part)
        files.append(str(tmp_path / f"{place}.stats"))
        assert main(["observe", *FNR, *step, "--groups", "sex,site", str(path), "--out", files[-1]]) == 0
    first, last = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    assert main(["merge", *files[:2], "--out", str(first), "--statistics"]) == 0
    assert main(["merge", str(first), files[2], "--out", str(last)]) == 0
    made = gmc.ThresholdHead(0.1, 0.02, groups(arrays))
    made.fit(torch.from_numpy(arrays["scores"]), torch.from_numpy(arrays["masks"]), groups(arrays), solver="paper", eta=0.0078125)
    torch.testing.assert_close(gmc.load(last).state_dict(), made.state_dict(), rtol=0, atol=1e-9)
    capsys.readouterr()
    assert main(["merge", str(last), files[2], "--out", str(tmp_path / "c.safetensors")]) == 2
    assert "without its statistics" in capsys.readouterr().err
    assert main(["merge", files[2], str(last), "--out", str(tmp_path / "c.safetensors")]) == 2
    assert "without its statistics" in capsys.readouterr().err
    copy = str(shutil.copy(files[0], tmp_path / "copy.stats"))
    for same in (files[0], copy):
        assert main(["merge", files[0], files[1], same, "--out", str(tmp_path / "c.safetensors")]) == 2
        assert f"{same!r} is {files[0]!r} again, or a copy" in capsys.readouterr().err and not (tmp_path / "c.safetensors").exists()


def test_parts_with_other_groups_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays, files = images(N, 0), []
    for place, site in enumerate(([1, 2, 3], [1, 2])):
        rows = np.isin(arrays["site"], site)
        path = write(tmp_path / f"{place}.npz", {name: value[rows] for name, value in arrays.items()})
        files.append(str(tmp_path / f"{place}.stats"))
        assert main(["observe", *FNR, "--groups", "site", str(path), "--out", files[-1]]) == 0
    capsys.readouterr()
    out = ["--out", str(tmp_path / "h.safetensors")]
    assert main(["merge", *files, *out]) == 2
    error = capsys.readouterr().err
    assert "cannot be merged with" in error and "its `groups` is" in error and "head 0" not in error
    assert error.rstrip().endswith("; observe all parts with --like one of them.")  # not "`Groups`.; observe"
    assert main(["observe", *FNR, "--like", files[0], str(tmp_path / "1.npz"), "--out", files[1]]) == 0
    assert main(["merge", *files, *out]) == 0
    assert main(["observe", *FNR, "--like", files[0], "--groups", "sex", str(tmp_path / "1.npz"), "--out", files[1]]) == 2
    assert "--like takes the groups from the other part; omit --groups" in capsys.readouterr().err
    assert main(["observe", *FNR, "--like", files[1], str(tmp_path / "0.npz"), "--out", str(tmp_path / "x.stats")]) == 0
    few = [str(tmp_path / "few.stats"), str(tmp_path / "x.stats")]
    assert main(["observe", *FNR, "--groups", "site", str(tmp_path / "1.npz"), "--out", few[0]]) == 0
    assert main(["observe", *FNR, "--like", few[0], str(tmp_path / "0.npz"), "--out", few[1]]) == 2
    assert "`observe` has none: --like must know all values" in capsys.readouterr().err
    assert main(["observe", *FNR, "--groups", "site", str(tmp_path / "1.npz"), "--out", str(tmp_path / "x.npz")]) == 2
    assert "must end in .stats" in capsys.readouterr().err
