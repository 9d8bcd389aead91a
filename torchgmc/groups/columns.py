"""One column of labels or numbers to integer codes: what :class:`torchgmc.groups.Groups` is made of."""

import contextlib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchgmc.engine import checks

Codes = npt.NDArray[np.int64]


class ColumnError(ValueError):
    """A column that cannot be used as it is.

    ``column``: its name. ``kind``: ``"floats"``, ``"missing"`` or ``"unknown"``. ``problem``: what is wrong, without the
    remedy, which differs outside Python.
    """

    def __init__(self, column: str, kind: str, problem: str, remedy: str) -> None:
        super().__init__(f"column `{column}` {problem}{remedy}")
        self.column, self.kind, self.problem = column, kind, problem


@dataclass(frozen=True)
class Column:
    """How one column is coded: its levels in order, and which label or interval each stands for.

    Attributes:
        name: the column's name.
        levels: a group name per level, such as ``"sex=female"`` or ``"30<=age<50"``.
        labels: the level of every known label (several share one after a merge); the key ``None`` is a missing value.
        edges: of a numeric column; level k holds ``edges[k - 1] <= value < edges[k]``. None for a column of labels.
        spelled: values are compared as text: "3" matches the label 3 and the number 3.

    Example:
        >>> groups = gmc.Groups.from_columns({"age": [25, 61, 40]}, bins={"age": [30, 50]})
        >>> groups.columns[0].levels
        ('age<30', '30<=age<50', 'age>=50')
    """

    name: str
    levels: tuple[str, ...]
    labels: dict[Any, int]
    edges: tuple[float, ...] | None = None
    spelled: bool = False

    def encode(self, values: Any, unknown: str = "error", start: int = 0) -> Codes:
        """The level of every value, shape ``(n,)``; -1 for an unknown label if ``unknown="none"``.

        Messages count rows from ``start``.

        Example:
            >>> column = gmc.Groups.from_columns({"sex": ["f", "m"]}).columns[0]
            >>> column.encode(["m", "x", "f"], unknown="none").tolist()
            [1, -1, 0]
        """
        array = read(self.name, values)
        if self.edges is not None:
            numbers = to_numbers(self.name, array, self.spelled, start)
            codes = bin_of(numbers, self.edges, self.labels.get(None, -1))
        else:
            labels, inverse = factorize(self.name, array)
            table = np.array([self._level(label) for label in labels], dtype=np.int64)
            codes = table[inverse]
        if unknown == "error" and (codes < 0).any():
            row = int((codes < 0).argmax())
            label = "a missing value" if self.edges is not None else _show_label(labels[inverse[row]])
            known = checks.listing(_show_label(label) for label in self.labels) or "numbers only"
            raise ColumnError(
                self.name,
                "unknown",
                f"has {label} in row {start + row}, which did not occur when the groups were made; known: {known}",
                ". Pass `unknown='none'` to put such rows in no group of this column.",
            )
        return codes

    def _level(self, label: Any) -> int:
        level = self.labels.get(label, -1)
        return self._spellings.get(str(label), -1) if level < 0 and self.spelled and label is not None else level

    @cached_property
    def _spellings(self) -> dict[str, int]:
        return {str(label): level for label, level in self.labels.items() if label is not None}


def as_mapping(columns: Any) -> dict[str, Any]:
    if isinstance(columns, Mapping):
        pairs = list(columns.items())
    elif hasattr(columns, "columns") and hasattr(columns, "__getitem__"):
        pairs = [(name, columns[name]) for name in columns.columns]
    else:
        raise TypeError(f"`columns` must map names to columns (a dict, or a pandas or polars frame), got {type(columns).__name__}.")
    data = {str(name): values for name, values in pairs}
    if len(data) < len(pairs):
        raise ValueError(f"`columns` has two columns with the same name: {checks.listing(str(name) for name, _ in pairs)}.")
    return data


def num_rows(data: dict[str, Any]) -> int:
    for name, values in data.items():
        if isinstance(values, str | bytes) or not hasattr(values, "__len__") or getattr(values, "ndim", 1) == 0:
            raise TypeError(f"column `{name}` must be a list, tuple, array, tensor or series, got {type(values).__name__}.")
    lengths = {name: len(values) for name, values in data.items()}
    if len(set(lengths.values())) > 1:
        listed = checks.listing(f"{name} ({length})" for name, length in lengths.items())
        raise ValueError(f"`columns` must all have the same length, got {listed}.")
    return next(iter(lengths.values()), 0)


