"""ProbabilityHead's solvers: the paper's algorithms step by step, the exact one by its optimum and its promise."""

import math

import pytest
import scipy.optimize
import torch
from hypothesis import example, given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import torchgmc as gmc
from gmctest import oracles_levelsets as oracle
from gmctest.oracles_levelsets import classes, events, head_table
from torchgmc.engine.folds import deal
from torchgmc.engine.statistics import Bits
from torchgmc.heads.levelsets.steps import Membership, cell_sums, exact_product

NAMES = ["a", "b", "c"]


@pytest.mark.parametrize("geometry", ["kl", "euclidean"])
@pytest.mark.parametrize("bins", [None, 4])
@pytest.mark.parametrize("conditional", [False, True])
def test_paper_equals_loop_step_by_step(geometry, bins, conditional):
    probs, y, member, _ = events(300)
    alpha, eta, euclidean = 0.02, 2.0**-5, geometry == "euclidean"
    head = gmc.ProbabilityHead(alpha, NAMES, bins=bins, geometry=geometry, conditional=conditional)
    head.fit(probs, y, member, solver="paper", eta=eta, max_iter=150)
    z = probs if euclidean else torch.logit(probs)
    edges = [k / (bins or 1) for k in range(1, bins or 1)]
    final, steps = oracle.algorithm_1(
        z[:, None].tolist(),
        lambda i, row: [oracle.probability(row, euclidean)[0] - float(y[i])],
        lambda row: oracle.probability(row, euclidean),
        member.tolist(),
        edges,
        alpha,
        eta,
        150,
        project=(lambda row: oracle.probability(row, True)) if euclidean else None,
        share=member.double().mean(0).tolist() if conditional else None,
    )
    assert 2 < len(steps) < 150
    assert head.report.converged and head.report.iterations == len(steps)
    torch.testing.assert_close(head.report.history[:-1], torch.tensor([s[3] for s in steps]).double(), rtol=0, atol=1e-7)
    expected = torch.tensor([oracle.probability(row, euclidean)[0] for row in final], dtype=torch.float64)
    torch.testing.assert_close(head(probs, member), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("geometry", ["kl", "euclidean"])
def test_paper_with_classes_equals_loop(geometry):
    probs, y, member, _ = classes(150)
    alpha, eta, euclidean = 0.02, 2.0**-4, geometry == "euclidean"
    head = gmc.ProbabilityHead(alpha, NAMES, bins=3, num_classes=3, geometry=geometry)
    head.fit(probs, y, member, solver="paper", eta=eta, max_iter=60)
    final, steps = oracle.algorithm_1(
        (probs if euclidean else probs.log()).tolist(),
        lambda i, row: [p - float(y[i] == c) for c, p in enumerate(oracle.probability(row, euclidean))],
        lambda row: oracle.probability(row, euclidean),
        member.tolist(),
        [1 / 3, 2 / 3],
        alpha,
        eta,
        60,
        project=oracle.simplex if euclidean else None,
    )
    assert len(steps) > 3 and head.report.iterations == len(steps)
    expected = torch.tensor([oracle.probability(row, euclidean) for row in final], dtype=torch.float64)
    torch.testing.assert_close(head(probs, member), expected, rtol=0, atol=1e-7)


def test_fresh_equals_loop():
    probs, y, member, _ = events(1200, shift=2.0)
    alpha, eta, steps = 0.04, 2.0**-3, 12
    head = gmc.ProbabilityHead(alpha, NAMES, bins=3, geometry="euclidean")
    head.fit(probs, y, member, solver="fresh", eta=eta, max_iter=steps)
    order = deal(2 * steps, *head.statistics.unpacked(head.num_groups).content())
    final, taken = oracle.algorithm_1(
        probs[:, None].tolist(),
        lambda i, row: [row[0] - float(y[i])],
        lambda row: row,
        member.tolist(),
        [1 / 3, 2 / 3],
        alpha,
        eta,
        steps,
        project=lambda row: oracle.probability(row, True),
        splits=order.tolist(),
    )
    assert len(taken) > 1 and head.report.iterations == len(taken)
    expected = torch.tensor([row[0] for row in final], dtype=torch.float64)
    torch.testing.assert_close(head(probs, member), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("bins", [None, 1])
def test_static_offsets_are_the_minimum_found_by_scipy(bins):
    """Log loss with the l1 term 0.95 alpha |Theta| of the groups (everyone is free), by a general-purpose method."""
    probs, y, member, _ = events(500)
    alpha = 0.02
    head = gmc.ProbabilityHead(alpha, NAMES, bins=bins, noise_floor=False).fit(probs, y, member)
    design = torch.cat([torch.ones(500, 1), member], 1).double().numpy()
    z0, target = torch.logit(probs).numpy(), y.double().numpy()

    def objective(theta):  # theta = positive part - negative part, so that the l1 term is smooth
        z = torch.from_numpy(z0 - design @ (theta[:4] - theta[4:]))
        value = float((torch.nn.functional.softplus(z) - torch.from_numpy(target) * z).mean())
        return value + 0.95 * alpha * (theta[1:4].sum() + theta[5:].sum())

    found = scipy.optimize.minimize(objective, [0.1] * 8, bounds=[(0, None)] * 8, method="L-BFGS-B", options={"ftol": 1e-14})
    best = torch.from_numpy(z0 - design @ (found.x[:4] - found.x[4:])).sigmoid()
    torch.testing.assert_close(head(probs, member), best, rtol=0, atol=3e-3)
    assert head.report.converged and float(head_table(head, probs, y, member).abs().max()) <= alpha


@pytest.mark.parametrize("geometry", ["kl", "euclidean"])
@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("bins", [None, 5])
def test_exact_keeps_the_promise_and_reports_it(geometry, conditional, bins):
    probs, y, member, _ = events(800)
    alpha = 0.02 if conditional else 0.005
    head = gmc.ProbabilityHead(alpha, NAMES, bins, geometry=geometry, conditional=conditional, noise_floor=False)
    head.fit(probs, y, member)
    table = head_table(head, probs, y, member, conditional)
    assert head.report.converged and float(table.abs().max()) <= alpha
    torch.testing.assert_close(head.report.violations_after, table.double(), rtol=0, atol=1e-7)
    details = head.report.details
    assert details["alpha_asked"] == alpha and math.isclose(details["alpha_met"], float(table.abs().max()), abs_tol=1e-7)


@pytest.mark.parametrize("geometry", ["kl", "euclidean"])
def test_exact_with_classes(geometry):
    probs, y, member, truth = classes(3000)
    head = gmc.ProbabilityHead(0.004, NAMES, bins=4, num_classes=3, geometry=geometry, noise_floor=False)
    head.fit(probs, y, member)
    table = head_table(head, probs, y, member)
    assert head.report.converged and float(table.abs().max()) <= 0.004
    out = head(probs, member)
    torch.testing.assert_close(out.sum(1), torch.ones(3000, dtype=torch.float64))
    assert float((out - truth).square().mean()) < 0.3 * float((probs - truth).square().mean())


def test_real_outcomes_in_their_range():
    g = torch.Generator().manual_seed(0)
    member = torch.rand(2000, 3, generator=g) < 0.5
    guess = 10 * torch.rand(2000, generator=g) - 3
    y = (guess + 1.5 * member[:, 0] - 1.0 * member[:, 1] + 0.3 * torch.randn(2000, generator=g)).clamp(-3, 7)
    head = gmc.ProbabilityHead(0.02, NAMES, bins=4, range=(-3, 7), noise_floor=False).fit(guess, y, member)
    f = head(guess, member).double()
    edges = [-3 + 2.5 * k for k in (1, 2, 3)]
    table = oracle.promised_table(f[:, None].tolist(), (f - y)[:, None].tolist(), member.tolist(), edges)
    assert head.report.converged and oracle.worst_cell(table)[0] <= 0.02 + 1e-5
    torch.testing.assert_close(head.report.violations_after, torch.tensor(table).double(), rtol=0, atol=1e-4)
    assert float((f - y).square().mean()) < 0.3 * float((guess - y).square().mean())


def test_groups_that_repeat_each_other():
    """Everyone, both halves of a division, and a group twice: the Hessian is singular, the promise is not."""
    probs, y, member, _ = events(1500)
    first = member[:, :1]
    groups = torch.cat([torch.ones_like(first), first, ~first, first, member[:, 1:2]], 1)
    names = ["all", "in", "out", "again", "b"]
    for geometry in ("kl", "euclidean"):
        head = gmc.ProbabilityHead(0.003, names, bins=4, geometry=geometry, noise_floor=False).fit(probs, y, groups)
        assert head.report.converged and float(head_table(head, probs, y, groups).abs().max()) <= 0.003
        assert float(head.offsets.abs().max()) < 3


def test_weights_count_as_repeats():
    probs, y, member, _ = events(300)
    weight = torch.randint(1, 4, (300,), generator=torch.Generator().manual_seed(1))
    repeated = [t.repeat_interleave(weight, 0) for t in (probs, y, member)]
    options = {"alpha": 0.004, "groups": NAMES, "bins": 4, "noise_floor": False}
    weighted = gmc.ProbabilityHead(**options).fit(probs, y, member, weight=weight.double())
    plain = gmc.ProbabilityHead(**options).fit(*repeated)
    torch.testing.assert_close(weighted(probs, member), plain(probs, member), rtol=0, atol=1e-8)


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(1, 120),
    bins=st.sampled_from([None, 1, 3, 10]),
    geometry=st.sampled_from(["kl", "euclidean"]),
    floor=st.booleans(),
    conditional=st.booleans(),
    alpha=st.sampled_from([1e-4, 0.01, 0.1]),
    seed=st.integers(0, 2**16),
)
@example(n=34, bins=None, geometry="kl", floor=False, conditional=False, alpha=0.1, seed=56977)  # offsets alone would raise it
@example(n=67, bins=3, geometry="kl", floor=True, conditional=False, alpha=0.01, seed=33939)  # and so would slopes
def test_brier_never_rises_and_replay_is_the_fit(n, bins, geometry, floor, conditional, alpha, seed):
    probs, y, member, _ = events(n, seed)
    head = gmc.ProbabilityHead(alpha, NAMES, bins, geometry=geometry, conditional=conditional, noise_floor=floor)
    head.fit(probs, y, member, max_iter=20)
    out = head(probs, member)
    before, after = (float((p - y.double()).square().mean()) for p in (probs, out))
    assert after <= before + 1e-11
    assert math.isclose(after, head.report.details["brier_after"], abs_tol=1e-9)
    table = head_table(head, probs, y, member, conditional)
    torch.testing.assert_close(head.report.violations_after, table.double(), rtol=0, atol=1e-7)
    if head.report.converged:
        assert bool((table.abs() <= head.report.details["tolerance"] + 1e-9).all())
    elif not floor:
        ends = [float(part.abs().max()) for part in (head.report.violations_after, head.report.violations_before)]
        assert ends[0] <= ends[1] + 1e-9  # the table above is float32


@settings(deadline=None, max_examples=15)
@given(n=st.integers(2, 80), c=st.integers(2, 4), geometry=st.sampled_from(["kl", "euclidean"]), seed=st.integers(0, 2**16))
def test_brier_never_rises_with_classes(n, c, geometry, seed):
    probs, y, member, _ = classes(n, seed, c=c)
    head = gmc.ProbabilityHead(0.01, NAMES, 4, num_classes=c, geometry=geometry, noise_floor=False)
    head.fit(probs, y, member, max_iter=10)
    truth = torch.nn.functional.one_hot(y, c).double()
    before, after = (float((p - truth).square().sum(1).mean()) for p in (probs, head(probs, member)))
    assert after <= before + 1e-11
    torch.testing.assert_close(head.report.violations_after, head_table(head, probs, y, member).double(), rtol=0, atol=1e-7)


def test_replay_is_exact_in_any_batch_order_and_precision_of_the_solver():
    """30,000 x 40 members are kept in float32 by the solver; the head replays in float64, row by row."""
    from torchgmc.heads.probability import solver as probabilities

    probs, y, member, _ = events(30_000, a=40, shift=0.3)
    names = [str(i) for i in range(40)]
    head = gmc.ProbabilityHead(1e-4, names, noise_floor=False)
    head.observe(probs, y, member)
    examples, promise = head.statistics.unpacked(40), head._promise(probs.device, everyone=True)
    assert probabilities.Sample(examples, promise).dtype == torch.float32
    solution = probabilities.fit(examples, promise, 3, head.test_functions())
    head.calibrate(max_iter=3)
    assert len(head.rounds) > 0
    assert torch.equal(head.calibrated(probs, member), solution.z)
    shuffled = torch.randperm(30_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head.calibrated(probs[shuffled], member[shuffled]), solution.z[shuffled])
    some = [head.calibrated(probs[i : i + 37], member[i : i + 37]) for i in range(0, 2000, 37)]
    assert torch.equal(torch.cat(some)[:2000], solution.z[:2000])


def test_a_promise_already_kept_changes_nothing():
    probs, y, member, _ = events(2000)
    head = gmc.ProbabilityHead(0.01, NAMES, bins=5, noise_floor=False).fit(probs, y, member)
    again = gmc.ProbabilityHead(0.0101, NAMES, bins=5, noise_floor=False).fit(head(probs, member), y, member)
    assert head.report.iterations > 0 and again.report.iterations == 0
    torch.testing.assert_close(again(probs, member), probs, rtol=1e-9, atol=1e-11)


def test_order_and_batches_do_not_matter():
    probs, y, member, _ = events(900)
    whole = gmc.ProbabilityHead(0.003, NAMES, bins=5, noise_floor=False).fit(probs, y, member)
    parts = gmc.ProbabilityHead(0.003, NAMES, bins=5, noise_floor=False)
    for part in torch.arange(900).split(130):
        parts.observe(probs[part], y[part], member[part])
    parts.calibrate()
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), parts.state_dict().values(), strict=True))
    order = torch.randperm(900, generator=torch.Generator().manual_seed(0))
    shuffled = gmc.ProbabilityHead(0.003, NAMES, bins=5, noise_floor=False).fit(probs[order], y[order], member[order])
    torch.testing.assert_close(shuffled(probs, member), whole(probs, member), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("geometry", "count"), [("kl", None), ("euclidean", 3)])
