r"""Thresholds of all groups at once: the exact minimum of a pinball loss with an l1 slack, by an interior-point method.

.. math:: \min_\theta \; \sum_i w_i (\lambda_i - h_i)_+ - b^\top \theta + \sum_j s_j |\theta_j|,
          \qquad \lambda_i = x_{c(i)}^\top \theta

h are scores, x_c the row of the design of cell c, b the linear part (for a target sigma it is :math:`\sigma \sum_i w_i x_i`).
It is a linear program in disguise; its dual has one bounded variable per score and one equation per offset, so that Mehrotra's
predictor-corrector steps cost a few passes over the scores and one small system each, and a dozen or two of them are enough.
Many problems that share scores and design (folds, slacks) are solved side by side.
"""

import contextlib
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchgmc.engine.modes import calm

Array = npt.NDArray[Any]
#: Scores in one problem; of more, those near their threshold are kept and the rest is added to the linear part.
LIMIT = 1024
STEPS = 80
#: Gap between the problem and its dual, relative to the objective, at which the steps end.
GAP = 1e-10
#: A threshold so near to a score, relative to the width of the scores, meets it.
MEETS = 1e-6
#: A step goes so far towards the nearest bound.
REACH = 0.99995


@dataclass(frozen=True)
class Pinball:
    """Scores and design, shared by all problems.

    ``scores``: h, float64 ``(N,)``. ``cell``: row of the design that each score belongs to, int64 ``(N,)``. ``design``: x,
    float64 ``(c, K)``. ``merged``: a score may stand for many, so that a few of them say little.
    """

    scores: Tensor
    cell: Tensor
    design: Tensor
    merged: bool = False

    def thresholds(self, theta: Tensor) -> Tensor:
        """Lambda of each cell, ``(..., c)``."""
        return theta @ self.design.T

    def objective(self, weight: Tensor, linear: Tensor, slack: Tensor, theta: Tensor) -> Tensor:
        """Value of every problem, ``(B,)``."""
        over = (self.thresholds(theta)[..., self.cell] - self.scores).clamp_min(0.0)
        return (weight * over).sum(-1) - (linear * theta).sum(-1) + (slack * theta.abs()).sum(-1)


@dataclass(frozen=True)
class Solution:
    """Offsets ``(B, K)``, the gap each problem ended with relative to its objective ``(B,)``, and the steps taken."""

    theta: Tensor
    gap: Tensor
    steps: int


def solve(
    problem: Pinball, weight: Tensor, linear: Tensor, slack: Tensor, start: Tensor, exact: int = 0, enough: float = GAP
) -> Solution:
    """The minimum of B problems over the same scores.

    ``problem``: scores and design. ``weight``: w >= 0, ``(B, N)``; scores of weight 0 play no part. ``linear``: b, ``(B, K)``.
    ``slack``: s >= 0, ``(B, K)``. ``start``: offsets to start from, ``(B, K)``; of a large problem they also say which scores
    matter. ``exact``: bring so many of the last solutions from the interior to a vertex, where thresholds equal scores.
    ``enough``: the gap at which to end.

    Example:
        >>> scores = torch.tensor([0.1, 0.4, 0.2, 0.9, 0.5], dtype=torch.float64)
        >>> one = Pinball(scores, torch.zeros(5).long(), torch.ones(1, 1).double())
        >>> weight = torch.full((1, 5), 0.2).double()
        >>> zero = torch.zeros(1, 1).double()
        >>> solve(one, weight, torch.tensor([[0.7]]).double(), zero, zero, exact=1).theta
        tensor([[0.5000]], dtype=torch.float64)
    """
    low, high = (float(v) for v in problem.scores.aminmax()) if problem.scores.numel() else (0.0, 1.0)
    # A shift of all scores is a shift of all thresholds, which offsets cannot express: it goes to a column of the design that
    # every row has, if there is one. Otherwise only the width is taken out.
    common = (problem.design == 1).all(0).nonzero()[:1, 0]
    centre, width = (low + high) / 2 if len(common) else 0.0, max(high - low, abs(low) * 1e-9, 1e-300)
    begin = start.clone()
    begin[:, common] -= centre
    scaled = replace(problem, scores=(problem.scores - centre) / width)
    found = _windows(scaled, weight, linear, slack, begin / width, enough)
    theta = found.theta * width
    theta[:, common] += centre
    for i in range(len(theta) - exact, len(theta)):
        theta[i] = _vertex(problem, weight[i], linear[i], slack[i], theta[i], width)
    return Solution(theta, found.gap, found.steps)


