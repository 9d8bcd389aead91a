"""Conformity scores: score <= q is the same as y being in the interval or set."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

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
        (lambda: conformity.interval(torch.rand(3), torch.rand(1)), "same shape, got `threshold` \\(1,\\), `prediction` \\(3,\\)"),
        (lambda: conformity.lac(torch.rand(3), torch.zeros(3).long()), "shape \\(n, C\\)"),
        (lambda: conformity.aps(torch.full((3, 2), 0.5), torch.zeros(3)), "class ids"),
        (lambda: conformity.lac(torch.full((3, 2), 0.5), torch.tensor([0, 1, 2])), "from 0 to 1, got 2"),
    ],
)
def test_bad_input_is_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.parametrize("score", [conformity.lac, conformity.aps])
@pytest.mark.parametrize(
    "probs",
    [torch.randn(4, 3) * 3, torch.full((4, 3), float("nan")), torch.rand(4, 3) * 0.2, torch.full((4, 3), 0.9)],
    ids=["logits", "NaN", "sums below 1", "sigmoids"],
)
def test_only_probabilities_are_scored(score, probs):
    makers = {conformity.lac: conformity.lac_set, conformity.aps: conformity.aps_set}
    with pytest.raises(ValueError, match="`probs` must hold probabilities"):
        score(probs, torch.zeros(4).long())
    with pytest.raises(ValueError, match="`probs` must hold probabilities"):
        makers[score](probs, torch.full((4,), 0.5))


def test_nan_becomes_no_set_and_no_interval():
    probs, nan, one = torch.full((2, 2), 0.5), torch.tensor([0.5, float("nan")]), torch.ones(2)
    for call in (
        lambda: conformity.lac_set(probs, nan),
        lambda: conformity.aps_set(probs, nan),
        lambda: conformity.interval(one, nan),
        lambda: conformity.interval(nan, one),
        lambda: conformity.cqr_interval(one, nan, one),
        lambda: conformity.absolute_residual(one, nan),
        lambda: conformity.cqr(one, one, nan),
    ):
        with pytest.raises(ValueError, match=r"must not be NaN, but \w+\[1\] is"):
            call()
    assert conformity.lac_set(probs, torch.full((2,), float("inf"))).all()  # no finite threshold: everything


def test_randomized_sets_of_an_older_head_draw_as_their_scores_did():
    probs, labels = torch.rand(500, 3).softmax(1), torch.randint(3, (500,))
    for version in (1, 2):
        scores = conformity.aps(probs, labels, randomized=True, version=version)
        inside = conformity.aps_set(probs, scores, randomized=True, version=version)
        assert inside.gather(1, labels[:, None]).all()
    assert not torch.equal(scores, conformity.aps(probs, labels, randomized=True, version=1))
    with pytest.raises(ValueError, match="`version` must be one of 1, 2"):
        conformity.aps(probs, labels, randomized=True, version=3)
