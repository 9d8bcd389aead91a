"""Trees: three ways to write them, their structure, answers by their definition."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import torchgmc as gmc
from gmctest.oracles_tree import TOY, WOS, SlowTree, random_case, random_tree, sample
from torchgmc.heads.tree.tree import Tree, answers, path_levels, path_levels_in_blocks, replay, rounds

VIEWS = ("view", "slice", "select", "split", "t", "detach", "expand", "unsqueeze", "unbind", "alias", "as_strided")


def test_a_path_is_no_string_with_slashes():
    with pytest.raises(ValueError, match=r"a path is a tuple of names, \('animal', 'cat'\), not 'animal/cat'"):
        gmc.TreeHead(["animal/cat", "animal/dog", "car/bus"], 0.9, 0.02)
    assert gmc.TreeHead(["TCP/IP", "cat"], 0.9, 0.02).num_leaves == 2


def test_three_ways_to_write_a_tree():
    paths = [
        ("Civil", "Green Building"),
        ("Civil", "Water Pollution"),
        ("Medical", "Cancer"),
        ("Medical", "Alzheimer's Disease"),
    ]
    trees = [Tree(TOY), Tree(paths), Tree([5, 5, 6, 6, -1, 4, 4], Tree(TOY).names)]
    for tree in trees:
        assert tree.parents == [5, 5, 6, 6, -1, 4, 4]
        assert tree.names == ["Green Building", "Water Pollution", "Cancer", "Alzheimer's Disease", "root", "Civil", "Medical"]
    assert Tree({"a": ["x", "y"], "b": ["x", "z"], "c": None}).names == ["a/x", "y", "b/x", "z", "c", "root", "a", "b"]


@settings(deadline=None, max_examples=40)
@given(num_leaves=st.integers(2, 12), seed=st.integers(0, 2**16))
def test_structure_matches_leaf_sets(num_leaves, seed):
    parents = random_tree(num_leaves, torch.Generator().manual_seed(seed))
    tree, slow = Tree(parents), SlowTree(parents)
    for node in range(len(parents)):
        first, last = tree.spans[node].tolist()
        assert set(tree.order[first:last].tolist()) == slow.leaves[node]
        assert set(tree.below(node)) == {v for v in range(len(parents)) if slow.leaves[v] <= slow.leaves[node]} - {
            v for v in range(len(parents)) if slow.leaves[v] == slow.leaves[node] and tree.depths[v] < tree.depths[node]
        }
    for leaf in range(num_leaves):
        path = slow.path(leaf)
        assert tree.paths[leaf].tolist() == path + [leaf] * (tree.height + 1 - len(path))


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([2, 2, 3, -1, 9], "must be another node"),
        ([2, 2, -1, -1], "exactly one root"),
        ([2, 2, -1, 4, 3], "must number the 2 leaves|cycle"),
        ([-1, 0, 0], "renumber"),
        ([1, -1], "at least 2 leaves"),
        ([("a",), ("a", "b")], "both as a leaf"),
        ([("a",), ("a",)], "twice"),
        (torch.tensor([1.0, -1.0]), "one node id per node"),
    ],
)
def test_bad_trees_are_refused(parents, message):
    with pytest.raises(ValueError, match=message):
        Tree(parents)


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 12), num_leaves=st.integers(2, 10), lam=st.integers(-64, 1200), seed=st.integers(0, 2**16))
def test_answers_match_loop(n, num_leaves, lam, seed):
    parents, probs, labels = random_case(seed, n, num_leaves)
    slow = SlowTree(parents)
    head = gmc.TreeHead(parents, target=0.9, alpha=0.1, jitter=0.0)
    lams = torch.full((n,), lam / 1024, dtype=torch.float64)
    nodes = head.answer(probs, lams)
    assert nodes.tolist() == [slow.answer(row, lam / 1024) for row in probs.tolist()]
    leaves = head.leaves(nodes)
    assert [set(row.nonzero()[:, 0].tolist()) for row in leaves] == [slow.leaves[v] for v in nodes.tolist()]
    covered = leaves.gather(1, labels[:, None])[:, 0]
    head.observe(probs, labels)
    assert torch.equal(head.tree.depths[nodes] <= head.statistics.common, covered)


def test_the_papers_toy_tree():
    head = gmc.TreeHead(TOY, target=0.9, alpha=0.1, jitter=0.0)
    scores = torch.tensor([[0.1, 0.1, 0.5, 0.6]]).repeat(3, 1)
    assert head.names(head.answer(scores, torch.tensor([0.5, 1.2, 1.4]))) == ["Alzheimer's Disease", "Medical", "root"]


def test_rounds_replay_the_plain_log():
    """Merged rounds against one step at a time, for random logs."""
    g = torch.Generator().manual_seed(0)
    for seed in range(10):
        parents, probs, _ = random_case(seed, 50, 8)
        tree = Tree(parents)
        sets = tree.node_sets(None) | {f"n{v}": [v] for v in range(tree.num_nodes)}
        table = torch.zeros(tree.num_nodes, len(sets), dtype=torch.bool)
        for j, nodes in enumerate(sets.values()):
            table[nodes, j] = True
        member = torch.rand(50, 2, generator=g) < 0.6
        who = torch.randint(2 * len(sets), (60,), generator=g).tolist()
        shift = ((torch.rand(60, generator=g) - 0.5) * 64).round().div(128).tolist()
        leaves, levels = path_levels(probs, tree.paths, tree.depths, tree.order, tree.spans, 0.0)
        routes = tree.paths[leaves]
        lam = torch.full((50,), 0.5, dtype=torch.float64)
        for index, size in zip(who, shift, strict=True):
            group, chosen = divmod(index, len(sets))
            inside = table[answers(levels, routes, lam), chosen] & member[:, group]
            lam = lam - size * inside.double()
        merged = rounds(tree, table, who, shift, 2)
        assert len(merged) < 60
        assert torch.equal(replay(levels, routes, member.double(), merged, torch.tensor(0.5, dtype=torch.float64)), lam)


def test_half_precision_and_batches_do_not_change_an_answer():
    probs, labels = sample(400, 0)
    probs = probs.half()
    head = gmc.TreeHead(WOS, 0.9, 0.02).fit(probs, labels)
    for other in (probs.float(), probs.double()):
        assert torch.equal(head(other), head(probs))
    assert torch.equal(torch.cat([head(probs[i : i + 1]) for i in range(20)]), head(probs)[:20])


def test_jitter_keeps_levels_falling_and_depends_on_the_input_alone():
    probs, _ = sample(300, 1)
    tree = Tree(WOS)
    structure = (tree.paths, tree.depths, tree.order, tree.spans)
    leaves, levels = path_levels(probs, *structure, 0.05)
    plain = path_levels(probs, *structure, 0.0)[1]
    assert bool((levels.diff(dim=1) <= 0).all())
    assert float((levels[:, 0] - plain[:, 0]).abs().max()) <= 0.05 + 1e-12
    assert len(levels[:, 0].unique()) == 300  # no atom left at the root
    flipped = path_levels(probs.flip(0), *structure, 0.05)[1].flip(0)
    assert torch.equal(flipped, levels)
    assert leaves.tolist() == probs.argmax(1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_levels_in_blocks_are_the_plain_ones_to_the_bit(dtype, monkeypatch):
    monkeypatch.setattr("torchgmc.heads.tree.tree.IN_CACHE", 100)
    monkeypatch.setattr("torchgmc.heads.tree.tree.EXACT", 140)
    for num_leaves in (2, 9, 300):  # blocks of 37, 10 and 1 rows; keys of three parts
        generator = torch.Generator().manual_seed(num_leaves)
        tree = Tree(random_tree(num_leaves, generator))
        probs = torch.randn(37, num_leaves, generator=generator).mul(2).softmax(1).to(dtype)
        probs[:5] = probs[:5].round(decimals=1)  # ties
        for width, version in ((0.0, 2), (0.005, 2), (0.005, 1)):
            options = (probs, tree.paths, tree.depths, tree.order, tree.spans, width, version)
            *found, seen = path_levels_in_blocks(*options, probs[:, ::3])
            assert seen.equal(probs[:, ::3])
            for plain, fast in zip(path_levels(*options), found, strict=True):
                assert plain.equal(fast)


def test_observe_reads_the_scores_few_times_and_copies_them_never():
    n, k = 4000, 200
    tree = [k + i % 7 for i in range(k)] + [k + 7] * 7 + [-1]
    probs, labels = torch.randn(n, k).softmax(1), torch.randint(k, (n,))
    written, largest = 0, 0

    class Count(TorchDispatchMode):
        """Numbers that are written, and those of the largest new tensor."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal written, largest
            out = func(*args, **(kwargs or {}))
            for one in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(one, torch.Tensor) and func.name().split("::")[1].split(".")[0] not in VIEWS:
                    new = not any(isinstance(a, torch.Tensor) and a.data_ptr() == one.data_ptr() for a in args)
                    written, largest = written + one.numel(), max(largest, one.numel() * new)
            return out

    head = gmc.TreeHead(tree, 0.9, 0.02)
    with Count():
        head.observe(probs, labels)
    assert largest < n * k / 4
    assert written < 9 * n * k  # in 20 passes before
