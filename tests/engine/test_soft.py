"""Soft outputs: plain oracles, derivatives against differences, limits, and training through an attached model."""

import contextlib
import copy
import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

import torchgmc as gmc
from gmctest.fake_device import AWAY
from gmctest.heads_zoo import GROUPS, NAMES, ZOO, Data, events, images, membership, residuals
from torchgmc.heads.levelsets import soft as soft_levels
from torchgmc.heads.tree import soft as soft_answers
from torchgmc.heads.tree.tree import Tree

SOFT = ("soft", "straight_through")


def _fit(make: Callable[..., gmc.Head], data: Callable[[int, int], Data], **options: Any) -> Callable[[], gmc.Head]:
    return lambda: make().fit(*data(400, 2).observe, **options)


#: Heads with rounds on level sets, which those of the zoo need not have.
LEVELED = {
    "probability-bins+exact": _fit(lambda: gmc.ProbabilityHead(0.002, GROUPS, bins=4, noise_floor=False), events),
    "probability-bins+paper": _fit(lambda: gmc.ProbabilityHead(0.01, GROUPS, bins=4), events, solver="paper", max_iter=20),
    "probability-euclidean+exact": _fit(
        lambda: gmc.ProbabilityHead(0.002, GROUPS, bins=4, geometry="euclidean", noise_floor=False), events, max_iter=5
    ),
    "probability-classes+exact": _fit(
        lambda: gmc.ProbabilityHead(0.003, GROUPS, bins=3, num_classes=3, noise_floor=False),
        lambda n, s: events(n, s, 3),
        max_iter=5,
    ),
    "probability-classes+paper": _fit(
        lambda: gmc.ProbabilityHead(0.01, GROUPS, bins=3, num_classes=3, geometry="euclidean"),
        lambda n, s: events(n, s, 3),
        solver="paper",
        max_iter=10,
    ),
    "quantile-bins+paper": _fit(
        lambda: gmc.QuantileHead(0.8, 0.003, GROUPS, bins=4, init=0.5), residuals, solver="paper", eta=0.2, max_iter=12
    ),
}
ALL = NAMES + list(LEVELED)


@functools.cache
def fitted(name: str) -> gmc.Head:
    if name not in LEVELED:
        return ZOO[NAMES.index(name)].fitted()
    head = LEVELED[name]()
    assert sum(len(getattr(head, key)) for key in ("tables", "log_who") if hasattr(head, key)) > 0
    return head


