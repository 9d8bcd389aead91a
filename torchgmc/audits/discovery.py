"""Discovery: which of all intersections of columns deviate most?"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchgmc.audits.intervals import Rows
from torchgmc.audits.moments import Moments
from torchgmc.audits.tabular import Tabular
from torchgmc.engine import checks, rules, trees
from torchgmc.engine.clusters import check as check_clusters, deal_clusters
from torchgmc.engine.folds import shuffled
from torchgmc.groups.columns import as_mapping, factorize, num_rows, read
from torchgmc.groups.groups import Groups

#: Rows (or clusters) are dealt to so many parts, of which some are held out.
PARTS = 20
#: Most rows that trees are searched on, and examples that draw a leaf to no deviation.
SEARCHED, RIDGE = 1 << 16, 10.0
#: Levels that their columns are cut into: halves first, where a condition means nothing without a second one.
BINS = (2, 32)


@dataclass(frozen=True)
class Discovery(Tabular):
    """The worst of the groups that were searched.

    Attributes:
        table: ``group``, ``count`` (rows), ``mass`` (share of the weight), ``estimate`` (mean of s inside the group), ``low``
            and ``high`` (its interval), ``weighted``, ``weighted low`` and ``weighted high`` (mass times mean), and
            ``verdict``; worst first.
        alpha: largest deviation that keeps the promise.
        delta: 1 - confidence of all intervals of **all searched groups** together, not of those shown.
        order: what "worst" meant: ``"conditional"`` or ``"mass-weighted"``.
        num_searched: groups searched.
        num_rows: rows searched.
        num_violated: groups, among all searched, whose interval lies beyond alpha.
        num_held: rows held out of a search by trees; figures and intervals are theirs, and hold for all groups shown at once.
    """

    table: dict[str, list[Any]]
    alpha: float
    delta: float
    order: str
    num_searched: int
    num_rows: int
    num_violated: int
    num_held: int = 0

    @property
    def violated(self) -> bool:
        """Some group is violated, with confidence 1 - delta over everything searched."""
        return self.num_violated > 0

    @property
    def summary(self) -> str:
        """The result in one line."""
        what, where = f"{self.num_searched} groups searched", ""
        if self.num_held:
            what, where = f"the {len(self.table['group'])} worst rules of trees", f" in {self.num_held} rows held out"
        return (
            f"{self.num_violated} of {what} in {self.num_rows} rows deviate by more than {self.alpha:g}{where} "
            f"(confidence {100 * (1 - self.delta):g} % for all of them at once)."
        )

    def __str__(self) -> str:
        wide = max([5, *(len(name) for name in self.table["group"])])
        lines = [f"{'group':{wide}s} {'count':>8s} {'mass':>7s} {'mean s':>8s}  {'interval':^19s} {'weighted':>9s}  verdict"]
        lines += [
            f"{r['group']:{wide}s} {r['count']:8d} {r['mass']:7.4f} {r['estimate']:+8.4f}  "
            f"[{r['low']:+8.4f},{r['high']:+8.4f}] {r['weighted']:+9.5f}  {r['verdict']}"
            for r in self.rows()
        ]
        return "\n".join([*lines, self.summary])


def find_groups(
    columns: Any,
    s: Any,
    depth: int = 2,
    top: int = 20,
    delta: float = 0.05,
    *,
    alpha: float = 0.0,
    bounds: tuple[float, float] = (-1.0, 1.0),
    order: str = "conditional",
    min_size: int = 30,
    weight: Any = None,
    clusters: Any = None,
    bins: Mapping[str, Sequence[float]] | None = None,
    quantiles: Mapping[str, int] | None = None,
    missing: str = "error",
    holdout: float | None = None,
) -> Discovery:
    r"""Whom did we forget? The intersections of up to ``depth`` columns where s deviates most from 0.

    s is the error of each row with the sign of heads and audits, positive where it is too high: risk - target, coverage -
    target, prediction - outcome (``head.values(...).s``). Every level of every column and every intersection that occurs is
    searched, by counting: time is a few dozen passes over the rows, and no membership table is made.

    Intervals follow from sums (:meth:`torchgmc.audits.moments.Moments.intervals`) with a union bound over **all** candidate groups
    and both views, so that picking the worst of them stays honest: with probability at least 1 - delta no interval of any searched
    group misses its mean, and no group within alpha is called violated. The candidates depend only on the columns, never on s.

    With ``holdout`` the class is learned: trees of ``depth`` conditions look for the rules that deviate most on the other rows
    (numbers need no bins, missing values are a level), and the ``top`` of them are judged by betting on the rows held out, with
    a union bound over these only: the largest deviation that greedy search finds at this depth, with its interval.

    Args:
        columns: labels and numbers, as in :meth:`torchgmc.Groups.from_columns`.
        s: values, shape ``(n,)``.
        depth: largest number of columns an intersection may combine.
        top: number of groups to return.
        delta: 1 - confidence.
        alpha: largest deviation that keeps the promise; a group is ``violated`` when its interval lies beyond it.
        bounds: range of s, known in advance; the intervals depend on it.
        order: what is worst: ``"conditional"`` ranks by the side of the interval of the group's mean that is nearest to 0 (a
            small group's mean can be far off by chance), and by the mean where the interval contains 0; ``"mass-weighted"``
            ranks by mass times mean. The verdict is that of the same view.
        min_size: smaller groups are not searched.
        weight: weight of each row; it must not depend on s.
        clusters: which rows belong together, e.g. the patient of each visit: integers or strings, ``(n,)``. Clusters are then
            what is independent, and the intervals are Hoeffding's over them, which allow for any dependence inside.
        bins, quantiles, missing: as in :meth:`torchgmc.Groups.from_columns`.
        holdout: share of the rows (or clusters) that trees do not see, e.g. 0.5; None searches all intersections.

    Returns:
        The worst groups, at most ``top``.

    Example:
        >>> columns = {"sex": ["f", "m"] * 500, "site": [1, 1, 2, 2] * 250}
        >>> s = torch.tensor([0.5 if pair == ("f", 2) else 0.0 for pair in zip(columns["sex"], columns["site"])])
        >>> found = gmc.find_groups(columns, s)
        >>> found.table["group"][0], found.table["count"][0], found.table["verdict"][0], found.num_searched
        ('sex=f & site=2', 250, 'violated', 8)
        >>> columns["age"] = torch.arange(1000) % 70 + 20.5
        >>> found = gmc.find_groups(columns, torch.where(columns["age"] > 60, 0.5, 0.0), top=1, holdout=0.5)
        >>> found.table["group"][0], found.table["verdict"][0], found.num_held
        ('age >= 60', 'violated', 500)
    """
    checks.fraction("delta", delta)
    checks.count("top", top, 20)
    data = as_mapping(columns)
    depth = checks.count("depth", depth, 2)
    depth = min(depth, max(len(data), 1)) if holdout is None else depth
    checks.option("order", order, ("conditional", "mass-weighted"))
    low, high = checks.interval("bounds", bounds)
    if not low <= 0.0 <= high:
        raise ValueError(f"`bounds` must be (low, high), the range of s, with low <= 0 <= high and low < high, got {bounds!r}.")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0.0 <= alpha < math.inf:
        raise ValueError(f"`alpha` must be a finite number of at least 0, got {alpha!r}.")
    values = _values(s, low, high)
    if (n := num_rows(data)) != len(values):
        raise ValueError(f"`s` must have one value per row of `columns`, n = {n}, got {len(values)}.")
    w, cluster = checks.weights(weight, n, values), check_clusters(clusters, n, values.device)
    name: Callable[[int], str]
    if holdout is None:
        with warnings.catch_warnings():  # groups below `min_size` are left out on purpose
            warnings.filterwarnings("ignore", message="left out groups")
            groups = Groups.from_columns(
                data, depth, bins=bins, quantiles=quantiles, min_size=min_size, small="drop", missing=missing
            ).to(values.device)
        figures = _counted(Moments.of(groups.sums, values, w, cluster), low, high, delta)
        searched, held, name = len(groups), 0, groups.name
    else:
        if bins or quantiles or depth > 8:
            raise ValueError("with `holdout` trees cut columns: omit `bins` and `quantiles`; `depth` is at most 8.")
        share, least = checks.fraction("holdout", holdout), checks.count("min_size", min_size, 30)
        words, who, rest, searched = _by_trees(data, values, w, cluster, depth, share, order, top, least)
        rows = Rows.of(values[rest, None], who, w[rest], cluster[rest], (low, high))
        views = [rows.judge(None, delta / 2, conditional) for conditional in (True, False)]
        parts = [rows.count, rows.mass / rows.total, *(part for j in views for part in (j.estimate, j.low, j.high))]
        figures = [part[:, 0] for part in parts]
        held, name = len(rest), words.__getitem__
    table, beyond = _worst(name, figures, alpha, order, high - low, top)
    return Discovery(table, float(alpha), delta, order, searched, n - held, beyond, held)


def _worst(
    name: Callable[[int], str], figures: list[Tensor], alpha: float, order: str, width: float, top: int
) -> tuple[dict[str, list[Any]], int]:
    """The table of the groups that are worst in the view of ``order``, and how many lie beyond alpha in all."""
    conditional = order == "conditional"
    estimate, least, most = figures[2:5] if conditional else figures[5:]
    # The side of the interval nearest to 0 first; where the interval holds 0, the mean decides, below all of those.
    nearest = torch.maximum(least, -most)
    key = torch.where(nearest > 0, width + nearest, estimate.abs()) if conditional else estimate.abs()
    chosen = key.argsort(descending=True, stable=True)[:top]
    beyond = nearest > alpha
    code = torch.where(beyond, 2, (torch.maximum(-least, most) <= alpha).long())
    table: dict[str, list[Any]] = {"group": [name(index) for index in chosen.tolist()]}
    keys = ("count", "mass", "estimate", "low", "high", "weighted", "weighted low", "weighted high")
    table |= {key: figure[chosen].tolist() for key, figure in zip(keys, figures, strict=True)}
    table["count"] = [int(count) for count in table["count"]]
    table["verdict"] = [("undecided", "holds", "violated")[k] for k in code[chosen].tolist()]
    return table, int(beyond.sum())


def _counted(moments: Moments, low: float, high: float, delta: float) -> list[Tensor]:
    """Figures of every group, ``(a,)`` each; both views are shown, so each has half of delta."""
    own, *ends = moments.estimates(True), *moments.intervals(True, (low, high), delta / 2)
    empty = moments.mass <= 0  # all of its rows have weight 0
    mine = [figure.masked_fill(empty, value) for figure, value in zip((own, *ends), (0.0, low, high), strict=True)]
    part = moments.estimates(False), *moments.intervals(False, (low, high), delta / 2)
    return [moments.count, moments.mass / moments.total, *mine, *part]


def _by_trees(
    data: dict[str, Any], s: Tensor, w: Tensor, cluster: Tensor, depth: int, holdout: float, order: str, top: int, least: int
) -> tuple[list[str], Tensor, Tensor, int]:
    """Rules that deviate most on the rows searched: words, membership ``(m, k)`` of the rows held out, these, leaves searched.

    Trees are grown from each column, so that conditions that mean nothing by themselves are found together.
    """
    matrix, levels = _numbers(data)
    matrix, names, equal = matrix.to(s.device), list(data), torch.tensor([bool(one) for one in levels], device=s.device)
    held = deal_clusters(PARTS, cluster, matrix, s, w) < min(max(round(PARTS * holdout), 1), PARTS - 1)
    mix = shuffled(matrix, s, w)
    seen, unseen = mix[~held[mix]][:SEARCHED], held.nonzero()[:, 0]
    slope, curvature = (v[seen, None] / w[seen].mean().clamp_min(1e-300) for v in (w * s, w))
    found = []
    for bins in BINS:
        coded = trees.code(matrix[seen], equal, bins)
        grown, _ = trees.grow(coded, slope, curvature, depth, RIDGE, float(least), np.eye(len(names), dtype=bool))
        single = [trees.Grown(*parts) for parts in zip(*grown, strict=True)]
        found.append(rules.raw(single, coded, matrix.isnan().any(0)))
    splits, leaves = [torch.cat(part) for part in zip(*found, strict=True)], 1 << depth
    place = trees.places(matrix[seen], *splits)
    place = place + leaves * torch.arange(place.shape[1], device=s.device)
    values = torch.cat([slope, curvature], 1).repeat_interleave(place.shape[1], 0)
    sums, mass = values.new_zeros(leaves * place.shape[1], 2).index_add_(0, place.flatten(), values).T
    size = sums.abs() / ((mass + RIDGE).sqrt() if order == "conditional" else 1.0)  # as splits are chosen, or mass x mean
    chosen: dict[str, int] = {}

    def level(j: int, value: float) -> str:
        return str(levels[j][int(value)]) if levels[j] else f"{value:.{4 if abs(value) < 1e4 else 8}g}"

    for k in size.argsort(descending=True, stable=True).tolist():
        column, cut, kind = (part[k // leaves] for part in splits)
        chosen.setdefault(rules.words(column, cut, kind, k % leaves, names.__getitem__, level) or "all rows", k)
        if len(chosen) == top:
            break
    index = torch.tensor(list(chosen.values()), dtype=torch.int64, device=s.device)
    who = trees.places(matrix[unseen], *(part[index // leaves] for part in splits)) == index % leaves
    fine = (who & (w[unseen] > 0)[:, None]).sum(0) > 1  # else there is nobody to judge it on
    if len(seen) < 2 * least or not bool(fine.any()):
        raise ValueError(f"`holdout` = {holdout:g} leaves too few rows, {len(seen)} to search with `min_size` = {least}.")
    kept = [name for name, is_fine in zip(chosen, fine.tolist(), strict=True) if is_fine]
    return kept, who[:, fine], unseen, int((mass > 0).sum())


def _numbers(data: dict[str, Any]) -> tuple[Tensor, list[list[Any]]]:
    """Columns as float32 ``(n, q)``, and the labels that codes stand for; of numbers none."""
    found, levels = [], []
    for name, values in data.items():
        array = read(name, values)
        labels, code = ([], array) if array.dtype.kind in "biuf" else factorize(name, array)
        numbers = all(v is None or (isinstance(v, int | float) and not isinstance(v, bool)) for v in labels)
        known = [math.nan if v is None else float(v) if numbers else k for k, v in enumerate(labels)]
        found.append(torch.from_numpy((np.array(known)[code] if labels else array).astype(np.float64)).float())
        levels.append([] if numbers else labels)
        if bool(found[-1].isinf().any()):
            raise ValueError(f"column `{name}` must be finite as float32 (NaN where a value is missing), but it holds infinity.")
    return torch.stack(found, 1), levels


def _values(s: Any, low: float, high: float) -> Tensor:
    values = checks.numbers("s", s).detach()
    if values.dim() != 1 or values.is_complex():
        raise ValueError(f"`s` must have shape (n,), one value per row, got {tuple(values.shape)}.")
    if len(values) == 0:
        raise ValueError("`s` has no rows to search.")
    values = values.double()
    least, most = checks.finite("s", values)
    slack = 1e-6 * (high - low)  # float32 values at the ends
    if least < low - slack or most > high + slack:
        raise ValueError(f"`s` must lie in `bounds` = ({low:g}, {high:g}), but ranges from {least:g} to {most:g}; pass its range.")
    return values