def test_equal_rows_of_other_weights_may_come_in_any_order(geometry, count):
    """Which fold a row is in follows from its weight too, relative to the largest: nor does the unit of weights matter."""
    probs, y, member, _ = events(400) if count is None else classes(400)
    kind = torch.arange(400) % 40
    probs, y, member = probs[kind], y[kind], member[kind]
    weight = torch.randint(1, 4, (400,), generator=torch.Generator().manual_seed(5)).double()
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    options = {"alpha": None, "groups": NAMES, "bins": 4, "geometry": geometry, "num_classes": count}
    head = gmc.ProbabilityHead(**options).fit(probs, y, member, weight)
    for unit in (1.0, 0.37, 1e-6):
        again = gmc.ProbabilityHead(**options).fit(probs[order], y[order], member[order], unit * weight[order])
        torch.testing.assert_close(again(probs, member), head(probs, member), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("count", "bins"), [(None, None), (None, 4), (3, 2)])
def test_the_size_of_a_cell_is_its_number_of_clusters(count, bins):
    """By counting; a tolerance trusts few clusters of many examples no more than few examples."""
    from torchgmc.heads.probability import solver as probabilities

    probs, y, member, _ = events(300) if count is None else classes(300)
    ids = torch.randint(0, 25, (300,), generator=torch.Generator().manual_seed(1))
    weight = (torch.arange(300) % 3).double()
    head = gmc.ProbabilityHead(None, NAMES, bins=bins, num_classes=count)
    head.observe(probs, y, member, weight, ids)
    sample = probabilities.Sample(head.statistics.unpacked(3), head._promise(head.fitted.device))
    found = sample.measure(sample.z)
    f = probs if count else probs[:, None]
    who = torch.cat([torch.ones(300, 1).bool(), member], 1)
    for k in range(found.sizes.shape[1]):
        inside = torch.ones_like(f).bool() if k == (bins or 0) else (f * (bins or 1)).floor().long() == k
        for j in range(4):
            for c in range(f.shape[1]):
                rows = who[:, j] & inside[:, c] & (weight > 0)
                assert int(found.sizes[j, k, c]) == len(ids[rows].unique())


