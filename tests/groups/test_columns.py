"""Columns of every kind, bins and their names, values that are missing."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch

from torchgmc.groups.groups import Groups

SEX, SITE = ["f", "m", "f", "f"], [3, 3, 7, 3]


@pytest.mark.parametrize(
    "wrap",
    [
        list,
        tuple,
        np.array,
        pd.Series,
        pl.Series,
        lambda values: pd.Series(values, dtype="category"),
        lambda values: np.array(values, dtype=object),
    ],
)
def test_kinds_of_column(wrap: Callable[[list[Any]], Any]) -> None:
    columns = {"sex": wrap(SEX), "site": wrap(SITE), "ok": wrap([True, False, True, True])}
    groups = Groups.from_columns(columns)
    assert groups.names == ("sex=f", "sex=m", "site=3", "site=7", "ok=False", "ok=True")
    assert groups.sizes.tolist() == [3, 1, 3, 1, 1, 3]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_tensor_columns(dtype: torch.dtype) -> None:
    assert Groups.from_columns({"x": torch.tensor([1, 0, 1]).to(dtype)}).sizes.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_float_tensor_columns_in_bins(dtype: torch.dtype) -> None:
    groups = Groups.from_columns({"x": torch.tensor([0.5, 1.5, 1.0], dtype=dtype)}, bins={"x": [1]})
    assert groups.names == ("x<1", "x>=1")
    assert groups.sizes.tolist() == [1, 2]


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
def test_frames(frame: Callable[[dict[str, Any]], Any]) -> None:
    data = {"sex": SEX, "age": [25.0, 30.0, 49.9, 50.0], "site": SITE}
    groups = Groups.from_columns(frame(data), intersections=2, bins={"age": [30, 50]})
    assert groups.names[:7] == ("sex=f", "sex=m", "age<30", "30<=age<50", "age>=50", "site=3", "site=7")
    assert groups.sizes[2:5].tolist() == [1, 2, 1]
    wider = frame({"other": [1.5, 2.5], "site": [7, 3], "age": [80.0, 20.0], "sex": ["m", "f"]})
    new = groups.transform(wider)
    assert [name for name, inside in zip(new.names, new.membership[1].tolist(), strict=True) if inside] == [
        "sex=f",
        "age<30",
        "site=3",
        "sex=f & age<30",
        "sex=f & site=3",
        "age<30 & site=3",
    ]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64, bool])
@pytest.mark.parametrize("values", [[3, 1, 3, 0], [0], [1, 0]])
def test_integers_in_a_narrow_range(values: list[int], dtype: Any) -> None:
    column = np.array(values, dtype=dtype)
    groups = Groups.from_columns({"x": column})
    assert groups.names == tuple(f"x={label}" for label in sorted(set(column.tolist())))
    assert groups.membership.tolist() == [[v == label for label in sorted(set(column.tolist()))] for v in column.tolist()]


@pytest.mark.parametrize(
    "column",
    [
        np.array([-(2**63), 2**63 - 1, 0]),
        np.array([2**63 - 1, 2**63 - 2]),
        np.array([-(2**63), -(2**63) + 1]),
        np.array([2**64 - 1, 0], dtype=np.uint64),
        np.array([2**64 - 1, 2**64 - 2], dtype=np.uint64),
        np.array([-128, 127], dtype=np.int8),
        np.array([-5, -7, -5]),
    ],
)
def test_integers_at_the_ends_of_their_type(column: Any) -> None:
    labels = sorted(set(column.tolist()))
    groups = Groups.from_columns({"x": column})
    assert groups.names == tuple(f"x={label}" for label in labels)
    assert groups.codes[:, 0].tolist() == [labels.index(value) for value in column.tolist()]


def test_edges_and_their_names() -> None:
    groups = Groups.from_columns({"x": [0, 1, 2]}, bins={"x": [0.25, 1.5]})
    assert groups.names == ("x<0.25", "0.25<=x<1.5", "x>=1.5")
    extremes = groups.transform({"x": [-math.inf, math.inf, 0.25]})
    assert extremes.membership.int().tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]


def test_quantiles() -> None:
    values = np.random.default_rng(0).normal(size=1000)
    groups = Groups.from_columns({"x": values}, quantiles={"x": 4})
    assert groups.sizes.tolist() == [250, 250, 250, 250]
    edges = groups.columns[0].edges
    assert edges is not None and set(edges) <= set(values.tolist())
    assert Groups.from_columns({"x": [1, 1, 1, 2, 3]}, quantiles={"x": 4}).names == ("x<2", "x>=2")
    near = [1.0, 1.0 + 1e-9, 1.0 + 2e-9]  # names need all digits
    assert len(set(Groups.from_columns({"x": near}, quantiles={"x": 3}).names)) == 3


@pytest.mark.parametrize(
    "column",
    [
        ["f", None, "m"],
        ["f", math.nan, "m"],
        pd.Series(["f", None, "m"]),
        pd.Series(["f", pd.NA, "m"], dtype="string"),
        pl.Series(["f", None, "m"]),
    ],
)
def test_missing_labels(column: Any) -> None:
    groups = Groups.from_columns({"sex": column}, missing="level")
    assert groups.names == ("sex=f", "sex=m", "sex=missing")
    assert groups.membership.int().tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]
    with pytest.raises(ValueError, match="column `sex` has 1 missing values, the first in row 1.*missing='level'"):
        Groups.from_columns({"sex": column})


@pytest.mark.parametrize("column", [pl.Series([3, None, 7]), pd.Series([3, None, 7], dtype="Int64"), [3, None, 7]])
def test_integers_with_missing_values_stay_integers(column: Any) -> None:
    assert Groups.from_columns({"x": column}, missing="level").names == ("x=3", "x=7", "x=missing")


@pytest.mark.parametrize(
    "column",
    [[1.0, None, 3.0], [1.0, math.nan, 3.0], pl.Series([1.0, None, 3.0]), pd.Series([1, None, 3], dtype="Float64")],
)
def test_missing_numbers(column: Any) -> None:
    groups = Groups.from_columns({"x": column}, bins={"x": [2]}, missing="level")
    assert groups.names == ("x<2", "x>=2", "x=missing")
    assert groups.sizes.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="column `x` has 1 missing values, the first in row 1"):
        Groups.from_columns({"x": column}, bins={"x": [2]})
