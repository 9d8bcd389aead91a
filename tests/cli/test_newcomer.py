"""What someone new stumbled over on the command line, with tables that pandas wrote."""

from pathlib import Path

import numpy as np
import pytest
import torch

import torchgmc as gmc
from torchgmc.cli import main

pandas = pytest.importorskip("pandas")


def houses(n=400, seed=0):
    """A frame with text, numbers and booleans, values missing in the first two."""
    rng = np.random.default_rng(seed)
    frame = pandas.DataFrame(
        {
            "city": rng.choice(["Lyon", "Nice", None], n, p=[0.6, 0.3, 0.1]),
            "age": rng.normal(40, 15, n).round(1),
            "garden": rng.random(n) < 0.3,
        }
    )
    frame.loc[rng.random(n) < 0.1, "age"] = np.nan
    frame.loc[3, ["city", "age"]] = ["Nice", np.nan]
    frame["residual"] = np.abs(rng.normal(size=n))
    return frame


def write(frame, path: Path) -> str:
    frame.to_csv(path, index=False) if path.suffix == ".csv" else frame.to_parquet(path)
    return str(path)


QUANTILE = ["--task", "quantile", "--target", "0.9", "--alpha", "0.02", "--scores", "residual"]
CUT = ["--groups", "city,garden,age", "--cut", "age=30,50"]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_number_that_is_missing_can_be_a_group(suffix, tmp_path, capsys):
    data, test = (write(houses(seed=k), tmp_path / f"{k}{suffix}") for k in (0, 1))
    out = str(tmp_path / "head.safetensors")
    assert main(["calibrate", data, *QUANTILE, *CUT, "--missing", "level", "--out", out]) == 0
    frame = houses()
    made = gmc.Groups.from_columns(frame[["city", "garden", "age"]], bins={"age": [30, 50]}, missing="level")
    assert gmc.load(out).groups == list(made.names) and "age=missing" in made.names
    assert main(["apply", out, test, "--out", str(tmp_path / f"o{suffix}")]) == 0
    read = pandas.read_csv if suffix == ".csv" else pandas.read_parquet
    found = read(tmp_path / f"o{suffix}")["thresholds"].to_numpy()
    wanted = gmc.load(out)(made.transform(houses(seed=1)).membership)
    np.testing.assert_allclose(found, wanted.numpy())


@pytest.mark.parametrize(("groups", "name"), [("garden,city", "city"), ("age", "age")])
def test_a_missing_value_is_reported_in_the_row_of_the_file(groups, name, tmp_path, capsys):
    frame = houses()
    data, out = write(frame, tmp_path / "d.csv"), str(tmp_path / "h.safetensors")
    cut = ["--cut", "age=30,50"] if name == "age" else []
    assert main(["calibrate", data, *QUANTILE, "--groups", groups, *cut, "--out", out]) == 2
    row = int(frame[name].isna().to_numpy().argmax())
    assert f"`{name}` has no value in row {row}; " in (said := capsys.readouterr().err) and "--missing level" in said


def test_the_list_of_commands_is_not_cut_off(capsys):
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out.split("Commands:")[1].strip().splitlines()
    assert len(listed) == 6 and not any(line.endswith("...") for line in listed)


def test_how_columns_make_a_matrix_is_said(tmp_path, capsys):
    data = write(pandas.DataFrame({"p_cat": [0.5, 0.5], "p_dog": [0.5, 0.5], "label": [0, 1]}), tmp_path / "d.csv")
    (tmp_path / "tree.json").write_text('["cat", "dog"]')
    words = ["--task", "tree", "--target", "0.9", "--alpha", "0.1", "--tree", str(tmp_path / "tree.json")]
    assert main(["calibrate", data, *words, "--out", str(tmp_path / "h.safetensors")]) == 2
    assert "--scores NAME (columns NAME[0], NAME[1], ... make a matrix)." in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".csv", ".npz"])
def test_answers_of_a_tree_by_name(suffix, tmp_path, capsys):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 300)
    probs = rng.dirichlet([1, 1, 1], 300) * 0.5 + 0.5 * np.eye(3)[labels]
    np.savez(tmp_path / "d.npz", probs=probs, labels=labels)
    (tmp_path / "tree.json").write_text('{"animal": ["cat", "dog"], "vehicle": ["omnibus"]}')
    words = ["--task", "tree", "--target", "0.9", "--alpha", "0.1", "--tree", str(tmp_path / "tree.json")]
    data, out, found = (str(tmp_path / name) for name in ("d.npz", "h.safetensors", f"o{suffix}"))
    assert main(["calibrate", data, *words, "--out", out]) == 0
    assert main(["apply", out, data, "--out", found, "--node-names", "--chunk", "7"]) == 0
    named = pandas.read_csv(found)["nodes"].tolist() if suffix == ".csv" else np.load(found)["nodes"].tolist()
    head = gmc.load(out)
    assert named == head.names(head(torch.from_numpy(probs)))
    assert main(["apply", out, data, "--out", str(tmp_path / "o.parquet"), "--node-names"]) == 2
    write(houses(), tmp_path / "q.csv")
    assert main(["calibrate", str(tmp_path / "q.csv"), *QUANTILE, "--out", out]) == 0
    assert main(["apply", out, str(tmp_path / "q.csv"), "--out", str(tmp_path / "o.csv"), "--node-names"]) == 2
    assert "--node-names is for a tree" in capsys.readouterr().err
