"""Derivatives through a fit, against finite differences of the whole fit.

Where the active set changes (an offset about to become 0, or a violation about to reach its slack) theta has a kink and no
derivative: such draws are left out, and counted so that they stay few.
"""

import copy

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor

import torchgmc as gmc
from gmctest.fake_device import AWAY
from torchgmc.engine import hashing, implicit
from torchgmc.engine.implicit import SoftPinball, minimise
from torchgmc.heads.distribution.tilt import Dual
from torchgmc.heads.distribution.training import log_masses
from torchgmc.heads.probability import static
from torchgmc.heads.probability.problem import Columns

SEEDS = st.integers(0, 2**16)
T = 0.05


def members(n: int, a: int, rng: torch.Generator) -> Tensor:
    member = torch.rand(n, a, generator=rng) < 0.45
    member[:2] = torch.tensor([[True], [False]])
    return member


def threshold_case(seed: int, alpha: float | None = None, **options):
    rng = torch.Generator().manual_seed(seed)
    columns = options.get("num_classes")
    shape = (24, 5, 5) if columns is None else (24, columns, 5, 5)
    masks, groups = torch.rand(shape, generator=rng) < 0.5, members(24, 3, rng)
    shift = groups[:, 0].double().reshape(-1, *[1] * (len(shape) - 1))
    scores = 0.02 + 0.96 * torch.sigmoid(2 * masks - 1 + torch.randn(shape, generator=rng, dtype=torch.float64) - shift)
    head = gmc.ThresholdHead(0.2, 0.02, ["a", "b", "c"], **options)
    return head, scores, lambda x: head.solve_differentiably(x, masks, groups, alpha=alpha, temperature=T)


def quantile_case(seed: int, alpha: float | None = None, **options):
    rng = torch.Generator().manual_seed(seed)
    groups = members(60, 3, rng)
    scores = torch.randn(60, generator=rng, dtype=torch.float64) * (1 + groups[:, 0])
    head = gmc.QuantileHead(0.8, 0.02, ["a", "b", "c"], **options)
    return head, scores, lambda x: head.solve_differentiably(x, groups, alpha=alpha, temperature=0.2)


def probability_case(seed: int, alpha: float | None = None, **options):
    rng = torch.Generator().manual_seed(seed)
    groups, columns = members(80, 3, rng), options.get("num_classes")
    logits = torch.randn((80,) if columns is None else (80, columns), generator=rng, dtype=torch.float64)
    if columns is None:
        y = torch.rand(80, generator=rng) < torch.sigmoid(logits + groups[:, 0])
    else:
        y = torch.multinomial(torch.softmax(logits + groups[:, :1], 1), 1, generator=rng)[:, 0]
    head = gmc.ProbabilityHead(0.02, ["a", "b", "c"], bins=None, **options)
    squash = torch.sigmoid if columns is None else lambda x: x.softmax(1)
    return head, logits, lambda x: head.solve_differentiably(squash(x), y, groups, alpha=alpha)


def distribution_case(seed: int, alpha: float | None = None, **options):
    rng = torch.Generator().manual_seed(seed)
    groups = members(40, 2, rng)
    logits = torch.randn(40, 9, generator=rng, dtype=torch.float64)
    logits[:, 3] += 1.5 * groups[:, 0]
    head = gmc.DistributionHead({"one": [3, 4], "two": [4, 7], "three": [0]}, 0.01, ["a", "b"], **options)
    return head, logits, lambda x: head.solve_differentiably(x, groups, alpha=alpha)


CASES = {
    "fnr": (threshold_case, {}),
    "fpr": (threshold_case, {"risk": "fpr"}),
    "fnr conditional, classes": (threshold_case, {"num_classes": 2, "conditional": True}),
    "fnr, alpha 0": (threshold_case, {"alpha": 0.0}),
    "fnr, jitter": (threshold_case, {"jitter": 0.01}),
    "quantile": (quantile_case, {}),
    "quantile, init": (quantile_case, {"init": 0.5, "conditional": True}),
    "quantile, alpha 0": (quantile_case, {"alpha": 0.0}),
    "probability": (probability_case, {}),
    "probability, no floor": (probability_case, {"noise_floor": False, "conditional": True}),
    "classes": (probability_case, {"num_classes": 3}),
    "classes, no floor": (probability_case, {"num_classes": 3, "noise_floor": False}),
    "kl": (distribution_case, {}),
    "kl conditional": (distribution_case, {"conditional": True, "temperature": 0.7}),
}


