r"""Pinball problems with one example more: from vertex to vertex, many patterns side by side.

The problem of :mod:`torchgmc.engine.pinball` without a slack,

.. math:: \min_\theta \; \sum_i w_i (\lambda_i - h_i)_+ - b^\top \theta, \qquad \lambda_i = x_{c(i)}^\top \theta

has its minimum at a vertex, where K scores are met exactly, if and only if :math:`b = \sum_i a_i x_i` with a_i = w_i for the
scores below their threshold, 0 for those above, and something between for those that are met. An example whose score lies
beyond every threshold only changes b. So b is moved in a straight line to where it should be: a_i of the scores that are met
move with it, and where one of them comes to 0 or its weight, its score is let go and the next one on the way is met instead.
One example moves b little, hence few such turns. Every step is made for all patterns at once.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchgmc.engine.pinball import Pinball, independent, product

Array = npt.NDArray[Any]
#: Scores near the thresholds of the solved problem that are looked at; more where a threshold leaves them.
WINDOW = 256
#: Entries of the tables of patterns by scores that are held at a time.
ENTRIES = 1 << 20
#: Thresholds are kept within so many widths of the scores around them.
FAR = 64.0
#: A threshold that moves slower does not move.
STILL = 1e-9


class _Vertex(NamedTuple):
    """Scores that are met, int64 ``(B, r)``, their a ``(B, r)``, and which scores are below their threshold, ``(B, W)``."""

    met: Tensor
    a: Tensor
    below: Tensor


def thresholds_with_one_more(problem: Pinball, weight: Tensor, linear: Tensor, theta: Tensor, rows: Tensor, gain: float) -> Tensor:
    """Threshold of an example that is added, for each of B patterns by itself, ``(B,)``.

    Where it has no finite value, because the pattern lies outside the span of those seen, it is infinite; because nothing
    stops a threshold, it is far beyond all scores.

    ``problem``: scores and design. ``weight``: ``(N,)``; ``linear``: b, ``(K,)``. ``theta``: near the minimum without the
    example, ``(K,)``. ``rows``: of the added example in the design, ``(B, K)``. ``gain``: what it adds to b, times its row.
    """
    used = weight > 0
    scores, cell, weight = problem.scores[used], problem.cell[used], weight[used]
    seen = torch.zeros(len(problem.design), dtype=torch.bool, device=theta.device)
    seen[cell] = True
    # Coordinates in which the columns are independent.
    _, size, turn = torch.linalg.svd(problem.design[seen], full_matrices=False)
    turn, size = turn[size > 1e-9 * size[0]].T, size[size > 1e-9 * size[0]]  # (K, r), (r,)
    design, new = problem.design @ turn, rows @ turn
    found = torch.full_like(new[:, 0], torch.inf if gain > 0 else -torch.inf)
    todo = ((rows - new @ turn.T).abs().amax(1) <= 1e-7).nonzero()[:, 0]
    rest = scores - (problem.design @ theta)[cell]
    low, high = float(scores.min()), float(scores.max())
    width = max(high - low, abs(high) * 1e-9, 1e-300)
    # Heavy scores far out on both sides of every coordinate: thresholds stay between them.
    wall = torch.eye(len(size), dtype=theta.dtype, device=theta.device).repeat(2, 1)
    far = FAR * width * len(problem.design) ** 0.5 / float(size[-1])
    beside = torch.full_like(wall[:, 0], far)
    beside[: len(size)] *= -1.0
    ends = beside + wall @ (turn.T @ theta)
    heavy = (weight.sum() + abs(gain) + linear.abs().max()).expand(len(wall))
    window = WINDOW
    while len(todo):
        kept = rest.abs().topk(min(window, len(rest)), largest=False).indices
        x, h, w = (torch.cat(pair) for pair in ((design[cell[kept]], wall), (scores[kept], ends), (weight[kept], heavy)))
        outside = torch.ones_like(rest, dtype=torch.bool).scatter(0, kept, False)
        below = outside & (rest < 0)
        target = linear @ turn - (weight * below) @ design[cell] + heavy[0]
        begin = _begin(x, torch.cat([rest[kept], beside]), w)
        first = _walk(x, h, w, begin, target[None])
        floor, ceiling = _edges(scores, cell, below, outside & ~below, len(design))
        again = []
        for part in torch.split(todo, max(1, ENTRIES // len(h))):
            start = _Vertex(*(t.expand(len(part), -1) for t in first))
            met = _walk(x, h, w, start, target + gain * new[part]).met
            place = torch.linalg.solve(x[met], h[met])  # (B, r)
            found[part] = (place * new[part]).sum(1)
            moved = place @ design.T
            again.append(part[((moved > ceiling + 1e-9 * width) | (moved < floor - 1e-9 * width)).any(1)])
        todo, window = torch.cat(again), 4 * window
    return found


def _edges(scores: Tensor, cell: Tensor, below: Tensor, above: Tensor, cells: int) -> tuple[Tensor, Tensor]:
    """Between which two scores outside the window the threshold of each cell must stay, ``(c,)`` each."""
    floor = scores.new_full((cells,), -torch.inf).scatter_reduce_(0, cell[below], scores[below], "amax")
    return floor, scores.new_full((cells,), torch.inf).scatter_reduce_(0, cell[above], scores[above], "amin")


def _begin(x: Tensor, rest: Tensor, w: Tensor) -> _Vertex:
    """A vertex near a point, and the b whose minimum it is (its a are inside their bounds, none like another)."""
    order = rest.abs().argsort(stable=True)
    met = order[independent(x[order])]
    within = torch.arange(1, len(met) + 1, dtype=w.dtype, device=w.device) * 0.6180339887 % 1.0
    theta = torch.linalg.solve(x[met], (rest[met])[:, None])[:, 0]
    return _Vertex(met[None], (w[met] * (0.3 + 0.4 * within))[None], (rest < x @ theta)[None])


def _walk(x: Tensor, h: Tensor, w: Tensor, at: _Vertex, goal: Tensor) -> _Vertex:
    """From the minimum for some b to that for the goal ``(B, r)``; x, h, w are rows ``(W, r)``, scores and weights."""
    found = _turns(*(t.cpu().numpy() for t in (x, h, w, goal)), *(t.cpu().numpy().copy() for t in at))
    return _Vertex(*(torch.from_numpy(part).to(x.device) for part in found))


def _turns(x: Array, h: Array, w: Array, goal: Array, met: Array, a: Array, below: Array) -> tuple[Array, Array, Array]:
    """:func:`_walk` in numpy, whose small operations cost a third of torch's."""
    many = np.arange(len(met))
    below[many[:, None], met] = False
    inverse = np.linalg.inv(x[met])  # theta = inverse h_met, a = b inverse
    rest = h - product((inverse @ h[met][..., None])[..., 0], x.T)
    basic = np.zeros_like(below)
    basic[many[:, None], met] = True
    way = goal - (a[:, None] @ x[met])[:, 0] - product(below * w, x)
    left = np.ones_like(a[:, 0])  # of the way
    busy = many
    while len(busy):
        rate = (way[busy, None] @ inverse[busy])[:, 0]
        mine, speed = a[busy], np.abs(rate)
        room = np.where(rate < 0, mine, w[met[busy]] - mine).clip(0.0)
        room = np.divide(room, speed, out=np.full_like(room, np.inf), where=speed > 1e-300)
        which = room.argmin(1)
        step = room[np.arange(len(busy)), which]
        far = np.minimum(step, left[busy])
        a[busy] = mine + far[:, None] * rate
        go = step < left[busy]
        left[busy] -= far
        busy, which, rate = busy[go], which[go], rate[go]
        if not len(busy):
            break
        here = np.arange(len(busy))
        up = rate[here, which] > 0  # its a came to its weight: its threshold rises above it
        turn = np.where(up, 1.0, -1.0)[:, None] * inverse[busy, :, which]
        speed = product(turn, x.T)
        can = (np.where(below[busy], -speed, speed) > STILL) & ~basic[busy]
        reach = np.divide(rest[busy], speed, out=np.full_like(speed, np.inf), where=can)
        enter = np.where(can, reach.clip(0.0), np.inf).argmin(1)
        rest[busy] -= reach[here, enter].clip(0.0)[:, None] * speed
        leave = met[busy, which]
        a[busy, which] = np.where(below[busy, enter], w[enter], 0.0)
        below[busy, leave], below[busy, enter] = up, False
        basic[busy, leave], basic[busy, enter] = False, True
        met[busy, which] = enter
        across = (x[enter][:, None] @ inverse[busy])[:, 0]  # (B, r)
        pivot = across[here, which]
        across[here, which] -= 1.0
        inverse[busy] -= inverse[busy, :, which][:, :, None] * (across / pivot[:, None])[:, None]
    return met, a, below
