"""The contract of a head: what it must provide, and all that follows from it."""

import copy
import functools
import json
import math
import operator
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Optional, TypeVar

import torch
from torch import Tensor

from torchgmc import distributed
from torchgmc.audits import measure, overlap
from torchgmc.audits.audit import Audit
from torchgmc.audits.tabular import Table
from torchgmc.engine import checks, hashing
from torchgmc.engine.batches import each
from torchgmc.engine.clusters import total
from torchgmc.engine.float64 import Float64Module, at_hand, lacks, wide
from torchgmc.engine.scripting import has_values, is_scripting, is_tracing
from torchgmc.engine.solver import SOLVERS, Report
from torchgmc.engine.statistics import PerExample
from torchgmc.engine.values import Names, Values
from torchgmc.groups.cells import with_everyone
from torchgmc.groups.columns import is_frame
from torchgmc.groups.groups import Groups, check_groups, no_membership
from torchgmc.heads.task import Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Same = TypeVar("_Same", bound="Head")
#: Options that a state means the same without.
FITTING = frozenset({"alpha", "noise_floor", "init", "resolution", "patterns", "cells"})
#: Arguments of which a frame is columns by name; of others it is a matrix.
COLUMNS = ("groups", "features")
#: torch's name for the entry of a state dict that `get_extra_state` returns.
ABOUT = "_extra_state"
#: Buffers of what audits know from calibration.
KNOWN = ("variance", "tail")
#: Name of the row for everyone.
EVERYONE = "everyone"
#: Arguments of `prepare` if nobody calls it.
PREPARED = ("exact", None, None)
#: How far beyond its range a probability may be by rounding, as a share of the range.
ROOM = 1e-3
#: Held while statistics are added: several threads may observe.
_KEEPING = threading.RLock()


