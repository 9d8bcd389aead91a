"""torch.func over heads and violations: vmap, functional_call and derivatives against plain loops."""

import functools
import math

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vmap

import torchgmc as gmc
from gmctest.heads_zoo import GROUPS, NAMES, ZOO, events, images, membership
from torchgmc.engine.search import masses
from torchgmc.groups.groups import pattern_ids


@functools.cache
def fitted(name: str) -> gmc.Head:
    return ZOO[NAMES.index(name)].fitted()


N = 40
WHO = membership(N, torch.Generator().manual_seed(0))
S = torch.randn(N, 2, generator=torch.Generator().manual_seed(1))
COLUMNS = {f"c{j}": [str((i * (j + 2)) % 5) for i in range(N)] for j in range(3)}
SETS = {
    "membership": WHO,
    "ids": torch.arange(N) % 3,
    "cells": gmc.Cells(*pattern_ids(WHO)),
    "groups": gmc.Groups.from_columns(COLUMNS, intersections=2),
    "general": torch.randn(N, 3, 2, generator=torch.Generator().manual_seed(2)),
}


@pytest.mark.parametrize("kind", list(SETS))
def test_violations_over_bootstrap_weights_and_over_mappings(kind):
    who = SETS[kind]
    draws = torch.randint(N, (7, N), generator=torch.Generator().manual_seed(3))
    weights = torch.zeros(7, N).scatter_add_(1, draws, torch.ones(7, N))  # how often a resample holds each example
    found = vmap(lambda w: gmc.violations(who, S, weight=w))(weights)
    torch.testing.assert_close(found, torch.stack([gmc.violations(who, S, weight=w) for w in weights]))
    if kind == "membership":  # a weight is a number of copies
        torch.testing.assert_close(found[0], gmc.violations(WHO[draws[0]], S[draws[0]]))
    many = torch.randn(4, N, 2)
    found = vmap(lambda s: gmc.violations(who, s))(many)
    torch.testing.assert_close(found, torch.stack([gmc.violations(who, s) for s in many]))


def test_derivative_of_violations_in_s_is_the_membership():
    slope = jacrev(lambda s: gmc.violations(WHO, s)[:, 0])(S[:, 0].double())
    torch.testing.assert_close(slope, WHO.T.double() / N)
    per_weight = vmap(masses, in_dims=(None, 0))(WHO, torch.rand(3, N, dtype=torch.float64))
    assert per_weight.shape == (3, len(GROUPS))


@pytest.mark.parametrize("name", NAMES)
def test_one_forward_for_all_alphas(name):
    entry, head = ZOO[NAMES.index(name)], fitted(name)
    before = {key: value.clone() for key, value in head.named_buffers()}
    alpha = head.alpha or 0.02
    alphas = [0.5 * alpha, alpha, 4.0 * alpha]
    heads = gmc.func.sweep(head, alphas, **entry.options)
    assert [one.alpha for one in heads] == alphas
    for key, value in head.named_buffers():
        assert torch.equal(value, before[key])
    for one in heads:
        fresh = entry.make()
        fresh.alpha, fresh.noise_floor = one.alpha, False
        fresh.fit(*entry.data(80, 0).observe, **entry.options)
        for key, value in fresh.named_buffers():
            assert torch.equal(value, dict(one.named_buffers())[key]), key
    inputs = entry.data(25, 1).inputs
    for mode in ("hard", "soft", "straight_through"):
        wanted = torch.stack([one(*inputs, mode=mode, temperature=0.2) for one in heads])
        for chunk_size in (None, 2):
            found = gmc.func.apply(heads, *inputs, mode=mode, temperature=0.2, chunk_size=chunk_size)
            torch.testing.assert_close(found, wanted)


def test_logs_of_different_length_are_filled_up():
    heads = gmc.func.sweep(fitted("tree"), [0.3, 0.1, 0.02])
    lengths = [len(head.shifts) for head in heads]
    assert len(set(lengths)) > 1
    assert gmc.func.stack(heads)["shifts"].shape[:2] == (3, max(lengths))


def test_heads_of_other_data():
    """The spread of a threshold over resamples: one fit each, one forward."""
    scores, masks, member = images(60, 0).observe
    heads = []
    for seed in range(4):
        chosen = torch.randint(60, (60,), generator=torch.Generator().manual_seed(seed))
        heads.append(gmc.ThresholdHead(0.1, 0.02, GROUPS).fit(scores[chosen], masks[chosen], member[chosen]))
    found = gmc.func.apply(heads, scores, member)
    assert torch.equal(found, torch.stack([head(scores, member) for head in heads]))
    assert len({head.offsets.sum().item() for head in heads}) > 1


