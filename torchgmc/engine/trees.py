r"""Boosted trees over binned columns: a level of a tree is one search over all :math:`g = 1_{leaf} 1_A` at once.

A is ``x >= cut``, ``x = level`` or ``x is missing``. The search counts: columns are coded (a level each for missing values and
for categories), and those that depend on each other, or have few values, share a code. Slopes and curvatures are whole numbers
of a unit, both in one float64: :func:`torchgmc.engine.search.sums` adds them up over leaf x code, and every split follows.
All sums are exact in any order, and over all ranks (:func:`torchgmc.distributed.total`): the same trees come out however the
rows were cut or spread. Some trees are grown from the same slopes, with another first split each; the moves of their leaves are
not, and one whose gain the others took is dropped.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchgmc.distributed import collected, scattered, total as over_ranks
from torchgmc.engine import search
from torchgmc.engine.folds import leading

Array = npt.NDArray[Any]
__all__ = ["Boosted", "Coded", "Grown", "Loss", "boost", "code", "grow", "walk"]

#: Rows that splits are searched on (of fewer they are much worse), and held-out ones that judge them, at most.
POOL, JUDGES = 1 << 17, 1 << 15
#: Trees whose splits are found from the same slopes (the moves of their leaves are not): each has another first split.
BATCH = 4
#: Share of its gain that a tree must still have after those of its batch before it; gain below which a split is none.
STALE, LEAST = 0.8, 1e-9
#: Entries that are counted at once: what the caches like; rows that say which half of a leaf looks smaller.
AT_ONCE, LOOK = 1 << 17, 1 << 10
#: Fewer are counted by numpy, more by torch: a call of it costs more, an entry less.
FEW = 1 << 15
#: Codes of columns that are counted together, unless a column has more.
SIZE = 64
#: Entries of a table from which on it pays to look for columns that depend on each other; rows x splits, in entries of
#: ``Coded.ways``, below which one product sums them faster than counts do.
MANY, FLAT = 1 << 18, 4
#: Finest unit of slopes and curvatures in a search; bits of their sums, counted together; unit of what moves leaves.
GRAIN, BITS, SHIFT, FINE = 2.0**-16, 25, 2.0**26, 2.0**-22
#: Added and taken off again, it rounds a float64 to the unit of what moves leaves.
ROUND = 1.5 * 2.0**52 * FINE
#: Trees without progress, times the rate, after which no more are grown.
PATIENCE = 4.0
#: Share of the columns that the first split of a tree may use, drawn for each.
ROOTS = 0.1
#: Unit of the moves of leaves, and the largest: their sums are exact in any order.
UNIT, LARGEST = 2.0**-32, 16.0


class Coded(NamedTuple):
    """Columns as small codes, on the CPU: the search is in numpy, whose small operations cost a third of torch's.

    ``codes``: uint8 ``(q, n)``; ``missing`` (the last) for NaN. ``cuts``: value that each code starts at (numbers) or stands
    for (categories), float32 ``(q, b)``; inf where there is none. ``equal``: columns of categories, bool ``(q,)``. ``cells``:
    what is counted, see :func:`_joined`. ``splits``: column, code and direction of NaN of all splits that part some rows, int64
    ``(m, 3)``; the first: none. ``ways``: codes of each cell that its splits send right, float64 ``(k, size, most)``. ``some``:
    places of the splits among cells x most. ``gaps``, ``mixed``, ``few``: are there NaN, categories, few rows (see ``FLAT``)?
    """

    codes: Array
    cuts: Array
    equal: Array
    cells: Array
    splits: Array
    some: Array
    ways: Array
    gaps: bool
    mixed: bool
    few: bool

    @property
    def missing(self) -> int:
        """Code of NaN."""
        return int(self.cuts.shape[1])

    def layout(self, rows: slice) -> Array:
        """Cell and code of each of these rows, as one number, ``(n, k)``; of few 1 where a split sends it right, ``(n, m)``."""
        if self.few:
            return np.pad(_turns(self.pick(rows), self.splits[1:]).T.astype(float, "C"), ((0, 0), (1, 0)), constant_values=1.0)
        return np.ascontiguousarray(self.cells[:, rows].T + np.arange(len(self.cells)) * self.ways.shape[1])

    def pick(self, rows: Array | slice) -> "Coded":
        """Some of the rows."""
        return self._replace(codes=self.codes[:, rows], cells=self.cells[:, rows])


class Grown(NamedTuple):
    """One tree, or some: column, code, direction of NaN and gain of each split ``(N,)``."""

    column: Array
    code: Array
    missing: Array
    gain: Array


@dataclass
class Loss:
    """What is minimised.

    ``slopes``: (z, rows) -> derivative and curvature of each row, ``(m, C)`` each. ``value``: (z, rows) -> loss of each row
    ``(m,)``. ``steps``: (z, place, leaves, rows) -> step of each leaf, ``(leaves, C)``; None for Newton's. ``place``: leaf of
    each row. z and place may be on the CPU, wherever the loss is.
    """

    slopes: Callable[[Tensor, slice], tuple[Tensor, Tensor]]
    value: Callable[[Tensor, slice], Tensor]
    steps: Callable[[Tensor, Tensor, int, slice], Tensor] | None = None


def code(columns: Tensor, equal: Tensor, bins: int, few: Tensor | None = None) -> Coded:
    """Codes of columns ``(n, q)``, float32: up to ``bins`` of about equal size; of categories the most frequent values.

    ``few``: rows that say where to cut, bool ``(n,)``, with the least and the largest of all ranks; None for all.
    """
    table, same = np.ascontiguousarray(columns.T.cpu().numpy()), equal.cpu().numpy()
    q, n = table.shape
    cuts, codes = np.full((q, bins), np.inf, dtype=np.float32), np.empty((q, n), dtype=np.uint8)
    ends = collected(torch.stack([columns.amin(0), columns.amax(0)])[None] if n else columns.new_zeros(0, 2, q))[0]
    ends = torch.stack([ends[:, 0].amin(0), ends[:, 1].amax(0)]) if len(ends) else columns.new_full((2, q), np.inf)
    told = collected(columns)[0] if few is None else torch.cat([collected(columns[few])[0], ends])
    known = table if told is columns else np.ascontiguousarray(told.T.cpu().numpy())
    low, high = ends.cpu().numpy()
    upper = table == high[:, None]
    two = (_summed((~(upper | (table == low[:, None]))).sum(1)) == 0) & (low < high)
    plain = two & ~same  # numbers of two values, at once
    middle = np.where((low != low.round()) | (high != high.round()), (low + high) / 2, high)
    codes[plain], cuts[plain, :2] = upper[plain], np.stack([low, middle], 1)[plain]
    for j in np.flatnonzero(~plain):  # columns, not rows
        column, lacking = table[j], np.isnan(table[j])
        kept, count = np.unique(known[j][~np.isnan(known[j])], return_counts=True)
        if same[j]:
            kept = np.sort(kept[np.argsort(-count, kind="stable")[: bins - 1]])
            place = np.searchsorted(kept, column).clip(0, max(len(kept) - 1, 0))
            place = np.where(kept[place] == column, place, bins - 1) if len(kept) else place
        else:
            if (kept != kept.round()).any():  # half-way: rounding in another format turns few
                kept = np.concatenate([kept[:1], (kept[1:] + kept[:-1]) / 2])
            kept = kept[_spread(count, bins)] if len(kept) > bins else kept
            place = (np.searchsorted(kept, column, side="right") - 1).clip(0)
        cuts[j, : len(kept)] = kept
        codes[j] = np.where(lacking, bins, place)
    size, pairs, wide = max(bins + 1, SIZE), np.flatnonzero(two), np.flatnonzero(~two)
    few = _summed(np.array(n)) * q < MANY
    cells, where, seen = _packed_pairs(codes, pairs, wide, size) if few else _joined(codes, np.where(two, 2, bins + 1), size)
    gaps = bool(_summed((codes[wide] == bins).sum(1)).any())
    numbers = np.stack(np.meshgrid(wide, np.arange(bins + 1), np.arange(1 + gaps), indexing="ij"), -1).reshape(-1, 3)
    numbers = numbers[numbers[:, 1] != np.where(same[numbers[:, 0]], bins - 1, 0)]  # all other levels; all numbers
    splits = np.concatenate([numbers, pairs[:, None] * [1, 0, 0] + [0, 1, 0]])
    level = _summed(np.array([np.bincount(cell, minlength=size) for cell in cells]).reshape(-1, size))
    right = _right(seen[splits[:, 0]], same, splits, bins)
    count = (right * level[where[splits[:, 0]]]).sum(1)  # rows that each split sends right
    some = (count > 0) & (count < level[:1].sum())
    splits, right, cell = splits[some], right[some], where[splits[some, 0]]
    slot, order = np.empty_like(cell), cell.argsort(kind="stable")
    slot[order] = np.arange(len(cell)) - np.searchsorted(cell[order], cell[order])
    ways = np.zeros((len(cells), size, int(slot.max(initial=0)) + 1))
    ways[cell, :, slot] = right
    splits, small = np.concatenate([[[0, bins, 0]], splits]), bool(_summed(np.array(n)) * len(splits) < FLAT * ways.size)
    return Coded(codes, cuts, same, cells, splits, cell * ways.shape[2] + slot, ways, gaps, bool(same.any()), small)


def _packed_pairs(codes: Array, pairs: Array, wide: Array, size: int) -> tuple[Array, Array, Array]:
    """As :func:`_joined`, in no time: columns of two values share cells, six at a time."""
    bit, where, seen = np.arange(len(pairs)) % 6, np.arange(len(codes)), np.arange(size) + np.zeros((len(codes), 1), dtype=int)
    where[wide], where[pairs] = np.arange(len(wide)), len(wide) + np.arange(len(pairs)) // 6
    seen[pairs] = seen[pairs] >> bit[:, None] & 1
    packs = codes[pairs] << bit[:, None].astype(np.uint8)
    cells = [codes[wide], *(packs[k : k + 6].sum(0, dtype=np.uint8)[None] for k in range(0, len(pairs), 6))]
    return np.concatenate(cells), where, seen


def _joined(codes: Array, levels: Array, size: int) -> tuple[Array, Array, Array]:
    """Columns that depend on each other, or are short, share a cell, of up to ``size`` codes: one for each pattern of theirs.

    The cells, uint8 ``(k, n)``, that of each column ``(q,)``, and what the column's code is in each pattern, ``(q, size)``.
    """
    cells, counts = np.zeros((0, codes.shape[1]), dtype=np.uint8), np.zeros(0)
    where, seen = np.zeros(len(codes), dtype=np.int64), np.full((len(codes), size), -1)
    for j, (own, wide) in enumerate(zip(codes, levels.tolist(), strict=True)):  # columns, not rows
        last = np.arange(max(0, len(cells) - size), len(cells))
        few = cells[last, :LOOK] * np.int64(wide) + own[:LOOK] + (last - last[:1])[:, None] * (size * wide)
        more = (_summed(np.bincount(few.ravel(), minlength=len(last) * size * wide)) > 0).reshape(-1, size * wide).sum(1)
        order = np.argsort(more / counts[last], kind="stable")  # those that depend on it most, by a look at some rows
        for k in (*last[order[more[order] <= size]].tolist(), len(cells)):
            both = cells[k] * np.int64(wide) + own if k < len(cells) else own
            there = _summed(np.bincount(both, minlength=size * wide)) > 0
            if there.sum() <= size:  # no rare patterns
                break
        if k == len(cells):
            cells, counts = np.concatenate([cells, own[None]]), np.append(counts, 0)
        old, new = np.divmod(np.flatnonzero(there), wide)
        inside = np.flatnonzero(where[:j] == k)
        seen[inside, : len(old)] = seen[inside][:, old]
        seen[j, : len(new)], where[j], counts[k] = new, k, len(new)
        cells[k] = (there.cumsum() - 1).astype(np.uint8)[both]
    return cells, where, seen


def _right(here: Array, equal: Array, splits: Array, missing: int, mixed: bool = True, gaps: bool = True) -> Array:
    """Which codes ``(splits, n)`` each split (column, code, direction of NaN) sends right, bool; ``mixed``, ``gaps``: of Coded."""
    column, code, lost = splits.T[..., None]
    code = code.astype(here.dtype)
    found: Array = here >= code
    found = np.where(equal[column], here == code, found) if mixed else found
    return np.where(here == missing, lost > 0, found) if gaps else found


def _summed(values: Array) -> Array:
    """Sum over all ranks, float64."""
    values = values.astype(np.float64, copy=False)  # numpy counts no rows in int64
    return np.asarray(over_ranks(torch.from_numpy(values)).numpy()) if scattered() else values


def _spread(count: Array, bins: int) -> Array:
    """Which of the sorted values start a bin: frequent ones have a bin of their own, the others share bins of equal size."""
    heavy = count * bins > count.sum()
    rest = bins - 2 * int(heavy.sum())
    if rest < 2:
        heavy, rest = np.zeros_like(heavy), bins
    light = np.where(heavy, 0, count).cumsum().astype(np.float64)
    first = np.searchsorted(light, np.arange(1, rest) * (light[-1] / rest), side="right")
    own = np.flatnonzero(heavy)
    return np.unique(np.concatenate([[0], first, own, own + 1]).clip(0, len(count) - 1))


def histogram(places: Array, leaf: Array | None, leaves: int, size: int, values: Array, rows: Array | None = None) -> Array:
    """Sums of values ``(v, n)`` of rows (None for all) over leaf x cell x code of ``places``: ``(v, leaves, k, size)``."""
    k = places.shape[1]
    total = np.zeros((len(values), leaves * k * size))
    for start in range(0, values.shape[1], max(1, AT_ONCE // k)):
        some = slice(start, start + max(1, AT_ONCE // k))
        place = places[some] if rows is None else places.take(rows[some], 0)
        place = place if leaf is None else place + (leaf[some] * (k * size))[:, None]
        for into, v in zip(total, values[:, some], strict=True):
            if place.size < FEW:
                into += np.bincount(place.ravel(), v.repeat(k), len(into))
            else:
                each = torch.from_numpy(v)[:, None].expand(-1, k).reshape(-1, 1)
                into += search.sums(torch.from_numpy(place.ravel()), each, len(into)).numpy()[:, 0]
    return total.reshape(len(values), leaves, k, size)


def _halves(places: Array, bits: list[Array], sums: Array, values: Array) -> Array:
    """Sums of all leaves of some trees from those of their parents: the half that looks smaller is counted.

    ``bits``: which way the rows went at each level, uint8 ``(B, n)``. ``sums``: of the parents, ``(C, B leaves, k, size)``; of
    one for all trees ``(C, 1, k, size)``.
    """
    (count, n), (classes, _, k, size), parents = bits[0].shape, sums.shape, 1 << len(bits) - 1
    every, tree = count * parents, np.arange(count)[:, None]
    leaf = _leaf([np.zeros_like(bits[0]), *bits[:-1]])
    few = (2 * (leaf[:, :LOOK] + parents * tree) + bits[-1][:, :LOOK]).ravel()
    less = _summed(np.bincount(few, minlength=2 * every)).reshape(every, 2).argmin(1)  # the same on every rank
    larger = _select((1 - less).astype(np.uint8).reshape(count, parents, 1), bits[:-1])
    chosen = np.flatnonzero((bits[-1] ^ larger).view(bool))
    which = np.repeat(tree[:, 0], np.diff(np.searchsorted(chosen, np.arange(count + 1) * n)))
    rows, parent = chosen - which * n, leaf.ravel()[chosen] + which * parents
    own = _summed(histogram(places, parent, every, size, values.take(rows, 1), rows))
    found = np.empty((classes, every, 2, k, size))
    found[:, np.arange(every), less], found[:, np.arange(every), 1 - less] = own, sums - own
    return found.reshape(classes, 2 * every, k, size)


def _select(table: Array, bits: list[Array]) -> Array:
    """Of a table of 0 and 1 by leaf, uint8 ``(B, leaves, n or 1)``, what each row finds in its leaf: ``(B, n)``."""
    for bit in reversed(bits):
        even = table[:, ::2]
        table = even ^ ((even ^ table[:, 1::2]) & bit[:, None])
    return table[:, 0]


def _leaf(bits: list[Array]) -> Array:
    """Leaf of each row from the way it went at each level, uint8 ``(B, n)``."""
    return functools.reduce(lambda leaf, bit: leaf << 1 | bit, bits)


def _packed(slope: Tensor, curvature: Tensor) -> tuple[Array, tuple[float, float]]:
    """Slopes and curvatures ``(n, C)`` as whole numbers, both in one float64, ``(C, n)``; and their units."""
    one, two = (part.cpu().numpy() for part in (slope, curvature))
    most = _summed(np.stack([np.abs(one).sum(0), two.sum(0)])).max(1) / 2.0 ** (BITS - 1)
    units = [2.0 ** math.ceil(math.log2(max(unit, GRAIN))) for unit in most.tolist()]
    whole = np.rint(one / units[0]) * SHIFT + np.rint(two / units[1])
    return np.ascontiguousarray(whole.T), (units[0], units[1])


def grow(
    coded: Coded, slope: Tensor, curvature: Tensor, depth: int, ridge: float, least: float,
    roots: Array | None = None, places: Array | None = None,
) -> tuple[Grown, Array]:  # fmt: skip
    """Trees ``(B, N)`` whose splits, level by level, gain most in the quadratic model of the loss, and the leaves of all rows.

    ``coded``: columns of the rows. ``slope``, ``curvature``: ``(n, C)``, of the rows that are searched. ``depth``, ``ridge``,
    ``least``: levels; what is added to each leaf's curvature; smallest curvature of a leaf, summed over C. ``roots``: columns
    that the first split of each tree should use, bool ``(B, q)``; None for one tree and all columns. ``places``: see
    :meth:`Coded.layout`, of the rows that are searched, the first, if at hand. Leaves: uint8 ``(B, n)``.
    """
    rows = slice(0, len(slope))
    places = coded.layout(rows) if places is None else places
    count = 1 if roots is None else len(roots)
    values, units = _packed(slope, curvature)
    splits, gains, bits = [], [], list[Array]()
    sums = values if coded.few else _summed(histogram(places, None, 1, coded.ways.shape[1], values))  # (C, B leaves, k, size)
    for level in range(depth):
        went = [bit[:, rows] for bit in bits]
        if coded.few:
            inside = _leaf(went)[:, None] == np.arange(1 << level)[:, None] if level else np.ones((1, 1))
            shape = len(values), count << level if level else 1, len(slope)  # a rank may have no rows
            right = _summed((inside * values[:, None, None]).reshape(shape) @ places)
        else:
            sums = _halves(places, went, sums, values) if level else sums
            right = (sums.reshape(-1, *sums.shape[2:]).swapaxes(0, 1) @ coded.ways).swapaxes(0, 1).reshape(*sums.shape[:2], -1)
            right = np.concatenate([sums[:, :, 0].sum(2, keepdims=True), right.take(coded.some, 2)], 2)  # (C, leaves, m)
        gain = _gains(right, units, ridge, least)
        if level == 0 and roots is not None:
            own = np.where(roots[:, coded.splits[:, 0]], gain, -np.inf)
            gain = np.where(own.max(1, keepdims=True) > LEAST, own, gain)  # those columns may be constant
        split = coded.splits[gain.argmax(1)]
        splits.append(split.reshape(count, -1, 3))
        gains.append((gain.max(1) - LEAST).reshape(count, -1))
        bits.append(_select(_turns(coded, split).reshape(count, 1 << level, -1), bits))
    column, code, missing = np.concatenate(splits, 1).transpose(2, 0, 1)
    return Grown(column, code, missing, np.concatenate(gains, 1)), _leaf(bits)


def _gains(right: Array, units: tuple[float, float], ridge: float, least: float) -> Array:
    """Fall of the quadratic model by each split of each leaf, ``(leaves, m)``; -inf where a side is too small."""
    slope = np.floor(right / SHIFT)
    own = slope * units[0], (right - slope * SHIFT) * units[1]
    both = own, tuple(part[..., :1] - part for part in own)
    parts = (*(np.square(one) / (two + ridge) for one, two in both), *(two for _, two in both))
    one, two, *sizes = (part.sum(0) if len(part) > 1 else part[0] for part in parts)
    gain = np.where(np.minimum(*sizes) < least, -np.inf, one + two - one[:, :1])
    gain[:, 0] = LEAST  # none
    return gain


def _turns(coded: Coded, split: Array) -> Array:
    """Rows that each split (column, code, direction of NaN) sends right, 0 or 1, uint8 ``(splits, n)``."""
    here = coded.codes[split[:, 0]]
    return _right(here, coded.equal, split, coded.missing, coded.mixed, coded.gaps).view(np.uint8)


def leaves_of(coded: Coded, tree: Grown) -> Array:
    """Leaf of every row, uint8 ``(n,)``."""
    return _descended(_turns(coded, np.stack(tree[:3], 1)))


def _descended(turns: Array) -> Array:
    """Leaf of every row, uint8 ``(n,)``, from the way that each split of a tree sends it, 0 or 1, uint8 ``(N, n)``."""
    bits: list[Array] = []
    while (first := (1 << len(bits)) - 1) < len(turns):
        bits.append(_select(turns[None, first : 2 * first + 1], bits))
    return np.asarray(_leaf(bits)[0])


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
    depth: int, most: int, rate: float, ridge: float, least: float, stop: bool = True, spots: Tensor | None = None,
) -> Boosted:  # fmt: skip
    """Trees until the loss of the last ``held`` rows has not fallen for a while; the best prefix, its moves fitted to all rows.

    ``coded``: columns, in an order without a pattern; the search sees all but the last ``held`` rows. ``z``: where the trees
    start, ``(n, C)``, found without the held-out rows (else they would stop too early). ``final``: where their moves start when
    these are fitted again, to all rows. ``loss``: what is minimised. ``held``: rows that decide how many trees are kept.
    ``depth``, ``most``, ``rate``, ``ridge``, ``least``: levels and number of trees, share of a leaf's step that is taken, see
    :func:`grow`. ``stop``: False grows ``most`` trees whatever the held-out rows say, and does not fit their moves again: only
    z is of use. ``spots``: from 0 to 1, which rows of all ranks come first, of those searched and of those held out ``(n,)``,
    both ascending; None for the order of one rank.
    """
    n, cut, leaves, device = len(z), len(z) - held, 1 << depth, z.device
    spots = torch.cat([torch.arange(k, dtype=torch.float64) / k for k in (cut, held)]) if spots is None else spots
    train, judges = leading(spots[:cut], POOL), leading(spots[cut:], JUDGES) if stop else held
    seen, rest = slice(0, train), slice(cut, cut + judges)
    few = coded if train + judges == n else coded.pick(np.r_[:train, rest])
    places_of, drawn = few.layout(seen), 0
    both = torch.cat([z[:train], z[rest]]).cpu()
    own, other = both[:train], both[train:]
    trees, places = list[Grown](), list[Array]()
    before = loss.value(other, rest)
    history, gained = [average(before)], before.new_zeros(1)
    best, patience, lowest, last = 0, math.ceil(PATIENCE / rate), history[0], -1
    while last < len(trees) < most and (len(trees) - best < patience or not stop):  # a batch of which none is kept is the last
        roots = _roots(drawn, max(1, BATCH * 8 >> max(3, depth)), len(coded.codes)) if depth > 1 else None
        batch, leaf = grow(few, *loss.slopes(own, seen), depth, ridge, least, roots, places_of)
        drawn, gains, leaf_of, last = drawn + len(leaf), batch.gain.sum(1).tolist(), leaf.astype(np.int64), len(trees)
        for b in [b for b, gain in enumerate(gains) if gain > 0][: most - len(trees)]:
            step, (one, two) = _moves(loss, own, leaf_of[b, :train], seen, leaves, ridge)
            gain = float(np.vdot(one, one / (two + ridge)) - (one.sum(1) ** 2 / (two.sum(1) + ridge)).sum())
            if gain < STALE * gains[b]:  # the trees before it took what it found
                continue
            _move(both.numpy(), rate * step, leaf_of[b])
            trees.append(Grown(*(part[b] for part in batch)))
            places.append(leaf[b])
            after = loss.value(other, rest)
            history.append(average(after))
            if history[-1] < lowest:
                best, gained, lowest = len(trees), before - after, history[-1]
    if not stop or in_noise(gained):
        best = 0
    if few is not coded:
        parts = [coded.pick(slice(k, k + JUDGES)) for k in range(0, n, JUDGES)]
        places = [np.concatenate([leaves_of(part, tree) for part in parts]) for tree in trees[:best]]
    kept = np.stack(places[:best]) if best else np.zeros((0, n), dtype=np.uint8)
    moves, moved = _fitted(kept.__getitem__, best, final, loss, leaves, rate, ridge)
    steps, rows_moved, leaf_of_rows = (torch.from_numpy(part).to(device) for part in (moves, -moved, kept))
    return Boosted(trees[:best], steps, history[: best + 1], other.to(device), rows_moved, leaf_of_rows)


def average(values: Tensor) -> float:
    """Mean over the rows of all ranks ``(n,)``."""
    total, count = _summed(np.array([float(values.sum()), len(values)])).tolist()
    return float(total / max(count, 1.0))


def in_noise(gained: Tensor) -> bool:
    """Is the mean of what held-out rows gained ``(n,)`` at most its standard error?"""
    mean, count = average(gained), int(over_ranks(torch.tensor(len(gained))))
    return mean <= math.sqrt(average((gained - mean).square()) / max(1, count))


def _roots(first: int, count: int, columns: int) -> Array:
    """Columns that the first splits of some trees may use, bool ``(count, columns)``.

    Where effects of single columns are gone, as after named groups, the best first split is noise, and each tree the same; with
    another start each time, the second split finds the partner of an interaction.
    """
    draw = torch.rand(count, columns, generator=torch.Generator().manual_seed(first)).numpy()
    return np.asarray(draw <= np.maximum(draw.min(1, keepdims=True), ROOTS))


def pinball(scores: Tensor, weight: Tensor, target: Tensor) -> Loss:
    """The loss of quantiles: z ``(n, C)`` are thresholds, s the weight of the scores at or below them - target x all weight.

    ``scores``: ``(n, C, q)``: one score of an example, or those of the pixels of an image. ``weight``: of each, about 1 for an
    example. ``target``: ``(C,)``.

    Leaves search the whole line. Curvatures are those of an event of probability ``target``, up to a factor: what a leaf knows.
    """
    mass = weight.sum(2)  # (n, C)

    def slopes(z: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        below = ((scores[rows] <= z.to(scores.device)[:, :, None]) * weight[rows]).sum(2)
        return below - target * mass[rows], 2.0 * target * (1.0 - target) * mass[rows]

    def value(z: Tensor, rows: slice) -> Tensor:
        above = scores[rows] - z.to(scores.device)[:, :, None]
        goal = target[:, None]
        return (torch.maximum(goal * above, (goal - 1.0) * above) * weight[rows]).sum((1, 2))

    def steps(z: Tensor, place: Tensor, leaves: int, rows: slice) -> Tensor:
        leaf = place.repeat_interleave(scores.shape[2]).cpu().numpy()
        residual, heavy = (scores[rows] - z.to(scores.device)[:, :, None]).cpu().numpy(), weight[rows].cpu().numpy()
        parts = enumerate(target.tolist())
        found = [quantiles(residual[:, c].ravel(), leaf, heavy[:, c].ravel(), leaves, goal - 1e-9) for c, goal in parts]
        return -torch.from_numpy(np.stack(found, 1))

    return Loss(slopes, value, steps)


def quantiles(values: Array, leaf: Array, weight: Array, leaves: int, part: float) -> Array:
    """Smallest value of each leaf with this part of its weight, over all ranks, at or below it, ``(leaves,)``; 0 without weight.

    It is found from its highest byte down: only counts of bytes are exchanged. ``values``, ``leaf``, ``weight``: ``(n,)``.
    """
    total = _summed(np.bincount(leaf, weight, leaves))
    goal, found, sign = part * total, np.zeros(leaves, dtype=np.uint64), np.uint64(1 << 63)
    bits = (values + 0.0).view(np.uint64)
    key = np.where(bits >= sign, ~bits, bits | sign)  # in the order of the values
    for shift in range(56, -1, -8):
        byte = (key >> np.uint64(shift)).astype(np.uint8)
        table = _summed(np.bincount(256 * leaf + byte, weight, 256 * leaves)).reshape(leaves, 256)
        below = table.cumsum(1)
        at = (below[:, :-1] < goal[:, None]).sum(1)
        goal = goal - (below - table)[np.arange(leaves), at]
        found |= at.astype(np.uint64) << np.uint64(shift)
        same = np.flatnonzero(byte == at[leaf])
        key, leaf, weight = key.take(same), leaf.take(same), weight.take(same)
    return np.where(total > 0, np.where(found >= sign, found ^ sign, ~found).view(np.float64), 0.0)


def refit(
    columns: Tensor, splits: tuple[Tensor, ...], leaf: Tensor, z: Tensor, loss: Loss, rate: float, ridge: float
) -> tuple[Tensor, Tensor]:
    """Moves of leaves ``(T, leaves, C)``, Newton's, fitted tree by tree to the rows of all ranks; and z ``(n, C)`` after them.

    ``columns``: ``(n, q)``; ``splits``: column, cut and kind of each, as of :func:`walk`; ``leaf``: other moves of the leaves.
    ``z``, ``loss``, ``rate``, ``ridge``: as for :func:`boost`.
    """
    table, trees = np.ascontiguousarray(columns.T.cpu().numpy()), tuple(part.cpu().numpy() for part in splits)

    def place_of(t: int) -> Array:
        column, cut, kind = (part[t] for part in trees)
        each, (equal, lost) = cut.astype(np.float32)[:, None], (np.flatnonzero(kind & bit) for bit in (1, 2))
        found = np.empty(len(z), dtype=np.uint8)
        for at in range(0, len(z), AT_ONCE):
            x = table[:, at : at + AT_ONCE][column]
            right = x >= each
            right[equal] = x[equal] == each[equal]
            right[lost] |= np.isnan(x[lost])
            found[at : at + AT_ONCE] = _descended(right.view(np.uint8))
        return found

    moves, moved = map(torch.from_numpy, _fitted(place_of, len(leaf), z, loss, leaf.shape[1], rate, ridge))
    return moves.to(z.device), z + moved.to(z.device)


def _fitted(
    place_of: Callable[[int], Array], count: int, z: Tensor, loss: Loss, leaves: int, rate: float, ridge: float
) -> tuple[Array, Array]:
    """Moves of the leaves of some trees ``(T, leaves, C)``, fitted tree by tree from z ``(n, C)`` on, and what they add to z.

    ``place_of``: leaf of each row in a tree, uint8 ``(n,)``.
    """
    start = z.cpu()
    moves, moved, now = np.zeros((count, leaves, z.shape[1])), np.zeros(start.shape), start.clone()
    for t in range(count):
        place = place_of(t).astype(np.int64)
        step, _ = _moves(loss, torch.add(start, torch.from_numpy(moved), out=now), place, slice(0, len(z)), leaves, ridge)
        moves[t] = (np.rint((rate * step).clip(-LARGEST, LARGEST) / UNIT) * UNIT).T
        _move(moved, moves[t].T, place)
    return moves, moved


def _moves(loss: Loss, z: Tensor, place: Array, rows: slice, leaves: int, ridge: float) -> tuple[Array, Array]:
    """Step of each leaf ``(C, leaves)`` from these rows, Newton's or the loss's own; the sums of slopes and curvatures."""
    sums = np.zeros((2, z.shape[1], leaves))
    for at in range(0, len(z), AT_ONCE):
        some = slice(at, min(at + AT_ONCE, len(z)))
        parts = torch.stack(loss.slopes(z[some], slice(rows.start + some.start, rows.start + some.stop))).cpu().mT
        whole = parts.contiguous().add_(ROUND).sub_(ROUND).flatten(0, 1)
        sums += search.sums(torch.from_numpy(place[some]), whole.T, leaves).T.reshape(sums.shape).numpy()
    sums = _summed(sums)
    step = sums[0] / (sums[1] + ridge)
    if loss.steps is not None:
        own = loss.steps(z, torch.from_numpy(place), leaves, rows).T.cpu().numpy()
        step = own * (sums[1] / (sums[1] + ridge))
    return step, sums


def _move(z: Array, moves: Array, place: Array) -> None:
    """Take the moves of leaves ``(C, leaves)`` off z ``(n, C)``, in place; ``place``: leaf of each row."""
    for column, move in zip(z.T, moves, strict=True):
        column -= move.take(place)


def places(columns: Tensor, column: Tensor, cut: Tensor, kind: Tensor) -> Tensor:
    """Leaf of every row in each of T trees, int64 ``(n, T)``; arguments as of :func:`walk`."""
    splits = column.shape[1]
    first = torch.arange(column.shape[0], device=column.device) * splits
    start = torch.arange(columns.shape[0], device=column.device)[:, None] * columns.shape[1]
    values, which, low, kinds = columns.flatten(), column.flatten(), cut.to(columns.dtype).flatten(), kind.flatten()
    high, lost = torch.where(kinds % 2 == 1, low, torch.full_like(low, float("inf"))), kinds // 2 % 2 == 1
    node = torch.zeros([columns.shape[0], column.shape[0]], dtype=torch.int64, device=column.device)
    depth = 0
    while (1 << depth) - 1 < splits:
        at = (first + node).flatten()
        x = values.index_select(0, (start + which.index_select(0, at).view(node.shape)).flatten())
        right = ((x >= low.index_select(0, at)) & (x <= high.index_select(0, at))) | (lost.index_select(0, at) & x.isnan())
        node = 2 * node + 1 + right.view(node.shape).to(torch.int64)
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