class Head(Float64Module):
    """A small module behind a trained model, fitted so that a promise holds for every group at once.

    A subclass must provide

    - ``observe(...)``: a batch becomes statistics, passed to :meth:`keep`, and is forgotten. They are a dataclass with
      ``__add__`` whose fields are new tensors (the caller may overwrite the batch); their sum is ``self.statistics``.
      Statistics that keep something of every example say of how many in ``rows``; they are in files, and can be forgotten, if
      the head says their class in ``keeps`` and they have ``layout`` and ``forget``
      (:class:`~torchgmc.engine.statistics.PerExample` has both);
    - ``calibrate(...)``: ``self.statistics`` become fitted buffers. It ends with :meth:`mark_fitted`. Decorated with
      :func:`torchgmc.distributed.pooled` it finds the statistics of all ranks;
    - ``forward(...)``: buffers change an output;
    - ``reset()``: buffers as they were before the fit; it ends with :meth:`mark_unfitted`;
    - ``values(...)``: what the promise is about, s and who, on a batch.

    From these follow ``fit``, ``fit_batches``, ``audit``, reports, metrics, penalties, monitoring, saving, attaching and
    exporting. A subclass may also set the class attributes below and override the methods of the second part.

    Args:
        alpha: largest violation allowed; None for as small as the sample can resolve.
        groups: names of the groups, in the order of the columns of the membership; None for one group, "all".
        conditional: g = 1_A / P(A), so that alpha bounds each group's own deviation, not the mass-weighted one.
        jitter: half-width of the tie-breaking noise, drawn from the input itself.
        noise_floor: solver ``"exact"`` goes as far as the sample can be trusted (:mod:`torchgmc.engine.noise`), and alpha is
            what the report, the audit and the gate compare with. False: it goes to alpha on the sample, noise included.
    """

    fitted: Tensor
    with_everyone: Tensor
    variance: Tensor
    tail: Tensor
    largest_cluster: Tensor
    #: Arguments of ``__init__`` that rebuild the head; their values are written to saved files.
    settings: ClassVar[tuple[str, ...]] = ("alpha", "groups", "conditional", "jitter")
    #: Of them, those that matter for a fit only: heads that differ in them have the same ``forward``.
    fit_only: ClassVar[tuple[str, ...]] = ("alpha", "conditional", "noise_floor")
    #: Names of what ``observe`` takes, in order: what comes from the model, the truth if there is one, groups, weight.
    arguments: ClassVar[tuple[str, ...]] = ("scores", "groups", "weight")
    #: Which of them is the truth; empty if the head learns without.
    truth: ClassVar[str] = ""
    #: Names of what else ``audit`` takes, to measure costs.
    audit_only: ClassVar[tuple[str, ...]] = ()
    #: What ``forward`` takes of the model: ``"scores"`` as they are, ``"probs"``, ``"logits"``, or only ``"groups"``.
    takes: str = "scores"
    #: The groups do not depend on f: each must have examples.
    static: bool = True
    #: The fit has a term for everyone, and solver ``"exact"`` promises everyone too: a last row of every table.
    common: ClassVar[bool] = False
    #: The promise compares with everybody's mean: :attr:`Values.mean` is set.
    relative: ClassVar[bool] = False
    #: s takes the two ends of its range only (covered or not).
    two_valued: ClassVar[bool] = False
    #: Memberships may be numbers m from 0 to 1: the promise is then about E[m_A(x) s]. None: the head has no such option.
    fractional: Optional[bool] = None
    #: ``forward`` takes the probability of one event, ``(n,)``.
    one_event: bool = False
    #: The columns of ``probs (n, C)`` are classes, of which one holds; False: labels, of which several may.
    exclusive: bool = True
    #: The output has a dimension of classes (or labels), and how many there are.
    per_class: bool = False
    columns: int = 1
    #: Buffers that grow in a fit along their first dimension (a log); a saved state may be of any length.
    growing: ClassVar[tuple[str, ...]] = ()
    #: Buffers that older files do not have; 0 there.
    added: ClassVar[tuple[str, ...]] = ()
    #: Buffers that older files call otherwise: from the old name to the new.
    renamed: ClassVar[dict[str, str]] = {}
    #: Buffers in which infinity means something. Any other number that is not finite is an error when a state is loaded.
    unbounded: ClassVar[tuple[str, ...]] = ()
    #: No other number of a state may be larger: there ``forward`` would overflow.
    largest_number: ClassVar[float] = float("inf")
    #: Options that say how large the state is, and the buffer that is at least so large: a file is asked before a head is made.
    sized: ClassVar[dict[str, str]] = {}
    #: Classes of its statistics, and of what they consist of: a file may hold these and no others.
    keeps: ClassVar[tuple[type, ...]] = ()
    #: Does ``calibrate`` fit something to the data? If not, an audit may use the same data.
    fits: ClassVar[bool] = True
    #: How the command line calibrates it; None for a head that is used from Python.
    task: ClassVar[Optional[Task]] = None
    __jit_unused_properties__: ClassVar[list[str]] = ["statistics", "member_argument", "needs_groups", "may_take_groups"]

    def __init__(
        self, alpha: float | None, groups: Any = None, conditional: bool = False, jitter: float = 0.0, noise_floor: bool = True
    ) -> None:
        super().__init__()
        self.alpha = None if alpha is None else checks.positive("alpha", alpha, "It is the largest violation allowed.")
        self.noise_floor = checks.flag("noise_floor", noise_floor)
        if self.alpha is None and not self.noise_floor:
            raise ValueError("alpha=None means as small as the sample can resolve, which needs noise_floor=True.")
        self.groups = checks.names(groups)
        self.num_groups = len(self.groups)
        self.grouped = groups is not None  # without groups, `groups` may be left out of every call
        self.conditional = checks.flag("conditional", conditional)
        if not isinstance(jitter, int | float) or not 0.0 <= jitter < float("inf"):
            raise ValueError(f"`jitter` must be a finite half-width of at least 0, got {jitter!r}.")
        self.jitter = float(jitter)
        self.noise_version = hashing.VERSION  # of the noise that breaks ties; a loaded head keeps that of its fit
        self.register_buffer("fitted", torch.tensor(False))
        self.register_buffer("with_everyone", torch.tensor(self.common and self.grouped))
        self.promises_everyone = self.common and self.grouped  # mirrors the buffer
        # For audits: n times the squared standard error of each violation in calibration (empty: unknown), in the order of
        # `test_functions`, the largest |s| of each direction (empty: unknown), rounded up, and the largest weight of a
        # cluster (0: there were none). Exported programs do not hold them.
        self.register_buffer("variance", torch.zeros(0, dtype=torch.float64))
        self.register_buffer("tail", torch.zeros(0, dtype=torch.float64))
        self.register_buffer("largest_cluster", torch.tensor(0.0, dtype=torch.float64))
        self.is_fitted = False  # mirrors the buffer: forward may read it without looking at a tensor's value
        self.report: Optional[Report] = None
        self._parts: tuple[Any, ...] = ()  # statistics, see `keep`
        self.prepared_for: tuple[Any, Any, Any] = PREPARED  # arguments of `prepare`
        self.lacks_statistics = False  # the fitted state is of examples whose statistics are not here
        self.observed: overlap.Sketch | None = None  # keys of the examples observed by this process
        self.calibrated_on: overlap.Sketch | None = None  # keys of the calibration data; in no file unless asked for
        #: How to compute its groups from columns, if it was made with Groups or its file says how; without rows.
        self.named_groups: Groups | None = Groups.from_dict(groups.to_dict()) if isinstance(groups, Groups) else None

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """As torch does; a tensor made in inference mode becomes an ordinary one, which a later fit may overwrite."""
        with torch.inference_mode(False):
            super().register_buffer(name, tensor.clone() if tensor is not None and tensor.is_inference() else tensor, persistent)

    @property
    def member_argument(self) -> str:
        """The argument that says who is in which group."""
        return "groups" if "groups" in self.arguments else "x"

    @property
    def needs_groups(self) -> bool:
        """Must every call pass a membership?"""
        return self.grouped and (self.static or "groups" in self.arguments)

    @property
    def may_take_groups(self) -> bool:
        """May a call pass something that the sets are computed from?"""
        return not self.static and "x" in self.arguments

    # -- what a subclass must provide -----------------------------------------------------------------------------------

    def observe(self, *args: Any, **kwargs: Any) -> None:
        """Turn a batch into statistics and forget the batch."""
        raise NotImplementedError  # abstract

    def calibrate(self, solver: str = "exact", eta: float | None = None, max_iter: int | None = None) -> "Head":
        """Run the solver on the statistics and write the fitted buffers."""
        raise NotImplementedError  # abstract

    def reset(self) -> None:
        """Forget the statistics, the fitted state and the report."""
        self.mark_unfitted()

    def values(self, *args: Any, **kwargs: Any) -> Values:
        """s and who of a batch, from the arguments of ``observe`` without ``weight``.

        At the fitted f, or at f0 before the fit. ``softness=None`` returns the hard values that the promise is about; a number
        is the width of soft steps, for values with a derivative.
        """
        raise NotImplementedError(f"a {type(self).__name__} does not say what its promise is about; implement `values`.")

    # -- what a subclass may say -------------------------------------------------------------------------------------

    def test_functions(self) -> Names:
        """Names of the sets and of the directions: the rows and columns of every table of violations."""
        return Names(self.promised_groups(), [""])

    def class_names(self, columns: int = 0) -> list[str]:
        """Names of the classes, or labels, of the output, or of as many ``columns``; an empty one where there are none."""
        kind, count = "class" if self.exclusive else "label", columns or self.columns
        return [f"{kind} {c}" for c in range(count)] if self.per_class or count > 1 else [""]

    def promised_groups(self) -> list[str]:
        """Names of the groups, and of everyone where that is a separate promise."""
        return [*self.groups, EVERYONE] if self.promises_everyone else self.groups

    def lacks_everyone(self, member: Tensor) -> bool:
        """Is no group everyone, so that everyone is a separate promise? From the membership ``(n, a)`` of all examples."""
        parts = (member[start : start + (1 << 13)] for start in range(0, len(member), 1 << 13))
        outside = sum(((part < 1).sum(0) for part in parts), torch.zeros_like(member[:1].sum(0)))
        outside = distributed.total(outside)
        return self.grouped and not bool((outside == 0).any())

    def promised(self, member: Tensor) -> Tensor:
        """Membership in :meth:`promised_groups` ``(n, a)``, from that in the groups."""
        return with_everyone(member) if self.promises_everyone else member

    def s_range(self) -> tuple[Any, Any] | None:
        """Smallest and largest s that can occur: numbers, or tensors ``(u,)``. None if unknown: then the data tell.

        Of a promise about everybody's mean, the range before the mean is taken off.
        """
        return None

    def s_target(self) -> Tensor | float:
        """What was subtracted from the risk to get s: a number, or ``(u,)``; tables show both."""
        return 0.0

    def input_range(self) -> tuple[float, float]:
        """Where the numbers that ``forward`` takes of the model must lie."""
        return -math.inf, math.inf

    def softness(self) -> float:
        """Default width of a soft step."""
        return 0.1

    def audit_sums(self, weight: Tensor, **batch: Any) -> dict[str, Tensor]:
        """Sums over a batch from which costs follow; they are added over batches."""
        return {}

    def audit_rows(self, **batch: Any) -> dict[str, Tensor]:
        """Numbers per example that :meth:`audit_summary` needs in addition to s, first dimension n."""
        return {}

    def audit_summary(self, tally: measure.Tally) -> dict[str, Any]:
        """Parts of an :class:`~torchgmc.Audit` that this head knows about: ``cost``, ``note``, ``details``, ``columns``."""
        return {}

    def audit_measures(self, tally: measure.Tally) -> dict[str, tuple[Tensor, tuple[float, float] | None]]:
        """Named means for :meth:`torchgmc.Audit.measures`: a value per example ``(n,)``, NaN where it has none, and its range.

        Of predictions ``"p"`` and outcomes ``"y"`` among :meth:`audit_rows`, in [0, 1], calibration errors follow.
        """
        return {}

    def group_thresholds(self, member: Tensor, fitted: bool = True) -> Tensor:
        """Threshold of each membership ``(c, a)``, ``(c, C)`` on the CPU, where it depends on the groups only; or f0's."""
        raise TypeError(f"the output of a {type(self).__name__} is not a threshold per combination of groups.")

    def figures(self, audit: Audit | None) -> dict[str, "Callable[[bool], Figure]"]:
        """Figures of what was fitted, for the report: from a caption to a function of ``dark`` that draws."""
        return {}

    def tables(self, audit: Audit | None) -> list[Table]:
        """Tables of what was fitted, for the report."""
        return []

    def prepare(self, solver: str, eta: float | None, max_iter: int | None) -> None:
        """Choose the statistics that a solver needs, before the first batch. An override calls this one too."""
        self.check_solver(solver, eta, max_iter)
        self.prepared_for = (solver, eta, max_iter)

    def sizes(self) -> dict[str, int]:
        """Sizes that the shapes of its statistics depend on; see :func:`torchgmc.engine.statistics.check_layout`."""
        return {"a": self.num_groups, "fractional": int(bool(self.fractional))}

    # -- fit ---------------------------------------------------------------------------------------------------------

    def fit(
        self: _Same, *data: Any, solver: str = "exact", eta: float | None = None, max_iter: int | None = None, **options: Any
    ) -> _Same:
        """:meth:`fit_batches` with one batch, passed as to ``observe``; returns the head."""
        return self.fit_batches([self.bind(*data, **options)], solver, eta, max_iter)

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
        with distributed.together():
            if distributed.active():
                distributed.agree(distributed.signature(self, solver, eta, max_iter))
            fresh, place = self.twin(), self.fitted.device
            if lacks(place):
                fresh.to("cpu")
            fresh.reset()
            fresh.prepare(solver, eta, max_iter)
            for number, batch in enumerate(each(batches)):
                fresh.observe(**self.bind_batch(batch, number))
            fresh.calibrate(solver=solver, eta=eta, max_iter=max_iter)
            if lacks(place):
                fresh.to(place)
        self.__dict__.update(fresh.__dict__)
        return self

    def twin(self: _Same) -> _Same:
        """A copy with the same statistics that can be calibrated without changing this head."""
        twin = copy.copy(self)
        twin._buffers = {name: None if b is None else b.clone() for name, b in self._buffers.items()}
        return twin

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
        return {name: one if name in COLUMNS and is_frame(one) else at_hand(checks.tensor_of(one)) for name, one in found.items()}

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

    @property
    def statistics(self) -> Any:
        """Of all batches observed; None before the first example."""
        with _KEEPING:
            parts = self.__dict__.get("_parts", ())
            if len(parts) > 1:
                parts = self._parts = (_joined(list(parts)),)
        return parts[0] if parts else None

    @statistics.setter
    def statistics(self, value: Any) -> None:
        self._parts = () if value is None else (value,)

    def seen(self, one: str = "example") -> Any:
        """:attr:`statistics`; an error, with this word for what a head observes, if there are none."""
        found = self.statistics
        count = int(getattr(found, "examples", getattr(found, "rows", 1)))
        if found is None or not int(distributed.total(torch.tensor(count))):
            raise ValueError(f"no examples observed: call `observe` (or `fit`) with at least one {one} first.")
        return found

    def keep(self, batch: Any, *content: Tensor, keys: Tensor | None = None) -> None:
        """Add a batch's statistics to those of the others; threads may call it at the same time.

        Rows (and cells, of sums over many of them) are joined once the later ones are half as many as those before, so n
        examples are copied O(log n) times each in however many batches they come, and lie in O(log n) pieces; other sums are
        added at once.

        ``batch``: the statistics. ``content``: scores and truth of the examples, one row each: an audit that sees them again
        warns. ``keys``: their :func:`~torchgmc.audits.overlap.example_keys`, if they are known already.
        """
        if keys is None and content:
            keys = overlap.example_keys(*(at_hand(checks.tensor_of(one)) for one in content))
        seen = self.observed
        limit = math.inf if seen is None or seen.salt else seen.limit  # those above would be left out of the sum of both
        self._join(batch, None if keys is None else overlap.Sketch.of_keys(keys, limit))

    def _join(self, batch: Any, sketch: overlap.Sketch | None) -> None:
        with _KEEPING:
            parts = [*self.__dict__.get("_parts", ()), batch]
            if len(parts) > 1 and hasattr(batch, "check_alike"):
                parts[0].check_alike(batch)
            while len(parts) > 1 and 2 * _length(parts[-1]) >= _length(parts[-2]):
                late = parts.pop()
                parts[-1] = parts[-1] + late
            self._parts = tuple(parts)
            if sketch is not None:
                self.observed = sketch if self.observed is None else self.observed + sketch

    def merge(self: _Same, *others: "Head") -> _Same:
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
            if not isinstance(other, Head):
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

    def _foreign(self, other: "Head") -> str:
        """Why the statistics of another head cannot be added to this one's; empty if they can."""
        if self.kind() != other.kind():
            return f"it is a {other.kind()}, and this is a {self.kind()}."
        mine, its = (one.config() | {"noise_version": one.noise_version} for one in (self, other))
        for name in mine | its:  # options that are off may be left out
            ours, theirs = mine.get(name), its.get(name)
            if json.dumps(ours, default=str) != json.dumps(theirs, default=str):
                hint = "; make the groups of all parts from one `Groups`" if name == "groups" else ""
                return f"its `{name}` is {_short(theirs)}, and this head's {_short(ours)}{hint}."
        if other.is_fitted and other.statistics is None:
            return "it is fitted and has no statistics; save it with gmc.save(head, path, statistics=True)."
        if self.prepared_for[:2] != other.prepared_for[:2]:
            return f"it observed for solver, eta = {other.prepared_for[:2]}, and this head for {self.prepared_for[:2]}."
        return ""

    def forget(self: _Same, factor: float) -> _Same:
        """Let the examples observed so far count ``factor`` of what they did, above 0 and at most 1; returns the head.

        The same as if they had been observed with so much less ``weight``. Call it before the examples of a new week are
        observed, then ``calibrate``. Guarantees that need examples of equal weight (``finite_sample``) refuse them.
        """
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0.0 < factor <= 1.0:
            raise ValueError(f"`factor` must be above 0 and at most 1, got {factor!r}; to forget everything, call `reset`.")
        if self.is_fitted and self.statistics is None:
            raise ValueError("this head has no statistics to forget; save it with gmc.save(head, path, statistics=True).")
        with _KEEPING:
            self._parts = tuple(part.forget(float(factor)) for part in self._parts)
        return self

    def check_solver(self, solver: str, eta: float | None, max_iter: int | None) -> None:
        """Raise for options that no solver takes; :meth:`prepare` did for its own."""
        if all(map(operator.is_, self.prepared_for, (solver, eta, max_iter))):
            return
        checks.option("solver", solver, SOLVERS)
        if eta is not None:
            checks.positive("eta", eta, "It is the size of a fixed step.")
            if solver == "exact":
                raise ValueError("`eta` is the fixed step of solver='paper' or 'fresh'; solver='exact' finds its own.")
        checks.count("max_iter", max_iter, 1)
        if self.alpha is None and solver != "exact":
            raise ValueError(f"solver={solver!r} fits to `alpha`, but this head was made with alpha=None; set `alpha` to a number.")

    def goal(self) -> float:
        """alpha, where a number is needed."""
        if self.alpha is None:
            raise ValueError("this head was made with alpha=None; pass a number as `alpha=` here.")
        return self.alpha

    def mark_fitted(self, report: Report | None, everyone: bool = False) -> None:
        """The buffers hold a fitted state; ``everyone``: its tables have a last row for everyone.

        ``report.details["variance"]`` may hold n times the squared standard error of each E[1_A s], ``"tail"`` the largest |s|
        of each direction: audits then bet better.
        """
        about = {} if report is None else report.details
        known = [about.get(name, self.variance[:0]).detach().double().flatten().to(self.fitted.device) for name in KNOWN]
        part, power = torch.frexp(known[1])
        self.variance, self.tail = known[0], torch.ldexp((32.0 * part).ceil() / 32.0, power)  # nobody's own value
        self.largest_cluster.fill_(largest_cluster(self.statistics))
        self.with_everyone.fill_(everyone)
        self.promises_everyone = everyone
        self.calibrated_on = self.observed if self.fits else None
        self.fitted.fill_(True)
        self.is_fitted = True
        self.report = report

    def mark_unfitted(self) -> None:
        """The buffers hold nothing (those that grow are empty), and no examples were seen."""
        for name in self.growing:
            if len(getattr(self, name)):  # torch takes its time to set a buffer
                setattr(self, name, getattr(self, name)[:0].clone())
        self.statistics = None
        self.observed = self.calibrated_on = None
        self.prepared_for, self.lacks_statistics = PREPARED, False
        self.fitted.fill_(False)
        self.is_fitted = False
        self.with_everyone.fill_(self.common and self.grouped)
        self.promises_everyone = self.common and self.grouped
        self.variance, self.tail = self.variance[:0], self.tail[:0]
        self.largest_cluster.zero_()
        self.noise_version = hashing.VERSION
        self.report = None

    # -- audit -------------------------------------------------------------------------------------------------------

    def same_state(self, other: "Head") -> bool:
        """Would both give the same output: the same kind, options and fitted buffers?"""
        if self.kind() != other.kind() or self.config() != other.config() or set(self._buffers) != set(other._buffers):
            return False
        if not torch.equal(self.get_extra_state(), other.get_extra_state()):  # the order of word lists, which == ignores
            return False
        return all(torch.equal(a, b.to(a.device)) for a, b in zip(self.buffers(), other.buffers(), strict=True))

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
        return measure.audit(self, [self.bind(*batch, **named)], delta, method=method, cluster_size=cluster_size)

    # -- checks ------------------------------------------------------------------------------------------------------

    def check_groups(self, groups: Any, n: int, device: torch.device) -> Tensor:
        """Membership (n, a), bool (float64 of a ``fractional`` head), on the device of the scores."""
        if groups is None and not self.grouped:
            return torch.ones(n, 1, dtype=torch.float64 if self.fractional else torch.bool, device=device)
        if groups is None:
            raise ValueError(
                f"`groups` is missing: this head was made for {self.num_groups} groups "
                f"({checks.listing(self.groups, 4)}); pass a membership of shape "
                f"(n, {self.num_groups})."
            )
        if is_frame(groups):
            groups = self.transform(groups).to(device)
        member = check_groups(groups, n, self.groups, bool(self.fractional))
        if member.device != device:
            raise ValueError(f"`groups` is on {member.device} but `scores` is on {device}; move them to one device.")
        return member

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
        """Membership as :func:`wide` numbers (n, a) inside ``forward``: checks only shapes, so that it scripts and exports."""
        if not self.is_fitted:
            raise RuntimeError("this head is not fitted; call `fit`, or `observe` and `calibrate`, or load its state.")
        if groups is None:
            if self.grouped:
                raise ValueError("`groups` is missing: this head needs a membership of shape (n, num_groups).")
            return wide(torch.ones([n, 1], device=like.device))
        if not is_scripting():
            groups = self.check_member(groups)
        if groups.dim() != 2 or groups.shape[1] != self.num_groups:
            raise ValueError(f"`groups` must have shape (n, {self.num_groups}), got {groups.shape}")
        return wide(groups)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``forward``. Groups, frames of group columns and arrays become tensors first.

        All of a call sees one state: another thread may fit the head meanwhile.
        """
        if torch.compiler.is_compiling() or is_tracing():
            return super().__call__(*args, **kwargs)
        args = tuple(self._as_tensor(value, k > 0 or self.takes == "groups") for k, value in enumerate(args))
        kwargs = {name: self._as_tensor(value, name in COLUMNS) for name, value in kwargs.items()}
        return super(Head, self.now()).__call__(*args, **kwargs)

    def now(self: _Same) -> _Same:
        """This head as it is at this moment: `fit` and `calibrate` replace the table of buffers, they do not write to it."""
        now = object.__new__(type(self))
        now.__dict__ = self.__dict__.copy()
        return now

    def _as_tensor(self, value: Any, columns: bool = True) -> Any:
        if isinstance(value, Tensor | str | int | float | None):
            return value
        if isinstance(value, Groups) or (columns and is_frame(value)):
            return self.members_of(value).to(self.fitted.device)
        return checks.tensor_of(value)

    def members_of(self, groups: Any) -> Tensor:
        """Membership ``(n, a)``, bool, from Groups of the same names, or from columns by the Groups this head was made with."""
        if isinstance(groups, Groups):
            return check_groups(groups, groups.num_rows, self.groups)
        return self.transform(groups)

    def check_input(self, name: str, value: Any, rows: Any = None, hint: str = "") -> None:
        """Type, device, rows and values of a floating input of an eager call; NaN would become an answer.

        ``name``, ``value``: the input. ``rows``: another input, which must have as many rows. ``hint``: what to do about
        numbers outside :meth:`input_range` (up to rounding); empty if any number will do.
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
        if not value.numel() or not has_values(value):
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

    def check_state(self, fitted: bool = False) -> None:
        """Raise if a fitted number is not finite: its answers would be NaN, which audits leave out; or if it must be fitted."""
        if fitted and not self.is_fitted:
            raise RuntimeError("this head is not fitted; call `fit`, or `observe` and `calibrate`, or load its state.")
        why = self._refuse(dict(self._buffers), "") if self.is_fitted else ""
        if why:
            raise ValueError(f"the state of this {type(self).__name__} cannot be used: {why}; fit it again.")

    def _check_place(self, name: str, value: Tensor) -> None:
        if value.layout != torch.strided or value.is_complex():
            raise TypeError(f"`{name}` must be a dense tensor of real numbers, got {value.dtype}, {value.layout}.")
        if value.dim() == 0:
            raise ValueError(f"`{name}` must have one row per example, got a single number.")
        if value.device != self.fitted.device:
            raise ValueError(f"`{name}` is on {value.device} but the head is on {self.fitted.device}; use `.to(...)`.")

    def solve_differentiably(self, *data: Any, **options: Any) -> dict[str, Tensor]:
        """The fitted state as a differentiable function of the scores, where a head has one."""
        raise TypeError(
            f"a {type(self).__name__} has no smooth optimum to differentiate: its sets depend on its own output, and its fit "
            "is a sequence of steps that jump with the scores. Train with `gmc.GMCPenalty.for_head(head)` and fit afterwards."
        )

    def apply_state(self, state: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """What ``forward`` returns with another fitted state; the head itself, fitted or not, does not change.

        ``state``: of :meth:`solve_differentiably`, or fitted buffers by name; derivatives flow through it. ``args``,
        ``kwargs``: of ``forward``, e.g. ``mode="soft"``.
        """
        unknown = sorted(set(state) - set(self._buffers))
        if unknown:
            raise ValueError(f"`state` has {unknown[0]!r}, which is not a buffer of {type(self).__name__}.")
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
        if name not in self.growing and value.shape != own.shape:
            raise ValueError(f"`state` must have {name!r} of shape {tuple(own.shape)}, got {tuple(value.shape)}.")

    @classmethod
    def kind(cls) -> str:
        """What files call this class: its name, with its module for a class outside this package."""
        return cls.__name__ if cls.__module__.split(".")[0] == "torchgmc" else f"{cls.__module__}:{cls.__qualname__}"

    def config(self) -> dict[str, Any]:
        """Arguments that rebuild this head (JSON types)."""
        values = {name: getattr(self, name) for name in self.settings}
        if not self.grouped:
            values["groups"] = None
        return values

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Head":
        """The head that :meth:`config` describes, not fitted."""
        kept = {name: value for name, value in config.items() if name != "splits"}  # an option of version 0.1
        try:
            return cls(**kept)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the configuration of this {cls.__name__} cannot be used: {error}") from error

    def extra_repr(self) -> str:
        """Options and state, readable in a notebook."""
        kind = ", conditional" if self.conditional else ""
        alpha = "None" if self.alpha is None else f"{self.alpha:g}"
        return f"alpha={alpha}{kind}, groups=[{checks.listing(self.groups, 4)}] ({self.num_groups}), fitted={self.is_fitted}"

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
        return ""

    def index_limits(self) -> dict[str, int]:
        """Buffers that hold indices, and the number that these must be below."""
        return {}

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
    if isinstance(cluster, Tensor) and cluster.shape[1] and len(cluster):
        weight = statistics.weight if hasattr(statistics, "weight") else statistics.mass.amax(1)
        return float(total(weight[:, None].double(), cluster).max())
    return 0.0 if sums is None or not len(sums.mass) else float(sums.mass[:, -1].max())


def _joined(parts: list[Any]) -> Any:
    """The sum: of rows all at once, so that none is copied twice; else of the smallest first."""
    if len(parts) > 1 and isinstance(parts[0], PerExample):
        return parts[0].joined(parts[1:])
    return functools.reduce(lambda late, early: early + late, reversed(parts))


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
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
