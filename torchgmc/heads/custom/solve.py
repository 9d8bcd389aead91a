"""GMC on a user's own problem: one row of f per example, any mapping, groups that may depend on f, any projection."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchgmc import theory
from torchgmc.engine import checks
from torchgmc.engine.folds import Pair, fresh_splits
from torchgmc.engine.roots import MAX_TRIALS, damped, falling_root
from torchgmc.engine.search import Cells, Structured, masses, violations
from torchgmc.engine.solver import EXACT_STEPS, FIXED_STEPS, SOLVERS, Log, OneTensor, Report, entry, run
from torchgmc.mappings import Mapping

Sets = Tensor | Cells | Structured
Who = Sets | Callable[[Tensor], Sets]
Projection = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Solution:
    """What :func:`solve` found.

    Attributes:
        f: the calibrated f, shape of ``f0``.
        log: the steps, to be applied to new examples by :func:`replay`.
        report: what happened.
        scale: P(A) of each set if ``conditional``, else ones, shape ``(a,)``; the steps are taken along 1_A v / scale.
    """

    f: Tensor
    log: Log
    report: Report
    scale: Tensor


def solve(
    f0: Tensor,
    mapping: Mapping | Callable[[Tensor], Tensor],
    who: Who,
    what: Tensor | None = None,
    *,
    alpha: float,
    projection: Projection | None = None,
    solver: str = "exact",
    eta: float | None = None,
    max_iter: int | None = None,
    weight: Tensor | None = None,
    conditional: bool = False,
    names: Sequence[str] | None = None,
    seed: int = 0,
    tolerance: Tensor | None = None,
) -> Solution:
    r"""Make f satisfy (s, G, alpha)-GMC with G = {+-1_A v}: :math:`|E\langle s(f), 1_A v\rangle| \le \alpha`.

    Args:
        f0: f to start from, shape ``(n, m)`` or ``(n,)``.
        mapping: s. An object with ``value(f, weight)`` and ``potential(f, weight)`` (see :mod:`torchgmc.mappings`), or a plain
            function of f ``(n, m)`` that returns s ``(n, m)``; s must rise along itself (be the gradient of a convex function).
        who: the sets A: membership ``(n, a)``, cell ids ``(n,)``, :class:`~torchgmc.Cells`, or
            :class:`~torchgmc.Groups`, whose membership table is never made; or a function of f that returns one of these,
            for sets that depend on the prediction; or one that returns general test functions g as floating point
            ``(n, a, m)``.
        what: directions v, shape ``(u, m)``; the identity if omitted.
        alpha: largest violation allowed.
        projection: onto the convex set F, e.g. :func:`torchgmc.projections.simplex`; none if omitted.
        solver: ``"exact"``, ``"paper"`` (Algorithm 1) or ``"fresh"`` (Algorithm 2).
        eta: fixed step of the latter two; alpha / B (Theorem 1 with K = 1) by default.
        max_iter: cap T; by default 1000 for ``"exact"``, 10,000 for ``"paper"``, n // 100 (at most 200) for ``"fresh"``.
        weight: weight of each example, ``(n,)``.
        conditional: g = 1_A v / P(A).
        names: names of the sets for messages.
        seed: of the random splits of ``"fresh"``.
        tolerance: largest violation of each g, ``(a, u)``, in place of alpha; for ``"exact"``.

    Example:
        >>> y = torch.tensor([[1.0], [0.0], [1.0], [1.0]])
        >>> groups = torch.tensor([[1, 0], [1, 0], [1, 1], [0, 1]]).bool()
        >>> from torchgmc.mappings import Residual
        >>> solution = gmc.solve(torch.full((4, 1), 0.5), Residual(y), groups, alpha=0.01)
        >>> solution.report.converged
        True
        >>> gmc.violations(groups, solution.f - y).abs().max() <= 0.01
        tensor(True)
    """
    checks.positive("alpha", alpha)
    checks.option("solver", solver, SOLVERS)
    f0 = checks.scores("f0", f0)
    f = f0.detach().double()
    flat = f.dim() == 1
    f = f[:, None] if flat else f
    if f.dim() != 2:
        raise ValueError(f"`f0` must have shape (n, m) or (n,), got {tuple(f0.shape)}.")
    if len(f) == 0:
        raise ValueError("`f0` has no rows; pass at least one example.")
    weights = checks.weights(weight, len(f), f)
    problem = DenseProblem(f, mapping, who, what, projection, weights, conditional, names)
    if solver != "exact":
        eta = checks.positive("eta", eta) if eta is not None else theory.step_size(alpha, 1.0, problem.norm(), solver == "fresh")
    elif eta is not None:
        raise ValueError("`eta` is the fixed step of solver='paper' or 'fresh'; solver='exact' finds its own.")
    steps = checks.count("max_iter", max_iter, EXACT_STEPS if solver == "exact" else FIXED_STEPS)
    splits = fresh_splits(max_iter, f, problem.value(f, weights), weights, seed=seed) if solver == "fresh" else None
    report, log = run(problem, alpha, solver, eta, steps, tolerance, splits=splits)
    f = problem.f.to(f0.dtype)
    return Solution(f[:, 0] if flat else f, log, report, problem.scale)


def replay(solution: Solution, f0: Tensor, who: Who, what: Tensor | None = None, projection: Projection | None = None) -> Tensor:
    """Apply the steps of a solution to new examples: f <- Proj(f - step g), with g at the current f.

    Args:
        solution: of :func:`solve`.
        f0: f of the new examples, ``(n, m)`` or ``(n,)``.
        who: their membership, or the same function of f as in the fit.
        what, projection: as in the fit.

    Returns:
        The calibrated f, shape of ``f0``.

    Example:
        >>> from torchgmc.mappings import Residual
        >>> y, level = torch.tensor([0.0, 1.0, 1.0]), lambda f: f > 0.5
        >>> solution = gmc.solve(torch.tensor([0.2, 0.9, 0.6]), Residual(y[:, None]), level, alpha=0.01)
        >>> torch.equal(gmc.replay(solution, torch.tensor([0.2, 0.9, 0.6]), level), solution.f)
        True
    """
    f = checks.scores("f0", f0).double()
    f = f[:, None] if f.dim() == 1 else f
    first = _membership(who, f)
    if not isinstance(solution, Solution) or not isinstance(first, Tensor | Cells | Structured):
        wrong, kind = ("who", first) if isinstance(solution, Solution) else ("solution", solution)
        raise TypeError(f"`{wrong}` must be an input or the result of `solve`, got {type(kind).__name__}.")
    if f.dim() != 2:
        raise ValueError(f"`f0` must have shape (n, m) or (n,), got {tuple(f0.shape)}.")
    if _num_sets(first) != len(solution.scale) and not (isinstance(first, Tensor) and first.dim() == 1):
        raise ValueError(f"`who` must have the {len(solution.scale)} sets of the solution, got {_num_sets(first)}.")
    width = first.shape[2] if isinstance(first, Tensor) and first.dim() == 3 else f.shape[1]
    violations(first, f.new_zeros(len(f), width))  # raises for sets of the wrong shape
    for index, direction, step in zip(*solution.log, strict=True):
        test = _test_function(_membership(who, f), index, direction, what, solution.scale, f)
        f = f - step * test if projection is None else projection(f - step * test)
    return f.to(f0.dtype).reshape(f0.shape)


class DenseProblem(OneTensor):
    """f with one row per example; see :class:`torchgmc.engine.solver.Problem`."""

    moving = "f"

    def __init__(
        self,
        f: Tensor,
        mapping: Mapping | Callable[[Tensor], Tensor],
        who: Who,
        what: Tensor | None,
        projection: Projection | None,
        weight: Tensor,
        conditional: bool,
        names: Sequence[str] | None,
    ) -> None:
        self.f, self.mapping, self.who, self.weight = f, mapping, who, weight
        self.what = None if what is None else what.to(f)
        self.projection: Projection = projection or (lambda x: x)
        self.dynamic = callable(who)
        self.names = names
        first = _membership(who, f)
        general = isinstance(first, Tensor) and first.dim() == 3
        if conditional and general:
            raise ValueError("`conditional` needs sets; general test functions (n, a, m) have no P(A).")
        self.num_sets = _num_sets(first)
        self.scale = masses(first, weight, self.num_sets) if conditional else f.new_ones(self.num_sets)
        self.conditional = conditional
        if bool((self.scale <= 0).any()):
            where = int((self.scale <= 0).nonzero()[0])
            raise ValueError(f"set {self._name(where)} has no examples; drop it, or use conditional=False.")
        if not f.shape[1]:
            raise ValueError(f"`f0` must have at least one column, got shape {tuple(f.shape)}.")
        value = self.value(f, weight)
        if value.shape[0] != len(f) or not bool(value.isfinite().all()):
            raise ValueError(f"`mapping` must return one finite row per example, got shape {tuple(value.shape)}.")
        wide = f.shape[1]
        if what is not None and (what.dim() != 2 or what.shape[1] != wide):
            raise ValueError(f"`what` must have shape (u, {wide}) because f has {wide} columns, got {tuple(what.shape)}.")
        if value.shape[1:] != (wide,):
            raise ValueError(f"`mapping` must return shape ({len(f)}, {wide}), like f, got {tuple(value.shape)}.")
        violations(first, value, self.what)  # raises for sets of the wrong shape

    def value(self, f: Tensor, weight: Tensor) -> Tensor:
        """s at f, ``(n, m)``."""
        return value_of(self.mapping, f, weight).detach()

    def norm(self) -> float:
        """B, the largest E||g||^2."""
        who = _membership(self.who, self.f)
        if isinstance(who, Tensor) and who.dim() == 3:
            return float((who.double().square().sum(2) * self.weight[:, None]).sum(0).max() / self.weight.sum())
        longest = 1.0 if self.what is None else float(self.what.square().sum(1).max())
        return longest * float((masses(who, self.weight, self.num_sets) / self.scale.square()).max())

    def violations(self, split: Pair | None = None, f: Tensor | None = None) -> Tensor:
        """Signed violations at the current f (or at another one), (a, u)."""
        f = self.f if f is None else f
        measure, inside = (self.weight, self.weight) if split is None else (self.weight * part for part in split)
        s = self.value(f, inside)
        return violations(_membership(self.who, f), s, self.what, measure, self.num_sets) / self.scale[:, None]

    def _moved(self, test: Tensor, step: Tensor) -> Tensor:
        return self.projection(self.f - step * test)

    def line_search(self, who: Tensor, what: Tensor, violation: Tensor) -> Tensor:
        """Step to the minimum of the potential along g; damped where the sets depend on f."""
        sign = violation.sign()
        test = sign * _test_function(_membership(self.who, self.f), who, what, self.what, self.scale, self.f)

        def slope(step: Tensor) -> Tensor:
            return (self.value(self._moved(test, step), self.weight) * test).sum(1) @ self.weight / self.weight.sum()

        norm = (test.square().sum(1) @ self.weight / self.weight.sum()).clamp_min(1e-300)
        step = falling_root(slope, violation.abs(), violation.abs() / norm)
        step = self._fall(test, step)
        if self.dynamic:
            start = self.violations().abs().max()
            step = damped(step, lambda size: self.violations(f=self._moved(test, size)).abs().max(), start, 8)
        return sign * step

    def _fall(self, test: Tensor, step: Tensor) -> Tensor:
        """Halve the step until the potential does not rise (a projection, or a potential that is not convex)."""
        if not isinstance(self.mapping, Mapping):
            return step
        start = self.mapping.potential(self.f, self.weight)
        for _ in range(MAX_TRIALS):
            rise = self.mapping.potential(self._moved(test, step), self.weight) - start
            if bool(rise <= 1e-12 * start.abs()) or not bool(step > 0):
                return step
            step = step / 2
        return torch.zeros_like(step)

    def move(self, who: Tensor, what: Tensor, step: Tensor) -> None:
        """f <- Proj(f - step g)."""
        test = _test_function(_membership(self.who, self.f), who, what, self.what, self.scale, self.f)
        self.f = torch.where(step != 0, self._moved(test, step), self.f)

    def _name(self, who: int) -> str:
        if self.names is not None:
            return repr(self.names[who])
        return repr(self.who.name(who)) if isinstance(self.who, Structured) else str(who)

    def label(self, who: int, what: int) -> str:
        """Set and direction."""
        many = self.what is not None or self.f.shape[1] > 1
        return f"set {self._name(who)}" + (f", direction {what}" if many else "")

    def explain(self, who: int, what: int) -> str:
        """What can be said without knowing s."""
        return (
            f"No step along {self.label(who, what)} lowers its violation further: s may jump there (ties, few examples), be "
            "constant (an unreachable target), or the projection may undo the step. Try a larger `alpha`, more data, or noise "
            "that breaks ties."
        )


def value_of(mapping: Mapping | Callable[[Tensor], Tensor], f: Tensor, weight: Tensor) -> Tensor:
    """s at f, ``(n, m)``."""
    value = mapping.value(f, weight) if isinstance(mapping, Mapping) else mapping(f)
    return value[:, None] if value.dim() == 1 else value


def _membership(who: Who, f: Tensor) -> Sets:
    return who(f) if callable(who) else who


def _num_sets(who: Sets) -> int:
    if isinstance(who, Cells):
        return who.patterns.shape[1]
    if not isinstance(who, Tensor):
        checks.kind("who", who, Structured, "(or return) a tensor, Cells or Groups")
        return len(who)
    if who.dim() == 0 or who.layout != torch.strided or who.device.type == "meta":
        raise ValueError(f"`who` must be a dense table (n, a) with values, got {who.layout}, {tuple(who.shape)}, {who.device}.")
    return (int(who.max()) + 1 if who.numel() else 0) if who.dim() == 1 else who.shape[1]


def _test_function(who: Sets, index: Tensor, direction: Tensor, what: Tensor | None, scale: Tensor, f: Tensor) -> Tensor:
    """g = 1_A v / scale at every example, (n, m)."""
    if isinstance(who, Tensor) and who.dim() == 3:
        return who.index_select(1, index[None])[:, 0].to(f.dtype)
    if isinstance(who, Cells):
        inside = who.patterns.index_select(1, index[None])[who.ids, 0]
    elif not isinstance(who, Tensor):
        inside = who.member(index)
    elif who.dim() == 1:
        inside = who == index
    else:
        inside = who.index_select(1, index[None])[:, 0]
    if what is None:
        vector = (torch.arange(f.shape[1], device=f.device) == direction).to(f.dtype)
    else:
        vector = what.index_select(0, direction[None])[0].to(f.dtype)
    return inside.to(f.dtype)[:, None] * vector / entry(scale, index)
