"""The quantile's line search and its error."""

import pytest
import torch

import torchgmc as gmc
from gmctest.oracles_levelsets import scores_of
from torchgmc.engine import folds
from torchgmc.engine.solver import run
from torchgmc.engine.values import Names
from torchgmc.heads.quantile.problem import QuantileProblem, quantile_error


@pytest.mark.parametrize("many", [False, True], ids=["sorted", "counted"])
def test_quantile_line_search_reaches_the_best_coverage(many: bool, monkeypatch):
    """Against every possible shift of one cell."""
    monkeypatch.setattr(folds, "EXACT", 10 if many else 100)
    g = torch.Generator().manual_seed(0)
    scores = torch.rand(60, generator=g, dtype=torch.float64)
    member = torch.rand(60, 2, generator=g) < 0.7
    p = QuantileProblem(
        scores,
        0.8,
        z=torch.full((60, 1), 0.5, dtype=torch.float64),
        member=member,
        weight=torch.rand(60, generator=g, dtype=torch.float64),
        edges=torch.zeros(0, dtype=torch.float64),
        names=Names(["a", "b"], [""]),
        conditional=False,
        euclidean=None,
        unit=2.0**-40,
    )
    who, what = torch.tensor(0), torch.tensor(0)
    step = p.line_search(who, what, p.violations()[0, 0])
    inside = member[:, 0]
    candidates = [
        abs(float(((scores[inside] <= 0.5 + d).double() - 0.8) @ p.share[inside]))
        for d in [*(scores[inside] - 0.5 + 1e-9).tolist(), -1.0]
    ]
    p.move(who, what, step)
    assert abs(float(p.violations()[0, 0])) <= min(candidates) + 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_counted_steps_on_level_sets_are_the_sorted_ones(seed: int, monkeypatch):
    """The same log, with equal scores too, whether residuals are sorted or counted by their bits; no ties between coverages."""
    scores, member = scores_of(3000, seed)
    weight = torch.rand(3000, generator=torch.Generator().manual_seed(seed)).double()
    scores = (4 * scores).round() / 4 if seed % 2 else scores
    found = []
    for exact in (1 << 15, 100):
        monkeypatch.setattr(folds, "EXACT", exact)
        head = gmc.QuantileHead(0.8, 0.002, ["a", "b", "c"], bins=5, noise_floor=False, init=1.0)
        edges, z = torch.arange(1, 5).double() / 2, torch.full((3000, 1), 1.0).double()
        head.observe(scores, member, weight)
        problem = head._problem(head.statistics, z, edges, 2.0**-40, True)
        assert problem.many == (exact == 100)
        found.append(run(problem, 0.002, max_iter=60))
    (first, log), (second, other) = found
    assert first.iterations > 3
    assert all(torch.equal(a, b) for a, b in zip(log, other, strict=True))
    torch.testing.assert_close(first.violations_after, second.violations_after, rtol=0, atol=1e-12)


def test_quantile_error_is_the_formula():
    scores, member = scores_of(200)
    q = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)[torch.arange(200) % 3]
    weight = torch.rand(200, dtype=torch.float64)
    expected = []
    for j in range(3):
        total = 0.0
        mass = sum(float(weight[i]) for i in range(200) if member[i, j])
        for v in (0.5, 1.0, 2.0):
            rows = [i for i in range(200) if member[i, j] and float(q[i]) == v]
            inside = sum(float(weight[i]) for i in rows)
            covered = sum(float(weight[i]) for i in rows if scores[i] <= v) / inside
            total += inside / mass * (0.8 - covered) ** 2
        expected.append(total)
    found = quantile_error(q, scores, member, 0.8, weight)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
