"""Answers on a label tree that can be trusted whatever they are, end to end, in seconds on one core.

A network files documents under the topics of a library. Some shelves are harder than others, and the archive it learnt from is
neater than the documents that come in. It answers with a topic, or with a whole shelf when it is unsure. Three ways to choose
how broad an answer is are fitted on calibration documents and audited on fresh ones: the best leaf as it is, split conformal
(right on average), and :class:`torchgmc.TreeHead` (right whenever it answers on a given shelf).

    $ torchgmc demo tree
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgmc as gmc
from torchgmc.demo.stage import Result, clock, folder, percent, progress_bar, remake
from torchgmc.demo.terminal import by_method, meaning, show
from torchgmc.heads.tree.tree import Tree
from torchgmc.report import Section, Table, write, write_file

__all__ = ["QUICK", "Setting", "TreeResult", "run"]

METHODS = ("unprocessed", "conformal", "GMC")
LIBRARY: dict[str, Any] = {
    "Medicine": {
        "Internal": ["Cancer", "Diabetes", "Asthma", "Heart"],
        "Nervous system": ["Alzheimer's", "Epilepsy", "Migraine"],
        "Nutrition": None,
    },
    "Engineering": ["Bridges", "Water", "Green building", "Turbines", "Control"],
    "Computing": ["Networks", "Graphics", "Databases", "Vision"],
    "Psychology": ["Attention", "Children", "Anxiety", "Prejudice", "Memory"],
    "News": ["World", "Sport", "Weather"],
}
HARD = {"Medicine": 1.15, "Engineering": 0.9, "Computing": 1.0, "Psychology": 1.25, "News": 1.1}  # noise of each shelf in use


@dataclass(frozen=True)
class Setting:
    """Sizes of the demonstration; the defaults are what ``torchgmc demo tree`` shows."""

    target: float = 0.95
    alpha: float = 0.02
    delta: float = 0.05
    features: int = 24
    num_train: int = 6000
    num_calibration: int = 6000
    num_test: int = 20_000
    epochs: int = 6
    batch_size: int = 128
    learning_rate: float = 3e-3


QUICK = Setting(num_train=1500, num_calibration=1000, num_test=1000, epochs=3)
"""Everything once, in a second; the model learns less."""


@dataclass(frozen=True, kw_only=True)
class TreeResult(Result):
    """What the demonstration found, on the test documents."""

    demo: ClassVar[str] = "tree"

    @property
    def certificate(self) -> str:
        """One line about the calibrated model."""
        return super().certificate.replace("groups", "sets of answers")

    def rows(self) -> list[dict[str, Any]]:
        """One row a set of answers: by method how often it is used, its coverage, deviation and verdict."""
        return self.by_method("set", (*LIBRARY, "all"), coverage="risk")

    def findings(self) -> dict[str, Any]:
        """Sets of answers, how precise the answers are, and the length of the log."""
        precision = {name: audit.cost for name, audit in self.audits.items()}
        return {"sets": self.rows(), "precision": precision, "rounds": self.report.details["rounds"]}

    def __rich__(self) -> Any:
        return _rich_table(self)


def run(
    out: str | Path = "torchgmc-demo", *, seed: int = 0, progress: bool = True, setting: Setting | None = None
) -> TreeResult:
    """Trains, calibrates, audits and writes the report.

    Args:
        out: folder for ``report.html``, ``deviation.png``, ``tree.png``, ``results.json`` and ``head.safetensors``.
        seed: of the documents and of the model.
        progress: shows a progress bar; never when the output is not a terminal.
        setting: sizes; :data:`QUICK` for a trial run.

    Example:
        >>> result = run("torchgmc-demo")  # doctest: +SKIP
        >>> result.audits["GMC"].max_violation  # doctest: +SKIP
        0.0237
    """
    setting = setting or Setting()
    out = folder(out)
    seconds: dict[str, float] = {}
    with progress_bar(progress) as bar:
        with clock(seconds, "draw"):
            train = draw(setting.num_train, 3 * seed, seed, setting.features, used=False)
            calibration, test = (
                draw(num, 3 * seed + k, seed, setting.features)
                for k, num in ((1, setting.num_calibration), (2, setting.num_test))
            )
        with clock(seconds, "train"):
            model = train_network(*train, setting, seed, bar)
        with clock(seconds, "calibrate and audit"), torch.inference_mode():
            known, fresh = (model(x).softmax(1) for x in (calibration[0], test[0]))
            heads = _heads(setting)
            for head in bar.track(heads.values(), "calibrate"):
                head.fit(known, calibration[1])
            audits = {name: head.audit(fresh, test[1], delta=setting.delta) for name, head in heads.items()}
        report = heads["GMC"].report
        assert report is not None
        result = TreeResult(out=out, seed=seed, setting=setting, audits=audits, report=report, seconds=seconds)
        with clock(seconds, "write"):
            return _write(result, heads["GMC"])


def draw(num: int, seed: int, world: int, features: int, used: bool = True) -> tuple[Tensor, Tensor]:
    """Documents ``(num, features)`` and their topics ``(num,)``: a topic lies near its shelf, and hard shelves are spread out.

    Args:
        num: number of documents.
        seed: of the documents; ``world``: of the places of the topics.
        features: length of a document.
        used: documents as they come in; those of the archive are equally neat on every shelf.
    """
    tree = Tree(LIBRARY)
    g = torch.Generator().manual_seed(1000 + world)
    place = torch.randn(tree.num_nodes, features, generator=g)
    scale = torch.tensor([0.8, 0.75, 0.6, 0.6])[tree.depths]  # how far a node lies from its parent
    centre = (place * scale[:, None])[tree.paths]  # (K, height + 1, features)
    own = torch.arange(tree.height + 1) <= tree.depths[: tree.num_leaves, None]  # padding repeats the leaf
    centre = (centre * own[..., None]).sum(1)
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(tree.num_leaves, (num,), generator=g)
    shelf = torch.tensor([HARD[tree.names[int(path[1])]] for path in tree.paths])
    noise = torch.randn(num, features, generator=g) * (shelf[labels] if used else torch.full((num,), 0.8))[:, None]
    return centre[labels] + noise, labels


def train_network(x: Tensor, y: Tensor, setting: Setting, seed: int, bar: Any) -> nn.Module:
    """A small network by AdamW and cross-entropy."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(setting.features, 64), nn.ReLU(), nn.Linear(64, Tree(LIBRARY).num_leaves))
    optimiser = torch.optim.AdamW(model.parameters(), lr=setting.learning_rate)
    generator = torch.Generator().manual_seed(seed)
    for _ in bar.track(range(setting.epochs), "train"):
        order = torch.randperm(len(x), generator=generator)
        for start in range(0, len(x), setting.batch_size):
            rows = order[start : start + setting.batch_size]
            loss = F.cross_entropy(model(x[rows]), y[rows])
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            optimiser.step()
    return model.eval()


