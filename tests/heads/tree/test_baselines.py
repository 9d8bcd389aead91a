"""Baselines for a tree, against loops."""

import copy

import pytest
import torch
from hypothesis import given, settings, strategies as st

import torchgmc as gmc
from gmctest.oracles_tree import WOS, SlowTree, random_case, sample


@settings(deadline=None, max_examples=30)
@given(n=st.integers(8, 40), num_leaves=st.integers(2, 8), seed=st.integers(0, 2**16))
def test_split_conformal_matches_loop(n, num_leaves, seed):
    parents, probs, labels = random_case(seed, n, num_leaves)
    slow, rows = SlowTree(parents), probs.tolist()
    head = gmc.baselines.SplitConformal(parents, 0.8, jitter=0.0).fit(probs, labels)
    lam = float(head.threshold(probs)[0])

    def risk(value):
        missed = [not slow.covers(slow.answer(row, value), y) for row, y in zip(rows, labels.tolist(), strict=True)]
        return (sum(missed) + 1) / (n + 1)

    assert risk(lam) <= 0.2 + 1e-9
    levels = sorted({sum(row[k] for k in slow.leaves[v]) for row in rows for v in range(len(parents))})
    lower = [v for v in levels if v < lam - 1e-9]
    assert all(risk(v) > 0.2 - 1e-9 for v in lower[-3:-1])  # at a level below, lambda is too low


def test_unprocessed_answers_the_best_leaf():
    probs, labels = sample(200, 10)
    head = gmc.baselines.UnprocessedTree(WOS, 0.9).fit(probs, labels)
    assert torch.equal(head(probs), probs.argmax(1))
    assert head.report.details["mean set size"] == 1.0
    assert copy.deepcopy(head)(probs).equal(head(probs))


def test_each_group_by_itself_is_split_conformal_of_its_examples(tmp_path):
    probs, labels = sample(400, 1)
    groups = torch.nn.functional.one_hot(torch.arange(400) % 3, 3).bool()
    head = gmc.baselines.MondrianConformalTree(WOS, 0.9, groups=["a", "b", "c"]).fit(probs, labels, groups)
    for group in groups.T:
        alone = gmc.baselines.SplitConformalTree(WOS, 0.9).fit(probs[group], labels[group])
        torch.testing.assert_close(head.threshold(probs, groups)[group], alone.threshold(probs[group]), rtol=0, atol=1e-12)
    gmc.save(head, tmp_path / "head.safetensors")
    assert torch.equal(gmc.load(tmp_path / "head.safetensors")(probs, groups), head(probs, groups))
    assert torch.equal(torch.jit.script(head)(probs, groups), head(probs, groups))
    assert head.audit(probs, labels, groups).max_violation >= 0


def test_groups_that_overlap_have_no_fit_of_their_own():
    probs, labels = sample(60, 1)
    head = gmc.baselines.MondrianConformalTree(WOS, 0.9, groups=["a", "b"])
    with pytest.raises(ValueError, match="divide the examples"):
        head.fit(probs, labels, torch.ones(60, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="group 'b': no threshold.*n >= 9"):
        head.fit(probs, labels, torch.arange(60)[:, None] // 57 == torch.arange(2))
    assert not head.is_fitted
