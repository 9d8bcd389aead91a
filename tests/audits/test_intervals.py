"""From rows to verdicts: units by the loop, the order of rows, labels by their tests, coverage and width, clusters."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

import torchgmc as gmc
from gmctest.oracles import bet
from gmctest.tables import rows_of, summarize
from torchgmc.audits import betting, intervals


def draw(n, seed, columns=1, holes=False):
    rng = torch.Generator().manual_seed(seed)
    who, s = torch.rand(n, 2, generator=rng) < 0.4, torch.rand(n, columns, generator=rng).double() - 0.4
    s = torch.where(torch.rand(n, columns, generator=rng) < 0.3, 0.0, s)
    if holes:
        s[torch.rand(n, columns, generator=rng) < 0.2] = torch.nan
    return who, s, torch.randint(0, max(n // 3, 1), (n,), generator=rng), torch.rand(n, generator=rng).double() + 0.1


def plain_units(rows, group, column, conditional):
    """(A, U, event) of each cluster in the order of the rows (of the ids, with clusters), by a loop."""
    low, high = float(rows.bounds[0][column]), float(rows.bounds[1][column])
    found = {}
    for i in range(len(rows.s)):
        if not rows.counts[i, column] or (conditional and not rows.who[i, group]):
            continue
        key = int(rows.cluster[i, 0]) if rows.cluster.shape[1] else i
        x = float(rows.s[i, column]) * bool(rows.who[i, group])
        total = found.setdefault(key, [0.0, 0.0])
        total[0] += float(rows.weight[i]) * x
        total[1] += float(rows.weight[i])
    keys = sorted(found)
    return [(found[k][0], found[k][1]) for k in keys], low, high


@settings(deadline=None, max_examples=30)
@given(
    n=st.integers(1, 60),
    seed=st.integers(0, 9999),
    conditional=st.booleans(),
    columns=st.integers(1, 2),
    holes=st.booleans(),
    weighted=st.booleans(),
    clustered=st.booleans(),
    mean=st.floats(-0.35, 0.55),
)
def test_what_is_bet_on_by_the_loop(n, seed, conditional, columns, holes, weighted, clustered, mean):
    who, s, cluster, weight = draw(n, seed, columns, holes)
    rows = rows_of(who, s, (-0.4, 0.6), weight if weighted else None, cluster if clustered else None)
    units, low, high = rows.units(conditional)
    place = (mean - low[:1]) / (high - low)[:1]
    for up in (True, False):
        found = units.rejects(place.expand(len(low), 1), torch.tensor([up]), torch.tensor([0.3]))
        for g in range(2 * columns):
            listed, bottom, top = plain_units(rows, g // columns, g % columns, conditional)
            others = [u for k in range(columns) for a in range(2) for _, u in plain_units(rows, a, k, conditional)[0]]
            most = max(others, default=1.0)
            triples = [((x - bottom * u) / (top - bottom) / most, u / most, x != 0) for x, u in listed]
            expected = bet(triples, float(place), up, 0.3, betting.BLOCKS, betting.MOST, betting.VAGUE, aim=betting.AIM)
            assert bool(found[g, 0]) == expected


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 999), conditional=st.booleans(), weighted=st.booleans(), relative=st.booleans())
def test_the_order_of_the_rows_changes_nothing(seed, conditional, weighted, relative):
    who, s, cluster, weight = draw(80, seed)
    who[:2] = True
    order = torch.randperm(80, generator=torch.Generator().manual_seed(seed))
    bounds = (-0.4, 0.6)
    for clusters in (None, cluster):
        options = {"relative": relative}
        one = rows_of(who, s, bounds, weight if weighted else None, clusters, **options)
        again = rows_of(
            who[order],
            s[order],
            bounds,
            weight[order] if weighted else None,
            None if clusters is None else cluster[order],
            **options,
        )
        first, second = (rows.judge(0.1, 0.05, conditional) for rows in (one, again))
        for name in ("estimate", "low", "high", "bound", "verdict"):
            torch.testing.assert_close(getattr(first, name), getattr(second, name), rtol=0, atol=1e-12)


def test_equal_rows_are_spread_out():
    """A hash order would put equal values side by side, which broke betting on few distinct values."""
    s = torch.tensor([0.6] * 100 + [-0.4] * 100).double()
    rows = rows_of(torch.ones(200, 1).bool(), s, (-0.4, 0.6))
    longest = max(len(run) for run in "".join("x" if v > 0 else " " for v in rows.s[:, 0].tolist()).split())
    assert longest < 20


def test_verdicts():
    who = torch.ones(20_000, 1).bool()
    holds = summarize(who, torch.zeros(20_000).double(), 0.1)
    assert holds.table["verdict"] == ["holds"] and holds.certified and holds.holds and not holds.violated
    violated = summarize(who, torch.full((20_000,), 0.3).double(), 0.1)
    assert violated.table["verdict"] == ["violated"] and violated.violated and not violated.holds and not violated.certified
    few = summarize(who[:10], torch.zeros(10).double(), 0.1)
    assert few.table["verdict"] == ["undecided"] and few.holds and not few.certified
    assert "95 %" in few.certificate and few.certified_alpha > 0.1


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 9999), n=st.integers(50, 400), alpha=st.floats(0.01, 0.3), conditional=st.booleans())
def test_labels_are_those_of_the_tests_at_alpha(seed, n, alpha, conditional):
    rng = torch.Generator().manual_seed(seed)
    who = torch.rand(n, 3, generator=rng) < torch.tensor([0.9, 0.5, 0.2])
    who[0] = True
    s = torch.rand(n, generator=rng).double() ** 3 - 0.4 + 0.4 * who[:, 2]
    rows = rows_of(who, s, (-0.4, 1.0))
    found = rows.judge(alpha, 0.1, conditional)
    units, low, high = rows.units(conditional)

    def rejected(m, up, level):
        return units.rejects(((m - low) / (high - low))[:, None], torch.tensor([up]), torch.tensor([level]))[:, 0]

    certified = rejected(alpha, False, 0.1) & rejected(-alpha, True, 0.1)
    holds = rejected(alpha, False, 0.1 / 3) & rejected(-alpha, True, 0.1 / 3)
    violated = rejected(alpha, True, 0.1 / 6) | rejected(-alpha, False, 0.1 / 6)
    assert (found.bound[:, 0] <= alpha).tolist() == certified.tolist()
    assert found.verdict[:, 0].tolist() == torch.where(violated, 2, holds.long()).tolist()
    assert bool((found.low <= found.estimate).all() and (found.estimate <= found.high).all())
    assert bool((found.bound >= found.estimate.abs()).all())


def test_covered_or_not_is_judged_by_the_binomial_law():
    beta = pytest.importorskip("scipy.stats").beta
    scores, groups = torch.rand(400, generator=torch.Generator().manual_seed(0)), torch.zeros(400, 2).bool()
    groups[:, 0], groups[:30, 1] = True, True
    head = gmc.QuantileHead(0.9, 0.05, ["all", "few"], conditional=True).fit(torch.rand(500), torch.ones(500, 2).bool())
    audit = head.audit(scores, groups, delta=0.1)
    for row in audit.rows():
        inside = groups[:, ["all", "few"].index(row["group"])]
        n, k = int(inside.sum()), round(row["risk"] * int(inside.sum()))
        share = 0.1 / (2 * len(audit.rows()))
        assert row["low"] == pytest.approx(beta.ppf(share, k, n - k + 1) - 0.9, abs=1e-5)
        assert row["high"] == pytest.approx((beta.ppf(1 - share, k + 1, n - k) if k < n else 1.0) - 0.9, abs=1e-5)


def test_weights_shift_the_estimate():
    audit = summarize(torch.ones(2, 1).bool(), torch.tensor([0.5, 0.0]).double(), 0.1, weight=torch.tensor([3.0, 1.0]))
    assert audit.table["estimate"] == [pytest.approx(0.375)]


def population(shape, draws, n, rng):
    """who (draws, n, 4), s (draws, n), mean of s in each group and mass of each group, known exactly."""
    u, x = torch.rand(draws, n, 1, generator=rng), torch.rand(draws, n, generator=rng).double()
    if shape == "rare groups":  # disjoint, 1 % and 3 % of the examples, each with a mean of its own
        edges, means = torch.tensor([0.0, 0.01, 0.04, 0.5, 1.0]), torch.tensor([0.3, 0.05, 0.1, 0.2]).double()
        who = (u >= edges[:-1]) & (u < edges[1:])
        return who, (x < means[who.long().argmax(2)]).double() - 0.1, means - 0.1, edges.diff().double()
    rates = torch.tensor([1.0, 0.5, 0.25, 0.05])
    if shape == "overlapping":  # nested, the mean rises to the inside: P(s = 1 | u) = 1 - u
        return u < rates, (x < 1 - u[..., 0].double()).double() - 0.1, 0.9 - rates.double() / 2, rates.double()
    who = torch.rand(draws, n, 4, generator=rng) < rates  # "skewed": most s near 0, few near 1
    return who, x**8 - 1 / 9, torch.zeros(4).double(), rates.double()


@pytest.mark.slow
@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("shape", ["rare groups", "skewed", "overlapping"])
def test_coverage_and_width(shape, conditional):
    """160 draws of 2,000, truth known: all intervals hold at once in at least 95 % of draws (less 3 standard errors),
    and are not needlessly wide beside an oracle's, who knows the joint law of the errors. The worst g is bounded too."""
    rng = torch.Generator().manual_seed(4)
    bottom = 1 / 9 if shape == "skewed" else 0.1
    who, s, means, masses = population(shape, 160, 2000, rng)
    truth = means if conditional else means * masses
    judged = [
        rows_of(who[i], s[i], (-bottom, 1 - bottom), two_valued=shape != "skewed").judge(None, 0.05, conditional)
        for i in range(160)
    ]
    estimate, low, high, bound = (torch.stack([getattr(j, k)[:, 0] for j in judged]) for k in ("estimate", "low", "high", "bound"))
    held = float(((low <= truth) & (truth <= high)).all(1).double().mean())
    worst = float((bound.amax(1) >= truth.abs().max()).double().mean())
    assert held >= 0.95 - 0.052 and worst >= 0.95 - 0.052
    error = (estimate - truth).abs()
    spread = error.square().mean(0).sqrt()
    oracle = float((error / spread).amax(1).quantile(0.95)) * spread
    ratio = ((high - low) / 2).mean(0) / oracle
    print(f"{shape}, conditional={conditional}: all {held:.3f}, worst {worst:.3f}, width {[round(r, 2) for r in ratio.tolist()]}")
    assert float(ratio.median()) <= 1.35 and float(ratio.max()) <= 2.0


