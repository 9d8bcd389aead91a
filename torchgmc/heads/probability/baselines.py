"""Baselines of probabilities: one slope and offset for everyone (Platt, vector scaling), and one of each for every group."""

import dataclasses
import math
import time
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchgmc.distributed import pooled
from torchgmc.engine.values import Names
from torchgmc.heads.contract import EVERYONE
from torchgmc.heads.levelsets.problem import check_masses
from torchgmc.heads.probability import solver as probabilities
from torchgmc.heads.probability.head import ProbabilityHead
from torchgmc.heads.probability.problem import Columns, minimise
from torchgmc.heads.probability.static import Found


class Scaling(ProbabilityHead):
    r"""A slope and an offset for everyone, :math:`\sigma(b \operatorname{logit} p + c)` (Platt's; of classes, vector scaling).

    Groups play no part in the fit; they are audited.

    Args:
        alpha: deviation to audit against.
        groups, bins, num_classes, conditional: as for :class:`~torchgmc.ProbabilityHead`.

    Example:
        >>> z = torch.randn(2000)
        >>> y = torch.rand(2000) < torch.sigmoid(z)
        >>> head = gmc.baselines.Scaling().fit(torch.sigmoid(2 * z), y)  # a model twice too sure
        >>> bool((head(torch.sigmoid(2 * z)) - torch.sigmoid(z)).abs().max() < 0.1)
        True
    """

    settings: ClassVar[tuple[str, ...]] = ("alpha", "groups", "bins", "num_classes", "conditional")
    fitted_in_words: ClassVar[str] = "one slope and one offset for everyone"

    def __init__(
        self,
        alpha: float | None = 0.005,
        groups: Any = None,
        bins: int | None = 10,
        num_classes: int | None = None,
        conditional: bool = False,
    ) -> None:
        super().__init__(alpha, groups, bins, num_classes, conditional=conditional)

    @pooled
    def calibrate(self, solver: str = "exact", eta: float | None = None, max_iter: int | None = None) -> "Scaling":
        """Find slope and offset; accepts the options of a head's ``calibrate`` and ignores them."""
        examples = self.seen().unpacked(self.num_groups)
        began = time.perf_counter()
        everyone = self.lacks_everyone(examples.member)
        sample = probabilities.Sample(examples, self._promise(examples.z.device, everyone))
        check_masses(sample.mass[1:], self.groups)
        columns = Columns(sample.member, sample.z, sample.y, sample.share, False, True)
        none = torch.full(columns.shape, math.inf, dtype=torch.float64, device=sample.z.device)
        price = self._price(sample.member[:], none)
        theta = minimise(columns, torch.zeros_like(price), price, None, 50, 1e-6)
        before = sample.measure(sample.z)
        z, offsets, slopes = sample.apply(theta)
        after = sample.measure(z)
        history = [float(m.violation[1:].abs().max()) for m in (before, after)]
        tables = offsets.new_zeros(0, len(offsets), self.num_bins, self.columns)
        found = probabilities._Attempt(1.0, offsets, slopes, tables, z, after, history, "converged")
        static = Found(theta, math.nan, torch.zeros(0), True)
        names = Names([*self.groups, EVERYONE] if everyone else self.groups, self._cells(True))
        report = probabilities._report(sample, before, found, static, 1, names, time.perf_counter() - began)
        report = dataclasses.replace(report, message=f"{self.fitted_in_words}; level sets are not fitted.")
        self._write(offsets, None, None)
        self.slopes.copy_(slopes)
        self.mark_fitted(report, everyone)
        return self

    def _price(self, member: Tensor, none: Tensor) -> Tensor:
        """Columns that are free have the price 0, the others an infinite one."""
        none[:, 0] = 0.0
        return none


class MondrianScaling(Scaling):
    """A separate slope and offset for every group; the groups must not overlap.

    Args:
        alpha, groups, bins, num_classes, conditional: as for :class:`~torchgmc.ProbabilityHead`.

    Example:
        >>> z, odd = torch.randn(2000), torch.arange(2000) % 2 == 1
        >>> y = torch.rand(2000) < torch.sigmoid(z + odd)
        >>> groups = torch.stack([odd, ~odd], 1)
        >>> head = gmc.baselines.MondrianScaling(groups=["odd", "even"]).fit(torch.sigmoid(z), y, groups)
        >>> bool(head.report.violations_after[:, -1].abs().max() < 1e-4)  # of each group's mean
        True
    """

    fitted_in_words: ClassVar[str] = "a slope and an offset for each group"

    def _price(self, member: Tensor, none: Tensor) -> Tensor:
        if bool((member[:, 1:].sum(1) > 1).any()):
            raise ValueError(
                "`groups` overlap: a baseline that fits each group separately needs groups that do not. Name the combinations, "
                "e.g. one column of labels in Groups.from_columns."
            )
        none[:, 1:] = 0.0
        if bool((member[:, 1:].sum(1) == 0).any()):  # whoever is in no group
            none[:, 0] = 0.0
        return none
