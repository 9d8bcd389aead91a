"""Hall's intervals: by the formula, jointly, refused where they fail, and how often they hold."""

import pytest
import torch

from gmctest.tables import rows_of, summarize
from torchgmc.audits.asymptotic import Normal, quantile


def test_without_skewness_they_are_the_usual_ones():
    x = torch.tensor([-1.0, 1.0]).double().repeat(50)[:, None]
    normal = Normal(x, torch.tensor([0.3], dtype=torch.float64), torch.tensor([100.0]))
    assert bool(normal.fits) and quantile(0.05) == pytest.approx(1.6449, abs=1e-4)
    assert float(normal.end(1.96)) == pytest.approx(0.3 - 1.96 / 10, abs=1e-9)
    assert float(normal.end(-1.96)) == pytest.approx(0.3 + 1.96 / 10, abs=1e-9)


def test_hall_inverts_its_own_transformation():
    """t + a t^2 / 3 + a^2 t^3 / 27 + a / 6 is nearly normal; its inverse at q gives q back, unless t = q lies farther out."""
    x = torch.rand(200, 1, generator=torch.Generator().manual_seed(0)).double() ** 6
    normal = Normal(x, x.mean(0), torch.tensor([200.0]))
    halls = 0
    for q in (-2.0, 0.5, 2.0):
        t = (float(x.mean()) - float(normal.end(q))) / float(normal.error)
        a = float(normal.skew)
        back = t + a * t**2 / 3 + a**2 * t**3 / 27 + a / 6
        halls += (by_hall := back == pytest.approx(q, abs=1e-9))
        assert by_hall or (t == pytest.approx(q, abs=1e-9) and (back - q) * q > 0)
    assert halls == 1  # towards the long tail


def test_equal_columns_need_no_more_than_one():
    x = torch.randn(500, 1, generator=torch.Generator().manual_seed(0)).double()
    many = Normal(x.expand(-1, 40), torch.zeros(40).double(), torch.full((40,), 500.0))
    apart = Normal(
        torch.randn(500, 40, generator=torch.Generator().manual_seed(1)).double(), torch.zeros(40).double(), many.skew + 500
    )
    assert many.joint(0.05) == pytest.approx(1.96, abs=0.1) and apart.joint(0.05) == pytest.approx(3.2, abs=0.15)


def test_where_it_fails_the_exact_ends_are_kept_and_the_certificate_says_which():
    rng = torch.Generator().manual_seed(2)
    who = torch.rand(600, 2, generator=rng) < torch.tensor([1.0, 0.02])
    who[:3] = True
    s = torch.rand(600, generator=rng).double() - 0.4
    exact, normal = (summarize(who, s, 0.1, method=method) for method in ("exact", "asymptotic"))
    few, many = ({r["group"]: r for r in audit.rows()} for audit in (exact, normal))
    assert few["g1"]["low"] == many["g1"]["low"] and few["g1"]["bound"] == many["g1"]["bound"]
    assert many["g0"]["high"] - many["g0"]["low"] < few["g0"]["high"] - few["g0"]["low"]
    assert "asymptotic" in normal.certificate and "asymptotic" not in exact.certificate


@pytest.mark.slow
@pytest.mark.parametrize("relative", [False, True])
def test_how_often_all_hold(relative):
    """200 draws of 1,000 rows: small probabilities, as in text, against everybody's mean; or miss rates."""
    rng = torch.Generator().manual_seed(3)
    held = 0
    for _ in range(200):
        who = torch.rand(1000, 3, generator=rng) < torch.tensor([0.5, 0.3, 0.2])
        s = 0.005 * torch.rand(1000, 2, generator=rng).double() ** 2
        truth = 0.0 if relative else torch.tensor([[0.5], [0.3], [0.2]]).double() * 0.005 / 3
        found = rows_of(who, s, (0.0, 1.0), relative=relative).judge(None, 0.05, False, "asymptotic")
        held += bool(((found.low <= truth) & (truth <= found.high)).all())
    assert 0.9 * 200 <= held <= 199


@pytest.mark.parametrize("levels", [False, True])
def test_of_two_values_the_rarer_one_counts(levels):
    """20 misses among 400 values that are all other than 0 are few, whatever their skewness; 45 are enough."""
    miss = torch.tensor([20, 45]) > torch.arange(400)[:, None]  # a group each
    s = torch.cat([miss[:, 0], miss[:, 1]]).double() - 0.1
    who = torch.eye(2).bool().repeat_interleave(400, 0)
    rows = rows_of(who, s, (-0.1, 0.9), two_valued=not levels, levels=levels)
    normal = rows._normal(True, rows.estimates(True))
    assert bool((normal.skew.abs() < 0.3).all()) and normal.fits.tolist() == [False, True]
    exact, found = (rows.judge(None, 0.05, True, method) for method in ("exact", "asymptotic"))
    assert torch.equal(exact.low[0], found.low[0]) and torch.equal(exact.high[0], found.high[0])
    assert not torch.equal(exact.low[1], found.low[1])
