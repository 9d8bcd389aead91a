"""notebooks/machines.md: every engine gives the head of one process, in at most 15 lines."""

import re
import shlex
import shutil
import sys
from typing import Any

import numpy as np
import pytest
import torch

import torchgmc as gmc
from gmctest import ROOT
from torchgmc.cli import main

PAGE = (ROOT / "notebooks" / "machines.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)


def blocks(title: str, kind: str = "python") -> str:
    (section,) = (s for s in SECTIONS[1:] if s.startswith(title)) if title else SECTIONS[:1]
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    return found


def common() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(blocks(""), "machines.md", "exec"), names)
    return names


def whole(names: dict[str, Any], seeds: range = range(4)) -> gmc.Head:
    scores, member = (np.concatenate(x) for x in zip(*map(names["part"], seeds), strict=True))
    return names["make"]().fit(scores, member)


@pytest.mark.parametrize("title", ["joblib", "Ray", "Dask", "Spark"])
@pytest.mark.filterwarnings("ignore")  # of the engines
def test_every_engine_gives_the_head_of_one_process(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytest.importorskip({"Spark": "pyspark"}.get(title, title.lower()))
    if title == "Spark" and shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    lines = [line for line in blocks(title).splitlines() if line.strip()]
    assert len(lines) <= 15
    names = common()
    exec(compile(blocks(title), f"machines.md, {title}", "exec"), names)
    torch.testing.assert_close(names["head"].state_dict(), whole(names).state_dict(), rtol=0, atol=1e-6)


def test_the_next_week_and_the_command_line(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = common()
    names["head"] = whole(names)
    exec(compile(blocks("Files and weeks"), "machines.md", "exec"), names)
    scores, member = (np.concatenate(x) for x in zip(*map(names["part"], range(5)), strict=True))
    want = names["make"]().fit(scores, member, weight=np.repeat([0.9, 1.0], [2000, 500]))
    torch.testing.assert_close(gmc.load("head.safetensors").state_dict(), want.state_dict(), rtol=0, atol=1e-6)
    for seed in range(2):
        scores, member = names["part"](seed)
        np.savez(f"part{seed}.npz", scores=scores, age=np.where(member[:, 1], "old", "young"))
    for line in blocks("Files and weeks", "text").splitlines():
        assert main(shlex.split(line.removeprefix("$ torchgmc "))) == 0
    assert gmc.load("head.safetensors").groups == ["age=old", "age=young"]