def inputs_of(name: str, n: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Inputs of forward; the first that is floating point is the one to differentiate in (a quantile head gets a base)."""
    inputs = ZOO[NAMES.index(name.split("+")[0])].data(n, seed).inputs
    if name.startswith("quantile"):
        return (*inputs, torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2)
    return (inputs[0].to(dtype), *inputs[1:])


def place_of(inputs: tuple[Tensor, ...]) -> int:
    return next(i for i, value in enumerate(inputs) if value.is_floating_point())


def decided(head: gmc.Head, hard: Tensor) -> Tensor:
    """The hard result in the form of the soft one."""
    if isinstance(head, gmc.TreeHead):
        return nn.functional.one_hot(hard, head.num_nodes)
    return hard


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x > -700 else 0.0


# -- every head --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_modes_agree_as_they_should(name):
    head, inputs = fitted(name), inputs_of(name, 40, dtype=torch.float32)
    place = place_of(inputs)
    hard = head(*inputs)
    assert torch.equal(head(*inputs, mode="hard", temperature=3.0), hard)
    x = inputs[place].clone().requires_grad_()
    args = (*inputs[:place], x, *inputs[place + 1 :])
    values, slopes = {}, {}
    for mode in SOFT:
        out = head(*args, mode=mode, temperature=0.1)
        assert out.dtype == (torch.float64 if name.startswith("quantile") else torch.float32)
        values[mode] = out.detach()
        kept = torch.where(out.isfinite(), out, torch.zeros_like(out))
        (slopes[mode],) = torch.autograd.grad((kept * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum(), x)
        assert bool(slopes[mode].isfinite().all())
        assert bool((slopes[mode] != 0).any()) != (name == "tree-unprocessed")  # the best leaf whatever the scores
    assert torch.equal(values["straight_through"], decided(head, hard).to(values["soft"].dtype))
    torch.testing.assert_close(slopes["straight_through"], slopes["soft"], rtol=0, atol=0)


@pytest.mark.parametrize("name", ALL)
def test_soft_tends_to_hard(name):
    head, inputs = fitted(name), inputs_of(name, 40)
    hard = decided(head, head(*inputs)).double()
    apart = [
        float((head(*inputs, mode="soft", temperature=t).double() - hard).nan_to_num(0.0).abs().mean()) for t in (0.3, 1e-3)
    ]
    assert apart[1] <= apart[0]
    torch.testing.assert_close(head(*inputs, mode="soft", temperature=1e-9).double(), hard, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is:FutureWarning")
@pytest.mark.parametrize("name", ALL)
def test_scripted_is_eager(name):
    head = copy.deepcopy(fitted(name))
    head.statistics = head.report = None
    scripted, inputs = torch.jit.script(head), inputs_of(name, 12, dtype=torch.float32)
    for mode in ("hard", *SOFT):
        torch.testing.assert_close(scripted(*inputs, mode=mode, temperature=0.1), head(*inputs, mode=mode, temperature=0.1))
    with pytest.raises(torch.jit.Error, match="`mode` must be"):
        scripted(*inputs, mode="warm")
    with pytest.raises(torch.jit.Error, match="`temperature` must be"):
        scripted(*inputs, mode="soft", temperature=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_bad_arguments_are_named(name):
    head, inputs = fitted(name), inputs_of(name, 3)
    with pytest.raises(ValueError, match=re.escape("`mode` must be 'hard', 'soft' or 'straight_through', got 'warm'")):
        head(*inputs, mode="warm")
    for temperature in (0.0, -1.0, math.nan, math.inf):
        for mode in ("hard", *SOFT):
            with pytest.raises(ValueError, match=f"`temperature` must be a finite number above 0, got {temperature}"):
                head(*inputs, mode=mode, temperature=temperature)


@pytest.mark.parametrize("name", ALL)
def test_no_examples(name):
    head, inputs = fitted(name), tuple(value[:0] for value in inputs_of(name, 3))
    for mode in ("hard", *SOFT):
        assert head(*inputs, mode=mode).shape[0] == 0


SMOOTH = [name for name in ALL if name not in ("threshold-exact", "unprocessed", "tree-unprocessed")]


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives_of_soft(name):
    head, inputs = copy.copy(fitted(name)), inputs_of(name, 2 if name == "distribution-euclidean" else 3)
    if name.startswith("threshold"):
        inputs = (inputs[0][..., :2, :2], *inputs[1:])
    place = place_of(inputs)
    head.jitter = 0.0  # noise that is drawn from the input jumps with it
    x = inputs[place].clone().requires_grad_()

    def f(x: Tensor) -> Tensor:
        out = head(*inputs[:place], x, *inputs[place + 1 :], mode="soft", temperature=0.2)
        return torch.where(out.isfinite(), out, torch.zeros_like(out))

    # Coordinates lie on a grid of 2^-40 (2^-20 of the scores' size for quantiles), which differences of 1e-6 see.
    loose = {"eps": 1e-3, "atol": 2e-3} if name.startswith("quantile") else {"atol": 1e-4}
    assert gradcheck(f, (x,), **loose)
    assert gradgradcheck(f, (x,), atol=1e-3)


@pytest.mark.parametrize("name", [name for name in ALL if name.split("-")[0] in ("probability", "distribution", "gmc")])
def test_derivatives_of_hard_are_exact_between_the_jumps(name):
    head, inputs = fitted(name), inputs_of(name, 4)

    def f(x: Tensor) -> Tensor:
        out = head(x, *inputs[1:])
        return torch.where(out.isfinite(), out, torch.zeros_like(out))

    assert gradcheck(f, (inputs[0].clone().requires_grad_(),), atol=1e-4)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(name, dtype):
    head, inputs = fitted(name), inputs_of(name, 20)
    place = place_of(inputs)
    half = (*inputs[:place], inputs[place].to(dtype), *inputs[place + 1 :])
    full = (*inputs[:place], half[place].double(), *inputs[place + 1 :])
    out, wanted = (head(*args, mode="soft", temperature=0.5) for args in (half, full))
    assert out.dtype == (torch.float64 if name.startswith("quantile") else dtype)
    close = {torch.bfloat16: 0.03, torch.float16: 0.005}[dtype]
    torch.testing.assert_close(out.double(), wanted.double(), rtol=close, atol=close)


@pytest.mark.parametrize("name", ALL)
def test_stays_on_the_device_of_the_input(name):
    head, inputs = copy.deepcopy(fitted(name)), inputs_of(name, 6)
    head.statistics = head.report = None
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        for key, buffer in head._buffers.items():
            head._buffers[key] = fake.from_tensor(buffer).to(AWAY)
        args = [fake.from_tensor(value).to(AWAY) for value in inputs]
        for mode in ("hard", *SOFT):
            assert head(*args, mode=mode).device == AWAY


# -- thresholds --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["threshold", "threshold-classes"])
def test_threshold_is_a_loop_over_pixels(name):
    head, (scores, member) = fitted(name), inputs_of(name, 5)
    found, lam = head(scores, member, "soft", 0.07), head.threshold(member)
    for where in torch.cartesian_prod(*(torch.arange(size) for size in scores.shape)).tolist():
        level = lam[where[0]] if lam.dim() == 1 else lam[where[0], where[1]]
        assert float(found[tuple(where)]) == pytest.approx(
            sigmoid((float(scores[tuple(where)]) - float(level)) / 0.07), abs=1e-12
        )


def test_offsets_given_as_tensors_have_a_derivative():
    """What differentiating through a fit needs."""
    head, (scores, member) = fitted("threshold"), inputs_of("threshold", 5)
    state = dict(head.named_buffers())

    def f(offsets: Tensor) -> Tensor:
        return torch.func.functional_call(head, state | {"offsets": offsets}, (scores, member, "soft", 0.2)).mean(dim=(1, 2))

    assert gradcheck(f, (head.offsets.clone().requires_grad_(),))


# -- trees -------------------------------------------------------------------------------------------------------------------


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
        lam -= sum(
            p * sum(a * b for a, b in zip(shift[v], member, strict=True)) for p, v in zip(answer(lam), nodes, strict=True)
        )
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
        (f"a{int(torch.randint(3, (), generator=g))}", f"b{int(torch.randint(2, (), generator=g))}", f"{k}")
        for k in range(leaves)
    ]
    tree = Tree(paths)
    nodes = torch.rand(4, tree.num_nodes, generator=g, dtype=torch.float64)
    below = torch.tensor([[k in tree.below(v) for k in range(leaves)] for v in range(tree.num_nodes)]).double()
    torch.testing.assert_close(soft_answers.covered_leaves(nodes, tree.spans, tree.place), nodes @ below)


# -- level sets --------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(n=st.integers(0, 6), bins=st.integers(1, 6), columns=st.integers(1, 3), seed=st.integers(0, 2**16))
def test_level_sets_are_a_partition(n, bins, columns, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, columns, generator=g, dtype=torch.float64)
    edges = torch.arange(1, bins, dtype=torch.float64) / bins
    inside = soft_levels.level_sets(x, edges, 0.1)
    assert inside.shape == (n, bins, columns)
    assert bool((inside >= 0).all())
    torch.testing.assert_close(inside.sum(1), torch.ones(n, columns).double())
    sharp = soft_levels.level_sets(x, edges, 1e-12)
    assert torch.equal(sharp.argmax(1), torch.bucketize(x, edges, right=True))


def soft_probability(head: gmc.ProbabilityHead, p: float, member: list[float], temperature: float) -> float:
    """The soft replay of one event's probability, from the definition."""
    everyone = [1.0, *member]
    kl = head.geometry == "kl"
    z = math.log(p / (1 - p)) if kl else p
    z -= sum(a * b for a, b in zip(everyone, head.offsets[:, 0].tolist(), strict=True))

    def project(z: float) -> float:
        return z if kl else min(max(z, 0.0), 1.0)

    def inside(z: float) -> list[float]:
        rise = [1.0, *(sigmoid((z - e) / temperature) for e in head.edges.tolist()), 0.0]
        return [a - b for a, b in itertools.pairwise(rise)]

    for table in head.tables[..., 0].tolist():  # (a, b)
        z = project(z)
        z -= sum(w * sum(m * row[k] for m, row in zip(everyone, table, strict=True)) for k, w in enumerate(inside(z)))
    for who, step in zip(head.log_who.tolist(), head.log_step.tolist(), strict=True):
        z = project(z - sum(w * step[k] * member[who[k]] for k, w in enumerate(inside(z))))
    return sigmoid(z) if kl else project(z)


@pytest.mark.parametrize("geometry", ["kl", "euclidean"])
@pytest.mark.parametrize("solver", ["exact", "paper"])
def test_probabilities_are_the_definition(geometry, solver):
    probs, y, member = events(300, 3).observe
    head = gmc.ProbabilityHead(0.01, GROUPS, bins=4, geometry=geometry, noise_floor=False)
    head.fit(probs, y, member, solver=solver, max_iter=20)
    assert len(head.tables) + len(head.log_who) > 0
    found = head(probs[:20].double(), member[:20], "soft", 0.3)
    wanted = [soft_probability(head, float(p), m, 0.3) for p, m in zip(probs[:20], member[:20].double().tolist(), strict=True)]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_nothing_to_soften_without_level_sets():
    head, inputs = fitted("probability"), inputs_of("probability", 20)
    assert torch.equal(head(*inputs, mode="soft"), head(*inputs))


# -- quantiles ---------------------------------------------------------------------------------------------------------------


def test_quantiles_are_the_definition():
    head, (member, base) = fitted("quantile-bins+paper"), inputs_of("quantile-bins", 12)
    unit, edges = float(head.unit), head.edges.tolist()

    def one(q: float, member: list[float]) -> float:
        q = round(q / unit) * unit - sum(a * b for a, b in zip(member, head.offsets.tolist(), strict=True))
        for who, step in zip(head.log_who.tolist(), head.log_step.tolist(), strict=True):
            rise = [1.0, *(sigmoid((q - e) / 0.2) for e in edges), 0.0]
            q -= sum((a - b) * step[k] * member[who[k]] for k, (a, b) in enumerate(itertools.pairwise(rise)))
        return q

    wanted = [one(q, m) for q, m in zip(base.tolist(), member.double().tolist(), strict=True)]
    torch.testing.assert_close(head(member, base, "soft", 0.2), torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize("name", ["quantile", "quantile-bins"])
def test_covers(name):
    head, (member, _) = fitted(name), inputs_of(name, 30)
    scores = torch.rand(30, generator=torch.Generator().manual_seed(8)) * 3
    q = head(member)
    assert torch.equal(head.covers(scores, member), scores.double() <= q)
    x = scores.clone().requires_grad_()
    values = head.covers(x, member, mode="straight_through", temperature=0.1)
    assert torch.equal(values, (scores.double() <= q).float())
    (through,) = torch.autograd.grad(values.sum(), x)
    found = head.covers(x, member, mode="soft", temperature=0.1)
    (slope,) = torch.autograd.grad(found.sum(), x)
    assert torch.equal(through, slope)
    assert bool((slope < 0).all())
    if name == "quantile":
        torch.testing.assert_close(found, torch.sigmoid((q - scores) / 0.1).float())
    assert gradcheck(lambda s: head.covers(s, member[:5], None, "soft", 0.2), (scores[:5].double().requires_grad_(),))
    with pytest.raises(ValueError, match="`mode` must be"):
        head.covers(scores, member, mode="warm")
    for mode in ("hard", *SOFT):
        with pytest.raises(ValueError, match="`temperature` must be"):
            head.covers(scores, member, mode=mode, temperature=0.0)


def test_covers_is_scripted():
    head = copy.deepcopy(fitted("quantile-bins"))
    head.statistics = head.report = None
    scores, (member, base) = torch.rand(9), inputs_of("quantile-bins", 9)
    announced = hasattr(torch.compiler, "nested_compile_region")  # recent torch says that TorchScript will end
    with pytest.warns(Warning, match="deprecated|not supported") if announced else contextlib.nullcontext():
        scripted = torch.jit.script(head)
    for mode in ("hard", *SOFT):
        assert torch.equal(scripted.covers(scores, member, base, mode, 0.1), head.covers(scores, member, base, mode, 0.1))


def test_base_has_the_derivative_one():
    head, (member, base) = fitted("quantile"), inputs_of("quantile", 10)
    base[0] = math.inf  # covers everything, as it always did
    x = base.requires_grad_()
    q = head(member, x)
    assert q[0].detach() == math.inf
    assert torch.autograd.grad(q.sum(), x)[0].tolist() == [0.0] + [1.0] * 9


# -- distributions -----------------------------------------------------------------------------------------------------------


def test_tokens_without_mass_do_not_spoil_a_loss():
    member = membership(60, torch.Generator().manual_seed(0))
    logits = torch.randn(60, 12, generator=torch.Generator().manual_seed(1)) * 3
    logits[:, 2] += 3.0 * member[:, 1]
    head = gmc.DistributionHead({"jobs": [2, 3]}, 0.002, GROUPS, geometry="euclidean").fit(logits, member)
    x = logits.clone().requires_grad_()
    out = head(x, member)
    assert bool((out == -math.inf).any())
    (slope,) = torch.autograd.grad(-out.amax(1).sum(), x)
    assert bool(slope.isfinite().all())
    assert bool((slope != 0).any())


# -- training ----------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """One hidden layer."""

    def __init__(self, out: tuple[int, ...], last: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, math.prod(out)), nn.Unflatten(1, out), last)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


NETS: dict[str, Any] = {
    "threshold": lambda: Net((6, 5), nn.Sigmoid()),
    "threshold-classes": lambda: Net((2, 6, 5), nn.Sigmoid()),
    "threshold-jitter": lambda: Net((6, 5), nn.Sigmoid()),
    "probability-bins": lambda: Net((1,), nn.Sequential(nn.Sigmoid(), nn.Flatten(0))),
    "probability-classes": lambda: Net((3,), nn.Softmax(1)),
    "distribution": lambda: Net((20,), nn.Identity()),
    "distribution-euclidean": lambda: Net((20,), nn.Identity()),
    "tree": lambda: Net((5,), nn.Softmax(1)),
    "tree-groups": lambda: Net((5,), nn.Softmax(1)),
    "gmc": lambda: Net((1,), nn.Sequential(nn.Sigmoid(), nn.Flatten(0))),
}


@pytest.mark.parametrize("mode", SOFT)
@pytest.mark.parametrize("name", list(NETS))
def test_gradients_reach_every_parameter_of_an_attached_model(name, mode):
    net, head = NETS[name](), fitted(name)
    model = gmc.attach(net, head, mode=mode, temperature=0.3).train()
    x = torch.randn(16, 6)
    member = membership(16, torch.Generator().manual_seed(3))
    out = model(x, groups=member) if name != "tree" else model(x)
    out = torch.where(out.isfinite(), out, torch.zeros_like(out))
    (out * torch.randn(out.shape)).sum().backward()
    for parameter in net.parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.isfinite().all())
        assert bool((parameter.grad != 0).any())
    assert all(buffer.grad is None for buffer in head.buffers())


