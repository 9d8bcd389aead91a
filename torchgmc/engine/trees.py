r"""Boosted trees over binned columns: a level of a tree is one search over all :math:`g = 1_{leaf} 1_A` at once.

A is ``x >= cut``, ``x = level`` or ``x is missing``. The search counts: columns are coded (a level each for missing values and
for categories), those of two values six to a code. Slopes and curvatures are whole numbers of a unit, both in one float64:
one `scatter_add` per tree sums them over leaf x column x code, and every split of every leaf follows from cumulative sums.
All sums are exact in any order: the same trees come out however the rows were cut or spread. Some trees are grown from the
same slopes, with another first split each; the moves of their leaves are not, and one whose gain the others took is dropped.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgmc.distributed import total as over_ranks

__all__ = ["Boosted", "Coded", "Grown", "Loss", "boost", "code", "grow", "walk"]

#: Rows that the splits of a batch of trees are searched on, those of all batches, and held-out ones that judge them, at most.
SAMPLE, POOL, JUDGES = 1 << 15, 1 << 17, 1 << 15
#: Trees whose splits are found from the same slopes (the moves of their leaves are not): each has another first split.
BATCH = 4
#: Share of its gain that a tree must still have after those of its batch before it; gain below which a split is none.
STALE, LEAST = 0.8, 1e-9
#: Entries that are counted at once: what the caches like.
AT_ONCE = 1 << 17
#: Columns of two values that share a code.
PACK = 6
#: Finest unit of slopes and curvatures in a search; bits of their sums, counted together; unit of what moves leaves.
GRAIN, BITS, SHIFT, FINE = 2.0**-16, 25, 2.0**26, 2.0**-22
#: Trees without progress, times the rate, after which no more are grown.
PATIENCE = 4.0
#: Share of the columns that the first split of a tree may use, drawn for each.
ROOTS = 0.1
#: Unit of the moves of leaves, and the largest: their sums are exact in any order.
UNIT, LARGEST = 2.0**-32, 16.0


class Coded(NamedTuple):
    """Columns as small codes.

    ``codes``: uint8 ``(q, n)``; ``missing`` (the last) for NaN. ``cuts``: value that each code starts at (numbers) or stands
    for (categories), float32 ``(q, b)``; inf where there is none. ``equal``: columns of categories, bool ``(q,)``. ``pairs``,
    ``wide``: columns that hold two values and no NaN, and the others, int64. ``cells``: what is counted: codes of ``wide``,
    then those of ``pairs``, six to a code; uint8 ``(w + p / 6, n)``. ``splits``: column, code and direction of NaN of all
    splits that can be made, int64 ``(m, 3)``; the last: none. ``useless``: those that part nobody, bool ``(m,)``. ``right``:
    codes that each split sends right, float64 ``(size, splits)``: of a number, of a category, and of six pairs. ``gaps``,
    ``mixed``: whether there are NaN, and columns of categories.
    """

    codes: Tensor
    cuts: Tensor
    equal: Tensor
    pairs: Tensor
    wide: Tensor
    cells: Tensor
    splits: Tensor
    useless: Tensor
    right: tuple[Tensor, Tensor, Tensor]
    gaps: bool
    mixed: bool

    @property
    def missing(self) -> int:
        """Code of NaN."""
        return self.cuts.shape[1]

    def places(self, rows: slice) -> Tensor:
        """Cell and code of each of these rows, as one number, int64 ``(n, k)``."""
        return self.cells[:, rows].T.contiguous() + torch.arange(len(self.cells), device=self.cells.device) * len(self.right[0])

    def pick(self, rows: Tensor) -> "Coded":
        """Some of the rows."""
        return self._replace(codes=self.codes[:, rows], cells=self.cells[:, rows])


class Grown(NamedTuple):
    """One tree, or some: column, code, direction of NaN and gain of each split ``(N,)``."""

    column: Tensor
    code: Tensor
    missing: Tensor
    gain: Tensor


@dataclass
class Loss:
    """What is minimised.

    ``slopes``: (z, rows) -> derivative and curvature of each row, ``(m, C)`` each. ``value``: (z, rows) -> loss of each row
    ``(m,)``. ``steps``: (z, place, leaves, rows) -> step of each leaf, ``(leaves, C)``; None for Newton's. ``place``: leaf of
    each row.
    """

    slopes: Callable[[Tensor, slice], tuple[Tensor, Tensor]]
    value: Callable[[Tensor, slice], Tensor]
    steps: Callable[[Tensor, Tensor, int, slice], Tensor] | None = None


def code(columns: Tensor, equal: Tensor, bins: int) -> Coded:
    """Codes of columns ``(n, q)``, float32: up to ``bins`` of about equal size; of categories the most frequent values."""
    n, q = columns.shape
    cuts = torch.full((q, bins), math.inf, dtype=torch.float32, device=columns.device)
    codes = torch.empty(q, n, dtype=torch.uint8, device=columns.device)
    low, high = torch.aminmax(columns, dim=0) if n else (columns.new_zeros(q), columns.new_zeros(q))
    upper = columns == high
    two = (upper | (columns == low)).all(0) & (low < high)
    plain = two & ~equal  # numbers of two values, at once
    middle = torch.where((low != low.round()) | (high != high.round()), (low + high) / 2, high)
    codes[plain], cuts[plain, :2] = upper.T[plain].to(torch.uint8), torch.stack([low, middle], 1)[plain]
    for j in (~plain).nonzero()[:, 0].tolist():  # columns, not rows
        column = columns[:, j].contiguous()
        lacking = column.isnan()
        found, count = torch.unique(column[~lacking], return_counts=True)
        if equal[j]:
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
    pairs, wide = two.nonzero()[:, 0], (~two).nonzero()[:, 0]
    bit = torch.arange(PACK, device=columns.device).to(torch.uint8)
    packs = [(codes[some] << bit[: len(some), None]).sum(0, dtype=torch.uint8) for some in torch.split(pairs, PACK)]
    cells = torch.cat([codes[wide], torch.stack(packs)]) if len(pairs) else codes
    gaps = bool((codes == bins).any())
    every, sides = torch.arange(bins + 1, device=columns.device), torch.arange(1 + gaps, device=columns.device)
    useless = torch.where(equal[wide, None], every == bins - 1, every == 0)  # all other levels; all numbers
    splits = torch.cat([torch.cartesian_prod(wide, every, sides).view(-1, 3), torch.nn.functional.pad(pairs[:, None], (0, 2))])
    splits[len(splits) - len(pairs) :, 1] = 1
    splits = torch.cat([splits, splits.new_tensor([[0, bins, 0]])])
    useless = torch.nn.functional.pad(useless.flatten().repeat_interleave(1 + gaps), (0, len(pairs) + 1))
    code = torch.arange(max(bins + 1, (1 << PACK) * (len(pairs) > 0)), device=columns.device)[:, None]
    lost = (code == bins) & (sides == 1)[:, None, None]  # (sides, size, 1)
    number, category = ((one & (code < bins) | lost).double().permute(1, 2, 0).flatten(1) for one in (code >= every, code == every))
    right = number, category, (code[: 1 << PACK] >> bit.long() & 1).double()
    return Coded(codes, cuts, equal, pairs, wide, cells, splits, useless, right, gaps, bool(equal.any()))


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


def histogram(places: Tensor, leaf: Tensor, leaves: int, size: int, values: Tensor, rows: Tensor | None = None) -> Tensor:
    """Sums of values ``(v, n)`` of rows (None for all) over leaf x cell x code of ``places``: ``(v, leaves, k, size)``."""
    k = places.shape[1]
    total = values.new_zeros(len(values), leaves * k * size)
    for start in range(0, len(leaf), max(1, AT_ONCE // k)):
        some = slice(start, start + max(1, AT_ONCE // k))
        place = places[some] if rows is None else places.index_select(0, rows[some])
        place = (place + (leaf[some] * (k * size))[:, None] if leaves > 1 else place).flatten()
        for into, v in zip(total, values[:, some], strict=True):
            into.scatter_add_(0, place, v[:, None].expand(-1, k).flatten())
    return total.view(len(values), leaves, k, size)


def _halves(places: Tensor, leaf: Tensor, sums: Tensor, values: Tensor) -> Tensor:
    """Sums of all leaves ``(B, n)`` of some trees from those of their parents: the smaller half is counted."""
    (count, n), (every, size) = leaf.shape, sums.shape[1::2]
    parents = every // count
    first = torch.arange(count, device=leaf.device)[:, None] * parents
    sizes = torch.zeros(count, 2 * parents, dtype=torch.int64, device=leaf.device)
    less = sizes.scatter_add_(1, leaf, torch.ones_like(leaf)).view(count, parents, 2).argmin(2)
    parent = leaf >> 1
    chosen = (less.gather(1, parent) == (leaf & 1)).flatten().nonzero()[:, 0]
    rows, parent = chosen % n, (parent + first).flatten().index_select(0, chosen)
    own = histogram(places, parent, every, size, values.index_select(1, rows), rows)
    both, second = torch.stack([own, sums - own], 2), less.flatten().bool()
    return torch.where(second[:, None, None, None], both.flip(2), both).flatten(1, 2)


def _packed(slope: Tensor, curvature: Tensor) -> tuple[Tensor, tuple[float, float]]:
    """Slopes and curvatures ``(n, C)`` as whole numbers, both in one float64, ``(C, n)``; and their units."""
    most = torch.stack([slope.abs().sum(0), curvature.sum(0)]).amax(1) / 2.0 ** (BITS - 1)
    one, two = (2.0 ** math.ceil(math.log2(max(unit, GRAIN))) for unit in most.tolist())
    whole = torch.round(slope / one).mul_(SHIFT).add_(torch.round(curvature / two))
    return whole.T.contiguous(), (one, two)


def grow(
    coded: Coded, slope: Tensor, curvature: Tensor, depth: int, ridge: float, least: float,
    roots: Tensor | None = None, places: Tensor | None = None, rows: slice | None = None,
) -> tuple[Grown, Tensor]:  # fmt: skip
    """Trees ``(B, N)`` whose splits, level by level, gain most in the quadratic model of the loss, and the leaves of all rows.

    ``coded``: columns of the rows. ``slope``, ``curvature``: ``(n, C)``, of the rows that are searched. ``depth``, ``ridge``,
    ``least``: levels; what is added to each leaf's curvature; smallest curvature of a leaf, summed over C. ``roots``: columns
    that the first split of each tree should use, bool ``(B, q)``; None for one tree and all columns. ``places``, ``rows``: see
    :meth:`Coded.places`, if at hand; rows that are searched, None for the first.
    """
    rows = rows or slice(0, len(slope))
    places = coded.places(rows) if places is None else places[rows]
    w, p, n, count = len(coded.wide), len(coded.pairs), coded.codes.shape[1], 1 if roots is None else len(roots)
    values, units = _packed(slope, curvature)
    leaf = torch.zeros(count, n, dtype=torch.int64, device=slope.device)
    splits: list[Tensor] = []
    gains: list[Tensor] = []
    sums = histogram(places, leaf[0, rows], 1, len(coded.right[0]), values)  # (C, B leaves, k, size)
    for level in range(depth):
        leaves = 1 << level
        if level:
            sums = _halves(places, leaf[:, rows], sums if level > 1 else sums.expand(-1, count, -1, -1), values)
        right = sums[:, :, :w] @ coded.right[0]
        if coded.mixed:
            right = torch.where(coded.equal[coded.wide, None], sums[:, :, :w] @ coded.right[1], right)
        every = [right.flatten(2)]
        if p:
            every.append((sums[:, :, w:, : 1 << PACK] @ coded.right[2]).flatten(2)[:, :, :p])
        whole = sums[:, :, 0].sum(2, keepdim=True)
        gain = _gain(torch.cat([*every, torch.zeros_like(whole)], 2), whole, units, ridge, least)
        gain = gain.masked_fill_(coded.useless, -math.inf)  # (B leaves, m)
        gain[:, -1] = LEAST
        if level == 0 and roots is not None:
            own = torch.where(roots.index_select(1, coded.splits[:, 0]), gain, -math.inf)
            gain = torch.where(own.amax(1, keepdim=True) > LEAST, own, gain)  # those columns may be constant
        best, at = gain.max(1)
        split = coded.splits.index_select(0, at)
        splits.append(split.view(count, leaves, 3))
        gains.append(best.view(count, leaves) - LEAST)
        turns = _goes_right(coded, *split.unbind(1)).view(count, leaves, n)
        leaf = 2 * leaf + (turns.gather(1, leaf[:, None]) if level else turns)[:, 0]
    column, code, missing = torch.cat(splits, 1).unbind(2)
    return Grown(column, code, missing, torch.cat(gains, 1)), leaf


def _gain(right: Tensor, whole: Tensor, units: tuple[float, float], ridge: float, least: float) -> Tensor:
    """Fall of the quadratic model, ``(leaves, m)``, from packed sums ``(C, leaves, m)``; -inf where a side is too small."""
    both = torch.cat([whole, right, whole - right], 2)
    slope = torch.floor(both / SHIFT)
    curvature = both.sub_(slope, alpha=SHIFT).mul_(units[1])
    score, size = slope.mul_(units[0]).square_().div_(curvature + ridge).sum(0), curvature.sum(0)
    (one, two), (less, more) = (torch.chunk(part[:, 1:], 2, 1) for part in (score, size))
    return (one + two - score[:, :1]).masked_fill_(torch.minimum(less, more) < least, -math.inf)


def _goes_right(coded: Coded, column: Tensor, code: Tensor, missing: Tensor) -> Tensor:
    """Rows that each split sends right, bool ``(splits, n)``."""
    here, code = coded.codes.index_select(0, column), code[:, None].to(torch.uint8)
    right = here >= code
    if coded.mixed:
        right = torch.where(coded.equal[column, None], here == code, right)
    return torch.where(here == coded.missing, missing[:, None].bool(), right) if coded.gaps else right


def leaves_of(coded: Coded, tree: Grown) -> Tensor:
    """Leaf of every row, int64 ``(n,)``."""
    leaf, first = torch.zeros(coded.codes.shape[1], dtype=torch.int64, device=coded.codes.device), 0
    while first < len(tree.column):
        right = _goes_right(coded, *(part[first : 2 * first + 1] for part in tree[:3]))
        leaf, first = 2 * leaf + right.gather(0, leaf[None])[0], 2 * first + 1
    return leaf


class Boosted(NamedTuple):
    """Trees, the moves of their leaves ``(T, leaves, C)`` (z falls by them), and the held-out loss before and after each.

    ``z``: of the held-out rows, where trees that did not see them put it; of all trees grown. ``moved``: sum of the moves of
    each row, ``(n, C)``; ``places``: leaf of each, uint8 ``(T, n)``.
    """

    trees: list[Grown]
    moves: Tensor
    history: list[float]
    z: Tensor
    moved: Tensor
    places: Tensor


def boost(
    coded: Coded, z: Tensor, final: Tensor, loss: Loss, held: int,
    depth: int, most: int, rate: float, ridge: float, least: float, stop: bool = True,
) -> Boosted:  # fmt: skip
    """Trees until the loss of the last ``held`` rows has not fallen for a while; the best prefix, its moves fitted to all rows.

    ``coded``: columns, in an order without a pattern; the search sees all but the last ``held`` rows. ``z``: where the trees
    start, ``(n, C)``, found without the held-out rows (else they would stop too early). ``final``: where their moves start when
    these are fitted again, to all rows. ``loss``: what is minimised. ``held``: rows that decide how many trees are kept.
    ``depth``, ``most``, ``rate``, ``ridge``, ``least``: levels and number of trees, share of a leaf's step that is taken, see
    :func:`grow`. ``stop``: False grows ``most`` trees whatever the held-out rows say, and does not fit their moves again: only
    z is of use.
    """
    n, leaves, device = len(z), 1 << depth, z.device
    train, judges = min(n - held, POOL), min(held, JUDGES) if stop else held
    rest = slice(n - held, n - held + judges)
    some = torch.cat([torch.arange(n, device=device)[part] for part in (slice(0, train), rest)])
    few = coded if len(some) == n else coded.pick(some)
    places_of = few.places(slice(0, train))
    size = min(train, SAMPLE)
    both, first, drawn = z[some], 0, 0
    own, other = both[:train], both[train:]
    trees: list[Grown] = []
    places: list[Tensor] = []
    before = loss.value(other, rest)
    history, gained = [float(before.mean())], before.new_zeros(1)
    best, patience, lowest = 0, math.ceil(PATIENCE / rate), history[0]
    while len(trees) < most and (len(trees) - best < patience or not stop):
        rows = slice(first, first + size)
        first = 0 if first + 2 * size > train else first + size
        slopes = loss.slopes(own[rows], rows)
        roots = _roots(drawn, max(1, BATCH * 8 >> max(3, depth)), len(coded.codes), device) if depth > 1 else None
        batch, leaf = grow(few, *slopes, depth, ridge, least, roots, places_of, rows)
        drawn, gains = drawn + len(leaf), batch.gain.sum(1).tolist()
        if max(gains) <= 0:
            break
        usual = 0.0
        for b in [b for b, gain in enumerate(gains) if gain > 0][: most - len(trees)]:
            place = leaf[b]
            moves, gain = _moves(loss, own, place[:train], slice(0, train), leaves, ridge)
            usual = usual or gain / gains[b]  # 1, or less where other rows were searched
            if gain < STALE * usual * gains[b]:  # the trees before it took what it found
                continue
            both = both - (rate * moves).index_select(0, place)
            own, other = both[:train], both[train:]
            trees.append(Grown(*(part[b] for part in batch)))
            places.append(place.to(torch.uint8))
            after = loss.value(other, rest)
            history.append(float(after.mean()))
            if history[-1] < lowest:
                best, gained, lowest = len(trees), before - after, history[-1]
    if not stop or float(gained.mean()) <= float(gained.std(unbiased=False)) / max(1, len(gained)) ** 0.5:
        best = 0  # within the noise of the held-out rows
    moves, moved = z.new_zeros(best, leaves, z.shape[1]), torch.zeros_like(final)
    for t in range(best):
        if few is not coded:
            parts = torch.split(torch.arange(n, device=device), SAMPLE)
            places[t] = torch.cat([leaves_of(coded.pick(rows), trees[t]).to(torch.uint8) for rows in parts])
        place = places[t].long()
        step = rate * _moves(loss, final - moved, place, slice(0, n), leaves, ridge)[0]
        moves[t] = torch.round(step.clamp(-LARGEST, LARGEST) / UNIT) * UNIT
        moved = moved + moves[t].index_select(0, place)
    kept = torch.stack(places[:best]) if best else torch.zeros(0, n, dtype=torch.uint8, device=device)
    return Boosted(trees[:best], moves, history[: best + 1], other, moved, kept)


def _roots(first: int, count: int, columns: int, device: torch.device) -> Tensor:
    """Columns that the first splits of some trees may use, bool ``(count, columns)``.

    Where effects of single columns are gone, as after named groups, the best first split is noise, and each tree the same; with
    another start each time, the second split finds the partner of an interaction.
    """
    draw = torch.rand(count, columns, generator=torch.Generator().manual_seed(first))
    return (draw <= draw.amin(1, keepdim=True).clamp_min(ROOTS)).to(device)


def pinball(scores: Tensor, weight: Tensor, target: Tensor) -> Loss:
    """The loss of quantiles: z ``(n, C)`` are thresholds, s the weight of the scores at or below them - target x all weight.

    ``scores``: ``(n, C, q)``: one score of an example, or those of the pixels of an image. ``weight``: of each, about 1 for an
    example. ``target``: ``(C,)``.

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


