"""Betting on all g at once, against one bet at a time; and how often a true hypothesis is rejected."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats

from gmctest.oracles import bet
from torchgmc.audits import betting
from torchgmc.audits.betting import Histogram, Units


def units_of(y, u=None, rest=0.0, spread=None, jumps=False):
    """Every value an event of its own sequence, unless it equals the rest."""
    u = torch.ones_like(y) if u is None else u
    row, g = (y != rest * u).nonzero().unbind(1)
    count = y.shape[1]
    return Units.of(u, torch.arange(count), torch.full((count,), rest).double(), g, row, y[row, g], spread, jumps)


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(0, 150),
    seed=st.integers(0, 10_000),
    mean=st.floats(0.02, 0.98),
    up=st.booleans(),
    level=st.sampled_from([0.3, 0.05, 0.001]),
    weighted=st.booleans(),
    known=st.sampled_from([0.0, 0.001, 0.05]),
    jumps=st.booleans(),
)
def test_rejections_by_the_loop(n, seed, mean, up, level, weighted, known, jumps):
    rng = torch.Generator().manual_seed(seed)
    u = torch.rand(n, 2, generator=rng).double() * 0.9 + 0.1 if weighted else torch.ones(n, 2).double()
    y = torch.rand(n, 2, generator=rng).double()
    y = torch.stack([y[:, 0].round(), y[:, 1] ** 2], 1)
    y = torch.where(torch.rand(n, 2, generator=rng) < 0.4, 0.25, y)
    units = units_of(u * y, u, 0.25, torch.tensor([0.0, n * known]).double(), jumps)
    found = units.rejects(torch.full((2, 1), mean).double(), torch.tensor([up]), torch.tensor([level]))
    for g in range(2):
        events = (u * y)[:, g] != 0.25 * u[:, g]
        listed = list(zip((u * y)[:, g].tolist(), u[:, g].tolist(), events.tolist(), strict=True))
        prior = (betting.PRIOR, known) if g == 1 and known else (betting.VAGUE, math.inf)
        assert bool(found[g, 0]) == bet(listed, mean, up, level, betting.BLOCKS, betting.MOST, *prior, jumps, 0.25, betting.AIM)


def test_ends_are_where_rejections_begin_and_never_inside():
    rng = torch.Generator().manual_seed(1)
    y = torch.rand(400, 3, generator=rng).double() ** torch.tensor([1.0, 4.0, 12.0])
    units, levels = units_of(y), torch.tensor([0.05, 0.002])
    low, high = units.ends(levels)
    for k, level in enumerate(levels):
        for side, end in ((True, low[:, k : k + 1]), (False, high[:, k : k + 1])):
            inward = (y.mean(0)[:, None] - end) * 0.01
            assert bool(units.rejects(end, torch.tensor([side]), level[None]).all())
            assert not bool(units.rejects(end + inward, torch.tensor([side]), level[None]).all())
    assert bool((low[:, 1] <= low[:, 0]).all() and (high[:, 1] >= high[:, 0]).all() and (low < high).all())


def test_quick_ends_are_rejected_by_their_own_bets_and_a_little_wider():
    y = torch.rand(400, 3, generator=torch.Generator().manual_seed(1)).double() ** torch.tensor([1.0, 4.0, 12.0])
    units, level = units_of(y), torch.tensor([0.01])
    quick, (low, high) = units.quick(), units.ends(level)
    least, most = quick.ends(level)
    assert bool(quick.rejects(least, torch.tensor([True]), level).all())
    assert bool(quick.rejects(most, torch.tensor([False]), level).all())
    wider = (most - least) / (high - low)
    assert bool((wider > 0.98).all()) and bool((wider < 1.15).all())


def test_nothing_seen_says_nothing_and_means_beyond_the_range_are_rejected():
    empty = units_of(torch.zeros(0, 1).double())
    assert empty.ends(torch.tensor([0.05])).flatten().tolist() == [0.0, 1.0]
    mean = torch.tensor([[-0.1, 0.5, 1.1]]).double()
    for up, expected in ((True, [True, False, False]), (False, [False, False, True])):
        assert empty.rejects(mean, torch.tensor([up] * 3), torch.tensor([0.05] * 3)).tolist() == [expected]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["rare", "jumps", "skewed", "clusters"])
def test_a_true_hypothesis_is_rejected_no_more_often_than_allowed(shape):
    """4,000 sequences of 300 with the mean exactly at the hypothesis; also not far below the level, or power is lost."""
    rng = torch.Generator().manual_seed(3)
    n, draws, level = 300, 4000, 0.1
    y, u, mean = (torch.rand(n, draws, generator=rng) < 0.05).double(), None, 0.05
    if shape == "skewed":
        y, mean = torch.rand(n, draws, generator=rng).double() ** 8, 1 / 9
    if shape == "clusters":  # of 1 to 4 equal values each
        u = torch.randint(1, 5, (n, draws), generator=rng).double() / 4
        y = u * (torch.rand(n, draws, generator=rng) < 0.2).double()
        mean = 0.2
    found = units_of(y, u, jumps=shape == "jumps").rejects(
        torch.full((draws, 2), mean).double(), torch.tensor([True, False]), torch.tensor([level] * 2)
    )
    share = found.double().mean(0)
    assert bool((share <= level + 3 * (level * (1 - level) / draws) ** 0.5).all()) and float(share.max()) >= 0.05, share


@pytest.mark.parametrize("known", [0.0, 0.01])
def test_a_histogram_rejects_what_the_product_of_fixed_bets_does_and_no_more(known):
    rng = torch.Generator().manual_seed(4)
    y = torch.rand(3000, generator=rng).double() ** 6  # mean 1/7
    nodes = betting.NODES
    left = (y * nodes).long().clamp_max(nodes - 1)
    table = torch.zeros(nodes + 1).double().index_add(0, left, left + 1 - y * nodes).index_add(0, left + 1, y * nodes - left)
    told = Histogram(table[:, None], torch.tensor([known]).double())
    means = torch.linspace(0.11, 0.18, 30).double()
    for up in (True, False):
        exact = []
        for m in means.tolist():
            spread = (known or 0.25) * len(y)
            wide = [c if known else 4 * c * c for c in betting.SHARES]
            bets = [min(c * math.sqrt(2 * math.log(20) / spread), 0.95 / (m if up else 1 - m)) for c in wide]
            gains = [float(torch.log1p((b if up else -b) * (y - m)).sum()) for b in bets]
            exact.append(torch.tensor(gains).logsumexp(0) - math.log(len(bets)) >= math.log(20))
        found = told.rejects(means[None], torch.full((30,), up), torch.full((30,), 0.05))[0].tolist()
        assert any(found) and not all(found) and sum(found) >= sum(exact) - 1
        assert all(e for f, e in zip(found, exact, strict=True) if f)
    low, high = told.ends(torch.tensor([0.05])).flatten().tolist()
    assert low < float(y.mean()) < high < low + 0.03


def poisson(count: int, level: float) -> float:
    """The mean at which at most so many are seen with this probability."""
    return float(stats.gamma.isf(level, count + 1))


@pytest.mark.parametrize("level", [1e-2, 1e-4])
@pytest.mark.parametrize("rest", [0.0, 1.0])
def test_few_jumps_are_judged_as_by_the_exact_test_of_their_number(level: float, rest: float):
    """300 samples of 4,000 units with 0 to 30 jumps: no end is 5 % beyond Poisson's, and their mean is not 2 %."""
    rng = torch.Generator().manual_seed(2)
    n, mean = 4000, torch.tensor([0.3, 1.0, 4.0, 16.0]).double().repeat_interleave(75)
    count = torch.poisson(mean, generator=rng).long()
    g = torch.arange(300).repeat_interleave(count)
    row = torch.randint(n, (len(g),), generator=rng)
    events = torch.full((len(g),), 1.0 - rest).double()
    which, rests = torch.zeros(300).long(), torch.full((300,), rest).double()
    units = Units.of(torch.ones(n, 1).double(), which, rests, g, row, events, mean, True)
    far = units.ends(torch.tensor([level]))[0 if rest else 1, :, 0]
    found = n * (far - rest).abs()
    exact = torch.tensor([poisson(k, level) for k in count.tolist()]).double()
    ratio = found / exact
    assert float(ratio.mean()) < 1.02 and float(ratio.max()) < 1.05


