r"""Is the promise still kept after deployment? Evidence over batches, and an alarm that is almost never false.

An audit is made once. A :class:`Monitor` looks at every batch, forever, and the probability that it ever raises a false
alarm is at most delta: for each g and side it bets on "the deviation is beyond alpha", and while that is false the capital is a
supermartingale, which reaches 1/delta with probability at most delta (Ville's inequality).

With M the capital of a bet :math:`\lambda_k = 0.9 \cdot 2^{-k}` of the most it could lose, and one part
:math:`\rho_t = 1/((t+1)(t+2))` of the initial capital entering before every batch t, so that a quiet year does not use it up,

.. math:: M \leftarrow (M + \rho_t) \prod_i (1 + \lambda_k (x_i - \alpha)), \qquad e = \mathrm{mean}_k\, M + \frac{1}{t + 2}.

The alarm is raised when the mean of e over all g and sides reaches 1/delta; a g is named when its own e reaches 2 G/delta.
The delay after a change is about :math:`2 \sigma^2 \ln(2 G K / (\delta \rho)) / (d - \alpha)^2` examples, d being the new
deviation: one just beyond alpha stays invisible for a long time.
"""

import json
import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchgmc import distributed
from torchgmc.audits.intervals import Bounds, Rows
from torchgmc.audits.tabular import Tabular, row_name
from torchgmc.engine import checks
from torchgmc.engine.clusters import check as check_clusters, total
from torchgmc.engine.float64 import Float64Module, at_hand
from torchgmc.engine.values import Names
from torchgmc.groups.columns import is_frame
from torchgmc.groups.groups import Groups, check_groups
from torchgmc.heads.base import Head

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Monitor", "ShiftMonitor", "Watch"]

#: Bets of each g and side.
BETS = 10
#: Batches whose evidence is kept for the figure; beyond that every second one is forgotten.
LONGEST = 4096


@dataclass
class _Growth:
    """What a batch adds: the growth of each bet ``(G, 2, BETS)``, sums ``(3, G)`` and the number of examples."""

    growth: Tensor
    sums: Tensor
    examples: Tensor

    def __add__(self, other: "_Growth") -> "_Growth":
        return _Growth(self.growth + other.growth, self.sums + other.sums, self.examples + other.examples)


