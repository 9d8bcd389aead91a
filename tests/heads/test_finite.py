"""Thresholds with a finite-sample guarantee: the table by brute force, the guarantee over draws, refusals, files."""

import importlib.util
import math
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.optimize import linprog

import torchgmc as gmc
from torchgmc.engine.offsets import Folded
from torchgmc.engine.pinball import Pinball, solve
from torchgmc.groups.cells import pattern_ids
from torchgmc.heads import finite


def draw(n, seed):
    rng = torch.Generator().manual_seed(seed)
    groups = torch.rand(n, 2, generator=rng) < torch.tensor([0.4, 0.5])
    return torch.randn(n, generator=rng).abs().double() * torch.exp(groups[:, 0].double() - 0.5 * groups[:, 1]), groups


def test_a_score_at_its_threshold_over_a_start_is_covered():
    """-3 + (0.3 + 3) is below 0.3: all scores of 0.3 were lost, and with them the guarantee (0.65 for 0.8)."""
    covered = []
    for seed in range(100):
        scores = (
            torch.where(torch.rand(340, generator=torch.Generator().manual_seed(seed)) < 0.3, 0.3, -0.7).double().round(decimals=1)
        )
        base = torch.full_like(scores, -3.0)
        head = gmc.QuantileHead(0.8, None, finite_sample=True).fit(scores[:40], base=base[:40])
        assert torch.equal(
            head.covers(scores, None, base), scores <= gmc.QuantileHead(0.8, None, finite_sample=True).fit(scores[:40])()
        )
        covered.append(float(head.covers(scores[40:], None, base[40:]).double().mean()))
    assert sum(covered) / 100 > 0.8


@pytest.mark.parametrize("power", [-100, 100])
def test_the_unit_of_scores_does_not_matter(power):
    """Densities of 1e-30 are scores too: a pattern that no finite threshold serves has none there either."""
    scores, groups = draw(60, 1)
    for target in (0.8, 0.96):
        head, other = (
            gmc.QuantileHead(target, None, ["a", "b"], finite_sample=True).fit(scores * s, groups) for s in (1, 2.0**power)
        )
        assert torch.equal(other.table, head.table * 2.0**power)
    assert 0 < int(head.table.isinf().sum()) < 4


def test_each_pattern_is_the_fit_with_a_phantom():
    """Solve n + 1 examples from scratch for each pattern; thresholds differ by less than the next score."""
    scores, groups = draw(150, 0)
    head = gmc.QuantileHead(0.87, None, ["a", "b"], finite_sample=True).fit(scores, groups)
    patterns = finite.all_patterns(2)
    for pattern in patterns:
        design = torch.cat([torch.ones(151, 1), torch.cat([groups, pattern[None]])], 1).double()
        one = Pinball(torch.cat([scores, torch.tensor([1e3]).double()]), torch.arange(151), design)
        weight, zero = torch.ones(1, 151).double(), torch.zeros(1, 3).double()
        theta = solve(one, weight, 0.87 * weight @ design, zero, zero.clone(), exact=1).theta[0]
        assert float(head(pattern[None])) == pytest.approx(float(design[-1] @ theta), abs=1e-4)


@settings(deadline=None, max_examples=15)
@given(
    n=st.integers(12, 40),
    groups=st.integers(1, 3),
    seed=st.integers(0, 999),
    target=st.sampled_from([0.2, 0.5, 0.8, 0.9]),  # whole numbers of examples in many groups: several minima
    coarse=st.booleans(),
    side=st.sampled_from(["covers", "covers, safe", "misses"]),
)
def test_of_several_minima_one_rule_decides(n, groups, seed, target, coarse, side):
    """The end of all minima for the pattern, by two linear programs; the same to the bit in any order of rows."""
    rng = np.random.default_rng(seed)
    member = rng.random((n, groups)) < 0.45
    scores = rng.standard_normal(n) + member @ np.arange(groups)
    scores = np.round(scores) if coarse else scores

    def table(order):
        weight = torch.ones(1, n).double()
        cell, kinds = pattern_ids(torch.tensor(member[order]))
        mass = weight.new_zeros(1, len(kinds)).index_add_(1, cell, weight)
        data = Folded(torch.tensor(scores[order]), cell, weight, mass, kinds, n)
        return finite.phantom_thresholds(data, target, finite.all_patterns(groups), "covers" in side, "safe" in side)

    found = table(np.arange(n))
    assert torch.equal(found, table(rng.permutation(n)))
    for pattern, lam in zip(finite.all_patterns(groups).numpy()[-3:], found.tolist()[-3:], strict=True):
        end = end_of_minima(scores, member, pattern, target, side)
        assert math.isinf(lam) if end is None else lam == pytest.approx(end, abs=1e-6)