def test_errors_of_func():
    head = fitted("threshold")
    with pytest.raises(ValueError, match="`alphas` is empty"):
        gmc.func.sweep(head, [])
    with pytest.raises(ValueError, match="`alphas` must be a finite number above 0, got -0.1"):
        gmc.func.sweep(head, [0.1, -0.1])
    with pytest.raises(ValueError, match="no examples observed"):
        gmc.func.sweep(gmc.ThresholdHead(0.1, 0.02), [0.1])
    with pytest.raises(ValueError, match="`heads` is empty"):
        gmc.func.stack([])
    with pytest.raises(TypeError, match=r"heads\[1\] is a TreeHead, not ThresholdHead"):
        gmc.func.stack([head, fitted("tree")])
    with pytest.raises(RuntimeError, match=r"heads\[1\] is not fitted"):
        gmc.func.stack([head, gmc.ThresholdHead(0.1, 0.02, GROUPS)])
    with pytest.raises(ValueError, match=r"heads\[1\] was made with a different `jitter`"):
        gmc.func.stack([head, gmc.ThresholdHead(0.1, 0.02, GROUPS, jitter=0.1).fit(*images(20, 0).observe)])
    probs, y, member = events(50, 0).observe
    unit, wide = (gmc.ProbabilityHead(0.1, GROUPS, range=(0, top)).fit(probs, y.float(), member) for top in (1.0, 2.0))
    with pytest.raises(ValueError, match=r"heads\[1\] was made with a different `range`"):
        gmc.func.stack([unit, wide])


@pytest.mark.parametrize("name", ["threshold", "tree-groups", "probability-bins", "distribution"])
def test_derivatives_through_a_soft_forward(name):
    head = fitted(name)
    x, member = ZOO[NAMES.index(name)].data(4, 1).inputs
    x = x.double()

    def total(x: Tensor) -> Tensor:
        return head(x, member, mode="soft", temperature=0.3).square().sum()

    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(total(leaf), leaf)
    torch.testing.assert_close(grad(total)(x), wanted)
    rows = jacrev(lambda x: head(x, member, mode="soft", temperature=0.3))(x)
    torch.testing.assert_close(jacfwd(lambda x: head(x, member, mode="soft", temperature=0.3))(x), rows)
    # Examples do not see one another: the derivative of each by itself, vectorised, is the diagonal of the whole.
    one = vmap(jacrev(lambda a, m: head(a[None], m[None], mode="soft", temperature=0.3)[0]))(x, member)
    torch.testing.assert_close(one, torch.stack([rows[i].movedim(rows[i].dim() - x.dim(), 0)[i] for i in range(4)]))


def test_second_derivative_of_a_soft_threshold():
    head = fitted("threshold")
    member, lam = WHO[:1], float(fitted("threshold").threshold(WHO[:1])[0])
    x = torch.tensor(0.4, dtype=torch.float64)
    s = 1.0 / (1.0 + math.exp(-(0.4 - lam) / 0.2))
    found = hessian(lambda x: head(x.view(1, 1, 1), member, mode="soft", temperature=0.2).sum())(x)
    assert float(found) == pytest.approx(s * (1 - s) * (1 - 2 * s) / 0.04)


def test_per_example_gradients_of_a_network_behind_which_a_head_sits():
    net = torch.nn.Sequential(torch.nn.Linear(3, 30), torch.nn.Unflatten(1, (6, 5)), torch.nn.Sigmoid())
    model = gmc.attach(net, fitted("threshold"), mode="soft")
    x, state = torch.randn(5, 3), {**dict(model.named_parameters()), **dict(model.named_buffers())}
    weights = {key: value.detach() for key, value in state.items() if key.startswith("model.")}
    rest = {key: value for key, value in state.items() if key not in weights}
    model(x, WHO[:5])  # the first call looks at the range of the scores

    def loss(weights: dict[str, Tensor], x: Tensor, m: Tensor) -> Tensor:
        return functional_call(model, {**weights, **rest}, (x[None], m[None])).square().mean()

    found = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, WHO[:5])["model.0.weight"]
    wanted = torch.stack([grad(loss)(weights, x[i], WHO[i])["model.0.weight"] for i in range(5)])
    torch.testing.assert_close(found, wanted)
