r"""Thresholds of all groups at once: the exact minimum of a pinball loss with an l1 slack, by an interior-point method.

.. math:: \min_\theta \; \sum_i w_i (\lambda_i - h_i)_+ - b^\top \theta + \sum_j s_j |\theta_j|,
          \qquad \lambda_i = x_{c(i)}^\top \theta

h are scores, x_c the row of the design of cell c, b the linear part (for a target sigma it is :math:`\sigma \sum_i w_i x_i`).
It is a linear program in disguise; its dual has one bounded variable per score and one equation per offset, so that Mehrotra's
predictor-corrector steps cost a few passes over the scores and one small system each, and a dozen or two of them are enough.
Many problems that share scores and design (folds, slacks) are solved side by side.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

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

    Attributes:
        scores: h, float64 ``(N,)``.
        cell: row of the design that each score belongs to, int64 ``(N,)``.
        design: x, float64 ``(c, K)``.
    """

    scores: Tensor
    cell: Tensor
    design: Tensor

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

    Args:
        problem: scores and design.
        weight: w >= 0, ``(B, N)``; scores of weight 0 play no part.
        linear: b, ``(B, K)``.
        slack: s >= 0, ``(B, K)``.
        start: offsets to start from, ``(B, K)``; of a large problem they also say which scores matter.
        exact: bring so many of the last solutions from the interior to a vertex, where thresholds equal scores.
        enough: the gap at which to end.

    Example:
        >>> scores = torch.tensor([0.1, 0.4, 0.2, 0.9, 0.5], dtype=torch.float64)
        >>> one = Pinball(scores, torch.zeros(5).long(), torch.ones(1, 1).double())
        >>> weight = torch.full((1, 5), 0.2).double()
        >>> zero = torch.zeros(1, 1).double()
        >>> solve(one, weight, torch.tensor([[0.7]]).double(), zero, zero, exact=1).theta
        tensor([[0.5000]], dtype=torch.float64)
    """
    centre, width = _scale(problem.scores)
    scaled = Pinball((problem.scores - centre) / width, problem.cell, problem.design)
    # A shift of all scores is a shift of all thresholds, which offsets cannot express: it goes to a column of the design that
    # every row has, if there is one. Otherwise only the width is taken out.
    common = _common(problem.design)
    if common is None:
        scaled = Pinball(problem.scores / width, problem.cell, problem.design)
        begin = start / width
    else:
        begin = start.clone()
        begin[:, common] -= centre
        begin /= width
    found = _windows(scaled, weight, linear, slack, begin, enough)
    theta = found.theta * width
    if common is not None:
        theta[:, common] += centre
    for i in range(len(theta) - exact, len(theta)):
        theta[i] = _vertex(problem, weight[i], linear[i], slack[i], theta[i], width)
    return Solution(theta, found.gap, found.steps)


def _scale(scores: Tensor) -> tuple[float, float]:
    if scores.numel() == 0:
        return 0.0, 1.0
    low, high = (float(v) for v in scores.aminmax())
    return (low + high) / 2, max(high - low, abs(low) * 1e-9, 1e-300)


def _common(design: Tensor) -> int | None:
    """A column of ones."""
    ones = (design == 1).all(0).nonzero()
    return int(ones[0]) if len(ones) else None


def _windows(problem: Pinball, weight: Tensor, linear: Tensor, slack: Tensor, start: Tensor, enough: float) -> Solution:
    """Solve each problem on the scores near its thresholds.

    The others of a cell count as one score at the nearest of them, on either side: the minimum is the same as long as no
    threshold meets it. Windows grow until none does.
    """
    n, cells = problem.scores.numel(), len(problem.design)
    scores, cell = (t.expand(len(weight), n) for t in (problem.scores, problem.cell))
    if n <= 4 * (LIMIT + 2 * cells):
        return _interior(problem.design, scores, cell, weight, linear, slack, start, enough)
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
            edge = torch.full_like(mass, far).scatter_reduce_(
                1, cell, torch.where(here, scores, far), "amin" if above else "amax"
            )
            parts.append((torch.where(mass > 0, edge, torch.zeros_like(edge)), ends, mass))
        near, where, heavy = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        found = _interior(problem.design, near, where, heavy, linear, slack, theta, enough)
        moved = problem.scores - problem.thresholds(found.theta)[:, problem.cell]
        if size >= n or not bool(_meets(rest, moved, outside, 1.0).any()):
            return found
        theta, size = found.theta, 2 * size


def _meets(rest: Tensor, moved: Tensor, outside: Tensor, width: float) -> Tensor:
    """Does a threshold meet a score outside the window, ``(B,)``? That score stands for others beyond it.

    Args:
        rest: scores minus the thresholds that the window was chosen at, ``(B, N)`` or ``(N,)``; ``moved``: minus the new ones.
        outside: of the window.
        width: of the scores.
    """
    return ((torch.where(rest >= 0, moved, -moved) <= MEETS * width) & outside).any(-1)


def _interior(
    design: Tensor,
    scores: Tensor,
    cell: Tensor,
    weight: Tensor,
    linear: Tensor,
    slack: Tensor,
    start: Tensor,
    enough: float,
) -> Solution:
    """Primal-dual steps on min h^T a with X^T a = b, 0 <= a <= w, each problem with its own scores and cells ``(B, M)``.

    The term s |theta| is a score 0 with the weight 2 s in a separate cell, minus s in the linear part.
    """
    many, count, rows = len(linear), linear.shape[1], len(design)
    own = torch.arange(rows, rows + count, device=weight.device).expand(many, count)
    design = torch.cat([design, torch.eye(count, dtype=torch.float64, device=weight.device)])
    cell, h = torch.cat([cell, own], 1), torch.cat([scores, scores.new_zeros(many, count)], 1)
    w, b = torch.cat([weight, 2.0 * slack], 1), linear + slack
    live = w > 0
    one = torch.ones((), dtype=torch.float64, device=weight.device)
    w = torch.where(live, w, one)
    used, pairs = live.double(), 2.0 * live.sum(1, keepdim=True)

    def spread(theta: Tensor) -> Tensor:
        return (theta @ design.T).gather(1, cell)

    def gather(values: Tensor) -> Tensor:
        return values.new_zeros(len(values), len(design)).scatter_add_(1, cell, values)

    theta = start
    rest = h - spread(theta)
    margin = 0.1 * (rest.abs() * used).sum(1, keepdim=True) / used.sum(1, keepdim=True) + 1e-3
    a, s = 0.5 * w, 0.5 * w
    z, v = rest.clamp_min(0.0) + margin, (-rest).clamp_min(0.0) + margin
    found, ended = torch.zeros_like(start), start.new_full((len(start),), torch.inf)
    todo = torch.arange(len(start), device=start.device)
    steps = 0
    while steps < STEPS:
        steps += 1
        gap = ((a * z + s * v) * used).sum(1, keepdim=True)
        short = b - gather(a * used) @ design
        gap_size = gap / (1.0 + (h * a * used).sum(1, keepdim=True).abs())
        miss = short.abs().amax(1, keepdim=True) / (1.0 + b.abs().amax(1, keepdim=True))
        better = gap_size[:, 0] < ended[todo]  # rounding can end the progress: keep the best
        found[todo[better]], ended[todo[better]] = theta[better], gap_size[better, 0]
        busy = ((gap_size > enough) | (miss > 100.0 * enough))[:, 0] & gap_size[:, 0].isfinite()
        if not bool(busy.any()):
            break
        if not bool(busy.all()):
            todo, theta, a, s, z, v, b, h, cell, used, pairs, live, gap, short = (
                t[busy] for t in (todo, theta, a, s, z, v, b, h, cell, used, pairs, live, gap, short)
            )
        mean = gap / pairs
        scale = used / (z / a + v / s)
        rest = h - spread(theta)
        system = _system(design, gather(scale))
        turn = torch.cholesky_solve((short + gather(scale * rest) @ design)[..., None], system)[..., 0]
        move = scale * (spread(turn) - rest)
        dz, dv = -z - (z / a) * move, -v + (v / s) * move
        primal, dual = _step(a, move, s, -move, used), _step(z, dz, v, dv, used)
        ahead = (a + primal * move) * (z + dual * dz) + (s - primal * move) * (v + dual * dv)
        aim = ((ahead * used).sum(1, keepdim=True) / gap) ** 3 * mean
        left, right = (aim - move * dz) / a, (aim + move * dv) / s
        push = left - right
        turn = torch.cholesky_solve((short + gather(scale * (rest - push)) @ design)[..., None], system)[..., 0]
        move = scale * (spread(turn) - rest + push)
        dz, dv = left - z - (z / a) * move, right - v + (v / s) * move
        primal, dual = REACH * _step(a, move, s, -move, used), REACH * _step(z, dz, v, dv, used)
        a, s = a + primal * move, s - primal * move
        z, v, theta = z + dual * dz, v + dual * dv, theta + dual * turn
        a, s, z, v = (torch.where(live, t, one) for t in (a, s, z, v))
    return Solution(found, ended, steps)


def _system(design: Tensor, mass: Tensor) -> Tensor:
    """Cholesky factor of X^T D X, ``(B, K, K)``; a ridge far below its size makes collinear columns harmless."""
    matrix = torch.einsum("bc,ck,cl->bkl", mass, design, design)
    size = matrix.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-300)
    ridge = torch.eye(design.shape[1], dtype=design.dtype, device=design.device)
    for power in (1e-13, 1e-10, 1e-7):
        factor, failed = torch.linalg.cholesky_ex(matrix + (power * size)[:, None, None] * ridge)
        if not bool(failed.any()):
            break
    return torch.as_tensor(factor)


def _step(x: Tensor, dx: Tensor, y: Tensor, dy: Tensor, used: Tensor) -> Tensor:
    """Longest step up to 1, ``(B, 1)``, that keeps x + t dx and y + t dy at or above 0."""
    fall = torch.maximum(-dx / x, -dy / y) * used
    return 1.0 / fall.amax(1, keepdim=True).clamp_min(1.0)


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

    Args:
        rows: ``x^T theta`` that stay as they are, linearly independent; fewer than K leave an edge (or a face).
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
