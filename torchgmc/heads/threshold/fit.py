"""Thresholds of all groups at once under the noise rule, from risk curves or from every score."""

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchgmc.distributed import total as over_ranks, totals
from torchgmc.engine import noise, trees
from torchgmc.engine.clusters import deal_clusters, total
from torchgmc.engine.noise import small_groups
from torchgmc.engine.offsets import Curves, Folded, Offsets, fit_offsets, fit_offsets_to, quantile_of_all, span_of
from torchgmc.engine.pinball import LIMIT
from torchgmc.engine.solver import Report, reached
from torchgmc.engine.values import Names
from torchgmc.groups.cells import pattern_ids, with_everyone
from torchgmc.heads import finite
from torchgmc.heads.contract import EVERYONE
from torchgmc.heads.learned import Found as TreesFound, looked_at
from torchgmc.heads.threshold.problem import POINTS, CurveProblem, CurveStatistics, RiseStatistics, SampleProblem, SampleStatistics

if TYPE_CHECKING:
    from torchgmc.heads.threshold.head import ThresholdHead

#: Without a lattice offsets are multiples of this part of the step that can be distinguished, so that their sums are exact.
PARTS = 1024
#: Scores of an image that trees look at.
SKETCH = 32


class Fitted(NamedTuple):
    """Threshold of everyone ``(C,)``, what each group adds ``(a, C)``, the report, and whether its last row is everyone."""

    base: Tensor
    offsets: Tensor
    report: Report
    everyone: bool


class Spread(NamedTuple):
    """What the noise of one class depends on, at its common threshold.

    ``error``: standard error of each group's violation, and everyone's, ``(a + 1,)``. ``sizes``: examples, or clusters, of
    each, ``(a + 1,)``. ``skewness``: of s.
    """

    error: Tensor
    sizes: Tensor
    skewness: float


def grow(head: "ThresholdHead", statistics: SampleStatistics, target: Tensor) -> TreesFound | None:
    """Trees that move the threshold of each image, on the pinball loss of its scores; target: of the rising risk ``(C,)``."""
    divided = head.divide(statistics)
    if divided is None:
        return None
    seen = torch.ones_like(statistics.weight)
    seen[divided.order[len(seen) - divided.held :]] = 0.0

    def thresholds(some: SampleStatistics) -> Tensor:
        found = fit_thresholds(head, some, head.problem_of(some))
        return found.base + statistics.member.double() @ found.offsets  # (n, C)

    final = thresholds(statistics)
    start = thresholds(replace(statistics, mass=statistics.mass * seen[:, None], share=statistics.share * seen[statistics.example]))
    start = torch.where(start.isfinite(), start, final)  # a class that nobody else has
    table, weight = statistics.sketch(SKETCH)
    away = (table - final[..., None])[weight > 0].abs()
    scale = 2.0 ** round(math.log2(max(quantile_of_all(away, torch.ones_like(away), 0.5), 1e-6)))
    weight = weight * (over_ranks((statistics.mass > 0).sum()) / over_ranks(statistics.mass.sum()))

    def loss(rows: Tensor) -> trees.Loss:
        return trees.pinball(table[rows] / scale, weight[rows], target)

    assert statistics.features is not None
    columns = looked_at(statistics.features, torch.zeros_like(statistics.mass), statistics.member)  # no output
    return head.grow_trees(columns, (start / scale, final / scale), loss, divided, cross=True).scaled(scale, final)