def test_a_price_after_a_jump_is_that_of_one_jump_less():
    """Against probabilities of Poisson's law, whose number of jumps is taken as continuous."""
    a, left = torch.meshgrid(torch.tensor([1.5, 3.0, 10.0, 80.0]).double(), torch.tensor([4.0, 12.0, 70.0]).double(), indexing="ij")
    before, after = (torch.from_numpy(stats.norm.ppf(stats.gamma.sf(left, a - k))) for k in (0.0, 1.0))
    inside = (before.abs() < 5) & (after.abs() < 6)
    found = betting._after_jump(before, left, torch.ones_like(left))
    assert int(inside.sum()) >= 5
    torch.testing.assert_close(found[inside], after[inside], atol=0.2, rtol=0.0)


def test_shares_make_the_sum_of_powers_of_lengths_least_and_depend_on_nothing_of_the_data():
    """Against a plain search: no shift of delta from one end to another makes it less; unknown variances: all equal."""
    n, delta = 400, 0.05
    rows, variance = (
        torch.rand(n, 3, generator=torch.Generator().manual_seed(0)).double(),
        torch.tensor([0.2, 0.01, 1e-4]).double(),
    )

    def units(values: torch.Tensor, spread: torch.Tensor | None) -> betting.Units:
        row, g = (values > 0).nonzero().unbind(1)
        rest = torch.tensor([0.5, 0.1, 0.1]).double()
        return betting.Units.of(torch.ones(n, 1).double(), torch.zeros(3).long(), rest, g, row, values[row, g], spread)

    torch.testing.assert_close(units(rows, None).shares(delta), torch.full((2, 3), 1 / 6, dtype=torch.float64))
    found = units(rows, n * variance).shares(delta)
    assert found.equal(units(rows.square(), n * variance).shares(delta)) and float(found.sum()) == pytest.approx(1)
    assert float(found[1, 2]) > 2 * float(found[0, 0])  # rare and far beside common and near
    span = torch.tensor([[0.5, 0.1, 0.1], [0.5, 0.9, 0.9]]).double() / (n * variance).sqrt()
    unit = ((n * variance).sqrt() / betting.LEAST).clamp_max(1.0)

    def worst(parts: torch.Tensor) -> float:
        return float((unit * betting.expected(delta * parts, span).sum(0)).pow(betting.POWER).sum().pow(1 / betting.POWER))

    least = worst(found)
    for a in range(6):
        for b in range(6):
            moved = found.flatten().clone()
            moved[a], moved[b] = moved[a] + 0.02 * (a != b), moved[b] - 0.02 * (a != b)
            if bool((moved > 0).all()):
                assert worst(moved.view(2, 3)) >= least - 2e-3


