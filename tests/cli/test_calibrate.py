"""`torchgmc calibrate`: its options and what they make of the head."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchgmc as gmc
from gmctest.cli_files import CASES, FNR, N, calibrated, groups, images, read_array, tensors, write
from torchgmc.cli import main


@pytest.mark.parametrize(
    ("words", "options", "fit"),
    [
        (["--conditional"], {"conditional": True}, {}),
        (["--solver", "paper", "--eta", "0.0078125"], {}, {"solver": "paper", "eta": 0.0078125}),
        (["--solver", "fresh", "--max-iter", "5"], {}, {"solver": "fresh", "max_iter": 5}),
        (["--risk", "fpr", "--jitter", "0.01"], {"risk": "fpr", "jitter": 0.01}, {}),
        (["--resolution", "exact", "--init", "0.4"], {"resolution": "exact", "init": 0.4}, {}),
        (["--resolution", "0.125", "--range", "-1,2"], {"resolution": 0.125, "range": (-1, 2)}, {}),
    ],
)
def test_options_reach_the_head(words: list[str], options: dict[str, Any], fit: dict[str, Any], tmp_path: Path) -> None:
    arrays = images(N, 0)
    _, head = calibrated(tmp_path, arrays, *FNR, "--groups", "sex,site", "--chunk", "100", *words)
    made = gmc.ThresholdHead(0.1, 0.02, groups(arrays), **options)
    made.fit(*tensors(arrays, ("scores", "masks")), groups(arrays), **fit)
    assert head.config() == made.config()
    torch.testing.assert_close(head.state_dict(), made.state_dict(), rtol=1e-9, atol=1e-12)


def test_classes_weights_and_names_of_arrays(tmp_path: Path) -> None:
    arrays = images(N, 0)
    member, weight = groups(arrays).membership, np.random.default_rng(2).random(N)
    own = {"s": arrays["scores"].reshape(N, 2, 6), "t": arrays["masks"].reshape(N, 2, 6).astype(np.uint16), "w": weight}
    words = ["fnr", "--alpha", "0.02", "--classes", "2", "--target", "0.1,0.2", "--groups", "who"]
    words += ["--scores", "s", "--labels", "t", "--weight", "w", "--group-names", "f,m,1,2,3"]
    _, head = calibrated(tmp_path, own | {"who": member.numpy()}, *words)
    made = gmc.ThresholdHead([0.1, 0.2], 0.02, ["f", "m", "1", "2", "3"], num_classes=2)
    scores, masks = (x.reshape(N, 2, 6) for x in tensors(arrays, ("scores", "masks")))
    made.fit(scores, masks, member, weight=torch.from_numpy(weight))
    assert head.groups == made.groups
    torch.testing.assert_close(head.state_dict(), made.state_dict(), rtol=1e-9, atol=1e-12)
    # The names are in the file: another command needs none of them.
    assert main(["audit", str(tmp_path / "h.safetensors"), str(tmp_path / "d.npz"), "--require", "nothing"]) == 0


def test_multiclass_and_no_level_sets(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(3), 400)
    arrays = {"probs": probs, "y": np.array([rng.choice(3, p=p) for p in probs])}
    _, head = calibrated(tmp_path, arrays, "probability", "--alpha", "0.05", "--bins", "0")
    assert isinstance(head, gmc.ProbabilityHead) and head.num_classes == 3 and head.bins is None and not head.grouped


def test_a_tree_of_parents_and_labels_by_name(tmp_path: Path) -> None:
    arrays = CASES["tree"].data(N, 0)
    tree = gmc.TreeHead({"x": ["x1", "x2"], "y": ["y1", "y2", "y3"]}, 0.8, 0.05)
    numbered = arrays | {"parents": np.array(tree.tree.parents)}
    words = ("tree", "--target", "0.8", "--alpha", "0.05")
    _, first = calibrated(tmp_path, numbered, *words)
    named = numbered | {"names": np.array(tree.tree.names), "labels": np.array(tree.tree.names)[arrays["labels"]]}
    _, second = calibrated(tmp_path, named, *words)
    assert first.config()["parents"] == second.config()["parents"] and second.config()["names"] == tree.tree.names
    tree.fit(*tensors(arrays, ("probs", "labels")))
    for head in (first, second):
        torch.testing.assert_close(head.state_dict(), tree.state_dict())


def test_held_out_rows_depend_on_the_seed_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = []
    for seed, chunk in ((0, 50), (0, 1000), (1, 50)):
        words = [*FNR, "--groups", "sex", "--holdout", "0.4", "--seed", str(seed), "--chunk", str(chunk), "--json"]
        capsys.readouterr()
        _, head = calibrated(tmp_path, images(N, 0), *words)
        states.append((head.state_dict()["offsets"], json.loads(capsys.readouterr().out)["audit"]["max_violation"]))
    torch.testing.assert_close(states[0], states[1])
    assert not states[0][0].equal(states[2][0])


def test_starting_thresholds_and_weights_are_asked_for_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = CASES["quantile"].data(N, 0) | {"start": np.linspace(0, 1, N), "w": np.ones(N)}
    words = ("quantile", "--target", "0.8", "--alpha", "0.05", "--base", "start", "--weight", "w", "--remember")
    _, head = calibrated(tmp_path, arrays, *words)
    made = gmc.QuantileHead(0.8, 0.05).fit(torch.from_numpy(arrays["scores"]), base=torch.from_numpy(arrays["start"]))
    torch.testing.assert_close(head.state_dict(), made.state_dict())
    file = str(tmp_path / "h.safetensors")
    data = write(tmp_path / "new.npz", {name: arrays[name] for name in ("scores", "start")})
    capsys.readouterr()
    assert main(["audit", file, str(data), "--require", "nothing"]) == 0
    printed = capsys.readouterr()
    assert "were also used to calibrate this head" in printed.out
    assert printed.err.startswith("torchgmc: warning: no array 'w' in ") and printed.err.count("\n") == 1
    assert main(["apply", file, str(data), "--out", str(tmp_path / "o.npz")]) == 0
    expected = head(None, torch.from_numpy(arrays["start"]))
    assert torch.from_numpy(read_array(tmp_path / "o.npz", "thresholds")).equal(expected)
    write(tmp_path / "new.npz", {"scores": arrays["scores"]})
    capsys.readouterr()
    assert main(["audit", file, str(data)]) == 2
    assert "has no array 'start'" in capsys.readouterr().err


def test_not_reaching_alpha_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = {"scores": np.repeat(np.float32(0.5), 20), "site": np.arange(20) % 2}  # ties: no threshold covers 80 %
    words = ("quantile", "--target", "0.8", "--alpha", "0.01", "--groups", "site")
    assert calibrated(tmp_path, arrays, *words)[0] == 0
    assert "warning: alpha was not reached" in capsys.readouterr().err
    assert calibrated(tmp_path, arrays, *words, "--strict")[0] == 1
