r"""Coverage on a label tree as a GMC problem: f = lambda(x), s = 1{the answer covers y} - sigma, sets of answers.

s is the slope in lambda of the pinball loss :math:`(\lambda - r)_+ - \sigma\lambda`, r being the level at which the answer
starts to cover y: coverage grows with lambda. The sets depend on the answers, so a step can move examples out of the set it was
meant to fix. :func:`descend` therefore re-measures every promise after every possible step before it takes one.
"""

import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchgmc.distributed import collected, total as over_ranks
from torchgmc.engine.clusters import total as total_of
from torchgmc.engine.folds import EXACT, Pair, Places, places
from torchgmc.engine.hashing import row_keys
from torchgmc.engine.noise import among, slacks, small_groups, too_small
from torchgmc.engine.search import MAX_ELEMENTS
from torchgmc.engine.solver import OneTensor, Report
from torchgmc.engine.statistics import PerExample
from torchgmc.engine.values import Names
from torchgmc.groups.cells import pattern_ids
from torchgmc.heads.tree.tree import Tree, answers

#: Violated promises looked at per step, and shifts tried for each move (twice: coarse, then between the best's neighbours).
SHORTLIST, CANDIDATES = 8, 128
#: Breakpoints sampled to place those shifts.
SAMPLE = 4096
#: How far past the last breakpoint a shift may go, so that new inputs just beyond it go along.
BEYOND = 0.01
#: Aim at this share of the tolerance: a promise met on the edge is broken by the noise of fresh data.
MARGIN = 0.5
#: Loss of precision (as a share of "always the root") that is free when the gain of a step is weighed against it.
FREE = 0.02
#: A step may not take a set below this share of the examples that could answer with it: emptying it would "fix" it.
KEEP = 0.1


@dataclass
class TreeStatistics(PerExample):
    """What the solver needs of each example; nothing grows with the number of leaves.

    ``levels``: of :func:`~torchgmc.heads.tree.tree.path_levels`, ``(n, height)``. ``leaves``: best leaf, ``(n,)``. ``common``:
    depth of the lowest common ancestor of the best leaf and the label, ``(n,)``: answers down to it cover. ``labels``:
    ``(n,)``; ``member``: static groups, bool, ``(n, a)``; ``weight``: ``(n,)``; ``cluster``: ``(n, 0)`` or ``(n, 1)``.
    """

    layout: ClassVar[dict[str, str]] = {
        "levels": "float n height",
        **{"leaves": "int<leaves n", "common": "int<depths n", "labels": "int<leaves n"},
        **PerExample.layout,
    }
    levels: Tensor
    leaves: Tensor
    common: Tensor
    labels: Tensor
    member: Tensor
    weight: Tensor
    cluster: Tensor


