"""Many scores seen through those near the thresholds, against all of them."""

import pytest
import torch

from torchgmc.engine import folds, offsets
from torchgmc.engine.offsets import Curves, Folded, crossing, fit_offsets_to, quantile_of_all, span_of


def scores_of(n: int, kind: str) -> Folded:
    g = torch.Generator().manual_seed(n)
    patterns = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]]).bool()
    cell = torch.randint(4, (n,), generator=g)
    scores = torch.randn(n, generator=g).double() * (1 + cell) + 1e3
    scores = scores.round() if kind == "equal" else scores
    weight = torch.rand(1, n, generator=g).double() + 0.5 if kind == "weights" else torch.ones(1, n).double()
    mass = torch.zeros(1, 4).double().index_add_(1, cell, weight)
    return Folded(scores, cell, weight, mass, patterns, float(n), span_of(scores, 4))


@pytest.mark.parametrize("seed", range(6))
def test_scores_counted_in_buckets_cross_where_sorted_ones_do(seed: int):
    """Against sorting: both signs, all sizes, zeros, many orders of size, equal scores, weights of 0."""
    g = torch.Generator().manual_seed(seed)
    n = (1, 2, 50, 400, 1000, 3000)[seed]
    size = 10.0 ** (torch.randint(-60, 60, (n,), generator=g) if seed % 2 else torch.zeros(n)).double()
    scores = torch.randn(n, generator=g).double() * size
    scores = torch.where(torch.rand(n, generator=g) < 0.3, torch.tensor([-0.0, 0.0, 2.5, -1e-30])[torch.arange(n) % 4], scores)
    weight = torch.randint(4, (n,), generator=g).double() + (torch.arange(n) == 0)
    for part in (0.0, 1e-9, 0.1, 0.5, 0.9, 1.0, 1.1):
        goal = part * float(weight.sum())
        found, (reached, below) = crossing(scores, weight, goal)
        ordered, order = scores[weight > 0].sort()
        at = torch.searchsorted(weight[weight > 0][order].cumsum(0), goal * (1 - 1e-12)).clamp(max=len(order) - 1)
        assert found == crossing(scores, weight, goal, alone=True)[0] == float(ordered[at])
        assert reached == weight[scores <= found].sum() and below == weight[scores < found].sum()


@pytest.mark.parametrize("kind", ["plain", "equal", "weights"])
def test_many_scores_have_the_optimum_of_all(kind: str, monkeypatch):
    monkeypatch.setattr(folds, "EXACT", 100)
    monkeypatch.setattr(offsets, "NEAR", 200)
    many = scores_of(5000, kind)
    every = offsets.replace(many, span=0.0)
    assert many.span > 0
    few, radius = many.near(torch.full((4,), 1e3).double())
    assert len(few.scores) < 1500 and (radius > 0.01 or kind == "equal")  # 200 near ones, the others by their distance
    torch.testing.assert_close(few.weight.sum(), many.total)
    torch.testing.assert_close((few.weight[0] * few.scores).sum(), (many.weight[0] * many.scores).sum())
    for part in (0.0317, 0.5123, 0.9071):  # no flat minima
        plain = crossing(many.scores, many.weight[0], part * float(many.total), alone=True)[0]
        assert quantile_of_all(many.scores, many.weight[0], part) == pytest.approx(plain, abs=1e-9)
        for slack in (0.0, 0.02):
            alpha = torch.full((2,), slack).double()
            a, b = (fit_offsets_to(data, part, alpha, lambda _: 0.0) for data in (many, every))
            assert a.common == pytest.approx(b.common, abs=1e-7)
            torch.testing.assert_close(a.groups, b.groups, rtol=0, atol=1e-7)


@pytest.mark.parametrize("window", [8, 2, 1])  # with 1 every threshold leaves what is near
@pytest.mark.parametrize("each", [20, 200, 20_000])
def test_curves_on_a_lattice_have_the_optimum_of_all_scores(each: int, window: int, monkeypatch):
    monkeypatch.setattr(offsets, "WINDOW", window)
    patterns = torch.tensor([[0, 0, 1], [0, 1, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [0, 0, 0]]).bool()
    points = torch.linspace(-1, 2, 1537).double()
    for seed in range(6):
        g = torch.Generator().manual_seed(seed)
        place = (400 + 60 * torch.arange(6)[:, None] + 90 * torch.randn(6, each, generator=g)).long().clamp(0, 1536)
        if seed > 3:
            place[:, : each // 2] = 700  # an atom
        share = torch.rand(6, each, generator=g).double() + 0.5
        steps = torch.zeros(6, 1537).double().scatter_add_(1, place, share)
        mass = 1.05 * steps.sum(1)[None]  # some scores lie above the lattice
        cell, used = steps.nonzero(as_tuple=True)
        every = Folded(points[used], cell, steps[cell, used][None], mass, patterns, 100.0)
        curves = Curves(points, cell[:0], steps.cumsum(1), mass, patterns, 100.0)
        for part in (0.0317, 0.5123, 0.9071):  # no flat minima
            assert curves.quantile(part * float(mass.sum())) == every.quantile(part * float(mass.sum()))
            for slack in (0.0, 0.01, 0.3):
                alpha = torch.full((3,), slack).double()
                a, b = (fit_offsets_to(data, part, alpha, lambda _: 0.0) for data in (curves, every))
                assert a.common == pytest.approx(b.common, abs=1e-9)
                torch.testing.assert_close(a.groups, b.groups, rtol=0, atol=1e-9)
    assert curves.quantile(2 * float(mass.sum())) == float(points[used.max()]) == every.quantile(2 * float(mass.sum()))


def test_too_many_cells_are_not_counted(monkeypatch):
    monkeypatch.setattr(folds, "EXACT", 100)
    scores = torch.rand(101).double()
    assert span_of(scores, offsets.CELLS) == 1.0 and span_of(scores, offsets.CELLS + 1) == span_of(scores[:100]) == 0.0
