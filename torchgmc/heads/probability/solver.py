r"""Multicalibrated probabilities: offsets of all groups at once by Newton steps, then rounds on groups x level sets.

In coordinates z (logit or identity, see :mod:`torchgmc.heads.levelsets.steps`) both geometries have a convex potential
:math:`E[\psi(z) - y z]` whose derivative is s = f(z) - y: the log loss for ``"kl"``, a Huber-like loss for ``"euclidean"``.
So a violation is a slope of the potential, and all offsets can be found at once.
"""

import math
import time
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchgmc.engine.lasso import solve_lasso
from torchgmc.engine.solver import Report
from torchgmc.engine.statistics import PerExample
from torchgmc.engine.values import Names
from torchgmc.heads.levelsets import steps as levelsets
from torchgmc.heads.levelsets.problem import check_masses
from torchgmc.heads.levelsets.steps import LARGEST, ROWS, UNIT, cell_sums, exact_product, project, snap
from torchgmc.heads.probability.newton import HALVINGS, Newton, curvature, loss

#: Slack of an offset and of a cell's step, and the least violation worth mending, in standard errors of the cell's sum.
STATIC_SLACK, CELL_SLACK, FLOOR = 0.5, 2.0, 3.0
#: Rows that a Hessian is estimated from (the slope itself always uses every row).
SAMPLE = 1 << 14
#: A membership with fewer entries is kept in float64.
SMALL = 1 << 20


@dataclass
class ProbabilityStatistics(PerExample):
    """What a calibration set is reduced to.

    Attributes:
        z: coordinates of f0, float64 ``(n, C)``.
        y: outcomes in [0, 1], float64 ``(n, C)``; rows of classes sum to 1.
        member: groups, bool ``(n, a)``.
        weight: float64 ``(n,)``.
    """

    z: Tensor
    y: Tensor
    member: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Promise:
    """What is asked: |violation| <= alpha on every (group, level set, class), where the sample can tell.

    Attributes:
        alpha: largest violation.
        edges: inner edges of the level sets, empty for one; see :func:`torchgmc.heads.levelsets.steps.equal_width`.
        euclidean: geometry.
        conditional: violations are divided by P(A).
        noise_floor: a violation below three standard errors of its own sum is left alone.
        events: y is 0 or 1 (the variance of a cell is then also known from f).
        low, width: f and y were brought to [0, 1] from [low, low + width]; reports are in the units of y, ``alpha`` is not.
    """

    alpha: float
    edges: Tensor
    euclidean: bool
    conditional: bool
    noise_floor: bool
    events: bool
    low: float = 0.0
    width: float = 1.0

    @property
    def bins(self) -> int:
        """Level sets."""
        return len(self.edges) + 1


class Solution(NamedTuple):
    """Offsets ``(1 + a, C)`` and rounds ``(T, 1 + a, b, C)`` (row 0 is for everyone), z at the end, and the report."""

    offsets: Tensor
    tables: Tensor
    z: Tensor
    report: Report


class Measure(NamedTuple):
    """One search over all cells at some f: violations, tolerances and slacks ``(1 + a, b, C)``, and the losses."""

    level: Tensor
    violation: Tensor
    error: Tensor  # standard error of each violation
    brier: float