def _heads(setting: Setting) -> dict[str, gmc.TreeHead]:
    options: dict[str, Any] = {"target": setting.target, "alpha": setting.alpha, "conditional": True}
    return {
        "unprocessed": gmc.baselines.UnprocessedTree(LIBRARY, **options),
        "conformal": gmc.baselines.SplitConformal(LIBRARY, **options),
        "GMC": gmc.TreeHead(LIBRARY, **options),
    }


def _write(result: TreeResult, head: gmc.TreeHead) -> TreeResult:
    """Writes every file, each whole or not at all."""
    from torchgmc import plots

    setting = result.setting
    result = result.placed("report.html", "deviation.png", "tree.png", "results.json", "head.safetensors")
    gmc.save(head, result.files["head.safetensors"])
    title = "Deviation of the coverage from the target, by set of answers"
    write_file(result.files["deviation.png"], plots.png(plots.deviation(result.audits, setting.alpha, title=title)))
    shelves = plots.tree(head, result.audits["GMC"], title="Coverage of the answers on each shelf")
    write_file(result.files["tree.png"], plots.png(shelves))
    write(
        result.files["report.html"],
        result.audits,
        head,
        title=f"Right {100 * setting.target:g} % of the time whatever the answer, not on average",
        lead="A network files documents under the topics of a library, and may answer with a whole shelf. How broad its "
        f"answers are is chosen in three ways on calibration documents, and each is audited on {setting.num_test} fresh ones.",
        certificate=result.certificate,
        sections=[_coverage(result)],
        settings=remake(result, quick=setting == QUICK),
    )
    return result.saved()


def _coverage(result: TreeResult) -> Section:
    heads = [f"{what}, {name}" for name in METHODS for what in ("used", "right")]
    coverage = Table(
        ["answers on the shelf", *heads],
        [
            [row["set"], *(percent(row[what][name]) for name in METHODS for what in ("mass", "coverage"))]
            for row in result.rows()
        ],
        numeric=heads,
    )
    root = 'The root, which says nothing, belongs to "all" alone.'
    return Section("How often each answer is used, and how often it is right", [root], [coverage])


def _rich_table(result: TreeResult) -> Any:
    setting = result.setting

    def numbers(row: dict[str, Any], name: str) -> str:
        return f"{percent(row['mass'][name], 0)}  {percent(row['coverage'][name])}"

    rows = [([row["set"]], by_method(row, setting.alpha, numbers)) for row in result.rows()]
    lines = (("answers a leaf", "answers: leaf"), ("answers the root", "answers: root"))
    return show(
        f"Coverage by set of answers, target {percent(setting.target)}",
        ["\nanswers in"],
        [f"{name}\nused  right" for name in METHODS],
        rows,
        [
            ["worst deviation", *(f"{result.audits[name].max_violation:.4f}" for name in METHODS)],
            *([label, *(percent(result.audits[name].cost[key]) for name in METHODS)] for label, key in lines),
        ],
        f"promised: every set of answers is right {percent(setting.target)} of the time, within {setting.alpha:g}\n"
        + meaning(f"these {setting.num_test} test documents", setting.delta),
        result.certificate,
    )
