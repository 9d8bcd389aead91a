"""`torchgmc audit`: a gate for a pipeline."""

import json
from pathlib import Path

import pytest

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
    assert "With confidence 95 %" in printed.out and printed.err == ""
    assert all(name in printed.out for name in head.groups)
    done = program("audit", file, broken, "--json")
    assert done.returncode == 1 and done.stderr == ""
    content = json.loads(done.stdout)
    assert content["violated"] and not content["passed"] and content["require"] == "unviolated"
    assert main(["audit", str(file), str(broken), "--require", "nothing"]) == 0
    assert main(["audit", str(file), str(kept), "--alpha", "0.0001"]) == 0  # nothing is certain, but
    assert main(["audit", str(file), str(kept), "--alpha", "0.0001", "--require", "holds"]) == 1
    assert main(["audit", str(file), str(kept), "--alpha", "0.0001", "--require", "certified"]) == 1
    assert main(["audit", str(file), str(kept), "--alpha", "0.2", "--require", "certified"]) == 0
