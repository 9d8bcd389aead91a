"""Groups from rows that come in blocks: only which values occur, and which occur together, is kept."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchgmc.engine import checks
from torchgmc.engine.clusters import INTEGER
from torchgmc.groups.columns import ColumnError, as_mapping, bin_of, factorize, num_rows, number, read, refuse_floats, to_numbers


def few_rows(
    blocks: Iterable[Any],
    bins: Mapping[str, Sequence[float]],
    min_size: int,
    missing: str,
    spelled: bool,
    check: Callable[[dict[str, Any], int], None],
) -> dict[str, npt.NDArray[Any]]:
    """Columns that give the same groups as all blocks: each combination of values, at most ``min_size`` times.

    ``blocks``: mappings or frames with the same columns. ``bins``, ``min_size``, ``missing``, ``spelled``: as for
    :meth:`Groups.learn`. ``check``: called with the first block and its number of rows, before anything else is done.
    """
    if not isinstance(blocks, Iterable) or isinstance(blocks, Mapping | str):
        raise TypeError(f"`blocks` must be an iterable of mappings or frames, got {type(blocks).__name__}.")
    names: list[str] = []
    seen: Counter[tuple[Any, ...]] = Counter()
    start = 0
    for block in blocks:
        data = as_mapping(block)
        rows = num_rows(data)
        if not rows:
            continue
        if not names:
            check(data, rows)
            names = list(data)
        if list(data) != names:
            raise ValueError(f"`blocks` must have the columns {checks.listing(names)}, got {checks.listing(list(data)) or 'none'}.")
        coded = []
        for name, values in data.items():
            array = read(name, values)
            if name in bins:  # one value for each bin, None for a missing one
                place = bin_of(to_numbers(name, array, spelled, start), bins[name], len(bins[name]) + 1)
                found = [-np.inf, *bins[name], None], place
            else:
                found = factorize(name, array)
                refuse_floats(name, array, [label for label in found[0] if label is not None])
            if missing == "error" and None in found[0] and (absent := found[1] == found[0].index(None)).any():
                remedy = f"; fill it in, or pass `missing='level'` to make such rows the group `{name}=missing`."
                raise ColumnError(name, "missing", f"has no value in row {start + int(absent.argmax())}", remedy)
            coded.append(found)
        keys, counts = np.unique(np.stack([codes for _, codes in coded], 1), axis=0, return_counts=True)
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            seen[tuple(values[code] for (values, _), code in zip(coded, key, strict=True))] += count
        start += rows
    if not seen:
        raise ValueError("`blocks` must have at least one row.")
    # A group is a sum of combinations: min_size rows of each tell as much as all of them.
    times = np.minimum(np.fromiter(seen.values(), dtype=np.int64, count=len(seen)), min(max(1, int(min_size)), 2**62))
    few = {}
    for j, name in enumerate(names):
        labels = [row[j] for row in seen]
        kept = typed(name, labels) if spelled and name not in bins else labels
        few[name] = np.repeat(np.fromiter(kept, dtype=object, count=len(kept)), times)
    return few


def typed(name: str, labels: Sequence[Any]) -> list[Any]:
    """Text that is all integers, or all True and False, converted: a text file then makes the same groups as numbers.

    Example:
        >>> typed("site", ["10", None, "2"]), typed("zip", ["010", "2"]), typed("x", ["--5", "5"])
        ([10, None, 2], ['010', '2'], ['--5', '5'])
    """
    texts = {label for label in labels if isinstance(label, str)}
    if texts and all(label is None or isinstance(label, str) for label in labels):
        if all(map(INTEGER.fullmatch, texts)):
            return [label if label is None else int(label) for label in labels]
        if texts <= {"True", "False"}:
            return [label if label is None else label == "True" for label in labels]
        written = any("." in text or "e" in text.lower() for text in texts)
        if written and all(number(text, spelled=True) is not None for text in texts):
            refuse_floats(name, np.zeros(1), [])
    return list(labels)
