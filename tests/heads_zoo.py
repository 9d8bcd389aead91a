"""One entry per head: a fitted head, the inputs of its forward, and the data of its observe.

A new head is one line in ``ZOO``; export, golden files, many processes and attach are tested over all of it.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchgmc as gmc

GROUPS = ["a", "b", "c"]


class Data(NamedTuple):
    """Arguments of ``observe``, one row per example each; ``inputs``: those of ``forward``."""

    observe: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]


class Entry(NamedTuple):
    name: str
    make: Callable[[], gmc.Head]
    data: Callable[[int, int], Data]
    per_cell: bool = False  # bytes exchanged between processes do not grow with n
    options: Mapping[str, Any] = MappingProxyType({})  # of calibrate

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


ZOO = [
    Entry("threshold", lambda: gmc.ThresholdHead(0.1, 0.02, GROUPS), images, per_cell=True),
    Entry(
        "threshold-classes",
        lambda: gmc.ThresholdHead([0.1, 0.2], 0.02, GROUPS, num_classes=2),
        lambda n, s: images(n, s, 2),
        True,
    ),
    Entry(
        "threshold-jitter",
        lambda: gmc.ThresholdHead(0.1, 0.02, GROUPS, jitter=0.01, risk="fpr", conditional=True),
        images,
        True,
    ),
    Entry("threshold-exact", lambda: gmc.ThresholdHead(0.1, 0.02, GROUPS, resolution="exact"), images),
    Entry("conformal", lambda: gmc.baselines.ConformalRiskControl(0.1, 0.02, GROUPS), images, per_cell=True),
    Entry("unprocessed", lambda: gmc.baselines.Unprocessed(0.1, alpha=0.02, groups=GROUPS), images, per_cell=True),
]
NAMES = [entry.name for entry in ZOO]