class Sample:
    """Examples laid out for fast sums; row 0 of every table is the group of everyone.

    Args:
        examples: at least one.
        promise: what is asked.
    """

    def __init__(self, examples: ProbabilityStatistics, promise: Promise) -> None:
        member = examples.member
        n, a = member.shape
        cpu = member.device.type == "cpu" and torch.get_float32_matmul_precision() == "highest"
        self.dtype = torch.float32 if cpu and n * a > SMALL else torch.float64
        self.member = torch.ones(n, a + 1, dtype=self.dtype, device=member.device)
        self.member[:, 1:] = member
        self.z, self.y, self.promise = examples.z, examples.y, promise
        self.share = (examples.weight / examples.weight.sum())[:, None]  # (n, 1)
        self.mass = self._transposed(self.share)[:, 0]  # (1 + a,): P(A)
        self.scale = (self.mass if promise.conditional else torch.ones_like(self.mass))[:, None, None]

    def _transposed(self, values: Tensor) -> Tensor:
        """member^T values, float64, in pieces."""
        total = torch.zeros(self.member.shape[1], values.shape[1], dtype=torch.float64, device=values.device)
        for part, some in zip(torch.split(self.member, ROWS), torch.split(values.to(self.dtype), ROWS), strict=True):
            total += part.T @ some
        return total

    def level(self, z: Tensor) -> Tensor:
        """Level set of each example and class."""
        if z.shape[1] > 1 or z.device.type != "cpu":
            return levelsets.levels(z, self.promise.edges, self.promise.euclidean)
        return torch.bucketize(z, self.promise.edges, right=True)

    def measure(self, z: Tensor) -> Measure:
        """Search every cell at z."""
        f = levelsets.probabilities(z, self.promise.euclidean)
        level, s = self.level(z), f - self.y
        square = s.square()
        brier = float((square * self.share).sum())
        if self.promise.events:
            square = 0.5 * (square + f * (1.0 - f))  # a cell without events would look free of noise
        # One pass for both sums; the second is scaled up so that float32 holds it as well as the first.
        both = torch.cat([s * self.share, square * (self.share.square() * len(s))], 1)
        sums = cell_sums(self.member, both.to(self.dtype), level.repeat(1, 2), self.promise.bins)
        violation, variance = torch.split(sums, z.shape[1], 2)
        return Measure(level, violation.contiguous(), (variance / len(s)).sqrt(), brier)

    def tolerance(self, measure: Measure) -> Tensor:
        """Largest violation allowed in each cell (not divided by P(A))."""
        asked = (self.promise.alpha * self.scale).expand_as(measure.error)
        return torch.maximum(asked, FLOOR * measure.error) if self.promise.noise_floor else asked

    def slack(self, error: Tensor, factor: float) -> Tensor:
        """Slack of the l1 term: well inside the noise, or just inside alpha if the noise is not to count."""
        return factor * error if self.promise.noise_floor else (0.95 * self.promise.alpha * self.scale).expand_as(error)

    def excess(self, measure: Measure) -> Tensor:
        """|violation| / tolerance of the groups asked for (everyone is not among them), ``(a, b, C)``."""
        return (measure.violation.abs() / self.tolerance(measure).clamp_min(1e-300))[1:]


def static_offsets(sample: Sample) -> Tensor:
    """Offsets of every group (and everyone) at once, ``(1 + a, C)``: on a thinned sample first, then on all of it."""
    newton = Newton(sample.member, sample.z, sample.y, sample.share, sample.promise.euclidean)
    n = len(sample.z)
    f = levelsets.probabilities(sample.z, sample.promise.euclidean)
    square = ((f - sample.y).square() * sample.share.square()).to(sample.dtype)
    error = sample._transposed(square).sqrt()  # (1 + a, C)
    slack = sample.slack(error[:, None], STATIC_SLACK)[:, 0]
    theta, hessian = torch.zeros_like(error), None
    if n > 4 * SAMPLE:
        few = newton.thin(SAMPLE)
        theta = few.minimise(theta, slack * math.sqrt(n / len(few.z)) if sample.promise.noise_floor else slack, None, 20, 0.5)
        hessian = newton.thin(2 * SAMPLE).hessian(theta)
    return newton.minimise(theta, slack, hessian, 50, 0.05)


