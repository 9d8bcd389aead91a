"""Soft outputs of every head: derivatives against differences, limits, and the threshold by a loop over pixels."""

import copy
import math
import re

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

import torchgmc as gmc
from gmctest.fake_device import AWAY
from gmctest.heads_zoo import NAMES
from gmctest.soft_heads import ALL, SOFT, fitted, inputs_of, sigmoid


def place_of(inputs: tuple[Tensor, ...]) -> int:
    return next(i for i, value in enumerate(inputs) if value.is_floating_point())


def decided(head: gmc.Head, hard: Tensor) -> Tensor:
    """The hard result in the form of the soft one."""
    if isinstance(head, gmc.TreeHead):
        return nn.functional.one_hot(hard, head.num_nodes)
    return hard


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
    apart = [float((head(*inputs, mode="soft", temperature=t).double() - hard).nan_to_num(0.0).abs().mean()) for t in (0.3, 1e-3)]
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
        assert float(found[tuple(where)]) == pytest.approx(sigmoid((float(scores[tuple(where)]) - float(level)) / 0.07), abs=1e-12)


def test_offsets_given_as_tensors_have_a_derivative():
    """What differentiating through a fit needs."""
    head, (scores, member) = fitted("threshold"), inputs_of("threshold", 5)
    state = dict(head.named_buffers())

    def f(offsets: Tensor) -> Tensor:
        return torch.func.functional_call(head, state | {"offsets": offsets}, (scores, member, "soft", 0.2)).mean(dim=(1, 2))

    assert gradcheck(f, (head.offsets.clone().requires_grad_(),))
