"""notebooks/jobs.md: seven jobs, as a new user would do them, run to their end."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchgmc as gmc
from gmctest import ROOT, subprocess_env
from torchgmc.cli import main

PAGE = (ROOT / "notebooks" / "jobs.md").read_text(encoding="utf-8")
SECTIONS = {part.split("\n")[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}


def block(title: str, kind: str = "python") -> str:
    (section,) = (text for name, text in SECTIONS.items() if name.startswith(title))
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)

    def do(title: str) -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(block(title), f"jobs.md, {title}", "exec"), names)
        return names

    return do


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on this machine
def test_segmentation(run) -> None:
    pytest.importorskip("lightning")
    made = run("Segmentation")
    file = torch.jit.load("organs.pt")
    answer = file(made["images"][:4], made["member"][:4])
    assert set(answer) == set(made["masks"]) == {"liver", "tumour"}
    assert all(torch.equal(answer[name], made["masks"][name]) and answer[name].dtype == torch.bool for name in answer)


def test_tables_and_the_gate(run, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pandas")
    made = run("Tables")
    assert made["head"].groups == ["sex=f", "sex=m", "age<40", "40<=age<65", "age>=65"]
    (line,) = block("Tables", "text").splitlines()
    words = shlex.split(line.removeprefix("$ torchgmc "))
    assert main(words) == 0
    recent = made["frame"][20000:]
    recent.assign(p=np.where(recent.sex == "f", recent.p**3, recent.p)).to_csv("recent.csv", index=False)  # the model drifted
    capsys.readouterr()
    assert main(words) == 1
    assert "sex=f" in capsys.readouterr().out


def test_tags_and_sets(run) -> None:
    made = run("Tags")
    assert abs(made["measures"]["coverage"] - 0.9) < 0.03 and made["measures"]["CovGap"] < 0.06
    audit = made["tagger"].audit(made["tags"][3000:], made["true"][3000:], made["night"][3000:])
    assert "violated" not in str(audit) and audit.max_violation < 0.03


def test_quantiles_to_onnx(run) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    made = run("Two quantiles")
    session = runtime.InferenceSession("intervals.onnx")
    x, coast = made["x"][2000:2100], made["coast"][2000:2100]
    given = {i.name: v.numpy() for i, v in zip(session.get_inputs(), (x, coast), strict=True)}
    (found,) = session.run(None, given)
    np.testing.assert_allclose(found, made["intervals"](x, coast).detach(), rtol=1e-5, atol=1e-5)


def test_many_processes(tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text(block("Many processes"), encoding="utf-8")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "fit.py"]
    subprocess.run(words, cwd=tmp_path, env=subprocess_env(), check=True, capture_output=True, timeout=240)
    rows = []
    for rank in range(2):
        g = torch.Generator().manual_seed(rank)
        rows.append((torch.rand(500, generator=g), torch.rand(500, 1, generator=g) < 0.4))
    scores, old = (torch.cat(part) for part in zip(*rows, strict=True))
    whole = gmc.QuantileHead(target=0.9, alpha=0.01, groups=["old"]).fit(scores, old)
    for (name, one), two in zip(gmc.load(tmp_path / "head.safetensors").named_buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6, msg=name)


def test_your_own_risk_and_error(run) -> None:
    made = run("Your own risk")
    assert float(made["head"].audit(made["scores"], made["truth"], made["member"]).max_violation) < 0.06
    error = (made["better"] - made["outcome"]).double()
    assert all(abs(float(error[k::2].mean())) * 0.5 <= 0.0101 for k in range(2))


def lines(code: str) -> int:
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in code.splitlines())


def test_lines_of_code_are_as_the_table_says() -> None:
    """Today's from the blocks, the first version's from the page that keeps them."""
    table = re.findall(r"^\| ([^|]+) \| (\d+)[^|]* \| (\d+) \| [^|]+ \|$", PAGE, flags=re.MULTILINE)
    said = {job.strip(): (int(first), int(today)) for job, first, today in table}
    blocks = re.compile(r"^```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
    *causal, masked = map(lines, blocks.findall((ROOT / "notebooks" / "language.md").read_text(encoding="utf-8")))
    today = [*map(lines, blocks.findall(PAGE)), sum(causal), masked]
    page = (ROOT / "benchmarks" / "results" / "jobs.md").read_text(encoding="utf-8")
    first = [*map(lines, blocks.findall(page)), masked]
    assert list(said.values()) == list(zip(first, today, strict=True))
    for job, title in zip(said, re.findall(r"^## (.*)", page, flags=re.MULTILINE), strict=False):
        assert title.startswith(job) and any(one.startswith(job.split(",")[0]) for one in SECTIONS)
