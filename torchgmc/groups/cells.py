"""Rows of equal membership: numbered by packing memberships into integers and sorting those."""

import torch
from torch import Tensor

from torchgmc.distributed import collected

_WORD = 62  # memberships packed into one int64


def pattern_ids(membership: Tensor) -> tuple[Tensor, Tensor]:
    """Cells of equal membership: which cell each row is in, and the membership of each cell.

    Rows are packed 62 groups to an integer and sorted, so that 1e6 rows of 50 groups take a fraction of a second.

    ``membership``: bool, shape ``(n, a)``; or fractional, floating: rows are then kept unless all of their numbers agree.
    Returns: ids: int64, shape ``(n,)``. patterns: of the same type, shape ``(c, a)``, distinct and in lexicographic order;
    ``patterns[ids]`` is ``membership``.

    Example:
        >>> pattern_ids(torch.tensor([[True, False], [False, True], [True, False]]))
        (tensor([1, 0, 1]), tensor([[False,  True],
                [ True, False]]))
    """
    n, a = membership.shape
    if membership.is_floating_point():
        patterns, ids = torch.unique(membership, dim=0, return_inverse=True)
        return ids, patterns
    words = []
    for begin in range(0, a, _WORD):
        part = membership[:, begin : begin + _WORD]
        word = torch.zeros(n, dtype=torch.int64, device=membership.device)
        for j in range(part.shape[1]):
            word.add_(part[:, j], alpha=1 << (part.shape[1] - 1 - j))
        words.append(word)
    ids, count = fold(words, [1 << min(_WORD, a - begin) for begin in range(0, a, _WORD)], n, membership.device)
    return ids, membership[representatives(ids, count)]


def shared_patterns(membership: Tensor, always: bool = False) -> tuple[Tensor, Tensor]:
    """:func:`pattern_ids` among the rows of all ranks, of which this one has some; see :func:`torchgmc.distributed.total`."""
    ids, patterns = pattern_ids(membership)
    every, first = collected(patterns.double(), always)
    if len(every) > len(patterns):  # other ranks have some too
        place, patterns = pattern_ids(every.to(patterns.dtype))
        ids = place[first:][ids]
    return ids, patterns


def few_patterns(membership: Tensor, most: int) -> bool:
    """Are there at most so many patterns, on all ranks together?"""
    return len(shared_patterns(pattern_ids(membership)[1][: most + 1], always=True)[1]) <= most


def fold(keys: list[Tensor], radices: list[int], n: int | None = None, device: torch.device | None = None) -> tuple[Tensor, int]:
    """Number the distinct rows of `keys` in lexicographic order; compresses before a product leaves int64."""
    ids = torch.zeros(keys[0].shape[0] if n is None else n, dtype=torch.int64, device=device or keys[0].device)
    size = 1
    for key, radix in zip(keys, radices, strict=True):
        if size * radix > 2**_WORD:
            ids, size = _compress(ids, size)
        if size * radix > 2**_WORD:
            key, radix = _compress(key, radix)
        ids, size = ids * radix + key, size * radix
    return _compress(ids, size)


def _compress(ids: Tensor, size: int) -> tuple[Tensor, int]:
    """Numbers below ``size`` as places among those that occur, and how many these are."""
    if 0 < size <= min(len(ids), 1 << 16):  # counted, not sorted
        place = (torch.bincount(ids, minlength=size) > 0).cumsum(0)
        return (place - 1)[ids], int(place[-1])
    values, inverse = torch.unique(ids, return_inverse=True)
    return inverse, len(values)


def representatives(ids: Tensor, count: int) -> Tensor:
    """One row of each cell, shape ``(count,)``."""
    return ids.new_zeros(count).scatter_(0, ids, torch.arange(len(ids), device=ids.device))


def with_everyone(member: Tensor) -> Tensor:
    """Membership, and a column of everyone, ``(n, a + 1)``."""
    return torch.cat([member, torch.ones_like(member[:, :1])], 1)
