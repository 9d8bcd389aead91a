"""Risk curves of thresholds: the sufficient statistics of ThresholdHead, and the GMC problem on them.

An example enters as the curve R_i(lambda) of its risk on a lattice of thresholds, and is added to the cell of all
examples with the same group membership. Memory grows with cells x lattice, never with pixels or examples; where cells are as
many as examples, only the points at which their curves rise are kept.
"""

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchgmc.distributed import total as over_ranks
from torchgmc.engine.folds import Pair
from torchgmc.engine.solver import OneTensor, entry
from torchgmc.engine.values import Names
from torchgmc.groups.cells import pattern_ids, shared_patterns, with_everyone
from torchgmc.heads.threshold.risks import Lattice

#: Points of the lattice at which the powers of each example's risk are summed; for standard errors the powers 0 to 3, and one
#: whose sum tells the largest risk, nearly.
POINTS, LARGE = 65, 16
#: Elements of the largest table of curves (128 MB in float64); of more cells only the points at which curves rise are kept.
MAX_ELEMENTS = 1 << 24


@functools.lru_cache(maxsize=16)
def coarse(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices of the ``POINTS`` of a lattice, and which of them is the first at or above each index, int32 ``(size + 1,)``."""
    found = torch.linspace(0, size - 1, POINTS, device=device).round().long()
    return found, torch.searchsorted(found, torch.arange(size + 1, device=device)).int()


@dataclass
class ClusterSums:
    """Sums of the risk over the members of each group in each cluster, at a few thresholds.

    ``key``: of each cluster, int64 ``(m,)``. ``risk``: sum of w 1_A R, ``(m, a + 1, C, POINTS)``; the last set is everyone.
    ``mass``: sum of w 1_A, ``(m, a + 1, C)``.
    """

    layout: ClassVar[dict[str, str]] = {"key": "int m", "risk": "rise m a+1 C points", "mass": "weight m a+1 C"}
    key: Tensor
    risk: Tensor
    mass: Tensor

    def __add__(self, other: "ClusterSums") -> "ClusterSums":
        """Of both sets of examples; parts of one cluster are joined."""
        key, place = torch.unique(torch.cat([self.key, other.key]), return_inverse=True)

        def merge(a: Tensor, b: Tensor) -> Tensor:
            return a.new_zeros(len(key), *a.shape[1:]).index_add_(0, place, torch.cat([a, b]))

        return ClusterSums(key, merge(self.risk, other.risk), merge(self.mass, other.mass))


@dataclass
class CurveStatistics:
    """Sums over the examples of each cell (equal membership), or one cell per example where examples must stay apart.

    ``member``: membership of each cell, bool, ``(c, a)``. ``steps``: sum of weighted increments of the risk curve, by fold,
    ``(F, c, C, size)``. ``mass``: sum of weights of the examples that count for a class, by fold, ``(F, c, C)``. ``moments``:
    sums of w^2 R^p, p of 0 to 3 and ``LARGE``, at ``POINTS`` thresholds over each group and everyone, ``(5, a + 1, C, POINTS)``.
    ``examples``: number of examples seen; ``excluded``: of them, without a relevant pixel, per class. ``clusters``: sums by
    cluster; None where every example is its own. ``apart``: every example is its own cell.
    """

    layout: ClassVar[dict[str, str]] = {
        **{"member": "bool c a", "steps": "rise F c C size", "mass": "weight F c C"},
        **{"moments": "weight 5 a+1 C points", "examples": "int", "excluded": "int C"},
    }
    member: Tensor
    steps: Tensor
    mass: Tensor
    moments: Tensor
    examples: Tensor
    excluded: Tensor
    clusters: ClusterSums | None = None
    apart: bool = False

    def __add__(self, other: "CurveStatistics") -> "CurveStatistics":
        """Statistics of both sets of examples; cells of equal membership are joined."""
        self.check_alike(other)
        both = torch.cat([self.member, other.member])
        place, patterns = (torch.arange(len(both), device=both.device), both) if self.apart else pattern_ids(both)
        if isinstance(other, RiseStatistics) or (not self.apart and len(patterns) * self.steps[:, 0].numel() > MAX_ELEMENTS):
            return self.rises() + other

        def merge(a: Tensor, b: Tensor) -> Tensor:
            if len(patterns) == len(self.member) == len(other.member):  # both have the same, in the same order
                return a + b
            empty = a.new_zeros(a.shape[0], len(patterns), *a.shape[2:])
            return empty.index_add_(1, place[: len(self.member)], a).index_add_(1, place[len(self.member) :], b)

        steps, mass = merge(self.steps, other.steps), merge(self.mass, other.mass)
        return CurveStatistics(patterns, steps, mass, *self._sums(other), self.apart)

    def absorb(self, other: "CurveStatistics") -> bool:
        """Add others in place, by one call, which nothing interrupts; False where that cannot be."""
        alike = type(self) is type(other) is CurveStatistics and self.steps.is_inference() == torch.is_inference_mode_enabled()
        alike = alike and not self.apart and self.clusters is None and torch.equal(self.member, other.member)
        if alike:
            torch._foreach_add_(*([getattr(one, name) for name in one.layout if name != "member"] for one in (self, other)))
        return alike

    def _sums(self, other: "CurveStatistics") -> tuple[Tensor, Tensor, Tensor, ClusterSums | None]:
        """What does not depend on cells."""
        clusters = None if self.clusters is None or other.clusters is None else self.clusters + other.clusters
        return self.moments + other.moments, self.examples + other.examples, self.excluded + other.excluded, clusters

    def rises(self) -> "RiseStatistics":
        """The same sums, of the points at which curves rise."""
        flat = self.steps.flatten(0, 2).T.flatten()
        place = flat.nonzero()[:, 0]
        tail = (self.moments, self.examples, self.excluded, self.clusters)
        return RiseStatistics(self.member, flat[place], self.mass, *tail, place=place)

    def check_alike(self, other: "CurveStatistics") -> None:
        """Clusters come with every batch or with none."""
        if (self.clusters is None) != (other.clusters is None):
            raise ValueError("pass `clusters` with every batch or with none.")

    def forget(self, factor: float) -> "CurveStatistics":
        """The same examples with this part of their weight."""
        clusters = self.clusters
        if clusters is not None:
            clusters = ClusterSums(clusters.key, clusters.risk * factor, clusters.mass * factor)
        steps, mass, moments = self.steps * factor, self.mass * factor, self.moments * factor**2
        return replace(self, steps=steps, mass=mass, moments=moments, clusters=clusters)

    @property
    def num_cells(self) -> int:
        """Cells kept: where they are many, not every batch is added to all of them."""
        return len(self.member)

    @property
    def rows(self) -> int:
        """Number of examples kept; sums over many keep none."""
        return len(self.member) if self.apart or isinstance(self, RiseStatistics) else 0

    def content(self) -> tuple[Tensor, ...]:
        """What tells examples apart, where they are kept apart."""
        return self.member, self.steps[0], self.mass[0]

    def cells(self) -> tuple[Tensor, Tensor]:
        """Membership and weight of each cell."""
        return self.member, self.mass.sum((0, 2))


@dataclass
class RiseStatistics(CurveStatistics):
    """The same sums where cells are many and have few examples each: memory grows with the points at which curves rise.

    ``steps``: the increments that are not 0, ``(N,)``. ``place``: ``((point * F + fold) * c + cell) * C + class`` of each,
    int64 ``(N,)``, ascending.
    """

    layout: ClassVar[dict[str, str]] = CurveStatistics.layout | {"steps": "rise N", "place": "int<size*F*c*C N"}
    place: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def __add__(self, other: CurveStatistics) -> "RiseStatistics":
        """Statistics of both sets of examples; cells of equal membership are joined."""
        self.check_alike(other)
        other = other.rises()
        ids, patterns = pattern_ids(torch.cat([self.member, other.member]))
        folds, _, classes = self.mass.shape
        mass = self.mass.new_zeros(folds, len(patterns), classes).index_add_(1, ids, torch.cat([self.mass, other.mass], 1))
        places = []
        for one, own in ((self, ids[: len(self.member)]), (other, ids[len(self.member) :])):
            point, cell, label = one.where()
            places.append((point * len(patterns) + own[cell]) * classes + label)
        place, steps = coalesce(torch.cat(places), torch.cat([self.steps, other.steps]))
        return RiseStatistics(patterns, steps, mass, *self._sums(other), place=place)

    def where(self) -> tuple[Tensor, Tensor, Tensor]:
        """``point * F + fold``, cell and class of each increment."""
        _, cells, classes = self.mass.shape
        row = self.place // classes
        return row // cells, row % cells, self.place % classes

    def rises(self) -> "RiseStatistics":
        """They are kept so already."""
        return self

    @property
    def num_cells(self) -> int:
        """What is copied when a batch is added."""
        return len(self.place)


def coalesce(place: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct places, ascending, and the sum of the steps at each."""
    place, where = torch.unique(place, return_inverse=True)
    return place, steps.new_zeros(len(place)).index_add_(0, where, steps)


@dataclass
class SampleStatistics:
    """Every relevant score, for the exact mode: memory grows with the relevant pixels.

    ``member``: groups of each example, bool (or fractional), ``(n, a)``. ``mass``: its weight for each class, ``(n, C)``, 0 if
    excluded. ``key``: a number of each example that depends on its content only, int64 ``(n,)``. ``cluster``: its cluster,
    int64 ``(n, 1)``, or ``(n, 0)`` if there are none. ``scores``, ``share``: each relevant score and its part of the example's
    risk, ``(N,)``. ``example``, ``label``: the example and the class it belongs to, ``(N,)``. ``dtype``: type of the scores;
    thresholds are compared in it. ``examples``, ``excluded``: as in :class:`CurveStatistics`. ``features``: float32 ``(n, d)``;
    None if nothing is learned.
    """

    layout: ClassVar[dict[str, str]] = {
        **{"member": "who n a", "mass": "weight n C", "key": "int n", "cluster": "int n k", "scores": "float N"},
        **{"share": "weight N", "example": "int<n N", "label": "int<C N", "examples": "int", "excluded": "int C"},
    }
    member: Tensor
    mass: Tensor
    key: Tensor
    cluster: Tensor
    scores: Tensor
    share: Tensor
    example: Tensor
    label: Tensor
    dtype: torch.dtype
    examples: Tensor
    excluded: Tensor
    features: Tensor | None = None

    def __add__(self, other: "SampleStatistics") -> "SampleStatistics":
        """Statistics of both sets of examples."""
        self.check_alike(other)
        later = replace(other, example=other.example + len(self.member))
        more = [] if self.features is None else ["features"]
        rows = ["member", "mass", "key", "cluster", "scores", "share", "example", "label", *more]
        found: dict[str, Any] = {name: torch.cat([getattr(self, name), getattr(later, name)]) for name in rows}
        found |= {name: getattr(self, name) + getattr(other, name) for name in ("examples", "excluded")}
        return replace(self, dtype=torch.promote_types(self.dtype, other.dtype), **found)

    @property
    def weight(self) -> Tensor:
        """Of each example, ``(n,)``; 0 if it counts for no class."""
        return self.mass.amax(1)

    def risk(self, thresholds: Tensor) -> Tensor:
        """Rising risk of each example at its thresholds ``(n, C)``; NaN where it does not count."""
        row = self.example * self.mass.shape[1] + self.label
        below = self.share * (self.scores <= thresholds.flatten()[row])
        return torch.zeros_like(self.mass).flatten().index_add_(0, row, below).view_as(self.mass) / self.mass

    def sketch(self, points: int) -> tuple[Tensor, Tensor]:
        """Up to so many scores for each example and class, of about equal weight: means of neighbours, and their weights.

        ``(n, C, points)`` each; the weight is 0 where there are fewer. The risk changes by half a point's weight at most.
        """
        rows = self.mass.numel()
        row = self.example * self.mass.shape[1] + self.label
        order = self.scores.argsort(stable=True)
        order = order[row[order].argsort(stable=True)]
        scores, share, row = self.scores[order], self.share[order], row[order]
        mass = share.new_zeros(rows).index_add_(0, row, share)
        units = (share / mass[row].clamp_min(1e-300) * 2.0**52).round().long()  # exact sums, whatever rows come before
        every = units.new_zeros(rows).index_add_(0, row, units)
        middle = (units.cumsum(0) - units // 2 - (every.cumsum(0) - every)[row]).double() * 2.0**-52
        place = row * points + (middle * points + 1e-9).long().clamp(0, points - 1)
        sums = [share.new_zeros(rows * points).index_add_(0, place, part) for part in (share * scores, share)]
        shape = (*self.mass.shape, points)
        return (sums[0] / sums[1].clamp_min(1e-300)).view(shape), sums[1].view(shape)

    def sketched(self, points: int) -> "SampleStatistics":
        """The same examples with so many scores at most."""
        table, weight = self.sketch(points)
        example, label, _ = (weight > 0).nonzero(as_tuple=True)
        return replace(self, scores=table[weight > 0], share=weight[weight > 0], example=example, label=label)

    def nobody(self) -> "SampleStatistics":
        """No examples, of the same shapes: what ranks whose rows stay tell one another."""
        rows: dict[str, Any] = {k: v[:0] for k, v in vars(self).items() if isinstance(v, Tensor) and v.dim()}
        return replace(self, **rows | {"examples": self.examples * 0, "excluded": self.excluded * 0})

    def check_alike(self, other: "SampleStatistics") -> None:
        """Clusters come with every batch or with none, and as many features."""
        if self.cluster.shape[1] != other.cluster.shape[1]:
            raise ValueError("pass `clusters` with every batch or with none.")
        if (wide := getattr(self.features, "shape", (0, 0))[1]) != (got := getattr(other.features, "shape", (0, 0))[1]):
            raise ValueError(f"`features` must have {wide} columns, as in the batches before, got {got}.")

    def forget(self, factor: float) -> "SampleStatistics":
        """The same examples with this part of their weight."""
        return replace(self, mass=self.mass * factor, share=self.share * factor)

    @property
    def rows(self) -> int:
        """Number of scores and examples kept."""
        return len(self.scores) + len(self.key)

    def content(self) -> tuple[Tensor, ...]:
        """What tells examples apart."""
        return self.member, self.mass, self.key

    def cells(self) -> tuple[Tensor, Tensor]:
        """Membership and weight of each example."""
        return self.member, self.mass.sum(1)


class ThresholdProblem(OneTensor):
    """Thresholds lambda(x) = f0 - sum of the offsets of x's groups, on statistics per cell of equal membership.

    The violation of (A, class) is E[1_A (R - target)] for the risk R, or 1 - R, that rises with lambda: the slope of a
    convex potential, the integral of R (the pinball loss for shares of pixels).
    """

    dynamic = False

    def __init__(
        self, patterns: Tensor, mass: Tensor, target: Tensor, increasing: bool, conditional: bool, names: Names, *line: float
    ) -> None:
        self.member, self.mass, self.increasing = patterns.to(torch.float64), mass, increasing
        *self.ends, self.step = line  # thresholds lie between two numbers, and differ by so much at least
        self.names, self.label = names, names.label
        self.total = mass.sum(0).clamp_min(torch.finfo(torch.float64).tiny)  # (C,)
        self.target = target if increasing else 1.0 - target  # of the rising risk
        self.share = (self.member.T @ mass) / self.total  # (a, C): P(A)
        self.scale = self.share if conditional else torch.ones_like(self.share)  # g = 1_A / scale

    def tabulate(self, risk: Tensor, mass: Tensor, split: Pair | None = None) -> Tensor:
        """Violations (a, C) from the sums of weighted risks of each cell (c, C)."""
        if split is not None:  # the risk is not a functional of f: the inner split has no part in it
            risk, mass = risk * split.outer[:, None], mass * split.outer[:, None]
        total = mass.sum(0).clamp_min(torch.finfo(torch.float64).tiny)
        return (self.member.T @ (risk - mass * self.target)) / total / self.scale

    @property
    def thresholds(self) -> Tensor:
        """Threshold of each cell and class, (c, C)."""
        raise NotImplementedError  # abstract

    def risk_at(self, thresholds: Tensor) -> Tensor:
        """Sum of the weighted rising risk of each cell at any thresholds, ``(c, C)``."""
        raise NotImplementedError  # abstract

    def violations_at(self, thresholds: Tensor, everyone: bool) -> Tensor:
        """Signed violations of the rising risk at any thresholds ``(c, C)``: ``(a, C)``, and a row for everyone."""
        risk = self.risk_at(thresholds)
        table = self.tabulate(risk, self.mass)
        return table if not everyone else torch.cat([table, ((risk - self.mass * self.target).sum(0) / self.total)[None]])

    def largest_slope(self, rise: Tensor, width: float) -> float:
        """Steepest slope of the risk of all examples of equal membership, from its rise ``(c, C, k)`` over ``width``."""
        place, patterns = pattern_ids(self.member > 0)
        rise = rise.new_zeros(len(patterns), *rise.shape[1:]).index_add_(0, place, rise)
        mass = self.mass.new_zeros(len(patterns), self.mass.shape[1]).index_add_(0, place, self.mass)
        return max(float((rise / mass.clamp_min(torch.finfo(torch.float64).tiny)[..., None]).max()), 1e-6) / width

    def line_search(self, who: Tensor, what: Tensor, violation: Tensor) -> Tensor:
        """Not needed: ``"exact"`` finds all offsets at once."""
        raise NotImplementedError

    def violations(self, split: Pair | None = None) -> Tensor:
        """Signed violations of the rising risk, (a, C)."""
        return self.tabulate(self.risk_at(self.thresholds), self.mass, split)

    def explain(self, who: int, what: int, lam: Tensor | None = None, label: str = "") -> str:
        """Why a violation stays, at other thresholds ``(c, C)`` if given: the target is out of range, or the risk jumps over it."""
        lam, label = self.thresholds if lam is None else lam, label or self.label(who, what)
        sets = with_everyone(self.member)
        inside = sets[:, who, None] > 0  # (c, 1)

        def risk(thresholds: Tensor) -> float:
            rising = float((sets.T @ self.risk_at(thresholds) / (sets.T @ self.mass))[who, what])
            return rising if self.increasing else 1.0 - rising

        goal = float(self.target[what] if self.increasing else 1.0 - self.target[what])
        ends = [risk(torch.where(inside, end, lam)) for end in self.ends]
        if not min(ends) <= goal <= max(ends):
            return (
                f"Even at the end of the range the risk of {label} is {min(ends, key=lambda r: abs(r - goal)):.4g} against the "
                f"target {goal:.4g}: the target is unreachable. Widen `range`, or check scores and masks."
            )
        here, around = risk(lam), [risk(torch.where(inside, lam + move, lam)) for move in (-self.step, self.step)]
        there = min(around, key=lambda r: abs(r - goal)) if (here - goal) * (min(around) - goal) < 0 else max(around)
        return (
            f"The risk of {label} jumps from {here:.4g} to {there:.4g}, over the target {goal:.4g}, in one step of the "
            "threshold: an atom of equal scores, too few examples, or thresholds too coarse for alpha. Try `jitter`, a finer "
            "`resolution`, logits instead of saturated probabilities, a larger `alpha` or more data."
        )


class CurveProblem(ThresholdProblem):
    """On lattice curves: thresholds move by whole units of the lattice, and every one is evaluated exactly."""

    moving = "levels"

    def __init__(self, statistics: CurveStatistics, lattice: Lattice, *common: Any) -> None:
        super().__init__(statistics.member, statistics.mass.sum(0), *common)
        self.lattice = lattice
        self.shift = statistics.member.to(torch.int64)
        self.statistics = statistics
        #: Whole units of threshold taken off for each group and class.
        self.levels = torch.zeros(self.share.shape, dtype=torch.int64, device=self.share.device)
        self._rows = torch.arange(self.mass.numel(), device=self.mass.device).view_as(self.mass)  # (c, C)

    @functools.cached_property
    def curve(self) -> Tensor:
        """The rising risk of each cell at all thresholds, ``(c, C, size)``."""
        if isinstance(self.statistics, RiseStatistics):
            return self.rise(self._rows[..., None], torch.arange(self.lattice.size, device=self._rows.device))
        return self.statistics.steps.sum(0).cumsum(-1)

    @functools.cached_property
    def _sums(self) -> tuple[Tensor, Tensor]:
        """Of increments: row (cell and class) and place on the lattice, ``row * size + place``, ascending; sums before each."""
        assert isinstance(self.statistics, RiseStatistics)
        point, cell, label = self.statistics.where()
        row = cell * self.mass.shape[1] + label
        key, order = (row * self.lattice.size + point // len(self.statistics.mass)).sort()
        return key, torch.cat([self.mass.new_zeros(1), self.statistics.steps[order].cumsum(0)])

    def rise(self, row: Tensor, place: Tensor) -> Tensor:
        """The rising risk of each row up to a place on the lattice, or -1."""
        if not isinstance(self.statistics, RiseStatistics):
            return self.curve.flatten()[row * self.lattice.size + place]
        key, sums = self._sums
        low, high = (torch.searchsorted(key, row * self.lattice.size + at, right=True) for at in (-1, place))
        return sums[high] - sums[low]

    @property
    def thresholds(self) -> Tensor:
        """Threshold of each cell and class, (c, C)."""
        # A sum in place of an integer product, which CUDA lacks.
        return self.lattice.origin - (self.shift[:, :, None] * self.levels).sum(1).double() * self.lattice.unit

    def risk_at(self, thresholds: Tensor) -> Tensor:
        """Sum of the weighted rising risk of each cell at any thresholds, ``(c, C)``."""
        lattice = self.lattice
        place = torch.floor((thresholds - lattice.origin) / lattice.unit + 1e-9).to(torch.int64) - lattice.first
        return self.rise(self._rows, place.clamp(0, lattice.size - 1))

    def move(self, who: Tensor, what: Tensor, step: Tensor) -> None:
        """Take ``step / scale`` off the thresholds of the group."""
        units = torch.round(step / entry(self.scale, who, what) / self.lattice.unit).to(torch.int64)
        index = who * self.levels.shape[1] + what
        self.levels = self.levels.flatten().index_add(0, index[None], units[None]).view_as(self.levels)

    def slope(self) -> float:
        """Steepest slope K of a cell's risk, over windows of a 64th of the range."""
        window = max(1, self.lattice.size // 64)
        if isinstance(self.statistics, RiseStatistics):  # the steepest window ends at an increment
            row, place = self._sums[0] // self.lattice.size, self._sums[0] % self.lattice.size
            rise = (self.rise(row, place) - self.rise(row, (place - window).clamp_min(-1))) / self.mass.flatten()[row]
            return max(float(rise.max()), 1e-6) / (window * self.lattice.unit)
        return self.largest_slope(self.curve[..., window:] - self.curve[..., :-window], window * self.lattice.unit)

    @property
    def offsets(self) -> Tensor:
        """What each group takes off the threshold, (a, C)."""
        return self.levels.double() * self.lattice.unit

    @property
    def points(self) -> Tensor:
        """Thresholds at which the powers of risks are known, ``(POINTS,)``."""
        return self.lattice.points(self.mass.device)[coarse(self.lattice.size, self.mass.device)[0]]

    def tail(self, lam: Tensor) -> Tensor:
        """About the largest |s| of each class ``(C,)`` at thresholds ``(c, C)``, or more: no example has a larger risk than the
        largest of each of its groups at the next of the ``POINTS``.
        """
        after = torch.searchsorted(self.points, lam.contiguous()).clamp_max(POINTS - 1)  # (c, C)
        largest = self.statistics.moments[-1].permute(1, 2, 0) ** (1 / LARGE)  # (C, POINTS, a + 1), nearly
        risk = largest[torch.arange(lam.shape[1], device=lam.device), after]  # (c, C, a + 1)
        risk = risk.masked_fill(with_everyone(self.member)[:, None] == 0, math.inf)
        return torch.maximum(self.target, risk.amin(2).amax(0).clamp_max(1.0) - self.target)


class SampleProblem(ThresholdProblem):
    """On every relevant score: thresholds are any numbers of the scores' type. Scores may be this rank's; sums are of all ranks."""

    moving = "offsets"

    def __init__(self, statistics: SampleStatistics, origin: float, *common: Any, apart: bool = False) -> None:
        cells, patterns = self.patterns = shared_patterns(statistics.member)
        if apart:
            cells, patterns = torch.arange(len(cells), device=cells.device), statistics.member
        mass = statistics.mass.new_zeros(len(patterns), statistics.mass.shape[1]).index_add_(0, cells, statistics.mass)
        self.scores, place = torch.unique(statistics.scores, return_inverse=True)
        row = cells[statistics.example] * mass.shape[1] + statistics.label
        #: Row (cell and class) and place among different scores, ``row * (number + 1) + place``, ascending; sums before each.
        self.key, order = (row * (len(self.scores) + 1) + place).sort()
        self.sums = torch.cat([mass.new_zeros(1), statistics.share[order].cumsum(0)])
        super().__init__(patterns, over_ranks(mass), *common)
        self.origin, self.dtype = origin, statistics.dtype
        self.offsets = torch.zeros_like(self.share)

    @property
    def thresholds(self) -> Tensor:
        """Threshold of each cell and class, (c, C)."""
        return self.origin - self.member @ self.offsets

    def risk_at(self, thresholds: Tensor) -> Tensor:
        """Sum of the weighted rising risk of each cell at any thresholds, ``(c, C)``."""
        return over_ranks(self._rise(thresholds.to(self.dtype).double()[..., None])[..., 0])  # as the head compares them

    def _rise(self, thresholds: Tensor) -> Tensor:
        """The rising risk of each cell and class at thresholds ``(c, C, k)``, or ``(1, 1, k)``, of this rank."""
        start = torch.arange(self.mass.numel(), device=self.mass.device).view(*self.mass.shape, 1) * (len(self.scores) + 1)
        place = torch.searchsorted(self.scores, thresholds.contiguous(), side="right")
        low, high = torch.searchsorted(self.key, start), torch.searchsorted(self.key, start + place)
        return self.sums[high] - self.sums[low]

    def move(self, who: Tensor, what: Tensor, step: Tensor) -> None:
        """Take ``step / scale`` off the thresholds of the group."""
        index = who * self.offsets.shape[1] + what
        change = (step / entry(self.scale, who, what))[None]
        self.offsets = self.offsets.flatten().index_add(0, index[None], change).view_as(self.offsets)

    def slope(self) -> float:
        """Steepest slope K of a cell's risk, over windows of a 64th of the range of the scores."""
        finite = self.scores[self.scores.isfinite()]
        low, high = (float(v) for v in finite.aminmax()) if len(finite) else (0.0, 1.0)
        points = torch.linspace(low, high, 65, dtype=torch.float64, device=self.scores.device)
        return self.largest_slope(self._rise(points[None, None]).diff(dim=-1), max(high - low, 1e-12) / 64)
