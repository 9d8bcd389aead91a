"""``resolution``: counts of rounded scores in place of the scores."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, strategies as st

import torchgmc as gmc
from torchgmc.heads.quantile.problem import QuantileStatistics, ScoreCounts, round_up

GROUPS = ["a", "b"]


def data(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    member = torch.rand(n, 2, generator=g) < torch.tensor([0.3, 0.6])
    return torch.randn(n, generator=g, dtype=torch.float64).abs() * (1 + member[:, 0]), member


def counts(scores: torch.Tensor, member: torch.Tensor, weight: torch.Tensor, resolution: float) -> ScoreCounts:
    n = len(scores)
    none = torch.full((n,), math.nan, dtype=torch.float64), torch.zeros(n, 0, dtype=torch.int64), torch.zeros(n, 0)
    return ScoreCounts.of(QuantileStatistics(scores, none[0], member, weight, none[1], none[2]), resolution)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1), st.integers(1, 30))
def test_rounding_goes_up_by_less_than_a_step_and_keeps_the_order(values: list[float], bits: int):
    x = torch.tensor(values, dtype=torch.float64)
    up = round_up(x, bits)
    top = torch.finfo(torch.float64).max
    assert bool((up >= x).all()) and torch.equal(round_up(up, bits), up)
    for one, found in zip(x.tolist(), up.tolist(), strict=True):
        fraction, exponent = math.frexp(one)
        exact = math.ceil(fraction * 2 ** (bits + 1))
        small = abs(one) < 2.0**-1021  # below, numbers have fewer bits
        assert small or found == top or found == math.ldexp(exact, exponent - bits - 1)
    assert bool((up[x.argsort()].diff() >= 0).all())


def test_rows_are_the_counts_of_a_plain_loop():
    scores, member = data(500)
    weight = torch.rand(500, dtype=torch.float64)
    found = counts(scores, member, weight, 0.25)
    number, total, squares = Counter(), Counter(), Counter()
    for score, who, w in zip(round_up(scores, 2).tolist(), member.tolist(), weight.tolist(), strict=True):
        key = (*who, score)
        number[key] += 1
        total[key] += w
        squares[key] += w * w
    keys = [(*who, score) for who, score in zip(found.member.tolist(), found.scores.tolist(), strict=True)]
    assert keys == sorted(number)
    assert found.count.tolist() == [number[key] for key in keys]
    torch.testing.assert_close(found.weight, torch.tensor([total[key] for key in keys], dtype=torch.float64))
    torch.testing.assert_close(found.squared(), torch.tensor([squares[key] for key in keys], dtype=torch.float64))
    torch.testing.assert_close(found.group_sizes(), (member.double().T @ weight) ** 2 / (member.double().T @ weight**2))


def test_folds_share_each_row_out_by_chance_and_completely():
    found = counts(*data(20_000), torch.full((20_000,), 0.5, dtype=torch.float64), 0.05)
    dealt, _ = found.dealt(5)
    torch.testing.assert_close(dealt.sum(0), found.weight)
    share = 2 * dealt.sum(1)
    assert bool(((share - 4000).abs() < 5 * 57).all())  # a standard deviation is 56.6
    heavy = found.count > 30
    expected = found.count[heavy] / 5
    spread = ((2 * dealt[:, heavy] - expected).square() / (0.8 * expected)).mean()
    assert 0.85 < float(spread) < 1.15  # as examples that are dealt one by one


def test_neither_order_nor_batches_nor_merging_matter():
    scores, member = data(3000)
    make = lambda: gmc.QuantileHead(0.9, None, GROUPS, resolution=0.01)  # noqa: E731
    whole = make().fit(scores, member)
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(1))
    parts = [(scores[rows], member[rows]) for rows in order.split(170)]
    batches = make().fit_batches(parts)
    heads = [make() for _ in parts]
    for head, part in zip(heads, parts, strict=True):
        head.observe(*part)
    merged = heads[3].merge(*heads[:3], *heads[4:]).calibrate()
    for head in (batches, merged):
        assert torch.equal(head(member), whole(member))
        assert torch.equal(head.report.violations_after, whole.report.violations_after)
        assert head.report.details["examples"] == 3000


@pytest.mark.parametrize("bins", [None, 3])
def test_it_is_a_fit_to_rounded_scores(bins: int | None):
    scores, member = data(4000)
    options = {"bins": bins, "range": (0.0, 6.0), "noise_floor": False}
    plain = gmc.QuantileHead(0.9, 0.01, GROUPS, **options).fit(round_up(scores, 7), member)
    head = gmc.QuantileHead(0.9, 0.01, GROUPS, **options, resolution=0.01).fit(scores, member)
    assert head.report.reached == plain.report.reached == "alpha"
    torch.testing.assert_close(head(member), plain(member), rtol=0.02, atol=0)  # several thresholds may be the best
    covered = gmc.violations(member, (scores <= head(member)).double() - 0.9)[:, 0]
    assert bool((covered.abs() <= 0.01 + 0.01).all())  # a step of a hundredth moves few scores


def test_the_statistics_stay_small_and_the_fit_that_of_the_rows():
    scores, member = data(100_000)
    head = gmc.QuantileHead(0.9, None, GROUPS, resolution=0.01)
    sizes = []
    for part in zip(scores.split(10_000), member.split(10_000), strict=True):
        head.observe(*part)
        sizes.append(head.statistics.rows)
    assert sizes[-1] < 1.2 * sizes[4] < 10_000
    plain = gmc.QuantileHead(0.9, None, GROUPS).fit(scores, member)
    torch.testing.assert_close(head.calibrate()(member), plain(member), rtol=0.02, atol=0)
    torch.testing.assert_close(head.report.details["noise"], plain.report.details["noise"], rtol=0.05, atol=0)
    torch.testing.assert_close(head.variance, plain.variance, rtol=0.05, atol=0)


def test_weights_and_forgetting_count():
    scores, member = data(2000)
    weight = torch.rand(2000, dtype=torch.float64) + 0.5
    options = {"noise_floor": False, "resolution": 0.001}
    plain = gmc.QuantileHead(0.9, 0.01, GROUPS, noise_floor=False).fit(scores, member, weight)
    head = gmc.QuantileHead(0.9, 0.01, GROUPS, **options).fit(scores, member, weight)
    torch.testing.assert_close(head(member), plain(member), rtol=0.02, atol=0)
    old, new = gmc.QuantileHead(0.9, None, GROUPS, resolution=0.001), gmc.QuantileHead(0.9, None, GROUPS, resolution=0.001)
    old.observe(scores, member)
    old.forget(0.25).observe(2 * scores, member)
    new.observe(scores, member, torch.full((2000,), 0.25, dtype=torch.float64))
    new.observe(2 * scores, member)
    torch.testing.assert_close(old.calibrate()(member), new.calibrate()(member))


def test_a_file_holds_the_counts(tmp_path):
    scores, member = data(1000)
    head = gmc.QuantileHead(0.9, None, GROUPS, resolution=0.01).fit(scores, member)
    with pytest.warns(UserWarning, match="statistics"):
        gmc.save(head, tmp_path / "head.safetensors", statistics=True)
    loaded = gmc.load(tmp_path / "head.safetensors")
    assert loaded.resolution == 0.01 and torch.equal(loaded(member), head(member))
    loaded.observe(*data(1000, 1))
    both = gmc.QuantileHead(0.9, None, GROUPS, resolution=0.01)
    both.observe(scores, member)
    both.observe(*data(1000, 1))
    assert torch.equal(loaded.calibrate()(member), both.calibrate()(member))


def test_what_counts_cannot_do_is_an_error():
    scores, member = data(50)
    for more in ({"finite_sample": True}, {"learn": gmc.Trees()}, {"fractional": True}, {"resolution": 1e-12}):
        with pytest.raises(ValueError, match="`resolution`"):
            gmc.QuantileHead(0.9, 0.1, GROUPS, **({"resolution": 0.01} | more))
    for bad in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="resolution"):
            gmc.QuantileHead(0.9, 0.1, GROUPS, resolution=bad)
    head = gmc.QuantileHead(0.9, 0.1, GROUPS, resolution=0.01)
    for more in ({"base": scores}, {"clusters": list(range(50))}):
        with pytest.raises(ValueError, match="omit `base` and `clusters`"):
            head.observe(scores, member, **more)
    assert head.statistics is None
    with pytest.raises(ValueError, match="does not keep"):
        head.fit(scores, member, solver="fresh", max_iter=2)
    with pytest.raises(ValueError, match="`resolution`"):
        head.merge(gmc.QuantileHead(0.9, 0.1, GROUPS, resolution=0.02))