def fit(examples: ProbabilityStatistics, promise: Promise, max_iter: int, names: Names) -> Solution:
    """Newton on all offsets, then rounds on the level sets until every cell is within its tolerance.

    Every step lowers the potential and does not raise the Brier score. Of all rounds the best prefix is kept, and the result
    is never further from the promise than f0.
    """
    started = time.perf_counter()
    sample = Sample(examples, promise)
    check_masses(sample.mass[1:], names.who)
    before = sample.measure(sample.z)
    start = float(sample.excess(before).max())
    found = _attempt(sample, before, max_iter, static=start > 1)
    if found.excess > max(1.0, start):  # a tiny sample: the offsets moved examples between level sets for the worse
        found = _attempt(sample, before, max_iter, static=False)
    offsets, tables = found.offsets, found.tables
    if promise.bins == 1 and not promise.euclidean:  # one level set and no projection: the rounds are offsets too
        offsets, tables = offsets + tables.sum(0)[:, 0], tables[:0]
    seconds = time.perf_counter() - started
    report = _report(sample, before, found.after, found.history, found.reason, max_iter, names, seconds)
    return Solution(offsets, tables, found.z, report)


class _Attempt(NamedTuple):
    """What :func:`_attempt` found, and the largest |violation| / tolerance of it."""

    excess: float
    offsets: Tensor
    tables: Tensor
    z: Tensor
    after: Measure
    history: list[float]
    reason: str


def _attempt(sample: Sample, before: Measure, max_iter: int, static: bool) -> _Attempt:
    """Offsets if ``static``, then rounds; the best prefix of them."""
    z, measure, reason = sample.z, before, "converged"
    offsets = torch.zeros(sample.member.shape[1], z.shape[1], dtype=torch.float64, device=z.device)
    history, rounds = [_worst(sample, measure)], _Rounds(sample)
    if static:
        z, offsets, reason = _shorten(sample, static_offsets(sample), measure.brier)
        measure = sample.measure(z)
        history.append(_worst(sample, measure))
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
    tables = torch.stack(rounds.tables[:count]) if count else offsets.new_zeros(0, *before.violation.shape)
    return _Attempt(excess, offsets, tables, z, after, history[: 1 + static + count], reason)


def _shorten(sample: Sample, offsets: Tensor, brier: float) -> tuple[Tensor, Tensor, str]:
    """z after the offsets, on the grid; halved until the Brier score has not risen."""
    for halving in range(HALVINGS):
        used = snap(offsets * 0.5**halving, UNIT)
        z = sample.z - exact_product(sample.member, used)
        f = levelsets.probabilities(z, sample.promise.euclidean)
        if float(((f - sample.y).square() * sample.share).sum()) <= brier:
            return z, used, "converged" if halving == 0 else "brier"
    return sample.z, torch.zeros_like(offsets), "brier"


