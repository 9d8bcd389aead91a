"""Both geometries as the solver sees them."""

import pytest
import torch

from gmctest.oracles_distribution import draw, dual_of, numpy_algorithm, tail_and_words
from torchgmc.engine.values import Names
from torchgmc.heads.distribution.problem import SimplexProblem, TiltProblem
from torchgmc.heads.distribution.simplex import tail_of


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fixed_steps_equal_numpy_step_for_step(seed, conditional):
    from torchgmc.engine.solver import run

    logits, member, lists = draw(seed=seed)
    alpha, eta = 0.01, 0.004
    p, words, others, keep, found = tail_and_words(logits, lists)
    ones = torch.ones(len(logits), dtype=torch.float64)
    names = Names([str(i) for i in range(3)], [str(i) for i in range(3)])
    directions = found.lists[found.atom].T
    problem = SimplexProblem(words, tail_of(others), directions, member, ones, conditional, names)
    report, log = run(problem, alpha, "paper", eta, 500)
    p, loop = numpy_algorithm(logits, member, lists, alpha, eta, 500, conditional)
    assert report.converged and report.iterations == len(loop) > 3
    assert [(int(a), int(k)) for a, k in zip(log.who, log.what, strict=True)] == [(a, k) for a, k, _ in loop]
    torch.testing.assert_close(log.step, torch.tensor([s for *_, s in loop], dtype=torch.float64))
    torch.testing.assert_close(problem.point.words, p[:, found.ids], rtol=0, atol=1e-12)
    rest = torch.maximum(others - problem.point.shift[:, None], problem.point.floor[:, None])
    torch.testing.assert_close(rest, p[:, keep], rtol=0, atol=1e-12)


def test_line_search_removes_the_violation_in_both_geometries():
    logits, member, lists = draw()
    dual = dual_of(logits, member, lists)
    _, words, others, _, found = tail_and_words(logits, lists)
    common = (member, torch.ones(40, dtype=torch.float64), False, Names(["a", "b", "c"], ["x", "y", "z"]))
    for problem in (TiltProblem(dual, *common), SimplexProblem(words, tail_of(others), found.lists[found.atom].T, *common)):
        before = problem.violations()
        who, what = torch.tensor(0), torch.tensor(0)
        size = problem.line_search(who, what, before[0, 0])
        torch.testing.assert_close(problem.violations(), before)  # looking moves nothing
        problem.move(who, what, size)
        assert abs(float(before[0, 0])) > 0.01
        assert float(problem.violations()[0, 0]) == pytest.approx(0.0, abs=1e-9)
