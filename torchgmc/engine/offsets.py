"""Thresholds per group under the noise rule: one for everyone, an offset for each group that earns it, a last common shift."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from torchgmc.distributed import collected, extremes, from_first, total as over_ranks, totals
from torchgmc.engine import folds, noise
from torchgmc.engine.pinball import LIMIT, Array, Pinball, product, solve

#: Scores from which k is chosen; of more, neighbours become one. Buckets that scores are counted in.
BUCKETS = 512
#: Slacks of a fit that goes to alpha, as parts of it.
INSIDE = (0.95, 0.75, 0.5, 0.0)
#: Of many scores, those near the thresholds that are looked at one by one; cells up to which the others are counted by their
#: distance, in so many octaves; and how often thresholds may leave what is near.
NEAR, CELLS, OCTAVES, PASSES = 1 << 13, 1 << 10, 24, 12
#: Scores counted at a time.
ROWS = 1 << 17
#: Points of a lattice on each side of a threshold that are looked at one by one.
WINDOW = 8


@dataclass(frozen=True)
class Folded:
    """Scores of calibration examples, dealt to folds, in cells of equal membership.

    The risk of a cell at a threshold is the weight of its scores at or below it, over its mass.

    ``scores``: float64 ``(N,)``; ``cell``: int64 ``(N,)``. ``weight``: of each score, by fold, ``(F, N)``. ``mass``: of each
    cell, by fold, ``(F, c)``; where examples may have no score at all it exceeds the sum of the weights. ``member``: groups of
    each cell, bool or fractional ``(c, a)``. ``examples``: number of examples (or clusters) altogether. ``span``: width of the
    scores, a power of two, where they are many, and may be this rank's only; else 0. See :meth:`near`. ``merged``: a score may
    stand for many. ``fold``: of each score, uint8 ``(N,)``, where they are many and each is in one; ``weight`` is ``(1, N)`` then.
    """

    scores: Tensor
    cell: Tensor
    weight: Tensor
    mass: Tensor
    member: Tensor
    examples: float
    span: float = 0.0
    merged: bool = False
    fold: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """Mass of all."""
        return self.mass.sum()

    def columns(self) -> Tensor:
        """Groups that get their own offset: some but not all of the weight, int64."""
        inside = self.member.double().T @ self.mass.sum(0)
        return ((inside > 0) & (inside < self.total * (1 - 1e-12))).nonzero()[:, 0]

    def near(self, centre: Tensor) -> tuple["Folded", float]:
        """Few scores in place of many, over all ranks, and how far thresholds may be from ``centre`` ``(c,)`` to be exact.

        The nearest as they are; of a cell, those beyond at a similar distance become one at their mean, which changes nothing
        in a pinball loss while no threshold passes them. The same on every rank, however the rows are spread.
        """
        if not self.span:
            return replace(self, weight=self.weights(slice(None)), fold=None), math.inf
        cells = len(self.member)
        fine = min(3, max(0, 8 - (cells - 1).bit_length()))  # bits of a distance within its octave
        bins, size = OCTAVES << fine, 2 * cells * OCTAVES << fine
        table, code = self.mass.new_zeros(len(self.mass) + 1, size), torch.empty_like(self.scores, dtype=torch.uint8)
        for start in range(0, len(code), ROWS):
            one = slice(start, start + ROWS)
            scores, cell, weight = self.scores[one], self.cell[one].long(), self.weights(one)
            rest = scores - centre[cell]
            far = (rest.abs() * (2.0**OCTAVES / self.span)).view(torch.int64) >> (52 - fine)
            far = (far - (1023 << fine)).clamp_(0, bins - 1)
            place, code[one] = (2 * cell + (rest > 0)) * bins + far, far.to(torch.uint8)
            table += torch.stack([torch.bincount(place, w, size) for w in (*weight, weight.sum(0) * scores)])
        table, count = totals(table, torch.bincount(code, minlength=bins).double())
        first = int((count.cumsum(0) <= NEAR).sum())  # beyond the nearest
        kept = (code < first).nonzero()[:, 0]
        near = torch.cat([torch.stack([self.scores[kept], self.cell[kept].double()]), self.weights(kept)])
        beyond = torch.arange(size, device=code.device) % bins >= first
        used = (beyond & (table[:-1].sum(0) > 0)).nonzero()[:, 0]
        table = table[:, used]
        merged = torch.cat([(table[-1] / table[:-1].sum(0))[None], (used // (2 * bins)).double()[None], table[:-1]])
        rows = torch.cat([collected(near.T)[0], merged.T])
        rows = rows[rows[:, 0].argsort(stable=True)]
        rows = rows[rows[:, 1].argsort(stable=True)].T.contiguous()
        radius = self.span * 2.0 ** (first // (1 << fine) - OCTAVES) * (1 + first % (1 << fine) / (1 << fine))
        return replace(self, scores=rows[0], cell=rows[1].long(), weight=rows[2:], span=0.0, merged=True, fold=None), radius

    def weights(self, rows: Tensor | slice) -> Tensor:
        """Of some scores, by fold, ``(F, k)``."""
        some = self.weight[:, rows]
        if self.fold is None:
            return some
        return some.new_zeros(len(self.mass), some.shape[1]).scatter_(0, self.fold[rows].long()[None], some)

    def optimum(self, design: Tensor, left: Tensor, linear: Tensor, price: Tensor, theta: Tensor) -> tuple["Folded", Tensor]:
        """Minima of B pinball losses, offsets ``(B, K)``, from others to start from; and the scores that were looked at last.

        These are the :meth:`near` ones, and others where a threshold leaves them. ``left`` ``(B, F)``: weight of each fold.
        """

        def minima(few: Folded, start: Tensor) -> Tensor:
            problem = Pinball(few.scores, few.cell, design, few.merged)
            return solve(problem, left @ few.weight, linear, price, start, exact=1).theta

        for _ in range(PASSES):
            centre = design @ theta[-1]
            few, radius = self.near(centre)
            theta = from_first(partial(minima, few, theta), theta.device)  # one's rounding decides
            moved = (theta @ design.T - centre).abs().amax(1)
            if float(moved.max()) <= radius or float(moved[-1]) <= max(self.span * 2.0**-OCTAVES, radius / 8):
                break
        return few, theta

    def quantile(self, mass: float) -> float:
        """:func:`crossing` of all scores."""
        return crossing(self.scores, self.weight.sum(0), mass, alone=not self.span)[0]

    def bucketed(self, most: int) -> "Folded":
        """About ``most`` scores in place of all: neighbours in a cell become one, at their mean; of about equal weight if some
        were :attr:`merged` before, else as many in each.
        """
        n, cells = len(self.scores), len(self.member)
        if n <= most:
            return self
        order = self.scores.argsort()
        order = order[self.cell[order].argsort(stable=True)]
        cell = self.cell[order]
        count = torch.bincount(cell, minlength=cells)
        mass = self.weight.sum(0)[order] if self.merged else torch.ones_like(self.scores)
        inside = torch.bincount(cell, mass, cells)
        below = mass.cumsum(0) - mass - (inside.cumsum(0) - inside)[cell]  # in the cell
        parts = (inside * (most / inside.sum().clamp_min(1e-300))).ceil().long().clamp_min(1).minimum(count.clamp_min(1))
        place = (below * parts[cell] / inside[cell].clamp_min(1e-300)).long().clamp_min(0).minimum(parts[cell] - 1)
        place += (parts.cumsum(0) - parts)[cell]
        weight = self.weight.new_zeros(len(self.weight), int(parts.sum())).index_add_(1, place, self.weight[:, order])
        total = weight.sum(0)
        sums = torch.zeros_like(total).index_add_(0, place, (self.weight.sum(0) * self.scores)[order])
        used = total > 0
        where = torch.repeat_interleave(torch.arange(cells, device=cell.device), parts)
        return Folded((sums / total.clamp_min(1e-300))[used], where[used], weight[:, used], self.mass, self.member, self.examples)

    def design(self, columns: Tensor) -> Tensor:
        """A column for everyone, and one for each of these groups, ``(c, 1 + k)``."""
        ones = torch.ones(len(self.member), 1, dtype=torch.float64, device=self.member.device)
        return torch.cat([ones, self.member[:, columns].double()], 1)


@dataclass(frozen=True)
class Curves(Folded):
    """Many scores on a lattice; ``scores``: its points ``(size,)``; ``weight``: of each cell at or below each, ``(c, size)``."""

    @property
    def line(self) -> tuple[float, float]:
        """The lowest point, and the step to the next."""
        return float(self.scores[0]), float(self.scores[-1] - self.scores[0]) / (len(self.scores) - 1)

    def at(self, place: Array) -> Array:
        """Weight at or below these places of the lattice, ``(c, k)``; 0 below the first."""
        table, (cells, size) = self.weight.cpu().numpy(), self.weight.shape
        rows = np.arange(0, cells * size, size)[:, None]
        return np.asarray(table.take(rows + np.minimum(np.maximum(place, 0), size - 1)) * (place >= 0))

    def between(self, ends: Array) -> Folded:
        """Scores between ascending places ``(c, k)``, each lower one excluded: of every cell and two neighbours one."""
        (low, unit), weight = self.line, np.diff(self.at(ends), axis=1)  # those beyond the others: near them, for fewer steps
        where = ((ends[:, 1:] + ends[:, :-1] + 1) / 2).clip(ends[:, 1:2] - WINDOW, ends[:, -2:-1] + WINDOW)
        cell, used = (weight > 1e-13 * self.weight[:, -1].max().item()).nonzero()
        scores, cells, heavy = map(torch.from_numpy, (low + unit * where[cell, used], cell, weight[cell, used][None]))
        device, mass = self.mass.device, self.mass.sum(0, keepdim=True)
        return Folded(scores.to(device), cells.to(device), heavy.to(device), mass, self.member, self.examples)

    def quantile(self, mass: float) -> float:
        """The lowest point with at least this mass at or below it; the highest with a weight if there is none."""
        below = self.weight.sum(0)
        return float(self.scores[int(torch.searchsorted(below, min(mass - 1e-12 * abs(mass), float(below[-1]))))])

    def optimum(self, design: Tensor, left: Tensor, linear: Tensor, price: Tensor, start: Tensor) -> tuple[Folded, Tensor]:
        """:meth:`Folded.optimum` of one loss: of the points near offsets that are nearly there; of all if a threshold leaves them.

        Those of a cell beyond are one on each side, which changes nothing while no threshold passes them.
        """
        size, (low, unit), left = len(self.scores), self.line, left[:, :1]
        near = self._approach(*(t.cpu().numpy() for t in (design, left[0, 0], linear[0], price[0], start[0])))
        place = np.rint((product(design.cpu().numpy(), near) - low) / unit).clip(0, size - 1)[:, None].astype(np.int64)
        ends = place + np.concatenate([[-2 * size], np.arange(-WINDOW, WINDOW + 1), [2 * size]])
        begin = torch.from_numpy(near[None]).to(start.device)
        few, theta = self.between(ends).optimum(design, left, linear, price, begin)
        if float(((theta - begin) @ design.T).abs().max()) < (WINDOW - 1) * unit:
            return few, theta
        return self.between(np.arange(-1, size)[None].repeat(len(place), 0)).optimum(design, left, linear, price, start)

    @np.errstate(all="ignore")
    def _approach(self, design: Array, part: Array, linear: Array, price: Array, start: Array) -> Array:
        """Newton's steps on curves that are averaged over ever smaller widths."""
        size, (low, unit), theta, eye = len(self.scores), self.line, start, np.eye(len(start))
        for power in range(size.bit_length() - 3, 0, -1):
            width, reach = unit * (1 << power), 1 << power
            place = np.rint((product(design, theta) - low) / unit).astype(np.int64)
            first, middle, last = part * self.at(place[:, None] + [-reach, 0, reach]).T
            side = np.minimum(np.maximum(theta / width, -1.0), 1.0)
            slope = product((first + 4 * middle + last) / 6, design) + price * side - linear
            bend = product(design.T * (last - first), design) / 2 + eye * (price * (np.abs(side) < 1))  # times the width
            step = width * np.linalg.solve(bend + (1e-9 * bend.trace() + 1e-300) * eye, slope)
            theta = theta - step * min(1.0, 4 * width / max(float(np.abs(design @ step).max()), 1e-300))
        return theta if np.isfinite(theta).all() else start


