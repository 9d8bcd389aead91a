"""DistributionHead in plain NumPy: violations and the paper's algorithm, row by row over the whole vocabulary."""

import numpy as np
import torch

from torchgmc.heads.distribution.tilt import Dual, atoms, log_masses


def draw(n=40, vocabulary=12, a=3, seed=0, strength=1.5):
    """Logits with a planted bias, overlapping lists and overlapping groups, all float64."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, vocabulary, generator=g, dtype=torch.float64)
    member = torch.rand(n, a, generator=g) < 0.45
    member[:a] |= torch.eye(a, dtype=torch.bool)
    member[a : 2 * a] &= ~torch.eye(a, dtype=torch.bool)[: len(member[a : 2 * a])]
    lists = [[1, 2, 3], [3, 4], [6]]
    logits[:, 1:4] += strength * member[:, :1]
    logits[:, 6] -= strength * member[:, -1]
    return logits, member, lists


def violation_loop(p, member, lists, weight, conditional=False):
    """E[1_A (p(U) - E p(U))], example by example."""
    p, member, weight = p.numpy(), member.numpy(), weight.numpy() / weight.numpy().sum()
    table = np.zeros((member.shape[1], len(lists)))
    for k, tokens in enumerate(lists):
        mean = sum(w * row[tokens].sum() for w, row in zip(weight, p, strict=True))
        for a in range(member.shape[1]):
            total = sum(w * (row[tokens].sum() - mean) for w, row, m in zip(weight, p, member[:, a], strict=True) if m)
            table[a, k] = total / (weight[member[:, a]].sum() if conditional else 1.0)
    return torch.from_numpy(table)


def numpy_simplex(f):
    """Sort-based projection of one row."""
    ordered = np.sort(f)[::-1]
    excess = np.cumsum(ordered) - 1
    count = np.nonzero(ordered * np.arange(1, len(f) + 1) > excess)[0][-1] + 1
    return np.maximum(f - excess[count - 1] / count, 0)


def numpy_algorithm(logits, member, lists, alpha, eta, max_iter, conditional=False):
    """Algorithm 1 of the paper, row by row over the whole vocabulary."""
    p = torch.softmax(logits, 1).numpy().copy()
    inside = member.numpy()
    log = []
    for _ in range(max_iter):
        table = violation_loop(torch.from_numpy(p), member, lists, torch.ones(len(p)), conditional).numpy()
        who, what = np.unravel_index(np.abs(table).argmax(), table.shape)
        if abs(table[who, what]) <= alpha:
            break
        size = eta * np.sign(table[who, what])
        log.append((who, what, size))
        share = inside[:, who].mean() if conditional else 1.0
        for i in np.nonzero(inside[:, who])[0]:
            g = np.zeros(p.shape[1])
            g[lists[what]] = 1 / share
            p[i] = numpy_simplex(p[i] - size * g)
    return torch.from_numpy(p), log


def dual_of(logits, member, lists, weight=None, conditional=False):
    """The package's dual problem of these prompts."""
    found = atoms(lists)
    weight = torch.ones(len(logits), dtype=torch.float64) if weight is None else weight
    return Dual(log_masses(logits, found.ids, found.atom, len(found.lists)), found.lists, member, weight, conditional)


def tail_and_words(logits, lists):
    """Probabilities, those of words in a list, those of the tail, which tokens are the tail, and the atoms."""
    found = atoms(lists)
    p = torch.softmax(logits, 1)
    keep = torch.ones(logits.shape[1], dtype=torch.bool)
    keep[found.ids] = False
    return p, p[:, found.ids], p[:, keep], keep, found
