"""Groups against plain Python loops, every message, frames, and the helpers all heads use."""

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchgmc.groups.groups import Groups, check_groups, pattern_ids

SEX, SITE = ["f", "m", "f", "f"], [3, 3, 7, 3]


def groups_by_loop(columns: dict[str, list[Any]], intersections: int) -> dict[str, list[bool]]:
    """Name to membership, row by row."""
    found = {}
    for order in range(1, intersections + 1):
        for names in itertools.combinations(columns, order):
            for labels in itertools.product(*(sorted(set(columns[name])) for name in names)):
                rows = zip(*(columns[name] for name in names), strict=True)
                member = [row == labels for row in rows]
                if any(member):
                    found[" & ".join(f"{n}={v}" for n, v in zip(names, labels, strict=True))] = member
    return found


@st.composite
def tables(draw: st.DrawFn) -> dict[str, list[Any]]:
    n = draw(st.integers(1, 12))
    kinds = [st.sampled_from("abc"), st.integers(-2, 2), st.booleans()]
    drawn = [draw(st.lists(draw(st.sampled_from(kinds)), min_size=n, max_size=n)) for _ in range(draw(st.integers(1, 4)))]
    return {f"c{j}": values for j, values in enumerate(drawn)}


@settings(deadline=None)
@given(columns=tables(), data=st.data())
def test_groups_match_the_loop(columns: dict[str, list[Any]], data: st.DataObject) -> None:
    order = data.draw(st.integers(1, len(columns)))
    groups = Groups.from_columns(columns, intersections=order)
    expected = groups_by_loop(columns, order)
    assert groups.names == tuple(expected)
    assert groups.membership.T.tolist() == list(expected.values())
    assert groups.sizes.tolist() == groups.to("cpu").sizes.tolist() == [sum(member) for member in expected.values()]
    assert len(groups) == len(expected) == len(groups.terms)
    n = groups.num_rows
    for start, stop, ids in groups.blocks():
        for i in range(n):
            assert [j for j in range(start, stop) if groups.membership[i, j]] == [start + ids[i]] * bool(ids[i] >= 0)
    rows = data.draw(st.lists(st.integers(0, n - 1), max_size=15))  # new rows, also none at all
    new = groups.transform({name: [values[i] for i in rows] for name, values in columns.items()})
    assert new.names == groups.names
    assert torch.equal(new.membership, groups.membership[rows])
    assert torch.equal(new.sizes, new.membership.sum(0))


@settings(deadline=None)
@given(columns=tables())
def test_cells_are_the_patterns_of_the_membership(columns: dict[str, list[Any]]) -> None:
    groups = Groups.from_columns(columns, intersections=min(2, len(columns)), overall=True)
    for ids, patterns in (groups.cells(), pattern_ids(groups.membership)):
        assert torch.equal(patterns[ids], groups.membership)
        assert torch.equal(patterns, torch.unique(groups.membership, dim=0))


@settings(deadline=None)
@given(n=st.integers(0, 30), a=st.sampled_from([0, 1, 5, 61, 62, 63, 130]), seed=st.integers(0, 2**16))
def test_pattern_ids_match_unique(n: int, a: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    base = torch.rand(4, a, generator=generator) < 0.5
    membership = base[torch.randint(0, 4, (n,), generator=generator)]
    ids, patterns = pattern_ids(membership)
    assert torch.equal(patterns[ids], membership)
    assert len(patterns) == len({tuple(row) for row in membership.tolist()})
    if n and a:
        assert torch.equal(patterns, torch.unique(membership, dim=0))


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


@pytest.mark.parametrize(
    "columns",
    [
        {"a": ["1 & b=2", "3"], "b": ["2", "2"]},  # fine: nothing clashes
        {"a": ["x &", "x"], "b": ["y", "z"]},
    ],
)
def test_an_ampersand_in_a_label_is_no_error_by_itself(columns: dict[str, list[str]]) -> None:
    groups = Groups.from_columns(columns, intersections=1)
    assert len(set(groups.names)) == len(groups)


def test_an_ampersand_that_makes_two_names_equal() -> None:
    columns = {"a": ["1", "1 & b=2"], "b": ["2", "3"], "c": ["x", "x"]}
    with pytest.raises(ValueError, match="several groups would share a name: a=1 & b=2"):
        Groups.from_columns(columns, intersections=2)


def test_too_many_levels_to_number() -> None:
    columns = {f"c{j}": np.arange(2000) for j in range(6)}
    with pytest.raises(ValueError, match="`intersections` of 6 columns with .* levels are too many; merge levels first"):
        Groups.from_columns(columns, intersections=6)


def test_many_small_groups_are_listed_in_part() -> None:
    columns = {"x": list(range(30)), "y": [0] * 30}
    with pytest.warns(UserWarning, match=r"x=0 \(1\), .*x=11 \(1\) and 48 more\.$"):
        groups = Groups.from_columns(columns, intersections=2, min_size=2, small="drop")
    assert groups.names == ("y=0",)
    assert groups.sums(torch.ones(30, 1)).tolist() == [[30.0]]


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


def test_overall_comes_first() -> None:
    groups = Groups.from_columns({"sex": SEX}, overall=True)
    assert groups.names == ("all", "sex=f", "sex=m")
    assert groups.membership[:, 0].all()
    assert groups.terms == ((), ((0, 0),), ((0, 1),))
    assert groups.transform({"sex": ["x"]}, unknown="none").membership.tolist() == [[True, False, False]]


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


def test_small_groups_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"fewer than `min_size` = 2 rows: sex=m \(1\), site=7 \(1\), .*small='drop'"):
        Groups.from_columns({"sex": SEX, "site": SITE}, intersections=2, min_size=2)
    with pytest.raises(ValueError, match=r"x>=5 \(0\)"):  # a bin was asked for and is empty
        Groups.from_columns({"x": [1, 2]}, bins={"x": [5]})
    assert Groups.from_columns({"x": [1, 2]}, bins={"x": [5]}, min_size=0).sizes.tolist() == [2, 0]


