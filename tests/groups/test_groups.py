"""Groups against plain Python loops, every message, frames, and the helpers all heads use."""

import itertools
import math
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st

import torchgmc as gmc
from gmctest.examples import cameras
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


def test_overall_comes_first() -> None:
    groups = Groups.from_columns({"sex": SEX}, overall=True)
    assert groups.names == ("all", "sex=f", "sex=m")
    assert groups.membership[:, 0].all()
    assert groups.terms == ((), ((0, 0),), ((0, 1),))
    assert groups.transform({"sex": ["x"]}, unknown="none").membership.tolist() == [[True, False, False]]


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
        UserWarning, match=r"merged into x=other because each has fewer than 3 rows: x=b \(1\), x=c \(1\), x=d"
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
    with pytest.warns(UserWarning, match="merged bins of `x` with fewer than 3 rows; the remaining edges are 20"):
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
    with pytest.raises(ValueError, match="column `sex` has 'x' in row 1, which did not occur .*; known: 'f', 'm'. Pass `unk"):
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
    ({"columns": {"x": [1], "y": [1, 2]}}, ValueError, r"`columns` must all have the same length, got x \(1\), y \(2\)"),
    ({"columns": {"x": np.ones((2, 2), int)}}, ValueError, r"column `x` must be one-dimensional, got shape \(2, 2\)"),
    ({"columns": {"x": np.array(["2020-01-01"], "M8[D]")}}, TypeError, "column `x` has dtype datetime64"),
    ({"columns": {"x": ["a", [1]]}}, TypeError, "column `x` holds a list in row 1; labels must be strings"),
    ({"columns": {1: [1], "1": [2]}}, ValueError, "two columns with the same name: 1, 1"),
    ({"columns": {"x": [1, "1"]}}, ValueError, "column `x` has different labels that make the same group name: x=1"),
    ({"columns": {"a": ["b=c"], "a=b": ["c"]}}, ValueError, "several groups would share a name: a=b=c"),
    (
        {"columns": {"x": [0.5]}},
        ValueError,
        r"column `x` holds decimal numbers.*`bins=\{'x': \[...\]\}`.*`quantiles=\{'x': 4\}`",
    ),
    ({"columns": {"x": np.array([1.0, 2.0])}}, ValueError, "column `x` holds decimal numbers"),
    ({"columns": {"x": [1, 2.5]}}, ValueError, "column `x` holds decimal numbers"),
    (
        {"columns": {"x": ["a"]}, "bins": {"x": [1]}},
        TypeError,
        "column `x` is binned, so it must hold numbers, got 'a' in row 0",
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
    ({"columns": {"x": [1, 1]}, "quantiles": {"x": 2}}, ValueError, "column `x` has too few distinct values for 2"),
    ({"columns": {"x": [1]}, "bins": {"x": [1]}, "quantiles": {"x": 2}}, ValueError, "in both `bins` and `quantiles`"),
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
        (torch.ones(4), ValueError, r"got \(4,\); a single group is `groups\[:, None\]`"),
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


def test_groups_are_cut_by_rows():
    groups = cameras()[2]
    wanted = torch.tensor([5, 3, 3, 599])
    mask = torch.arange(600) % 3 == 0
    for rows in (slice(None, 200), slice(10, 300, 7), wanted, wanted.tolist(), mask, mask.numpy(), slice(0, 0)):
        part = groups[rows]
        chosen = rows if isinstance(rows, slice) else torch.as_tensor(rows)
        assert torch.equal(part.membership, groups.membership[chosen]) and part.names == groups.names
        assert part.num_rows == len(part.membership) and torch.equal(part.sizes, part.membership.sum(0))
    s = torch.randn(200).double()
    torch.testing.assert_close(gmc.violations(groups[:200], s), gmc.violations(groups.membership[:200], s))
    for rows in (3, "camera", 1.5, [0.5], None):
        with pytest.raises(TypeError):
            groups[rows]
    with pytest.raises(TypeError, match=r"indexed by rows.*groups.member"):
        groups[3]
    with pytest.raises(ValueError, match=r"mask of rows must have shape \(600,\)"):
        groups[mask[:7]]


@settings(deadline=None)
@given(columns=tables())
def test_cells_are_the_patterns_of_the_membership(columns: dict[str, list[Any]]) -> None:
    groups = Groups.from_columns(columns, intersections=min(2, len(columns)), overall=True)
    for ids, patterns in (groups.cells(), pattern_ids(groups.membership)):
        assert torch.equal(patterns[ids], groups.membership)
        assert torch.equal(patterns, torch.unique(groups.membership, dim=0))


# -- frames as people have them ------------------------------------------------------------------------------------------------


def test_ordered_categoricals_keep_their_order_and_integers_with_gaps_are_labels():
    pandas = pytest.importorskip("pandas")
    sizes = pandas.Categorical(["L", "S", "M", "S"], categories=["S", "M", "L", "XL"], ordered=True)
    frame = pandas.DataFrame({"size": sizes, "site": [3, np.nan, 12, 3]})
    groups = Groups.from_columns(frame, missing="level")
    assert groups.names == ("size=S", "size=M", "size=L", "site=3", "site=12", "site=missing")
    assert groups.transform(frame.iloc[[1]]).membership.int().tolist() == [[1, 0, 0, 0, 0, 1]]
    whole = pandas.DataFrame({"size": sizes[:1], "site": [12]})  # integers again where nothing is missing
    assert groups.transform(whole).membership.int().tolist() == [[0, 0, 1, 0, 1, 0]]
    unordered = frame.assign(size=frame["size"].astype(str))
    assert Groups.from_columns(unordered, missing="level").names[:3] == ("size=L", "size=M", "size=S")
    with pytest.raises(ValueError, match="decimal numbers"):
        Groups.from_columns({"x": np.array([0.5, np.nan])}, missing="level")
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"size": polars.Series(["L", "S"], dtype=polars.Enum(["S", "M", "L"]))})
    assert Groups.from_columns(frame).names == ("size=S", "size=L")


