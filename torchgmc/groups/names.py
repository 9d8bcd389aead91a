"""Terms, the (column, level) pairs that make a group, and their names."""

from collections.abc import Sequence

import numpy as np

from torchgmc.engine.checks import printable
from torchgmc.groups.columns import Codes, Column
from torchgmc.groups.sums import Combo


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