def check_options(
    data: dict[str, Any],
    n: int,
    intersections: int,
    bins: dict[str, Sequence[float]],
    quantiles: dict[str, int],
    min_size: int,
    small: str,
    missing: str,
) -> None:
    if not data or n == 0:
        raise ValueError(f"`columns` must have at least one column and one row, got {len(data)} columns of {n} rows.")
    for name, value in (("intersections", intersections), ("min_size", min_size)):
        if not isinstance(value, int | float | np.integer) or value != value or abs(value) == math.inf:
            raise TypeError(f"`{name}` must be a whole number, got {value!r}.")
    if intersections != int(intersections) or not 1 <= intersections <= len(data):
        raise ValueError(
            f"`intersections` must be a whole number from 1 to the number of columns, {len(data)}, got {intersections}."
        )
    if min_size != int(min_size) or min_size < 0:
        raise ValueError(f"`min_size` must be a whole number >= 0, got {min_size}.")
    if small not in ("error", "drop", "merge"):
        raise ValueError(f"`small` must be 'error', 'drop' or 'merge', got {small!r}.")
    if missing not in ("error", "level"):
        raise ValueError(f"`missing` must be 'error' or 'level', got {missing!r}.")
    for option, given in (("bins", bins), ("quantiles", quantiles)):
        if foreign := [str(name) for name in given if name not in data]:
            raise ValueError(f"`{option}` names {checks.listing(foreign)}, but the columns are {checks.listing(data)}.")
    if both := [name for name in bins if name in quantiles]:
        raise ValueError(f"column `{both[0]}` is in both `bins` and `quantiles`; pass it in only one of them.")
    for name, edges in bins.items():
        cuts = np.asarray(edges, dtype=np.float64)
        if cuts.ndim != 1 or not len(cuts) or not np.isfinite(cuts).all() or (np.diff(cuts) <= 0).any():
            raise ValueError(f"`bins[{name!r}]` must be increasing finite edges, such as [30, 50], got {edges}.")
    for name, count in quantiles.items():
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or not 2 <= count <= 10**6:
            raise ValueError(f"`quantiles[{name!r}]` must be a number of bins >= 2, got {count}.")


