"""Fuzz entries of what stands around the heads: adapters, exports, datasets, Lightning, plots."""

import functools
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchgmc as gmc
from gmctest import fuzz_functions as common, heads_zoo
from gmctest.fuzz_functions import HERE, finite, finite_if_plain, head_of, rng
from gmctest.fuzz_inputs import Arguments, Entry
from gmctest.fuzz_text import prompt_data
from torchgmc import export, plots, report
from torchgmc.deploy.torchscript import open_torchscript

# -- models -------------------------------------------------------------------------------------------------------------------


class Scores(nn.Module):
    """A model whose output is its input, in a dict."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.layout != torch.strided or x.device.type != "cpu":
            raise TypeError("`x` is nothing for this model")  # the user's model, not ours
        return {"out": x, "other": x}


def adapted(field: Any, channel: Any, activation: Any, position: Any, mask_token_id: Any, x: Any, groups: Any) -> Any:
    adapter = gmc.Adapter(field, channel, activation, position=position, mask_token_id=mask_token_id)
    return gmc.attach(Scores(), head_of("threshold"), adapter=adapter)(x, groups)


def adapter_data(n: int, seed: int) -> Arguments:
    scores, _, groups = heads_zoo.images(n, seed).observe
    options = {"field": "out", "channel": None, "activation": "none", "position": None, "mask_token_id": None}
    return options | {"x": scores, "groups": groups}


def check_adapted(data: Arguments, output: dict[str, Tensor]) -> None:
    if data["activation"] in ("none", "auto") and data["channel"] is None and data["field"] in ("out", None):
        assert output["out"].equal(head_of("threshold")(data["x"], data["groups"])) and output["other"] is data["x"]


def softened(mode: Any, temperature: Any, x: Any, groups: Any) -> Tensor:
    out: Tensor = gmc.attach(nn.Identity(), head_of("threshold")).soften(mode, temperature)(x, groups)
    return out


def split(batch: Any, inputs: Any, target: Any, groups: Any) -> Any:
    return gmc.Adapter(inputs=inputs, target=target, groups=groups).split(batch)


def check_split(data: Arguments, batch: Any) -> None:
    if isinstance(data["batch"], dict) and "image" in data["batch"] and data["inputs"] in ("image", None):
        assert batch.args[0] is data["batch"]["image"]


def observed(x: Any, mask: Any, groups: Any, conformity: Any) -> Any:
    adapter = gmc.Adapter(conformity=conformity)
    return adapter.observation(head_of("threshold"), x, adapter.split((x, mask, groups)))


@functools.cache
def model() -> gmc.CalibratedModel:
    return gmc.attach(nn.Identity(), head_of("probability"))


def exported(path: Any, format: Any, example_inputs: Any, checks: Any) -> tuple[Path, Any]:
    return model().export(path, format, example_inputs, checks), example_inputs


def export_data(n: int, seed: int) -> Arguments:
    probs, _, groups = heads_zoo.events(4, seed).observe
    format = "torch.export" if seed % 4 == 0 else "torchscript"
    return {"path": HERE / "model.pt", "format": format, "example_inputs": (probs, groups), "checks": seed % 2 == 0}


def check_exported(data: Arguments, answer: tuple[Path, Any]) -> None:
    path, inputs = answer
    about = export.metadata(path)
    assert about["head"] == "ProbabilityHead" and about["checks"] is bool(data["checks"])
    if isinstance(inputs, tuple):
        program = open_torchscript(path) if data["format"] == "torchscript" else export._open_export(path)
        torch.testing.assert_close(program(*inputs), model()(*inputs))
        if data["checks"]:
            with pytest.raises(Exception, match="must hold"):
                program(inputs[0] + 3.0, *inputs[1:])


# -- data sets ----------------------------------------------------------------------------------------------------------------


@functools.cache
def data_folder() -> Path:
    """A few rows of each data set, in the compact layout."""
    root = HERE / "data"
    for name in ("fasseg", "hierarchy", "text"):
        (root / name).mkdir(parents=True)
    lines(root / "hierarchy" / "wos.jsonl.gz", [{"id": k, "text": f"text {k}", "label": k % 3} for k in range(6)])
    tree = {"parent": [3, 3, 4, 5, 5, -1], "names": ["x", "y", "z", "a", "b", "Root"]}
    (root / "hierarchy" / "wos_tree.json").write_text(json.dumps(tree))
    scores = {"probs": np.full((2, 3), 1 / 3), "label": np.array([2, 1]), "doc_id": np.array([5, 1])}
    np.savez(root / "hierarchy" / "scores.npz", **scores)
    groups = ("female", "male", "both")
    lines(root / "text" / "prompts.jsonl.gz", [{"id": g, "text": f"{g} [MASK].", "word": None, "group": g} for g in groups])
    (root / "text" / "word_lists.json").write_text(json.dumps({"attributes": {"jobs": ["nurse"]}}))
    label = np.ones((2, 4, 4), np.uint8)
    np.savez(root / "fasseg" / "frontal.npz", image=np.zeros((2, 4, 4, 3), np.uint8), label=label, hw=np.full((2, 2), 4))
    np.savez(root / "fasseg" / "multipose.npz", image=np.zeros((2, 4, 4, 3), np.uint8), label=label, hw=np.full((2, 2), 4))
    rows = ["set,index,included,set118,pose_bucket,subject,series", *(f"frontal,{k},1,1,half,{k},{k}" for k in range(2))]
    (root / "fasseg" / "metadata.csv").write_text("\n".join(rows) + "\n")
    return root


def lines(path: Path, rows: list[Any]) -> None:
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def check_length(length: int) -> Any:
    def check(data: Arguments, found: Any) -> None:
        assert len(found) == length

    return check


def texts() -> Any:
    return gmc.datasets.HierarchicalText(data_folder())


# -- Lightning ----------------------------------------------------------------------------------------------------------------


def callback(**options: Any) -> Any:
    from torchgmc.lightning import CalibrationCallback

    return CalibrationCallback(head_of("threshold"), **options)


def monitor_callback(**options: Any) -> Any:
    from torchgmc.lightning import MonitorCallback

    return MonitorCallback(gmc.Monitor(head_of("threshold"), alpha=0.1), **options)


def from_checkpoint(path: Any, name: Any) -> gmc.Head:
    from torchgmc.lightning import CalibrationCallback, head_from_checkpoint

    file = HERE / "trained.ckpt"
    if not file.exists():
        made = CalibrationCallback(head_of("threshold"))
        torch.save({"callbacks": {made.state_key: made.state_dict()}}, file)
    return head_from_checkpoint(path, name)


def check_restored(data: Arguments, head: gmc.Head) -> None:
    assert head.config() == head_of("threshold").config() and head.is_fitted


# -- figures ------------------------------------------------------------------------------------------------------------------

LOOK = {"title": None, "dark": False}


def drawn(data: Arguments, figure: Any) -> None:
    assert figure.axes


def picture_data(n: int, seed: int) -> Arguments:
    truth = torch.rand(2, 4, 4, generator=rng(seed)) < 0.5
    return LOOK | {
        "images": torch.rand(2, 3, 4, 4, generator=rng(seed)),
        "truth": truth,
        "predictions": {"a": truth},
        "captions": None,
    }


@functools.cache
def tree_audit() -> gmc.Audit:
    return head_of("tree").audit(*heads_zoo.documents(40, 77).observe)


@functools.cache
def an_audit() -> gmc.Audit:
    return common.audit_batches(**common.image_data(24, 1), delta=0.1, alpha=0.1)


def set_data(n: int, seed: int) -> Arguments:
    probs, labels, groups = heads_zoo.events(n, seed, 4).observe
    options = {"score": "aps", "class_conditional": bool(seed % 2), "clusters": 2 if seed % 4 == 1 else None}
    return {"probs": probs, "labels": labels, "groups": groups} | options


def sets_of(probs: Any, labels: Any, groups: Any, score: Any, class_conditional: Any, clusters: Any) -> Any:
    head = gmc.QuantileHead(0.8, None, heads_zoo.GROUPS, finite_sample=True)
    sets = gmc.PredictionSets(None, head, score, None, None, class_conditional, clusters).fit(probs, labels, groups)
    sets.audit(probs, labels, groups)
    sets.measure(probs, labels, groups)
    return sets(probs, groups)


def sets_of_batches(probs: Any, labels: Any, groups: Any, score: Any, class_conditional: Any, clusters: Any) -> Any:
    head = gmc.QuantileHead(0.8, None, heads_zoo.GROUPS, finite_sample=True)
    sets = gmc.PredictionSets(None, head, score, None, None, class_conditional, clusters)
    good = set_data(24, 5)
    return sets.fit_batches([tuple(good[k] for k in ("probs", "labels", "groups")), (probs, labels, groups)])(probs, groups)


def reliability_audit() -> gmc.Audit:
    return gmc.audit(head_of("probability"), [heads_zoo.events(60, 77).observe])


def check_sets(data: Arguments, answer: Any) -> None:
    assert answer.dtype == torch.bool and answer.shape == data["probs"].shape


def interval_data(n: int, seed: int) -> Arguments:
    scores, groups = heads_zoo.residuals(n, seed).observe
    return {"output": torch.stack([-scores, scores], 1), "y": scores / 2, "groups": groups, "score": "cqr"}


def intervals_of(output: Any, y: Any, groups: Any, score: Any) -> Any:
    intervals = gmc.Intervals(None, gmc.QuantileHead(0.8, None, heads_zoo.GROUPS, finite_sample=True), score)
    intervals.fit(output, y, groups).measure(output, y, groups)
    return intervals(output, groups)


ENTRIES = [
    Entry("PredictionSets", set_data, sets_of, check_sets),
    Entry("PredictionSets.fit_batches", set_data, sets_of_batches, check_sets, share=0.5),
    Entry(
        "plots.reliability",
        lambda n, s: LOOK | {"audit": reliability_audit(), "top": 2},
        plots.reliability,
        drawn,
        share=0.3,
    ),
    Entry("Intervals", interval_data, intervals_of, lambda d, v: None),
    Entry(
        "Adapter.collate",
        lambda n, s: {
            "samples": [(torch.rand(1, 4, 3 + k % 2), torch.ones(4, 3 + k % 2).long()) for k in range(4)],
            "multiple": 2,
        },
        gmc.Adapter(ignore_index=255).collate,
        lambda d, v: None,
    ),
    Entry(
        "Groups.from_levels",
        lambda n, s: {"levels": {"sex": ["f", "m"], "site": [1, 2]}, "intersections": 2, "bins": {"age": [30, 50]}},
        gmc.Groups.from_levels,
        lambda d, v: None,
    ),
    Entry(
        "Groups.drop_small",
        lambda n, s: {"min_size": 1},
        lambda min_size: gmc.Groups.from_columns({"sex": ["f", "m", "m"]}).drop_small(min_size),
        lambda d, v: None,
    ),
    Entry("Adapter", adapter_data, adapted, check_adapted),
    Entry(
        "CalibratedModel.soften",
        lambda n, s: dict(zip(("x", "groups"), heads_zoo.images(n, s).inputs, strict=True)) | {"mode": "soft", "temperature": 0.1},
        softened,
        finite_if_plain,
    ),
    Entry(
        "CalibratedModel.scores",
        lambda n, s: {"x": heads_zoo.images(n, s).inputs[0]},
        lambda x: gmc.attach(Scores(), head_of("threshold")).scores(x),
        lambda d, v: None,
    ),
    Entry(
        "CalibratedModel.scores_and_features",
        lambda n, s: {"x": heads_zoo.images(n, s).inputs[0]},
        lambda x: gmc.attach(
            nn.Sequential(nn.Identity(), Scores()), gmc.ThresholdHead(0.1, 0.1, learn=gmc.Linear()), features="0"
        ).scores_and_features(x),
        lambda d, v: None,
    ),
    Entry(
        "Adapter.split",
        lambda n, s: {
            "batch": dict(zip(("image", "mask", "groups"), heads_zoo.images(n, s).observe, strict=True)),
            "inputs": None,
            "target": None,
            "groups": None,
        },
        split,
        check_split,
    ),
    Entry(
        "Adapter.observation",
        lambda n, s: dict(zip(("x", "mask", "groups"), heads_zoo.images(n, s).observe, strict=True)) | {"conformity": None},
        observed,
        lambda d, v: None,
    ),
    Entry("CalibratedModel.export", export_data, exported, check_exported, share=0.5),
    Entry(
        "export.metadata",
        lambda n, s: {"path": exported(**export_data(4, 1))[0]},
        export.metadata,
        lambda d, v: None,
        share=0.5,
    ),
    Entry(
        "FASSEG",
        lambda n, s: {"root": data_folder(), "subset": "frontal", "download": False},
        lambda **a: gmc.datasets.FASSEG(**a),
        check_length(2),
    ),
    Entry(
        "HierarchicalText",
        lambda n, s: {"root": data_folder(), "name": "wos", "download": False},
        lambda **a: gmc.datasets.HierarchicalText(**a),
        check_length(6),
    ),
    Entry(
        "GenderPrompts",
        lambda n, s: {"root": data_folder(), "part": "prompts", "download": False},
        lambda **a: gmc.datasets.GenderPrompts(**a),
        check_length(3),
    ),
    Entry(
        "FASSEG[index]",
        lambda n, s: {"index": 1},
        lambda index: gmc.datasets.FASSEG(data_folder(), "frontal")[index],
        check_length(2),
    ),
    Entry("HierarchicalText[index]", lambda n, s: {"index": 1}, lambda index: texts()[index], check_length(2)),
    Entry(
        "GenderPrompts[index]",
        lambda n, s: {"index": 1},
        lambda index: gmc.datasets.GenderPrompts(data_folder())[index],
        check_length(2),
    ),
    Entry(
        "FASSEG.groups",
        lambda n, s: {"columns": ["pose_bucket", "subject"]},
        lambda columns: gmc.datasets.FASSEG(data_folder()).groups(columns),
        lambda d, v: None,
    ),
    Entry("HierarchicalText.scores", lambda n, s: {"kind": "scores"}, lambda kind: texts().scores(kind), check_length(3)),
    Entry(
        "HierarchicalText.scored",
        lambda n, s: {"kind": "scores"},
        lambda kind: texts().scored(kind),
        lambda d, v: finite(v),
    ),
    Entry(
        "MonitorCallback",
        lambda n, s: {"adapter": None, "groups": None, "name": "m"},
        monitor_callback,
        lambda data, made: None,
    ),
    Entry(
        "CalibrationCallback",
        lambda n, s: {
            "dataloader": None,
            "adapter": None,
            "groups": None,
            "replace_forward": False,
            "monitor": True,
            "name": "c",
            "solver": "exact",
        },
        callback,
        lambda d, v: None,
    ),
    Entry(
        "head_from_checkpoint",
        lambda n, s: {"path": HERE / "trained.ckpt", "name": "calibration"},
        from_checkpoint,
        check_restored,
    ),
    Entry(
        "plots.convergence",
        lambda n, s: LOOK | {"report": head_of("threshold"), "alpha": 0.02},
        plots.convergence,
        drawn,
        share=0.3,
    ),
    Entry(
        "plots.deviation",
        lambda n, s: LOOK | {"audits": an_audit(), "alpha": 0.02, "top": 3},
        plots.deviation,
        drawn,
        share=0.3,
    ),
    Entry("plots.masks", picture_data, plots.masks, drawn, share=0.3),
    Entry(
        "plots.thresholds",
        lambda n, s: LOOK | {"heads": head_of("threshold"), "groups": heads_zoo.images(n, s).inputs[1], "top": 4},
        plots.thresholds,
        drawn,
        share=0.3,
    ),
    Entry(
        "plots.tradeoff",
        lambda n, s: LOOK | {"series": {"a": [(0.1, 2.0), (0.01, 3.0)]}, "start": (0.2, 1.0), "bias": "b", "cost": "c"},
        plots.tradeoff,
        drawn,
        share=0.3,
    ),
    Entry(
        "plots.tree",
        lambda n, s: LOOK | {"head": head_of("tree"), "audit": tree_audit(), "below": True, "rows": 9},
        plots.tree,
        drawn,
        share=0.3,
    ),
    Entry(
        "plots.words",
        lambda n, s: LOOK | prompt_data(n, s) | {"head": head_of("distribution"), "names": None, "top": 3},
        plots.words,
        drawn,
        share=0.3,
    ),
    Entry(
        "report.write",
        lambda n, s: {
            "path": HERE / "page.html",
            "audit": an_audit(),
            "head": None,
            "ours": None,
            "title": "",
            "lead": "",
            "certificate": "",
            "settings": None,
        },
        report.write,
        lambda d, path: None,
        share=0.2,
    ),
]
