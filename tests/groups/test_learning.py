"""Groups learned block by block are those of all rows together."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from torchgmc.groups.columns import ColumnError
from torchgmc.groups.groups import Groups
from torchgmc.groups.learning import typed


def rows(n: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "sex": rng.choice(np.array(["f", "m", None], dtype=object), n),
        "site": rng.integers(-3, 12, n),
        "old": rng.random(n) < 0.5,
        "age": np.where(rng.random(n) < 0.1, np.nan, rng.integers(20, 80, n)),
    }


def blocks(columns: dict[str, Any], size: int) -> Any:
    n = len(columns["sex"])
    return ({name: values[k : k + size] for name, values in columns.items()} for k in range(0, n, size))


@settings(deadline=None, max_examples=30)
@given(
    n=st.integers(1, 40),
    size=st.integers(1, 9),
    seed=st.integers(0, 2**16),
    order=st.integers(1, 4),
    min_size=st.integers(0, 4),
    small=st.sampled_from(["error", "drop", "merge"]),
    overall=st.booleans(),
)
def test_blocks_against_all_rows(n: int, size: int, seed: int, order: int, min_size: int, small: str, overall: bool) -> None:
    data = rows(n, seed)
    options: dict[str, Any] = {"intersections": order, "bins": {"age": [40, 60]}, "min_size": min_size, "small": small}
    options |= {"missing": "level", "overall": overall}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = Groups.from_columns(data, **options)
        except ValueError as error:
            with pytest.raises(ValueError, match="min_size"):
                Groups.learn(blocks(data, size), **options)
            assert "min_size" in str(error)
            return
        found = Groups.learn(blocks(data, size), **options)
    assert found.num_rows == 0 and found.names == expected.names and found.columns == expected.columns
    assert found.transform(data).membership.equal(expected.membership)


def as_text(values: Any) -> list[str | None]:
    return [None if v is None or v != v else str(v) for v in values.tolist()]


def test_text_gives_the_groups_of_numbers() -> None:
    data = rows(200, 0)
    text = {name: as_text(values) for name, values in data.items()}
    options: dict[str, Any] = {"bins": {"age": [40, 60]}, "missing": "level", "intersections": 2}
    numbers, spelled = Groups.from_columns(data, **options), Groups.learn([text], spelled=True, **options)
    assert spelled.names == numbers.names
    for columns in (data, text):
        assert spelled.transform(columns).membership.equal(numbers.membership)
    other = Groups.from_columns({"site": ["2", "10"]}).as_spelled()  # text is known again as a number, too
    assert other.transform({"site": [10, 2]}).membership.equal(other.transform({"site": ["10", "2"]}).membership)
    with pytest.raises(ValueError, match="column `site` has 3 in row 0"):
        other.transform({"site": [3]})
    assert other.transform({"site": [3, 2]}, unknown="none").membership.sum() == 1


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["2", "10", "-3"], [2, 10, -3]),
        (["True", "False"], [True, False]),
        (["True", "1"], ["True", "1"]),
        (["--5", "5"], ["--5", "5"]),
        (["-0", "0"], ["-0", "0"]),
        (["007", "12"], ["007", "12"]),  # a code, not a number
        (["9" * 40, "1"], ["9" * 40, "1"]),
        (["1_0", "2"], ["1_0", "2"]),
        (["١", "2"], ["١", "2"]),
        (["f", "2"], ["f", "2"]),
        (["nan", "inf"], ["nan", "inf"]),
        (["3", None], [3, None]),
        ([3, "3x"], [3, "3x"]),
        ([None], [None]),
    ],
)
def test_what_text_is(texts: list[Any], expected: list[Any]) -> None:
    assert [(type(v), v) for v in typed("x", texts)] == [(type(v), v) for v in expected]


@pytest.mark.parametrize("texts", [["0.5", "1"], ["1e3", "2"]])
def test_text_of_decimals_is_refused(texts: list[str]) -> None:
    with pytest.raises(ColumnError, match="column `x` holds decimal numbers, which are not labels; cut it with `bins=") as caught:
        Groups.learn([{"x": texts}], spelled=True)
    assert caught.value.kind == "floats" and Groups.learn([{"x": texts}]).names == (f"x={texts[0]}", f"x={texts[1]}")


def test_messages_count_rows_over_all_blocks() -> None:
    with pytest.raises(ColumnError, match=r"column `sex` has no value in row 3; fill it in, or pass `missing='level'`"):
        Groups.learn([{"sex": ["f", "m"]}, {"sex": ["f", None]}])
    with pytest.raises(ColumnError, match="column `age` has no value in row 2"):
        Groups.learn([{"age": [1.0, 2.0]}, {"age": [np.nan]}], bins={"age": [1.5]})
    with pytest.raises(TypeError, match="column `age` is binned, so it must hold numbers, got 'x' in row 1"):
        Groups.learn([{"age": ["1"]}, {"age": ["x"]}], bins={"age": [1.5]}, spelled=True)
    groups = Groups.from_columns({"sex": ["f", "m"]})
    with pytest.raises(ColumnError, match="column `sex` has 'x' in row 41"):
        groups.transform({"sex": ["f", "x"]}, start=40)


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        ([], {}, ValueError, "`blocks` must have at least one row"),
        ([{"x": []}], {}, ValueError, "`blocks` must have at least one row"),
        ({"x": [1]}, {}, TypeError, "`blocks` must be an iterable of mappings or frames, got dict"),
        (3, {}, TypeError, "`blocks` must be an iterable"),
        ([{"x": [1]}, {"y": [1]}], {}, ValueError, "`blocks` must have the columns x, got y"),
        ([{"x": [0.5]}], {}, ValueError, "holds decimal numbers, which are not labels"),
        ([{"x": [1]}], {"intersections": 2}, ValueError, "`intersections` must be a whole number from 1"),
        ([{"x": [1]}], {"bins": {"y": [1]}}, ValueError, "`bins` names y"),
        ([{"x": [1]}], {"small": "forget"}, ValueError, "`small` must be"),
    ],
)
def test_bad_blocks(given: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Groups.learn(given, **options)


def test_options_are_checked_before_all_blocks_are_read() -> None:
    def endless() -> Any:
        yield {"x": [1, 2]}
        raise AssertionError("the options are wrong: no other block is to be asked for")

    with pytest.raises(ValueError, match="`missing` must be"):
        Groups.learn(endless(), missing="guess")


def test_empty_blocks_do_not_matter() -> None:
    groups = Groups.learn([{"x": []}, {"x": ["a"]}, {"x": []}, {"x": ["b"]}])
    assert groups.names == ("x=a", "x=b") and groups.transform({"x": ["b"]}).membership.equal(torch.tensor([[False, True]]))


def test_bytes_are_text() -> None:
    assert Groups.from_columns({"x": np.array([b"a", "é".encode()])}).names == ("x=a", "x=é")
    with pytest.raises(ValueError, match="column `x` holds bytes that are not UTF-8"):
        Groups.from_columns({"x": np.array([b"\xff"])})
