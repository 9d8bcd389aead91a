"""From batches to an audit: what a head keeps of held-out data, added up, and judged at the end."""

import copy
import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchgmc import distributed
from torchgmc.audits import overlap
from torchgmc.audits.audit import Audit, Evidence
from torchgmc.audits.intervals import METHODS, Rows
from torchgmc.engine import checks
from torchgmc.engine.batches import one_batch
from torchgmc.engine.clusters import check as check_clusters, total
from torchgmc.engine.float64 import at_hand, lacks
from torchgmc.engine.values import Names

if TYPE_CHECKING:
    from torchgmc.heads.base import Head

#: Name of the column for all level sets together.
ALL_LEVELS = "all levels"
UNKNOWN_RANGE = "The range of s was taken from these data, so the intervals are a guide, not a guarantee."
UNKNOWN_SIZE = "The largest cluster was taken from these data: pass `cluster_size` if a bound is known in advance."


@dataclass
class Tally:
    """What is kept of audited batches; they add up, however the data are cut, to the same audit.

    ``s``: values of the mapping, ``(n, u)``, before everybody's mean is taken off; NaN where an example has none. ``who``:
    membership in each set, ``(n, a)``. ``weight``: ``(n,)``. ``cluster``: int64 ``(n, 1)``, or ``(n, 0)``. ``column``: see
    :class:`~torchgmc.engine.values.Values`. ``sums``, ``rows``: what the head needs for costs, see
    :meth:`torchgmc.Head.audit_sums`. ``sketch``: which examples they were.
    """

    s: Tensor
    who: Tensor
    weight: Tensor
    cluster: Tensor
    column: Tensor | None
    sums: dict[str, Tensor]
    rows: dict[str, Tensor]
    sketch: overlap.Sketch

    @classmethod
    def of(cls, head: "Head", batch: Mapping[str, Any]) -> "Tally":
        """Of one batch, by the names of the arguments of ``head.observe``."""
        batch = {name: at_hand(value) for name, value in batch.items()}
        given = {name: value for name, value in batch.items() if name not in ("weight", "clusters")}
        with torch.no_grad(), one_batch():
            values = head.values(**{name: value for name, value in given.items() if name not in head.audit_only})
            n = len(values.s)
            if n == 0:
                raise ValueError(f"`{head.arguments[0]}` has no examples to audit.")
            weight = checks.weights(batch.get("weight"), n, values.s)
            s, cluster = values.s, check_clusters(batch.get("clusters"), n, weight.device)
            s, sketch = s if values.mean is None else s + values.mean, overlap.Sketch.of(*content(head, batch))
            sums, rows = head.audit_sums(weight=weight, **given), head.audit_rows(**given)
            return cls(s, values.who, weight, cluster, values.column, sums, rows, sketch)

    def __add__(self, other: "Tally") -> "Tally":
        """Of both sets of examples."""

        def both(a: Tensor, b: Tensor) -> Tensor:
            return torch.cat([a, b.to(a.device)])

        if self.cluster.shape[1] != other.cluster.shape[1]:
            raise ValueError("pass `clusters` with every batch or with none.")

        s, who, weight, cluster = (both(getattr(self, k), getattr(other, k)) for k in ("s", "who", "weight", "cluster"))
        column = None if self.column is None or other.column is None else both(self.column, other.column)
        sums = {key: value + other.sums[key] for key, value in self.sums.items()}
        rows = {key: both(value, other.rows[key]) for key, value in self.rows.items()}
        return Tally(s, who, weight, cluster, column, sums, rows, self.sketch + other.sketch)


def content(head: "Head", batch: Mapping[str, Any]) -> list[Tensor]:
    """What tells one example from another: its scores and its truth."""
    return [checks.numbers(name, batch.get(name)) for name in (head.arguments[0], head.truth) if name]


