"""Risk control of thresholds: the miss rate of a segmentation at its target for every group."""

import dataclasses
import math
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor

from torchgmc import theory
from torchgmc.audits.measure import Tally
from torchgmc.audits.overlap import example_keys
from torchgmc.audits.tabular import Table
from torchgmc.distributed import pooled, rows_stay, total as over_ranks
from torchgmc.engine import checks, folds, hashing, noise, soft
from torchgmc.engine.batches import checked_once
from torchgmc.engine.clusters import check as check_clusters
from torchgmc.engine.folds import fresh_splits
from torchgmc.engine.offsets import CELLS
from torchgmc.engine.scripting import is_scripting
from torchgmc.engine.solver import MAX_FIXED_STEPS, Report, run
from torchgmc.engine.values import Names, Values
from torchgmc.groups.cells import few_patterns
from torchgmc.heads import finite
from torchgmc.heads.base import Head
from torchgmc.heads.combinations import threshold_figures, threshold_tables
from torchgmc.heads.learned import Learning
from torchgmc.heads.threshold import problem as curves, training
from torchgmc.heads.threshold.fit import fit_thresholds, grow, tabulate
from torchgmc.heads.threshold.problem import POINTS, ClusterSums, CurveProblem, CurveStatistics, SampleProblem, SampleStatistics
from torchgmc.heads.threshold.risks import CHUNK, RISKS, Lattice, MonotoneRisk, Risk, repeat
from torchgmc.heads.threshold.sums import Batch, sum_curves
from torchgmc.heads.threshold.task import TASK

#: Images whose curves are summed at a time, at most.
BATCH = 1 << 15
#: Scores per image and class that a head with `learn` or `fractional` keeps.
KEPT = 256


