"""Offsets of a language model's lists by the noise rule: how far each group can be distinguished from the others."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchgmc.distributed import total as over_ranks
from torchgmc.engine import noise
from torchgmc.engine.clusters import deal_clusters, total
from torchgmc.engine.folds import places
from torchgmc.engine.implicit import cell_sums
from torchgmc.heads.distribution.problem import MassStatistics
from torchgmc.heads.distribution.tilt import Dual, Projection, project

#: Prompts that choose k; from twice as many on they choose for all.
CHOICES = 1 << 18


class Spread(NamedTuple):
    """Standard error of each violation ``(a, u)`` before the fit, and prompts (or clusters) of each group, ``(a, 1)``."""

    error: Tensor
    sizes: Tensor


def spread_of(dual: Dual, statistics: MassStatistics) -> Spread:
    """Noise (of rounding at least) of the violations of the model as it is, means of (1_A - P(A)) (p(U) - E p(U)) over prompts."""
    p = dual.at(dual.log_mass.new_zeros(dual.shape)).memory @ dual.lists
    away = (p - over_ranks(dual.weight @ p)) * dual.weight[:, None]  # (n, u), times the weight
    powers = cell_sums(torch.cat([away, dual.weight[:, None]], 1).square(), dual.cell, dual.tilt)  # (c, u + 1)
    squares, pooled = over_ranks(dual.tilt.square().T @ powers), over_ranks(powers.sum(0))
    mine, squares, pooled = squares[:, -1:] / pooled[-1], squares[:, :-1], pooled[:-1]  # (a, 1), (a, u), (u,)
    if statistics.cluster.shape[1]:
        values = (dual.tilt[dual.cell][:, :, None] * away[:, None]).flatten(1)  # (n, a u)
        squares = over_ranks(total(values, statistics.cluster).square().sum(0)).view(dual.shape)
        pooled = over_ranks(total(away, statistics.cluster).square().sum(0))
    return Spread(torch.maximum(squares, mine * pooled).sqrt().clamp_min(1e-9), statistics.group_sizes()[:, None])


def fit_tilt(dual: Dual, statistics: MassStatistics, lists: Tensor, spread: Spread, max_iter: int) -> tuple[Projection, float]:
    """The projection with the slack that held-out prompts choose, and k; k = infinity leaves the model as it is.

    A violation beyond its noise is never left as it is: held-out loss cannot tell on few prompts, the violation itself can.
    """
    tried = noise.candidates(dual.shape[0] * dual.shape[1])
    fold = _folds(statistics)
    sizes = over_ranks(torch.bincount(fold + 1, minlength=noise.FOLDS + 1))
    nothing = project(dual, torch.full_like(spread.error, math.inf), max_iter)
    filled = (sizes[1:] > 0).nonzero()[:, 0].tolist()
    if len(filled) < 2:
        return nothing, math.inf
    fewer = float(sizes.sum() / sizes[1:].sum()) * noise.FOLDS / (noise.FOLDS - 1)  # all prompts over those of a fit
    prices = [math.sqrt(fewer) * noise.slacks(k, spread.error, spread.sizes) for k in tried]
    losses = []
    for k in filled:
        rest, held = (_part(statistics, lists, dual, rows) for rows in ((fold >= 0) & (fold != k), fold == k))
        found = [project(rest, price, max_iter).theta for price in prices]
        losses.append([float(held.at(theta).value) for theta in (*found, torch.zeros_like(nothing.theta))])
    k = noise.choose(torch.tensor(losses, dtype=torch.float64).T, tried).k
    if math.isinf(k):
        if bool((nothing.violation.abs() <= noise.bound(k, spread.error, spread.sizes)).all()):
            return nothing, k
        k = tried[-1]
    return project(dual, noise.slacks(k, spread.error, spread.sizes), max_iter), k


def _folds(statistics: MassStatistics) -> Tensor:
    """Fold of each prompt, int64 ``(n,)``; -1 for those that have no say in k."""
    if statistics.cluster.shape[1]:
        return deal_clusters(noise.FOLDS, statistics.cluster)
    spots = places(*statistics.content())
    few = spots.few(CHOICES, spots.rows)
    fold = spots.place % noise.FOLDS
    return fold if few is None else fold.masked_fill(~few, -1)


def _part(statistics: MassStatistics, lists: Tensor, like: Dual, rows: Tensor) -> Dual:
    """The problem of some of the prompts, seen with the shares P(A) of all."""
    part = Dual(statistics.log_mass[rows], lists, statistics.member[rows], statistics.weight[rows])
    part.mean, part.scale = like.mean, like.scale
    part.tilt = (part.patterns.to(like.tilt.dtype) - like.mean) / like.scale
    return part
