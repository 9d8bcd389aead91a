"""TreeHead against loops over explicit leaf sets, and the properties of its log."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchgmc as gmc
from gmctest.oracles_tree import TOY, WOS, SlowTree, random_scores, random_tree, sample
from torchgmc.engine.solver import run
from torchgmc.heads.tree.tree import Tree, answers, path_levels, replay, rounds


def make(seed, n, num_leaves, signal=1.5):
    g = torch.Generator().manual_seed(seed)
    parents = random_tree(num_leaves, g)
    return (parents, *random_scores(n, num_leaves, g, signal))


# -- structure ---------------------------------------------------------------------------------------------------------


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


# -- answers -----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 12), num_leaves=st.integers(2, 10), lam=st.integers(-64, 1200), seed=st.integers(0, 2**16))
def test_answers_match_loop(n, num_leaves, lam, seed):
    parents, probs, labels = make(seed, n, num_leaves)
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


# -- fit ---------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15)
@given(
    num_leaves=st.integers(3, 7),
    seed=st.integers(0, 2**16),
    conditional=st.booleans(),
    grouped=st.booleans(),
    nodes=st.booleans(),
)
def test_paper_solver_matches_loop_step_by_step(num_leaves, seed, conditional, grouped, nodes):
    n, steps, eta = 32, 40, 1 / 64
    parents, probs, labels = make(seed, n, num_leaves)
    member = torch.rand(n, 2, generator=torch.Generator().manual_seed(seed)) < 0.7
    member[0] = True
    options = {"groups": ["a", "b"]} if grouped else {}
    data = (probs, labels, member) if grouped else (probs, labels)
    head = gmc.TreeHead(
        parents, 0.875, 1 / 128, "nodes" if nodes else None, conditional=conditional, jitter=0.0, init=0.75, **options
    )
    head.observe(*data)
    problem = head._problem()
    report, _ = run(problem, head.alpha, "paper", eta, steps)
    slow = SlowTree(parents)
    log, worst, lams = slow.algorithm(
        probs.tolist(),
        labels.tolist(),
        [set(s) for s in head.sets.values()],
        *(0.875, 1 / 128, eta, 0.75, report.iterations),
        conditional,
        member.tolist() if grouped else None,
    )
    q, many = problem.promised, problem.sets.shape[1]
    expected = [(index // q) * many + index % q for index, _ in log]
    kept = report.iterations
    assert problem.who[:kept] == expected
    assert problem.shift[:kept] == pytest.approx([s for _, s in log], rel=1e-12)
    torch.testing.assert_close(report.history[:kept], torch.tensor(worst[:kept], dtype=torch.float64))
    torch.testing.assert_close(problem.lam, torch.tensor(lams, dtype=torch.float64), rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=15)
@given(num_leaves=st.integers(3, 9), seed=st.integers(0, 2**16), conditional=st.booleans(), grouped=st.booleans())
def test_exact_fit_is_what_the_loop_measures(num_leaves, seed, conditional, grouped):
    n = 64
    parents, probs, labels = make(seed, n, num_leaves)
    member = torch.rand(n, 2, generator=torch.Generator().manual_seed(seed)) < 0.7
    member[0] = True
    options = {"groups": ["a", "b"]} if grouped else {}
    groups = (member,) if grouped else ()
    head = gmc.TreeHead(parents, 0.8, 0.03, conditional=conditional, jitter=0.0, **options).fit(probs, labels, *groups)
    lams = head.threshold(probs, *groups)
    slow = SlowTree(parents)
    sets = [set(s) for s in head.sets.values()]
    rows, members = probs.tolist(), member.tolist() if grouped else None
    table = slow.violations(rows, labels.tolist(), lams.tolist(), sets, 0.8, conditional, members)
    torch.testing.assert_close(head.report.violations_after[:, 0], torch.tensor(table, dtype=torch.float64))
    start = slow.violations(rows, labels.tolist(), [0.5] * n, sets, 0.8, conditional, members)
    torch.testing.assert_close(head.report.violations_before[:, 0], torch.tensor(start, dtype=torch.float64))
    assert head(probs, *groups).tolist() == [slow.answer(row, lam) for row, lam in zip(rows, lams.tolist(), strict=True)]
    tolerance = head.report.details["tolerance"]
    assert head.report.converged == bool((head.report.violations_after.abs() <= tolerance).all())
    if not conditional:  # never worse than the start
        assert float(head.report.violations_after.abs().max()) <= max(map(abs, start)) + 1e-12


@pytest.mark.parametrize("solver", ["exact", "paper", "fresh"])
@pytest.mark.parametrize("conditional", [False, True])
def test_replay_is_the_fit(solver, conditional):
    probs, labels = sample(600, 2)
    head = gmc.TreeHead(WOS, 0.93, 0.01, conditional=conditional)
    head._prepare(solver, None, 3, 600)
    head.observe(probs, labels)
    problem = head._problem()
    if solver == "exact":
        from torchgmc.heads.tree.solver import descend

        steps = descend(problem, 1000).iterations
    else:
        steps = run(problem, head.alpha, solver, 0.01, 200 if solver == "paper" else 3).report.iterations
    shifts = rounds(head.tree, problem.sets, problem.who[:steps], problem.shift[:steps], 1)
    lam = replay(problem.stats.levels, problem.routes, problem.stats.member.double(), shifts, head.base)
    assert steps > 0
    torch.testing.assert_close(lam, problem.lam, rtol=0, atol=1e-12)  # sums of steps over all nodes may round
    steps = {"exact": None, "paper": 200, "fresh": 3}[solver]
    fitted = gmc.TreeHead(WOS, 0.93, 0.01, conditional=conditional).fit(probs, labels, solver=solver, max_iter=steps)
    again = fitted._problem()
    again.restore(fitted.threshold(probs))
    assert torch.equal(again.violations(), fitted.report.violations_after)


def test_rounds_replay_the_plain_log():
    """Merged rounds against one step at a time, for random logs."""
    g = torch.Generator().manual_seed(0)
    for seed in range(10):
        parents, probs, _ = make(seed, 50, 8)
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


def test_the_sweep_measures_every_shift():
    """The tables of all shifts at once, against moving and measuring one by one."""
    probs, labels = sample(200, 3)
    member = torch.rand(200, 2, generator=torch.Generator().manual_seed(0)) < 0.6
    head = gmc.TreeHead(WOS, 0.9, 0.02, groups=["a", "b"], sets="nodes", init=0.9)
    head.observe(probs, labels, member)
    problem = head._problem()
    for who in range(problem.sets.shape[1] + 3):
        rows = problem.inside(who).nonzero()[:, 0]
        if len(rows) == 0:
            continue
        points = problem.points(rows)
        total = torch.stack(problem.sums())
        swept = problem.sweep(rows, total - torch.stack(problem.sums(rows)), points)
        start = problem.lam
        for k in range(0, len(points), 17):
            problem.lam = start.index_add(0, rows, -points[k].expand(len(rows)))
            moved = problem.sums()
            torch.testing.assert_close(swept[0][k], moved[0])
            torch.testing.assert_close(swept[1][k], moved[1])
        problem.lam = start


def test_restart_at_a_solution_takes_no_step():
    probs, labels = sample(2000, 4)
    everyone = {"all": list(range(16))}
    head = gmc.TreeHead(WOS, 0.9, 0.02, everyone).fit(probs, labels)
    assert head.report.converged
    assert head.report.iterations > 0
    conformal = gmc.baselines.SplitConformal(WOS, 0.9).fit(probs, labels)
    again = gmc.TreeHead(WOS, 0.9, 0.02, everyone, init=float(conformal.base)).fit(probs, labels)
    assert again.report.iterations == 0
    assert len(again.shifts) == 0


def test_order_of_examples_and_batches_do_not_matter():
    probs, labels = sample(500, 5)
    weight = torch.rand(500, generator=torch.Generator().manual_seed(1)) + 0.5
    head = gmc.TreeHead(WOS, 0.9, 0.02).fit(probs, labels, weight=weight)
    parts = gmc.TreeHead(WOS, 0.9, 0.02)
    for i in range(0, 500, 130):
        parts.observe(probs[i : i + 130], labels[i : i + 130], weight=weight[i : i + 130])
    assert torch.equal(parts.calibrate().shifts, head.shifts)
    other = gmc.TreeHead(WOS, 0.9, 0.02).fit(probs.flip(0), labels.flip(0), weight=weight.flip(0))
    torch.testing.assert_close(other(probs), head(probs))


def test_integer_weights_are_repeats():
    probs, labels = sample(300, 6)
    weight = torch.randint(1, 4, (300,), generator=torch.Generator().manual_seed(0))
    repeated = torch.arange(300).repeat_interleave(weight)
    a = gmc.TreeHead(WOS, 0.9, 0.03, jitter=0.0)
    a.observe(probs, labels, weight=weight)
    b = gmc.TreeHead(WOS, 0.9, 0.03, jitter=0.0)
    b.observe(probs[repeated], labels[repeated])
    torch.testing.assert_close(a._problem().violations(), b._problem().violations())


# -- the promise on fresh data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("conditional", [False, True])
def test_promise_on_fresh_draws(conditional):
    """Violations of fresh draws stay near alpha.

    For a head whose violations on the population are within 2 alpha, each of the |G| = 4 means over 50,000 fresh examples (of
    which a set holds at least 1 in 20 when conditional) leaves 2 alpha + r with probability at most 2 exp(-2 m r^2), by
    Hoeffding. r below makes the union over G 1e-6: the error rate of this test.
    """
    probs, labels = sample(20_000, 7)
    head = gmc.TreeHead(WOS, 0.9, 0.02, conditional=conditional).fit(probs, labels)
    assert head.report.converged
    fresh = head.audit(*sample(50_000, 8))
    smallest = min(fresh.table["count"]) if conditional else 50_000
    assert smallest >= 2500
    slack = (torch.tensor(2 * 4 / 1e-6).log() / (2 * smallest)).sqrt().item()
    assert fresh.max_violation <= 2 * 0.02 + slack


def test_less_root_than_conformal_at_the_same_coverage():
    probs, labels = sample(5000, 9)
    head = gmc.TreeHead(WOS, 0.93, 0.01, conditional=True).fit(probs, labels)
    conformal = gmc.baselines.SplitConformal(WOS, 0.93, 0.01, conditional=True).fit(probs, labels)
    assert head.report.details["answers: leaf"] > conformal.report.details["answers: leaf"]
    assert head.report.violations_after.abs().max() < conformal.report.violations_after.abs().max()


# -- baselines ---------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(n=st.integers(8, 40), num_leaves=st.integers(2, 8), seed=st.integers(0, 2**16))
def test_split_conformal_matches_loop(n, num_leaves, seed):
    parents, probs, labels = make(seed, n, num_leaves)
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
