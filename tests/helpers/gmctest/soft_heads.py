"""Fitted heads for the soft modes, with inputs to differentiate in."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torchgmc as gmc
from gmctest.heads_zoo import GROUPS, NAMES, ZOO, Data, events, residuals

SOFT = ("soft", "straight_through")


def _fit(make: Callable[..., gmc.Head], data: Callable[[int, int], Data], **options: Any) -> Callable[[], gmc.Head]:
    return lambda: make().fit(*data(400, 2).observe, **options)


#: Heads with rounds on level sets, which those of the zoo need not have.
LEVELED = {
    "probability-bins+exact": _fit(lambda: gmc.ProbabilityHead(0.002, GROUPS, bins=4, noise_floor=False), events),
    "probability-bins+paper": _fit(lambda: gmc.ProbabilityHead(0.01, GROUPS, bins=4), events, solver="paper", max_iter=20),
    "probability-euclidean+exact": _fit(
        lambda: gmc.ProbabilityHead(0.002, GROUPS, bins=4, geometry="euclidean", noise_floor=False), events, max_iter=5
    ),
    "probability-classes+exact": _fit(
        lambda: gmc.ProbabilityHead(0.003, GROUPS, bins=3, num_classes=3, noise_floor=False),
        lambda n, s: events(n, s, 3),
        max_iter=5,
    ),
    "probability-classes+paper": _fit(
        lambda: gmc.ProbabilityHead(0.01, GROUPS, bins=3, num_classes=3, geometry="euclidean"),
        lambda n, s: events(n, s, 3),
        solver="paper",
        max_iter=10,
    ),
    "quantile-bins+paper": _fit(
        lambda: gmc.QuantileHead(0.8, 0.003, GROUPS, bins=4, init=0.5), residuals, solver="paper", eta=0.2, max_iter=12
    ),
}


ALL = NAMES + list(LEVELED)


@functools.cache
def fitted(name: str) -> gmc.Head:
    if name not in LEVELED:
        return ZOO[NAMES.index(name)].fitted()
    head = LEVELED[name]()
    assert sum(len(getattr(head, key)) for key in ("rounds", "log_who") if hasattr(head, key)) > 0
    return head


def inputs_of(name: str, n: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Inputs of forward; the first that is floating point is the one to differentiate in (a quantile head gets a base)."""
    inputs = ZOO[NAMES.index(name.split("+")[0])].data(n, seed).inputs
    if name.startswith("quantile"):
        return (*inputs, torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2)
    return (inputs[0].to(dtype), *inputs[1:])


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x > -700 else 0.0
