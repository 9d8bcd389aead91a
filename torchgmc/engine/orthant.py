r"""Newton steps on a smooth convex function with an l1 term, all offsets at once, in float64.

.. math:: \min_\theta \; \Phi(\theta) + \sum_i \lambda_i |\theta_i|

Inside an orthant the l1 term is linear. A step solves for the offsets that are not 0 or whose slope exceeds lambda, stays in
their orthant (an offset that would change sign stops at 0) and is halved until the objective falls. Offsets that are not
needed stay exactly 0.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Halvings of a step.
HALVINGS = 40
#: Largest change of one offset in one step. An offset with almost no effect would otherwise go to infinity.
LONGEST = 1e3


class Point(NamedTuple):
    """Phi at some offsets: its value, its gradient ``(a, u)``, and whatever makes the second derivative cheap there."""

    value: Tensor
    gradient: Tensor
    memory: Any


class Minimum(NamedTuple):
    """What :func:`minimise` found.

    ``theta``: offsets, ``(a, u)``; ``point``: Phi there. ``history``: worst abs(gradient) at the start and after each step.
    ``missed``: how far the optimality conditions are from being met, at the worst. ``stalled``: no step lowers the objective
    although the conditions are not met.
    """

    theta: Tensor
    point: Point
    history: Tensor
    missed: Tensor
    stalled: bool


def minimise(
    look: Callable[[Tensor], Point], hessian: Callable[[Any], Tensor], slack: Tensor, theta: Tensor, enough: float, max_iter: int
) -> Minimum:
    """Newton steps until every optimality condition holds up to ``enough``.

    ``look``: Phi at offsets ``(a, u)``. ``hessian``: second derivative of Phi, ``(a u, a u)``, from the memory of a point.
    ``slack``: lambda >= 0, ``(a, u)``; an offset with 0 may change its sign freely, one with infinity stays at 0. ``theta``:
    offsets to begin with. ``enough``: largest violation of a condition. ``max_iter``: maximum number of steps.
    """
    slack = slack.clamp_max(torch.finfo(slack.dtype).max)  # times 0 it is 0
    point = look(theta)
    history, stalled = [point.gradient.abs().max()], False
    best: tuple[Tensor, Tensor, Point] | None = None
    while True:
        moves = torch.where(theta != 0, theta.sign(), -point.gradient.sign())  # the orthant to stay in
        free = (theta != 0) | (point.gradient.abs() > slack)
        slope = torch.where(free, point.gradient + slack * moves, 0.0)
        missed = slope.abs().max()
        if best is None or bool(missed < best[0]):
            best = missed, theta, point
        if bool(missed <= enough) or len(history) > max_iter:
            break
        found = _step(look, theta, point, slope, moves, free, hessian(point.memory), slack)
        if found is None:
            stalled = True
            break
        theta, point = found
        history.append(point.gradient.abs().max())
    missed, theta, point = best  # the objective falls with every step, but its slopes may not
    return Minimum(theta, point, torch.stack(history), missed, stalled)


def _step(
    look: Callable[[Tensor], Point],
    theta: Tensor,
    point: Point,
    slope: Tensor,
    moves: Tensor,
    free: Tensor,
    hessian: Tensor,
    slack: Tensor,
) -> tuple[Tensor, Point] | None:
    """The first of a Newton step, its halves, a scaled gradient step and its halves that lowers the objective enough."""
    start = point.value + (slack * theta.abs()).sum()
    noise = 4 * torch.finfo(theta.dtype).eps * (1 + start.abs())
    diagonal = hessian.diagonal()
    # A floor, so that an offset without effect (a group of everyone) never divides by 0.
    diagonal = diagonal.clamp_min(1e-12 * float(diagonal.max()) + 1e-300)
    for direction in (_newton(hessian, diagonal, theta, slope, moves, free, slack), -slope / diagonal.view_as(slope)):
        size, direction = 1.0, direction.clamp(-LONGEST, LONGEST)  # at first: else its halves could all be equally long
        for _ in range(HALVINGS):
            trial = theta + size * direction
            trial = torch.where((trial * moves > 0) | (slack == 0), trial, 0.0)
            new = look(trial)
            gain = start - new.value - (slack * trial.abs()).sum()
            promised = (slope * (theta - trial)).sum()
            if bool((gain >= 1e-4 * promised) & (promised > 0) & new.gradient.isfinite().all()):
                return trial, new
            # Close to the minimum the value no longer resolves the gain: there a step that lowers the slope itself counts.
            if bool((promised.abs() <= noise) & (gain >= -noise)):
                left = torch.where((trial != 0) | (slack == 0), new.gradient + slack * moves, 0.0)
                if bool(left.abs().max() < slope.abs().max()):
                    return trial, new
            size /= 2
    return None


def _newton(hessian: Tensor, diagonal: Tensor, theta: Tensor, slope: Tensor, moves: Tensor, free: Tensor, slack: Tensor) -> Tensor:
    """Newton direction over the free offsets; one that starts at 0 and would leave its orthant is held there."""
    # Groups that are one another's complement make the Hessian singular; the ridge picks one of the equal solutions.
    hessian = hessian + torch.diag(1e-9 * diagonal + 1e-14 * diagonal.max())
    direction = torch.zeros_like(slope)
    for _ in range(4):
        keep = free.flatten()
        block = torch.where(keep[:, None] & keep, hessian, torch.diag(diagonal))
        factor, failed = torch.linalg.cholesky_ex(block)
        if bool(failed != 0):
            return -slope / diagonal.view_as(slope)
        right = torch.where(free, slope, 0.0)
        direction = -torch.cholesky_solve(right.view(-1, 1), factor).view_as(slope)
        wrong = free & (theta == 0) & (direction * moves <= 0) & (slack > 0)
        if not bool(wrong.any()):
            break
        free = free & ~wrong
    return torch.where(free, direction, 0.0)
