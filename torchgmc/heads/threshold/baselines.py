"""Baselines of thresholds: one for everyone (conformal risk control), one per combination of groups, and none fitted."""

from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from torchgmc.distributed import pooled
from torchgmc.engine.solver import Report, reached
from torchgmc.groups.cells import pattern_ids
from torchgmc.heads import finite
from torchgmc.heads.threshold.head import ThresholdHead
from torchgmc.heads.threshold.problem import CurveProblem, SampleProblem


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
        problem = _on_lattice(self)
        assert self.statistics is not None
        n = (int(self.statistics.examples) - self.statistics.excluded).double()  # (C,)
        best = _controlled(self, problem.curve.sum(0) / problem.total[:, None], n)
        for column in (best < 0).nonzero().flatten().tolist():
            need = finite.needed(float(self.s_target()[column]), False)
            raise ValueError(
                f"no threshold keeps the {self.risk.name} of class {column} at {self.target}: n = {int(n[column])} images and "
                f"the bound 1/(n+1) + n/(n+1) risk is above it everywhere. It needs n >= {need} and a reachable risk."
            )
        base = problem.lattice.points(best.device)[best]  # (C,)
        self._write(base, torch.zeros_like(self.offsets))
        message = f"one threshold per class: {', '.join(f'{v:.4g}' for v in base.tolist())}; groups are not fitted."
        return _marked(self, problem, base.expand_as(problem.mass), message)


_Same = TypeVar("_Same", bound=ThresholdHead)


def _marked(head: _Same, problem: CurveProblem | SampleProblem, fitted: Tensor, message: str, steps: int = 1) -> _Same:
    """The head, with a report on its thresholds ``(c, C)``."""
    everyone = head.lacks_everyone(problem.member)
    before, after = (problem.violations_at(lam, everyone) for lam in (torch.full_like(problem.mass, head.init), fitted))
    history = torch.stack([before.abs().max(), after.abs().max()][-1 - steps :]).cpu()
    state = reached(after, head.alpha, torch.zeros_like(after))
    head.mark_fitted(head.finish(Report(state == "alpha", steps, before, after, history, 0.0, message)), everyone)
    return head


def _on_lattice(head: ThresholdHead) -> CurveProblem:
    problem = head.problem()
    if not isinstance(problem, CurveProblem):
        raise ValueError("conformal risk control works on a grid of thresholds; `resolution` must be a number.")
    return problem


def _controlled(head: ThresholdHead, rising: Tensor, n: Tensor) -> Tensor:
    """Place on the lattice of the threshold that conformal risk control takes, int64 ``(..., C)``; -1 where there is none.

    ``head``: whose risk it is. ``rising``: mean of the rising risk at each threshold, ``(..., C, size)``. ``n``: number of
    examples, ``(..., C)``.
    """
    risk = rising if head.risk.increasing else 1.0 - rising
    valid = (n[..., None] * risk + 1.0) / (n[..., None] + 1.0) <= head.s_target().to(risk)[:, None]
    place = torch.arange(risk.shape[-1], device=risk.device)
    if head.risk.increasing:
        return torch.where(valid, place, -1).amax(-1)
    return torch.where(valid.any(-1), torch.where(valid, place, len(place)).amin(-1), -1)


class MondrianRiskControl(ThresholdHead):
    """Conformal risk control, separately in every combination of groups.

    A combination with too few images for any threshold gets the safe end: everything is found (or nothing marked). Groups
    that overlap have many combinations, each with few images: that is the price.

    Args:
        target, alpha, groups, options: as for :class:`~torchgmc.ThresholdHead`.

    Example:
        >>> masks, dark = torch.rand(200, 8, 8) < 0.5, torch.arange(200) % 2 == 0
        >>> scores = torch.sigmoid(2 * masks - 1.0 * dark[:, None, None] + torch.randn(200, 8, 8))
        >>> head = gmc.baselines.MondrianRiskControl(target=0.1, groups=["dark"]).fit(scores, masks, dark[:, None])
        >>> light, dark = head.threshold(torch.tensor([[False], [True]])).tolist()
        >>> dark < light
        True
    """

    settings: ClassVar[tuple[str, ...]] = tuple(
        name for name in ThresholdHead.settings if name not in ("finite_sample", "patterns", "noise_floor")
    )

    def __init__(self, target: float | list[float], alpha: float | None = 0.005, groups: Any = None, **options: Any) -> None:
        super().__init__(target, alpha, groups, finite_sample=True, **options)

    @pooled
    def calibrate(self, solver: str = "exact", eta: float | None = None, max_iter: int | None = None) -> "MondrianRiskControl":
        """Find the thresholds; accepts the options of a head's ``calibrate`` and ignores them."""
        problem = _on_lattice(self)
        cell, patterns = pattern_ids(problem.member > 0)
        curve = problem.curve.new_zeros(len(patterns), *problem.curve.shape[1:]).index_add_(0, cell, problem.curve)
        mass = problem.mass.new_zeros(len(patterns), problem.mass.shape[1]).index_add_(0, cell, problem.mass)
        images = mass * ((self.statistics.examples - self.statistics.excluded) / problem.total)  # whatever the unit of weights
        best = _controlled(self, curve / mass.clamp_min(1e-300)[..., None], images)  # (P, C)
        lam = torch.where(best < 0, self.safe_end, problem.lattice.points(best.device)[best.clamp_min(0)])
        self.known, self.table = patterns.to(self.base.device), lam.to(self.base.device)
        self._write(self.base, self.offsets)
        message = f"{len(lam)} combinations of groups, each fitted separately; {int((best < 0).any(1).sum())} are too small."
        return _marked(self, problem, finite.look_up(problem.member, patterns, lam, self.safe_end), message)


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
        super().__init__(target, alpha, groups, init=threshold if threshold is not None else options.pop("init", None), **options)

    @pooled
    def calibrate(self, solver: str = "exact", eta: float | None = None, max_iter: int | None = None) -> "Unprocessed":
        """Measure the violations; nothing is fitted."""
        problem = self.problem()
        self._write(self.base.new_full((self.columns,), self.init), torch.zeros_like(self.offsets))
        return _marked(self, problem, torch.full_like(problem.mass, self.init), "nothing was fitted.", 0)