def fit_thresholds(
    head: "ThresholdHead", statistics: CurveStatistics | SampleStatistics, problem: CurveProblem | SampleProblem
) -> Fitted:
    """Fit every class by itself."""
    began = time.perf_counter()
    everyone = head.lacks_everyone(problem.member)
    found, spreads = [], []
    for label in range(problem.mass.shape[1]):
        data = _folded(statistics, problem, label, not head.noise_floor)
        target = float(problem.target[label])
        middle = data.quantile(float(target * data.total)) if float(data.total) else 0.0
        spread = _spread(statistics, problem, label, middle, target)
        spreads.append(spread)
        if head.noise_floor:
            found.append(fit_offsets(data, target, spread.error[:-1], spread.sizes[:-1], spread.skewness, 0.0))
        else:
            found.append(_fit_to_alpha(head, problem, data, target, label, everyone))
    base, offsets = _snap(head, found)
    lam = base + problem.member @ offsets  # (c, C)
    before, after = (problem.violations_at(at, everyone) for at in (torch.full_like(lam, head.init), lam))
    bound = torch.stack([noise.bound(o.k, s.error, s.sizes, s.skewness) for o, s in zip(found, spreads, strict=True)], 1)
    bound = (bound / torch.cat([problem.scale, torch.ones_like(problem.scale[:1])]))[: len(after)]
    state = reached(after, head.alpha, bound)
    sizes = torch.stack([s.sizes[:-1] for s in spreads], 1).amin(1)
    small = small_groups(head.groups, sizes, 0.5)
    place = divmod(int(after.abs().argmax()), after.shape[1])
    name = Names([*head.groups, EVERYONE], problem.names.what).label(*place)
    history = torch.stack([before.abs().max(), after.abs().max()]).cpu()
    text = f"worst |violation| {float(history[1]):.4g} in {name}. {noise.explain(found[0].k, head.noise_floor, small)}"
    if state == "no" or not (head.noise_floor or state == "alpha"):
        text += f" {problem.explain(*place, lam, name)}"
    slack = [o.k for o in found] if head.per_class else found[0].k
    variance = torch.stack([s.error for s in spreads], 1).square() * over_ranks(statistics.examples - statistics.excluded)
    details = {"slack": slack, "noise": bound, "small": small, "variance": variance[: len(after)]}  # (a + 1, C)
    details |= {"tail": problem.tail(lam)} if isinstance(problem, CurveProblem) else {}
    report = Report(state == "alpha", 1, before, after, history, time.perf_counter() - began, text, details, state)
    return Fitted(base, offsets, report, everyone)


def tabulate(
    head: "ThresholdHead", statistics: CurveStatistics | SampleStatistics, problem: CurveProblem | SampleProblem, solver: str
) -> tuple[Tensor, Tensor, Report, bool]:
    """Patterns, their thresholds ``(P, C)``, the report, and whether it has a row for everyone."""
    began = time.perf_counter()
    finite.check_fit(solver, *_equal(statistics))
    patterns = pattern_ids(problem.member > 0)[1]
    known = finite.wanted_patterns(head.groups, patterns, head.patterns)
    covers = not head.risk.increasing
    columns = []
    for label in range(problem.mass.shape[1]):
        data = _folded(statistics, problem, label)
        lam = finite.phantom_thresholds(data, float(problem.target[label]), known, covers, safe=True)
        columns.append(lam if covers else lam - head.resolution_used)  # h = lambda counts as missed: one step to the safe side
    table = torch.stack(columns, 1)
    everyone = head.lacks_everyone(problem.member)
    fitted = finite.look_up(problem.member, known, table, head.safe_end)
    start = torch.full_like(problem.mass, head.init)
    sizes = problem.member.T @ problem.mass.amin(1)
    report = finite.report(
        (head.groups, sizes, float(problem.target.min() if not covers else problem.target.max()), covers),
        (problem.violations_at(start, everyone), problem.violations_at(fitted, everyone), head.alpha),
        (known, table),
        time.perf_counter() - began,
    )
    return known.to(head.base.device), table.to(head.base.device), report, everyone


def _equal(statistics: CurveStatistics | SampleStatistics) -> tuple[bool, bool]:
    """Are all weights 1, and are there clusters?"""
    if isinstance(statistics, SampleStatistics):
        return bool(((statistics.mass == 0) | (statistics.mass == 1)).all()), statistics.cluster.shape[1] > 0
    first, second = statistics.mass.sum(), statistics.moments[0, -1, :, 0].sum()  # of w and of w^2
    return bool((first - second).abs() <= 1e-9 * first) and float(first) == round(float(first)), statistics.clusters is not None


