r"""The mappings s of the heads as differentiable functions of a model's scores, for :class:`torchgmc.GMCPenalty`.

A hard step 1{z > 0} becomes :math:`\sigma(z / T)`; sets that depend on f (answers of a tree, level sets) have soft membership.
As T -> 0 the violations become those that the heads bound.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgmc.engine import checks
from torchgmc.heads.levelsets import soft as soft_levels
from torchgmc.heads.threshold.risks import RISKS, MonotoneRisk
from torchgmc.heads.tree import soft as soft_answers
from torchgmc.heads.tree.tree import path_levels

__all__ = ["Values", "residual", "soft_risk"]


class Values(NamedTuple):
    """Values of a mapping on sets that depend on f.

    Attributes:
        s: membership times s, ``(n, u)``, NaN for a value to leave out.
        inside: soft membership, ``(n, u)``; the mass of a set is its mean. None for everyone.
    """

    s: Tensor
    inside: Tensor | None


def residual(preds: Tensor, target: Tensor | None = None) -> Tensor:
    """preds - target, ``(n,)`` or ``(n, C)``; class ids become one-hot rows.

    Example:
        >>> residual(torch.tensor([[0.2, 0.8]]), torch.tensor([1]))
        tensor([[ 0.2000, -0.2000]])
    """
    if target is None:
        raise ValueError("`target` is missing: the residual is preds - target.")
    preds = _single(preds)
    if preds.dim() == 2 and target.dim() == 1 and not target.is_floating_point() and target.dtype != torch.bool:
        if target.numel() and (int(target.min()) < 0 or int(target.max()) >= preds.shape[1]):
            raise ValueError(f"`target` must hold class ids from 0 to {preds.shape[1] - 1}.")
        target = torch.nn.functional.one_hot(target.long(), preds.shape[1])
    if target.shape != preds.shape:
        raise ValueError(f"`target` must have the shape of `preds`, {tuple(preds.shape)}, got {tuple(target.shape)}.")
    return preds - target.to(preds.dtype)


def soft_risk(scores: Tensor, masks: Tensor, thresholds: Tensor, risk: str = "fnr", temperature: float = 0.1) -> Tensor:
    r"""Share of the relevant pixels on the wrong side of the threshold, with soft sides.

    .. math:: FN = \frac{1}{|P|} \sum_{i \in P} \sigma\big((\lambda - h_i) / T\big), \qquad
              FP = \frac{1}{|N|} \sum_{i \in N} \sigma\big((h_i - \lambda) / T\big)

    Args:
        scores, masks: ``(n, C, m)``; masks bool.
        thresholds: ``(n, C)``.
        risk: ``"fnr"`` or ``"fpr"``.
        temperature: T, in the units of the scores.

    Returns:
        Shape ``(n, C)``; NaN where no pixel counts.

    Example:
        >>> scores, masks = torch.tensor([[[0.9, 0.4, 0.1]]]), torch.tensor([[[True, True, False]]])
        >>> soft_risk(scores, masks, torch.tensor([[0.5]]), temperature=0.01)
        tensor([[0.5000]])
    """
    kind = RISKS[checks.option("risk", risk, sorted(RISKS))]
    scores = _single(scores)
    chosen = kind.relevant(masks)
    gap = (thresholds.to(scores.dtype)[..., None] - scores) / checks.positive("temperature", temperature)
    wrong = torch.sigmoid(gap if kind.increasing else -gap)
    count = chosen.sum(-1)
    share = torch.where(chosen, wrong, 0.0).sum(-1) / count.clamp_min(1)
    return torch.where(count > 0, share, torch.nan)


def _single(x: Tensor) -> Tensor:
    """At least float32: sums of many half-precision numbers lose the small ones."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


# -- by head -----------------------------------------------------------------------------------------------------------------


class _OfHead:
    """A mapping that reads a head: called with the membership and what ``head.observe`` takes."""

    takes_groups = True
    centered = False

    def __init__(self, head: Any, softness: float) -> None:
        self.head, self.softness = head, softness

    def groups(self, member: Tensor) -> Tensor | None:
        """What the head's forward takes."""
        return member if self.head.grouped else None


class ThresholdMapping(_OfHead):
    """Soft risk - target at the head's thresholds (f0 before its fit)."""

    def __call__(self, member: Tensor, scores: Tensor, masks: Tensor) -> Tensor:
        head, n = self.head, len(scores)
        masks = checks.binary("masks", masks, scores.detach())
        if head.is_fitted:
            lam = head.threshold(self.groups(member), n).to(scores.device).reshape(n, head.columns)
        else:
            lam = torch.full((n, head.columns), head.init, dtype=torch.float64, device=scores.device)
        risk = soft_risk(head._flat(scores), head._flat(masks), lam, head._risk.name, self.softness)
        target: Tensor = head._targets().to(risk)
        return risk - target


class DistributionMapping(_OfHead):
    """Probability of each list, calibrated if the head is fitted; s takes it from its mean."""

    centered = True

    def __call__(self, member: Tensor, logits: Tensor) -> Tensor:
        head = self.head
        x = _single(logits)
        probs = head(x, member).exp() if head.is_fitted else torch.softmax(x / head.temperature, -1)
        words = probs.index_select(1, head.ids.to(x.device)).double()
        found: Tensor = words @ head.directions.T.to(x.device)
        return found


