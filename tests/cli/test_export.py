"""`torchgmc export`: a head without its model."""

import io
import json
from pathlib import Path

import numpy as np
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


@pytest.mark.parametrize("format", ["torchscript", "torch.export", "onnx"])
@pytest.mark.parametrize("task", ["probability", "quantile", "fnr"])
def test_heads_that_learned_take_features(task: str, format: str, tmp_path: Path) -> None:
    """The last input, with or without an example; it said that `groups` was missing."""
    g = torch.Generator().manual_seed(0)
    x, sex = torch.randn(400, 2, generator=g), np.array(["f", "m"] * 200)
    x[::20, 1] = float("nan")
    p, y = torch.rand(400, generator=g), torch.rand(400, generator=g) < 0.3 + 0.4 * (x[:, 0] > 0)
    arrays = {"probs": p, "y": y} if task == "probability" else {"scores": p * (1 + (x[:, 0] > 0))}
    if task == "fnr":
        arrays = {"scores": torch.rand(400, 5, generator=g) ** (1 + (x[:, :1] > 0)), "masks": torch.rand(400, 5, generator=g) < 0.5}
    np.savez(tmp_path / "d.npz", x=x.numpy(), sex=sex, **{name: value.numpy() for name, value in arrays.items()})
    file, data = str(tmp_path / "h.safetensors"), str(tmp_path / "d.npz")
    words = [*([] if task == "probability" else ["--target", "0.9" if task == "quantile" else "0.4"]), "--groups", "sex"]
    assert main(["calibrate", task, data, "--learn", "2", "--features", "x", *words, "--out", file]) == 0
    head, member = gmc.load(file), torch.from_numpy(np.stack([sex == "f", sex == "m"], 1))
    scores = next(iter(arrays.values()))
    want = head(member, features=x) if task == "quantile" else head(scores, member, features=x)
    assert head.learned
    for k, more in enumerate(([], ["--example", data])):
        out = tmp_path / f"{k}.bin"
        assert main(["export", file, "--format", format, "--out", str(out), *more]) == 0
        if format != "onnx":  # that file is compared with the head when it is written, as all are
            run = torch.jit.load(out) if format == "torchscript" else torch.export.load(io.BytesIO(out.read_bytes())).module()
            found = run(scores, member, x)
            torch.testing.assert_close(found[1] if isinstance(found, tuple) else found, want, check_dtype=False)
