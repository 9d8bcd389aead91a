"""FASSEG: the compact layout, its repository, and what is measured in a picture."""

import os
import sys

import numpy as np
import pytest
import torch

import torchgmc as gmc
from torchgmc_paper.datasets import FASSEG, _files, prepare


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
    with pytest.raises(ValueError, match="'age', which metadata.csv does not have"):
        faces.groups(["age"])


def test_fasseg_transforms_and_loader(compact):
    faces = FASSEG(compact, "frontal", transform=lambda image: image.float() / 255, target_transform=lambda label: label == 1)
    images, labels = next(iter(torch.utils.data.DataLoader(faces, batch_size=3)))
    assert images.dtype == torch.float32 and labels.dtype == torch.bool and images.shape == (3, 3, 12, 12)
    assert "3 images" in repr(faces)


def paint(classes, scale, rng):
    """A label bitmap: colours of the classes, enlarged, with a little noise and grey blur at one place."""
    big = np.repeat(np.repeat(classes, scale, 0), scale, 1)
    bitmap = prepare.faces.COLOURS[big].astype(int) + rng.integers(-3, 4, (*big.shape, 3))
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
        assert abs(meta["skin_L"][k] - prepare.faces.lab(pixel)[0]) < 0.5
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
    assert prepare.faces.classify(bitmap)[0].tolist()[:3] == [1, 1, 1] and prepare.faces.classify(bitmap)[0].tolist()[4:] == [
        5,
        5,
        5,
    ]


@pytest.mark.skipif("TORCHGMC_DATA" not in os.environ, reason="the real data is not here")
def test_real_skin_tones():
    """What is measured in the small pictures is what the compact layout measured in the large ones, nearly."""
    faces = FASSEG(subset="all")
    for k in range(0, len(faces), 30):
        height, width = faces.hw[k].tolist()
        image, label = faces.images[k, :, :height, :width].permute(1, 2, 0).numpy(), faces.labels[k, :height, :width].numpy()
        got = prepare.faces.measure(image, label)
        for key, near in {"ita": 2.0, "skin_L": 0.3, "image_L": 0.05, "hair_frac": 0.002, "face_frac": 0.002}.items():
            assert abs(got[key] - faces.metadata[key][k]) <= near, (k, key)
