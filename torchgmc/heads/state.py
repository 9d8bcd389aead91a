"""What a head has observed and what was fitted: kept, joined with that of others, forgotten, copied, saved and loaded."""

import copy
import functools
import json
import math
import numbers
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchgmc import distributed
from torchgmc.audits import overlap
from torchgmc.engine import checks, hashing
from torchgmc.engine.clusters import total
from torchgmc.engine.float64 import KEEPING, nearby
from torchgmc.engine.solver import Report
from torchgmc.engine.statistics import PerExample
from torchgmc.heads.contract import PREPARED, Contract

_Same = TypeVar("_Same", bound="State")
#: Options that a state means the same without.
FITTING = frozenset({"alpha", "noise_floor", "init", "resolution", "patterns", "cells"})
#: torch's name for the entry of a state dict that `get_extra_state` returns.
ABOUT = "_extra_state"
#: Buffers of what audits know from calibration.
KNOWN = ("variance", "tail")


class State(Contract):
    """The statistics and the fitted buffers of a head."""

    def __init_subclass__(cls, **options: Any) -> None:
        """What looks at data runs on the CPU where the head's device lacks float64."""
        super().__init_subclass__(**options)
        for name in {"observe", "calibrate", "values", "s_range"} & set(cls.__dict__):
            setattr(cls, name, nearby(cls.__dict__[name]))

    # -- statistics --------------------------------------------------------------------------------------------------

    @property
    def statistics(self) -> Any:
        """Of all batches observed; None before the first example."""
        with KEEPING:
            parts = self.__dict__.get("_parts", ())
            if len(parts) > 1 and isinstance(parts[0], PerExample):  # all at once, so that no row is copied twice
                parts = self._parts = (parts[0].joined(list(parts[1:])),)
            elif len(parts) > 1:  # the smallest first
                parts = self._parts = (functools.reduce(lambda late, early: early + late, reversed(parts)),)
            self.__dict__["_own"] = None
        return parts[0] if parts else None

    @statistics.setter
    def statistics(self, value: Any) -> None:
        self._parts, self.__dict__["_own"] = () if value is None else (value,), None

    def seen(self, one: str = "example") -> Any:
        """:attr:`statistics`; an error, with this word for what a head observes, if there are none."""
        found = self.statistics
        count = int(getattr(found, "examples", getattr(found, "rows", 1)))
        if found is None or not int(distributed.total(torch.tensor(count))):
            raise ValueError(f"no examples observed: call `observe` (or `fit`) with at least one {one} first.")
        return found

    def keep(self, batch: Any, *content: Tensor, keys: Tensor | None = None) -> None:
        """Add a batch's statistics to those of the others; threads may call it at the same time.

        Rows (and cells, of sums over many of them) are joined once the later ones are half as many as those before, so n examples
        are copied O(log n) times each in however many batches they come, and lie in O(log n) pieces; other sums are added at once.

        ``batch``: the statistics. ``content``: scores and truth of the examples, one row each: an audit that sees them again
        warns. ``keys``: their :func:`~torchgmc.audits.overlap.example_keys`, if they are known already.
        """
        if keys is None and content:
            keys = overlap.example_keys(*map(checks.tensor_of, content))
        seen = self.observed
        limit = math.inf if seen is None or seen.salt else seen.limit  # those above would be left out of the sum of both
        self._join(batch, None if keys is None else overlap.Sketch.of_keys(keys, limit))

    def _join(self, batch: Any, sketch: overlap.Sketch | None) -> None:
        with KEEPING:
            parts = [*self.__dict__.get("_parts", ()), batch]
            if len(parts) > 1 and hasattr(batch, "check_alike"):
                parts[0].check_alike(batch)
            while len(parts) > 1 and 2 * _length(parts[-1]) >= _length(parts[-2]):
                late, own = parts.pop(), self.__dict__.get("_own")  # made here, and seen by nobody yet
                if parts[-1] is not own or not hasattr(own, "absorb") or not own.absorb(late):
                    parts[-1] = self.__dict__["_own"] = parts[-1] + late
            self._parts = tuple(parts)
            if sketch is not None:
                self.observed = sketch if self.observed is None else self.observed + sketch

    def merge(self: _Same, *others: "State") -> _Same:
        """Add what other heads observed to what this one did; returns the head.

        The others were made with the same arguments, and observed other examples: in another process, on another machine, last
        week. ``calibrate`` then gives the state of one head that saw all examples, in whatever order heads are merged. The
        fitted state stays as it is until then. All is checked before anything changes.

        Example:
            >>> scores = torch.rand(300)
            >>> parts = [gmc.QuantileHead(target=0.9, alpha=0.01) for _ in range(3)]
            >>> for part, some in zip(parts, scores.split(100)):
            ...     part.observe(some)  # anywhere: joblib, Ray, Dask, Spark
            >>> merged = parts[0].merge(*parts[1:]).calibrate()
            >>> merged().equal(gmc.QuantileHead(target=0.9, alpha=0.01).fit(scores)())
            True
        """
        joined, lacks = self.twin(), False  # of the others; batches that come meanwhile are kept too
        joined.statistics = joined.observed = None
        for place, other in enumerate(others):
            if not isinstance(other, State):
                raise TypeError(f"`merge` takes heads, got {type(other).__name__} in place {place}; load files with gmc.load.")
            why = self._foreign(other)
            if why or any(other is one for one in (self, *others[:place])):
                raise ValueError(f"head {place} cannot be merged: {why or 'its examples would count twice.'}")
            if other.statistics is not None:
                joined._join(distributed.moved(other.statistics, self.fitted.device), None)
            if other.observed is not None:
                joined.observed = other.observed if joined.observed is None else joined.observed + other.observed
            lacks = lacks or other.lacks_statistics
        if joined.statistics is not None:
            self._join(joined.statistics, joined.observed)
        self.lacks_statistics = self.lacks_statistics or lacks
        return self

    def _foreign(self, other: "State") -> str:
        """Why the statistics of another head cannot be added to this one's; empty if they can."""
        if self.kind() != other.kind():
            return f"it is a {other.kind()}, and this is a {self.kind()}."
        for name, (ours, theirs) in self.differences(other).items():
            hint = "; make the groups of all parts from one `Groups`" if name == "groups" else ""
            return f"its `{name}` is {_short(theirs)}, but this head has {_short(ours)}{hint}."
        if other.is_fitted and other.statistics is None:
            return "it is fitted and has no statistics; save it with gmc.save(head, path, statistics=True)."
        if self.prepared_for[:2] != other.prepared_for[:2]:
            return f"it observed for solver, eta = {other.prepared_for[:2]}, and this head for {self.prepared_for[:2]}."
        return ""

    def forget(self: _Same, factor: float) -> _Same:
        """Let the examples observed so far count ``factor`` of what they did, from 1e-6 to 1; returns the head.

        The same as if they had been observed with so much less ``weight``. Call it before the examples of a new week are
        observed, then ``calibrate``. ``finite_sample`` needs examples of equal weight, so such a head forgets all or nothing.
        """
        if isinstance(factor, bool) or not isinstance(factor, numbers.Real) or not 1e-6 <= factor <= 1.0:
            raise ValueError(f"`factor` must be from 1e-6 to 1, got {factor!r}; to forget everything, call `reset`.")
        if factor < 1.0 and getattr(self, "finite_sample", False):
            raise ValueError("`finite_sample` needs examples of equal weight: none can be forgotten in part; omit it, or `reset`.")
        if self.is_fitted and self.statistics is None:
            raise ValueError("this head has no statistics to forget; save it with gmc.save(head, path, statistics=True).")
        with KEEPING:
            self._parts = tuple(part.forget(float(factor)) for part in self._parts)
        return self

    # -- fitted or not -----------------------------------------------------------------------------------------------

    def mark_fitted(self, report: Report | None, everyone: bool = False) -> None:
        """The buffers hold a fitted state; ``everyone``: its tables have a last row for everyone.

        ``report.details["variance"]`` may hold n times the squared standard error of each E[1_A s], ``"tail"`` the largest |s|
        of each direction: audits then bet better.
        """
        about = {} if report is None else report.details
        known = [about.get(name, self.variance[:0]).detach().double().flatten().to(self.fitted.device) for name in KNOWN]
        part, power = torch.frexp(known[1])
        self._buffers |= {"variance": known[0], "tail": torch.ldexp((32.0 * part).ceil() / 32.0, power)}  # nobody's own value
        self.largest_cluster.fill_(largest_cluster(self.statistics))
        self.with_everyone.fill_(everyone)
        self.promises_everyone = everyone
        self.calibrated_on = self.observed if self.fits else None
        self.fitted.fill_(True)
        self.is_fitted = True
        self.report = report

    def mark_unfitted(self) -> None:
        """The buffers hold nothing (those that grow are empty), and no examples were seen."""
        for name in self.zeroed:
            getattr(self, name).zero_()
        for name in (*KNOWN, *self.growing):
            self._buffers[name] = getattr(self, name)[:0].clone()
        self.statistics = None
        self.observed = self.calibrated_on = None
        self.prepared_for, self.lacks_statistics = PREPARED, False
        self.fitted.fill_(False)
        self.is_fitted = False
        self.with_everyone.fill_(self.common and self.grouped)
        self.promises_everyone = self.common and self.grouped
        self.largest_cluster.zero_()
        self.noise_version = hashing.VERSION
        self.report = None

    def reset(self) -> None:
        """Forget the statistics, the fitted state and the report."""
        self.mark_unfitted()

    def twin(self: _Same) -> _Same:
        """A copy with the same statistics that can be calibrated without changing this head."""
        twin = copy.copy(self)
        twin._buffers = {name: None if b is None else b.clone() for name, b in self._buffers.items()}
        return twin

    def now(self: _Same) -> _Same:
        """This head as it is at this moment: `fit` and `calibrate` replace the table of buffers, they do not write to it."""
        now, self.__dict__["_own"] = object.__new__(type(self)), None
        now.__dict__ = self.__dict__.copy()
        return now

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy: it shares statistics with this head, which are not added to in place from now on."""
        with KEEPING:
            self.__dict__["_own"] = None
            return self.__dict__.copy()

    def check_state(self, fitted: bool = False) -> None:
        """Raise if a fitted number is not finite: its answers would be NaN, which audits leave out; or if it must be fitted."""
        if fitted and not self.is_fitted:
            raise RuntimeError("this head is not fitted; call `fit`, or `observe` and `calibrate`, or load its state.")
        why = self._refuse(dict(self._buffers), "") if self.is_fitted else ""
        if why:
            raise ValueError(f"the state of this {type(self).__name__} cannot be used: {why}; fit it again.")

    def differences(self, other: "State") -> dict[str, tuple[Any, Any]]:
        """Options in which another head differs, and both values; lists of words have an order, which == ignores."""
        mine, its = (one.config() | {"noise_version": one.noise_version} for one in (self, other))
        pairs = {name: (mine.get(name), its.get(name)) for name in mine | its}  # options that are off may be left out
        return {name: pair for name, pair in pairs.items() if len({json.dumps(one, default=str) for one in pair}) > 1}

    def same_state(self, other: "State") -> bool:
        """Would both give the same output: the same kind, options and fitted buffers?"""
        if self.kind() != other.kind() or self.differences(other) or set(self._buffers) != set(other._buffers):
            return False
        return all(torch.equal(a, b.to(a.device)) for a, b in zip(self.buffers(), other.buffers(), strict=True))

    def apply_state(self, state: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """What ``forward`` returns with another fitted state; the head itself, fitted or not, does not change.

        ``state``: of :meth:`solve_differentiably`, or fitted buffers by name; derivatives flow through it. ``args``,
        ``kwargs``: of ``forward``, e.g. ``mode="soft"``.
        """
        unknown = sorted(set(state) - set(self._buffers))
        if unknown:
            raise ValueError(f"`state` has {unknown[0]!r}, which is not a buffer of {type(self).__name__}.")
        for name, value in state.items():
            own = self._buffers[name]
            assert own is not None
            if not isinstance(value, Tensor) or value.dtype != own.dtype or value.device != own.device:
                kind = f"{value.dtype} on {value.device}" if isinstance(value, Tensor) else type(value).__name__
                raise TypeError(f"`state` must have {name!r} as a tensor, {own.dtype} on {own.device}, got {kind}.")
            if name not in self.growing and value.shape != own.shape:
                raise ValueError(f"`state` must have {name!r} of shape {tuple(own.shape)}, got {tuple(value.shape)}.")
        twin = copy.copy(self)
        twin._buffers = {**self._buffers, **state}
        twin.is_fitted = True
        return twin(*args, **kwargs)  # type: ignore[no-any-return]

    # -- files -------------------------------------------------------------------------------------------------------

    def get_extra_state(self) -> Tensor:
        """What a state dict says of its head: the options that the meaning of the state depends on, as JSON in bytes."""
        about = {name: value for name, value in self.config().items() if name not in FITTING}
        return _as_bytes(about | {"kind": self.kind(), "noise_version": self.noise_version})

    def set_extra_state(self, state: Any) -> None:
        """Nothing: :meth:`_load_from_state_dict` reads it before anything is changed."""

    def _refuse(self, state_dict: Mapping[str, Any], prefix: str) -> str:
        """Why a state cannot be this head's; empty if it can."""
        about = state_dict.get(prefix + ABOUT)
        if about is not None:
            found, own = read_about(about), read_about(self.get_extra_state())
            if found.get("noise_version", 1) not in hashing.VERSIONS:
                return f"it draws its noise in a way ({_short(found['noise_version'])}) that a later torchgmc knows; upgrade"
            for name in sorted(set(found) & set(own) - {"noise_version"}):
                if json.dumps(found[name]) != json.dumps(own[name]):  # lists of words have an order, which == ignores
                    return f"it belongs to a head with {name} = {_short(found[name])}, and this one has {_short(own[name])}"
        state = {name: state_dict.get(prefix + name) for name in self._buffers}
        for name, value in state.items():
            buffer = self._buffers[name]
            if not isinstance(value, Tensor) or buffer is None:
                continue
            grows = bool(value.dim()) and name in (*self.growing, *KNOWN)
            shape = (len(value), *buffer.shape[1:]) if grows else tuple(buffer.shape)
            if tuple(value.shape) != shape:
                return f"{name!r} has the shape {tuple(value.shape)}, and this head's {shape} (size mismatch)"
            if value.is_meta:
                continue
            if value.is_floating_point() and bool((value.isnan() if name in self.unbounded else ~value.isfinite()).any()):
                return f"{name!r} holds a number that is not finite"
            if value.is_floating_point() and name not in self.unbounded and bool((value.abs() > self.largest_number).any()):
                return f"{name!r} holds {float(value.abs().max()):.3g}, too large a number to compute with"
            limit = self.index_limits().get(name)
            if limit is not None and value.numel() and not 0 <= int(value.min()) <= int(value.max()) < limit:
                return f"{name!r} must hold indices from 0 to {limit - 1}, got {int(value.min())} to {int(value.max())}"
        for kind, parts in (("log", ("log_who", "log_what", "log_step", "log_column")), ("table", ("known", "table"))):
            lengths = {name: len(value) for name in parts if isinstance(value := state.get(name), Tensor) and value.dim()}
            if len(set(lengths.values())) > 1:
                return f"the parts of its {kind} differ in length: {lengths}"
            if kind == "table" and 0 in lengths.values() and getattr(self, "finite_sample", False) and bool(state["fitted"]):
                return "its table of thresholds is empty"
        return self.misfit({name: value for name, value in state.items() if isinstance(value, Tensor)})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for old, new in self.renamed.items():
            if prefix + old in state_dict:
                state_dict[prefix + new] = state_dict.pop(prefix + old)
        if prefix + "fitted" in state_dict:  # files of version 0.1 have no promise for everyone, nor later buffers
            state_dict.setdefault(prefix + "with_everyone", torch.tensor(False))
            state_dict.setdefault(prefix + "largest_cluster", torch.zeros_like(self.largest_cluster))
            for name in KNOWN:
                state_dict.setdefault(prefix + name, self.variance[:0])
            for name in self.added:
                state_dict.setdefault(prefix + name, torch.zeros_like(getattr(self, name)))
        state_dict.pop(prefix + "seen", None)  # keys of the calibration data, which files of version 0.1 held
        why = self._refuse(state_dict, prefix)
        if why:
            args[-1].append(f"the state{' of ' + repr(prefix.rstrip('.')) if prefix else ''} cannot be loaded: {why}.")
            return
        for name in (*self.growing, *KNOWN):
            if prefix + name in state_dict:
                old = getattr(self, name)
                setattr(self, name, old.new_empty(state_dict[prefix + name].shape[0], *old.shape[1:]))
        about = state_dict.setdefault(prefix + ABOUT, _as_bytes({"noise_version": 1}))  # version 0.1 had none
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.noise_version = int(read_about(about).get("noise_version", 1))
        self.is_fitted = bool(self.fitted)
        self.promises_everyone = bool(self.with_everyone)
        self.lacks_statistics = self.is_fitted and self.statistics is None


