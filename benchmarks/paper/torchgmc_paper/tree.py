"""Prediction-set-conditional coverage on a label tree: the paper's experiment on Web of Science.

Protocol (the paper's): target 0.95, tolerance 0.025, noise of half-width 0.005 on the scores, examples split 1:1 at random, 50
seeds. Promises: one for the answers at or below each child of the root, and one for all answers.
"""

import hashlib
import math
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgmc as gmc
from torchgmc_paper.demo.progress import Bar
from torchgmc_paper.frame import Prepared, cached, digest
from torchgmc_paper.measures import measure

NAME, TITLE, SEEDS = "tree", "Coverage of every set of answers on a label tree", 50


@dataclass(frozen=True)
class Setting:
    """The paper's protocol, and what was ours to choose.

    Attributes:
        target, alpha, jitter, calibration: the paper's; ``calibration`` is the share of the examples to calibrate on.
        tight: a second tolerance for ``GMC exact``: conformal's one threshold aims at the target itself, whereas GMC may stop
            as soon as every violation is within alpha.
        eta: fixed step of Algorithm 1 in the conditional view, where the theorem's step takes some 10,000 of them; in the
            mass-weighted view the step is the theorem's.
        steps: cap on those fixed steps.
        parts: which trees: ``"wos"``, ``"newsgroups"``, ``"amazon"``.
        kind: ``"scores"`` of one classifier, or ``"crossfit"`` (Web of Science only).
        limit: only the first examples of each tree; 0 for all.
    """

    target: float = 0.95
    alpha: float = 0.025
    tight: float = 0.005
    jitter: float = 0.005
    calibration: float = 0.5
    eta: float = 0.01
    steps: int = 1000
    parts: tuple[str, ...] = ("wos",)
    kind: str = "scores"
    limit: int = 0


QUICK = Setting(limit=800, steps=100)

METHODS = (
    "GMC paper",
    "GMC exact",
    "GMC exact, tight",
    "GMC paper, conditional",
    "GMC exact, conditional",
    "conformal",
    "unprocessed",
)
OURS = METHODS[:5]

_SETS = ("all", "CS", "Medical", "Civil", "ECE", "Biochemistry", "MAE", "Psychology")
PAPER = {
    "wos": {
        "GMC": dict(zip(_SETS, (0.016, 0.027, 0.003, 0.001, 0.002, 0.002, 0.001, 0.002), strict=True)),
        "conformal": dict(zip(_SETS, (0.068, 0.071, 0.001, 0.001, 0.002, 0.001, 0.001, 0.001), strict=True)),
        "unprocessed": dict(zip(_SETS, (0.093, 0.014, 0.004, 0.004, 0.005, 0.001, 0.003, 0.017), strict=True)),
    }
}


def prepare(data: Path, out: Path, bar: Bar, setting: Setting) -> Prepared:
    """Leaf scores of every tree: those that come with the data, else of a linear classifier trained here."""
    from torchgmc.datasets import HierarchicalText

    tensors: dict[str, Tensor] = {}
    trees: dict[str, Any] = {}
    notes: list[str] = []
    for part in bar.track(setting.parts, "read scores"):
        texts = HierarchicalText(data, part)
        probs, labels, trained = _scores(texts, part, out, bar, setting)
        if setting.limit:
            probs, labels = probs[: setting.limit], labels[: setting.limit]
        tensors |= {f"{part}.probs": probs, f"{part}.labels": labels}
        trees[part] = (texts.parents, texts.node_names)
        right = float((probs.argmax(1) == labels).double().mean())
        notes.append(
            f"{part}: {len(probs)} examples scored by a classifier that did not see them, {texts.num_leaves} leaves, best leaf "
            f"right in {100 * right:.1f} %; {int(len(probs) * setting.calibration)} to calibrate, the rest to test."
        )
        if trained:
            notes[-1] += " The data came without scores: the classifier was trained here, on a third of the documents of each leaf."
    notes.append(
        "GMC paper and GMC exact are fitted for the mass-weighted promise, those marked conditional for each set's own "
        f"coverage; tight: at a tolerance of {setting.tight:g} instead of {setting.alpha:g}. Cost: mean number of leaves in an "
        "answer, share of answers that are the root (which says nothing) or a leaf; fit converged: share of seeds whose "
        "violations on the calibration examples are within the tolerance."
    )
    settings = {part: digest(tensors[f"{part}.probs"], tensors[f"{part}.labels"]) for part in setting.parts}
    return Prepared({"data": settings}, tensors, notes, {"trees": trees, "setting": setting})