def end_of_minima(scores, member, pattern, target, side):
    """Smallest (for safe coverage largest) threshold of the pattern over all minima, None if it is not bounded."""
    n = len(scores)
    x, row = np.c_[np.ones(n), member], np.r_[1.0, pattern]
    cost = np.r_[-target * x.sum(0) - (target - (side == "misses")) * row, np.ones(n)]
    over, bounds = np.c_[x, -np.eye(n)], [(None, None)] * len(row) + [(0, None)] * n
    fine = {"bounds": bounds, "options": {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}}
    least = linprog(cost, over, scores, **fine)
    if least.status != 0:
        return None
    way = (-1 if side == "covers, safe" else 1) * np.r_[row, np.zeros(n)]
    end = linprog(way, np.r_[over, cost[None]], np.r_[scores, least.fun + 1e-9], **fine)
    return float(row @ end.x[: len(row)]) if end.status == 0 else None


@pytest.mark.slow
def test_every_group_is_covered_on_average():
    """300 draws at n = 60: mean coverage of each group, from the known law, at least 0.8 less 3 standard errors."""
    patterns = finite.all_patterns(2)
    scale = torch.exp(patterns[:, 0].double() - 0.5 * patterns[:, 1])
    chance = torch.where(patterns, torch.tensor([0.4, 0.5]), torch.tensor([0.6, 0.5])).prod(1).double()
    inside = torch.cat([patterns, torch.ones(4, 1, dtype=torch.bool)], 1).double() * chance[:, None]
    found = []
    for seed in range(300):
        head = gmc.QuantileHead(0.8, None, ["a", "b"], finite_sample=True).fit(*draw(60, seed))
        covered = torch.erf(head(patterns) / scale / math.sqrt(2))
        found.append((inside * covered[:, None]).sum(0) / inside.sum(0))
    table = torch.stack(found)
    assert bool((table.mean(0) >= 0.8 - 3 * table.std(0) / 300**0.5).all())


def test_groups_too_small_are_named_with_what_they_need():
    scores, groups = draw(100, 1)
    groups[:, 1] = False
    groups[:5, 1] = True
    report = gmc.QuantileHead(0.9, None, ["a", "rare"], finite_sample=True).fit(scores, groups).report
    assert report.details["small"] == ["rare"] and "'rare'" in report.message and "at least 9 examples" in report.message


