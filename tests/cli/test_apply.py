"""`torchgmc apply`: what it writes."""

import csv
import json

import numpy as np
import pytest
import torch

import torchgmc as gmc
from gmctest.cli_files import read_array
from gmctest.frames import QUANTILE, houses, write_frame
from torchgmc.cli import main


@pytest.mark.parametrize("suffix", [".csv", ".npz"])
def test_answers_of_a_tree_by_name(suffix, tmp_path, capsys):
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 300)
    probs = rng.dirichlet([1, 1, 1], 300) * 0.5 + 0.5 * np.eye(3)[labels]
    np.savez(tmp_path / "d.npz", probs=probs, labels=labels)
    (tmp_path / "tree.json").write_text('{"animal": ["cat", "dog"], "vehicle": ["omnibus"]}')
    words = ["tree", "--target", "0.9", "--alpha", "0.1", "--tree", str(tmp_path / "tree.json")]
    data, out, found = (str(tmp_path / name) for name in ("d.npz", "h.safetensors", f"o{suffix}"))
    assert main(["calibrate", *words, data, "--out", out]) == 0
    assert main(["apply", out, data, "--out", found, "--names", "--chunk", "7"]) == 0
    named = pandas.read_csv(found)["nodes"].tolist() if suffix == ".csv" else np.load(found)["nodes"].tolist()
    head = gmc.load(out)
    assert named == head.names(head(torch.from_numpy(probs)))
    assert main(["apply", out, data, "--out", str(tmp_path / "o.parquet"), "--node-names"]) == 2
    write_frame(houses(), tmp_path / "q.csv")
    assert main(["calibrate", *QUANTILE, str(tmp_path / "q.csv"), "--out", out]) == 0
    assert main(["apply", out, str(tmp_path / "q.csv"), "--out", str(tmp_path / "o.csv"), "--node-names"]) == 2
    assert "holds a QuantileHead, whose results have no names" in capsys.readouterr().err


