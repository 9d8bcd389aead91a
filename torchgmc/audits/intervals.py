"""From rows to verdicts: estimates of every g, their intervals, and what may be said with confidence 1 - delta.

Three claims follow from one set of rows, each with confidence 1 - delta (statistics: intersection-union test, Bonferroni):

- *bound*: the farthest that each g can be from the target. The largest of them bounds the worst g without any correction for
  the number of g, since the worst one is not random: that is the certificate;
- *intervals*, which hold for all g at once: each end has a share of delta, 1 / (2 G) unless variances known in advance tell
  which ends need more (:meth:`torchgmc.audits.betting.Units.shares`); what no example shows is allowed for once
  (:mod:`torchgmc.audits.far`), where calibration knows how far values lie;
- *labels*, which are all right at once: "holds" at delta / G, "violated" at delta / (2 G) per side. No interval contradicts a
  label: one that is not "violated" reaches into the band.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchgmc.audits import asymptotic, betting, binomial, far
from torchgmc.engine.clusters import codes, total
from torchgmc.engine.folds import shuffled

#: Range of s: two numbers, or a tensor (u,) each.
Bounds = tuple[float, float] | tuple[Tensor, Tensor]
Tests = betting.Units | betting.Histogram | binomial.Counts
METHODS = ("exact", "asymptotic")
#: Of more independent examples of equal weight, histograms are kept in place of an order: rows are not sorted.
MOST_ROWS = 10_000_000
#: Events that level sets of a group are given as if all groups were alike; and how many of them tell nothing.
ALIKE, RARE = 4.0, 0.01


@dataclass(frozen=True)
class Judged:
    """What is known about each g, ``(a, u)`` each.

    ``estimate``: violation. ``low``, ``high``: simultaneous interval. ``bound``: upper bound of |violation|, for this g by
    itself. ``verdict``: 0 undecided, 1 holds, 2 violated.
    """

    estimate: Tensor
    low: Tensor
    high: Tensor
    bound: Tensor
    verdict: Tensor


@dataclass(frozen=True)
class Rows:
    """Audited examples, in an order that depends on their content only.

    ``s``: values, float64 ``(n, u)``; 0 where an example has none. ``counts``: where it has one, bool ``(n, u)``. ``who``:
    membership, bool ``(n, a)``; float64 if some of it is fractional. ``weight``: ``(n,)``. ``cluster``: int64 ``(n, 1)``, or
    ``(n, 0)``. ``bounds``: range of s, two of ``(u,)``. ``two_valued``: s takes the two ends of its range only. ``levels``: s
    is 0 outside a level set, whatever the range. ``relative``: the target is everybody's mean, which was not subtracted from s.
    ``largest``: upper bound of a cluster's weight, if known in advance. ``variance``: n times the squared standard error of
    each mass-weighted estimate, and ``tail``: the largest abs(s), from other data, ``(a, u)`` and ``(u,)``.
    """

    s: Tensor
    counts: Tensor
    who: Tensor
    weight: Tensor
    cluster: Tensor
    bounds: tuple[Tensor, Tensor]
    two_valued: bool = False
    levels: bool = False
    relative: bool = False
    largest: float | None = None
    variance: Tensor | None = None
    tail: Tensor | None = None

    @classmethod
    def of(cls, s: Tensor, who: Tensor, weight: Tensor, cluster: Tensor, bounds: Bounds, **options: Any) -> "Rows":
        """From rows in any order, or with an ``order`` that does not depend on s; s is NaN where an example has none."""
        s, weight = s.double(), weight.double()
        counts = ~s.isnan() & (weight > 0)[:, None]
        s = torch.where(counts, s, torch.zeros((), dtype=s.dtype, device=s.device))
        if options.get("relative"):
            counts = counts.all(1, keepdim=True).expand_as(counts)
        low, high = (torch.as_tensor(b, dtype=torch.float64, device=s.device).expand(s.shape[1]) for b in bounds)
        scale = (high - low).clamp_min(1e-300)
        # Numbers that differ by rounding, as they do between sizes of batches, are the same content, whatever weights add up to.
        content = ((s / scale) * 2.0**36).round(), counts, who, (weight / weight.mean()).float(), cluster
        soft = who.is_floating_point() and bool(((who > 0) & (who < 1)).any())
        many = len(s) > MOST_ROWS and cluster.shape[1] == 0 and not options.get("relative") and not soft
        many = many and bool((weight == weight[0]).all())
        order = options.pop("order", None)
        if order is None:
            order = torch.arange(len(s), device=s.device) if many else shuffled(*content, seed=None)
        member = who.double() if soft else who > 0
        if cluster.shape[1]:  # in the order of their ids, permuted
            place, count = codes(cluster)
            cluster = shuffled(torch.arange(count, device=place.device))[place][:, None]
        kept = [part[order] for part in (s, counts, member, weight, cluster)]
        return cls(kept[0], kept[1], kept[2], kept[3], kept[4], (low, high), **options)

    def check_range(self) -> None:
        """Betting on values beyond their range proves nothing: an error."""
        low, high = self.bounds
        slack = 1e-6 * (high - low)  # float32 values at the ends
        wrong = self.counts & ((self.s < low - slack) | (self.s > high + slack))
        if self.levels:
            wrong &= self.s != 0
        if bool(wrong.any()):
            k = int(wrong.any(0).nonzero()[0])
            raise ValueError(
                f"s must lie in its range, {float(low[k]):g} to {float(high[k]):g}, but it is {float(self.s[wrong][0]):g} "
                "for some example; the head's range of the risk is wrong."
            )

    # -- sums ----------------------------------------------------------------------------------------------------------

    @property
    def mass(self) -> Tensor:
        """Weight of each g, ``(a, u)``."""
        return self.who.double().T @ (self.weight[:, None] * self.counts)

    @property
    def total(self) -> Tensor:
        """Weight of all, ``(u,)``."""
        return self.weight @ self.counts.double()

    @property
    def count(self) -> Tensor:
        """Examples of each g, ``(a, u)``."""
        return (self.who > 0).double().T @ self.counts.double()

    @property
    def fractional(self) -> bool:
        """Is some membership between 0 and 1? A member then weighs less in the group's own mean."""
        return self.who.is_floating_point()

    @property
    def mean(self) -> Tensor:
        """Of s over everybody, ``(u,)``."""
        return self.weight @ self.s / self.total

    def estimates(self, conditional: bool) -> Tensor:
        """Violation of each g, ``(a, u)``; NaN for a conditional one without examples."""
        s = self.s - self.mean * self.counts if self.relative else self.s
        sums = self.who.double().T @ (self.weight[:, None] * s)
        return sums / (self.mass if conditional else self.total.expand_as(sums))

    # -- units ---------------------------------------------------------------------------------------------------------

    @property
    def weighted(self) -> bool:
        """Do units differ in size?"""
        return self.fractional or self.cluster.shape[1] > 0 or bool((self.weight[self.weight > 0].diff() != 0).any())

    def _range(self, conditional: bool) -> tuple[Tensor, Tensor]:
        """Range of what is bet on, ``(u,)``."""
        low, high = self.bounds
        if self.relative:
            half = (high - low) if conditional else (high - low) / 2
            return -half, half
        if not conditional or self.levels:  # the others have 1_A s = 0
            low, high = low.clamp_max(0.0), high.clamp_min(0.0)
        return low, torch.maximum(high, low + 1e-12)

    def _sizes(self, conditional: bool) -> tuple[Tensor, Tensor]:
        """Weight of every cluster in each sequence ``(m, J)``, and the sequence that each g follows, ``(G,)``."""
        count, columns = self.who.shape[1], self.s.shape[1]
        g = torch.arange(count * columns, device=self.s.device)
        same = bool((self.counts == self.counts[:, :1]).all())
        inside = self.counts[:, :1] if same else self.counts  # (n, 1) or (n, u)
        which = torch.zeros_like(g) if same else g % columns
        if conditional:
            inside = (self.who[:, :, None] * inside[:, None]).flatten(1)
            which = g // columns if same else g
        return total(self.weight[:, None] * inside, self.cluster), which

    def _events(self) -> tuple[Tensor, Tensor, Tensor]:
        """Cluster, g and weighted sum of s wherever that is not 0."""
        count, columns = self.who.shape[1], self.s.shape[1]
        row, column = (self.s != 0).nonzero().unbind(1)
        group = self.who.nonzero()[:, 1]
        many = (self.who > 0).sum(1)
        first = many.cumsum(0) - many
        times = many[row]
        event = torch.repeat_interleave(torch.arange(len(row), device=row.device), times)
        within = torch.arange(len(event), device=row.device) - torch.repeat_interleave(times.cumsum(0) - times, times)
        row, column = row[event], column[event]
        group = group[first[row] + within]
        g, value = group * columns + column, self.weight[row] * self.s[row, column]
        if self.fractional:
            value = value * self.who[row, group]
        if self.cluster.shape[1] == 0:
            return row, g, value
        place, _ = codes(self.cluster)
        cell, where = torch.unique(place[row] * (count * columns) + g, return_inverse=True)
        value = value.new_zeros(len(cell)).index_add_(0, where, value)
        return cell // (count * columns), cell % (count * columns), value

    def units(self, conditional: bool, everybody: bool = False) -> tuple[betting.Units, Tensor, Tensor]:
        """What is bet on, and where 0 and 1 of it lie, ``(G,)`` each; ``everybody``: others than members are units too."""
        low, high = (end.repeat(self.who.shape[1]) for end in self._range(conditional))
        sizes, which = self._sizes(conditional)
        if self.relative:
            sizes, row, g, value = self._pairs(conditional)
            largest = None if self.largest is None else self.largest**2
        else:
            row, g, value = self._events()
            largest = self.largest
        most = max(float(sizes.max()) if sizes.numel() else 0.0, 1e-300) if largest is None else largest
        sizes, rest = sizes / most, -low / (high - low)
        a = sizes[row, which[g]] * rest[g] + value / (most * (high - low)[g])
        a = torch.minimum(a.clamp_min(0.0), sizes[row, which[g]])
        spread = None
        if self.variance is not None and not (self.relative and self.weighted):
            # Of n units of mean weight w (n / 2 pairs: of w^2); the estimate is their sum, divided by that of their weights.
            n, power = self.counts.double().sum(0).clamp_min(1.0), 2 if self.relative else 1
            spread = self.variance.flatten() * (n / power * (self.total / n) ** (2 * power)).repeat(self.who.shape[1])
            spread = spread / (most * (high - low)).square()
            spread = steady(spread.view(-1, self.s.shape[1])).flatten() if self.levels else spread
        inside = total(self.counts.any(1, keepdim=True).double(), self.cluster) > 0 if everybody else None
        return betting.Units.of(sizes, which, rest, g, row, a, spread, self.two_valued or self.levels, inside), low, high

    def _pairs(self, conditional: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pairs of clusters, of which (1_A - 1_A')(s - s')/2 has the mean E[1_A s] - P(A) E[s], whatever the law."""
        whole = total(self.weight[:, None] * self.counts[:, :1], self.cluster)  # (m, 1)
        member = total(self.weight[:, None] * (self.who * self.counts[:, :1]), self.cluster)
        values = total(self.weight[:, None] * self.s, self.cluster)
        both = total((self.weight[:, None, None] * self.who[:, :, None] * self.s[:, None]).flatten(1), self.cluster)
        even = len(whole) // 2 * 2
        (n, m), (a, b), (p, q), (x, y) = (t[:even].view(-1, 2, t.shape[1]).unbind(1) for t in (whole, member, values, both))
        across = (a[:, :, None] * q[:, None] + b[:, :, None] * p[:, None]).flatten(1)
        value = (x * m + n * y - across) / 2  # (m / 2, G)
        sizes = (a * m + n * b) / 2 if conditional else n * m
        row, g = (value != 0).nonzero().unbind(1)
        return sizes, row, g, value[row, g]

    # -- verdicts ------------------------------------------------------------------------------------------------------

    def judge(self, alpha: float | None, delta: float, conditional: bool, method: str = "exact") -> Judged:
        """Estimates, intervals, bounds and verdicts.

        ``alpha``: the promise; None leaves all undecided. ``delta``: 1 - confidence of each of the three claims.
        ``conditional``: each group's own deviation, or the mass-weighted one. ``method``: ``"exact"`` or ``"asymptotic"``.
        """
        estimate = self.estimates(conditional)
        shape, count = estimate.shape, estimate.numel()
        tests, low, high = self._tests(conditional)
        found = self._ends(tests, high - low, delta, conditional, method)
        ends = low[None, :, None] + (high - low)[None, :, None] * found
        sure = torch.zeros(3, count, dtype=torch.bool, device=estimate.device)  # within alpha; label holds; violated
        if alpha is not None:
            # H: at least alpha; H: at most -alpha; both at delta and delta / G. Then the reverse, at delta / (2 G).
            m = torch.tensor([alpha, -alpha, alpha, -alpha, alpha, -alpha], dtype=torch.float64, device=low.device)
            up = torch.tensor([False, True, False, True, True, False], device=low.device)
            level = [delta, delta, delta / count, delta / count, delta / (2 * count), delta / (2 * count)]
            mean = (m - low[:, None]) / (high - low)[:, None]
            found = tests.rejects(mean, up, torch.tensor(level, dtype=torch.float64))
            sure = torch.stack([found[:, 0] & found[:, 1], found[:, 2] & found[:, 3], found[:, 4] | found[:, 5]])
        middle = estimate.flatten().nan_to_num(0.0)
        bound = torch.maximum(ends[1, :, 0], -ends[0, :, 0])
        least, most = ends[0, :, 1], ends[1, :, 1]
        if method == "asymptotic":
            normal = self._normal(conditional, estimate)
            fits, part = normal.fits, float(normal.fits.double().mean())
            q, one, each = normal.joint(part * delta), *(asymptotic.quantile(d) for d in (delta, delta / count))
            bound = torch.where(fits, torch.maximum(normal.end(-one), -normal.end(one)), bound)
            least, most = torch.where(fits, normal.end(q), least), torch.where(fits, normal.end(-q), most)
            if alpha is not None:
                label = torch.maximum(normal.end(-each), -normal.end(each)) <= alpha
                mine = torch.stack([bound <= alpha, label, torch.maximum(least, -most) > alpha])
                sure = torch.where(fits, mine, sure)
        least, most = torch.minimum(least, middle), torch.maximum(most, middle)
        bound = torch.maximum(bound, middle.abs())
        if alpha is not None:  # the test at alpha decides; rounding of ends does not
            beyond = math.nextafter(alpha, math.inf)
            bound = torch.where(sure[0] & (bound > alpha), alpha, torch.where(~sure[0] & (bound <= alpha), beyond, bound))
            least = torch.where(sure[2], least, least.clamp_max(alpha))
            most = torch.where(sure[2], most, most.clamp_min(-alpha))
        verdict = torch.where(sure[2], 2, torch.where(sure[1], 1, 0))
        return Judged(*(part.view(shape) for part in (middle, least, most, bound, verdict)))

    def table(self, alpha: float | None, delta: float, conditional: bool, method: str = "exact") -> dict[str, Tensor]:
        """Share of all weight, examples and mean s of each g, and what :meth:`judge` knows, by name, ``(a, u)`` each."""
        own = {"mass": self.mass / self.total, "count": self.count, "risk": self.estimates(True)}
        return own | vars(self.judge(alpha, delta, conditional, method))

    def _ends(self, tests: Tests, scale: Tensor, delta: float, conditional: bool, method: str) -> Tensor:
        """Ends of each g by itself and of all at once, ``(2, G, 2)``, in [0, 1]; ``scale``: the range."""
        share = torch.full((2, len(scale)), 0.5 * delta / len(scale), dtype=torch.float64, device=scale.device)
        if method == "exact" and isinstance(tests, betting.Units):
            left = delta
            if self.tail is not None and not self.relative and bool((self.counts == self.counts[:, :1]).all()):
                units = self.units(True, True)[0] if conditional else tests
                plan = far.plan(units, self.tail.to(scale).repeat(self.who.shape[1]) / scale, delta)
                if plan is not None and not plan.exceeded(units):
                    return torch.cat([tests.ends(torch.full_like(share[:, :, None], delta)), plan.ends(units)[:, :, None]], -1)
                left = delta if plan is None else far.KEPT * delta
            share = left * tests.shares(left)
        return tests.ends(torch.stack([torch.full_like(share, delta), share], -1))

    def at_once(self, delta: float) -> tuple[Tensor, Tensor, Tensor]:
        """Estimates inside each g, and the ends of their intervals, which hold for all at once: :meth:`judge` without more."""
        estimate = self.estimates(True)
        tests, low, high = self._tests(True)
        share = torch.full((2, estimate.numel(), 1), 0.5 * delta / estimate.numel(), dtype=torch.float64, device=low.device)
        while isinstance(tests, betting.Units) and len(tests.cuts) > 1 + max(16, min(64, 2 * float(tests.size.double().mean()))):
            tests = tests.quick()  # few units need few blocks
        least, most = (low + (high - low) * end[:, 0] for end in tests.ends(share))
        return estimate, torch.minimum(least.view_as(estimate), estimate), torch.maximum(most.view_as(estimate), estimate)

    def needed(
        self, alpha: float, delta: float, conditional: bool, chance: float, method: str = "exact", shift: float = 0.0
    ) -> int | None:
        """How many examples certify alpha with this chance, each |estimate| being ``shift`` standard errors further from 0.

        An interval (see :func:`torchgmc.audits.betting.expected`) misses alpha where the estimate is off by what is left.
        """
        estimate = self.estimates(conditional)
        if method == "asymptotic":
            error, unit = self._normal(conditional, estimate).error, estimate.new_zeros(())
        else:
            bets, low, high = self._bets(conditional)
            _, spread, u = bets.moments()
            error, unit = spread * (high - low), (high - low) / u
        middle = (estimate.flatten().abs() + shift * error).clamp_min(0.0)
        if not bool((middle < alpha).all()):  # beyond, or a set without examples
            return None
        level = torch.tensor(delta, dtype=torch.float64, device=error.device)

        def enough(examples: int) -> bool:
            factor = len(self.s) / examples
            now = (error * factor**0.5).clamp_min(1e-12)
            half = now * betting.expected(level, unit * factor / now)
            failing = torch.special.ndtr((half - alpha + middle) / now) + torch.special.ndtr((half - alpha - middle) / now)
            return float(failing.sum()) <= 1.0 - chance

        high_end = 1
        while not enough(high_end):
            if high_end >= 1 << 50:
                return None
            high_end *= 2
        low_end = high_end // 2
        while high_end - low_end > 1:
            between = (low_end + high_end) // 2
            low_end, high_end = (low_end, between) if enough(between) else (between, high_end)
        return high_end

    def _tests(self, conditional: bool) -> tuple[Tests, Tensor, Tensor]:
        if conditional and self.two_valued and not self.weighted and (not self.levels or self.s.shape[1] == 1):
            low, high = (end.repeat(self.who.shape[1]) for end in self.bounds)
            n = self.count.flatten()
            middle = ((low + high) / 2).view(-1, self.s.shape[1])[0]
            k = (self.who.double().T @ ((self.s > middle) & self.counts).double()).flatten()
            return binomial.Counts(k, n), low, high
        return self._bets(conditional)

    def _bets(self, conditional: bool) -> tuple[betting.Units | betting.Histogram, Tensor, Tensor]:
        many = len(self.s) > MOST_ROWS and not self.weighted and not self.relative
        return self._histogram(conditional) if many else self.units(conditional)

    def _histogram(self, conditional: bool) -> tuple[betting.Histogram, Tensor, Tensor]:
        """Values of each g on a grid, and where its 0 and 1 lie, ``(G,)`` each."""
        count, columns = self.who.shape[1], self.s.shape[1]
        low, high = self._range(conditional)
        nodes = betting.NODES
        table = torch.zeros((nodes + 1) * columns, count, dtype=torch.float64, device=self.s.device)
        place = torch.arange(columns, device=self.s.device)

        def add(y: Tensor, weight: Tensor) -> None:  # (n, u), (n, u, a)
            y = nodes * y.clamp(0.0, 1.0)
            left = y.long().clamp_max(nodes - 1)
            for node, part in ((left, left + 1 - y), (left + 1, y - left)):
                table.index_add_(0, (node * columns + place).flatten(), (part[:, :, None] * weight).flatten(0, 1))

        step = max(1, betting.AT_ONCE // (count * columns))
        for start in range(0, len(self.s), step):
            rows = slice(start, start + step)
            inside = self.who[rows, None, :] & self.counts[rows, :, None]
            add((self.s[rows] - low) / (high - low), inside.double())
        size = self.count if conditional else self.counts.sum(0).expand(count, -1)
        if not conditional:  # the others, whose 1_A s is 0
            add((-low / (high - low))[None], (size - self.count).T[None].contiguous())
        low, high = low.repeat(count), high.repeat(count)
        variance = torch.zeros_like(low)
        if self.variance is not None:
            variance = self.variance.flatten() * self.counts.sum(0).repeat(count) / (size.flatten() * (high - low).square())
        table = table.view(nodes + 1, columns, count).transpose(1, 2).flatten(1)
        return betting.Histogram(table, variance.nan_to_num(0.0)), low, high

    def _normal(self, conditional: bool, estimate: Tensor) -> asymptotic.Normal:
        """What each cluster adds to each estimate: its influence."""
        s = self.s - self.mean * self.counts if self.relative else self.s
        share = self.weight[:, None] * self.counts  # (n, u)
        member = self.who.double()[:, :, None]
        if self.relative:  # (1_A - P(A)) (s - mean)
            member = member - (self.mass / self.total)
        part = member * (self.weight[:, None] * s)[:, None]  # (n, a, u)
        if conditional:
            part = part / self.mass - (self.who.double()[:, :, None] * share[:, None]) * (estimate / self.mass)
        else:
            part = part / self.total - share[:, None] * (estimate / self.total)
        values = total(part.flatten(1).nan_to_num(0.0), self.cluster)
        above, below = ((self.who > 0).double().T @ sign.double() for sign in (self.s > 0, self.s < 0))
        count = (torch.minimum(above, below) if self.two_valued or self.levels else above + below).flatten()
        return asymptotic.Normal(values * len(values), estimate.flatten().nan_to_num(0.0), count)


def steady(events: Tensor) -> Tensor:
    """Numbers of events in groups and level sets, ``(a, u)``, with ``ALIKE`` more in each as if all groups were alike."""
    alike = events.sum(1, keepdim=True) * events.sum(0) / events.sum().clamp_min(1e-300)
    found = (events + ALIKE) / (1.0 + ALIKE / alike.clamp_min(1e-300))
    return torch.where(alike > RARE, found, torch.zeros_like(found))
