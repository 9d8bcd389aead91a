import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._subclasses import FakeTensorMode

import torchgmc as gmc
from gmctest.fake_device import AWAY
from gmctest.oracles import violations_loop
from torchgmc.engine.search import Cells, masses


def draw(n, a, l, seed, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    who = torch.rand(n, a, generator=rng) < 0.5
    return who, torch.randn(n, l, generator=rng, dtype=torch.float64).to(dtype), torch.rand(n, generator=rng).double() + 0.1


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(0, 20),
    a=st.integers(1, 4),
    l=st.integers(1, 3),
    u=st.integers(0, 3),
    weighted=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_matches_the_loop(n, a, l, u, weighted, seed):
    who, s, weight = draw(n, a, l, seed)
    what = torch.randn(u, l, dtype=torch.float64) if u else None
    table = gmc.violations(who, s, what, weight if weighted else None)
    expected = violations_loop(who.tolist(), s.tolist(), what.tolist() if u else None, weight.tolist() if weighted else None)
    width = u or l
    expected = torch.tensor(expected, dtype=torch.float64).reshape(a, width) if n else torch.zeros(a, width).double()
    torch.testing.assert_close(table, expected)


@settings(deadline=None, max_examples=40)
@given(n=st.integers(1, 30), a=st.integers(1, 4), l=st.integers(1, 3), seed=st.integers(0, 2**16))
def test_cells_ids_and_dense_agree(n, a, l, seed):
    who, s, weight = draw(n, a, l, seed)
    patterns, ids = torch.unique(who, dim=0, return_inverse=True)
    torch.testing.assert_close(gmc.violations(Cells(ids, patterns), s, weight=weight), gmc.violations(who, s, weight=weight))
    one_hot = torch.nn.functional.one_hot(ids, len(patterns))
    torch.testing.assert_close(gmc.violations(ids, s), gmc.violations(one_hot, s))
    assert torch.equal(gmc.violations(ids, s.T.contiguous().T), gmc.violations(ids, s))  # in another order in memory
    torch.testing.assert_close(gmc.violations(ids, s, num_sets=len(patterns) + 2)[-2:], torch.zeros(2, l).double())
    torch.testing.assert_close(masses(Cells(ids, patterns), weight), masses(who, weight))


@settings(deadline=None, max_examples=30)
@given(n=st.integers(2, 30), seed=st.integers(0, 2**16))
def test_order_of_examples_and_groups_does_not_matter(n, seed):
    who, s, weight = draw(n, 3, 2, seed)
    table = gmc.violations(who, s, weight=weight)
    order, columns = torch.randperm(n), torch.randperm(3)
    torch.testing.assert_close(gmc.violations(who[order], s[order], weight=weight[order]), table)
    torch.testing.assert_close(gmc.violations(who[:, columns], s, weight=weight), table[columns])


def test_general_test_functions_equal_products(monkeypatch):
    who, s, weight = draw(50, 3, 2, 0)
    what = torch.randn(4, 2).double()
    g = (who[:, :, None, None] * what).reshape(50, 12, 2)
    expected = gmc.violations(who, s, what, weight).reshape(12, 1)
    torch.testing.assert_close(gmc.violations(g.double(), s, weight=weight), expected)
    monkeypatch.setattr("torchgmc.engine.search.MAX_ELEMENTS", 100)  # several chunks
    torch.testing.assert_close(gmc.violations(g.double(), s, weight=weight), expected)


def test_weights_per_direction():
    who, s, _ = draw(40, 3, 2, 1)
    weight = (torch.rand(40, 2) < 0.7).double()
    table = gmc.violations(who, s, weight=weight)
    for k in range(2):
        keep = weight[:, k] > 0
        torch.testing.assert_close(table[:, k], gmc.violations(who[keep], s[keep, k])[:, 0])


def test_float32_is_close_to_float64():
    who, s, weight = draw(2000, 5, 3, 2)
    torch.testing.assert_close(
        gmc.violations(who, s.float(), weight=weight).double(), gmc.violations(who, s, weight=weight), atol=1e-6, rtol=1e-5
    )


def test_an_empty_set_gives_zero():
    who = torch.zeros(5, 2, dtype=torch.bool)
    assert gmc.violations(who, torch.ones(5)).tolist() == [[0.0], [0.0]]


def test_stays_on_the_device():
    with FakeTensorMode():
        who, s = torch.ones(8, 3, device=AWAY).bool(), torch.randn(8, 2, device=AWAY)
        assert gmc.violations(who, s, weight=torch.ones(8, device=AWAY)).device == AWAY
        cells = Cells(torch.zeros(8, dtype=torch.int64, device=AWAY), torch.ones(2, 3, device=AWAY).bool())
        assert gmc.violations(cells, s).device == AWAY


@pytest.mark.parametrize(
    ("who", "s", "options", "error", "message"),
    [
        (torch.ones(3, 2), [1.0], {}, TypeError, "`s` must be a tensor"),
        (torch.ones(3, 2), torch.ones(3).long(), {}, TypeError, "floating point, got torch.int64"),
        (torch.ones(3, 2), torch.ones(3, 1, 1), {}, ValueError, r"shape \(n, l\) or \(n,\), got \(3, 1, 1\)"),
        (torch.ones(2, 2), torch.ones(3), {}, ValueError, "2 rows but `s` has 3"),
        (torch.ones(3), torch.ones(3), {}, TypeError, "integer cell ids"),
        ([[1]], torch.ones(1), {}, TypeError, "`who` must be a tensor, Cells or Groups"),
        (torch.ones(3, 2), torch.ones(3), {"what": torch.ones(2, 5)}, ValueError, r"shape \(u, 1\)"),
        (torch.ones(3, 2), torch.ones(3), {"weight": torch.ones(4)}, ValueError, r"`weight` must have shape \(3,\)"),
        (torch.ones(3, 2, 2), torch.ones(3, 2), {"what": torch.ones(2, 2)}, ValueError, "do not pass `what`"),
        (torch.ones(3, 2, 1), torch.ones(3, 2), {}, ValueError, "must have l = 2"),
    ],
)
def test_errors(who, s, options, error, message):
    with pytest.raises(error, match=message):
        gmc.violations(who, s, **options)
