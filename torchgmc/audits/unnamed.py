"""Groups that a head does not know, named in the audit only: how much of their deviation its features explain, what remains."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchgmc.audits import overlap
from torchgmc.audits.audit import ranked
from torchgmc.audits.intervals import Rows
from torchgmc.audits.measure import content, largest_seen
from torchgmc.audits.tabular import Tabular, row_name
from torchgmc.engine import checks
from torchgmc.engine.clusters import check as check_clusters
from torchgmc.groups.groups import Groups, check_groups

if TYPE_CHECKING:
    from torchgmc.heads.base import Head


@dataclass(frozen=True)
class Remaining(Tabular):
    """What is left of the deviation of groups that the head does not know.

    Attributes:
        table: ``group``, ``what``, ``count``, ``mass``; the mean of s ``before`` and ``after``, each with ``low`` and ``high``;
            and ``explained``, the share 1 - after / before, with its interval (NaN where ``before`` may be 0, as the interval
            says). Largest ``after`` first.
        delta: 1 - confidence of all intervals together.
        num_examples: rows.
        note: a reservation, if there is one.
    """

    table: dict[str, list[Any]]
    delta: float
    num_examples: int
    note: str = ""

    def __str__(self) -> str:
        wide = max([5, *(len(row_name(r["group"], r["what"])) for r in self.rows())])
        lines = [f"{'group':{wide}s} {'mass':>6s}  {'before':^26s}  {'after':^26s}  explained"]
        for r in self.rows():
            share = f"{100 * r['explained low']:.0f} to {100 * r['explained high']:.0f} %".replace("nan to nan %", "-")
            pairs = [f"{r[k]:+.4f} [{r[f'{k} low']:+.4f},{r[f'{k} high']:+.4f}]" for k in ("before", "after")]
            lines.append(f"{row_name(r['group'], r['what']):{wide}s} {r['mass']:6.3f}  {pairs[0]}  {pairs[1]}  {share}")
        confidence = f"{self.num_examples} examples; all intervals hold with confidence {100 * (1 - self.delta):g} %."
        return "\n".join([*lines, f"{confidence} {self.note}".rstrip()])


def audit_named(
    head: "Head",
    data: Any,
    groups: Any,
    names: Sequence[str] | None = None,
    *,
    before: "Head | None" = None,
    delta: float = 0.05,
    conditional: bool = True,
) -> Remaining:
    """Audit a head on groups that it was not told of: what its features explain of their deviation, and what remains.

    For those who may not use group labels at inference: fit with ``learn`` and ``features`` only, and name the groups here, on
    held-out data that have labels.

    Args:
        head: fitted.
        data: held-out batch, a tuple or a mapping of the arguments of ``head.observe``.
        groups: :class:`~torchgmc.Groups`, or a membership ``(n, a)``, 0/1 or fractional, of the groups to look at.
        names: of the groups, if ``groups`` does not say them.
        before: what to compare with: a head or baseline fitted without features. By default the model's own output; a
            :class:`~torchgmc.QuantileHead` has none and needs e.g. :class:`~torchgmc.baselines.SplitConformal`.
        delta: 1 - confidence of all intervals together.
        conditional: each group's own deviation (True), or the mass-weighted one.

    Example:
        >>> x = torch.randn(4000, 1)
        >>> women = (x + 0.5 * torch.randn(4000, 1) > 0)  # not to be used; the feature is related to it
        >>> probs, y = torch.full((4000,), 0.4), torch.rand(4000) < 0.3 + 0.3 * women[:, 0]
        >>> head = gmc.ProbabilityHead(alpha=None, learn=gmc.Trees(depth=1)).fit(probs[:2000], y[:2000], features=x[:2000])
        >>> data = {"probs": probs[2000:], "y": y[2000:], "features": x[2000:]}
        >>> found = gmc.audit_named(head, data, women[2000:], ["women"])
        >>> row = found.rows()[0]
        >>> row["before"] < -0.1 < row["after"] and 0.2 < row["explained"] < 1
        True
    """
    checks.fraction("delta", delta)
    head.check_state(fitted=True)
    first_head = _start(head, before)
    batch = head.bind_batch(data)
    after_s, n = _mean_s(head, batch), len(checks.numbers(head.arguments[0], batch[head.arguments[0]]))
    weight = checks.weights(batch.get("weight"), n, after_s)
    cluster = check_clusters(batch.get("clusters"), n, after_s.device)
    member = check_groups(groups, n, None, fractional=True).to(after_s.device)
    named = groups.names if isinstance(groups, Groups) else names or [str(k) for k in range(member.shape[1])]
    listed = checks.names(named, "names")
    if len(listed) != member.shape[1]:
        raise ValueError(f"`names` must name the {member.shape[1]} columns of `groups`, got {len(listed)}.")
    what = head.class_names() if len(head.class_names()) == after_s.shape[1] else head.test_functions().what
    bounds = _bounds(head, len(what), after_s.device)
    options = {"two_valued": head.two_valued, "largest": largest_seen(head, weight, cluster)}
    first, last = (Rows.of(s, member, weight, cluster, bounds, **options) for s in (_mean_s(first_head, batch), after_s))
    if bool((empty := last.count.eq(0).any(1)).any()):
        raise ValueError(f"group {listed[int(empty.nonzero()[0])]!r} has no examples to audit; drop it.")
    known = head.calibrated_on
    if note := "" if known is None else overlap.warning_text(known, overlap.Sketch.of(*content(head, batch))):
        warnings.warn(note, overlap.OverlapWarning, stacklevel=2)
    return Remaining(_explained(first, last, delta, conditional, listed, what), delta, n, note)


def _start(head: "Head", before: "Head | None") -> "Head":
    """What to compare a head with: the one given, or the same head as it was before it was fitted."""
    if before is None:
        if head.takes == "groups":
            raise ValueError("`before` is missing: scores have no threshold of their own; pass e.g. a fitted SplitConformal.")
        before = head.twin()
        before.reset()
        return before
    before.check_state(fitted=True)
    if (before.arguments[0], before.truth, before.columns) != (head.arguments[0], head.truth, head.columns):
        raise ValueError(f"`before` must take the same data as `head`, {type(head).__name__}, got {type(before).__name__}.")
    return before


def _bounds(head: "Head", columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The range of s in each column, over all level sets."""
    low, high = (torch.as_tensor(end, device=device).double().reshape(-1, 1) for end in head.s_range() or (math.nan, math.nan))
    bounds = (low.view(-1, columns).amin(0), high.view(-1, columns).amax(0)) if len(low) > 1 else (low[0], high[0])
    if head.relative or bool(bounds[0].isnan().any()):
        raise TypeError(f"this {type(head).__name__} compares with everybody's mean, or does not know the range of its s.")
    return bounds


