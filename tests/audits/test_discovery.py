"""Discovery: against plain loops, honest under the null, and it finds what was planted."""

import math
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st

import torchgmc as gmc
from gmctest.oracles import audit_interval


def loops(columns, s, weight, depth, min_size, delta):
    """Every intersection that occurs: count, mass, mean and its interval, mass-weighted mean and its interval."""
    n, names = len(s), list(columns)
    found = {}
    for order in range(1, depth + 1):
        for combo in combinations(names, order):
            for levels in sorted({tuple(columns[c][i] for c in combo) for i in range(n)}):
                rows = [i for i in range(n) if tuple(columns[c][i] for c in combo) == levels]
                if len(rows) >= min_size:
                    found[" & ".join(f"{c}={v}" for c, v in zip(combo, levels, strict=True))] = rows
    if not found:
        return {}
    share = delta / 2 / len(found)  # two views
    total = sum(weight)
    result = {}
    for name, rows in found.items():
        mass = sum(weight[i] for i in rows)
        first = sum(weight[i] * s[i] for i in rows)
        inside = [i in set(rows) for i in range(n)]
        ends = [audit_interval(s, inside, weight, (-1.0, 1.0), share, view) for view in (True, False)]
        result[name] = (len(rows), mass / total, first / mass, ends[0], first / total, ends[1])
    return result


@settings(deadline=None, max_examples=25)
@given(
    n=st.integers(4, 60),
    depth=st.integers(1, 3),
    min_size=st.integers(1, 3),
    weighted=st.booleans(),
    order=st.sampled_from(["conditional", "mass-weighted"]),
    seed=st.integers(0, 999),
)
def test_by_the_loop(n, depth, min_size, weighted, order, seed):
    rng = torch.Generator().manual_seed(seed)
    codes = (torch.rand(n, 3, generator=rng) * torch.tensor([2, 3, 2])).long()
    columns = dict(zip("abc", codes.T.tolist(), strict=True))
    s = (2 * torch.rand(n, generator=rng) - 1).double()
    weight = (torch.rand(n, generator=rng) + 0.1).double() if weighted else None
    oracle = loops(columns, s.tolist(), [1.0] * n if weight is None else weight.tolist(), depth, min_size, 0.05)
    if not oracle:
        with pytest.raises(ValueError, match="no group has"):
            gmc.find_groups(columns, s, depth, min_size=min_size, weight=weight)
        return
    found = gmc.find_groups(columns, s, depth, top=1000, order=order, min_size=min_size, weight=weight, alpha=0.05)
    assert found.num_searched == len(oracle) and set(found.table["group"]) == set(oracle)
    keys = []
    for row in found.rows():
        count, mass, own, (low, high), part, (part_low, part_high) = oracle[row["group"]]
        assert row["count"] == count
        for name, value in {
            "mass": mass,
            "estimate": own,
            "low": low,
            "high": high,
            "weighted": part,
            "weighted low": part_low,
            "weighted high": part_high,
        }.items():
            assert row[name] == pytest.approx(value, abs=1e-9), name
        mean, least, most = (own, low, high) if order == "conditional" else (part, part_low, part_high)
        nearest, farthest = max(least, -most), max(-least, most)
        assert row["verdict"] == ("violated" if nearest > 0.05 else "holds" if farthest <= 0.05 else "undecided")
        keys.append((nearest > 0, nearest if nearest > 0 else abs(mean)))
    if order == "mass-weighted":
        keys = [abs(row["weighted"]) for row in found.rows()]
        assert all(a >= b - 1e-12 for a, b in pairwise(keys))
    else:
        assert all(a[0] > b[0] or a[1] >= b[1] - 1e-12 for a, b in pairwise(keys))
    assert found.num_violated == found.table["verdict"].count("violated")


def draw(rng, n=2000):
    return {
        "sex": torch.randint(2, (n,), generator=rng).tolist(),
        "site": torch.randint(8, (n,), generator=rng).tolist(),
        "age": torch.randint(5, (n,), generator=rng).tolist(),
    }


@pytest.mark.parametrize("order", ["conditional", "mass-weighted"])
def test_finds_nothing_where_nothing_is(order):
    """100 draws of 2,000 rows, 81 groups searched, mean 0 everywhere: at least 95 draws report no violation; the intervals with
    delta alone, without the union, would report one in most draws."""
    rng = torch.Generator().manual_seed(0)
    quiet = alone = 0
    for _ in range(100):
        s = (torch.rand(2000, generator=rng) < 0.1).double() - 0.1
        found = gmc.find_groups(draw(rng), s, bounds=(-0.1, 0.9), top=200, order=order, min_size=10)
        assert found.num_searched == 15 + 16 + 10 + 40
        quiet += not found.violated and all(r["low"] <= 0 <= r["high"] for r in found.rows())
        deviations = [abs(r["estimate"]) / (0.3 / math.sqrt(r["count"])) for r in found.rows()]
        alone += max(deviations) > 1.96
    assert quiet >= 95
    assert alone > 50  # the multiplicity is real


def test_finds_what_was_planted():
    rng = torch.Generator().manual_seed(1)
    for _ in range(5):
        columns = draw(rng, 20_000)
        s = (torch.rand(20_000, generator=rng) < 0.1).double() - 0.1
        inside = torch.tensor([a == 1 and b == 3 for a, b in zip(columns["sex"], columns["site"], strict=True)])
        s[inside] = (torch.rand(int(inside.sum()), generator=rng) < 0.4).double() - 0.1
        found = gmc.find_groups(columns, s, bounds=(-0.1, 0.9), top=3)
        assert found.table["group"][0] == "sex=1 & site=3" and found.table["verdict"][0] == "violated"
        assert found.table["low"][0] <= 0.3 <= found.table["high"][0]
        assert len(found.table["group"]) == 3 and found.violated
        text = str(found)
        assert "sex=1 & site=3" in text and "of 81 groups searched in 20000 rows" in text