@pytest.mark.parametrize(("n", "a", "seed", "choices"), [(50_641, 5, 2, 1 << 17), (40_000, 30, 0, 1 << 17), (80_000, 5, 1, 20_000)])
def test_many_rows_may_come_in_any_order(n: int, a: int, seed: int, choices: int, monkeypatch):
    """Sums in float32 depend on the order, up to 6e-8 here, and 4e-6 where a row passes the edge of a level set by that."""
    monkeypatch.setattr("torchgmc.heads.probability.static.CHOICES", choices)  # as of very many rows
    generator = torch.Generator().manual_seed(seed)
    member, z = torch.rand(n, a, generator=generator) < 0.3, 1.5 * torch.randn(n, generator=generator)
    truth = z + 0.7 * member[:, 0] - 0.4 * member[:, 1] + 0.3 * torch.sin(3 * z)
    rows = torch.sigmoid(z), torch.rand(n, generator=generator) < torch.sigmoid(truth), member
    order = torch.randperm(n, generator=generator)
    names = [str(k) for k in range(a)]
    first, second = (gmc.ProbabilityHead(None, names).fit(*some) for some in (rows, [t[order] for t in rows]))
    assert len(first.rounds)
    for key, value in first.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(second.state_dict()[key], value, rtol=0, atol=1e-11)


