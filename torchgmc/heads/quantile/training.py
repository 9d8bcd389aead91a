"""The thresholds as a differentiable function of the scores they are fitted to, with a smoothed pinball loss."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchgmc.engine import checks
from torchgmc.engine.implicit import SoftPinball, check_members, check_some, optimum, slack_of
from torchgmc.engine.offsets import quantile_of_all
from torchgmc.groups.cells import pattern_ids

if TYPE_CHECKING:
    from torchgmc.heads.quantile.head import QuantileHead


def solve(
    head: "QuantileHead", scores: Tensor, groups: Any, weight: Any, base: Any, alpha: Any, temperature: float
) -> dict[str, Tensor]:
    """See :meth:`torchgmc.QuantileHead.solve_differentiably`."""
    checks.positive("temperature", temperature, "It is the width over which the step 1{score <= q} is smoothed.")
    if head.bins is not None:
        raise ValueError(
            f"with bins={head.bins} examples jump between level sets as q moves, so the fit is not a smooth function of the "
            "scores. Train through a head with bins=None, and calibrate one with `bins` afterwards."
        )
    batch = head.check_batch(scores, groups, weight, base)
    check_some("scores", scores)
    share = batch.weight / batch.weight.sum()
    check_members(head.groups, share @ batch.member.double())
    target = torch.full_like(share, head.target)
    values = scores.to(torch.float64)
    spread = float((batch.scores.max() - batch.scores.min()).abs())
    if base is not None:
        start = values.new_zeros(())
        spread += float((batch.base - batch.scores).abs().max())
    elif head.init is not None:
        start = values.new_full((), head.init)
        spread += float((start - batch.scores).abs().max())
    else:  # the common threshold is itself a (smoothed) quantile of the scores
        one = share.new_ones(1, 1)
        everyone = SoftPinball(torch.zeros_like(share).long(), share, target, one, 1, temperature, spread + temperature)
        middle = torch.full_like(values, quantile_of_all(batch.scores, batch.weight, head.target))
        start = middle[0] - optimum(everyone, torch.zeros_like(one), values, middle)[0, 0]
    origins = start.expand_as(values) if base is None else base.to(torch.float64)
    cell, patterns = pattern_ids(batch.member)
    problem = SoftPinball(cell, share, target, patterns.to(torch.float64), 1, temperature, spread + temperature)
    scale = (share @ batch.member.double())[:, None]
    slack = slack_of(head.alpha or 0.0, alpha, scores) * (scale if head.conditional else torch.ones_like(scale))
    state = {"offsets": optimum(problem, slack, values, origins)[:, 0], "base": start}
    return state | {name: getattr(head, name)[:0] for name in ("log_who", "log_step", "log_column")}