def _fit_to_alpha(
    head: "ThresholdHead", problem: CurveProblem | SampleProblem, data: Folded, target: float, label: int, everyone: bool
) -> Offsets:
    """Offsets of one class that end within alpha on the sample, noise included."""
    alpha = head.goal()

    def worst(found: Offsets) -> float:
        base, offsets = _snap(head, [found])
        thresholds = (base + problem.member @ offsets).expand_as(problem.mass)
        return float(problem.violations_at(thresholds, everyone)[:, label].abs().max()) / alpha

    return fit_offsets_to(data, target, alpha * problem.scale[:, label], worst)


def _snap(head: "ThresholdHead", found: list[Offsets]) -> tuple[Tensor, Tensor]:
    """Common thresholds ``(C,)`` and offsets ``(a, C)`` whose sums are exact, and never below the score they meet.

    On a lattice they are whole steps of it: between its points the risk is not known.
    """
    common = torch.tensor([o.common for o in found], dtype=torch.float64, device=head.base.device)
    groups = torch.stack([o.groups for o in found], 1).to(head.base.device)
    lattice = head.lattice
    if lattice is not None:
        steps = torch.ceil((common - lattice.origin) / lattice.unit - 1e-6)
        groups = torch.floor(groups / lattice.unit + (0.5 + 1e-6))  # halves go up, whatever their last bits
        return lattice.origin + steps * lattice.unit, groups * lattice.unit
    unit = head.resolution_used / PARTS
    groups = torch.round(groups / unit) * unit
    lift = 1 + (groups != 0).sum(0)
    return torch.ceil(common / unit) * unit + unit * lift, groups


