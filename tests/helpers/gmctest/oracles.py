"""Slow, plain and independent: loops that are too simple to be wrong."""

import math
import statistics

import torch
from torch import Tensor


def everyone_too(groups: Tensor) -> Tensor:
    """Membership with a last column to which everyone belongs."""
    return torch.cat([groups, torch.ones(len(groups), 1, dtype=groups.dtype)], 1)


def violations_loop(who, s, what=None, weight=None):
    """who[i][a], s[i][l], what[k][l], weight[i] -> table[a][k], all nested lists."""
    n, a = len(who), len(who[0]) if who else 0
    dim = len(s[0]) if s else 0
    what = what or [[1.0 if i == j else 0.0 for i in range(dim)] for j in range(dim)]
    weight = weight or [1.0] * n
    table = [[0.0] * len(what) for _ in range(a)]
    for i in range(n):
        for j in range(a):
            if who[i][j]:
                for k, v in enumerate(what):
                    table[j][k] += weight[i] * sum(x * y for x, y in zip(s[i], v, strict=True))
    total = sum(weight)
    return [[x / total if total else 0.0 for x in row] for row in table]


def miss_rate(scores, mask, threshold):
    """Share of the positive pixels at or below the threshold; None without a positive pixel."""
    positive = [h for h, y in zip(scores, mask, strict=True) if y]
    return sum(h <= threshold for h in positive) / len(positive) if positive else None


def false_alarm_rate(scores, mask, threshold):
    """Share of the negative pixels above the threshold; None without a negative pixel."""
    negative = [h for h, y in zip(scores, mask, strict=True) if not y]
    return sum(h > threshold for h in negative) / len(negative) if negative else None


def group_violations(scores, masks, groups, thresholds, target, risk=miss_rate, conditional=False, weight=None):
    """Violation of each group by a loop over images and pixels; images without a risk are left out."""
    weight = weight or [1.0] * len(scores)
    risks = [risk(h, y, t) for h, y, t in zip(scores, masks, thresholds, strict=True)]
    used = [i for i in range(len(scores)) if risks[i] is not None]
    total = sum(weight[i] for i in used)
    table = []
    for j in range(len(groups[0])):
        members = [i for i in used if groups[i][j]]
        excess = sum(weight[i] * (risks[i] - target) for i in members)
        mass = sum(weight[i] for i in members)
        table.append(excess / mass if conditional else excess / total)
    return table


def algorithm_1(scores, masks, groups, target, alpha, eta, start, max_iter, conditional=False):
    """Algorithm 1 to the letter for thresholds: largest violation first, one image and one pixel at a time."""
    n, a = len(scores), len(groups[0])
    usable = [i for i in range(n) if any(masks[i])]
    share = [sum(1 for i in usable if groups[i][j]) / len(usable) for j in range(a)]
    thresholds, steps = [start] * n, 0
    while steps < max_iter:
        table = group_violations(scores, masks, groups, thresholds, target, conditional=conditional)
        worst = max(range(a), key=lambda j: abs(table[j]))
        if abs(table[worst]) <= alpha:
            break
        sign = math.copysign(1.0, table[worst])
        size = eta / share[worst] if conditional else eta
        thresholds = [t - sign * size if groups[i][worst] else t for i, t in enumerate(thresholds)]
        steps += 1
    return thresholds, steps


def pinball(scores, masks, thresholds, target):
    """The potential: mean over images of mean over positives of (lambda - h)_+ - target lambda."""
    total, count = 0.0, 0
    for h, y, t in zip(scores, masks, thresholds, strict=True):
        positive = [x for x, inside in zip(h, y, strict=True) if inside]
        if positive:
            total += sum(max(t - x, 0.0) for x in positive) / len(positive) - target * t
            count += 1
    return total / count