@dataclass(frozen=True)
class Offsets:
    """What was found: the threshold of everyone, what each group adds ``(a,)``, the slack k and its held-out losses."""

    common: float
    groups: Tensor
    k: float
    loss: Tensor
    shift: float = 0.0


def crossing(scores: Tensor, weight: Tensor, mass: float, alone: bool = False) -> tuple[float, Tensor]:
    """The smallest score of all ranks with at least this mass at or below it (the largest if none); mass up to it, below it.

    Scores are counted in buckets, those in the answer's bucket in smaller ones until they are few: what is sent does not depend
    on n, nor the answer on how the rows are spread. There must be some weight. ``alone``: of this rank's scores.
    """
    goal, below, inside, parts = mass - 1e-12 * max(abs(mass), 1e-300), weight.new_zeros(()), math.inf, BUCKETS // 2
    while inside > NEAR:
        low, high = (float(end) for end in (scores.aminmax() if alone else extremes(scores)))
        if high - low <= 1e-290:  # all are equal
            scores, weight = scores.new_full((1,), low), weight.sum()[None]
            break
        place = ((scores - low) * (parts / (high - low))).long().clamp_(max=parts - 1)
        both = torch.bincount(place, weight, parts).double(), torch.bincount(place, minlength=parts).double()
        sums, count = both if alone else totals(*both)
        covered, used = below + sums.cumsum(0), sums.nonzero()[:, 0]
        bucket = int(torch.searchsorted(covered, goal).clamp(used[0], used[-1]))
        some, inside = place == bucket, float(count[bucket])
        scores, weight, below = scores[some], weight[some], covered[bucket - 1] if bucket else below
    rows = torch.stack([scores, weight.double()], 1)[weight > 0]
    scores, weight = (rows if alone else collected(rows)[0]).T
    scores, place = torch.unique(scores, return_inverse=True)
    covered = torch.cat([below[None], below + torch.bincount(place, weight).cumsum(0)])
    first = int(torch.searchsorted(covered[1:], goal).clamp_max(len(scores) - 1))
    return float(scores[first]), torch.stack([covered[first + 1], covered[first]])