def _windows(problem: Pinball, weight: Tensor, linear: Tensor, slack: Tensor, start: Tensor, enough: float) -> Solution:
    """Solve each problem on the scores near its thresholds.

    The others of a cell count as one score at the nearest of them, on either side: the minimum is the same as long as no
    threshold meets it. Windows grow until none does.
    """
    n, cells = problem.scores.numel(), len(problem.design)
    scores, cell = (t.expand(len(weight), n) for t in (problem.scores, problem.cell))
    if n <= 4 * (LIMIT + 2 * cells):
        return _interior(problem.design, scores, cell, weight, linear, slack, start, enough)
    theta = start
    if not problem.merged:
        every = torch.arange(0, n, -(-n // LIMIT), device=weight.device)
        rough = weight[:, every] * (weight.sum(1) / weight[:, every].sum(1).clamp_min(1e-300))[:, None]
        theta = _interior(problem.design, scores[:, every], cell[:, every], rough, linear, slack, start, max(1e-5, enough)).theta
    ends = torch.arange(cells, device=weight.device).expand(len(weight), cells)
    size = LIMIT
    while True:
        rest = problem.scores - problem.thresholds(theta)[:, problem.cell]  # (B, N)
        kept = torch.where(weight > 0, rest.abs(), torch.inf).topk(min(size, n), 1, largest=False).indices
        outside = (weight > 0).scatter(1, kept, False)
        parts = [(problem.scores[kept], problem.cell[kept], weight.gather(1, kept))]
        for above in (True, False):
            here = outside & ((rest >= 0) == above)
            mass = weight.new_zeros(len(weight), cells).index_add_(1, problem.cell, weight * here)
            far = torch.inf if above else -torch.inf
            edge = torch.full_like(mass, far).scatter_reduce_(1, cell, torch.where(here, scores, far), "amin" if above else "amax")
            parts.append((torch.where(mass > 0, edge, torch.zeros_like(edge)), ends, mass))
        near, where, heavy = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        found = _interior(problem.design, near, where, heavy, linear, slack, theta, enough)
        moved = problem.scores - problem.thresholds(found.theta)[:, problem.cell]
        # A threshold that meets a score outside the window: that score stands for others beyond it.
        if size >= n or not bool(((torch.where(rest >= 0, moved, -moved) <= MEETS) & outside).any()):
            return found
        theta, size = found.theta, 2 * size


def _interior(
    design: Tensor, scores: Tensor, cell: Tensor, weight: Tensor, linear: Tensor, slack: Tensor, start: Tensor, enough: float
) -> Solution:
    """Primal-dual steps on min h^T a with X^T a = b, 0 <= a <= w, each problem with its own scores and cells ``(B, M)``.

    The term s |theta| is a score 0 with the weight 2 s in a separate cell, minus s in the linear part.
    """
    many, count, rows = len(linear), linear.shape[1], len(design)
    own = torch.arange(rows, rows + count, device=weight.device).expand(many, count)
    design = torch.cat([design, torch.eye(count, dtype=torch.float64, device=weight.device)])
    cell, h = torch.cat([cell, own], 1), torch.cat([scores, scores.new_zeros(many, count)], 1)
    w, b = torch.cat([weight, 2.0 * slack], 1), linear + slack
    with calm():
        theta, gap, steps = _steps(enough, *(t.cpu().numpy() for t in (design, h, cell, w, b, start)))
    return Solution(torch.from_numpy(theta).to(weight.device), torch.from_numpy(gap).to(weight.device), steps)


@np.errstate(all="ignore")
def _steps(enough: float, design: Array, h: Array, cell: Array, w: Array, b: Array, theta: Array) -> tuple[Array, Array, int]:
    """:func:`_interior` in numpy, whose small operations cost a third of torch's: theta, the gap, and the steps taken."""
    todo = np.arange(len(theta))
    place = cell + len(design) * todo[:, None]
    used = (w > 0).astype(float)
    pairs = 2.0 * used.sum(1, keepdims=True)

    def spread(theta: Array) -> Array:
        return product(theta, design.T).take(place)

    def gather(values: Array) -> Array:
        return np.bincount(place.ravel(), values.ravel(), len(values) * len(design)).reshape(len(values), -1)

    rest = h - spread(theta)
    margin = 0.1 * (np.abs(rest) * used).sum(1, keepdims=True) / used.sum(1, keepdims=True) + 1e-3
    # a and what it lacks to w, stacked; their multipliers. Where there is no weight, nothing moves.
    sides = np.array([1.0, -1.0])[:, None, None]
    x, z = np.stack([0.5 * np.where(w > 0, w, 1.0)] * 2), np.maximum(sides * rest, 0.0) + margin
    found, ended = np.zeros_like(theta), np.full(len(theta), np.inf)
    steps = 0
    while steps < STEPS:
        steps += 1
        gap = ((x * z).sum(0) * used).sum(1, keepdims=True)
        inside = x[0] * used
        short = b - product(gather(inside), design)
        gap_size = gap / (1.0 + np.abs((h * inside).sum(1, keepdims=True)))
        miss = np.abs(short).max(1, keepdims=True) / (1.0 + np.abs(b).max(1, keepdims=True))
        better = gap_size[:, 0] < ended[todo]  # rounding can end the progress: keep the best
        found[todo[better]], ended[todo[better]] = theta[better], gap_size[better, 0]
        busy = ((gap_size > enough) | (miss > 100.0 * enough))[:, 0] & np.isfinite(gap_size[:, 0])
        if not busy.all():
            if not busy.any():
                break
            x, z = x[:, busy], z[:, busy]
            todo, theta, b, h, cell, used, rest, pairs, gap, short = (
                t[busy] for t in (todo, theta, b, h, cell, used, rest, pairs, gap, short)
            )
            place = cell + len(design) * np.arange(len(todo))[:, None]
        ratio = z / x
        scale = used / ratio.sum(0)
        system = _system(np.stack([product(design.T * mass, design) for mass in gather(scale)]))
        turn = _solve(system, short + product(gather(scale * rest), design))
        dx = sides * (scale * (spread(turn) - rest))
        dz = -z - ratio * dx
        primal, dual = _step(x, dx), _step(z, dz)
        ahead = (((x + primal * dx) * (z + dual * dz)).sum(0) * used).sum(1, keepdims=True)
        aim = (ahead / gap) ** 3 * (gap / pairs)
        push = (aim - dx * dz) / x
        away = rest - push[0] + push[1]
        turn = _solve(system, short + product(gather(scale * away), design))
        swing = spread(turn)
        dx = sides * (scale * (swing - away))
        dz = (push - z - ratio * dx) * used
        primal, dual = REACH * _step(x, dx), REACH * _step(z, dz)
        x, z = x + primal * dx, z + dual * dz
        theta, rest = theta + dual * turn, rest - dual * swing
    return found, ended, steps


def product(a: Array, b: Array) -> Array:
    """a @ b by torch, whose threads can be limited: numpy's are as many as cores, and wait for one another on a busy machine."""
    return (torch.from_numpy(a) @ torch.from_numpy(b)).numpy()


def _system(matrix: Array) -> Array:
    """Inverse Cholesky factor of X^T D X, ``(B, K, K)``; a ridge far below its size makes collinear columns harmless."""
    size, eye = np.maximum(np.trace(matrix, axis1=1, axis2=2) / matrix.shape[1], 1e-300)[:, None, None], np.eye(matrix.shape[1])
    for power in (1e-13, 1e-10, 1e-7):
        with contextlib.suppress(np.linalg.LinAlgError):
            return np.asarray(np.linalg.inv(np.linalg.cholesky(matrix + power * size * eye)))
    return np.full_like(matrix, np.nan)


def _solve(system: Array, right: Array) -> Array:
    """What the matrix of an inverse Cholesky factor turns into this right-hand side, ``(B, K)``."""
    return np.asarray((system.swapaxes(1, 2) @ (system @ right[..., None]))[..., 0])


def _step(x: Array, dx: Array) -> Array:
    """Longest step up to 1, ``(B, 1)``, that keeps x + t dx, ``(2, B, M)``, at or above 0."""
    return np.asarray(-1.0 / np.minimum((dx / x).min((0, 2)), -1.0))[:, None]


def _vertex(problem: Pinball, weight: Tensor, linear: Tensor, slack: Tensor, theta: Tensor, width: float) -> Tensor:
    """From the interior to a vertex: scores next to their thresholds are met exactly, tiny offsets become 0.

    As many of them as are independent, nearest first; the move is the shortest one. It is kept if the objective does not rise.
    """
    before = problem.objective(weight, linear, slack, theta)
    rest = problem.scores - problem.thresholds(theta)[problem.cell]
    near = torch.where(weight > 0, rest.abs(), torch.inf)
    count = min(4 * len(theta), len(near))
    place = near.topk(count, largest=False).indices if count else near.new_zeros(0, dtype=torch.int64)
    place = place[near[place] <= 1e-5 * width]
    zeros = ((slack > 0) & (theta.abs() <= 1e-5 * width)).nonzero()[:, 0]
    eye = torch.eye(len(theta), dtype=theta.dtype, device=theta.device)
    rows = torch.cat([eye[zeros], problem.design[problem.cell[place]]])
    goal = torch.cat([-theta[zeros], rest[place]])
    size = torch.cat([theta[zeros].abs(), near[place]])
    order = size.argsort(stable=True)
    chosen = independent(rows[order])
    rows, goal = rows[order][chosen], goal[order][chosen]
    if len(rows):
        met = theta + torch.linalg.lstsq(rows, goal[:, None]).solution[:, 0]
        met[zeros[met[zeros].abs() <= 1e-12 * width]] = 0.0
        after = problem.objective(weight, linear, slack, met)
        theta = met if bool(after <= before + 1e-9 * (before.abs() + width)) else theta
    return _downhill(problem, weight, linear, slack, theta, rows)


def _downhill(problem: Pinball, weight: Tensor, linear: Tensor, slack: Tensor, theta: Tensor, rows: Tensor) -> Tensor:
    """Along an edge that falls, to its lowest kink: where an edge is nearly flat, the interior ends in the middle of it.

    ``rows``: ``x^T theta`` that stay as they are, linearly independent; fewer than K leave an edge (or a face).
    """
    eye = torch.eye(len(theta), dtype=theta.dtype, device=theta.device)
    for _ in range(len(theta) - len(rows)):
        over = problem.thresholds(theta)[problem.cell] - problem.scores
        mass = weight.new_zeros(len(problem.design)).index_add_(0, problem.cell, weight * (over > 0))
        slope = mass @ problem.design - linear + slack * theta.sign()
        kept = torch.linalg.qr(rows.T).Q
        way = kept @ (kept.T @ slope) - slope
        way = way - kept @ (kept.T @ way)  # twice: it may be tiny beside the slope
        speed, kink = torch.cat([problem.thresholds(way)[problem.cell], way]), torch.cat([-over, -theta])
        rise = speed.abs() * torch.cat([weight, 2.0 * slack])
        ahead = (rise > 0) & (kink * speed > 0)
        if bool(way.norm() <= 1e-12 * linear.norm()) or not bool(ahead.any()):
            break
        time = torch.where(ahead, kink / speed, torch.inf)
        order = time.argsort()[: int(ahead.sum())]
        rises = (slope @ way + rise[order].cumsum(0) >= 0).nonzero()[:, 0]
        first = int(order[rises[0] if len(rises) else -1])
        theta = theta + time[first] * way
        row = problem.design[problem.cell[first]] if first < len(over) else eye[first - len(over)]
        rows = torch.cat([rows, row[None]])
    return theta


def independent(rows: Tensor) -> list[int]:
    """Indices of the first rows that are linearly independent of those before."""
    chosen: list[int] = []
    table = rows.cpu().numpy()
    basis = table[:0]
    for k, row in enumerate(table):
        left = row - (basis @ row) @ basis
        left = left - (basis @ left) @ basis
        norm = math.sqrt(left @ left)
        if norm > 1e-8 * max(math.sqrt(row @ row), 1e-300):
            basis = np.concatenate([basis, (left / norm)[None]])
            chosen.append(k)
            if len(chosen) == table.shape[1]:
                break
    return chosen