def test_training_through_the_threshold_lowers_a_loss_on_the_mask_itself():
    _, masks, member = images(40, 0).observe
    x = torch.randn(40, 6)
    model = gmc.attach(Net((6, 5), nn.Sigmoid()), fitted("threshold")).soften("straight_through", 0.2)
    optimiser = torch.optim.Adam(model.model.parameters(), lr=0.05)
    losses = []
    for _ in range(40):
        loss = (model(x, member) - masks.float()).square().mean()  # share of wrong pixels: no derivative without soft modes
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    hard = model.soften("hard")(x, member)
    assert hard.dtype == torch.bool


def test_autocast():
    net = Net((6, 5), nn.Sigmoid())
    x, member = torch.randn(10, 6), membership(10, torch.Generator().manual_seed(3))
    model = gmc.attach(net, fitted("threshold"), mode="soft", temperature=0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x, member)
    out.float().mean().backward()
    torch.testing.assert_close(out.float(), model(x, member), rtol=0.05, atol=0.05)
    assert all(bool(p.grad.isfinite().all()) for p in net.parameters())


def test_quantile_head_behind_a_model():
    head = fitted("quantile")
    net = Net((1,), nn.Flatten(0))
    model = gmc.attach(net, head, mode="soft", temperature=0.3)
    member = membership(10, torch.Generator().manual_seed(3))
    output, q = model(torch.randn(10, 6), member)
    torch.sigmoid((q - output.abs()) / 0.3).mean().backward()
    assert bool((next(net.parameters()).grad != 0).any())