@pytest.mark.slow
def test_clusters_keep_the_coverage_that_is_lost_without():
    """10 equal values per cluster: intervals that take them for independent fail, those of clusters hold."""
    rng = torch.Generator().manual_seed(5)
    held, naive = 0, 0
    for k in range(200):
        x = (torch.rand(200, generator=rng) < 0.2).double().repeat_interleave(10) - 0.2
        who, ids = torch.ones(2000, 1).bool(), torch.arange(200).repeat_interleave(10)
        found = rows_of(who, x, (-0.2, 0.8), cluster=ids).judge(None, 0.05, False)
        held += bool(found.low <= 0 <= found.high)
        if k < 60:  # enough to see that it fails
            found = rows_of(who, x, (-0.2, 0.8)).judge(None, 0.05, False)
            naive += bool(found.low <= 0 <= found.high)
    assert held >= 0.95 * 200 - 10 and naive < 0.7 * 60


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 9999), conditional=st.booleans())
def test_pairs_of_a_relative_promise(seed, conditional):
    """Of all pairs, what is bet on has the mean P(A) (E[s | A] - E[s]) (over P(A), conditional), without bias."""
    rng = torch.Generator().manual_seed(seed)
    who, s = torch.rand(6, 2, generator=rng) < 0.5, torch.rand(6, 1, generator=rng).double()
    who[:2] = torch.tensor([[True, False], [False, True]])
    size = value = torch.zeros(2).double()
    for i in range(6):
        for j in range(6):
            rows = rows_of(who[[i, j]], s[[i, j]], (0.0, 1.0), relative=True)
            which, (pair, _, g, x) = rows._sizes(conditional)[1], rows._pairs(conditional)
            size = size + pair[0, which]
            value = value.index_add(0, g, x)
    p = who.double().mean(0)
    truth = (who.double() * s).mean(0) - p * s.mean()
    torch.testing.assert_close(value / size, truth / p if conditional else truth)


