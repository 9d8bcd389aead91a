"""`torchgmc calibrate`: its options and what they make of the head."""

import json
import os
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
from gmctest import subprocess_env
from gmctest.cli_files import CASES, FNR, N, calibrated, groups, images, read_array, tensors, write
from torchgmc.cli import main
from torchgmc.cli.source import tasks


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
        torch.testing.assert_close(dict(head.named_buffers()), dict(tree.named_buffers()))


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


# -- one subcommand per task --------------------------------------------------------------------------------------------------

COMMON = 26  # options that all tasks share, --help and --clusters among them


@pytest.mark.parametrize("name", CASES)
def test_the_help_of_a_task_has_its_own_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", name, "--help"]) == 0
    shown = capsys.readouterr().out
    flags = re.findall(r"^  (--[a-z-]+)", shown.split("Options:")[1], re.MULTILINE)
    task = tasks()[name].task
    assert task is not None and len(flags) == len(set(flags))
    assert len(flags) == COMMON + len(task.options) + bool(task.labels) + len(task.arrays)
    foreign = {o.flag for kind in tasks().values() if kind.task is not None for o in kind.task.options}
    assert not set(flags) & (foreign - {o.flag for o in task.options})
    words = " ".join(shown.split())
    assert task.promise in words and f"Example: torchgmc calibrate {name} {task.example}" in words
    for title in ("Options:", "Arrays:", "Groups:", "Fit:", "Audit:", "Output:"):
        assert f"\n{title}\n" in shown


def test_the_tasks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["calibrate"], ["calibrate", "--help"]):
        assert main(words) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert all(f" {name} {kind.task.promise}" in shown for name, kind in tasks().items() if kind.task is not None)


@pytest.mark.parametrize("place", ["after", "before", "with ="])
def test_the_form_of_version_0_1_is_understood(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = images(N, 0)
    data, out = str(write(tmp_path / "my d.npz", arrays)), str(tmp_path / "h.safetensors")
    rest = ["--target", "0.1", "--alpha", "0.02", "--groups", "sex,site", "--out", out]
    words = {
        "after": [data, "--task", "fnr", *rest],
        "before": ["--task", "fnr", *rest, data],
        "with =": [data, *rest, "--task=fnr"],
    }[place]
    assert main(["calibrate", *words]) == 0
    said = capsys.readouterr().err
    assert said.startswith("torchgmc: warning: --task is deprecated; write: torchgmc calibrate fnr ") and said.count("\n") == 1
    line = shlex.split(said.strip())
    again = line[line.index("write:") + 2 :]
    old = gmc.load(out)
    assert main(again) == 0 and capsys.readouterr().err == ""  # what it says to write is the same
    torch.testing.assert_close(gmc.load(out).state_dict(), old.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["d.npz", "--alpha", "0.1"], "calibrate needs a task: fnr, probability, quantile, text, tree; for example"),
        (["d.npz", "--task", "fns"], "`--task` must be one of 'fnr', 'probability', 'quantile', 'text', 'tree', got 'fns'"),
        (["d.npz", "--task"], "`--task` must be one of"),
        (["fns", "d.npz"], "calibrate needs a task"),
    ],
)
def test_a_task_is_needed(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", *words]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


OWN = """
from gmctest.own_head import MeanHead
from torchgmc.heads.task import Task


class TaskedHead(MeanHead):
    task = Task(
        name="mean",
        promise="Means that are right for every group.",
        example="means.csv --alpha 0.01 --groups site --out head.safetensors",
        scores=("predicted",),
        labels=("value",),
        label_kind="mask",
        output="means",
        written="a mean for each row",
    )
"""


def test_a_new_task_is_one_file(tmp_path: Path) -> None:
    """A user's head with a task: every command knows it, and nothing else had to be changed."""
    (tmp_path / "own.py").write_text(OWN)
    rng = np.random.default_rng(0)
    site = rng.integers(0, 3, N)
    predicted = rng.random(N)
    write(tmp_path / "d.csv", {"predicted": predicted, "value": predicted + site - 1.0, "site": site})
    env = subprocess_env()
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    lines = [
        "calibrate --help",
        "calibrate mean --help",
        "calibrate mean d.csv --alpha 0.01 --groups site --out h.safetensors",
        "audit h.safetensors d.csv --json --require holds",
        "apply h.safetensors d.csv --out o.csv",
        "export h.safetensors --out h.pt",
    ]
    code = "import sys, own; from torchgmc.cli import main\nfor line in sys.argv[1:]: print(main(line.split()), end='<end>')"
    line = [sys.executable, "-c", code, *lines]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=env)
    listed, helped, _, audited, applied, exported = done.stdout.removesuffix("0<end>").split("0<end>")
    assert done.returncode == 0 and done.stderr == ""
    assert "mean         Means that are right for every group." in listed and "--target" not in helped
    assert json.loads(audited)["max_violation"] < 0.01
    assert applied == f"means ({N},): o.csv\n" and exported == "torchscript: h.pt\n"
    np.testing.assert_allclose(read_array(tmp_path / "o.csv", "means"), predicted + site - 1.0, atol=1e-9)


