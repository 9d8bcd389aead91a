"""Baselines of quantiles: one threshold for everyone (split conformal), and one per combination of groups (Mondrian)."""

import math
import time
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchgmc.distributed import pooled
from torchgmc.engine.clusters import codes, total as total_of
from torchgmc.engine.offsets import crossing
from torchgmc.engine.solver import Report, reached
from torchgmc.groups.cells import pattern_ids
from torchgmc.heads import finite
from torchgmc.heads.base import Head
from torchgmc.heads.quantile import problem as quantiles
from torchgmc.heads.quantile.head import QuantileHead
from torchgmc.heads.quantile.problem import QuantileStatistics
from torchgmc.heads.tree.baselines import SplitConformalTree


class SplitConformal(QuantileHead):
    r"""Split conformal prediction: one threshold, the :math:`\lceil (n + 1)\,\text{target} \rceil`-th smallest score.

    A new score lies at or below it with a probability of at least the target, on average over calibration sets. Groups play no
    part in the fit; they are audited. With a label tree in place of the target it is the split conformal of trees,
    :class:`~torchgmc.baselines.SplitConformalTree`.

    Args:
        target: coverage to hold, e.g. 0.9.
        alpha: deviation to audit against.
        groups: names of the groups to audit by.
        conditional: as for :class:`~torchgmc.QuantileHead`.

    Example:
        >>> scores = torch.arange(1.0, 20.0)  # 19 of them: the 18th is the one
        >>> gmc.baselines.SplitConformal(0.9).fit(scores)()
        tensor([18.], dtype=torch.float64)
    """

    settings: ClassVar[tuple[str, ...]] = ("target", "alpha", "groups", "conditional")

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """One for scores, or one for a tree."""
        if "parents" in options or (args and not isinstance(args[0], int | float)):
            return SplitConformalTree(*args, **options)
        return super().__new__(cls)

    def __init__(self, target: float, alpha: float | None = 0.005, groups: Any = None, conditional: bool = False) -> None:
        super().__init__(target, alpha, groups, conditional=conditional)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Head:
        """The head of a file; those of version 0.1 hold a tree."""
        return SplitConformalTree.from_config(config) if "parents" in config else super().from_config(config)

    @pooled
    def calibrate(self, solver: str = "exact", eta: float | None = None, max_iter: int | None = None) -> "SplitConformal":
        """Find the threshold; accepts the options of a head's ``calibrate`` and ignores them."""
        examples, residual = _residuals(self)
        whole = total_of(examples.weight[:, None], examples.cluster)  # of clusters
        number = float(whole.sum().square() / whole.square().sum())
        rank = int(finite.conformal_rank(torch.tensor(number), self.target))
        if rank > number + 1e-9:
            raise ValueError(
                f"no threshold can promise coverage {self.target:g} with n = {int(number)} examples: it needs "
                f"n >= {finite.needed(self.target, True)}."
            )
        q = crossing(residual, examples.weight, rank / number * float(examples.weight.sum()), alone=True)[0]
        q = _above(q, examples)
        (self.shift if examples.has_base() else self.base).fill_(q)
        _finish(self, examples, torch.full_like(residual, q), f"one threshold: {q:.4g}; groups are not fitted.")
        return self


class MondrianConformal(QuantileHead):
    r"""Split conformal, separately in every combination of groups.

    The threshold of a combination with n_c examples is its :math:`\lceil (n_c + 1)\,\text{target} \rceil`-th smallest score,
    and infinite where it has too few. Groups that overlap have many combinations, each with few examples: that is the price.

    Args:
        target, alpha, groups, conditional: as for :class:`~torchgmc.QuantileHead`.

    Example:
        >>> scores, odd = torch.arange(40.0), torch.arange(40) % 2 == 1
        >>> head = gmc.baselines.MondrianConformal(0.9, groups=["odd"]).fit(scores, odd[:, None])
        >>> head(torch.tensor([[False], [True]]))  # the 19th of 20 each
        tensor([36., 37.], dtype=torch.float64)
    """

    settings: ClassVar[tuple[str, ...]] = ("target", "alpha", "groups", "conditional")

    def __init__(self, target: float, alpha: float | None = 0.005, groups: Any = None, conditional: bool = False) -> None:
        super().__init__(target, alpha, groups, conditional=conditional, finite_sample=True)

    @pooled
    def calibrate(self, solver: str = "exact", eta: float | None = None, max_iter: int | None = None) -> "MondrianConformal":
        """Find the thresholds; accepts the options of a head's ``calibrate`` and ignores them."""
        examples, residual = _residuals(self)
        cell, patterns = pattern_ids(examples.member)
        order = residual.argsort()
        order = order[cell[order].argsort(stable=True)]
        code, many = codes(examples.cluster)
        pair, place = torch.unique(cell * many + code, return_inverse=True)
        whole = torch.bincount(place, examples.weight)  # of the clusters of each combination
        total, squares = (torch.bincount(pair // many, part, len(patterns)) for part in (whole, whole.square()))
        count = total.square() / squares.clamp_min(1e-300)
        rank, covered = finite.conformal_rank(count, self.target), examples.weight[order].cumsum(0)
        goal = total.cumsum(0) - total + (rank / count.clamp_min(1e-300) - 1e-12) * total
        place = torch.searchsorted(covered, goal).clamp_max(len(order) - 1)
        table = _above(torch.where(rank <= count + 1e-9, residual[order][place], math.inf), examples)
        self.known, self.table = patterns.to(self.offsets.device), table[:, None].to(self.offsets.device)
        infinite = int(table.isinf().sum())
        message = f"{len(table)} combinations of groups, each fitted separately; {infinite} are too small for a finite threshold."
        _finish(self, examples, table[cell], message)
        return self


def _residuals(head: QuantileHead) -> tuple[QuantileStatistics, Tensor]:
    """Examples, and their scores over the start of each."""
    examples: QuantileStatistics = head.seen("score")
    return examples, examples.scores - examples.base if examples.has_base() else examples.scores


def _above(q: Any, examples: QuantileStatistics) -> Any:
    """A threshold over starts, which ``forward`` rounds, is two steps of the grid higher, so that no covered score is lost."""
    return q + 2.0 * quantiles.grid_unit(examples.scores) if examples.has_base() else q


def _finish(head: QuantileHead, examples: QuantileStatistics, found: Tensor, message: str) -> None:
    """Measure before and after, write the report."""
    began = time.perf_counter()
    unit = quantiles.grid_unit(examples.scores)
    start = head._begin(examples, unit)[1]
    everyone = head.lacks_everyone(examples.member)
    before = head._problem(examples, start, head.edges.to(start.device), unit, everyone)
    at = found + examples.base if examples.has_base() else found
    after = head._problem(examples, at[:, None], before.edges, unit, everyone).violations()
    head.unit.fill_(unit)
    state = reached(after, head.alpha, torch.zeros_like(after))
    history = torch.stack([before.violations().abs().max(), after.abs().max()]).cpu()
    seconds, details = time.perf_counter() - began, {"examples": examples.rows}
    report = Report(state == "alpha", 1, before.violations(), after, history, seconds, message, details, state)
    head.mark_fitted(report, everyone)
