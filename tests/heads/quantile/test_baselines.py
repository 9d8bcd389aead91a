"""Split conformal and Mondrian conformal on plain scores, against their definitions."""

import math

import pytest
import torch
from hypothesis import example, given, settings, strategies as st

import torchgmc as gmc


def rank(scores: list[float], target: float) -> float:
    """The ceil((n + 1) target)-th smallest by counting; exact fractions, no rounding."""
    needed = (len(scores) + 1) * round(target * 1000)
    for value in sorted(scores):
        if sum(s <= value for s in scores) * 1000 >= needed:
            return value
    return math.inf


@settings(deadline=None, max_examples=40)
@example(n=1, target=0.5, seed=11)
@given(n=st.integers(1, 60), target=st.sampled_from([0.5, 0.7, 0.8, 0.9, 0.95, 0.925]), seed=st.integers(0, 99))
def test_one_group_has_the_rank_of_split_conformal(n, target, seed):
    scores = torch.randn(n, generator=torch.Generator().manual_seed(seed)).double()
    expected = rank(scores.tolist(), target)
    table = gmc.QuantileHead(target, None, finite_sample=True).fit(scores)
    assert float(table()) == expected
    if math.isinf(expected):
        with pytest.raises(ValueError, match="no threshold can promise coverage"):
            gmc.baselines.SplitConformal(target).fit(scores)
    else:
        assert float(gmc.baselines.SplitConformal(target).fit(scores)()) == expected


@settings(deadline=None, max_examples=20)
@given(n=st.integers(10, 80), seed=st.integers(0, 99))
def test_mondrian_is_split_conformal_in_each_combination(n, seed):
    rng = torch.Generator().manual_seed(seed)
    scores, groups = torch.randn(n, generator=rng).double(), torch.rand(n, 2, generator=rng) < 0.6
    groups[:2] = torch.tensor([[True, False], [False, True]])  # nobody is left out of both fits
    head = gmc.baselines.MondrianConformal(0.8, groups=["a", "b"]).fit(scores, groups)
    for pattern in groups.unique(dim=0):
        own = scores[(groups == pattern).all(1)].tolist()
        assert float(head(pattern[None])) == rank(own, 0.8)


def test_groups_that_do_not_overlap_have_the_rank_each_under_finite_sample():
    scores = torch.randn(99, generator=torch.Generator().manual_seed(5)).double()
    odd = torch.arange(99) % 2 == 1
    groups = torch.stack([odd, ~odd], 1)
    head = gmc.QuantileHead(0.9, None, ["odd", "even"], finite_sample=True).fit(scores, groups)
    mondrian = gmc.baselines.MondrianConformal(0.9, groups=["odd", "even"]).fit(scores, groups)
    assert torch.equal(head(groups), mondrian(groups))


def test_thresholds_over_a_start_of_each_example():
    rng = torch.Generator().manual_seed(1)
    base, rest, groups = torch.randn(3, 60, generator=rng).double()
    groups = (groups > 0)[:, None]
    for head in (gmc.baselines.SplitConformal(0.8, groups=["a"]), gmc.baselines.MondrianConformal(0.8, groups=["a"])):
        plain = type(head)(0.8, groups=["a"]).fit(rest, groups)
        moved = head.fit(base + rest, groups, base=base)
        torch.testing.assert_close(moved(groups, base) - base, plain(groups), atol=1e-9, rtol=0)
        assert bool(((base + rest <= moved(groups, base)) >= (rest <= plain(groups))).all())


def test_groups_are_audited_and_everyone_is_among_them():
    rng = torch.Generator().manual_seed(2)
    groups = torch.rand(400, 2, generator=rng) < 0.5
    scores = torch.randn(400, generator=rng).abs() * (1 + 2 * groups[:, 0])
    head = gmc.baselines.SplitConformal(0.9, groups=["wide", "other"]).fit(scores[:200], groups[:200])
    covered = (scores[:200] <= head(groups[:200])).double() - 0.9
    expected = torch.cat([groups[:200], torch.ones(200, 1).bool()], 1).double().T @ covered / 200
    torch.testing.assert_close(head.report.violations_after[:, 0], expected)
    assert head.report.reached == "no" and "groups are not fitted" in head.report.message
    assert set(head.audit(scores[200:], groups[200:]).table["group"]) == {"wide", "other", "everyone"}


def test_a_tree_in_place_of_the_target_is_the_conformal_of_trees(tmp_path):
    head = gmc.baselines.SplitConformal({"x": ["x1", "x2"]}, target=0.9)
    assert isinstance(head, gmc.baselines.SplitConformalTree)
    assert isinstance(gmc.baselines.SplitConformal(parents={"x": ["x1", "x2"]}, target=0.9), gmc.baselines.SplitConformalTree)
    scores = torch.arange(20.0)
    gmc.save(gmc.baselines.SplitConformal(0.9).fit(scores), tmp_path / "head.safetensors")
    loaded = gmc.load(tmp_path / "head.safetensors")
    assert isinstance(loaded, gmc.baselines.SplitConformal) and float(loaded()) == 18.0


def test_weights_and_clusters_count_in_the_rank():
    """A row of weight 2 is that row twice in one cluster, the unit of weights is nothing, and a weight of 0 is no row."""
    rng = torch.Generator().manual_seed(3)
    scores, groups = torch.randn(120, generator=rng).double(), torch.rand(120, 2, generator=rng) < 0.6
    weight, ids = torch.randint(0, 4, (120,), generator=rng), torch.arange(120) // 2
    seen = weight > 0
    groups[:2], rows = torch.tensor([[True, False], [False, True]]), torch.arange(120).repeat_interleave(weight)
    for kind in (gmc.baselines.SplitConformal, gmc.baselines.MondrianConformal):
        head, again = (kind(0.7, groups=["a", "b"]) for _ in range(2))
        head.fit(scores, groups, weight=weight.double() * 0.3, clusters=ids)
        again.fit(scores[rows], groups[rows], clusters=ids[rows])
        assert torch.equal(head(groups[seen]), again(groups[seen]))
        each = again.fit(scores[rows], groups[rows])(groups[seen])
        assert bool((head(groups[seen]) >= each).all() & (head(groups[seen]) > each).any())  # fewer count, higher ranks