def test_groups_of_levels_without_rows(tmp_path):
    groups = Groups.from_levels({"sex": ["m", "f"], "site": [7, 3]}, intersections=2, bins={"age": [30, 50]})
    assert groups.num_rows == 0 and groups.names[:7] == (
        "sex=m",
        "sex=f",
        "site=7",
        "site=3",
        "age<30",
        "30<=age<50",
        "age>=50",
    )
    assert len(groups.names) == 7 + 4 + 6 + 6
    rows = {"sex": ["m", "m", "f"] * 40, "site": [3, 3, 7] * 40, "age": [20.0, 40.0, 60.0] * 40}
    want = Groups.from_columns(rows, intersections=2, bins={"age": [30, 50]})
    found = groups.transform(rows)
    for k, name in enumerate(want.names):
        assert torch.equal(found.membership[:, found.names.index(name)], want.membership[:, k])
    head = gmc.ProbabilityHead(None, groups, bins=None)
    with pytest.raises(ValueError, match=r"group 'sex=m & site=7' has no examples.*Groups.drop_small"):
        head.fit(torch.rand(120), torch.rand(120) < 0.5, found)
    with pytest.warns(UserWarning, match="left out groups with fewer than 1 rows: sex=m & site=7"):
        kept = found.drop_small()
    assert sorted(kept.names) == sorted(want.names) and bool((kept.sizes > 0).all())
    head = gmc.ProbabilityHead(None, kept, bins=None).fit(torch.rand(120), torch.rand(120) < 0.5, kept)
    loaded = gmc.load(gmc.save(head, tmp_path / "h.safetensors", groups=kept))
    new = {"sex": ["m"], "site": [3], "age": [70.0]}
    probs = torch.rand(1)
    assert torch.equal(loaded(probs, new), head(probs, kept.transform(new).membership))
    strange = {"sex": ["x"], "site": [3], "age": [70.0]}
    with pytest.raises(ValueError, match="unknown='none'"):
        loaded(probs, strange)
    assert loaded.transform(strange, unknown="none").sum() == 2  # site and age; their combination was dropped
    for wrong in ({"sex": []}, {"sex": "mf"}):
        with pytest.raises(TypeError, match="`levels` must map the name of each column to a list"):
            Groups.from_levels(wrong)
