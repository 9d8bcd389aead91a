"""Group-conditional and multivalid quantiles of conformity scores: coverage at its target for every group."""

import math
import time
from dataclasses import replace
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor

from torchgmc import theory
from torchgmc.audits.measure import Tally
from torchgmc.audits.tabular import Table
from torchgmc.distributed import extremes, pooled, rows_stay, total as over_ranks, totals
from torchgmc.engine import checks, noise, soft, trees
from torchgmc.engine.batches import checked_once
from torchgmc.engine.clusters import check as check_clusters, total as total_of
from torchgmc.engine.float64 import wide
from torchgmc.engine.folds import EXACT, fresh_splits
from torchgmc.engine.noise import small_groups
from torchgmc.engine.offsets import CELLS, Folded, Offsets, crossing, fit_offsets, fit_offsets_to, quantile_of_all, span_of
from torchgmc.engine.scripting import is_scripting
from torchgmc.engine.solver import EXACT_STEPS, MAX_FIXED_STEPS, Log, Report, reached, run
from torchgmc.engine.values import Names, Values
from torchgmc.groups.cells import few_patterns, pattern_ids, shared_patterns, with_everyone
from torchgmc.heads import finite
from torchgmc.heads.combinations import threshold_figures, threshold_tables
from torchgmc.heads.contract import EVERYONE
from torchgmc.heads.learned import Found as TreesFound, Learning, looked_at
from torchgmc.heads.levelsets import steps as levelsets
from torchgmc.heads.levelsets.steps import cell_sums
from torchgmc.heads.quantile import problem as quantiles, training
from torchgmc.heads.quantile.problem import QuantileProblem, QuantileStatistics, ScoreCounts
from torchgmc.heads.quantile.task import TASK