def span_of(scores: Tensor, cells: int = 1, among: int = 0) -> float:
    """:attr:`Folded.span` of the scores of all ranks ``(n,)``, in so many cells; of some ``among`` so many."""
    if (among or int(over_ranks(torch.tensor(len(scores))))) <= folds.EXACT or cells > CELLS:
        return 0.0
    low, high = extremes(scores)
    return 2.0 ** math.frexp(max(high - low, abs(low) * 1e-9, 1e-200))[1]


def quantile_of_all(scores: Tensor, weight: Tensor, part: float) -> float:
    """Smallest score of all ranks with at least this part of the weight at or below it."""
    return crossing(scores, weight, part * float(over_ranks(weight.sum())))[0]


def fit_offsets_to(data: Folded, target: float, alpha: Tensor, worst: Callable[[Offsets], float]) -> Offsets:
    """Offsets that bring every violation within alpha on the sample.

    A slack just inside alpha is enough unless the risk jumps; where a jump goes beyond alpha, smaller slacks are tried, and
    one threshold for everyone.

    ``data``: scores. ``target``: sigma, of the risk that rises with the threshold. ``alpha``: largest violation of each group,
    ``(a,)``. ``worst``: largest |violation| / alpha of all that is promised, with these offsets.
    """
    tried = []
    for part in INSIDE:
        found = _with_slack(data, target, part * alpha)
        tried.append((worst(found), found))
        if tried[-1][0] <= 1.0:
            break
    else:
        alike = torch.zeros_like(found.groups)
        pooled = Offsets(data.quantile(target * float(data.total)), alike, math.nan, alike[:0])
        tried.append((worst(pooled), pooled))
    return min(tried, key=lambda pair: pair[0])[1]


