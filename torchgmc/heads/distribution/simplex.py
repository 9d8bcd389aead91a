r"""The paper's geometry: p <- Proj(p - step 1_A v) with the projection onto the simplex after every step.

A projection subtracts one number tau from every token and clips at 0, so tokens outside all lists (the *tail*) are always
max(h - shift, floor) with two numbers per prompt: max(max(h - c, d) - tau, 0) = max(h - (c + tau), max(d - tau, 0)). With the
tail sorted once, a step costs a bisection for the tokens that stay positive and an exact solution for tau: nothing of the
size of the vocabulary is touched again.

The functions are plain tensor code that TorchScript and ``torch.export`` can read.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchgmc.engine.float64 import wide

#: Probabilities below 2^-40 share the last cell: together they hold less than 1e-7 of the mass.
DEPTH = 40.0


class Tail(NamedTuple):
    """Tokens outside all lists, largest first, single or in cells of nearly equal probability.

    ``values``: probability of each, descending, ``(n, r)``. ``counts``: number of tokens among the first k, ``(n, r + 1)``.
    ``sums``: their mass, ``(n, r + 1)``.
    """

    values: Tensor
    counts: Tensor
    sums: Tensor


class Point(NamedTuple):
    """p of every prompt: the tail is max(h - shift, floor).

    ``words``: probabilities of the tokens in the lists, ``(n, J)``. ``shift``, ``floor``: ``(n,)``. ``number``, ``total``:
    number and mass (under h) of the tail's tokens above the floor, ``(n,)``.
    """

    words: Tensor
    shift: Tensor
    floor: Tensor
    number: Tensor
    total: Tensor


def tail_of(rest: Tensor) -> Tail:
    """Every token by itself. ``rest``: probabilities of the tokens outside all lists, ``(n, r)``, in any order."""
    values = wide(torch.sort(rest, -1, descending=True)[0])
    zero = torch.zeros_like(values[:, :1]) if values.shape[1] > 0 else values.new_zeros([values.shape[0], 1])
    sums = torch.cat([zero, values.cumsum(1)], 1)
    counts = torch.arange(values.shape[1] + 1, device=values.device, dtype=values.dtype).expand_as(sums)
    return Tail(values, counts, sums)


def cells_of(rest: Tensor, cells: int) -> tuple[Tensor, Tensor]:
    """Number of tokens and their mass in each of ``cells`` equal steps of log probability, largest first.

    ``rest``: probabilities, ``(n, r)``; entries below 0 are left out. ``cells``: K. Returns: Two tables ``(n, K)``: numbers
    (float32) and masses (float64).
    """
    place = (rest.clamp_min(1e-30).log2() * (-cells / DEPTH)).clamp(0, cells - 1).to(torch.int64)
    inside = rest >= 0
    counts = torch.zeros(len(rest), cells, dtype=torch.float32, device=rest.device).scatter_add_(1, place, inside.float())
    masses = torch.zeros(len(rest), cells, dtype=torch.float64, device=rest.device)
    return counts, masses.scatter_add_(1, place, torch.where(inside, rest, torch.zeros_like(rest)).double())


def tail_from_cells(counts: Tensor, masses: Tensor) -> Tail:
    """The tail with every token at the mean of its cell: exact once its whole cell is above or below the floor."""
    counts = counts.double()
    values = torch.where(counts > 0, masses / counts.clamp_min(1), torch.zeros_like(masses))
    # An empty cell takes the value of the next one, which keeps the order; it has no tokens and no mass.
    values = values.flip(1).cummax(1).values.flip(1)
    zero = masses.new_zeros(len(masses), 1)
    return Tail(values, torch.cat([zero, counts.cumsum(1)], 1), torch.cat([zero, masses.cumsum(1)], 1))


def start(words: Tensor, tail: Tail) -> Point:
    """p = h."""
    zero = torch.zeros_like(tail.sums[:, 0])
    return Point(words, zero, zero, tail.counts[:, -1], tail.sums[:, -1])


def step(point: Point, tail: Tail, direction: Tensor, amount: Tensor) -> Point:
    """p <- Proj(p - amount v); rows with amount 0 stay as they are.

    ``point``: p, of which each row sums to 1. ``tail``: of h. ``direction``: v over the tokens in the lists, ``(J,)``.
    ``amount``: step of each row, ``(n,)``.
    """
    f = point.words - amount[:, None] * direction  # (n, J)
    upper = point.total - point.number * (point.shift + point.floor)  # tail's mass above the floor
    size = tail.counts[:, -1]
    # The tail keeps all its tokens if tau stays below the floor.
    whole = (f - point.floor[:, None]).clamp_min(0.0).sum(1) + upper < 1.0
    kept = _kept(f.detach(), point.shift.detach(), tail)[:, None]
    count = tail.counts.gather(1, kept)[:, 0]
    total = tail.sums.gather(1, kept)[:, 0]
    block = torch.where(whole, size, count)
    mass = torch.where(whole, upper + size * point.floor, total - count * point.shift)
    tau = _tau(f, block, mass)
    moved = amount != 0
    return Point(
        torch.where(moved[:, None], (f - tau[:, None]).clamp_min(0.0), point.words),
        torch.where(moved, point.shift + tau, point.shift),
        # Rounding must not take the floor below 0, where the logarithm of p would be NaN.
        torch.where(moved, torch.where(whole, (point.floor - tau).clamp_min(0.0), torch.zeros_like(tau)), point.floor),
        torch.where(moved & ~whole, count, point.number),
        torch.where(moved & ~whole, total, point.total),
    )


def _kept(f: Tensor, shift: Tensor, tail: Tail) -> Tensor:
    """How many of the tail's entries stay positive: those at whose level less than 1 lies above, found by bisection."""
    size = tail.values.shape[1]
    low = torch.zeros_like(shift, dtype=torch.int64)
    high = torch.full_like(low, size)
    values = tail.values.detach()
    span = 1
    while span <= size:
        middle = (low + high + 1) // 2
        at = middle[:, None]
        x = values.gather(1, (at - 1).clamp_min(0))  # (n, 1)
        level = x - shift[:, None]
        above = (f - level).clamp_min(0.0).sum(1, keepdim=True) + tail.sums.detach().gather(1, at) - tail.counts.gather(1, at) * x
        inside = (above < 1.0)[:, 0]
        open_ = low < high
        low = torch.where(open_ & inside, middle, low)
        high = torch.where(open_ & ~inside, middle - 1, high)
        span *= 2
    return low


def _tau(f: Tensor, count: Tensor, mass: Tensor) -> Tensor:
    """tau with sum_j (f_j - tau)_+ + mass - count tau = 1: ``(n,)``."""
    ordered = torch.sort(f, 1, descending=True)[0]
    sums = ordered.cumsum(1) + (mass - 1.0)[:, None]  # (n, J)
    rank = torch.arange(1, f.shape[1] + 1, device=f.device, dtype=f.dtype) + count[:, None]
    number = (ordered * rank > sums).sum(1, keepdim=True)  # a prefix
    all_sums = torch.cat([(mass - 1.0)[:, None], sums], 1)
    return all_sums.gather(1, number)[:, 0] / (count + number[:, 0]).clamp_min(1.0)
