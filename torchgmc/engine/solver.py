r"""The algorithm: find the largest violation, step against it, repeat. What happened is a result, not a print.

The loop knows nothing about pixels, trees or vocabularies. A :class:`Problem` holds f (as a table of offsets on statistics,
or as one row per example), measures violations and moves along a test function g.

*Which solver is which.* ``"paper"`` and ``"fresh"`` are this loop, in every head. ``"exact"`` is the best that a head's own
problem allows (modules below ``torchgmc``):

=================  ==========================================  ==========================================================
head               ``solver="exact"``                          minimised, and by what
=================  ==========================================  ==========================================================
Threshold          ``heads.threshold.fit.fit_thresholds``      pinball loss + l1, all groups: ``engine.pinball.solve``
Quantile           ``engine.offsets.fit_offsets``              the same; what is left in level sets: line searches, below
Probability        ``heads.probability.solver.fit``            log loss or its euclidean kin + l1, all groups: Newton of
                                                               ``heads.probability.static``; then a Newton step of all
                                                               groups in each level set, in rounds
Distribution, kl   ``heads.distribution.fit.fit_tilt``         E log Z + l1, all groups and lists: Newton of
                                                               ``engine.orthant.minimise``
the same,          ``engine.solver.run``                       the potential along the worst g, a line search at a time
euclidean; GMC
Tree               ``heads.tree.solver.descend``               squared excess of all promises, greedily: the sets depend
                                                               on the answers, so there is no potential to follow
=================  ==========================================  ==========================================================

*Why three minimisers.* All have the form :math:`\Phi(\theta) + \sum_A \lambda_A |\theta_A|`, whose optimality conditions
are the promise. The pinball loss is piecewise linear: Newton has no curvature to go by, an interior-point method needs none
(``engine.pinball``). The other two are smooth. ``engine.orthant`` works on a few numbers per prompt, in float64, to the last
digits: its optimum certifies a duality gap, and derivatives through a fit (``engine.implicit``, the same Newton) need it.
``heads.probability.static`` reads every example and hundreds of groups in each step: a second derivative from a sample, kept
over several steps, one block per class, and it stops well inside the noise. Its quadratic models, and those of the
level sets, are solved by ``engine.lasso``, which is exact and no Newton.
"""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from torchgmc.distributed import total as over_ranks
from torchgmc.engine.folds import Pair, Splits
from torchgmc.engine.hashing import places64

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOLVERS = ("exact", "paper", "fresh")
#: Default `max_iter`: for exact steps, for fixed steps, and the most that is allowed for fixed steps bounded by theory.
EXACT_STEPS, FIXED_STEPS, MAX_FIXED_STEPS = 1_000, 10_000, 100_000
#: A violation that exceeds its bound by less than this part does so by rounding.
ROUNDING = 1 + 1e-9


def steps_per_sync(device: torch.device) -> int:
    """Steps taken between two looks at the result: looking is free on the CPU, and stalls other devices."""
    return 1 if device.type == "cpu" else 16


def entry(table: Tensor, *place: Tensor) -> Tensor:
    """``table[place]``, where 0-d indices stay on their device: torch's own indexing would read them on the host."""
    return table[place] if place[0].dim() else table[tuple(index[None] for index in place)][0]


@dataclass(frozen=True)
class Report:
    """What a fit did.

    Attributes:
        converged: ``reached == "alpha"``.
        iterations: steps taken.
        violations_before: signed violations at f0, shape ``(a, u)``.
        violations_after: signed violations of the fitted f on the same data, shape ``(a, u)``.
        history: worst |violation| before each step and at the end, shape ``(iterations + 1,)``.
        seconds: time of the search.
        message: what stopped it and, if alpha was missed, where, why and what to try.
        details: counts that belong to one head (excluded images, duality gap, ...).
        reached: ``"alpha"``: every |violation| is at most alpha. ``"noise"``: those above it are within the noise of the
            sample.
            ``"no"``: some are not.
    """

    converged: bool
    iterations: int
    violations_before: Tensor
    violations_after: Tensor
    history: Tensor
    seconds: float
    message: str
    details: dict[str, Any] = field(default_factory=dict)
    reached: str = ""

    def __post_init__(self) -> None:
        if not self.reached:
            object.__setattr__(self, "reached", "alpha" if self.converged else "no")
        object.__setattr__(self, "converged", self.reached == "alpha")

    def plot(self, **options: Any) -> "Figure":
        """Worst violation after each step (extra ``report``); options of :func:`torchgmc.plots.convergence`."""
        from torchgmc import plots

        return plots.convergence(self, **options)

    def __str__(self) -> str:
        state = {"alpha": "converged", "noise": "within the noise", "no": "NOT converged"}[self.reached]
        before, after = (float(_worst(v)) for v in (self.violations_before, self.violations_after))
        return f"{state}: worst |violation| {before:.4g} -> {after:.4g} in {self.iterations} steps. {self.message}"


