"""torch.compile: every head in one graph, equal to eager, and few recompilations."""

import functools
import shutil
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

import torchgmc as gmc
from gmctest.heads_zoo import GROUPS, NAMES, ZOO, events, images, membership


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@functools.cache
def fitted(name: str) -> gmc.Head:
    return ZOO[NAMES.index(name)].fitted()


def compiled(module: nn.Module, backend: str = "eager") -> tuple[nn.Module, torch._dynamo.testing.CompileCounterWithBackend]:
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(module, fullgraph=True, backend=counter), counter


@pytest.mark.parametrize("name", NAMES)
def test_one_graph_for_any_number_of_examples(name):
    head, data = fitted(name), ZOO[NAMES.index(name)].data
    fast, counter = compiled(head)
    for n in (20, 33, 7, 61, 12):
        inputs = data(n, 1).inputs
        torch.testing.assert_close(fast(*inputs), head(*inputs), rtol=0, atol=0)
    assert counter.frame_count == 2  # the first size, then any


# A log is unrolled, so that those of trees and of the euclidean geometry make large graphs: one size is enough here.
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("threshold-jitter", "soft"),
        ("threshold", "straight_through"),
        ("probability-bins", "soft"),
        ("quantile-bins", "soft"),
        ("distribution", "soft"),
        ("tree-groups", "soft"),
        ("tree-conformal", "straight_through"),
        ("gmc", "soft"),
    ],
)
def test_soft_modes_with_their_derivatives(name, mode):
    head, inputs = fitted(name), ZOO[NAMES.index(name)].data(20, 1).inputs
    fast, _ = compiled(head, "aot_eager")  # fullgraph=True: a graph break would raise
    found, slopes = [], []
    for module in (fast, head):
        x = inputs[0].clone().requires_grad_() if inputs[0].is_floating_point() else inputs[0]
        out = module(x, *inputs[1:], mode=mode, temperature=0.2)
        found.append(out.detach())
        if x.requires_grad:
            slopes.append(torch.autograd.grad(out.double().square().sum(), x)[0])
    torch.testing.assert_close(found[0], found[1])
    if slopes:
        torch.testing.assert_close(slopes[0], slopes[1])


def test_a_log_on_level_sets():
    probs, y, member = events(400, 2).observe
    head = gmc.ProbabilityHead(0.01, GROUPS, bins=4).fit(probs, y, member, solver="paper", max_iter=8)
    assert len(head.log_who) > 0
    fast, counter = compiled(head)
    for mode in ("hard", "soft"):
        torch.testing.assert_close(fast(probs, member, mode), head(probs, member, mode))
    assert counter.frame_count == 2


def test_cooling_down_does_not_recompile_for_ever():
    head, (scores, member) = fitted("threshold"), images(12, 0).inputs
    fast, counter = compiled(head)
    for k in range(12):
        temperature = 0.5 * 0.8**k
        torch.testing.assert_close(fast(scores, member, "soft", temperature), head(scores, member, "soft", temperature))
    assert counter.frame_count <= 3


def test_errors_pass_through():
    head, (scores, member) = fitted("threshold"), images(12, 0).inputs
    for options in ({"mode": "warm"}, {"mode": "soft", "temperature": -1.0}):
        fast = torch.compile(head, backend="eager")
        with pytest.raises(ValueError, match=r"`mode` must be|`temperature` must be"):
            fast(scores, member, **options)


def test_training_step_of_an_attached_model():
    net = nn.Sequential(nn.Linear(6, 30), nn.Unflatten(1, (6, 5)), nn.Sigmoid())
    x, member = torch.randn(9, 6), membership(9, torch.Generator().manual_seed(3))
    model = gmc.attach(net, fitted("threshold"), mode="straight_through", temperature=0.2)
    wanted = torch.autograd.grad(model(x, member).mean(), net[0].weight)[0]
    fast, counter = compiled(model, "aot_eager")
    out = fast(x, member)
    assert torch.equal(out, model(x, member))
    torch.testing.assert_close(torch.autograd.grad(out.mean(), net[0].weight)[0], wanted)
    assert counter.frame_count == 1


def test_violations_and_a_penalty_on_them():
    who, s = membership(50, torch.Generator().manual_seed(0)), torch.randn(50, 2)

    def penalty(s: Tensor) -> Tensor:
        return gmc.violations(who, s).square().sum()

    fast = torch.compile(penalty, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(fast(s), penalty(s))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="inductor needs a C++ compiler")
def test_inductor():
    head, inputs = fitted("threshold"), images(20, 1).inputs
    fast = torch.compile(head, fullgraph=True)
    for mode in ("hard", "soft"):
        torch.testing.assert_close(fast(*inputs, mode=mode), head(*inputs, mode=mode))