def audit(
    head: "Head",
    batches: Any,
    delta: float = 0.05,
    *,
    alpha: float | None = None,
    conditional: bool | None = None,
    method: str = "exact",
    cluster_size: float | None = None,
) -> Audit:
    """Audit a head or a baseline on held-out data that come in batches.

    Pixels and vocabularies are seen once and forgotten. Kept of each example, and gathered over processes, are 8 bytes for each
    column of s, its weight, cluster and level set, and each figure that measures need, and a byte per group: 99 bytes for
    probabilities in 50 groups, 187 with 10 level sets. However the data are cut and ordered, the audit is that of
    ``head.audit`` on all (to rounding). Under ``torch.distributed`` every rank passes its own batches and gets the audit of all
    of them; to audit on one rank only, use ``gmc.distributed.local()``. Audits of parts are joined by
    :meth:`torchgmc.Audit.merge`.

    Args:
        head: fitted head or baseline.
        batches: an iterable of batches (a ``DataLoader``, a generator), or one batch. A batch is a tuple of the arguments of
            ``head.observe``, e.g. ``(scores, masks, groups)`` or ``(scores, masks, groups, weight)``, or a mapping from their
            names.
        delta: 1 - confidence: of the certificate, of all intervals together, and of all verdicts together.
        alpha: use this alpha instead of the head's.
        conditional: judge each group's own deviation (True) or the mass-weighted one (False); by default like the head.
        method: ``"exact"`` holds for every number of examples and every distribution; ``"asymptotic"`` holds for many examples
            and is narrower, above all for small probabilities as in text. Groups that it does not fit (fewer than 30 values
            other than 0, or 30 misses, or skewed) keep the exact intervals. The certificate names it.
        cluster_size: largest number of examples (or weight) of a cluster, known in advance; only with ``clusters`` in the
            batches, which say which examples belong together: a cluster counts as one independent draw.

    Example:
        >>> masks = torch.rand(200, 8, 8) < 0.5
        >>> scores = torch.sigmoid(2 * masks + torch.randn(200, 8, 8))
        >>> head = gmc.ThresholdHead(target=0.1, alpha=0.01).fit(scores, masks)
        >>> audit = gmc.audit(head, zip(scores.split(64), masks.split(64)), delta=0.1)
        >>> audit.num_examples, abs(audit.max_violation - head.audit(scores, masks).max_violation) < 1e-12
        (200, True)
    """
    if not all(hasattr(head, name) for name in ("bind_each", "values", "is_fitted")):
        raise TypeError(f"`head` must be a head or a baseline, got {type(head).__name__}.")
    tally: Tally | None = None
    options = f"{delta=}, {method=}, {cluster_size=}, {alpha=}, {conditional=}"
    with distributed.together(lambda: f"audit of {distributed.signature(head)}, {options}"):
        checks.fraction("delta", delta)
        checks.option("method", method, METHODS)
        if cluster_size is not None:
            checks.positive("cluster_size", cluster_size, "It is the largest number of examples of a cluster.")
        if lacks(head.fitted.device):
            head = head.twin().to("cpu")
        head.check_state(fitted=True)
        for batch in head.bind_each(batches):
            part = Tally.of(head, batch)
            tally = part if tally is None else tally + part
        tally = distributed.reduce(tally, "audit", head.fitted.device)
        if tally is None:
            raise ValueError("`batches` has no batch to audit.")
        found = conclude(head, tally, delta, method, cluster_size)
    own = found.conditional if conditional is None else conditional
    return found if alpha is None and conditional is None else found.view("conditional" if own else "mass-weighted", alpha)


def conclude(head: "Head", tally: Tally, delta: float, method: str, cluster_size: float | None) -> Audit:
    """The audit of all batches, with a warning if their examples were calibrated on."""
    summary = head.audit_summary(tally)
    warning = "" if head.calibrated_on is None else overlap.warning_text(head.calibrated_on, tally.sketch)
    size = cluster_size or largest_seen(head, tally.weight, tally.cluster)
    evidence, guessed = _evidence(head, tally, summary.get("columns", {}), size, apart=not warning)
    excluded = int(tally.s.isnan().any(1).sum())
    unsized = size is None and tally.cluster.shape[1] > 0
    notes = [summary.get("note", ""), UNKNOWN_RANGE if guessed else "", UNKNOWN_SIZE if unsized else ""]
    if warning:
        warnings.warn(warning, overlap.OverlapWarning, stacklevel=4)
    promise = (head.alpha, delta, head.conditional)
    cost, details, source = summary.get("cost", {}), summary.get("details", {}), (copy.copy(head), tally, cluster_size)
    note = " ".join(part for part in (*notes, warning) if part)
    found = (evidence.table(*promise, method), *promise, len(tally.s), excluded)
    return Audit(*found, cost, type(head).__name__, note, evidence, details, method, source)


