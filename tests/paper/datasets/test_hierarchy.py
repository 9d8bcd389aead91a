"""Texts under a tree of labels: the compact layout and the published archives."""

import csv
import io
import os
import tarfile
import zipfile

import pytest
import torch

import torchgmc as gmc
from torchgmc_paper.datasets import HierarchicalText, prepare


def test_hierarchy(compact):
    texts = HierarchicalText(compact)
    assert len(texts) == 6 and texts[4] == ("text 4", 1) and texts.num_leaves == 3
    assert texts.random_sample.tolist() == [False, True] * 3
    probs, labels, sample = texts.scores()
    assert probs.dtype == torch.float32 and labels.tolist() == [2, 1, 0, 2] and sample.tolist() == [True, False, True, True]
    assert texts.labels[texts.scored()].equal(labels)
    head = gmc.TreeHead(texts.parents, target=0.9, alpha=0.2, names=texts.node_names)
    assert head.fit(probs, labels)(probs).shape == (4,)
    assert list(head.sets) == ["a", "b", "all"]
    with pytest.raises(FileNotFoundError, match="scores_crossfit.npz.*train a classifier"):
        texts.scores("crossfit")


def web_of_science(root, leaf, num=7):
    with zipfile.ZipFile(root / "WebOfScience.zip", "w") as archive:
        archive.writestr("WOS46985/X.txt", "".join(f"abstract  {k} \r\n" for k in range(num)))
        archive.writestr("WOS46985/Y.txt", "".join(f"{y}\r\n" for y in leaf))


def test_web_of_science_from_its_archive(tmp_path):
    leaf = [0, 0, 1, 40, 40, 40, 110]
    web_of_science(tmp_path, leaf)
    texts = HierarchicalText(tmp_path, "wos")
    assert texts.labels.tolist() == [0, 0, 1, 2, 2, 2, 3] and texts.texts[3] == "abstract 3"
    leaves = ["Computer vision", "Machine learning", "Depression", "Cancer"]
    assert texts.node_names == [*leaves, "CS", "Psychology", "Medical", "Root"]
    assert texts.parents == [4, 4, 5, 6, 7, 7, 7, -1]
    assert {s for s in texts.metadata["split"]} == {"train", "score"}
    gmc.TreeHead(texts.parents, target=0.9, alpha=0.1, names=texts.node_names)
    with pytest.raises(FileNotFoundError, match="scores come with the compact layout only"):
        texts.scores()


@pytest.mark.parametrize(
    ("leaf", "message"),
    [([0] * 6 + [134], "not as published.*134"), ([0] * 6, "7 texts and 6 leaves; the two numbers must agree")],
)
def test_another_web_of_science(tmp_path, leaf, message):
    web_of_science(tmp_path, leaf)
    with pytest.raises(ValueError, match=message):
        HierarchicalText(tmp_path, "wos")


def test_newsgroups_from_their_archive(tmp_path):
    body = "A post about the subject of the group number {} and some more words."
    with tarfile.open(tmp_path / "20news-bydate.tar.gz", "w:gz") as archive:
        for k, group in enumerate(["sci.med", "alt.atheism", "talk.politics.guns", "sci.space"]):
            for part, number in (("train", 1), ("test", 2), ("test", 3)):
                text = body.format(k) if number < 3 else body.format(k) + " Another one."  # 1 and 2 are the same
                content = f"From: me@x.org\nSubject: s\n\n> quoted\n{text}\n--\nme@x.org\n".encode()
                info = tarfile.TarInfo(f"20news-bydate-{part}/{group}/{number}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    texts = HierarchicalText(tmp_path, "newsgroups")
    assert texts.node_names[:4] == ["alt.atheism", "sci.med", "sci.space", "talk.politics.guns"]
    assert texts.node_names[4:] == ["sci", "politics", "religion", "Root"] and texts.parents == [6, 4, 4, 5, 7, 7, 7, -1]
    assert len(texts) == 8 and texts.texts[:2] == [body.format(1), body.format(1) + " Another one."]
    assert sorted(texts.labels.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_amazon_from_its_table(tmp_path):
    folder = tmp_path / "HierarchicalTextClassification" / "data"
    folder.mkdir(parents=True)
    rows = [(f'said "{k}", fine', "toys", "games", "cards") for k in range(6)]
    rows += [(f"good {k}", "pets", "games", "unknown") for k in range(7)] + [("rare", "pets", "dogs", "doors")] * 5
    with (folder / "test.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "cat1", "cat2", "cat3"), *rows])
    texts = HierarchicalText(tmp_path, "amazon")
    assert len(texts) == 13 and texts.texts[0] == 'said "0", fine'
    assert texts.node_names == ["pets/games/unknown", "toys/games/cards", "pets/games", "toys/games", "pets", "toys", "Root"]
    assert texts.parents == [2, 3, 4, 5, 6, 6, -1]


def test_damaged_archives(tmp_path):
    (tmp_path / "WebOfScience.zip").write_bytes(b"no zip")
    with pytest.raises(ValueError, match="WebOfScience.zip.* is not as published"):
        HierarchicalText(tmp_path, "wos")
    (tmp_path / "20news-bydate.tar.gz").write_bytes(b"no tar")
    with pytest.raises(ValueError, match="20news-bydate.tar.gz.* is not as published"):
        HierarchicalText(tmp_path, "newsgroups")
    assert not (tmp_path / "hierarchy").exists()


@pytest.mark.skipif("TORCHGMC_DATA" not in os.environ, reason="the real data is not here")
@pytest.mark.parametrize("name", ["newsgroups", "amazon"])
def test_real_trees(name):
    """A tree grown from its leaves is the tree of the compact layout."""
    texts = HierarchicalText(name=name)

    def route(node):
        above = texts.parents[node]
        return (*route(above), texts.node_names[node]) if above >= 0 else ()

    leaves = [route(leaf) for leaf in range(texts.num_leaves)]
    tops = {"newsgroups": prepare.texts.SECTIONS, "amazon": sorted({path[0] for path in leaves})}[name]
    tree = prepare.texts.grow(leaves, tops)
    assert tree["parent"] == texts.parents and tree["names"] == texts.node_names


@pytest.mark.skipif("TORCHGMC_DATA" not in os.environ, reason="the real data is not here")
def test_real_web_of_science(tmp_path):
    """An archive with every leaf gives the tree of the compact layout."""
    web_of_science(tmp_path, range(134), num=134)
    made, real = HierarchicalText(tmp_path, "wos"), HierarchicalText(name="wos")
    assert made.node_names == real.node_names and made.parents == real.parents
