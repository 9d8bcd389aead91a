"""Audit: is the promise kept on held-out data, for every g at once, and with what certainty?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torchgmc.audits.intervals import Rows
from torchgmc.audits.measures import Estimate, Measures, difference, measure, ratio
from torchgmc.audits.tabular import Table, Tabular, row_name
from torchgmc.engine import checks
from torchgmc.engine.files import plain, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from torchgmc.heads.base import Head

#: Rows of a printed audit; there may be one for every group, level set and class.
MAX_SHOWN = 40


class Needed(int):
    """A number of examples, and how certain it is.

    ``chance``: probability that this many examples certify alpha, if the population is like these data. ``low``, ``high``: the
    number for a population that deviates 1.28 standard errors less, and more: four times out of five the truth is in between.
    None: no number would be enough.
    """

    chance: float
    low: int
    high: int | None

    def __new__(cls, number: int, chance: float, low: int, high: int | None) -> "Needed":
        made = super().__new__(cls, number)
        made.chance, made.low, made.high = chance, low, high
        return made

    def __str__(self) -> str:
        number, low = (f"{_rounded(n):,}" for n in (int(self), self.low))
        high = "any number" if self.high is None else f"{_rounded(self.high):,}"
        return f"about {number} (for a chance of {100 * self.chance:g} %; uncertain: from {low} to {high})"


def _rounded(number: int) -> int:
    """Two digits are enough for an extrapolation."""
    return int(float(f"{number:.1e}"))


@dataclass(frozen=True)
class Audit(Tabular):
    """A promise measured on held-out data.

    A row of the audit is one test function g: a group, together with a class, a word list or a level set if there are any.

    Three claims, each with confidence 1 - delta: the certificate (the worst g is within ``certified_alpha``), the intervals
    (all hold at once), and the verdicts (all are right at once).

    Attributes:
        table: columns ``group``, ``what``, ``mass``, ``count``, ``risk``, ``estimate``, ``low``, ``high``, ``bound``,
            ``verdict``; one row per g, worst first.
            ``estimate`` is the violation (mass-weighted, or the group's own deviation if ``conditional``),
            [``low``, ``high``] its simultaneous interval, and ``bound`` the largest it can be, for this g by itself.
        alpha, delta, conditional: the promise, and 1 - confidence.
        num_examples: examples audited; ``excluded``: of them, without a risk.
        cost: what the promise cost, e.g. accuracy before and after.
        name: the head audited.
        note: a warning to read with the figures.
        evidence: the rows behind the table, from which :meth:`view` and :meth:`examples_needed` follow.
        details: sums that belong to one head, for its figures (answers of a tree by node).
        method: ``"exact"`` (holds for every number of examples) or ``"asymptotic"`` (for many).
        source: the head and what was kept of its examples, for :meth:`merge`.
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
    method: str = "exact"
    source: Any = field(default=None, repr=False, compare=False)

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
        """Every g is within alpha on the population, with confidence 1 - delta.

        For every g both "at least alpha" and "at most -alpha" are rejected at level delta. No correction for the number of g is
        needed: if some g is beyond alpha, this g by itself is rejected with probability at most delta.
        """
        return self.certified_alpha <= self._asked()

    @property
    def violated(self) -> bool:
        """Some g is beyond alpha on the population; with confidence 1 - delta no such label is wrong."""
        return any(verdict == "violated" for verdict in self.table["verdict"])

    @property
    def certified_alpha(self) -> float:
        """The smallest alpha that these data certify."""
        return max(self.table["bound"], default=0.0)

    @property
    def certificate(self) -> str:
        """The result in one line."""
        many = len(self.table["group"])
        kind = "own deviation" if self.conditional else "mass-weighted deviation"
        promises = "promises" if any(self.table["what"]) else "groups"
        how = "" if self.method == "exact" else " (asymptotic method, for many examples)"
        wish = "" if self.alpha is None else f"alpha {self.alpha:g}; "
        found = [] if self.evidence is None or self.evidence.rows.relative else sorted({*self.evidence.target.tolist()})
        target = f" {found[0]:g}" if len(found) == 1 and found[0] else ""  # a single number, not 0, nor everybody's mean
        return (
            f"With {100 * (1 - self.delta):g} % confidence{how}, the {kind} of each of {many} {promises} is within "
            f"{self.certified_alpha:.4f} of the target{target} in the population ({wish}"
            f"{self.max_violation:.4f} on these {self.num_examples} examples)."
        )

    @property
    def answer(self) -> str:
        """The result in a sentence for those who do not read tables."""
        many = len(dict.fromkeys(self.table["group"]))
        groups = f"all {many} groups" if many > 1 else "the group"
        if self.alpha is None:
            return f"Nothing was promised; {groups} stay within {self.certified_alpha:.4f} of the target."
        if self.violated:
            off = list(dict.fromkeys(row["group"] for row in self.rows() if row["verdict"] == "violated"))
            worst = next(row for row in self.rows() if row["verdict"] == "violated")
            which = f" ({worst['what']})" if worst["what"] else ""
            return (
                f"The promise is broken for {len(off)} of {many} groups, most of all for {off[0]!r}{which}: off by "
                f"{abs(worst['estimate']):.3g}, where {self.alpha:g} is allowed."
            )
        if self.certified:
            return f"The promise is kept for {groups}: none is off by more than {self.alpha:g}."
        return f"Undecided: these data are too few to tell whether the promise is kept for {groups}."

    @property
    def explanation(self) -> str:
        """What the intervals and verdicts claim in addition to the certificate."""
        return (
            f"The intervals are a separate claim: with {100 * (1 - self.delta):g} % confidence they hold for all rows at once, "
            "so they are wider than the certificate needs. The verdicts, which are tests at alpha, are all right at once "
            "with the same confidence."
        )

    def _asked(self) -> float:
        if self.alpha is None:
            raise ValueError("this audit has no alpha: see `certified_alpha`, or set one with `view(..., alpha=...)`.")
        return self.alpha

    def _paid(self) -> str:
        """Every cost, in one line."""
        return ", ".join(f"{k} {round(v, 4) + 0.0:.4f}" for k, v in self.cost.items())  # no -0.0000

    def view(self, kind: str, alpha: float | None = None) -> "Audit":
        """The same data seen the other way: each group's own deviation, or weighted by the group's mass.

        Intervals of one view hold at once with probability 1 - delta; for both views together use half the delta for each.

        Args:
            kind: ``"conditional"`` (own deviation) or ``"mass-weighted"``.
            alpha: use another alpha; the audit's own if omitted.

        Example:
            >>> probs, y = torch.rand(500), torch.rand(500).round()
            >>> head = gmc.ProbabilityHead(alpha=0.05, bins=2).fit(probs, y)
            >>> head.audit(probs, y).view("conditional").conditional
            True
        """
        conditional = checks.option("kind", kind, ("conditional", "mass-weighted")) == "conditional"
        alpha = self.alpha if alpha is None else checks.positive("alpha", alpha, "It is the largest violation allowed.")
        table = self._evidence().table(alpha, self.delta, conditional, self.method)
        return replace(self, table=table, alpha=alpha, conditional=conditional)

    def difference(self) -> Estimate:
        """Largest minus smallest risk over the groups, with its interval, as in fairlearn's MetricFrame.

        Of several columns (classes, level sets), the one where it is largest.
        """
        return max((difference(risks) for risks in self._risks()), default=Estimate(0.0, 0.0, 0.0))

    def ratio(self) -> Estimate:
        """Smallest over largest risk over the groups, with its interval; of several columns, the one where it is smallest."""
        return min((ratio(risks) for risks in self._risks()), default=Estimate(1.0, 1.0, 1.0))

    def measures(self) -> Measures:
        """Measures that people know, by group and with intervals: what there is depends on the head.

        Probabilities: ECE, smooth ECE, ECCE (also in sigmas, as a p-value, and the smallest detectable) and, of the decision
        p >= 1/2, FNR, recall, FPR and precision. Masks: these four, averaged over images. Quantiles: coverage and width. Trees:
        coverage and set size. See :class:`torchgmc.audits.measures.Measures`.

        Example:
            >>> p, groups = torch.rand(4000), torch.rand(4000, 2) < 0.5
            >>> head = gmc.ProbabilityHead(alpha=0.05, groups=["a", "b"], bins=None)
            >>> head = head.fit(p[:2000], torch.rand(2000) < p[:2000], groups[:2000])
            >>> found = head.audit(p[2000:], torch.rand(2000) < p[2000:], groups[2000:]).measures()
            >>> found["ECCE"]["a"] < 0.1, found.difference()["recall"].high < 0.5
            (True, True)
        """
        if self.source is None:
            raise ValueError("an audit made from a table has no measures; make it with `gmc.audit`.")
        return measure(self)

    def _risks(self) -> list[list[Estimate]]:
        """Risks of the groups that have examples, with their intervals, by column."""
        found: dict[str, list[Estimate]] = {}
        for row in self.rows() if self.conditional or self.evidence is None else self.view("conditional").rows():
            if row["risk"] == row["risk"]:  # not NaN
                target = row["risk"] - row["estimate"]
                found.setdefault(row["what"], []).append(Estimate(row["risk"], target + row["low"], target + row["high"]))
        return list(found.values())

    def merge(self, *others: "Audit") -> "Audit":
        """The audit of all examples together, as if they had been audited at once: parts of the data, hospitals, weeks.

        Args:
            others: audits of the same head, with the same delta and method.

        Example:
            >>> probs, y = torch.rand(500), torch.rand(500).round()
            >>> head = gmc.ProbabilityHead(alpha=0.05, bins=2).fit(probs, y)
            >>> probs, y = torch.rand(400), torch.rand(400).round()
            >>> parts = [head.audit(p, t) for p, t in zip(probs.split(100), y.split(100))]
            >>> parts[0].merge(*parts[1:]).table == head.audit(probs, y).table
            True
        """
        from torchgmc.audits import measure

        for other in (self, *others):
            checks.kind("others", other, Audit, "audits")
            if other.source is None:
                raise ValueError("an audit made from a table cannot be merged; make it with `gmc.audit`.")
        head, tally, size = self.source
        for other in others:
            theirs, more, their_size = other.source
            if (other.delta, other.method, their_size) != (self.delta, self.method, size):
                raise ValueError("`others` must be audits with the same delta, method and cluster_size.")
            if not head.same_state(theirs):
                raise ValueError("`others` must be audits of the same fitted head, but one is not.")
            tally = tally + more
        found = measure.conclude(head, tally, self.delta, self.method, size)
        if (found.alpha, found.conditional) == (self.alpha, self.conditional):
            return found
        return found.view("conditional" if self.conditional else "mass-weighted", self.alpha)

    def examples_needed(self, alpha: float | None = None, chance: float = 0.8) -> Needed | None:
        """How many held-out examples like these would certify alpha; None if no number would.

        The estimates, masses and variances of these data are taken as those of the population. They are uncertain, so the
        answer, a whole number, also has a range.

        Args:
            alpha: the alpha to certify; the audit's own if omitted.
            chance: probability that such a sample certifies it.

        Example:
            >>> probs, y = torch.full((400,), 0.5), torch.arange(400) % 2
            >>> audit = gmc.ProbabilityHead(alpha=0.05, bins=1).fit(probs, y).audit(probs, y)
            >>> need = audit.examples_needed(0.03)
            >>> audit.certified_alpha > 0.03, need > 400, need.chance
            (True, True, 0.8)
        """
        alpha = self._asked() if alpha is None else checks.positive("alpha", alpha, "It is the largest violation allowed.")
        checks.fraction("chance", chance)
        rows = self._evidence().rows
        middle, low, high = (
            rows.needed(alpha, self.delta, self.conditional, chance, self.method, shift) for shift in (0.0, -1.28, 1.28)
        )
        if middle is None:
            return None
        return Needed(middle, chance, min(middle, low or middle), None if high is None else max(middle, high))

    def _evidence(self) -> "Evidence":
        if self.evidence is None:
            raise ValueError("this audit was made only from a table; make it with `gmc.audit` or a head's `audit`.")
        return self.evidence

    def to_dict(self) -> dict[str, Any]:
        """Everything shown, in JSON types; a figure that does not exist is None."""
        names = ["name", "alpha", "delta", "conditional", "num_examples", "excluded", "max_violation", "certified_alpha"]
        names += ["violated", "certificate", "note", "method"]
        asked = {name: None if self.alpha is None else getattr(self, name) for name in ("holds", "certified")}
        return plain({name: getattr(self, name) for name in [*names, "cost", "table"]} | asked)

    def to_json(self, path: str | Path) -> Path:
        """Write :meth:`to_dict` to a file, completely or not at all; returns its path.

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

        Options of :func:`torchgmc.plots.deviation`. For what was fitted, see ``plots.thresholds``, ``.tree`` and ``.words``.
        """
        from torchgmc import plots

        return plots.deviation(self, **options)

    def __repr__(self) -> str:
        verdicts = self.table["verdict"]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in ("violated", "undecided", "holds") if v in verdicts)
        worst = f"worst {self.max_violation:.4g}" + ("" if self.alpha is None else f", alpha {self.alpha:g}")
        return f"Audit({self.name}: {len(verdicts)} rows, {worst}: {counts}; n = {self.num_examples})"

    def __str__(self) -> str:
        rows = self.rows()
        shown = rows[:MAX_SHOWN]  # the largest estimates come first
        names = [row_name(r["group"], r["what"]) for r in shown]
        width = min(max([28, *map(len, names)]), 60)
        head = f"{'group':{width}s} {'mass':>7s} {'risk':>8s} {'estimate':>9s}  {'interval':^19s}  verdict"
        lines = [
            f"{name[:width]:{width}s} {r['mass']:7.4f} {r['risk']:8.4f} {r['estimate']:+9.4f}  "
            f"[{r['low']:+8.4f},{r['high']:+8.4f}]  {r['verdict']}"
            for name, r in zip(names, shown, strict=True)
        ]
        if len(rows) > len(shown):
            lines.append(f"... and {len(rows) - len(shown)} more with smaller estimates: all are in `audit.table`.")
        return "\n".join([head, *lines, self.certificate, self.explanation, self._paid(), *([self.note] if self.note else [])])

    def _repr_html_(self) -> str:
        """Table for notebooks."""
        from torchgmc.audits.page import brief

        keep = ["group", *(["what"] if any(self.table["what"]) else []), "mass", "risk", "estimate", "low", "high", "verdict"]
        rows = [[v if isinstance(v, str) else f"{v:.4f}" for v in map(row.get, keep)] for row in self.rows()]
        return brief(self.certificate, Table(keep, rows), self._paid(), self.note)


