"""A head that a user wrote outside the package: the mean error of every group brought to 0 by an offset per group."""

from dataclasses import dataclass
from typing import ClassVar, Optional

import torch
from torch import Tensor

import torchgmc as gmc
from torchgmc.engine.statistics import PerExample
from torchgmc.engine.values import Values


@dataclass
class Rows(PerExample):
    f: Tensor
    y: Tensor
    member: Tensor
    weight: Tensor


class MeanHead(gmc.Head):
    """f(x) = h(x) - sum of the offsets of x's groups, with E[1_A (f - y)] = 0 for every group A."""

    offsets: Tensor
    arguments: ClassVar[tuple[str, ...]] = ("scores", "y", "groups", "weight")
    truth: ClassVar[str] = "y"
    settings: ClassVar[tuple[str, ...]] = ("alpha", "groups")
    zeroed: ClassVar[tuple[str, ...]] = ("offsets",)

    def __init__(self, alpha: float, groups=None):
        super().__init__(alpha, groups)
        self.hold(offsets=(self.num_groups,))

    def observe(self, scores, y, groups=None, weight=None):
        member = self.check_groups(groups, len(scores), scores.device)
        weight = torch.ones(len(scores)) if weight is None else weight
        self.keep(Rows(scores.double().clone(), y.double().clone(), member.clone(), weight.double().clone()), scores, y)

    @gmc.distributed.pooled
    def calibrate(self, solver="exact", eta=None, max_iter=None):
        rows = self.statistics
        who = rows.member.double()
        before = gmc.violations(who, rows.f - rows.y, weight=rows.weight)
        self.offsets.copy_(torch.linalg.lstsq(who * rows.weight[:, None].sqrt(), (rows.f - rows.y) * rows.weight.sqrt()).solution)
        after = gmc.violations(who, rows.f - who @ self.offsets - rows.y, weight=rows.weight)
        worst = torch.stack([before.abs().max(), after.abs().max()])
        self.mark_fitted(gmc.Report(bool(worst[1] <= self.alpha), 1, before, after, worst, 0.0, "least squares."))
        return self

    def forward(self, scores: Tensor, groups: Optional[Tensor] = None) -> Tensor:  # noqa: UP045  # TorchScript
        return (scores - self.membership(groups, scores.shape[0], scores) @ self.offsets).to(scores.dtype)

    def values(self, scores, y, groups=None, softness=None):
        member = self.check_groups(groups, len(scores), scores.device)
        f = self(scores, member if self.grouped else None) if self.is_fitted else scores
        return Values((f - y.to(f.dtype))[:, None], member)