def test_names_of_nodes_are_not_formulas(tmp_path):
    """A spreadsheet runs what begins with =, +, - or @; what is written is shown as it is."""
    names = ["=1+1", "+a", "-b", "@c", "d"]
    labels = np.arange(300) % 5
    np.savez(tmp_path / "d.npz", probs=np.eye(5)[labels], labels=labels)
    (tmp_path / "tree.json").write_text(json.dumps({"x": names[:2], "y": names[2:]}))
    data, head, out = (str(tmp_path / name) for name in ("d.npz", "h.safetensors", "o.csv"))
    words = ["tree", "--target", "0.9", "--alpha", "0.2", "--tree", str(tmp_path / "tree.json")]
    assert main(["calibrate", *words, data, "--out", head]) == 0
    assert main(["apply", head, data, "--out", out, "--names", "--name", "answers"]) == 0
    with open(out, newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["answers"] and rows[1:6] == [["'=1+1"], ["'+a"], ["'-b"], ["'@c"], ["d"]]
    assert main(["apply", head, data, "--out", str(tmp_path / "o.npz"), "--names"]) == 0
    assert np.load(tmp_path / "o.npz")["nodes"][:5].tolist() == names  # no spreadsheet opens it


@pytest.mark.parametrize("name", ["../../evil", "/evil", "a/b", "a\\b", "", ".hidden", "=1+1", "a b", "x\n", "-x"])
def test_the_name_of_the_array_is_plain(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.savez("d.npz", scores=np.linspace(0, 1, 50))
    assert main(["calibrate", "quantile", "d.npz", "--target", "0.9", "--alpha", "0.1", "--out", "h.safetensors"]) == 0
    assert main(["apply", "h.safetensors", "d.npz", "--out", "o.npz", f"--name={name}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("torchgmc: --name must be letters, digits, ") and said.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.npz", "h.safetensors"]
    assert main(["apply", "h.safetensors", "d.npz", "--out", "o.npz", "--name", "größe-2.x"]) == 0
    assert np.load("o.npz").files == ["größe-2.x"]


def test_results_are_written_through_a_link(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk").mkdir()
    np.savez("d.npz", scores=np.linspace(0, 1, 50))
    assert main(["calibrate", "quantile", "d.npz", "--target", "0.9", "--alpha", "0.1", "--out", "h.safetensors"]) == 0
    for suffix in ("npz", "csv", "safetensors"):
        (tmp_path / f"o.{suffix}").symlink_to(tmp_path / "disk" / f"real.{suffix}")
        assert main(["apply", "h.safetensors", "d.npz", "--out", f"o.{suffix}"]) == 0
        assert (tmp_path / f"o.{suffix}").is_symlink() and len(read_array(tmp_path / "disk" / f"real.{suffix}", "thresholds")) == 50
    (tmp_path / "in.npz").symlink_to(tmp_path / "d.npz")
    before = (tmp_path / "d.npz").read_bytes()
    assert main(["apply", "h.safetensors", "d.npz", "--out", "in.npz"]) == 2  # the input, by another name
    assert "is also an input" in capsys.readouterr().err and (tmp_path / "d.npz").read_bytes() == before


@pytest.mark.parametrize("task", ["probability", "quantile", "fnr"])
def test_learned_groups_are_those_of_python(task, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x, p = rng.normal(size=(600, 2)), np.full(600, 0.4)
    x[::20, 1] = np.nan
    y = rng.random(600) < 0.4 + 0.4 * (x[:, 0] > 0)
    arrays = {"probs": p, "y": y} if task == "probability" else {"scores": rng.random(600) * (1 + (x[:, 0] > 0))}
    if task == "fnr":
        arrays = {"scores": rng.random((600, 5)) ** (1 + (x[:, :1] > 0)), "masks": rng.random((600, 5)) < 0.5}
    np.savez("d.npz", x=x, **arrays)
    words = [
        task,
        "d.npz",
        "--alpha",
        "0.05",
        *([] if task == "probability" else ["--target", "0.9" if task == "quantile" else "0.4"]),
    ]
    assert main(["calibrate", *words, "--learn", "2", "--features", "x", "--out", "h.safetensors"]) == 0
    assert main(["apply", "h.safetensors", "d.npz", "--out", "o.npz"]) == 0  # under the name that the calibration was told
    learn, given = gmc.Trees(depth=2), {k: torch.from_numpy(v) for k, v in arrays.items()}
    head = gmc.ProbabilityHead(0.05, learn=learn) if task == "probability" else gmc.QuantileHead(0.9, 0.05, learn=learn)
    head = gmc.ThresholdHead(0.4, 0.05, learn=learn) if task == "fnr" else head
    head.fit(*given.values(), features=x)
    want = head(features=x) if task == "quantile" else head(next(iter(given.values())), features=x)
    assert head.learned and np.array_equal(read_array(tmp_path / "o.npz", gmc.load("h.safetensors").task.output), want.numpy())
    assert main(["calibrate", *words, "--learn", "2", "--out", "h.safetensors"]) == 2
    assert main(["calibrate", *words, "--learn", "deep", "--features", "x", "--out", "h.safetensors"]) == 2
    told = capsys.readouterr().err
    assert "`features` is missing" in told and "--learn must be a whole number, got 'deep'" in told


def test_pixels_are_weighted_in_the_fit_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    scores = rng.random((80, 6, 6))
    masks, weight = rng.random((80, 6, 6)) < scores, rng.integers(0, 3, (80, 6, 6)).astype(float)
    np.savez("d.npz", scores=scores, masks=masks, pixel_weight=weight)
    words = ["fnr", "d.npz", "--target", "0.1", "--alpha", "0.02", "--no-noise-floor", "--pixel-weight", "pixel_weight"]
    assert main(["calibrate", *words, "--out", "h.safetensors"]) == 0
    np.savez("new.npz", scores=scores)
    assert main(["apply", "h.safetensors", "new.npz", "--out", "o.npz"]) == 0
    tensors = [torch.from_numpy(a) for a in (scores, masks, weight)]
    head = gmc.ThresholdHead(0.1, 0.02, noise_floor=False).fit(*tensors[:2], pixel_weight=tensors[2])
    assert np.array_equal(read_array(tmp_path / "o.npz", "masks"), head(tensors[0]).numpy())
