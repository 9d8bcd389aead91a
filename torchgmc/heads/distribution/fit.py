"""Offsets of a language model's lists by the noise rule: how far each group can be distinguished from the others."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchgmc.distributed import total as over_ranks
from torchgmc.engine import noise
from torchgmc.engine.clusters import codes, deal_clusters, total
from torchgmc.heads.distribution.problem import MassStatistics
from torchgmc.heads.distribution.tilt import Dual, Projection, project


class Spread(NamedTuple):
    """Standard error of each violation ``(a, u)`` before the fit, and prompts (or clusters) of each group, ``(a, 1)``."""

    error: Tensor
    sizes: Tensor


def spread_of(dual: Dual, statistics: MassStatistics) -> Spread:
    """Noise of the violations of the model as it is: the mean of (1_A - P(A)) (p(U) - E p(U)) over prompts."""
    p = dual.at(dual.log_mass.new_zeros(dual.shape)).memory @ dual.lists
    away = (p - over_ranks(dual.weight @ p)) * dual.weight[:, None]  # (n, u), times the weight
    tilt = dual.tilt[dual.cell]  # (n, a)
    values = (tilt[:, :, None] * away[:, None]).flatten(1)  # (n, a u)
    squares = over_ranks(total(values, statistics.cluster).square().sum(0)).view(dual.shape)
    pooled = over_ranks(total(away, statistics.cluster).square().sum(0))  # (u,)
    weight = dual.weight[:, None].square()
    mine = over_ranks((tilt.square() * weight).sum(0)) / over_ranks(weight.sum())  # (a,)
    sizes = statistics.group_sizes()
    if statistics.cluster.shape[1]:
        place, count = codes(statistics.cluster)
        sizes = (sizes.new_zeros(count, len(sizes)).index_add_(0, place, statistics.member.double()) > 0).double().sum(0)
    return Spread(torch.maximum(squares, mine[:, None] * pooled).sqrt(), sizes[:, None])


def fit_tilt(dual: Dual, statistics: MassStatistics, lists: Tensor, spread: Spread, max_iter: int) -> tuple[Projection, float]:
    """The projection with the slack that held-out prompts choose, and k; k = infinity leaves the model as it is.

    A violation beyond its noise is never left as it is: held-out loss cannot tell on few prompts, the violation itself can.
    """
    tried = noise.candidates(dual.shape[0] * dual.shape[1])
    fold = deal_clusters(noise.FOLDS, statistics.cluster, *statistics.content())
    parts = [(fold != k, fold == k) for k in range(noise.FOLDS)]
    sizes = over_ranks(torch.tensor([[int(rows.sum()) for rows in pair] for pair in parts]))
    filled = (sizes > 0).all(1).tolist()
    usable = [
        tuple(_part(statistics, lists, dual, rows) for rows in pair) for pair, some in zip(parts, filled, strict=True) if some
    ]
    nothing = project(dual, torch.full_like(spread.error, math.inf), max_iter)
    if len(usable) < 2:
        return nothing, math.inf
    losses = []
    for k in tried:
        price = noise.slacks(k, spread.error, spread.sizes)
        grown = price * math.sqrt(noise.FOLDS / (noise.FOLDS - 1))
        losses.append([float(held.at(project(rest, grown, max_iter).theta).value) for rest, held in usable])
    losses.append([float(held.at(torch.zeros_like(nothing.theta)).value) for _, held in usable])
    choice = noise.choose(torch.tensor(losses, dtype=torch.float64), tried)
    k = choice.k
    if math.isinf(k):
        if bool((nothing.violation.abs() <= noise.bound(k, spread.error, spread.sizes)).all()):
            return nothing, k
        k = tried[-1]
    return project(dual, noise.slacks(k, spread.error, spread.sizes), max_iter), k


def _part(statistics: MassStatistics, lists: Tensor, like: Dual, rows: Tensor) -> Dual:
    """The problem of some of the prompts, seen with the shares P(A) of all."""
    part = Dual(statistics.log_mass[rows], lists, statistics.member[rows], statistics.weight[rows])
    part.mean, part.scale = like.mean, like.scale
    part.tilt = (part.patterns.to(like.tilt.dtype) - like.mean) / like.scale
    return part
