"""Slow, plain and independent: loops that are too simple to be wrong."""

import math


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
