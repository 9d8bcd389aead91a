"""Exact tests and intervals (Clopper and Pearson) for the probability of an event that was seen k times in n."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchgmc.audits.betting import outermost

#: Tails are computed to about nine digits; the level is lowered by more than that.
CAREFUL = 1.0 - 1e-7
TINY = 1e-300


def tail(k: Tensor, n: Tensor, p: Tensor) -> Tensor:
    """P(X >= k) for X binomial with n and p: the incomplete beta function I_p(k, n - k + 1), by its continued fraction.

    Example:
        >>> float(tail(torch.tensor(1.0).double(), torch.tensor(3.0).double(), torch.tensor(0.5).double()))  # 7/8
        0.875
    """
    k, n, p = torch.broadcast_tensors(k.double(), n.double(), p.double())  # type: ignore[no-untyped-call]
    a, b, x = k.clamp_min(1.0), (n - k + 1.0).clamp_min(1.0), p.clamp(TINY, 1.0)
    other = x > (a + 1.0) / (a + b + 2.0)  # then the fraction of the other tail is the quick one
    a, b, x = torch.where(other, b, a), torch.where(other, a, b), torch.where(other, 1.0 - x, x)
    front = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b) + torch.xlogy(a, x) + b * torch.log1p(-x)
    part = (front.exp() * _fraction(a, b, x) / a).clamp(0.0, 1.0)
    found = torch.where(other, 1.0 - part, part)
    return torch.where(k <= 0, 1.0, torch.where((k > n) | (p <= 0), 0.0, torch.where(p >= 1, 1.0, found)))


def _fraction(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """The continued fraction of I_x(a, b), by Lentz's method."""
    c, d = torch.ones_like(x), 1.0 / _away(1.0 - (a + b) * x / (a + 1.0))
    value = d.clone()
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d, c = 1.0 / _away(1.0 + even * d), _away(1.0 + even / c)
        value = value * d * c
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d, c = 1.0 / _away(1.0 + odd * d), _away(1.0 + odd / c)
        value = value * d * c
        if m % 8 == 0 and bool(((d * c - 1.0).abs() < 1e-12).all()):
            break
    return value


def _away(x: Tensor) -> Tensor:
    """Not 0."""
    return torch.where(x.abs() < TINY, torch.full_like(x, TINY), x)


@dataclass(frozen=True)
class Counts:
    """Events and trials of G test functions, float64 ``(G,)`` each; tests as :class:`torchgmc.audits.betting.Units` has them.

    Example:
        >>> none = Counts(torch.zeros(1).double(), torch.tensor([100.0]).double())
        >>> [round(float(end), 4) for end in none.ends(torch.tensor([0.05]))]
        [0.0, 0.0295]
    """

    k: Tensor
    n: Tensor

    def rejects(self, mean: Tensor, up: Tensor, level: Tensor) -> Tensor:
        """Which hypotheses about the probability are rejected, ``(G, l)``."""
        k, n, up = self.k[:, None], self.n[:, None], up.to(mean.device)
        upper, lower = tail(k, n, mean), tail(n - k, n, 1.0 - mean)
        found = torch.where(up, upper, lower) <= CAREFUL * level.to(mean.device, torch.float64)
        return (found & (n > 0)) | torch.where(up, mean < 0.0, mean > 1.0)

    def ends(self, level: Tensor) -> Tensor:
        """Ends of one-sided intervals, taken outward; low and high, ``(2, G, l)``; levels ``(l,)`` or ``(2, G, l)``."""
        count, steps = level.shape[-1], 40
        level = level.expand(2, len(self.k), -1).transpose(0, 1).flatten(1)
        up = torch.tensor([True, False], device=self.k.device).repeat_interleave(count)
        inner = (self.k / self.n.clamp_min(1.0)).masked_fill(self.n <= 0, 0.5)[:, None].expand(-1, 2 * count)
        outer = torch.where(up, 0.0, 1.0).double().expand_as(inner)
        share = torch.arange(1, steps + 1, device=self.k.device, dtype=torch.float64) / (steps + 1)
        levels, sides = level.repeat_interleave(steps, 1), up.repeat_interleave(steps)
        for _ in range(4):
            tried = inner[..., None] + (outer - inner)[..., None] * share
            found = self.rejects(tried.flatten(1), sides, levels).view_as(tried)
            inner, outer = outermost(inner, tried, outer, found)
        return torch.stack([outer[:, :count], outer[:, count:]])