class Watch(Float64Module, Tabular):
    """Evidence against "every deviation is within alpha", over batches as they come.

    Attributes:
        alarm: some deviation was beyond alpha, with confidence 1 - delta; it stays until :meth:`reset`.
        table: ``group``, ``what``, ``count``, ``estimate`` (mean of all batches so far), ``evidence`` (log10 of e, at its
            highest) and ``beyond`` (it reached its own bar, log10(2 G / delta)); most evidence first.

    ``state_dict`` holds everything: save it and continue another day. Under ``torch.distributed`` every rank updates equally
    often and has the evidence of all.
    """

    log_capital: Tensor
    highest: Tensor
    sums: Tensor
    batches: Tensor
    examples: Tensor
    alarmed: Tensor
    history: Tensor
    promises: Tensor
    #: What an alarm says.
    about = "the deviation is beyond"
    stays = True

    def __init__(self, names: Names, alpha: float, delta: float, conditional: bool, cluster_size: float = 1.0) -> None:
        super().__init__()
        self.names, self.conditional = names, conditional
        self.alpha = checks.positive("alpha", alpha, "It is the largest violation allowed.")
        self.delta = checks.fraction("delta", delta)
        self.cluster_size = checks.positive("cluster_size", cluster_size, "It is the largest number of examples of a cluster.")
        count = len(names.who) * len(names.what)
        self.register_buffer("promises", torch.tensor(_code([*names.who, *names.what, self.alpha, conditional, cluster_size])))
        self.register_buffer("log_capital", torch.full((count, 2, BETS), -math.inf, dtype=torch.float64))
        self.register_buffer("highest", torch.zeros(count, 2, dtype=torch.float64))  # log e of each g and side, at its highest
        self.register_buffer("sums", torch.zeros(3, count, dtype=torch.float64))
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("examples", torch.tensor(0))
        self.register_buffer("alarmed", torch.tensor(-1))  # examples seen at the alarm; -1: none
        self.register_buffer("history", torch.zeros(0, 2, dtype=torch.float64))  # examples, log of the mean e

    def reset(self) -> None:
        """Forget all evidence. The probabilities of a false alarm before and after a reset add up to 2 delta."""
        self.log_capital.fill_(-math.inf)
        self.alarmed.fill_(-1)
        for buffer in (self.highest, self.sums, self.batches, self.examples):
            buffer.zero_()
        self.history = self.history[:0]

    # -- batches -------------------------------------------------------------------------------------------------------

    def _add(self, rows: Rows | None) -> None:
        """One batch; None for a rank that has no examples this time."""
        part = None if rows is None else self._measure(rows)
        part = distributed.reduce(part, f"{type(self).__name__} of {self.config()}", self.sums.device)
        if part is None:
            return
        t = int(self.batches)
        start = math.log(1.0 / ((t + 1) * (t + 2)))
        self.log_capital = torch.logaddexp(self.log_capital, torch.full_like(self.log_capital, start)) + part.growth
        self.sums += part.sums
        self.batches += 1
        self.examples += part.examples
        log_e = self.log_evidence()
        torch.maximum(self.highest, log_e, out=self.highest)
        mean = _log_mean(log_e)
        if int(self.alarmed) < 0 and mean >= -math.log(self.delta):
            self.alarmed.fill_(int(self.examples))
        now = torch.tensor([[float(self.examples), mean]], dtype=torch.float64, device=self.history.device)
        self.history = torch.cat([self.history[::2] if len(self.history) >= LONGEST else self.history, now])

    def _measure(self, rows: Rows) -> _Growth:
        units, low, high = rows.units(self.conditional)
        width = high - low
        up, down = (self.alpha - low) / width, (-self.alpha - low) / width  # H: at most alpha; H: at least -alpha
        share = 0.9 * 0.5 ** torch.arange(BETS, dtype=torch.float64, device=low.device)
        bets = [share / up.clamp_min(1e-9)[:, None], -share / (1.0 - down).clamp_min(1e-9)[:, None]]
        means = [m[:, None].expand(-1, BETS) for m in (up, down)]
        grown = torch.stack([units.growth(m, b) for m, b in zip(means, bets, strict=True)], 1)
        mass = (rows.mass if self.conditional else rows.total.expand_as(rows.mass)).flatten()
        first = (rows.estimates(self.conditional).nan_to_num(0.0)).flatten() * mass
        return _Growth(grown, torch.stack([first, mass, rows.count.flatten()]), torch.tensor(len(rows.s), device=low.device))

    def _rows(self, s: Tensor, who: Tensor, weight: Tensor, cluster: Tensor, bounds: Bounds, **options: Any) -> Rows:
        rows = Rows.of(s, who, weight, cluster, bounds, largest=self.cluster_size, **options)
        largest = float(total(rows.weight[:, None], rows.cluster).max())
        if largest > self.cluster_size * (1 + 1e-9):
            raise ValueError(
                f"`cluster_size` = {self.cluster_size:g} must bound the weight of every cluster (of every example, without "
                f"`clusters`), but one has {largest:g}; make the monitor with a larger bound."
            )
        return rows

    # -- what is known -------------------------------------------------------------------------------------------------

    def log_evidence(self) -> Tensor:
        """Logarithm of e of each g, for "above alpha" and "below -alpha", ``(G, 2)``."""
        reserve = torch.full_like(self.log_capital[..., 0], -math.log(float(self.batches) + 1.0))
        return torch.logaddexp(self.log_capital.logsumexp(-1) - math.log(BETS), reserve)

    @property
    def alarm(self) -> bool:
        """Was there ever enough evidence?"""
        return int(self.alarmed) >= 0

    @property
    def evidence(self) -> float:
        """Mean of e over all g and sides; the alarm is raised at 1 / delta."""
        return math.exp(min(_log_mean(self.log_evidence()), 700.0))

    def compute(self) -> dict[str, Any]:
        """Alarm, evidence and the groups named, as a metric returns them."""
        return {"alarm": self.alarm, "evidence": self.evidence, "named": self.named}

    @property
    def named(self) -> list[str]:
        """Groups whose own evidence reached its bar; after an alarm without one, the one with most evidence."""
        if not self.alarm:
            return []
        found = [row_name(row["group"], row["what"]) for row in self.rows() if row["beyond"]]
        first = self.rows()[0]
        return found or [f"{row_name(first['group'], first['what'])} (most evidence, but not certain by itself)"]

    @property
    def table(self) -> dict[str, list[Any]]:  # type: ignore[override]
        """See the class."""
        names = [(who, what) for who in self.names.who for what in self.names.what]
        highest = self.highest.amax(1)
        order = highest.argsort(descending=True, stable=True).tolist()
        first, mass, count = self.sums.tolist()
        bar = math.log(2 * len(names) / self.delta)
        return {
            "group": [names[k][0] for k in order],
            "what": [names[k][1] for k in order],
            "count": [int(count[k]) for k in order],
            "estimate": [first[k] / mass[k] if mass[k] else 0.0 for k in order],
            "evidence": [float(highest[k]) / math.log(10.0) for k in order],
            "beyond": [bool(highest[k] >= bar) for k in order],
        }

    @property
    def message(self) -> str:
        """One sentence."""
        seen = f"{int(self.examples):,} examples in {int(self.batches):,} batches"
        if not self.alarm:
            return f"No alarm after {seen}: the evidence is {self.evidence:.3g}, an alarm needs {1 / self.delta:g}."
        return (
            f"ALARM after {int(self.alarmed):,} of {seen}: {self.about} {self.alpha:g}, with confidence "
            f"{100 * (1 - self.delta):g} %: {', '.join(self.named[:5])}."
        )

    def __str__(self) -> str:
        rows = self.rows()[:40]
        names = [row_name(r["group"], r["what"]) for r in rows]
        wide = max([28, *map(len, names)])
        lines = [f"{'group':{wide}s} {'count':>9s} {'estimate':>9s} {'log10 e':>8s}"]
        lines += [
            f"{name:{wide}s} {r['count']:9d} {r['estimate']:+9.4f} {r['evidence']:8.2f}{'  beyond' * r['beyond']}"
            for name, r in zip(names, rows, strict=True)
        ]
        return "\n".join([*lines, self.message])

    def plot(self, **options: Any) -> "Figure":
        """Evidence over time, and where the alarm is (extra ``report``); options of :func:`torchgmc.plots.evidence`."""
        from torchgmc import plots

        return plots.evidence(self, **options)

    # -- files ---------------------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """What the evidence is about, in JSON types; a state can only be continued where this is the same."""
        names = {"groups": list(self.names.who), "what": list(self.names.what)}
        return names | {name: getattr(self, name) for name in ("alpha", "delta", "conditional", "cluster_size")}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Evidence that is NaN, or about other promises, is refused before anything changes."""
        about = state_dict.setdefault(prefix + "promises", self.promises)  # states of earlier versions have none
        if int(about) != int(self.promises):
            args[-1].append("the state of a monitor cannot be loaded: its groups, their order, alpha or the view are others.")
            return
        history = state_dict.get(prefix + "history", self.history)
        lacking = [name for name in self._buffers if bool(state_dict.get(prefix + name, self.history[:0]).isnan().any())]
        if lacking or history.shape[1:] != self.history.shape[1:]:
            why = f"{lacking[0]!r} holds NaN" if lacking else f"'history' has the shape {tuple(history.shape)}, not (n, 2)"
            args[-1].append(f"the state of a monitor cannot be loaded: {why}.")
            return
        self.history = self.history.new_empty(history.shape) if prefix + "history" in state_dict else self.history
        super()._load_from_state_dict(state_dict, prefix, *args)


class Monitor(Watch):
    """Watches a head's promise on labelled batches after deployment; see :mod:`torchgmc.monitor`.

    Labels may arrive late, and only for some examples: update with those that have one. Which ones these are must not depend on
    how well the head did on them, or the evidence is about that selection. A cluster must be whole within one batch.

    Args:
        head: fitted; its state must not change while it is watched.
        delta: upper bound of the probability that a false alarm is ever raised.
        alpha: largest deviation allowed; the head's if omitted. Only a population *beyond* alpha counts: an alpha somewhat
            above the one that the head was fitted to leaves room for sampling error.
        conditional: watch each group's own deviation (True) or the mass-weighted one; by default like the head.
        cluster_size: largest weight of a cluster, or of an example if there are none; by default that of the calibration
            data, or 1.

    Example:
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch...>
        >>> probs, groups = torch.rand(4000), torch.rand(4000, 2) < 0.5
        >>> y = torch.rand(4000) < probs
        >>> head = gmc.ProbabilityHead(alpha=0.01, groups=["a", "b"], bins=None).fit(probs[:2000], y[:2000], groups[:2000])
        >>> monitor = gmc.Monitor(head, alpha=0.05)
        >>> for batch in zip(probs.split(100)[20:], y.split(100)[20:], groups.split(100)[20:]):
        ...     monitor.update(*batch)
        >>> monitor.alarm, int(monitor.examples)
        (False, 2000)
        >>> for p, _, g in zip(probs.split(100)[20:], y.split(100)[20:], groups.split(100)[20:]):
        ...     monitor.update(p, torch.rand(100) < p - 0.3 * g[:, 0], g)  # outcomes of group a have changed
        >>> monitor.alarm, monitor.named[0]
        (True, 'a')
    """

    head: Head

    def __init__(
        self,
        head: Head,
        delta: float = 0.01,
        alpha: float | None = None,
        conditional: bool | None = None,
        cluster_size: float | None = None,
    ) -> None:
        checks.kind("head", head, Head, "a head or a baseline")
        head.check_state(fitted=True)
        if alpha is None and head.alpha is None:
            raise ValueError("`alpha` is missing: this head was made with alpha=None, so pass the deviation that is allowed.")
        if head.s_range() is None:
            raise ValueError("a monitor needs the range of s: make the head with `bounds=(low, high)`.")
        own = head.conditional if conditional is None else bool(conditional)
        size = max(1.0, float(head.largest_cluster)) if cluster_size is None else cluster_size
        super().__init__(head.test_functions(), head.alpha if alpha is None else alpha, delta, own, size)  # type: ignore[arg-type]
        self.__dict__["head"] = head  # not a submodule: the state is the evidence
        self.to(head.fitted.device)

    def update(self, *batch: Any, **named: Any) -> None:
        """Add a batch, passed as to ``head.observe``; under ``torch.distributed`` on every rank."""
        with distributed.together():
            self._add(self._of(self.head.bind(*batch, **named)))

    def _of(self, batch: dict[str, Any]) -> Rows | None:
        head = self.head
        kept = {name: value for name, value in batch.items() if name not in ("weight", "clusters", *head.audit_only)}
        with torch.no_grad():
            values = head.values(**kept)
        if len(values.s) == 0:
            return None
        s = values.s if values.mean is None else values.s + values.mean
        if bool(s.isinf().any()):
            raise ValueError("s is infinite for some examples, so it cannot be monitored; check the scores and the risk.")
        weight = checks.weights(batch.get("weight"), len(s), s)
        cluster = check_clusters(batch.get("clusters"), len(s), s.device)
        bounds = head.s_range()
        assert bounds is not None
        rows = self._rows(s, values.who, weight, cluster, bounds, levels=values.column is not None, relative=head.relative)
        rows.check_range()
        return rows


class ShiftMonitor(Watch):
    """Watches scores and groups *without labels*: have the shares of the groups, or the distribution of the scores, moved?

    It proves nothing about the promise, which may hold on shifted data and break without a shift. But it is early: labels may
    take months. Shares of the groups, and of the reference's deciles of scores, may move by ``tolerance`` before they count.

    Args:
        scores: of the calibration data, ``(n, ...)``; the mean of each image or row counts. At least 100 examples.
        groups: their :class:`~torchgmc.Groups`, with which ``update`` takes a frame of group columns too; a membership
            ``(n, a)``; or None.
        names: of the groups; those of Groups by default.
        delta: upper bound of the probability that a false alarm is ever raised, if the shares of the reference are those of its
            population to within ``tolerance``.
        tolerance: how far a share may move.
        bins: parts of the scores.

    Example:
        >>> watch = gmc.ShiftMonitor(torch.rand(2000))
        >>> watch.update(torch.rand(500)), watch.alarm
        (None, False)
        >>> watch.update(0.5 * torch.rand(500)), watch.alarm
        (None, True)
    """

    edges: Tensor
    shares: Tensor
    about = "the share of a group or of a range of scores moved by more than"

    def __init__(
        self, scores: Any, groups: Any = None, names: Any = None, delta: float = 0.01, tolerance: float = 0.05, bins: int = 10
    ) -> None:
        values = self._scores(scores)
        if len(values) < 100:
            raise ValueError(f"`scores` must have at least 100 reference examples, got {len(values)}.")
        count = checks.count("bins", bins, 10)
        places = torch.arange(1, count, dtype=torch.float64, device=values.device) / count
        edges = torch.unique(values.sort().values[(places * len(values)).long()])
        self.named_groups = Groups.from_dict(groups.to_dict()) if isinstance(groups, Groups) else None  # without its rows
        found = checks.names(names, "names") if names is not None else list(groups.names) if isinstance(groups, Groups) else None
        member = self._member(groups, values)
        found = [f"group {k}" for k in range(member.shape[1])] if found is None else found
        if len(found) != member.shape[1]:
            raise ValueError(f"`names` must have one name per column of `groups`, {member.shape[1]}, got {len(found)}.")
        cells = [f"scores {_between(edges.tolist(), k)}" for k in range(len(edges) + 1)]
        super().__init__(Names([*(f"share of {name}" for name in found), *cells], [""]), tolerance, delta, False)
        self.promises.fill_(_code([*found, self.alpha]))
        self.register_buffer("edges", edges)
        self.register_buffer("shares", self._cells(values, member).mean(0))
        self.to(values.device)

    def update(self, scores: Any, groups: Any = None) -> None:
        """Add a batch; no labels."""
        with distributed.together():
            values = self._scores(scores)
            if not len(values):
                raise ValueError("`scores` holds no examples; leave out empty batches.")
            cells = self._cells(values, self._member(groups, values))
            if cells.shape[1] != len(self.shares):
                raise ValueError("`groups` must have the same columns as the reference.")
            n, shares = len(cells), self.shares
            everyone, weight = torch.ones_like(cells[:, :1], dtype=torch.bool), checks.weights(None, n, cells)
            cluster = check_clusters(None, n, cells.device)
            # Each cell is a separate g: x = 1{inside} - share, within [-share, 1 - share].
            self._add(self._rows(cells - shares, everyone, weight, cluster, (-shares, 1.0 - shares)))

    @staticmethod
    def _scores(scores: Any) -> Tensor:
        values: Tensor = at_hand(checks.numbers("scores", scores).detach()).double()
        if values.dim() == 0:
            raise ValueError("`scores` must have one row per example, got a single number.")
        checks.finite("scores", values)
        return values.flatten(1).mean(1) if values.dim() > 1 else values.contiguous()

    def _member(self, groups: Any, like: Tensor) -> Tensor:
        if groups is None:
            return like.new_zeros(len(like), 0)
        if is_frame(groups):
            if self.named_groups is None:
                raise ValueError("`groups` holds columns, but the reference came without `Groups`; pass a membership (n, a).")
            groups = self.named_groups.transform(groups)
        names = None if self.named_groups is None else self.named_groups.names
        return check_groups(at_hand(groups), len(like), names).to(like)

    def _cells(self, values: Tensor, member: Tensor) -> Tensor:
        level = torch.bucketize(values, self.edges, right=True)
        return torch.cat([member, torch.nn.functional.one_hot(level, len(self.edges) + 1).double()], 1)


def _log_mean(logs: Tensor) -> float:
    return float(logs.logsumexp((0, 1))) - math.log(logs.numel())


def _code(about: list[Any]) -> int:
    """A number that differs between monitors whose evidence does not mean the same."""
    return zlib.crc32(json.dumps(about).encode())


def _between(edges: list[float], k: int) -> str:
    if k == 0:
        return f"below {edges[0]:.3g}" if edges else "of any size"
    return f"from {edges[-1]:.3g}" if k == len(edges) else f"{edges[k - 1]:.3g} to {edges[k]:.3g}"
