"""The paper's geometry: projected steps with two numbers for the whole tail, against NumPy on the whole vocabulary."""

import torch
from hypothesis import given, settings, strategies as st

from gmctest.oracles_distribution import numpy_simplex, tail_and_words
from torchgmc import projections
from torchgmc.heads.distribution.simplex import cells_of, start, step, tail_from_cells, tail_of


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
    torch.testing.assert_close(torch.autograd.functional.jacobian(fast, logits), torch.autograd.functional.jacobian(slow, logits))
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
