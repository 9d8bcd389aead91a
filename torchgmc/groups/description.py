"""Names of groups, and how they are computed from columns, in JSON types: what a file stores about them, without any rows."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchgmc.engine.checks import printable
from torchgmc.groups.columns import Codes, Column
from torchgmc.groups.sums import Combo

#: Version of the layout. A later one raises.
SCHEMA = 1


def describe(columns: Sequence[Column], blocks: Sequence[tuple[Combo, Codes]]) -> dict[str, Any]:
    """Columns, and for each combination of them the keys of its groups."""

    def one(c: Column) -> dict[str, Any]:
        labels = [[_plain(c.name, label), int(level)] for label, level in c.labels.items()]
        edges = None if c.edges is None else list(c.edges)
        return {"name": c.name, "levels": list(c.levels), "labels": labels, "edges": edges, "spelled": c.spelled}

    combinations = [[list(combo), keys.tolist()] for combo, keys in blocks]
    return {"schema": SCHEMA, "columns": [one(c) for c in columns], "combinations": combinations}


def _plain(name: str, label: Any) -> Any:
    value = label.item() if isinstance(label, np.generic) else label
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise TypeError(f"column `{name}` has the label {label!r}, a {type(label).__name__}, which JSON cannot hold; use text.")


def restore(found: Any) -> tuple[tuple[Column, ...], list[tuple[Combo, Codes]]]:
    """The arguments of :func:`describe`."""
    if not isinstance(found, Mapping):
        raise TypeError(f"`found` must be the output of `Groups.to_dict`, got {type(found).__name__}.")
    schema = found.get("schema", SCHEMA)
    if not isinstance(schema, int) or schema > SCHEMA:
        raise ValueError(f"`found` has schema {schema!r}, but this version of torchgmc reads up to {SCHEMA}; upgrade torchgmc.")
    try:
        columns = tuple(map(_column, found["columns"]))
        blocks = [_block(columns, combo, keys) for combo, keys in found["combinations"]]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"`found` is not the output of `Groups.to_dict`: {type(error).__name__}: {error}") from error
    if not columns or not blocks:
        raise ValueError("`found` is not the output of `Groups.to_dict`: it has no groups.")
    return columns, blocks


def _column(found: Mapping[str, Any]) -> Column:
    name, levels, edges = found["name"], tuple(found["levels"]), found["edges"]
    labels = {label: level for label, level in found["labels"]}
    if not isinstance(name, str) or not levels or not all(isinstance(level, str) for level in levels):
        raise TypeError(f"the column {name!r} must have a name and names of levels")
    if not all(isinstance(level, int) and 0 <= level < len(levels) for level in labels.values()):
        raise ValueError(f"a label of the column {name!r} has no level")
    if edges is not None and not (len(levels) - len(edges) in (1, 2) and np.isfinite(np.asarray(edges, dtype=float)).all()):
        raise ValueError(f"the column {name!r} must have a level for each interval")
    return Column(name, levels, labels, None if edges is None else tuple(edges), bool(found.get("spelled", False)))


def _block(columns: Sequence[Column], combo: Sequence[int], keys: Sequence[int]) -> tuple[Combo, Codes]:
    places = tuple(combo)
    if not all(isinstance(j, int) and 0 <= j < len(columns) for j in places) or list(places) != sorted(set(places)):
        raise ValueError(f"{combo} does not name columns in order")
    total = math.prod(len(columns[j].levels) for j in places)
    table = np.array(keys, dtype=np.int64)
    if table.ndim != 1 or not len(table) or table[0] < 0 or table[-1] >= total or (np.diff(table) <= 0).any():
        raise ValueError(f"the groups of the columns {combo} must be increasing numbers below {total}")
    return places, table


def digits(columns: Sequence[Column], combo: Combo, keys: Codes) -> Codes:
    """The levels that keys of one combination stand for, shape ``(len(keys), len(combo))``."""
    if not combo:
        return np.zeros((len(keys), 0), dtype=np.int64)
    return np.stack(np.unravel_index(keys, [len(columns[j].levels) for j in combo]), axis=1)


def terms_of(columns: Sequence[Column], combo: tuple[int, ...], keys: Codes) -> list[tuple[tuple[int, int], ...]]:
    """For each key its (column index, level index) pairs."""
    return [tuple(zip(combo, row, strict=True)) for row in digits(columns, combo, keys).tolist()]


def term_name(columns: Sequence[Column], term: tuple[tuple[int, int], ...]) -> str:
    return printable(" & ".join(columns[j].levels[level] for j, level in term)) or "all"


def listing_of_terms(columns: Sequence[Column], refused: list[tuple[Combo, Codes, Codes]], limit: int = 12) -> str:
    """The first few of the groups and their sizes: there may be very many."""
    total = sum(len(keys) for _, keys, _ in refused)
    shown: list[str] = []
    for combo, keys, counts in refused:
        terms = terms_of(columns, combo, keys[: limit - len(shown)])
        shown += [f"{term_name(columns, term)} ({size})" for term, size in zip(terms, counts.tolist(), strict=False)]
    return ", ".join(shown) + (f" and {total - limit} more" if total > limit else "")


def names_differ(columns: Sequence[Column]) -> bool:
    """Whether the levels show that no two groups share a name: a name then identifies its levels, and these their columns."""
    levels = [printable(level) for column in columns for level in column.levels]
    return len(set(levels)) == len(levels) and not any("&" in level for level in levels)
