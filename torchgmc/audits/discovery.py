"""Discovery: which of all intersections of columns deviate most?"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchgmc.audits.moments import Moments
from torchgmc.audits.tabular import Tabular
from torchgmc.engine import checks
from torchgmc.engine.clusters import check as check_clusters
from torchgmc.engine.clusters import codes, total
from torchgmc.groups.columns import as_mapping
from torchgmc.groups.groups import Groups


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
    """

    table: dict[str, list[Any]]
    alpha: float
    delta: float
    order: str
    num_searched: int
    num_rows: int
    num_violated: int

    @property
    def violated(self) -> bool:
        """Some group is violated, with confidence 1 - delta over everything searched."""
        return self.num_violated > 0

    @property
    def summary(self) -> str:
        """The result in one line."""
        return (
            f"{self.num_violated} of {self.num_searched} groups searched in {self.num_rows} rows deviate by more than "
            f"{self.alpha:g} (confidence {100 * (1 - self.delta):g} % for all of them at once)."
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
) -> Discovery:
    r"""Whom did we forget? The intersections of up to ``depth`` columns where s deviates most from 0.

    s is the error of each row with the sign of heads and audits, positive where it is too high: risk - target, coverage -
    target, prediction - outcome (``head.values(...).s``). Every level of every column and every intersection that occurs is
    searched, by counting: time is a few dozen passes over the rows, and no membership table is made.

    Intervals follow from sums (:meth:`torchgmc.audits.moments.Moments.intervals`) with a union bound over **all**
    candidate groups and both views, so that picking the worst of them stays honest: with probability at least 1 - delta no
    interval of any searched group misses its mean, and no group within alpha is called violated. The candidates depend only
    on the columns, never on s.

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

    Returns:
        The worst groups, at most ``top``.

    Example:
        >>> columns = {"sex": ["f", "m"] * 500, "site": [1, 1, 2, 2] * 250}
        >>> s = torch.tensor([0.5 if pair == ("f", 2) else 0.0 for pair in zip(columns["sex"], columns["site"])])
        >>> found = gmc.find_groups(columns, s)
        >>> found.table["group"][0], found.table["count"][0], found.table["verdict"][0], found.num_searched
        ('sex=f & site=2', 250, 'violated', 8)
    """
    checks.fraction("delta", delta)
    checks.count("top", top, 20)
    data = as_mapping(columns)
    depth = min(checks.count("depth", depth, 2), max(len(data), 1))
    checks.option("order", order, ("conditional", "mass-weighted"))
    low, high = checks.interval("bounds", bounds)
    if not low <= 0.0 <= high:
        raise ValueError(f"`bounds` must be (low, high), the range of s, with low <= 0 <= high and low < high, got {bounds!r}.")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0.0 <= alpha < math.inf:
        raise ValueError(f"`alpha` must be a finite number of at least 0, got {alpha!r}.")
    values = _values(s, low, high)
    with warnings.catch_warnings():  # groups below `min_size` are left out on purpose
        warnings.filterwarnings("ignore", message="left out groups")
        groups = Groups.from_columns(
            data, depth, bins=bins, quantiles=quantiles, min_size=min_size, small="drop", missing=missing
        ).to(values.device)
    if groups.num_rows != len(values):
        raise ValueError(f"`s` must have one value per row of `columns`, n = {groups.num_rows}, got {len(values)}.")
    w = checks.weights(weight, len(values), values)
    moments = _moments(groups, values, w, check_clusters(clusters, len(values), values.device))
    # Both views are shown, so each has half of delta.
    own, part = moments.estimates(True)[:, 0], moments.estimates(False)[:, 0]
    own_low, own_high = (end[:, 0] for end in moments.intervals(True, (low, high), delta / 2))
    part_low, part_high = (end[:, 0] for end in moments.intervals(False, (low, high), delta / 2))
    empty = moments.mass[:, 0] <= 0  # all of its rows have weight 0
    own, own_low, own_high = own.masked_fill(empty, 0.0), own_low.masked_fill(empty, low), own_high.masked_fill(empty, high)
    conditional = order == "conditional"
    estimate, least, most = (own, own_low, own_high) if conditional else (part, part_low, part_high)
    # The side of the interval nearest to 0 first; where the interval holds 0, the mean decides, below all of those.
    nearest = torch.maximum(least, -most)
    key = torch.where(nearest > 0, high - low + nearest, estimate.abs()) if conditional else estimate.abs()
    chosen = key.argsort(descending=True, stable=True)[:top]
    verdicts = ["undecided", "holds", "violated"]
    beyond = nearest > alpha
    code = torch.where(beyond, 2, (torch.maximum(-least, most) <= alpha).long())
    figures = {
        "count": moments.count[:, 0],
        "mass": moments.mass[:, 0] / moments.total,
        "estimate": own,
        "low": own_low,
        "high": own_high,
        "weighted": part,
        "weighted low": part_low,
        "weighted high": part_high,
    }
    table: dict[str, list[Any]] = {"group": [groups.name(index) for index in chosen.tolist()]}
    table |= {name: column[chosen].tolist() for name, column in figures.items()}
    table["count"] = [int(count) for count in table["count"]]
    table["verdict"] = [verdicts[k] for k in code[chosen].tolist()]
    return Discovery(table, float(alpha), delta, order, len(groups), len(values), int(beyond.sum()))


def _moments(groups: Groups, s: Tensor, w: Tensor, cluster: Tensor) -> Moments:
    """Moments of every group by counting; column vectors of shape ``(a, 1)``.

    The weight W_c of a cluster's members in A is at most that of the cluster, so that the sum of W_c^2 over clusters, which
    Hoeffding's inequality needs, is at most that of w W over the rows of A. Variances are not known from sums over rows.
    """
    weighted, together = w * s, w
    if cluster.shape[1]:
        together = total(w[:, None], cluster)[codes(cluster)[0], 0]
    table = torch.stack([weighted, weighted.square(), w, w * together, (w > 0).double()], 1)
    first, second, mass, square, count = (column[:, None] for column in groups.sums(table).unbind(1))
    if bool((together > w).any()):
        second = torch.full_like(second, math.inf)
    everyone, every_square, every_count = table[:, 2:].sum(0)[:, None].unbind(0)
    return Moments(first, second, mass, square, count, everyone, every_square, every_count, w.amax()[None])


def _values(s: Any, low: float, high: float) -> Tensor:
    values = checks.numbers("s", s).detach()
    if values.dim() != 1 or values.is_complex():
        raise ValueError(f"`s` must have shape (n,), one value per row, got {tuple(values.shape)}.")
    if len(values) == 0:
        raise ValueError("`s` has no rows to search.")
    values = values.double()
    checks.finite("s", values)
    least, most = (float(v) for v in values.aminmax())
    slack = 1e-6 * (high - low)  # float32 values at the ends
    if least < low - slack or most > high + slack:
        raise ValueError(
            f"`s` must lie in `bounds` = ({low:g}, {high:g}), but ranges from {least:g} to {most:g}; pass its range."
        )
    return values
