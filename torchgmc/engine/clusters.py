"""Examples that belong together: slices of a patient, crops of a photo, sentences of an author.

Within a cluster nothing is independent. Standard errors come from sums over clusters, folds deal whole clusters, and intervals
count clusters, not examples.
"""

import hashlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed as dist

from torchgmc.distributed import collected, total as over_ranks
from torchgmc.engine import folds
from torchgmc.engine.folds import deal, places
from torchgmc.engine.hashing import mix64

#: Text that an integer would be printed as: neither ``007``, which is a code, nor ``--5``.
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")


def check(value: Any, n: int, device: torch.device) -> Tensor:
    """Cluster ids of n examples as int64 ``(n, 1)``, or ``(n, 0)`` if there are none.

    ``value``: None, or one integer or string per example ("5" is 5, as in a text file): a list, an array, a series or a tensor.
    ``n``: number of examples. ``device``: where the ids go.
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
            hashed = (hashlib.sha256(name.encode()).hexdigest()[:14] for name in names.tolist())
            found = [int(i) if INTEGER.fullmatch(i) else int(key, 16) for i, key in zip(names.tolist(), hashed, strict=True)]
            ids = torch.tensor(found, dtype=torch.int64)[torch.from_numpy(place.reshape(array.shape))]
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
    """Sums of values ``(n, k)`` over clusters ``(m, k)``; the values themselves without ids. See :func:`adder`."""
    return adder(cluster)(values)


def adder(cluster: Tensor) -> Callable[[Tensor], Tensor]:
    """What sums values over clusters; of rows that stay on their ranks ids are sent (8 bytes each), once for all values.

    Sums of clusters on several ranks are sent too: the first has them. Of whole numbers only the sign counts: 2 bytes each.
    """
    if cluster.shape[1] == 0:
        return lambda values: values
    ids, place = torch.unique(cluster[:, 0], return_inverse=True)
    every, start = collected(ids)
    _, where, ranks = torch.unique(every, return_inverse=True, return_counts=True)
    mine, several = where[start : start + len(ids)], ranks > 1

    def add(values: Tensor) -> Tensor:
        sums = values.new_zeros(len(ids), *values.shape[1:]).index_add_(0, place, values)
        sums = sums if values.is_floating_point() else sums.sign().short()
        if len(every) == len(ids):
            return sums
        here, shared = several[mine], sums.new_zeros(int(several.sum()), *values.shape[1:])
        shared[(several.cumsum(0) - 1)[mine[here]]] = sums[here]
        shared = over_ranks(shared)
        return torch.cat([sums[~here], shared[: len(shared) * (dist.get_rank() == 0)]])

    return add


def deal_clusters(parts: int, cluster: Tensor, *content: Tensor) -> Tensor:
    """Part of each example, int64 ``(n,)``: clusters stay together; see :mod:`torchgmc.engine.folds`.

    Of more than ``EXACT`` clusters the part follows from the id only, and none is sent.
    """
    if cluster.shape[1] == 0:
        return places(*content).place % parts
    ids, place = torch.unique(cluster[:, 0], return_inverse=True)
    many = int(over_ranks(torch.tensor(int(len(ids) > folds.EXACT)))) > 0
    every = ids if many else torch.unique(collected(ids)[0])  # of all ranks
    if many or len(every) > folds.EXACT:
        return parts_of(cluster[:, 0], parts)
    return deal(parts, every)[torch.searchsorted(every, ids)][place]


def parts_of(keys: Tensor, parts: int) -> Tensor:
    """Part of each key, int64 ``(n,)``, from the key only: the other keys are unknown when they come in batches."""
    return (mix64(keys.clone()) >> 20).remainder(parts)
