"""Conformity scores: score <= q is the same as y being in the interval or set."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchgmc as gmc
from torchgmc import conformity


def draw(n, c, seed):
    g = torch.Generator().manual_seed(seed)
    probs = torch.randn(n, c, generator=g, dtype=torch.float64).mul(2).softmax(1)
    return probs, torch.randint(0, c, (n,), generator=g), torch.rand(n, generator=g, dtype=torch.float64)


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 30), c=st.integers(2, 6), seed=st.integers(0, 2**16), randomized=st.booleans())
def test_sets_hold_the_label_exactly_when_its_score_is_within_reach(n, c, seed, randomized):
    probs, labels, q = draw(n, c, seed)
    lac = conformity.lac_set(probs, q).gather(1, labels[:, None])[:, 0]
    assert torch.equal(lac, conformity.lac(probs, labels) <= q)
    aps = conformity.aps_set(probs, q, randomized).gather(1, labels[:, None])[:, 0]
    assert torch.equal(aps, conformity.aps(probs, labels, randomized) <= q)


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 30), seed=st.integers(0, 2**16))
def test_intervals_hold_y_exactly_when_its_score_is_within_reach(n, seed):
    g = torch.Generator().manual_seed(seed)
    prediction, y, q, width = (torch.randn(n, generator=g, dtype=torch.float64) for _ in range(4))
    low, high = conformity.interval(prediction, q)
    inside = (low <= y) & (y <= high)
    assert torch.equal(inside, conformity.absolute_residual(prediction, y) <= q)
    bottom, top = prediction - width.abs(), prediction + width.abs()
    low, high = conformity.cqr_interval(bottom, top, q)
    assert torch.equal((low <= y) & (y <= high), conformity.cqr(bottom, top, y) <= q)


def test_aps_is_the_loop():
    probs, labels, _ = draw(20, 5, 0)
    for i in range(20):
        own = float(probs[i, labels[i]])
        expected = sum(p for p in probs[i].tolist() if p >= own)
        assert abs(float(conformity.aps(probs, labels)[i]) - expected) < 1e-12
        noisy = float(conformity.aps(probs, labels, randomized=True)[i])
        assert expected - own <= noisy <= expected
    assert torch.equal(conformity.aps(probs[3:4], labels[3:4], True), conformity.aps(probs, labels, True)[3:4])


def test_three_lines_from_a_classifier_to_sets_that_cover_every_group():
    g = torch.Generator().manual_seed(0)
    member = torch.rand(6000, 2, generator=g) < 0.5
    logits = 2 * torch.randn(6000, 4, generator=g)
    truth = (logits / (1 + 2 * member[:, :1])).softmax(1)  # the model is too sure of itself in the first group
    labels = torch.multinomial(truth, 1, generator=g)[:, 0]
    probs = logits.softmax(1)
    head = gmc.QuantileHead(0.9, 0.005, ["sure", "other"], conditional=True)
    head.fit(conformity.aps(probs[:3000], labels[:3000], True), member[:3000])
    sets = conformity.aps_set(probs[3000:], head(member[3000:]), True)
    covered = sets.gather(1, labels[3000:, None])[:, 0].double()
    for inside in (member[3000:, 0], member[3000:, 1]):  # 4 standard errors of both halves are 0.044: chance of failure 1e-4
        assert abs(float(covered[inside].mean()) - 0.9) < 0.005 + 0.044
    assert float(sets[member[3000:, 0]].sum(1).double().mean()) > float(sets[~member[3000:, 0]].sum(1).double().mean())


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: conformity.absolute_residual(torch.rand(3, 1), torch.rand(3)), "the same shape \\(n,\\)"),
        (lambda: conformity.cqr(torch.rand(3), torch.rand(2), torch.rand(3)), "`high` \\(2,\\)"),
        (lambda: conformity.interval(torch.rand(3), torch.rand(1)), "`threshold` must have one entry per prediction"),
        (lambda: conformity.lac(torch.rand(3), torch.zeros(3).long()), "shape \\(n, C\\)"),
        (lambda: conformity.aps(torch.full((3, 2), 0.5), torch.zeros(3)), "class ids"),
        (lambda: conformity.lac(torch.full((3, 2), 0.5), torch.tensor([0, 1, 2])), "from 0 to 1, got 2"),
    ],
)
def test_bad_input_is_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()
