r"""Quantiles of conformity scores per group and per level set of the threshold: s = 1{score <= q} - target."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchgmc.distributed import extremes, total as over_ranks
from torchgmc.engine import folds
from torchgmc.engine.clusters import deal_clusters
from torchgmc.engine.offsets import crossing
from torchgmc.engine.roots import damped
from torchgmc.engine.solver import entry
from torchgmc.engine.statistics import PerExample
from torchgmc.groups.cells import pattern_ids
from torchgmc.heads.levelsets.problem import LevelProblem, check_masses
from torchgmc.heads.levelsets.steps import cell_sums


@dataclass
class QuantileStatistics(PerExample):
    """Conformity scores ``(n,)`` float64, thresholds f0 to start from ``(n,)`` (NaN: the common one), and who they are of.

    ``features``: float32 ``(n, d)``; ``(n, 0)`` if nothing is learned.
    """

    layout: ClassVar[dict[str, str]] = {"scores": "float n", "base": "start n", **PerExample.layout}
    #: May a row stand for many examples?
    counted: ClassVar[bool] = False
    scores: Tensor
    base: Tensor
    member: Tensor
    weight: Tensor
    cluster: Tensor
    features: Tensor

    def check_alike(self, other: Any) -> None:
        """Starting thresholds come with every batch or with none."""
        super().check_alike(other)
        if bool(self.base[:1].isnan().any()) != bool(other.base[:1].isnan().any()):
            raise ValueError("pass `base` with every batch or with none.")

    def has_base(self) -> bool:
        """Has each example, on all ranks, its own start?"""
        return not int(over_ranks(self.base.isnan().sum()))

    def counts(self) -> Tensor:
        """Examples that each row stands for, float64 ``(n,)``."""
        return torch.ones_like(self.weight)

    def dealt(self, parts: int) -> tuple[Tensor, Tensor | None]:
        """Weight of each row ``(1, n)`` and its fold, uint8 ``(n,)``; or its weight in each fold, ``(parts, n)``."""
        return self.weight[None], deal_clusters(parts, self.cluster, *self.content()).to(torch.uint8)


@dataclass
class ScoreCounts(QuantileStatistics):
    """Scores rounded up, counted: all of one value and one combination of groups are a row, in an order by content.

    ``weight``: sum of their weights. ``squares``: sum of the squares of these. ``count``: how many they are. ``(n,)`` each.
    """

    layout: ClassVar[dict[str, str]] = {**QuantileStatistics.layout, "squares": "weight n", "count": "weight n"}
    counted: ClassVar[bool] = True
    squares: Tensor
    count: Tensor

    @classmethod
    def of(cls, batch: QuantileStatistics, resolution: float) -> "ScoreCounts":
        """A batch whose scores are rounded up by at most this part of their size."""
        if batch.cluster.shape[1] or not batch.base.isnan().all():
            raise ValueError("a head with `resolution` counts scores; omit `base` and `clusters`, or make it without.")
        bits = math.ceil(-math.log2(resolution))
        scores = round_up(batch.scores, bits)
        return cls(**(vars(batch) | {"scores": scores}), squares=batch.squared(), count=batch.counts())._counted()

    def joined(self, others: list["ScoreCounts"]) -> "ScoreCounts":
        """The same rows become one."""
        return super().joined(others)._counted()

    def _counted(self) -> "ScoreCounts":
        place, _ = pattern_ids(self.member)
        order = self.scores.argsort(stable=True)
        order = order[place[order].argsort(stable=True)]
        new = (place[order].diff() != 0) | (self.scores[order].diff() != 0)
        kind = torch.cat([new.new_zeros(min(1, len(order)), dtype=torch.int64), new.cumsum(0)])
        first = torch.cat([new.new_ones(min(1, len(order))), new]).nonzero()[:, 0]
        sums = self.weight.new_zeros(3, len(first))
        sums.index_add_(1, kind, torch.stack([self.weight, self.squares, self.count])[:, order])
        return replace(self.pick(order[first]), weight=sums[0], squares=sums[1], count=sums[2])

    def forget(self, factor: float) -> "ScoreCounts":
        """The same examples with this part of their weight."""
        return replace(self, weight=self.weight * factor, squares=self.squares * factor**2)

    def squared(self) -> Tensor:
        """Sums of squared weights."""
        return self.squares

    def counts(self) -> Tensor:
        """Examples counted."""
        return self.count

    def dealt(self, parts: int) -> tuple[Tensor, Tensor | None]:
        """Each example of a row goes to a fold by chance, so that batches and ranks do not matter: only their counts do."""
        generator = torch.Generator().manual_seed(int(self.count.sum()))
        left, found = self.count.cpu(), []
        for fold in range(parts - 1):
            found.append(torch.binomial(left, torch.full_like(left, 1.0 / (parts - fold)), generator))
            left = left - found[-1]
        return torch.stack([*found, left]).to(self.weight.device) * (self.weight / self.count), None


class QuantileProblem(LevelProblem):
    """Thresholds q = z, one per example; the potential is the pinball loss, so line searches are exact.

    ``scores``: ``(n,)``, float64. ``target``: target share of scores at or below q. ``rows``: their number on all ranks, if
    these are not all. ``options``: of :class:`~torchgmc.heads.levelsets.problem.LevelProblem`.
    """

    def __init__(self, scores: Tensor, target: float, rows: int = 0, **options: object) -> None:
        self.scores, self.target = scores[:, None], target
        self.many = max(rows, len(scores)) > folds.EXACT
        super().__init__(**options)  # type: ignore[arg-type]  # checked where it is called
        check_masses(self.mass, self.names.who)

    def mapping(self, z: Tensor, rows: Tensor | slice) -> Tensor:
        """s = 1{score <= q} - target."""
        return (self.scores[rows] <= z).to(z.dtype) - self.target

    def line_search(self, who: Tensor, what: Tensor, violation: Tensor) -> Tensor:
        """The shift that brings the cell's coverage nearest to the target; damped where level sets depend on q.

        After a shift d the covered are those with score - q <= d: the sorted residuals are all coverages there are.
        """
        inside, _ = self.cell(who, what)
        rows = inside.nonzero()[:, 0]
        m = inside[rows].to(self.share.dtype)  # a shift moves q by its part m
        residual, weight = (self.scores[rows, 0] - self.z[rows, 0]) / m, self.share[rows] * m
        goal = self.target * over_ranks(weight.sum())
        if not bool(goal > 0):
            return torch.zeros_like(violation)
        if self.many:
            value, reached = crossing(residual, weight, float(goal))
            crossed = goal.new_tensor(value)
        else:
            residual, order = residual.sort()
            covered = weight[order].cumsum(0)
            goal = self.target * weight[order].sum()
            crossed = residual[torch.searchsorted(covered, goal).clamp(max=len(residual) - 1)]
            ends = torch.stack([torch.searchsorted(residual, crossed, right=True), torch.searchsorted(residual, crossed)])
            reached = torch.cat([covered.new_zeros(1), covered])[ends]
        # The pinball loss is lowest at the residual where coverage crosses the goal; of the coverages there and just below it
        # (ties come and go together) the nearer one is taken.
        gap = (reached - goal).abs()
        there = torch.ceil(crossed / self.unit) * self.unit  # at or above the residual, on the grid
        nearer = gap[0] <= gap[1] + (1e-12 * goal if self.many else 0.0)
        least, shift = gap.min(), torch.where(nearer, there, there - self.unit)
        step = -shift * entry(self.scale, who)
        # Only a step that lowers the violation counts as one (the target may lie inside an atom of equal scores).
        step = torch.where(least / entry(self.scale, who) < violation.abs() * (1 - 1e-9), step, torch.zeros_like(step))
        if not self.dynamic:
            return step
        before = self.z, self.place, self.table.sums

        def worst(trial: Tensor) -> Tensor:
            self.move(who, what, trial)
            found = self.violations().abs().max()
            self.z, self.place, self.table.sums = before
            return found

        return damped(step, worst, self.violations().abs().max(), 6)

    def slope(self) -> float:
        """Largest density of the scores of any group, over windows of a 64th of their range."""
        low, high = extremes(self.scores[:, 0])
        width = max(high - low, 1e-12) / 64
        place = ((self.scores - low) / width).long().clamp(0, 63)
        share = over_ranks(cell_sums(self.member, self.share[:, None], place, 64)[:, :, 0])
        return max(float((share / self.mass.clamp_min(1e-300)[:, None]).max()) / width, 1e-6)

    def explain(self, who: int, what: int) -> str:
        """Atoms, few examples, or level sets that examples leave as soon as they are fixed."""
        inside, _ = self.cell(torch.tensor(who, device=self.z.device), torch.tensor(what, device=self.z.device))
        count = int(over_ranks((inside > 0).sum()))
        return (
            f"{self.label(who, what)} has {count} examples. The coverage may jump over the target there (equal scores, few "
            "examples), or a step may carry examples into another level set. Try a larger `alpha`, fewer `bins`, or more data."
        )


def round_up(scores: Tensor, bits: int) -> Tensor:
    """The next number, at or above each score, float64, of which only so many bits after the first are not 0."""
    step = 1 << (52 - bits)
    whole = (scores + 0.0).view(torch.int64)  # 0 is positive; the size of a number grows with its bits
    up = ((whole + (scores > 0) * (step - 1)) & -step).view(torch.float64)
    return up.clamp_max(torch.finfo(torch.float64).max)


def grid_unit(scores: Tensor) -> float:
    """Power of two that divides the range of the scores into about 2^40 steps: sums of thresholds are then exact."""
    low, high = extremes(scores)
    size = max(high - low, abs(low), abs(high))
    return 2.0 ** (math.frexp(size if size > 1e-200 else 1.0)[1] - 40)


def quantile_error(thresholds: Tensor, scores: Tensor, groups: Tensor, target: float, weight: Tensor | None = None) -> Tensor:
    r"""The metric Q of quantile multicalibration, for each group.

    .. math:: Q(f, g') = \sum_{v \in R(f)} P(f = v \mid g') \left(q - P(s \le f \mid f = v, g')\right)^2

    f is q-quantile multicalibrated when :math:`Q(f, g') \le \alpha / P(g')`. On a sample, a value of f that few examples share
    adds about q(1 - q)/count of pure noise; merge values first (e.g. by level set) if f takes many.

    ``thresholds``: values of f, or a label for each value (e.g. its level set), ``(n,)``. ``scores``: 1 where the score is at
    or below f, else 0, if ``thresholds`` are labels; the scores themselves otherwise. ``(n,)``, bool for the former.
    ``groups``: membership ``(n, a)``. ``target``: q. ``weight``: ``(n,)``. Returns: ``(a,)``, float64; 0 for an empty group.

    Example:
        >>> groups = torch.ones(4, 1).bool()
        >>> quantile_error(torch.full((4,), 0.5), torch.tensor([0.1, 0.4, 0.6, 0.9]), groups, target=0.75)
        tensor([0.0625], dtype=torch.float64)
    """
    covered = (scores if scores.dtype == torch.bool else scores <= thresholds).double()
    share = torch.ones_like(covered) if weight is None else weight.double()
    values, place = torch.unique(thresholds, return_inverse=True)
    member = groups.double() * share[:, None]  # (n, a)
    mass = torch.zeros(len(values), groups.shape[1], dtype=torch.float64, device=covered.device).index_add_(0, place, member)
    hit = torch.zeros_like(mass).index_add_(0, place, member * covered[:, None])
    gap = target - hit / mass.clamp_min(1e-300)
    return (mass * gap.square()).sum(0) / mass.sum(0).clamp_min(1e-300)