@pytest.mark.parametrize("words", [["audit", "d.npz"], ["apply", "d.npz", "--out", "o.npz"], ["export", "--out", "o.pt"]])
def test_a_head_without_a_task(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gmctest.own_head import MeanHead

    monkeypatch.chdir(tmp_path)
    gmc.save(MeanHead(0.1).fit(torch.rand(9), torch.rand(9)), "h.safetensors")
    write(tmp_path / "d.npz", {"scores": np.zeros(9)})
    assert main([words[0], "h.safetensors", *words[1:]]) == 2
    assert capsys.readouterr().err == "torchgmc: a MeanHead has no command-line task; use it from Python.\n"


@pytest.mark.parametrize("kind", [int, str])
def test_clusters_are_a_column(kind: type, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Given to the fit, remembered for the audit; a file without the column is warned about."""
    arrays = images(N, 0)
    patient = np.array([kind(f"{1000 + i // 4}") for i in range(N)])
    _, head = calibrated(tmp_path, arrays | {"patient": patient}, *FNR, "--groups", "sex,site", "--clusters", "patient")
    path = tmp_path / "h.safetensors"
    made = gmc.ThresholdHead(0.1, 0.02, groups(arrays))
    made.fit(*tensors(arrays, ("scores", "masks")), groups(arrays), clusters=patient)
    torch.testing.assert_close(head.state_dict(), made.state_dict(), rtol=1e-9, atol=1e-12)
    fresh = images(N, 1)
    capsys.readouterr()
    main(["audit", str(path), str(write(tmp_path / "fresh.npz", fresh | {"patient": patient})), "--json"])
    told = json.loads(capsys.readouterr().out)
    expected = made.audit(*tensors(fresh, ("scores", "masks")), groups(fresh), clusters=patient)
    assert told["certified_alpha"] == pytest.approx(expected.certified_alpha)
    main(["audit", str(path), str(write(tmp_path / "other.npz", fresh)), "--json"])
    assert re.search("no array 'patient' .* all rows count as independent", capsys.readouterr().err)


def test_without_alpha_the_fit_goes_as_far_as_the_sample_can_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = images(N, 0)
    words = ["calibrate", "fnr", str(write(tmp_path / "d.npz", arrays)), "--target", "0.1", "--groups", "sex,site", "--out"]
    path = str(tmp_path / "h.safetensors")
    assert main([*words, path]) == 0
    assert "not reached" not in capsys.readouterr().err
    head = gmc.load(path)
    assert head.alpha is None
    made = gmc.ThresholdHead(0.1, None, groups(arrays)).fit(*tensors(arrays, ("scores", "masks")), groups(arrays))
    torch.testing.assert_close(head.state_dict(), made.state_dict(), rtol=1e-9, atol=1e-12)
    assert main([*words, path, "--holdout", "0.3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fit"]["reached"] == "noise" and told["audit"]["alpha"] is None and told["audit"]["certified_alpha"] > 0
    assert main([*words, str(tmp_path / "no.safetensors"), "--strict"]) == 2
    assert "--strict compares the fit with alpha" in capsys.readouterr().err and not (tmp_path / "no.safetensors").exists()
    assert main([*words, path, "--solver", "paper"]) == 2
    assert "alpha=None" in capsys.readouterr().err
