"""Baselines of thresholds: one for everyone (conformal risk control), and none fitted at all."""

import math
from typing import Any, ClassVar

import torch

from torchgmc.distributed import pooled
from torchgmc.engine.solver import Report, reached
from torchgmc.heads.threshold.head import ThresholdHead
from torchgmc.heads.threshold.problem import CurveProblem

__all__ = ["ConformalRiskControl", "Unprocessed"]


class ConformalRiskControl(ThresholdHead):
    r"""Conformal risk control (Angelopoulos et al.): one threshold whose risk is at most the target on average.

    .. math:: \hat\lambda = \sup\{\lambda : \tfrac{n}{n+1} \hat R_n(\lambda) + \tfrac{1}{n+1} \le \sigma\}

    for a risk that rises with lambda (the infimum for one that falls). Groups are ignored by the fit, but audited.
    The paper prints this formula without its "<= target".

    Args:
        target: the risk to stay below, or one per class.
        alpha: deviation to audit against.
        options: as for :class:`~torchgmc.ThresholdHead`.

    Example:
        >>> masks = torch.rand(100, 8, 8) < 0.5
        >>> scores = torch.sigmoid(2 * masks + torch.randn(100, 8, 8))
        >>> head = gmc.baselines.ConformalRiskControl(target=0.1).fit(scores, masks)
        >>> bool(head.report.violations_after <= 0)
        True
    """

    def __init__(self, target: float | list[float], alpha: float | None = 0.005, groups: Any = None, **options: Any) -> None:
        super().__init__(target, alpha, groups, **options)

    @pooled
    def calibrate(self, solver: str = "exact", eta: float | None = None, max_iter: int | None = None) -> "ConformalRiskControl":
        """Find the threshold; accepts the options of a head's ``calibrate`` and ignores them."""
        problem = self._problem()
        assert self.statistics is not None
        if not isinstance(problem, CurveProblem):
            raise ValueError("conformal risk control works on a grid of thresholds; `resolution` must be a number.")
        n = (int(self.statistics.examples) - self.statistics.excluded).double()  # (C,)
        rising = problem.curve.sum(0) / problem.total[:, None]  # (C, size)
        risk = rising if self.risk.increasing else 1.0 - rising
        valid = (n[:, None] * risk + 1.0) / (n[:, None] + 1.0) <= self.s_target().to(risk)[:, None]
        for column in (~valid.any(1)).nonzero().flatten().tolist():
            need = math.ceil(1.0 / float(self.s_target()[column])) - 1
            raise ValueError(
                f"no threshold keeps the {self.risk.name} of class {column} at {self.target}: n = {int(n[column])} images and "
                f"the bound 1/(n+1) + n/(n+1) risk is above it everywhere. It needs n >= {need} and a reachable risk."
            )
        size = risk.shape[1]
        place = torch.arange(size, device=risk.device)
        best = torch.where(valid, place, -1).amax(1) if self.risk.increasing else torch.where(valid, place, size).amin(1)
        lattice = problem.lattice
        base = lattice.points(risk.device)[best]  # (C,)
        self._write(base, torch.zeros_like(self.offsets))
        everyone = self.lacks_everyone(problem.member)
        start = problem.violations_at(torch.full_like(problem.mass, self.init), everyone)
        after = problem.violations_at(base.expand_as(problem.mass), everyone)
        history = torch.stack([start.abs().max(), after.abs().max()]).cpu()
        message = f"one threshold per class: {', '.join(f'{v:.4g}' for v in base.tolist())}; groups are not fitted."
        state = reached(after, self.alpha, torch.zeros_like(after))
        self.mark_fitted(self._finish(Report(state == "alpha", 1, start, after, history, 0.0, message)), everyone)
        return self


class Unprocessed(ThresholdHead):
    """The model as it is: a threshold that was not fitted.

    Args:
        target: the risk to audit against.
        threshold: the model's own threshold; the middle of the range by default (0.5 for probabilities).
        alpha, groups, options: as for :class:`~torchgmc.ThresholdHead`.

    Example:
        >>> masks = torch.rand(100, 8, 8) < 0.5
        >>> scores = torch.sigmoid(2 * masks + torch.randn(100, 8, 8))
        >>> gmc.baselines.Unprocessed(target=0.1, threshold=0.4).fit(scores, masks).threshold().tolist()
        [0.4]
    """

    fits: ClassVar[bool] = False

    def __init__(
        self,
        target: float | list[float],
        alpha: float | None = 0.005,
        groups: Any = None,
        threshold: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            target, alpha, groups, init=threshold if threshold is not None else options.pop("init", None), **options
        )

    @pooled
    def calibrate(self, solver: str = "exact", eta: float | None = None, max_iter: int | None = None) -> "Unprocessed":
        """Measure the violations; nothing is fitted."""
        problem = self._problem()
        everyone = self.lacks_everyone(problem.member)
        table = problem.violations_at(torch.full_like(problem.mass, self.init), everyone)
        self._write(self.base.new_full((self.columns,), self.init), torch.zeros_like(self.offsets))
        within = reached(table, self.alpha, torch.zeros_like(table)) == "alpha"
        history = table.abs().max()[None].cpu()
        self.mark_fitted(self._finish(Report(within, 0, table, table, history, 0.0, "nothing was fitted.")), everyone)
        return self