@pytest.mark.parametrize("rest", [0.0, 0.1, 0.9, 1.0])
@pytest.mark.parametrize("n", [30, 300])
def test_jumps_are_bet_on_up_to_the_ends_of_the_range(n: int, rest: float, monkeypatch):
    """Of two values, seen never, sometimes or always: no capital is NaN, and what is rejected is what lies far enough away."""
    plain, found = torch.log1p, []

    def watched(x: torch.Tensor) -> torch.Tensor:
        found.append(plain(x))
        return found[-1]

    monkeypatch.setattr(torch, "log1p", watched)
    y = (torch.arange(n)[:, None] * 7 % n < torch.tensor([0, n // 10, n // 2, n])).double()
    units, near = units_of(y, rest=rest, jumps=True), torch.tensor([0.0, 1e-12, 1e-9, 1e-7, 1e-5, 1e-3, 0.1]).double()
    mean = torch.cat([near, torch.linspace(0.2, 0.8, 13).double(), 1 - near.flip(0)]).expand(4, -1)
    for up in (True, False):
        rejected = units.rejects(mean, torch.full((mean.shape[1],), up), torch.full((mean.shape[1],), 0.05))
        rejected = rejected if up else rejected.flip(1)
        assert bool((rejected.long().diff(dim=1) <= 0).all())  # from the far end on, then no more
        assert bool(rejected[2, 0]) and not bool(rejected[0 if up else 3].any())
    low, high = units.ends(torch.tensor([0.05]))[..., 0]
    assert float(high[2]) < 0.8 and float(low[2]) > 0.2 and float(high[0]) < 0.13 and float(low[3]) > 0.87
    assert not any(bool(part.isnan().any()) for part in found)


@pytest.mark.parametrize("up", [True, False])
def test_no_bet_is_on_the_hypothesis(up: bool, monkeypatch):
    """Capital that was nearly lost, where H is true by far, is not won back by bets on H: then it could grow under H."""
    plain, bets = torch.log1p, []
    monkeypatch.setattr(torch, "log1p", lambda x: (bets.append(x.double()), plain(x))[1])
    y = (torch.rand(3000, 50, generator=torch.Generator().manual_seed(0)) < 0.1).double()
    units = units_of(1.0 - y if up else y, rest=float(up), jumps=True)  # most units are at the rest, which is what H denies
    units.rejects(torch.full((50, 1), 0.95 if up else 0.05).double(), torch.tensor([up]), torch.tensor([0.05]))
    of_rest = [x for x in bets if x.shape == (50, 1)]
    assert len(of_rest) >= betting.BLOCKS and all(bool((x >= 0).all()) for x in of_rest)
