"""``torchgmc reproduce fnr``: no image is scored by a model that saw it, the noise is the head's, the miss rates are right."""

from dataclasses import replace

import pytest
import torch

from gmctest import made_up_data

pytest.importorskip("segmentation_models_pytorch")
pytest.importorskip("typer")
pytest.importorskip("matplotlib")

import torchgmc as gmc
from torchgmc.cli import main
from torchgmc.engine import hashing
from torchgmc_paper import fnr
from torchgmc_paper.demo.progress import Bar

ALPHA = 0.05  # fits of a few steps


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return made_up_data.faces(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def out(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    words = ["reproduce", "fnr", "--data", str(data), "--out", str(out), "--quick", "--seeds", "2", "--set", f"alpha={ALPHA}"]
    assert main(words) == 0
    return out


@pytest.fixture
def prepared(data, out, monkeypatch):
    monkeypatch.setattr(fnr, "train", lambda *_: pytest.fail("trained again"))
    return fnr.prepare(data, out / "fnr", Bar(), replace(fnr.QUICK, alpha=ALPHA))


def test_page_says_what_is_missing(out):
    page = (out / "fnr.md").read_text()
    assert "annotations of gender and race are not public" in page and "2-fold cross-fit" in page
    assert {p.name for p in out.iterdir()} >= {"fnr.csv", "fnr_pairs.csv", "fnr_costs.csv", "fnr-118-images.png"}
    assert "paper's own figures" in page and "0.0118" in page


def test_scores_are_cached_and_parts_are_those_of_the_metadata(prepared):
    assert len(prepared.tensors["118 images"]) == 16 + 4 * 2
    assert len(prepared.tensors["345 images"]) == 16 + 8 * 3
    names, member = prepared.extra["groups"], prepared.tensors["member"]
    assert member[:, [names.index(n) for n in ("facing", "turned", "profile")]].sum(1).eq(1).all()
    assert member[:, names.index("profile")].sum() == 8


def test_no_fold_shares_a_subject(data):
    faces = gmc.datasets.FASSEG(data, subset="all")
    fold = fnr.fold_of(faces, 2)
    for subject in faces.subjects.unique():
        assert len(fold[faces.subjects == subject].unique()) == 1
    assert fold.bincount().tolist() == [20, 20]
    one = fnr.fold_of(faces, 1)
    known = set(faces.subjects[one == -1].tolist())
    inside = torch.tensor(faces.metadata["set118"]) == 1
    assert known and not known & set(faces.subjects[inside].tolist())


def test_a_model_never_trains_on_the_fold_it_scores(data, monkeypatch):
    faces = gmc.datasets.FASSEG(data, subset="all")
    fold = fnr.fold_of(faces, 2)
    seen = []

    def train(images, masks, valid, rows, *_):
        seen.append(rows)
        return torch.nn.Identity()

    monkeypatch.setattr(fnr, "train", train)
    monkeypatch.setattr(fnr, "score", lambda model, images, rows, size: seen.append(rows) or torch.zeros(len(rows), 2, 2))
    fnr.fold_scores(faces, fold, 1, fnr.QUICK, Bar())
    assert not set(seen[0].tolist()) & set(seen[1].tolist())
    assert not set(faces.subjects[seen[0]].tolist()) & set(faces.subjects[seen[1]].tolist())


def test_training_learns_and_is_repeatable(data):
    faces = gmc.datasets.FASSEG(data, subset="all")
    rows, fresh = torch.arange(30), torch.arange(30, 40)

    def scores(epochs):
        setting = fnr.Setting(size=32, epochs=epochs, batch_size=8)
        model = fnr.train(faces.images, faces.face, faces.valid, rows, setting, Bar(), "")
        return fnr.score(model, faces.images, fresh, 32)

    assert torch.equal(scores(1), scores(1))
    right = ((scores(6) > 0.5) == faces.face[fresh])[faces.valid[fresh]].double().mean()
    assert right > 0.9


def test_noise_added_once_is_the_noise_of_the_head():
    g = torch.Generator().manual_seed(0)
    scores, masks = torch.rand(40, 12, 12, generator=g), torch.rand(40, 12, 12, generator=g) < 0.5
    member = torch.rand(40, 2, generator=g) < 0.6
    options = {"target": 0.2, "alpha": 0.01, "groups": ["a", "b"], "init": 1.5}
    own = gmc.ThresholdHead(jitter=0.1, **options).fit(scores, masks, member)
    values = hashing.add(scores, 0.1)
    once = gmc.ThresholdHead(range=(-0.1, 1.1), **options).fit(values, masks, member)
    assert torch.equal(own(scores, member), once(values, member))


@pytest.mark.parametrize("seed", range(3))
def test_split_keeps_subjects_together_and_the_share(seed):
    subjects = torch.randint(30, (200,), generator=torch.Generator().manual_seed(seed))
    known, fresh = fnr.split(200, 0.7, seed, subjects)
    assert sorted([*known.tolist(), *fresh.tolist()]) == list(range(200))
    assert not set(subjects[known].tolist()) & set(subjects[fresh].tolist())
    assert abs(len(known) - 140) <= 15
    known, fresh = fnr.split(118, 0.7, seed)
    assert len(known) == 83 and sorted([*known.tolist(), *fresh.tolist()]) == list(range(118))


def test_rows_are_the_miss_rates_of_the_masks(prepared):
    rows = fnr.run_seed(prepared, 0)
    assert rows == fnr.run_seed(prepared, 0)
    values, masks, member = (prepared.tensors[k] for k in ("values", "masks", "member"))
    chosen = prepared.tensors["118 images"]
    _, fresh = fnr.split(len(chosen), 0.7, 0)
    fresh = chosen[fresh]
    for group in ("facing", "ITA low"):
        column = prepared.extra["groups"].index(group)
        rates = [
            sum(bool(v <= 0.5) for v in values[i][masks[i]].tolist()) / int(masks[i].sum()) if member[i, column] else 0.075
            for i in fresh.tolist()
        ]
        found = next(r for r in rows if (r["part"], r["method"], r["group"]) == ("118 images", "unprocessed", group))
        assert found["deviation"] == pytest.approx(sum(rate - 0.075 for rate in rates) / len(fresh))
    assert not any(r["group"] == "profile" for r in rows if r["part"] == "118 images")
