"""The contract of a head: what it must provide, and what it may say."""

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Optional

import torch
from torch import Tensor

from torchgmc import distributed
from torchgmc.audits import measure, overlap
from torchgmc.audits.audit import Audit
from torchgmc.audits.tabular import Table
from torchgmc.engine import checks, hashing
from torchgmc.engine.float64 import Float64Module
from torchgmc.engine.solver import SOLVERS, Report
from torchgmc.engine.values import Names, Values
from torchgmc.groups.cells import with_everyone
from torchgmc.groups.groups import Groups
from torchgmc.heads.task import Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Name of the row for everyone.
EVERYONE = "everyone"
#: Arguments of `prepare` if nobody calls it.
PREPARED = ("exact", None, None)


class Contract(Float64Module):
    """A small module behind a trained model, fitted so that a promise holds for every group at once.

    A subclass must provide

    - ``observe(...)``: a batch becomes statistics, passed to :meth:`keep`, and is forgotten. They are a dataclass with
      ``__add__`` whose fields are new tensors (the caller may overwrite the batch); their sum is ``self.statistics``. Statistics
      that keep something of every example say of how many in ``rows``; they are in files, and can be forgotten, if the head says
      their class in ``keeps`` and they have ``layout`` and ``forget`` (:class:`~torchgmc.engine.statistics.PerExample` has both);
    - ``calibrate(...)``: ``self.statistics`` become fitted buffers. It ends with :meth:`mark_fitted`. Decorated with
      :func:`torchgmc.distributed.pooled` it finds the statistics of all ranks;
    - ``forward(...)``: buffers change an output;
    - ``reset()``: buffers as they were before the fit, unless ``zeroed`` and ``growing`` say all about that; it ends with
      :meth:`mark_unfitted`;
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
    #: The head was made with ``learn``, and takes ``features``; see :mod:`torchgmc.heads.learned`.
    learns: bool = False
    #: Memberships may be numbers m from 0 to 1: the promise is then about E[m_A(x) s]. None: the head has no such option.
    fractional: Optional[bool] = None
    #: ``forward`` takes the probability of one event, ``(n,)``.
    one_event: bool = False
    #: The columns of ``probs (n, C)`` are classes, of which one holds; False: labels, of which several may.
    exclusive: bool = True
    #: The output has a dimension of classes (or labels), and how many there are.
    per_class: bool = False
    columns: int = 1
    #: Buffers that are 0 before a fit.
    zeroed: ClassVar[tuple[str, ...]] = ()
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
    #: Has it rows that may stay on their ranks? Sums over cells are added up as they are.
    keeps_rows: bool = True
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
        self.hold(variance=(0,), tail=(0,), largest_cluster=())
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

    def hold(self, dtype: torch.dtype = torch.float64, **shapes: tuple[int, ...]) -> None:
        """Buffers of zeros, for what a fit will find."""
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=dtype))

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

    # -- what a subclass must provide --------------------------------------------------------------------------------

    def observe(self, *args: Any, **kwargs: Any) -> None:
        """Turn a batch into statistics and forget the batch."""
        raise NotImplementedError  # abstract

    def calibrate(self, solver: str = "exact", eta: float | None = None, max_iter: int | None = None) -> "Contract":
        """Run the solver on the statistics and write the fitted buffers."""
        raise NotImplementedError  # abstract

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

    def check_features(self, features: Any, n: int, device: torch.device) -> Tensor:
        """Features of a batch, for a head that learns: float32 ``(n, d)``."""
        raise TypeError(f"a {type(self).__name__} does not use `features`.")

    def by_name(self, frame: Any) -> Tensor:
        """Features from the columns of a frame, for a head that learns."""
        return self.check_features(frame, 0, self.fitted.device)

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

    def sizes(self) -> dict[str, int]:
        """Sizes that the shapes of its statistics depend on; see :func:`torchgmc.engine.statistics.check_layout`."""
        return {"a": self.num_groups, "fractional": int(bool(self.fractional))}

    def index_limits(self) -> dict[str, int]:
        """Buffers that hold indices, and the number that these must be below."""
        return {}

    def misfit(self, state: dict[str, Tensor]) -> str:
        """Why these buffers cannot be its state, beyond what the base class checks; empty if they can."""
        return ""

    def solve_differentiably(self, *data: Any, **options: Any) -> dict[str, Tensor]:
        """The fitted state as a differentiable function of the scores, where a head has one."""
        raise TypeError(
            f"a {type(self).__name__} has no smooth optimum to differentiate: its sets depend on its own output, and its fit "
            "is a sequence of steps that jump with the scores. Train with `gmc.GMCPenalty.for_head(head)` and fit afterwards."
        )

    def config(self) -> dict[str, Any]:
        """Arguments that rebuild this head (JSON types)."""
        values = {name: getattr(self, name) for name in self.settings}
        if not self.grouped:
            values["groups"] = None
        return values

    @classmethod
    def kind(cls) -> str:
        """What files call this class: its name, with its module for a class outside this package."""
        return cls.__name__ if cls.__module__.split(".")[0] == "torchgmc" else f"{cls.__module__}:{cls.__qualname__}"

    def extra_repr(self) -> str:
        """Options and state, readable in a notebook."""
        kind = ", conditional" if self.conditional else ""
        alpha = "None" if self.alpha is None else f"{self.alpha:g}"
        return f"alpha={alpha}{kind}, groups=[{checks.listing(self.groups, 4)}] ({self.num_groups}), fitted={self.is_fitted}"
