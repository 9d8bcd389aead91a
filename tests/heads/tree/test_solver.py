"""TreeHead against loops over explicit leaf sets, and the properties of its log."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

import torchgmc as gmc
from gmctest.oracles_tree import WOS, SlowTree, random_case, sample
from torchgmc.engine import folds
from torchgmc.engine.folds import Splits
from torchgmc.engine.solver import run
from torchgmc.heads.tree import solver
from torchgmc.heads.tree.tree import replay, rounds

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
    parents, probs, labels = random_case(seed, n, num_leaves)
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
    lams = torch.tensor(lams, dtype=torch.float64)[head.statistics.order()]
    torch.testing.assert_close(problem.lam, lams, rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=15)
@given(
    num_leaves=st.integers(3, 9),
    seed=st.integers(0, 2**16),
    conditional=st.booleans(),
    grouped=st.booleans(),
    floor=st.booleans(),
)
def test_exact_fit_is_what_the_loop_measures(num_leaves, seed, conditional, grouped, floor):
    n = 64
    parents, probs, labels = random_case(seed, n, num_leaves)
    member = torch.rand(n, 2, generator=torch.Generator().manual_seed(seed)) < 0.7
    member[0] = True
    options = {"groups": ["a", "b"]} if grouped else {}
    groups = (member,) if grouped else ()
    head = gmc.TreeHead(parents, 0.8, 0.03, conditional=conditional, jitter=0.0, noise_floor=floor, **options)
    head.fit(probs, labels, *groups)
    lams = head.threshold(probs, *groups)
    slow = SlowTree(parents)
    sets = [set(s) for s in head.sets.values()]
    rows, members = probs.tolist(), member.tolist() if grouped else None
    table = slow.violations(rows, labels.tolist(), lams.tolist(), sets, 0.8, conditional, members)
    torch.testing.assert_close(head.report.violations_after[:, 0], torch.tensor(table, dtype=torch.float64))
    start = slow.violations(rows, labels.tolist(), [0.5] * n, sets, 0.8, conditional, members)
    torch.testing.assert_close(head.report.violations_before[:, 0], torch.tensor(start, dtype=torch.float64))
    assert head(probs, *groups).tolist() == [slow.answer(row, lam) for row, lam in zip(rows, lams.tolist(), strict=True)]
    size, tolerance = head.report.violations_after.abs(), head.report.details["tolerance"]
    assert head.report.converged == (head.report.reached == "alpha") == bool((size <= 0.03).all())
    if floor:  # the tolerance is the noise
        assert (head.report.reached == "no") == bool((size > tolerance.clamp_min(0.03)).any())
    else:
        assert head.report.reached != "no" or bool((size > tolerance).any())
    if not conditional:  # never worse than the start
        assert float(head.report.violations_after.abs().max()) <= max(map(abs, start)) + 1e-12


@pytest.mark.parametrize("name", ["exact", "paper", "fresh"])
@pytest.mark.parametrize("conditional", [False, True])
def test_replay_is_the_fit(name, conditional):
    probs, labels = sample(600, 2)
    head = gmc.TreeHead(WOS, 0.93, 0.01, conditional=conditional)
    head.observe(probs, labels)
    problem = head._problem()
    if name == "exact":
        steps = solver.descend(problem, 1000).iterations
    else:
        splits = Splits(3, *head.statistics.content()) if name == "fresh" else None
        steps = run(problem, head.alpha, name, 0.01, 3 if splits else 200, splits=splits).report.iterations
    shifts = rounds(head.tree, problem.sets, problem.who[:steps], problem.shift[:steps], 1)
    lam = replay(problem.stats.levels, problem.routes, problem.stats.member.double(), shifts, head.base)
    assert steps > 0
    torch.testing.assert_close(lam, problem.lam, rtol=0, atol=1e-12)  # sums of steps over all nodes may round
    steps = {"exact": None, "paper": 200, "fresh": 3}[name]
    fitted = gmc.TreeHead(WOS, 0.93, 0.01, conditional=conditional).fit(probs, labels, solver=name, max_iter=steps)
    again = fitted._problem()
    again.restore(fitted.threshold(probs)[fitted.statistics.order()])
    assert torch.equal(again.violations(), fitted.report.violations_after)


def grouped_problem(n, seed, weighted=False):
    probs, labels = sample(n, seed)
    g = torch.Generator().manual_seed(0)
    member = torch.rand(n, 2, generator=g) < 0.6
    head = gmc.TreeHead(WOS, 0.9, 0.02, groups=["a", "b"], sets="nodes", init=0.9)
    head.observe(probs, labels, member, torch.rand(n, generator=g) if weighted else None)
    return head._problem()


def test_the_sweep_measures_every_shift():
    """The tables of all shifts at once, against moving and measuring one by one."""
    problem = grouped_problem(200, 3)
    kinds = len(problem.covers)
    for who in range(problem.sets.shape[1] + 3):
        rows = problem.inside(who).nonzero()[:, 0]
        if len(rows) == 0:
            continue
        breaks, start = problem.lam[:, None] - problem.stats.levels, problem.lam
        points = problem.points(breaks[rows])
        swept = problem._by_promise(problem.sweep(rows, breaks, points, problem.kind, kinds))
        own = problem.sums(problem.weight.index_fill(0, rows, 0.0))
        for k in range(0, len(points), 17):
            problem.lam = start.index_add(0, rows, -points[k].expand(len(rows)))
            torch.testing.assert_close(own + swept[k], problem.sums())
        problem.lam = start


def test_sums_are_those_of_a_loop():
    """Covered weight and weight of the answers in each set and group, and the breadth of all answers."""
    problem = grouped_problem(150, 4, weighted=True)
    depth, sets, q = (
        (problem.stats.levels >= problem.lam[:, None]).sum(1).tolist(),
        problem.sets[:, : problem.promised],
        problem.promised,
    )
    covered, mass, breadth = torch.zeros(2, q), torch.zeros(2, q), 0.0
    for i, node in enumerate(problem.nodes().tolist()):
        weight = float(problem.weight[i])
        breadth += weight * float(problem.tree.sizes[node].double().log() / torch.tensor(12.0).log())
        for group in problem.stats.member[i].nonzero()[:, 0].tolist():
            mass[group] += weight * sets[node]
            covered[group] += weight * sets[node] * (depth[i] <= int(problem.stats.common[i]))
    want = torch.cat([covered.flatten(), mass.flatten(), torch.tensor([breadth])]).double()
    torch.testing.assert_close(problem.sums(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("many", [False, True])
def test_a_step_gains_what_the_sweep_says(many, monkeypatch):
    """With points and a sweep of its own for each move, and with those that moves of many examples share."""
    if many:
        monkeypatch.setattr(solver, "EXACT", 1000)
        monkeypatch.setattr(solver, "SAMPLE", 512)
    problem = grouped_problem(3000, 5, weighted=True)
    assert (problem.some is not None) == many
    for who in (0, 12, 15, problem.sets.shape[1] + 13):
        total, lam = problem.sums(), problem.lam
        merit, _, cost = problem.merit(total)
        found = problem.best_shifts([who, 3, 15], total)
        assert [one[2] for one in found] == [one for one in (who, 3, 15) if bool(problem.inside(one).any())]
        for gain, shift, move in found:
            problem.lam = lam
            problem.take(move, float(shift))
            after, _, lost = problem.merit(problem.sums())
            if float(gain) > 0:
                assert float(gain) == pytest.approx(float((merit - after) / (0.02 + (lost - cost).clamp_min(0))), rel=1e-9)
        if not found:
            problem.lam = lam


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("conditional", [False, True])
def test_of_many_examples_no_order_changes_a_bit_and_none_is_worse_than_the_start(weighted, conditional, monkeypatch):
    monkeypatch.setattr(solver, "EXACT", 1000)
    monkeypatch.setattr(folds, "EXACT", 1000)
    for seed in range(3):
        probs, labels = sample(6000, seed, signal=2.0)
        g = torch.Generator().manual_seed(seed)
        member = torch.rand(6000, 2, generator=g) < 0.5
        weight = torch.rand(6000, generator=g) ** 3 if weighted else torch.ones(6000)
        head, other = (gmc.TreeHead(WOS, 0.9, 0.02, groups=["a", "b"], conditional=conditional) for _ in range(2))
        head.fit(probs, labels, member, weight)
        order = torch.randperm(6000, generator=g)
        other.fit(*(t[order] for t in (probs, labels, member, weight)))
        assert head.report.iterations > 0 and torch.equal(head.shifts, other.shifts)
        assert torch.equal(head.report.violations_after, other.report.violations_after)
        before, after = (v.abs().max() for v in (head.report.violations_before, head.report.violations_after))
        assert after <= before
        few = gmc.TreeHead(WOS, 0.9, 0.02, groups=["a", "b"], conditional=conditional)
        monkeypatch.setattr(solver, "EXACT", 1 << 15)
        few.fit(probs, labels, member, weight)
        monkeypatch.setattr(solver, "EXACT", 1000)
        assert {"alpha": 0, "noise": 1, "no": 2}[head.report.reached] <= {"alpha": 0, "noise": 1, "no": 2}[few.report.reached]


def test_what_a_fit_to_alpha_reaches_the_noise_rule_reaches_too():
    """Of three sets not every one can be within its noise (the root covers always): then alpha is what counts."""
    for seed in (1, 4, 8):
        g = torch.Generator().manual_seed(seed)
        labels = torch.randint(4, (1000,), generator=g)
        probs = (torch.randn(1000, 4, generator=g) + 1.5 * torch.nn.functional.one_hot(labels, 4)).softmax(1)
        heads = [gmc.TreeHead([4, 4, 5, 5, 6, 6, -1], 0.9, 0.025, noise_floor=floor) for floor in (False, True)]
        assert [head.fit(probs, labels).report.reached for head in heads] == ["alpha", "alpha"]


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


@pytest.mark.parametrize("floor", [True, False])
def test_sets_with_too_few_answers_are_named_with_what_to_do(floor):
    probs, labels = sample(400, 3)
    member = torch.stack([torch.arange(400) < 60, torch.arange(400) >= 0], 1)
    head = gmc.TreeHead(WOS, 0.8, 0.02, groups=["rare", "all"], noise_floor=floor).fit(probs, labels, member)
    nodes, parents = head(probs, member).tolist(), head.tree.parents
    few = []
    for column, group in enumerate(head.groups):
        for name, chosen in head.sets.items():
            answered = reach = 0
            for i in range(400):
                node, path = int(probs[i].argmax()), set()
                while node >= 0:
                    path.add(node)
                    node = parents[node]
                answered += bool(member[i, column]) and nodes[i] in chosen
                reach += bool(member[i, column]) and bool(path & set(chosen))
            if max(answered, 0.25 * reach) * 0.2 < 5:
                few.append(f"{group} & {name}")
    report = head.report
    assert few and report.details["small"] == few and "all & all" not in few
    assert f"{few[0]!r}" in report.message and f"({len(few)} in all). Merge such groups" in report.message
    pairs = gmc.TreeHead(WOS, 0.8, 0.02).fit(probs, labels, clusters=torch.arange(400) // 20)
    assert "all" in pairs.report.details["small"]  # twenty clusters are twenty examples
    many = [t.repeat(20, *([1] * (t.dim() - 1))) for t in (probs, labels)]
    assert "Too small" not in gmc.TreeHead(WOS, 0.8, 0.02, noise_floor=floor).fit(*many).report.message
