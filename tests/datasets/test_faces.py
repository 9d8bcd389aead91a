"""Datasets: the compact layout, the published layout, and errors. All data is made here."""

import csv
import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile

import numpy as np
import pytest
import torch

import torchgmc as gmc
from torchgmc.datasets import FASSEG, GenderPrompts, HierarchicalText, _faces, _files, _prompts, _skin, _texts


def write_lines(path, rows):
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def compact(tmp_path):
    """The compact layout with a few made-up rows."""
    rng = np.random.default_rng(0)
    fasseg, hierarchy, text = (tmp_path / name for name in ("fasseg", "hierarchy", "text"))
    for folder in (fasseg, hierarchy, text, text / "mlm"):
        folder.mkdir()
    shapes = {"frontal": (3, 12, 9), "multipose": (4, 12, 12)}
    rows = []
    for name, (n, height, width) in shapes.items():
        label = rng.integers(0, 6, (n, height, width)).astype(np.uint8)
        image = rng.integers(0, 256, (n, height, width, 3)).astype(np.uint8)
        hw = np.stack([np.full(n, height), np.arange(n) + width - n + 1], 1).astype(np.int16)
        for k in range(n):
            label[k, :, hw[k, 1] :] = 255
            image[k, :, hw[k, 1] :] = 0
            subject = "" if name == "frontal" else str(1 + k // 2)
            pose = "frontal" if k % 2 else "half"
            rows.append([name, k, 1, int(name == "frontal" or k == 0), pose, subject, subject, k % 3, 0.5 * k])
        np.savez(fasseg / f"{name}.npz", image=image, label=label, hw=hw)
    rows.insert(4, ["multipose", "", 0, 0, "half", "9", "1", "", ""])  # left out: empty cells
    with (fasseg / "metadata.csv").open("w", newline="") as file:
        names = ["set", "index", "included", "set118", "pose_bucket", "subject", "series", "ita_tercile_set", "ita"]
        csv.writer(file).writerows([names, *rows])

    tree = {"parent": [3, 3, 4, 5, 5, -1], "names": ["x", "y", "z", "a", "b", "Root"], "n_leaves": 3, "root": 5}
    (hierarchy / "wos_tree.json").write_text(json.dumps(tree))
    write_lines(
        hierarchy / "wos.jsonl.gz",
        [{"id": 10 + k, "text": f"text {k}", "label": k % 3, "parent": 3, "random_sample": k % 2} for k in range(6)],
    )
    probs = rng.dirichlet(np.ones(3), 4).astype(np.float16)
    keys = {"probs": probs, "label": np.array([2, 1, 0, 2]), "doc_id": np.array([15, 11, 13, 12])}
    np.savez(hierarchy / "scores.npz", **keys, random_sample=np.array([1, 0, 1, 1], dtype=np.uint8))

    write_lines(
        text / "prompts.jsonl.gz",
        [
            {"id": "a", "text": "She is a [MASK].", "word": "nurse", "group": "female", "corpus": "sst"},
            {"id": "b", "text": "He is a [MASK].", "word": "nurse", "group": "male", "corpus": "sst"},
            {"id": "c", "text": "He and she [MASK].", "word": None, "group": "both", "corpus": "pom"},
        ],
    )
    lists = {"attributes": {"jobs": ["nurse", "governer"]}, "attribute_token_ids": {"jobs": {"nurse": 7}}}
    (text / "word_lists.json").write_text(json.dumps(lists))
    np.savez(text / "h_prompts.npz", list_probs=np.ones((3, 1)))
    (text / "mlm" / "config.json").write_text("{}")
    return tmp_path


def test_fasseg_pads_and_masks(compact):
    faces = FASSEG(compact, subset="all")
    assert len(faces) == 7 and faces.images.shape == (7, 3, 12, 12) and faces.images.dtype == torch.uint8
    assert (faces.labels != 255).equal(faces.valid)
    assert not faces.images.permute(0, 2, 3, 1)[~faces.valid].any()
    with np.load(compact / "fasseg" / "frontal.npz") as raw:
        image, label = faces[2]
        assert (image[:, :, :9].permute(1, 2, 0).numpy() == raw["image"][2]).all()
        assert (label[:, :9].numpy() == raw["label"][2]).all()
        face = (raw["label"] == 1) | (raw["label"] >= 3) & (raw["label"] <= 5)
    assert (faces.face[:3, :, :9].numpy() == face).all() and not faces.face[:3, :, 9:].any()


def test_fasseg_subsets_columns_and_subjects(compact):
    sizes = {name: len(FASSEG(compact, subset=name)) for name in ("set118", "frontal", "multipose", "all")}
    assert sizes == {"set118": 4, "frontal": 3, "multipose": 4, "all": 7}
    faces = FASSEG(compact / "fasseg", subset="all")  # the folder itself will do
    assert faces.subjects.tolist() == [0, 1, 2, 3, 3, 4, 4]
    assert faces.metadata["ita"] == [0.0, 0.5, 1.0, 0.0, 0.5, 1.0, 1.5]
    groups = gmc.Groups.from_columns(faces.groups(["pose_bucket", "ita_tercile_set"]))
    assert groups.names[:3] == ("pose_bucket=frontal", "pose_bucket=half", "ita_tercile_set=0")
    assert groups.membership.sum(0).tolist()[:2] == [3, 4]
    with pytest.raises(ValueError, match="'age', which metadata.csv has not"):
        faces.groups(["age"])


def test_fasseg_transforms_and_loader(compact):
    faces = FASSEG(compact, "frontal", transform=lambda image: image.float() / 255, target_transform=lambda label: label == 1)
    images, labels = next(iter(torch.utils.data.DataLoader(faces, batch_size=3)))
    assert images.dtype == torch.float32 and labels.dtype == torch.bool and images.shape == (3, 3, 12, 12)
    assert "3 images" in repr(faces)


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


def test_prompts(compact):
    prompts = GenderPrompts(compact)
    assert prompts.groups.tolist() == [[True, False], [False, True], [True, True]]
    assert prompts.word_lists["jobs"].words == ["nurse", "governer"] and prompts.attributes == {"jobs": [7]}
    text, member = prompts[0]
    assert text == "She is a [MASK]." and member.tolist() == [True, False]
    assert prompts.outputs()["list_probs"].shape == (3, 1)
    assert prompts.model_dir == compact / "text" / "mlm"
    assert GenderPrompts(compact, transform=str.upper)[1][0] == "HE IS A [MASK]."
    (compact / "text" / "h_prompts.npz").unlink()
    with pytest.raises(FileNotFoundError, match="masked language model"):
        prompts.outputs()


def test_root_from_the_environment(compact, monkeypatch):
    monkeypatch.delenv("TORCHGMC_DATA", raising=False)
    with pytest.raises(ValueError, match="`root` was not given and TORCHGMC_DATA is not set"):
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
    with pytest.raises(ValueError, match="frontal.npz.* is no readable .npz file"):
        FASSEG(compact)
    (compact / "text" / "prompts.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n')[:-9])
    with pytest.raises(ValueError, match="prompts.jsonl.gz.* is no readable file of JSON lines"):
        GenderPrompts(compact)


def test_lazy():
    code = "import sys, torchgmc; assert 'torchgmc.datasets' not in sys.modules; torchgmc.datasets.FASSEG; "
    code += "assert not {'torchvision', 'PIL', 'pandas', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tables_round_trip(tmp_path):
    table = {"a": [1, 2], "b": ["x, y", ""], "c": ["0.5", ""]}
    _files.write_table(tmp_path / "t.csv", table)
    read = _files.read_table(tmp_path / "t.csv")
    assert read == {"a": ["1", "2"], "b": ["x, y", ""], "c": ["0.5", ""]}
    assert _files.typed(read["a"]) == [1, 2] and np.isnan(_files.typed(read["c"])[1]) and _files.typed(["", ""]) == ["", ""]


# The published layouts


def paint(classes, scale, rng):
    """A label bitmap: colours of the classes, enlarged, with a little noise and grey blur at one place."""
    big = np.repeat(np.repeat(classes, scale, 0), scale, 1)
    bitmap = _faces.COLOURS[big].astype(int) + rng.integers(-3, 4, (*big.shape, 3))
    bitmap[0, 1] = (128, 128, 128)  # far from every colour
    return bitmap.clip(0, 255).astype(np.uint8), big


@pytest.fixture
def repository(tmp_path):
    """FASSEG as in its repository: two frontal pairs, three multipose ones, one photograph without labels."""
    pil = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(1)
    root = tmp_path / "FASSEG-repository"
    classes = {}
    places = [
        ("V2/Train_RGB/2.bmp", "V2/Train_Labels/2.bmp"),
        ("V2/Train_RGB/10.bmp", "V2/Train_Labels/10.bmp"),
        ("V2/Test_RGB/3.bmp", "V2/Test_Labels/3.bmp"),
        ("V3/Train_RGB/-60/personne07142+0-60.bmp", "V3/Train_labels/-60/personne07142+0-60.bmp"),
        ("V3/Test_RGB/+30/personne08148+0+30.bmp", "V3/Test_labels/+30/personne08148+0+30.bmp"),
        ("V3/Test_RGB/+60/personne10250+0+60.bmp", "V3/Test_labels/+60/personne10250+0+60.bmp"),
        ("V3/Test_RGB/+45/personne08149+0+45.bmp", None),
    ]
    for image, label in places:
        few = np.array([[0, 0, 2, 2], [1, 1, 1, 3], [1, 1, 1, 1], [1, 1, 4, 5], [1, 1, 1, 1], [0, 1, 1, 0]])
        bitmap, big = paint(few, 64, rng)  # 384 x 256: shown at 192 x 128
        photo = np.full((*big.shape, 3), 40, dtype=np.uint8)
        photo[big == 1] = rng.integers(90, 200, 3)
        for path, pixels in ((image, photo), (label, bitmap)):
            if path:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                pil.fromarray(pixels).save(root / path)
        classes[image] = big[::2, ::2]
    return tmp_path, classes


def test_fasseg_from_its_repository(repository):
    root, classes = repository
    faces = FASSEG(root, subset="all")
    assert (root / "fasseg" / "metadata.csv").is_file()
    meta = faces.metadata
    assert meta["source"] == [name for name in classes if "+60" not in name and "+45" not in name]  # misfit and unlabelled
    for k, name in enumerate(meta["source"]):
        height, width = faces.hw[k].tolist()
        assert (height, width) == (192, 128)
        assert (faces.labels[k, :height, :width].numpy() == classes[name]).all()
    assert meta["pose_bucket"] == ["frontal"] * 3 + ["profile", "half"]
    assert meta["pose_side"] == ["none"] * 3 + ["minus", "plus"]
    assert meta["subject"] == ["", "", "", "7", "8"] and meta["series"] == ["", "", "", "1", "1"]
    assert meta["set118"] == [1, 1, 1, 0, 1] and meta["split"] == ["train", "train", "test", "train", "test"]
    assert meta["face_frac"] == [round(float((classes[n] == 1).mean() + (classes[n] >= 3).mean()), 5) for n in meta["source"]]
    for k in range(len(faces)):  # the tone is that of the painted skin
        inside = faces.labels[k] == 1
        pixel = faces.images[k].permute(1, 2, 0)[inside].median(0).values.numpy()
        assert abs(meta["skin_L"][k] - _skin.lab(pixel)[0]) < 0.5
    order = sorted(range(3), key=lambda k: meta["ita"][k])
    assert [meta["ita_tercile_set"][k] for k in order] == [0, 1, 2]
    assert len(FASSEG(root, subset="set118")) == 4
    table = _files.read_table(root / "fasseg" / "metadata.csv")
    assert table["included"].count("0") == 1


def test_fasseg_needs_pillow(repository, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"torchgmc\[datasets\]"):
        FASSEG(repository[0])


def test_fasseg_incomplete_copy(repository):
    for path in (repository[0] / "FASSEG-repository" / "V2").rglob("*.bmp"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match="no photographs with label maps for 'frontal'"):
        FASSEG(repository[0])


def test_blur_takes_the_class_of_the_nearest_clean_pixel():
    bitmap = np.zeros((1, 7, 3), dtype=np.uint8) + np.array([128, 128, 128], dtype=np.uint8)
    bitmap[0, 0], bitmap[0, 6] = (255, 255, 0), (0, 0, 255)
    assert _faces.classify(bitmap)[0].tolist()[:3] == [1, 1, 1] and _faces.classify(bitmap)[0].tolist()[4:] == [5, 5, 5]


def sheet(rows):
    """An .xlsx with shared strings and a number."""
    words = sorted({str(v) for row in rows for v in row if isinstance(v, str)})
    space = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'

    def cell(place, value):
        if isinstance(value, str):
            return f'<c r="{place}" t="s"><v>{words.index(value)}</v></c>'
        return f'<c r="{place}"><v>{value}</v></c>'

    lines = [
        f'<row r="{r}">' + "".join(cell(f"{'ABCDEFG'[k]}{r}", v) for k, v in enumerate(row)) + "</row>"
        for r, row in enumerate(rows, 1)
    ]
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as book:
        shared = "".join(f"<si><t>{word}</t></si>" for word in words)
        book.writestr("xl/sharedStrings.xml", f"<sst {space}>{shared}</sst>")
        book.writestr("xl/worksheets/sheet1.xml", f"<worksheet {space}><sheetData>{''.join(lines)}</sheetData></worksheet>")
    return file.getvalue()


@pytest.mark.parametrize("named", [True, False])
def test_web_of_science_from_its_archive(tmp_path, named):
    leaf, domain = [0, 0, 1, 2, 2, 2, 3], [0, 0, 0, 5, 5, 2, 2]  # one document of leaf 2 is filed elsewhere
    with zipfile.ZipFile(tmp_path / "WebOfScience.zip", "w") as archive:
        archive.writestr("WOS46985/X.txt", "".join(f"abstract  {k} \r\n" for k in range(7)))
        archive.writestr("WOS46985/Y.txt", "".join(f"{y}\r\n" for y in leaf))
        archive.writestr("WOS46985/YL1.txt", "".join(f"{y}\r\n" for y in domain))
        if named:
            rows = [["Y1", "Y2", "Y", "Domain", "area"]]
            areas = {0: "Vision", 1: "Robots ", 2: "Depression", 3: "Depression"}
            rows += [[d, 0, y, "x", areas[y]] for y, d in zip(leaf, domain, strict=True)]
            archive.writestr("Meta-data/Data.xlsx", sheet(rows))
    texts = HierarchicalText(tmp_path, "wos")
    assert texts.labels.tolist() == leaf and texts.texts[3] == "abstract 3"
    names = ["Vision", "Robots", "Depression (2)", "Depression (3)"] if named else ["CS 0", "CS 1", "Medical 2", "Psychology 3"]
    assert texts.node_names == [*names, "CS", "Psychology", "Medical", "Root"]
    assert texts.parents == [4, 4, 6, 5, 7, 7, 7, -1]
    assert {s for s in texts.metadata["split"]} == {"train", "score"}
    gmc.TreeHead(texts.parents, target=0.9, alpha=0.1, names=texts.node_names)
    with pytest.raises(FileNotFoundError, match="scores come with the compact layout only"):
        texts.scores()


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


@pytest.fixture
def corpora(tmp_path):
    text, wiki = (tmp_path / name for name in _prompts.ORIGINAL)
    (text / "POM").mkdir(parents=True)
    wiki.mkdir(parents=True)
    (text / "sst.txt").write_text("1\tShe is a strong nurse .\n2\tNobody is strong .\n3\tShe is a strong nurse .\n")
    (text / "reddit.txt").write_text("Man loves his family\nThe price rose, a cool day\n")
    (text / "meld.txt").write_text("Rose and Tom were polite.\n" + "he " * 101 + "cool\n")
    (text / "POM" / "a.txt").write_text("It was fun. The king was rude! Good.")
    (wiki / "valid.txt").write_text(" \n = The king was brave = \n \n His well @-@ known <unk> was brave . It fell . \n")
    (wiki / "test.txt").write_text(" A queen , patient . \n")
    return tmp_path


def test_prompts_from_the_corpora(corpora):
    prompts = GenderPrompts(corpora)
    found = dict(zip(prompts.texts, zip(prompts.metadata["group"], prompts.metadata["word"], strict=True), strict=True))
    assert found == {
        "She is a [MASK] nurse .": ("female", "strong"),
        "She is a strong [MASK] .": ("female", "nurse"),
        "Man loves his [MASK]": ("male", "family"),
        "Rose and Tom were [MASK].": ("both", "polite"),
        "The king was [MASK]!": ("male", "rude"),
        "His well-known [UNK] was [MASK] .": ("male", "brave"),
        "A queen , [MASK] .": ("female", "patient"),
    }
    family = prompts.metadata["lists"][prompts.texts.index("Man loves his [MASK]")]
    assert family == ["female_adj", "pleasant"]
    with pytest.raises(ValueError, match="no token ids: use torchgmc.text.attributes_from_words"):
        prompts.attributes  # noqa: B018
    masks = GenderPrompts(corpora, "random_mask")
    assert len(masks) == 6 and all(text.count("[MASK]") == 1 for text in masks.texts)
    for text, word in zip(masks.texts, masks.metadata["word"], strict=True):
        assert not _prompts.indicators(word) and "unk" not in word, text
    templates = GenderPrompts(corpora, "templates")
    assert len(templates) == 348 and templates.groups.sum(0).tolist() == [178, 170]
    assert sorted(templates.texts) == sorted(gmc.text.words.template_prompts())


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
        found = {row["text"]: row for row in _prompts.prompts_of({"id": "x", "text": whole})}
        mentioned = list(_prompts.indicators(whole))
        assert found[text]["lists"] == lists and (mentioned == [group] or (group == "both" and len(mentioned) == 2))


@pytest.mark.skipif("TORCHGMC_DATA" not in os.environ, reason="the real data is not here")
@pytest.mark.parametrize("name", ["wos", "newsgroups", "amazon"])
def test_real_trees(name):
    """A tree grown from its leaves is the tree of the compact layout."""
    texts = HierarchicalText(name=name)

    def route(node):
        above = texts.parents[node]
        return (*route(above), texts.node_names[node]) if above >= 0 else ()

    leaves = [route(leaf) for leaf in range(texts.num_leaves)]
    tops = {"wos": _texts.DOMAINS, "newsgroups": _texts.SECTIONS, "amazon": sorted({path[0] for path in leaves})}[name]
    tree = _texts.grow(leaves, tops)
    assert tree["parent"] == texts.parents and tree["names"] == texts.node_names


@pytest.mark.skipif("TORCHGMC_DATA" not in os.environ, reason="the real data is not here")
def test_real_skin_tones():
    """What is measured in the small pictures is what the compact layout measured in the large ones, nearly."""
    faces = FASSEG(subset="all")
    for k in range(0, len(faces), 30):
        height, width = faces.hw[k].tolist()
        image, label = faces.images[k, :, :height, :width].permute(1, 2, 0).numpy(), faces.labels[k, :height, :width].numpy()
        got = _faces.measure(image, label)
        for key, near in {"ita": 2.0, "skin_L": 0.3, "image_L": 0.05, "hair_frac": 0.002, "face_frac": 0.002}.items():
            assert abs(got[key] - faces.metadata[key][k]) <= near, (k, key)
