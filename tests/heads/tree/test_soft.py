"""Soft answers of a tree: the definition, and what is covered."""

import copy
import math
import re

import pytest
import torch
from hypothesis import given, settings, strategies as st

import torchgmc as gmc
from gmctest.soft_heads import fitted, inputs_of, sigmoid
from torchgmc.heads.tree import soft as soft_answers
from torchgmc.heads.tree.tree import Tree


def soft_tree(head: gmc.TreeHead, probs: list[float], member: list[float], temperature: float) -> list[float]:
    """P(o = v) for one input, from the definition."""
    tree = head.tree
    leaf = max(range(len(probs)), key=lambda k: probs[k])
    nodes = [leaf]
    while tree.parents[nodes[0]] >= 0:
        nodes.insert(0, tree.parents[nodes[0]])
    scores = [sum(probs[k] for k in tree.below(v) if k < tree.num_leaves) for v in nodes]

    def answer(lam: float) -> list[float]:
        reached = [sigmoid((lam - r) / temperature) for r in scores[:-1]] + [1.0]
        return [b - a for a, b in zip([0.0, *reached[:-1]], reached, strict=True)]

    lam = float(head.base)
    for shift in head.shifts.tolist():
        lam -= sum(p * sum(a * b for a, b in zip(shift[v], member, strict=True)) for p, v in zip(answer(lam), nodes, strict=True))
    found = [0.0] * tree.num_nodes
    for p, v in zip(answer(lam), nodes, strict=True):
        found[v] += p
    return found


@pytest.mark.parametrize("name", ["tree", "tree-groups", "tree-conformal"])
def test_tree_is_the_definition(name):
    head, inputs = copy.copy(fitted(name)), inputs_of(name, 8)
    head.jitter = 0.0
    member = inputs[1].double() if len(inputs) > 1 else torch.ones(8, 1)
    wanted = [soft_tree(head, p, m, 0.15) for p, m in zip(inputs[0].tolist(), member.tolist(), strict=True)]
    torch.testing.assert_close(head(*inputs, mode="soft", temperature=0.15), torch.tensor(wanted, dtype=torch.float64))


def test_coverage_of_leaves():
    head, (probs,) = fitted("tree"), inputs_of("tree", 30)
    hard = head.leaves(head(probs))
    assert torch.equal(head.leaves(head(probs, mode="straight_through")), hard.double())
    nodes = head(probs, mode="soft")
    below = torch.tensor([[k in head.tree.below(v) for k in range(5)] for v in range(head.num_nodes)]).double()
    torch.testing.assert_close(head.leaves(nodes), nodes @ below)
    torch.testing.assert_close(head.leaves(nodes).amax(1), torch.ones(30).double())  # the best leaf is always covered
    with pytest.raises(ValueError, match=re.escape(f"soft answers must have shape (n, {head.num_nodes})")):
        head.leaves(nodes[:, :3])


@settings(deadline=None, max_examples=60)
@given(n=st.integers(0, 6), height=st.integers(1, 5), seed=st.integers(0, 2**16), temperature=st.floats(1e-6, 1e3))
def test_path_is_a_distribution_that_climbs_with_lambda(n, height, seed, temperature):
    g = torch.Generator().manual_seed(seed)
    levels = torch.rand(n, height, generator=g, dtype=torch.float64).sort(1, descending=True)[0]
    depth = torch.randint(1, height + 1, (n, 1), generator=g)
    levels = torch.where(torch.arange(height) >= depth, -math.inf, levels)
    lam = torch.rand(n, generator=g, dtype=torch.float64) * 2 - 0.5
    found = soft_answers.path(levels, lam, temperature)
    assert found.shape == (n, height + 1)
    assert bool((found >= 0).all())
    torch.testing.assert_close(found.sum(1), torch.ones(n).double())
    mean = (found * torch.arange(height + 1)).sum(1)
    higher = (soft_answers.path(levels, lam + 0.1, temperature) * torch.arange(height + 1)).sum(1)
    assert bool((higher <= mean + 1e-12).all())


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**16), leaves=st.integers(2, 12))
def test_covered_leaves_is_a_matrix_product(seed, leaves):
    g = torch.Generator().manual_seed(seed)
    paths = [
        (f"a{int(torch.randint(3, (), generator=g))}", f"b{int(torch.randint(2, (), generator=g))}", f"{k}") for k in range(leaves)
    ]
    tree = Tree(paths)
    nodes = torch.rand(4, tree.num_nodes, generator=g, dtype=torch.float64)
    below = torch.tensor([[k in tree.below(v) for k in range(leaves)] for v in range(tree.num_nodes)]).double()
    torch.testing.assert_close(soft_answers.covered_leaves(nodes, tree.spans, tree.place), nodes @ below)
