"""Audit: is the promise kept on held-out data, for every g at once, and with what certainty?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchgmc import checks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class Moments:
    """Sums over examples from which estimates and intervals of all g follow; batches add up.

    All of shape ``(a, u)`` but the totals, ``(u,)``.
    """

    first: Tensor  # sum of w 1_A s
    second: Tensor  # sum of w^2 1_A s^2
    mass: Tensor  # sum of w 1_A
    square: Tensor  # sum of w^2 1_A
    count: Tensor  # members of A
    total: Tensor  # sum of w
    total_square: Tensor  # sum of w^2
    total_count: Tensor  # examples that count
    largest: Tensor  # largest w

    @classmethod
    def of(cls, who: Tensor, s: Tensor, weight: Tensor) -> "Moments":
        """Moments of one batch.

        Args:
            who: membership, ``(n, a)``.
            s: values of the mapping, ``(n, u)``; ignored where the weight is 0.
            weight: ``(n, u)``.
        """
        w, member = weight.double(), who.double().T
        value = torch.where(w > 0, s.double(), torch.zeros((), dtype=torch.float64, device=s.device))
        return cls(
            member @ (w * value),
            member @ (w * value).square(),
            member @ w,
            member @ w.square(),
            member @ (w > 0).double(),
            w.sum(0),
            w.square().sum(0),
            (w > 0).double().sum(0),
            w.amax(0) if len(w) else w.new_zeros(w.shape[1]),
        )

    def __add__(self, other: "Moments") -> "Moments":
        """Moments of both sets of examples."""
        parts = {name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__}
        parts["largest"] = torch.maximum(self.largest, other.largest)
        return Moments(**parts)

    def estimates(self, conditional: bool) -> Tensor:
        """Violation of each g, mass-weighted or conditional on the group."""
        return self.first / (self.mass if conditional else self.total.expand_as(self.mass))

    def half_widths(self, conditional: bool, width: float, delta: float) -> Tensor:
        r"""Half-widths of intervals that all hold at once with probability 1 - delta.

        A union bound over every g and over two bounds, of which the tighter counts, leaves each
        :math:`\delta' = \delta / (2 |G|)`:

        - Hoeffding: :math:`R \sqrt{\sum w^2 \ln(2/\delta') / 2} / \sum w`;
        - empirical Bernstein (Maurer and Pontil): :math:`\sqrt{2 \hat V \ln(4/\delta')/n} + 7 R \ln(4/\delta') / (3(n-1))`,

        where R is the width of the range of s. Mass-weighted, the sample is all n examples with 1_A s; conditional, it is the
        members of A. Weights are taken as given.
        """
        share = delta / (2 * self.first.numel())
        if conditional:
            n, total, square = self.count, self.mass, self.square
        else:
            n, total, square = (t.expand_as(self.mass) for t in (self.total_count, self.total, self.total_square))
        hoeffding = width * (square * math.log(2 / share) / 2).sqrt() / total
        scale = n / total  # weights with mean 1
        variance = ((scale.square() * self.second - n * (self.first / total).square()) / (n - 1)).clamp_min(0.0)
        log = math.log(4 / share)
        bernstein = (2 * variance * log / n).sqrt() + 7 * width * scale * self.largest * log / (3 * (n - 1))
        return torch.fmin(hoeffding, torch.where(n > 1, bernstein, hoeffding))


@dataclass(frozen=True)
class Audit:
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
    """

    table: dict[str, list[Any]]
    alpha: float
    delta: float
    conditional: bool
    num_examples: int
    excluded: int = 0
    cost: dict[str, float] = field(default_factory=dict)
    name: str = ""
    note: str = ""

    @property
    def max_violation(self) -> float:
        """Largest |estimate| over all g."""
        return max((abs(v) for v in self.table["estimate"]), default=0.0)

    @property
    def holds(self) -> bool:
        """Every estimate lies within alpha on these data (see ``certified`` for the population)."""
        return self.max_violation <= self.alpha * (1 + 1e-9)

    @property
    def certified(self) -> bool:
        """Every interval lies within alpha: the promise holds on the population with confidence 1 - delta."""
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
        return (
            f"With confidence {100 * (1 - self.delta):g} %, the {kind} of every one of {many} groups is within "
            f"{self.certified_alpha:.4f} of the target on the population (asked {self.alpha:g}; on these "
            f"{self.num_examples} examples {self.max_violation:.4f})."
        )

    def plot(self, **options: Any) -> "Figure":
        """Deviation of each group with its interval and the alpha band (extra ``report``)."""
        from torchgmc import plots

        return plots.deviation({self.name or "head": self}, self.alpha, **options)

    def rows(self) -> list[dict[str, Any]]:
        """The table as one dict per g."""
        return [dict(zip(self.table, row, strict=True)) for row in zip(*self.table.values(), strict=True)]

    def __str__(self) -> str:
        head = f"{'group':28s} {'mass':>7s} {'estimate':>9s}  {'interval':^19s}  verdict"
        lines = [
            f"{(r['group'] + (' / ' + r['what'] if r['what'] else ''))[:28]:28s} {r['mass']:7.4f} {r['estimate']:+9.4f}  "
            f"[{r['low']:+8.4f},{r['high']:+8.4f}]  {r['verdict']}"
            for r in self.rows()
        ]
        cost = ", ".join(f"{k} {v:.4f}" for k, v in self.cost.items())
        return "\n".join([head, *lines, self.certificate, cost, *([self.note] if self.note else [])])

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
        cost = ", ".join(f"{k} {v:.4f}" for k, v in self.cost.items())
        note = f"<p><strong>{escape(self.note)}</strong></p>" if self.note else ""
        return f"<p>{escape(self.certificate)}</p><table><tr>{heads}</tr>{cells}</table><p>{escape(cost)}</p>{note}"


