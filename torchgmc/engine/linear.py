"""Linear functions of features by boosting: ridge steps (l2), or along one feature at a time (l1). Sums are over all ranks."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchgmc.distributed import total as over_ranks
from torchgmc.engine.trees import Loss, average, in_noise

#: Steps without progress after which no more are taken; lengths of a step, and ridges (times the given one), that are tried.
PATIENCE, LENGTHS, RIDGES = 10, (0.5, 0.125, 0.03125), (1.0, 10.0, 100.0, 1000.0)


class Line(NamedTuple):
    """z falls by ``x @ weight``, ``(d, C)``; the steps taken, their ridge, and the held-out losses."""

    weight: Tensor
    steps: int
    ridge: float
    history: list[float]


def standard(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features with mean 0 and deviation 1, float64, 0 where missing; their means and deviations (1 where constant)."""
    known = ~features.isnan()
    x, count = features.double().nan_to_num(0.0), over_ranks(known.sum(0)).clamp_min(1)
    mean = over_ranks(x.sum(0)) / count
    x = (x - mean) * known
    deviation = (over_ranks(x.square().sum(0)) / count).sqrt()
    deviation = torch.where(deviation > 1e-9 * mean.abs().clamp_min(1e-30), deviation, 1.0)
    return x / deviation, mean, deviation


def fit(x: Tensor, start: Tensor, final: Tensor, loss: Loss, held: int, most: int, ridge: float, l1: bool) -> Line:
    """As many steps as the last ``held`` rows say, of the ridge that they like best; then the same ones on all rows.

    ``x``: ``(n, d)``, of :func:`standard`, in an order without a pattern. ``start``, ``final``, ``loss``, ``held``, ``most``:
    as for :func:`torchgmc.engine.trees.boost`. ``ridge``: examples that each weight is drawn to 0 by. ``l1``: each step changes
    one feature, which leaves weights of 0, as the lasso does.
    """
    tried = [descend(x, start, loss, held, most, ridge * r, l1) for r in (RIDGES[:1] if l1 else RIDGES)]
    best, rest = min(tried, key=lambda line: line.history[line.steps]), slice(len(x) - held, len(x))
    gained = loss.value(start[rest], rest) - loss.value(start[rest] - x[rest] @ best.weight, rest)
    if in_noise(gained):
        return best._replace(weight=torch.zeros_like(best.weight), steps=0)
    return descend(x, final, loss, 0, best.steps, best.ridge, l1)._replace(steps=best.steps)


def descend(x: Tensor, z: Tensor, loss: Loss, held: int, most: int, ridge: float, l1: bool) -> Line:
    """Steps down the loss of all but the last ``held`` rows; the best for those, or all ``most`` if there are none."""
    train, rest = slice(0, len(z) - held), slice(len(z) - held, len(z))
    inside, now, judged = x[train], z[train], int(over_ranks(torch.tensor(held))) > 0
    curvature = loss.slopes(now, train)[1].mean(1, keepdim=True)
    heavy = over_ranks(torch.diag((inside.square() * curvature).sum(0)) if l1 else inside.T @ (inside * curvature))
    factor = torch.linalg.cholesky(heavy + (ridge * average(curvature[:, 0]) + 1e-9) * torch.eye(x.shape[1]).to(heavy))
    weight = best = x.new_zeros(x.shape[1], z.shape[1])
    here, steps = average(loss.value(now, train)), 0
    history = [average(loss.value(z[rest], rest)) if judged else math.inf]
    for k in range(1, most + 1):
        slope = over_ranks(inside.T @ loss.slopes(now, train)[0])  # (d, C)
        move = torch.cholesky_solve(slope, factor)
        if l1:
            score = slope.square().sum(1) / heavy.diagonal().clamp_min(1e-300)
            move = move * (torch.arange(len(score), device=x.device) == score.argmax())[:, None]
        for length in LENGTHS:
            there = now - inside @ (length * move)
            reached = average(loss.value(there, train))
            if reached < here:
                break
        else:
            break
        weight, now, here = weight + length * move, there, reached
        history.append(average(loss.value(z[rest] - x[rest] @ weight, rest)) if judged else -float(k))
        if history[-1] < min(history[:-1]):
            best, steps = weight, k
        if k - steps >= PATIENCE:
            break
    return Line(best, steps, ridge, history)
