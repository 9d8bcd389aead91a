r"""Measures that people know, group by group and with intervals: ECE, ECCE, miss rates, precision, coverage, widths.

Means (FNR, precision, coverage, set size, ...) have the intervals of an audit. The three calibration errors are suprema of
sums, :math:`\max_h \frac1W \sum_i w_i (y_i - p_i) h(p_i)`: over all signs per bin (ECE), over all signs after smoothing with a
reflected normal kernel as wide as the result (smooth ECE), over all intervals (ECCE). The last is a violation whose g are the
intervals of p. To their values the intervals add and subtract what the supremum of the noise is below with the given
probability, for many examples: its mean plus z standard errors, or for ECCE a quantile of the range of Brownian motion.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchgmc.audits.asymptotic import quantile
from torchgmc.audits.intervals import Rows
from torchgmc.audits.tabular import Tabular
from torchgmc.engine.clusters import total
from torchgmc.engine.files import plain

if TYPE_CHECKING:
    from torchgmc.audits.audit import Audit

#: Bins of the ECE, points of the smoothed one, and groups worked on at once.
BINS, POINTS, AT_ONCE = 10, 256, 64
#: Sigmas that an error must reach to be called detectable, as mcgrad has it.
DETECTABLE = 5.0
SIGMA, PVALUE, SMALLEST = "ECCE in sigmas", "ECCE p-value", "ECCE detectable"


class Estimate(float):
    """A number with an interval, ``low`` and ``high``."""

    low: float
    high: float

    def __new__(cls, value: float, low: float, high: float) -> "Estimate":
        made = super().__new__(cls, value)
        made.low, made.high = low, high
        return made

    def __repr__(self) -> str:
        return f"{float(self):.4g} [{self.low:.4g}, {self.high:.4g}]"


@dataclass(frozen=True)
class Measures(Tabular):
    """Named measures of an audit.

    Attributes:
        table: columns ``group``, ``measure``, ``value``, ``low``, ``high``; NaN where there is none. All intervals hold at once
            with confidence 1 - delta; those of calibration errors for many examples.
        delta: 1 - confidence.
        mce: by class (``""`` for one event) the multicalibration error as mcgrad has it: ``sigma`` (the largest ECCE of any
            group, in its own standard deviations), ``absolute`` (the same in everyone's), ``pvalue``, and ``detectable``.
    """

    table: dict[str, list[Any]]
    delta: float
    mce: dict[str, dict[str, float]]

    def __getitem__(self, measure: str) -> dict[str, Estimate]:
        """One measure by group."""
        found = {r["group"]: Estimate(r["value"], r["low"], r["high"]) for r in self.rows() if r["measure"] == measure}
        if not found:
            raise ValueError(f"`measure` must be one of {', '.join(map(repr, self.names))}, got {measure!r}.")
        return found

    @property
    def names(self) -> list[str]:
        """Names of the measures."""
        return list(dict.fromkeys(self.table["measure"]))

    def to_dict(self) -> dict[str, Any]:
        """Everything in JSON types: the table, differences and ratios (value, low, high), and ``mce``."""
        spans = {"difference": self.difference(), "ratio": self.ratio()}
        listed = {name: {key: [float(e), e.low, e.high] for key, e in found.items()} for name, found in spans.items()}
        return plain({"table": self.table, "mce": self.mce} | listed)

    def spans(self) -> dict[str, tuple[dict[str, Estimate], Estimate | None, Estimate | None]]:
        """Of each measure the values by group, and their difference and ratio if it has intervals."""
        apart, shares = self.difference(), self.ratio()
        return {name: (self[name], apart.get(name), shares.get(name)) for name in self.names}

    def difference(self) -> dict[str, Estimate]:
        """Largest minus smallest value over the groups, of each measure that has intervals; as fairlearn's MetricFrame."""
        return self._compare(difference)

    def ratio(self) -> dict[str, Estimate]:
        """Smallest over largest value over the groups, of each measure that has intervals; 1 where all are 0."""
        return self._compare(ratio)

    def _compare(self, how: Any) -> dict[str, Estimate]:
        kept = {name: [e for e in self[name].values() if e == e and e.low == e.low] for name in self.names}
        return {name: how(found) for name, found in kept.items() if found}


def rates(chosen: Tensor, true: Tensor, classes: list[str]) -> dict[str, tuple[Tensor, tuple[float, float] | None]]:
    """FNR, recall, FPR and precision of decisions ``(n, C)``, as values per example that are NaN where they do not count."""
    found: dict[str, tuple[Tensor, tuple[float, float] | None]] = {}
    parts = {"FNR": (~chosen, true), "recall": (chosen, true), "FPR": (chosen, ~true), "precision": (true, chosen)}
    for name, (event, given) in parts.items():
        values = event.double().masked_fill(~given, math.nan)
        found |= {f"{name}, {tag}" if tag else name: (values[:, c], (0.0, 1.0)) for c, tag in enumerate(classes)}
    return found


def difference(found: list[Estimate]) -> Estimate:
    """Largest minus smallest, with an interval that holds wherever those of all values do."""
    least = max(e.low for e in found) - min(e.high for e in found)
    return Estimate(max(found) - min(found), max(0.0, least), max(e.high for e in found) - min(e.low for e in found))


def ratio(found: list[Estimate]) -> Estimate:
    """Smallest over largest, with such an interval."""
    ends = [(min(found), max(found)), (min(e.low for e in found), max(e.high for e in found))]
    ends.append((min(e.high for e in found), max(e.low for e in found)))
    value, low, high = (min(1.0, max(0.0, a) / b) if b > 0 else 1.0 for a, b in ends)
    return Estimate(value, low, high)


def measure(audit: "Audit") -> Measures:
    """All measures that the audited head has."""
    head, tally, size = audit.source
    groups, means = head.test_functions().who, head.audit_measures(tally)
    pairs = {key: tally.rows[key].double() for key in ("p", "y") if key in tally.rows}
    classes = head.class_names(pairs["p"].shape[1]) if pairs else []
    share = audit.delta / (len(means) + 3 * len(classes) or 1)  # of each measure
    found: dict[str, list[Tensor]] = {}
    for name, (values, bounds) in means.items():
        seen = values[~values.isnan()]
        two = bool(((seen == 0) | (seen == 1)).all()) and bounds == (0.0, 1.0)
        ends = bounds or (float(seen.min()), float(seen.max()) + 1e-12)
        rows = Rows.of(values[:, None], tally.who, tally.weight, tally.cluster, ends, two_valued=two, largest=size)
        judged = rows.table(None, share, True)
        found[name] = [judged[key][:, 0].masked_fill(judged["count"][:, 0] == 0, math.nan) for key in ("estimate", "low", "high")]
    mce = {}
    for c, tag in enumerate(classes):
        p, y = (pairs[key][:, c] for key in ("p", "y"))
        events = bool(((y == 0) | (y == 1)).all())
        errors, overall = calibration_errors(p, y, tally.who, tally.weight.double(), tally.cluster, share, events)
        found |= {f"{name}, {tag}" if tag else name: list(parts) for name, parts in errors.items()}
        mce[tag] = overall
    rows_of = [(g, name, *(float(t[k]) for t in parts)) for name, parts in found.items() for k, g in enumerate(groups)]
    columns = zip(*rows_of, strict=True) if rows_of else [()] * 5
    return Measures(dict(zip(("group", "measure", "value", "low", "high"), map(list, columns), strict=True)), audit.delta, mce)


def calibration_errors(
    p: Tensor, y: Tensor, who: Tensor, weight: Tensor, cluster: Tensor, delta: float, events: bool = True
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """ECE, smooth ECE and ECCE of every group with their ends, ``(3, a)`` each, and the multicalibration error.

    ``p``, ``y``: predictions and outcomes in [0, 1], float64 ``(n,)``. ``who``: membership ``(n, a)``. ``weight``, ``cluster``:
    ``(n,)``; int64 ``(n, 1)`` or ``(n, 0)``. ``delta``: 1 - confidence of the intervals of all groups, of each measure.
    ``events``: y is 0 or 1, so that its variance is p (1 - p); else it is estimated.
    """
    order = p.argsort(stable=True)
    p, y, who, weight, cluster = (t[order] for t in (p, y, who > 0, weight, cluster))
    away = weight * (y - p)
    last = torch.cat([p[1:] != p[:-1], torch.ones_like(p[:1], dtype=torch.bool)])  # equal p are in the same intervals
    spread = weight * (p * (1.0 - p)).sqrt() if events else away
    level = quantile(delta / (2 * who.shape[1])), range_quantile(delta / who.shape[1])
    parts = [_errors(p, away, spread, part.double(), weight, cluster, last, level) for part in torch.split(who, AT_ONCE, 1)]
    found = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
    everyone = float(spread.square().sum().sqrt() / weight.sum().clamp_min(1e-300))
    sigma = float(found[SIGMA][0].nan_to_num(0.0, posinf=math.inf).max())
    overall = {"sigma": sigma, "absolute": sigma * everyone if sigma else 0.0}
    return found, overall | {"pvalue": ecce_pvalue(sigma), "detectable": DETECTABLE * everyone}


def _errors(
    p: Tensor,
    away: Tensor,
    spread: Tensor,
    member: Tensor,
    weight: Tensor,
    cluster: Tensor,
    last: Tensor,
    level: tuple[float, float],
) -> dict[str, Tensor]:
    mass = weight @ member
    some = member / mass.clamp_min(1e-300)  # (n, a)
    terms = some * away[:, None]
    total_error = total(terms.abs(), cluster).square().sum(0).sqrt()  # as if all of a cluster erred the same way
    apart = terms.square().sum(0).sqrt()
    design = torch.where(apart > 0, total_error / apart.clamp_min(1e-300), 1.0)
    z, k = level
    sums = terms.cumsum(0)[last]
    ecce = sums.amax(0).clamp_min(0.0) - sums.amin(0).clamp_max(0.0)
    sigma = (some * spread[:, None]).square().sum(0).sqrt()
    in_sigmas = torch.where(sigma > 0, ecce / sigma.clamp_min(1e-300), torch.where(ecce > 0, math.inf, 0.0))
    bins = (p * BINS).long().clamp(0, BINS - 1)
    cells = terms.new_zeros(2, BINS, len(mass)).index_add_(1, bins, torch.stack([terms, terms.square()]))
    noise = math.sqrt(2.0 / math.pi) * design * cells[1].sqrt().sum(0)
    smooth, smooth_noise = _smooth(p, terms)
    none = torch.full_like(mass, math.nan)
    found = {
        "ECE": _around(cells[0].abs().sum(0), noise + z * total_error),
        "smooth ECE": _around(smooth, design * smooth_noise + z * total_error),
        "ECCE": _around(ecce, k * total_error),
        SIGMA: torch.stack([in_sigmas, none, none]),
        PVALUE: torch.stack([in_sigmas.new_tensor([ecce_pvalue(x) for x in in_sigmas.tolist()]), none, none]),
        SMALLEST: torch.stack([DETECTABLE * sigma, none, none]),
    }
    return {name: table.masked_fill(mass <= 0, math.nan) for name, table in found.items()}


def _around(value: Tensor, reach: Tensor) -> Tensor:
    return torch.stack([value, (value - reach).clamp_min(0.0), (value + reach).clamp_max(1.0)])


def _smooth(p: Tensor, terms: Tensor) -> tuple[Tensor, Tensor]:
    """The smooth ECE of each column of terms, and the mean of the same of pure noise; smoothing is a product in cosines."""
    place = (p * POINTS).clamp(0.0, POINTS - 1e-9).long()
    table = terms.new_zeros(2, POINTS, terms.shape[1]).index_add_(1, place, torch.stack([terms, terms.square()]))
    node = (torch.arange(POINTS, device=p.device, dtype=p.dtype) + 0.5) / POINTS
    wave = torch.arange(POINTS, device=p.device, dtype=p.dtype)
    basis = torch.cos(math.pi * node[:, None] * wave) * torch.where(wave > 0, 2.0, 1.0).sqrt()
    waves = basis.T @ table  # (2, POINTS, a)

    def density(part: Tensor, h: Tensor) -> Tensor:
        return basis @ (part * torch.exp(-0.5 * (math.pi * wave[:, None] * h).square()))

    low, high = terms.new_full(terms.shape[1:], 1e-4), terms.new_ones(terms.shape[1])
    for _ in range(20):  # the width at which the error is as large as the width
        middle = (low + high) / 2
        wider = density(waves[0], middle).abs().mean(0) > middle
        low, high = torch.where(wider, middle, low), torch.where(wider, high, middle)
    variance = density(waves[1], high / math.sqrt(2.0)).clamp_min(0.0) / (2.0 * math.sqrt(math.pi) * high)
    return density(waves[0], high).abs().mean(0), math.sqrt(2.0 / math.pi) * variance.sqrt().mean(0)


def ecce_pvalue(sigma: float) -> float:
    """Probability that the range of Brownian motion on [0, 1] is at least this.

    Example:
        >>> [round(ecce_pvalue(x), 4) for x in (0.0, 1.5, 2.5)]
        [1.0, 0.5129, 0.0497]
    """
    if sigma < 0.1 or sigma > 8.0:
        return 1.0 if sigma < 0.1 else torch.finfo(torch.float64).eps
    k = (torch.arange(200, dtype=torch.float64) + 0.5).square() * math.pi**2
    terms = (8.0 / sigma**2 + 2.0 / k) * torch.exp(-2.0 * k / sigma**2)
    return max(1.0 - float(terms.sum()), torch.finfo(torch.float64).eps)


def range_quantile(level: float) -> float:
    """What the range of Brownian motion is above with this probability."""
    low, high = 0.1, 8.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if ecce_pvalue(middle) > level else (low, middle)
    return high
