"""One allowance for far values in all intervals at once."""

import math
from dataclasses import replace

import pytest
import torch

from torchgmc.audits import far
from torchgmc.audits.betting import Units
from torchgmc.audits.intervals import Rows

RATES = torch.tensor([1.0, 0.4, 0.1])


def rows(n: int, seed: int, rare: float = 0.0, known: bool = True, group: int = 0) -> Rows:
    """s of mean 0 in [-0.25, 0.25], of which a share ``rare`` of everybody, all in this group, is at the end of its range, 2."""
    g = torch.Generator().manual_seed(seed)
    who = torch.rand(n, 3, generator=g) < RATES
    s = 0.1 * torch.randn(n, 1, generator=g).double().clamp(-2.5, 2.5)
    s = torch.where((torch.rand(n, 1, generator=g) < rare / RATES[group]) & who[:, group : group + 1], 2.0, s)
    variance, tail = (0.0096 * RATES.double()[:, None], torch.tensor([0.25]).double()) if known else (None, None)
    none = torch.zeros(n, 0, dtype=torch.int64)
    return Rows.of(s, who, torch.ones(n).double(), none, (-1.0, 2.0), variance=variance, tail=tail)


def test_levels_stay_within_their_budget_and_rise_with_e():
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        span, reach = torch.rand(2, 2, 5, generator=g).double() * 2
        e = torch.linspace(0.0, -math.log(0.0475), far.STEPS + 1).double()
        level = far.levels(span, span + reach, e, 0.0475)
        assert level.shape == (2, 5, far.STEPS)
        assert bool((level > 0).all()) and bool((level <= 0.9 + 1e-9).all())
        assert bool((level.diff(dim=2) >= 0).all())
        assert bool((level.sum((0, 1)) <= 0.0475 * e[:-1].exp() * (1 + 1e-9)).all())


def planned(seed: int, conditional: bool) -> tuple[Units, far.Plan]:
    """Everybody is a unit; and how ends are found."""
    units, *_ = rows(600, seed).units(conditional, True)
    plan = far.plan(units, torch.full((3,), 0.25 / 3).double(), 0.05)
    assert plan is not None and not plan.exceeded(units)
    return units, plan


def test_the_ends_are_the_farthest_over_all_shares_of_far_values():
    """Mass-weighted: a plain loop over e, with the mean of near units on their own range, and what far ones can add to it."""
    units, plan = planned(6, False)
    low, high = plan.near
    width, found = high - low, plan.ends(units)
    near = Units(
        units.size, (units.rest - low) / width, units.others, units.g, (units.a - low[units.g]) / width[units.g], units.u,
        units.cuts, units.variance / width**2,
    )  # fmt: skip
    lows, highs = [], []
    for step in range(far.STEPS):
        p = 1 - math.exp(-float(plan.e[step]) / 600)
        least, most = (1 - p) * (low + width * near.ends(plan.level[:, :, step : step + 1])[..., 0])
        lows.append(least)
        highs.append(most + p)
    # a search that is made together may end one step of its grid nearer or farther
    torch.testing.assert_close(found[0], torch.stack(lows).amin(0), atol=2e-4, rtol=0)
    torch.testing.assert_close(found[1], torch.stack(highs).amax(0), atol=2e-4, rtol=0)


@pytest.mark.parametrize("up", [True, False])
def test_a_group_is_bet_on_as_the_mass_weighted_mean_of_its_distance_to_the_hypothesis(up: bool):
    """Per group: "E[s | A] is at least c" is "E[1_A (s - c)] is at least 0", which near units may miss by the odds of far ones."""
    units, plan = planned(2, True)
    low, high = (float(end[0]) for end in plan.near)
    member, value, compared = rows(600, 2).who.double(), units.a[units.g == 0], []  # the first group is everybody, in order
    for c in torch.linspace(0.32, 0.345, 26).tolist():
        for step in (0, 5, far.STEPS - 1):
            odds, level = math.expm1(float(plan.e[step]) / 600), 0.02
            x = member * (value[:, None] - c)  # 1_A (s - c), in [low - c, high - c]
            y, rest = (x - (low - c)) / (high - low), (c - low) / (high - low)
            row, g = (member > 0).nonzero().unbind(1)
            spread = units.variance * 600 / (high - low) ** 2
            plain = Units.of(
                torch.ones(600, 1).double(), torch.zeros(3).long(), torch.full((3,), rest).double(), g, row, y[row, g], spread
            )
            shift = odds * c if up else -odds * (1 - c)
            mean = torch.full((3, 1), (shift - (low - c)) / (high - low)).double()
            one = plain.rejects(mean, torch.tensor([up]), torch.tensor([level]))
            near = replace(units, near=plan.near)
            both = near.rejects(torch.full((3, 1), c).double(), torch.tensor([up]), torch.tensor([level]), torch.tensor([odds]))
            compared.append(bool(both.any()))
            assert both.equal(one)
    assert any(compared) and not all(compared)


@pytest.mark.parametrize("conditional", [False, True])
def test_intervals_are_shorter_where_calibration_knows_and_hold_where_it_errs(conditional: bool):
    shorter = [rows(1000, seed).judge(None, 0.05, conditional) for seed in range(4)]
    plain = [rows(1000, seed) for seed in range(4)]
    plain = [Rows(**(vars(one) | {"tail": None})).judge(None, 0.05, conditional) for one in plain]
    for mine, other in zip(shorter, plain, strict=True):
        ratio = (mine.high - mine.low) / (other.high - other.low)
        assert float(ratio.max()) < 1.0 and float(ratio.log().mean()) < math.log(0.9)
    seen = rows(1000, 5, rare=0.01).judge(None, 0.05, conditional)  # far values, which calibration did not have
    truth = 2.0 * 0.01 * (torch.ones(3) if conditional else RATES)[:, None]
    assert bool(((seen.low <= truth) & (truth <= seen.high)).all())


@pytest.mark.slow
@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("group", [0, 2])
@pytest.mark.parametrize("rare", [0.002, 0.006])
def test_all_intervals_hold_at_once_whatever_the_share_of_far_values(rare: float, group: int, conditional: bool):
    """0.8 and 2.4 far values are expected in 400 examples, of all or of a tenth; in 95 % of draws, less 3 standard errors."""
    share = RATES.clone() if group == 0 else torch.where(torch.arange(3) == group, 1.0, RATES)  # of far values, in each group
    truth, held = 2.0 * rare * (share / RATES if conditional else share)[:, None], 0
    for seed in range(100):
        found = rows(400, 1000 + seed, rare, group=group).judge(None, 0.05, conditional)
        held += bool(((found.low <= truth) & (truth <= found.high)).all())
    assert held >= 100 * (0.95 - 3 * math.sqrt(0.95 * 0.05 / 100))


def test_it_is_left_out_where_it_does_not_apply():
    tail = torch.full((3,), 0.25 / 3).double()
    units, *_ = rows(200, 0).units(False)
    assert far.plan(units, tail, 0.05) is not None
    assert far.plan(rows(200, 0).units(True)[0], tail, 0.05) is None  # units are not the same
    assert far.plan(rows(200, 0, known=False).units(False)[0], tail, 0.05) is None
    assert far.plan(units, torch.full((3,), 0.7).double(), 0.05) is None  # calibration had far values
    assert far.plan(replace(units, jumps=True), tail, 0.05) is None
    weighted = replace(units, others=units.others * torch.tensor([1.0, 0.5, 0.25])[:, None, None])
    assert far.plan(weighted, tail, 0.05) is None
