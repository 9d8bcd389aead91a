r"""Boosted trees over binned columns: a level of a tree is one search over all :math:`g = 1_{leaf} 1_A` at once.

A is ``x >= cut``, ``x = level`` or ``x is missing``. The search counts: columns are coded (a level each for missing values and
for categories), sums of slopes and curvatures over leaf x column x code come from one `bincount` per column, columns of two
values packed six to a code, and every split of every leaf follows from cumulative sums. Slopes are rounded to a power of two,
so that the sums are exact in any order: the same trees come out however the rows were cut or spread.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Boosted", "Coded", "Grown", "Loss", "boost", "code", "grow", "walk"]

#: Rows that the splits of one tree are searched on; leaf values use all.
SAMPLE = 1 << 16
#: Entries up to which all columns are counted at once; of more, one by one, which the caches like better.
AT_ONCE = 1 << 18
#: Columns of two values that share a code.
PACK = 6
#: Unit of slopes and curvatures: sums of a billion of them are exact.
GRAIN = 2.0**-22
#: Trees without progress, times the rate, after which no more are grown.
PATIENCE = 5.0
#: Share of the columns that the first split of a tree may use, drawn for each.
ROOTS = 0.1
#: Unit of the moves of leaves, and the largest: their sums are exact in any order.
UNIT, LARGEST = 2.0**-32, 16.0


class Coded(NamedTuple):
    """Columns as small codes.

    Attributes:
        codes: uint8 ``(q, n)``; ``missing`` (the last) for NaN.
        cuts: value that each code starts at (numbers) or stands for (categories), float32 ``(q, b)``; inf where there is none.
        equal: columns of categories, bool ``(q,)``.
        pairs: columns that hold two values and no NaN, int64 ``(p,)``; ``packs``: six of them to a code, uint8 ``(p / 6, n)``.
    """

    codes: Tensor
    cuts: Tensor
    equal: Tensor
    pairs: Tensor
    packs: Tensor

    @property
    def missing(self) -> int:
        """Code of NaN."""
        return self.cuts.shape[1]

    def pick(self, rows: Tensor | slice) -> "Coded":
        """Some of the rows."""
        return self._replace(codes=self.codes[:, rows], packs=self.packs[:, rows])

    def some(self, columns: Tensor) -> "Coded":
        """Some of the columns, bool ``(q,)``."""
        nothing = self.pairs[:0]
        return Coded(self.codes[columns], self.cuts[columns], self.equal[columns], nothing, self.packs[:0])


class Grown(NamedTuple):
    """One tree: column, code and direction of NaN of each split ``(N,)``, and where each code goes, bool ``(N, b + 1)``."""

    column: Tensor
    code: Tensor
    missing: Tensor
    right: Tensor
    gain: Tensor


@dataclass
class Loss:
    """What is minimised.

    Attributes:
        slopes: (z, rows) -> derivative and curvature of each row, ``(m, C)`` each.
        value: (z, rows) -> loss of each row ``(m,)``.
        steps: (z, place, leaves, rows) -> step of each leaf, ``(leaves, C)``; None for Newton's. ``place``: leaf of each row.
    """

    slopes: Callable[[Tensor, slice], tuple[Tensor, Tensor]]
    value: Callable[[Tensor, slice], Tensor]
    steps: Callable[[Tensor, Tensor, int, slice], Tensor] | None = None


def code(columns: Tensor, equal: Tensor, bins: int) -> Coded:
    """Codes of columns ``(n, q)``, float32: up to ``bins`` of about equal size; of categories the most frequent values."""
    n, q = columns.shape
    cuts = torch.full((q, bins), math.inf, dtype=torch.float32, device=columns.device)
    codes = torch.empty(q, n, dtype=torch.uint8, device=columns.device)
    two = torch.zeros(q, dtype=torch.bool, device=columns.device)
    for j, is_equal in enumerate(equal.tolist()):  # columns, not rows
        column = columns[:, j].contiguous()
        lacking = column.isnan()
        known = column[~lacking]
        found, count = torch.unique(known, return_counts=True)
        two[j] = len(found) == 2 and len(known) == n
        if is_equal:
            kept = found[count.argsort(descending=True, stable=True)[: bins - 1]].sort().values
            place = torch.searchsorted(kept, column).clamp_max(max(len(kept) - 1, 0))
            place = torch.where(kept[place] == column, place, bins - 1) if len(kept) else torch.zeros_like(place)
        else:
            kept = found
            if bool((found != found.round()).any()):  # half-way: rounding in another format turns nobody
                found = torch.cat([found[:1], (found[1:] + found[:-1]) / 2])
                kept = found
            if len(found) > bins:
                kept = found[_spread(count, bins)]
            place = torch.searchsorted(kept, column, right=True).sub_(1).clamp_min_(0)
        cuts[j, : len(kept)] = kept
        codes[j] = torch.where(lacking, bins, place).to(torch.uint8)
    pairs = two.nonzero()[:, 0]
    bit = torch.arange(PACK, device=columns.device).to(torch.uint8)
    packs = [(codes[some] << bit[: len(some), None]).sum(0, dtype=torch.uint8) for some in torch.split(pairs, PACK)]
    return Coded(codes, cuts, equal, pairs, torch.stack(packs) if packs and len(pairs) else codes[:0])


def _spread(count: Tensor, bins: int) -> Tensor:
    """Which of the sorted values start a bin: frequent ones have a bin of their own, the others share bins of equal size."""
    heavy = count * bins > count.sum()
    rest = bins - 2 * int(heavy.sum())
    if rest < 2:
        heavy, rest = torch.zeros_like(heavy), bins
    light = torch.where(heavy, 0, count).cumsum(0).double()
    ranks = torch.arange(1, rest, device=count.device).double() * (light[-1] / rest)
    first = torch.searchsorted(light, ranks, right=True)
    own = heavy.nonzero()[:, 0]
    starts = torch.cat([torch.zeros_like(first[:1]), first, own, own + 1])
    found: Tensor = torch.unique(starts.clamp_max(len(count) - 1))
    return found


def histogram(coded: Coded, leaf: Tensor, leaves: int, values: Tensor) -> Tensor:
    """Sums of ``values`` (n, v) over leaf x column x code, ``(leaves, q, b + 1, v)``."""
    size, (q, n) = coded.missing + 1, coded.codes.shape
    if q * n <= AT_ONCE:
        first = leaf * (q * size) + torch.arange(q, device=leaf.device)[:, None] * size
        place = (first + coded.codes).flatten()
        sums = [torch.bincount(place, v.expand(q, n).reshape(-1), leaves * q * size) for v in values.unbind(1)]
        return torch.stack(sums, 1).view(leaves, q, size, -1)
    total = values.new_zeros(leaves, q, size, values.shape[1])

    def count(code: Tensor, wide: int) -> Tensor:
        place = leaf * wide + code
        return torch.stack([torch.bincount(place, v, leaves * wide).view(leaves, wide) for v in values.unbind(1)], 2)

    packed = set(coded.pairs.tolist())
    for j in range(len(coded.codes)):  # columns, not rows
        if j not in packed:
            total[:, j] = count(coded.codes[j], size)
    bits = (torch.arange(1 << PACK, device=leaf.device) >> torch.arange(PACK, device=leaf.device)[:, None]) & 1
    for some, pack in zip(torch.split(coded.pairs, PACK), coded.packs, strict=False):
        cells = count(pack, 1 << PACK)  # (leaves, 64, v)
        upper = bits[: len(some)].to(values.dtype) @ cells
        total[:, some, 1] = upper
        total[:, some, 0] = cells.sum(1, keepdim=True) - upper
    return total


def grow(
    coded: Coded, slope: Tensor, curvature: Tensor, depth: int, ridge: float, least: float, roots: Tensor | None = None
) -> Grown:
    """The tree whose splits, level by level, gain most in the quadratic model of the loss.

    Args:
        coded: columns of the rows.
        slope, curvature: ``(n, C)``, multiples of ``GRAIN``.
        depth: levels.
        ridge: added to each leaf's curvature.
        least: smallest curvature of a leaf, summed over C.
        roots: columns that the first split may use, bool ``(q,)``; None for all.
    """
    columns = slope.shape[1]
    values = torch.cat([slope, curvature], 1)
    size, device = coded.missing + 1, slope.device
    leaf = torch.zeros(len(slope), dtype=torch.int64, device=device)
    parts: list[tuple[Tensor, ...]] = []
    for level in range(depth):
        leaves = 1 << level
        if level == 0 and roots is not None:
            sums = values.new_zeros(1, len(coded.codes), size, values.shape[1])
            sums[:, roots] = histogram(coded.some(roots), leaf, 1, values)
        else:
            sums = histogram(coded, leaf, leaves, values)
        first = 0 if level or roots is None else int(roots.nonzero()[0])
        whole = sums.sum(2)[:, first]  # (leaves, v)
        lost = sums[:, :, -1:]
        upper = sums[:, :, :-1].flip(2).cumsum(2).flip(2)  # x >= cut of the code
        upper = torch.where(coded.equal[:, None, None], sums[:, :, :-1], upper)
        upper = torch.cat([upper, torch.zeros_like(lost)], 2)  # the last: nobody
        right = torch.stack([upper, upper + lost], 3)  # (leaves, q, b + 1, 2, v)
        gain = _gain(right, whole, columns, ridge, least)
        every = torch.arange(size, device=device)
        useless = torch.where(coded.equal[:, None], every == coded.missing - 1, every == 0)  # all other levels; all numbers
        gain = gain.masked_fill(useless[..., None], -math.inf).flatten(1)
        if level == 0 and roots is not None:
            gain = gain.masked_fill(~roots.repeat_interleave(2 * size), -math.inf)
        best, at = gain.max(1)
        none = best <= 1e-9
        at = torch.where(none, (size - 1) * 2, at)  # column 0, nobody
        column, rest = at.div(2 * size, rounding_mode="floor"), at.remainder(2 * size)
        k, missing = rest.div(2, rounding_mode="floor"), rest.remainder(2).bool()
        table = torch.where(coded.equal[column, None], every == k[:, None], every >= k[:, None])
        table[:, -1] = missing
        parts.append((column, k, missing, table, torch.where(none, torch.zeros_like(best), best)))
        here = coded.codes.gather(0, column[leaf][None])[0].long()
        leaf = 2 * leaf + table[leaf, here]
    return Grown(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _gain(right: Tensor, whole: Tensor, columns: int, ridge: float, least: float) -> Tensor:
    """Fall of the quadratic model, ``(leaves, q, b + 1, 2)``; -inf where a side is too small."""
    whole = whole[:, None, None, None]
    left = whole - right

    def score(sums: Tensor) -> Tensor:
        slope, curvature = sums[..., :columns], sums[..., columns:]
        return (slope.square() / (curvature + ridge)).sum(-1)

    small = torch.minimum(right[..., columns:].sum(-1), left[..., columns:].sum(-1)) < least
    return (score(right) + score(left) - score(whole)).masked_fill(small, -math.inf)


def leaves_of(coded: Coded, tree: Grown) -> Tensor:
    """Leaf of every row, int64 ``(n,)``."""
    node = torch.zeros(coded.codes.shape[1], dtype=torch.int64, device=coded.codes.device)
    for _ in range((len(tree.column) + 1).bit_length() - 1):
        here = coded.codes.gather(0, tree.column[node][None])[0].long()
        node = 2 * node + 1 + tree.right[node, here]
    return node - len(tree.column)


class Boosted(NamedTuple):
    """Trees, the moves of their leaves ``(T, leaves, C)`` (z falls by them), and the held-out loss before and after each.

    ``z``: of the held-out rows, where trees that did not see them put it; of all trees grown.
    """

    trees: list[Grown]
    moves: Tensor
    history: list[float]
    z: Tensor


def boost(
    coded: Coded,
    z: Tensor,
    final: Tensor,
    loss: Loss,
    held: int,
    depth: int,
    most: int,
    rate: float,
    ridge: float,
    least: float,
    stop: bool = True,
) -> Boosted:
    """Trees until the loss of the last ``held`` rows has not fallen for a while; the best prefix, its moves fitted to all rows.

    Args:
        coded: columns, in an order without a pattern; the search sees all but the last ``held`` rows.
        z: where the trees start, ``(n, C)``, found without the held-out rows (else they would stop too early).
        final: where their moves start when these are fitted again, to all rows.
        loss: what is minimised.
        held: rows that decide how many trees are kept.
        depth, most, rate, ridge, least: levels and number of trees, share of a leaf's step that is taken, see :func:`grow`.
        stop: False grows ``most`` trees whatever the held-out rows say, and does not fit their moves again: only z is of use.
    """
    n, leaves = len(z), 1 << depth
    train, rest = n - held, slice(n - held, n)
    size = min(train, SAMPLE)
    trees: list[Grown] = []
    places: list[Tensor] = []
    before = loss.value(z[rest], rest)
    history, gained = [float(before.mean())], before.new_zeros(1)
    best, patience = 0, math.ceil(PATIENCE / rate)
    while len(trees) < most and (len(trees) - best < patience or not stop):
        first = min(len(trees) * size % max(1, train), train - size)
        rows = slice(first, first + size)
        slope, curvature = (_grain(part) for part in loss.slopes(z[rows], rows))
        roots = _roots(len(trees), len(coded.codes), z.device) if depth > 1 else None  # one split has no partner to find
        tree = grow(coded.pick(rows), slope, curvature, depth, ridge, least, roots)
        if not bool((tree.gain > 0).any()):  # those columns are constant, or there is nothing left
            tree = grow(coded.pick(rows), slope, curvature, depth, ridge, least)
        if not bool((tree.gain > 0).any()):
            break
        place = leaves_of(coded, tree)
        z = z - rate * _moves(loss, z, place, slice(0, train), leaves, ridge)[place]
        trees.append(tree)
        places.append(place.to(torch.uint8))
        after = loss.value(z[rest], rest)
        history.append(float(after.mean()))
        if history[-1] < min(history[:-1]):
            best, gained = len(trees), before - after
    if not stop or float(gained.mean()) <= float(gained.std(unbiased=False)) / max(1, len(gained)) ** 0.5:
        best = 0  # within the noise of the held-out rows
    moves = z.new_zeros(best, leaves, z.shape[1])
    for t, found in enumerate(places[:best]):
        place = found.long()
        step = rate * _moves(loss, final, place, slice(0, n), leaves, ridge)
        moves[t] = torch.round(step.clamp(-LARGEST, LARGEST) / UNIT) * UNIT
        final = final - moves[t][place]
    return Boosted(trees[:best], moves, history[: best + 1], z[rest])


def _roots(tree: int, columns: int, device: torch.device) -> Tensor:
    """Columns that the first split of a tree may use.

    Where effects of single columns are gone, as after named groups, the best first split is noise, and each tree the same; with
    another start each time, the second split finds the partner of an interaction.
    """
    draw = torch.rand(columns, generator=torch.Generator().manual_seed(tree))
    return (draw <= max(ROOTS, float(draw.min()))).to(device)


def pinball(scores: Tensor, weight: Tensor, target: Tensor) -> Loss:
    """The loss of quantiles: z ``(n, C)`` are thresholds, s the weight of the scores at or below them - target x all weight.

    Args:
        scores: ``(n, C, q)``: one score of an example, or those of the pixels of an image.
        weight: of each, about 1 for an example.
        target: ``(C,)``.

    Leaves search the whole line. Curvatures are those of an event of probability ``target``, up to a factor: what a leaf knows.
    """
    mass = weight.sum(2)  # (n, C)

    def slopes(z: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        below = ((scores[rows] <= z[:, :, None]) * weight[rows]).sum(2)
        return below - target * mass[rows], 2.0 * target * (1.0 - target) * mass[rows]

    def value(z: Tensor, rows: slice) -> Tensor:
        above = scores[rows] - z[:, :, None]
        goal = target[:, None]
        return (torch.maximum(goal * above, (goal - 1.0) * above) * weight[rows]).sum((1, 2))

    def steps(z: Tensor, place: Tensor, leaves: int, rows: slice) -> Tensor:
        found, leaf_of = [], place[:, None].expand(-1, scores.shape[2]).reshape(-1)
        for c, goal in enumerate(target):
            residual, order = (scores[rows, c] - z[:, c, None]).flatten().sort(stable=True)
            leaf, again = leaf_of[order].sort(stable=True)  # by leaf, and within by residual
            residual, w = residual[again], weight[rows, c].flatten()[order[again]]
            total = torch.bincount(leaf, w, leaves)
            before = total.cumsum(0) - total
            at = torch.searchsorted(w.cumsum(0), before + (goal - 1e-9) * total).clamp_max(len(w) - 1)
            found.append(torch.where(total > 0, -residual[at], torch.zeros_like(total)))
        return torch.stack(found, 1)

    return Loss(slopes, value, steps)


def _grain(values: Tensor) -> Tensor:
    return torch.round(values / GRAIN) * GRAIN


def _moves(loss: Loss, z: Tensor, place: Tensor, rows: slice, leaves: int, ridge: float) -> Tensor:
    """Step of each leaf, ``(leaves, C)``, from some of the rows: Newton's, or that of the loss itself."""
    slope, curvature = (_grain(part) for part in loss.slopes(z[rows], rows))
    values = torch.cat([slope, curvature], 1)
    sums = torch.stack([torch.bincount(place[rows], v, leaves) for v in values.unbind(1)], 1)
    first, second = sums[:, : z.shape[1]], sums[:, z.shape[1] :]
    if loss.steps is not None:
        return loss.steps(z[rows], place[rows], leaves, rows) * (second / (second + ridge))
    return first / (second + ridge)