@pytest.mark.parametrize("position", [None, "last", "mask"])
def test_language_model_positions(position):
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 20)

        def forward(self, input_ids: Tensor) -> Tensor:
            out: Tensor = self.table(input_ids)
            return out

    net = Words()
    adapter = gmc.Adapter(position=position, mask_token_id=0 if position == "mask" else None)
    model = gmc.attach(net, fitted("distribution"), adapter=adapter, mode="soft")
    ids = torch.randint(1, 20, (6, 4))
    ids[:, 2] = 0
    out = model(ids, membership(6, torch.Generator().manual_seed(3)))
    assert torch.equal(out, model.soften("hard")(ids, membership(6, torch.Generator().manual_seed(3))))
    out[:, 2, 3].sum().backward()
    assert bool((net.table.weight.grad != 0).any())


def test_soften_says_what_is_wrong_and_shows_itself():
    model = gmc.attach(Net((6, 5), nn.Sigmoid()), fitted("threshold"))
    assert "mode" not in repr(model).split("(model)")[0]
    with pytest.raises(ValueError, match="`mode` must be"):
        model.soften("warm")
    with pytest.raises(ValueError, match="`temperature` must be"):
        gmc.attach(Net((6, 5), nn.Sigmoid()), fitted("threshold"), mode="soft", temperature=0.0)
    assert (model.mode, model.temperature) == ("hard", 0.1)
    assert "mode='soft', temperature=0.5" in repr(model.soften("soft", 0.5))


def test_files_hold_the_hard_answer(tmp_path):
    model = gmc.attach(Net((6, 5), nn.Sigmoid()), fitted("threshold"), mode="soft")
    x, member = torch.randn(8, 6), membership(8, torch.Generator().manual_seed(3))
    path = model.export(tmp_path / "model.pt2", format="torch.export", example_inputs=(x, member))
    program = torch.export.load(path).module()
    assert torch.equal(program(x, member), model.soften("hard")(x, member))


def test_a_head_without_modes_can_still_be_attached():
    class Plain(gmc.ThresholdHead):
        def forward(self, scores: Tensor, groups: Tensor | None = None) -> Tensor:
            return super().forward(scores, groups)

    head = Plain(0.1, 0.02, GROUPS).fit(*images(80, 0).observe)
    x, member = torch.randn(8, 6), membership(8, torch.Generator().manual_seed(3))
    assert gmc.attach(Net((6, 5), nn.Sigmoid()), head)(x, member).dtype == torch.bool