def _with_slack(data: Folded, target: float, slack: Tensor) -> Offsets:
    """Offsets with a given slack per group, ``(a,)``: every violation ends within it, but for jumps of the risk."""
    columns = data.columns()
    design = data.design(columns)
    start = torch.zeros(1, design.shape[1], dtype=torch.float64, device=design.device)
    start[0, 0] = data.quantile(target * float(data.total))
    linear = target * (data.mass.sum(0) / data.total)[None] @ design
    price = torch.cat([slack.new_zeros(1), slack[columns]])[None]
    theta = data.optimum(design, torch.ones_like(data.mass[:, :1]).T / data.total, linear, price, start)[1][0]
    groups = torch.zeros(data.member.shape[1], dtype=torch.float64, device=design.device)
    groups[columns] = theta[1:]
    return Offsets(float(theta[0]), groups, math.nan, torch.zeros(0))


def fit_offsets(data: Folded, target: float, error: Tensor, count: Tensor, skewness: float, ahead: float) -> Offsets:
    """Offsets by the noise rule of :mod:`torchgmc.engine.noise`.

    ``data``: scores in folds. ``target``: sigma, of the risk that rises with the threshold. ``error``: standard error of each
    group's violation, ``(a,)``. ``count``: examples (or clusters) of each group, ``(a,)``. ``skewness``: of s. ``ahead``: how
    far the common threshold goes beyond the target for the example to come, in examples: the rank of split conformal is
    ``target * (n + ahead)``, with ahead = 1.
    """
    columns = data.columns()
    total, folds = data.total, len(data.mass)
    rank = target * (data.examples + ahead) / data.examples  # of the mass of all
    everyone = data.quantile(float(rank * total))
    alike = torch.zeros(data.member.shape[1], dtype=torch.float64, device=data.mass.device)
    kept = (data.mass.sum(1) > 0) & (data.mass.sum(1) < total)  # folds with examples, and others to fit on
    if len(columns) == 0 or int(kept.sum()) < 2:
        return Offsets(everyone, alike, math.inf, torch.zeros(0))
    design = data.design(columns)
    seen = data.near(torch.full_like(data.mass[0], everyone))[0]
    # Fits without each fold, then with all.
    left = torch.cat([1.0 - torch.eye(folds, dtype=torch.float64, device=design.device)[kept], total.new_ones(1, folds)])
    size = (left @ data.mass).sum(1, keepdim=True)
    tried = noise.candidates(len(columns))
    price = torch.stack([noise.slacks(k, error[columns], count[columns], skewness) for k in tried])  # (k, a)
    price = price * (total / size).sqrt()[:, :, None]  # (F + 1, k, a): fewer examples, larger errors
    price = torch.cat([price.new_zeros(*price.shape[:2], 1), price], 2)
    linear, inside = target * (left @ data.mass / size) @ design, data.mass[kept]
    fit = design, left / size, linear

    def chosen() -> Tensor:
        """Held-out losses ``(F, k + 1)``, and offsets ``(F + 1, K)`` with the k that they choose, in a row."""
        few = seen.bucketed(max(BUCKETS, 4 * len(data.member)))
        weight = left @ few.weight / size
        alike = torch.zeros(len(weight), 1, design.shape[1], dtype=torch.float64, device=design.device)
        alike[:, 0, 0] = total.new_tensor([crossing(few.scores, w, target, alone=True)[0] for w in weight])
        each = (part[:, None].expand(-1, len(tried), -1) for part in (weight, linear, alike[:, 0]))
        heavy, ahead, start = (part.flatten(0, 1) for part in each)
        found = solve(Pinball(few.scores, few.cell, design), heavy, ahead, price.flatten(0, 1), start).theta
        theta = torch.cat([found.view(*price.shape), alike], 1)  # (F + 1, k + 1, K)
        out = theta[:-1] @ design.T  # thresholds of each cell by the fit without its fold, (F, k + 1, c)
        over = ((out[:, :, few.cell] - few.scores).clamp_min(0.0) * few.weight[kept][:, None]).sum(2)
        loss = (over - target * (out * inside[:, None]).sum(2)) / inside.sum(1)[:, None]
        place = noise.choose(loss.T, tried).place
        best = theta[:, place]
        if data.span and place < len(tried):  # near enough to look at few scores from there on
            best = seen.bucketed(2 * LIMIT).optimum(*fit, price[:, place], best)[1]
        return torch.cat([loss.flatten(), best.flatten()])

    loss, theta = torch.split(from_first(chosen, design.device), [len(inside) * (len(tried) + 1), linear.numel()])
    choice = noise.choose(loss.view(len(inside), -1).T, tried)
    if math.isinf(choice.k):
        return Offsets(everyone, alike, math.inf, choice.loss)
    # The fits with this k once more, on every score: the last gives the offsets, the others the common shift.
    few, theta = data.optimum(*fit, price[:, choice.place], theta.view(linear.shape))
    rest = few.scores - (theta[:-1] @ design.T)[:, few.cell]  # (F, N)
    shift = crossing(rest.flatten(), few.weight[kept].flatten(), float(rank * inside.sum()), alone=True)[0]
    groups = torch.zeros_like(alike)
    groups[columns] = theta[-1, 1:]
    return Offsets(float(theta[-1, 0]) + shift, groups, choice.k, choice.loss, shift)
