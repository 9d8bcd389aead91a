"""Audit: is the promise kept on held-out data, for every g at once, and with what certainty?"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchgmc.audits.intervals import Bounds, Moments
from torchgmc.audits.tabular import Tabular
from torchgmc.engine import checks
from torchgmc.engine.files import plain, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from torchgmc.heads.base import Head

__all__ = ["Audit", "Evidence"]

#: Rows of a printed audit; there may be one for every group, level set and class.
MAX_SHOWN = 40


@dataclass(frozen=True)
class Audit(Tabular):
    """A promise measured on held-out data.

    Attributes:
        table: columns ``group``, ``what``, ``mass``, ``count``, ``risk``, ``estimate``, ``low``, ``high``, ``verdict``;
            one row per g, worst first.
            ``estimate`` is the violation (mass-weighted, or the group's own deviation if ``conditional``) and
            [``low``, ``high``] its simultaneous interval.
        alpha, delta, conditional: the promise, and 1 - confidence.
        num_examples: examples audited; ``excluded``: of them, without a risk.
        cost: what the promise cost, e.g. accuracy before and after.
        name: the head audited.
        note: a warning to read with the figures.
        evidence: the moments behind the table, from which :meth:`view` and :meth:`examples_needed` follow.
        details: sums that belong to one head, for its figures (answers of a tree by node).
    """

    table: dict[str, list[Any]]
    alpha: float | None
    delta: float
    conditional: bool
    num_examples: int
    excluded: int = 0
    cost: dict[str, float] = field(default_factory=dict)
    name: str = ""
    note: str = ""
    evidence: "Evidence | None" = field(default=None, repr=False, compare=False)
    details: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def max_violation(self) -> float:
        """Largest |estimate| over all g."""
        return max((abs(v) for v in self.table["estimate"]), default=0.0)

    @property
    def holds(self) -> bool:
        """Every estimate lies within alpha on these data (see ``certified`` for the population)."""
        return self.max_violation <= self._asked() * (1 + 1e-9)

    @property
    def certified(self) -> bool:
        """Every interval lies within alpha: the promise holds on the population with confidence 1 - delta."""
        self._asked()
        return all(verdict == "holds" for verdict in self.table["verdict"])

    @property
    def violated(self) -> bool:
        """Some interval lies wholly beyond alpha."""
        return any(verdict == "violated" for verdict in self.table["verdict"])

    @property
    def certified_alpha(self) -> float:
        """The smallest alpha that these data certify."""
        return max((max(abs(a), abs(b)) for a, b in zip(self.table["low"], self.table["high"], strict=True)), default=0.0)

    @property
    def certificate(self) -> str:
        """One line to show."""
        many = len(self.table["group"])
        kind = "own deviation" if self.conditional else "mass-weighted deviation"
        promises = "promises" if any(self.table["what"]) else "groups"
        return (
            f"With confidence {100 * (1 - self.delta):g} %, the {kind} of every one of {many} {promises} is within "
            f"{self.certified_alpha:.4f} of the target{self._target()} on the population ({self._wish()}on these "
            f"{self.num_examples} examples {self.max_violation:.4f})."
        )

    def _asked(self) -> float:
        if self.alpha is None:
            raise ValueError("no alpha was asked for: see `certified_alpha`, or judge by one with `view(..., alpha=...)`.")
        return self.alpha

    def _paid(self) -> str:
        """Every cost, in one line."""
        return ", ".join(f"{k} {round(v, 4) + 0.0:.4f}" for k, v in self.cost.items())  # no -0.0000

    def _wish(self) -> str:
        return "" if self.alpha is None else f"asked {self.alpha:g}; "

    def _target(self) -> str:
        """The target to show, where it is one number that was asked for (not 0, nor everybody's mean)."""
        found = [] if self.evidence is None or self.evidence.relative else sorted({*self.evidence.target.tolist()})
        return f" {found[0]:g}" if len(found) == 1 and found[0] else ""

    def view(self, kind: str, alpha: float | None = None) -> "Audit":
        """The same data seen the other way: each group's own deviation, or weighted by the group's mass.

        Intervals of one view hold at once with probability 1 - delta; for both views together ask half the delta of each.

        Args:
            kind: ``"conditional"`` (own deviation) or ``"mass-weighted"``.
            alpha: judge by another alpha; the audit's own if omitted.

        Example:
            >>> probs, y = torch.rand(500), torch.rand(500).round()
            >>> head = gmc.ProbabilityHead(alpha=0.05, bins=2).fit(probs, y)
            >>> head.audit(probs, y).view("conditional").conditional
            True
        """
        conditional = checks.option("kind", kind, ("conditional", "mass-weighted")) == "conditional"
        alpha = self.alpha if alpha is None else checks.positive("alpha", alpha, "It is the largest violation allowed.")
        table = self._evidence().table(alpha, self.delta, conditional)
        return replace(self, table=table, alpha=alpha, conditional=conditional)

    def examples_needed(self, alpha: float | None = None) -> int | None:
        """How many held-out examples like these would certify a wished alpha; None if none do.

        The estimates, masses and variances of these data are taken as those of the population, and the same intervals are
        computed for more (or fewer) examples. No number of examples helps where an estimate itself is beyond alpha.

        Args:
            alpha: the wish; the audit's own alpha if omitted.

        Example:
            >>> probs, y = torch.full((400,), 0.5), torch.arange(400) % 2
            >>> audit = gmc.ProbabilityHead(alpha=0.05, bins=1).fit(probs, y).audit(probs, y)
            >>> audit.certified, audit.examples_needed(0.05) > 400
            (False, True)
        """
        alpha = self._asked() if alpha is None else checks.positive("alpha", alpha, "It is the largest violation allowed.")
        evidence = self._evidence()

        def enough(n: int) -> bool:
            _, low, high = evidence.intervals(self.conditional, self.delta, n / self.num_examples)
            return bool((torch.maximum(-low, high) <= alpha).all())

        high = 1
        while not enough(high):
            if high >= 1 << 50:  # an estimate at or beyond alpha, or a set without examples
                return None
            high *= 2
        low = high // 2  # not enough, or 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return high

    def _evidence(self) -> "Evidence":
        if self.evidence is None:
            raise ValueError("this audit was made from a table alone; make it with `gmc.audit` or a head's `audit`.")
        return self.evidence

    def to_dict(self) -> dict[str, Any]:
        """Everything shown, in JSON types; a figure that does not exist is None."""
        names = ["name", "alpha", "delta", "conditional", "num_examples", "excluded", "max_violation", "certified_alpha"]
        names += ["holds", "certified", "violated", "certificate", "note"]
        judged = {"holds", "certified"} if self.alpha is None else set()
        return plain({name: None if name in judged else getattr(self, name) for name in [*names, "cost", "table"]})

    def to_json(self, path: str | Path) -> Path:
        """Write :meth:`to_dict` to a file, whole or not at all; returns its path.

        Example:
            >>> head.audit(scores, masks).to_json("audit.json")  # doctest: +SKIP
        """
        return write_json(path, self.to_dict())

    def to_html(self, path: str | Path, title: str = "", head: "Head | None" = None, **options: Any) -> Path:
        """Write the full report; returns its path.

        Args:
            path: of the file.
            title: of the page.
            head: the head that was audited: adds what was fitted, its figures and its settings.
            options: of :func:`torchgmc.report.write`.

        Example:
            >>> head.audit(scores, masks).to_html("audit.html", head=head)  # doctest: +SKIP
        """
        from torchgmc import report

        return report.write(path, self, head, title=title, **options)

    def plot(self, **options: Any) -> "Figure":
        """Deviation of each group with its interval and the alpha band (extra ``report``).

        Options of :func:`torchgmc.plots.deviation`. What a head was fitted to is in ``plots.thresholds``, ``.tree`` and
        ``.words``.
        """
        from torchgmc import plots

        return plots.deviation(self, **options)

    def __repr__(self) -> str:
        verdicts = self.table["verdict"]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in ("violated", "undecided", "holds") if v in verdicts)
        worst = f"worst {self.max_violation:.4g}" + ("" if self.alpha is None else f", alpha {self.alpha:g}")
        return f"Audit({self.name}: {len(verdicts)} g, {worst}: {counts}; n = {self.num_examples})"

    def __str__(self) -> str:
        rows = self.rows()
        shown = rows[:MAX_SHOWN]  # the largest estimates come first
        names = [r["group"] + (" / " + r["what"] if r["what"] else "") for r in shown]
        width = min(max([28, *map(len, names)]), 60)
        head = f"{'group':{width}s} {'mass':>7s} {'risk':>8s} {'estimate':>9s}  {'interval':^19s}  verdict"
        lines = [
            f"{name[:width]:{width}s} {r['mass']:7.4f} {r['risk']:8.4f} {r['estimate']:+9.4f}  "
            f"[{r['low']:+8.4f},{r['high']:+8.4f}]  {r['verdict']}"
            for name, r in zip(names, shown, strict=True)
        ]
        if len(rows) > len(shown):
            lines.append(f"... and {len(rows) - len(shown)} more with smaller estimates: all are in `audit.table`.")
        return "\n".join([head, *lines, self.certificate, self._paid(), *([self.note] if self.note else [])])

    def _repr_html_(self) -> str:
        """Table for notebooks."""
        from html import escape

        keep = ["group", "what", "mass", "risk", "estimate", "low", "high", "verdict"]
        if not any(self.table["what"]):
            keep.remove("what")
        cells = "".join(
            "<tr>"
            + "".join(f"<td>{escape(v if isinstance(v, str) else f'{v:.4f}')}</td>" for v in map(row.get, keep))
            + "</tr>"
            for row in self.rows()
        )
        heads = "".join(f"<th>{k}</th>" for k in keep)
        note = f"<p><strong>{escape(self.note)}</strong></p>" if self.note else ""
        return f"<p>{escape(self.certificate)}</p><table><tr>{heads}</tr>{cells}</table><p>{escape(self._paid())}</p>{note}"


@dataclass(frozen=True)
class Evidence:
    """What an audit was computed from; small, whatever the number of examples.

    Attributes:
        moments: of s = risk - target; with ``relative``, a last row for everybody.
        groups, what: names of the rows and columns of G.
        target: target of each column, shape ``(u,)``.
        bounds: range of s: two numbers, or two tensors ``(u,)``.
        relative: the target is everybody's mean, itself estimated: its interval becomes part of each.
        cells: mass and count ``(a, u)`` to show mass-weighted, where a column is a part of the group (a level set).
        columns: further columns of the table, one number per group, ``(a,)``.
    """

    moments: Moments
    groups: tuple[str, ...]
    what: tuple[str, ...]
    target: Tensor
    bounds: Bounds
    relative: bool = False
    cells: tuple[Tensor, Tensor] | None = None
    columns: dict[str, Tensor] = field(default_factory=dict)

    def intervals(self, conditional: bool, delta: float, factor: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """Estimates, low and high ends ``(a, u)``, as they would be with ``factor`` times the examples.

        A set without examples has violation 0 in an interval as wide as the range of s: undecided.
        """
        moments = self.moments.times(factor)
        low, high = moments.intervals(conditional, self.bounds, delta)
        if self.relative:  # E[s - E s | A] lies between the ends of A minus those of everybody, the last row
            moments = moments.rows(len(self.groups))
            part = 1.0 if conditional else moments.mass / moments.total
            low, high = low[:-1] - part * high[-1], high[:-1] - part * low[-1]
        estimate = moments.estimates(conditional)
        empty = (moments.mass <= 0) & estimate.isnan()
        reach = torch.maximum(*(torch.as_tensor(b).abs().to(estimate) for b in self.bounds)).expand_as(estimate)
        low, high = torch.where(empty, -reach, low), torch.where(empty, reach, high)
        return estimate.masked_fill(empty, 0.0), low, high

    def table(self, alpha: float | None, delta: float, conditional: bool) -> dict[str, list[Any]]:
        """Columns of an audit's table, worst g first."""
        estimate, low, high = (t.flatten() for t in self.intervals(conditional, delta))
        moments = self.moments.rows(len(self.groups))
        if self.cells is not None and not conditional:  # what each cell itself holds; the estimates do not use it
            moments = replace(moments, mass=self.cells[0], count=self.cells[1])
        order = estimate.abs().nan_to_num(-1.0).argsort(descending=True, stable=True)
        places = [divmod(index, len(self.what)) for index in order.tolist()]
        columns = {
            "mass": (moments.mass / moments.total).flatten(),
            "count": moments.count.flatten(),
            "risk": (moments.estimates(True) + self.target).flatten(),
            "estimate": estimate,
            "low": low,
            "high": high,
        }
        table: dict[str, list[Any]] = {
            "group": [self.groups[row] for row, _ in places],
            "what": [self.what[column] for _, column in places],
        }
        table |= {key: value[order].tolist() for key, value in columns.items()}
        table["count"] = [int(c) for c in table["count"]]
        table["verdict"] = [_verdict(a, b, alpha) for a, b in zip(table["low"], table["high"], strict=True)]
        for key, values in self.columns.items():
            listed = values.tolist()
            table[key] = [listed[row] for row, _ in places]
        return table


def _verdict(low: float, high: float, alpha: float | None) -> str:
    if alpha is None:
        return "undecided"
    if -alpha <= low and high <= alpha:
        return "holds"
    return "violated" if low > alpha or high < -alpha else "undecided"