def refit(
    columns: Tensor, splits: tuple[Tensor, ...], leaf: Tensor, z: Tensor, loss: Loss, rate: float, ridge: float
) -> tuple[Tensor, Tensor]:
    """Moves of leaves ``(T, leaves, C)``, Newton's, fitted tree by tree to the rows of all ranks; and z ``(n, C)`` after them.

    ``columns``: ``(n, q)``; ``splits``: column, cut and kind of each, as of :func:`walk`; ``leaf``: other moves of the leaves.
    ``z``, ``loss``, ``rate``, ``ridge``: as for :func:`boost`.
    """
    moves = torch.zeros_like(leaf)
    for t, tree in enumerate(zip(*(torch.split(part, 1) for part in splits), strict=True)):
        place = places(columns, *tree)[:, 0]
        whole = torch.cat([torch.round(part / FINE) for part in loss.slopes(z, slice(0, len(z)))], 1)
        sums = over_ranks(whole.new_zeros(leaf.shape[1], whole.shape[1]).index_add_(0, place, whole)).mul_(FINE)
        first, second = sums.chunk(2, 1)
        step = rate * first / (second + ridge)
        moves[t] = torch.round(step.clamp(-LARGEST, LARGEST) / UNIT) * UNIT
        z = z - moves[t].index_select(0, place)
    return moves, z


