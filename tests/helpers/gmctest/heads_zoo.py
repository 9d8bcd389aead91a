"""One entry per head: a fitted head, the inputs of its forward, and the data of its observe.

A new head is one line in ``ZOO``; export, golden files, many processes and attach are tested over all of it.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchgmc as gmc
from torchgmc.mappings import Residual

GROUPS = ["a", "b", "c"]


#: Groups of which none is everyone.
OTHERS = ["b", "c"]


class Data(NamedTuple):
    """Arguments of ``observe``, one row per example each; ``inputs``: those of ``forward``."""

    observe: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]


class Entry(NamedTuple):
    name: str
    make: Callable[[], gmc.Head]
    data: Callable[[int, int], Data]
    loading: Mapping[str, Any] = MappingProxyType({})  # what a file cannot hold
    per_cell: bool = False  # bytes exchanged between processes do not grow with n
    options: Mapping[str, Any] = MappingProxyType({})  # of calibrate

    @property
    def baseline(self) -> bool:
        """It ignores groups, to be compared with."""
        return type(self.make()).__name__ in gmc.baselines.__all__

    def fitted(self, n: int = 80, seed: int = 0) -> gmc.Head:
        return self.make().fit(*self.data(n, seed).observe, **self.options)

    def fitted_alone(self) -> gmc.Head:
        """Fitted by this process alone, inside a process group."""
        with gmc.distributed.local():
            return self.fitted()


def membership(n: int, generator: torch.Generator) -> Tensor:
    member = torch.rand(n, len(GROUPS), generator=generator) < 0.5
    member[:, 0] = True
    return member


def images(n: int, seed: int, classes: int | None = None) -> Data:
    g = torch.Generator().manual_seed(seed)
    shape = (n, 6, 5) if classes is None else (n, classes, 6, 5)
    member = membership(n, g)
    masks = torch.rand(shape, generator=g) < 0.4
    shift = member[:, 1].float().view(-1, *[1] * (len(shape) - 1))
    scores = torch.sigmoid(2.0 * masks + torch.randn(shape, generator=g) - 1.0 - shift)
    return Data((scores, masks, member), (scores, member))


def events(n: int, seed: int, classes: int | None = None) -> Data:
    g = torch.Generator().manual_seed(seed)
    member = membership(n, g)
    logits = torch.randn(n, classes or 1, generator=g) * 1.5
    truth = logits + member[:, 1:2] * torch.linspace(1.0, -1.0, classes or 1)
    if classes is None:
        y = torch.rand(n, generator=g) < truth[:, 0].sigmoid()
        return Data((logits[:, 0].sigmoid(), y, member), (logits[:, 0].sigmoid(), member))
    y = torch.multinomial(truth.softmax(1), 1, generator=g)[:, 0]
    return Data((logits.softmax(1), y, member), (logits.softmax(1), member))


def tags(n: int, seed: int) -> Data:
    """Three labels of which several may hold."""
    g = torch.Generator().manual_seed(seed)
    member, logits = membership(n, g), torch.randn(n, 3, generator=g)
    y = torch.rand(n, 3, generator=g) < torch.sigmoid(logits + member[:, 1:2] * torch.linspace(1.0, -1.0, 3))
    return Data((torch.sigmoid(2.0 * logits), y, member), (torch.sigmoid(2.0 * logits), member))


def means(n: int, seed: int) -> Data:
    probs, y, member = events(n, seed).observe
    return Data((probs, y.float(), member), (probs, member))


def residuals(n: int, seed: int) -> Data:
    g = torch.Generator().manual_seed(seed)
    member = membership(n, g)
    scores = (torch.randn(n, generator=g) * (1.0 + member[:, 1])).abs()
    return Data((scores, member), (member,))


def prompts(n: int, seed: int) -> Data:
    g = torch.Generator().manual_seed(seed)
    member = membership(n, g)
    logits = torch.randn(n, 20, generator=g)
    logits[:, 3:6] += 1.5 * member[:, 1:2]
    return Data((logits, member), (logits, member))


TREE = {"x": ["x1", "x2"], "y": ["y1", "y2", "y3"]}


def documents(n: int, seed: int, grouped: bool = False) -> Data:
    g = torch.Generator().manual_seed(seed)
    member = membership(n, g)
    labels = torch.randint(5, (n,), generator=g)
    probs = (torch.randn(n, 5, generator=g) + 1.5 * torch.nn.functional.one_hot(labels, 5)).softmax(1)
    if grouped:
        return Data((probs, labels, member), (probs, member))
    return Data((probs, labels), (probs,))


def oversure(n: int, seed: int) -> Data:
    """Events of a model whose logits are twice too large."""
    probs, y, member = events(n, seed).observe
    probs = torch.sigmoid(2.0 * torch.logit(probs))
    return Data((probs, y, member), (probs, member))


def without_all(data: Data) -> Data:
    """The same without the first group, to which everyone belongs."""
    return Data(*((*part[:-1], part[-1][:, 1:]) for part in data))


def apart(data: Data) -> Data:
    """The same with the last group and its complement, which do not overlap."""
    return Data(*((*part[:-1], torch.stack([part[-1][:, -1], ~part[-1][:, -1]], 1)) for part in data))


LISTS = {"jobs": [3, 4], "praise": [4, 5, 9]}

ZOO = [
    Entry("threshold", lambda: gmc.ThresholdHead(0.1, 0.02, GROUPS, noise_floor=False), images, per_cell=True),
    Entry(
        "threshold-classes",
        lambda: gmc.ThresholdHead([0.1, 0.2], 0.02, GROUPS, num_classes=2, noise_floor=False),
        lambda n, s: images(n, s, 2),
        per_cell=True,
    ),
    Entry(
        "threshold-jitter",
        lambda: gmc.ThresholdHead(0.1, 0.02, GROUPS, jitter=0.01, risk="fpr", conditional=True, noise_floor=False),
        images,
        per_cell=True,
    ),
    Entry("threshold-exact", lambda: gmc.ThresholdHead(0.1, 0.02, GROUPS, resolution="exact", noise_floor=False), images),
    Entry("conformal", lambda: gmc.baselines.ConformalRiskControl(0.1, 0.02, GROUPS), images, per_cell=True),
    Entry("conformal-mondrian", lambda: gmc.baselines.MondrianRiskControl(0.1, 0.02, GROUPS), images, per_cell=True),
    Entry("unprocessed", lambda: gmc.baselines.Unprocessed(0.1, alpha=0.02, groups=GROUPS), images, per_cell=True),
    Entry("probability", lambda: gmc.ProbabilityHead(0.01, GROUPS, bins=None, noise_floor=False), events),
    Entry("probability-bins", lambda: gmc.ProbabilityHead(0.02, GROUPS, bins=4, noise_floor=False), events),
    Entry(
        "probability-euclidean",
        lambda: gmc.ProbabilityHead(0.02, GROUPS, bins=4, geometry="euclidean", noise_floor=False),
        events,
    ),
    Entry(
        "probability-classes",
        lambda: gmc.ProbabilityHead(0.02, GROUPS, bins=3, num_classes=3, noise_floor=False),
        lambda n, s: events(n, s, 3),
    ),
    Entry(
        "probability-labels",
        lambda: gmc.ProbabilityHead(0.02, GROUPS, bins=3, num_classes=3, multilabel=True, noise_floor=False),
        tags,
    ),
    Entry("quantile", lambda: gmc.QuantileHead(0.8, 0.02, GROUPS, noise_floor=False), residuals),
    Entry("quantile-bins", lambda: gmc.QuantileHead(0.8, 0.02, GROUPS, bins=4, noise_floor=False), residuals),
    Entry("quantile-conformal", lambda: gmc.baselines.SplitConformal(0.8, 0.02, GROUPS), residuals),
    Entry("quantile-mondrian", lambda: gmc.baselines.MondrianConformal(0.8, 0.02, GROUPS), residuals),
    Entry("probability-scaling", lambda: gmc.baselines.Scaling(0.02, GROUPS), events),
    Entry(
        "probability-mondrian",
        lambda: gmc.baselines.MondrianScaling(0.02, ["inside", "outside"]),
        lambda n, s: apart(events(n, s)),
    ),
    Entry("distribution", lambda: gmc.DistributionHead(LISTS, 0.002, GROUPS, noise_floor=False), prompts),
    Entry(
        "distribution-euclidean",
        lambda: gmc.DistributionHead(LISTS, 0.01, GROUPS, geometry="euclidean", noise_floor=False),
        prompts,
    ),
    Entry("tree", lambda: gmc.TreeHead(TREE, 0.9, 0.025, noise_floor=False), documents),
    Entry(
        "tree-groups",
        lambda: gmc.TreeHead(TREE, 0.9, 0.05, groups=GROUPS, noise_floor=False),
        lambda n, s: documents(n, s, True),
    ),
    Entry("tree-conformal", lambda: gmc.baselines.SplitConformalTree(TREE, 0.9), documents),
    Entry(
        "tree-mondrian",
        lambda: gmc.baselines.MondrianConformalTree(TREE, 0.6, groups=["inside", "outside"]),
        lambda n, s: apart(documents(n, s, True)),
    ),
    Entry("tree-unprocessed", lambda: gmc.baselines.UnprocessedTree(TREE, 0.9), documents),
    Entry("gmc", lambda: gmc.GMCHead(Residual, 0.02, groups=GROUPS, noise_floor=False), means, {"mapping": Residual}),
    # The noise rule, with groups of which none is everyone.
    Entry("threshold-noise", lambda: gmc.ThresholdHead(0.1, None, OTHERS), lambda n, s: without_all(images(n, s)), per_cell=True),
    Entry("probability-noise", lambda: gmc.ProbabilityHead(None, OTHERS, bins=4), lambda n, s: without_all(events(n, s))),
    Entry("probability-oversure", lambda: gmc.ProbabilityHead(None, OTHERS, bins=None), lambda n, s: without_all(oversure(n, s))),
    Entry("quantile-noise", lambda: gmc.QuantileHead(0.8, None, OTHERS), lambda n, s: without_all(residuals(n, s))),
    Entry(
        "quantile-counts", lambda: gmc.QuantileHead(0.8, None, OTHERS, resolution=0.01), lambda n, s: without_all(residuals(n, s))
    ),
    Entry("distribution-noise", lambda: gmc.DistributionHead(LISTS, None, OTHERS), lambda n, s: without_all(prompts(n, s))),
    Entry("tree-noise", lambda: gmc.TreeHead(TREE, 0.9, None), documents),
    Entry(
        "gmc-noise",
        lambda: gmc.GMCHead(Residual, None, groups=OTHERS),
        lambda n, s: without_all(means(n, s)),
        {"mapping": Residual},
    ),
]
ENTRIES = {entry.name: entry for entry in ZOO}
NAMES = list(ENTRIES)
