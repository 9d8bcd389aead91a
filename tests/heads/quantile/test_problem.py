"""The quantile's line search and its error."""

import torch

from gmctest.oracles_levelsets import scores_of
from torchgmc.engine.values import Names
from torchgmc.heads.quantile.problem import QuantileProblem, quantile_error


def test_quantile_line_search_reaches_the_best_coverage():
    """Against every possible shift of one cell."""
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
