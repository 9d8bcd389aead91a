"""Groups as JSON: what a file keeps of them."""

import json
from datetime import date
from typing import Any

import numpy as np
import pytest

from torchgmc.groups.description import SCHEMA
from torchgmc.groups.groups import Groups

COLUMNS = {
    "sex": ["f", "m", "f", None],
    "site": [3, 12, 3, 7],
    "ok": [True, False, True, True],
    "age": [20.0, 40.0, 61.0, 33.0],
}
GROUPS = Groups.from_columns(COLUMNS, intersections=3, bins={"age": [30, 50.5]}, missing="level", overall=True)


def through_json(groups: Groups) -> Groups:
    return Groups.from_dict(json.loads(json.dumps(groups.to_dict(), allow_nan=False)))


def test_round_trip() -> None:
    for groups in (GROUPS, GROUPS.as_spelled(), GROUPS[:0]):
        again = through_json(groups)
        assert again.num_rows == 0 and again.names == groups.names and again.columns == groups.columns
        assert again.transform(COLUMNS).membership.equal(GROUPS.membership)
        assert again.to_dict() == groups.to_dict()
    assert "Groups: " in repr(through_json(GROUPS)) and through_json(GROUPS).sizes.sum() == 0


def test_no_row_is_in_it() -> None:
    twice = Groups.from_columns({name: [*values, *values] for name, values in COLUMNS.items()}, bins={"age": [30]}, missing="level")
    once = Groups.from_columns(COLUMNS, bins={"age": [30]}, missing="level")
    assert twice.to_dict() == once.to_dict()


def test_merged_labels_stay_merged() -> None:
    with pytest.warns(UserWarning, match="merged into x=other"):
        groups = Groups.from_columns({"x": ["a", "a", "b", "c"]}, min_size=2, small="merge")
    assert through_json(groups).transform({"x": ["c", "a", "b"]}).membership.int().tolist() == [[0, 1], [1, 0], [0, 1]]


def test_labels_that_json_cannot_hold() -> None:
    assert through_json(Groups.from_columns({"x": np.array([np.int64(3), "a"], dtype=object)})).names == ("x=3", "x=a")
    with pytest.raises(TypeError, match="column `day` has the label datetime.date.*, a date, which JSON cannot hold"):
        Groups.from_columns({"day": [date(2020, 1, 1)]}).to_dict()


def changed(**parts: Any) -> dict[str, Any]:
    return GROUPS.to_dict() | parts


def column(**parts: Any) -> dict[str, Any]:
    found = GROUPS.to_dict()
    found["columns"][0] |= parts
    return found


@pytest.mark.parametrize(
    ("found", "error", "message"),
    [
        ([], TypeError, "must be the output of `Groups.to_dict`, got list"),
        ({}, ValueError, "is not the output of `Groups.to_dict`: KeyError: 'columns'"),
        (
            changed(schema=SCHEMA + 1),
            ValueError,
            f"has schema {SCHEMA + 1}, but this version of torchgmc reads up to {SCHEMA}; upgrade",
        ),
        (changed(columns=3), ValueError, "is not the output of `Groups.to_dict`"),
        (changed(columns=[]), ValueError, "is not the output of `Groups.to_dict`"),
        (changed(combinations=[]), ValueError, "it has no groups"),
        (changed(combinations=[[[9], [0]]]), ValueError, "does not name columns in order"),
        (changed(combinations=[[[1, 0], [0]]]), ValueError, "does not name columns in order"),
        (changed(combinations=[[[0], [99]]]), ValueError, "must be increasing numbers below 3"),
        (changed(combinations=[[[0], [1, 0]]]), ValueError, "must be increasing numbers below 3"),
        (changed(combinations=[[[0], [-1]]]), ValueError, "must be increasing numbers below 3"),
        (column(name=3), ValueError, "must have a name"),
        (column(levels=[]), ValueError, "names of levels"),
        (column(labels=[["f", 7]]), ValueError, "a label of the column 'sex' has no level"),
        (column(edges=[1.0, 2.0, 3.0]), ValueError, "must have a level for each interval"),
    ],
)
def test_what_is_refused(found: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Groups.from_dict(found)