def _scores(texts: Any, part: str, out: Path, bar: Bar, setting: Setting) -> tuple[Tensor, Tensor, bool]:
    """Scores and labels that come with the data, else of a classifier trained here; whether it was."""
    try:
        probs, labels, _ = texts.scores(setting.kind if part == "wos" else "scores")
        return probs, labels, False
    except FileNotFoundError:
        if setting.kind != "scores":
            raise
    digits = hashlib.sha256("\n".join(texts.texts).encode()).hexdigest()[:16]
    mark = {**CLASSIFIER, "texts": digits, "labels": digest(texts.labels), "torch": torch.__version__}
    make = partial(train_scores, texts.texts, texts.labels, texts.num_leaves, bar)
    found = cached(out / f"{part}.safetensors", mark, make)
    return found["probs"], found["labels"], True


def run_seed(prepared: Prepared, seed: int) -> list[dict[str, Any]]:
    """Every method on one split of every tree."""
    setting: Setting = prepared.extra["setting"]
    rows: list[dict[str, Any]] = []
    for part in setting.parts:
        probs, labels = prepared.tensors[f"{part}.probs"], prepared.tensors[f"{part}.labels"]
        order = torch.randperm(len(probs), generator=torch.Generator().manual_seed(seed))
        cut = int(len(order) * setting.calibration)
        known, fresh = order[:cut], order[cut:]
        for method in METHODS:
            head = _fitted(method, prepared.extra["trees"][part], setting, probs[known], labels[known])
            rows += _measured(method, part, head, setting, (probs, labels), known, fresh)
    return rows


def _fitted(method: str, tree: Any, setting: Setting, probs: Tensor, labels: Tensor) -> gmc.TreeHead:
    options: dict[str, Any] = {"target": setting.target, "alpha": setting.alpha, "jitter": setting.jitter, "names": tree[1]}
    fit: dict[str, Any] = {}
    kind: type[gmc.TreeHead] = gmc.TreeHead
    if method == "conformal":
        kind = gmc.baselines.SplitConformalTree
    elif method == "unprocessed":
        kind = gmc.baselines.UnprocessedTree
    if "tight" in method:
        options["alpha"] = setting.tight
    if "conditional" in method:
        options["conditional"] = True
    if "paper" in method:
        fit["solver"] = "paper"
        if "conditional" in method:
            fit |= {"eta": setting.eta, "max_iter": setting.steps}
    head: gmc.TreeHead = kind(tree[0], **options).fit(probs, labels, **fit)
    return head


def _measured(
    method: str,
    part: str,
    head: gmc.TreeHead,
    setting: Setting,
    data: tuple[Tensor, Tensor],
    known: Tensor,
    fresh: Tensor,
) -> list[dict[str, Any]]:
    probs, labels = data
    seen, _, covered = _answers(head, probs[known], labels[known])
    mass = (seen.double() * (covered - setting.target)[:, None]).mean(0)
    who, nodes, covered = _answers(head, probs[fresh], labels[fresh])
    sizes = head.leaves(nodes).sum(1).double()
    root = head.num_nodes - 1 if head.tree.parents[-1] == -1 else head.tree.parents.index(-1)
    report = head.report
    assert report is not None
    cost = {
        "coverage": float(covered.mean()),
        "mean set size": float(sizes.mean()),
        "answers: root": float((nodes == root).double().mean()),
        "answers: leaf": float((nodes < head.num_leaves).double().mean()),
        "fit converged": float(report.converged),
    }
    return measure(
        method,
        list(head.sets),
        who,
        covered - setting.target,
        target=setting.target,
        calibration={"mass": mass, "conditional": mass / seen.double().mean(0)},
        num_calibration=len(known),
        part=part,
        cost=cost,
    )


