"""Violations as a torchmetrics metric (extra ``lightning``): EarlyStopping and ModelCheckpoint can watch the worst group."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgmc.engine import checks
from torchgmc.engine.extras import require
from torchgmc.engine.float64 import at_hand, leads_away
from torchgmc.groups.groups import check_groups
from torchgmc.heads.base import Head
from torchgmc.penalty import MAPPINGS, residual, table_of

Metric: Any = require("torchmetrics", extra="lightning").Metric

__all__ = ["GroupViolation", "for_head"]


class GroupViolation(Metric):  # type: ignore[misc]  # a class of an optional package
    r"""Worst violation over groups, from sums of fixed size: memory does not grow, batches and ranks add up.

    .. math:: V_{ak} = \frac{\sum_i w_i 1\{x_i \in A_a\} s_{ik}}{\sum_i w_i}, \qquad \text{compute} = \max_{a, k} |V_{ak}|

    Args:
        groups: names of the groups, or how many there are.
        num_outputs: u, the number of columns of s.
        mapping: s as a function of ``preds`` and ``target``: ``"residual"`` for preds - target, ``"centered"`` for
            preds - E preds (no target: do groups differ?), or your own function that returns ``(n,)`` or ``(n, u)``;
            NaN values are ignored.
        conditional: divide by the group's mass, to get its own deviation.
        kwargs: of ``torchmetrics.Metric``.

    Example:
        >>> metric = GroupViolation(["left", "right"])
        >>> groups = torch.tensor([[1, 0], [1, 0], [0, 1], [0, 1]])
        >>> metric.update(torch.tensor([0.9, 0.8, 0.5, 0.5]), torch.tensor([1, 1, 1, 0]), groups)
        >>> metric.compute()
        tensor(0.0750)
        >>> metric.violations()
        tensor([[-0.0750],
                [ 0.0000]])
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    fractional = False  # may memberships lie between 0 and 1?

    def __init__(
        self,
        groups: int | Sequence[str],
        num_outputs: int = 1,
        mapping: str | Callable[[Tensor, Tensor], Tensor] = "residual",
        conditional: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        names = [str(i) for i in range(checks.count("groups", groups, 1))] if isinstance(groups, int) else checks.names(groups)
        self.names, self.num_outputs = names, checks.count("num_outputs", num_outputs, 1)
        if not callable(mapping):
            checks.option("mapping", mapping, MAPPINGS)
        self.mapping, self.conditional = mapping, checks.flag("conditional", conditional)
        shape = (len(self.names), self.num_outputs)
        for name, size in {"sums": shape, "mass": shape, "total_sums": shape[1:], "total": shape[1:]}.items():
            self.add_state(name, torch.zeros(size, dtype=torch.float64), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        """Move with the model; the sums stay where there is float64."""
        return self if leads_away(fn) else super()._apply(fn, *args, **kwargs)

    def update(self, preds: Tensor, target: Tensor | None = None, groups: Any = None, weight: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            preds: ``(n,)`` or ``(n, u)``, or whatever your own mapping takes.
            target: the same shape, or class ids of ``preds (n, u)``, for ``"residual"``.
            groups: membership ``(n, a)``; omit it for one group of everyone.
            weight: ``(n,)``.
        """
        if callable(self.mapping):
            s = self.mapping(preds, target)  # type: ignore[arg-type]  # its author knows whether it takes None
        else:
            s, target = at_hand(checks.numbers("preds", checks.ordinary("preds", preds))).double(), at_hand(target)
        if self.mapping == "residual":
            target = None if target is None else checks.numbers("target", checks.ordinary("target", target))
            if target is not None and target.device != s.device:
                raise ValueError(f"`target` is on {target.device} but `preds` is on {s.device}; move them to one device.")
            s = residual(s, target)
        self.accumulate(s, groups, weight)

    def accumulate(self, s: Tensor, groups: Any = None, weight: Tensor | None = None) -> None:
        """Add values of s, ``(n,)`` or ``(n, u)``, as they are."""
        s, groups, weight = at_hand(checks.numbers("s", s).detach()).double(), at_hand(groups), at_hand(weight)
        s = s[:, None] if s.dim() == 1 else s
        if s.dim() != 2 or s.shape[1] != self.num_outputs:
            raise ValueError(f"s must have shape (n, {self.num_outputs}) for num_outputs={self.num_outputs}, got {tuple(s.shape)}.")
        if groups is None and len(self.names) > 1:
            raise ValueError(f"`groups` is missing: pass a membership of shape (n, {len(self.names)}).")
        groups = torch.ones(len(s), 1, dtype=torch.bool) if groups is None else groups
        member = check_groups(groups, len(s), self.names, self.fractional).to(s.device).double()
        w = checks.weights(weight, len(s), s)[:, None] * ~s.isnan()  # (n, u)
        s = s.nan_to_num(0.0)
        self.sums += member.T @ (w * s)
        self.mass += member.T @ w
        self.total_sums += (w * s).sum(0)
        self.total += w.sum(0)

    def violations(self) -> Tensor:
        """Signed violations ``(a, u)``, float32; 0 for a group without examples.

        On this rank only, except inside ``compute``, which adds up all ranks.
        """
        return table_of(self.sums, self.mass, self.total_sums, self.total, self.mapping == "centered", self.conditional).float()

    def compute(self) -> Tensor:
        """Worst \\|violation\\| over groups and outputs, over all ranks."""
        return self.violations().abs().max()


def for_head(head: Head, **kwargs: Any) -> "HeadViolation":
    """A metric that is updated with what ``head.observe`` takes and measures the violations that ``head`` bounds.

    A head that is not fitted yet measures the model as it is (at f0), so that you can monitor training before you calibrate.

    Example:
        >>> head = gmc.ThresholdHead(target=0.1, alpha=0.01, groups=["dark", "light"])
        >>> metric = gmc.metrics.for_head(head)
        >>> metric.update(torch.rand(6, 4, 4), torch.rand(6, 4, 4) < 0.5, torch.arange(6)[:, None] % 2 == torch.arange(2))
        >>> bool(metric.compute() > 0.1)
        True
    """
    return HeadViolation(head, **kwargs)


class HeadViolation(GroupViolation):
    """See :func:`for_head`."""

    def __init__(self, head: Head, **kwargs: Any) -> None:
        checks.kind("head", head, Head, "a torchgmc head")
        names = head.test_functions()
        super().__init__(names.who, len(names.what), "centered" if head.relative else "residual", head.conditional, **kwargs)
        self.__dict__["head"] = head  # watched, not owned: its buffers are not a state of this metric
        self.fractional = bool(head.fractional)

    def update(self, *batch: Any, **named: Any) -> None:
        """Add a batch, passed as to ``head.observe``."""
        bound = self.head.bind(*batch, **named)
        weight = bound.pop("weight", None)
        with torch.no_grad():
            values = self.head.values(**bound)
        self.accumulate(values.s if values.mean is None else values.s + values.mean, values.who, weight)
