r"""Betting against a mean: tests and intervals that hold for every distribution in a known range and every number of examples.

To test H: :math:`E z \le 0` one starts with a capital of 1 and bets a share of it on every z, which was not looked at before:
:math:`K \leftarrow K (1 + \lambda z)`. Under H the capital is a supermartingale, so it reaches 1/d with probability at most d
(Ville's inequality), whatever rule :math:`\lambda` follows, as long as it looks at earlier values only. The rule here
replicates the z-test: K d is the price of that test's rejection, and :math:`\lambda` hedges it against a loss of size j,

.. math:: \lambda = \frac{1 - \Phi(q - j / \sqrt{v \tau}) / p}{j}, \qquad p = K d, \quad q = \Phi^{-1}(p)

with v the variance so far, :math:`\tau` the number of bets left and j the typical size of what is lost: the third moment over
the second of the values so far. (For small j this is the derivative of the price, :math:`\varphi(q) / (p \sqrt{v \tau})`, which
bets too much where losses are rare and large.) That makes the intervals nearly as narrow as those of the z-test, which holds
only for n to infinity. Where values jump to the far end of their range and that loses, K d is the price of Poisson's test of
the number of jumps, hedged against one more of them: such ends are within 3 % of that test's, however few jumps there are.

:math:`\lambda` is fixed over each of ``BLOCKS`` blocks, and capital is looked at where a block ends, so that all g are worked on
at once, and examples at which a g sees nothing are counted, not visited.
"""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

#: Stretches over which a bet is fixed.
BLOCKS = 128
#: Most of the capital that one z can take.
MOST = 0.97
#: Before anything is seen, the variance is that of calibration, and that counts for so many units.
PRIOR = 20.0
#: Where that is unknown, it is the largest there can be, which counts for so many.
VAGUE = 1.0
#: The lengths of intervals, in standard errors, have the least sum of such powers: the longest counts most.
POWER = 12.0
#: Capital aimed at, beyond what is needed: what hedges a price of 1 comes near it only.
AIM = 0.03
#: Lengths are in standard errors, which are taken to be at least this part of the range: delta is not spent on what hardly occurs.
LEAST = 0.3
#: Numbers worked on at once.
AT_ONCE = 1 << 22
#: Numbers of a block's bets that are prepared at once.
IN_CACHE = 1 << 16
#: Of a histogram: its nodes, and its bets in units of the best one for the variance.
NODES, SHARES = 256, (0.5, 0.7, 1.0, 1.4, 2.0)