def _moves(loss: Loss, z: Tensor, place: Tensor, rows: slice, leaves: int, ridge: float) -> tuple[Tensor, float]:
    """Step of each leaf, ``(leaves, C)``, from these rows: Newton's, or that of the loss itself; and the gain of Newton's."""
    whole = torch.cat([part.T for part in loss.slopes(z, rows)]).div_(FINE).round_()
    sums = whole.new_zeros(len(whole), leaves).scatter_add_(1, place.expand_as(whole), whole).mul_(FINE)
    first, second = sums.T.chunk(2, 1)
    step = first / (second + ridge)
    one, two = np.split(sums.cpu().numpy(), 2)  # so few are quicker here
    gain = (one**2 / (two + ridge)).sum() - (one.sum(1) ** 2 / (two.sum(1) + ridge)).sum()
    if loss.steps is not None:
        step = loss.steps(z, place, leaves, rows) * (second / (second + ridge))
    return step, float(gain)


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

    ``columns``: float32 ``(n, q)``, NaN where a value is missing. ``column``, ``cut``, ``kind``: of each split in heap order,
    ``(T, N)``: a row goes right where ``x >= cut``, or ``x == cut`` for an odd kind; and where x is NaN and the kind has its
    second bit. (The third says that NaN occurred in the fit.) ``leaf``: moves ``(T, N + 1, C)``.
    """
    total = torch.zeros([columns.shape[0], leaf.shape[2]], dtype=leaf.dtype, device=leaf.device)
    for start in range(0, column.shape[0], 16):  # trees at a time; TorchScript sees no globals
        some = [part[start : start + 16] for part in (column, kind)]
        moves = leaf[start : start + 16]
        at = places(columns, some[0], cut[start : start + 16], some[1])
        at = at + torch.arange(moves.shape[0], device=leaf.device) * moves.shape[1]
        total = total + moves.flatten(0, 1)[at].sum(1)
    return total
