"""A head: the contract, its state, and what follows from both: fit, audit, and calls with every kind of input."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Optional, TypeVar

import torch
from torch import Tensor

from torchgmc import distributed
from torchgmc.audits import measure
from torchgmc.audits.audit import Audit
from torchgmc.engine import checks
from torchgmc.engine.float64 import wide
from torchgmc.engine.scripting import has_values, is_scripting, is_tracing
from torchgmc.groups.columns import is_frame
from torchgmc.groups.groups import Groups, check_groups, no_membership
from torchgmc.heads.state import State

_Same = TypeVar("_Same", bound="Head")
#: Arguments of which a frame is columns by name; of others it is a matrix.
COLUMNS = ("groups", "features")
#: How far beyond its range a probability may be by rounding, as a share of the range.
ROOM = 1e-3


class Head(State):
    """A small module behind a trained model, fitted so that a promise holds for every group at once.

    What a subclass must provide and may say is in :class:`torchgmc.heads.contract.Contract`; what it has observed and what was
    fitted in :class:`torchgmc.heads.state.State`.
    """

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Head":
        """The head that :meth:`config` describes, not fitted."""
        kept = {name: value for name, value in config.items() if name != "splits"}  # an option of version 0.1
        try:
            return cls(**kept)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the configuration of this {cls.__name__} cannot be used: {error}") from error

    # -- fit and audit -----------------------------------------------------------------------------------------------

    def fit(
        self: _Same, *data: Any, solver: str = "exact", eta: float | None = None, max_iter: int | None = None, **options: Any
    ) -> _Same:
        """:meth:`fit_batches` with one batch, passed as to ``observe``; returns the head."""
        return self.fit_batches((self.bind(*data, **options) for _ in range(1)), solver, eta, max_iter)  # errors reach all ranks

    def fit_batches(
        self: _Same, batches: Iterable[Any], solver: str = "exact", eta: float | None = None, max_iter: int | None = None
    ) -> _Same:
        """Fit from data that come in batches; returns the head.

        Each batch becomes statistics and is forgotten. Until the fit is done, the head stays as it was: a fit that raises
        changes nothing, and another thread may go on using the old state. Under ``torch.distributed`` every rank passes its own
        batches and ends with the same state; an error on one rank is raised on all.

        Args:
            batches: an iterable of tuples, or mappings, of the arguments of ``observe``: a ``DataLoader``, a generator.
            solver: ``"exact"``, ``"paper"`` (Algorithm 1) or ``"fresh"`` (Algorithm 2).
            eta: fixed step of the latter two.
            max_iter: maximum number of steps.

        Example:
            >>> masks = torch.rand(200, 8, 8) < 0.5
            >>> scores = torch.sigmoid(2 * masks + torch.randn(200, 8, 8))
            >>> head = gmc.ThresholdHead(target=0.1, alpha=0.01)
            >>> head.fit_batches(zip(scores.split(64), masks.split(64))).report.converged
            True
        """
        with distributed.together(lambda: distributed.signature(self, solver, eta, max_iter)):
            fresh = self.twin()
            fresh.reset()
            fresh.prepare(solver, eta, max_iter)
            for batch in self.bind_each(batches):
                fresh.observe(**batch)
            fresh.calibrate(solver=solver, eta=eta, max_iter=max_iter)
        self.__dict__.update(fresh.__dict__)
        return self

    def audit(
        self, *batch: Any, delta: float = 0.05, method: str = "exact", cluster_size: float | None = None, **named: Any
    ) -> Audit:
        """Measure the promise on held-out data, passed as to ``observe``, with intervals that hold for every g at once.

        Args:
            batch, named: arguments of ``observe``; some heads take more, to measure costs.
            delta: 1 - confidence.
            method: ``"exact"`` or ``"asymptotic"``, see :func:`torchgmc.audit`.
            cluster_size: largest number of examples of a cluster, where ``clusters`` are given.

        Returns:
            The audit: a row per g, worst first, the certificate, and what the promise cost.
        """
        return measure.audit(self, (self.bind(*batch, **named) for _ in range(1)), delta, method=method, cluster_size=cluster_size)

    def bind(self, *batch: Any, **named: Any) -> dict[str, Any]:
        """A batch by the names of the arguments of ``observe`` (and ``audit``)."""
        known = (*self.arguments, *self.audit_only)
        wanted = ", ".join(f"`{name}`" for name in known)
        if len(batch) > len(known):
            raise TypeError(f"a batch must be {wanted}, as for `observe`, got {len(batch)} entries.")
        found = dict(zip(known, batch, strict=False))
        for name in named:
            if name not in known or name in found:
                why = "is passed twice" if name in found else "is unknown"
                raise TypeError(f"`{name}` {why}: a batch of a {type(self).__name__} is {wanted}.")
        found |= named
        missing = [name for name in (known[0], self.truth) if name and name not in found]
        if missing:
            raise TypeError(f"`{missing[0]}` is missing: a batch of a {type(self).__name__} is {wanted}.")
        ready = {name for name, one in found.items() if isinstance(one, Tensor) or (name in COLUMNS and is_frame(one))}
        return {name: one if name in ready else checks.tensor_of(one) for name, one in found.items()}

    def bind_each(self, batches: Any) -> Iterator[dict[str, Any]]:
        """:meth:`bind_batch` of the batches one by one; a single batch is accepted too."""
        if isinstance(batches, Mapping) or (isinstance(batches, tuple | list) and batches and isinstance(batches[0], Tensor)):
            batches = [batches]
        if isinstance(batches, Tensor | str) or not isinstance(batches, Iterable):
            kind = type(batches).__name__
            raise TypeError(f"`batches` must be an iterable of batches, or a tuple of tensors for one, got {kind}.")
        return (self.bind_batch(batch, place) for place, batch in enumerate(batches))

    def bind_batch(self, batch: Any, place: int = 0) -> dict[str, Any]:
        """:meth:`bind` for a tuple or mapping out of many."""
        if isinstance(batch, Mapping):
            return self.bind(**batch)
        if isinstance(batch, tuple | list):
            return self.bind(*batch)
        if isinstance(batch, Tensor) and len(self.arguments) - ("weight" in self.arguments) <= 2 and not self.truth:
            return self.bind(batch)  # loaders of one tensor
        raise TypeError(
            f"batch {place} of `batches` must be a tuple of {', '.join(self.arguments)}, or a mapping from these names, "
            f"got {type(batch).__name__}."
        )

    # -- inputs ------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``forward``. Groups, frames of group columns and arrays become tensors first.

        All of a call sees one state: another thread may fit the head meanwhile.
        """
        if torch.compiler.is_compiling() or is_tracing():
            return super().__call__(*args, **kwargs)
        args = tuple(self._as_tensor(value, "groups" if k or self.takes == "groups" else "") for k, value in enumerate(args))
        kwargs = {name: self._as_tensor(value, name) for name, value in kwargs.items()}
        return super(Head, self.now()).__call__(*args, **kwargs)

    def _as_tensor(self, value: Any, name: str = "groups") -> Any:
        if isinstance(value, Tensor | str | int | float | None):
            return value
        if isinstance(value, Groups) or (name in COLUMNS and is_frame(value)):
            found = self.by_name(value).float() if name == "features" else self.members_of(value)
            return found.to(self.fitted.device)
        return checks.tensor_of(value)

    def check_groups(self, groups: Any, n: int, device: torch.device) -> Tensor:
        """Membership (n, a), bool (float64 of a ``fractional`` head), on the device of the scores."""
        if groups is None and not self.grouped:
            return torch.ones(n, 1, dtype=torch.float64 if self.fractional else torch.bool, device=device)
        if groups is None:
            raise ValueError(
                f"`groups` is missing: this head was made for {self.num_groups} groups ({checks.listing(self.groups, 4)}); pass a "
                f"membership of shape (n, {self.num_groups})."
            )
        if is_frame(groups):
            groups = self.transform(groups).to(device)
        member = check_groups(groups, n, self.groups, bool(self.fractional))
        if member.device != device:
            raise ValueError(f"`groups` is on {member.device} but `scores` is on {device}; move them to one device.")
        return member

    def members_of(self, groups: Any) -> Tensor:
        """Membership ``(n, a)``, bool, from Groups of the same names, or from columns by the Groups this head was made with."""
        return check_groups(groups, groups.num_rows, self.groups) if isinstance(groups, Groups) else self.transform(groups)

    def transform(self, columns: Any, unknown: str = "error") -> Tensor:
        """Membership of new rows, bool ``(n, a)``, from their columns; for a head whose file says how groups follow from them.

        Args:
            columns: a mapping from name to values, or a frame; see :meth:`torchgmc.Groups.transform`.
            unknown: an unseen label: "error" raises, "none" leaves the row out of the groups of this column.
        """
        if self.named_groups is None:
            raise ValueError(
                f"this {type(self).__name__} cannot compute its groups from columns: it was saved without them. "
                "Save it with `gmc.save(head, path, groups=groups)`, or use `groups.transform(columns).membership`."
            )
        return self.named_groups.transform(columns, unknown).membership.to(self.fitted.device)

    def membership(self, groups: Optional[Tensor], n: int, like: Tensor) -> Tensor:
        """Membership as :func:`wide` numbers (n, a) inside ``forward``: checks only shapes, so that it scripts and exports.

        ``n``: of the scores; -1 where there are none beside ``groups``. ``like``: where rows of 1 are made without ``groups``.
        """
        if not self.is_fitted:
            raise RuntimeError("this head is not fitted; call `fit`, or `observe` and `calibrate`, or load its state.")
        if groups is None:
            if self.grouped:
                raise ValueError("`groups` is missing: this head needs a membership of shape (n, num_groups).")
            return wide(torch.ones([n, 1], device=like.device))
        if not is_scripting():
            groups = self.check_member(groups)
        if groups.dim() != 2 or groups.shape[1] != self.num_groups or (n >= 0 and groups.shape[0] != n):
            raise ValueError(f"`groups` must have shape (n, {self.num_groups}), one row per example, got {groups.shape}")
        return wide(groups)

    def check_input(self, name: str, value: Any, rows: Any = None, hint: str = "", features: Any = None) -> None:
        """Type, device, rows and values of a floating input of an eager call; NaN would become an answer.

        ``name``, ``value``: the input. ``rows``: another input, which must have as many rows. ``hint``: what to do about
        numbers outside :meth:`input_range` (up to rounding); empty if any number will do. ``features``: of a head that learns.
        """
        if torch.compiler.is_compiling():
            return
        if not isinstance(value, Tensor):
            raise TypeError(f"`{name}` must be a tensor, got {type(value).__name__}; use torch.as_tensor.")
        if not value.is_floating_point():
            raise TypeError(f"`{name}` must be floating point, got {value.dtype}; convert it with `.float()`.")
        self._check_place(name, value)
        if isinstance(rows, Tensor) and (rows.dim() == 0 or len(rows) != len(value)):
            raise ValueError(f"`groups` must have one row per example, like all inputs, got shape {tuple(rows.shape)}.")
        if not has_values(value):
            return
        if features is not None or (self.learns and self.is_fitted and name != "base"):
            self.check_features(features, len(value), value.device)
        if not value.numel():
            return
        least, most = (float(v) for v in value.detach().aminmax())  # one pass; NaN comes through
        if least != least:
            place = value.isnan().nonzero()[0].tolist()
            raise ValueError(f"`{name}` must not be NaN, but {name}{place} is; check the model for overflow.")
        low, high = self.input_range()
        room = ROOM * (high - low)
        if hint and (least < low - room or most > high + room):
            raise ValueError(f"`{name}` must lie in [{low:g}, {high:g}], got {least:.4g} to {most:.4g}; {hint}.")

    def check_member(self, groups: Any) -> Any:
        """A membership as a tensor, from Groups, a frame of group columns or an array too; in an eager call all is 0 or 1.

        Of a ``fractional`` head, from 0 to 1.
        """
        if torch.compiler.is_compiling():
            return groups
        groups = self._as_tensor(groups)
        if not isinstance(groups, Tensor):
            raise TypeError(f"`groups` must be a tensor of memberships, got {type(groups).__name__}; use torch.as_tensor.")
        self._check_place("groups", groups)
        if groups.dtype == torch.bool or not has_values(groups):
            return groups
        wrong = no_membership(groups, bool(self.fractional))
        if bool(wrong.any()):
            raise ValueError(
                f"`groups` must hold memberships, {'from 0 to 1' if self.fractional else '0 or 1'}, but it holds "
                f"{groups[wrong][0].item()}; for a mask of 0 and 255 pass `groups > 0`"
                f"{', for probabilities make the head with fractional=True' if self.fractional is False else ''}."
            )
        return groups

    def _check_place(self, name: str, value: Tensor) -> None:
        if value.layout != torch.strided or value.is_complex():
            raise TypeError(f"`{name}` must be a dense tensor of real numbers, got {value.dtype}, {value.layout}.")
        if value.dim() == 0:
            raise ValueError(f"`{name}` must have one row per example, got a single number.")
        if value.device != self.fitted.device:
            raise ValueError(f"`{name}` is on {value.device} but the head is on {self.fitted.device}; use `.to(...)`.")
