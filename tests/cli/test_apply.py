"""`torchgmc apply`: what it writes."""

import numpy as np
import pytest
import torch

import torchgmc as gmc
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
