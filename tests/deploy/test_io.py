"""Saved heads: whole or not at all, and refused when truncated, changed, foreign or newer."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import torchgmc as gmc
from torchgmc.deploy import io
from torchgmc.heads.threshold.risks import MonotoneRisk

SCORES = torch.rand(60, 5, 5, generator=torch.Generator().manual_seed(0))
MASKS = torch.rand(60, 5, 5, generator=torch.Generator().manual_seed(1)) < 0.5
GROUPS = torch.rand(60, 2, generator=torch.Generator().manual_seed(2)) < 0.6


@pytest.fixture
def head():
    return gmc.ThresholdHead(0.1, 0.05, ["a", "ü & b"], conditional=True, jitter=0.01).fit(SCORES, MASKS, GROUPS)


@pytest.mark.parametrize(
    "options",
    [{}, {"risk": "fpr"}, {"logits": True}, {"range": (-1.0, 2.0)}, {"resolution": "exact"}, {"init": 0.3, "resolution": 0.01}],
)
def test_round_trip(tmp_path, options):
    head = gmc.ThresholdHead(0.1, 0.05, ["a", "b"], **options).fit(SCORES, MASKS, GROUPS)
    loaded = gmc.load(gmc.save(head, tmp_path / "head.safetensors"))
    assert type(loaded) is gmc.ThresholdHead and loaded.config() == head.config() and loaded.is_fitted
    assert torch.equal(loaded(SCORES, GROUPS), head(SCORES, GROUPS))
    assert loaded.fit(SCORES, MASKS, GROUPS).offsets.equal(head.offsets)


def test_classes_baselines_and_unfitted_heads(tmp_path):
    two = gmc.ThresholdHead([0.1, 0.2], 0.05, num_classes=2).fit(SCORES[:, :2], MASKS[:, :2])
    assert torch.equal(gmc.load(gmc.save(two, tmp_path / "2"))(SCORES[:, :2]), two(SCORES[:, :2]))
    for kind in (gmc.baselines.ConformalRiskControl, gmc.baselines.Unprocessed):
        head = kind(0.1, groups=["a", "b"]).fit(SCORES, MASKS, GROUPS)
        loaded = gmc.load(gmc.save(head, tmp_path / "b"))
        assert type(loaded) is kind and torch.equal(loaded(SCORES, GROUPS), head(SCORES, GROUPS))
    assert not gmc.load(gmc.save(gmc.ThresholdHead(0.1, 0.05), tmp_path / "n")).is_fitted


def test_a_risk_of_ones_own_is_given_again(tmp_path):
    risk = MonotoneRisk(lambda s, m, t: ((s <= t[..., None, None]) & m).double().mean((2, 3)), name="share")
    head = gmc.ThresholdHead(0.1, 0.05, risk=risk).fit(SCORES, MASKS)
    path = gmc.save(head, tmp_path / "head")
    with pytest.raises(ValueError, match=r"gmc.load\(path, risk=MonotoneRisk"):
        gmc.load(path)
    assert torch.equal(gmc.load(path, risk=risk)(SCORES), head(SCORES))


def test_truncated_at_every_length(head, tmp_path):
    path = gmc.save(head, tmp_path / "head")
    data = path.read_bytes()
    for length in [*range(0, len(data), 37), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match="truncated or damaged"):
            gmc.load(path)


def test_every_flipped_byte_is_refused_or_harmless(head, tmp_path):
    path = gmc.save(head, tmp_path / "head")
    data, expected = path.read_bytes(), head(SCORES, GROUPS)
    for place in range(0, len(data), 11):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        try:
            loaded = gmc.load(path)
        except ValueError:
            continue
        assert torch.equal(loaded(SCORES, GROUPS), expected)  # e.g. white space of the header


def rewrite(path, **changes):
    """The same file with another configuration and a right checksum."""
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        body = json.loads(file.metadata()["torchgmc"]) | changes
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    text = json.dumps(body)
    save_file(tensors, str(path), metadata={"torchgmc": text, "checksum": io._checksum(text, tensors)})


def test_newer_foreign_unknown_and_impossible_files(head, tmp_path):
    path = gmc.save(head, tmp_path / "head")
    rewrite(path, schema=99)
    with pytest.raises(ValueError, match="schema 99, but this version of torchgmc reads up to 1; upgrade"):
        gmc.load(path)
    rewrite(path, schema=1, head="OtherHead")
    with pytest.raises(ValueError, match="unknown kind 'OtherHead'; import its module first. Known: .*ThresholdHead"):
        gmc.load(path)
    rewrite(path, head="ThresholdHead", config={"target": 0.1, "alpha": -1.0})
    with pytest.raises(ValueError, match="configuration of this ThresholdHead cannot be used: `alpha`"):
        gmc.load(path)
    save_file({"x": torch.ones(2)}, str(path))
    with pytest.raises(ValueError, match=r"was not written by torchgmc.save"):
        gmc.load(path)
    path.write_bytes(b"\x80\x04K\x01.")  # a pickle
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        gmc.load(path)
    with pytest.raises(FileNotFoundError, match="no file"):
        gmc.load(tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match="no file"):
        gmc.load(tmp_path)


def test_tampered_tensors_are_refused(head, tmp_path):
    path = gmc.save(head, tmp_path / "head")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="changed since it was saved"):
        gmc.load(path)


def test_save_writes_the_whole_file_or_nothing(head, tmp_path, monkeypatch):
    path = gmc.save(head, tmp_path / "head")
    before = path.read_bytes()

    def fail(*_, **__):
        raise OSError("disk full")

    with monkeypatch.context() as broken, pytest.raises(OSError, match="disk full"):
        broken.setattr("os.fsync", fail)
        gmc.save(head, path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["head"]
    with pytest.raises(IsADirectoryError, match="is a folder"):
        gmc.save(head, tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        gmc.save(head, tmp_path / "no" / "head")
    with pytest.raises(TypeError, match="must be a torchgmc head"):
        gmc.save(torch.nn.Linear(2, 2), path)


def test_loads_in_another_process(head, tmp_path):
    path = gmc.save(head, tmp_path / "head")
    code = "import sys, torchgmc; print(torchgmc.load(sys.argv[1]).offsets.tolist())"
    run = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == head.offsets.tolist()


def test_groups_travel_with_the_head(head, tmp_path):
    columns = {"sex": ["f", "m"] * 30, "site": [3, 7, 12] * 20}
    groups = gmc.Groups.from_columns(columns, intersections=2)
    named = gmc.ThresholdHead(0.1, 0.05, groups).fit(SCORES, MASKS, groups)
    path = gmc.save(named, tmp_path / "head", groups=groups)
    loaded = gmc.load(path)
    assert loaded.transform(columns).equal(groups.membership)
    assert loaded.transform({"site": [7, 7], "sex": ["f", "x"]}, unknown="none").sum(1).tolist() == [3, 1]
    assert gmc.load(gmc.save(loaded, tmp_path / "again")).transform(columns).equal(groups.membership)  # kept
    with pytest.raises(ValueError, match="column `sex` has 'x' in row 0"):
        loaded.transform({"site": [7], "sex": ["x"]})
    with pytest.raises(ValueError, match=r"saved without them. Save it with `gmc.save\(head, path, groups=groups\)`"):
        bare = gmc.ThresholdHead(0.1, 0.05, groups.names).fit(SCORES, MASKS, groups)
        gmc.load(gmc.save(bare, path)).transform(columns)
    with pytest.raises(ValueError, match="`groups` must be the head's groups, a, ü & b, got sex=f, sex=m, site=3"):
        gmc.save(head, path, groups=groups)
    with pytest.raises(TypeError, match="`groups` must be Groups, made by `Groups.from_columns`, got list"):
        gmc.save(named, path, groups=["sex=f"])


def test_a_file_says_nothing_about_rows(tmp_path):
    states = []
    for times in (1, 2):
        groups = gmc.Groups.from_columns({"sex": ["f", "m"] * 30 * times})
        head = gmc.ThresholdHead(0.1, 0.05, groups)
        states.append(io._read(gmc.save(head, tmp_path / "head", groups=groups))[0])
    assert states[0] == states[1] and states[0]["groups"]["columns"][0]["labels"] == [["f", 0], ["m", 1]]


def test_saved_through_a_link(head, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "current").symlink_to(tmp_path / "models" / "v1")
    gmc.save(head, tmp_path / "current")
    assert (tmp_path / "current").is_symlink() and gmc.load(tmp_path / "models" / "v1").offsets.equal(head.offsets)


def test_a_class_that_stands_for_a_head_is_not_loaded(head, tmp_path):
    """torch.export makes subclasses with the same name and module, which live until they are collected."""
    stand_in = type("ThresholdHead", (gmc.ThresholdHead,), {"__module__": gmc.ThresholdHead.__module__, "__init__": None})
    assert stand_in.kind() == "ThresholdHead"
    assert type(gmc.load(gmc.save(head, tmp_path / "head"))) is gmc.ThresholdHead