def summarize(
    moments: Moments,
    alpha: float,
    delta: float,
    conditional: bool,
    groups: Sequence[str],
    what: Sequence[str],
    target: Tensor,
    bounds: tuple[float, float],
    num_examples: int,
    excluded: int = 0,
    sign: float = 1.0,
    cost: dict[str, float] | None = None,
    name: str = "",
    half: Tensor | None = None,
    note: str = "",
) -> Audit:
    """Estimates, simultaneous intervals and verdicts for every g from the moments.

    Args:
        moments: of s = risk - target.
        alpha, delta, conditional: the promise.
        groups, what: names of the rows and columns of G.
        target: target of each column, shape ``(u,)``; ``risk`` is shown as target + deviation.
        bounds: range of s.
        num_examples, excluded, cost, name, note: copied to the audit.
        sign: sign that turns s into risk - target.
        half: half-widths ``(a, u)`` of the intervals, if others than those of the moments.

    A set without examples has violation 0 in an interval as wide as the range of s: undecided.
    """
    checks.fraction("delta", delta)
    half = (moments.half_widths(conditional, bounds[1] - bounds[0], delta) if half is None else half).flatten()
    estimate = sign * moments.estimates(conditional).flatten()
    empty = (moments.mass <= 0).flatten() & estimate.isnan()
    estimate = estimate.masked_fill(empty, 0.0)
    half = half.masked_fill(empty, max(abs(bounds[0]), abs(bounds[1])))
    own = sign * moments.estimates(True) + target
    order = estimate.abs().nan_to_num(-1.0).argsort(descending=True, stable=True)
    mass = (moments.mass / moments.total).flatten()
    table: dict[str, list[Any]] = {"group": [], "what": []}
    for index in order.tolist():
        row, column = divmod(index, len(what))
        table["group"].append(groups[row])
        table["what"].append(what[column])
    columns = {
        "mass": mass,
        "count": moments.count.flatten(),
        "risk": own.flatten(),
        "estimate": estimate,
        "low": estimate - half,
        "high": estimate + half,
    }
    table |= {key: value[order].tolist() for key, value in columns.items()}
    table["count"] = [int(c) for c in table["count"]]
    table["verdict"] = [_verdict(a, b, alpha) for a, b in zip(table["low"], table["high"], strict=True)]
    return Audit(table, alpha, delta, conditional, num_examples, excluded, cost or {}, name, note)


def _verdict(low: float, high: float, alpha: float) -> str:
    if -alpha <= low and high <= alpha:
        return "holds"
    return "violated" if low > alpha or high < -alpha else "undecided"
