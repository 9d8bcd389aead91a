"""Where data sets are looked for, files that are missing or damaged, and the real data where it is there."""

import gzip
import os

import numpy as np
import pytest

from torchgmc_paper.datasets import FASSEG, GenderPrompts, HierarchicalText, _files, prepare


def test_root_from_the_environment(compact, monkeypatch):
    monkeypatch.delenv("TORCHGMC_DATA", raising=False)
    with pytest.raises(ValueError, match="`root` is missing and TORCHGMC_DATA is not set"):
        FASSEG()
    monkeypatch.setenv("TORCHGMC_DATA", str(compact))
    assert len(FASSEG()) == 4 and len(HierarchicalText()) == 6 and len(GenderPrompts()) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: FASSEG(root), r"no FASSEG faces in .*frontal.npz.*FASSEG-repository/V2.*download=True.*TORCHGMC_DATA"),
        (lambda root: HierarchicalText(root, "newsgroups"), r"newsgroups.jsonl.gz.*20news-bydate.tar.gz"),
        (lambda root: GenderPrompts(root), r"prompts.jsonl.gz.*text_corpus"),
    ],
)
def test_nothing_there(tmp_path, make, message):
    with pytest.raises(FileNotFoundError, match=message):
        make(tmp_path)
    assert not list(tmp_path.iterdir())


def test_bad_arguments_and_files(compact):
    with pytest.raises(ValueError, match="`subset` must be one of 'set118', 'frontal'.*got 'side'"):
        FASSEG(compact, subset="side")
    with pytest.raises(ValueError, match="`name` must be one of"):
        HierarchicalText(compact, "rcv1")
    with pytest.raises(ValueError, match="`part` must be one of"):
        GenderPrompts(compact, "all")
    with pytest.raises(TypeError, match="`root` must be a path, got int"):
        FASSEG(3)
    (compact / "fasseg" / "frontal.npz").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(ValueError, match="frontal.npz.* is not a readable .npz file"):
        FASSEG(compact)
    (compact / "text" / "prompts.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n')[:-9])
    with pytest.raises(ValueError, match="prompts.jsonl.gz.* is not a readable JSON Lines file"):
        GenderPrompts(compact)


def test_tables_round_trip(tmp_path):
    table = {"a": [1, 2], "b": ["x, y", ""], "c": ["0.5", ""]}
    _files.write_table(tmp_path / "t.csv", table)
    read = _files.read_table(tmp_path / "t.csv")
    assert read == {"a": ["1", "2"], "b": ["x, y", ""], "c": ["0.5", ""]}
    assert _files.typed(read["a"]) == [1, 2] and np.isnan(_files.typed(read["c"])[1]) and _files.typed(["", ""]) == ["", ""]


@pytest.mark.skipif("TORCHGMC_DATA" not in os.environ, reason="the real data is not here")
def test_real_data():
    assert [len(FASSEG(subset=name)) for name in ("set118", "frontal", "multipose", "all")] == [118, 70, 275, 345]
    faces = FASSEG(subset="all")
    assert abs(float(faces.face.flatten(1).sum(1).div(faces.valid.flatten(1).sum(1)).mean()) - 0.466) < 0.001
    wos = HierarchicalText(name="wos")
    probs, labels, sample = wos.scores()
    assert (len(wos), len(labels), int(sample.sum())) == (5918, 3950, 2457)
    assert abs(float((probs.argmax(1) == labels).float().mean()) - 0.752) < 0.001
    assert wos.labels[wos.scored("crossfit")].equal(wos.scores("crossfit").labels)
    prompts = GenderPrompts()
    assert (prompts.groups.numpy() == np.stack([prompts.outputs()[key] for key in ("is_female", "is_male")], 1)).all()
    rows = zip(prompts.texts, *(prompts.metadata[key] for key in ("word", "group", "lists")), strict=True)
    for text, word, group, lists in rows:  # our rules find every prompt of the compact layout
        whole = text.replace("[MASK]", word)
        found = {row["text"]: row for row in prepare.prompts.prompts_of({"id": "x", "text": whole})}
        mentioned = list(prepare.prompts.indicators(whole))
        assert found[text]["lists"] == lists and (mentioned == [group] or (group == "both" and len(mentioned) == 2))


def test_tables_hold_no_formulas_and_come_back_as_they_were(tmp_path):
    columns = {"=x": ["=1+1", "@a", "'quoted'", "b"], "n": [-1, "-2.5", "+3", "-1-1"]}
    _files.write_table(tmp_path / "t.csv", columns)
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert lines == ["'=x,n", "'=1+1,-1", "'@a,-2.5", "'quoted',+3", "b,'-1-1"]
    assert _files.read_table(tmp_path / "t.csv") == {"=x": columns["=x"], "n": ["-1", "-2.5", "+3", "-1-1"]}