def _explained(
    before: Rows, after: Rows, delta: float, conditional: bool, names: Sequence[str], what: Sequence[str]
) -> dict[str, list[Any]]:
    """The table of :class:`Remaining`: each side has half of delta, and a share of a ratio of ends has both."""
    first, last = (rows.judge(None, delta / 2, conditional) for rows in (before, after))
    ends = torch.stack([1.0 - a / b for a in (last.low, last.high) for b in (first.low, first.high)])
    unsure = (first.low <= 0) & (first.high >= 0)
    share = [part.masked_fill(unsure, math.nan) for part in (1.0 - last.estimate / first.estimate, ends.amin(0), ends.amax(0))]
    keys = [f"{key}{end}" for key in ("before", "after", "explained") for end in ("", " low", " high")]
    judged = [figure for j in (first, last) for figure in (j.estimate, j.low, j.high)]
    figures = [after.count.long(), after.mass / after.total, *judged, *share]
    return ranked(last.estimate, names, what, dict(zip(("count", "mass", *keys), figures, strict=True)))


def _mean_s(head: "Head", batch: Mapping[str, Any]) -> Tensor:
    """s of a head, ``(n, u)``, of all level sets together."""
    unused = {"weight", "clusters", *head.audit_only, *(() if head.grouped else ("groups",))}
    unused |= set() if getattr(head, "learns", False) else {"features"}
    with torch.no_grad():
        values = head.values(**{name: value for name, value in batch.items() if name not in unused})
    if values.column is None:
        return values.s
    means = values.column.shape[1] > head.columns  # the last columns are those of all levels
    return values.s[:, -head.columns :] if means else values.s.view(len(values.s), -1, head.columns).sum(1)
