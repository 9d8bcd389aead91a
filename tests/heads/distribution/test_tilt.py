"""The information projection and the paper's projected steps, against plain NumPy and SciPy on the whole vocabulary."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from gmctest.oracles_distribution import draw, numpy_algorithm, numpy_simplex, violation_loop
from torchgmc import projections
from torchgmc.heads.distribution.problem import SimplexProblem, TiltProblem
from torchgmc.heads.distribution.simplex import cells_of, start, step, tail_from_cells, tail_of
from torchgmc.heads.distribution.tilt import Dual, atoms, log_masses, project


def smallest_change(logits, member, lists, weight, alpha, conditional):
    """min E KL(p || h) over every token's probability by SciPy's trust-constr-free SLSQP: the primal, no dual, no atoms."""
    h = torch.softmax(logits, 1).numpy()
    n, v = h.shape
    w = weight.numpy() / weight.numpy().sum()
    inside = member.double().numpy()
    share = w @ inside
    tilt = (inside - share) / (share if conditional else 1.0)  # (n, a)
    words = np.zeros((len(lists), v))
    for k, tokens in enumerate(lists):
        words[k, tokens] = 1
    rows = np.einsum("n,na,kv->aknv", w, tilt, words).reshape(-1, n * v)

    def value(x):
        p = np.maximum(x.reshape(n, v), 1e-12)
        return float((w[:, None] * p * np.log(p / h)).sum())

    def slope(x):
        p = np.maximum(x.reshape(n, v), 1e-12)
        return (w[:, None] * (np.log(p / h) + 1)).ravel()

    total = np.kron(np.eye(n), np.ones(v))
    found = minimize(
        value,
        h.ravel(),
        jac=slope,
        method="SLSQP",
        bounds=[(1e-9, 1)] * (n * v),
        constraints=[
            {"type": "eq", "fun": lambda x: total @ x - 1, "jac": lambda x: total},
            {
                "type": "ineq",
                "fun": lambda x: alpha - np.concatenate([rows @ x, -rows @ x]),
                "jac": lambda x: np.concatenate([-rows, rows]),
            },
        ],
        options={"maxiter": 300, "ftol": 1e-13},
    )
    assert np.abs(rows @ found.x).max() <= alpha * (1 + 1e-4)
    return found.fun


def fit(logits, member, lists, weight=None, alpha=0.01, conditional=False):
    found = atoms(lists)
    weight = torch.ones(len(logits), dtype=torch.float64) if weight is None else weight
    dual = Dual(log_masses(logits, found.ids, found.atom, len(found.lists)), found.lists, member, weight, conditional)
    return dual, project(dual, alpha)


def full(logits, member, lists, dual, theta):
    """p over the whole vocabulary from the formula, token by token."""
    words = torch.zeros(len(lists), logits.shape[1], dtype=torch.float64)
    for k, tokens in enumerate(lists):
        words[k, tokens] = 1
    tilt = (member.double() - dual.mean) / dual.scale
    return torch.softmax(logits - tilt @ theta @ words, 1)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), temperature=st.sampled_from([0.5, 1.0, 2.0]))
def test_log_masses_match_a_loop(seed, temperature):
    logits, _, lists = draw(n=7, seed=seed)
    found = atoms(lists)
    p = torch.softmax(logits / temperature, 1)
    table = log_masses(logits, found.ids, found.atom, len(found.lists), temperature).exp()
    for i, row in enumerate(p):
        for m, pattern in enumerate(found.lists.tolist()):
            inside = [t for t in range(len(row)) if [t in tokens for tokens in lists] == pattern]
            assert float(table[i, m]) == pytest.approx(float(row[inside].sum()), rel=1e-12)


def test_log_masses_in_blocks_and_types(monkeypatch):
    logits, _, lists = draw(n=50)
    found = atoms(lists)
    whole = log_masses(logits, *found[:2], len(found.lists))
    monkeypatch.setattr("torchgmc.distributions.CHUNK", 13)
    torch.testing.assert_close(log_masses(logits, *found[:2], len(found.lists)), whole)
    half = log_masses(logits.bfloat16(), *found[:2], len(found.lists))
    torch.testing.assert_close(half, log_masses(logits.bfloat16().double(), *found[:2], len(found.lists)), rtol=1e-5, atol=1e-5)
    assert log_masses(logits[:0], *found[:2], len(found.lists)).shape == (0, len(found.lists))
    rare = logits.float().index_fill(1, torch.tensor([1]), -200.0)
    assert torch.isfinite(log_masses(rare, *atoms([[1]])[:2], 2)).all()


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 10_000), conditional=st.booleans(), weighted=st.booleans(), alpha=st.sampled_from([0.05, 0.01, 1e-3])
)
def test_projection_meets_alpha_on_every_token(seed, conditional, weighted, alpha):
    logits, member, lists = draw(seed=seed)
    weight = torch.rand(len(logits), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.1
    weight = weight if weighted else torch.ones_like(weight)
    dual, found = fit(logits, member, lists, weight, alpha, conditional)
    p = full(logits, member, lists, dual, found.theta)
    loop = violation_loop(p, member, lists, weight, conditional)
    torch.testing.assert_close(found.violation, loop, rtol=1e-9, atol=1e-12)
    assert float(loop.abs().max()) <= alpha
    # The optimality conditions: an offset is 0, or its constraint is tight on the side of its sign.
    tight = torch.where(found.theta != 0, loop - alpha * found.theta.sign(), torch.zeros_like(loop))
    assert float(tight.abs().max()) <= 1e-5 * alpha
    divergence = (weight / weight.sum()) @ (p * (p.log() - torch.log_softmax(logits, 1))).sum(1)
    assert found.kl == pytest.approx(float(divergence), rel=1e-6, abs=1e-12)
    slack = 2e-6 * alpha * float(found.theta.abs().sum())  # alpha is aimed at from within by one part in a million
    assert -1e-12 <= found.kl - found.bound <= slack + 1e-12
    assert slack <= 0.01 * found.kl + 1e-12
    assert not found.stalled


@pytest.mark.parametrize(("seed", "alpha", "conditional"), [(0, 0.02, False), (1, 0.01, False), (2, 0.05, True)])
@pytest.mark.filterwarnings("ignore:Values in x were outside bounds:RuntimeWarning")  # scipy before 1.16, of its own steps
def test_projection_is_the_smallest_change(seed, alpha, conditional):
    logits, member, lists = draw(n=16, vocabulary=8, a=2, seed=seed)
    weight = torch.rand(16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.5
    _, found = fit(logits, member, lists, weight, alpha, conditional)
    best = smallest_change(logits, member, lists, weight, alpha, conditional)
    assert best > 1e-4
    assert found.kl == pytest.approx(best, rel=0.02)
    assert found.bound <= best * (1 + 1e-4)


def test_dual_derivatives():
    logits, member, lists = draw()
    dual, _ = fit(logits, member, lists)
    theta = torch.randn(dual.shape, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(dual.value(theta), theta)
    p = dual.tilted(theta.detach())[1]
    torch.testing.assert_close(slope, -dual.violation(p))
    hessian = torch.autograd.functional.hessian(dual.value, theta.detach())
    torch.testing.assert_close(dual.hessian(p), hessian.reshape(theta.numel(), -1))


def test_hessian_in_blocks(monkeypatch):
    logits, member, lists = draw()
    dual, _ = fit(logits, member, lists)
    p = dual.tilted(torch.randn(dual.shape, dtype=torch.float64))[1]
    whole = dual.hessian(p)
    monkeypatch.setattr("torchgmc.distributions.MAX_ELEMENTS", 20)
    torch.testing.assert_close(dual.hessian(p), whole)


def test_order_of_prompts_does_not_matter():
    logits, member, lists = draw(n=60)
    order = torch.randperm(60)
    _, one = fit(logits, member, lists)
    _, two = fit(logits[order], member[order], lists)
    torch.testing.assert_close(one.theta, two.theta, rtol=1e-5, atol=1e-6)
    assert one.kl == pytest.approx(two.kl, rel=1e-6)


def test_nothing_to_do_leaves_exact_zeros():
    logits, member, lists = draw()
    _, found = fit(logits, member, lists, alpha=1.0)
    assert torch.equal(found.theta, torch.zeros_like(found.theta))
    assert found.kl == pytest.approx(0.0, abs=1e-15)
    assert len(found.history) == 1


def test_complementary_groups_and_a_group_of_everyone():
    """Both make the Hessian singular."""
    logits, member, lists = draw(n=80)
    member = torch.stack([member[:, 0], ~member[:, 0], torch.ones(80, dtype=torch.bool)], 1)
    _, found = fit(logits, member, lists, alpha=1e-4)
    assert float(found.violation.abs().max()) <= 1e-4
    assert not found.stalled
    assert torch.equal(found.theta[2], torch.zeros(3, dtype=torch.float64))
    assert found.kl - found.bound <= 1e-6 * found.kl


def test_many_groups_and_a_strong_bias():
    g = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(500, 30, generator=g, dtype=torch.float64)
    member = torch.rand(500, 20, generator=g) < 0.3
    logits[:, :5] += 8.0 * member[:, :1] - 6.0 * member[:, 1:2]
    lists = [[0, 1], [1, 2, 3], [3, 4], [10, 11, 12], [20]]
    _, found = fit(logits, member, lists, alpha=1e-3)
    assert float(found.violation.abs().max()) <= 1e-3
    assert found.kl - found.bound <= 1e-5 * found.kl
    assert len(found.history) < 40


def test_an_unreachable_list_is_said():
    """A token that cannot occur in one group, and always occurs in the other: no p with KL < inf is fair."""
    logits = torch.zeros(10, 3, dtype=torch.float64)
    member = torch.arange(10)[:, None] < 5
    logits[:5, 0] = -torch.inf
    logits[5:, 1:] = -torch.inf
    _, found = fit(logits, member, [[0]], alpha=0.01)
    assert float(found.violation.abs().max()) > 0.01


# -- the paper's geometry --------------------------------------------------------------------------------------------------


def tail_and_words(logits, lists):
    found = atoms(lists)
    p = torch.softmax(logits, 1)
    keep = torch.ones(logits.shape[1], dtype=torch.bool)
    keep[found.ids] = False
    return p, p[:, found.ids], p[:, keep], keep, found


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), steps=st.integers(1, 12), scale=st.sampled_from([0.01, 0.1, 0.5]), rest=st.integers(0, 9))
def test_step_is_the_simplex_projection(seed, steps, scale, rest):
    """Two numbers per row stand for the whole tail, whatever the order of steps down and up."""
    g = torch.Generator().manual_seed(seed)
    lists = [[0, 1], [1, 2]]
    logits = 2 * torch.randn(5, 3 + rest, generator=g, dtype=torch.float64)
    p, words, others, keep, found = tail_and_words(logits, lists)
    tail = tail_of(others)
    point = start(words, tail)
    directions = found.lists[found.atom].T.double()
    for _ in range(steps):
        amount = scale * torch.randn(5, generator=g, dtype=torch.float64) * (torch.rand(5, generator=g) < 0.7)
        k = int(torch.randint(2, (), generator=g))
        point = step(point, tail, directions[k], amount)
        v = torch.zeros(3 + rest, dtype=torch.float64)
        v[lists[k]] = 1
        p = torch.stack([torch.from_numpy(numpy_simplex((row - s * v).numpy())) for row, s in zip(p, amount, strict=True)])
        torch.testing.assert_close(point.words, p[:, found.ids], rtol=0, atol=1e-13)
        torch.testing.assert_close(
            torch.maximum(others - point.shift[:, None], point.floor[:, None]), p[:, keep], rtol=0, atol=1e-13
        )


def test_step_has_the_projections_derivative():
    logits = torch.randn(4, 9, dtype=torch.float64)
    direction = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    amount = torch.tensor([0.05, -0.05, 0.3, 0.0], dtype=torch.float64)

    def fast(x):
        p = torch.softmax(x, 1)
        tail = tail_of(p[:, 3:])
        point = step(step(start(p[:, :3], tail), tail, direction, amount), tail, direction.flip(0), -0.5 * amount)
        return torch.cat([point.words, torch.maximum(p[:, 3:] - point.shift[:, None], point.floor[:, None])], 1)

    def slow(x):
        p = torch.softmax(x, 1)
        v = torch.nn.functional.pad(direction, (0, 6))
        w = torch.nn.functional.pad(direction.flip(0), (0, 6))
        return projections.simplex(projections.simplex(p - amount[:, None] * v) + 0.5 * amount[:, None] * w)

    torch.testing.assert_close(fast(logits), slow(logits))
    torch.testing.assert_close(
        torch.autograd.functional.jacobian(fast, logits), torch.autograd.functional.jacobian(slow, logits)
    )
    assert torch.autograd.gradcheck(fast, logits.requires_grad_())


def test_the_floor_never_falls_below_zero():
    """Seen on a real model: a step along a list that is at 0 already moves nothing but rounding, and log p became NaN."""
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(1000, 300, generator=g)
    logits[:, 30:60] -= 25.0  # the second list
    p = torch.softmax(logits, -1)
    tail = tail_of(p[:, 60:])
    point = start(p[:, :60].double(), tail)
    first, second = torch.eye(2, dtype=torch.float64).repeat_interleave(30, 1)
    for direction, size in ((first, -0.002), (first, -0.002), (second, 0.4), (second, 0.4)):
        point = step(point, tail, direction, torch.full((1000,), size, dtype=torch.float64))
        assert float(point.floor.min()) >= 0


def test_cells_stand_for_the_tail():
    g = torch.Generator().manual_seed(0)
    p = torch.softmax(3 * torch.randn(6, 4000, generator=g, dtype=torch.float64), 1)
    words, others = p[:, :10], p[:, 10:]
    exact, coarse = tail_of(others), tail_from_cells(*cells_of(others, 512))
    assert coarse.values.shape == (6, 512)
    torch.testing.assert_close(coarse.sums[:, -1], exact.sums[:, -1])
    assert torch.equal(coarse.counts[:, -1], exact.counts[:, -1])
    assert bool((coarse.values[:, 1:] <= coarse.values[:, :-1]).all())
    direction, one, two = torch.ones(10, dtype=torch.float64), start(words, exact), start(words, coarse)
    for size in (-0.001, -0.001, 0.0005, -0.002):
        amount = torch.full((6,), size, dtype=torch.float64)
        one, two = step(one, exact, direction, amount), step(two, coarse, direction, amount)
    torch.testing.assert_close(two.words, one.words, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fixed_steps_equal_numpy_step_for_step(seed, conditional):
    from torchgmc.engine.solver import run

    logits, member, lists = draw(seed=seed)
    alpha, eta = 0.01, 0.004
    p, words, others, keep, found = tail_and_words(logits, lists)
    ones = torch.ones(len(logits), dtype=torch.float64)
    names = ([str(i) for i in range(3)], [str(i) for i in range(3)])
    directions = found.lists[found.atom].T
    problem = SimplexProblem(words, tail_of(others), directions, member, ones, conditional, torch.zeros(40).long(), *names)
    report, log = run(problem, alpha, "paper", eta, 500)
    p, loop = numpy_algorithm(logits, member, lists, alpha, eta, 500, conditional)
    assert report.converged and report.iterations == len(loop) > 3
    assert [(int(a), int(k)) for a, k in zip(log.who, log.what, strict=True)] == [(a, k) for a, k, _ in loop]
    torch.testing.assert_close(log.step, torch.tensor([s for *_, s in loop], dtype=torch.float64))
    torch.testing.assert_close(problem.point.words, p[:, found.ids], rtol=0, atol=1e-12)
    rest = torch.maximum(others - problem.point.shift[:, None], problem.point.floor[:, None])
    torch.testing.assert_close(rest, p[:, keep], rtol=0, atol=1e-12)


def test_line_search_removes_the_violation_in_both_geometries():
    logits, member, lists = draw()
    dual, _ = fit(logits, member, lists)
    _, words, others, _, found = tail_and_words(logits, lists)
    common = (member, torch.ones(40, dtype=torch.float64), False, torch.zeros(40).long(), ["a", "b", "c"], ["x", "y", "z"])
    for problem in (TiltProblem(dual, *common), SimplexProblem(words, tail_of(others), found.lists[found.atom].T, *common)):
        before = problem.violations()
        who, what = torch.tensor(0), torch.tensor(0)
        size = problem.line_search(who, what, before[0, 0])
        torch.testing.assert_close(problem.violations(), before)  # looking moves nothing
        problem.move(who, what, size)
        assert abs(float(before[0, 0])) > 0.01
        assert float(problem.violations()[0, 0]) == pytest.approx(0.0, abs=1e-9)
