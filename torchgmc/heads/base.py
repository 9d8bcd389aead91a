"""What every head shares: names, options, the fitted flag, fit = reset + observe + calibrate."""

import copy
import functools
import warnings
from dataclasses import replace
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor

from torchgmc import distributed
from torchgmc.audits import overlap
from torchgmc.audits.audit import Audit, Tally
from torchgmc.engine import checks
from torchgmc.engine.float64 import Float64Module
from torchgmc.engine.scripting import is_scripting
from torchgmc.engine.solver import SOLVERS, Report
from torchgmc.groups.groups import Groups, check_groups


class Head(Float64Module):
    """A small module behind a trained model, fitted so that a promise holds for every group at once.

    A subclass gives ``observe`` (a batch becomes statistics), ``calibrate`` (statistics become buffers), ``forward`` (buffers
    change an output) and ``audit`` (a promise is measured on held-out data).

    ``observe`` gives the statistics of a batch to ``self._keep``: a dataclass with ``__add__`` whose fields are tensors of its
    own (the caller may use the batch's memory again). Their sum is ``self.statistics``, None before the first example;
    statistics that keep something of every example say of how many in ``rows``. ``calibrate`` is decorated with
    :func:`torchgmc.distributed.pooled`: under ``torch.distributed`` it finds the sum over all ranks there, so that every rank
    ends with the state of one process over all the data. A new head need do no more for it.

    Args:
        alpha: largest violation allowed.
        groups: names of the groups, in the order of the columns of the membership; None for one group, "all".
        conditional: g = 1_A / P(A), so that alpha bounds each group's own deviation, not the mass-weighted one.
        jitter: half-width of the tie-breaking noise, drawn from the input itself.
    """

    fitted: Tensor
    seen: Tensor
    #: Arguments of ``__init__`` that rebuild the head; their values are written to saved files.
    settings: ClassVar[tuple[str, ...]] = ("alpha", "groups", "conditional", "jitter")
    #: Buffers that grow in a fit along their first dimension (a log); a saved state may be of any length.
    _growing: ClassVar[tuple[str, ...]] = ()
    #: Does ``calibrate`` fit something to the data? If not, an audit may use the same data.
    _fits: ClassVar[bool] = True
    __jit_unused_properties__: ClassVar[list[str]] = ["statistics"]

    def __init__(self, alpha: float, groups: Any = None, conditional: bool = False, jitter: float = 0.0) -> None:
        super().__init__()
        self.alpha = checks.positive("alpha", alpha, "It is the largest violation allowed.")
        self.groups = checks.names(groups)
        self.num_groups = len(self.groups)
        self.grouped = groups is not None  # without groups, `groups` may be left out of every call
        self.conditional = bool(conditional)
        if not isinstance(jitter, int | float) or not 0.0 <= jitter < float("inf"):
            raise ValueError(f"`jitter` must be a finite half-width of at least 0, got {jitter!r}.")
        self.jitter = float(jitter)
        self.register_buffer("fitted", torch.tensor(False))
        self.is_fitted = False  # mirrors the buffer: forward may read it without looking at a tensor's value
        self.report: Optional[Report] = None  # noqa: UP045  # TorchScript reads Optional
        self.register_buffer("seen", overlap.nothing())  # keys of the calibration data, for audits
        self._parts: tuple[Any, ...] = ()  # statistics, see `_keep`
        self.observed: overlap.Sketch | None = None  # the same of this process's examples, while they come in

    # -- what a subclass gives ---------------------------------------------------------------------------------------

    def observe(self, *args: Any, **kwargs: Any) -> None:
        """Turn a batch into statistics and forget the batch."""
        raise NotImplementedError  # abstract

    def calibrate(self, solver: str = "exact", eta: float | None = None, max_iter: int | None = None) -> "Head":
        """Run the solver on the statistics and write the fitted buffers."""
        raise NotImplementedError  # abstract

    def reset(self) -> None:
        """Forget the statistics, the fitted state and the report."""
        raise NotImplementedError  # abstract

    def _tally(self, *args: Any, **kwargs: Any) -> Tally:
        """What an audit needs of one batch: takes the arguments of ``audit`` but ``delta``."""
        raise NotImplementedError  # abstract

    def _audit(self, tally: Tally, delta: float) -> Audit:
        """The audit of all batches."""
        raise NotImplementedError  # abstract

    # -- what is shared ----------------------------------------------------------------------------------------------

    @property
    def statistics(self) -> Any:
        """Of all batches observed; None before the first example."""
        parts = self.__dict__.get("_parts", ())
        if len(parts) > 1:
            parts = self._parts = (functools.reduce(lambda late, early: early + late, reversed(parts)),)
        return parts[0] if parts else None

    @statistics.setter
    def statistics(self, value: Any) -> None:
        self._parts = () if value is None else (value,)

    def _keep(self, batch: Any) -> None:
        """Add a batch's statistics to those of the others.

        Rows are joined once the later ones are half as many as those before, so n examples are copied O(log n) times each in
        however many batches they come, and lie in O(log n) pieces; sums (no ``rows``) are added at once.
        """
        parts = [*self.__dict__.get("_parts", ()), batch]
        while len(parts) > 1 and 2 * getattr(parts[-1], "rows", 0) >= getattr(parts[-2], "rows", 0):
            late = parts.pop()
            parts[-1] = parts[-1] + late
        self._parts = tuple(parts)

    def fit(
        self, *data: Any, solver: str = "exact", eta: float | None = None, max_iter: int | None = None, **options: Any
    ) -> Any:
        """``reset``, ``observe`` and ``calibrate`` in one call; returns the head.

        A fit that raises leaves the head as it was.
        """
        with _unchanged_on_error(self), distributed.together():
            self._check_solver(solver, eta, max_iter)
            self.reset()
            rows = next((len(t) for t in (*data, *options.values()) if _has_rows(t)), 0)
            self._prepare(solver, eta, max_iter, distributed.total(rows))
            self.observe(*data, **options)
            self.calibrate(solver=solver, eta=eta, max_iter=max_iter)
        return self

    def _prepare(self, solver: str, eta: float | None, max_iter: int | None, n: int) -> None:
        """Choose the statistics that this solver needs for n examples; nothing to choose by default."""

    def _check_solver(self, solver: str, eta: float | None, max_iter: int | None) -> None:
        checks.option("solver", solver, SOLVERS)
        if eta is not None:
            checks.positive("eta", eta, "It is the size of a fixed step.")
            if solver == "exact":
                raise ValueError("`eta` is the fixed step of solver='paper' or 'fresh'; solver='exact' finds its own.")
        checks.count("max_iter", max_iter, 1)

    def _check_groups(self, groups: Any, n: int, device: torch.device) -> Tensor:
        """Membership (n, a), bool, on the device of the scores."""
        if groups is None and not self.grouped:
            return torch.ones(n, 1, dtype=torch.bool, device=device)
        if groups is None:
            raise ValueError(
                f"`groups` is missing: this head was made for {self.num_groups} groups "
                f"({', '.join(self.groups[:4])}{', ...' if self.num_groups > 4 else ''}); give a membership of shape "
                f"(n, {self.num_groups})."
            )
        member = check_groups(groups, n, self.groups)
        if member.device != device:
            raise ValueError(f"`groups` is on {member.device} but `scores` is on {device}; move them to one device.")
        return member

    def _remember(self, *parts: Tensor) -> None:
        """Note which examples were observed, for :meth:`_conclude`; each part has one row per example."""
        sketch = overlap.Sketch.of(*parts)
        self.observed = sketch if self.observed is None else self.observed + sketch

    def _conclude(self, tally: Tally, delta: float) -> Audit:
        """The audit of all batches, with a warning if their examples were calibrated on."""
        found = self._audit(tally, delta)
        text = "" if tally.sketch is None else overlap.warning_text(self.seen, tally.sketch.keys)
        if not text:
            return found
        warnings.warn(text, overlap.OverlapWarning, stacklevel=3)
        return replace(found, note=f"{found.note} {text}".strip())

    def _mark_fitted(self, report: Report | None) -> None:
        if self._fits and self.observed is not None:
            self.seen.copy_(self.observed.keys)
        self.fitted.fill_(True)
        self.is_fitted = True
        self.report = report

    def _mark_unfitted(self) -> None:
        self.observed = None
        self.seen.fill_(torch.inf)
        self.fitted.fill_(False)
        self.is_fitted = False
        self.report = None

    def membership(self, groups: Optional[Tensor], n: int, like: Tensor) -> Tensor:  # noqa: UP045
        """Membership as float64 (n, a) inside ``forward``: checks shapes alone, so that it scripts and exports."""
        if not self.is_fitted:
            raise RuntimeError("this head is not fitted; call `fit`, or `observe` and `calibrate`, or load its state.")
        if groups is None:
            if self.grouped:
                raise ValueError("`groups` is missing: this head needs a membership of shape (n, num_groups).")
            return torch.ones([n, 1], dtype=torch.float64, device=like.device)
        if not is_scripting():
            self._check_table(groups)
        if groups.dim() != 2 or groups.shape[1] != self.num_groups:
            raise ValueError(f"`groups` must have shape (n, {self.num_groups}), got {groups.shape}")
        return groups.to(torch.float64)

    def _check_table(self, groups: Any) -> None:
        if not isinstance(groups, Tensor):
            raise TypeError(f"`groups` must be a tensor of memberships, got {type(groups).__name__}; use torch.as_tensor.")

    def _check_inputs(self, name: str, value: Any, groups: Any = None, other: str = "groups") -> None:
        """Types, rows and devices of an eager call of ``forward``; compiled and exported ones are left as they are."""
        if torch.compiler.is_compiling():
            return
        if not isinstance(value, Tensor) or not isinstance(groups, Tensor | None):
            wrong, kind = (name, type(value)) if not isinstance(value, Tensor) else (other, type(groups))
            remedy = "give its `.membership`" if kind is Groups else "use torch.as_tensor"
            raise TypeError(f"`{wrong}` must be a tensor, got {kind.__name__}; {remedy}.")
        if groups is not value and not value.is_floating_point():
            raise TypeError(f"`{name}` must be floating point, got {value.dtype}; convert it with `.float()`.")
        for label, given in ((name, value), (other, value if groups is None else groups)):
            if given.layout != torch.strided or given.is_complex():
                raise TypeError(f"`{label}` must be a dense tensor of real numbers, got {given.dtype}, {given.layout}.")
            if given.dim() == 0 or len(given) != len(value):
                raise ValueError(f"`{label}` must have one row per example, as all inputs, got shape {tuple(given.shape)}.")
            if given.device != self.fitted.device:
                raise ValueError(f"`{label}` is on {given.device} but the head is on {self.fitted.device}; use `.to(...)`.")
        if other == "groups" and groups is not None and groups.is_floating_point() and bool(groups.isnan().any()):
            raise ValueError("`groups` has NaN; a membership is 0 or 1.")

    def solve_differentiably(self, *data: Any, **options: Any) -> dict[str, Tensor]:
        """The fitted state as a differentiable function of the scores, where a head has one."""
        raise TypeError(
            f"a {type(self).__name__} has no smooth optimum to differentiate at: its sets depend on its own output, its fit "
            "is a sequence of steps that jump with the scores. Train with `gmc.GMCPenalty.for_head(head)`, fit afterwards."
        )

    def apply_state(self, state: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """What ``forward`` gives with another fitted state; the head itself, fitted or not, stays as it is.

        Args:
            state: of :meth:`solve_differentiably`, or fitted buffers by name; derivatives flow through it.
            args, kwargs: of ``forward``, e.g. ``mode="soft"``.
        """
        unknown = sorted(set(state) - set(self._buffers))
        if unknown:
            raise ValueError(f"`state` has {unknown[0]!r}, which is no buffer of a {type(self).__name__}.")
        for name, value in state.items():
            self._check_buffer(name, value)
        twin = copy.copy(self)
        twin._buffers = {**self._buffers, **state}
        twin.is_fitted = True
        output: Tensor = twin(*args, **kwargs)
        return output

    def _check_buffer(self, name: str, value: Any) -> None:
        own = self._buffers[name]
        assert own is not None
        if not isinstance(value, Tensor) or value.dtype != own.dtype or value.device != own.device:
            kind = f"{value.dtype} on {value.device}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"`state` must have {name!r} as a tensor, {own.dtype} on {own.device}, got {kind}.")
        if name not in self._growing and value.shape != own.shape:
            raise ValueError(f"`state` must have {name!r} of shape {tuple(own.shape)}, got {tuple(value.shape)}.")

    def config(self) -> dict[str, Any]:
        """Arguments that rebuild this head (JSON types)."""
        values = {name: getattr(self, name) for name in self.settings}
        if not self.grouped:
            values["groups"] = None
        return values

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Head":
        """The head that :meth:`config` describes, not fitted."""
        try:
            return cls(**config)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the configuration of this {cls.__name__} cannot be used: {error}") from error

    def extra_repr(self) -> str:
        """Options and state, readable in a notebook."""
        shown = ", ".join(self.groups[:4]) + (", ..." if self.num_groups > 4 else "")
        kind = ", conditional" if self.conditional else ""
        return f"alpha={self.alpha:g}{kind}, groups=[{shown}] ({self.num_groups}), fitted={self.is_fitted}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in self._growing:
            if prefix + name in state_dict:
                old = getattr(self, name)
                setattr(self, name, old.new_empty(state_dict[prefix + name].shape[0], *old.shape[1:]))
        if prefix + "fitted" in state_dict:  # files of version 0.1 have no keys of the calibration data
            state_dict.setdefault(prefix + "seen", torch.full_like(self.seen, torch.inf))
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.is_fitted = bool(self.fitted)


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


class _unchanged_on_error:  # reads as a phrase
    """Put a head's attributes and buffers back if the block raises."""

    def __init__(self, head: Head) -> None:
        self.head = head

    def __enter__(self) -> None:
        self.attributes = dict(self.head.__dict__)
        self.buffers = {k: None if b is None else b.clone() for k, b in self.head._buffers.items()}

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.head.__dict__.update(self.attributes)
            self.head._buffers.update(self.buffers)
