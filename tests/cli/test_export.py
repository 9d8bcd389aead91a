"""`torchgmc export`: a head without its model."""

import io
import json
from pathlib import Path

import pytest
import torch

import torchgmc as gmc
from gmctest.cli_files import CASES, N, calibrated, groups, images, tensors, write
from torchgmc.cli import main


@pytest.mark.parametrize("format", ["torchscript", "torch.export"])
def test_export_of_the_head_alone(format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = CASES["probability"].data(N, 0)
    words = ["probability", "--alpha", "0.02", "--groups", "sex,site", "--bins", "0"]
    _, head = calibrated(tmp_path, arrays, *words)
    capsys.readouterr()
    file, out = str(tmp_path / "h.safetensors"), tmp_path / "head.bin"
    assert main(["export", file, "--format", format, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == {"out": str(out)}
    load = torch.jit.load if format == "torchscript" else lambda path: torch.export.load(io.BytesIO(path.read_bytes())).module()
    given = (torch.from_numpy(arrays["probs"]), groups(arrays).membership)
    torch.testing.assert_close(load(out)(*given), head(*given))


def test_export_needs_to_know_the_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = images(N, 0)
    head = gmc.ThresholdHead(0.1, 0.02).fit(*tensors(arrays, ("scores", "masks")))
    file, data = gmc.save(head, tmp_path / "h.safetensors"), write(tmp_path / "d.npz", arrays)
    assert main(["export", str(file), "--out", str(tmp_path / "o.pt")]) == 2
    assert "pass --example FILE" in capsys.readouterr().err
    assert main(["export", str(file), "--out", str(tmp_path / "o.pt"), "--example", str(data)]) == 0
    scores = torch.from_numpy(arrays["scores"])
    assert torch.jit.load(tmp_path / "o.pt")(scores).equal(head(scores))
