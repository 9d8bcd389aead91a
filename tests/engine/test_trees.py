"""Boosted trees over coded columns, against a search written as plain loops."""

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from torchgmc.engine import trees


def draw(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A number with gaps, a few numbers, categories with gaps, two columns of 0 and 1; which are categories; g and h."""
    g = torch.Generator().manual_seed(seed)
    columns = torch.randn(n, 5, generator=g)
    columns[:, 1] = columns[:, 1].round()
    columns[:, 2] = torch.randint(0, 4, (n,), generator=g).float()
    columns[:, 3:] = (columns[:, 3:] > 0.3).float()
    columns[torch.rand(n, generator=g) < 0.2, 0] = math.nan
    columns[torch.rand(n, generator=g) < 0.2, 2] = math.nan
    slope = (torch.randn(n, 1, generator=g).double() / trees.GRAIN).round() * trees.GRAIN
    curvature = (torch.rand(n, 1, generator=g).double() / trees.GRAIN).round() * trees.GRAIN
    return columns, torch.tensor([False, False, True, False, False]), slope, curvature


def goes_right(x: float, cut: float, equal: bool, missing: bool) -> bool:
    if math.isnan(x):
        return missing
    return x == cut if equal else x >= cut


def best_split(rows, columns, coded, slope, curvature, ridge, least):
    """Gain of the best split of these rows, by trying all: column, cut and direction of NaN."""

    def score(some: list[int]) -> float:
        return sum(float(slope[i]) for i in some) ** 2 / (sum(float(curvature[i]) for i in some) + ridge)

    best, how = 0.0, None
    for j in range(columns.shape[1]):
        cuts = [*coded.cuts[j][~np.isinf(coded.cuts[j])].tolist(), math.inf]
        for cut in cuts:
            for missing in (False, True):
                right = [i for i in rows if goes_right(float(columns[i, j]), cut, bool(coded.equal[j]), missing)]
                left = [i for i in rows if i not in set(right)]
                if min(sum(float(curvature[i]) for i in part) for part in (left, right)) < least:
                    continue
                gain = score(left) + score(right) - score(rows)
                if gain > best + 1e-9:
                    best, how = gain, (j, cut, missing)
    return best, how


def test_columns_that_depend_on_each_other_are_counted_together_and_split_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    level = torch.randint(0, 12, (4000, 2), generator=g)
    shown = [level, level[:, :1] == torch.arange(12), level[:, 1:] == torch.arange(12), level[:, :1] > 5]
    noise = torch.randn(4000, 2, generator=g).masked_fill(torch.rand(4000, 2, generator=g) < 0.1, torch.nan)
    columns = torch.cat([part.float() for part in (*shown, noise, torch.rand(4000, 5, generator=g) < 0.2)], 1)
    equal = torch.zeros(columns.shape[1], dtype=torch.bool).index_fill_(0, torch.tensor([1]), True)
    slope, curvature = torch.randn(4000, 1, generator=g, dtype=torch.float64), torch.ones(4000, 1, dtype=torch.float64)
    slope += (level[:, :1] == 3) & (columns[:, -1:] > 0)
    found = []
    for many in (0, 1 << 40):
        monkeypatch.setattr(trees, "MANY", many)
        coded = trees.code(columns, equal, 32)
        tree, leaf = trees.grow(coded, slope, curvature, 3, 1.0, 5.0)
        found.append((len(coded.cells), coded.splits, *tree, leaf))
    assert found[0][0] <= 6 < found[1][0]
    assert all(np.array_equal(one, two) for one, two in zip(found[0][1:], found[1][1:], strict=True))
    cells, where, seen = trees._joined(coded.codes, coded.codes.max(1).astype(int) + 1, 64)
    assert np.array_equal(seen[np.arange(len(where))[:, None], cells[where]], coded.codes)


@pytest.mark.parametrize("classes", [1, 2])
def test_sums_of_the_larger_half_are_what_the_smaller_leaves(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    columns, equal, _, _ = draw(300, 3)
    coded, g = trees.code(columns, equal, 16), torch.Generator().manual_seed(0)
    places, size = coded._replace(few=False).layout(slice(0, 300)), coded.ways.shape[1]
    values = torch.randint(-1000, 1000, (classes, 300), generator=g).double().numpy()
    leaf = (
        (torch.rand(5, 300, generator=g) * torch.tensor([4.0, 4.0, 2.0, 1.0, 3.5])[:, None]).to(torch.uint8).numpy()
    )  # some are empty
    parents = np.concatenate([trees.histogram(places, one.astype(int) >> 1, 2, size, values) for one in leaf], 1)
    found = trees._halves(places, [leaf >> 1, leaf & 1], parents, values)
    plain = np.zeros_like(found)
    for b, row, cell in itertools.product(range(5), range(300), range(places.shape[1])):
        plain[:, 4 * b + leaf[b, row], cell, places[row, cell] - cell * size] += values[:, row]
    assert np.array_equal(found, plain)
    monkeypatch.setattr(trees, "FEW", 0)  # by torch, and which half is smaller by a look at few rows
    monkeypatch.setattr(trees, "LOOK", 7)
    monkeypatch.setattr(trees, "AT_ONCE", 100)
    assert np.array_equal(trees._halves(places, [leaf >> 1, leaf & 1], parents, values), plain)


@pytest.mark.parametrize("classes", [1, 2])
def test_few_rows_are_summed_as_cells_are_counted(classes: int) -> None:
    columns, equal, _, _ = draw(300, 4)
    g, held = torch.Generator().manual_seed(1), 60
    slope, curvature = (torch.rand(300 - held, classes, generator=g, dtype=torch.float64) - part for part in (0.5, 0.0))
    counted, summed = (trees.code(columns, equal, 16)._replace(few=few) for few in (False, True))
    there = summed.layout(slice(0, 240))
    for j, (column, code, lost) in enumerate(summed.splits[1:].tolist(), 1):
        plain = [lost if c == 16 else c == code if equal[column] else c >= code for c in summed.codes[column, :240].tolist()]
        assert there[:, j].tolist() == [float(p) for p in plain]
    assert (there[:, 0] == 1).all()
    for roots in (None, np.eye(columns.shape[1], dtype=bool)):
        one, two = (trees.grow(coded, slope, curvature, 4, 1.0, 0.5, roots) for coded in (counted, summed))
        assert all(np.array_equal(*pair) for pair in zip((*one[0], one[1]), (*two[0], two[1]), strict=True))


@settings(deadline=None, max_examples=12)
@given(n=st.integers(2, 40), seed=st.integers(0, 2**16))
def test_every_split_is_the_best_of_all(n: int, seed: int) -> None:
    columns, equal, slope, curvature = draw(n, seed)
    coded = trees.code(columns, equal, 64)
    some, reached = trees.grow(coded, slope, curvature, 2, 1.0, 0.5)
    for few in (False, True):  # counts of cells, and sums of all rows
        again, there = trees.grow(coded._replace(few=few), slope, curvature, 2, 1.0, 0.5)
        assert all(np.array_equal(one, two) for one, two in zip((*again, there), (*some, reached), strict=True))
    tree = trees.Grown(*(part[0] for part in some))
    leaf = [list(range(n))]
    for level in range(2):
        following = []
        for place, rows in enumerate(leaf):
            node = 2**level - 1 + place
            gain, _ = best_split(rows, columns, coded, slope, curvature, 1.0, 0.5) if rows else (0.0, None)
            assert float(tree.gain[node]) == pytest.approx(gain, abs=1e-7)
            j, k = int(tree.column[node]), int(tree.code[node])
            cut = math.inf if k == coded.missing else float(coded.cuts[j, k])
            right = [i for i in rows if goes_right(float(columns[i, j]), cut, bool(equal[j]), bool(tree.missing[node]))]
            following += [[i for i in rows if i not in set(right)], right]
        leaf = following
    found = trees.leaves_of(coded, tree)
    assert np.array_equal(found, reached[0])
    assert [sorted(part) for part in leaf] == [np.flatnonzero(found == k).tolist() for k in range(4)]


def on_ranks(monkeypatch: pytest.MonkeyPatch, world: int, work):
    """What ``work`` of each rank returns: ranks are threads, which sum up what they have at each exchange."""
    parts, barrier, rank = [None] * world, threading.Barrier(world, timeout=30), threading.local()

    def gathered(values: torch.Tensor) -> list[torch.Tensor]:
        parts[rank.id] = values
        barrier.wait()
        found = list(parts)
        barrier.wait()
        return found

    def run(k: int):
        rank.id = k
        return work(k)

    monkeypatch.setattr(trees, "scattered", lambda: True)
    monkeypatch.setattr(trees, "over_ranks", lambda values: sum(gathered(values)))
    monkeypatch.setattr(trees, "collected", lambda values: (torch.cat(gathered(values)), 0))
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


@pytest.mark.parametrize("flat", [0, 1 << 20])
@pytest.mark.parametrize("few", [False, True])
def test_summed_histograms_grow_the_trees_of_all_rows(few: bool, flat: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "FLAT", flat)  # counts of cells, or sums of all rows
    columns, equal, slope, curvature = draw(400, 6)
    chosen = torch.rand(400, generator=torch.Generator().manual_seed(2)) < 0.3 if few else torch.ones(400, dtype=torch.bool)
    ends, roots = (0, 90, 90, 400), np.eye(5, dtype=bool)  # a rank has no rows

    def work(k: int):
        rows = slice(ends[k], ends[k + 1])
        coded = trees.code(columns[rows], equal, 16, chosen[rows] if few else None)
        return coded, *trees.grow(coded, slope[rows], curvature[rows], 3, 1.0, 0.5, roots)

    whole = trees.code(columns, equal, 16, chosen if few else None)
    want, leaf = trees.grow(whole, slope, curvature, 3, 1.0, 0.5, roots)
    found = on_ranks(monkeypatch, 3, work)
    for coded, grown, _ in found:
        assert np.array_equal(coded.cuts, whole.cuts) and np.array_equal(coded.splits, whole.splits)
        assert all(np.array_equal(one, two) for one, two in zip(grown, want, strict=True))
    assert np.array_equal(np.concatenate([coded.codes for coded, _, _ in found], 1), whole.codes)
    assert np.array_equal(np.concatenate([part for _, _, part in found], 1), leaf)


def test_quantiles_of_leaves_are_those_of_sorted_values(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    values, leaf = (
        torch.randn(500, generator=g).double().mul(4).round().div(4).numpy(),
        torch.randint(0, 6, (500,), generator=g).numpy(),
    )
    weight, part = torch.rand(500, generator=g).double().numpy(), 0.7
    plain = np.zeros(8)
    for k in range(6):
        order = np.flatnonzero(leaf == k)[np.argsort(values[leaf == k], kind="stable")]
        plain[k] = values[order][np.searchsorted(weight[order].cumsum(), part * weight[order].sum())]
    ends = (0, 100, 500, 500)

    def work(k: int):
        return trees.quantiles(*(x[ends[k] : ends[k + 1]] for x in (values, leaf, weight)), 8, part)

    assert np.array_equal(trees.quantiles(values, leaf, weight, 8, part), plain)
    assert all(np.array_equal(one, plain) for one in on_ranks(monkeypatch, 3, work))


def test_codes_are_levels_of_numbers_and_categories() -> None:
    columns = torch.tensor([[3.0, 7.0], [1.0, 9.0], [math.nan, 7.0], [2.0, math.nan], [2.0, 8.0]])
    coded = trees.code(columns, torch.tensor([False, True]), 3)
    assert coded.codes[0].tolist() == [2, 0, 3, 1, 1]
    assert coded.codes[1].tolist() == [0, 2, 0, 3, 1]  # 7 and 8 (the first of those that occur once); the rest; missing
    heavy = trees.code(torch.cat([torch.zeros(900), torch.arange(1.0, 101)])[:, None], torch.tensor([False]), 10)
    assert np.bincount(heavy.codes[0])[0] == 900 and len(np.bincount(heavy.codes[0])) >= 8
    many = trees.code(torch.arange(1000.0)[:, None], torch.tensor([False]), 10)
    assert np.bincount(many.codes[0]).tolist() == [100] * 10


def boosted(n: int = 600, seed: int = 0, order: torch.Tensor | None = None):
    columns, equal, _, _ = draw(n, seed)
    g = torch.Generator().manual_seed(seed + 1)
    truth = 2.0 * (columns[:, 3] * columns[:, 4]) - 1.5 * columns[:, 0].isnan() + (columns[:, 2] == 1)
    y = (torch.rand(n, generator=g) < torch.sigmoid(truth - 0.5)).double()[:, None]
    if order is not None:
        columns, y = columns[order], y[order]

    def slopes(z: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sigmoid(z) - y[rows], torch.sigmoid(z) * (1 - torch.sigmoid(z))

    def value(z: torch.Tensor, rows: slice) -> torch.Tensor:
        return (torch.nn.functional.softplus(z) - y[rows] * z)[:, 0]

    coded = trees.code(columns, equal, 16)
    z = torch.zeros(n, 1, dtype=torch.float64)
    return columns, coded, trees.boost(coded, z, z, trees.Loss(slopes, value), n // 5, 2, 100, 0.2, 3.0, 1.0)


def test_held_out_loss_falls_and_a_walk_on_values_is_the_walk_on_codes() -> None:
    columns, coded, found = boosted()
    assert len(found.trees) >= 5 and found.history[-1] < found.history[0] - 0.02
    cuts = np.concatenate([coded.cuts, np.full((5, 1), math.inf)], 1).astype(np.float64)
    column, code, missing = (np.stack([tree[k] for tree in found.trees]) for k in range(3))
    splits = (torch.from_numpy(part) for part in (column, cuts[column, code], coded.equal[column] + 2 * missing))
    moves = trees.walk(columns, *splits, found.moves)
    plain = sum(found.moves[t][trees.leaves_of(coded, tree).astype(int)] for t, tree in enumerate(found.trees))
    assert torch.equal(moves, plain)


def test_the_order_of_the_searched_rows_does_not_matter() -> None:
    order = torch.cat([torch.randperm(480, generator=torch.Generator().manual_seed(3)), torch.arange(480, 600)])
    _, _, one = boosted()
    _, _, two = boosted(order=order)
    assert torch.equal(one.moves, two.moves)


def test_rows_of_one_kind_have_nothing_to_split() -> None:
    coded = trees.code(torch.full((40, 2), 3.0), torch.tensor([False, True]), 8)
    found, leaf = trees.grow(coded, torch.ones(40, 1).double(), torch.ones(40, 1).double(), 2, 1.0, 0.5, np.eye(2, dtype=bool))
    assert not found.gain.any() and not leaf.any()


def test_leaves_of_more_rows_than_the_search_saw_are_those_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many rows some grow the trees; leaves of all follow from the splits."""
    _, coded, whole = boosted()
    monkeypatch.setattr(trees, "POOL", 300)
    monkeypatch.setattr(trees, "JUDGES", 100)
    _, _, some = boosted()
    assert len(whole.trees) and len(some.trees) and some.places.shape == (len(some.trees), 600)
    for found in (whole, some):
        plain = np.stack([trees.leaves_of(coded, tree) for tree in found.trees])
        assert np.array_equal(found.places.numpy(), plain)


def test_nothing_is_kept_of_noise() -> None:
    columns, equal, _, _ = draw(500, 5)
    y = (torch.rand(500, 1, generator=torch.Generator().manual_seed(8)) < 0.5).double()
    loss = trees.Loss(
        lambda z, rows: (torch.sigmoid(z) - y[rows], torch.full_like(z, 0.25)),
        lambda z, rows: (torch.nn.functional.softplus(z) - y[rows] * z)[:, 0],
    )
    z = torch.zeros(500, 1, dtype=torch.float64)
    found = trees.boost(trees.code(columns, equal, 16), z, z, loss, 100, 3, 100, 0.2, 10.0, 3.0)
    assert len(found.trees) <= 3


def test_one_split_is_the_best_column_whatever_the_first_draw_of_roots() -> None:
    """A stump has no second split; columns without any use before the useful one must not end the search."""
    columns = torch.zeros(400, 4)
    columns[:, 3] = torch.rand(400, generator=torch.Generator().manual_seed(0))
    scores = 1 + 4 * (columns[:, 3] > 0.5).double() * torch.rand(400, generator=torch.Generator().manual_seed(1))
    z = torch.full((400, 1), float(scores.quantile(0.9)), dtype=torch.float64)
    loss = trees.pinball(scores[:, None, None], torch.ones(400, 1, 1).double(), torch.tensor([0.9]).double())
    coded = trees.code(columns, torch.zeros(4, dtype=torch.bool), 16)
    found = trees.boost(coded, z, z, loss, 100, 1, 40, 0.2, 3.0, 1.0)
    assert len(found.trees) >= 3 and all(int(tree.column[0]) == 3 for tree in found.trees)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_fit_ends_once_the_search_finds_nothing_but_its_own_rounding(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds of rows: each tree leaves part of their slopes, until the rest is less than their unit; it searched for ever."""
    column = (torch.arange(1200) % 2)[:, None].float()
    y = (torch.rand(1200, 1, generator=torch.Generator().manual_seed(0)) < 0.3 + 0.4 * column).double()
    loss = trees.Loss(
        lambda z, rows: (torch.sigmoid(z) - y[rows], torch.sigmoid(z) * torch.sigmoid(-z)),
        lambda z, rows: (torch.nn.functional.softplus(z) - y[rows] * z)[:, 0],
    )
    calls, grow = [], trees.grow

    def counted(*args):
        calls.append(1)
        assert len(calls) < 500, "more searches than trees"
        return grow(*args)

    monkeypatch.setattr(trees, "grow", counted)
    z = torch.zeros(1200, 1, dtype=torch.float64)
    coded = trees.code(column, torch.zeros(1, dtype=torch.bool), 32)
    for stop in (True, False):
        found = trees.boost(coded, z, z, loss, 240, depth, 400, 0.2, 10.0, 3.0, stop=stop)
        gap = (torch.sigmoid(found.z) - y[960:])[column[960:] > 0].mean()
        assert len(calls) < 500 and abs(float(gap)) < 0.1


@pytest.mark.parametrize("depth", [1, 3])
def test_refitted_leaves_are_those_of_use(depth: int) -> None:
    """What a split's kind means is known to `places` and to `refit`: NaN, equality, and cuts that nobody reaches."""
    g = torch.Generator().manual_seed(depth)
    columns = torch.randint(0, 4, (500, 5), generator=g).float()
    columns[torch.rand(500, 5, generator=g) < 0.2] = float("nan")
    shape = (20, (1 << depth) - 1)
    cut = torch.randint(0, 4, shape, generator=g).double()
    cut[torch.rand(shape, generator=g) < 0.2] = float("inf")
    splits = (torch.randint(5, shape, generator=g), cut, torch.randint(8, shape, generator=g))
    slope, z = torch.randn(500, 2, generator=g).double(), torch.randn(500, 2, generator=g).double()
    loss = trees.Loss(lambda z, rows: (slope[rows], torch.ones_like(z)), lambda z, rows: z.sum(1))
    moves, after = trees.refit(columns, splits, torch.zeros(20, 1 << depth, 2).double(), z, loss, 0.5, 1.0)
    place = trees.places(columns, *splits)
    assert len(place.unique()) == 1 << depth
    assert len(moves.unique()) > 20
    torch.testing.assert_close(after, z - moves[torch.arange(20), place].sum(1), rtol=0, atol=1e-12)
