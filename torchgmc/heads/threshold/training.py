"""The thresholds as a differentiable function of the scores they are fitted to."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchgmc.engine import checks, hashing
from torchgmc.engine.implicit import SoftPinball, check_members, check_some, optimum, slack_of
from torchgmc.groups.cells import pattern_ids

if TYPE_CHECKING:
    from torchgmc.heads.threshold.head import ThresholdHead


def solve(
    head: "ThresholdHead", scores: Tensor, masks: Tensor, groups: Any, weight: Any, alpha: Any, temperature: float
) -> dict[str, Tensor]:
    """See :meth:`torchgmc.ThresholdHead.solve_differentiably`."""
    checks.positive("temperature", temperature, "It is the width over which the step 1{h <= lambda} is smoothed.")
    risk = head.risk.shares()
    batch = head.check_batch(scores, masks, groups, weight)
    check_some("scores", scores)
    chosen = risk.relevant(head.flat(batch.masks))  # (n, C, m)
    counts = chosen.sum(-1)
    cell, patterns = pattern_ids(batch.member)
    tilt, columns = patterns.to(torch.float64), head.columns
    example, label, _ = chosen.nonzero(as_tuple=True)
    mass = batch.weight[:, None] * (counts > 0)  # (n, C)
    total = mass.sum(0)
    scale = batch.member.double().T @ mass / total.clamp_min(torch.finfo(torch.float64).tiny)  # (a, C): P(A)
    check_members(head.groups, scale)
    share = (batch.weight[:, None] / counts.clamp_min(1) / total)[example, label]
    target = head.s_target().to(scores.device)
    target = target if risk.increasing else 1.0 - target
    values = head.flat(hashing.add(scores, head.jitter, head.noise_version))[chosen]
    widest = float((values.detach() - head.init).abs().max()) + temperature
    problem = SoftPinball(cell[example] * columns + label, share, target[label], tilt, columns, temperature, widest)
    slack = slack_of(head.alpha or 0.0, alpha, scores) * (scale if head.conditional else torch.ones_like(scale))
    base = torch.full((columns,), head.init, dtype=torch.float64, device=scores.device)
    ends = torch.tensor([-torch.inf, torch.inf], dtype=torch.float64, device=scores.device)
    return {"offsets": optimum(problem, slack, values, base[label]), "base": base, "limits": ends}