def _answers(head: gmc.TreeHead, probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In which sets each answer lies, bool (n, q); the answers, (n,); whether they cover the label, (n,)."""
    nodes = head(probs)
    inside = torch.zeros(head.num_nodes, len(head.sets), dtype=torch.bool)
    for column, members in enumerate(head.sets.values()):
        inside[members, column] = True
    covered = head.leaves(nodes).gather(1, labels[:, None])[:, 0].double()
    return inside[nodes], nodes, covered


# -- leaf scores of documents that come without them: softmax regression on hashed words, trained once ------------------------

BUCKETS, EPOCHS, BATCH, RATE = 1 << 16, 40, 64, 5.0
CLASSIFIER = {"buckets": BUCKETS, "epochs": EPOCHS, "batch": BATCH, "rate": RATE, "share": 1 / 3}


def train_scores(texts: Sequence[str], labels: Tensor, num_leaves: int, bar: Bar) -> dict[str, Tensor]:
    """Trains on a third of the documents of each leaf, scores the others.

    Args:
        texts: n documents.
        labels: leaf of each, ``(n,)``.
        num_leaves: number of leaves K.
        bar: shows how far it is.

    Returns:
        ``probs`` ``(m, K)`` float32 and ``labels`` ``(m,)`` of the m documents that were not trained on.
    """
    generator = torch.Generator().manual_seed(0)
    known = _third(labels, generator)
    ids, weights, starts = _bags(texts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        table = nn.EmbeddingBag(BUCKETS, num_leaves, mode="sum", include_last_offset=True)
    nn.init.zeros_(table.weight)
    bias = nn.Parameter(torch.zeros(num_leaves))
    optimiser = torch.optim.SGD([*table.parameters(), bias], RATE, momentum=0.9)

    def logits(rows: Tensor) -> Tensor:
        length = starts[rows + 1] - starts[rows]
        place = torch.cat([length.new_zeros(1), length.cumsum(0)])
        take = torch.repeat_interleave(starts[rows] - place[:-1], length) + torch.arange(int(place[-1]))
        found: Tensor = table(ids[take], place, per_sample_weights=weights[take])
        return found + bias

    rows = known.nonzero()[:, 0]
    for _ in bar.track(range(EPOCHS), "train a classifier"):
        for batch in torch.split(rows[torch.randperm(len(rows), generator=generator)], BATCH):
            loss = F.cross_entropy(logits(batch), labels[batch])
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            optimiser.step()
    others = (~known).nonzero()[:, 0]
    with torch.inference_mode():
        probs = torch.cat([logits(part).softmax(1) for part in torch.split(others, 1024)])
    return {"probs": probs.clone(), "labels": labels[others].clone()}


def _third(labels: Tensor, generator: torch.Generator) -> Tensor:
    """A random third of the documents of each leaf, bool ``(n,)``; at least one of a leaf with two."""
    order = torch.randperm(len(labels), generator=generator)
    order = order[labels[order].argsort(stable=True)]  # by leaf, at random inside
    count = torch.bincount(labels)
    rank = torch.arange(len(labels)) - (count.cumsum(0) - count)[labels[order]]
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    chosen[order] = rank < ((count + 1) // 3).clamp_min(1)[labels[order]]
    return chosen


def _bags(texts: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Words and pairs of neighbouring words of every document: buckets, TF-IDF weights of length 1, and where each begins."""
    bags = []
    for text in texts:
        words = re.findall(r"[a-z0-9]+", text.lower())
        terms = (*words, *map(" ".join, pairwise(words)))
        bags.append(Counter(zlib.crc32(term.encode()) % BUCKETS for term in terms))
    present = Counter(bucket for bag in bags for bucket in bag)
    ids, weights, starts = [], [], [0]
    for bag in bags:
        values = [(1 + math.log(many)) * math.log((1 + len(bags)) / (1 + present[bucket])) for bucket, many in bag.items()]
        length = math.sqrt(sum(v * v for v in values)) or 1.0
        ids += list(bag)
        weights += [v / length for v in values]
        starts.append(len(ids))
    return torch.tensor(ids), torch.tensor(weights), torch.tensor(starts)