@dataclass(frozen=True)
class Evidence:
    """What an audit was computed from: a few numbers per example.

    ``rows``: s, membership and weights. ``groups``, ``what``: names of the rows and columns of G. ``target``: target of each
    column, shape ``(u,)``. ``cells``: share and count ``(a, u)`` of the mass-weighted view, where a column is a part of the
    group (a level set). ``columns``: further columns of the table, one number per group, ``(a,)``.
    """

    rows: Rows
    groups: tuple[str, ...]
    what: tuple[str, ...]
    target: Tensor
    cells: tuple[Tensor, Tensor] | None = None
    columns: dict[str, Tensor] = field(default_factory=dict)

    def table(self, alpha: float | None, delta: float, conditional: bool, method: str = "exact") -> dict[str, list[Any]]:
        """Columns of an audit's table, worst g first."""
        columns = self.rows.table(alpha, delta, conditional, method)
        if self.cells is not None and not conditional:
            columns |= dict(zip(("mass", "count"), self.cells, strict=True))
        columns |= {"count": columns["count"].long(), "risk": columns["risk"] + self.target}
        columns |= {key: values[:, None].expand_as(columns["count"]) for key, values in self.columns.items()}
        table = ranked(columns["estimate"], self.groups, self.what, columns)
        table["verdict"] = [("undecided", "holds", "violated")[code] for code in table["verdict"]]
        return table


def ranked(estimate: Tensor, groups: Sequence[str], what: Sequence[str], columns: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Columns of a table with a row for each g, largest |estimate| first; all have the shape ``(a, u)`` of the estimate."""
    order = estimate.flatten().abs().argsort(descending=True, stable=True)
    places = [divmod(index, len(what)) for index in order.tolist()]
    table: dict[str, list[Any]] = {"group": [groups[row] for row, _ in places], "what": [what[column] for _, column in places]}
    return table | {key: value.flatten()[order].tolist() for key, value in columns.items()}