def places(columns: Tensor, column: Tensor, cut: Tensor, kind: Tensor) -> Tensor:
    """Leaf of every row in each of T trees, int64 ``(n, T)``; arguments as of :func:`walk`."""
    splits = column.shape[1]
    first = torch.arange(column.shape[0], device=column.device) * splits
    which, cuts, kinds = column.flatten(), cut.flatten(), kind.flatten()
    node = torch.zeros([columns.shape[0], column.shape[0]], dtype=torch.int64, device=column.device)
    depth = 0
    while (1 << depth) - 1 < splits:
        at = first + node
        x, how = columns.gather(1, which[at]).to(cuts.dtype), kinds[at]
        equal, lacking, cut_here = how % 2 == 1, x.isnan(), cuts[at]
        right = (equal & (x == cut_here)) | (~equal & (x >= cut_here))  # of NaN False; ONNX has no `where` of bools
        right = right | (lacking & (how // 2 % 2 == 1))
        node = 2 * node + 1 + right.to(torch.int64)
        depth += 1
    return node - splits


def walk(columns: Tensor, column: Tensor, cut: Tensor, kind: Tensor, leaf: Tensor) -> Tensor:
    """Sum of the moves of all trees, float64 ``(n, C)``; it scripts and exports.

    Args:
        columns: float32 ``(n, q)``, NaN where a value is missing.
        column, cut, kind: of each split in heap order, ``(T, N)``: a row goes right where ``x >= cut``, or ``x == cut`` for an
            odd kind; and where x is NaN and the kind has its second bit. (The third says that NaN occurred in the fit.)
        leaf: moves ``(T, N + 1, C)``.
    """
    total = torch.zeros([columns.shape[0], leaf.shape[2]], dtype=leaf.dtype, device=leaf.device)
    for start in range(0, column.shape[0], 16):  # trees at a time; TorchScript sees no globals
        some = [part[start : start + 16] for part in (column, kind)]
        moves = leaf[start : start + 16]
        at = places(columns, some[0], cut[start : start + 16], some[1])
        at = at + torch.arange(moves.shape[0], device=leaf.device) * moves.shape[1]
        total = total + moves.flatten(0, 1)[at].sum(1)
    return total
