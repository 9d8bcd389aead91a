"""`torchgmc monitor`: batches of a folder, a state between calls, and an alarm."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
from safetensors.torch import save_file

import torchgmc as gmc
from gmctest.cli_files import groups, images, tensors
from torchgmc.cli import main


def prepared(folder: Path) -> Path:
    arrays = images(600, 0)
    head = gmc.ThresholdHead(0.1, 0.02, groups(arrays)).fit(*tensors(arrays, ("scores", "masks")), groups(arrays))
    return gmc.save(head, folder / "head.safetensors", {"arrays": {"scores": "scores", "labels": "masks"}})


def add(folder: Path, name: str, seed: int, faint: float = 1.0) -> None:
    arrays = images(150, seed)
    arrays["groups"] = groups(arrays).membership.numpy()
    folder.mkdir(exist_ok=True)
    np.savez(folder / f"{name}.npz", **arrays | {"scores": arrays["scores"] * faint})


def test_a_folder_a_state_and_an_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    head, folder, state = prepared(tmp_path), tmp_path / "batches", tmp_path / "state.safetensors"
    words = ["monitor", str(head), str(folder), "--state", str(state), "--alpha", "0.1"]
    for k in range(2):
        add(folder, f"week {k}", k + 1)
    assert main(words) == 0
    assert "No alarm after 300 examples" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["examples"] == 300  # nothing new
    add(tmp_path / "next", "week 0", 9)  # a file of the same name is another batch
    again = tmp_path / "again.safetensors"
    again.write_bytes(state.read_bytes())
    assert main(["monitor", str(head), str(tmp_path / "next"), "--state", str(again), "--alpha", "0.1"]) == 0
    found = capsys.readouterr().out
    assert "No alarm after 450 examples" in found and found.count("No alarm") == 1
    assert main(["monitor", str(head), str(tmp_path / "next"), "--state", str(again), "--alpha", "0.1"]) == 0
    assert "after 450 examples" in (found := capsys.readouterr().out) and "1 files had been counted before" in found
    with safetensors.safe_open(again, framework="pt") as file:
        files = json.loads(file.metadata()["monitor"])["files"]
    assert {name: len(parts) for name, parts in files.items()} == {"week 0.npz": 2, "week 1.npz": 1}
    assert all(0 <= part < 1 << 16 for parts in files.values() for part in parts)  # no fingerprint of anybody's data
    for k in range(2, 5):
        add(folder, f"week {k}", k + 1, 0.5)
    assert main(words) == 1 and "ALARM" in capsys.readouterr().out
    assert main(words) == 1  # it stays
    found = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{folder / 'week 0.npz'}\n"))
    assert main(["monitor", str(head), "-", "--alpha", "0.1"]) == 0 and "150 examples" in capsys.readouterr().out
    assert "ALARM" in found


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, folder, state = prepared(tmp_path), tmp_path / "batches", tmp_path / "state.safetensors"
    add(folder, "one", 1)
    assert main(["monitor", str(head), str(tmp_path / "none")]) == 2 and "no file or folder" in capsys.readouterr().err
    assert main(["monitor", str(head), str(folder), "--state", str(state), "--alpha", "0.1"]) == 0
    capsys.readouterr()
    assert main(["monitor", str(head), str(folder), "--state", str(state), "--alpha", "0.2"]) == 2
    assert "is evidence for alpha = 0.1, not 0.2" in capsys.readouterr().err
    with safetensors.safe_open(state, framework="pt") as file:
        about = json.loads(file.metadata()["monitor"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, state, {"monitor": json.dumps(about | {"files": ["one.npz"]})})
    assert main(["monitor", str(head), str(folder), "--state", str(state), "--alpha", "0.1"]) == 2
    assert "knows files by their names only" in capsys.readouterr().err
    state.write_bytes(b"nothing")
    assert (
        main(["monitor", str(head), str(folder), "--state", str(state)]) == 2
        and "does not hold a monitor's evidence" in capsys.readouterr().err
    )


def test_clusters_are_not_cut_by_blocks_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, folder = prepared(tmp_path), tmp_path / "batches"
    add(folder, "one", 1, 0.6)
    arrays = dict(np.load(folder / "one.npz"))
    np.savez(folder / "one.npz", **arrays, patient=np.arange(150) // 4)
    words = ["monitor", str(head), str(folder), "--alpha", "0.1", "--clusters", "patient", "--json"]
    assert main(words) == 2 and "`cluster_size` = 1 must bound" in capsys.readouterr().err
    assert main([*words, "--cluster-size", "4", "--chunk", "30"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    watch = gmc.Monitor(gmc.load(head), alpha=0.1, cluster_size=4)
    watch.update(*tensors(arrays, ("scores", "masks", "groups")), clusters=np.arange(150) // 4)
    assert found["evidence"] == pytest.approx(watch.evidence, rel=1e-9) and found["examples"] == 150