def test_large_samples_use_a_thinned_hessian_and_reach_the_same_optimum():
    """Above 8,192 rows the Hessian comes from a part of them; the slope does not, so the optimum is the same."""
    from torchgmc.heads.probability import problem, solver as probabilities, static

    probs, y, member, _ = events(70_000, a=20, slope=0.0, shift=0.5)
    head = gmc.ProbabilityHead(0.001, [str(i) for i in range(20)], bins=None)
    head.observe(probs, y, member)
    sample = probabilities.Sample(head.statistics.unpacked(20), head._promise(probs.device))
    columns = problem.Columns(sample.member, sample.z, sample.y, sample.share, False, False, sample.places)
    assert len(columns.thin(problem.SAMPLE).z) < 70_000
    error = cell_sums(sample.member, (probs[:, None] - sample.y).square() * sample.share.square())[:, 0].sqrt()
    slack = 0.5 * error
    slack[0] = 0.0
    found = static.fit_static(columns, sample.sizes, sample.cluster, slack)
    thinned = found.theta
    full = problem.minimise(columns, torch.zeros_like(thinned), slack[None], None, 50, 1e-3)
    slope, _ = columns.slope(thinned)
    assert found.optimal and bool((slope[0, 1:].abs() <= 1.06 * slack[1:]).all())
    torch.testing.assert_close(thinned, full, rtol=0, atol=5e-3)


