"""Sums over examples, and the intervals that follow from them for every g at once."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Moments:
    """Sums over examples from which estimates and intervals of all g follow; batches add up.

    All of shape ``(a, u)`` but the totals, ``(u,)``.
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
    def of(cls, who: Tensor, s: Tensor, weight: Tensor) -> "Moments":
        """Moments of one batch.

        Args:
            who: membership, ``(n, a)``.
            s: values of the mapping, ``(n, u)``; ignored where the weight is 0.
            weight: ``(n, u)``.
        """
        w, member = weight.double(), who.double().T
        value = torch.where(w > 0, s.double(), torch.zeros((), dtype=torch.float64, device=s.device))
        return cls(
            member @ (w * value),
            member @ (w * value).square(),
            member @ w,
            member @ w.square(),
            member @ (w > 0).double(),
            w.sum(0),
            w.square().sum(0),
            (w > 0).double().sum(0),
            w.amax(0) if len(w) else w.new_zeros(w.shape[1]),
        )

    def __add__(self, other: "Moments") -> "Moments":
        """Moments of both sets of examples."""
        parts = {name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__}
        parts["largest"] = torch.maximum(self.largest, other.largest)
        return Moments(**parts)

    def times(self, factor: float) -> "Moments":
        """Moments of ``factor`` times as many examples like these."""
        parts = {name: factor * getattr(self, name) for name in self.__dataclass_fields__}
        return Moments(**(parts | {"largest": self.largest}))

    def rows(self, stop: int) -> "Moments":
        """Moments of the first sets alone."""
        return Moments(**{name: part[:stop] if part.dim() == 2 else part for name, part in vars(self).items()})

    def estimates(self, conditional: bool) -> Tensor:
        """Violation of each g, mass-weighted or conditional on the group."""
        return self.first / (self.mass if conditional else self.total.expand_as(self.mass))

    def half_widths(self, conditional: bool, width: float, delta: float) -> Tensor:
        r"""Half-widths of intervals that all hold at once with probability 1 - delta.

        A union bound over every g and over two bounds, of which the tighter counts, leaves each
        :math:`\delta' = \delta / (2 |G|)`:

        - Hoeffding: :math:`R \sqrt{\sum w^2 \ln(2/\delta') / 2} / \sum w`;
        - empirical Bernstein (Maurer and Pontil): :math:`\sqrt{2 \hat V \ln(4/\delta')/n} + 7 R \ln(4/\delta') / (3(n-1))`,

        where R is the width of the range of s. Mass-weighted, the sample is all n examples with 1_A s; conditional, it is the
        members of A. Weights are taken as given.
        """
        share = delta / (2 * self.first.numel())
        if conditional:
            n, total, square = self.count, self.mass, self.square
        else:
            n, total, square = (t.expand_as(self.mass) for t in (self.total_count, self.total, self.total_square))
        hoeffding = width * (square * math.log(2 / share) / 2).sqrt() / total
        scale = n / total  # weights with mean 1
        variance = ((scale.square() * self.second - n * (self.first / total).square()) / (n - 1)).clamp_min(0.0)
        log = math.log(4 / share)
        bernstein = (2 * variance * log / n).sqrt() + 7 * width * scale * self.largest * log / (3 * (n - 1))
        return torch.fmin(hoeffding, torch.where(n > 1, bernstein, hoeffding))
