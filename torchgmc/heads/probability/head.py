"""Multiaccurate and multicalibrated probabilities: right for every group, at every level of the prediction."""

import dataclasses
from itertools import pairwise
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor

from torchgmc import theory
from torchgmc.audits.measure import ALL_LEVELS, Tally
from torchgmc.audits.measures import rates
from torchgmc.distributed import pooled, rows_stay, total as over_ranks
from torchgmc.engine import checks, folds, soft, trees
from torchgmc.engine.batches import checked_once
from torchgmc.engine.clusters import check as check_clusters
from torchgmc.engine.float64 import wide
from torchgmc.engine.folds import fresh_splits
from torchgmc.engine.scripting import has_values, is_scripting
from torchgmc.engine.solver import MAX_FIXED_STEPS, run
from torchgmc.engine.values import Names, Values
from torchgmc.heads.base import Head
from torchgmc.heads.contract import EVERYONE
from torchgmc.heads.learned import Found as TreesFound, Learning, looked_at
from torchgmc.heads.levelsets import steps as levelsets
from torchgmc.heads.levelsets.problem import ResidualProblem, check_masses
from torchgmc.heads.probability import problem as potential, solver as probabilities, static, training
from torchgmc.heads.probability.solver import ProbabilityStatistics
from torchgmc.heads.probability.task import TASK

GEOMETRIES = ("kl", "euclidean")


