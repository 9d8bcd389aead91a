"""Baselines on a label tree: one threshold for everyone (split conformal), and the best leaf as it is."""

import math
from typing import Any, ClassVar

import torch

from torchgmc.distributed import pooled
from torchgmc.engine.solver import Report, reached
from torchgmc.heads.tree.head import TreeHead
from torchgmc.heads.tree.solver import TreeProblem

__all__ = ["SplitConformalTree", "UnprocessedTree"]


class SplitConformalTree(TreeHead):
    r"""Split conformal on the tree: one threshold whose coverage is at least the target on average.

    .. math:: \hat\lambda = \inf\{\lambda : \tfrac{n}{n+1} \hat R_n(\lambda) + \tfrac{1}{n+1} \le 1 - \sigma\}

    with R the share of examples that the answer does not cover. Sets and groups play no part in the fit; they are audited.

    Args:
        parents, target, alpha, sets, options: as for :class:`~torchgmc.TreeHead`.

    Example:
        >>> labels = torch.randint(4, (500,))
        >>> probs = (torch.randn(500, 4) + 2 * torch.nn.functional.one_hot(labels, 4)).softmax(1)
        >>> head = gmc.baselines.SplitConformalTree([4, 4, 5, 5, 6, 6, -1], target=0.9).fit(probs, labels)
        >>> head.leaves(head(probs)).gather(1, labels[:, None]).double().mean() >= 0.9
        tensor(True)
    """

    def __init__(self, parents: Any, target: float, alpha: float | None = 0.025, sets: Any = None, **options: Any) -> None:
        super().__init__(parents, target, alpha, sets, **options)

    @pooled
    def calibrate(self, solver: str = "exact", eta: float | None = None, max_iter: int | None = None) -> "SplitConformalTree":
        """Find the threshold; accepts the options of a head's ``calibrate`` and ignores them."""
        problem = self._problem()
        stats = problem.stats
        inner = stats.common < self.depths.to(stats.leaves.device)[stats.leaves]  # the best leaf is wrong
        level = stats.levels.gather(1, stats.common.clamp_max(self.tree.height - 1)[:, None])[:, 0]
        level = torch.where(inner, level, torch.full_like(level, -math.inf))  # lambda must exceed it to cover
        level, order = level.sort()
        covered = stats.weight[order].cumsum(0)  # weight covered by a lambda just above each level
        n = float(problem.effective)
        enough = (n * (1.0 - covered / problem.total) + 1.0) / (n + 1.0) <= 1.0 - self.target + 1e-12
        if not bool(enough.any()):
            raise ValueError(
                f"no threshold can promise coverage {self.target:g} with n = {int(n)} examples: already 1/(n+1) is above "
                f"{1 - self.target:g}. It needs n >= {math.ceil(1.0 / (1.0 - self.target)) - 1}."
            )
        lam = level[enough.to(torch.int8).argmax()]
        lam = torch.nextafter(lam, torch.full_like(lam, math.inf))
        message = f"one threshold: {float(lam):.4g}; sets and groups are not fitted."
        _finish(self, problem, float(lam), message)
        return self


class UnprocessedTree(TreeHead):
    """The best leaf as it is: nothing is fitted, the promises are measured.

    Args:
        parents, target, alpha, sets, options: as for :class:`~torchgmc.TreeHead`.

    Example:
        >>> probs = torch.tensor([[0.1, 0.2, 0.6, 0.1], [0.7, 0.1, 0.1, 0.1]])
        >>> gmc.baselines.UnprocessedTree([4, 4, 5, 5, 6, 6, -1], target=0.9).fit(probs, torch.tensor([2, 0]))(probs)
        tensor([2, 0])
    """

    fits: ClassVar[bool] = False

    def __init__(self, parents: Any, target: float, alpha: float | None = 0.025, sets: Any = None, **options: Any) -> None:
        super().__init__(parents, target, alpha, sets, **options)

    @pooled
    def calibrate(self, solver: str = "exact", eta: float | None = None, max_iter: int | None = None) -> "UnprocessedTree":
        """Measure the violations; nothing is fitted."""
        _finish(self, self._problem(), -math.inf, "nothing was fitted.")
        return self


def _finish(head: TreeHead, problem: TreeProblem, lam: float, message: str) -> None:
    before = problem.violations()
    problem.restore(torch.full_like(problem.lam, lam))
    after = problem.violations()
    within = reached(after, head.alpha, torch.zeros_like(after)) == "alpha"
    history = torch.stack([before.abs().max(), after.abs().max()]).cpu()
    head.write(problem, Report(within, 0, before, after, history, 0.0, message), lam)