def _folded(
    statistics: CurveStatistics | SampleStatistics, problem: CurveProblem | SampleProblem, label: int, tables: bool = False
) -> Folded:
    """Scores of one class: of curves the points of the lattice; if these are many, as ``tables`` where they will do."""
    if isinstance(problem, SampleProblem):
        assert isinstance(statistics, SampleStatistics)
        return _folded_scores(statistics, problem, label)
    assert isinstance(statistics, CurveStatistics)
    points = problem.lattice.points(statistics.steps.device)
    mass, count = statistics.mass[:, :, label], _number(statistics, label)
    if isinstance(statistics, RiseStatistics):
        point, cell, which = statistics.where()
        chosen, (folds, cells) = which == label, mass.shape
        place, where = torch.unique((point // folds * cells + cell)[chosen], return_inverse=True)
        weight = mass.new_zeros(folds, len(place)).index_put_((point[chosen] % folds, where), statistics.steps[chosen])
        return Folded(points[place // cells], place % cells, weight, mass, statistics.member, count)
    steps = statistics.steps[:, :, label]  # (F, c, size)
    if tables and int(torch.count_nonzero(steps)) > 4 * (LIMIT + 2 * len(statistics.member)):
        return Curves(points, points.new_zeros(0, dtype=torch.int64), problem.curve[:, label], mass, statistics.member, count)
    cell, place = (steps != 0).any(0).nonzero(as_tuple=True)
    return Folded(points[place], cell, steps[:, cell, place], mass, statistics.member, count)


def _number(statistics: CurveStatistics, label: int) -> float:
    """Examples (or clusters) that count for a class, after weighting."""
    if statistics.clusters is not None:
        return float((statistics.clusters.mass[:, -1, label] > 0).sum())
    return float(statistics.mass[:, :, label].sum().square() / statistics.moments[0, -1, label, 0].clamp_min(1e-300))


def _folded_scores(statistics: SampleStatistics, problem: SampleProblem, label: int) -> Folded:
    """Every relevant score of one class; with more than 32,768 images this rank's only, see :class:`Folded`."""
    cell, patterns = problem.patterns
    fold, own = deal_clusters(noise.FOLDS, statistics.cluster, *statistics.content()), statistics.mass[:, label]
    chosen = statistics.label == label
    example, scores = statistics.example[chosen], statistics.scores[chosen]
    mass = torch.bincount(fold * len(patterns) + cell, own, noise.FOLDS * len(patterns)).view(noise.FOLDS, -1)
    each = total(own[:, None], statistics.cluster)
    mass, squares, number, images = totals(mass, own.square().sum(), (each > 0).sum().double(), own.new_tensor(len(own)))
    count = number if statistics.cluster.shape[1] else mass.sum().square() / squares.clamp_min(1e-300)
    span = span_of(scores, len(patterns), int(images))
    share, place = statistics.share[chosen][None], fold.to(torch.uint8)[example]
    return Folded(scores, cell[example], share, mass, patterns, float(count), span, fold=place)


def _spread(
    statistics: CurveStatistics | SampleStatistics, problem: CurveProblem | SampleProblem, label: int, middle: float, target: float
) -> Spread:
    """Noise of s = rising risk - target at one threshold for everyone."""
    if isinstance(statistics, SampleStatistics):
        return _spread_of_samples(statistics, label, middle, target)
    assert isinstance(problem, CurveProblem)
    points = problem.points
    high = int(torch.searchsorted(points, torch.tensor(middle, dtype=points.dtype, device=points.device)).clamp(1, POINTS - 1))
    part = min(max((middle - float(points[high - 1])) / float(points[high] - points[high - 1]), 0.0), 1.0)

    def between(table: Tensor) -> Tensor:  # linear between the two nearest points
        return (1 - part) * table[..., high - 1] + part * table[..., high]

    zero, one, two, three = (between(t) for t in statistics.moments[:4, :, label])  # (a + 1,): sums of w^2 R^p
    second = two - 2 * target * one + target**2 * zero
    third = three - 3 * target * two + 3 * target**2 * one - target**3 * zero
    total = problem.total[label]
    mass = with_everyone(problem.member).T @ problem.mass[:, label]
    pooled = second[-1] / zero[-1].clamp_min(1e-300)
    skewness = float(third[-1] / zero[-1].clamp_min(1e-300) / pooled.clamp_min(1e-300) ** 1.5)
    if statistics.clusters is None:
        return Spread(noise.standard_errors(second, zero, total, pooled), mass.square() / zero.clamp_min(1e-300), skewness)
    masses = statistics.clusters.mass[:, :, label]
    sums = between(statistics.clusters.risk[:, :, label]) - target * masses  # (m, a + 1)
    return _spread_from(sums, masses, True, skewness)


def _spread_from(sums: Tensor, masses: Tensor, clusters: bool, skewness: float) -> Spread:
    """From the sums of w s and of w over each example, or cluster, in each set, ``(m, a + 1)``."""
    parts = torch.stack([sums.square().sum(0), masses.square().sum(0), masses.sum(0), (masses > 0).double().sum(0)])
    squares, count, mass, number = over_ranks(parts)
    error = noise.standard_errors(squares, count, mass[-1], squares[-1] / count[-1].clamp_min(1e-300))
    return Spread(error, number if clusters else mass.square() / count.clamp_min(1e-300), skewness)


def _spread_of_samples(statistics: SampleStatistics, label: int, middle: float, target: float) -> Spread:
    chosen = (statistics.label == label) & (statistics.scores <= middle)
    mass = statistics.mass[:, label]
    risk = torch.zeros_like(mass).index_add_(0, statistics.example[chosen], statistics.share[chosen])  # w R
    value = risk - target * mass  # w s
    inside, cluster = with_everyone(statistics.member).double(), statistics.cluster
    sums, masses = (total(inside * part[:, None], cluster) for part in (value, mass))
    skewness = noise.skewness_of(torch.where(mass > 0, value / mass.clamp_min(1e-300), 0.0), mass)
    return _spread_from(sums, masses, cluster.shape[1] > 0, skewness if math.isfinite(skewness) else 0.0)
