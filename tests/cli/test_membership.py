"""Groups on the command line: columns, cuts, intersections, matrices, values missing or never seen."""

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.numpy import load_file

import torchgmc as gmc
from gmctest import GOLDEN
from gmctest.cli_files import CASES, FNR, FORMATS, N, calibrated, groups, images, read_array, tensors, write
from gmctest.frames import QUANTILE, houses, write_frame
from torchgmc.cli import main
from torchgmc.cli.membership import Membership
from torchgmc.cli.options import Grouping
from torchgmc.cli.tables import open_table


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
    assert head.named_groups.columns[2].edges == (40.0, 60.0)


def test_groups_are_known_again_from_another_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Integers, booleans and text from an npz are the same values in a csv."""
    arrays = CASES["probability"].data(N, 0) | {"smoker": np.random.default_rng(0).random(N) < 0.5}
    arrays["sex"] = np.array(["f", "m"])[arrays["sex"]]
    text = write(tmp_path / "d.csv", arrays)
    words = ["probability", "--alpha", "0.05", "--groups", "sex,site,smoker"]
    calibrated(tmp_path, arrays, *words)
    capsys.readouterr()
    results = []
    for data in (tmp_path / "d.npz", text):
        assert main(["audit", str(tmp_path / "h.safetensors"), str(data), "--json", "--require", "nothing"]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0]["table"]["count"] == results[1]["table"]["count"]
    assert main(["calibrate", *words, str(text), "--out", str(tmp_path / "csv.safetensors")]) == 0
    assert gmc.load(tmp_path / "csv.safetensors").groups == gmc.load(tmp_path / "h.safetensors").groups


def test_unknown_values_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calibrated(tmp_path, images(N, 0), *FNR, "--groups", "site")
    other = images(N, 1)
    other["site"][7] = 9
    data, head = write(tmp_path / "new.npz", other), str(tmp_path / "h.safetensors")
    capsys.readouterr()
    assert main(["audit", head, str(data)]) == 2
    assert "group column `site` has 9 in row 7" in capsys.readouterr().err
    assert main(["apply", head, str(data), "--unknown", "none", "--out", str(tmp_path / "o.npz")]) == 0
    member = torch.from_numpy(other["site"])[:, None] == torch.tensor([1, 2, 3])
    result = torch.from_numpy(read_array(tmp_path / "o.npz", "masks"))
    assert result.equal(gmc.load(head)(torch.from_numpy(other["scores"]), member))


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
    words = ["quantile", "--target", "0.8", "--alpha", "0.05", "--groups", "who,site", "--overall", "--chunk", "50"]
    assert main(["calibrate", *words, str(data), "--out", str(tmp_path / "h.safetensors")]) == 0
    head = gmc.load(tmp_path / "h.safetensors")
    assert head.groups == ["all", "site=1", "site=2", "site=3", *(f"who[{k}]" for k in range(5))]
    whole = torch.cat([torch.ones(N, 1).bool(), member[:, 2:], member], 1)
    assert main(["apply", str(tmp_path / "h.safetensors"), str(data), "--out", str(tmp_path / "o.npz")]) == 0
    assert torch.from_numpy(read_array(tmp_path / "o.npz", "thresholds")).equal(head(whole))


def test_missing_values_can_be_a_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{k / 60},{['f', 'm', ''][k % 3]}" for k in range(60)]
    (tmp_path / "d.csv").write_text("\n".join(["scores,sex", *lines]))
    words = [
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
    assert main(["calibrate", *words, str(tmp_path / "d.csv")]) == 2
    assert "column `sex` has" in capsys.readouterr().err
    assert main(["calibrate", *words, str(tmp_path / "d.csv"), "--missing", "level"]) == 0
    assert gmc.load(tmp_path / "h.safetensors").groups == ["sex=f", "sex=m", "sex=missing"]
    assert main(["apply", str(tmp_path / "h.safetensors"), str(tmp_path / "d.csv"), "--out", str(tmp_path / "o.csv")]) == 0
    assert len(read_array(tmp_path / "o.csv", "thresholds")) == 60


CUT = ["--groups", "city,garden,age", "--cut", "age=30,50"]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_number_that_is_missing_can_be_a_group(suffix, tmp_path, capsys):
    pandas = pytest.importorskip("pandas")
    data, test = (write_frame(houses(seed=k), tmp_path / f"{k}{suffix}") for k in (0, 1))
    out = str(tmp_path / "head.safetensors")
    assert main(["calibrate", *QUANTILE, data, *CUT, "--missing", "level", "--out", out]) == 0
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
    data, out = write_frame(frame, tmp_path / "d.csv"), str(tmp_path / "h.safetensors")
    cut = ["--cut", "age=30,50"] if name == "age" else []
    assert main(["calibrate", *QUANTILE, data, "--groups", groups, *cut, "--out", out]) == 2
    row = int(frame[name].isna().to_numpy().argmax())
    assert f"`{name}` has no value in row {row}; " in (said := capsys.readouterr().err) and "--missing level" in said


@settings(deadline=None, max_examples=25)
@given(data=st.data(), n=st.integers(1, 30), rows=st.integers(1, 8), seed=st.integers(0, 2**16))
def test_groups_learned_in_blocks_are_those_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, n: int, rows: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    columns = {
        "sex": rng.choice(np.array(["f", "m", "x"]), n),
        "site": rng.integers(-1, 12, n),
        "old": rng.random(n) < 0.5,
        "age": rng.integers(20, 80, n).astype(np.float64),
    }
    intersections = data.draw(st.integers(1, 4))
    overall = data.draw(st.booleans())
    options = Grouping(",".join(columns), intersections=intersections, cut=["age=40,60"], min_size=0, overall=overall)
    expected = gmc.Groups.from_columns(
        columns, intersections=intersections, bins={"age": [40.0, 60.0]}, min_size=0, overall=options.overall
    )
    suffix = data.draw(st.sampled_from(["npz", "csv"]))
    table = open_table(write(tmp_path_factory.mktemp("groups") / f"d.{suffix}", columns))
    learned = Membership.learn(table, options, rows)
    assert learned is not None
    again = Membership.from_dict(_through_json(learned.to_dict()))
    for member in (learned, again):
        assert member.names == list(expected.names)
        found = [member.of(block) for block in table.blocks(list(member.matrices), member.columns, rows)]
        assert torch.cat(found).equal(expected.membership)


def _through_json(content: Any) -> Any:
    return json.loads(json.dumps(content))


@pytest.mark.parametrize("name", ["columns", "matrix"])
@pytest.mark.parametrize("suffix", ["npz", "csv"])
def test_files_of_version_0_1_are_understood(name: str, suffix: str, tmp_path: Path) -> None:
    """Heads that `calibrate` wrote when groups were kept in the notes; what `apply` gave then it gives now."""
    rng = np.random.default_rng(1)
    new = {"scores": rng.random(50), "sex": np.array(["f", "m"])[rng.integers(0, 2, 50)], "site": rng.integers(1, 12, 50)}
    new |= {"smoker": rng.random(50) < 0.5, "age": rng.integers(20, 80, 50).astype(float), "who": rng.random((50, 2)) < 0.5}
    data, out = write(tmp_path / f"n.{suffix}", new), tmp_path / "o.npz"
    assert main(["apply", str(GOLDEN / f"calibrate-{name}-0.1.head"), str(data), "--out", str(out)]) == 0
    expected = load_file(GOLDEN / "calibrate-0.1.expected.safetensors")[name]
    np.testing.assert_allclose(np.load(out)["thresholds"], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("suffix", FORMATS)
def test_groups_saved_from_python_are_understood(suffix: str, tmp_path: Path) -> None:
    arrays = CASES["quantile"].data(N, 0)
    made = groups(arrays, 2)
    head = gmc.QuantileHead(0.8, 0.02, made).fit(torch.from_numpy(arrays["scores"]), made)
    file = gmc.save(head, tmp_path / "h.safetensors", groups=made)
    data = write(tmp_path / f"d.{suffix}", arrays)
    assert main(["apply", str(file), str(data), "--out", str(tmp_path / "o.npz")]) == 0
    assert torch.from_numpy(read_array(tmp_path / "o.npz", "thresholds")).equal(head(made.membership))


def test_groups_of_a_file_are_understood_in_python(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    data, out = write_frame(houses(), tmp_path / "d.csv"), str(tmp_path / "h.safetensors")
    assert main(["calibrate", *QUANTILE, data, *CUT, "--missing", "level", "--out", out]) == 0
    frame = pandas.read_csv(data)
    made = gmc.Groups.from_columns(houses()[["city", "garden", "age"]], bins={"age": [30, 50]}, missing="level")
    assert gmc.load(out).transform(frame).equal(made.membership)
    assert gmc.load(out).transform(frame.astype(str).replace("nan", None)).equal(made.membership)  # however it is written


@pytest.mark.parametrize("labels", [["--5", "5"], ["007", "12"], ["-", "+1"], ["1_0", "10"]])
def test_text_that_is_not_quite_a_number(labels: list[str], tmp_path: Path) -> None:
    lines = [f"{k / 60},{labels[k % 2]}" for k in range(60)]
    (tmp_path / "d.csv").write_text("\n".join(["scores,code", *lines]))
    words = ["quantile", "--target", "0.8", "--alpha", "0.1", "--groups", "code", str(tmp_path / "d.csv")]
    assert main(["calibrate", *words, "--out", str(tmp_path / "h.safetensors")]) == 0
    head = gmc.load(tmp_path / "h.safetensors")
    assert head.groups == sorted(f"code={label}" for label in labels)
    assert main(["apply", str(tmp_path / "h.safetensors"), str(tmp_path / "d.csv"), "--out", str(tmp_path / "o.csv")]) == 0


def test_a_label_that_no_file_can_hold_is_refused_before_the_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"residual": np.linspace(0, 1, 20), "day": [datetime.date(2020, 1, 1 + k % 2) for k in range(20)]})
    frame.to_parquet(tmp_path / "d.parquet")
    words = [*QUANTILE, str(tmp_path / "d.parquet"), "--groups", "day", "--out", str(tmp_path / "h.safetensors")]
    assert main(["calibrate", *words]) == 2
    assert "column `day` has the label datetime.date(2020, 1, 1), a date, which JSON cannot hold" in capsys.readouterr().err
