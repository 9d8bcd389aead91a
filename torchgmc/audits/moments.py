"""Sums over examples, and intervals that need nothing else: for searches over more groups than rows can be kept of."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchgmc.engine.clusters import codes, total


@dataclass
class Moments:
    """Sums over examples from which estimates and intervals of all groups follow.

    All of shape ``(a,)`` but the totals, which are single numbers.
    """

    first: Tensor  # sum of w 1_A s
    second: Tensor  # sum of w^2 1_A s^2
    mass: Tensor  # sum of w 1_A
    square: Tensor  # sum of w^2 1_A
    count: Tensor  # members of A
    total: Tensor  # sum of w
    total_square: Tensor  # sum of w^2
    total_count: Tensor  # examples that count
    largest: Tensor  # largest w

    @classmethod
    def of(cls, sums: Callable[[Tensor], Tensor], s: Tensor, w: Tensor, cluster: Tensor) -> "Moments":
        """Moments of every group.

        The weight W_c of a cluster's members in A is at most that of the cluster, so that the sum of W_c^2 over clusters, which
        Hoeffding's inequality needs, is at most that of w W over the rows of A. Variances are not known from sums over rows.

        ``sums``: from columns ``(n, k)`` to their sums over the rows of each group, ``(a, k)``. ``s``: values of the mapping,
        ``(n,)``. ``w``: weights, ``(n,)``. ``cluster``: int64 ``(n, 1)``, or ``(n, 0)``.
        """
        weighted, together = w * s, w
        if cluster.shape[1]:
            together = total(w[:, None], cluster)[codes(cluster)[0], 0]
        table = torch.stack([weighted, weighted.square(), w, w * together, (w > 0).double()], 1)
        first, second, mass, square, count = sums(table).unbind(1)
        if cluster.shape[1] and bool((together > w).any()):
            second = torch.full_like(second, math.inf)
        everyone, every_square, every_count = table[:, 2:].sum(0).unbind()
        return cls(first, second, mass, square, count, everyone, every_square, every_count, w.amax())

    def estimates(self, conditional: bool) -> Tensor:
        """Violation of each g, mass-weighted or conditional on the group."""
        return self.first / (self.mass if conditional else self.total)

    def intervals(self, conditional: bool, bounds: tuple[float, float], delta: float) -> tuple[Tensor, Tensor]:
        r"""Low and high ends of intervals that all hold at once with probability 1 - delta.

        A union bound over every g and over several bounds, of which the tightest on each side counts, leaves each
        :math:`\delta' = \delta / (2 |G|)`, or a third instead of a half mass-weighted:

        - empirical Bernstein (Maurer and Pontil): :math:`\sqrt{2 \hat V \ln(4/\delta')/n} + 7 R \ln(4/\delta') / (3(n-1))`;
        - Chernoff with the relative entropy of the mean's place p in the range: :math:`n\, kl(\hat p, p) \le \ln(2/\delta')`,
          which is nearly exact for s of two values; with unequal weights Hoeffding's, its bound that allows for them:
          :math:`R \sqrt{\sum w^2 \ln(2/\delta') / 2} / \sum w`;
        - mass-weighted and equally weighted also the product of P(A) and the group's own deviation, each with its Chernoff
          interval: the members of A say all there is to know of a rare group.

        R is the width of the range of s. Mass-weighted, the sample is all n examples with 1_A s; conditional, it is the members
        of A. Weights are treated as fixed.

        ``conditional``: of the group's own deviation, or of the mass-weighted one. ``bounds``: range of s, known in advance.
        ``delta``: 1 - confidence.
        """
        bottom, top = bounds
        width = top - bottom
        share = delta / ((2 if conditional else 3) * self.first.numel())
        if conditional:
            n, total, square = self.count, self.mass, self.square
        else:
            n, total, square = self.total_count, self.total, self.total_square
            bottom, top = min(bottom, 0.0), max(top, 0.0)  # others have 1_A s = 0
        mean = self.first / total
        scale = n / total  # weights with mean 1
        variance = ((scale.square() * self.second - n * mean.square()) / (n - 1)).clamp_min(0.0)
        log = math.log(4 / share)
        half = (2 * variance * log / n).sqrt() + 7 * (top - bottom) * scale * self.largest * log / (3 * (n - 1))
        half = torch.where(n > 1, half, torch.inf)
        hoeffding = (top - bottom) * (square * math.log(2 / share) / 2).sqrt() / total
        equal = self.total_square * self.total_count <= self.total.square() * (1 + 1e-9)
        place = chernoff((mean - bottom) / (top - bottom), n, math.log(2 / share))
        low = torch.where(equal, bottom + (top - bottom) * place[0], mean - hoeffding)
        high = torch.where(equal, bottom + (top - bottom) * place[1], mean + hoeffding)
        low, high = torch.maximum(low, mean - half), torch.minimum(high, mean + half)
        if conditional:
            return low, high
        # A tenth of this bound's share for P(A), whose interval matters little where the deviation is near 0.
        bottom = bounds[0]
        own = chernoff((self.first / self.mass - bottom) / width, self.count, math.log(2 / (0.9 * share)))
        least, most = (bottom + width * end for end in own)
        few, many = chernoff(self.count / n, n, math.log(2 / (0.1 * share)))
        least, most = torch.where(least < 0, least * many, least * few), torch.where(most > 0, most * many, most * few)
        usable = equal & (self.count > 0)
        return torch.where(usable, torch.maximum(low, least), low), torch.where(usable, torch.minimum(high, most), high)


def chernoff(p: Tensor, n: Tensor, log: float) -> tuple[Tensor, Tensor]:
    r"""Ends of :math:`\{q \in [0, 1] : n\, kl(p, q) \le \text{log}\}`, by bisection; all of [0, 1] for n = 0.

    For n independent variables in [0, 1] with mean q, Chernoff's bound gives that p lies so far below (or above) q with
    probability at most exp(-log).

    Example:
        >>> [round(float(end), 3) for end in chernoff(torch.tensor(0.0).double(), torch.tensor(100.0).double(), 3.0)]
        [0.0, 0.03]
    """
    p = p.nan_to_num(0.5).clamp(0.0, 1.0)
    least = torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p) - log / n  # kl(p, q) <= log / n where p ln q + ... is at least this
    outer, inner = torch.stack([torch.zeros_like(p), torch.ones_like(p)]), torch.stack([p, p])  # both ends at once
    for _ in range(36):
        q = (outer + inner) / 2
        inside = torch.xlogy(p, q) + torch.xlogy(1 - p, 1 - q) >= least
        outer, inner = torch.where(inside, outer, q), torch.where(inside, q, inner)
    return outer[0], outer[1]  # the outer ends: rounding makes an interval wider, never narrower
