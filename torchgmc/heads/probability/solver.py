r"""Multicalibrated probabilities: offsets of all groups at once by Newton steps, then rounds on groups x level sets.

In coordinates z (logit or identity, see :mod:`torchgmc.heads.levelsets.steps`) both geometries have a convex potential
:math:`E[\psi(z) - y z]` whose derivative is s = f(z) - y: the log loss for ``"kl"``, a Huber-like loss for ``"euclidean"``.
So a violation is a slope of the potential, and all offsets can be found at once.
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchgmc.distributed import total as over_ranks
from torchgmc.engine import checks, folds, noise
from torchgmc.engine.clusters import adder
from torchgmc.engine.folds import Places, places_of
from torchgmc.engine.hashing import row_keys
from torchgmc.engine.lasso import solve_lasso
from torchgmc.engine.solver import Report, reached
from torchgmc.engine.statistics import Bits, PerExample
from torchgmc.engine.trees import Loss
from torchgmc.engine.values import Names
from torchgmc.heads.learned import Found as TreesFound
from torchgmc.heads.levelsets import steps as levelsets
from torchgmc.heads.levelsets.problem import check_masses
from torchgmc.heads.levelsets.steps import LARGEST, ROWS, UNIT, Members, Membership, blocks, cell_sums, exact_product, project, snap
from torchgmc.heads.probability.problem import BLOCK, HALVINGS, SAMPLE, Columns, curvature, loss, over_clusters
from torchgmc.heads.probability.static import Found, fit_static, without

#: Slack of a cell's step, as a share of the violation that is worth a step. Of rows that trees were fitted to, f looks less sure
#: than of fresh ones, and of a fit to alpha the Brier score pays for steps: then no step is longer than it must be.
CELL_SLACK, LEAST_STEP = 2.0 / 3.0, 0.95
#: A membership with more entries is float32 up to ``folds.EXACT`` examples; of more, a lost bit moves one to another level set.
SMALL = 1 << 20
#: One with more stays a bit an entry, at some cost of time.
LARGE = 1 << 23
#: Unit of offsets and slopes that trees start from: below their noise, far above that of sums in another order.
ROUGH = 2.0**-9
#: Ridge of the Hessian of a level set, as a share of its mean diagonal.
RIDGE = 1e-8


@dataclass
class ProbabilityStatistics(PerExample):
    """What a calibration set is reduced to.

    ``z``: coordinates of f0, float64 ``(n, C)``. ``y``: outcomes in [0, 1], float64 ``(n, C)``; rows of classes sum to 1.
    ``member``: groups, bool or fractional ``(n, a)``; a head keeps bool as bytes of :class:`~torchgmc.engine.statistics.Bits`.
    ``weight``: float64 ``(n,)``. ``cluster``: int64 ``(n, 1)``, or ``(n, 0)`` if there are none. ``features``: float32 ``(n,
    d)``; ``(n, 0)`` if nothing is learned.
    """

    layout: ClassVar[dict[str, str]] = {"z": "float n C", "y": "part n C", **PerExample.layout, "member": "bits n a"}
    z: Tensor
    y: Tensor
    member: Tensor
    weight: Tensor
    cluster: Tensor
    features: Tensor

    def packed(self) -> "ProbabilityStatistics":
        """As a head keeps it."""
        return replace(self, member=Bits.of(self.member)) if self.member.dtype == torch.bool else self

    def unpacked(self, groups: int, whole: bool = True) -> "ProbabilityStatistics":
        """With the groups of each example; those of very many, not whole, as :class:`Bits`."""
        if self.member.dtype != torch.uint8:
            return self
        member: Any = Bits(self.member, groups)
        few = whole or math.prod(member.shape) <= LARGE or member.device.type != "cpu" or self.cluster.shape[1]
        return replace(self, member=member[:] if few else member)


@dataclass(frozen=True)
class Promise:
    """What is asked: |violation| <= alpha on every (group, level set, class), where the sample can tell.

    ``alpha``: largest violation; None for as small as the sample can resolve. ``edges``: inner edges of the level sets, empty
    for one; see :func:`torchgmc.heads.levelsets.steps.equal_width`. ``euclidean``: geometry. ``conditional``: violations are
    divided by P(A). ``noise_floor``: go as far as the sample can be trusted, whatever alpha. ``events``: y is 0 or 1 (the
    variance of a cell is then also known from f). ``everyone``: the group of everyone is among the promises. ``low``,
    ``width``: f and y were brought to [0, 1] from [low, low + width]; reports are in the units of y, ``alpha`` is not.
    """

    alpha: float | None
    edges: Tensor
    euclidean: bool
    conditional: bool
    noise_floor: bool
    events: bool
    everyone: bool = True
    low: float = 0.0
    width: float = 1.0

    @property
    def bins(self) -> int:
        """Level sets."""
        return len(self.edges) + 1


class Solution(NamedTuple):
    """Offsets and slopes ``(1 + a, C)``, rounds ``(T, 1 + a, b, C)`` (row 0 is for everyone), z at the end, report, trees."""

    offsets: Tensor
    slopes: Tensor
    tables: Tensor
    z: Tensor
    report: Report
    trees: TreesFound | None = None


#: Trees after offsets and slopes, from the examples, their sample, what was found and z.
Grow = Callable[[ProbabilityStatistics, "Sample", Found | None, Tensor], TreesFound | None]


class Measure(NamedTuple):
    """One search over all cells at some f: violations, errors and sizes ``(1 + a, b', C)``, and the losses.

    With level sets the last of the b' = b + 1 is their union: the group's own mean.
    """

    level: Tensor
    violation: Tensor
    error: Tensor  # standard error of each violation
    sizes: Tensor  # examples in each cell, after weighting, or clusters
    brier: float


class Sample:
    """Examples laid out for fast sums; row 0 of every table is the group of everyone.

    They may be on several ranks: all sums are over all of them (:func:`torchgmc.distributed.total`), ``count`` examples.

    ``examples``: at least one. ``promise``: what is asked.
    """

    def __init__(self, examples: ProbabilityStatistics, promise: Promise) -> None:
        member = examples.member
        (rows, a), n = member.shape, int(over_ranks(torch.tensor(len(member))))
        cpu = member.device.type == "cpu" and torch.get_float32_matmul_precision() == "highest"
        self.fractional = member.dtype.is_floating_point
        self.dtype = torch.float32 if cpu and n * a > SMALL and n <= folds.EXACT and not self.fractional else torch.float64
        table: Members = Membership(member, self.dtype)
        plain = not cpu or rows * a <= LARGE or self.fractional or bool(examples.cluster.shape[1])
        self.member = table[:].contiguous() if plain else table
        self.z, self.y, self.promise = examples.z, examples.y, promise
        self.cluster, self.sizes = examples.cluster, examples.group_sizes()
        self.count, self.share = n, (examples.weight / over_ranks(examples.weight.sum()))[:, None]  # (n, 1)
        self.kish = 1.0 / float(over_ranks(self.share.square().sum())) if n else 1.0  # sums of squared shares into examples
        self.mass = over_ranks(cell_sums(self.member, self.share)[:, 0, 0])  # (1 + a,): P(A)
        self.supposed, self.unseen = self._suppose() if promise.events and not promise.euclidean and n else (self.y, [])
        self.scale = (self.mass if promise.conditional else torch.ones_like(self.mass))[:, None, None]

    def _suppose(self) -> tuple[Tensor, list[int]]:
        """The y that is fitted, and outcomes that no example has: half an example of each is added, or what f0 expects of it,
        as a free offset would take their logit to minus infinity. Violations and Brier scores are those of y itself.
        """
        one = self.y.shape[1] == 1  # an event: "no" and "yes"
        gone = over_ranks((self.share.T @ (torch.cat([1.0 - self.y, self.y], 1) if one else self.y))[0]) <= 0
        if not bool(gone.any()):
            return self.y, []
        f = levelsets.probabilities(self.z, False)
        most = over_ranks((self.share.T @ (torch.cat([1.0 - f, f], 1) if one else f))[0])
        share = gone * most.clamp_max(0.5 / (self.kish + 0.5 * float(gone.sum())))
        return self.y * (1.0 - share.sum()) + share[-self.y.shape[1] :], gone.nonzero()[:, 0].tolist()

    @functools.cached_property
    def places(self) -> Places:
        """Of the examples: they say how some of them are chosen."""
        rest = folds.relative(self.share) - 1.0  # keys of equal weights are those of rows without
        keys = [row_keys(self.z[one], self.y[one], self.member[one], rest[one]) for one in self._blocks(ROWS)]
        return places_of(torch.cat(keys) if keys else row_keys(self.z, self.y, self.member[:], rest))

    @functools.cached_property
    def add(self) -> Callable[[Tensor], Tensor]:
        """What sums values over clusters; ids are sent once."""
        return adder(self.cluster)

    def columns(self) -> Columns:
        """The static problem."""
        euclidean = self.promise.euclidean
        return Columns(self.member, self.z, self.supposed, self.share, euclidean, not euclidean, self.places)

    def apply(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z after offsets and slopes, which are put on the grid; what ``forward`` computes, to the bit."""
        offsets = snap(theta[0], UNIT)
        slopes = snap(theta[1], UNIT) if len(theta) > 1 else torch.zeros_like(offsets)
        out, steep = torch.empty_like(self.z), bool((slopes != 0).any())
        for one in self._blocks(ROWS):
            z, member = self.z[one], self.member[one]
            if steep:
                z = snap(z * (1.0 - exact_product(member, slopes)).clamp_min(0.0))
            out[one] = z - exact_product(member, offsets)
        return out, offsets, slopes

    def _blocks(self, rows: int = BLOCK) -> list[slice]:
        return blocks(len(self.z), rows if self.z.device.type == "cpu" else max(len(self.z), 1))

    def measure(self, z: Tensor) -> Measure:
        """Search every cell at z."""
        bins, brier = self.promise.bins, z.new_zeros(())
        places = torch.empty_like(z, dtype=torch.uint8 if bins < 256 else torch.int64)
        sums = z.new_zeros(self.member.shape[1], bins, 3 * z.shape[1])
        for one in self._blocks():
            f, share = levelsets.probabilities(z[one], self.promise.euclidean), self.share[one]
            level, s = levelsets.levels_of(z[one], self.promise.edges, self.promise.euclidean), f - self.y[one]
            places[one] = level
            square = s.square()
            brier += (square * share).sum()
            if self.promise.events:
                square = 0.5 * (square + f * (1.0 - f))  # a cell without events would look free of noise
            # One pass for all sums; those of squares are scaled up so that float32 holds them as well as the first.
            square = square * (share.square() * self.count)
            both = torch.cat([s * share, square, (share.square() * self.count).expand_as(s)], 1)
            found = cell_sums(self.member, both.to(self.dtype), level.repeat(1, 3), bins, one.start)
            if self.fractional:
                wide = z.shape[1]
                found[..., wide:] = cell_sums(self.member[one].square(), both[:, wide:], level.repeat(1, 2), bins)
            sums += found
        everything = over_ranks(torch.cat([sums.flatten(), brier[None]]))
        sums, brier = everything[:-1].view_as(sums), everything[-1]
        if bins > 1:
            sums = torch.cat([sums, sums.sum(1, keepdim=True)], 1)
        violation, variance, weight = torch.split(sums, z.shape[1], 2)
        variance, sizes = variance / self.count, (weight * self.kish).contiguous()
        if self.cluster.shape[1]:  # from sums over clusters, and their number, a cell at a time
            s = (levelsets.probabilities(z, self.promise.euclidean) - self.y) * self.share
            inside = torch.stack([*(places == k for k in range(violation.shape[1] - 1)), places >= 0], 1)  # (n, b', C)
            parts = (torch.square, s[:, None] * inside), (torch.sign, ((self.share > 0)[:, None] & inside).int())
            each = (over_clusters(how, part.flatten(1), self.member[:], self.add) for how, part in parts)
            variance, sizes = (part.view_as(violation) for part in each)
        return Measure(places, violation.contiguous(), variance.sqrt(), sizes, float(brier))

    def tolerance(self, measure: Measure) -> Tensor:
        """Largest violation allowed in each cell (not divided by P(A))."""
        if not self.promise.noise_floor:
            assert self.promise.alpha is not None
            return (self.promise.alpha * self.scale).expand_as(measure.error)
        return noise.slacks(noise.among(measure.error[1:].numel()), measure.error, measure.sizes).clamp_min(1e-12)

    def excess(self, measure: Measure) -> Tensor:
        """|violation| / tolerance of the groups asked for, ``(a, b', C)``; everyone is the first row where it is promised."""
        table = measure.violation.abs() / self.tolerance(measure).clamp_min(1e-300)
        return table if self.promise.everyone else table[1:]


@torch.inference_mode()  # a tenth faster
def static_stage(sample: Sample) -> Found:
    """Offsets and slopes of every group (and everyone) at once."""
    promise = sample.promise
    slack = None
    if not promise.noise_floor:
        assert promise.alpha is not None
        slack = (0.95 * promise.alpha * sample.scale[:, 0]).expand(-1, sample.z.shape[1]).clone()
        slack[0] = 0.0
    return fit_static(sample.columns(), sample.sizes, sample.cluster, slack)


def start_of_trees(examples: ProbabilityStatistics, sample: Sample, static: Found | None, rows: Tensor) -> Tensor:
    """z after offsets and slopes (of many rows in units of ``ROUGH``) that only ``rows`` decide: others judge the trees."""
    if static is None or math.isnan(static.alike):
        theta = static_stage(Sample(examples.pick(rows), sample.promise)).theta
    else:
        theta = without(sample.columns(), static, rows)
    return sample.apply(snap(theta, ROUGH) if sample.count > folds.EXACT else theta)[0]


def tree_loss(y: Tensor, weight: Tensor, euclidean: bool) -> Loss:
    """The potential, for trees, of rows with outcomes y ``(n, C)`` and weights of mean 1 ``(n, 1)``."""

    of = functools.cache(lambda start, stop: (y[start:stop], weight[start:stop]))  # of few rows a slice costs as much as a step

    def slopes(z: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        z, (truth, mass) = z.to(y.device), of(rows.start, rows.stop)
        f = levelsets.probabilities(z, euclidean)
        second = curvature(z, f, euclidean).mul_(mass)
        return f.sub_(truth).mul_(mass), second

    def value(z: Tensor, rows: slice) -> Tensor:
        z, (truth, mass) = z.to(y.device), of(rows.start, rows.stop)
        f = levelsets.probabilities(z, euclidean) if euclidean else z  # of logits the loss needs no f
        return (loss(z, f, truth, euclidean) * mass)[:, 0]

    return Loss(slopes, value)


def fit(examples: ProbabilityStatistics, promise: Promise, max_iter: int, names: Names, grow: Grow | None = None) -> Solution:
    """Newton on all offsets, then rounds on the level sets until every cell is within its tolerance.

    Every step lowers the potential, and none raises the Brier score above that of f0 (nor above what it was, as long as such
    steps are left). Of all rounds the best prefix is kept, and the result is never further from the promise than f0. A fit to
    alpha changes nothing where f0 keeps the promise already. ``grow`` finds groups that nobody named, before the rounds.
    """
    started = time.perf_counter()
    sample = Sample(examples, promise)
    check_masses(sample.mass[1:], names.who)
    before = sample.measure(sample.z)
    start = float(sample.excess(before).max())
    kept = not promise.noise_floor and start <= 1
    static = None if kept else static_stage(sample)
    static = static if static is None else static._replace(theta=static.theta.clone())  # not of inference mode
    found = _attempt(sample, before, max_iter, static, None if grow is None else lambda z: grow(examples, sample, static, z))
    # A tiny sample: the offsets moved examples between level sets for the worse.
    if found.excess > max(1.0, start) and found.trees is None:
        found = _attempt(sample, before, max_iter, None)
    offsets, tables = found.offsets, found.tables
    if promise.bins == 1 and not promise.euclidean:  # one level set and no projection: the rounds are offsets too
        offsets, tables = offsets + tables.sum(0)[:, 0], tables[:0]
    report = _report(sample, before, found, static, max_iter, names, time.perf_counter() - started)
    return Solution(offsets, found.slopes, tables, found.z, report, found.trees)


def fit_each(examples: ProbabilityStatistics, promise: Promise, max_iter: int, names: Names, grow: Grow | None = None) -> Solution:
    """:func:`fit` of every column by itself, as the probability of one event."""
    count = examples.z.shape[1]
    each = [replace(examples, z=examples.z[:, [k]], y=examples.y[:, [k]]) for k in range(count)]
    found = [fit(one, promise, max_iter, Names(names.who, names.what[k::count]), grow) for k, one in enumerate(each)]
    rounds = max(len(part.tables) for part in found)  # those of 0 change nothing
    tables = [torch.cat([part.tables, part.tables.new_zeros(rounds - len(part.tables), *part.tables.shape[1:])]) for part in found]
    reports = [part.report for part in found]
    worst = max(range(count), key=lambda k: (("alpha", "noise", "no").index(reports[k].reached), reports[k].history[-1]))
    steps = max(report.iterations for report in reports)

    def side_by_side(name: str) -> Tensor:
        return torch.stack([getattr(report, name) for report in reports], -1).flatten(1)  # (a, b' C)

    ends = [torch.cat([r.history, r.history[-1:].expand(steps + 1 - len(r.history))]) for r in reports]
    details = {key: reports[worst].details[key] for key in ("examples", "alpha_asked", "alpha_met", "small")}
    details |= {key: sum(r.details[key] for r in reports) for key in ("noise_limited", "brier_before", "brier_after")}
    details |= {key: [r.details[key] for r in reports] for key in ("slack", "alike", "unseen")}
    details |= {key: torch.stack([r.details[key] for r in reports], -1).flatten(1) for key in ("tolerance", "variance")}
    before, after = side_by_side("violations_before"), side_by_side("violations_after")
    history, seconds = torch.stack(ends).amax(0), sum(r.seconds for r in reports)
    message = f"{count} labels, each fitted by itself; the worst: {reports[worst].message}"
    if alike := [k for k, r in enumerate(reports) if r.details["unseen"]]:
        message += f" All examples have the same y of the labels {checks.listing(alike)}."
    within = all(r.converged for r in reports)
    report = Report(within, steps, before, after, history, seconds, message, details, reports[worst].reached)
    offsets, slopes, z = (torch.cat([getattr(part, name) for part in found], 1) for name in ("offsets", "slopes", "z"))
    return Solution(offsets, slopes, torch.cat(tables, 3), z, report, _side_by_side([part.trees for part in found]))


def _side_by_side(parts: Sequence[TreesFound | None]) -> TreesFound | None:
    """Trees of each column, which do not move the others."""
    pad, last = torch.nn.functional.pad, len(parts) - 1
    wide = ((p, (k, last - k)) for k, p in enumerate(parts) if p is not None)
    kept = [p._replace(leaf=pad(p.leaf, sides), weight=pad(p.weight, sides)) for p, sides in wide]
    if not kept:
        return None
    names = ("column", "cut", "kind", "leaf", "place")
    joined: dict[str, Any] = {name: torch.cat([getattr(p, name) for p in kept]) for name in names}
    return kept[0]._replace(weight=torch.stack([p.weight for p in kept]).sum(0), **joined)


class _Attempt(NamedTuple):
    """What :func:`_attempt` found, and the largest |violation| / tolerance of it."""

    excess: float
    offsets: Tensor
    slopes: Tensor
    tables: Tensor
    z: Tensor
    after: Measure
    history: list[float]
    reason: str
    trees: TreesFound | None = None


def _attempt(
    sample: Sample, before: Measure, max_iter: int, static: Found | None, grow: Callable[[Tensor], TreesFound | None] | None = None
) -> _Attempt:
    """Offsets and slopes if there are any, trees if there are any, then rounds; the best prefix of them."""
    z, measure, reason = sample.z, before, "converged"
    offsets = torch.zeros(sample.member.shape[1], z.shape[1], dtype=torch.float64, device=z.device)
    slopes = torch.zeros_like(offsets)
    history, rounds = [_worst(sample, measure)], _Rounds(sample, before.brier)
    if static is not None:
        for halving in range(HALVINGS + 2):  # the log loss falls all the way, the Brier score need not; the last is 0
            z, offsets, slopes = sample.apply(static.theta * (0.5**halving if halving <= HALVINGS else 0.0))
            measure = sample.measure(z)
            if measure.brier <= before.brier:
                break
        history.append(_worst(sample, measure))
    trees = None if grow is None else grow(z)
    if trees is not None and len(trees.column):
        moved = sample.measure(trees.z)
        if moved.brier <= measure.brier:
            z, measure, rounds.slack = trees.z, moved, LEAST_STEP
            history.append(_worst(sample, measure))
        else:
            trees = None
    start = len(history)
    best = (float(sample.excess(measure).max()), 0, z, measure)
    for _ in range(max_iter):
        if best[0] <= 1:
            break
        stepped = rounds.step(z, measure)
        if stepped is None:
            reason = "stuck" if reason == "converged" else reason
            break
        z, measure = stepped
        history.append(_worst(sample, measure))
        excess = float(sample.excess(measure).max())
        if excess < best[0]:
            best = (excess, len(rounds.tables), z, measure)
    else:
        reason = "max_iter"
    excess, count, z, after = best
    shape = (len(offsets), sample.promise.bins, z.shape[1])
    tables = torch.stack(rounds.tables[:count]) if count else offsets.new_zeros(0, *shape)
    return _Attempt(excess, offsets, slopes, tables, z, after, history[: start + count], reason, trees)


class _Rounds:
    """Rounds on the level sets: in each violated level set, a Newton step of all groups with the slack of their noise.

    ``sample``: examples. ``brier``: that of f0. A fit to alpha may spend what it gained since, once no step is left that does
    without.
    """

    def __init__(self, sample: Sample, brier: float) -> None:
        self.sample, self.promise = sample, sample.promise
        self.ceiling, self.most = 0.0, 0.0 if sample.promise.noise_floor else brier
        self.slack = CELL_SLACK if sample.promise.noise_floor else LEAST_STEP  # of the l1 term of a step, in tolerances
        self.tables: list[Tensor] = []
        self.blocked: set[tuple[int, int]] = set()

    def step(self, z: Tensor, measure: Measure) -> tuple[Tensor, Measure] | None:
        """One round that lowers the potential; None when there is none."""
        z = project(z, self.promise.euclidean)
        excess = self.sample.excess(measure).amax(0)  # (b, C)
        order = excess.flatten().argsort(descending=True)
        cells = [divmod(i, excess.shape[1]) for i in order[: int((excess > 1).sum())].tolist()]
        cells = [cell for cell in cells if cell not in self.blocked]
        while cells:
            table = self._table(z, measure, cells)
            found = self._search(z, measure, table)
            if found is not None:
                self.blocked.clear()
                return found
            if len(cells) == 1:
                self.blocked.add(cells[0])
                return self.step(z, measure)
            cells = cells[: len(cells) // 2]  # too many at once: the worst half
        if self.ceiling < self.most:
            self.ceiling = self.most
            self.blocked.clear()
            return self.step(z, measure)
        return None

    def _table(self, z: Tensor, measure: Measure, cells: list[tuple[int, int]]) -> Tensor:
        """Steps (1 + a, b, C): a lasso in every level set of ``cells``."""
        sample = self.sample
        weight = torch.empty_like(z, dtype=sample.dtype)
        for rows in sample._blocks():
            f = levelsets.probabilities(z[rows], self.promise.euclidean)
            weight[rows] = (torch.ones_like(f) if self.promise.euclidean else curvature(z[rows], f, False)) * sample.share[rows]
        bins = self.promise.bins
        blocks = self._hessians(measure.level, weight, cells)
        level, column = (torch.tensor(part, device=z.device) for part in zip(*cells, strict=True))
        slack = self.slack * sample.tolerance(measure)
        steps = solve_lasso(blocks, measure.violation[:, level, column].T, slack[:, level, column].T)
        steps = snap(steps.T.clamp(-LARGEST / 2, LARGEST / 2), UNIT * 2.0**HALVINGS)  # (1 + a, cells)
        table = torch.zeros(len(steps), bins, z.shape[1], dtype=torch.float64, device=z.device)
        for place, (k, one) in enumerate(cells):
            if k == bins:  # the union: the same for every level set
                table[:, :, one] += steps[:, place, None]
            else:
                table[:, k, one] += steps[:, place]
        return table

    def _hessians(self, level: Tensor, weight: Tensor, cells: list[tuple[int, int]]) -> Tensor:
        """Second derivative of each cell, ``(cells, 1 + a, 1 + a)``, of a large one from some of its examples."""
        sample, found = self.sample, []
        insides = [(level[:, column] == k) | (k == self.promise.bins) for k, column in cells]
        counts = over_ranks(torch.stack([inside.sum() for inside in insides]))
        for inside, count, (_, column) in zip(insides, counts.tolist(), cells, strict=True):
            few = None if count < 2 * SAMPLE else sample.places.few(SAMPLE, count)
            some = (inside if few is None else inside & few).nonzero()[:, 0]
            member = sample.member[some].double()  # collinear columns need it
            block = member.T @ (member * weight[some, column, None].double())
            found.append(torch.cat([block.flatten(), block.new_tensor([len(some)])]))
        sums = over_ranks(torch.stack(found))
        blocks = sums[:, :-1].reshape(len(cells), *block.shape) * (counts / sums[:, -1].clamp_min(1.0))[:, None, None]
        # Along collinear columns a step is as long as this says, not as rounding (the order of the examples) does.
        ridge = RIDGE * blocks.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)
        return blocks + torch.diag_embed(ridge.expand(-1, blocks.shape[1]))

    def _search(self, z: Tensor, measure: Measure, table: Tensor) -> tuple[Tensor, Measure] | None:
        """The whole step, or the first of its halves, quarters, ... that lowers the potential with a Brier score allowed."""
        sample = self.sample
        used = (table != 0).flatten(1).any(0).nonzero()[:, 0]  # columns of the flat table
        column, move = torch.arange(z.shape[1], device=z.device), torch.empty_like(z)  # (n, C)
        for one in sample._blocks(ROWS):
            some = measure.level[one].long() * z.shape[1] + column
            moves = z.new_zeros(len(some), table[0].numel())
            moves[:, used] = exact_product(sample.member[one], table.flatten(1)[:, used])
            move[one] = moves.gather(1, some)
        start = self._losses(z)[0]
        for halving in range(HALVINGS + 1):
            length = 0.5**halving
            trial = torch.sub(z, move, alpha=length)
            value, brier = self._losses(trial)
            if value < start and brier <= max(measure.brier, self.ceiling):
                self.tables.append(length * table)
                return trial, sample.measure(trial)
        return None

    def _losses(self, z: Tensor) -> tuple[float, float]:
        """The potential, and the Brier score; of a projected f they are the same."""
        sample, euclidean = self.sample, self.promise.euclidean
        sums = z.new_zeros(2)
        for one in sample._blocks():
            y, share, f = sample.y[one], sample.share[one], levelsets.probabilities(z[one], euclidean)
            brier = ((f - y).square() * share).sum()
            sums += torch.stack([brier if euclidean else (loss(z[one], f, y, False) * share).sum(), brier])
        value, brier = over_ranks(sums).tolist()
        return value, brier


def _worst(sample: Sample, measure: Measure) -> float:
    scaled = (measure.violation / sample.scale)[0 if sample.promise.everyone else 1 :]
    return float(scaled.abs().max()) if scaled.numel() else 0.0


def _rows(table: Tensor, sample: Sample) -> Tensor:
    """Groups in their order, everyone last: ``(a, b' C)``."""
    rows = [table[1:], table[:1]] if sample.promise.everyone else [table[1:]]
    return torch.cat(rows).flatten(1)


def _report(
    sample: Sample, before: Measure, found: _Attempt, static: Found | None, max_iter: int, names: Names, seconds: float
) -> Report:
    promise, after = sample.promise, found.after
    width, k = promise.width, math.nan if static is None else static.k
    alpha = None if promise.alpha is None else promise.alpha * width
    first, last = (_rows(width * m.violation / sample.scale, sample) for m in (before, after))
    tolerance = _rows(width * sample.tolerance(after) / sample.scale, sample)
    bound = _rows(width * noise.bound(noise.among(after.error[1:].numel()), after.error, after.sizes) / sample.scale, sample)
    state = reached(last, alpha, torch.maximum(tolerance, bound) if promise.noise_floor else bound)
    worst, largest = int((last.abs() / tolerance).argmax()), int(last.abs().argmax())
    met = float(last.abs().flatten()[largest])
    who, what = divmod(worst, last.shape[1])
    place = f"violation {abs(float(last[who, what])):.4g} > {float(tolerance[who, what]):.4g} in {names.label(who, what)}"
    small = noise.small_groups(names.who[: len(sample.sizes)], sample.sizes, 0.5)
    asked = "as small as the sample can resolve" if alpha is None else f"alpha = {alpha:.4g}"
    text = f"asked {asked}, met {met:.4g} on the sample (in {names.label(*divmod(largest, last.shape[1]))})."
    text += (f" {_how(static)}" if promise.noise_floor else "") + noise.too_small(small)
    if sample.unseen and static is not None:
        text += f" No example has y = {checks.listing(sample.unseen)}: the fit (not the violations) adds half an example at most."
    above = 0 if alpha is None or not promise.noise_floor else int((last.abs() > alpha).sum())
    if above and state == "noise":
        text += f" {above} of {last.numel()} cells lie above alpha but within their own noise (noise_floor=False chases them)."
    if static is not None and not static.optimal:
        text += " The conditions of the optimum are not met for every group: plain steps got no further."
    if state == "no":
        text += {
            "max_iter": f" `max_iter` = {max_iter} rounds reached with {place}; raise `max_iter`, or `alpha`.",
            "stuck": f" Stopped with {place}: no step lowers the potential without raising the Brier score. Try a larger "
            "`alpha`, fewer `bins`, or more data.",
        }.get(found.reason, "")
    limited = 0 if alpha is None else int(((last.abs() > alpha) & (last.abs() <= tolerance)).sum())
    variance, alike = sample.count * _rows(width * after.error, sample).square(), math.nan if static is None else static.alike
    details: dict[str, Any] = {"examples": sample.count, "alpha_asked": alpha, "alpha_met": met, "slack": k, "small": small}
    details |= {"noise_limited": limited, "tolerance": tolerance, "variance": variance, "alike": alike, "unseen": sample.unseen}
    details |= {"brier_before": before.brier * width**2, "brier_after": after.brier * width**2}
    values = torch.tensor(found.history, dtype=torch.float64) * width
    return Report(state == "alpha", len(found.history) - 1, first, last, values, seconds, text, details, state)


def _how(static: Found | None) -> str:
    if static is None or math.isnan(static.alike):
        return noise.explain(math.nan if static is None else static.k, True, [])
    return (
        "Offsets and slopes of groups are drawn to everyone's as far as held-out loss says "
        f"(weight of the fit in which no group differs: {100 * static.alike:.0f} %)."
    )