def read(name: str, values: Any) -> npt.NDArray[Any]:
    """The column as a one-dimensional array; anything that numpy would have to convert stays an array of objects."""
    array: npt.NDArray[Any]
    if isinstance(values, Tensor):
        if values.is_complex() or values.device.type == "meta" or values.layout != torch.strided:
            raise TypeError(f"column `{name}` must hold real values, got {values.dtype} on {values.device}, {values.layout}.")
        values = values.detach().cpu()
        array = (values.double() if values.is_floating_point() else values).numpy()
    elif isinstance(values, np.ndarray):
        array = values
    elif _would_turn_to_float(values):
        array = np.fromiter(values.to_list(), dtype=object, count=len(values))
    elif hasattr(values, "to_numpy"):
        array = np.asarray(values.to_numpy())
    else:
        array = np.fromiter(values, dtype=object, count=len(values))
    if array.dtype.kind == "S":
        try:
            array = np.char.decode(array, "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"column `{name}` holds bytes that are not UTF-8; decode it first: {error}") from None
    if array.ndim != 1:
        raise ValueError(f"column `{name}` must be one-dimensional, got shape {array.shape}.")
    if array.dtype.kind not in "biufOU":
        raise TypeError(f"column `{name}` has dtype {array.dtype}; turn it into labels (strings) or numbers first.")
    return array


def _would_turn_to_float(values: Any) -> bool:
    """Whether this is a polars or pandas series of integers or booleans with missing values."""
    if callable(getattr(values, "null_count", None)):  # polars
        return bool(values.null_count())
    return bool(getattr(values, "hasnans", False)) and values.dtype.kind in "biu"


def factorize(name: str, array: npt.NDArray[Any]) -> tuple[list[Any], Codes]:
    """Distinct labels, with every missing value as None, and for each row the index of its label."""
    if array.dtype.kind in "biuf":
        values, inverse = _distinct(array)
        labels = values.tolist()
    else:
        index: dict[Any, int] = {}
        try:
            inverse = np.fromiter(
                (index.setdefault(label, len(index)) for label in array.tolist()), dtype=np.int64, count=len(array)
            )
        except TypeError:
            raise TypeError(f"column `{name}` holds a {_unhashable(array)}; labels must be strings, integers or bools.") from None
        labels = list(index)
    kept: dict[Any, int] = {}
    table = [kept.setdefault(None if _is_missing(label) else label, len(kept)) for label in labels]
    return list(kept), np.array(table, dtype=np.int64)[inverse]


def _distinct(array: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Codes]:
    """``np.unique`` with the inverse; integers of a narrow range are counted, which is many times faster than sorting."""
    if array.dtype.kind in "biu" and len(array):
        low, high = int(array.min()), int(array.max())
        if high - low < max(1024, len(array)) and low > -(2**62) and high < 2**62:
            place = array.astype(np.int64) - low
            seen = np.bincount(place, minlength=high - low + 1) > 0
            return (seen.nonzero()[0] + low).astype(array.dtype), (np.cumsum(seen) - 1)[place]
    values, inverse = np.unique(array, return_inverse=True)
    return values, inverse.astype(np.int64)


def _unhashable(array: npt.NDArray[Any]) -> str:
    for row, label in enumerate(array.tolist()):
        try:
            hash(label)
        except TypeError:
            return f"{type(label).__name__} in row {row}"
    raise AssertionError("every label has a hash")


def _is_missing(label: Any) -> bool:
    if label is None or type(label).__name__ in ("NAType", "NaTType"):  # pandas
        return True
    return isinstance(label, float | np.floating) and bool(label != label)


def _is_number(label: Any) -> bool:
    return isinstance(label, int | float | np.number | np.bool_)


def ordered_levels(values: Any) -> list[Any]:
    """Levels of an ordered categorical of pandas, or an Enum of polars, in their order; empty for anything else."""
    kind = getattr(values, "dtype", None)
    ordered = getattr(kind, "ordered", type(kind).__name__ == "Enum")
    return list(getattr(kind, "categories", ())) if ordered else []


def fit_labels(
    name: str, array: npt.NDArray[Any], merge_below: int, missing: str, given: Sequence[Any] = ()
) -> tuple[Column, Codes]:
    """A level per label: in the order ``given``, else sorted."""
    if array.dtype.kind == "f" and np.isnan(array).any() and np.all(np.mod(array[~np.isnan(array)], 1) == 0):
        array = np.array([None if v != v else int(v) for v in array.tolist()], dtype=object)  # integers, but for missing ones
    labels, inverse = factorize(name, array)
    known = [label for label in labels if label is not None]
    refuse_floats(name, array, known)
    if len(known) < len(labels) and missing == "error":
        _raise_missing(name, inverse == labels.index(None))
    with contextlib.suppress(TypeError):  # labels of a type without an order keep their order
        known.sort(key=lambda label: (type(label).__name__, label))
    known.sort(key=lambda label: given.index(label) if label in given else len(given))
    order = known + [None] * (len(known) < len(labels))
    levels = [f"{name}=missing" if label is None else f"{name}={label}" for label in order]
    coded = {label: i for i, label in enumerate(order)}
    counts = dict(zip(labels, np.bincount(inverse, minlength=len(labels)).tolist(), strict=True))
    rare = [label for label in order if counts[label] < merge_below]
    if len(rare) > 1:
        listed = checks.listing([f"{levels[coded[label]]} ({counts[label]})" for label in rare])
        warnings.warn(f"merged into {name}=other because each has fewer than {merge_below} rows: {listed}.", stacklevel=3)
        common = [label for label in order if counts[label] >= merge_below]
        levels = [levels[coded[label]] for label in common] + [f"{name}=other"]
        coded = {label: i for i, label in enumerate(common)} | dict.fromkeys(rare, len(common))
    if len(set(levels)) < len(levels):
        double = sorted({level for level in levels if levels.count(level) > 1})
        raise ValueError(f"column `{name}` has different labels that make the same group name: {checks.listing(double)}; rename.")
    table = np.array([coded[label] for label in labels], dtype=np.int64)
    return Column(name, tuple(levels), coded), table[inverse]


def refuse_floats(name: str, array: npt.NDArray[Any], known: Sequence[Any]) -> None:
    """Raise for numbers with a fraction: they are not labels."""
    if array.dtype.kind == "f" or (any(isinstance(v, float | np.floating) for v in known) and all(map(_is_number, known))):
        remedy = f"cut it with `bins={{{name!r}: [...]}}` (edges) or `quantiles={{{name!r}: 4}}`, or turn it into integers"
        raise ColumnError(name, "floats", "holds decimal numbers, which are not labels", f"; {remedy} or strings.")


def to_numbers(name: str, array: npt.NDArray[Any], spelled: bool = False, start: int = 0) -> npt.NDArray[np.float64]:
    """The column as floats, NaN where a value is missing; numbers may be ``spelled``, as text."""
    if array.dtype.kind in "biuf":
        return array.astype(np.float64)
    labels, inverse = factorize(name, array)
    numbers = [number(label, spelled) for label in labels]
    if None in numbers:
        place = numbers.index(None)
        row = start + int((inverse == place).argmax())
        raise TypeError(f"column `{name}` is binned, so it must hold numbers, got {labels[place]!r} in row {row}.")
    return np.array(numbers, dtype=np.float64)[inverse]


def number(label: Any, spelled: bool) -> float | None:
    """NaN for a missing label, None for one that is no number."""
    if label is None:
        return math.nan
    try:
        return float(label) if _is_number(label) or (spelled and isinstance(label, str)) else None
    except ValueError:
        return None


def bin_of(numbers: npt.NDArray[np.float64], edges: Sequence[float], missing: int) -> Codes:
    codes = np.searchsorted(np.asarray(edges, dtype=np.float64), numbers, side="right")
    return np.where(np.isnan(numbers), missing, codes).astype(np.int64)


def fit_numbers(name: str, numbers: npt.NDArray[np.float64], cuts: Any, merge_below: int, missing: str) -> tuple[Column, Codes]:
    """Cut at the edges `cuts`, or into `cuts` quantiles if it is an integer."""
    absent = np.isnan(numbers)
    if absent.any() and missing == "error":
        _raise_missing(name, absent)
    exact = not isinstance(cuts, int | np.integer)
    edges = [float(cut) for cut in cuts] if exact else _quantile_edges(name, numbers[~absent], int(cuts))
    if merge_below:
        counts = np.bincount(bin_of(numbers[~absent], edges, -1), minlength=len(edges) + 1).tolist()
        merged = _merge_bins(edges, counts, merge_below)
        if not merged:
            raise ValueError(f"column `{name}` cannot be cut into bins of `min_size` = {merge_below} rows; lower `min_size`.")
        if len(merged) < len(edges):
            shown = checks.listing(_show_edge(edge, exact) for edge in merged)
            warnings.warn(
                f"merged bins of `{name}` with fewer than {merge_below} rows; the remaining edges are {shown}.", stacklevel=3
            )
        edges = merged
    levels = _bin_names(name, edges, exact)
    labels: dict[Any, int] = {}
    if absent.any():
        labels[None] = len(levels)
        levels.append(f"{name}=missing")
    return Column(name, tuple(levels), labels, tuple(edges)), bin_of(numbers, edges, labels.get(None, -1))


def _quantile_edges(name: str, numbers: npt.NDArray[np.float64], count: int) -> list[float]:
    """Values of the column itself, so that the names stay short; fewer than asked where values repeat."""
    if len(numbers):
        edges = np.unique(np.quantile(numbers, np.arange(1, count) / count, method="higher"))
        edges = edges[(edges > numbers.min()) & np.isfinite(edges)]
        if len(edges):
            return [float(edge) for edge in edges]
    raise ValueError(f"column `{name}` has too few distinct values for {count} quantiles; remove it or use `bins`.")


def _merge_bins(edges: list[float], counts: list[int], min_size: int) -> list[float]:
    """Drop edges from the left until each bin has `min_size` rows; what remains at the right joins the last bin."""
    kept: list[float] = []
    size = 0
    for edge, count in zip(edges, counts, strict=False):
        size += count
        if size >= min_size:
            kept.append(edge)
            size = 0
    return kept[:-1] if size + counts[-1] < min_size else kept


def _bin_names(name: str, edges: list[float], exact: bool) -> list[str]:
    shown = [_show_edge(edge, exact) for edge in edges]
    if len(set(shown)) < len(shown):
        shown = [_show_edge(edge, True) for edge in edges]
    inner = [f"{low}<={name}<{high}" for low, high in pairwise(shown)]
    return [f"{name}<{shown[0]}", *inner, f"{name}>={shown[-1]}"]


def _show_edge(edge: float, exact: bool) -> str:
    whole = edge.is_integer() and abs(edge) < 1e15
    return str(int(edge)) if whole else repr(edge) if exact else f"{edge:.6g}"


def _show_label(label: Any) -> str:
    return "a missing value" if label is None else repr(label.item() if isinstance(label, np.generic) else label)


def _raise_missing(name: str, absent: npt.NDArray[np.bool_]) -> None:
    raise ColumnError(
        name,
        "missing",
        f"has {int(absent.sum())} missing values, the first in row {int(absent.argmax())}",
        f"; fill them in, or pass `missing='level'` to make them the group `{name}=missing`.",
    )


def is_frame(value: Any) -> bool:
    """Columns by name: a mapping, or a frame of pandas or polars."""
    listed = hasattr(value, "columns") and hasattr(value, "__getitem__") and not hasattr(value, "membership")
    return isinstance(value, Mapping) or listed
