"""What a head stores about the prompts, and de-biasing as the solver sees it, in both geometries."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchgmc.engine.folds import Pair
from torchgmc.engine.roots import falling_root
from torchgmc.engine.solver import OneTensor, entry
from torchgmc.engine.statistics import PerExample
from torchgmc.engine.values import Names
from torchgmc.heads.distribution.simplex import Point, Tail, start, step
from torchgmc.heads.distribution.tilt import Dual


@dataclass
class MassStatistics(PerExample):
    """One row per prompt and no more columns than atoms (and, for ``euclidean``, tokens in lists and cells).

    ``log_mass``: log mass of each atom, ``(n, m)``. ``member``: membership, bool, ``(n, a)``. ``weight``: ``(n,)``.
    ``cluster``: int64 ``(n, 1)``, or ``(n, 0)`` if there are none. ``words``: for ``euclidean``, probability of each token in a
    list, ``(n, J)``; else ``(n, 0)``. ``counts``, ``masses``: for ``euclidean``, number and mass of the tail's tokens in each
    cell, ``(n, K)``; else ``(n, 0)``.
    """

    layout: ClassVar[dict[str, str]] = {
        "log_mass": "log n atoms",
        **{"words": "part n words", "counts": "count n cells", "masses": "count n cells"},
        **PerExample.layout,
    }
    log_mass: Tensor
    member: Tensor
    weight: Tensor
    cluster: Tensor
    words: Tensor
    counts: Tensor
    masses: Tensor


class DistributionProblem(OneTensor):
    """The probability of each list, prompt by prompt; see :class:`torchgmc.engine.solver.Problem`.

    ``member``: ``(n, a)``, bool. ``weight``: ``(n,)``. ``conditional``: divide the violation of a group by P(A). ``names``: of
    the groups and lists.
    """

    dynamic = False

    def __init__(self, member: Tensor, weight: Tensor, conditional: bool, names: Names) -> None:
        self.member, self.weight, self.names, self.label = member.double(), weight, names, names.label
        self.share = weight @ self.member / weight.sum()  # P(A), (a,)
        self.scale = self.share if conditional else torch.ones_like(self.share)

    def masses(self) -> Tensor:
        """Probability of each list under the current p, ``(n, u)``."""
        raise NotImplementedError  # abstract

    def moved(self, who: Tensor, what: Tensor, step: Tensor) -> Tensor:
        """State after a step along g = 1_A v / scale."""
        raise NotImplementedError  # abstract

    def violations(self, split: Pair | None = None) -> Tensor:
        """E[1_A (p(U) - E p(U))] / scale; the inner expectation from the second of two splits in Algorithm 2."""
        outer, inner = (self.weight, self.weight) if split is None else (self.weight * part for part in split)
        p = self.masses()
        s = p - inner @ p / inner.sum()
        return (self.member * outer[:, None]).T @ s / outer.sum() / self.scale[:, None]

    def move(self, who: Tensor, what: Tensor, step: Tensor) -> None:
        """One step along g."""
        self.restore(self.moved(who, what, step))

    def line_search(self, who: Tensor, what: Tensor, violation: Tensor) -> Tensor:
        """Step after which g itself has no violation left: the minimum of the potential along g."""
        sign, here = violation.sign(), self.state()

        def slope(size: Tensor) -> Tensor:
            self.restore(self.moved(who, what, sign * size))
            left = sign * self.violations().index_select(0, who[None]).index_select(1, what[None])[0, 0]
            self.restore(here)
            return left

        return sign * falling_root(slope, violation.abs(), self.guess(who, what, violation))

    def guess(self, who: Tensor, what: Tensor, violation: Tensor) -> Tensor:
        """Size of the first step to try."""
        raise NotImplementedError  # abstract

    def explain(self, who: int, what: int) -> str:
        """Why a violation may stay."""
        return (
            f"The probability of {self.names.what[what]} can no longer be moved in group {self.names.who[who]!r}: it may "
            "be 0 or 1 already in every prompt. Try a larger `alpha`, geometry='kl', or more prompts."
        )


class TiltProblem(DistributionProblem):
    """Offsets theta ``(a, u)`` of the information projection: a step along g adds to one of them."""

    moving = "theta"

    def __init__(self, dual: Dual, member: Tensor, weight: Tensor, conditional: bool, names: Names) -> None:
        super().__init__(member, weight, conditional, names)
        self.dual = dual
        self.theta = dual.log_mass.new_zeros(dual.shape)

    def masses(self) -> Tensor:
        """Probability of each list, ``(n, u)``."""
        return self.dual.tilted(self.dual.tilt @ self.theta, self.dual.log_mass)[1] @ self.dual.lists

    def moved(self, who: Tensor, what: Tensor, step: Tensor) -> Tensor:
        """Theta with the step added."""
        place = who * self.theta.shape[1] + what
        return self.theta.flatten().index_add(0, place[None], step[None]).view_as(self.theta)

    def guess(self, who: Tensor, what: Tensor, violation: Tensor) -> Tensor:
        """Violation over the largest slope possible."""
        return violation.abs() / self.smoothness()

    def smoothness(self) -> float:
        """Bound on the second derivative along any g: E[(1_A - P(A))^2] / 4."""
        return float((self.share * (1 - self.share) / self.scale.square()).max().clamp_min(1e-12)) / 4


class SimplexProblem(DistributionProblem):
    """p itself, as the probabilities of the tokens in lists and four numbers for all others."""

    def __init__(
        self, words: Tensor, tail: Tail, directions: Tensor, member: Tensor, weight: Tensor, conditional: bool, names: Names
    ) -> None:
        super().__init__(member, weight, conditional, names)
        self.tail, self.directions = tail, directions.double()  # (u, J)
        self.point = start(words, tail)

    def masses(self) -> Tensor:
        """Probability of each list, ``(n, u)``."""
        return self.point.words @ self.directions.T

    def moved(self, who: Tensor, what: Tensor, step_: Tensor) -> Tensor:
        """State after one projected step."""
        amount = self.member.index_select(1, who[None])[:, 0] * (step_ / entry(self.scale, who))
        return _pack(step(self.point, self.tail, self.directions.index_select(0, what[None])[0], amount))

    def guess(self, who: Tensor, what: Tensor, violation: Tensor) -> Tensor:
        """The step that would be enough without the projection."""
        size = entry(self.directions.sum(1), what)
        share = entry(self.share * (1 - self.share) / self.scale.square(), who)
        return violation.abs() / (size * share).clamp_min(1e-12)

    def bound(self) -> float:
        """B, the largest E||g||^2 = P(A) |U| / scale^2."""
        return float((self.share / self.scale.square()).max() * self.directions.sum(1).max())

    def state(self) -> Tensor:
        """Everything that moves, ``(n, J + 4)``."""
        return _pack(self.point)

    def restore(self, state: Tensor) -> None:
        """Set p."""
        shift, floor, count, total = state[:, -4:].unbind(1)
        self.point = Point(state[:, :-4], shift, floor, count, total)


def _pack(point: Point) -> Tensor:
    return torch.cat([point.words, torch.stack(point[1:], 1)], 1)