def reached(table: Tensor, alpha: float | None, noise: Tensor) -> str:
    """Where a fit ended: see :attr:`Report.reached`.

    ``table``: violations. ``alpha``: largest allowed; None if none was asked. ``noise``: violation of each g that the sample
    cannot tell from 0.
    """
    size = table.abs()
    if alpha is not None and bool((size <= alpha * ROUNDING).all()):
        return "alpha"
    bound = noise if alpha is None else noise.clamp_min(alpha)
    return "noise" if bool((size <= bound * ROUNDING).all()) else "no"


class Log(NamedTuple):
    """The steps taken, f <- Proj(f - step g) with g = 1_A v / scale; each of shape ``(T,)``."""

    who: Tensor
    what: Tensor
    step: Tensor


class Problem(Protocol):
    """One GMC problem as the solver sees it. Indices and steps are 0-d tensors: no host sync inside a step."""

    #: Membership depends on f: steps are damped and the best iterate is kept.
    dynamic: bool

    def violations(self, split: Pair | None = None) -> Tensor:
        """Signed violations at the current f, (a, u); over two splits of the data if ``split`` is given."""
        ...

    def line_search(self, who: Tensor, what: Tensor, violation: Tensor) -> Tensor:
        """Signed step to the minimum of the potential along g; 0 if none lowers it."""
        ...

    def move(self, who: Tensor, what: Tensor, step: Tensor) -> None:
        """f <- Proj(f - step g)."""
        ...

    def state(self) -> Tensor:
        """f as one tensor."""
        ...

    def restore(self, state: Tensor) -> None:
        """Set f to a result of :meth:`state`."""
        ...

    def label(self, who: int, what: int) -> str:
        """Name of g for messages."""
        ...

    def explain(self, who: int, what: int) -> str:
        """Why no step along g reduces its violation, and what to try."""
        ...


class OneTensor:
    """The part of a :class:`Problem` that keeps and sets f, where f is one attribute."""

    #: Its name.
    moving: ClassVar[str]

    def state(self) -> Tensor:
        """f."""
        return getattr(self, self.moving)  # type: ignore[no-any-return]

    def restore(self, state: Tensor) -> None:
        """Set f."""
        setattr(self, self.moving, state)


class Result(NamedTuple):
    """Outcome of :func:`run`."""

    report: Report
    log: Log