def summary(state: dict[str, Tensor]) -> Tensor:
    """One number of all of the state that has a derivative."""
    parts = torch.cat([state[key].flatten() for key in ("offsets", "base") if key in state])
    return (parts * torch.arange(1, len(parts) + 1).cos()).sum()


def near_a_kink(solve, x: Tensor, along: Tensor, step: float) -> bool:
    patterns = [solve(x + k * step * along)["offsets"] != 0 for k in (-20, -1, 0, 1, 20)]
    return any(not torch.equal(patterns[0], p) for p in patterns)


@pytest.mark.parametrize("name", CASES)
@settings(deadline=None, max_examples=4, derandomize=True)
@given(seed=SEEDS)
def test_derivative_is_that_of_the_whole_fit(name: str, seed: int):
    make, options = CASES[name]
    _, x, solve = make(seed, **options)
    rng = torch.Generator().manual_seed(seed + 1)
    along = torch.randn(x.shape, generator=rng, dtype=torch.float64)
    step = 1e-5
    assume(not near_a_kink(solve, x, along, step))
    point = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(summary(solve(point)), point)
    if "jitter" in options:  # the noise of the hard scores jumps; along a direction it is held as it is here
        noise = hashing.add(x, options["jitter"]) - x
        plain = make(seed)[2]
        slope = (summary(plain(x + noise + step * along)) - summary(plain(x + noise - step * along))) / (2 * step)
    else:
        slope = (summary(solve(x + step * along)) - summary(solve(x - step * along))) / (2 * step)
    torch.testing.assert_close((grad * along).sum(), slope, rtol=2e-5, atol=2e-6)


def test_few_draws_are_left_out_as_kinks():
    rng = torch.Generator().manual_seed(0)
    kinks = []
    for seed in range(8):
        for make in (threshold_case, distribution_case):
            _, x, solve = make(seed)
            kinks.append(near_a_kink(solve, x, torch.randn(x.shape, generator=rng, dtype=torch.float64), 1e-5))
    assert sum(kinks) <= 1


@pytest.mark.parametrize("name", ["fnr", "quantile", "probability, no floor", "classes", "kl"])
def test_gradcheck_and_gradgradcheck(name: str):
    make, options = CASES[name]
    _, x, solve = make(1, **options)
    rng = torch.Generator().manual_seed(5)
    directions = torch.randn(3, *x.shape, generator=rng, dtype=torch.float64)

    def function(weights: Tensor) -> Tensor:
        return summary(solve(x + torch.tensordot(weights, directions, 1)))

    weights = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    tolerances = {"eps": 1e-5, "atol": 1e-5, "rtol": 1e-3}
    assert torch.autograd.gradcheck(function, weights, **tolerances)
    assert torch.autograd.gradgradcheck(function, weights, **tolerances)


# -- the optimum itself ------------------------------------------------------------------------------------------------------