def test_what_breaks_exchangeability_is_refused():
    scores, groups = draw(50, 2)
    head = gmc.QuantileHead(0.8, None, ["a", "b"], finite_sample=True)
    with pytest.raises(ValueError, match="cannot be used with weights or clusters"):
        head.fit(scores, groups, weight=torch.arange(1.0, 51.0))
    with pytest.raises(ValueError, match="cannot be used with weights or clusters"):
        head.fit(scores, groups, clusters=torch.arange(50) // 2)
    with pytest.raises(ValueError, match="`bins`"):
        gmc.QuantileHead(0.8, None, ["a"], bins=3, finite_sample=True)
    with pytest.raises(ValueError, match="not one of the groups"):
        gmc.QuantileHead(0.8, None, ["a"], finite_sample=True, patterns=[["c"]])


def test_a_pattern_that_is_not_in_the_table_gets_the_safe_end(tmp_path):
    rng = torch.Generator().manual_seed(3)
    names = [f"g{k}" for k in range(10)]
    groups = torch.rand(200, 10, generator=rng) < 0.3
    scores = torch.randn(200, generator=rng).double()
    head = gmc.QuantileHead(0.8, None, names, finite_sample=True, patterns=[["g0"]]).fit(scores, groups)
    asked, never = torch.zeros(2, 1, 10, dtype=torch.bool)
    asked[0, 0], never[0, :9] = True, True
    assert math.isfinite(float(head(asked))) and math.isinf(float(head(never)))
    gmc.save(head, tmp_path / "head.safetensors")
    assert torch.equal(gmc.load(tmp_path / "head.safetensors")(groups), head(groups))
    assert torch.equal(torch.jit.script(head)(groups), head(groups))


@pytest.mark.parametrize("risk", ["fnr", "fpr"])
def test_masks_stay_below_the_target_on_average(risk):
    """60 draws of 80 images: mean risk on fresh images at most the target plus 3 standard errors, of every group."""
    found = []
    for seed in range(60):
        rng = torch.Generator().manual_seed(seed)
        masks = torch.rand(280, 16, generator=rng) < 0.5
        masks[:, 0], masks[:, 1] = True, False
        dark = torch.rand(280, 1, generator=rng) < 0.4
        scores = torch.sigmoid(2.5 * masks + torch.randn(280, 16, generator=rng) - 1.2 - 0.8 * dark)
        head = gmc.ThresholdHead(0.15, None, ["dark"], risk=risk, finite_sample=True).fit(scores[:80], masks[:80], dark[:80])
        out, truth = head(scores[80:], dark[80:]), masks[80:]
        wrong, relevant = (truth & ~out, truth) if risk == "fnr" else (~truth & out, ~truth)
        rate = wrong.sum(1) / relevant.sum(1)
        found.append(torch.stack([rate[dark[80:, 0]].mean(), rate.mean()]))
    table = torch.stack(found)
    assert bool((table.mean(0) <= 0.15 + 3 * table.std(0) / 60**0.5).all())


@pytest.mark.parametrize("peer", ["mapie", "crepes", "torchcp", "rank"])
@pytest.mark.parametrize("target", [0.5, 0.8, 0.9, 0.95])
def test_one_group_is_at_the_rank_of_other_packages(peer, target):
    """MAPIE's, crepes' and TorchCP's threshold where they are installed, and ceil((n + 1) target) by hand."""
    if peer != "rank" and importlib.util.find_spec(peer) is None:
        pytest.skip(f"{peer} is not installed")
    for n in (20, 33, 50, 101, 333):
        scores = torch.rand(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
        ours = gmc.QuantileHead(target, None, finite_sample=True).fit(scores)(torch.ones(1, 1, dtype=torch.bool)).item()
        assert ours == peer_threshold(peer, scores, target)


def peer_threshold(peer, scores, target):
    if peer == "crepes":
        from crepes import ConformalRegressor

        return float(ConformalRegressor().fit(residuals=scores.numpy()).predict_int([0.0], confidence=target)[0, 1])
    if peer == "mapie":
        from mapie.regression import SplitConformalRegressor
        from sklearn.dummy import DummyRegressor

        zero = DummyRegressor(strategy="constant", constant=0.0).fit([[0.0]], [0.0])
        fitted = SplitConformalRegressor(zero, confidence_level=target, prefit=True)
        fitted.conformalize([[0.0]] * len(scores), scores.numpy())
        return float(fitted.predict_interval([[0.0]])[1].reshape(-1)[1])
    if peer == "torchcp":  # the file by itself: the whole package needs others that it does not install
        where = Path(importlib.util.find_spec(peer).origin).parent / "utils" / "common.py"
        return float(runpy.run_path(str(where))["calculate_conformal_value"](scores, 1 - target))
    return float(scores.sort().values[math.ceil(round((len(scores) + 1) * target, 9)) - 1])