class ThresholdHead(Learning):
    r"""Thresholds per group: mask = scores > lambda(x), with the risk of every group at the target.

    .. math:: \left| E[1_A(x) (R(\lambda(x)) - \sigma)] \right| \le \alpha \quad \text{for every group } A,
              \qquad \lambda(x) = f_0 - \sum_{A \ni x} \theta_A

    R is by default the false negative rate: the share of an image's positive pixels with score <= lambda. Images without a
    positive pixel have no such rate; they are left out and counted in ``report.details["excluded"]``. Theta minimises a
    convex potential (the pinball loss), see :mod:`torchgmc.heads.threshold.problem`.

    Args:
        target: the target risk sigma, or one per class.
        alpha: largest violation allowed.
        groups: names of the groups; None for one group of everyone.
        risk: ``"fnr"``, ``"fpr"`` or a :class:`~torchgmc.MonotoneRisk`.
        num_classes: None for binary scores ``(n, ...)``; C for scores ``(n, C, ...)`` with one threshold per class.
        conditional: alpha bounds each group's own deviation \|risk_A - target\|.
        logits: the scores are logits (thresholds are searched in [-16, 16]), not probabilities in [0, 1].
        range: another interval of thresholds to search.
        resolution: step between thresholds. By default 2^-12 of the range, rounded to a power of two (2^-7 for a custom
            risk). ``"exact"`` keeps every relevant score instead: no rounding, but memory grows with the pixels.
        init: the starting threshold f0; the middle of the range by default.
        jitter: half-width of tie-breaking noise added to the scores, drawn from the image itself.
        noise_floor: False fits to alpha on the sample, noise included.
        finite_sample: the risk of every group is at most the target on average over calibration sets, proven for any sample
            size (:mod:`torchgmc.heads.finite`): a table of one threshold per combination of groups. Not with weights or clusters.
        patterns: for ``finite_sample`` with more than 8 groups, combinations to tabulate in addition to those seen in
            calibration, as lists of group names. A combination that is not in the table gets the safe end: everything is found.
        learn: ``gmc.Trees(...)`` makes the threshold depend on ``features`` ``(n, d)`` of the images passed to every call (NaN:
            missing); the risk of the named groups is then at the target as before, on images that the trees did not see. Up to
            256 scores of each image are kept, or all with ``resolution="exact"``. Not with ``finite_sample`` or a custom risk.
        fractional: memberships may be numbers m from 0 to 1 (probabilities of membership): the promise is about E[m s].
            Scores are kept as with ``learn``; not with what ``learn`` does not go with.

    Shapes: ``fit(scores (n, ...), masks (n, ...), groups (n, a))``; ``head(scores, groups)`` -> bool mask like scores;
    ``head.threshold(groups)`` -> ``(n,)`` or ``(n, C)``.

    Example:
        >>> masks = torch.rand(200, 16, 16) < 0.3
        >>> dark = torch.arange(200) % 3 == 0
        >>> scores = torch.sigmoid(3 * masks + torch.randn(200, 16, 16) - 1.5 - dark[:, None, None] * 1.0)
        >>> groups = torch.stack([dark, ~dark], dim=1)
        >>> head = gmc.ThresholdHead(target=0.1, alpha=0.005, groups=["dark", "light"]).fit(scores, masks, groups)
        >>> head.report.converged, head(scores, groups).shape
        (True, torch.Size([200, 16, 16]))
        >>> bool(head.threshold(groups)[0] < head.threshold(groups)[1])
        True
    """

    base: Tensor
    offsets: Tensor
    limits: Tensor
    known: Tensor
    table: Tensor
    growing: ClassVar[tuple[str, ...]] = ("known", "table", *Learning.forest)
    unbounded: ClassVar[tuple[str, ...]] = ("limits", "table", *Learning.unbounded)
    sized: ClassVar[dict[str, str]] = {"num_classes": "offsets"}
    added: ClassVar[tuple[str, ...]] = ("known", "table", "tree_width", *Learning.forest)
    __jit_unused_properties__: ClassVar[list[str]] = ["lattice", "resolution_used", "learned", *Head.__jit_unused_properties__]
    settings: ClassVar[tuple[str, ...]] = (
        *("target", "alpha", "groups", "num_classes", "conditional", "logits", "resolution", "init"),
        *("jitter", "noise_floor", "finite_sample", "patterns", "learn"),
    )
    fit_only: ClassVar[tuple[str, ...]] = (
        *("alpha", "target", "conditional", "init", "resolution", "risk", "noise_floor", "patterns"),
    )
    arguments: ClassVar[tuple[str, ...]] = ("scores", "masks", "groups", "weight", "clusters", "pixel_weight", "features")
    truth: ClassVar[str] = "masks"
    keeps: ClassVar[tuple[type, ...]] = (CurveStatistics, curves.RiseStatistics, SampleStatistics, ClusterSums)
    common: ClassVar[bool] = True
    task = TASK

    def __init__(
        self,
        target: float | list[float],
        alpha: float | None,
        groups: Any = None,
        risk: str | MonotoneRisk = "fnr",
        num_classes: int | None = None,
        conditional: bool = False,
        logits: bool = False,
        range: tuple[float, float] | None = None,
        resolution: float | str | None = None,
        init: float | None = None,
        jitter: float = 0.0,
        noise_floor: bool = True,
        finite_sample: bool = False,
        patterns: Any = None,
        learn: Any = None,
        fractional: bool = False,
    ) -> None:
        super().__init__(alpha, groups, conditional, jitter, noise_floor)
        self.finite_sample = checks.flag("finite_sample", finite_sample)
        self.patterns = finite.check_patterns(patterns, self.groups)
        self.num_classes = None if num_classes is None else checks.count("num_classes", num_classes, 1)
        self.columns = self.num_classes or 1
        self.per_class = self.num_classes is not None
        self.target = target
        self.risk = _find_risk(risk)
        self.logits = checks.flag("logits", logits)
        default = (-16.0, 16.0) if self.logits else (0.0, 1.0)
        self.low, self.high = default if range is None else checks.interval("range", range)
        if init is not None and (isinstance(init, bool) or not isinstance(init, int | float) or not math.isfinite(init)):
            raise ValueError(f"`init` must be a finite threshold, got {init!r}.")
        self.init = float((self.low + self.high) / 2 if init is None else init)
        self.resolution = resolution
        self._unit = _find_unit("exact" if fractional or learn is not None else resolution, self.high - self.low, self.risk)
        self.probabilities = range is None and not self.logits
        self._range = None if range is None else [self.low, self.high]
        self.takes = "probs" if self.probabilities else "scores"
        self.safe_end = -math.inf if self.risk.increasing else math.inf
        targets = target if isinstance(target, list | tuple) else [target] * self.columns
        if len(targets) != self.columns:
            raise ValueError(f"`target` must be one number or {self.columns} of them, one per class, got {target!r}.")
        self._targets = [checks.fraction("target", value) for value in targets]
        self.register_buffer("base", torch.full((self.columns,), self.init, dtype=torch.float64))
        self.register_buffer("offsets", torch.zeros(self.num_groups, self.columns, dtype=torch.float64))
        self.register_buffer("known", torch.zeros(0, self.num_groups, dtype=torch.bool))
        self.register_buffer("table", torch.zeros(0, self.columns, dtype=torch.float64))
        self.register_buffer("limits", torch.tensor([-math.inf, math.inf], dtype=torch.float64))
        if learn is not None and (self.finite_sample or resolution not in (None, "exact")):
            raise ValueError("`learn` makes thresholds that depend on features; omit `finite_sample` and `resolution`.")
        if fractional and resolution not in (None, "exact"):
            raise ValueError("`fractional` keeps scores, not curves at a `resolution`; omit it, or pass 'exact'.")
        if learn is not None and type(self).calibrate is not ThresholdHead.calibrate:
            raise TypeError(f"a {type(self).__name__} does not learn; use a ThresholdHead.")
        self.prepare_learning(learn, self.columns, fractional)
        self.keeps_rows = self._unit is None
        self.reset()

    # -- statistics --------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget statistics, thresholds and report."""
        self._working_unit, self.keeps_apart = self._unit, False
        self.folds = noise.FOLDS if self.noise_floor else 1
        self.base.fill_(self.init)
        self.offsets.zero_()
        super().reset()

    def prepare(self, solver: str, eta: float | None, max_iter: int | None) -> None:
        """Keep examples apart for ``"fresh"``, and curves at the thresholds that fixed steps visit."""
        super().prepare(solver, eta, max_iter)
        self.keeps_apart = solver == "fresh"
        self.folds = noise.FOLDS if self.noise_floor and solver == "exact" else 1
        if solver != "exact" and self.conditional and not isinstance(self.risk, MonotoneRisk):
            self._working_unit = None  # steps of eta / P(A) do not lie on a lattice
        elif eta is not None and self._unit is not None:
            self._working_unit = eta  # every threshold visited is f0 + k eta

    def sizes(self) -> dict[str, int]:
        """Of the curves too."""
        lattice = self.lattice
        own = {"F": self.folds, "C": self.columns, "size": 0 if lattice is None else lattice.size, "points": POINTS}
        return super().sizes() | own | {"a+1": self.num_groups + 1}

    @property
    def resolution_used(self) -> float:
        """Step between thresholds that can be distinguished."""
        return self._working_unit or (self.high - self.low) * 2.0**-30

    @property
    def lattice(self) -> Lattice | None:
        """The thresholds at which risks are known; None in exact mode."""
        if self._working_unit is None:
            return None
        return Lattice.over(self.low - self.jitter, self.high + self.jitter, self.init, self._working_unit, self.probabilities)

    def observe(
        self,
        scores: Tensor,
        masks: Tensor,
        groups: Any = None,
        weight: Any = None,
        clusters: Any = None,
        pixel_weight: Any = None,
        features: Any = None,
    ) -> None:
        """Add a batch to the statistics: curves of each combination of groups; of many, the points at which they rise.

        Args:
            scores: shape ``(n, ...)``, or ``(n, C, ...)`` with classes; any floating type.
            masks: true pixels, bool (or 0/1), the same shape.
            groups: membership ``(n, a)``, bool, or a :class:`~torchgmc.Groups`.
            weight: weight of each example, ``(n,)``.
            clusters: which examples belong together, e.g. the patient of each slice: integers or strings, ``(n,)``.
            pixel_weight: how much each pixel counts in its image's risk, of the shape of the scores (or without its channel):
                2 for the pixels of small objects, 0 for pixels to leave out, such as those of an unknown class.
            features: of each image, ``(n, d)``, where the head was made with ``learn``.
        """
        batch = self.check_batch(scores, masks, groups, weight, clusters, pixel_weight, features)
        lattice, pixels = self.lattice, math.prod(batch.scores.shape[2 if self.per_class else 1 :])
        rows = len(batch.scores)
        if lattice is not None:
            most = curves.MAX_ELEMENTS // (self.columns * max(POINTS, self.folds * min(pixels, lattice.size)))
            rows = max(1, min(BATCH, most))
        if self.jitter:  # noise is many cheap operations: stay in the cache
            rows = min(rows, max(1, CHUNK // max(1, math.prod(batch.scores.shape[1:]))))
        for start in range(0, len(batch.scores), max(rows, 1)):
            part = batch.part(start, rows)
            keys = example_keys(part.scores, part.masks)
            self.keep(self._summarize(part, lattice, keys), keys=keys)

    def _summarize(self, batch: Batch, lattice: Lattice | None, keys: Tensor) -> CurveStatistics | SampleStatistics:
        """Statistics of one batch."""
        scores, masks = self.flat(hashing.add(batch.scores, self.jitter, self.noise_version)), self.flat(batch.masks)  # (n, C, ...)
        pixels = None if batch.pixels is None else self.flat(batch.pixels)
        if lattice is not None:
            return sum_curves(self, batch._replace(scores=scores, masks=masks, pixels=pixels), lattice, keys)
        found, number, share, counts = self.risk.shares().pixels(masks, pixels)
        row = repeat(torch.arange(len(number), device=number.device), number)
        example, label = row // self.columns, row % self.columns
        mass = batch.weight[:, None] * (counts > 0)
        values, share = scores.flatten()[found].double(), batch.weight[example] * share
        rows = (batch.member.clone(), mass, keys, batch.cluster.clone(), values, share, example, label)
        n, features = torch.tensor(len(scores), device=scores.device), batch.features.clone() if self.learns else None
        kept = SampleStatistics(*rows, scores.dtype, n, (counts == 0).sum(0), features)
        return kept if self.resolution == "exact" or not (self.learns or self.fractional) else kept.sketched(KEPT)

    @checked_once
    def check_batch(
        self,
        scores: Any,
        masks: Any,
        groups: Any = None,
        weight: Any = None,
        clusters: Any = None,
        pixel_weight: Any = None,
        features: Any = None,
    ) -> Batch:
        """The checked batch, or an error that says what is wrong with it."""
        scores, low, high = checks.bounded("scores", scores, detach=True)
        if self.num_classes is not None and (scores.dim() < 2 or scores.shape[1] != self.num_classes):
            raise ValueError(
                f"`scores` must have shape (n, {self.num_classes}, ...) for num_classes={self.num_classes}, "
                f"got {tuple(scores.shape)}."
            )
        masks = checks.binary("masks", masks, scores)
        if self.probabilities and (low < 0.0 or high > 1.0):
            raise ValueError(
                f"`scores` must be probabilities in [0, 1], got {low:.4g} to {high:.4g}; pass logits=True for logits, "
                "or range=(low, high) for other scores."
            )
        member = self.check_groups(groups, len(scores), scores.device)
        cluster = check_clusters(clusters, len(scores), scores.device)
        weights = checks.weights(weight, len(scores), scores).detach()
        columns = self.check_features(features, len(scores), scores.device)
        return Batch(scores, masks, member, weights, cluster, self._pixels(pixel_weight, scores), columns)

    def _pixels(self, given: Any, scores: Tensor) -> Tensor | None:
        """Weights of pixels, float64 of the shape of the scores."""
        if given is None:
            return None
        pixels = checks.numbers("pixel_weight", given).to(scores.device, torch.float64)
        if self.per_class and pixels.dim() == scores.dim() - 1:
            pixels = pixels.unsqueeze(1).expand(scores.shape)
        if pixels.shape != scores.shape:
            raise ValueError(
                f"`pixel_weight` must have one weight per pixel, {tuple(scores.shape)}, got {tuple(pixels.shape)}; weights "
                "of whole examples are `weight`."
            )
        checks.finite("pixel_weight", pixels)
        if pixels.numel() and float(pixels.min()) < 0:
            raise ValueError(f"`pixel_weight` must not be negative, got {float(pixels.min()):g}.")
        if isinstance(self.risk, MonotoneRisk) and not self.risk.weighted:
            raise ValueError(
                f"the risk {self.risk.name!r} does not take weights of pixels; make it with MonotoneRisk(function, "
                "weighted=True), where function(scores, masks, thresholds, weights)."
            )
        return pixels

    def flat(self, x: Tensor) -> Tensor:
        """(n, C, m), or (n, C, ...) for a custom risk, which may look at the image's shape."""
        x = x if self.per_class else x[:, None]
        return x if isinstance(self.risk, MonotoneRisk) else x.reshape(len(x), self.columns, math.prod(x.shape[2:]))

    # -- the promise -------------------------------------------------------------------------------------------------

    def input_range(self) -> tuple[float, float]:
        """[0, 1] for probabilities; other scores are free."""
        return (0.0, 1.0) if self.probabilities else (-math.inf, math.inf)

    def test_functions(self) -> Names:
        """Groups and classes."""
        return Names(self.promised_groups(), self.class_names())

    def softness(self) -> float:
        """Default width of a soft step; only for risks that have one."""
        self.risk.shares()
        return 0.1

    def s_range(self) -> tuple[Tensor, Tensor]:
        """A risk lies in [0, 1]."""
        return -self.s_target(), 1.0 - self.s_target()

    def s_target(self) -> Tensor:
        """The target risk, one per class, float64."""
        return torch.tensor(self._targets, dtype=torch.float64)

    # -- fit ---------------------------------------------------------------------------------------------------------

    def _rows_stay(self, rows: SampleStatistics, solver: str = "exact", *_: Any, **__: Any) -> bool:
        """Do sums over the images tell everything? See :func:`torchgmc.distributed.rows_stay`."""
        own = rows if self.statistics is None else self.statistics
        many = int(over_ranks(torch.tensor(len(own.key)), always=True)) > folds.EXACT
        return solver == "exact" and not self.finite_sample and many and few_patterns(own.member, CELLS)

    @pooled
    @rows_stay(_rows_stay)
    def calibrate(self, solver: str = "exact", eta: float | None = None, max_iter: int | None = None) -> "ThresholdHead":
        """Find the thresholds.

        Over several processes curves are added up. Scores that are kept (with ``learn``, ``fractional`` or ``"exact"``) of more
        than 32,768 images stay where they are; they are sent to every process with ``finite_sample``, another solver, or more
        than 1,024 combinations of groups. With clusters their ids are sent, and the sums of those on several processes.

        Args:
            solver: ``"exact"`` (all offsets at once), ``"paper"`` (Algorithm 1) or ``"fresh"`` (Algorithm 2), see
                :mod:`torchgmc.engine.solver`.
            eta: fixed step; by default alpha / (K B) with K the steepest slope of the risk seen in the data.
            max_iter: maximum number of fixed steps; by default the bound of Theorem 1, at most 100,000.
        """
        self.check_solver(solver, eta, max_iter)
        if solver == "fresh" and not self.keeps_apart:
            raise ValueError("solver='fresh' needs the individual examples: use `fit` or `fit_batches` with solver='fresh'.")
        splits = fresh_splits(max_iter, *self.seen("image").content()) if solver == "fresh" else None
        problem = self.problem()
        if self.finite_sample:
            self.known, self.table, report, everyone = tabulate(self, self.statistics, problem, solver)
            self._write(self.base, self.offsets)
            self.mark_fitted(self.finish(report), everyone)
            return self
        if self.learns:
            if solver != "exact":
                raise ValueError(f"solver={solver!r} takes steps on named groups only; use solver='exact' with `learn`.")
            return self._learn(problem)
        if solver == "exact":
            found = fit_thresholds(self, self.statistics, problem)
            self._write(found.base, -found.offsets)
            self.mark_fitted(self.finish(found.report), found.everyone)
            return self
        eta, bound = self._fixed_step(problem, eta, solver == "fresh")
        report, _ = run(problem, self.goal(), solver, eta, max_iter or bound, splits=splits)
        self._write(self.base.new_full((self.columns,), self.init), problem.offsets)
        self.mark_fitted(self.finish(report))
        return self

    def _learn(self, problem: CurveProblem | SampleProblem) -> "ThresholdHead":
        """Trees, then the promises on what trees that did not see an image leave of it: scores moved by them."""
        seen: SampleStatistics = self.statistics
        trees, moved = grow(self, seen, problem.target), seen
        before = problem.violations_at(torch.full_like(problem.mass, self.init), self.lacks_everyone(problem.member))
        if trees is not None:
            shift = (trees.unseen - trees.start)[seen.example, seen.label]
            moved = dataclasses.replace(seen, scores=seen.scores - shift, dtype=torch.float64)
            problem = self.problem_of(moved)
        found = fit_thresholds(self, moved, problem)
        self._write(found.base, -found.offsets)
        assert seen.features is not None
        self.write_trees(trees, seen.features.shape[1])
        if trees is not None:
            fresh = found.base + seen.member.double() @ found.offsets + trees.unseen - trees.start
            sign = 1.0 if self.risk.increasing else -1.0
            s = [sign * (seen.risk(lam) - problem.target) for lam in (trees.start, fresh)]
            effect = fresh - trees.start + trees.z - trees.unseen
            self.write_rules(trees, (effect, *s), seen, self.s_range())
        history = torch.stack([before.abs().max().cpu(), found.report.history[-1]])
        report = dataclasses.replace(found.report, violations_before=before, history=history)  # of scores as they came
        self.mark_fitted(self.finish(report), found.everyone)
        return self

    def _write(self, base: Tensor, offsets: Tensor) -> None:
        lattice = self.lattice
        # Probabilities lie inside the lattice, where no clamp is needed; other scores may lie beyond it, and were then
        # counted as at its ends.
        limits = [-math.inf, math.inf] if lattice is None or self.probabilities else lattice.points()[[0, -1]].tolist()
        self.base.copy_(base)
        self.offsets.copy_(offsets)
        self.limits.copy_(torch.tensor(limits, dtype=torch.float64))

    def problem_of(self, statistics: CurveStatistics | SampleStatistics) -> CurveProblem | SampleProblem:
        """What is solved on these statistics."""
        target = self.s_target().to(statistics.mass.device)
        line = (self.low - self.jitter - 1e-9, self.high + self.jitter, self.resolution_used)
        common = (target, self.risk.increasing, self.conditional, Names(self.groups, self.class_names()), *line)
        if isinstance(statistics, CurveStatistics):
            lattice = self.lattice
            assert lattice is not None
            return CurveProblem(statistics, lattice, *common)
        return SampleProblem(statistics, self.init, *common, apart=self.keeps_apart)

    def problem(self) -> CurveProblem | SampleProblem:
        """What is solved on all that was observed; an error if nothing can be fitted for a group."""
        statistics = self.seen("image")
        problem = self.problem_of(statistics)
        empty = (problem.share <= 0).nonzero()
        if len(empty):
            row, column = empty[0].tolist()
            excluded, examples = over_ranks(statistics.excluded), over_ranks(statistics.examples)
            place = f" of {self.class_names()[column]}" if self.per_class else ""
            raise ValueError(
                f"group {self.groups[row]!r} has no examples with a {self.risk.name}{place} ({len(empty)} such groups in "
                f"total; {int(excluded.max())} of {int(examples)} images have no relevant pixel), so "
                "nothing can be fitted for it. Drop the group, or calibrate on data that includes it."
            )
        return problem

    def _fixed_step(self, problem: CurveProblem | SampleProblem, eta: float | None, fresh: bool) -> tuple[float, int]:
        """The step of Theorem 1 or 2 (on the lattice, where there is one), and Theorem 1's bound on the number of steps."""
        slope = problem.slope()
        bound = float((problem.share / problem.scale.square()).max())  # E||g||^2 = P(A) / scale^2
        unit = self._working_unit
        if eta is None:
            eta = theory.step_size(self.goal(), slope, bound, finite_sample=fresh)
            if unit is not None:
                eta = max(1, math.floor(eta / unit)) * unit
        elif unit is not None and (round(eta / unit) == 0 or abs(eta / unit - round(eta / unit)) > 1e-9 * eta / unit):
            raise ValueError(
                f"`eta` = {eta:g} is not a multiple of the step {unit:g} between the observed thresholds; use `fit` or "
                f"`fit_batches`, which observe the right ones, or make the head with resolution={eta:g} (or 'exact')."
            )
        if unit is not None and self.conditional:
            raise ValueError(
                "with conditional=True a fixed step is eta / P(A), which fits no grid of thresholds; use `fit` or "
                "`fit_batches`, which then keep every score, or make the head with resolution='exact'."
            )
        steps = theory.iteration_bound(self.goal(), slope, bound, self.high - self.low + abs(self.init))
        return eta, min(MAX_FIXED_STEPS, max(1, steps))

    def finish(self, report: Report) -> Report:
        """Violations as risk - target, and facts about the data."""
        statistics = self.statistics
        assert statistics is not None
        sign = 1.0 if self.risk.increasing else -1.0
        excluded = over_ranks(statistics.excluded).tolist()
        note = f" {max(excluded)} images without a relevant pixel were left out." if max(excluded) else ""
        details = {
            "examples": int(over_ranks(statistics.examples)),
            "excluded": excluded if self.per_class else excluded[0],
            "cells": len(statistics.member) if isinstance(statistics, CurveStatistics) else None,
        }
        tables = {name: sign * getattr(report, name) for name in ("violations_before", "violations_after")}
        return dataclasses.replace(report, message=report.message + note, details=details | report.details, **tables)

    # -- use ---------------------------------------------------------------------------------------------------------

    def threshold(self, groups: Optional[Tensor] = None, n: int = 1, features: Optional[Tensor] = None) -> Tensor:
        """Threshold of each example: ``(n,)``, or ``(n, C)`` with classes, float64.

        ``n`` is the number of rows when the head has no groups; ``features``: where it was made with ``learn``.
        """
        if groups is not None or features is not None:
            n = -1 if features is None else features.shape[0]
        member = self.membership(groups, n, self.base)
        if self.finite_sample:
            lam = finite.look_up(member, self.known, self.table, self.safe_end)
        else:
            lam = self.base - member @ self.offsets  # (n, C)
            if self.learns:
                lam = lam - self.learned_move(torch.zeros_like(lam), member, features)
            lam = lam.clamp(self.limits[0], self.limits[1])  # beyond them nothing was measured
        return lam if self.per_class else lam[:, 0]

    def forward(
        self,
        scores: Tensor,
        groups: Optional[Tensor] = None,
        mode: str = "hard",
        temperature: float = 0.1,
        features: Optional[Tensor] = None,
    ) -> Tensor:
        r"""Mask = scores > threshold, of the shape of ``scores``.

        .. math:: 1\{h_i > \lambda(x)\} \;\text{(hard)} \qquad \sigma\big((h_i - \lambda(x)) / T\big) \;\text{(soft)}

        Args:
            scores: shape ``(n, ...)``.
            groups: membership ``(n, a)``.
            mode: ``"hard"``: bool, no derivative. ``"soft"``: numbers in (0, 1) of the type of the scores, differentiable.
                ``"straight_through"``: 0 or 1 as in ``"hard"``, with the derivative of ``"soft"``.
            temperature: T, in the units of the scores; take a larger one for logits.
            features: ``(n, d)``, where the head was made with ``learn``.
        """
        if not is_scripting():
            self.check_input("scores", scores, groups, "this head was fitted on probabilities", features)
        lam = self.threshold(groups, scores.shape[0], features)
        if lam.shape[0] != scores.shape[0]:
            raise ValueError(f"`scores` has {scores.shape[0]} rows, but `groups` or `features` {lam.shape[0]}")
        values = hashing.add(scores, self.jitter, self.noise_version)
        for _ in range(scores.dim() - lam.dim()):
            lam = lam.unsqueeze(-1)
        found = soft.above(values, lam.to(values.dtype), mode, temperature)
        return found if mode == "hard" else found.to(scores.dtype)

    def solve_differentiably(
        self,
        scores: Tensor,
        masks: Tensor,
        groups: Any = None,
        weight: Any = None,
        alpha: float | Tensor | None = None,
        temperature: float = 0.1,
    ) -> dict[str, Tensor]:
        r"""Fitted thresholds as a differentiable function of the scores; the head does not change.

        The risk is smoothed, 1{h <= lambda} becoming :math:`\sigma((\lambda - h)/T)`, and the offsets minimise the smooth
        pinball loss + alpha \|offsets\|_1: \|smooth risk of A - target\| P(A) <= alpha, with offsets of 0 where f0 is good
        enough. Derivatives are those of the optimum (:mod:`torchgmc.engine.implicit`): one small linear system per backward
        pass. Each process uses only its own data.

        Args:
            scores, masks, groups, weight: as in ``observe``.
            alpha: replaces the head's; 0 brings every smooth violation to 0 and has no kinks. A tensor may have a derivative.
            temperature: T, in the units of the scores.

        Returns:
            The state for :meth:`apply_state`: ``"offsets"`` ``(a, C)`` with their derivative, ``"base"``, ``"limits"``.

        Example:
            >>> scores, masks = torch.rand(20, 8, 8, requires_grad=True), torch.rand(20, 8, 8) < 0.4
            >>> head = gmc.ThresholdHead(target=0.1, alpha=0.01)
            >>> state = head.solve_differentiably(scores[:10], masks[:10], temperature=0.05)
            >>> soft_mask = head.apply_state(state, scores[10:], mode="soft", temperature=0.05)
            >>> soft_mask[~masks[10:]].mean().backward()  # fewer false alarms *after* calibration
            >>> bool((scores.grad[:10] != 0).any())
            True
        """
        if type(self).calibrate is not ThresholdHead.calibrate:
            raise TypeError(f"a {type(self).__name__} has no differentiable fit; train through a ThresholdHead.")
        return training.solve(self, scores, masks, groups, weight, alpha, temperature)

    def values(
        self,
        scores: Tensor,
        masks: Tensor,
        groups: Any = None,
        softness: float | None = None,
        pixel_weight: Any = None,
        features: Any = None,
    ) -> Values:
        """Risk - target of each image (and class) at its threshold; NaN for an image without a relevant pixel.

        Soft, the risk is a smooth function of the scores.
        """
        checks.softness(softness)
        batch = self.check_batch(scores, masks, groups, pixel_weight=pixel_weight, features=features)
        pixels, lam = None if batch.pixels is None else self.flat(batch.pixels), self._at(batch)
        masks, target = self.flat(batch.masks), self.s_target().to(batch.scores.device)
        if softness is None:
            risk = self.risk.values(self.flat(hashing.add(batch.scores, self.jitter, self.noise_version)), masks, lam, pixels)
        else:
            risk = self.risk.shares().soft(self.flat(scores), masks, lam, softness, pixels)
        return Values(risk - target.to(risk.dtype), self.promised(batch.member))

    def _at(self, batch: Batch) -> Tensor:
        """The threshold of each example and class, ``(n, C)``; f0 before the fit."""
        n = len(batch.scores)
        if not self.is_fitted:
            return self.base.new_full((n, self.columns), self.init).to(batch.scores.device)
        member, features = batch.member if self.grouped else None, batch.features if self.learns else None
        return self.threshold(member, n, features).reshape(n, self.columns)

    def audit_sums(self, weight: Tensor, **batch: Any) -> dict[str, Tensor]:
        """Pixels that are right at f0."""
        seen = self.check_batch(**batch)
        right = (seen.scores > self.init) == seen.masks
        if seen.pixels is None:
            return {"pixels": torch.tensor(right.numel(), device=right.device), "before": right.sum()}
        return {"pixels": seen.pixels.sum(), "before": (right * seen.pixels).sum()}

    def audit_rows(self, **batch: Any) -> dict[str, Tensor]:
        """Pixels of each image and class: found, missed, wrongly found, rightly left out, ``(n, C)`` each."""
        seen = self.check_batch(**batch)
        scores = self.flat(hashing.add(seen.scores, self.jitter, self.noise_version))
        lam = self._at(seen).to(scores.dtype).reshape(*scores.shape[:2], *[1] * (scores.dim() - 2))
        found, true = scores > lam, self.flat(seen.masks)
        weight = 1 if seen.pixels is None else self.flat(seen.pixels)
        pairs = {"tp": found & true, "fn": ~found & true, "fp": found & ~true, "tn": ~found & ~true}
        return {name: (part * weight).flatten(2).sum(-1).double() for name, part in pairs.items()}

    def audit_measures(self, tally: Tally) -> dict[str, tuple[Tensor, tuple[float, float] | None]]:
        """Rates of the pixels of an image, averaged over images."""
        tp, fn, fp, tn = (tally.rows[name] for name in ("tp", "fn", "fp", "tn"))
        parts = {"FNR": (fn, tp), "recall": (tp, fn), "FPR": (fp, tn), "precision": (tp, fp)}
        tags = [f", {name}" if name else "" for name in self.class_names()]
        return {name + tag: ((a / (a + b))[:, c], (0.0, 1.0)) for name, (a, b) in parts.items() for c, tag in enumerate(tags)}

    def audit_summary(self, tally: Tally) -> dict[str, Any]:
        """What the promise cost: pixel accuracy before and after."""
        right = {"before": tally.sums["before"].double(), "after": (tally.rows["tp"] + tally.rows["tn"]).sum()}
        return {"cost": {f"accuracy {when}": float(found / tally.sums["pixels"]) for when, found in right.items()}}

    def group_thresholds(self, member: Tensor, fitted: bool = True) -> Tensor:
        """Threshold of each combination and class."""
        if self.learns:
            raise TypeError("the thresholds of this head depend on features too.")
        if not fitted:
            return self.base.cpu().expand(len(member), self.columns)
        member = member.to(self.base.device)
        return self.threshold(member if self.grouped else None, len(member)).cpu().reshape(len(member), self.columns)

    def figures(self, audit: Any) -> dict[str, Any]:
        """The threshold of each combination of groups."""
        return {} if self.learns or self.fractional else threshold_figures(self)

    def tables(self, audit: Any) -> list[Table]:
        """The same as a table; or the rules that were learned."""
        return super().tables(audit) if self.learns or self.fractional else threshold_tables(self)

    def config(self) -> dict[str, Any]:
        """Arguments that rebuild this head; a custom risk is named, not stored."""
        return super().config() | {"risk": self.risk.name, "range": self._range}

    def extra_repr(self) -> str:
        """Options and state."""
        return f"target={self.target}, risk={self.risk.name}, {super().extra_repr()}"


def _find_risk(risk: Any) -> Risk:
    if isinstance(risk, MonotoneRisk):
        return risk
    if not isinstance(risk, str) or risk not in RISKS:
        raise ValueError(
            f"`risk` must be one of {sorted(RISKS)} or a MonotoneRisk(function), got {risk!r}; "
            "load a head that was saved with a custom risk with gmc.load(path, risk=MonotoneRisk(function))."
        )
    return RISKS[risk]


def _find_unit(resolution: Any, width: float, risk: Risk) -> float | None:
    """Step of the lattice; None for exact mode."""
    if resolution == "exact":
        if isinstance(risk, MonotoneRisk):
            raise ValueError(
                f"`resolution='exact'` only works for {' and '.join(map(repr, RISKS))}; for a custom risk, pass a step between "
                "thresholds."
            )
        return None
    if resolution is None:
        return 2.0 ** (math.floor(math.log2(width)) - (7 if isinstance(risk, MonotoneRisk) else 12))
    unit = checks.positive("resolution", resolution, "It is the step between thresholds, or 'exact'.")
    if width / unit > 1 << 24:
        raise ValueError(f"`resolution` = {unit:g} would need {width / unit:.0f} thresholds; use resolution='exact'.")
    return unit
