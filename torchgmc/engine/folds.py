"""Dealing examples to folds and splits so that neither batches, nor their order, nor ranks matter.

Rows are sorted by their content, and a fixed pseudo-random permutation of the *positions* deals them out. A hash of the content
itself would put equal rows side by side into one part.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgmc import distributed
from torchgmc.engine import hashing

#: Up to so many rows have their exact place, for which every rank needs the keys of all rows; more have one by a hash.
EXACT = 1 << 15
#: Up to so many kinds of rows, equal ones have different places. Of more kinds, those have of which there are more than so many
#: rows, and more than one in so many of all; equal rows of other kinds share a place.
EQUAL, ALIKE, MOST = 1 << 12, 16, 1 << 16
#: Range of places by a hash.
RANGE = 1 << 40


def shuffled(*parts: Tensor, seed: int | None = 0) -> Tensor:
    """The order in which examples are taken: by content, then permuted; a function of the set of rows only.

    ``parts``: tensors with one row per example, ``(n, ...)``. ``seed``: of the permutation; None: the content decides.

    Example:
        >>> x = torch.tensor([3.0, 1.0, 2.0, 1.0])
        >>> torch.equal(x[shuffled(x)], x.flip(0)[shuffled(x.flip(0))])
        True
    """
    return permuted(keys := hashing.row_keys(*parts), int(keys.sum() >> 32) if seed is None else seed)


def permuted(keys: Tensor, seed: int = 0) -> Tensor:
    """:func:`shuffled` from the keys of the rows."""
    order = keys.argsort(stable=True)
    places = torch.randperm(len(keys), generator=torch.Generator().manual_seed(len(keys) + seed)).to(order.device)
    return order[places]


class Places(NamedTuple):
    """A place from 0 to ``limit`` - 1 for each row of this rank ``(n,)``, and the number of rows on all ranks."""

    place: Tensor
    limit: int
    rows: int

    def few(self, rows: int, count: int) -> Tensor | None:
        """About ``rows`` out of ``count``, bool ``(n,)``; None for all, if there are fewer than twice as many."""
        return None if count < 2 * rows else self.place < int(rows * self.limit / count)


def places(*parts: Tensor) -> Places:
    """Places that do not depend on the order of the rows, nor on the ranks they are on; equal rows have different ones.

    (If there are more than ``EXACT`` rows, and of more than ``EQUAL`` kinds, equal ones of a rare kind share a place.)

    ``parts``: as for :func:`shuffled`.
    """
    return places_of(hashing.row_keys(*parts))


def places_of(keys: Tensor) -> Places:
    """:func:`places` from the keys of the rows."""
    sizes = distributed.collected(torch.tensor([len(keys)]))[0]
    count = int(sizes.sum())
    if count <= EXACT:
        every, start = distributed.collected(keys)
        return Places(permuted(every).argsort()[start : start + len(keys)], count, count)
    ascending = np.sort(keys.cpu().numpy())  # half of the time and memory of torch's
    new = np.append(ascending[:1] == ascending[:1], ascending[1:] != ascending[:-1])
    own, times = torch.from_numpy(ascending[new] if not new.all() else ascending), torch.ones(1, dtype=torch.int64)
    times = times.expand(len(own)) if new.all() else torch.from_numpy(np.diff(np.flatnonzero(new), append=len(new)))
    apart = len(torch.unique(distributed.collected(own[: EQUAL + 1])[0])) > EQUAL
    limit = max(ALIKE, count / MOST) if apart else 0
    known = torch.unique(distributed.collected(own[times > limit / len(sizes)])[0])  # others have fewer on all ranks together
    here, mine = torch.isin(known, own), torch.zeros_like(known)
    where = torch.searchsorted(own, known[here])
    mine[here] = times[where]
    told, rank = distributed.collected(mine[None])
    many = told.sum(0) > limit
    if not bool((many & here).any()):
        code = hashing.mix64(keys)
    else:
        dealt, before = torch.zeros(2, len(own), dtype=torch.int64)
        dealt[where], before[where] = many[here].long(), told[:rank].sum(0)[here]
        before -= times.cumsum(0) - times
        kind, order = torch.repeat_interleave(times), keys.argsort()
        index = (torch.arange(len(kind)) + before[kind]) * dealt[kind]  # of a row among those equal to it
        code = torch.empty_like(keys)
        code[order] = hashing.mix64(keys[order] + hashing.mix64(index.to(keys.device)))
    return Places((code >> 20).bitwise_and_(RANGE - 1), RANGE, count)


def relative(weight: Tensor) -> Tensor:
    """Weights over the largest of all ranks, but for last bits: to tell rows apart whatever the unit and the order of a sum."""
    return (weight / distributed.extremes(weight.flatten())[1]).float().double()


def leading(spots: Tensor, rows: int) -> int:
    """How many of this rank's rows, by ascending spots from 0 to 1 ``(n,)``, are among about the first ``rows`` of all ranks."""
    count = int(distributed.total(torch.tensor(len(spots))))
    return int(torch.searchsorted(spots, rows / count)) if count > rows else len(spots)


def deal(parts: int, *content: Tensor, seed: int = 0) -> Tensor:
    """Number of the part each example is dealt to, int64 ``(n,)``; parts differ by at most one example.

    ``parts``: how many. ``content``, ``seed``: as for :func:`shuffled`.
    """
    return shuffled(*content, seed=seed).argsort() % parts


class Pair(NamedTuple):
    """Examples that step t of Algorithm 2 measures on, and those it takes expectations over; 0 or 1, float64 ``(n,)``."""

    outer: Tensor
    inner: Tensor


class Splits:
    """The 2T disjoint splits of Algorithm 2. ``steps``: T. ``content``, ``seed``: the examples, as for :func:`shuffled`."""

    def __init__(self, steps: int, *content: Tensor, seed: int = 0) -> None:
        n = len(content[0])
        if n < 2 * steps:
            raise ValueError(
                f"solver='fresh' divides the examples into 2 T = {2 * steps} splits, but there are {n} examples; lower "
                "`max_iter` or use more (theory.sample_size says how many the theorem needs)."
            )
        self.steps = steps
        self.part = deal(2 * steps, *content, seed=seed)

    def pair(self, t: int) -> Pair:
        """The two splits of step t, counted from 0."""
        return Pair((self.part == 2 * t).double(), (self.part == 2 * t + 1).double())


def fresh_splits(max_iter: int | None, *content: Tensor, seed: int = 0) -> Splits:
    """With T of Algorithm 2 from the argument, or about a hundred examples per step."""
    return Splits(max_iter or min(200, max(1, len(content[0]) // 100)), *content, seed=seed)