class ProbabilityHead(Learning):
    r"""Probabilities that are right on average in every group, and at every level of the prediction.

    .. math:: \left| E[1_A(x)\, 1\{f(x) \in \text{bin}_k\}\, (f(x) - y)] \right| \le \alpha \quad \text{for every group } A
              \text{ and level set } k

    ``bins=None`` has one level set: multiaccuracy. The default geometry ``"kl"`` makes the smallest change: the fitted f is
    :math:`\sigma(\mathrm{logit}\, h - \theta_0 - \sum_{A \ni x} \theta_A)`, all offsets found at once by Newton steps (with an
    l1 slack inside the noise), then rounds of steps on groups x level sets for what is left; ``"euclidean"`` does the same on
    the probabilities themselves, :math:`\mathrm{clip}(h - \theta_0 - \sum \theta_A)`. Neither ever raises the Brier score on
    the calibration data. With classes, f and y are vectors on the simplex, and the promise holds for each class. With
    ``multilabel=True`` the C columns are events that do not exclude one another (tags), each fitted like a single one.

    With ``"kl"`` slopes are fitted too, for everyone and for each group, to correct an overconfident model
    (:mod:`torchgmc.heads.probability.static`): where no group differs, this is Platt, temperature or vector
    scaling. The noise of the sample decides how far a group moves (:mod:`torchgmc.engine.noise`).

    Args:
        alpha: largest violation allowed; None for as small as the sample can resolve.
        groups: names of the groups; None for one group of everyone.
        bins: number of equal-width level sets of f, or None.
        num_classes: None for the probability of one event, ``(n,)``; C for probabilities ``(n, C)`` and y class ids.
        geometry: ``"kl"`` (steps in logits) or ``"euclidean"`` (steps in probabilities).
        conditional: violations are divided by P(A), so that alpha bounds what happens inside each group.
        range: (low, high) of a bounded real outcome: f and y are then means and values in this range.
        noise_floor: False fits to alpha on the sample, noise included, and fits no slopes (``"paper"`` and ``"fresh"`` know
            only alpha).
        learn: ``gmc.Trees(...)`` finds groups that nobody named, from ``features`` ``(n, d)`` passed to every call (NaN where a
            value is missing): after the named groups, before the rounds that keep the promises of these.
        multilabel: probabilities ``(n, C)`` that need not sum to 1, and y ``(n, C)`` of 0 and 1; C is ``num_classes``.
        fractional: memberships may be numbers m from 0 to 1 (probabilities of membership): the promise is about E[m s].

    Shapes: ``fit(probs (n,) or (n, C), y (n,), groups (n, a))``; ``head(probs, groups)`` has the shape of ``probs``.
    ``report.violations_after`` has a row per group and one for everyone, and a column per level set (and class) and one for all
    levels together.

    Example:
        >>> groups = torch.rand(4000, 3) < 0.5
        >>> truth = torch.sigmoid(torch.randn(4000) + groups[:, 0] * 1.0)
        >>> y = torch.rand(4000) < truth
        >>> probs = torch.sigmoid(torch.logit(truth) - groups[:, 0] * 1.0)  # blind to the first group
        >>> head = gmc.ProbabilityHead(alpha=0.005, groups=["a", "b", "c"]).fit(probs, y, groups)
        >>> head.report.reached, head(probs, groups).shape
        ('alpha', torch.Size([4000]))
        >>> bool(((head(probs, groups) - truth).square().mean() < 0.1 * (probs - truth).square().mean()))
        True
    """

    offsets: Tensor
    slopes: Tensor
    rounds: Tensor
    log_who: Tensor
    log_step: Tensor
    log_column: Tensor
    edges: Tensor
    settings: ClassVar[tuple[str, ...]] = (
        *("alpha", "groups", "bins", "num_classes", "geometry", "conditional", "range", "noise_floor", "learn", "multilabel"),
    )
    fit_only: ClassVar[tuple[str, ...]] = ("alpha", "conditional", "noise_floor")
    arguments: ClassVar[tuple[str, ...]] = ("probs", "y", "groups", "weight", "clusters", "features")
    common: ClassVar[bool] = True
    keeps: ClassVar[tuple[type, ...]] = (ProbabilityStatistics,)
    truth: ClassVar[str] = "y"
    __jit_unused_properties__: ClassVar[list[str]] = ["with_means", "learned", *Head.__jit_unused_properties__]
    task = TASK
    takes = "probs"
    largest_number: ClassVar[float] = 1e15
    zeroed: ClassVar[tuple[str, ...]] = ("offsets", "slopes")
    growing: ClassVar[tuple[str, ...]] = ("rounds", "log_who", "log_step", "log_column", *Learning.forest)
    sized: ClassVar[dict[str, str]] = {"bins": "edges", "num_classes": "offsets"}
    renamed: ClassVar[dict[str, str]] = {"tables": "rounds"}
    added: ClassVar[tuple[str, ...]] = ("slopes", "tree_width", *Learning.forest)
    effect_unit = (" in points", 100.0)

    def __init__(
        self,
        alpha: float | None,
        groups: Any = None,
        bins: int | None = 10,
        num_classes: int | None = None,
        geometry: str = "kl",
        conditional: bool = False,
        range: tuple[float, float] | None = None,
        noise_floor: bool = True,
        learn: Any = None,
        multilabel: bool = False,
        fractional: bool = False,
    ) -> None:
        super().__init__(alpha, groups, conditional, noise_floor=noise_floor)
        self.multilabel = checks.flag("multilabel", multilabel)
        self.exclusive = not self.multilabel
        if self.multilabel and num_classes is None:
            raise ValueError("`multilabel` needs `num_classes`, the number of labels: columns of `probs` and of `y`.")
        self.bins = None if bins is None else checks.count("bins", bins, 1)
        self.num_bins = self.bins or 1
        self.num_classes = None if num_classes is None else checks.count("num_classes", num_classes, 1)
        self.per_class = self.num_classes is not None
        if self.num_classes == 1:
            raise ValueError("`num_classes` must be at least 2; omit it for the probability of a single event.")
        self.columns = self.num_classes or 1
        self.one_event = not self.per_class
        self.geometry = checks.option("geometry", geometry, GEOMETRIES)
        self.euclidean = geometry == "euclidean"
        self.range = None if range is None else [*checks.interval("range", range)]
        if range is not None and self.per_class:
            raise ValueError("`range` is for a real outcome; with `num_classes` the outcome is a class.")
        self.low, self.high = self.range or (0.0, 1.0)
        rows = self.num_groups + 1
        self.hold(offsets=(rows, self.columns), slopes=(rows, self.columns), rounds=(0, rows, self.num_bins, self.columns))
        self.hold(torch.int64, log_who=(0, self.num_bins), log_column=(0,))
        self.hold(log_step=(0, self.num_bins))
        edges = levelsets.equal_width(self.num_bins, self.columns == 1 or self.multilabel, self.euclidean)
        self.register_buffer("edges", edges)
        self.prepare_learning(learn, self.columns, fractional)
        self.reset()

    # -- statistics --------------------------------------------------------------------------------------------------

    def observe(
        self, probs: Tensor, y: Tensor, groups: Any = None, weight: Any = None, clusters: Any = None, features: Any = None
    ) -> None:
        """Add a batch to the statistics.

        Args:
            probs: shape ``(n,)``, or ``(n, C)`` with classes; floating, in [0, 1] (or in ``range``).
            y: outcomes ``(n,)``: bool or 0/1; class ids; or values in ``range``.
            groups: membership ``(n, a)``, bool, or a :class:`~torchgmc.Groups`.
            weight: weight of each example, ``(n,)``.
            clusters: which examples belong together, e.g. the patient of each visit: integers or strings, ``(n,)``.
            features: what groups are learned from, ``(n, d)``, where the head was made with ``learn``.
        """
        batch = self.check_batch(probs, y, groups, weight, clusters, features)
        if batch.rows:
            self.keep(batch.packed().clone(), probs, y)

    @checked_once
    def check_batch(
        self, probs: Any, y: Any, groups: Any = None, weight: Any = None, clusters: Any = None, features: Any = None
    ) -> ProbabilityStatistics:
        """The checked batch, or an error that says what is wrong with it."""
        probs, low, high = checks.bounded("probs", probs, detach=True)
        wanted = "(n,)" if self.num_classes is None else f"(n, {self.num_classes})"
        if probs.dim() != (2 if self.per_class else 1) or (self.per_class and probs.shape[1] != self.num_classes):
            more = "; for classes make the head with num_classes=C, for labels that may hold together with multilabel=True too"
            hint = more if probs.dim() == 2 and not self.per_class else ""
            raise ValueError(f"`probs` must have shape {wanted}, got {tuple(probs.shape)}{hint}.")
        if probs.numel() and (low < self.low - 1e-6 or high > self.high + 1e-6):
            hint = "apply sigmoid or softmax to logits" if self.range is None else "widen `range`"
            raise ValueError(f"`probs` must lie in [{self.low:g}, {self.high:g}], got {low:.4g} to {high:.4g}; {hint}.")
        if self.per_class and self.exclusive:
            self._check_sums(probs)
        outcome = self._outcome(y, probs)
        member = self.check_groups(groups, len(probs), probs.device)
        weights = checks.weights(weight, len(probs), probs).detach()
        cluster = check_clusters(clusters, len(probs), probs.device)
        columns = self.check_features(features, len(probs), probs.device)
        return ProbabilityStatistics(self.coordinates(probs), outcome, member, weights, cluster, columns)

    def sizes(self) -> dict[str, int]:
        """Of the classes too."""
        return super().sizes() | {"C": self.columns}

    def _check_sums(self, probs: Tensor) -> None:
        """Eager calls: the classes of a row exclude one another."""
        if not probs.numel() or not has_values(probs):
            return
        off = float((probs.detach().sum(1, dtype=torch.float32) - 1).abs().max())
        if off > (2e-2 if probs.dtype in (torch.float16, torch.bfloat16) else 1e-2):
            raise ValueError(
                f"`probs` must sum to 1 over the classes, got sums off by {off:.3g}; for labels of which several may hold "
                "(tags, the outputs of a sigmoid) make the head with multilabel=True."
            )

    def _outcome(self, y: Any, probs: Tensor) -> Tensor:
        """y in [0, 1], float64 ``(n, C)``."""
        y = checks.ordinary("y", y)
        if self.multilabel:
            return checks.binary("y", y, probs, "probs").double()
        if y.shape != probs.shape[:1]:
            if y.shape == probs.shape and self.per_class:
                raise ValueError(
                    f"`y` must hold one class id per row, ({len(probs)},), got {tuple(y.shape)}; for labels of which several "
                    "may hold make the head with multilabel=True."
                )
            raise ValueError(f"`y` must have shape ({len(probs)},), one outcome per row of `probs`, got {tuple(y.shape)}.")
        if y.device != probs.device:
            raise ValueError(f"`y` is on {y.device} but `probs` is on {probs.device}; move them to one device.")
        if self.num_classes is not None:
            if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
                raise TypeError(f"`y` must hold class ids (an integer type), got {y.dtype}.")
            if y.numel() and (int(y.min()) < 0 or int(y.max()) >= self.num_classes):
                raise ValueError(f"`y` must hold class ids from 0 to {self.num_classes - 1}, got {int(y.min())} to {int(y.max())}.")
            rows: Tensor = torch.nn.functional.one_hot(y.long(), self.num_classes)
            return rows.double()
        if y.is_complex():
            raise TypeError(f"`y` must hold real outcomes, got {y.dtype}.")
        y = y.double()
        checks.finite("y", y)
        if self.range is None:
            wrong = y[(y != 0) & (y != 1)]
            if len(wrong):
                raise ValueError(
                    f"`y` must be bool or hold only 0 and 1, but it holds {float(wrong[0]):.4g}; for a real outcome make the "
                    "head with range=(low, high), for classes with num_classes=C."
                )
        elif y.numel() and (float(y.min()) < self.low or float(y.max()) > self.high):
            raise ValueError(
                f"`y` must lie in `range` = [{self.low:g}, {self.high:g}], got {float(y.min()):.4g} to {float(y.max()):.4g}."
            )
        scaled: Tensor = (y - self.low) / (self.high - self.low)
        return scaled[:, None]

    # -- fit ---------------------------------------------------------------------------------------------------------

    def _rows_stay(self, rows: ProbabilityStatistics, solver: str = "exact", *_: Any, **__: Any) -> bool:
        """Do sums over the rows tell everything? Few rows to learn from, or with clusters, are sent: they are less."""
        if solver != "exact" or not (self.learns or rows.cluster.shape[1]):
            return solver == "exact"
        count = torch.tensor(0 if self.statistics is None else self.statistics.rows)
        return int(over_ranks(count, always=True)) > folds.EXACT

    @pooled
    @rows_stay(_rows_stay)
    def calibrate(self, solver: str = "exact", eta: float | None = None, max_iter: int | None = None) -> "ProbabilityHead":
        """Find the offsets and the steps.

        With ``learn``, trees are grown from about 164,000 of twice as many rows or more. Over several processes, rows of more
        than 32,768 examples stay where they are, and sums are exchanged, with clusters their ids too, and the sums of those whose
        rows are on several processes; fewer rows with ``learn`` or clusters are sent.

        Args:
            solver: ``"exact"`` moves all groups at once; ``"paper"`` (Algorithm 1) and ``"fresh"`` (Algorithm 2) take one cell
                and one fixed step at a time, in the coordinates of the geometry.
            eta: fixed step; by default alpha / (K B).
            max_iter: maximum number of rounds (``"exact"``, 100) or steps (else the bound of Theorem 1, at most 100,000).
        """
        self.check_solver(solver, eta, max_iter)
        examples = self.seen().unpacked(self.num_groups, self.learns or solver != "exact")
        if solver == "exact":
            everyone = self.lacks_everyone(examples.member)
            promise, width = self._promise(examples.z.device, everyone), self.high - self.low
            names = Names([*self.groups, EVERYONE] if everyone else self.groups, self._cells(True))
            fit = probabilities.fit_each if self.multilabel else probabilities.fit
            known = self.learns and not self.multilabel and self._learn_from_some(examples)
            grow = self._known if known else self._grow if self.learns else None
            found = fit(examples, promise, max_iter or 100, names, grow)
            self._write(found.offsets, found.tables, None)
            self.slopes.copy_(found.slopes)
            self.write_trees(found.trees, examples.features.shape[1], known)
            if found.trees is not None and not known:
                before, after = (self._f(z) for z in (examples.z, found.z))
                values = [width * part for part in (after - before, before - examples.y, after - examples.y)]
                self.write_rules(found.trees, values, examples, (-width, width))
            self.mark_fitted(found.report, everyone)
        else:
            self._take_fixed_steps(examples, solver, eta, max_iter)
        return self

    def _take_fixed_steps(self, examples: ProbabilityStatistics, solver: str, eta: float | None, max_iter: int | None) -> None:
        """Algorithm 1 or 2."""
        if self.learns:
            raise ValueError(f"solver={solver!r} takes steps on named groups only; use solver='exact' with `learn`.")
        width, problem = self.high - self.low, self._problem(examples)
        check_masses(problem.mass, problem.names.who)
        alpha = self.goal() / width
        norm = float((problem.mass / problem.scale.square()).max())  # E||g||^2 is at most P(A) / scale^2
        start = potential.loss(problem.z, self._f(problem.z), problem.y, self.euclidean, self.multilabel).sum(1)
        height = max(float((start * problem.share).sum()) + 1.0, 1.0)
        bound = theory.iteration_bound(alpha, problem.smoothness, norm, height)
        eta, steps = eta or theory.step_size(alpha, problem.smoothness, norm), max_iter or min(MAX_FIXED_STEPS, max(1, bound))
        splits = fresh_splits(max_iter, *examples.content()) if solver == "fresh" else None
        report, log = run(problem, alpha, solver, eta, steps, splits=splits)
        changed: dict[str, Any] = {"details": {"examples": len(examples.z), "eta": eta}}
        if width != 1.0:
            changed |= {name: getattr(report, name) * width for name in ("violations_before", "violations_after", "history")}
            changed["message"] = f"{report.message} (Values in this message are relative to the width of `range`.)"
        step, level, column = problem.length(log.who, log.step), log.what // self.columns, log.what % self.columns
        self._write(None, None, levelsets.merge_log(log.who, level, column, step, problem.edges, self.columns))
        self.mark_fitted(dataclasses.replace(report, **changed))

    def shown_output(self, value: float) -> float:
        """A probability (or mean) instead of a coordinate."""
        z = torch.tensor([[value]], dtype=torch.float64)
        f = z.exp() if self.per_class and self.exclusive and not self.euclidean else levelsets.probabilities(z, self.euclidean)
        return float(f) * (self.high - self.low) + self.low

    def _known(self, examples: ProbabilityStatistics, sample: probabilities.Sample, _: Any, z: Tensor) -> TreesFound:
        """What some of the rows taught; see :meth:`_learn_from_some`."""
        loss = probabilities.tree_loss(sample.supposed, sample.share * sample.count, self.euclidean)
        return self._known_trees(z, examples, loss)

    def _grow(
        self, examples: ProbabilityStatistics, sample: probabilities.Sample, found: static.Found | None, final: Tensor
    ) -> TreesFound | None:
        """Trees after offsets and slopes; they start from those of the rows that the search sees.

        Of several labels ``examples`` are one's; its trees see the model's output for all.
        """
        every = self.statistics.unpacked(self.num_groups)
        divided = self.divide(every)
        if divided is None:
            return None
        weight = sample.share * sample.count

        def loss(rows: Tensor) -> trees.Loss:
            return probabilities.tree_loss(sample.supposed[rows], weight[rows], self.euclidean)

        with torch.inference_mode():  # a tenth faster
            start = probabilities.start_of_trees(examples, sample, found, divided.order[: -divided.held or None])
            columns = looked_at(every.features, every.z, every.member)
            grown = self.grow_trees(columns, (start, final), loss, divided)
        return TreesFound._make(part.clone() if isinstance(part, Tensor) else part for part in grown)

    def _promise(self, device: torch.device, everyone: bool = False) -> probabilities.Promise:
        width, how = self.high - self.low, (self.euclidean, self.conditional, self.noise_floor, self.range is None)
        alpha = None if self.alpha is None else self.alpha / width
        return probabilities.Promise(alpha, self.edges.to(device), *how, everyone, self.low, width)

    def _problem(self, examples: ProbabilityStatistics) -> ResidualProblem:
        smoothness = 1.0 if self.euclidean else 0.25 if self.columns == 1 or self.multilabel else 0.5
        rows = {"z": examples.z, "member": examples.member, "weight": examples.weight}
        names = Names(self.groups, self._cells(False))
        how = {"conditional": self.conditional, "euclidean": self.euclidean, "unit": levelsets.UNIT, "apart": self.multilabel}
        return ResidualProblem(examples.y, smoothness, names=names, edges=self.edges.to(examples.z.device), **rows, **how)

    def _write(self, offsets: Tensor | None, rounds: Tensor | None, log: tuple[Tensor, Tensor, Tensor] | None) -> None:
        device = self.offsets.device
        self.offsets.zero_()
        if offsets is not None:
            self.offsets.copy_(offsets)
        names = ("rounds", "log_who", "log_step", "log_column")
        for name, part in zip(names, (rounds, *(log or (None, None, None))), strict=True):
            self._buffers[name] = getattr(self, name)[:0] if part is None else part.to(device)

    # -- use ---------------------------------------------------------------------------------------------------------

    def coordinates(self, probs: Tensor) -> Tensor:
        """Coordinates (n, C) of the inputs, float64."""
        scaled = (wide(probs) - self.low) / (self.high - self.low)
        return levelsets.coordinates(scaled if self.per_class else scaled.unsqueeze(1), self.euclidean, self.multilabel)

    def _f(self, z: Tensor) -> Tensor:
        """f of coordinates."""
        return levelsets.probabilities(z, self.euclidean, self.multilabel)

    def calibrated(
        self, probs: Tensor, groups: Optional[Tensor] = None, temperature: float = 0.0, features: Optional[Tensor] = None
    ) -> Tensor:
        """Calibrated coordinates (n, C), float64; with a temperature above 0 through soft level sets."""
        member = self.membership(groups, probs.shape[0], probs)
        everyone = torch.cat([torch.ones_like(member[:, :1]), member], 1)
        own = self.coordinates(probs)
        z = levelsets.snap(own * (1.0 - everyone @ self.slopes).clamp_min(0.0)) - everyone @ self.offsets
        if self.learns:
            z = z - self.learned_move(own, member, features)
        edges, euclidean, apart = self.edges, self.euclidean, self.multilabel
        z = levelsets.apply_tables(z, everyone, self.rounds, edges, euclidean, apart, temperature)
        return levelsets.apply_log(z, member, self.log_who, self.log_step, self.log_column, edges, euclidean, apart, temperature)

    def forward(
        self,
        probs: Tensor,
        groups: Optional[Tensor] = None,
        mode: str = "hard",
        temperature: float = 0.1,
        features: Optional[Tensor] = None,
    ) -> Tensor:
        r"""Calibrated probabilities, of the shape and type of ``probs``.

        The only decision is the level set in which each round of the fit finds f. Its soft form moves f by the mean step of
        all level sets, with the weights :math:`\sigma((z - e_k) / T) - \sigma((z - e_{k+1}) / T)`; with ``bins=None`` there is
        nothing to soften and all modes agree.

        Args:
            probs: shape ``(n,)``, or ``(n, C)`` with classes.
            groups: membership ``(n, a)``.
            mode: ``"hard"``: the promised f, with its exact derivative inside the level sets and none for crossing an edge.
                ``"soft"``: soft level sets, smooth in ``probs``. ``"straight_through"``: f as in ``"hard"``, with the
                derivative of ``"soft"``.
            temperature: T, in the units of what the edges e cut: logits for one event with ``geometry="kl"``, else
                probabilities. Keep it well below the width of a level set.
            features: ``(n, d)``, where the head was made with ``learn``.
        """
        soft.check(mode, temperature)
        if not is_scripting():
            hint = "apply sigmoid or softmax to logits" if self.range is None else "widen `range`"
            self.check_input("probs", probs, groups, hint, features)
        if probs.dim() != (2 if self.per_class else 1) or (self.per_class and probs.shape[1] != self.columns):
            raise ValueError(f"`probs` must have shape (n,), or (n, C) with classes, got {probs.shape}")
        if self.per_class and self.exclusive and not is_scripting():
            self._check_sums(probs)
        f = self._f(self.calibrated(probs, groups, temperature if mode == "soft" else 0.0, features))
        if mode == "straight_through":
            f = soft.straight_through(f, self._f(self.calibrated(probs, groups, temperature, features)))
        f = f if self.per_class else f.squeeze(1)
        return (f * (self.high - self.low) + self.low).to(probs.dtype)

    def solve_differentiably(
        self, probs: Tensor, y: Tensor, groups: Any = None, weight: Any = None, alpha: float | Tensor | None = None
    ) -> dict[str, Tensor]:
        """Fitted offsets as a differentiable function of ``probs``; the head does not change.

        They minimise the log loss + slack \\|offsets of groups\\|_1 exactly (``fit`` to alpha stops within 2 % of the slack, and
        does not touch what already keeps its promise). With ``noise_floor=False`` the slack is that of ``fit``, 0.95 alpha; else it
        is 1.5 standard errors of each group's sum, which depend on ``probs`` too (``fit`` chooses among several by held-out loss,
        and fits slopes). For ``geometry="kl"`` and ``bins=None``: with level sets the fit jumps, so train through the offsets and
        calibrate with ``bins`` afterwards. See :mod:`torchgmc.engine.implicit`. Each process uses only its own data.

        Args:
            probs, y, groups, weight: as in ``observe``.
            alpha: replaces the noise and the head's; 0 brings every violation to 0. A tensor may have a derivative.

        Returns:
            The state for :meth:`apply_state`: ``"offsets"`` ``(1 + a, C)`` with their derivative, and no rounds.

        Example:
            >>> logits, y = torch.randn(100, requires_grad=True), torch.rand(100) < 0.3
            >>> head = gmc.ProbabilityHead(alpha=0.01, bins=None)
            >>> state = head.solve_differentiably(torch.sigmoid(logits[:50]), y[:50])
            >>> f = head.apply_state(state, torch.sigmoid(logits[50:]))
            >>> torch.nn.functional.binary_cross_entropy(f, y[50:].float()).backward()  # the loss *after* calibration
            >>> bool((logits.grad[:50] != 0).all())
            True
        """
        return training.solve(self, probs, y, groups, weight, alpha)

    # -- the promise -------------------------------------------------------------------------------------------------

    def input_range(self) -> tuple[float, float]:
        """``range``, or [0, 1]."""
        return self.low, self.high

    def test_functions(self) -> Names:
        """Groups; level sets and classes, and all levels together."""
        return Names(self.promised_groups(), self._cells(self.with_means))

    @property
    def with_means(self) -> bool:
        """Tables have columns for all levels together: the mean of every group is a separate promise."""
        return self.num_bins > 1 and len(self.log_who) == 0

    def _cells(self, means: bool) -> list[str]:
        """Names of the columns of a table."""
        classes = self.class_names()
        if self.num_bins == 1:
            return classes
        edges = [self.low + (self.high - self.low) * k / self.num_bins for k in range(self.num_bins + 1)]
        levels = [f"f in [{low:.4g}, {high:.4g})" for low, high in pairwise(edges)]
        levels[-1] = levels[-1][:-1] + "]"
        if means:
            levels.append(ALL_LEVELS)
        return [f"{level}, {name}" if name else level for level in levels for name in classes]

    def s_range(self) -> tuple[Tensor, Tensor]:
        """f - y with f in the level set."""
        level = torch.arange(self.num_bins, device=self.edges.device, dtype=torch.float64)
        low, high = level / self.num_bins - 1.0, (level + 1.0) / self.num_bins
        if self.with_means:
            low, high = torch.cat([low, -torch.ones_like(low[:1])]), torch.cat([high, torch.ones_like(high[:1])])
        width = self.high - self.low
        return width * low.repeat_interleave(self.columns), width * high.repeat_interleave(self.columns)

    def softness(self) -> float:
        """A tenth of a level set."""
        return 0.1 * (self.high - self.low) / self.num_bins

    def values(self, probs: Tensor, y: Tensor, groups: Any = None, softness: float | None = None, features: Any = None) -> Values:
        """f - y of each example in its level set (and 0 in the others), for every class. Soft, the level sets have soft edges."""
        checks.softness(softness)
        batch = self.check_batch(probs, y, groups, features=features)
        member, columns = batch.member if self.grouped else None, batch.features if self.learns else None
        width = self.high - self.low
        if softness is not None:
            probs = probs if probs.dtype in (torch.float32, torch.float64) else probs.float()
            f = (self(probs, member, features=columns) if self.is_fitted else probs).reshape(len(probs), -1)
            s = f - (self.low + width * batch.y).to(f.dtype)
            edges = self.low + width * torch.arange(1, self.num_bins, device=f.device, dtype=f.dtype) / self.num_bins
            inside = levelsets.level_sets(f, edges, softness) if self.num_bins > 1 else torch.ones_like(s)[:, None]
            if self.with_means:
                inside = torch.cat([inside, torch.ones_like(s)[:, None]], 1)
            return Values((inside * s[:, None]).flatten(1), self.promised(batch.member))
        z = self.calibrated(probs.detach(), member, 0.0, columns) if self.is_fitted else batch.z
        level = levelsets.levels(z, self.edges, self.euclidean, self.multilabel)
        place = torch.arange(self.columns, device=z.device)
        column = level * self.columns + place
        s = (self._f(z) - batch.y) * width
        if self.with_means:
            column = torch.cat([column, (self.num_bins * self.columns + place).expand(len(z), -1)], 1)
            s = torch.cat([s, s], 1)
        wide = (self.num_bins + self.with_means) * self.columns
        return Values(z.new_zeros(len(z), wide).scatter(1, column, s), self.promised(batch.member), column)

    def audit_rows(self, **batch: Any) -> dict[str, Tensor]:
        """Predictions before and after, and outcomes, in [0, 1]."""
        found = self.check_batch(**batch)
        columns = found.features if self.learns else None
        z = self.calibrated(batch["probs"].detach(), found.member if self.grouped else None, 0.0, columns)
        return {"before": self._f(found.z), "p": self._f(z), "y": found.y}

    def audit_measures(self, tally: Tally) -> dict[str, tuple[Tensor, tuple[float, float] | None]]:
        """Rates of the decision p >= 1/2, or for the most probable class."""
        p, y = tally.rows["p"], tally.rows["y"] > 0.5
        if self.range is not None:
            return {}
        chosen = p == p.amax(1, keepdim=True) if self.per_class and self.exclusive else p >= 0.5
        return rates(chosen, y, self.class_names())

    def audit_summary(self, tally: Tally) -> dict[str, Any]:
        """Brier score (mean squared error) before and after, and the log loss of events and classes."""
        y, weight, total = tally.rows["y"], tally.weight.double(), tally.weight.sum()
        name = "Brier score" if self.range is None else "squared error"
        cost = {}
        for when, f in (("before", tally.rows["before"]), ("after", tally.rows["p"])):
            cost[f"{name} {when}"] = float(((f - y) * (self.high - self.low)).square().sum(1) @ weight / total)
            if self.range is None:
                p = f.clamp(1e-12, 1.0 - 1e-12)
                chosen = y * p.log() + (0.0 if self.per_class and self.exclusive else (1 - y) * torch.log1p(-p))
                cost[f"log loss {when}"] = -float(chosen.sum(1) @ weight / total)
        return {"cost": cost}

    def figures(self, audit: Any) -> dict[str, Any]:
        """Reliability of the groups that deviate most."""
        if audit is None or audit.source is None or "p" not in audit.source[1].rows:
            return {}
        from torchgmc import plots

        text = "Reliability in the groups that deviate most: how often it happened against the predicted probability"
        return {text: lambda dark: plots.reliability(audit, dark=dark)}

    def index_limits(self) -> dict[str, int]:
        """Sets and directions of the log."""
        return {"log_who": len(self.offsets), "log_column": self.columns}

    def extra_repr(self) -> str:
        """Options and state."""
        kind = f"num_classes={self.num_classes}, {'multilabel, ' if self.multilabel else ''}" if self.per_class else ""
        rounds = len(self.rounds) + len(self.log_who)
        return f"bins={self.bins}, {kind}geometry={self.geometry}, {super().extra_repr()}, rounds={rounds}"