class TreeProblem(OneTensor):
    """Lambda per example; see :class:`torchgmc.engine.solver.Problem`. Who = group * q + set, what = 0.

    Examples may be on several ranks: all sums are over all of them (:func:`torchgmc.distributed.total`), ``count`` examples.

    ``statistics``: of the examples. ``tree``: the tree. ``sets``: nodes of each promised set, bool, ``(V, q)``. ``target``:
    coverage sigma. ``conditional``: the violation of a set is divided by its mass at the current lambda; 0 for a set nobody
    answers with. ``alpha``: tolerance. If ``conditional``, a set's tolerance is at least one standard error of its own
    coverage. ``names``: of the a * q promises. ``init``: f0. ``jitter``: half-width of the noise, for messages.
    """

    dynamic = True
    moving = "lam"

    def __init__(
        self,
        statistics: TreeStatistics,
        tree: Tree,
        sets: Tensor,
        target: float,
        conditional: bool,
        alpha: float | None,
        names: Names,
        init: float,
        jitter: float,
    ) -> None:
        device = statistics.levels.device
        self.stats, self.tree, self.target, self.names, self.label = statistics, tree, target, names.who, names.label
        self.conditional, self.alpha, self.jitter = conditional, alpha, jitter
        self.routes = tree.paths.to(device)[statistics.leaves]  # (n, height + 1)
        self.cell, self.patterns = pattern_ids(statistics.member)
        everyone = torch.ones(1, len(self.patterns), dtype=torch.float64, device=device)
        self.groups = torch.cat([self.patterns.double().T, everyone])  # (a + 1, c): cells of each group, and all of them
        self.weight, self.total = statistics.weight, over_ranks(statistics.weight.sum())
        self.count = int(over_ranks(torch.tensor(len(self.weight))))
        #: Which examples some are chosen by; of few, every so many is taken.
        self.spots: Places | None = places(*statistics.content()) if self.count > EXACT else None
        self.cells = len(torch.unique(collected(row_keys(self.patterns))[0]))  # on all ranks
        self.effective = _effective(statistics)
        self.promised = sets.shape[1]
        extra, self.parts = _parts(tree, sets.cpu())
        self.sets = torch.cat([sets, extra.to(device)], 1)  # (V, q + extra moves)
        breadth = tree.sizes.to(device).double().log() / torch.tensor(float(tree.num_leaves)).double().log()
        self.columns = torch.cat([self.sets[:, : self.promised].double(), breadth[:, None]], 1)  # (V, q + 1)
        self.lam = torch.full_like(statistics.levels[:, 0], init)
        meets = torch.stack([sets[self.routes, j].any(1) for j in range(self.promised)], 1).double()  # (n, q)
        #: Weight of the examples that could answer with each set, (a, q).
        self.reach = over_ranks((statistics.member.double() * self.weight[:, None]).T @ meets)
        self.who: list[int] = []
        self.shift: list[float] = []

    # -- measures ----------------------------------------------------------------------------------------------------

    def nodes(self) -> Tensor:
        """The answers, (n,)."""
        return answers(self.stats.levels, self.routes, self.lam)

    def _depth(self) -> Tensor:
        """Edges between the root and each answer, (n,)."""
        return (self.stats.levels >= self.lam[:, None]).sum(1)

    def _value(self, depth: Tensor | int) -> Tensor:
        """s of every example when it answers at this depth of its path."""
        return (depth <= self.stats.common).double() - self.target

    def sums(self, rows: Tensor | None = None, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Sums of w s and of w over the examples of each promise: two of ``(a + 1, q + 1)``.

        The last row is everybody, the last column weighs by the breadth of the answer.
        """
        weight = self.weight if weight is None else weight
        depth = self._depth()
        node = self.routes.gather(1, depth[:, None])[:, 0]
        place, value = self.cell * self.tree.num_nodes + node, weight * self._value(depth)
        if rows is not None:
            place, value, weight = place[rows], value[rows], weight[rows]
        zeros = value.new_zeros(len(self.patterns) * self.tree.num_nodes)
        shape = len(self.patterns), self.tree.num_nodes
        both = [zeros.index_add(0, place, v).view(shape) @ self.columns for v in (value, weight)]
        sums, mass = over_ranks(torch.stack([self._by_group(table) for table in both]))
        return sums, mass

    def _by_group(self, table: Tensor) -> Tensor:
        """From cells of equal membership ``(..., c, k)`` to groups and everybody ``(..., a + 1, k)``."""
        return self.groups @ table

    def _counted(self, share: Tensor) -> Tensor:
        """No set may hide behind its noise by shrinking: it counts as at least a quarter of what it could be."""
        return torch.maximum(share, 0.25 * self.reach.flatten() / self.total)

    def small(self) -> list[str]:
        """Promises with too few answers at the current lambda to say anything about."""
        share = (self.sums()[1][:-1, :-1] / self.total).flatten()
        return small_groups(self.names, self._counted(share) * self.effective, self.target)

    def measure(self, sums: Tensor, mass: Tensor, total: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Violation and tolerance of each promise from sums and masses ``(..., a + 1, q + 1)``: two of ``(..., a * q)``."""
        total = self.total if total is None else total
        value, share = ((t[..., :-1, :-1] / total).flatten(-2) for t in (sums, mass))
        counted = self._counted(share)
        size = (counted * self.effective).clamp_min(1.0)
        error = (self.target * (1 - self.target) / size).sqrt()
        if not self.conditional:
            error = error * counted
        tolerance = torch.full_like(value, 0.0 if self.alpha is None else self.alpha)
        if self.alpha is None:
            skewness = (1.0 - 2.0 * self.target) / (self.target * (1.0 - self.target)) ** 0.5
            tolerance = slacks(among(value.shape[-1]), error, size, skewness)
        elif self.conditional:
            tolerance = torch.maximum(tolerance, error)
        if self.conditional:
            filled = share > 1e-12
            value = torch.where(filled, value / share.clamp_min(1e-12), torch.zeros_like(value))
        return value, tolerance

    def noise(self) -> Tensor:
        """Violation of each promise that the sample cannot tell from 0, (a * q, 1)."""
        own, self.alpha = self.alpha, None
        found = self.tolerance()
        self.alpha = own
        return found

    def violations(self, split: Pair | None = None) -> Tensor:
        """Signed violations at the current lambda, (a * q, 1)."""
        weight = self.weight if split is None else self.weight * split.outer
        sums, mass = self.sums(weight=weight)
        return self.measure(sums, mass, over_ranks(weight.sum()).clamp_min(1e-300))[0][:, None]

    def tolerance(self) -> Tensor:
        """Tolerance of each promise at the current lambda, (a * q, 1)."""
        return self.measure(*self.sums())[1][:, None]

    def merit(self, sums: Tensor, mass: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Squared excess over the tolerances, worst ratio to them, and lost precision (0 all leaves, 1 all root)."""
        value, tolerance = self.measure(sums, mass)
        ratio = value.abs() / tolerance
        return (ratio - MARGIN).clamp_min(0).square().sum(-1), ratio.amax(-1), mass[..., -1, -1] / self.total

    # -- moves -------------------------------------------------------------------------------------------------------

    def inside(self, who: int) -> Tensor:
        """Members of a move, bool (n,)."""
        group, chosen = divmod(who, self.sets.shape[1])
        return self.sets[self.nodes(), chosen] & self.stats.member[:, group]

    def take(self, who: int, shift: float) -> None:
        """Take a shift off the lambda of a move's members, and note it."""
        self.lam = self.lam - shift * self.inside(who).double()
        self.who.append(who)
        self.shift.append(shift)

    def move(self, who: Tensor, what: Tensor, step: Tensor) -> None:
        """f <- f - step g with g = 1_A, or 1_A / P(A) at the current f."""
        size = float(step)
        if size == 0.0:
            return
        group, chosen = divmod(int(who), self.promised)
        move = group * self.sets.shape[1] + chosen
        if self.conditional:
            size = size / float(self.weight[self.inside(move)].sum() / self.total)
        self.take(move, size)

    def line_search(self, who: Tensor, what: Tensor, violation: Tensor) -> Tensor:
        """Not used: the tree's exact solver is :func:`descend`."""
        raise NotImplementedError("use torchgmc.heads.tree.solver.descend")

    def explain(self, who: int, what: int) -> str:
        """Why no step helps: an atom at the root, or too few examples."""
        tops = collected(self.stats.levels[:, 0].sort().values[[0, -1] if len(self.lam) else []])[0]
        spread = float(tops.max() - tops.min())
        at_most = float(over_ranks(self.weight @ (self.stats.common >= 1).double()) / self.total)
        if self.jitter == 0.0 and spread < 0.01 and at_most < self.target:
            return (
                "The root's score is the same for everyone (an atom), so a threshold sends everyone to the root or no "
                f"one, and below the root at most {at_most:.4g} can be covered against the target {self.target:g}: the "
                "promise is unreachable without noise. Make the head with jitter=0.005."
            )
        group, chosen = divmod(who, self.promised)
        inside = self.sets[self.nodes(), chosen] & self.stats.member[:, group]
        weight = self.weight * inside
        right = weight @ (self.stats.leaves == self.stats.labels).double()
        narrowest = float(torch.div(*over_ranks(torch.stack([right, weight.sum()]))))
        if float(self.violations()[who, 0]) > 0 and narrowest > self.target:
            return (
                f"Answering only the best leaf is already right for {narrowest:.4g} of {self.label(who, 0)}, more than the "
                f"target {self.target:g}: nothing narrower can be answered. Raise `target`, or drop the set."
            )
        return (
            "No step lowers the violations further: too few examples, promises that pull against each other, or scores that "
            "say little about who is right. Try a larger `alpha`, fewer `sets`, or more data."
        )

    # -- the sweep ---------------------------------------------------------------------------------------------------

    def sweep(self, rows: Tensor, start: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        """Sums and masses of every promise after taking each of ``points`` off lambda of the examples ``rows``.

        As the shift grows an example steps down its path, one node per breakpoint (lambda - level). Every breakpoint is filed
        under the first point at or above it, and the running totals are the tables of all points at once.

        ``rows``: indices of the members, (m,). ``start``: sums and masses of the others, ``(2, a + 1, q + 1)``. ``points``:
        rising, (k,). Returns: Two of ``(k, a + 1, q + 1)``.
        """
        breaks = self.lam[rows, None] - self.stats.levels[rows]  # (m, height); inf below the best leaf
        bucket = torch.searchsorted(points, breaks)  # k: never reached
        height, k = breaks.shape[1], len(points)
        routes, weight, common = self.routes[rows], self.weight[rows, None], self.stats.common[rows, None]
        depth = torch.arange(height + 1, device=rows.device)
        value = weight * ((depth <= common).double() - self.target)  # (m, height + 1)
        change = [(value[:, 1:], value[:, :-1]), (weight.expand(-1, height), weight.expand(-1, height))]
        cells, nodes = len(self.patterns), self.tree.num_nodes
        place = (bucket * cells + self.cell[rows, None]) * nodes
        top = self.cell[rows] * nodes + routes[:, 0]  # before the first point all answer the root: filed under the first
        tables = []
        for (enter, leave), first in zip(change, (value[:, 0], weight[:, 0]), strict=True):
            table = value.new_zeros((k + 1) * cells * nodes)
            table.index_add_(0, (place + routes[:, 1:]).flatten(), enter.flatten())
            table.index_add_(0, (place + routes[:, :-1]).flatten(), -leave.flatten())
            table.index_add_(0, top, first)
            tables.append((table.view(k + 1, cells, nodes)[:k] @ self.columns).cumsum(0))
        sums, masses = over_ranks(torch.stack([self._by_group(table) for table in tables]))
        return start[0] + sums, start[1] + masses

    def points(self, rows: Tensor) -> Tensor:
        """Shifts half-way between sampled neighbouring breakpoints, and one beyond each end; rising."""
        if self.spots is not None:
            few = self.spots.few(SAMPLE // self.stats.levels.shape[1], int(over_ranks(torch.tensor(len(rows)))))
            rows = rows if few is None else rows[few[rows]]
        breaks = (self.lam[rows, None] - self.stats.levels[rows]).flatten()
        if self.spots is None:
            breaks = breaks[:: max(1, len(breaks) // SAMPLE)]
        breaks = torch.unique(collected(breaks[breaks.isfinite()])[0])
        ends = torch.stack([breaks[0] - BEYOND, breaks[-1] + BEYOND])
        return torch.cat([ends[:1], (breaks[1:] + breaks[:-1]) / 2, ends[1:]])

    def best_shift(self, who: int, total: Tensor, merit: Tensor, cost: Tensor) -> tuple[Tensor, Tensor] | None:
        """Gain per lost precision of the best shift of a move, and that shift; None for a move without members."""
        rows = self.inside(who).nonzero()[:, 0]
        if int(over_ranks(torch.tensor(len(rows)))) == 0:
            return None
        others = total - torch.stack(self.sums(rows))
        sign = over_ranks(self.weight[rows] @ self._value(self._depth())[rows]).sign()  # of the move's own violation
        points = self.points(rows)
        size = self.cells * self.tree.num_nodes
        many = max(8, min(CANDIDATES, MAX_ELEMENTS // size))
        index = torch.linspace(0, len(points) - 1, min(many, len(points)), device=points.device).round().long()
        best = self._rate(rows, others, points[index], merit, cost, total[1], sign)
        if len(points) > len(index):  # once more between the neighbours of the best
            near = best[0].argmax()
            low, high = index[(near - 1).clamp_min(0)], index[(near + 1).clamp_max(len(index) - 1)]
            fine = torch.linspace(0, 1, many, device=points.device) * (high - low) + low
            best = self._rate(rows, others, points[fine.round().long()], merit, cost, total[1], sign)
        place = best[0].argmax()
        return best[0][place], best[1][place]

    def _rate(
        self, rows: Tensor, others: Tensor, points: Tensor, merit: Tensor, cost: Tensor, mass: Tensor, sign: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gain of each point. A step must go the way of Algorithm 1 for its own members, and must not empty a set.

        Otherwise a set that covers too much could be "fixed" by passing its surest answers to the root.
        """
        sums, masses = self.sweep(rows, others, points)
        after, _, lost = self.merit(sums, masses)
        now, then = mass[:-1, :-1], masses[..., :-1, :-1]
        emptied = ((then < KEEP * self.reach) & (then < now * (1 - 1e-9))).flatten(-2).any(-1)
        gain = (merit - after) / (FREE + (lost - cost).clamp_min(0))
        return gain.masked_fill(emptied | (points * sign < 0), -1.0), points


def _parts(tree: Tree, sets: Tensor) -> tuple[Tensor, list[list[int]]]:
    """Moves beyond the promised sets: the topmost nodes of each set, and the rest of it; bool (V, extra).

    Moving only the topmost nodes lets the solver pass the least certain answers of a set on to a broader node, which no shift
    of the whole set can do. The second result lists, for each promised set, the moves that lie inside it.
    """
    parents = torch.tensor(tree.parents)
    top = sets & ~(sets[parents.clamp_min(0)] & (parents >= 0)[:, None])
    found: dict[tuple[bool, ...], int] = {}
    for index, column in enumerate(map(tuple, sets.T.tolist())):
        found.setdefault(column, index)
    many = sets.shape[1]
    extra: list[tuple[bool, ...]] = []
    own = [[j] for j in range(many)]
    for part in (top, sets & ~top):
        for j, column in enumerate(map(tuple, part.T.tolist())):
            if any(column):
                if column not in found:
                    found[column] = many + len(extra)
                    extra.append(column)
                own[j].append(found[column])
    table = torch.tensor(extra, dtype=torch.bool).view(-1, tree.num_nodes).T
    moves = torch.cat([sets, table], 1)
    within = [(~(moves & ~sets[:, j : j + 1]).any(0)).nonzero()[:, 0].tolist() for j in range(many)]
    return table, [a if len(a) <= 3 * SHORTLIST else b for a, b in zip(within, own, strict=True)]


def descend(problem: TreeProblem, max_iter: int) -> Report:
    """Greedy damped steps: of all shifts of the moves near the worst promises, the one that fixes most per lost precision.

    The merit is the sum over all promises of the squared excess over their tolerance, re-measured after the move with the sets
    it leads to; each step lowers it, so nothing cycles. Lost precision is the mean log size of the answers: without it,
    answering "root" to everybody would fix every set but one by emptying it. Kept is the last lambda that meets every promise
    or, if none does, the last whose worst violation is no worse than at the start; of mass-weighted ones no larger either.
    """
    started = time.perf_counter()
    before = problem.violations()
    history = [before.abs().max()]
    total = torch.stack(problem.sums())
    merit, worst, cost = problem.merit(total[0], total[1])
    start = best = float(worst)
    kept, state, reason = 0, problem.lam, "stuck"
    while float(merit) > 0:
        if len(problem.who) >= max_iter:
            reason = "max_iter"
            break
        rated = [(pair, who) for who in _shortlist(problem, total) if (pair := problem.best_shift(who, total, merit, cost))]
        scores = torch.stack([pair[0] for pair, _ in rated])
        chosen = int(scores.argmax())
        if float(scores[chosen]) <= 1e-9:
            break
        lam = problem.lam
        problem.take(rated[chosen][1], float(rated[chosen][0][1]))
        total = torch.stack(problem.sums())
        now, worst, cost = problem.merit(total[0], total[1])
        if float(now) >= float(merit):  # the sweep and the move differ by rounding at most
            problem.lam = lam
            problem.who.pop(), problem.shift.pop()
            break
        merit = now
        history.append(problem.measure(total[0], total[1])[0].abs().max())
        no_worse = problem.conditional or bool(history[-1] <= history[0])
        if no_worse and float(worst) <= (1.0 if best <= 1.0 else start):
            best, kept, state = float(worst), len(problem.who), problem.lam
    reason = "converged" if best <= 1.0 else reason
    problem.restore(state)
    del problem.who[kept:], problem.shift[kept:]
    after, tolerance = problem.violations(), problem.tolerance()
    seconds = time.perf_counter() - started
    message = _message(problem, reason, after, tolerance, max_iter)
    return Report(best <= 1.0, kept, before, after, torch.stack(history[: kept + 1]).cpu(), seconds, message)


def _shortlist(problem: TreeProblem, total: Tensor) -> list[int]:
    """Moves to try: those inside the sets of the worst promises."""
    value, tolerance = problem.measure(total[0], total[1])
    ratio = value.abs() / tolerance
    worst, order = ratio.sort(descending=True)
    moves: dict[int, None] = {}
    for size, index in zip(worst[:SHORTLIST].tolist(), order[:SHORTLIST].tolist(), strict=True):
        if size > MARGIN:
            group, chosen = divmod(index, problem.promised)
            moves |= {group * problem.sets.shape[1] + j: None for j in problem.parts[chosen]}
    return list(moves)[: 6 * SHORTLIST]


def _message(problem: TreeProblem, reason: str, after: Tensor, tolerance: Tensor, max_iter: int) -> str:
    ratio = (after.abs() / tolerance)[:, 0]
    worst = int(ratio.argmax())
    size, bound, name = abs(float(after[worst, 0])), float(tolerance[worst, 0]), problem.label(worst, 0)
    loose = 0 if problem.alpha is None else int((tolerance > problem.alpha).sum())
    note = f" {loose} sets are too small for alpha and are held to one standard error of their coverage." if loose else ""
    if problem.alpha is None:
        note = " Each set is held to the noise of its own coverage."
    note += too_small(problem.small())
    if reason == "converged":
        return f"every |violation| <= {bound:.4g}; the worst is {size:.4g} in {name}.{note}"
    place = f"violation {size:.4g} > {bound:.4g} in {name}"
    if reason == "max_iter":
        return f"`max_iter` = {max_iter} reached with {place}; raise `max_iter`.{note}"
    return f"stopped with {place}. {problem.explain(worst, 0)}{note}"


def _effective(statistics: TreeStatistics) -> Tensor:
    """Number of independent examples: after weighting, and with whole clusters."""
    weight = total_of(statistics.weight[:, None], statistics.cluster)[:, 0]
    sums, squares = over_ranks(torch.stack([weight.sum(), weight.square().sum()]))
    found: Tensor = sums.square() / squares
    return found
