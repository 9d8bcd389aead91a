"""The information projection and the paper's projected steps, against plain NumPy and SciPy on the whole vocabulary."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.optimize import minimize

from gmctest.oracles_distribution import draw, dual_of, violation_loop
from torchgmc.heads.distribution.tilt import atoms, log_masses, project


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
    dual = dual_of(logits, member, lists, weight, conditional)
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
    monkeypatch.setattr("torchgmc.heads.distribution.tilt.CHUNK", 13)
    torch.testing.assert_close(log_masses(logits, *found[:2], len(found.lists)), whole)
    half = log_masses(logits.bfloat16(), *found[:2], len(found.lists))
    torch.testing.assert_close(half, log_masses(logits.bfloat16().double(), *found[:2], len(found.lists)), rtol=1e-5, atol=1e-5)
    assert log_masses(logits[:0], *found[:2], len(found.lists)).shape == (0, len(found.lists))
    rare = logits.float().index_fill(1, torch.tensor([1]), -200.0)
    assert torch.isfinite(log_masses(rare, *atoms([[1]])[:2], 2)).all()


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000), conditional=st.booleans(), weighted=st.booleans(), alpha=st.sampled_from([0.05, 0.01, 1e-3]))
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
    theta = torch.randn(dual.tilt.shape[1], dual.columns, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(dual.at(theta).value, theta)
    torch.testing.assert_close(slope, dual.at(theta).gradient)
    hessian = torch.autograd.functional.hessian(lambda theta: dual.at(theta).value, theta.detach())
    torch.testing.assert_close(dual.hessian(theta.detach(), dual.log_mass), hessian.reshape(theta.numel(), -1))


def test_hessian_in_blocks(monkeypatch):
    logits, member, lists = draw()
    dual, _ = fit(logits, member, lists)
    theta = torch.randn(dual.tilt.shape[1], dual.columns, dtype=torch.float64)
    whole = dual.hessian(theta, dual.log_mass)
    for module in ("heads.distribution.tilt", "engine.implicit"):
        monkeypatch.setattr(f"torchgmc.{module}.MAX_ELEMENTS", 20)
    torch.testing.assert_close(dual.hessian(theta, dual.log_mass), whole)


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
