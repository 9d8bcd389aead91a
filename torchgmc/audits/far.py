r"""Simultaneous intervals of means that a few far values, too rare to be seen, could move: one allowance for all g.

A unit is *far* beyond a cut, fixed in advance, of some g, with probability p. No unit is with probability :math:`e^{-e}`, e =
:math:`-n \ln(1 - p)`; the others are then draws of their own law, on a shorter range. So ends of tests of their means
:math:`\mu_i` at levels :math:`l_i(e)`, the farthest over all e, hold at once but with probability delta if for every e

.. math:: \sum_i l_i(e) \le \delta e^{e}, \qquad \theta_i \le (1 - p)\,\mu_i + p

If some unit is far, what was kept back of delta (``KEPT``) is for ordinary ends. The proof: notebooks/paper.md ("Far values,
together").
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from torchgmc.audits.betting import Units, expected

#: A unit is far beyond so many standard deviations, and beyond so many times the farthest one of calibration.
FAR, BEYOND = 8.0, 1.3
#: Cuts farther out than this part of the range gain nothing.
USEFUL = 0.8
#: Part of delta for samples with a far unit.
KEPT = 0.05
#: Values of e: levels are those of the lower end of each step, ends of the mean those of its upper end.
STEPS = 12
#: The lengths of intervals, in standard errors, have the least sum of such powers: the longest counts most.
POWER = 8.0
#: Levels are looked up in a table of so many; improvements of the lengths.
LEVELS, ROUNDS = 128, 15
#: Intervals are made so if they should then have this part of their usual length, or less.
WORTH = 0.98


def cuts(units: Units, tail: Tensor) -> Tensor | None:
    """How far from ``rest`` units of each g are far ``(G,)``, from what calibration knows; None where this would not help."""
    same = bool((units.size == units.size[:1]).all()) and bool((units.u == 1.0).all())
    if units.jumps or not same or not bool((units.variance > 0.0).all()) or not bool(tail.isfinite().all()):
        return None
    cut = torch.maximum(FAR * units.variance.max().sqrt(), BEYOND * tail)
    return cut if bool((cut < USEFUL * torch.maximum(units.rest, 1.0 - units.rest)).all()) else None


def ends(units: Units, tail: Tensor, delta: float) -> Tensor | None:
    """Low and high ends of all means ``(2, G)`` that hold at once with probability 1 - delta; None where this would not help.

    ``units``: the same for every g, each counting 1. ``tail``: the farthest one of calibration, from ``rest``, ``(G,)``.
    """
    cut = cuts(units, tail)
    if cut is None:
        return None
    low, high, rest = (units.rest - cut).clamp_min(0.0), (units.rest + cut).clamp_max(1.0), units.rest
    spread, kept, delta = (units.variance * units.size).sqrt(), KEPT * delta, (1.0 - KEPT) * delta
    span, reach = torch.stack([rest - low, high - rest]) / spread, torch.stack([rest, 1.0 - rest]) / spread
    e = torch.linspace(0.0, -math.log(delta), STEPS + 1, dtype=torch.float64, device=cut.device)
    level = levels(span, reach, e, delta)
    length = (e[1:] * reach[..., None] + expected(level, span[..., None])).amax(2)
    usual = expected((delta + kept) * units.shares(delta + kept), reach)
    if float(length.sum()) > WORTH * float(usual.sum()):  # known in advance, as all before it
        return None
    if bool(((units.a < low[units.g]) | (units.a > high[units.g])).any()):
        return units.ends((kept * units.shares(kept))[..., None])[..., 0]
    width = high - low
    a, variance = (units.a - low[units.g]) / width[units.g], units.variance / width.square()
    near = replace(units, rest=(rest - low) / width, a=a, variance=variance)
    p = -torch.expm1(-e[1:] / units.size[:, None])  # (G, STEPS)
    least, most = (1.0 - p) * (low[:, None] + width[:, None] * near.ends(level))
    return torch.stack([least.amin(1), (most + p).amax(1)])


def levels(span: Tensor, reach: Tensor, e: Tensor, delta: float) -> Tensor:
    """Level of each test at each step of e, ``(2, G, STEPS)``: not falling in e, and with sums of at most delta times exp(e).

    ``span``: range of the other units on either side of 0, ``(2, G)``; ``reach``: of all; in standard errors of the sum.

    An end of length C needs the level at which :func:`~torchgmc.audits.betting.expected` is what e leaves of C. The lengths are
    those at which a change of any one of them changes the objective, and the sums of levels, in the same proportion.
    """
    budget, steps = delta * e[:-1].exp(), e[1:]
    grid = torch.linspace(math.log(0.9), math.log(1e-7), LEVELS, dtype=torch.float64, device=e.device)
    table = expected(grid.exp(), span.flatten()[:, None]).contiguous()  # (2 G, LEVELS), rising
    reach = reach.flatten()[:, None]
    shortest = steps[-1] * reach[:, 0] + table[:, 0]

    def at(length: Tensor) -> tuple[Tensor, Tensor]:
        """Levels ``(2 G, STEPS)``, and minus their derivatives."""
        left = (length[:, None] - steps * reach).contiguous()
        place = torch.searchsorted(table, left).clamp(1, LEVELS - 1)
        first, second = table.gather(1, place - 1), table.gather(1, place)
        slope = (grid[1] - grid[0]) / (second - first).clamp_min(1e-12)
        level = (grid[place - 1] + (left - first) * slope).clamp_max(float(grid[0])).exp()
        return level, -slope * level

    price, heavy = torch.ones_like(budget), torch.ones_like(shortest)
    for _ in range(ROUNDS):
        short, long = shortest, shortest + 60.0
        for _ in range(24):
            length = (short + long) / 2
            dear = (price * at(length)[1]).sum(1) > heavy
            short, long = torch.where(dear, length, short), torch.where(dear, long, length)
        both = long.view(2, -1).sum(0)
        heavy = (heavy + ((both / both.min()) ** (POWER - 1.0)).repeat(2)) / 2
        price = (price * (at(long)[0].sum(0) / budget) ** 0.7).clamp_min(1e-9)
    level = at(long)[0]
    level = level * (budget / level.sum(0)).clamp_max(1.0)  # what is left of rounding
    return level.flip(1).cummin(1).values.flip(1).view(2, -1, len(steps))