@pytest.mark.parametrize("conditional", [False, True])
def test_of_very_many_rows_a_histogram_is_kept_whatever_their_order(conditional, monkeypatch):
    rng = torch.Generator().manual_seed(5)
    who = torch.rand(3000, 3, generator=rng) < torch.tensor([1.0, 0.4, 0.1])
    s = torch.rand(3000, 2, generator=rng).double() ** 4 - 0.2
    s[:100, 1] = math.nan
    usual = rows_of(who, s, (-0.2, 0.8)).judge(0.05, 0.05, conditional)
    monkeypatch.setattr(intervals, "MOST_ROWS", 2999)
    order = torch.randperm(3000, generator=rng)
    first, second = (rows_of(who[o], s[o], (-0.2, 0.8)).judge(0.05, 0.05, conditional) for o in (order, order.sort().values))
    for one, two in zip(vars(first).values(), vars(second).values(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-9, rtol=0)
    torch.testing.assert_close(first.estimate, usual.estimate)
    ratio = (first.high - first.low) / (usual.high - usual.low)
    assert float(ratio.min()) > 0.9 and float(ratio.max()) < 1.6  # fixed bets are a little wider
    assert rows_of(who, s, (-0.2, 0.8)).needed(0.2, 0.05, conditional, 0.8) is not None


@pytest.mark.parametrize("n", [40, 200, 2000])
def test_few_units_lose_little_by_few_blocks(n: int) -> None:
    """Intervals of ``at_once`` hold their estimate and are hardly wider than those of 64 blocks, whatever the number of units."""
    g = torch.Generator().manual_seed(n)
    s, who = torch.rand(n, 2, generator=g).double() * 2 - 1, torch.rand(n, 3, generator=g) < torch.tensor([0.2, 0.5, 1.0])
    rows = intervals.Rows.of(s, who, torch.ones(n).double(), torch.zeros(n, 0, dtype=torch.int64), (-1.0, 1.0))
    estimate, low, high = rows.at_once(0.1)
    assert bool(((low <= estimate) & (estimate <= high) & (low >= -1) & (high <= 1)).all())
    tests, least, most = rows._tests(True)
    ends = tests.quick().ends(torch.full((2, 6, 1), 0.05 / 6, dtype=torch.float64))
    many = ((most - least)[:, None] * (ends[1] - ends[0])).view_as(estimate)
    assert bool(((high - low) <= 1.06 * many).all())


def scaled(factor, known=False, equal=False, n=300, clustered=False, two=False, **options):
    """Rows whose weights are multiplied by this; ``known``: variances of other data."""
    who, s, cluster, weight = draw(n, 3, 1, holes=not options.get("relative"))
    who[:20] = True
    s = torch.where(s > 0, 0.6, torch.where(s <= 0, -0.4, s)) if two else s
    weight = torch.ones_like(weight) if equal else weight
    more = {"variance": torch.tensor([[0.03], [0.02]]).double(), "tail": torch.tensor([0.5]).double()} if known else {}
    return rows_of(who, s, (-0.4, 0.6), factor * weight, cluster if clustered else None, two_valued=two, **more, **options)


def same(one, two):
    for first, second in zip(vars(one).values(), vars(two).values(), strict=True):
        torch.testing.assert_close(first, second, atol=1e-9, rtol=0)


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("equal", [False, True])
def test_weights_count_relative_to_their_mean(equal, known, conditional):
    """Three times the weights, or a tenth, are the same weights: intervals, bounds and verdicts do not change."""
    for kind in ({}, {"two": True}, {"relative": True}, {"clustered": True}):
        for factor, method in ((3.0, "exact"), (0.1, "asymptotic")):
            same(*(scaled(f, known, equal, 120, **kind).judge(0.1, 0.05, conditional, method) for f in (1.0, factor)))


@pytest.mark.parametrize("conditional", [False, True])
def test_histograms_do_not_depend_on_the_scale_of_weights(conditional, monkeypatch):
    monkeypatch.setattr(intervals, "MOST_ROWS", 250)
    plain = scaled(1.0, True, True).judge(0.1, 0.05, conditional)
    for factor in (3.0, 0.1):
        same(plain, scaled(factor, True, True).judge(0.1, 0.05, conditional))
    rows = scaled(1.0, True, True)
    without = torch.cat([rows.weight.new_zeros(1), rows.weight])  # an example of weight 0, which is none
    s, who = (torch.cat([part[:1], part]) for part in (rows.s.masked_fill(~rows.counts, math.nan), rows.who))
    none, tail = torch.zeros(len(s), 0, dtype=torch.int64), {"variance": rows.variance, "tail": rows.tail}
    for order in (torch.arange(301), torch.arange(301).flip(0)):
        found = intervals.Rows.of(s, who, without, none, (-0.4, 0.6), order=order, **tail)
        same(plain, found.judge(0.1, 0.05, conditional))


def test_few_kinds_of_rows_have_another_order_for_other_numbers_of_each():
    """With one permutation for every n, the order of the bets on k events was that on k + 1 but for one, for ever."""
    who = torch.ones(400, 1).bool()

    def order(events):
        s = (torch.arange(400) < events).double() - 0.4
        return rows_of(who, s, (-0.4, 0.6), two_valued=True).s[:, 0] > 0

    different = [int((order(k) != order(k + 1)).sum()) for k in range(150, 170)]
    assert min(different) > 100 and torch.equal(order(150), order(150))
