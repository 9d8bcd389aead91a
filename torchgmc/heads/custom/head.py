"""A head for your own mapping: any s, any sets or test functions, any projection."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor, nn

from torchgmc.audits.measure import Tally
from torchgmc.distributed import pooled
from torchgmc.engine import checks, noise, soft
from torchgmc.engine.batches import checked_once
from torchgmc.engine.clusters import check as check_clusters, total
from torchgmc.engine.float64 import wide
from torchgmc.engine.scripting import is_scripting
from torchgmc.engine.search import violations
from torchgmc.engine.solver import Log, reached
from torchgmc.engine.statistics import PerExample
from torchgmc.engine.values import Names, Values
from torchgmc.heads.base import Head
from torchgmc.heads.custom.solve import solve, value_of

#: Written to a file in place of a function, which a file cannot hold.
CUSTOM = "pass it again"


@dataclass
class CustomStatistics(PerExample):
    """The examples themselves: f0 ``(n, m)``, outcomes ``(n, ...)``, x ``(n, ...)``, weights and clusters."""

    layout: ClassVar[dict[str, str]] = {
        **{"f0": "float n m", "y": "any n *", "x": "any n *", "weight": "weight n", "cluster": "int n k"}
    }
    f0: Tensor
    y: Tensor
    x: Tensor
    weight: Tensor
    cluster: Tensor

    @property
    def member(self) -> Tensor:  # type: ignore[override]  # x is what the sets follow from
        """What the sets follow from."""
        return self.x


class _Static(nn.Module):
    """Sets that do not depend on f: x is the membership."""

    def forward(self, f: Tensor, x: Tensor) -> Tensor:
        return x


class _Plain(nn.Module):
    """A Python function as a module; it does not script."""

    def __init__(self, function: Callable[..., Tensor], name: str) -> None:
        super().__init__()
        self.function, self.name = function, name

    def forward(self, *args: Any) -> Tensor:
        return self.function(*args)

    def __prepare_scriptable__(self) -> nn.Module:
        raise TypeError(
            f"`{self.name}` is a Python function, which TorchScript cannot hold; pass an nn.Module (or "
            "torch.jit.script(function)), or use torch.export."
        )


class GMCHead(Head):
    r"""Your own promise: :math:`|E\langle s(f, y), g(f(x), x)\rangle| \le \alpha` for every g.

    f starts at the model's output f0 and every step of the fit sets f <- Proj(f - step g). The log of the steps is the fitted
    state; a new input replays it, with g evaluated at its own f. The examples are kept for the fit (no statistics are known
    for an unknown s), so memory grows with them.

    Args:
        mapping: function from outcomes y to s: an object with ``value(f, weight)`` and ``potential(f, weight)`` such as
            :class:`torchgmc.mappings.Residual`, or a plain function of f ``(n, m)`` -> ``(n, m)``. s must rise along itself (be
            the gradient of a convex function of f).
        alpha: largest violation allowed.
        who: None for static sets, x being their membership ``(n, a)``; else a function or module of f ``(n, m)`` and x that
            returns membership ``(n, a)``, or general test functions g as floating point ``(n, a, m)``. x is f0 if omitted.
        what: directions v, ``(u, m)``; the identity if omitted. Not for general test functions.
        projection: onto the convex set of outputs, e.g. :func:`torchgmc.projections.simplex`; none if omitted.
        groups: names of the a sets.
        conditional: g = 1_A v / P(A), with P(A) at f0.
        bounds: range of <s, v> (or <s, g>), for the intervals of ``audit``; by default the range seen in the audited data.

    Shapes: ``fit(f0 (n, m) or (n,), y, x)``; ``head(f0, x)`` -> calibrated f, shape and type of f0.

    TorchScript needs ``who`` and ``projection`` as modules (or scripted functions); ``torch.export`` takes any function of
    tensors. A file holds no functions: ``gmc.load(path, mapping=..., who=..., projection=...)`` takes them again.

    Example:
        s-HappyMap: the expectile of level 0.8 in every level set of f, s = \|0.8 - 1{y < f}\| (f - y).

        >>> def expectile(y):
        ...     return lambda f: torch.where(y < f, 0.2, 0.8) * (f - y)
        >>> def level_sets(f, x):
        ...     return torch.nn.functional.one_hot((f[:, 0] * 4).long().clamp(0, 3), 4).bool()
        >>> x = torch.rand(2000)
        >>> y = x + 0.3 * torch.randn(2000)
        >>> head = gmc.GMCHead(expectile, alpha=0.005, who=level_sets).fit(x, y)
        >>> head.report.converged
        True
        >>> bool((head(x) > x).double().mean() > 0.9)  # an expectile of 0.8 lies above the mean
        True

        Outcome indistinguishability: no distinguisher A_j(x, y, p), here "y is the likeliest class" among long and among short
        inputs, can tell outcomes drawn from p from true ones. g_j(p, x)_c = A_j(x, c, p): a general vector-valued g.

        >>> from torchgmc.mappings import Residual
        >>> def distinguishers(p, x):
        ...     top = torch.nn.functional.one_hot(p.argmax(1), 3).double()  # (n, 3)
        ...     return torch.stack([top * (x > 0)[:, None], top * (x <= 0)[:, None]], 1)  # (n, 2, 3)
        >>> x = torch.randn(3000)
        >>> p = (2 * torch.randn(3000, 3)).softmax(1)
        >>> y = torch.nn.functional.one_hot(torch.multinomial((p + 0.2 * (x > 0)[:, None]), 1)[:, 0], 3)
        >>> head = gmc.GMCHead(Residual, 0.005, distinguishers, projection=gmc.projections.simplex, groups=["long", "short"])
        >>> report = head.fit(p, y, x).report
        >>> bool(report.violations_before[0].abs() > 0.02), report.converged
        (True, True)
        >>> bool((head(p, x).sum(1) - 1).abs().max() < 1e-5)
        True
    """

    log_who: Tensor
    log_what: Tensor
    log_step: Tensor
    scale: Tensor
    directions: Tensor
    growing: ClassVar[tuple[str, ...]] = ("log_who", "log_what", "log_step", "scale")
    fit_only: ClassVar[tuple[str, ...]] = ("alpha", "conditional", "bounds", "noise_floor")
    arguments: ClassVar[tuple[str, ...]] = ("f0", "y", "x", "weight", "clusters")
    truth: ClassVar[str] = "y"
    keeps: ClassVar[tuple[type, ...]] = (CustomStatistics,)
    settings: ClassVar[tuple[str, ...]] = ("alpha", "groups", "conditional", "bounds", "noise_floor")

    def __init__(
        self,
        mapping: Any,
        alpha: float | None,
        who: Any = None,
        what: Any = None,
        projection: Any = None,
        groups: Any = None,
        conditional: bool = False,
        bounds: Any = None,
        noise_floor: bool = True,
    ) -> None:
        super().__init__(alpha, groups, conditional, noise_floor=noise_floor)
        self._mapping = _function("mapping", mapping)
        self.static = who is None
        self.who = _Static() if who is None else _module("who", who)
        self.projected = projection is not None
        self.projection = nn.Identity() if projection is None else _module("projection", projection)
        self.bounds = None if bounds is None else checks.interval("bounds", bounds)
        self.directed = what is not None
        table = torch.zeros(0, 0) if what is None else checks.numbers("what", what)
        if table.dim() != 2:
            raise ValueError(f"`what` must have shape (u, m), got {tuple(table.shape)}.")
        self.register_buffer("directions", table.detach().clone().double(), persistent=False)
        #: Sets, directions, and whether the sets are general test functions: known once s was measured.
        self._shape = (self.num_groups, max(len(table), 1), False)
        self.hold(torch.int64, log_who=(0,), log_what=(0,))
        self.hold(log_step=(0,), scale=(0,))
        self.reset()

    # -- fit ---------------------------------------------------------------------------------------------------------

    def observe(self, f0: Tensor, y: Any, x: Any = None, weight: Any = None, clusters: Any = None) -> None:
        """Keep a batch of examples.

        Args:
            f0: outputs of the model, ``(n, m)`` or ``(n,)``.
            y: outcomes, whatever ``mapping`` takes, one row per example; ``(n,)`` becomes ``(n, 1)``.
            x: what ``who`` looks at, one row per example; the membership ``(n, a)`` for static sets.
            weight: weight of each example, ``(n,)``.
            clusters: which examples belong together: integers or strings, ``(n,)``.
        """
        rows = self.check_batch(f0, y, x, weight, clusters)
        if len(rows.f0):
            self.keep(rows.clone(), rows.f0, rows.y)

    @checked_once
    def check_batch(self, f0: Any, y: Any, x: Any = None, weight: Any = None, clusters: Any = None) -> CustomStatistics:
        """The checked batch, or an error that says what is wrong with it."""
        f0 = checks.scores("f0", f0).detach()
        if f0.dim() > 2:
            raise ValueError(f"`f0` must have shape (n, m) or (n,), got {tuple(f0.shape)}.")
        f0 = f0[:, None] if f0.dim() == 1 else f0
        y = checks.numbers("y", y)
        y = y[:, None] if y.dim() == 1 else y
        if self.static:
            x = self.check_groups(x, len(f0), f0.device) if self.grouped or x is None else x
        x = f0 if x is None else checks.numbers("x", x)
        for name, value in (("y", y), ("x", x)):
            if value.dim() == 0 or len(value) != len(f0):
                raise ValueError(f"`{name}` must have {len(f0)} rows, one per example, got shape {tuple(value.shape)}.")
            if value.device != f0.device:
                raise ValueError(f"`{name}` is on {value.device} but `f0` is on {f0.device}; move them to one device.")
        if self.directed and self.directions.shape[1] != f0.shape[1]:
            raise ValueError(f"`what` has directions of length {self.directions.shape[1]}, but f0 has {f0.shape[1]} columns.")
        cluster = check_clusters(clusters, len(f0), f0.device)
        return CustomStatistics(f0.double(), y, x, checks.weights(weight, len(f0), f0).detach(), cluster)

    @pooled
    def calibrate(self, solver: str = "exact", eta: float | None = None, max_iter: int | None = None) -> "GMCHead":
        """Run the algorithm of :func:`torchgmc.solve` on the examples."""
        self.check_solver(solver, eta, max_iter)
        rows: CustomStatistics = self.seen()
        x = rows.x
        noise_of, variance, small = self._noise(rows)
        tolerance = noise_of if solver == "exact" and self.noise_floor else None
        who = self._membership(rows.f0, x) if self.static else lambda f: self._membership(f, x)
        how: dict[str, Any] = {"solver": solver, "eta": eta, "max_iter": max_iter, "tolerance": tolerance}
        how |= {"projection": self.projection if self.projected else None, "conditional": self.conditional}
        how |= {"names": self.groups if self.grouped else None, "alpha": self.alpha or 1.0, "weight": rows.weight}
        solution = solve(rows.f0, self._mapping(rows.y), who, self.directions if self.directed else None, **how)
        log = solution.log
        if self.static and not self.projected:  # steps along static test functions commute: one line per g
            columns = solution.report.violations_before.shape[1]
            keys, place = torch.unique(log.who * columns + log.what, return_inverse=True)
            log = Log(keys // columns, keys % columns, log.step.new_zeros(len(keys)).index_add_(0, place, log.step))
        device = self.fitted.device
        self.log_who, self.log_what, self.log_step = (t.to(device) for t in log)
        self.scale = solution.scale.to(device)
        details = {"examples": len(rows.f0), "steps": len(solution.log.who), "log": len(log.who), "variance": variance}
        details["small"] = small
        message = solution.report.message + (noise.too_small(small) if solver == "exact" else "")
        self.mark_fitted(replace(solution.report, details=details))
        with torch.no_grad():
            f = self(rows.f0, x)
            after, s = self._table(f, rows), self._value(f, rows)
        details["tail"] = (s @ self.directions.to(s).T if self.directed else s).abs().amax(0)
        state = solution.report.reached if tolerance is None else reached(after, self.alpha, tolerance)
        self.mark_fitted(replace(solution.report, violations_after=after, message=message, details=details, reached=state))
        return self

    def _noise(self, rows: CustomStatistics) -> tuple[Tensor, Tensor, list[str]]:
        """Violation of each g that the sample cannot tell from 0, at f0, n times its variance, ``(a, u)``; sets too small."""
        member, s = self._membership(rows.f0, rows.x).detach(), self._value(rows.f0, rows).detach()
        share = rows.weight / rows.weight.sum()
        if member.dim() == 3:
            values = torch.einsum("nal,nl->na", member.to(s.dtype), s)[:, :, None]
        else:
            s = s @ self.directions.to(s).T if self.directed else s
            values = member.double()[:, :, None] * s[:, None].double()  # (n, a, u)
        sums = total((share[:, None, None] * values).flatten(1), rows.cluster).view(-1, *values.shape[1:])
        error = sums.square().sum(0).sqrt()
        sizes = (sums != 0).double().sum(0)
        scale = torch.ones_like(error[:, :1])
        if self.conditional and member.dim() == 2:
            scale = (share @ member.double())[:, None].clamp_min(1e-300)
        slack = (noise.slacks(noise.among(error.numel()), error, sizes) / scale).clamp_min(1e-9)
        small = noise.small_groups(self._set_names(len(sizes)), sizes.amax(1), 0.5)
        return slack, len(s) * error.square(), small

    def _set_names(self, count: int) -> list[str]:
        return self.groups if self.grouped else [f"set {j}" for j in range(count)]

    def _membership(self, f: Tensor, x: Tensor) -> Tensor:
        member: Tensor = self.who(f, x)
        if not isinstance(member, Tensor) or member.dim() not in (2, 3):
            raise ValueError(f"`who` must return a membership (n, a) or (n, a, m), got {getattr(member, 'shape', type(member))}.")
        if self.grouped and member.shape[1] != self.num_groups:
            raise ValueError(f"`who` returned {member.shape[1]} sets, but `groups` names {self.num_groups}.")
        return member

    def _value(self, f: Tensor, rows: CustomStatistics) -> Tensor:
        return value_of(self._mapping(rows.y), f, rows.weight)

    def _table(self, f: Tensor, rows: CustomStatistics) -> Tensor:
        member = self._membership(f, rows.x)
        what = self.directions if self.directed else None
        return violations(member, self._value(f, rows), what, rows.weight) / self.scale.to(f.device)[:, None]

    # -- use ---------------------------------------------------------------------------------------------------------

    def forward(self, f0: Tensor, x: Optional[Tensor] = None, mode: str = "hard", temperature: float = 0.1) -> Tensor:
        """The calibrated f, shape and type of ``f0``; one step per line of the log.

        Differentiable in ``f0`` in every mode: through the projection, and through ``who`` where it returns floating point
        numbers (a ``who`` of soft memberships makes the head smooth; sets as bool have no derivative). ``mode`` and
        ``temperature`` are checked and otherwise unused: only you know how your sets soften.
        """
        soft.check(mode, temperature)
        if not self.is_fitted:
            raise RuntimeError("this head is not fitted; call `fit`, or `observe` and `calibrate`, or load its state.")
        if not is_scripting():
            self.check_input("f0", f0, x)
            if self.static and x is not None:
                x = self.check_member(x)
        if f0.dim() > 2 or (x is not None and x.shape[0] != f0.shape[0]):
            raise ValueError(f"`f0` must have shape (n,) or (n, l), with as many rows as `x`, got {f0.shape}")
        if self.static and x is not None and (x.dim() != 2 or x.shape[1] != self.scale.shape[0]):
            raise ValueError(f"`x` must be the membership (n, {self.scale.shape[0]}) of the sets, got {x.shape}.")
        f = wide(f0 if f0.dim() == 2 else f0.unsqueeze(1))
        if x is None:
            if self.static and self.grouped:
                raise ValueError("`x` is missing: this head needs the membership of its sets, shape (n, a).")
            x = torch.ones_like(f[:, :1]) if self.static else f
        for t in range(self.log_step.shape[0]):
            f = self.projection(f - self.log_step[t] * self.direction(self.who(f, x), t, f))
        return f.reshape(f0.shape).to(f0.dtype)

    def direction(self, member: Tensor, t: int, f: Tensor) -> Tensor:
        """g of step t at every example, (n, m)."""
        chosen = member.index_select(1, self.log_who[t : t + 1])[:, 0].to(f.dtype)
        if member.dim() == 3:
            return chosen
        if self.directed:
            vector = self.directions.index_select(0, self.log_what[t : t + 1])  # (1, m)
        else:
            vector = (torch.arange(f.shape[1], device=f.device) == self.log_what[t]).to(f.dtype)[None]
        return chosen[:, None] * vector / self.scale.index_select(0, self.log_who[t : t + 1])

    # -- the promise -------------------------------------------------------------------------------------------------

    def test_functions(self) -> Names:
        """The sets and directions; of general test functions each is a column of everyone."""
        count, columns, general = self._shape
        sets = self._set_names(count)
        if general:
            return Names(["all"], sets)
        return Names(sets, [f"direction {k}" for k in range(columns)] if columns > 1 else [""])

    def s_range(self) -> tuple[float, float] | None:
        """``bounds``."""
        return self.bounds

    def values(self, f0: Tensor, y: Any, x: Any = None, softness: float | None = None) -> Values:
        """s along each direction, and the sets; of general test functions <s, g> of each. ``softness`` is yours to build in."""
        checks.softness(softness)
        rows = self.check_batch(f0, y, x)
        f = rows.f0 if softness is None else f0 if f0.dim() == 2 else f0[:, None]
        if self.is_fitted:
            f = self(f, rows.x)
        who, s = self._membership(f, rows.x), self._value(f, rows)
        if not bool(s.isfinite().all()):
            raise ValueError("`mapping` returned NaN or infinite values; check `f0`, `y` and `x`.")
        if who.dim() == 2:
            s = s @ self.directions.to(s).T if self.directed else s
        self._shape = (who.shape[1], s.shape[1], who.dim() == 3)
        if who.dim() == 2:
            return Values(s, who)
        everyone = torch.ones(len(s), 1, dtype=torch.bool, device=s.device)
        return Values(torch.einsum("nal,nl->na", who.to(s.dtype), s), everyone)

    def audit_summary(self, tally: Tally) -> dict[str, Any]:
        """Nothing but a check of ``bounds``."""
        least, most = (float(v) for v in tally.s.aminmax())
        if self.bounds and (least < self.bounds[0] - 1e-9 or most > self.bounds[1] + 1e-9):  # intervals would be too short
            raise ValueError(
                f"`bounds` = ({self.bounds[0]:g}, {self.bounds[1]:g}) must hold for every example, but s ranges from "
                f"{least:g} to {most:g}; pass the range of s, or omit `bounds`."
            )
        return {}

    # -- files -------------------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Arguments that rebuild this head; functions are marked, not stored."""
        return super().config() | {
            "mapping": CUSTOM,
            "who": None if self.static else CUSTOM,
            "projection": CUSTOM if self.projected else None,
            "what": self.directions.tolist() if self.directed else None,
        }

    def misfit(self, state: dict[str, Tensor]) -> str:
        """Sets of the log that do not exist."""
        who, scale = state.get("log_who"), state.get("scale")
        if who is None or scale is None:
            return ""
        if self.grouped and self.static and len(scale) not in (0, self.num_groups):
            return f"'scale' has {len(scale)} sets, and this head {self.num_groups} groups"
        if who.numel() and not 0 <= int(who.min()) <= int(who.max()) < len(scale):
            return f"'log_who' must hold sets from 0 to {len(scale) - 1}, got {int(who.min())} to {int(who.max())}"
        return ""

    def extra_repr(self) -> str:
        """Options and state."""
        return f"{super().extra_repr()}, log={len(self.log_step)} steps"


def _function(name: str, value: Any) -> Callable[..., Any]:
    if isinstance(value, str) and value == CUSTOM:
        raise ValueError(f"files do not hold functions; pass it again: gmc.load(path, {name}=...).")
    if not callable(value):
        raise TypeError(f"`{name}` must be a function or a module, got {type(value).__name__}.")
    return value  # type: ignore[no-any-return]


def _module(name: str, value: Any) -> nn.Module:
    function = _function(name, value)
    return function if isinstance(function, nn.Module) else _Plain(function, name)
