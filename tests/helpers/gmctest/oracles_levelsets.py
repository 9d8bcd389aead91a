"""Multicalibration and multivalid quantiles by loops over examples, groups and level sets: slow, plain, independent."""

import math

import torch


def level(value, edges):
    """Number of inner edges at or below the value."""
    return sum(edge <= value for edge in edges)


def cell_table(values, s, member, edges, weight=None, share=None):
    """E[1_A 1{value_c in level k} s_c]: table[a][k * C + c]; values and s are rows of length C."""
    n, a, columns = len(s), len(member[0]), len(s[0])
    weight = weight or [1.0] * n
    total = sum(weight)
    table = [[0.0] * ((len(edges) + 1) * columns) for _ in range(a)]
    for i in range(n):
        for c in range(columns):
            k = level(values[i][c], edges)
            for j in range(a):
                if member[i][j]:
                    table[j][k * columns + c] += weight[i] * s[i][c] / total
    if share is not None:
        table = [[v / share[j] for v in row] for j, row in enumerate(table)]
    return table


def worst_cell(table):
    """(|violation|, group, column, sign) of the largest; the first of equals."""
    best = (-1.0, 0, 0, 0.0)
    for j, row in enumerate(table):
        for u, v in enumerate(row):
            if abs(v) > best[0]:
                best = (abs(v), j, u, math.copysign(1.0, v))
    return best


def simplex(row):
    """Projection onto the simplex: bisection on the shift."""
    low, high = min(row) - 1.0, max(row)
    for _ in range(200):
        middle = (low + high) / 2
        if sum(max(v - middle, 0.0) for v in row) > 1.0:
            low = middle
        else:
            high = middle
    return [max(v - high, 0.0) for v in row]


def probability(row, euclidean):
    if len(row) == 1:
        return [min(max(row[0], 0.0), 1.0)] if euclidean else [1.0 / (1.0 + math.exp(-row[0]))]
    if euclidean:
        return simplex(row)
    top = max(row)
    total = sum(math.exp(v - top) for v in row)
    return [math.exp(v - top) / total for v in row]


def algorithm_1(z, s_of, f_of, member, edges, alpha, eta, max_iter, project=None, share=None, splits=None):
    """Algorithm 1 (2 with ``splits``): one cell a step.

    z: rows of coordinates; s_of(i, row) and f_of(row): mapping and the values whose level sets count.
    Returns the final z and the steps [(group, column, signed step, worst before)].
    """
    z, steps = [list(row) for row in z], []
    columns = len(z[0])
    for t in range(max_iter):
        weight = None if splits is None else [1.0 if split == 2 * t else 0.0 for split in splits]
        values = [f_of(row) for row in z]
        table = cell_table(values, [s_of(i, row) for i, row in enumerate(z)], member, edges, weight, share)
        size, j, u, sign = worst_cell(table)
        if size <= (alpha if splits is None else 0.75 * alpha):
            break
        steps.append((j, u, sign * eta, size))
        k, c = divmod(u, columns)
        length = sign * eta / (1.0 if share is None else share[j])
        for i in range(len(z)):
            if member[i][j] and level(values[i][c], edges) == k:
                z[i][c] -= length
                if project is not None:
                    z[i] = project(z[i])
    return z, steps


def scores_of(n, seed=0, a=3):
    """Residuals whose spread depends on the groups."""
    g = torch.Generator().manual_seed(seed)
    member = torch.rand(n, a, generator=g) < torch.linspace(0.3, 0.7, a)
    member[:1] = True
    spread = 1 + member.double() @ torch.linspace(1.5, 0.2, a, dtype=torch.float64)
    return (spread * torch.randn(n, generator=g, dtype=torch.float64)).abs(), member


def events(n, seed=0, a=3, slope=0.4, shift=1.0):
    """Probabilities that are wrong by group, and too steep in one of them; outcomes; membership; the truth."""
    g = torch.Generator().manual_seed(seed)
    member = torch.rand(n, a, generator=g) < torch.linspace(0.3, 0.7, a)
    member[:1] = True
    base = 1.5 * torch.randn(n, generator=g, dtype=torch.float64)
    logit = base + shift * (member.double() @ torch.linspace(1, -1, a, dtype=torch.float64)) - slope * base * member[:, 0]
    truth = logit.sigmoid()
    y = torch.rand(n, generator=g, dtype=torch.float64) < truth
    return base.sigmoid(), y, member, truth


def classes(n, seed=0, a=3, c=3):
    g = torch.Generator().manual_seed(seed)
    member = torch.rand(n, a, generator=g) < 0.5
    member[:1] = True
    logit = torch.randn(n, c, generator=g, dtype=torch.float64)
    truth = (logit + 0.8 * member.double() @ torch.randn(a, c, generator=g, dtype=torch.float64)).softmax(1)
    y = torch.multinomial(truth, 1, generator=g)[:, 0]
    return logit.softmax(1), y, member, truth


def promised_table(values, s, member, edges, share=None):
    """What the solver "exact" promises: groups and everyone last (unless a group is everyone); level sets and their union."""
    member = [list(map(bool, row)) for row in member]
    if not any(all(row[j] for row in member) for j in range(len(member[0]))):
        member, share = [[*row, True] for row in member], None if share is None else [*share, 1.0]
    table, columns = cell_table(values, s, member, edges, share=share), len(s[0])
    if edges:
        table = [row + [sum(row[c::columns]) for c in range(columns)] for row in table]
    return table


def head_table(head, probs, y, member, conditional=False):
    """Violations of the head's output by loops, as in :func:`promised_table`; level sets from the output itself."""
    f = head(probs, member)
    rows = f[:, None] if f.dim() == 1 else f
    target = y.double()[:, None] if f.dim() == 1 else torch.nn.functional.one_hot(y, f.shape[1]).double()
    edges = [k / head.num_bins for k in range(1, head.num_bins)]
    share = (member.double().mean(0)).tolist() if conditional else None
    return torch.tensor(promised_table(rows.tolist(), (rows - target).tolist(), member.tolist(), edges, share))
