"""From batches to an audit: what a head keeps of held-out data, added up, and judged at the end."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchgmc.audits import overlap
from torchgmc.audits.audit import Audit, Evidence
from torchgmc.audits.intervals import Moments
from torchgmc.engine import checks

if TYPE_CHECKING:
    from torchgmc.heads.base import Head

__all__ = ["Tally", "audit", "each"]

UNKNOWN_RANGE = "The range of s was taken from these data, so the intervals are a guide, not a guarantee."


@dataclass
class Tally:
    """What is kept of audited batches; they add up, however the data are cut, to the same audit.

    Attributes:
        s: values of the mapping, ``(n, u)``, before everybody's mean is taken off; NaN where an example has none.
        who: membership in each set, ``(n, a)``.
        weight: ``(n,)``.
        column: see :class:`~torchgmc.engine.values.Values`.
        sums, rows: what the head needs for costs, see :meth:`torchgmc.Head.audit_sums`.
        sketch: which examples they were.
    """

    s: Tensor
    who: Tensor
    weight: Tensor
    column: Tensor | None
    sums: dict[str, Tensor]
    rows: dict[str, Tensor]
    sketch: overlap.Sketch

    @classmethod
    def of(cls, head: "Head", batch: Mapping[str, Any]) -> "Tally":
        """Of one batch, given by the names of the arguments of ``head.observe``."""
        first = batch[head.arguments[0]]
        given = {name: value for name, value in batch.items() if name != "weight"}
        with torch.no_grad():
            values = head.values(**{name: value for name, value in given.items() if name not in head.audit_only})
            n = len(values.s)
            if n == 0:
                raise ValueError(f"`{head.arguments[0]}` holds no examples to audit.")
            weight = checks.weights(batch.get("weight"), n, values.s)
            return cls(
                values.s if values.mean is None else values.s + values.mean,
                values.who,
                weight,
                values.column,
                head.audit_sums(weight=weight, **given),
                head.audit_rows(**given),
                overlap.Sketch.of(*_content(head, first, batch)),
            )

    def __add__(self, other: "Tally") -> "Tally":
        """Of both sets of examples."""

        def both(a: Tensor, b: Tensor) -> Tensor:
            return torch.cat([a, b.to(a.device)])

        return Tally(
            both(self.s, other.s),
            both(self.who, other.who),
            both(self.weight, other.weight),
            None if self.column is None or other.column is None else both(self.column, other.column),
            {key: value + other.sums[key] for key, value in self.sums.items()},
            {key: both(value, other.rows[key]) for key, value in self.rows.items()},
            self.sketch + other.sketch,
        )


def _content(head: "Head", first: Any, batch: Mapping[str, Any]) -> list[Tensor]:
    """What tells one example from another: its scores and its truth."""
    parts = [first, batch.get(head.truth)] if head.truth else [first]
    return [checks.numbers(name, part) for name, part in zip((head.arguments[0], head.truth), parts, strict=False)]


def each(batches: Any) -> Iterable[Any]:
    """The batches one by one; one batch by itself is taken as such."""
    if isinstance(batches, Mapping) or (isinstance(batches, tuple | list) and batches and isinstance(batches[0], Tensor)):
        return [batches]
    if isinstance(batches, Tensor | str) or not isinstance(batches, Iterable):
        raise TypeError(
            f"`batches` must be batches, or one: a tuple of the arguments of `observe`; got {type(batches).__name__}."
        )
    return batches


def audit(
    head: "Head",
    batches: Any,
    delta: float = 0.05,
    *,
    alpha: float | None = None,
    conditional: bool | None = None,
) -> Audit:
    """Audit a head or a baseline on held-out data that come in batches.

    Pixels and vocabularies are seen once and forgotten; a few numbers per example are kept. However the data are cut, the audit
    is that of ``head.audit`` on all (to rounding).

    Args:
        head: fitted head or baseline.
        batches: an iterable of batches (a ``DataLoader``, a generator), or one batch. A batch is a tuple of the arguments of
            ``head.observe``, e.g. ``(scores, masks, groups)`` or ``(scores, masks, groups, weight)``, or a mapping from their
            names.
        delta: 1 - confidence of all intervals together.
        alpha: judge by another alpha than the head's.
        conditional: judge each group's own deviation (True) or the mass-weighted one (False); as the head if omitted.

    Returns:
        The audit: worst group first, certificate, cost, files.

    Example:
        >>> masks = torch.rand(200, 8, 8) < 0.5
        >>> scores = torch.sigmoid(2 * masks + torch.randn(200, 8, 8))
        >>> head = gmc.ThresholdHead(target=0.1, alpha=0.01).fit(scores, masks)
        >>> audit = gmc.audit(head, zip(scores.split(64), masks.split(64)), delta=0.1)
        >>> audit.num_examples, abs(audit.max_violation - head.audit(scores, masks).max_violation) < 1e-12
        (200, True)
    """
    if not all(hasattr(head, name) for name in ("bind_batch", "values", "is_fitted")):
        raise TypeError(f"`head` must be a head or a baseline, got {type(head).__name__}.")
    checks.fraction("delta", delta)
    if not head.is_fitted:
        raise RuntimeError("this head is not fitted; call `fit`, or `observe` and `calibrate`, or load its state.")
    tally: Tally | None = None
    for place, batch in enumerate(each(batches)):
        part = Tally.of(head, head.bind_batch(batch, place))
        tally = part if tally is None else tally + part
    if tally is None:
        raise ValueError("`batches` holds no batch to audit.")
    found = _conclude(head, tally, delta)
    if alpha is None and conditional is None:
        return found
    own = found.conditional if conditional is None else conditional
    return found.view("conditional" if own else "mass-weighted", alpha)


def _conclude(head: "Head", tally: Tally, delta: float) -> Audit:
    """The audit of all batches, with a warning if their examples were calibrated on."""
    names, summary = head.test_functions(), head.audit_summary(tally)
    evidence, guessed = _evidence(head, tally, summary.get("columns", {}))
    excluded = int(tally.s.isnan().any(1).sum())
    notes = [summary.get("note", ""), UNKNOWN_RANGE if guessed else ""]
    warning = "" if head.calibrated_on is None else overlap.warning_text(head.calibrated_on, tally.sketch)
    if warning:
        warnings.warn(warning, overlap.OverlapWarning, stacklevel=4)
    assert (len(names.who), len(names.what)) == tuple(evidence.moments.rows(len(names.who)).first.shape)
    return Audit(
        evidence.table(head.alpha, delta, head.conditional),
        head.alpha,
        delta,
        head.conditional,
        len(tally.s),
        excluded,
        summary.get("cost", {}),
        type(head).__name__,
        " ".join(part for part in (*notes, warning) if part),
        evidence,
        summary.get("details", {}),
    )


def _evidence(head: "Head", tally: Tally, columns: dict[str, Tensor]) -> tuple[Evidence, bool]:
    """What the table is computed from, and whether the range of s had to be taken from the data."""
    names = head.test_functions()
    s, who = tally.s.double(), tally.who
    weight = tally.weight[:, None] * ~s.isnan()  # (n, u)
    empty = ((who > 0).double().T @ (weight > 0).double()).eq(0).flatten(1).any(1)
    if head.static and bool(empty.any()):
        raise ValueError(f"group {names.who[int(empty.nonzero()[0])]!r} has no examples to audit; leave it out or add data.")
    known = head.s_range()
    if known is None:
        defined = s[~s.isnan()]
        least, most = (float(v) for v in defined.aminmax()) if defined.numel() else (0.0, 0.0)
    low, high = (least, max(most, least + 1e-12)) if known is None else known
    target = torch.as_tensor(head.s_target(), dtype=torch.float64, device=s.device).expand(s.shape[1])
    if head.relative:
        target = torch.where(weight > 0, s, 0.0).mul(weight).sum(0) / weight.sum(0)
        s, who = s - target, torch.cat([who, torch.ones_like(who[:, :1])], 1)
        low, high = low - target, high - target
    cells = None
    if tally.column is not None:
        inside = torch.zeros_like(s).scatter_(1, tally.column, 1.0)
        member = tally.who.double().T
        cells = member @ (inside * weight), member @ (inside * (weight > 0))
    moments = Moments.of(who, s, weight)
    return Evidence(
        moments, tuple(names.who), tuple(names.what), target, (low, high), head.relative, cells, columns
    ), known is None
