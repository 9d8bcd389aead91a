"""Examples that belong together: slices of a patient, crops of a photo, sentences of an author.

Within a cluster nothing is independent. Standard errors come from sums over clusters, folds deal whole clusters, and intervals
count clusters, not examples.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchgmc.distributed import collected, extremes, total as over_ranks
from torchgmc.engine.folds import deal, places
from torchgmc.engine.hashing import mix64

#: Rows, or clusters, added up at a time.
ROWS = 1 << 15


def check(value: Any, n: int, device: torch.device) -> Tensor:
    """Cluster ids of n examples as int64 ``(n, 1)``, or ``(n, 0)`` if there are none.

    ``value``: None, or one integer or string per example: a list, an array, a series or a tensor. ``n``: number of examples.
    ``device``: where the ids go.
    """
    if value is None:
        return torch.zeros(n, 0, dtype=torch.int64, device=device)
    if isinstance(value, Tensor):
        ids = value
    else:
        array = np.asarray(value)
        if array.dtype.kind in "iu":
            ids = torch.from_numpy(array.astype(np.int64))
        elif array.dtype.kind in "OU" and all(isinstance(v, str) for v in array.ravel().tolist()):
            names, place = np.unique(array.astype(str), return_inverse=True)
            hashed = [int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big") for name in names.tolist()]
            ids = torch.tensor(hashed, dtype=torch.int64)[torch.from_numpy(place.reshape(array.shape))]
        else:
            raise TypeError(f"`clusters` must hold integers or strings, one per example, got {array.dtype}.")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"`clusters` must hold integers or strings, one per example, got {ids.dtype}.")
    if ids.shape != (n,):
        raise ValueError(f"`clusters` must have shape ({n},), one id per example, got {tuple(ids.shape)}.")
    return ids.to(device, torch.int64)[:, None]


def codes(cluster: Tensor) -> tuple[Tensor, int]:
    """A number from 0 for each example's cluster ``(n,)``, and how many there are; without ids each example has its own."""
    if cluster.shape[1] == 0:
        return torch.arange(len(cluster), device=cluster.device), len(cluster)
    found, place = torch.unique(cluster[:, 0], return_inverse=True)
    return place, len(found)


def total(values: Tensor, cluster: Tensor) -> Tensor:
    """Sums of values ``(n, k)`` over clusters ``(m, k)``; the values themselves without ids."""
    if cluster.shape[1] == 0:
        return values
    place, count = codes(cluster)
    return values.new_zeros(count, *values.shape[1:]).index_add_(0, place, values)


class Clusters:
    """Sums over the clusters of all ranks, in a fit whose rows stay on their ranks too.

    Ranks tell one another the ids of their clusters (8 bytes each), and then the sums of those that lie on several ranks: nothing
    grows with the rows. Where the rows of a cluster are on one rank, as they best are, its sums stay there.

    ``cluster``: int64 ``(n, 1)``.
    """

    def __init__(self, cluster: Tensor) -> None:
        ids, self.place = torch.unique(cluster[:, 0], return_inverse=True)
        every, start = collected(ids)
        _, where, ranks = torch.unique(every, return_inverse=True, return_counts=True)
        mine, several = where[start : start + len(ids)], ranks > 1
        self.alone = ~several[mine]  # of this rank's
        self.slot, self.shared = (several.cumsum(0) - 1)[mine], int(several.sum())

    def sums(self, member: Tensor, values: Tensor, of: Callable[[Tensor], Tensor] = torch.square) -> Tensor:
        """Values ``(n,)`` of each group of ``member`` ``(n, k)``, summed by cluster, and ``of`` these over clusters, ``(k,)``."""
        own = values.new_zeros(len(self.alone), member.shape[1])
        for start in range(0, len(values), ROWS):
            one = slice(start, start + ROWS)
            own.index_add_(0, self.place[one], member[one].double() * values[one, None])
        return sum((of(part).sum(0) for part in self._shared(own)), over_ranks(of(own[self.alone]).sum(0)))

    def largest(self, values: Tensor) -> float:
        """The largest sum of values ``(n,)``, none below 0, over a cluster."""
        own = values.new_zeros(len(self.alone), 1).index_add_(0, self.place, values[:, None])
        return extremes(torch.cat([own[self.alone], own.new_zeros(1, 1), *self._shared(own)])[:, 0])[1]

    def _shared(self, own: Tensor) -> Iterator[Tensor]:
        """Sums of clusters on several ranks, ``(m, k)``, some at a time, from those of this rank's."""
        for start in range(0, self.shared, ROWS):
            here = (~self.alone & (self.slot >= start) & (self.slot < start + ROWS)).nonzero()[:, 0]
            part = own.new_zeros(min(ROWS, self.shared - start), own.shape[1])
            part[self.slot[here] - start] = own[here]
            yield over_ranks(part)


def deal_clusters(parts: int, cluster: Tensor, *content: Tensor) -> Tensor:
    """Part of each example, int64 ``(n,)``: clusters stay together; see :mod:`torchgmc.engine.folds`."""
    if cluster.shape[1] == 0:
        return places(*content).place % parts
    ids, place = torch.unique(cluster[:, 0], return_inverse=True)
    every = torch.unique(collected(ids)[0])  # of all ranks
    return deal(parts, every)[torch.searchsorted(every, ids)][place]


def parts_of(keys: Tensor, parts: int) -> Tensor:
    """Part of each key, int64 ``(n,)``, from the key only: the other keys are unknown when they come in batches."""
    return (mix64(keys.clone()) >> 20).remainder(parts)