def largest_cluster(statistics: Any) -> float:
    """Largest weight of a cluster among examples observed; 0 if they came without clusters."""
    cluster, sums = getattr(statistics, "cluster", None), getattr(statistics, "clusters", None)
    if isinstance(cluster, Tensor) and cluster.shape[1]:
        weight = statistics.weight if hasattr(statistics, "weight") else statistics.mass.amax(1)
        return distributed.extremes(torch.cat([total(weight.double(), cluster), weight.new_zeros(1).double()]))[1]
    return 0.0 if sums is None or not len(sums.mass) else float(sums.mass[:, -1].max())


def _length(part: Any) -> int:
    """Rows, or cells: sums over few of them are quickly added."""
    cells = int(getattr(part, "num_cells", 0))
    return max(cells, 16) if cells else int(getattr(part, "rows", 0))


def _as_bytes(about: dict[str, Any]) -> Tensor:
    return torch.tensor(list(json.dumps(about, default=str).encode()), dtype=torch.uint8)


def read_about(about: Any) -> dict[str, Any]:
    """What :meth:`Head.get_extra_state` wrote; empty if it cannot be read."""
    try:
        found = json.loads(bytes(about.to(torch.uint8).tolist()))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return {}
    return found if isinstance(found, dict) else {}


def _short(value: Any) -> str:
    text = "None" if value is None else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