def run(
    problem: Problem,
    alpha: float,
    solver: str = "exact",
    eta: float | None = None,
    max_iter: int = EXACT_STEPS,
    tolerance: Tensor | None = None,
    patience: int = 50,
    splits: Splits | None = None,
) -> Result:
    r"""Run Algorithm 1 (``"paper"``), its exact line-search form (``"exact"``) or Algorithm 2 (``"fresh"``).

    - ``"paper"``: while some :math:`|E\langle s, g\rangle| > \alpha` and t < T, take the largest and set
      :math:`f \leftarrow Proj(f - \eta g)`. A fixed step can cycle on finite data; that is detected, and the best f
      seen is returned.
    - ``"exact"``: the same with the step that minimises the potential along g. A g whose violation no step can lower is
      passed over until another step has been taken; when all are, the solver stops and says why.
    - ``"fresh"``: step t measures on split 2t - 1 with expectations from split 2t, and continues while a
      violation exceeds :math:`\frac34 \alpha`.

    ``problem``: the problem; its f is moved. ``alpha``: largest |violation| allowed. ``solver``: one of the three. ``eta``: the
    fixed step of ``"paper"`` and ``"fresh"``. ``max_iter``: T, the maximum number of steps. ``tolerance``: largest |violation|
    of each g, shape ``(a, u)``; alpha everywhere if omitted. ``patience``: with dynamic groups, or where steps are as small as
    the grid of f, stop after so many steps without a better worst violation. ``splits``: of the data, for ``"fresh"``; T is
    then theirs. Returns: The report, and the log of the steps that lead to the f left in ``problem``.
    """
    started = time.perf_counter()
    before = problem.violations()
    max_iter = max_iter if splits is None else splits.steps
    if tolerance is None:
        tolerance = torch.full_like(before, alpha)
    search = _Search(problem, tolerance, solver, eta, before, splits)
    reason = search.until_done(max_iter, patience)
    after = problem.violations()
    converged = reason == "converged" if solver == "fresh" else bool((after.abs() <= search.bar * tolerance).all())
    steps = search.kept
    message = search.message(reason, converged, after, max_iter, alpha)
    history = torch.stack([*search.history[:steps], _worst(after)]).cpu()
    none = torch.zeros(0, dtype=torch.int64, device=before.device)
    log = Log(*map(torch.stack, zip(*search.log[:steps], strict=True))) if steps else Log(none, none, before.new_zeros(0))
    return Result(Report(converged, steps, before, after, history, time.perf_counter() - started, message), log)


