"""Answers on a label tree that can be trusted, whichever they are, end to end, in seconds on one core.

A network files documents under the topics of a library. Some shelves are harder than others, and the archive it learned from is
neater than the documents that come in. It answers with a topic, or with a whole shelf when it is unsure. Three ways to choose
how broad an answer is are fitted on calibration documents and audited on fresh ones: the best leaf as it is, split conformal
(right on average), and :class:`torchgmc.TreeHead` (right whenever it answers on a given shelf).

    $ torchgmc demo tree
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgmc as gmc
from torchgmc.heads.tree.tree import Tree
from torchgmc.report import Section, Table
from torchgmc_paper.demo.progress import Bar, train
from torchgmc_paper.demo.stage import Found, Page, Result, by_method, fit_and_audit, meaning, percent, show, trained

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
    """Sizes of the demo; the defaults are what ``torchgmc demo tree`` shows."""

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
    """What the demo found, on the test documents."""

    demo: ClassVar[str] = "tree"
    standard: ClassVar[Setting] = Setting()
    quick: ClassVar[Setting] = QUICK

    @property
    def certificate(self) -> str:
        """One line about the calibrated model."""
        return super().certificate.replace("groups", "sets of answers")

    def rows(self) -> list[dict[str, Any]]:
        """One row per set of answers: by method how often it is used, its coverage, deviation and verdict."""
        return self.by_method("set", (*LIBRARY, "all"), coverage="risk")

    def findings(self) -> dict[str, Any]:
        """Sets of answers, how precise the answers are, and the length of the log."""
        precision = {name: audit.cost for name, audit in self.audits.items()}
        return {"sets": self.rows(), "precision": precision, "rounds": self.report.details["rounds"]}

    def __rich__(self) -> Any:
        setting = self.setting

        def numbers(row: dict[str, Any], name: str) -> str:
            return f"{percent(row['mass'][name], 0)}  {percent(row['coverage'][name])}"

        rows = [([row["set"]], by_method(row, setting.alpha, numbers)) for row in self.rows()]
        lines = (("answers a leaf", "answers: leaf"), ("answers the root", "answers: root"))
        return show(
            f"Coverage by set of answers, target {percent(setting.target)}",
            ["\nanswers in"],
            [f"{name}\nused  right" for name in METHODS],
            rows,
            [
                ["worst deviation", *(f"{self.audits[name].max_violation:.4f}" for name in METHODS)],
                *([label, *(percent(self.audits[name].cost[key]) for name in METHODS)] for label, key in lines),
            ],
            f"promised: every set of answers is right {percent(setting.target)} of the time, within {setting.alpha:g}\n"
            + meaning(f"these {setting.num_test} test documents", setting.delta),
            self.certificate,
        )

    @staticmethod
    def work(setting: Setting, seed: int, bar: Bar) -> Found:
        def filed(num: int, own: int, used: bool) -> tuple[Tensor, Tensor]:
            return draw(num, own, seed, setting.features, used)

        model, calibration, test = trained(setting, seed, bar, filed, train_network)
        with bar.clock("calibrate and audit"), torch.inference_mode():
            heads = _heads(setting)
            known, fresh = ((model(x).softmax(1), y) for x, y in (calibration, test))
            audits = fit_and_audit(heads, known, fresh, setting.delta, bar)
        return Found(heads["GMC"], audits, {}, lambda result: _page(result, heads["GMC"]))


run = TreeResult.run


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


def train_network(data: tuple[Tensor, Tensor], setting: Setting, seed: int, bar: Bar) -> nn.Module:
    """A small network by AdamW and cross-entropy."""
    x, y = data
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(setting.features, 64), nn.ReLU(), nn.Linear(64, Tree(LIBRARY).num_leaves))
    rng = torch.Generator().manual_seed(seed)
    batches = [
        rows for _ in range(setting.epochs) for rows in torch.split(torch.randperm(len(x), generator=rng), setting.batch_size)
    ]
    return train(model, batches, lambda rows: F.cross_entropy(model(x[rows]), y[rows]), setting.learning_rate, bar, "train")


def _heads(setting: Setting) -> dict[str, gmc.TreeHead]:
    options: dict[str, Any] = {"target": setting.target, "alpha": setting.alpha, "conditional": True}
    return {
        "unprocessed": gmc.baselines.UnprocessedTree(LIBRARY, **options),
        "conformal": gmc.baselines.SplitConformalTree(LIBRARY, **options),
        "GMC": gmc.TreeHead(LIBRARY, **options),
    }


def _page(result: TreeResult, head: gmc.TreeHead) -> Page:
    from torchgmc import plots

    setting = result.setting
    title = "Deviation of the coverage from the target, by set of answers"
    shelves = plots.tree(head, result.audits["GMC"], title="Coverage of the answers on each shelf")
    columns = [f"{what}, {name}" for name in METHODS for what in ("used", "right")]
    coverage = Table(
        ["answers on the shelf", *columns],
        [[row["set"], *(percent(row[what][name]) for name in METHODS for what in ("mass", "coverage"))] for row in result.rows()],
        numeric=columns,
    )
    root = 'The root, which says nothing, belongs only to "all".'
    bars = plots.deviation(result.audits, setting.alpha, title=title)
    return {"deviation.png": plots.png(bars), "tree.png": plots.png(shelves)}, {
        "title": f"Right {100 * setting.target:g} % of the time whatever the answer, not on average",
        "lead": "A network files documents under the topics of a library, and may answer with a whole shelf. How broad its "
        f"answers are is chosen in three ways on calibration documents, and each is audited on {setting.num_test} fresh ones.",
        "certificate": result.certificate,
        "sections": [Section("How often each answer is used, and how often it is right", [root], [coverage])],
    }