class ProbabilityMapping(_OfHead):
    """f - y on every level set, whose edges are soft."""

    def __call__(self, member: Tensor, probs: Tensor, y: Tensor) -> Values:
        head = self.head
        probs = _single(probs)
        f = head(probs, self.groups(member)) if head.is_fitted else probs
        s = residual(f, y)
        f, s = (t if head.per_class else t[:, None] for t in (f, s))
        if head.num_bins == 1:
            return Values(s, None)
        edges = (
            head.low + (head.high - head.low) * torch.arange(1, head.num_bins, device=f.device, dtype=f.dtype) / head.num_bins
        )
        inside = soft_levels.level_sets(f, edges, self.softness)  # (n, b, C)
        # `conditional` divides by P(A), not by the mass of the level set: as the head does.
        return Values((inside * s[:, None]).flatten(1), None)


class QuantileMapping(_OfHead):
    """Soft 1{score <= q} - target, at the head's q (or ``base``, or ``init``, before its fit)."""

    def __call__(self, member: Tensor, scores: Tensor, base: Tensor | None = None) -> Values:
        head = self.head
        scores = _single(scores)
        if scores.dim() != 1:
            raise ValueError(f"`scores` must have shape (n,), one conformity score per example, got {tuple(scores.shape)}.")
        if head.is_fitted:
            q = head(self.groups(member), base).to(scores.device).expand(len(scores))
        elif base is not None:
            q = base
        elif head.init is not None:
            q = torch.full_like(scores, head.init)
        else:
            raise ValueError("a QuantileHead that is not fitted has no thresholds: give `base`, `init=`, or fit it first.")
        s = (torch.sigmoid((q - scores) / self.softness) - head.target)[:, None]
        if head.num_bins == 1:
            return Values(s, None)
        if not head.is_fitted and head.range is None:
            raise ValueError("a QuantileHead with `bins` that is not fitted needs range=(low, high) to know its level sets.")
        edges = head.edges.to(q)
        if not head.is_fitted:
            low, high = head.range
            edges = low + (high - low) * torch.arange(1, head.num_bins, device=q.device, dtype=q.dtype) / head.num_bins
        inside = soft_levels.level_sets(q[:, None], edges, self.softness)[:, :, 0]  # (n, b)
        return Values(inside * s, None)


class TreeMapping(_OfHead):
    r"""Coverage - target on every set U of answers, :math:`\sum_k P(o = v_k) 1\{v_k \in U\} (1\{v_k \ge y\} - \sigma)`.

    The sum runs over the path to the best leaf; an answer covers y if it lies at or above the node where both paths part.
    """

    def __call__(self, member: Tensor, probs: Tensor, labels: Tensor) -> Values:
        head = self.head
        probs = _single(probs)
        _, labels, _, _ = head._check_batch(probs.detach(), labels, member if head.grouped else None, None)
        paths, depths, order, spans = head._structure(probs.device)
        leaves, levels = path_levels(probs, paths, depths, order, spans, 0.0)  # noise breaks ties; soft answers have none
        routes = paths[leaves]
        lam = torch.full_like(levels[:, 0], head.init)
        if head.is_fitted:
            inside = head.membership(self.groups(member), len(probs), probs)
            shifts, base = head.shifts.to(probs.device), head.base.to(probs.device)
            lam = soft_answers.replay_tree(levels, routes, inside, shifts, base, self.softness)
        chance = soft_answers.path(levels, lam, self.softness)  # (n, height + 1)
        common = (routes == paths[labels]).sum(1) - 1  # depth at which the paths part
        covers = torch.arange(routes.shape[1], device=probs.device) <= common[:, None]
        sets = head._sets(probs.device)[routes].to(chance.dtype)  # (n, height + 1, q)
        s = (chance * (covers.to(chance.dtype) - head.target))[:, :, None] * sets
        return Values(s.sum(1), (chance[:, :, None] * sets).sum(1))


class CustomMapping(_OfHead):
    """A user's own s on a user's own sets: all pairs as columns of one group of everyone."""

    def __call__(self, member: Tensor, f0: Tensor, y: Tensor, x: Tensor | None = None) -> Values:
        head = self.head
        rows = head._check_batch(f0.detach(), y, x, None)
        f = f0 if f0.dim() == 2 else f0[:, None]
        if head.is_fitted:
            f = head(f, rows.x)
        who, s = head._membership(f, rows.x), head._value(f, rows)
        if who.dim() == 3:
            return Values(torch.einsum("nal,nl->na", who.to(s.dtype), s), None)
        s = s @ head.directions.to(s).T if head.directed else s
        inside = who.to(s.dtype)[:, :, None].expand(-1, -1, s.shape[1])
        return Values((inside * s[:, None]).flatten(1), inside.flatten(1))


_OF = {
    "ThresholdHead": ThresholdMapping,
    "DistributionHead": DistributionMapping,
    "ProbabilityHead": ProbabilityMapping,
    "QuantileHead": QuantileMapping,
    "TreeHead": TreeMapping,
    "GMCHead": CustomMapping,
}


def of_head(head: Any, softness: float | None) -> tuple[_OfHead, Any]:
    """The mapping of a head, and the groups of its penalty."""
    known = [_OF[kind.__name__] for kind in type(head).__mro__ if kind.__name__ in _OF]
    if not known:
        raise TypeError(f"no soft mapping is known for a {type(head).__name__}; give GMCPenalty a mapping of your own.")
    if isinstance(getattr(head, "_risk", None), MonotoneRisk):
        raise ValueError(
            f"the risk {head._risk.name!r} of your own is known at hard thresholds alone, which have no derivative; give "
            "GMCPenalty a differentiable mapping instead."
        )
    width = 0.1
    if known[0] is ProbabilityMapping:
        width = 0.1 * (head.high - head.low) / head.num_bins
    softness = width if softness is None else checks.positive("softness", softness, "It is the width of a soft step.")
    grouped = head.grouped and known[0] is not CustomMapping
    return known[0](head, softness), head.groups if grouped else None