def test_small_groups_are_dropped_aloud() -> None:
    with pytest.warns(UserWarning, match=r"left out groups with fewer than 2 rows: sex=m \(1\), site=7 \(1\), ") as caught:
        groups = Groups.from_columns({"sex": SEX, "site": SITE}, intersections=2, min_size=2, small="drop")
    assert caught[0].filename == __file__
    assert groups.names == ("sex=f", "site=3", "sex=f & site=3")
    assert groups.transform({"sex": ["m"], "site": [3]}).membership.tolist() == [[False, True, False]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="no group has `min_size` = 9 of the 4 rows"):
            Groups.from_columns({"sex": SEX}, min_size=9, small="drop")


def test_small_labels_merge_aloud() -> None:
    column = ["a"] * 4 + ["b", "c", "d"]
    with pytest.warns(
        UserWarning, match=r"merged into x=other, .* fewer than 3 rows each: x=b \(1\), x=c \(1\), x=d"
    ) as caught:
        groups = Groups.from_columns({"x": column}, min_size=3, small="merge")
    assert caught[0].filename == __file__
    assert groups.names == ("x=a", "x=other")
    assert groups.sizes.tolist() == [4, 3]
    assert groups.transform({"x": ["c", "a"]}).membership.tolist() == [[False, True], [True, False]]
    with pytest.warns(UserWarning, match=r"left out groups with fewer than 2 rows: x=b \(1\)"):  # nothing to merge it with
        assert Groups.from_columns({"x": ["a", "a", "b"]}, min_size=2, small="merge").names == ("x=a",)


def test_small_bins_merge_with_their_neighbours() -> None:
    values = [1, 11, 12, 21, 31, 32, 41]
    with pytest.warns(UserWarning, match="merged bins of `x` with fewer than 3 rows; the edges left are 20"):
        groups = Groups.from_columns({"x": values}, bins={"x": [10, 20, 30, 40]}, min_size=3, small="merge")
    assert groups.names == ("x<20", "x>=20")
    assert groups.sizes.tolist() == [3, 4]
    with pytest.raises(ValueError, match="column `x` cannot be cut into bins of `min_size` = 5 rows"):
        Groups.from_columns({"x": values}, bins={"x": [10]}, min_size=5, small="merge")


def test_repr_is_short() -> None:
    text = repr(Groups.from_columns({"site": list(range(30))}))
    assert text.splitlines()[:2] == ["Groups: 30 groups of 30 rows", "  site=0   1"]
    assert text.splitlines()[-1] == "  ... and 10 more"


