r"""Simultaneous intervals of means that a few far values, too rare to be seen, could move: one allowance for all g.

A unit is *far* beyond a cut, fixed in advance, of some g, with probability p. No unit is with probability :math:`e^{-e}`, e =
:math:`-n \ln(1 - p)`; all n are then draws of their own law, on a shorter range, under which :math:`\theta = E A / E U \ge c` says

.. math:: E[c\,U - A] \le (1 - c)\, p / (1 - p)

So c lies beyond end i if, for every e, a bet in which each unit pays that fee rejects it at level :math:`l_i(e)`; all ends hold at
once but with probability delta if :math:`\sum_i l_i(e) \le \delta e^{e}`. If some unit is far, what was kept back of delta
(``KEPT``) is for ordinary ends. The proof: notebooks/paper.md ("Far values, together").
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchgmc.audits.betting import BLOCKS, Units, expected, search

#: A unit is far beyond so many standard deviations, and beyond so many times the farthest one of calibration.
FAR, BEYOND = 8.0, 1.3
#: Cuts farther out than this part of the range gain nothing.
USEFUL = 0.8
#: Part of delta for samples with a far unit.
KEPT = 0.05
#: Values of e: levels are those of the lower end of each step, ends of the mean those of its upper end.
STEPS = 16
#: Levels are looked up in a table of so many; improvements of the lengths.
LEVELS, ROUNDS = 128, 15
#: Intervals are made so if they should then have this part of their usual length, or less.
WORTH = 0.98
#: See :data:`torchgmc.audits.betting.POWER`; smaller, as most groups are not much shorter than the longest.
POWER = 8.0


@dataclass(frozen=True)
class Plan:
    """How ends are found; made in advance.

    ``near``: range of A / U where no unit is far, ``(2, G)``. ``e``: upper ends of its steps, ``(STEPS,)``. ``level``: of each
    end at each step, ``(2, G, STEPS)``. ``length``: of each end, about, in standard errors of calibration, ``(2, G)``.
    """

    near: Tensor
    e: Tensor
    level: Tensor
    length: Tensor

    def exceeded(self, units: Units) -> bool:
        """Is some unit far?"""
        low, high = self.near[:, units.g]
        return bool(((units.a < low) | (units.a > high)).any())

    def ends(self, units: Units) -> Tensor:
        """Low and high ends of all means, ``(2, G)``, from units of which none is far."""
        near, odds = replace(units, near=self.near), torch.expm1(self.e / units.size[0])  # p / (1 - p)

        def rejects(mean: Tensor, up: Tensor, _: Tensor) -> Tensor:
            """Whatever e is."""
            level = torch.where(up[:, None], self.level[0][:, None], self.level[1][:, None]).flatten(1)  # (G, k STEPS)
            mean, up, every = mean.repeat_interleave(STEPS, 1), up.repeat_interleave(STEPS), odds.repeat(len(up))
            return near.rejects(mean, up, level, every).view(len(mean), -1, STEPS).all(2)

        work = STEPS * 2.0 * (len(units.g) / BLOCKS + len(units.size))
        moments = units.moments()
        guess = self.length * (units.variance * units.size).sqrt() / moments[2].clamp_min(1.0)
        return search(rejects, moments, self.level[..., :1], work, guess=guess[..., None])[..., 0]


def plan(units: Units, tail: Tensor, delta: float) -> Plan | None:
    """How ends are to be found so that all hold at once with probability 1 - delta; None where this would not help.

    Nothing is used here but the number of ``units`` and what calibration knows of them. They are the same for every g, with a
    U of 0 or 1. ``tail``: the farthest one of calibration, from ``rest``, ``(G,)``.
    """
    alike = bool((units.size == units.size[:1]).all()) and bool((units.u == 1.0).all())
    alike = alike and torch.equal(units.others[1], units.others[2])
    if units.jumps or not alike or not bool((units.variance > 0.0).all()) or not bool(tail.isfinite().all()):
        return None
    cut, rest = torch.maximum(FAR * units.variance.max().sqrt(), BEYOND * tail), units.rest
    if not bool((cut < USEFUL * torch.maximum(rest, 1.0 - rest)).all()):
        return None
    near = torch.stack([(rest - cut).clamp_min(0.0), (rest + cut).clamp_max(1.0)])
    spread, most = (units.variance * units.size).sqrt(), (1.0 - KEPT) * delta
    span, reach = (near - rest).abs() / spread, torch.stack([rest, 1.0 - rest]) / spread
    e = torch.linspace(0.0, -math.log(most), STEPS + 1, dtype=torch.float64, device=cut.device)
    level = levels(span, reach, e, most)
    length = (e[1:] * reach[..., None] + expected(level, span[..., None])).amax(2)
    usual = expected(delta * units.shares(delta), reach)
    shorter = (length.sum(0) ** POWER).sum() <= (WORTH**POWER) * (usual.sum(0) ** POWER).sum()
    return Plan(near, e[1:], level, length) if bool(shorter) else None


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
