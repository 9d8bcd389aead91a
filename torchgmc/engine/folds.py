"""Dealing examples to folds and splits so that neither batches, nor their order, nor ranks matter.

Rows are sorted by their content, and a fixed pseudo-random permutation of the *positions* deals them out. A hash of the content
itself would put equal rows side by side into one part.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchgmc.engine import hashing


def shuffled(*parts: Tensor, seed: int = 0) -> Tensor:
    """The order in which examples are taken: by content, then permuted; a function of the set of rows only.

    Args:
        parts: tensors with one row per example, ``(n, ...)``.
        seed: of the permutation.

    Returns:
        Indices of the rows, int64 ``(n,)``.

    Example:
        >>> x = torch.tensor([3.0, 1.0, 2.0, 1.0])
        >>> torch.equal(x[shuffled(x)], x.flip(0)[shuffled(x.flip(0))])
        True
    """
    keys = hashing.row_keys(*parts)
    order = keys.argsort(stable=True)
    places = torch.randperm(len(keys), generator=torch.Generator().manual_seed(len(keys) + seed)).to(order.device)
    return order[places]


def deal(parts: int, *content: Tensor, seed: int = 0) -> Tensor:
    """Number of the part each example is dealt to, int64 ``(n,)``; parts differ by at most one example.

    Args:
        parts: how many.
        content, seed: as for :func:`shuffled`.
    """
    order = shuffled(*content, seed=seed)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device) % parts
    return place


class Pair(NamedTuple):
    """Examples that step t of Algorithm 2 measures on, and those it takes expectations over; 0 or 1, float64 ``(n,)``."""

    outer: Tensor
    inner: Tensor


class Splits:
    """The 2T disjoint splits of Algorithm 2.

    Args:
        steps: T.
        content, seed: the examples, as for :func:`shuffled`.
    """

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


def fresh_steps(max_iter: int | None, n: int) -> int:
    """T of Algorithm 2: the argument, or about a hundred examples per step."""
    return max_iter or min(200, max(1, n // 100))