def test_unknown_labels() -> None:
    groups = Groups.from_columns({"sex": SEX, "site": SITE}, intersections=2)
    with pytest.raises(ValueError, match="column `sex` has 'x' in row 1, which was not there .*; known: 'f', 'm'. Pass `unk"):
        groups.transform({"sex": ["f", "x"], "site": [3, 3]})
    with pytest.raises(ValueError, match="column `site` has '3' in row 0, .*; known: 3, 7"):  # a string is no integer
        groups.transform({"sex": ["f"], "site": ["3"]})
    with pytest.raises(ValueError, match="column `sex` has a missing value in row 0"):
        groups.transform({"sex": [None], "site": [3]})
    new = groups.transform({"sex": ["x", "f"], "site": [3, 9]}, unknown="none")
    assert [n for n, inside in zip(new.names, new.membership[0].tolist(), strict=True) if inside] == ["site=3"]
    assert [n for n, inside in zip(new.names, new.membership[1].tolist(), strict=True) if inside] == ["sex=f"]
    assert torch.equal(new.cells()[1][new.cells()[0]], new.membership)
    numeric = Groups.from_columns({"x": [1.0, 3.0]}, bins={"x": [2]})
    with pytest.raises(ValueError, match="column `x` has a missing value in row 1, .*; known: numbers only"):
        numeric.transform({"x": [1.0, None]})
    assert numeric.transform({"x": [1.0, None]}, unknown="none").sizes.tolist() == [1, 0]


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"columns": [1, 2]}, TypeError, "`columns` must map names to columns .*, got list"),
    ({"columns": {}}, ValueError, "at least one column and one row, got 0 columns"),
    ({"columns": {"x": []}}, ValueError, "at least one column and one row, got 1 columns of 0 rows"),
    ({"columns": {"x": "ab"}}, TypeError, "column `x` must be a list, tuple, array, tensor or series, got str"),
    ({"columns": {"x": 3}}, TypeError, "column `x` must be a list.*got int"),
    ({"columns": {"x": [1], "y": [1, 2]}}, ValueError, r"`columns` must be equally long, got x \(1\), y \(2\)"),
    ({"columns": {"x": np.ones((2, 2), int)}}, ValueError, r"column `x` must be one-dimensional, got shape \(2, 2\)"),
    ({"columns": {"x": np.array(["2020-01-01"], "M8[D]")}}, TypeError, "column `x` has dtype datetime64"),
    ({"columns": {"x": ["a", [1]]}}, TypeError, "column `x` holds a list in row 1; labels must be strings"),
    ({"columns": {1: [1], "1": [2]}}, ValueError, "two columns of one name: 1, 1"),
    ({"columns": {"x": [1, "1"]}}, ValueError, "column `x` has different labels for one group name: x=1"),
    ({"columns": {"a": ["b=c"], "a=b": ["c"]}}, ValueError, "several groups would share a name: a=b=c"),
    (
        {"columns": {"x": [0.5]}},
        ValueError,
        r"column `x` holds floats.*`bins=\{'x': \[...\]\}`.*`quantiles=\{'x': 4\}`",
    ),
    ({"columns": {"x": np.array([1.0, 2.0])}}, ValueError, "column `x` holds floats"),
    ({"columns": {"x": [1, 2.5]}}, ValueError, "column `x` holds floats"),
    (
        {"columns": {"x": ["a"]}, "bins": {"x": [1]}},
        TypeError,
        "column `x` is cut .* must hold numbers, got 'a' in row 0",
    ),
    ({"columns": {"x": [1]}, "bins": {"y": [1]}}, ValueError, "`bins` names y, but the columns are x"),
    ({"columns": {"x": [1]}, "quantiles": {"y": 2}}, ValueError, "`quantiles` names y, but the columns are x"),
    ({"columns": {"x": [1]}, "bins": {"x": [2, 1]}}, ValueError, r"`bins\['x'\]` must be increasing finite edges"),
    ({"columns": {"x": [1]}, "bins": {"x": []}}, ValueError, r"`bins\['x'\]` must be increasing finite edges"),
    (
        {"columns": {"x": [1]}, "quantiles": {"x": 1}},
        ValueError,
        r"`quantiles\['x'\]` must be a number of bins >= 2, got 1",
    ),
    ({"columns": {"x": [1, 1]}, "quantiles": {"x": 2}}, ValueError, "column `x` has too few different values for 2"),
    ({"columns": {"x": [1]}, "bins": {"x": [1]}, "quantiles": {"x": 2}}, ValueError, "in `bins` and in `quantiles`"),
    ({"columns": {"x": [1]}, "intersections": 2}, ValueError, "`intersections` must be .* from 1 to .* 1, got 2"),
    ({"columns": {"x": [1]}, "min_size": -1}, ValueError, "`min_size` must be a whole number >= 0, got -1"),
    ({"columns": {"x": [1]}, "small": "keep"}, ValueError, "`small` must be 'error', 'drop' or 'merge', got 'keep'"),
    ({"columns": {"x": [1]}, "missing": "drop"}, ValueError, "`missing` must be 'error' or 'level', got 'drop'"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_bad_columns_and_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Groups.from_columns(**options)


def test_bad_transform() -> None:
    groups = Groups.from_columns({"sex": SEX, "site": SITE})
    with pytest.raises(ValueError, match="`columns` lacks site; it has sex"):
        groups.transform({"sex": SEX})
    with pytest.raises(ValueError, match="`unknown` must be 'error' or 'none', got 'drop'"):
        groups.transform({"sex": SEX, "site": SITE}, unknown="drop")


def test_check_groups_takes_what_is_meant() -> None:
    groups = Groups.from_columns({"sex": SEX})
    expected = groups.membership
    names = ["sex=f", "sex=m"]
    for form in (
        groups,
        expected,
        expected.numpy(),
        expected.tolist(),
        expected.long(),
        expected.half(),
        expected.double(),
    ):
        assert torch.equal(check_groups(form, 4, names), expected)
        assert torch.equal(check_groups(form, 4), expected)
    assert check_groups(torch.zeros(0, 2), 0, names).shape == (0, 2)


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        (
            torch.ones(3, 2),
            ValueError,
            r"`groups` must have shape \(n, 2\) with n = 4 for the groups a, b, got \(3, 2\)",
        ),
        (torch.ones(4, 3), ValueError, r"\(n, 2\) with n = 4 for the groups a, b, got \(4, 3\); columns of labels"),
        (torch.ones(4), ValueError, r"got \(4,\); one group alone is `groups\[:, None\]`"),
        (torch.full((4, 2), 0.5), ValueError, "True or False .* got 0.5 in row 0, column 0; columns of labels become"),
        (torch.tensor([[0, 1]] * 3 + [[0, 2]]), ValueError, "got 2 in row 3, column 1"),
        (torch.full((4, 2), math.nan), ValueError, "got nan in row 0, column 0"),
        (torch.ones(4, 2, dtype=torch.complex64), TypeError, "`groups` must be a bool table, got torch.complex64"),
        (
            SEX,
            TypeError,
            r"`Groups` or a bool table of shape \(n, 2\), got list .*become memberships with `Groups.from_col",
        ),
        (np.array(SEX), TypeError, "got ndarray of dtype"),
        ([[True], [True, False]], TypeError, "`groups` must be `Groups` or a bool table .* got list"),
        ({"sex": SEX}, TypeError, "got dict; columns of labels become memberships with `Groups.from_columns`"),
        (pd.DataFrame({"sex": SEX}), TypeError, "got DataFrame; columns of labels"),
        ("female", TypeError, "got str"),
        (None, TypeError, "got NoneType"),
        (
            Groups.from_columns({"sex": SEX}),
            ValueError,
            "for, a, b, but it lacks a, b and also has sex=f, sex=m; .*transform",
        ),
    ],
)
def test_check_groups_says_what_to_pass(groups: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_groups(groups, 4, ["a", "b"])


def test_check_groups_of_other_rows_or_order() -> None:
    groups = Groups.from_columns({"sex": SEX})
    with pytest.raises(ValueError, match="`groups` must have n = 5 rows, one per example, got 4; .*transform"):
        check_groups(groups, 5)
    with pytest.raises(ValueError, match="but it has them in another order"):
        check_groups(groups, 4, ["sex=m", "sex=f"])


def test_many_rows_and_many_intersections() -> None:
    rng = np.random.default_rng(0)
    n = 100_000
    columns = {"name": rng.integers(0, 30, n).astype(str), "x": rng.normal(size=n)}
    columns |= {f"c{j}": rng.integers(0, 40, n) for j in range(2)}
    groups = Groups.from_columns(columns, intersections=3, quantiles={"x": 5})
    assert len(groups) > 50_000
    sizes = groups.sizes
    assert torch.equal(groups.to("cpu").sizes, sizes)  # counted again
    for j in (0, 500, len(groups) - 1):
        member = np.ones(n, dtype=bool)
        for column, level in groups.terms[j]:
            member &= groups.codes[:, column].numpy() == level
        assert sizes[j] == member.sum()
    assert groups.transform(columns).names == groups.names
    few = Groups.from_columns({"name": columns["name"], "c0": columns["c0"]}, overall=True)
    ids, patterns = few.cells()
    assert torch.equal(patterns[ids], few.membership)
    assert torch.equal(pattern_ids(few.membership)[1], patterns)
