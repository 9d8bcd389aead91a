"""Thresholds per group under the noise rule: one for everyone, an offset for each group that earns it, a last common shift."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchgmc.engine import noise
from torchgmc.engine.pinball import Pinball, solve

#: Scores from which k is chosen; of more, neighbours become one.
BUCKETS = 512
#: Slacks of a fit that goes to alpha, as parts of it.
INSIDE = (0.95, 0.75, 0.5, 0.0)


@dataclass(frozen=True)
class Folded:
    """Scores of calibration examples, dealt to folds, in cells of equal membership.

    The risk of a cell at a threshold is the weight of its scores at or below it, over its mass.

    Attributes:
        scores: float64 ``(N,)``; ``cell``: int64 ``(N,)``.
        weight: of each score, by fold, ``(F, N)``.
        mass: of each cell, by fold, ``(F, c)``; where examples may have no score at all it exceeds the sum of the weights.
        member: groups of each cell, bool or fractional ``(c, a)``.
        examples: number of examples (or clusters) altogether.
    """

    scores: Tensor
    cell: Tensor
    weight: Tensor
    mass: Tensor
    member: Tensor
    examples: float

    @property
    def total(self) -> Tensor:
        """Mass of all."""
        return self.mass.sum()

    def columns(self) -> Tensor:
        """Groups that get their own offset: some but not all of the weight, int64."""
        inside = self.member.double().T @ self.mass.sum(0)
        return ((inside > 0) & (inside < self.total * (1 - 1e-12))).nonzero()[:, 0]

    def bucketed(self, most: int) -> "Folded":
        """About ``most`` scores in place of all: neighbours in a cell become one, at their mean."""
        n, cells = len(self.scores), len(self.member)
        if n <= most:
            return self
        order = self.scores.argsort()
        order = order[self.cell[order].argsort(stable=True)]
        cell = self.cell[order]
        count = torch.bincount(cell, minlength=cells)
        rank = torch.arange(n, device=cell.device) - (count.cumsum(0) - count)[cell]
        parts = (count * most / n).ceil().long().clamp_min(1).minimum(count.clamp_min(1))
        place = (parts.cumsum(0) - parts)[cell] + rank * parts[cell] // count[cell]
        weight = self.weight.new_zeros(len(self.weight), int(parts.sum())).index_add_(1, place, self.weight[:, order])
        total = weight.sum(0)
        sums = torch.zeros_like(total).index_add_(0, place, (self.weight.sum(0) * self.scores)[order])
        used = total > 0
        where = torch.repeat_interleave(torch.arange(cells, device=cell.device), parts)
        return Folded(
            (sums / total.clamp_min(1e-300))[used], where[used], weight[:, used], self.mass, self.member, self.examples
        )

    def design(self, columns: Tensor) -> Tensor:
        """A column for everyone, and one for each of these groups, ``(c, 1 + k)``."""
        ones = torch.ones(len(self.member), 1, dtype=torch.float64, device=self.member.device)
        return torch.cat([ones, self.member[:, columns].double()], 1)


@dataclass(frozen=True)
class Offsets:
    """What was found: the threshold of everyone, what each group adds ``(a,)``, the slack k and its held-out losses."""

    common: float
    groups: Tensor
    k: float
    loss: Tensor
    shift: float = 0.0


def weighted_quantile(scores: Tensor, weight: Tensor, mass: float) -> float:
    """Smallest score with at least this mass at or below it; the largest score if there is none."""
    ordered, place = scores.sort()
    covered = weight[place].cumsum(0)
    index = torch.searchsorted(covered, mass - 1e-12 * max(abs(mass), 1e-300))
    return float(ordered[index.clamp(max=len(ordered) - 1)])


def fit_offsets_to(data: Folded, target: float, alpha: Tensor, worst: Callable[[Offsets], float]) -> Offsets:
    """Offsets that bring every violation within alpha on the sample.

    A slack just inside alpha is enough unless the risk jumps; where a jump goes beyond alpha, smaller slacks are tried, and
    one threshold for everyone.

    Args:
        data: scores.
        target: sigma, of the risk that rises with the threshold.
        alpha: largest violation of each group, ``(a,)``.
        worst: largest |violation| / alpha of all that is promised, with these offsets.
    """
    tried = []
    for part in INSIDE:
        found = _with_slack(data, target, part * alpha)
        tried.append((worst(found), found))
        if tried[-1][0] <= 1.0:
            break
    else:
        alike = torch.zeros_like(found.groups)
        pooled = Offsets(
            weighted_quantile(data.scores, data.weight.sum(0), target * float(data.total)), alike, math.nan, alike[:0]
        )
        tried.append((worst(pooled), pooled))
    return min(tried, key=lambda pair: pair[0])[1]


def _with_slack(data: Folded, target: float, slack: Tensor) -> Offsets:
    """Offsets with a given slack per group, ``(a,)``: every violation ends within it, but for jumps of the risk."""
    columns = data.columns()
    design = data.design(columns)
    weight, mass = data.weight.sum(0) / data.total, data.mass.sum(0) / data.total
    start = torch.zeros(1, design.shape[1], dtype=torch.float64, device=design.device)
    start[0, 0] = weighted_quantile(data.scores, weight, target)
    price = torch.cat([slack.new_zeros(1), slack[columns]])[None]
    problem = Pinball(data.scores, data.cell, design)
    theta = solve(problem, weight[None], target * mass[None] @ design, price, start, exact=1).theta[0]
    groups = torch.zeros(data.member.shape[1], dtype=torch.float64, device=design.device)
    groups[columns] = theta[1:]
    return Offsets(float(theta[0]), groups, math.nan, torch.zeros(0))


def fit_offsets(data: Folded, target: float, error: Tensor, count: Tensor, skewness: float, ahead: float) -> Offsets:
    """Offsets by the noise rule of :mod:`torchgmc.engine.noise`.

    Args:
        data: scores in folds.
        target: sigma, of the risk that rises with the threshold.
        error: standard error of each group's violation, ``(a,)``.
        count: examples (or clusters) of each group, ``(a,)``.
        skewness: of s.
        ahead: how far the common threshold goes beyond the target for the example to come, in examples: the rank of split
            conformal is ``target * (n + ahead)``, with ahead = 1.
    """
    columns = data.columns()
    total, folds = data.total, len(data.weight)
    rank = target * (data.examples + ahead) / data.examples  # of the mass of all
    everyone = weighted_quantile(data.scores, data.weight.sum(0), float(rank * total))
    alike = torch.zeros(data.member.shape[1], dtype=torch.float64, device=data.mass.device)
    kept = (data.mass.sum(1) > 0) & (data.mass.sum(1) < total)  # folds with examples, and others to fit on
    if len(columns) == 0 or int(kept.sum()) < 2:
        return Offsets(everyone, alike, math.inf, torch.zeros(0))
    design = data.design(columns)
    few = data.bucketed(max(BUCKETS, 4 * len(data.member)))  # enough to choose k
    problem = Pinball(few.scores, few.cell, design)
    # Fits without each fold, then with all.
    left = torch.cat([1.0 - torch.eye(folds, dtype=torch.float64, device=design.device)[kept], total.new_ones(1, folds)])
    weight, mass = left @ few.weight, left @ data.mass
    size = mass.sum(1, keepdim=True)
    weight, mass = weight / size, mass / size
    tried = noise.candidates(len(columns))
    price = torch.stack([noise.slacks(k, error[columns], count[columns], skewness) for k in tried])  # (k, a)
    price = price * (total / size).sqrt()[:, :, None]  # (F + 1, k, a): fewer examples, larger errors
    price = torch.cat([price.new_zeros(*price.shape[:2], 1), price], 2)
    middle = torch.stack([total.new_tensor(weighted_quantile(few.scores, w, target)) for w in weight])  # (F + 1,)
    start = torch.zeros(len(weight), len(tried), design.shape[1], dtype=torch.float64, device=design.device)
    start[:, :, 0] = middle[:, None]
    linear = (target * mass @ design)[:, None].expand(-1, len(tried), -1)
    shape = start.shape
    heavy = weight[:, None].expand(-1, len(tried), -1)
    flat = [part.flatten(0, 1) for part in (heavy, linear, price, start)]
    theta = solve(problem, flat[0], flat[1], flat[2], flat[3]).theta.view(shape)
    alone = torch.zeros_like(theta[:, :1])
    alone[:, 0, 0] = middle
    theta = torch.cat([theta, alone], 1)  # (F + 1, k + 1, K)
    out = theta[:-1] @ design.T  # thresholds of each cell by the fit without its fold, (F, k + 1, c)
    held, inside = few.weight[kept], data.mass[kept]
    over = (out[:, :, few.cell] - few.scores).clamp_min(0.0)
    loss = ((over * held[:, None]).sum(2) - target * (out * inside[:, None]).sum(2)) / inside.sum(1)[:, None]  # (F, k + 1)
    choice = noise.choose(loss.T, tried)
    if math.isinf(choice.k):
        return Offsets(everyone, alike, math.inf, choice.loss)
    # The fits with this k once more, on every score: the last gives the offsets, the others the common shift.
    whole = Pinball(data.scores, data.cell, design)
    theta = solve(
        whole, (left @ data.weight) / size, linear[:, 0], price[:, choice.place], theta[:, choice.place], exact=1
    ).theta
    rest = data.scores - (theta[:-1] @ design.T)[:, data.cell]  # (F, N)
    shift = weighted_quantile(rest.flatten(), data.weight[kept].flatten(), float(rank * inside.sum()))
    groups = torch.zeros_like(alike)
    groups[columns] = theta[-1, 1:]
    return Offsets(float(theta[-1, 0]) + shift, groups, choice.k, choice.loss, shift)