class _Search:
    """The loop's bookkeeping: every quantity stays on the device and is read once per batch of steps."""

    def __init__(
        self, problem: Problem, tolerance: Tensor, solver: str, eta: float | None, before: Tensor, splits: Splits | None
    ) -> None:
        self.problem, self.tolerance, self.solver, self.splits = problem, tolerance, solver, splits
        self.eta = before.new_tensor(eta if eta is not None else 0.0)
        self.bar = {"fresh": 0.75, "exact": ROUNDING}.get(solver, 1.0)
        self.blocked = torch.zeros_like(before, dtype=torch.bool)
        self.history: list[Tensor] = []  # worst |violation| before each step
        self.excess: list[Tensor] = []  # worst |violation| / tolerance before each step
        self.active: list[Tensor] = []  # was there anything to fix?
        self.prints: list[Tensor] = []  # fingerprints of f, to detect a cycle
        self.log: list[tuple[Tensor, Tensor, Tensor]] = []
        self.best: tuple[int, float, Tensor] = (0, float("inf"), problem.state())
        self.kept = 0
        self.batch = steps_per_sync(before.device)
        self.least = 2.0 * float(getattr(problem, "unit", 0.0))  # where f lives on a grid: steps that are rounding

    def step(self, t: int) -> None:
        table = self.problem.violations(None if self.splits is None else self.splits.pair(t))
        ratio = (table.abs() / self.tolerance).flatten()
        free = ratio.masked_fill(self.blocked.flatten(), -1.0)
        index = free.argmax()
        who, what = index // table.shape[1], index % table.shape[1]
        violation = entry(table.flatten(), index)
        active = entry(free, index) > self.bar
        if self.solver == "exact":
            step = self.problem.line_search(who, what, violation)
        else:
            step = self.eta * violation.sign()
        step = torch.where(active, step, torch.zeros_like(step))
        moved = step != 0
        hit = torch.zeros_like(self.blocked.flatten()).index_fill_(0, index[None], True).view_as(self.blocked)
        self.blocked = torch.where(moved, torch.zeros_like(self.blocked), self.blocked | (hit & active))
        if self.solver == "paper":
            self.prints.append(over_ranks(fingerprint(self.problem.state(), self.eta)))
        self.problem.move(who, what, step)
        self.history.append(_worst(table))
        self.excess.append(ratio.max())
        self.active.append(active)
        self.log.append((who, what, step))

    def until_done(self, max_iter: int, patience: int) -> str:
        """Step until nothing is left to fix; returns the reason for stopping."""
        seen: dict[int, int] = {}
        before, t = self.problem.state(), 0
        while t < max_iter:
            first = t
            for _ in range(min(self.batch, max_iter - t)):
                self.step(t)
                t += 1
            active = torch.stack(self.active[first:]).tolist()
            excess = torch.stack(self.excess[first:]).tolist()
            # The state before the first step of a batch is known without storing every iterate.
            if excess[0] < self.best[1]:
                self.best = (first, excess[0], before)
            before = self.problem.state()
            if not all(active):
                place = active.index(False)
                reason = "converged" if excess[place] <= self.bar else "stuck"
                if reason == "stuck" and self.best[1] < excess[place]:
                    return self._rewind(reason)
                self.kept = self._count(first + place)
                return reason
            if self.solver == "paper":
                for offset, value in enumerate(torch.stack(self.prints[first:]).tolist()):
                    if value in seen:
                        return self._rewind(f"cycle {first + offset - seen[value]}")
                    seen[value] = first + offset
            late = self.solver == "exact" and t - self.best[0] > patience
            steps = [step for _, _, step in self.log[-patience:]]
            # Steps as small as the grid of f: the potential is at its minimum, and atoms change sides forever.
            if late and (self.problem.dynamic or bool((torch.stack(steps).abs() <= self.least).all())):
                return self._rewind("patience")
        if self.solver == "exact":
            last = (self.problem.violations().abs() / self.tolerance).max().item()
            if last > self.best[1]:
                return self._rewind("max_iter")
        self.kept = self._count(t)
        return "max_iter"

    def _rewind(self, reason: str) -> str:
        """Return to the best f seen."""
        self.problem.restore(self.best[2])
        self.kept = self._count(self.best[0])
        return reason

    def _count(self, steps: int) -> int:
        """Drop steps of size 0 (a blocked g) from the log, and count the rest among the first ``steps``."""
        sizes = torch.stack([step for _, _, step in self.log[:steps]]).tolist() if steps else []
        keep = [i for i, size in enumerate(sizes) if size != 0.0]
        for name in ("history", "excess", "log"):
            setattr(self, name, [getattr(self, name)[i] for i in keep])
        return len(keep)

    def message(self, reason: str, converged: bool, after: Tensor, max_iter: int, alpha: float) -> str:
        """What stopped the search and, if alpha was missed, where, why and what to try."""
        worst = int((after.abs() / self.tolerance).argmax()) if after.numel() else 0
        who, what = divmod(worst, max(after.shape[1], 1))
        name = self.problem.label(who, what)
        size = abs(float(after[who, what])) if after.numel() else 0.0
        bound = float(self.tolerance[who, what]) if after.numel() else alpha
        place = f"violation {size:.4g} > {bound:.4g} in {name}"
        if self.solver == "fresh" and reason == "converged":
            return (
                f"no violation above 3/4 alpha on the fresh split of step {self.kept + 1}; worst over all splits {size:.4g} in "
                f"{name} (alpha = {alpha:.4g})."
            )
        if converged:
            return f"every |violation| <= {bound:.4g}; the worst is {size:.4g} in {name}."
        if reason == "max_iter":
            return f"`max_iter` = {max_iter} reached with {place}; raise `max_iter`" + (
                "." if self.solver == "exact" else ", raise `eta`, or use solver='exact'."
            )
        if reason.startswith("cycle"):
            period = reason.split()[1]
            return (
                f"the fixed step eta = {float(self.eta):.4g} returns to the same f every {period} steps; the best f seen has "
                f"{place}. Lower `eta`, or use solver='exact'. {self.problem.explain(who, what)}"
            )
        if reason == "patience":
            return f"no better f for many steps; the best has {place}. {self.problem.explain(who, what)}"
        return f"stopped with {place}. {self.problem.explain(who, what)}"


def fingerprint(state: Tensor, quantum: Tensor) -> Tensor:
    """A 64-bit integer that two equal f share and, but for a chance of 2^-64, no others: a sum with random weights.

    f is taken in millionths of the step, so that rounding does not tell two visits apart.
    """
    levels = torch.round(state.flatten() / quantum * 1e6).to(torch.int64)
    return (levels * places64(levels.numel(), levels.device)).sum()


def _worst(table: Tensor) -> Tensor:
    return table.abs().max() if table.numel() else table.new_zeros(())