@dataclass(frozen=True)
class Units:
    r"""What is bet on: for each g a sequence of independent pairs (A, U) with :math:`0 \le A \le U \le 1`.

    The mean asked about is :math:`E A / E U`. Without weights and clusters U = 1 and A is s, brought to [0, 1]. Where A is a
    share of U that is the same for most units of a g, these are counted; the others are events, sorted by block and g.

    ``size``: number of units of each g, int64 ``(G,)``. ``rest``: A / U of the units that are not events, ``(G,)``. ``others``:
    number of these, and their sums of U and U^2, in each block, ``(3, BLOCKS, G)``. ``g``: of each event, int64 ``(k,)``.
    ``a``, ``u``: A and U of each event, ``(k,)``. ``cuts``: where the events of each block start, ``BLOCKS + 1`` numbers.
    ``variance``: of one A - m U, known from other data, ``(G,)``; 0 where it is not. ``jumps``: single values lie at the end of
    the range (covered or not, p - y). ``near``: range of A / U, ``(2, G)``, if it is known to be shorter than [0, 1].
    """

    size: Tensor
    rest: Tensor
    others: Tensor
    g: Tensor
    a: Tensor
    u: Tensor
    cuts: list[int]
    variance: Tensor
    jumps: bool = False
    near: Tensor | None = None

    @classmethod
    def of(
        cls,
        sets: Tensor,
        which: Tensor,
        rest: Tensor,
        g: Tensor,
        row: Tensor,
        a: Tensor,
        spread: Tensor | None = None,
        jumps: bool = False,
        inside: Tensor | None = None,
    ) -> "Units":
        """From a table of U and a list of events.

        ``sets``: U of every unit in each of J sequences, in order, ``(m, J)``; 0 where a unit is not part of it. ``which``: the
        sequence that each g follows, ``(G,)``. ``rest``: see above. ``g``, ``row``, ``a``: the events, ``(k,)``: test function,
        unit and A. ``spread``: sum over all units of (A - m U)^2 that other data let expect, ``(G,)``; None if unknown.
        ``jumps``: see above. ``inside``: which units are part of a sequence, bool ``(m, 1 or J)``, if not those with U > 0.
        """
        inside = sets > 0 if inside is None else inside.expand_as(sets)
        place = inside.cumsum(0) - 1
        size = inside.sum(0)
        block = _blocks(place, size)  # (m, J)
        terms = torch.stack([inside.double(), sets, sets.square()])
        cell = block.clamp(0, BLOCKS - 1) * sets.shape[1] + torch.arange(sets.shape[1], device=sets.device)
        whole = terms.new_zeros(3, BLOCKS * sets.shape[1]).index_add_(1, cell.flatten(), terms.flatten(1))
        others = whole.view(3, BLOCKS, -1)[:, :, which]
        at, u = block[row, which[g]], sets[row, which[g]]
        order = ((at * len(which) + g) * max(len(sets), 1) + row).argsort()
        g, a, u, at = g[order], a[order], u[order], at[order]
        seen = torch.stack([torch.ones_like(u), u, u.square()])
        seen = torch.zeros_like(others).flatten(1).index_add_(1, at * len(which) + g, seen)
        others = (others - seen.view_as(others)).clamp_min(0.0)
        cuts = torch.bincount(at, minlength=BLOCKS).cumsum(0).tolist()
        spread = torch.zeros_like(rest) if spread is None else spread / size[which].clamp_min(1)
        return cls(size[which], rest, others, g, a, u, [0, *cuts], spread, jumps)

    def sums(self) -> Tensor:
        """Sums of 1 (units), U, U^2, A, U A, A^2 before each block; of events U^3, U^2 A, U A^2, A^3 too: ``(10, ..., G)``."""
        count, blocks, a, u = len(self.size), len(self.cuts) - 1, self.a, self.u
        lengths = torch.tensor(self.cuts, device=a.device).diff()
        cell = torch.repeat_interleave(torch.arange(blocks, device=a.device), lengths) * count + self.g
        terms = torch.stack([torch.ones_like(a), u, u * u, a, u * a, a * a, u**3, u * u * a, u * a * a, a**3])
        cells = terms.new_zeros(10, blocks * count).index_add_(1, cell, terms).view(10, blocks, count)
        units, u, uu = self.others
        cells[:6] += torch.stack([units, u, uu, self.rest * u, self.rest * uu, self.rest.square() * uu])
        return torch.cat([torch.zeros_like(cells[:, :1]), cells.cumsum(1)], 1)

    def rejects(self, mean: Tensor, up: Tensor, level: Tensor, odds: Tensor | None = None) -> Tensor:
        """Which hypotheses about E A / E U are rejected.

        ``mean``: the hypotheses, ``(G, k)``. ``up``: ``(k,)``, bool. True: H is "at most ``mean``", rejected by large values;
        False: "at least ``mean``". ``level``: probability with which a true H may be rejected, ``(k,)`` or ``(G, k)``.
        ``odds``: H is about these units, each U being 0 or 1, and as many more at the end of [0, 1], for each of them, ``(k,)``:
        every unit pays a fee for those.
        """
        device = mean.device
        up, goal = up.to(device), -level.to(device, torch.float64).log()
        sign = torch.where(up, 1.0, -1.0).double()
        bottom = torch.where(up, mean, 1.0 - mean)  # most that a unit can lose
        fee = torch.zeros_like(mean) if odds is None else odds.to(device) * bottom
        if self.near is not None:
            bottom = torch.where(up, mean - self.near[0, :, None], self.near[1, :, None] - mean)
        beyond, bottom = (bottom < 0.0) & (fee == 0.0), bottom.clamp_min(0.0) + fee
        most = MOST / bottom.clamp_min(1e-12)
        sums = self.sums()
        known, counts = self._prior(sums)
        one = known / counts  # before anything is seen, one unit lost all that it can
        capital = highest = torch.zeros_like(mean)  # its logarithm
        fee = sign * fee
        paid, blocks = mean + fee, len(self.cuts) - 1
        rest, skew = self.rest[:, None] - paid, 1.0 - 2.0 * self.rest[:, None]
        lost = (up == (skew < 0.0)) if self.jumps else None  # do long jumps lose?
        skew = torch.copysign(skew.abs().clamp_min(0.05), skew)
        step = max(1, int(IN_CACHE / max(1, (len(self.g) / blocks + len(mean)) * mean.shape[1])))
        for first in range(0, blocks, step):  # what does not depend on the capital, of some blocks at once
            last = min(first + step, blocks)
            start, end = self.cuts[first], self.cuts[last]
            n, u, uu, a, ua, aa, uuu, uua, uaa, aaa = (part[first:last, :, None] for part in sums)
            centred = aa - 2.0 * mean * ua + mean.square() * uu - (a - mean * u).square() / n.clamp_min(1.0)
            seen = known + centred.clamp_min(0.0)  # (blocks, G, k)
            left = (self.size[:, None] - n).clamp_min(1.0) / (counts + n)
            spread = (seen * left).clamp_min(1e-12).sqrt()
            z = self.a[start:end, None] - mean[self.g[start:end]] * self.u[start:end, None] - fee[self.g[start:end]]
            loss = bottom.expand_as(seen)
            if not self.jumps:
                third = sign * (paid * (3.0 * uaa - paid * (3.0 * uua - paid * uuu)) - aaa)  # of losses
                loss = ((one * bottom + third) / seen.clamp_min(1e-30)).minimum(bottom)
            else:  # jumps to be expected: a mean larger by x, by more of them, has a variance larger by x times the skew
                more = skew * (mean * (counts + u) - counts * self.rest[:, None] - a)
                jumps = (spread / skew).square() + (more * left).clamp_min(0.0) / skew.square()
            loss = loss.maximum(1e-4 * spread)
            shift, share = loss / spread, -sign / loss
            for k, (low, high) in enumerate(itertools.pairwise(self.cuts[first : last + 1])):
                price = (capital - goal).clamp_(math.log(1e-300), -1e-9) - AIM
                q = torch.special.ndtri(price.exp())
                after = q - shift[k]
                if lost is not None:
                    after = torch.where(lost, _after_jump(q, jumps[k], loss[k] / skew.abs()), after)
                bet = (torch.expm1(torch.special.log_ndtr(after) - price).clamp_max_(0.0) * share[k]).clamp_(-most, most)
                # log1p is concave: log(1 + b U) >= U log(1 + b), with equality where U is 1
                capital = capital + self.others[1, first + k][:, None] * torch.log1p(bet * rest)
                if odds is not None:
                    capital += (self.others[0] - self.others[1])[first + k][:, None] * torch.log1p(-bet * fee)
                g = self.g[low:high]
                capital.index_add_(0, g, torch.log1p(bet[g] * z[low - start : high - start]))
                highest = torch.maximum(highest, capital)
        return beyond | (highest >= goal)

    def _prior(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Squares of A - m U before anything is seen, and the units that they count for, ``(G, 1)`` each."""
        most_there_can_be = 0.25 * sums[2, -1] / sums[0, -1].clamp_min(1.0)
        known = self.variance > 0.0
        squares = torch.where(known, PRIOR * self.variance.clamp_max(0.25), VAGUE * most_there_can_be)
        return squares[:, None], torch.where(known, PRIOR, VAGUE)[:, None]

    def growth(self, mean: Tensor, bet: Tensor) -> Tensor:
        """Lower bound of the logarithm of what a fixed bet makes of a capital of 1, ``(G, k)``.

        ``mean``: the hypotheses, ``(G, k)``. ``bet``: share of the capital on A - mean U, negative for a bet on small values,
        ``(G, k)``.
        """
        gain = torch.log1p(bet[self.g] * (self.a[:, None] - mean[self.g] * self.u[:, None]))
        rest = self.others[1].sum(0)[:, None] * torch.log1p(bet * (self.rest[:, None] - mean))
        return rest.index_add(0, self.g, gain)

    def quick(self) -> "Units":
        """With half as many blocks, and ends from one grid: a few percent wider, for a fourth of the time."""
        return replace(self, others=self.others[:, ::2] + self.others[:, 1::2], cuts=self.cuts[::2])

    def ends(self, level: Tensor) -> Tensor:
        """Ends of one-sided intervals for E A / E U, taken outward.

        ``level``: probability of missing the mean, of each end, ``(k,)``, or of the low and high ends of each g, ``(2, G, k)``.
        Returns: Low and high ends, ``(2, G, k)``, within [0, 1].
        """
        work = (len(self.g) / BLOCKS + len(self.size)) * 2 * level.shape[-1]
        return search(self.rejects, self.moments(), level, work, int(len(self.cuts) <= BLOCKS))

    def shares(self, delta: float) -> Tensor:
        """Parts of delta for the low and high end of every g, ``(2, G)``, with the least sum of powers of expected lengths.

        They follow from the range and from variances known in advance, so that the ends hold at once with probability
        1 - delta. An end that is far away because of what is too rare to be seen gains most from a larger part.
        """
        parts = torch.full((2, len(self.size)), 0.5 / len(self.size), dtype=torch.float64, device=self.size.device)
        known = (self.variance > 0.0) & (self.size > 0)
        if not bool(known.any()):
            return parts
        spread = (self.variance * self.size).masked_fill(~known, 1.0).sqrt()
        span, unit = torch.stack([self.rest, 1.0 - self.rest]).clamp(0.0, 1.0) / spread, (spread / LEAST).clamp_max(1.0)
        for _ in range(20):  # where the sum is least, what each power loses by a part is in proportion to that part
            lengths = unit * expected(delta * parts, span)
            loses = unit * expected(delta / math.e * parts, span) - lengths
            loses = loses * (lengths.sum(0) / lengths.sum(0)[known].mean()) ** (POWER - 1.0)
            loses = torch.where(known, loses, loses[:, known].mean())
            parts = (parts + loses / loses.sum()) / 2.0
        return parts

    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """E A / E U, its standard error, and the sum of U, ``(G,)`` each."""
        _, u, uu, a, ua, aa = self.sums()[:6, -1]
        middle = (a / u.clamp_min(1e-300)).clamp(0.0, 1.0).masked_fill(u <= 0, 0.5)
        return middle, (aa - 2.0 * middle * ua + middle.square() * uu).clamp_min(0.0).sqrt() / u.clamp_min(1e-300), u


@dataclass(frozen=True)
class Histogram:
    r"""Tests that depend neither on the order of examples nor on how they are cut, of so many that rows cannot be sorted.

    The capital is the mean of those of several fixed bets, :math:`\prod_i (1 + \lambda_k (y_i - \mu))`, whose logarithms are
    sums. Each y is split between its two neighbours of ``NODES + 1`` nodes; the logarithm is concave, so the sum can only
    become smaller. Histograms of parts add up to that of the whole.

    ``table``: weight of each node, ``(NODES + 1, G)``. ``variance``: of y, known from other data, ``(G,)``; 0 where it is not.
    """

    table: Tensor
    variance: Tensor

    @property
    def nodes(self) -> Tensor:
        """Where y is, ``(NODES + 1, 1)``."""
        return torch.linspace(0.0, 1.0, NODES + 1, dtype=torch.float64, device=self.table.device)[:, None]

    def rejects(self, mean: Tensor, up: Tensor, level: Tensor) -> Tensor:
        """As :meth:`Units.rejects`."""
        up, goal = up.to(mean.device), -level.to(mean.device, torch.float64).log()
        bottom = torch.where(up, mean, 1.0 - mean)
        known = self.variance > 0.0
        spread = torch.where(known, self.variance, 0.25) * self.table.sum(0).clamp_min(1.0)
        found = []
        for share in SHARES:
            wide = torch.where(known, share, 4.0 * share * share)  # an unknown variance is tried over a wider range
            bet = torch.minimum((2.0 * goal / spread[:, None]).sqrt() * wide[:, None], 0.95 / bottom.clamp_min(1e-12))
            bet = bet * torch.where(up, 1.0, -1.0)
            gains = [self.table * torch.log1p(b * (self.nodes - m)) for b, m in zip(bet.T, mean.T, strict=True)]
            found.append(torch.stack([gain.sum(0) for gain in gains], 1))
        capital = torch.stack(found).logsumexp(0) - math.log(len(SHARES))
        return (bottom < 0.0) | (capital >= goal)

    def ends(self, level: Tensor) -> Tensor:
        """As :meth:`Units.ends`."""
        return search(self.rejects, self.moments(), level, 2.0 * level.shape[-1] * self.table.numel())

    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`Units.moments`."""
        n = self.table.sum(0)
        middle = ((self.table * self.nodes).sum(0) / n.clamp_min(1.0)).masked_fill(n <= 0, 0.5)
        return middle, (self.table * (self.nodes - middle).square()).sum(0).sqrt() / n.clamp_min(1.0), n


def expected(level: Tensor, span: Tensor) -> Tensor:
    r"""About how long a one-sided interval is, in standard errors; ``span`` is the range divided by n of them.

    It is :math:`z + \mathrm{span} \ln(1/d) / 3`, and not below :math:`1.1\, \mathrm{span} \ln(1/d)`: what is too rare to be
    seen can move the mean so far.
    """
    log = -level.log()
    return torch.maximum(span * log / 3.0 - torch.special.ndtri(level), 1.1 * span * log)


def _after_jump(q: Tensor, left: Tensor, size: Tensor) -> Tensor:
    r"""Normal quantile of the price of Poisson's test after one more jump of this size.

    ``q``: that before it. ``left``: jumps to be expected. Wilson and Hilferty: at most a of M are seen with probability
    :math:`\Phi(3 \sqrt a (1 - 1/(9 a) - \sqrt[3]{M / a}))`, which is solved for a.
    """
    root = 3.0 * left ** (1.0 / 3.0)
    y = (left + q * left.sqrt() + (q * q + 2.0) / 6.0).clamp_min(0.3) ** (1.0 / 6.0)  # the sixth root of a
    for _ in range(3):
        cube = y * y * y
        slope = (9.0 * y * y + 1.0 / (cube * y) - root).clamp_min(1e-3)
        y = (y - (3.0 * cube - 1.0 / (3.0 * cube) - root * y - q) / slope).maximum(0.2 * y)
    half = (y**6 - size).clamp_min(1e-3).sqrt()
    return 3.0 * half - 1.0 / (3.0 * half) - root * half ** (1.0 / 3.0)


def search(rejects: Any, moments: Any, level: Tensor, work: float, rounds: int = 0, guess: Tensor | None = None) -> Tensor:
    """Where rejections begin on either side of the middle, ``(2, G, k)``, from the outside in; ``guess``: about how far off."""
    (middle, spread, u), once = moments, rounds == 1
    count = level.shape[-1]
    level = level.to(middle.device, torch.float64).expand(2, len(middle), -1).transpose(0, 1).flatten(1)  # (G, 2 k)
    steps = 15 if once else max(4, min(24 if guess is None else 12, int(AT_ONCE / max(work, 1.0))))
    if guess is None:
        guess = -torch.special.ndtri(level) * spread[:, None] - level.log() / u.clamp_min(1.0)[:, None]
    else:
        guess = guess.transpose(0, 1).flatten(1)
    up = torch.tensor([True, False], device=middle.device).repeat_interleave(count)
    sign = torch.where(up, -1.0, 1.0)  # the low end is where "at most" is rejected
    edge = torch.where(up, 0.0, 1.0)
    inner = middle[:, None].expand(-1, 2 * count)
    outer = edge.expand_as(inner)
    factor = torch.logspace(math.log10(0.6), math.log10(6.0), steps, dtype=torch.float64, device=middle.device)
    if once:
        spread = spread.clamp_min(1e-9)[:, None]
        guess = spread * expected(level, 1.0 / (u.clamp_min(1.0)[:, None] * spread))
        factor = torch.cat([0.55 * 2.0 ** (torch.arange(12).to(factor) / 11), factor.new_tensor([1.25, 1.5, 3.0])])
    away = (sign * guess)[..., None] * factor
    tried = torch.minimum(torch.maximum(inner[..., None] + away, away.new_zeros(())), away.new_ones(()))
    for _ in range(rounds or (2 if steps == 24 else 3)):
        found = rejects(tried.flatten(1), up.repeat_interleave(steps), level.repeat_interleave(steps, 1)).view_as(tried)
        inner, outer = outermost(inner, tried, outer, found)
        share = torch.arange(1, steps + 1, device=middle.device, dtype=torch.float64) / (steps + 1)
        tried = inner[..., None] + (outer - inner)[..., None] * share
    return torch.stack([outer[:, :count], outer[:, count:]])


def outermost(inner: Tensor, tried: Tensor, outer: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
    """Where rejections from the outside in break off: the last place that is not rejected, and the first that is.

    ``inner``, ``outer``: ends of the search, ``(...)``; the outer one needs no test. ``tried``: places from the inner to the
    outer end, ``(..., k)``. ``rejected``: bool, ``(..., k)``.
    """
    place = tried.shape[-1] + 1 - rejected.flip(-1).long().cumprod(-1).sum(-1, keepdim=True)
    path = torch.cat([inner[..., None], tried, outer[..., None]], -1)
    return path.gather(-1, place - 1)[..., 0], path.gather(-1, place)[..., 0]


def _blocks(place: Tensor, size: Tensor) -> Tensor:
    """Block of the unit in each place of sequences of this size.

    Blocks become shorter, as the price of the test moves faster at the end.
    """
    size = size.clamp_min(1)
    block = (BLOCKS * (1.0 - (1.0 - place / size).clamp(0.0, 1.0).sqrt())).long().clamp(0, BLOCKS - 1)
    left = (1.0 - torch.arange(BLOCKS + 1, device=place.device, dtype=torch.float64) / BLOCKS).square()  # before each block
    start = (1.0 - left)[:, None] * size  # which rounding must not contradict
    column = torch.arange(place.shape[1], device=place.device).expand_as(place)
    return block + (start[block + 1, column] <= place).long() - (start[block, column] > place).long()
