"""One allowance for far values in all intervals at once."""

import math

import pytest
import torch

from torchgmc.audits import far
from torchgmc.audits.betting import Units
from torchgmc.audits.intervals import Rows

RATES = torch.tensor([1.0, 0.4, 0.1])


def rows(n: int, seed: int, rare: float = 0.0, known: bool = True) -> Rows:
    """s of mean 0 in [-0.25, 0.25] about everybody's mean, of which a share ``rare`` is at the end of its range, 2."""
    g = torch.Generator().manual_seed(seed)
    who = torch.rand(n, 3, generator=g) < RATES
    s = 0.1 * torch.randn(n, 1, generator=g).double().clamp(-2.5, 2.5)
    s = torch.where(torch.rand(n, 1, generator=g) < rare, 2.0, s)
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


def test_the_ends_are_the_farthest_over_all_shares_of_far_values():
    """A plain loop over e, each end by itself."""
    units, *_ = rows(600, 1).units(False)
    tail = torch.full((3,), 0.25 / 3).double()
    found = far.ends(units, tail, 0.05)
    cut = far.cuts(units, tail)
    low, high = (units.rest - cut).clamp_min(0), (units.rest + cut).clamp_max(1)
    width, delta = high - low, 0.95 * 0.05
    e = torch.linspace(0.0, -math.log(delta), far.STEPS + 1).double()
    spread = (units.variance * units.size).sqrt()
    span, reach = torch.stack([units.rest - low, high - units.rest]), torch.stack([units.rest, 1 - units.rest])
    level = far.levels(span / spread, reach / spread, e, delta)
    near = Units(
        units.size, (units.rest - low) / width, units.others, units.g, (units.a - low[units.g]) / width[units.g], units.u,
        units.cuts, units.variance / width**2,
    )  # fmt: skip
    for g in range(3):
        lows, highs = [], []
        for step in range(far.STEPS):
            p = 1 - math.exp(-float(e[step + 1]) / 600)
            own = near.ends(level[:, :, step : step + 1])[:, g, 0]
            lows.append((1 - p) * (float(low[g]) + float(width[g]) * float(own[0])))
            highs.append((1 - p) * (float(low[g]) + float(width[g]) * float(own[1])) + p)
        # a search that is made together may end one step of its grid farther out
        assert float(found[0, g]) == pytest.approx(min(lows), abs=2e-4)
        assert float(found[1, g]) == pytest.approx(max(highs), abs=2e-4)


def test_intervals_are_shorter_where_calibration_knows_and_hold_where_it_errs():
    shorter = [rows(1000, seed).judge(None, 0.05, False) for seed in range(4)]
    plain = [rows(1000, seed) for seed in range(4)]
    plain = [Rows(**(vars(one) | {"tail": None})).judge(None, 0.05, False) for one in plain]
    for mine, other in zip(shorter, plain, strict=True):
        ratio = (mine.high - mine.low) / (other.high - other.low)
        assert float(ratio.max()) < 1.12 and float(ratio[2]) < 0.9 and float(ratio.log().mean()) < 0.0
    seen = rows(1000, 5, rare=0.01).judge(None, 0.05, False)  # far values, which calibration did not have
    truth = 2.0 * 0.01 * RATES[:, None]
    assert bool(((seen.low <= truth) & (truth <= seen.high)).all())


@pytest.mark.slow
@pytest.mark.parametrize("rare", [0.002, 0.006])
def test_all_intervals_hold_at_once_whatever_the_share_of_far_values(rare: float):
    """0.8 and 2.4 far values are expected in 400 examples; in 95 % of draws, less 3 standard errors."""
    truth, held = 2.0 * rare * RATES[:, None], 0
    for seed in range(100):
        found = rows(400, 1000 + seed, rare).judge(None, 0.05, False)
        held += bool(((found.low <= truth) & (truth <= found.high)).all())
    assert held >= 100 * (0.95 - 3 * math.sqrt(0.95 * 0.05 / 100))


def test_it_is_left_out_where_it_does_not_apply():
    tail = torch.full((3,), 0.25 / 3).double()
    units, *_ = rows(200, 0).units(False)
    assert far.ends(units, tail, 0.05) is not None
    assert far.ends(rows(200, 0).units(True)[0], tail, 0.05) is None  # groups of other sizes
    assert far.ends(rows(200, 0, known=False).units(False)[0], tail, 0.05) is None
    assert far.ends(units, torch.full((3,), 0.7).double(), 0.05) is None  # calibration had far values
    assert far.ends(Units(**(vars(units) | {"jumps": True})), tail, 0.05) is None
