"""Which prompts choose how far groups move."""

import dataclasses
import math

import pytest
import torch

import torchgmc as gmc
from gmctest.heads_zoo import LISTS, OTHERS, prompts, without_all
from torchgmc.engine import noise
from torchgmc.engine.folds import places
from torchgmc.heads.distribution import fit
from torchgmc.heads.distribution.tilt import Dual, project


def problem(n: int) -> tuple[Dual, fit.MassStatistics, torch.Tensor]:
    head = gmc.DistributionHead(LISTS, None, OTHERS)
    head.observe(*without_all(prompts(n, 0)).observe)
    found = head.statistics
    return Dual(found.log_mass, head.atom_lists, found.member, found.weight), found, head.atom_lists


@pytest.mark.parametrize("choices", [1 << 18, 300])
def test_k_is_that_of_plain_cross_validation_on_the_prompts_that_choose(choices: int, monkeypatch):
    monkeypatch.setattr(fit, "CHOICES", choices)
    dual, rows, lists = problem(900)
    spread = fit.spread_of(dual, rows)
    found, k = fit.fit_tilt(dual, rows, lists, spread, 100)
    spots = places(*rows.content())
    chosen = spots.place < (300 if choices == 300 else 900)  # of up to 32,768 rows, places are 0, 1, 2, ...
    assert int(chosen.sum()) == min(choices, 900)
    losses = []
    for candidate in noise.CANDIDATES:
        price = noise.slacks(candidate, spread.error, spread.sizes) * math.sqrt(1.25 * 900 / int(chosen.sum()))
        row = []
        for fold in range(5):
            held, rest = chosen & (spots.place % 5 == fold), chosen & (spots.place % 5 != fold)
            parts = []
            for some in (rest, held):
                part = Dual(rows.log_mass[some], lists, rows.member[some], rows.weight[some])
                part.mean, part.tilt = dual.mean, part.patterns.double() - dual.mean
                parts.append(part)
            theta = project(parts[0], price).theta
            row.append((float(parts[1].at(theta).value), float(parts[1].at(0 * theta).value)))
        losses.append(row)
    table = torch.tensor([[one for one, _ in row] for row in losses] + [[alone for _, alone in losses[0]]])
    assert k == noise.choose(table).k < math.inf
    slack = noise.slacks(k, spread.error, spread.sizes)
    torch.testing.assert_close(found.theta, project(dual, slack).theta)  # all prompts are fitted


def test_standard_errors_are_those_of_a_plain_loop():
    dual, rows, lists = problem(200)
    p = rows.log_mass.exp() @ lists.double()
    member = rows.member.double()
    centred, tilt = p - p.mean(0), member - member.mean(0)
    for a in range(2):
        for u in range(len(LISTS)):
            own = sum(float(tilt[i, a] * centred[i, u]) ** 2 for i in range(200))
            alike = float(tilt[:, a].square().mean()) * sum(float(centred[i, u]) ** 2 for i in range(200))
            assert math.isclose(float(fit.spread_of(dual, rows).error[a, u]), math.sqrt(max(own, alike)) / 200, rel_tol=1e-9)


@pytest.mark.parametrize("geometry", ["kl", "euclidean"])
@pytest.mark.parametrize("effect", [0.0, 3.0])
def test_a_promise_that_always_holds_is_no_violation(geometry: str, effect: float):
    """Of everyone, and of a list of all words, there is only rounding: it was more than its own noise, and moved groups."""
    rng = torch.Generator().manual_seed(3)
    logits, member = 2 * torch.randn(200, 12, generator=rng), torch.rand(200, 2, generator=rng) < 0.5
    member[:, 1], words = True, {"a": [0, 1], "b": [3]}
    logits[:, 1] += effect * member[:, 0]
    plain = gmc.DistributionHead(words, None, ["x"], geometry).fit(logits, member[:, :1])
    head = gmc.DistributionHead(words | {"every word": [*range(12)]}, None, ["x", "everyone"], geometry).fit(logits, member)
    assert plain.report.reached == head.report.reached == "noise" and head.report.iterations < 20
    same = bool(torch.isclose(head(logits, member), plain(logits, member[:, :1]), rtol=0, atol=1e-4).all())
    assert same or geometry == "euclidean"  # which projects words in lists apart


def test_the_unit_of_weights_does_not_deal_prompts_to_other_folds():
    rows = problem(300)[1]
    half = dataclasses.replace(rows, weight=0.37 * rows.weight)
    assert torch.equal(fit._folds(half), fit._folds(rows))
