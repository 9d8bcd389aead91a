"""``find_groups(..., holdout=...)``: the worst rules of trees found on some rows, judged on the others."""

import numpy as np
import pytest
import torch

import torchgmc as gmc


def draw(n, seed, planted=0.0):
    """Columns of numbers and labels, and s, which deviates only where two of them meet (and the other way elsewhere)."""
    g = torch.Generator().manual_seed(seed)
    age, income = torch.rand(n, generator=g) * 70 + 20, torch.randn(n, generator=g)
    income[::10] = float("nan")
    site = torch.randint(3, (n,), generator=g)
    inside = (age >= 61) & (site == 1)
    chance = 0.5 + planted * inside.float()
    s = 0.5 - (torch.rand(n, generator=g) < chance).float()
    return {"age": age, "income": income, "site": [("A", "B", "C")[k] for k in site.tolist()]}, s, inside


def test_no_violation_is_found_where_there_is_none():
    false, misses = 0, 0
    for seed in range(24):
        columns, s, _ = draw(200, seed)
        found = gmc.find_groups(columns, s, depth=2, top=2, delta=0.2, min_size=15, holdout=0.5, bounds=(-0.5, 0.5))
        false += found.violated
        misses += any(not (r["low"] <= 0 <= r["high"] and r["weighted low"] <= 0 <= r["weighted high"]) for r in found.rows())
        assert found.num_held + found.num_rows == 200 and abs(found.num_held - 100) < 5
    assert false <= misses <= 10  # of 24, at 20 %


@pytest.mark.parametrize("order", ["conditional", "mass-weighted"])
def test_a_planted_interaction_is_found_and_its_interval_excludes_0(order):
    columns, s, _ = draw(3000, 1, planted=0.3)
    found = gmc.find_groups(columns, s, depth=2, top=5, holdout=0.5, bounds=(-0.5, 0.5), order=order)
    row = found.rows()[0]
    assert "site = B" in row["group"] and "age >= 6" in row["group"] and row["verdict"] == "violated"
    assert row["high"] < 0 and row["weighted high"] < 0 and row["low"] < -0.3 < row["high"]
    assert row["weighted"] == pytest.approx(row["mass"] * row["estimate"], abs=1e-9)
    assert "held out" in found.summary and row["group"] in str(found)
    single = gmc.find_groups({k: columns[k] for k in ("age", "income")}, s, depth=1, top=1, holdout=0.5, bounds=(-0.5, 0.5))
    assert single.table["estimate"][0] > row["estimate"]  # fewer conditions find less


def test_weights_clusters_and_rows_in_another_order():
    columns, s, _ = draw(2400, 2, planted=0.4)
    weight, cluster = torch.rand(2400) + 0.1, torch.arange(2400) // 2
    found = gmc.find_groups(columns, s, depth=2, top=1, holdout=0.25, bounds=(-0.5, 0.5), weight=weight, clusters=cluster)
    (row,) = found.rows()
    assert found.num_held == pytest.approx(600, abs=10) and found.num_held % 2 == 0  # clusters are whole
    assert "site = B" in row["group"] and row["high"] < 0
    again = gmc.find_groups(
        {k: np.asarray(v)[::-1].tolist() for k, v in columns.items()},
        s.flip(0),
        depth=2,
        top=1,
        holdout=0.25,
        bounds=(-0.5, 0.5),
        weight=weight.flip(0),
        clusters=cluster.flip(0),
    )
    assert again.table["group"] == found.table["group"]  # in any order
    assert again.table["low"] == pytest.approx(found.table["low"], abs=1e-9)


def test_two_conditions_that_mean_nothing_by_themselves():
    g = torch.Generator().manual_seed(0)
    a, b = torch.rand(2, 4000, generator=g)
    s = 0.5 - (torch.rand(4000, generator=g) < torch.where((a > 0.5) == (b > 0.5), 0.7, 0.3)).float()
    found = gmc.find_groups({"a": a, "b": b}, s, depth=2, top=4, holdout=0.5, bounds=(-0.5, 0.5))
    assert found.num_violated >= 3 and all("a" in name and "b" in name for name in found.table["group"])


def test_errors():
    columns, s, _ = draw(100, 0)
    for holdout in (0.0, 1.0, "half"):
        with pytest.raises(ValueError, match="holdout"):
            gmc.find_groups(columns, s, holdout=holdout)
    with pytest.raises(ValueError, match="min_size"):
        gmc.find_groups(columns, s, holdout=0.5, min_size=60)
    with pytest.raises(ValueError, match="bins"):
        gmc.find_groups(columns, s, holdout=0.5, bins={"age": [50]})
    with pytest.raises(ValueError, match="depth"):
        gmc.find_groups(columns, s, holdout=0.5, depth=9)
    for infinite in (float("inf"), float("-inf"), 1e300):  # >= inf was "all rows", of which there were few
        with pytest.raises(ValueError, match="`age` must be finite as float32"):
            gmc.find_groups(columns | {"age": torch.where(columns["age"] > 80, infinite, columns["age"].double())}, s, holdout=0.5)