def test_groups_with_fewer_than_ten_examples_are_named_with_what_to_do():
    probs, y, member, _ = events(200)
    member[:, 2] = False
    member[:9, 2] = True
    for head in (gmc.ProbabilityHead(None, NAMES, bins=None), gmc.ProbabilityHead(None, NAMES, num_classes=2, multilabel=True)):
        rows = [t[:, None].repeat(1, 2) if head.multilabel else t for t in (probs, y)]
        report = head.fit(*rows, member).report
        assert report.details["small"] == ["c"]
        assert "'c' (1 in all). Merge such groups" in report.message
    member[:, 2] = True
    member[:10, 2] = False
    assert "Too small" not in gmc.ProbabilityHead(None, NAMES, bins=None).fit(probs, y, member).report.message


def test_membership_of_a_byte_is_the_table_of_floats():
    generator = torch.Generator().manual_seed(0)
    member, more = torch.rand(9000, 5, generator=generator) < 0.3, torch.randn(9000, 2, generator=generator)
    plain = torch.cat([torch.ones(9000, 1), member.float(), more], 1)
    bits = Bits(Bits.of(member), 5)
    columns, rows = torch.tensor([0, 2, 5, 7]), torch.tensor([8999, 3, 3])
    for table in (Membership(who, torch.float32).beside(more[:, :1]).beside(more[:, 1:]) for who in (member, bits)):
        assert table.shape == plain.shape and len(table) == 9000 and table[rows].equal(plain[rows])
        assert table[:0].shape == (0, 8) and table[8190:].equal(plain[8190:])
        assert table.some(columns)[:].equal(plain[:, columns])
        assert table.pick(rows)[:].equal(plain[rows]) and table.some(columns).pick(rows)[:].equal(plain[rows][:, columns])
        assert table.some(columns).some(torch.tensor([0, 2, 3]))[:].equal(plain[:, [0, 5, 7]])
    weights = torch.randn(8, 3, generator=generator)
    torch.testing.assert_close(table @ weights, plain @ weights)
    assert torch.equal(
        exact_product(Membership(member, torch.float32), torch.ones(6, 2).double()),
        plain[:, :6].sum(1, True).expand(-1, 2).double(),
    )


