r"""Coverage on a label tree as a GMC problem: f = lambda(x), s = 1{the answer covers y} - sigma, sets of answers.

s is the slope in lambda of the pinball loss :math:`(\lambda - r)_+ - \sigma\lambda`, r being the level at which the answer
starts to cover y: coverage grows with lambda. The sets depend on the answers, so a step can move examples out of the set it was
meant to fix. :func:`descend` therefore re-measures every promise after every possible step before it takes one.
"""

import math
import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchgmc.distributed import collected, total as over_ranks, totals
from torchgmc.engine.clusters import total as total_of
from torchgmc.engine.folds import EXACT, Pair, places
from torchgmc.engine.hashing import row_keys
from torchgmc.engine.noise import among, slacks, small_groups, too_small
from torchgmc.engine.search import MAX_ELEMENTS
from torchgmc.engine.solver import OneTensor, Report
from torchgmc.engine.statistics import PerExample
from torchgmc.engine.values import Names
from torchgmc.groups.cells import fold, pattern_ids, representatives
from torchgmc.heads.tree.tree import Tree, answers

#: Violated promises looked at per step, and shifts tried for each move (twice: coarse, then between the best's neighbours);
#: of many examples twice as many, and so many moves are refined.
SHORTLIST, CANDIDATES, REFINED = 8, 128, 3
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
#: All rows.
ALL = slice(None)


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
        device, height = statistics.levels.device, statistics.levels.shape[1]
        self.tree, self.target, self.names, self.label = tree, target, names.who, names.label
        self.conditional, self.alpha, self.jitter = conditional, alpha, jitter
        self.count = int(over_ranks(torch.tensor(len(statistics.weight))))
        many = self.count > EXACT
        self.stats = statistics = statistics if many else statistics.sorted()
        few = places(*statistics.content()).few(SAMPLE // height, self.count) if many else None
        #: Of many examples, those whose breakpoints place the shifts of all moves; of several ranks, copies without weight on each.
        self.some = None if few is None else few.nonzero()[:, 0]
        if self.some is not None:
            copies = TreeStatistics(*(collected(part)[0] for part in vars(statistics.pick(self.some)).values()))
            if copies.rows > len(self.some):
                self.some = torch.arange(statistics.rows, statistics.rows + copies.rows, device=device)
                self.stats = statistics = statistics.joined([copies.forget(0.0)])
        self.weight = _whole(statistics.weight) if many else statistics.weight
        of_cluster = total_of(self.weight[:, None], statistics.cluster)[:, 0].square()
        squares = over_ranks((_whole(of_cluster) if many else of_cluster).sum())
        #: Weight, and number of independent examples: after weighting, and with whole clusters.
        self.total = over_ranks(self.weight.sum())
        self.effective = self.total.square() / squares
        self.promised = sets.shape[1]
        extra, self.parts = _parts(tree, sets.cpu())
        self.sets = torch.cat([sets, extra.to(device)], 1)  # (V, q + extra moves)
        breadth = tree.sizes.to(device).double().log() / torch.tensor(float(tree.num_leaves)).double().log()
        breadth = (4096 * breadth).round() / 4096 if many else breadth  # so that sums of it are exact too
        classes = torch.unique(row_keys(self.sets, breadth), return_inverse=True)[1]  # nodes of the same sets and breadth
        one = representatives(classes, int(classes.max()) + 1)
        self.columns, paths = torch.cat([sets.double(), breadth[:, None]], 1)[one], tree.paths.to(device)  # (classes, q + 1)
        self.routes = paths[statistics.leaves]  # (n, height + 1)
        alike = torch.unique(row_keys(classes[paths]), return_inverse=True)[1]  # leaves with paths of the same classes
        cell, self.patterns = pattern_ids(statistics.member)
        parts = [cell, alike[statistics.leaves], statistics.common]
        #: Examples of a kind have the same membership, classes along their paths, and depth down to which answers cover.
        self.kind, kinds = fold(parts, [len(self.patterns), len(alike), height + 1])
        first = representatives(self.kind, kinds)
        self.nodes_of, self.class_of, self.cell_of = self.routes[first], classes[self.routes[first]], cell[first]
        self.covers = torch.arange(height + 1, device=device) <= statistics.common[first, None]  # (kinds, height + 1)
        keys = collected(row_keys(self.patterns[cell[first]], torch.stack(parts[1:], 1)[first]))[0]
        table = len(torch.unique(keys)) * max(len(one), (height + 1) ** 2) if many else len(self.patterns) * tree.num_nodes
        #: Shifts tried for each move.
        self.tried = max(8, min((1 + many) * CANDIDATES, MAX_ELEMENTS // table))
        self.lam = torch.full_like(statistics.levels[:, 0], init)
        #: Weight of the examples that could answer with each set, (a, q).
        meets = sets[self.nodes_of].any(1).double() * _added(self.kind, self.weight, kinds)[:, None]  # (kinds, q)
        self.reach = over_ranks(self.patterns[self.cell_of].double().T @ meets)
        self.who: list[int] = []
        self.shift: list[float] = []
        self.known = self.reach, self.reach  #: the last lambda with sums of all weights, and the last sums

    # -- measures ----------------------------------------------------------------------------------------------------

    def nodes(self) -> Tensor:
        """The answers, (n,)."""
        return answers(self.stats.levels, self.routes, self.lam)

    def sums(self, weight: Tensor | None = None) -> Tensor:
        """Covered weight and weight of the answers of each promise, and of all answers times their breadth, (2 a q + 1,)."""
        if weight is not None or self.known[0] is not self.lam:
            mass = _added(self._state(), self.weight if weight is None else weight, self.covers.numel())
            found = over_ranks(self._by_promise(mass.view(*self.covers.shape, 1)))[0]
            self.known = (self.lam if weight is None else found), found
        return self.known[1]

    def _state(self) -> Tensor:
        """Kind and depth of each example as one number, (n,)."""
        return self.kind * self.covers.shape[1] + (self.stats.levels >= self.lam[:, None]).sum(1)

    def _by_promise(self, mass: Tensor, kind: Tensor | slice = ALL) -> Tensor:
        """:meth:`sums` of this rank, ``(k, 2 a q + 1)``, from weights at each depth, ``(m, height + 1, k)``, of these kinds."""
        cells, nodes, k = len(self.patterns), len(self.columns), mass.shape[2]
        place = self.cell_of[kind, None] * nodes + self.class_of[kind]
        both = torch.cat([mass * self.covers[kind, :, None], mass], 2).flatten(0, 1)
        table = both.new_zeros(cells * nodes, 2 * k).index_add_(0, place.flatten(), both).view(cells, nodes, 2 * k)
        by_set = self.columns.T @ table  # (cells, q + 1, 2 k)
        promised = self.patterns.double().T @ by_set[:, :-1].flatten(1)  # (a, q 2 k)
        promised = promised.view(-1, 2, k).transpose(0, 1).reshape(-1, k)  # (2 a q, k)
        return torch.cat([promised, by_set[:, -1, k:].sum(0, keepdim=True)]).T

    def mass(self) -> Tensor:
        """Weight of the answers of each promise, (a, q)."""
        return self.sums()[:-1].view(2, *self.reach.shape)[1]

    def _counted(self, share: Tensor) -> Tensor:
        """No set may hide behind its noise by shrinking: it counts as at least a quarter of what it could be."""
        return torch.maximum(share, 0.25 * self.reach.flatten() / self.total)

    def small(self) -> list[str]:
        """Promises with too few answers at the current lambda to say anything about."""
        return small_groups(self.names, self._counted(self.mass().flatten() / self.total) * self.effective, self.target)

    def measure(self, sums: Tensor, total: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Violation and tolerance of each promise from :meth:`sums` ``(..., 2 a q + 1)``: two of ``(..., a q)``."""
        covered, share = (sums[..., :-1] / (self.total if total is None else total)).chunk(2, -1)
        value = covered - self.target * share
        counted = self._counted(share)
        size = (counted * self.effective).clamp_min(1.0)
        error = (self.target * (1 - self.target) / size).sqrt()
        if not self.conditional:
            error = error * counted
        if self.alpha is None:
            skewness = (1.0 - 2.0 * self.target) / (self.target * (1.0 - self.target)) ** 0.5
            tolerance = slacks(among(value.shape[-1]), error, size, skewness)
        else:
            tolerance = (error * self.conditional).clamp_min(self.alpha)
        if self.conditional:
            value = (value / share.clamp_min(1e-12)).masked_fill(share <= 1e-12, 0.0)
        return value, tolerance

    def noise(self) -> Tensor:
        """Violation of each promise that the sample cannot tell from 0, (a * q, 1)."""
        own, self.alpha = self.alpha, None
        found = self.tolerance()
        self.alpha = own
        return found

    def violations(self, split: Pair | None = None) -> Tensor:
        """Signed violations at the current lambda, (a * q, 1)."""
        weight = None if split is None else self.weight * split.outer
        total = None if weight is None else over_ranks(weight.sum()).clamp_min(1e-300)
        return self.measure(self.sums(weight), total)[0][:, None]

    def tolerance(self) -> Tensor:
        """Tolerance of each promise at the current lambda, (a * q, 1)."""
        return self.measure(self.sums())[1][:, None]

    def merit(self, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Squared excess over the tolerances, worst ratio to them, and lost precision (0 all leaves, 1 all root)."""
        value, tolerance = self.measure(sums)
        ratio = value.abs() / tolerance
        return (ratio - MARGIN).clamp_min(0).square().sum(-1), ratio.amax(-1), sums[..., -1] / self.total

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
        weight = self.weight * self.inside(group * self.sets.shape[1] + chosen)
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

    def sweep(self, rows: Tensor | slice, breaks: Tensor, points: Tensor, code: Tensor, size: int) -> Tensor:
        """Weight at each depth after taking each of ``points`` off lambda of the examples ``rows``, by their code.

        As the shift grows an example steps down its path, one node per breakpoint (lambda - level). Every breakpoint is filed
        under the first point at or above it, and the running totals are the weights below each depth for all points at once.

        ``breaks``: of all examples, ``(n, height)``; inf below the best leaf. ``points``: rising, (k,). ``code``: of all
        examples, from 0 to ``size`` - 1. Returns: ``(size, height + 1, k)``.
        """
        k, weight, code = len(points), self.weight[rows], code[rows]
        whole = _added(code, weight, size)[:, None].expand(-1, k)
        below = [whole]
        for column in breaks[rows].unbind(1):
            place = torch.searchsorted(points, column.contiguous()).add_(code, alpha=k + 1)  # k: never reached
            below.append(_added(place, weight, size * (k + 1)).view(size, k + 1)[:, :k].cumsum(1))
        return torch.stack([above - under for above, under in zip(below, [*below[1:], torch.zeros_like(whole)], strict=True)], 1)

    def points(self, breaks: Tensor) -> Tensor:
        """Shifts half-way between neighbours of these breakpoints, and one beyond each end; rising."""
        breaks = breaks.flatten()[:: max(1, breaks.numel() // SAMPLE)]
        breaks = torch.unique(breaks[breaks.isfinite()])
        ends = torch.stack([breaks[0] - BEYOND, breaks[-1] + BEYOND])
        return torch.cat([ends[:1], (breaks[1:] + breaks[:-1]) / 2, ends[1:]])

    def best_shifts(self, moves: list[int], total: Tensor) -> list[tuple[Tensor, Tensor, int]]:
        """Gain per lost precision of the best shift of each move with members, that shift, and the move.

        Each move has points of its own, is swept and then refined. Of many examples, moves share points and one sweep, and the
        best few are refined.
        """
        (kinds, depths), breaks, many = self.covers.shape, self.lam[:, None] - self.stats.levels, self.tried
        state, kind = self._state(), torch.arange(kinds, device=breaks.device).repeat_interleave(depths)
        mass = _added(state, self.weight, len(kind))
        here = torch.diag_embed(mass.view(kinds, depths)).flatten(0, 1)[..., None]
        group, chosen = torch.tensor([divmod(who, self.sets.shape[1]) for who in moves], device=kind.device).T
        inside = (self.sets.T[chosen][:, self.nodes_of] & self.patterns.T[group][:, self.cell_of, None]).flatten(1)
        own = inside.double() @ torch.stack([mass * self.covers.flatten(), mass], 1)  # of the states of each move
        if self.some is None:
            moves, inside, own = [moves[j] for j in own[:, 1].nonzero()[:, 0]], inside[own[:, 1] > 0], own[own[:, 1] > 0]
        rows = [ALL] if self.some is not None else [states[state].nonzero()[:, 0] for states in inside]
        points = [self.points(breaks[some]) for some in (rows if self.some is None else [self.some])]
        index = [torch.linspace(0, len(p) - 1, min(many, len(p)), device=p.device).round().long() for p in points]
        coarse = [p[i] for p, i in zip(points, index, strict=True)]
        swept = [self.sweep(r, breaks, p, state, len(kind)) for r, p in zip(rows, coarse, strict=True)]
        if self.some is not None:
            points, index, coarse, swept = (part * len(moves) for part in (points, index, coarse, swept))
        found = [self._by_promise(torch.cat([here, t], 2)[states], kind[states]) for t, states in zip(swept, inside, strict=True)]
        own, *found = totals(own, *(t[1:] - t[:1] for t in found))
        held = own[:, 1].nonzero()[:, 0].tolist()
        moves, points, index, coarse = ([part[j] for j in held] for part in (moves, points, index, coarse))
        inside, sign = inside[held], (own[held, 0] - self.target * own[held, 1]).sign()
        rated = self._rate([(total, found[j], p) for j, p in zip(held, coarse, strict=True)], sign, total)
        best = [(gain.max(), p[gain.argmax()], who) for (gain, _), p, who in zip(rated, coarse, moves, strict=True)]
        order = sorted((j for j, p in enumerate(points) if len(p) > many), key=lambda j: -float(best[j][0]))
        finer = []
        for j in order if self.some is None else order[:REFINED]:  # once more between the neighbours of the best
            near = rated[j][0].argmax()
            low, high = (near - 1).clamp_min(0), (near + 1).clamp_max(many - 1)
            at = torch.linspace(0, 1, many, device=near.device) * (index[j][high] - index[j][low]) + index[j][low]
            at = (at.round() if self.some is None else at).double()
            p = torch.lerp(points[j][at.floor().long()], points[j][at.ceil().long()], at.frac())
            some = inside[j][state] & ((breaks > p[0]) & (breaks <= p[-1])).any(1)  # all others stay where they are
            after = self._by_promise(self.sweep(some.nonzero()[:, 0], breaks, p, self.kind, kinds))
            finer.append((rated[j][1][low], after - after[:1], p))
        if finer:
            starts, changes, tried = zip(*finer, strict=True)
            finer = list(zip(starts, totals(*changes), tried, strict=True))
        for j, (_, _, p), (gain, _) in zip(order, finer, self._rate(finer, sign[order], total) if finer else [], strict=False):
            best[j] = gain.max(), p[gain.argmax()], moves[j]
        return best

    def _rate(self, tried: list[tuple[Tensor, Tensor, Tensor]], sign: Tensor, total: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Gain of each point of each move, and the sums it leads to; from sums at the start, their changes, and points.

        A step must go the way of Algorithm 1 for its own members, and must not empty a set. Otherwise a set that covers too
        much could be "fixed" by passing its surest answers to the root.
        """
        sizes = [len(points) for _, _, points in tried]
        start = torch.cat([start.expand(len(points), -1) for start, _, points in tried])
        sums = start + torch.cat([change for _, change, _ in tried])
        (merit, _, cost), (after, _, lost) = self.merit(total), self.merit(sums)
        now, then = (t[..., :-1].chunk(2, -1)[1] for t in (total, sums))
        emptied = ((then < KEEP * self.reach.flatten()) & (then < now * (1 - 1e-9))).any(-1)
        against = torch.cat([points * one < 0 for (_, _, points), one in zip(tried, sign, strict=False)])
        gain = ((merit - after) / (FREE + (lost - cost).clamp_min(0))).masked_fill(emptied | against, -1.0)
        return list(zip(torch.split(gain, sizes), torch.split(sums, sizes), strict=True))


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
    total = problem.sums()
    merit, worst, _ = problem.merit(total)
    start = best = float(worst)
    kept, state, reason = 0, problem.lam, "stuck"
    while float(merit) > 0:
        if len(problem.who) >= max_iter:
            reason = "max_iter"
            break
        gain, shift, who = max(problem.best_shifts(_shortlist(problem, total), total), key=lambda found: float(found[0]))
        if float(gain) <= 1e-9:
            break
        lam = problem.lam
        problem.take(who, float(shift))
        total = problem.sums()
        now, worst, _ = problem.merit(total)
        if float(now) >= float(merit):  # the sweep and the move differ by rounding at most
            problem.lam = lam
            problem.who.pop(), problem.shift.pop()
            break
        merit = now
        history.append(problem.measure(total)[0].abs().max())
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
    value, tolerance = problem.measure(total)
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


def _added(place: Tensor, weight: Tensor, size: int) -> Tensor:
    """Sum of the weights at each place, (size,)."""
    return weight.new_zeros(size).index_add_(0, place, weight)


def _whole(values: Tensor) -> Tensor:
    """Rounded to multiples of one power of two, so coarse that sums over any ranks are exact, times 4096 too."""
    unit = 2.0 ** math.ceil(math.log2(max(float(over_ranks(values.sum())), 1e-280)) + 1e-6 - 40)
    return (values / unit).round() * unit