def bet(
    units: list[tuple[float, float, bool]],
    mean: float,
    up: bool,
    level: float,
    blocks: int,
    most: float,
    prior: float,
    known: float = math.inf,
    jumps: bool = False,
    rest: float = 0.0,
    aim: float = 0.0,
) -> bool:
    """Is "E A / E U is at most (up) or at least ``mean``" rejected? One unit (A, U, event) at a time, in order."""
    n, capital, place = len(units), 1.0, 0
    largest = prior * (min(known, 0.25) if known < math.inf else 0.25 * sum(u * u for _, u, _ in units) / max(n, 1))
    for block in range(blocks):
        seen = [a - mean * u for a, u, _ in units[:place]]
        middle = sum(seen) / max(len(seen), 1)
        variance = (largest + sum((z - middle) ** 2 for z in seen)) / (prior + len(seen))
        price = min(max(capital * level, 1e-300), 1 - 1e-9) * math.exp(-aim)
        normal = statistics.NormalDist()
        spread, bottom = math.sqrt(max(variance * max(n - place, 1), 1e-12)), mean if up else 1 - mean
        losses = sum((1 if up else -1) * (mean * u - a) ** 3 for a, u, event in units[:place] if event)
        total = variance * (prior + len(seen))
        loss = max(bottom if jumps else min((largest / prior * bottom + losses) / max(total, 1e-30), bottom), 1e-4 * spread)
        after = normal.inv_cdf(price) - loss / spread
        if jumps and up == (rest > 0.5):  # the long jumps lose: Poisson's test
            skew = math.copysign(max(abs(1 - 2 * rest), 0.05), 1 - 2 * rest)
            sums = [sum(part) for part in zip(*units[:place], strict=True)] or [0.0, 0.0]
            more = skew * (mean * (prior + sums[1]) - prior * rest - sums[0]) / (prior + len(seen)) * max(n - place, 1)
            after = after_jump(normal.inv_cdf(price), (spread**2 + max(more, 0.0)) / skew**2, loss / abs(skew))
        share = (1 - normal.cdf(after) / price) / loss
        share = min(max(share, 0.0), most / bottom)
        while place < (1 - (1 - (block + 1) / blocks) ** 2) * n - 1e-9 and place < n:
            a, u, event = units[place]
            sign = share if up else -share
            capital *= 1 + sign * (a - mean * u) if event else (1 + sign * (a / u - mean)) ** u
            place += 1
        if capital >= 1 / level:
            return True
    assert place == n
    return False


def after_jump(q: float, left: float, size: float) -> float:
    """Where at most a jumps are allowed, of ``left`` to be expected, which has the normal quantile q: the same for a - ``size``."""

    def quantile(a: float) -> float:  # Wilson and Hilferty
        return 3 * math.sqrt(a) * (1 - 1 / (9 * a) - (left / a) ** (1 / 3))

    a = max(left + q * math.sqrt(left) + (q * q + 2) / 6, 0.3)
    for _ in range(3):  # Newton, in the sixth root
        y = a ** (1 / 6)
        a = max(y - (quantile(a) - q) / max(9 * y**2 + y**-4 - 3 * left ** (1 / 3), 1e-3), 0.2 * y) ** 6
    return quantile(max(a - size, 1e-3))


def chernoff_ends(p: float, n: float, log: float) -> tuple[float, float]:
    """Where n kl(p, q) = log on either side of p, by SciPy."""
    from scipy.optimize import brentq

    def excess(q: float) -> float:
        first = p * math.log(p / q) if p > 0 else 0.0
        second = (1 - p) * math.log((1 - p) / (1 - q)) if p < 1 else 0.0
        return n * (first + second) - log

    tiny = 1e-15
    low = 0.0 if p <= tiny or excess(tiny) <= 0 else brentq(excess, tiny, p, xtol=1e-15)
    high = 1.0 if p >= 1 - tiny or excess(1 - tiny) <= 0 else brentq(excess, p, 1 - tiny, xtol=1e-15)
    return low, high


def audit_interval(
    s: list[float], inside: list[bool], weight: list[float], bounds: tuple[float, float], share: float, conditional: bool
) -> tuple[float, float]:
    """Interval of one group's violation; ``share`` is delta over the number of g."""
    bottom, top = bounds
    members = [(x, w) for x, a, w in zip(s, inside, weight, strict=True) if a]
    mass, n = sum(w for _, w in members), len(s)
    equal = max(weight) - min(weight) < 1e-12
    own_mean = sum(w * x for x, w in members) / mass
    share /= 2 if conditional else 3
    sample = members if conditional else [(x if a else 0.0, w) for x, a, w in zip(s, inside, weight, strict=True)]
    if not conditional:
        bottom, top = min(bottom, 0.0), max(top, 0.0)
    m, norm = len(sample), sum(w for _, w in sample)
    mean = sum(w * x for x, w in sample) / norm
    if equal:
        low, high = (bottom + (top - bottom) * q for q in chernoff_ends((mean - bottom) / (top - bottom), m, math.log(2 / share)))
    else:
        half = (top - bottom) * math.sqrt(sum(w * w for _, w in sample) * math.log(2 / share) / 2) / norm
        low, high = mean - half, mean + half
    if m > 1:
        second = sum((w * x) ** 2 for x, w in sample)
        variance = max(((m / norm) ** 2 * second - m * mean**2) / (m - 1), 0.0)
        log = math.log(4 / share)
        half = math.sqrt(2 * variance * log / m) + 7 * (top - bottom) * m / norm * max(weight) * log / (3 * (m - 1))
        low, high = max(low, mean - half), min(high, mean + half)
    if equal and not conditional:
        bottom, top = bounds
        ends = chernoff_ends((own_mean - bottom) / (top - bottom), len(members), math.log(2 / (0.9 * share)))
        few, many = chernoff_ends(len(members) / n, n, math.log(2 / (0.1 * share)))
        corners = [(bottom + (top - bottom) * q) * p for q in ends for p in (few, many)]
        low, high = max(low, min(corners)), min(high, max(corners))
    return low, high