def test_a_large_sample_needs_no_table_of_floats(monkeypatch):
    """Of 6 groups 9 columns of floats would be 36 bytes a row, and the sums of all cells had 72; the state is the same bits."""
    n, generator = 220_000, torch.Generator().manual_seed(0)
    member = torch.rand(n, 6, generator=generator) < 0.3
    z = torch.randn(n, generator=generator)
    y = torch.rand(n, generator=generator) < torch.sigmoid(z + 0.7 * member[:, 0] - 1.0 * ((z > 1) & member[:, 1]))
    largest = 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for one in out if isinstance(out, (tuple, list)) else [out]:
                largest = max(largest, one.nbytes if isinstance(one, torch.Tensor) else 0)
            return out

    heads = [gmc.ProbabilityHead(0.002, list("abcdef"), noise_floor=False) for _ in range(2)]
    for head, large in zip(heads, (1 << 25, 1), strict=True):
        monkeypatch.setattr("torchgmc.heads.probability.solver.LARGE", large)
        head.observe(torch.sigmoid(z), y, member)
        largest = 0
        with Count():
            head.calibrate()
    assert largest <= 16 * n
    assert len(heads[0].rounds) and all(a.equal(b) for a, b in zip(heads[0].buffers(), heads[1].buffers(), strict=True))


@pytest.mark.parametrize("outcome", [0, 1])
@pytest.mark.parametrize("more", [{}, {"bins": None}, {"weight": True}, {"learn": gmc.Trees()}, {"noise_floor": False}])
def test_an_outcome_that_no_example_has_keeps_a_probability(outcome, more):
    (probs, _, member, _), g = events(300), torch.Generator().manual_seed(0)
    y, options = torch.full((300,), outcome), {"alpha": 1e-3 if "noise_floor" in more else None, "groups": NAMES} | more
    weight = torch.rand(300, generator=g).double() if options.pop("weight", False) else torch.ones(300).double()
    x = {"features": torch.randn(300, 2, generator=g)} if "learn" in more else {}
    head = gmc.ProbabilityHead(**options).fit(probs, y, member, weight=weight, **x)
    away = (head(probs, member, **x) - outcome).abs()  # f of the other outcome
    share = weight / weight.sum()
    size = 1 / float(share.square().sum())  # examples, after weighting
    if options["alpha"] is None:
        assert float(share @ away) == pytest.approx(0.5 / (size + 0.5), rel=0.01)
    else:  # a smaller alpha is kept on the sample
        assert 5e-4 < float(share @ away) <= 1e-3
    assert float(away.min()) > 1e-6
    told = head.report.violations_after[-1, -1].abs()  # everyone, all levels: of the y that came
    assert float(told) == pytest.approx(float(share @ away), rel=1e-6)
    assert head.report.reached == ("alpha" if options["alpha"] else "noise")
    assert f"No example has y = {1 - outcome}: " in head.report.message


def test_classes_and_labels_that_no_example_has_keep_a_probability():
    probs, y, member, _ = classes(400)
    y = y.clamp_max(1)
    head = gmc.ProbabilityHead(None, NAMES, num_classes=3).fit(probs, y, member)
    f = head(probs, member)
    assert float(f[:, 2].mean()) == pytest.approx(0.5 / 400.5, rel=0.01) and float(f[:, 2].min()) > 1e-6
    torch.testing.assert_close(head.report.violations_after[-1, -3:], f.mean(0) - torch.bincount(y, minlength=3) / 400)
    assert "No example has y = 2: " in head.report.message
    rare = torch.cat([1e-6 * probs[:, :1], probs[:, 1:] + (1 - 1e-6) * probs[:, :1] / 2], 1)  # f0 expects less than half a one
    f = gmc.ProbabilityHead(None, num_classes=3).fit(rare, y.clamp_min(1))(rare)
    assert float(f[:, 0].mean()) == pytest.approx(float(rare[:, 0].mean()), rel=0.01)
    tags = torch.stack([y, 0 * y, 1 + 0 * y], 1)
    head = gmc.ProbabilityHead(None, num_classes=3, multilabel=True).fit(probs, tags)
    torch.testing.assert_close(head(probs)[:, 1:].mean(0), torch.tensor([0.5, 400.0]).double() / 400.5, rtol=1e-4, atol=0)
    assert "All examples have the same y of the labels 1, 2." in head.report.message