class _Rounds:
    """Rounds on the level sets: in each violated level set, a Newton step of all groups with the slack of their noise."""

    def __init__(self, sample: Sample) -> None:
        self.sample, self.promise = sample, sample.promise
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
        return None

    def _table(self, z: Tensor, measure: Measure, cells: list[tuple[int, int]]) -> Tensor:
        """Steps (1 + a, b, C): a lasso in every level set of ``cells``."""
        sample = self.sample
        f = levelsets.probabilities(z, self.promise.euclidean)
        weight = (torch.ones_like(f) if self.promise.euclidean else curvature(z, f, False)) * sample.share
        weight = weight.to(sample.dtype)
        blocks = [self._hessian(measure.level[:, column] == k, weight[:, column]) for k, column in cells]
        level, column = (torch.tensor(part, device=z.device) for part in zip(*cells, strict=True))
        slack = sample.slack(measure.error, CELL_SLACK)
        steps = solve_lasso(torch.stack(blocks), measure.violation[:, level, column].T, slack[:, level, column].T)
        table = torch.zeros_like(measure.violation)
        table[:, level, column] = snap(steps.T.clamp(-LARGEST / 2, LARGEST / 2), UNIT * 2.0**HALVINGS)
        return table

    def _hessian(self, inside: Tensor, weight: Tensor) -> Tensor:
        rows = inside.nonzero()[:, 0]
        stride = max(1, len(rows) // SAMPLE)
        some = rows[::stride]
        member = self.sample.member[some]
        factor = len(rows) / max(1, len(some))
        return (member.T @ (member * weight[some, None])).double() * factor

    def _search(self, z: Tensor, measure: Measure, table: Tensor) -> tuple[Tensor, Measure] | None:
        """The whole step, or the first of its halves, quarters, ... that lowers the potential and not raises Brier."""
        sample, euclidean = self.sample, self.promise.euclidean
        used = (table != 0).flatten(1).any(0).nonzero()[:, 0]  # columns of the flat table
        moves = torch.zeros(len(z), table[0].numel(), dtype=torch.float64, device=z.device)
        moves[:, used] = exact_product(sample.member, table.flatten(1)[:, used])
        place = measure.level * z.shape[1] + torch.arange(z.shape[1], device=z.device)
        move = moves.gather(1, place)  # (n, C)
        start = self._loss(z, measure.brier)
        for halving in range(HALVINGS + 1):
            length = 0.5**halving
            trial = z - length * move
            f = levelsets.probabilities(trial, euclidean)
            brier = float(((f - sample.y).square() * sample.share).sum())
            if self._loss(trial, brier) < start and brier <= measure.brier:
                self.tables.append(length * table)
                return trial, sample.measure(trial)
        return None

    def _loss(self, z: Tensor, brier: float) -> float:
        """The potential of a projected f is the Brier score itself."""
        if self.promise.euclidean:
            return brier
        f = levelsets.probabilities(z, False)
        return float((loss(z, f, self.sample.y, False) * self.sample.share[:, 0]).sum())


def _worst(sample: Sample, measure: Measure) -> float:
    scaled = (measure.violation / sample.scale)[1:]
    return float(scaled.abs().max()) if scaled.numel() else 0.0


def _report(
    sample: Sample,
    before: Measure,
    after: Measure,
    history: list[float],
    reason: str,
    max_iter: int,
    names: Names,
    seconds: float,
) -> Report:
    promise = sample.promise
    width, alpha = promise.width, promise.alpha * promise.width
    first, last = ((width * m.violation / sample.scale)[1:].flatten(1) for m in (before, after))  # (a, b C)
    tolerance = (width * sample.tolerance(after) / sample.scale)[1:].flatten(1)
    worst = int((last.abs() / tolerance).argmax())
    who, what = divmod(worst, last.shape[1])
    largest = int(last.abs().argmax())
    met = float(last.abs().flatten()[largest])
    converged = bool((last.abs() <= tolerance).all())
    spared = int(((last.abs() > alpha) & (last.abs() <= tolerance)).sum())

    place = f"violation {abs(float(last[who, what])):.4g} > {float(tolerance[who, what]):.4g} in {names.label(who, what)}"
    note = ""
    if spared:
        note = (
            f" {spared} of {last.numel()} cells lie above alpha but within {FLOOR:g} standard errors of their own sum: chasing "
            "them would fit noise (noise_floor=False does)."
        )
    if converged:
        text = f"asked alpha = {alpha:.4g}, met {met:.4g} on the sample (in {names.label(*divmod(largest, last.shape[1]))})."
    elif reason == "max_iter":
        text = f"`max_iter` = {max_iter} rounds reached with {place}; raise `max_iter`, or `alpha`."
    elif reason == "brier":
        text = f"stopped with {place}: a further step would raise the Brier score. Try the other `geometry`, or more `bins`."
    else:
        text = (
            f"stopped with {place}: no step lowers the potential without raising the Brier score. Try a larger `alpha`, fewer "
            "`bins`, or more data."
        )
    details = {
        "examples": len(sample.z),
        "alpha_asked": alpha,
        "alpha_met": met,
        "noise_limited": spared,
        "tolerance": tolerance,
        "brier_before": before.brier * width**2,
        "brier_after": after.brier * width**2,
    }
    values = torch.tensor(history, dtype=torch.float64) * width
    return Report(converged, len(history) - 1, first, last, values, seconds, text + note, details)


def in_units(report: Report, width: float) -> Report:
    """A report on f and y in [0, 1], with violations in the units of a y that had a range of this width."""
    if width == 1.0:
        return report
    return replace(
        report,
        violations_before=report.violations_before * width,
        violations_after=report.violations_after * width,
        history=report.history * width,
        message=f"{report.message} (Values in this message are relative to the width of `range`.)",
    )
