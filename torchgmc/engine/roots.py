"""Where a falling function crosses 0, with few evaluations; and a step halved until it helps."""

from collections.abc import Callable

import torch
from torch import Tensor

#: Evaluations that one search may use.
MAX_TRIALS = 60


def falling_root(slope: Callable[[Tensor], Tensor], start: Tensor, guess: Tensor) -> Tensor:
    """First step at which a slope that falls from ``start`` > 0 changes sign; the side with the smaller |slope|.

    Doubling, then secant and bisection in turn. A slope that comes to rest above 0 ends the search there.
    """
    low, high = torch.zeros_like(guess), guess
    at_low, at_high = start, slope(high)
    trials = 1
    while bool(at_high > 0) and trials < MAX_TRIALS:
        further = slope(2 * high)
        trials += 1
        if bool(further >= at_high) and bool(at_high < start):
            return high  # at rest: going on changes nothing
        low, at_low, high, at_high = high, at_high, 2 * high, further
    if bool(at_high > 0):
        return high if bool(at_high < start) else torch.zeros_like(high)
    while trials < MAX_TRIALS and bool(high - low > 1e-12 * high):
        if bool(torch.minimum(at_low, -at_high) <= 1e-12 * start):
            break
        secant = low + (high - low) * at_low / (at_low - at_high)
        middle = secant if trials % 2 else (low + high) / 2
        value = slope(middle)
        trials += 1
        if bool(value > 0):
            low, at_low = middle, value
        else:
            high, at_high = middle, value
    if bool(torch.minimum(at_low, -at_high) >= start):
        return torch.zeros_like(high)  # a jump: neither side is nearer to 0 than the start
    return high if bool(-at_high < at_low) else low


def damped(step: Tensor, worst: Callable[[Tensor], Tensor], start: Tensor, halvings: int) -> Tensor:
    """Of step, step/2, ... the first that lowers the ``worst`` violation below ``start``, measured with the sets it leads to.

    If none does, the one that leaves it lowest: the solver keeps the best f and stops when nothing improves.
    """
    best, chosen = torch.full_like(start, torch.inf), step
    for _ in range(halvings):
        found = worst(step)
        if bool(found < start):
            return step
        if bool(found < best):
            best, chosen = found, step
        step = step / 2
    return chosen