class QuantileHead(Learning):
    r"""Thresholds q(x) on a conformity score, so that every group is covered at the target rate.

    .. math:: \left| E[1_A(x)\, 1\{q(x) \in \text{bin}_k\}\, (1\{\text{score} \le q(x)\} - \text{target})] \right| \le \alpha

    ``bins=None`` has one level set: group-conditional coverage, :math:`q(x) = q_0 - \sum_{A \ni x} \theta_A`. With ``bins=b``
    coverage also holds at every level of the threshold itself (multivalid). Theta minimises the pinball loss with a slack for
    the noise of each group (:mod:`torchgmc.engine.noise`); q0 is at the rank of split conformal, and stays there where the
    groups do not differ beyond their noise. With level sets the state is a log of steps. The scores come from
    :mod:`torchgmc.conformity` or are your own; small means conforming.

    Args:
        target: target coverage, e.g. 0.9.
        alpha: largest violation allowed; None for as small as the sample can resolve.
        groups: names of the groups; None for one group of everyone.
        bins: number of equal-width level sets of q over ``range``, or None.
        conditional: violations are divided by P(A), so that alpha bounds each group's own miscoverage.
        init: q0, the starting threshold; by default the target quantile of all scores.
        range: (low, high), divided into the level sets; by default that of the calibration scores.
        noise_floor: False fits to alpha on the sample, noise included.
        finite_sample: coverage of every group is at least the target on average over calibration sets, proven for any sample
            size (:mod:`torchgmc.heads.finite`): a table of one threshold per combination of groups. Not with ``bins``, weights
            or clusters.
        patterns: for ``finite_sample`` with more than 8 groups, combinations to tabulate in addition to those seen in
            calibration, as lists of group names. A combination that is not in the table gets an infinite threshold.
        learn: ``gmc.Trees(...)`` makes the threshold depend on ``features`` ``(n, d)`` passed to every call (NaN: missing); the
            named groups are then covered as before. Thresholds are fitted (and the report measured) on what trees grown without
            each fifth of the rows leave there, so that the noise that trees fit does not count as coverage. Not with ``bins``
            or ``finite_sample``.
        fractional: memberships may be numbers m from 0 to 1 (probabilities of membership): the promise is about E[m s].
            Not with ``finite_sample``.
        resolution: keep counts of scores rounded up by at most this part of their size (e.g. 0.001), not the scores: for any
            number of examples the statistics stay small, as does what processes exchange. Thresholds are then up to so much
            larger. Not with ``finite_sample``, ``learn``, ``fractional``, ``base`` or clusters.

    Shapes: ``fit(scores (n,), groups (n, a))``; ``head(groups)`` -> thresholds ``(n,)``, float64. A starting threshold per
    example may be passed as ``base`` to both; it replaces q0.

    Example:
        >>> groups = torch.rand(3000, 2) < torch.tensor([0.3, 0.6])
        >>> prediction, noise = torch.zeros(3000), torch.randn(3000) * (1 + 2 * groups[:, 0])
        >>> scores = gmc.conformity.absolute_residual(prediction, noise)
        >>> head = gmc.QuantileHead(target=0.9, alpha=None, groups=["wide", "other"]).fit(scores, groups)
        >>> low, high = gmc.conformity.interval(prediction, head(groups))
        >>> covered = (low <= noise) & (noise <= high)
        >>> bool((gmc.violations(groups, covered.float() - 0.9).abs() <= 0.02).all())
        True
    """

    base: Tensor
    shift: Tensor
    offsets: Tensor
    log_who: Tensor
    log_step: Tensor
    log_column: Tensor
    edges: Tensor
    unit: Tensor
    known: Tensor
    table: Tensor
    settings: ClassVar[tuple[str, ...]] = (
        *("target", "alpha", "groups", "bins", "conditional", "init", "range", "noise_floor", "finite_sample", "patterns"),
        *("learn", "resolution"),
    )
    fit_only: ClassVar[tuple[str, ...]] = (
        *("alpha", "target", "conditional", "init", "range", "noise_floor", "patterns", "resolution"),
    )
    common: ClassVar[bool] = True
    two_valued: ClassVar[bool] = True
    keeps: ClassVar[tuple[type, ...]] = (QuantileStatistics, ScoreCounts)
    arguments: ClassVar[tuple[str, ...]] = ("scores", "groups", "weight", "base", "clusters", "features")
    takes = "groups"
    task = TASK
    zeroed: ClassVar[tuple[str, ...]] = ("base", "shift", "offsets")
    growing: ClassVar[tuple[str, ...]] = ("log_who", "log_step", "log_column", "known", "table", *Learning.forest)
    unbounded: ClassVar[tuple[str, ...]] = ("table", *Learning.unbounded)
    sized: ClassVar[dict[str, str]] = {"bins": "edges"}
    added: ClassVar[tuple[str, ...]] = ("shift", "known", "table", "tree_width", *Learning.forest)
    __jit_unused_properties__: ClassVar[list[str]] = ["learned", *Learning.__jit_unused_properties__]

    def __init__(
        self,
        target: float,
        alpha: float | None,
        groups: Any = None,
        bins: int | None = None,
        conditional: bool = False,
        init: float | None = None,
        range: tuple[float, float] | None = None,
        noise_floor: bool = True,
        finite_sample: bool = False,
        patterns: Any = None,
        learn: Any = None,
        fractional: bool = False,
        resolution: float | None = None,
    ) -> None:
        super().__init__(alpha, groups, conditional, noise_floor=noise_floor)
        self.target = checks.fraction("target", target)
        self.bins = None if bins is None else checks.count("bins", bins, 1)
        self.num_bins = self.bins or 1
        self.finite_sample = checks.flag("finite_sample", finite_sample)
        self.patterns = finite.check_patterns(patterns, self.groups)
        if self.finite_sample and self.bins is not None:
            raise ValueError("`finite_sample` needs groups that do not depend on the threshold; omit `bins`.")
        if learn is not None and (self.bins is not None or self.finite_sample):
            raise ValueError("`learn` makes thresholds that depend on features; omit `bins` and `finite_sample`.")
        self.resolution = None if resolution is None else checks.fraction("resolution", resolution)
        if self.resolution is not None and (self.finite_sample or learn is not None or fractional or self.resolution < 1e-9):
            raise ValueError("`resolution` (at least 1e-9) counts scores; omit `finite_sample`, `learn` and `fractional`.")
        if init is not None and not (isinstance(init, int | float) and abs(init) < math.inf):
            raise ValueError(f"`init` must be a finite threshold, got {init!r}.")
        self.init = None if init is None else float(init)
        self.range = None if range is None else [*checks.interval("range", range)]
        self.hold(base=(), shift=(), offsets=(self.num_groups,), edges=(self.num_bins - 1,))
        self.hold(torch.int64, log_who=(0, self.num_bins), log_column=(0,))
        self.hold(torch.bool, known=(0, self.num_groups))
        self.hold(log_step=(0, self.num_bins), table=(0, 1))
        self.register_buffer("unit", torch.ones((), dtype=torch.float64))
        self.prepare_learning(learn, 1, fractional)
        self.reset()

    # -- statistics --------------------------------------------------------------------------------------------------

    def observe(
        self, scores: Tensor, groups: Any = None, weight: Any = None, base: Any = None, clusters: Any = None, features: Any = None
    ) -> None:
        """Add a batch to the statistics.

        Args:
            scores: conformity scores, ``(n,)``, floating.
            groups: membership ``(n, a)``, bool, or a :class:`~torchgmc.Groups`.
            weight: weight of each example, ``(n,)``.
            base: starting threshold of each example, ``(n,)``; the common q0 if omitted.
            clusters: which examples belong together, e.g. the patient of each visit: integers or strings, ``(n,)``.
            features: what groups are learned from, ``(n, d)``, where the head was made with ``learn``.
        """
        batch = self.check_batch(scores, groups, weight, base, clusters, features)
        if batch.rows:
            self.keep(batch.clone() if self.resolution is None else ScoreCounts.of(batch, self.resolution), batch.scores)

    @checked_once
    def check_batch(
        self, scores: Any, groups: Any = None, weight: Any = None, base: Any = None, clusters: Any = None, features: Any = None
    ) -> QuantileStatistics:
        """The checked batch, or an error that says what is wrong with it."""
        scores = checks.scores("scores", scores).detach()
        if scores.dim() != 1:
            raise ValueError(f"`scores` must have shape (n,), one conformity score per example, got {tuple(scores.shape)}.")
        n = len(scores)
        if base is not None:
            base = checks.scores("base", base).detach().double()
            if base.shape != (n,) or base.device != scores.device:
                raise ValueError(f"`base` must have shape ({n},) on {scores.device}, got {tuple(base.shape)} on {base.device}.")
        else:
            base = scores.new_full((n,), math.nan, dtype=torch.float64)
        member = self.check_groups(groups, n, scores.device)
        cluster = check_clusters(clusters, n, scores.device)
        columns = self.check_features(features, n, scores.device)
        return QuantileStatistics(scores.double(), base, member, checks.weights(weight, n, scores).detach(), cluster, columns)

    # -- fit ---------------------------------------------------------------------------------------------------------

    def _rows_stay(self, rows: QuantileStatistics, solver: str = "exact", *_: Any, **__: Any) -> bool:
        """Do sums over the rows tell everything? See :func:`torchgmc.distributed.rows_stay`."""
        if solver == "fresh" or rows.counted or self.finite_sample:
            return False
        own = rows if self.statistics is None else self.statistics
        without, count = over_ranks(torch.tensor([int(own.base.isnan().sum()), own.rows]), always=True).tolist()
        few = solver != "exact" or few_patterns(own.member, CELLS)
        return few and without in (0, count)  # else it is an error, which those who have all rows raise

    @pooled
    @rows_stay(_rows_stay, above=EXACT)
    def calibrate(self, solver: str = "exact", eta: float | None = None, max_iter: int | None = None) -> "QuantileHead":
        """Find the thresholds.

        Over several processes, rows of more than 32,768 examples stay where they are; they are sent to every process with
        ``finite_sample``, solver "fresh", or more than 1,024 combinations of groups. With ``resolution`` the counts
        are sent, with clusters their ids and the sums of those whose rows are on several processes.

        Args:
            solver: ``"exact"`` (line searches on the pinball loss), ``"paper"`` (Algorithm 1) or ``"fresh"`` (Algorithm 2).
            eta: fixed step; by default alpha / (K B) with K the largest density of the scores seen.
            max_iter: maximum number of steps: 1000 for ``"exact"``; else the bound of Theorem 1, at most 100,000.
        """
        self.check_solver(solver, eta, max_iter)
        seen: QuantileStatistics = self.seen("score")
        examples = seen
        if self.finite_sample:
            return self._tabulate(examples, solver)
        unit = quantiles.grid_unit(examples.scores)
        if self.learns:
            if solver != "exact":
                raise ValueError(f"solver={solver!r} takes steps on named groups only; use solver='exact' with `learn`.")
            found = self._grow(examples, unit)
            self.write_trees(found, examples.features.shape[1])
            if found is not None:  # the rest is fitted to what the trees leave
                shift = (found.unseen - found.start)[:, 0]  # of trees that did not see the row: as on fresh data
                examples = replace(examples, scores=examples.scores - shift)
        low, high = self.range or (extremes(examples.scores) if self.num_bins > 1 else (0.0, 1.0))
        edges = low + (high - low) * torch.arange(1, self.num_bins, dtype=torch.float64) / self.num_bins
        edges = levelsets.snap(edges.to(examples.scores.device), unit)
        if solver == "exact":
            report, everyone = self._exact(examples, seen, edges, unit, max_iter or EXACT_STEPS)
        else:
            report, everyone = self._fixed(examples, edges, unit, solver, eta, max_iter), False
        self.unit.fill_(unit)
        self.edges.copy_(edges)
        if self.learns and found is not None:
            start = self._begin(seen, unit)[1]
            with torch.no_grad():
                self.is_fitted = True
                after = self._thresholds(seen)[:, None]
            fresh = after + found.unseen - found.z
            s = [(seen.scores[:, None] <= q).double() - self.target for q in (start, fresh)]
            self.write_rules(found, (after - start, *s), seen, self.s_range())
        details = {"examples": int(over_ranks(examples.counts().sum())), "alpha_asked": self.alpha} | report.details
        details |= {"alpha_met": float(report.violations_after.abs().max()), "rounds": len(self.log_who)}
        self.mark_fitted(replace(report, details=details), everyone)
        return self

    def _grow(self, examples: QuantileStatistics, unit: float) -> TreesFound | None:
        """Trees on the pinball loss, in a unit near the spread of the scores."""
        divided = self.divide(examples)
        if divided is None:
            return None
        own, count = examples.has_base(), int(over_ranks(torch.tensor(examples.rows)))

        def thresholds(rows: QuantileStatistics) -> Tensor:
            found, _ = self._offsets(rows, unit, rows.group_sizes(), own, count)
            lift, snapped = _snapped(found, unit)
            return (examples.base if own else 0.0) + lift + examples.member.double() @ snapped

        start, final = thresholds(examples.pick(divided.order[: -divided.held or None])), thresholds(examples)
        spread = quantile_of_all((examples.scores - final).abs(), torch.ones_like(final), 0.5) or 1.0
        scale = 2.0 ** round(math.log2(max(spread, 1e-150)))
        weight, goal = examples.weight * (count / over_ranks(examples.weight.sum())), final.new_tensor([self.target])

        def loss(rows: Tensor) -> trees.Loss:
            return trees.pinball(examples.scores[rows, None, None] / scale, weight[rows, None, None], goal)

        parts = (start[:, None] / scale, final[:, None] / scale)
        columns = looked_at(examples.features, examples.base.nan_to_num(0.0)[:, None], examples.member)
        return self.grow_trees(columns, parts, loss, divided, cross=True).scaled(scale, final[:, None])

    def _problem(
        self, examples: QuantileStatistics, z: Tensor, edges: Tensor, unit: float, everyone: bool = False, rows: int = 0
    ) -> QuantileProblem:
        member, names = examples.member, self.groups
        if everyone:
            member, names = with_everyone(member), [*names, EVERYONE]
        where = {"z": z, "member": member, "weight": examples.weight, "edges": edges, "unit": unit, "euclidean": None}
        named = Names(names, self._levels() if len(edges) else [""])
        return QuantileProblem(examples.scores, self.target, rows, names=named, conditional=self.conditional, **where)

    def _begin(self, examples: QuantileStatistics, unit: float) -> tuple[float, Tensor, bool, int, float | None]:
        """q0, and f0 ``(n, 1)``, on the grid; has each row its own? Rows on all ranks; the quantile of residuals that q0 is."""
        without, rows = examples.base.isnan().double().sum(), examples.weight.new_tensor(float(examples.rows))
        without, rows, total = totals(without, rows, examples.weight.sum())
        own, goal = not float(without), self.target * float(total)
        middle = crossing(examples.scores, examples.weight, goal)[0] if self.init is None else self.init
        start = math.ceil(middle / unit) * unit
        z = levelsets.snap(examples.base, unit) if own else examples.base.new_full((1,), start).expand(examples.rows)
        return start, z[:, None], own, int(rows), None if own or self.init is not None else middle

    def _exact(
        self, examples: QuantileStatistics, seen: QuantileStatistics, edges: Tensor, unit: float, max_iter: int
    ) -> tuple[Report, bool]:
        """Offsets of all groups at once, then steps on the level sets for what is left; ``seen``: the examples as they came."""
        began = time.perf_counter()
        start, z, own, rows, middle = self._begin(examples, unit)
        everyone = self.lacks_everyone(examples.member)
        problem = self._problem(examples, z, edges, unit, everyone, rows)
        before, sizes = problem.violations(), examples.group_sizes()
        found, level = self._offsets(examples, unit, sizes, own, rows, middle, seen)
        lift, snapped = _snapped(found, unit)
        problem.restore(_shifted(examples, own, lift, snapped, unit)[:, None])
        if not self.noise_floor and bool(problem.violations().abs().max() > before.abs().max()):
            lift, snapped = 0.0 if own else start, torch.zeros_like(snapped)  # the offsets moved level sets for the worse
            problem.restore(_shifted(examples, own, lift, snapped, unit)[:, None])
        (self.shift if own else self.base).fill_(lift)
        self.offsets.copy_(-snapped)
        steps, history = 1, [before.abs().max(), problem.violations().abs().max()]
        fixed, noise_of, variance = self._noise(problem, level, examples)
        small = small_groups(self.groups, sizes, self.target)
        message = noise.explain(found.k, self.noise_floor, small)
        if len(edges):
            tolerance = fixed if self.noise_floor else torch.full_like(fixed, self.goal())
            report, log = run(problem, self.alpha or 0.0, "exact", None, max_iter, tolerance)
            self._write_log(problem, log)
            steps, history = steps + report.iterations, [*history, *report.history[1:]]
            message, variance = f"{message} {report.message}", self._noise(problem, level, examples)[2]
        after = problem.violations()
        place = divmod(int(after.abs().argmax()), after.shape[1])
        state = reached(after, self.alpha, noise_of)
        details = {"slack": found.k, "noise": noise_of, "variance": variance}
        if state == "no" and not len(edges):
            message = f"{problem.explain(*place)} {message}"
        message = f"worst |violation| {float(after.abs().max()):.4g} in {problem.label(*place)}. {message}"
        worsts, seconds = torch.stack([t.cpu() for t in history]), time.perf_counter() - began
        found_in = (steps, before, after, worsts, seconds, message, details | {"small": small}, state)
        return Report(state == "alpha", *found_in), everyone

    def _offsets(
        self, examples: QuantileStatistics, unit: float, sizes: Tensor, own: bool, among: int, middle: float | None = None,
        seen: QuantileStatistics | None = None,
    ) -> tuple[Offsets, float]:  # fmt: skip
        """The common threshold and the offsets, and the slack they were found with; of examples out of ``among``."""
        residual = examples.scores - examples.base if own else examples.scores
        member, weight = examples.member, examples.weight
        cell, patterns = shared_patterns(examples.member)
        spread, fold = (seen or examples).dealt(noise.FOLDS)  # not by last bits of what was learned, and taken from the scores
        part = torch.arange(noise.FOLDS, device=cell.device)[:, None] if fold is None else fold.long()
        dealt = torch.bincount((part * len(patterns) + cell).flatten(), spread.flatten(), noise.FOLDS * len(patterns))
        together = total_of(weight[:, None], examples.cluster)[:, 0].square() if examples.cluster.shape[1] else examples.squared()
        total, squared, mass = totals(weight.sum(), together.sum(), dealt.double().view(noise.FOLDS, -1))
        count = float(total.square() / squared)  # examples (or clusters), after weighting
        span = span_of(residual, len(patterns), among)
        data = Folded(residual, cell, spread, mass, patterns, count, span, examples.counted, fold)
        if not self.noise_floor:
            inside = mass.sum(0) @ patterns.double()
            alpha = self.goal() * (inside / total if self.conditional else torch.ones_like(inside))

            def worst(found: Offsets) -> float:
                s = weight * ((residual <= _shifted(examples, False, *_snapped(found, unit), unit)).double() - self.target)
                *off, all_off = over_ranks(torch.cat([cell_sums(member, s[:, None])[:, 0, 0], s.sum()[None]]) / total).abs()
                return max(float((torch.stack(off) / alpha).max()), float(all_off) / self.goal())

            return fit_offsets_to(data, self.target, alpha, worst), 0.0
        middle = quantile_of_all(residual, weight, self.target) if middle is None else middle
        s = (residual <= middle).double() - self.target
        if examples.cluster.shape[1]:
            values = (with_everyone(member.double()) * part[:, None] for part in (weight * s, weight))
            sums = torch.stack([total_of(value, examples.cluster).square().sum(0) for value in values])
        else:
            pair = torch.stack([examples.squared() * s.square(), examples.squared()], 1)
            squared = member.square() if member.is_floating_point() else member
            sums = torch.cat([cell_sums(squared, pair)[:, 0], pair.sum(0)[None]]).T  # (2, a + 1)
        (squares, heavy), covered = totals(sums, weight @ (s > 0).double())
        error = noise.standard_errors(squares[:-1], heavy[:-1], total, squares[-1] / heavy[-1].clamp_min(1e-300))
        rate = float(covered / total)
        skewness = (1.0 - 2.0 * rate) / math.sqrt(rate * (1.0 - rate)) if 1e-12 < rate < 1.0 - 1e-12 else 0.0
        found = fit_offsets(data, self.target, error, sizes, skewness, 1.0)
        return found, found.k

    def _tabulate(self, examples: QuantileStatistics, solver: str) -> "QuantileHead":
        """A threshold per combination of groups, with a finite-sample guarantee."""
        began = time.perf_counter()
        finite.check_fit(solver, bool((examples.weight == 1.0).all()), examples.cluster.shape[1] > 0)
        own = examples.has_base()
        residual = examples.scores - examples.base if own else examples.scores
        cell, patterns = pattern_ids(examples.member)
        mass = torch.bincount(cell, examples.weight, len(patterns))[None]
        data = Folded(residual, cell, examples.weight[None], mass, patterns, float(examples.rows))
        known = finite.wanted_patterns(self.groups, patterns, self.patterns)
        unit = quantiles.grid_unit(examples.scores)
        table = finite.phantom_thresholds(data, self.target, known, covers=True) + 2.0 * unit * own  # rounding loses no score
        self.known, self.table = known.to(self.offsets.device), table[:, None].to(self.offsets.device)
        everyone = self.lacks_everyone(examples.member)
        z = self._begin(examples, unit)[1]
        before = self._problem(examples, z, self.edges[:0].to(z.device), unit, everyone)
        fitted = finite.look_up(examples.member.double(), known, table[:, None], math.inf)
        after = self._problem(examples, (examples.base[:, None] if own else 0.0) + fitted, before.edges, unit, everyone)
        self.unit.fill_(unit)
        report = finite.report(
            (self.groups, examples.group_sizes(), self.target, True),
            (before.violations(), after.violations(), self.alpha),
            (known, table),
            time.perf_counter() - began,
        )
        self.mark_fitted(report, everyone)
        return self

    def _noise(self, problem: QuantileProblem, level: float, examples: QuantileStatistics) -> tuple[Tensor, Tensor, Tensor]:
        """``(a, b)`` each: slack of each g where there is nothing to cross-validate, violation indistinguishable from 0, and n
        times its variance.
        """
        share, cluster, number = problem.share, examples.cluster, examples.counts()
        variance = self.target * (1.0 - self.target)
        member = problem.member.square() if problem.member.is_floating_point() else problem.member
        squares = cell_sums(member, examples.squared()[:, None], problem.place, problem.bins)[:, :, 0]
        count = cell_sums(problem.member, number[:, None], problem.place, problem.bins)[:, :, 0]
        skewness = (1.0 - 2.0 * self.target) / math.sqrt(variance)
        squares, count, total, examined = totals(squares, count, examples.weight.sum(), number.sum())
        squares = squares * (variance / total.square())
        if cluster.shape[1]:  # from sums over clusters, and their number
            s = share * problem.mapping(problem.z, slice(None))[:, 0]
            for k in range(problem.bins):
                inside = problem.member.double() * (problem.place == k)
                sums, there = total_of(torch.stack([inside * s[:, None], inside], 1), cluster).unbind(1)
                squared, count[:, k] = over_ranks(torch.stack([sums.square().sum(0), (there > 0).double().sum(0)]))
                squares[:, k] = torch.maximum(squares[:, k], squared)
        error = squares.sqrt().clamp_min(1e-12) / problem.scale[:, None]
        slack, bound = noise.slacks(noise.FIXED, error, count, skewness), noise.bound(level, error, count, skewness)
        return slack, bound, examined * squares

    def _write_log(self, problem: QuantileProblem, log: Log) -> None:
        """The log in rounds."""
        step = problem.length(log.who, log.step)
        merged = levelsets.merge_log(log.who, log.what, torch.zeros_like(log.who), step, problem.edges)
        self.log_who, self.log_step, self.log_column = (t.to(self.offsets.device) for t in merged)

    def _fixed(
        self, examples: QuantileStatistics, edges: Tensor, unit: float, solver: str, eta: float | None, max_iter: int | None
    ) -> Report:
        """Algorithm 1 or 2."""
        if solver == "fresh" and examples.counted:
            raise ValueError("solver='fresh' divides the examples, which a head with `resolution` does not keep; omit it.")
        start, z, _, rows, _ = self._begin(examples, unit)
        problem = self._problem(examples, z, edges, unit, rows=rows)
        slope, norm = problem.slope(), float((problem.mass / problem.scale.square()).max())
        low, high = extremes(torch.cat([examples.scores, z[:, 0]]))
        bound = theory.iteration_bound(self.goal(), slope, norm, max(high - low, 1e-12))
        splits = fresh_splits(max_iter, *examples.content()) if solver == "fresh" else None
        steps = max_iter or min(MAX_FIXED_STEPS, max(1, bound))
        eta = eta or theory.step_size(self.goal(), slope, norm)
        report, log = run(problem, self.goal(), solver, eta, steps, splits=splits)
        self.base.fill_(start)
        if problem.dynamic:
            self._write_log(problem, log)
        else:
            step = problem.length(log.who, log.step)
            self.offsets.copy_(torch.zeros_like(problem.mass).index_add_(0, log.who, step))  # a log of static groups collapses
        return report

    # -- use ---------------------------------------------------------------------------------------------------------

    def forward(
        self,
        groups: Optional[Tensor] = None,
        base: Optional[Tensor] = None,
        mode: str = "hard",
        temperature: float = 0.1,
        features: Optional[Tensor] = None,
    ) -> Tensor:
        r"""Threshold of each example, ``(n,)``, float64: one entry if the head has no groups and no ``base`` is given.

        It depends on the groups and on ``base``, in which it is differentiable: with ``bins=None`` the derivative is 1 in every
        mode. With level sets, ``"hard"`` has the derivative inside them; ``"soft"`` moves q by the mean step of all level sets
        with the weights :math:`\sigma((q - e_k) / T) - \sigma((q - e_{k+1}) / T)`; ``"straight_through"`` has the value of
        ``"hard"`` and the derivative of ``"soft"``. The decision score <= q is softened by :meth:`covers`.

        Args:
            groups: membership ``(n, a)``.
            base: starting threshold of each example, ``(n,)``.
            mode: see above.
            temperature: T, in the units of the scores.
            features: ``(n, d)``, where the head was made with ``learn``.
        """
        soft.check(mode, temperature)
        if not is_scripting() and (features is not None or self.learns):
            self.check_use(features, self.base.new_zeros([1]) if features is None else features)
        if not is_scripting() and groups is not None:
            groups = self.check_member(groups)
        if not is_scripting() and base is not None:
            self.check_input("base", base, groups)
        rows = base if base is not None else groups if groups is not None else features
        member = self.membership(groups, 1 if rows is None else rows.shape[0], self.base)
        start = self.base.expand([member.shape[0]])
        if base is not None:
            start = wide(base)
            free = torch.where(start.isfinite(), start, torch.zeros_like(start))  # rounding has the derivative 1
            start = torch.round(start.detach() / self.unit) * self.unit + (free - free.detach()) + self.shift
        z = (start - member @ self.offsets).unsqueeze(1)
        if self.learns:
            own = torch.zeros_like(z) if base is None else base.unsqueeze(1)
            z = z - self.learned_move(own, member, features)
        if self.finite_sample:
            z = finite.look_up(member, self.known, self.table, float("inf"))
            if base is not None:
                z = z + wide(base).unsqueeze(1)
        member = torch.cat([member, torch.ones_like(member[:, :1])], 1)  # steps may be for everyone
        who, step, column, edges, softened = self.log_who, self.log_step, self.log_column, self.edges, z
        if mode != "hard":
            softened = levelsets.apply_log(z, member, who, step, column, edges, False, False, temperature)
        if mode != "soft":
            z = levelsets.apply_log(z, member, who, step, column, edges, False)
        if mode == "straight_through":
            z = soft.straight_through(z, softened)
        return (softened if mode == "soft" else z).squeeze(1)

    @torch.jit.export
    def covers(
        self,
        scores: Tensor,
        groups: Optional[Tensor] = None,
        base: Optional[Tensor] = None,
        mode: str = "hard",
        temperature: float = 0.1,
        features: Optional[Tensor] = None,
    ) -> Tensor:
        r"""Is each score covered? :math:`1\{\text{score} \le q(x)\}`, or :math:`\sigma((q(x) - \text{score}) / T)` if soft.

        Args:
            scores: conformity scores ``(n,)``.
            groups, base, features: as in ``forward``.
            mode: ``"hard"``: bool. ``"soft"``: numbers in (0, 1) of the type of the scores, differentiable in scores and base.
                ``"straight_through"``: 0 or 1, with the derivative of ``"soft"``.
            temperature: T, in the units of the scores; of the level sets, if the head has any, too.

        Example:
            >>> scores = torch.rand(500, requires_grad=True)
            >>> head = gmc.QuantileHead(target=0.9, alpha=0.005).fit(scores)
            >>> head.covers(scores).double().mean().round(decimals=2)
            tensor(0.9000, dtype=torch.float64)
            >>> head.covers(scores, mode="soft", temperature=0.05).mean().backward()
            >>> bool((scores.grad < 0).all())  # smaller scores are covered more
            True
        """
        if not is_scripting():
            self.check_input("scores", scores, groups, features=features)
            groups = None if groups is None else self.check_member(groups)
        soft.check(mode, temperature)
        rows = base if base is not None else groups if groups is not None else features
        if scores.dim() != 1 or (rows is not None and rows.shape[0] != scores.shape[0]):
            raise ValueError(f"`scores` must have shape (n,), one conformity score per example, got {scores.shape}")
        hard = wide(scores) <= self.forward(groups, base, "hard", temperature, features)
        if mode == "hard":
            return hard
        gap = self.forward(groups, base, "soft", temperature, features) - wide(scores)
        found = torch.sigmoid(gap / temperature).to(scores.dtype)
        return found if mode == "soft" else soft.straight_through(hard, found)

    def solve_differentiably(
        self,
        scores: Tensor,
        groups: Any = None,
        weight: Any = None,
        base: Any = None,
        alpha: float | Tensor | None = None,
        temperature: float = 0.1,
    ) -> dict[str, Tensor]:
        r"""Fitted thresholds as a differentiable function of the scores (and of ``base``); the head does not change.

        Coverage is smoothed, 1{score <= q} becoming :math:`\sigma((q - \text{score})/T)`; the offsets minimise the smooth
        pinball loss + alpha \|offsets\|_1, and q0 is the smoothed quantile of all scores unless given. For ``bins=None``; with
        level sets the fit jumps. See :mod:`torchgmc.engine.implicit`. Each process uses only its own data.

        Args:
            scores, groups, weight, base: as in ``observe``.
            alpha: replaces the head's; 0 brings every smooth violation to 0 and has no kinks. A tensor may have a derivative.
            temperature: T, in the units of the scores.

        Returns:
            The state for :meth:`apply_state`: ``"offsets"`` ``(a,)`` and ``"base"`` with their derivatives, and an empty log.

        Example:
            >>> scores = torch.rand(100, requires_grad=True)
            >>> state = gmc.QuantileHead(target=0.9, alpha=0.01).solve_differentiably(scores, temperature=0.02)
            >>> state["base"].backward()
            >>> round(float(scores.grad.sum()), 4)  # moving all scores moves their quantile
            1.0
        """
        return training.solve(self, scores, groups, weight, base, alpha, temperature)

    # -- the promise -------------------------------------------------------------------------------------------------

    def test_functions(self) -> Names:
        """Groups; level sets of q."""
        return Names(self.promised_groups(), self._levels())

    def _levels(self) -> list[str]:
        return [""] if not self.bins else [f"q in level set {k + 1} of {self.num_bins}" for k in range(self.num_bins)]

    def s_range(self) -> tuple[float, float]:
        """Covered or not, minus the target."""
        return -self.target, 1.0 - self.target

    def s_target(self) -> float:
        """The target coverage."""
        return self.target

    def _start(self, batch: QuantileStatistics) -> Tensor:
        """q before the fit: ``base``, ``init``, or the target quantile of these very scores."""
        if self.is_fitted:
            common = float(self.base)
        elif self.init is not None:
            common = self.init
        else:
            common = quantile_of_all(batch.scores, batch.weight, self.target) if batch.rows else 0.0
        return torch.where(batch.base.isnan(), common, batch.base)

    def _thresholds(self, batch: QuantileStatistics) -> Tensor:
        """q of each example, ``(n,)``."""
        if not self.is_fitted:
            return self._start(batch)
        base = None if batch.rows == 0 or bool(batch.base[0].isnan()) else batch.base
        features = batch.features if self.learns else None
        return self.forward(batch.member if self.grouped else None, base, features=features).expand(batch.rows)

    def _edges(self, scores: Tensor) -> Tensor:
        """Inner edges of the level sets; before the fit over ``range``, or over these very scores."""
        if self.is_fitted or self.num_bins == 1:
            return self.edges.to(scores.device)
        low, high = self.range or [float(v) for v in scores.aminmax()]
        return low + (high - low) * torch.arange(1, self.num_bins, dtype=torch.float64, device=scores.device) / self.num_bins

    def values(
        self, scores: Tensor, groups: Any = None, base: Any = None, softness: float | None = None, features: Any = None
    ) -> Values:
        """1{score <= q} - target of each example in its level set of q (and 0 in the others).

        Soft, both the step and the level sets have soft edges.
        """
        checks.softness(softness)
        batch = self.check_batch(scores, groups, base=base, features=features)
        q = self._thresholds(batch)
        edges = self._edges(batch.scores)
        if softness is not None:
            if base is not None:  # with its derivative
                columns, member = batch.features if self.learns else None, batch.member if self.grouped else None
                q = self.forward(member, base, features=columns) if self.is_fitted else base
            scores = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
            s = (torch.sigmoid((q - scores) / softness) - self.target)[:, None]
            inside = levelsets.level_sets(q[:, None], edges.to(q), softness)[:, :, 0] if self.num_bins > 1 else 1.0
            return Values(inside * s, self.promised(batch.member))
        column = levelsets.levels(q[:, None], edges, False)
        s = ((batch.scores <= q).double() - self.target)[:, None]
        return Values(q.new_zeros(len(q), self.num_bins).scatter(1, column, s), self.promised(batch.member), column)

    def audit_sums(self, weight: Tensor, **batch: Any) -> dict[str, Tensor]:
        """Weighted sums of the thresholds before and after."""
        found = self.check_batch(**batch)
        return {"weight": weight.sum(), "before": weight @ self._start(found), "after": weight @ self._thresholds(found)}

    def audit_rows(self, **batch: Any) -> dict[str, Tensor]:
        """Each example's q: Q is taken over the distinct thresholds of all examples."""
        return {"q": self._thresholds(self.check_batch(**batch))}

    def audit_measures(self, tally: Tally) -> dict[str, tuple[Tensor, tuple[float, float] | None]]:
        """Coverage, and the threshold, which is the width of a set."""
        return {"coverage": ((tally.s.sum(1) > 0).double(), (0.0, 1.0)), "threshold": (tally.rows["q"].double(), None)}

    def audit_summary(self, tally: Tally) -> dict[str, Any]:
        r"""Mean threshold before and after, and the metric :math:`Q(f, g')` of quantile multicalibration.

        Q is taken over the level sets (over the distinct thresholds if ``bins=None``), see
        :func:`torchgmc.heads.quantile.problem.quantile_error`; f is multicalibrated in that sense when P(g') Q <= alpha for
        every group.
        """
        q, sums, share = tally.rows["q"], tally.sums, tally.weight / tally.weight.sum()
        covered = tally.s.sum(1) > 0  # 1 - target, or -target
        level = q if self.bins is None or tally.column is None else tally.column[:, 0]
        error = quantiles.quantile_error(level, covered, tally.who, self.target, tally.weight)
        cost = {f"mean threshold {when}": float(sums[when] / sums["weight"]) for when in ("before", "after")}
        cost["worst mean squared miscoverage"] = float((error * (tally.who.double().T @ share)).max())
        return {"cost": cost, "columns": {"Q": error}}

    def group_thresholds(self, member: Tensor, fitted: bool = True) -> Tensor:
        """Threshold of each combination."""
        if self.learns:
            raise TypeError("the thresholds of this head depend on features too.")
        if not fitted:
            return self.base.cpu().expand(len(member), 1)
        found = self.forward(member.to(self.base.device) if self.grouped else None)
        return found.cpu().expand(len(member))[:, None]

    def figures(self, audit: Any) -> dict[str, Any]:
        """The threshold of each combination of groups."""
        return {} if self.learns or self.fractional else threshold_figures(self)

    def tables(self, audit: Any) -> list[Table]:
        """The same as a table; or the rules that were learned."""
        return super().tables(audit) if self.learns or self.fractional else threshold_tables(self)

    def index_limits(self) -> dict[str, int]:
        """Sets and directions of the log."""
        return {"log_who": self.num_groups + 1, "log_column": 1}

    def extra_repr(self) -> str:
        """Options and state."""
        return f"target={self.target}, bins={self.bins}, {super().extra_repr()}, rounds={len(self.log_who)}"


def _shifted(examples: QuantileStatistics, own: bool, lift: float, offsets: Tensor, unit: float) -> Tensor:
    """Thresholds of common ones (of the examples' own) that are shifted by ``lift`` and by what groups add, ``(n,)``."""
    found = levelsets.snap(examples.base, unit).add_(lift) if own else torch.full_like(examples.base, lift)
    return found.add_(torch.cat([some.double() @ offsets for some in torch.split(examples.member, EXACT)]))


def _snapped(found: Offsets, unit: float) -> tuple[float, Tensor]:
    """The common threshold and the offsets on the grid; rounding never moves a threshold below the score it met."""
    groups = levelsets.snap(found.groups, unit)
    return math.ceil(found.common / unit) * unit + unit * (1 + int((groups != 0).sum())), groups
