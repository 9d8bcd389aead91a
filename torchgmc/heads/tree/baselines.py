"""Baselines on a label tree: split conformal for everyone, for each group by itself, and the best leaf as it is."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchgmc.distributed import pooled
from torchgmc.engine.clusters import total as total_of
from torchgmc.engine.solver import Report
from torchgmc.heads import finite
from torchgmc.heads.tree.head import TreeHead
from torchgmc.heads.tree.solver import TreeProblem


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
        lam = _conformal(self, problem, torch.ones_like(problem.stats.weight, dtype=torch.bool), "")
        message = f"one threshold: {lam:.4g}; sets and groups are not fitted."
        _finish(self, problem, lam, message)
        return self


class MondrianConformalTree(SplitConformalTree):
    """Split conformal for every group by itself; the groups must not overlap, and everybody must be in one.

    Args:
        parents, target, alpha, sets, options: as for :class:`~torchgmc.TreeHead`, with ``groups``.

    Example:
        >>> labels, odd = torch.randint(4, (500,)), torch.arange(500) % 2 == 1
        >>> probs = (torch.randn(500, 4) + 2 * torch.nn.functional.one_hot(labels, 4)).softmax(1)
        >>> groups = torch.stack([odd, ~odd], 1)
        >>> head = gmc.baselines.MondrianConformalTree([4, 4, 5, 5, 6, 6, -1], target=0.9, groups=["odd", "even"])
        >>> covered = head.fit(probs, labels, groups).leaves(head(probs, groups)).gather(1, labels[:, None])
        >>> covered[odd].double().mean() >= 0.9
        tensor(True)
    """

    @pooled
    def calibrate(self, solver: str = "exact", eta: float | None = None, max_iter: int | None = None) -> "MondrianConformalTree":
        """Find the thresholds; accepts the options of a head's ``calibrate`` and ignores them."""
        problem = self._problem()
        member = problem.stats.member.bool()
        if bool((member.sum(1) != 1).any()):
            raise ValueError(
                "`groups` overlap, or somebody is in none: a baseline that fits each group separately needs groups that "
                "divide the examples. Name the combinations, e.g. one column of labels in Groups.from_columns."
            )
        lam = [_conformal(self, problem, inside, f"group {name!r}: ") for name, inside in zip(self.groups, member.T, strict=True)]
        shifts = -torch.tensor(lam, dtype=torch.float64).expand(1, self.num_nodes, -1).clone()
        _finish(self, problem, 0.0, f"{len(lam)} thresholds, one per group; sets are not fitted.", shifts)
        return self


def _conformal(head: TreeHead, problem: TreeProblem, inside: Tensor, whose: str) -> float:
    """Smallest threshold whose coverage of these examples, and one more, is at least the target."""
    stats = problem.stats
    wrong = stats.common < head.depths.to(stats.leaves.device)[stats.leaves]  # the best leaf is
    level = stats.levels.gather(1, stats.common.clamp_max(head.tree.height - 1)[:, None])[:, 0]
    level = torch.where(wrong, level, -math.inf)[inside]  # lambda must exceed it to cover
    level, order = level.sort()
    weight = stats.weight[inside]
    covered = weight[order].cumsum(0)  # weight covered by a lambda just above each level
    whole = total_of(weight[:, None], stats.cluster[inside])[:, 0]  # of clusters
    n = float(whole.sum().square() / whole.square().sum())
    enough = (n * (1.0 - covered / weight.sum()) + 1.0) / (n + 1.0) <= 1.0 - head.target + 1e-12
    if not bool(enough.any()):
        raise ValueError(
            f"{whose}no threshold can promise coverage {head.target:g} with n = {int(n)} examples: already 1/(n+1) is above "
            f"{1 - head.target:g}. It needs n >= {finite.needed(head.target, True)}."
        )
    lam = level[enough.to(torch.int8).argmax()]
    return float(torch.nextafter(lam, torch.full_like(lam, math.inf)))


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


def _finish(head: TreeHead, problem: TreeProblem, lam: float, message: str, shifts: Tensor | None = None) -> None:
    before = problem.violations()
    start = torch.full_like(problem.lam, lam)
    problem.restore(start if shifts is None else start - problem.stats.member.double() @ shifts[0, 0].to(start.device))
    after = problem.violations()
    history = torch.stack([before.abs().max(), after.abs().max()]).cpu()
    head.write(problem, Report(False, 0, before, after, history, 0.0, message), lam, shifts)