def largest_seen(head: "Head", weight: Tensor, cluster: Tensor) -> float | None:
    """The largest cluster of the calibration data, as a bound that was known in advance; None if one here is larger."""
    known = float(head.largest_cluster)
    if not known or not cluster.shape[1]:
        return None
    return known if float(total(weight[:, None].double(), cluster).max()) <= known else None


def _evidence(
    head: "Head", tally: Tally, columns: dict[str, Tensor], cluster_size: float | None, apart: bool
) -> tuple[Evidence, bool]:
    """What the table is computed from, and whether the range of s had to be taken from the data."""
    tally, names, known, variance = _with_means(head, tally)
    if not apart or (tally.cluster.shape[1] and not float(head.largest_cluster)):
        variance = None  # not independent of these data, or of single examples
    defined = ~tally.s.isnan()
    if bool(tally.s.isinf().any()):
        raise ValueError("s is infinite for some examples, so there is no mean to audit; check the scores and the risk.")
    if known is None:  # only the data tell
        least, most = (float(v) for v in tally.s[defined].aminmax()) if bool(defined.any()) else (0.0, 0.0)
    low, high = (least, max(most, least + 1e-12)) if known is None else known
    options: dict[str, Any] = {"two_valued": head.two_valued, "levels": tally.column is not None, "relative": head.relative}
    tail = head.tail if variance is not None and len(head.tail) == tally.s.shape[1] else None
    options |= {"largest": cluster_size, "variance": variance, "tail": tail}
    rows = Rows.of(tally.s, tally.who, tally.weight, tally.cluster, (low, high), **options)
    rows.check_range()
    if cluster_size is not None and tally.cluster.shape[1]:
        found = float(total(rows.weight[:, None], rows.cluster).max())
        if found > cluster_size:
            raise ValueError(f"`cluster_size` must bound every cluster, got {cluster_size:g}, but one has {found:g} examples.")
    empty = rows.count.eq(0).any(1)
    if head.static and bool(empty.any()):
        raise ValueError(f"group {names.who[int(empty.nonzero()[0])]!r} has no examples to audit; drop it or add data.")
    target = rows.mean if head.relative else torch.as_tensor(head.s_target()).to(rows.s).expand(rows.s.shape[1])
    cells = None
    if tally.column is not None:
        inside = torch.zeros_like(rows.s).scatter_(1, tally.column, 1.0)
        member, some = tally.who if head.fractional else tally.who > 0, (tally.who > 0).double()
        weight = tally.weight[:, None] * defined
        cells = member.double().T @ (inside * weight) / rows.total, some.T @ (inside * (weight > 0))
    return Evidence(rows, tuple(names.who), tuple(names.what), target, cells, columns), known is None


def _with_means(head: "Head", tally: Tally) -> tuple[Tally, Names, Any, Tensor | None]:
    """With a column for all level sets of a group together, where the head does not promise one; names, range and variances.

    Level sets that are each a little off in the same direction make a group that is far off.
    """
    names, known, column = head.test_functions(), head.s_range(), tally.column
    shape = tally.who.shape[1], tally.s.shape[1]
    variance = head.variance.view(shape) if head.variance.numel() == shape[0] * shape[1] else None
    if column is None or tally.s.shape[1] == column.shape[1] or ALL_LEVELS in " ".join(names.what):
        return tally, names, known, variance
    classes = column.shape[1]  # the columns of s are level sets, and within them classes
    s = torch.cat([tally.s, tally.s.view(len(tally.s), -1, classes).sum(1)], 1)
    place = tally.s.shape[1] + torch.arange(classes, device=column.device)
    what = [*names.what, *(f"{ALL_LEVELS}, {name}" if name else ALL_LEVELS for name in head.class_names(classes))]
    if known is not None and isinstance(known[0], Tensor):
        low, high = (end.view(-1, classes) for end in known)
        known = torch.cat([known[0], low.amin(0)]), torch.cat([known[1], high.amax(0)])
    if variance is not None:
        variance = torch.cat([variance, variance.view(shape[0], -1, classes).sum(1)], 1)
    wider = dataclasses.replace(tally, s=s, column=torch.cat([column, place.expand(len(s), -1)], 1))
    return wider, Names(names.who, what), known, variance
