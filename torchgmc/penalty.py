r"""A training loss from the search over all of G: violations as they are measured, with a derivative."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed as dist

from torchgmc import distributed
from torchgmc.engine import checks, float64
from torchgmc.engine.float64 import Float64Module, at_hand
from torchgmc.engine.search import masses, violations
from torchgmc.engine.values import Values
from torchgmc.groups.groups import check_groups
from torchgmc.heads.base import Head

KINDS = ("smooth_max", "hinge", "squared")
REDUCTIONS = ("sum", "mean", "max")
MAPPINGS = ("residual", "centered")
_SUMS = ("sums", "mass", "total_sums", "total")


class GMCPenalty(Float64Module):
    r"""How far a model is from its promise, as a loss to add to the training loss.

    .. math:: V_{ak} = E[1_A(x)\, s_k] \;\; \text{(divided by } P(A) \text{ if conditional)} \qquad
              \text{loss} = \begin{cases}
              T \log \frac{1}{2 |G|} \sum_{a,k} \big(e^{V_{ak}/T} + e^{-V_{ak}/T}\big) & \text{smooth\_max} \\
              \sum_{a,k} \max(|V_{ak}| - \alpha, 0) & \text{hinge} \\
              \sum_{a,k} V_{ak}^2 & \text{squared} \end{cases}

    The smooth maximum lies between max\|V\| - T log(2\|G\|) and max\|V\|, and is 0 where every violation is. It reaches every g
    at once, with weights that single out the worst as T -> 0.

    **Rare groups.** A batch may hold none of a group, or one. So sums decay from batch to batch instead of starting over:
    :math:`S_t = \rho S_{t-1} + \sum_{\text{batch}} 1_A s`, as do the masses, and V is measured on them: about 1/(1 - rho)
    batches. The *value* of V is the running one, its *derivative* that of the batch:

    .. math:: \nabla \text{loss} = \sum_{a,k} \frac{\partial \text{loss}}{\partial V_{ak}}\Big|_{\text{running}}\;
              \nabla \hat V^{\text{batch}}_{ak}

    Why not just the batch (rho = 0)? Its loss is a nonlinear function of a noisy V, E[V^2] = (E V)^2 + Var V: it punishes
    the noise of small groups, and the two factors above, measured on the same few examples, are correlated. With decay the
    batch is only a share 1 - rho of the running sums, which makes that bias as much smaller; a single member of a rare group is
    pulled by what is known about its group, not by chance. The price is a *stale* bias: older batches were measured with older
    parameters, off by about the change of V over 1/(1 - rho) steps. It vanishes as training converges.

    **Many processes.** Sums are added over the ranks, so that every rank has the loss of the whole batch. The derivative of a
    rank's own examples is multiplied by the number of ranks, because DistributedDataParallel *averages* gradients: together
    they are the gradient of one process with all the examples, whatever the shares of the ranks. Every rank must call it
    equally often; inside :func:`torchgmc.distributed.local` a rank uses only its own batch.

    Sums are kept in float64 whatever the precision of training, in buffers of the ``state_dict``. In ``eval()`` mode they are
    used but not changed.

    Args:
        mapping: s as a function of the batch: ``"residual"`` (preds - target), ``"centered"`` (preds - E preds: do groups
            differ?), or your own function that returns ``(n,)`` or ``(n, u)``, differentiable (hard steps teach nothing; see
            the heads' ``values`` for soft ones), NaN for a value to ignore; it may return
            :class:`~torchgmc.engine.values.Values` for sets that depend on f. :meth:`for_head` takes those of a head.
        groups: names of the groups, or how many there are; None for one group of everyone.
        kind: ``"smooth_max"``, ``"hinge"`` or ``"squared"``.
        alpha: for ``"hinge"``, the violation that costs nothing.
        temperature: T of ``"smooth_max"``, in the units of a violation.
        reduction: over all g, for ``"hinge"`` and ``"squared"``: ``"sum"``, ``"mean"`` or ``"max"``.
        decay: rho in [0, 1); 0 measures each batch by itself.
        conditional: divide by the group's own mass: its own deviation.
        what: directions v, ``(u, l)``, if not the columns of s themselves.

    Shapes: ``penalty(*batch, groups (n, a), weight=(n,))`` -> a scalar.

    Example:
        >>> penalty = gmc.GMCPenalty("residual", groups=["left", "right"], kind="hinge", alpha=0.01)
        >>> logits = torch.zeros(4, requires_grad=True)
        >>> groups = torch.tensor([[1, 0], [1, 0], [0, 1], [0, 1]])
        >>> loss = penalty(torch.sigmoid(logits), torch.tensor([1, 1, 1, 0]), groups)
        >>> loss.backward()
        >>> loss, logits.grad  # only the left group is off, by (0.5 + 0.5) / 4 - 0.01
        (tensor(0.2400, grad_fn=<ToCopyBackward0>), tensor([-0.0625, -0.0625,  0.0000,  0.0000]))

        The promise of a head, on what its ``observe`` takes:

        >>> head = gmc.ThresholdHead(target=0.1, alpha=0.01, groups=["dark", "light"])
        >>> penalty = gmc.GMCPenalty.for_head(head, kind="squared")
        >>> scores = torch.rand(6, 4, 4, requires_grad=True)
        >>> loss = penalty(scores, torch.rand(6, 4, 4) < 0.5, torch.arange(6)[:, None] % 2 == torch.arange(2))
        >>> loss.backward()
        >>> penalty.violations().shape, bool((scores.grad != 0).any())
        (torch.Size([3, 1]), True)
    """

    head: Head | None = None
    sums: Tensor
    mass: Tensor
    total_sums: Tensor
    total: Tensor
    directions: Tensor | None
    stays = True

    def __init__(
        self,
        mapping: str | Callable[..., Any] = "residual",
        groups: Any = None,
        kind: str = "smooth_max",
        alpha: float = 0.0,
        temperature: float = 0.01,
        reduction: str = "sum",
        decay: float = 0.9,
        conditional: bool = False,
        what: Tensor | None = None,
    ) -> None:
        super().__init__()
        if not callable(mapping):
            checks.option("mapping", mapping, MAPPINGS)
        self.mapping = mapping
        count = isinstance(groups, int) and not isinstance(groups, bool)
        self.groups = [str(i) for i in range(checks.count("groups", groups, 1))] if count else checks.names(groups)
        self.grouped = groups is not None
        self.kind = checks.option("kind", kind, KINDS)
        self.reduction = checks.option("reduction", reduction, REDUCTIONS)
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0.0 <= alpha < math.inf:
            raise ValueError(f"`alpha` must be a finite number of at least 0, got {alpha!r}; violations up to it cost nothing.")
        self.alpha = float(alpha)
        self.temperature = checks.positive("temperature", temperature, "It is the width of the smooth maximum.")
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0.0 <= decay < 1.0:
            raise ValueError(f"`decay` must lie in [0, 1), got {decay!r}; 0 measures each batch on its own.")
        self.decay, self.conditional = float(decay), checks.flag("conditional", conditional)
        if what is not None and (not isinstance(what, Tensor) or what.dim() != 2):
            raise ValueError(f"`what` must be a tensor of directions, (u, l), got {getattr(what, 'shape', what)!r}.")
        self.register_buffer("directions", None if what is None else what.detach().clone().double())
        self.reset()

    @classmethod
    def for_head(cls, head: Head, softness: float | None = None, **options: Any) -> "GMCPenalty":
        r"""The penalty of a head's promise: called with what ``head.observe`` takes, groups last.

        A head that is not fitted is measured at f0 (thresholds at ``init``, probabilities and distributions as they are), a
        fitted one at its fitted state, which is held fixed. To train *through* a fit, see ``head.solve_differentiably``.

        Steps 1{z > 0} become :math:`\sigma(z / T)`, level sets get soft edges, the answers of a tree become distributions over
        its paths; probabilities and distributions need no softening. Each head says how in its ``values``.

        Args:
            head: the head; it is read, not owned.
            softness: T of a soft step, in the units of the scores; the head's :meth:`~torchgmc.Head.softness` by default.
            options: of :class:`GMCPenalty`. ``groups``, ``conditional`` and ``alpha`` default to the head's.
        """
        checks.kind("head", head, Head, "a torchgmc head")
        width = head.softness() if softness is None else checks.positive("softness", softness, "It is the width of a soft step.")
        own = {"groups": head.groups if head.grouped else None, "conditional": head.conditional, "alpha": head.alpha or 0.0}
        made = cls(functools.partial(head.values, softness=width), **(own | options))
        made.__dict__["head"] = head  # read, not owned: its buffers are not part of this module
        return made

    def reset(self) -> None:
        """Forget all batches."""
        where = self.sums.device if "sums" in self._buffers else None
        for name in _SUMS:
            self.register_buffer(name, torch.zeros(0, 0, dtype=torch.float64, device=where))

    def _refuse(self, saved: dict[str, Any]) -> str:
        """Why a state cannot be this penalty's; empty if it can."""
        shapes = {name: tuple(value.shape) for name, value in saved.items() if isinstance(value, Tensor)}
        own = None if self.directions is None else tuple(self.directions.shape)
        if shapes.get("directions") != own and len(shapes):
            return f"`what` has the shape {shapes.get('directions')}, and this penalty's {own} (size mismatch)"
        sums = {name: shapes[name] for name in _SUMS if name in shapes}
        rows = {0, 1, len(self.groups)}
        if self.head is not None:  # which may promise everyone too, depending on its fit
            rows |= {len(self.groups) + 1, len(self.head.test_functions().who)}
        table, row = sums.get("sums", ()), sums.get("total", ())
        if sums and (
            not table == sums.get("mass") != ()  # all four, of one mapping
            or not row == sums.get("total_sums") != ()
            or len(table) != 2
            or table[0] not in rows
            or row != (min(table[0], 1), table[1])
        ):
            return f"its sums have the shapes {sums}, and this penalty has {len(self.groups)} groups (size mismatch)"
        wrong = [name for name in shapes if not saved[name].is_meta and not bool(saved[name].isfinite().all())]
        return f"{wrong[0]!r} holds a number that is not finite" if wrong else ""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        why = self._refuse({name: state_dict.get(prefix + name) for name in (*_SUMS, "directions")})
        if why:  # and nothing has changed
            args[-1].append(f"the state{' of ' + repr(prefix.rstrip('.')) if prefix else ''} cannot be loaded: {why}.")
            return
        for name in _SUMS:  # as many groups, and as wide, as the mapping was
            if prefix + name in state_dict:
                setattr(self, name, getattr(self, name).new_zeros(state_dict[prefix + name].shape))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def violations(self) -> Tensor:
        """Running violations ``(a, u)``, signed, float64, without derivative; for logging."""
        return table_of(self.sums, self.mass, self.total_sums, self.total, self.centered, self.conditional)

    @property
    def centered(self) -> bool:
        """s is taken from its mean."""
        return self.mapping == "centered" or (self.head is not None and self.head.relative)

    def forward(self, *batch: Any, groups: Any = None, weight: Any = None, **named: Any) -> Tensor:
        """The loss of a batch.

        Args:
            batch: the arguments of the mapping, or of the head's ``observe``; the groups may come last.
            groups: membership ``(n, a)``.
            weight: weight of each example, ``(n,)``.
            named: further arguments of the head's ``observe``.

        Returns:
            A scalar, float32 (float64 if s is).
        """
        if self.head is not None:
            given = {self.head.member_argument: groups} if groups is not None else {}
            bound = self.head.bind(*batch, **given, **named)
            weight = bound.pop("weight", weight)
            values = self.mapping(**bound)  # type: ignore[operator]  # the head's own
            return self._finish(values, weight, self.head.fitted.device)
        if named:
            raise TypeError(f"`{next(iter(named))}` is unknown: a penalty takes the arguments of its mapping, groups and weight.")
        if groups is None and self.grouped:
            if not batch:
                raise TypeError("no arguments: call it with the arguments of the mapping, then the groups.")
            *batch, groups = batch  # type: ignore[assignment]  # a list serves as well
        if not batch or not all(isinstance(part, Tensor) or part is None for part in batch):
            kinds = ", ".join(type(part).__name__ for part in batch) or "nothing"
            raise TypeError(f"the batch must be tensors, with `groups` last, got {kinds}.")
        for part in batch:
            if part is not None and (part.layout != torch.strided or part.dim() == 0 or part.is_complex()):
                kind = f"{part.dtype}, {part.layout}, shape {tuple(part.shape)}"
                raise ValueError(f"the batch, `groups` last, must be dense tensors of real numbers, (n, ...), got {kind}.")
            if part is not None and part.device != batch[0].device:
                raise ValueError(f"the batch, `groups` last, must be on one device, got {batch[0].device} and {part.device}.")
        n, device = len(batch[0]), batch[0].device
        if groups is None:
            member = torch.ones(n, 1, dtype=torch.bool, device=device)
        else:
            member = check_groups(groups, n, self.groups)
        if member.device != device:
            raise ValueError(f"`groups` is on {member.device} but the batch is on {device}; move them to one device.")
        return self._finish(self._values(member, batch), weight, device)

    def _finish(self, values: Values, weight: Any, device: torch.device) -> Tensor:
        values = Values(*map(at_hand, vars(values).values()))
        with torch.autocast(values.s.device.type, enabled=False):
            loss = self._loss(self._table(values.who, values, checks.weights(at_hand(weight), len(values.s), values.s.detach())))
        return float64.sent(loss if values.s.dtype == torch.float64 else loss.float(), device)

    def _values(self, member: Tensor, batch: Any) -> Values:
        if callable(self.mapping):
            found = self.mapping(*batch)
        elif self.mapping == "centered":
            (found,) = batch
        else:
            found = residual(*batch)
        if isinstance(found, Values):
            return found
        if not isinstance(found, Tensor) or not found.is_floating_point() or found.dim() not in (1, 2) or len(found) != len(member):
            raise ValueError(
                f"the mapping must return floating-point values of shape ({len(member)},) or ({len(member)}, u), got "
                f"{tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__}."
            )
        return Values(found if found.dim() == 2 else found[:, None], member)

    def _table(self, member: Tensor, values: Values, weight: Tensor) -> Tensor:
        """Violations ``(a, u)``: running values, the batch's derivatives."""
        s, inside = values.s.double() + (0.0 if values.mean is None else values.mean), values.inside
        defined = ~s.isnan()
        s = torch.where(defined, s, 0.0)
        if self.directions is not None:
            if self.directions.shape[1] != s.shape[1]:
                raise ValueError(f"`what` has {self.directions.shape[1]} columns, but the mapping returns l = {s.shape[1]} values.")
            s, defined = s @ self.directions.T.to(s.device), defined.all(1, keepdim=True).expand(-1, len(self.directions))
        weights = weight[:, None] * defined  # (n, u)
        total = weights.sum(0, keepdim=True)  # (1, u)
        sums = violations(member, s, weight=weights) * total
        if inside is None:
            mass = masses(member, weights) * total
        else:
            mass = violations(member, inside.double(), weight=weights) * total
        batch = self._over_ranks([sums, mass, (weights * s).sum(0, keepdim=True), total])
        running = self._remember([part.detach() for part in batch])
        # Value of the running sums, derivative of the batch's, each as a mean over its own examples.
        mean, size, centre = (
            old / _safe(running[3]) + (new - new.detach()) / _safe(batch[3])
            for old, new in zip(running[:3], batch[:3], strict=True)
        )
        table = mean - size * centre if self.centered else mean
        return table / _safe(size) if self.conditional else table

    def _over_ranks(self, parts: list[Tensor]) -> list[Tensor]:
        """Sums over all ranks; a rank's own examples have their derivative times the number of ranks."""
        if not distributed.active():
            return parts
        flat = torch.cat([part.detach().flatten() for part in parts])
        dist.all_reduce(flat)
        sums = torch.split(flat, [part.numel() for part in parts])
        ranks = dist.get_world_size()
        return [all_.view_as(own) + ranks * (own - own.detach()) for all_, own in zip(sums, parts, strict=True)]

    def _remember(self, batch: list[Tensor]) -> list[Tensor]:
        """Running sums with this batch."""
        if self.sums.shape[1] == 0:
            for name, part in zip(_SUMS, batch, strict=True):
                setattr(self, name, torch.zeros_like(part))
        if self.sums.shape[1] != batch[0].shape[1]:
            raise ValueError(f"the mapping returned {batch[0].shape[1]} values, and {self.sums.shape[1]} before; call `reset`.")
        found = [self.decay * getattr(self, name).to(part.device) + part for name, part in zip(_SUMS, batch, strict=True)]
        if self.training:
            for name, part in zip(_SUMS, found, strict=True):
                setattr(self, name, part)
        return found

    def _loss(self, table: Tensor) -> Tensor:
        if self.kind == "smooth_max":
            both = torch.cat([table, -table]).flatten() / self.temperature
            return self.temperature * (torch.logsumexp(both, 0) - math.log(both.numel()))
        cost = (table.abs() - self.alpha).relu() if self.kind == "hinge" else table.square()
        if self.reduction == "max":
            return cost.max()
        return cost.sum() if self.reduction == "sum" else cost.mean()

    def extra_repr(self) -> str:
        """Options, readable in a notebook."""
        name = self.mapping if isinstance(self.mapping, str) else getattr(self.mapping, "__name__", type(self.mapping).__name__)
        more = {"smooth_max": f"temperature={self.temperature:g}", "hinge": f"alpha={self.alpha:g}", "squared": ""}[self.kind]
        return f"{name}, kind={self.kind}, {more}{', ' if more else ''}decay={self.decay:g}, groups={len(self.groups)}"


def table_of(sums: Tensor, mass: Tensor, total_sums: Tensor, total: Tensor, centered: bool, conditional: bool) -> Tensor:
    """Violations ``(a, u)`` from sums of w 1_A s, w 1_A ``(a, u)``, w s and w ``(u,)``; 0 for a group without examples."""
    tiny = torch.finfo(torch.float64).tiny
    total = total.clamp_min(tiny)
    table = sums / total - (mass / total * (total_sums / total) if centered else 0.0)
    return table / (mass / total).clamp_min(tiny) if conditional else table


def _safe(x: Tensor) -> Tensor:
    """x where it is above 0, else 1: an empty group has the violation 0."""
    return torch.where(x > 0, x, torch.ones_like(x))


def residual(preds: Tensor, target: Tensor | None = None) -> Tensor:
    """preds - target, ``(n,)`` or ``(n, C)``; class ids become one-hot rows.

    Example:
        >>> residual(torch.tensor([[0.2, 0.8]]), torch.tensor([1]))
        tensor([[ 0.2000, -0.2000]])
    """
    if target is None:
        raise ValueError("`target` is missing: the residual is preds - target.")
    preds = preds if preds.dtype in (torch.float32, torch.float64) else preds.float()  # half precision loses small numbers
    if preds.dim() == 2 and target.dim() == 1 and not target.is_floating_point() and target.dtype != torch.bool:
        if target.numel() and (int(target.min()) < 0 or int(target.max()) >= preds.shape[1]):
            raise ValueError(f"`target` must hold class ids from 0 to {preds.shape[1] - 1}.")
        target = torch.nn.functional.one_hot(target.long(), preds.shape[1])
    if target.shape != preds.shape:
        raise ValueError(f"`target` must have the same shape as `preds`, {tuple(preds.shape)}, got {tuple(target.shape)}.")
    return preds - target.to(preds.dtype)