def test_numbers_are_cut_and_s_may_be_a_list():
    found = gmc.find_groups({"age": [20.0, 70.0] * 50}, [0.5, -0.5] * 50, depth=1, bins={"age": [50]})
    assert dict(zip(found.table["group"], found.table["estimate"], strict=True)) == {"age<50": 0.5, "age>=50": -0.5}


def test_a_group_of_weight_zero_is_undecided():
    weight = torch.tensor([1.0, 0.0] * 50)
    found = gmc.find_groups({"sex": ["f", "m"] * 50}, torch.full((100,), 0.9), depth=1, weight=weight)
    row = next(r for r in found.rows() if r["group"] == "sex=m")
    assert (row["estimate"], row["verdict"], row["mass"]) == (0.0, "undecided", 0.0) and row["high"] == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"s": [0.1] * 3}, "one value per row"),
        ({"s": [[0.1]] * 40}, r"shape \(n,\)"),
        ({"s": [float("nan")] * 40}, "`s` must be finite"),
        ({"s": [3.0] * 40}, "`bounds`"),
        ({"bounds": (0.5, 1.0)}, "`bounds`"),
        ({"delta": 1.5}, "`delta`"),
        ({"alpha": -0.1}, "`alpha`"),
        ({"top": 0}, "`top`"),
        ({"depth": 0}, "`depth`"),
        ({"order": "size"}, "`order`"),
        ({"min_size": 100}, "min_size"),
        ({"weight": [-1.0] * 40}, "`weight`"),
    ],
)
def test_what_is_refused(change, message):
    options = {"columns": {"sex": ["f", "m"] * 20}, "s": [0.1] * 40, "min_size": 5} | change
    with pytest.raises(ValueError, match=message):
        gmc.find_groups(**options)


@pytest.mark.filterwarnings("ignore:.*also used to calibrate")
def test_the_sign_is_that_of_the_heads():
    """Too high is positive in both, with the same numbers: prediction - outcome, coverage - target, risk - target."""
    n, columns = 400, {"sex": ["f", "m"] * 200}
    groups = gmc.Groups.from_columns(columns)
    female = groups.membership[:, 0]
    as_it_is = {"alpha": 1.0, "groups": groups.names, "noise_floor": False}
    probs, y = torch.where(female, 0.7, 0.3), torch.arange(n) % 4 < 2
    residuals = torch.where(female, -1.0, 1.0)
    pixels = torch.where(female, 0.3, 0.7)[:, None].expand(n, 4)
    for head, batch in (
        (gmc.ProbabilityHead(bins=None, **as_it_is), {"probs": probs, "y": y}),  # predicts too much for f
        (gmc.QuantileHead(0.5, init=0.0, **as_it_is), {"scores": residuals}),  # covers too much of f
        (
            gmc.ThresholdHead(0.5, init=0.5, **as_it_is),
            {"scores": pixels, "masks": torch.ones(n, 4) > 0},
        ),  # misses too much of f
    ):
        head.fit(**batch, groups=groups)
        found = gmc.find_groups(columns, head.values(**batch, groups=groups).s[:, 0], depth=1)
        audit = head.audit(**batch, groups=groups).view("conditional")
        estimates = dict(zip(audit.table["group"], audit.table["estimate"], strict=True))
        for row in found.rows():
            assert row["estimate"] == pytest.approx(estimates[row["group"]], abs=1e-6)
            assert (row["estimate"] > 0.1) is (row["group"] == "sex=f") and abs(row["estimate"]) > 0.1


def test_clusters_are_what_is_independent():
    """Rows that repeat ten times say no more than one of each: intervals widen, and hold the truth where they failed."""
    rng = torch.Generator().manual_seed(0)
    s = (torch.rand(300, generator=rng) < 0.5).double() - 0.5
    site = torch.randint(3, (300,), generator=rng)
    rows, ids = torch.arange(300).repeat_interleave(10), torch.arange(300).repeat_interleave(10)
    columns = {"site": site[rows].tolist()}
    plain = gmc.find_groups({"site": site.tolist()}, s, bounds=(-0.5, 0.5)).table
    told = gmc.find_groups(columns, s[rows], bounds=(-0.5, 0.5), clusters=ids).table
    blind = gmc.find_groups(columns, s[rows], bounds=(-0.5, 0.5)).table
    for k, name in enumerate(told["group"]):
        half = (told["high"][k] - told["low"][k]) / 2
        i, j = plain["group"].index(name), blind["group"].index(name)
        assert half >= 0.99 * (plain["high"][i] - plain["low"][i]) / 2  # Hoeffding's is no narrower than the best of three
        assert half > 2 * (blind["high"][j] - blind["low"][j]) / 2
        count = told["count"][k] / 10  # by hand: R sqrt(sum of W^2 log(2 / share) / 2) / W, each cluster of weight 10
        share = 0.05 / 2 / (2 * len(told["group"]))
        assert half == pytest.approx(math.sqrt(100 * count * math.log(2 / share) / 2) / (10 * count), rel=1e-6)
    alone = gmc.find_groups({"site": site.tolist()}, s, bounds=(-0.5, 0.5), clusters=[str(i) for i in range(300)]).table
    assert alone == plain  # clusters of one
    with pytest.raises(ValueError, match="`clusters` must have shape"):
        gmc.find_groups(columns, s[rows], clusters=[1, 2])
