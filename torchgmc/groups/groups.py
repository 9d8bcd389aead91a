"""Groups: from columns of labels and numbers to names and memberships (the *who* of every test function)."""

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchgmc.engine import checks
from torchgmc.groups import columns as tables
from torchgmc.groups.cells import fold, pattern_ids, representatives
from torchgmc.groups.columns import as_mapping, check_options, num_rows, read
from torchgmc.groups.description import describe, digits, listing_of_terms, names_differ, restore, term_name, terms_of
from torchgmc.groups.learning import few_rows
from torchgmc.groups.sums import Combo, Cover, Tables, occurring

_ANY = -2  # in a table of terms: no level asked for; -1 is a row without one


class Groups:
    """Named groups of rows, possibly overlapping; see :meth:`from_columns`, and :meth:`transform` for new rows.

    What is stored is one small integer per row and column. The membership table is made when it is first asked for;
    :meth:`sums`, and with it :func:`torchgmc.violations` and :func:`torchgmc.solve`, count over very many intersections
    without it.

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

    def __init__(
        self,
        columns: tuple[tables.Column, ...],
        codes: Tensor,
        blocks: Sequence[tuple[Combo, tables.Codes]],
        gaps: Sequence[bool],
        plan: Cover | None = None,
    ) -> None:
        self.columns = columns
        self.codes = codes  # column by column in memory
        self._blocks = tuple(blocks)  # per combination of columns, the sorted keys of its terms
        self._gaps = tuple(gaps)  # whether a column may have rows without a level
        self._plan = plan  # tables to count in, if they have been chosen already

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
        given: Mapping[str, Sequence[Any]] | None = None,
    ) -> "Groups":
        """Groups from columns: one per level of each column, and the intersections that occur.

        Columns of strings, integers and booleans are labels; columns of floats are cut by ``bins`` or ``quantiles`` (but whole
        numbers among missing values are labels: pandas makes floats of such integers). Levels are sorted, so that the order of
        the rows does not matter; those of an ordered categorical (or a polars Enum) keep their order.

        Args:
            columns: a mapping from name to n values (list, tuple, array, tensor, series), or a pandas or polars frame.
            intersections: largest number of columns a group may combine; 2 adds all pairs of levels of two columns.
            bins: the inner edges per numeric column: ``{"age": [30, 50]}`` gives age<30, 30<=age<50 and age>=50.
            quantiles: number of bins of about equal size, per numeric column.
            min_size: groups with fewer rows are too small.
            small: how to treat them: "error" raises, "drop" drops them, "merge" first joins the small labels
                of a column into "column=other" and small bins with their neighbours, then drops what is still
                small. Dropping and merging warn.
            missing: None and NaN: "error" raises, "level" makes the group "column=missing".
            overall: add a group "all" of all rows, first.
            given: the order of the labels of a column, if it is not theirs.

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
        fitted, codes = [], np.empty((len(data), n), dtype=np.int32)
        for j, (name, values) in enumerate(data.items()):
            array = read(name, values)
            if name in bins or name in quantiles:
                edges = bins.get(name, quantiles.get(name))
                column, codes[j] = tables.fit_numbers(name, tables.to_numbers(name, array), edges, merge_below, missing)
            else:
                column, codes[j] = tables.fit_labels(
                    name, array, merge_below, missing, (given or {}).get(name) or tables.ordered_levels(values)
                )
            fitted.append(column)

        orders = range(0 if overall else 1, intersections + 1)
        combos = [combo for order in orders for combo in combinations(range(len(fitted)), order)]
        plan, found = occurring(torch.from_numpy(codes), [len(column.levels) for column in fitted], combos)
        blocks, kept, refused = [], [], []
        for combo in combos:
            keys, counts = found[combo]
            tiny = counts < (min_size if combo else 0)
            if tiny.any():
                refused.append((combo, keys[tiny], counts[tiny]))
                keys, counts = keys[~tiny], counts[~tiny]
            if len(keys):
                blocks.append((combo, keys))
                kept.append(counts)
        if refused:
            listed = listing_of_terms(fitted, refused)
            if small == "error":
                raise ValueError(
                    f"groups with fewer than `min_size` = {min_size} rows: {listed}. Pass `small='drop'` to drop "
                    "them, `small='merge'` to join the small levels of a column, or lower `min_size` or "
                    "`intersections`."
                )
            warnings.warn(f"left out groups with fewer than {min_size} rows: {listed}.", stacklevel=2)
        if not blocks:
            raise ValueError(f"no group has `min_size` = {min_size} of the {n} rows; lower `min_size`.")
        groups = cls(tuple(fitted), torch.from_numpy(codes).T, blocks, [False] * len(fitted), plan)
        groups.__dict__["sizes"] = torch.from_numpy(np.concatenate(kept))  # counted already
        if not names_differ(fitted):
            double = sorted(name for name, count in Counter(groups.names).items() if count > 1)
            if double:
                raise ValueError(f"several groups would share a name: {checks.listing(double)}; rename columns or labels.")
        return groups

    @classmethod
    def learn(
        cls,
        blocks: Iterable[Any],
        intersections: int = 1,
        bins: Mapping[str, Sequence[float]] | None = None,
        min_size: int = 1,
        small: str = "error",
        missing: str = "error",
        overall: bool = False,
        spelled: bool = False,
    ) -> "Groups":
        """:meth:`from_columns` for rows that come in blocks, each forgotten once it has been counted.

        Args:
            blocks: an iterable of what :meth:`from_columns` takes as ``columns``.
            intersections, bins, min_size, small, missing, overall: as in :meth:`from_columns`.
            spelled: values are compared as text, as in a text file: a column of "3" and "12" holds
                integers, and :meth:`transform` then knows 3 and "3".

        Returns:
            Groups on no rows; the membership of rows comes from :meth:`transform`.

        Example:
            >>> groups = Groups.learn([{"sex": ["f", "m"]}, {"sex": ["f", "x"]}])
            >>> groups.names, groups.transform({"sex": ["x", "f"]}).membership.int().tolist()
            (('sex=f', 'sex=m', 'sex=x'), [[0, 0, 1], [1, 0, 0]])
        """
        options: dict[str, Any] = {"intersections": intersections, "min_size": min_size, "small": small, "missing": missing}
        options["bins"] = dict(bins or {})
        check = partial(check_options, quantiles={}, **options)
        data = few_rows(blocks, options["bins"], min_size, missing, spelled, check)
        groups = cls.from_columns(data, overall=overall, **options)[:0]
        return groups.as_spelled() if spelled else groups

    @classmethod
    def from_levels(
        cls, levels: Mapping[str, Sequence[Any]], intersections: int = 1, bins: Mapping[str, Sequence[float]] | None = None
    ) -> "Groups":
        """Groups of levels that are known in advance, without rows, in the order given; :meth:`transform` makes them of rows.

        Args:
            levels: the labels of each column.
            intersections: as in :meth:`from_columns`; every combination is a group.
            bins: edges of numeric columns, which need no levels.

        Example:
            >>> groups = Groups.from_levels({"size": ["S", "M", "L"]}, bins={"age": [50]})
            >>> groups.names, groups.transform({"size": ["L"], "age": [61]}).membership.int().tolist()
            (('size=S', 'size=M', 'size=L', 'age<50', 'age>=50'), [[0, 0, 1, 0, 1]])
        """
        for option, value in (("levels", levels), ("bins", bins or {})):
            listed_well = isinstance(value, Mapping) and all(isinstance(v, list | tuple | np.ndarray) for v in value.values())
            if not listed_well or not all(len(v) for v in value.values()):
                raise TypeError(f"`{option}` must map the name of each column to a list, got {value!r:.80}.")
        cuts = {name: list(edges) for name, edges in (bins or {}).items()}
        if not all(isinstance(edge, int | float | np.number) for edges in cuts.values() for edge in edges):
            raise TypeError(f"`bins` must hold numbers, got {bins!r:.80}.")
        listed = {name: list(dict.fromkeys(one)) for name, one in levels.items()}
        listed |= {name: [edges[0] - 1.0, *edges] for name, edges in cuts.items()}
        count = math.prod(len(one) for one in listed.values())
        if count > 1 << 20:
            raise ValueError(f"`levels` have {count} combinations; make groups of so many from rows, with `learn`.")
        rows = zip(*itertools.product(*listed.values()), strict=True)  # every combination once
        found = cls.from_columns(dict(zip(listed, map(list, rows), strict=True)), intersections, cuts, given=listed)
        return found[:0]

    def drop_small(self, min_size: int = 1) -> "Groups":
        """Without the groups that have fewer rows here than ``min_size``; a warning names them.

        Example:
            >>> groups = Groups.from_levels({"size": ["S", "M", "L"]}).transform({"size": ["L", "S"]})
            >>> import warnings
            >>> with warnings.catch_warnings():
            ...     warnings.simplefilter("ignore")
            ...     groups.drop_small().names
            ('size=S', 'size=L')
        """
        min_size = checks.count("min_size", min_size, 1)
        blocks, left_out, counts = [], [], torch.split(self.sizes.cpu(), [len(keys) for _, keys in self._blocks])
        for (combo, keys), sizes in zip(self._blocks, counts, strict=True):
            kept = (sizes >= min_size).numpy()
            left_out += [term_name(self.columns, term) for term in terms_of(self.columns, combo, keys[~kept])]
            if kept.any():
                blocks.append((combo, keys[kept]))
        if not blocks:
            raise ValueError(f"no group has `min_size` = {min_size} of the {self.num_rows} rows; lower `min_size`.")
        if left_out:
            warnings.warn(f"left out groups with fewer than {min_size} rows: {checks.listing(left_out)}.", stacklevel=2)
        return Groups(self.columns, self.codes, blocks, self._gaps)

    def as_spelled(self) -> "Groups":
        """The same groups, where :meth:`transform` compares values as text: "3" matches the label 3 and the number 3.

        Example:
            >>> groups = Groups.from_columns({"site": [3, 7]})
            >>> groups.as_spelled().transform({"site": ["7", "3", 3]}).membership[:, 0].tolist()
            [False, True, True]
        """
        columns = tuple(replace(column, spelled=True) for column in self.columns)
        return Groups(columns, self.codes, self._blocks, self._gaps, self._plan)

    def to_dict(self) -> dict[str, Any]:
        """How these groups are computed from columns, in JSON types, without any rows. :meth:`from_dict` reads it.

        Example:
            >>> list(Groups.from_columns({"sex": ["f", "m"]}).to_dict())
            ['schema', 'columns', 'combinations']
        """
        return describe(self.columns, self._blocks)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> "Groups":
        """The groups that :meth:`to_dict` described, without rows; :meth:`transform` computes them for new rows.

        Example:
            >>> groups = Groups.from_dict(Groups.from_columns({"sex": ["f", "m"]}).to_dict())
            >>> groups.transform({"sex": ["m", "m"]}).sizes
            tensor([0, 2])
        """
        columns, blocks = restore(found)
        return cls(columns, torch.empty(len(columns), 0, dtype=torch.int32).T, blocks, [False] * len(columns))

    def transform(self, columns: Any, unknown: str = "error", start: int = 0) -> "Groups":
        """The same groups (names, labels, edges) on new rows.

        Args:
            columns: as in :meth:`from_columns`; columns that are not needed are ignored.
            unknown: an unseen label: "error" raises, "none" leaves the row out of the groups of this column.
            start: number of the first row, for messages.

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
            raise ValueError(f"`columns` lacks {checks.listing(absent)}; it has {checks.listing(data) or 'none'}.")
        data = {column.name: data[column.name] for column in self.columns}
        codes = np.empty((len(data), num_rows(data)), dtype=np.int32)
        for j, column in enumerate(self.columns):
            codes[j] = column.encode(data[column.name], unknown, start)
        gaps = tuple(bool((row < 0).any()) for row in codes)
        plan = self._plan if gaps == self._gaps else None
        return Groups(self.columns, torch.from_numpy(codes).to(self.device).T, self._blocks, gaps, plan)

    def to(self, device: torch.device | str) -> "Groups":
        """The same groups with their tensors on ``device``.

        Example:
            >>> Groups.from_columns({"sex": ["f", "m"]}).to("cpu").codes.device
            device(type='cpu')
        """
        try:
            codes = self.codes.to(torch.device(device))
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"`device` must be available on this machine, such as 'cpu', got {device!r}: {reason}") from error
        return Groups(self.columns, codes, self._blocks, self._gaps, self._plan)

    @cached_property
    def terms(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each group its (column index, level index) pairs."""
        return tuple(term for combo, keys in self._blocks for term in terms_of(self.columns, combo, keys))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """For each group its name."""
        return tuple(term_name(self.columns, term) for term in self.terms)

    def name(self, index: int) -> str:
        """Name of one group, without building all names.

        Example:
            >>> Groups.from_columns({"sex": ["f", "m", "f"]}).name(1)
            'sex=m'
        """
        combo, keys, place = self._find(index)
        return term_name(self.columns, terms_of(self.columns, combo, keys[place : place + 1])[0])

    @cached_property
    def sizes(self) -> Tensor:
        """Rows in each group, int64 of shape ``(a,)``; counted without the membership table."""
        return self.sums(torch.ones(self.num_rows, 1, dtype=torch.float64, device=self.device))[:, 0].round().long()

    @cached_property
    def membership(self) -> Tensor:
        """Whether each row is in each group, bool of shape ``(n, a)``; made once and kept."""
        return self._member(self.codes)

    @property
    def num_rows(self) -> int:
        """Number of rows n."""
        return self.codes.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    def __getitem__(self, rows: Any) -> "Groups":
        """The same groups on some of the rows: a slice, indices or a mask.

        Example:
            >>> Groups.from_columns({"sex": ["f", "m", "f"]})[:2].sizes
            tensor([1, 1])
        """
        if not isinstance(rows, slice):
            try:
                rows = torch.as_tensor(rows, device=self.device)
            except (TypeError, ValueError, RuntimeError):  # no numbers at all
                rows = torch.tensor(0.0)
            if rows.dim() != 1 or rows.is_floating_point() or rows.is_complex() or rows.layout != torch.strided:
                raise TypeError(
                    "`Groups` are indexed by rows: a slice, indices or a bool mask of shape (n,); one group is "
                    "`groups.member(i)`, its name `groups.name(i)`, and one row `groups.membership[i]`."
                )
            if rows.dtype == torch.bool and len(rows) != self.num_rows:
                raise ValueError(f"a mask of rows must have shape ({self.num_rows},), got {tuple(rows.shape)}.")
            rows = rows if rows.dtype == torch.bool else rows.long()  # torch takes uint8 for a mask
        try:
            codes = self.codes.T[:, rows].T
        except IndexError as error:
            raise ValueError(f"`Groups` have rows 0 to {self.num_rows - 1}; an index is out of range: {error}.") from None
        return Groups(self.columns, codes, self._blocks, self._gaps, self._plan)

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

    def sums(self, values: Tensor) -> Tensor:
        r"""Sum of the values over the rows of each group, :math:`\sum_i 1\{x_i \in A_a\} v_{ik}`, by counting.

        Rows are added up in joint tables over several columns; the groups are read from their margins. Time is a few dozen
        passes over the rows whatever the number of groups, memory O(a u) on top of the values. Sums are accumulated
        in float64; on a GPU they are not bitwise reproducible.

        Args:
            values: shape ``(n, u)``, floating point, on the device of the groups.

        Returns:
            Shape ``(a, u)``, dtype of ``values``. A group without rows has 0.

        Example:
            >>> groups = Groups.from_columns({"sex": ["f", "m", "f"], "site": [3, 3, 7]}, intersections=2)
            >>> groups.sums(torch.tensor([[1.0], [2.0], [4.0]])).T
            tensor([[5., 2., 3., 4., 1., 4., 2.]])
        """
        if not isinstance(values, Tensor) or values.layout != torch.strided or not values.is_floating_point():
            kind = getattr(values, "dtype", type(values).__name__)
            raise TypeError(f"`values` must be a dense floating-point tensor, got {kind}; use `.double()`.")
        if values.device != self.device:
            raise ValueError(f"`values` is on {values.device} but the groups are on {self.device}; use `.to(...)`.")
        if values.dim() != 2 or values.shape[0] != self.num_rows:
            raise ValueError(f"`values` must have shape ({self.num_rows}, u), a row per row, got {tuple(values.shape)}.")
        wide = values.T.to(torch.float64 if self.device.type != "mps" else torch.float32).contiguous()  # (u, n)
        return self._tables.sums(wide).T.to(values.dtype).contiguous()

    def member(self, index: int | Tensor) -> Tensor:
        """Whether each row is in one group, bool of shape ``(n,)``, from the codes.

        Args:
            index: of the group; a 0-d integer tensor on the device of the groups is not read back to the host.

        Example:
            >>> Groups.from_columns({"sex": ["f", "m", "f"]}).member(0)
            tensor([ True, False,  True])
        """
        if not isinstance(index, Tensor):
            self._find(index)  # raises if there is none
            index = torch.tensor(index, device=self.device)
        elif index.dim() or index.dtype not in (torch.int32, torch.int64) or index.device != self.device:
            raise TypeError(
                f"`index` must be a whole number, or a 0-d integer tensor on {self.device}, got {index.dtype} "
                f"{tuple(index.shape)} on {index.device}."
            )
        try:
            columns, levels = (table.index_select(0, index[None])[0] for table in self._term_table)
        except (IndexError, RuntimeError) as error:
            raise ValueError(f"`index` must be a group from 0 to {len(self) - 1}: {str(error).splitlines()[0]}") from None
        if not len(columns):  # everybody is the only group
            return torch.ones(self.num_rows, dtype=torch.bool, device=self.device)
        return ((self.codes.T.index_select(0, columns) == levels[:, None]) | (levels == _ANY)[:, None]).all(0)

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
        ids, count = fold(keys, [len(column.levels) + 1 for column in self.columns])
        merged, patterns = pattern_ids(self._member(self.codes[representatives(ids, count)]))
        return merged[ids], patterns

    def _ids(self, codes: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        start = 0
        for combo, keys in self._blocks:
            yield start, start + len(keys), self._tables.ids(codes.T, combo, keys)
            start += len(keys)

    @cached_property
    def _tables(self) -> Tables:
        levels = [len(column.levels) for column in self.columns]
        return Tables(self.codes.T, levels, self._gaps, self._blocks, self._plan)

    @cached_property
    def _term_table(self) -> tuple[Tensor, Tensor]:
        """Columns and levels of each group, each of shape ``(a, longest term)``, on the device."""
        width = max(len(combo) for combo, _ in self._blocks)
        columns = np.zeros((len(self), width), dtype=np.int32)
        levels = np.full((len(self), width), _ANY, dtype=np.int32)
        start = 0
        for combo, keys in self._blocks:
            part = slice(start, start + len(keys))
            columns[part, : len(combo)] = combo
            levels[part, : len(combo)] = digits(self.columns, combo, keys)
            start += len(keys)
        return torch.from_numpy(columns).to(self.device), torch.from_numpy(levels).to(self.device)

    def _find(self, index: int) -> tuple[Combo, tables.Codes, int]:
        """The combination a group belongs to, the keys of that combination and its place among them."""
        if isinstance(index, bool) or not isinstance(index, int | np.integer):
            raise TypeError(f"`index` must be a whole number, got {index!r}.")
        place = int(index)
        for combo, keys in self._blocks:
            if 0 <= place < len(keys):
                return combo, keys, place
            place -= len(keys)
        raise ValueError(f"`index` must be a group from 0 to {len(self) - 1}, got {index}.")

    def _member(self, codes: Tensor) -> Tensor:
        table = torch.zeros(codes.shape[0], len(self), dtype=torch.bool, device=codes.device)
        for start, _, ids in self._ids(codes):
            rows = (ids >= 0).nonzero().squeeze(1)
            table[rows, start + ids[rows]] = True
        return table


def check_groups(groups: Any, n: int, names: Sequence[str] | None = None, fractional: bool = False) -> Tensor:
    """The membership table that was passed, in any accepted form, or an error that says what to pass instead.

    ``groups``: :class:`Groups`, or a bool table of shape ``(n, a)``: tensor, array or nested list; 0 and 1 of any number type
    are accepted. ``n``: the number of rows it must have. ``names``: the names of the a groups it must have; None for any
    number. ``fractional``: memberships may lie between 0 and 1. Returns: bool, shape ``(n, a)``, on the device of ``groups``;
    float64 if ``fractional``.

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
        return groups.membership.double() if fractional else groups.membership
    table = groups if isinstance(groups, Tensor) else _as_tensor(groups, width, advice)
    if table.is_complex() or table.layout != torch.strided:
        raise TypeError(f"`groups` must be a bool table, got {table.dtype}, {table.layout}.")
    if table.dim() != 2 or table.shape[0] != n or (names is not None and table.shape[1] != len(names)):
        hint = "a single group is `groups[:, None]`; " if table.dim() == 1 else ""
        listed = "" if names is None else f" for the groups {checks.listing(names)}"
        raise ValueError(f"`groups` must have shape (n, {width}) with n = {n}{listed}, got {tuple(table.shape)}; {hint}{advice}")
    if table.dtype == torch.bool:
        return table.double() if fractional else table
    if table.device.type == "meta":
        raise ValueError("`groups` is on the meta device, where tensors have no values; move the data to a real one.")
    wrong = no_membership(table, fractional).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        kind = "numbers from 0 to 1" if fractional else "True or False (or 1 and 0)"
        raise ValueError(
            f"`groups` must hold memberships, {kind}, got {table[row, column].item()} in row {row}, column {column}; {advice}"
        )
    return table.detach().double() if fractional else table.bool()


def no_membership(table: Tensor, fractional: bool) -> Tensor:
    """Where numbers are not memberships: 0 or 1, or anything between where they may be ``fractional``."""
    return ~((table >= 0) & (table <= 1)) if fractional else (table != 0) & (table != 1)


def _name_mismatch(got: tuple[str, ...], expected: tuple[str, ...]) -> str:
    lacking = [name for name in expected if name not in got]
    foreign = [name for name in got if name not in expected]
    parts = [f"lacks {checks.listing(lacking)}"] * bool(lacking) + [f"also has {checks.listing(foreign)}"] * bool(foreign)
    differs = " and ".join(parts) or "has them in another order"
    if expected == ("all",):
        return (
            f"`groups` has {checks.listing(got)}, but the head was made without groups; make it with groups=groups.names ("
            "also a baseline: its fit ignores them, its audit does not)."
        )
    return (
        f"`groups` must be the groups the head was made for, {checks.listing(expected)}, but it {differs}; "
        "the same groups on new rows come from `groups.transform(columns)`."
    )


def _as_tensor(groups: Any, width: str, advice: str) -> Tensor:
    kind = type(groups).__name__
    if not isinstance(groups, Mapping | str | bytes) and not hasattr(groups, "columns"):
        try:
            array = np.asarray(groups)
            if array.dtype.kind in "biuf":
                return torch.from_numpy(array.copy())
            kind = f"{kind} of dtype {array.dtype}"
        except (TypeError, ValueError):  # ragged lists
            pass
    raise TypeError(f"`groups` must be `Groups` or a bool table of shape (n, {width}), got {kind}; {advice}")
