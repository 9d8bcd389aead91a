"""Places of rows: a function of the rows as a set, equal rows apart, about as many as asked for."""

import pytest
import torch

from torchgmc.engine import folds


@pytest.mark.parametrize("exact", [1 << 15, 10])
def test_places_follow_the_rows_and_tell_equal_ones_apart(exact, monkeypatch):
    monkeypatch.setattr(folds, "EXACT", exact)
    x = torch.randint(0, 12, (3000, 2), generator=torch.Generator().manual_seed(0)).double()  # 144 kinds of rows
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(1))
    found, again = folds.places(x[:, :1], x[:, 1:]), folds.places(x[order, :1], x[order, 1:])
    assert found.limit == again.limit and found.rows == again.rows == 3000
    for kind in range(12):  # which of the equal rows has which place does not matter
        here, there = (x == kind).all(1), (x[order] == kind).all(1)
        assert torch.equal(found.place[here].sort().values, again.place[there].sort().values)
    assert len(found.place.unique()) == 3000 and int(found.place.min()) >= 0 and int(found.place.max()) < found.limit
    parts = torch.bincount(found.place % 5)
    assert len(parts) == 5 and abs(int(parts.max()) - 600) < 100
    inside = torch.bincount((found.place % 5)[(x[:, 0] == 3)], minlength=5)  # and equal rows are spread over the folds
    assert int(inside.min()) > 20
    few = found.few(300, 3000)
    assert abs(int(few.sum()) - 300) < 80
    assert found.few(1501, 3000) is None


def test_small_sets_are_dealt_as_ever():
    x = torch.rand(101, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(folds.places(x).place % 5, folds.deal(5, x))
    assert len(folds.places(x[:0]).place) == 0


def test_a_permutation_by_content_is_one_of_the_rows_as_a_set():
    x = torch.randint(0, 3, (500, 2), generator=torch.Generator().manual_seed(0)).double()
    other = x[torch.randperm(500, generator=torch.Generator().manual_seed(1))]
    assert torch.equal(x[folds.shuffled(x, seed=None)], other[folds.shuffled(other, seed=None)])
    assert folds.shuffled(x, seed=None).unique().equal(torch.arange(500))
    ones = [(torch.arange(500)[:, None] < k).double() for k in (200, 201)]  # one row differs
    first, second = (rows[folds.shuffled(rows, seed=None)] for rows in ones)
    assert int((first != second).sum()) > 100