@given(seed=SEEDS)
@settings(deadline=None, max_examples=10, derandomize=True)
def test_kl_offsets_are_those_of_the_fit(seed: int):
    head, x, solve = distribution_case(seed, noise_floor=False)
    rng = torch.Generator().manual_seed(seed)
    fitted = copy.deepcopy(head).fit(x, members(40, 2, rng))
    torch.testing.assert_close(solve(x)["offsets"], fitted.offsets, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("floor", [True, False])
def test_probability_offsets_are_those_of_the_fit(floor: bool):
    """To alpha those of ``fit``; under the noise rule those of its static stage at 1.5 standard errors, without slopes."""
    rng = torch.Generator().manual_seed(0)
    groups = members(2000, 3, rng)
    logits = torch.randn(2000, generator=rng, dtype=torch.float64)
    probs = torch.sigmoid(logits)
    y = torch.rand(2000, generator=rng) < torch.sigmoid(logits + groups[:, 0].double() - 0.5)
    head = gmc.ProbabilityHead(0.01, ["a", "b", "c"], bins=None, noise_floor=floor).fit(probs, y, groups)
    state = head.solve_differentiably(probs, y, groups)
    if floor:
        member = torch.cat([torch.ones_like(groups[:, :1]), groups], 1).double()
        slack = 1.5 * (member.T @ (probs - y.double()).square()).sqrt()[:, None] / 2000
        slack[0] = 0.0
        columns = Columns(member, logits[:, None], y.double()[:, None], torch.full((2000, 1), 1 / 2000), False, False)
        fitted = static.fit_static(columns, groups.sum(0).double(), torch.zeros(2000, 0), slack).theta[0]
        expected = torch.sigmoid(logits - (member @ fitted)[:, 0])
    else:
        fitted, expected = head.offsets, head(probs, groups)
    torch.testing.assert_close(state["offsets"], fitted, rtol=0, atol=5e-3)  # the fit stops within 2 % of the slack
    torch.testing.assert_close(head.apply_state(state, probs, groups), expected, rtol=0, atol=2e-3)


@given(seed=SEEDS)
@settings(deadline=None, max_examples=8, derandomize=True)
def test_smooth_conditions_hold_and_sharpen_into_the_promise(seed: int):
    """Recomputed by the plain kernel: |violation| <= alpha, with equality (and the right sign) where an offset is not 0."""
    rng = torch.Generator().manual_seed(seed)
    masks, groups = torch.rand(200, 40, generator=rng) < 0.5, members(200, 3, rng)
    scores = torch.sigmoid(2 * masks - 1 + torch.randn(200, 40, generator=rng, dtype=torch.float64) - groups[:, :1].double())
    head = gmc.ThresholdHead(0.2, 0.01, ["a", "b", "c"])
    for temperature in (0.1, 1e-3):
        state = head.solve_differentiably(scores, masks, groups, temperature=temperature)
        lam = state["base"] - groups.double() @ state["offsets"]  # (n, 1)
        soft = (torch.sigmoid((lam - scores) / temperature) * masks).sum(1) / masks.sum(1)
        table = gmc.violations(groups, soft - 0.2)
        assert bool((table.abs() <= 0.01 + 1e-7).all())
        active = state["offsets"] != 0
        torch.testing.assert_close(table[active], 0.01 * state["offsets"][active].sign(), rtol=0, atol=1e-7)
    hard = ((scores <= lam) & masks).sum(1) / masks.sum(1)
    assert float(gmc.violations(groups, hard - 0.2).abs().max()) <= 0.01 + 1e-3


def test_minimise_against_scipy():
    from scipy.optimize import minimize

    head, x, _ = distribution_case(3)
    rng = torch.Generator().manual_seed(3)
    groups = members(40, 2, rng)
    mass = log_masses(x, head.ids, head.atom, len(head.atom_lists), 1.0)
    problem = Dual(mass, head.atom_lists, groups, torch.ones(40, dtype=torch.float64))
    slack = torch.full((2, 3), 0.01, dtype=torch.float64)
    theta = minimise(problem, slack, mass)

    def objective(parts):  # theta = plus - minus, both at least 0: the l1 term becomes linear
        plus, minus = torch.tensor(parts).view(2, 2, 3)
        return float(problem.measure(problem.tilt @ (plus - minus), mass)[0] + 0.01 * (plus + minus).sum())

    found = minimize(objective, [0.1] * 12, bounds=[(0, None)] * 12, tol=1e-14, options={"maxfun": 10**5, "maxiter": 10**4})
    best = float(problem.measure(problem.tilt @ theta, mass)[0] + 0.01 * theta.abs().sum())
    assert best <= found.fun + 1e-9
    assert found.fun - best < 1e-5


# -- singular systems and the solve ------------------------------------------------------------------------------------------


def test_groups_that_add_up_have_a_singular_system_and_the_right_outputs():
    """Women and men, old and young: offsets can be exchanged, outputs cannot."""
    rng = torch.Generator().manual_seed(0)
    one, two = (torch.rand(60, generator=rng) < 0.5 for _ in range(2))
    groups = torch.stack([one, ~one, two, ~two], 1)
    scores = torch.randn(60, generator=rng, dtype=torch.float64) * (1 + one)
    head = gmc.QuantileHead(0.7, 0.02, ["f", "m", "old", "young"], init=0.0)
    along, weights = torch.randn(2, 60, generator=rng, dtype=torch.float64)

    def output(x: Tensor) -> Tensor:
        state = head.solve_differentiably(x, groups, alpha=0.0, temperature=0.2)
        return (head.apply_state(state, groups) * weights).sum()

    x = scores.clone().requires_grad_()
    problem = SoftPinball(torch.arange(60), torch.full((60,), 1 / 60.0), torch.full((60,), 0.7), groups.double(), 1, 0.2, 1.0)
    hessian = problem.hessian(torch.zeros(4, 1, dtype=torch.float64), scores, torch.zeros(60, dtype=torch.float64))
    assert torch.linalg.matrix_rank(hessian) == 3
    (grad,) = torch.autograd.grad(output(x), x)
    slope = (output(scores + 1e-5 * along) - output(scores - 1e-5 * along)) / 2e-5
    torch.testing.assert_close((grad * along).sum(), slope, rtol=1e-5, atol=1e-7)


def test_backward_solves_one_system_of_the_active_offsets(monkeypatch):
    """The fit's steps are not recorded: backward factors one matrix, however many steps the fit took."""
    _, x, solve = threshold_case(2)
    loss = summary(solve(x.requires_grad_()))
    calls = []
    original = implicit._solve
    monkeypatch.setattr(implicit, "_solve", lambda h, *rest: (calls.append(h.shape), original(h, *rest))[1])
    loss.backward()
    assert calls == [(3, 3)]
    assert x.grad is not None


# -- use ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fnr", "quantile", "probability", "kl"])
def test_the_head_stays_as_it_is_and_precision_is_the_inputs(name: str):
    make, options = CASES[name]
    head, x, solve = make(0, **options)
    before = copy.deepcopy(head.state_dict())
    single = x.float().requires_grad_()
    state = solve(single)
    assert state["offsets"].dtype == torch.float64
    summary(state).backward()
    assert single.grad.dtype == torch.float32
    torch.testing.assert_close(state["offsets"], solve(x)["offsets"], rtol=1e-3, atol=1e-3)
    assert not head.is_fitted and head.report is None
    for key, value in head.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_apply_state_is_forward_with_that_state():
    rng = torch.Generator().manual_seed(0)
    groups, logits = members(40, 2, rng), torch.randn(40, 9, generator=rng)
    head = gmc.DistributionHead({"one": [3, 4]}, 0.001, ["a", "b"], noise_floor=False)
    state = head.solve_differentiably(logits, groups)
    out = head.apply_state(state, logits, groups)
    with pytest.raises(RuntimeError, match="not fitted"):
        head(logits, groups)
    torch.testing.assert_close(out, head.fit(logits, groups)(logits, groups), rtol=1e-5, atol=1e-5)
    called = torch.func.functional_call(head, {k: v.detach() for k, v in state.items()}, (logits, groups))
    torch.testing.assert_close(called, out)
    with pytest.raises(ValueError, match="not a buffer"):
        head.apply_state({"offset": state["offsets"]}, logits, groups)


def test_a_step_down_the_gradient_improves_what_comes_after_calibration():
    rng = torch.Generator().manual_seed(0)
    masks, groups = torch.rand(40, 6, 6, generator=rng) < 0.5, members(40, 2, rng)
    scores = torch.sigmoid(masks + torch.randn(40, 6, 6, generator=rng, dtype=torch.float64)).requires_grad_()
    head = gmc.ThresholdHead(0.1, 0.01, ["a", "b"])

    def false_alarms(x: Tensor) -> Tensor:
        state = head.solve_differentiably(x[:20], masks[:20], groups[:20], temperature=T)
        return head.apply_state(state, x[20:], groups[20:], mode="soft", temperature=T)[~masks[20:]].mean()

    loss = false_alarms(scores)
    (grad,) = torch.autograd.grad(loss, scores)
    before = float(loss.detach())
    assert bool((grad[:20] != 0).any()) and bool((grad[20:] != 0).any())
    size = 1e-3 / float(grad.norm())
    after = float(false_alarms((scores - size * grad).detach()))
    assert after < before
    assert abs((before - after) - size * float(grad.square().sum())) < 0.05 * size * float(grad.square().sum())


def test_alpha_has_a_derivative_and_can_be_mapped_over():
    _, x, _ = threshold_case(0)
    rng = torch.Generator().manual_seed(0)
    masks, groups = torch.rand(24, 5, 5, generator=rng) < 0.5, members(24, 3, rng)
    head = gmc.ThresholdHead(0.2, 0.02, ["a", "b", "c"])

    def offsets(alpha: Tensor) -> Tensor:
        return head.solve_differentiably(x, masks, groups, alpha=alpha, temperature=T)["offsets"]

    alphas = torch.tensor([0.005, 0.01, 0.02], dtype=torch.float64)
    mapped = torch.func.vmap(offsets)(alphas)
    torch.testing.assert_close(mapped, torch.stack([offsets(alpha) for alpha in alphas]))
    slope = torch.func.jacrev(lambda alpha: offsets(alpha).square().sum())(alphas[1])
    ends = [offsets(alphas[1] + d).square().sum() for d in (1e-6, -1e-6)]
    torch.testing.assert_close(slope, (ends[0] - ends[1]) / 2e-6, rtol=1e-4, atol=1e-7)


def test_runs_on_a_fake_accelerator_without_reading_values_in_the_formulas():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        member = torch.empty(9, 3, device=AWAY, dtype=torch.float64)
        problem = SoftPinball(torch.empty(9, device=AWAY, dtype=torch.int64), *torch.empty(2, 9, device=AWAY), member, 1, 0.1, 1.0)
        theta, x = torch.empty(3, 1, device=AWAY, dtype=torch.float64), torch.empty(2, 9, device=AWAY, dtype=torch.float64)
        assert problem.gradient(theta, *x).device == AWAY
        assert problem.hessian(theta, *x).shape == (3, 3)


# -- errors ------------------------------------------------------------------------------------------------------------------


def test_heads_without_a_smooth_optimum_say_so():
    probs, labels = torch.rand(4, 3), torch.tensor([0, 1, 2, 0])
    tree = gmc.TreeHead([3, 3, 4, 4, -1], 0.9, 0.1)
    with pytest.raises(TypeError, match="TreeHead has no smooth optimum.*GMCPenalty"):
        tree.solve_differentiably(probs, labels)
    own = gmc.GMCHead(lambda y: lambda f: f - y, 0.1)
    with pytest.raises(TypeError, match="GMCHead has no smooth optimum"):
        own.solve_differentiably(probs[:, 0], labels)
    with pytest.raises(TypeError, match="ConformalRiskControl has no differentiable fit"):
        gmc.baselines.ConformalRiskControl(0.1).solve_differentiably(torch.rand(4, 3), torch.rand(4, 3) < 0.5)
    groups = torch.eye(2).repeat(2, 1).bool()
    with pytest.raises(ValueError, match="sequence of projections"):
        gmc.DistributionHead({"a": [1]}, 0.1, ["f", "m"], geometry="euclidean").solve_differentiably(torch.rand(4, 3), groups)
    with pytest.raises(ValueError, match="bins=10.*bins=None"):
        gmc.ProbabilityHead(0.1).solve_differentiably(torch.rand(4), torch.rand(4) < 0.5)
    with pytest.raises(ValueError, match="clips at 0 and 1"):
        gmc.ProbabilityHead(0.1, geometry="euclidean").solve_differentiably(torch.rand(4), torch.rand(4) < 0.5)
    with pytest.raises(ValueError, match="bins=4"):
        gmc.QuantileHead(0.9, 0.1, bins=4).solve_differentiably(torch.rand(4))
    risk = gmc.MonotoneRisk(lambda s, m, t: (s <= t[..., None]).double().mean(-1), name="mine")
    with pytest.raises(ValueError, match="the custom risk 'mine' is only defined at hard thresholds"):
        gmc.ThresholdHead(0.1, 0.1, risk=risk).solve_differentiably(torch.rand(4, 3), torch.rand(4, 3) < 0.5)


def test_bad_arguments_are_named():
    head, scores, masks = gmc.ThresholdHead(0.1, 0.1, ["a", "b"]), torch.rand(4, 3), torch.ones(4, 3).bool()
    groups = torch.tensor([[1, 0]] * 4)
    with pytest.raises(ValueError, match="group 'b' has no examples in this batch"):
        head.solve_differentiably(scores, masks, groups)
    groups[0, 1] = 1
    with pytest.raises(ValueError, match="`temperature`"):
        head.solve_differentiably(scores, masks, groups, temperature=0.0)
    with pytest.raises(ValueError, match="`alpha`.*at least 0"):
        head.solve_differentiably(scores, masks, groups, alpha=-0.1)
    with pytest.raises(ValueError, match="`alpha`.*shape"):
        head.solve_differentiably(scores, masks, groups, alpha=torch.zeros(2))
    with pytest.raises(ValueError, match="no examples"):
        head.solve_differentiably(scores[:0], masks[:0], groups[:0])
    with pytest.raises(ValueError, match="`scores` must be finite"):
        head.solve_differentiably(scores * torch.nan, masks, groups)
    with pytest.raises(ValueError, match="`groups` is missing"):
        head.solve_differentiably(scores, masks)


def test_no_finite_optimum_is_an_error_with_advice():
    head = gmc.ProbabilityHead(0.01, ["a"], bins=None)
    groups = torch.tensor([[True], [False]]).repeat(10, 1)
    with pytest.raises(RuntimeError, match="no finite optimum"):
        head.solve_differentiably(torch.full((20,), 0.5), groups[:, 0], groups, alpha=0.0)
