"""The command line against the Python interface: every task, every format, the same state."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchgmc as gmc
from gmctest import subprocess_env
from gmctest.cli_files import CASES, FORMATS, command, groups, images, side_files, tensors, write

pytest.importorskip("typer")
pytest.importorskip("rich")
from torchgmc.cli import main
from torchgmc.cli.tables import open_table
from torchgmc.deploy.io import read_notes

N = 240


def program(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The program as a user runs it."""
    env = subprocess_env()
    line = [sys.executable, "-W", "error", "-m", "torchgmc", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=cwd, env=env)


def read_array(path: Path, name: str) -> Any:
    return np.concatenate([block.arrays[name] for block in open_table(path).blocks([name])])


def head_words(folder: Path, name: str, data: Path) -> list[str]:
    return [str(data), *command(name, folder, CASES[name].words), "--groups", "sex,site"]


# -- the same state as the Python interface ------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_every_task_in_every_format(name: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    case, head_file = CASES[name], tmp_path / "head.safetensors"
    side_files(tmp_path)
    arrays, fresh = case.data(N, 0), case.data(N, 1)
    data, test = write(tmp_path / f"data.{suffix}", arrays), write(tmp_path / f"test.{suffix}", fresh)

    code = main(["calibrate", *head_words(tmp_path, name, data), "--out", str(head_file), "--chunk", "70", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert code == 0 and printed["groups"] == list(groups(arrays).names)
    if suffix == "csv":  # text holds float64
        arrays |= {key: value.astype(np.float64) for key, value in arrays.items() if value.dtype.kind == "f"}
        fresh |= {key: value.astype(np.float64) for key, value in fresh.items() if value.dtype.kind == "f"}
        read = {key: read_array(data, key) for key in case.observe}
        assert all(np.array_equal(read[key], arrays[key]) for key in read)
    made = case.make(list(groups(arrays).names)).fit(*tensors(arrays, case.observe), groups(arrays).membership)
    head = gmc.load(head_file)
    for key, value in made.state_dict().items():
        torch.testing.assert_close(head.state_dict()[key], value, rtol=1e-9, atol=1e-12, msg=key)
    assert printed["fit"]["iterations"] == made.report.iterations
    assert printed["fit"]["worst_after"] == pytest.approx(float(made.report.violations_after.abs().max()))

    assert main(["audit", str(head_file), str(test), "--chunk", "64", "--json", "--require", "nothing"]) == 0
    found = json.loads(capsys.readouterr().out)
    labels = ("labels",) if name == "text" else ()
    batch = dict(zip((*case.observe, *labels), tensors(fresh, (*case.observe, *labels)), strict=True))
    expected = gmc.audit(made, {**batch, "groups": groups(fresh).membership})
    assert found["max_violation"] == pytest.approx(expected.max_violation)
    assert found["table"]["group"] == expected.table["group"] and found["cost"] == pytest.approx(expected.cost)

    out = tmp_path / f"out.{suffix}"
    assert main(["apply", str(head_file), str(test), "--out", str(out), "--chunk", "64"]) == 0
    assert capsys.readouterr().out == f"{case.output} {(N, *expected_shape(name, fresh))}: {out}\n"
    given = [groups(fresh).membership] if name == "quantile" else [*tensors(fresh, case.observe[:1]), groups(fresh).membership]
    result = read_array(out, case.output)
    torch.testing.assert_close(torch.from_numpy(result).double(), made(*given).double(), rtol=1e-6, atol=1e-6)


def expected_shape(name: str, arrays: dict[str, Any]) -> tuple[int, ...]:
    return {"fnr": (12,), "tree": (), "text": (20,), "probability": (), "quantile": ()}[name]


@pytest.mark.parametrize(("name", "suffix"), [("fnr", "npz"), ("text", "csv")])
def test_the_program_itself(name: str, suffix: str, tmp_path: Path) -> None:
    """A real process: warnings are errors, a pipe gets no progress bar, JSON is alone on stdout."""
    side_files(tmp_path)
    case = CASES[name]
    data = write(tmp_path / f"data.{suffix}", case.data(N, 0))
    words = head_words(tmp_path, name, data)
    done = program(
        "calibrate", *words, "--out", "head.safetensors", "--holdout", "0.3", "--report", "r.html", "--json", cwd=tmp_path
    )
    assert done.stderr == "", done.stderr
    content = json.loads(done.stdout)
    assert content["files"] == {"head": "head.safetensors", "report": "r.html"}
    assert content["audit"]["num_examples"] == 72 and done.returncode == int(content["audit"]["violated"])
    page = (tmp_path / "r.html").read_text()
    assert content["audit"]["certificate"] in page and "torchgmc calibrate" in page
    assert content["head"] == type(gmc.load(tmp_path / "head.safetensors")).__name__


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


# -- options -------------------------------------------------------------------------------------------------------------------


def calibrated(tmp_path: Path, arrays: dict[str, Any], *words: str) -> tuple[int, gmc.Head]:
    data = write(tmp_path / "d.npz", arrays)
    code = main(["calibrate", str(data), "--out", str(tmp_path / "h.safetensors"), *words])
    return code, gmc.load(tmp_path / "h.safetensors")


FNR = ("--task", "fnr", "--target", "0.1", "--alpha", "0.02")


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
    words = ["--task", "fnr", "--alpha", "0.02", "--classes", "2", "--target", "0.1,0.2", "--groups", "who"]
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
    _, head = calibrated(tmp_path, arrays, "--task", "probability", "--alpha", "0.05", "--bins", "0")
    assert isinstance(head, gmc.ProbabilityHead) and head.num_classes == 3 and head.bins is None and not head.grouped


def test_a_tree_of_parents_and_labels_by_name(tmp_path: Path) -> None:
    arrays = CASES["tree"].data(N, 0)
    tree = gmc.TreeHead({"x": ["x1", "x2"], "y": ["y1", "y2", "y3"]}, 0.8, 0.05)
    numbered = arrays | {"parents": np.array(tree.tree.parents)}
    words = ("--task", "tree", "--target", "0.8", "--alpha", "0.05")
    _, first = calibrated(tmp_path, numbered, *words)
    named = numbered | {"names": np.array(tree.tree.names), "labels": np.array(tree.tree.names)[arrays["labels"]]}
    _, second = calibrated(tmp_path, named, *words)
    assert first.config()["parents"] == second.config()["parents"] and second.config()["names"] == tree.tree.names
    tree.fit(*tensors(arrays, ("probs", "labels")))
    for head in (first, second):
        torch.testing.assert_close(head.state_dict(), tree.state_dict())


def test_intersections_cuts_and_small_groups(tmp_path: Path) -> None:
    arrays = images(N, 0) | {"age": np.random.default_rng(3).integers(20, 90, N).astype(np.float64)}
    words = ["--groups", "sex,site,age", "--cut", "age=40,60", "--intersections", "2", "--overall", "--min-size", "30"]
    with pytest.warns(UserWarning, match="left out"):
        expected = gmc.Groups.from_columns(
            {k: arrays[k] for k in ("sex", "site", "age")},
            intersections=2,
            bins={"age": [40, 60]},
            overall=True,
            min_size=30,
            small="drop",
        )
    _, head = calibrated(tmp_path, arrays, *FNR, *words, "--small", "drop", "--chunk", "33")
    assert head.groups == list(expected.names)
    made = gmc.ThresholdHead(0.1, 0.02, expected).fit(*tensors(arrays, ("scores", "masks")), expected)
    torch.testing.assert_close(head.state_dict(), made.state_dict(), rtol=1e-9, atol=1e-12)
    assert read_notes(tmp_path / "h.safetensors")["groups"]["columns"][2]["edges"] == [40.0, 60.0]


def test_groups_are_known_again_from_another_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Integers, booleans and text from an npz are the same values in a csv."""
    arrays = CASES["probability"].data(N, 0) | {"smoker": np.random.default_rng(0).random(N) < 0.5}
    arrays["sex"] = np.array(["f", "m"])[arrays["sex"]]
    text = write(tmp_path / "d.csv", arrays)
    words = ["--task", "probability", "--alpha", "0.05", "--groups", "sex,site,smoker"]
    calibrated(tmp_path, arrays, *words)
    capsys.readouterr()
    results = []
    for data in (tmp_path / "d.npz", text):
        assert main(["audit", str(tmp_path / "h.safetensors"), str(data), "--json", "--require", "nothing"]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0]["table"]["count"] == results[1]["table"]["count"]
    assert main(["calibrate", str(text), "--out", str(tmp_path / "csv.safetensors"), *words]) == 0
    assert gmc.load(tmp_path / "csv.safetensors").groups == gmc.load(tmp_path / "h.safetensors").groups


def test_unknown_values_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calibrated(tmp_path, images(N, 0), *FNR, "--groups", "site")
    other = images(N, 1)
    other["site"][7] = 9
    data, head = write(tmp_path / "new.npz", other), str(tmp_path / "h.safetensors")
    capsys.readouterr()
    assert main(["audit", head, str(data)]) == 2
    assert "group column 'site' has 9 in row 7" in capsys.readouterr().err
    assert main(["apply", head, str(data), "--unknown", "none", "--out", str(tmp_path / "o.npz")]) == 0
    member = torch.from_numpy(other["site"])[:, None] == torch.tensor([1, 2, 3])
    result = torch.from_numpy(read_array(tmp_path / "o.npz", "masks"))
    assert result.equal(gmc.load(head)(torch.from_numpy(other["scores"]), member))


def test_held_out_rows_depend_on_the_seed_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = []
    for seed, chunk in ((0, 50), (0, 1000), (1, 50)):
        words = [*FNR, "--groups", "sex", "--holdout", "0.4", "--seed", str(seed), "--chunk", str(chunk), "--json"]
        capsys.readouterr()
        _, head = calibrated(tmp_path, images(N, 0), *words)
        states.append((head.state_dict()["offsets"], json.loads(capsys.readouterr().out)["audit"]["max_violation"]))
    torch.testing.assert_close(states[0], states[1])
    assert not states[0][0].equal(states[2][0])


def test_a_head_from_python_takes_a_matrix_or_a_column_for_each_group(tmp_path: Path) -> None:
    arrays = images(N, 0)
    member = groups(arrays).membership
    head = gmc.ThresholdHead(0.1, 0.02, ["f", "m", "a", "b", "c"]).fit(*tensors(arrays, ("scores", "masks")), member)
    file = gmc.save(head, tmp_path / "h.safetensors")
    plain = {key: arrays[key] for key in ("scores", "masks")}
    by_column = plain | {name: member[:, k].numpy() for k, name in enumerate(head.groups)}
    for data, words in ((plain | {"who": member.numpy()}, ["--groups", "who"]), (by_column, [])):
        write(tmp_path / "d.npz", data)
        assert main(["apply", str(file), str(tmp_path / "d.npz"), "--out", str(tmp_path / "o.npz"), *words]) == 0
        expected = head(torch.from_numpy(arrays["scores"]), member)
        assert torch.from_numpy(read_array(tmp_path / "o.npz", "masks")).equal(expected)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_membership_matrix_in_every_format(suffix: str, tmp_path: Path) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    arrays = CASES["quantile"].data(N, 0)
    member = groups(arrays).membership
    data = write(tmp_path / f"d.{suffix}", {"scores": arrays["scores"], "who": member.numpy(), "site": arrays["site"]})
    words = ["--task", "quantile", "--target", "0.8", "--alpha", "0.05", "--groups", "who,site", "--overall", "--chunk", "50"]
    assert main(["calibrate", str(data), *words, "--out", str(tmp_path / "h.safetensors")]) == 0
    head = gmc.load(tmp_path / "h.safetensors")
    assert head.groups == ["all", "site=1", "site=2", "site=3", *(f"who[{k}]" for k in range(5))]
    whole = torch.cat([torch.ones(N, 1).bool(), member[:, 2:], member], 1)
    assert main(["apply", str(tmp_path / "h.safetensors"), str(data), "--out", str(tmp_path / "o.npz")]) == 0
    assert torch.from_numpy(read_array(tmp_path / "o.npz", "thresholds")).equal(head(whole))


def test_missing_values_can_be_a_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{k / 60},{['f', 'm', ''][k % 3]}" for k in range(60)]
    (tmp_path / "d.csv").write_text("\n".join(["scores,sex", *lines]))
    words = [
        "--task",
        "quantile",
        "--target",
        "0.8",
        "--alpha",
        "0.1",
        "--groups",
        "sex",
        "--out",
        str(tmp_path / "h.safetensors"),
    ]
    assert main(["calibrate", str(tmp_path / "d.csv"), *words]) == 2
    assert "column `sex` has" in capsys.readouterr().err
    assert main(["calibrate", str(tmp_path / "d.csv"), *words, "--missing", "level"]) == 0
    assert gmc.load(tmp_path / "h.safetensors").groups == ["sex=f", "sex=m", "sex=missing"]
    assert main(["apply", str(tmp_path / "h.safetensors"), str(tmp_path / "d.csv"), "--out", str(tmp_path / "o.csv")]) == 0
    assert len(read_array(tmp_path / "o.csv", "thresholds")) == 60


def test_starting_thresholds_and_weights_are_asked_for_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = CASES["quantile"].data(N, 0) | {"start": np.linspace(0, 1, N), "w": np.ones(N)}
    words = ("--task", "quantile", "--target", "0.8", "--alpha", "0.05", "--base", "start", "--weight", "w")
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
    words = ("--task", "quantile", "--target", "0.8", "--alpha", "0.01", "--groups", "site")
    assert calibrated(tmp_path, arrays, *words)[0] == 0
    assert "warning: alpha was not reached" in capsys.readouterr().err
    assert calibrated(tmp_path, arrays, *words, "--strict")[0] == 1


@pytest.mark.parametrize("format", ["torchscript", "torch.export"])
def test_export_of_the_head_alone(format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = CASES["probability"].data(N, 0)
    words = ["--task", "probability", "--alpha", "0.02", "--groups", "sex,site", "--bins", "0"]
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
    assert "give --example FILE" in capsys.readouterr().err
    assert main(["export", str(file), "--out", str(tmp_path / "o.pt"), "--example", str(data)]) == 0
    scores = torch.from_numpy(arrays["scores"])
    assert torch.jit.load(tmp_path / "o.pt")(scores).equal(head(scores))


# -- what is shown -------------------------------------------------------------------------------------------------------------


def test_every_command_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name in ("calibrate", "audit", "apply", "export", "demo"):
        assert name in listed
        assert main([name, "--help"]) == 0
        assert f"Example: torchgmc {name} " in " ".join(capsys.readouterr().out.split())


def test_the_table_is_whole_and_needs_no_colour(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = images(N, 0)
    arrays["site"] = np.array(["a clinic with a very long name [north], building 3, second floor", "b", "c"])[
        arrays["site"] - 1
    ]
    calibrated(tmp_path, arrays, *FNR, "--groups", "sex,site")
    shown = capsys.readouterr().out
    assert "site=a clinic with a very long name [north], building 3, second floor" in shown and "\x1b" not in shown
    words = [str(tmp_path / "h.safetensors"), str(tmp_path / "d.npz"), "--rows", "2", "--require", "nothing"]
    assert main(["audit", *words]) == 0
    shown = capsys.readouterr().out
    assert "and 3 more" in shown and "With confidence 95 %" in shown and "examples like these would certify" in shown


def test_a_bar_on_a_terminal_and_none_in_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from torchgmc.cli import show

    with show.progress("observe", 3) as advance:
        advance(3)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with show.progress("observe", 3) as advance:
        advance(3)
    printed = capsys.readouterr()
    assert printed.out == "" and "observe" in printed.err


def test_demo_all_runs_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torchgmc.demo import DEMOS

    ran = {}

    class Ran:
        QUICK = "tiny"

        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, out: Path, **options: Any) -> Any:
            ran[self.name] = (out, options)
            return type("Result", (), {"to_dict": lambda _: {"demo": self.name}})()

    monkeypatch.setattr("torchgmc.cli.demo.import_module", lambda module: Ran(module.rsplit(".", 1)[1]))
    assert main(["demo", "all", "--out", str(tmp_path), "--quick", "--seed", "3", "--json"]) == 0
    assert ran == {name: (tmp_path / name, {"seed": 3, "setting": "tiny"}) for name in DEMOS}
    assert json.loads(capsys.readouterr().out) == {name: {"demo": name} for name in DEMOS}
