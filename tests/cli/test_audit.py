"""`torchgmc audit`: a gate for a pipeline."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import torchgmc as gmc
from gmctest.cli_files import groups, images, program, tensors, write
from torchgmc.cli import main


def test_the_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 where the promise is kept, 1 where it is certainly not, and what `--require` asks for."""
    arrays = images(4000, 0)
    head = gmc.ThresholdHead(0.1, 0.005, groups(arrays)).fit(*tensors(arrays, ("scores", "masks")), groups(arrays))
    notes = {"arrays": {"scores": "scores", "labels": "masks"}}
    file = gmc.save(head, tmp_path / "head.safetensors", notes)
    good = images(4000, 1)
    good["groups"] = groups(good).membership.numpy()
    bad = good | {"scores": good["scores"] * 0.5}
    kept, broken = write(tmp_path / "good.npz", good), write(tmp_path / "bad.npz", bad)
    assert main(["audit", str(file), str(kept)]) == 0
    printed = capsys.readouterr()
    assert "With 95 % confidence" in printed.out and printed.err == ""
    assert all(name in printed.out for name in head.groups)
    done = program("audit", file, broken, "--json")
    assert done.returncode == 1 and done.stderr == ""
    content = json.loads(done.stdout)
    assert content["violated"] and not content["passed"] and content["require"] == "unviolated"
    assert main(["audit", str(file), str(broken), "--require", "nothing", "--measures", "--json"]) == 0
    measures = json.loads(capsys.readouterr().out)["measures"]
    assert {"FNR", "recall", "FPR", "precision"} == set(measures["table"]["measure"]) == set(measures["difference"])
    assert main(["audit", str(file), str(broken), "--require", "nothing", "--measures"]) == 0
    assert "precision: groups differ by 0." in capsys.readouterr().out
    assert main(["audit", str(file), str(kept), "--alpha", "0.0001"]) == 0  # nothing is certain, but
    assert main(["audit", str(file), str(kept), "--alpha", "0.0001", "--require", "holds"]) == 1
    assert main(["audit", str(file), str(kept), "--alpha", "0.0001", "--require", "certified"]) == 1
    assert main(["audit", str(file), str(kept), "--alpha", "0.2", "--require", "certified"]) == 0


def faces(n: int, seed: int, drift: float = 0.0) -> dict[str, object]:
    """The README's pictures; those of a new camera, which is used in the dark, are fainter by ``drift``."""
    rng = torch.Generator().manual_seed(seed)
    masks = torch.rand(n, 32, 32, generator=rng) < 0.3
    dark, old = torch.rand(n, generator=rng) < 0.3, torch.rand(n, generator=rng) < 0.5
    logits = 3 * masks + torch.randn(n, 32, 32, generator=rng) - 1.5 - (1.0 + drift) * dark[:, None, None]
    columns = {"light": np.where(dark, "dark", "bright"), "age": np.where(old, "old", "young")}
    return {"scores": torch.sigmoid(logits).numpy(), "masks": masks.numpy(), **columns}


def test_a_drift_of_one_group_fails_the_gate_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the README says: the miss rate of dark pictures drifts from 7.5 % to about 22 %, 200 pictures later."""
    for name, seed, drift in (("calibration", 0, 0.0), ("same", 1, 0.0), ("drifted", 2, 0.65)):
        np.savez(tmp_path / f"{name}.npz", **faces(200, seed, drift))
    head = tmp_path / "h.safetensors"
    words = ["--target", "0.075", "--alpha", "0.005", "--groups", "light,age", "--out", str(head)]
    assert main(["calibrate", "fnr", str(tmp_path / "calibration.npz"), *words]) == 0
    assert main(["audit", str(head), str(tmp_path / "same.npz")]) == 0
    capsys.readouterr()
    assert main(["audit", str(head), str(tmp_path / "drifted.npz"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    rows = {group: k for k, group in enumerate(found["table"]["group"])}
    dark = rows["light=dark"]
    assert found["table"]["verdict"][dark] == "violated" and 0.18 < found["table"]["risk"][dark] < 0.26
    assert found["table"]["verdict"][rows["light=bright"]] != "violated"


def test_a_head_without_alpha_needs_one_to_be_judged_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = images(60, 0)
    data = write(tmp_path / "d.npz", arrays)
    head = gmc.ThresholdHead(0.1, alpha=None).fit(*tensors(arrays, ("scores", "masks")))
    file = gmc.save(head, tmp_path / "head.safetensors", {"arrays": {"scores": "scores", "labels": "masks"}})
    assert main(["audit", str(file), str(data)]) == 2 and "--alpha" in capsys.readouterr().err
    assert main(["audit", str(file), str(data), "--alpha", "0.9"]) == 0
    assert main(["audit", str(file), str(data), "--require", "nothing", "--method", "asymptotic"]) == 0
    assert "certify" not in capsys.readouterr().err
