"""Groups: from columns of labels and numbers to names and memberships (the *who* of every test function)."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchgmc._columns import (
    Codes,
    Column,
    as_mapping,
    check_options,
    fit_labels,
    fit_numbers,
    listing,
    num_rows,
    read,
    to_numbers,
)

__all__ = ["Column", "Groups", "check_groups", "pattern_ids"]

_WORD = 62  # memberships packed into one int64
_TABLE = 2**22  # up to here keys are looked up in a table, beyond by bisection


class Groups:
    """Named groups of rows, possibly overlapping; see :meth:`from_columns`, and :meth:`transform` for new rows.

    What is stored is one small integer per row and column. The membership table is made when it is first asked for, and
    :meth:`blocks` serves those who want to count over very many intersections without it.

    Attributes:
        columns: how each column is coded.
        codes: the level of each row in each column, int32 of shape ``(n, num_columns)``; -1 is none.
        terms: for each group the tuple of its (column index, level index); all must hold. ``()`` is everybody.
        names: for each group its name.

    Example:
        >>> groups = gmc.Groups.from_columns({"sex": ["f", "m", "f"], "site": [3, 3, 7]}, intersections=2)
        >>> groups
        Groups: 7 groups of 3 rows
          sex=f           2
          sex=m           1
          site=3          2
          site=7          1
          sex=f & site=3  1
          sex=f & site=7  1
          sex=m & site=3  1
        >>> groups.membership[:, :4].int()
        tensor([[1, 0, 1, 0],
                [0, 1, 1, 0],
                [1, 0, 0, 1]], dtype=torch.int32)
    """

    def __init__(self, columns: tuple[Column, ...], codes: Tensor, blocks: Sequence[tuple[tuple[int, ...], Codes]]) -> None:
        self.columns = columns
        self.codes = codes
        self._blocks = tuple(blocks)  # per combination of columns, the sorted keys of its terms

    @classmethod
    def from_columns(
        cls,
        columns: Any,
        intersections: int = 1,
        bins: Mapping[str, Sequence[float]] | None = None,
        quantiles: Mapping[str, int] | None = None,
        min_size: int = 1,
        small: str = "error",
        missing: str = "error",
        overall: bool = False,
    ) -> "Groups":
        """Groups from columns: one per level of each column, and the intersections that occur.

        Columns of strings, integers and booleans are labels; columns of floats are cut by ``bins`` or ``quantiles``.
        Levels are sorted, so that the order of the rows does not matter.

        Args:
            columns: a mapping from name to n values (list, tuple, array, tensor, series), or a pandas or polars frame.
            intersections: up to how many columns a group combines; 2 gives all pairs of levels of two columns too.
            bins: the inner edges per numeric column: ``{"age": [30, 50]}`` gives age<30, 30<=age<50 and age>=50.
            quantiles: the number of about equally large bins per numeric column.
            min_size: groups with fewer rows are too small.
            small: what becomes of them: "error" refuses, "drop" leaves them out, "merge" first joins the small labels
                of a column into "column=other" and small bins with their neighbours, then leaves out what is still
                small. Dropping and merging warn.
            missing: None and NaN: "error" refuses, "level" makes the group "column=missing".
            overall: put a group "all" of all rows first.

        Returns:
            Groups of n rows.

        Example:
            >>> columns = {"age": [25.0, 61.0, 40.0, 44.0], "smoker": [True, False, False, True]}
            >>> Groups.from_columns(columns, bins={"age": [50]}, overall=True).names
            ('all', 'age<50', 'age>=50', 'smoker=False', 'smoker=True')
        """
        data = as_mapping(columns)
        n = num_rows(data)
        bins, quantiles = dict(bins or {}), dict(quantiles or {})
        check_options(data, n, intersections, bins, quantiles, min_size, small, missing)
        merge_below = min_size if small == "merge" else 0
        fitted, codes = [], np.empty((n, len(data)), dtype=np.int32)
        for j, (name, values) in enumerate(data.items()):
            array = read(name, values)
            if name in bins or name in quantiles:
                edges = bins.get(name, quantiles.get(name))
                column, codes[:, j] = fit_numbers(name, to_numbers(name, array), edges, merge_below, missing)
            else:
                column, codes[:, j] = fit_labels(name, array, merge_below, missing)
            fitted.append(column)

        blocks, kept, refused, sizes = [], [], [], []
        for order in range(1, intersections + 1):
            for combo in combinations(range(len(fitted)), order):
                keys, counts = _occurring(codes, combo, [len(fitted[j].levels) for j in combo])
                tiny = counts < min_size
                refused += [_term_name(fitted, term) for term in _terms(fitted, combo, keys[tiny])]
                sizes += counts[tiny].tolist()
                kept += counts[~tiny].tolist()
                if not tiny.all():
                    blocks.append((combo, keys[~tiny]))
        if refused:
            listed = listing([f"{name} ({size})" for name, size in zip(refused, sizes, strict=True)])
            if small == "error":
                raise ValueError(
                    f"groups with fewer than `min_size` = {min_size} rows: {listed}. Pass `small='drop'` to leave "
                    "them out, `small='merge'` to join the small levels of a column, or lower `min_size` or "
                    "`intersections`."
                )
            warnings.warn(f"left out groups with fewer than {min_size} rows: {listed}.", stacklevel=2)
        if overall:
            blocks.insert(0, ((), np.zeros(1, dtype=np.int64)))
        if not blocks:
            raise ValueError(f"no group has `min_size` = {min_size} of the {n} rows; lower `min_size`.")
        groups = cls(tuple(fitted), torch.from_numpy(codes), blocks)
        groups.__dict__["sizes"] = torch.tensor([n] * overall + kept)  # counted already
        if len(set(groups.names)) < len(groups):
            double = sorted({name for name in groups.names if groups.names.count(name) > 1})
            raise ValueError(f"several groups would share a name: {listing(double)}; rename columns or labels.")
        return groups

    def transform(self, columns: Any, unknown: str = "error") -> "Groups":
        """The same groups (names, labels, edges) on new rows.

        Args:
            columns: as in :meth:`from_columns`; columns that are not needed are ignored.
            unknown: a label never seen: "error" refuses, "none" puts the row in no group that asks for this column.

        Returns:
            Groups with the same names, on the new rows and on the device of these groups.

        Example:
            >>> groups = Groups.from_columns({"sex": ["f", "m", "f"]})
            >>> groups.transform({"sex": ["m", "m"]}).sizes
            tensor([0, 2])
        """
        if unknown not in ("error", "none"):
            raise ValueError(f"`unknown` must be 'error' or 'none', got {unknown!r}.")
        data = as_mapping(columns)
        absent = [column.name for column in self.columns if column.name not in data]
        if absent:
            raise ValueError(f"`columns` lacks {listing(absent)}; it has {listing(list(data)) or 'none'}.")
        data = {column.name: data[column.name] for column in self.columns}
        codes = np.empty((num_rows(data), len(data)), dtype=np.int32)
        for j, column in enumerate(self.columns):
            codes[:, j] = column.encode(data[column.name], unknown)
        return Groups(self.columns, torch.from_numpy(codes).to(self.codes.device), self._blocks)

    def to(self, device: torch.device | str) -> "Groups":
        """The same groups with their tensors on ``device``.

        Example:
            >>> Groups.from_columns({"sex": ["f", "m"]}).to("cpu").codes.device
            device(type='cpu')
        """
        return Groups(self.columns, self.codes.to(device), self._blocks)

    @cached_property
    def terms(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each group its (column index, level index) pairs."""
        return tuple(term for combo, keys in self._blocks for term in _terms(self.columns, combo, keys))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """For each group its name."""
        return tuple(_term_name(self.columns, term) for term in self.terms)

    @cached_property
    def sizes(self) -> Tensor:
        """Rows in each group, int64 of shape ``(a,)``; counted without the membership table."""
        counts = [torch.bincount(ids + 1, minlength=1 + stop - start)[1:] for start, stop, ids in self.blocks()]
        return torch.cat(counts)

    @cached_property
    def membership(self) -> Tensor:
        """Whether each row is in each group, bool of shape ``(n, a)``; made once and kept."""
        return self._member(self.codes)

    @property
    def num_rows(self) -> int:
        """Number of rows n."""
        return self.codes.shape[0]

    def __len__(self) -> int:
        return sum(len(keys) for _, keys in self._blocks)

    def __repr__(self) -> str:
        shown = min(len(self), 20)
        width = max(len(name) for name in self.names[:shown])
        sizes = self.sizes[:shown].tolist()
        lines = [f"Groups: {len(self)} groups of {self.num_rows} rows"]
        lines += [f"  {name:<{width}}  {size}" for name, size in zip(self.names[:shown], sizes, strict=True)]
        if len(self) > shown:
            lines.append(f"  ... and {len(self) - shown} more")
        return "\n".join(lines)

    def blocks(self) -> Iterator[tuple[int, int, Tensor]]:
        """Groups by combination of columns: inside one combination no two groups share a row.

        A sum over every group is then one ``index_add`` or ``bincount`` per combination, in memory O(n + a).

        Yields:
            ``(start, stop, ids)``: the combination holds the groups ``start`` to ``stop - 1``, and row i is in group
            ``start + ids[i]`` of them, or in none if ``ids[i]`` is -1; ``ids`` is int64 of shape ``(n,)``.

        Example:
            >>> groups = Groups.from_columns({"sex": ["f", "m"], "site": [3, 3]})
            >>> [(start, stop, ids.tolist()) for start, stop, ids in groups.blocks()]
            [(0, 2, [0, 1]), (2, 3, [0, 0])]
        """
        yield from self._ids(self.codes)

    def cells(self) -> tuple[Tensor, Tensor]:
        """Rows of equal membership share a cell; found from the codes, without the membership table.

        Returns:
            ids: the cell of each row, int64 of shape ``(n,)``.
            patterns: the membership all rows of a cell have, bool of shape ``(c, a)``; ``patterns[ids]`` is
            ``membership``.

        Example:
            >>> ids, patterns = Groups.from_columns({"sex": ["f", "m", "f"]}).cells()
            >>> ids, patterns
            (tensor([1, 0, 1]), tensor([[False,  True],
                    [ True, False]]))
        """
        keys = [self.codes[:, j].long() + 1 for j in range(len(self.columns))]
        ids, count = _fold(keys, [len(column.levels) + 1 for column in self.columns])
        merged, patterns = pattern_ids(self._member(self.codes[_representatives(ids, count)]))
        return merged[ids], patterns

    def _ids(self, codes: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        levels = codes.T.long().contiguous()  # (num_columns, n)
        known = levels >= 0
        complete = bool(known.all())
        start = 0
        for combo, keys in self._blocks:
            radices = [len(self.columns[j].levels) for j in combo]
            rows = codes.new_zeros(codes.shape[0], dtype=torch.int64)
            for j, radix in zip(combo, radices, strict=True):
                rows = torch.add(levels[j], rows, alpha=radix)
            if not complete:  # a negative key would read another group's entry
                rows = rows.where(known[list(combo)].all(0), -1)
            ids = _lookup(torch.from_numpy(keys).to(codes.device), rows, math.prod(radices))
            yield start, start + len(keys), ids
            start += len(keys)

    def _member(self, codes: Tensor) -> Tensor:
        table = torch.zeros(codes.shape[0], len(self), dtype=torch.bool, device=codes.device)
        for start, _, ids in self._ids(codes):
            rows = (ids >= 0).nonzero().squeeze(1)
            table[rows, start + ids[rows]] = True
        return table


def check_groups(groups: Any, n: int, names: Sequence[str] | None = None) -> Tensor:
    """The membership table a caller meant, or an error that says what to pass instead.

    Args:
        groups: :class:`Groups`, or a bool table of shape ``(n, a)``: tensor, array or nested list; 0 and 1 of any
            number type will do.
        n: the number of rows it must have.
        names: the names of the a groups it must have; None leaves a open.

    Returns:
        bool, shape ``(n, a)``, on the device of ``groups``.

    Example:
        >>> check_groups([[1, 0], [1, 1]], n=2, names=["all", "old"])
        tensor([[ True, False],
                [ True,  True]])
    """
    advice = "columns of labels become memberships with `Groups.from_columns`."
    width = "a" if names is None else str(len(names))
    if isinstance(groups, Groups):
        if names is not None and tuple(names) != groups.names:
            raise ValueError(_name_mismatch(groups.names, tuple(names)))
        if groups.num_rows != n:
            raise ValueError(
                f"`groups` must have n = {n} rows, one per example, got {groups.num_rows}; "
                "the same groups on other rows come from `groups.transform(columns)`."
            )
        return groups.membership
    table = groups if isinstance(groups, Tensor) else _as_tensor(groups, width, advice)
    if table.is_complex():
        raise TypeError(f"`groups` must be a bool table, got {table.dtype}.")
    if table.dim() != 2 or table.shape[0] != n or (names is not None and table.shape[1] != len(names)):
        hint = "one group alone is `groups[:, None]`; " if table.dim() == 1 else ""
        listed = "" if names is None else f" for the groups {listing(list(names))}"
        raise ValueError(
            f"`groups` must have shape (n, {width}) with n = {n}{listed}, got {tuple(table.shape)}; {hint}{advice}"
        )
    if table.dtype == torch.bool:
        return table
    wrong = ((table != 0) & (table != 1)).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise ValueError(
            f"`groups` must hold memberships, True or False (or 1 and 0), got {table[row, column].item()} in row "
            f"{row}, column {column}; {advice}"
        )
    return table.bool()


def pattern_ids(membership: Tensor) -> tuple[Tensor, Tensor]:
    """Cells of equal membership: which cell each row is in, and the membership of each cell.

    Rows are packed 62 groups to an integer and sorted, so that 1e6 rows of 50 groups take a fraction of a second.

    Args:
        membership: bool, shape ``(n, a)``.

    Returns:
        ids: int64, shape ``(n,)``.
        patterns: bool, shape ``(c, a)``, distinct and in lexicographic order; ``patterns[ids]`` is ``membership``.

    Example:
        >>> pattern_ids(torch.tensor([[True, False], [False, True], [True, False]]))
        (tensor([1, 0, 1]), tensor([[False,  True],
                [ True, False]]))
    """
    n, a = membership.shape
    words = []
    for begin in range(0, a, _WORD):
        part = membership[:, begin : begin + _WORD]
        word = torch.zeros(n, dtype=torch.int64, device=membership.device)
        for j in range(part.shape[1]):
            word.add_(part[:, j], alpha=1 << (part.shape[1] - 1 - j))
        words.append(word)
    ids, count = _fold(words, [1 << min(_WORD, a - begin) for begin in range(0, a, _WORD)], n, membership.device)
    return ids, membership[_representatives(ids, count)]


def _fold(
    keys: list[Tensor], radices: list[int], n: int | None = None, device: torch.device | None = None
) -> tuple[Tensor, int]:
    """Number the distinct rows of `keys` in lexicographic order; compresses before a product leaves int64."""
    ids = torch.zeros(keys[0].shape[0] if n is None else n, dtype=torch.int64, device=device or keys[0].device)
    size = 1
    for key, radix in zip(keys, radices, strict=True):
        if size * radix > 2**_WORD:
            ids, size = _compress(ids)
        if size * radix > 2**_WORD:
            key, radix = _compress(key)
        ids, size = ids * radix + key, size * radix
    return _compress(ids)


def _compress(ids: Tensor) -> tuple[Tensor, int]:
    values, inverse = torch.unique(ids, return_inverse=True)
    return inverse, max(len(values), 0)


def _representatives(ids: Tensor, count: int) -> Tensor:
    """One row of each cell, shape ``(count,)``."""
    return ids.new_zeros(count).scatter_(0, ids, torch.arange(len(ids), device=ids.device))


def _lookup(keys: Tensor, rows: Tensor, size: int) -> Tensor:
    """Position of each of `rows` in the sorted `keys`, both below `size`; -1 if it is not there or is -1."""
    position = torch.arange(len(keys), device=keys.device)
    if size <= _TABLE:  # one entry more, which the row -1 finds
        return position.new_full((size + 1,), -1).scatter_(0, keys, position)[rows]
    found = torch.searchsorted(keys, rows).clamp(max=len(keys) - 1)
    return torch.where(keys[found] == rows, found, -1)


def _occurring(codes: npt.NDArray[np.int32], combo: tuple[int, ...], radices: list[int]) -> tuple[Codes, Codes]:
    """Keys of the level combinations that occur and their counts; of a single column, of all its levels."""
    size = math.prod(radices)
    if size >= 2**_WORD:
        raise ValueError(f"`intersections` of {len(combo)} columns with {radices} levels are too many; merge levels first.")
    keys = np.zeros(len(codes), dtype=np.int64)
    for j, radix in zip(combo, radices, strict=True):
        keys = keys * radix + codes[:, j]
    if len(combo) > 1 and size > _TABLE:
        found, counts = np.unique(keys, return_counts=True)
        return found, counts.astype(np.int64)
    counts = np.bincount(keys, minlength=size)
    found = np.arange(size) if len(combo) == 1 else counts.nonzero()[0]
    return found.astype(np.int64), counts[found].astype(np.int64)


def _terms(columns: Sequence[Column], combo: tuple[int, ...], keys: Codes) -> list[tuple[tuple[int, int], ...]]:
    if not combo:
        return [()] * len(keys)
    levels = np.unravel_index(keys, [len(columns[j].levels) for j in combo])
    return [tuple(zip(combo, row, strict=True)) for row in np.stack(levels, axis=1).tolist()]


def _term_name(columns: Sequence[Column], term: tuple[tuple[int, int], ...]) -> str:
    return " & ".join(columns[j].levels[level] for j, level in term) or "all"


def _name_mismatch(got: tuple[str, ...], expected: tuple[str, ...]) -> str:
    lacking = [name for name in expected if name not in got]
    foreign = [name for name in got if name not in expected]
    parts = [f"lacks {listing(lacking)}"] * bool(lacking) + [f"also has {listing(foreign)}"] * bool(foreign)
    differs = " and ".join(parts) or "has them in another order"
    return (
        f"`groups` must be the groups the head was made for, {listing(expected)}, but it {differs}; "
        "the same groups on new rows come from `groups.transform(columns)`."
    )


def _as_tensor(groups: Any, width: str, advice: str) -> Tensor:
    kind = type(groups).__name__
    if not isinstance(groups, Mapping | str | bytes) and not hasattr(groups, "columns"):
        try:
            array = np.asarray(groups)
            if array.dtype.kind in "biuf":
                return torch.from_numpy(array)
            kind = f"{kind} of dtype {array.dtype}"
        except (TypeError, ValueError):  # ragged lists
            pass
    raise TypeError(f"`groups` must be `Groups` or a bool table of shape (n, {width}), got {kind}; {advice}")
