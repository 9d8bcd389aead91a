"""Groups nobody named: intersections of features, the model's own output and named groups, found inside a fit.

What the heads that learn share: the options, the buffers, the features of a batch, and the rules in words.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Optional, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torchgmc.audits.audit import Audit
from torchgmc.audits.intervals import Rows
from torchgmc.audits.tabular import Table
from torchgmc.distributed import alone, collected, total as over_ranks
from torchgmc.engine import checks, folds, linear, rules, search, trees
from torchgmc.engine.clusters import deal_clusters
from torchgmc.engine.float64 import wide
from torchgmc.engine.folds import leading, places
from torchgmc.engine.hashing import mix64
from torchgmc.engine.scripting import has_values
from torchgmc.engine.solver import Report
from torchgmc.groups.columns import as_mapping, factorize, is_frame, num_rows, read
from torchgmc.heads.base import Head

#: One of so many parts of the rows (or clusters) is kept from the search: it decides how many trees there are.
PARTS = 5
#: Rows below which nothing is learned.
FEWEST = 50
#: Rules that are kept, and 1 - confidence of their intervals together.
RULES, DELTA = 12, 0.05
#: Rows that rules are chosen on, and judged on.
MOST_ROWS = 1 << 13


@dataclass(frozen=True)
class Trees:
    """Learn groups as leaves of boosted trees, ``learn=gmc.Trees(depth=3)``.

    Four fifths of the rows (or clusters), chosen by their content, grow the trees; the others say how many of them help.

    Args:
        depth: largest number of conditions of a rule, 1 to 8.
        names: of the features, for :attr:`torchgmc.ProbabilityHead.learned`; ``x0, x1, ...`` by default.
        categorical: features that hold codes, by name or place: their rules are ``site = 3``, not ``site >= 3``. A mapping from
            them to the names of the codes makes this ``site = B``.
        trees: most trees; the report says where they ended while held-out loss still fell.
        rate: share of each leaf's step that is taken.
        bins: levels that a number is cut into, 2 to 255.
        ridge: examples by which each leaf is drawn to no change; ``smallest``: least curvature of a leaf, in examples.

    Example:
        >>> x, group = torch.randn(4000, 2), torch.rand(4000, 1) < 0.5
        >>> hidden = (x[:, 0] > 0.5) & group[:, 0]  # nobody named it
        >>> probs = torch.full((4000,), 0.4)
        >>> y = torch.rand(4000) < probs + 0.4 * hidden
        >>> learn = gmc.Trees(depth=2, names=["age", "income"])
        >>> head = gmc.ProbabilityHead(alpha=None, groups=["women"], learn=learn).fit(probs, y, group, features=x)
        >>> f = head(probs, group, features=x)
        >>> bool((f[hidden].mean() - 0.8).abs() < 0.05), "women" in head.learned[0][0]
        (True, True)
    """

    depth: int = 3
    names: Sequence[str] | None = None
    categorical: Any = ()
    trees: int = 400
    rate: float = 0.2
    bins: int = 32
    ridge: float = 10.0
    smallest: float = 3.0

    def __post_init__(self) -> None:
        for name, least, usual, most in (("depth", 1, 3, 8), ("trees", 1, 400, 10_000), ("bins", 2, 32, 255)):
            value = checks.count(name, getattr(self, name), usual)
            if not least <= value <= most:
                raise ValueError(f"`{name}` must be from {least} to {most}, got {value}.")
            object.__setattr__(self, name, value)
        for name in ("rate", "ridge", "smallest"):
            checks.positive(name, getattr(self, name), "See gmc.Trees.")
        if self.rate > 1:
            raise ValueError(f"`rate` must be at most 1, the whole step of a leaf, got {self.rate:g}.")
        if self.names is not None:
            object.__setattr__(self, "names", checks.names(self.names, "names"))
        labels = dict(self.categorical) if isinstance(self.categorical, dict) else {name: None for name in self.categorical or ()}
        found = {}
        for name, levels in labels.items():
            place = list(self.names or ()).index(name) if name in (self.names or ()) else name
            if isinstance(place, bool) or place not in range(len(self.names or ()) or 1 << 24):
                raise ValueError(f"`categorical` must hold features among `names` = {self.names}, or their places, got {name!r}.")
            found[str(int(place))] = None if levels is None else [str(level) for level in levels]
            if levels is not None and len(set(map(str, levels))) < len(levels):
                raise ValueError(f"`categorical` names a level of {name!r} twice: {checks.listing(map(str, levels))}.")
        object.__setattr__(self, "categorical", found)

    def to_dict(self) -> dict[str, Any]:
        """As JSON, for files."""
        return dataclasses.asdict(self) | {"categorical": [[int(k), v] for k, v in self.categorical.items()]}


@dataclass(frozen=True)
class Linear:
    """Learn a linear function of features, such as a model's own embedding: ``learn=gmc.Linear("l2")``.

    The promise is then multi-accuracy over that representation: no linear function of it tells where the model is wrong, up to
    noise. Features are standardised, missing ones count as their mean. A fifth of the rows (or clusters), chosen by their content,
    says how many steps help; :attr:`torchgmc.ProbabilityHead.learned` names the features that matter most, at or above their mean.

    Args:
        penalty: ``"l2"`` (ridge) or ``"l1"`` (few features, one step at a time).
        names: of the features; ``x0, x1, ...`` by default.
        steps: most steps.
        ridge: examples by which each weight is drawn to 0; or 10, 100 or 1,000 times as many, if held-out rows prefer it.

    Example:
        >>> x = torch.randn(2000, 5)
        >>> probs, y = torch.full((2000,), 0.5), torch.rand(2000) < torch.sigmoid(2 * x[:, 3])
        >>> head = gmc.ProbabilityHead(alpha=None, learn=gmc.Linear("l1")).fit(probs, y, features=x)
        >>> f, truth = head(probs, features=x), torch.sigmoid(2 * x[:, 3])
        >>> bool((f - truth).abs().mean() < 0.05), head.learned[0][0][:2]
        (True, 'x3')
    """

    penalty: str = "l2"
    names: Sequence[str] | None = None
    steps: int = 200
    ridge: float = 1.0
    depth: ClassVar[int] = 1  # of the rules that say what it found
    categorical: ClassVar[dict[str, Any]] = {}

    def __post_init__(self) -> None:
        checks.option("penalty", self.penalty, ("l1", "l2"))
        object.__setattr__(self, "steps", checks.count("steps", self.steps, 200))
        checks.positive("ridge", self.ridge, "See gmc.Linear.")
        if self.names is not None:
            object.__setattr__(self, "names", checks.names(self.names, "names"))

    def to_dict(self) -> dict[str, Any]:
        """As JSON, for files."""
        return dataclasses.asdict(self)


def learner(value: Any) -> Trees | Linear | None:
    """From an argument, or from a file."""
    if value is None:
        return None
    found = value.to_dict() if isinstance(value, Trees | Linear) else value
    if not isinstance(found, dict) or not {"penalty", "depth"} & found.keys():
        raise TypeError(f"`learn` must be gmc.Trees(...), gmc.Linear(...) or None, got {value!r}.")
    if "penalty" in found:
        return Linear(**found)
    return Trees(**found | {"categorical": dict(found.get("categorical", ()))})


#: z before trees, of fits without and with the held-out rows; and the loss of rows in an order.
Ends: TypeAlias = tuple[Tensor, Tensor]
LossOf: TypeAlias = Callable[[Tensor], trees.Loss]


class Division(NamedTuple):
    """Parts that rows are dealt to ``(n,)``, and an order of the rows in which the last ``held``, of part 0, are held out."""

    part: Tensor
    order: Tensor
    held: int
    spots: Tensor  # places of the rows in that order, among those of all ranks, from 0 to 1 (n,)


class Found(NamedTuple):
    """What :meth:`Learning.grow_trees` found: the buffers, and z after the trees."""

    column: Tensor
    cut: Tensor
    kind: Tensor
    leaf: Tensor
    z: Tensor
    order: Tensor  # of the rows
    held: int  # the last so many of them were not searched
    history: list[float]
    start: Tensor  # z before the trees
    unseen: Tensor  # z after trees grown without the row's part, where that was asked for; else z
    weight: Tensor  # z falls by (x - center) @ weight too, (d, C); (0, C) of trees
    center: Tensor
    place: Tensor  # leaf of each row in each tree, in the order, uint8 (T, n)
    spots: Tensor  # of :class:`Division`

    def scaled(self, scale: float, start: Tensor) -> "Found | None":
        """In another unit of z; None if nothing was found."""
        if not len(self.column):
            return None
        leaf, z, unseen, weight = self.leaf * scale, self.z * scale, self.unseen * scale, self.weight * scale
        return self._replace(leaf=leaf, z=z, unseen=unseen, start=start, weight=weight)


class Learning(Head):
    """A head that takes ``learn=`` and ``features=``."""

    tree_column: Tensor
    tree_cut: Tensor
    tree_kind: Tensor
    tree_leaf: Tensor
    tree_width: Tensor
    rule_place: Tensor
    rule_values: Tensor
    line_weight: Tensor
    line_center: Tensor
    #: Buffers of the trees, of their rules, and of a linear function.
    forest: ClassVar[tuple[str, ...]] = (
        *("tree_column", "tree_cut", "tree_kind", "tree_leaf", "rule_place", "rule_values", "line_weight", "line_center"),
    )
    unbounded: ClassVar[tuple[str, ...]] = ("tree_cut", "rule_values")
    #: What a rule changes, and by how much it is multiplied to be shown.
    effect_unit: ClassVar[tuple[str, float]] = ("", 1.0)

    def prepare_learning(self, learn: Any, columns: int, fractional: Any = False) -> None:
        """Options and empty buffers, from ``__init__``; ``columns``: of z."""
        self.learn = learner(learn)
        self.fractional = checks.flag("fractional", fractional)
        if self.fractional and getattr(self, "finite_sample", False):
            raise ValueError("`finite_sample` has a threshold for each combination of groups; omit `fractional`, or it.")
        self.linear = isinstance(self.learn, Linear)
        if self.learn is not None and not self.noise_floor:
            raise ValueError("`learn` goes as far as held-out rows say, which needs noise_floor=True.")
        self.learns = self.learn is not None
        splits = (1 << self.learn.depth) - 1 if self.learn is not None else 0
        self.hold(torch.int64, tree_column=(0, splits), tree_kind=(0, splits), tree_width=(), rule_place=(0, 3))
        self.hold(tree_cut=(0, splits), tree_leaf=(0, splits + 1, columns), rule_values=(0, 8))
        self.hold(line_weight=(0, columns), line_center=(0,))
        self.num_features = 0  # mirrors tree_width

    def reset(self) -> None:
        """Forget the trees too."""
        self.tree_width.zero_()
        self.num_features = 0
        super().reset()

    def config(self) -> dict[str, Any]:
        """Arguments that rebuild this head; ``learn`` and ``fractional`` only where they are used."""
        found = super().config()
        learn = found.pop("learn", None)
        return found | ({} if learn is None else {"learn": learn.to_dict()}) | ({"fractional": True} if self.fractional else {})

    def misfit(self, state: dict[str, Tensor]) -> str:
        """Trees whose parts do not fit together, or that look at columns that do not exist."""
        column, width = state.get("tree_column"), state.get("tree_width")
        if column is None or width is None:
            return ""
        for parts in (self.forest[:4], self.forest[4:6], self.forest[6:]):
            lengths = {name: len(state[name]) for name in parts if name in state}
            if len(set(lengths.values())) > 1:
                return f"the parts of its trees differ in length: {lengths}"
        line = state.get("line_center")
        if line is not None and len(line) not in (0, int(width)):
            return f"'line_center' must have {int(width)} entries, as 'tree_width' says, got {len(line)}"
        if not column.numel():
            return ""
        limit = int(width) + self.tree_leaf.shape[2] + self.num_groups
        if not 0 <= int(column.min()) <= int(column.max()) < limit:
            return f"'tree_column' must hold columns from 0 to {limit - 1}, got {int(column.min())} to {int(column.max())}"
        return ""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.num_features = int(self.tree_width)

    # -- features of a batch -----------------------------------------------------------------------------------------

    def check_features(self, features: Any, n: int, device: torch.device) -> Tensor:
        """Features of a batch, float32 ``(n, d)``; ``(n, 0)`` for a head that does not learn."""
        if self.learn is None:
            if features is not None:
                raise ValueError("this head does not use `features`; make it with learn=gmc.Trees() or gmc.Linear().")
            return torch.zeros(n, 0, device=device)
        if features is None:
            raise ValueError("`features` is missing: this head was made with `learn`; pass an array of shape (n, d).")
        framed = is_frame(features)
        features = self.by_name(features) if framed else checks.tensor_of(features)
        if not isinstance(features, Tensor) or features.is_complex() or features.layout != torch.strided:
            raise TypeError(f"`features` must be a dense array of real numbers (n, d), got {type(features).__name__}.")
        if features.dim() != 2 or len(features) != n:
            raise ValueError(f"`features` must have shape ({n}, d), one row per example, got {tuple(features.shape)}.")
        if features.device != device and not framed:
            raise ValueError(f"`features` is on {features.device} but the scores are on {device}; move them to one device.")
        known = self.statistics
        wide = self.num_features if self.is_fitted else len(self.learn.names) if self.learn.names else None
        wide = known.features.shape[1] if wide is None and known is not None else wide
        if wide is not None and features.shape[1] != wide:
            raise ValueError(f"`features` must have {wide} columns, as before, got {features.shape[1]}.")
        found = features.detach().to(torch.float32).to(device)
        if bool(found.isinf().any()):
            raise ValueError("`features` must be finite as float32 (NaN where a value is missing), but it holds infinity.")
        if (last := max(map(int, self.learn.categorical), default=-1)) >= found.shape[1]:
            raise ValueError(f"`features` has no column {last}, which `categorical` of gmc.Trees holds.")
        codes = found[:, [int(place) for place in self.learn.categorical]]
        if codes.numel() and bool(((codes != codes.round()) | (codes.abs() >= 1 << 24)).logical_and(~codes.isnan()).any()):
            raise ValueError("`features` must hold whole numbers below 2^24 in the columns of `categorical`.")
        for place, levels in self.learn.categorical.items():
            column = found[:, int(place)]
            if levels is not None and len(odd := column[(column < 0) | (column >= len(levels))]):
                why = f"`categorical` of gmc.Trees names the codes 0 to {len(levels) - 1}; NaN is missing."
                raise ValueError(f"column {place} of `features` holds the code {odd[0]:g}, but {why}")
        if not self.is_fitted and n >= FEWEST and features.dtype in (torch.float64, torch.int64, torch.int32):
            exact = features[:MOST_ROWS].detach().cpu().double()
            rounded, mean = found[:MOST_ROWS].cpu().double(), exact.nanmean(0)
            off, spread = ((exact - other).abs().nanmean(0) for other in (rounded, mean))
            if len(lost := ((off > 1e-3 * spread) & (spread > 1e-12 * mean.abs())).nonzero()):
                why = "loses what tells its rows apart when rounded to float32; subtract a constant from it first, e.g. its mean."
                warnings.warn(f"column {int(lost[0])} of `features` {why}", stacklevel=6)
        return found

    def by_name(self, frame: Any) -> Tensor:
        """Features ``(n, d)`` from a frame (or mapping): those that ``gmc.Trees(names=...)`` names; labels become codes."""
        if self.learn is None or self.learn.names is None:
            how = "make it with learn=gmc.Trees(names=[...]), or pass an array of shape (n, d)."
            raise ValueError(f"`features` came as a data frame, but this head does not know which columns to take; {how}")
        given = as_mapping(frame)
        if missing := [name for name in self.learn.names if name not in given]:
            raise ValueError(f"`features` has no column {missing[0]!r}; its columns are {checks.listing(given)}.")
        num_rows({name: given[name] for name in self.learn.names})
        found = []
        for place, name in enumerate(self.learn.names):
            column, levels = read(name, given[name]), self.learn.categorical.get(str(place))
            numbers = levels is None and column.dtype.kind in "biuf"
            labels, code = ([], column) if numbers else factorize(name, column)
            known = [math.nan if v is None else _code_of(v, levels) for v in labels]
            if None in known:
                what = "one of its levels" if levels else f"a number (for labels: gmc.Trees(categorical={{{name!r}: [levels]}}))"
                raise ValueError(f"column `{name}` of `features` must hold {what}, got {labels[known.index(None)]!r}.")
            found.append(torch.from_numpy((np.array(known, dtype=float)[code] if labels else column).astype(float)))
        return torch.stack(found, 1)

    def check_use(self, features: Any, like: Tensor) -> None:
        """Features of an eager call: there or not, their device, their values."""
        if not torch.compiler.is_compiling() and has_values(like) and (self.is_fitted or features is not None):
            self.check_features(features, len(like), like.device)

    def learned_move(self, z: Tensor, member: Tensor, features: Optional[Tensor]) -> Tensor:
        """What the trees take off z: float64 ``(n, C)``. Scripts and exports.

        ``z``: the model's own output ``(n, C)``; ``(n, 0)`` if the trees do not look at it. ``member``: named groups ``(n,
        a)``. ``features``: ``(n, d)``.
        """
        if features is None:
            raise ValueError("`features` is missing: this head was fitted with them; pass an array of shape (n, d)")
        if features.dim() != 2 or features.shape[1] != self.num_features or features.shape[0] != member.shape[0]:
            raise ValueError(f"`features` must have shape ({member.shape[0]}, {self.num_features}), got {features.shape}")
        if self.linear:
            if self.line_center.shape[0] == 0:
                return wide(torch.zeros_like(z))
            x = wide(features) - self.line_center
            return torch.where(x.isnan(), torch.zeros_like(x), x) @ self.line_weight
        columns = looked_at(features, z.detach(), member)
        return trees.walk(columns, self.tree_column, self.tree_cut, self.tree_kind, self.tree_leaf)

    # -- fit ---------------------------------------------------------------------------------------------------------

    def divide(self, rows: Any) -> Division | None:
        """Who is held out; None if rows are too few, or all weight is held out (one cluster). Clusters stay together."""
        if self.learn is None or int(over_ranks(torch.tensor(rows.rows))) < FEWEST:
            return None
        spots = places(*rows.content())
        part = deal_clusters(PARTS, rows.cluster) if rows.cluster.shape[1] else spots.place % PARTS
        if not float(over_ranks(rows.weight[part > 0].sum())):
            return None
        order = spots.place.argsort(stable=True)
        order = order[_last(part[order] == 0)]
        return Division(part, order, int((part == 0).sum()), spots.place[order] / spots.limit)

    def grow_trees(self, columns: Tensor, ends: Ends, loss: LossOf, division: Division, cross: bool = False) -> Found:
        """Boost; see :func:`torchgmc.engine.trees.boost`. All in the order of the statistics.

        ``columns``: features, own output and groups, float32 ``(n, q)``. ``ends``: z before the trees, ``(n, C)``, found
        without and with the held-out rows. ``loss``: of rows in an order. ``division``: of :meth:`divide`. ``cross``: grow as
        many trees without each part too, for ``Found.unseen``.
        """
        learn = self.learn
        if isinstance(learn, Linear):
            return self._draw_line(learn, columns, ends, loss, division, cross)
        assert learn is not None
        (part, order, held, spots), (start, final) = division, ends
        equal = torch.zeros(columns.shape[1], dtype=torch.bool, device=columns.device)
        equal[[int(place) for place in learn.categorical]] = True
        count = int(over_ranks(torch.tensor(len(order))))
        few = None if count < 2 * folds.EXACT else spots < folds.EXACT / count
        coded = trees.code(columns[order], equal, learn.bins, few)
        options = (learn.depth, learn.trees, learn.rate, learn.ridge, learn.smallest)
        found = trees.boost(coded, start[order], final[order], loss(order), held, *options, spots=spots)
        device, splits, none = columns.device, (1 << learn.depth) - 1, (final[:0], final[:0, 0])
        if not found.trees:
            nothing = torch.zeros(0, splits, dtype=torch.int64, device=device)
            no = (nothing, nothing.double(), nothing, found.moves)
            return Found(*no, final, order, held, found.history, final, final, *none, found.places, spots)
        column, cut, kind = rules.raw(found.trees, coded, over_ranks(columns.isnan().any(0).long()) > 0)
        z = torch.empty_like(final)
        z[order] = final[order] - found.moved
        unseen = z.clone()
        options = (learn.depth, len(found.trees), learn.rate, learn.ridge, learn.smallest)
        ascending = spots.argsort(stable=True) if cross else spots
        for k in range(PARTS if cross else 0):
            at = ascending[_last(part[order[ascending]] == k)]
            rows, own = order[at], int((part == k).sum())
            if 0 < int(over_ranks(torch.tensor(own))) < count:
                parts = (coded.pick(at.cpu().numpy()), final[rows], final[rows], loss(rows), own)
                unseen[rows[len(rows) - own :]] = trees.boost(*parts, *options, stop=False, spots=spots[at]).z
        return Found(column, cut, kind, found.moves, z, order, held, found.history, final, unseen, *none, found.places, spots)

    def _learn_from_some(self, rows: Any) -> bool:
        """Of very many rows, over all ranks, fit some by themselves and keep what they teach; False if all can be looked at."""
        wanted = trees.POOL + trees.JUDGES
        if self.linear or rows.cluster.shape[1] or int(over_ranks(torch.tensor(rows.rows))) < 2 * wanted:
            return False
        spots, other = places(*rows.content()), self.twin()
        drawn = mix64(spots.place) & (folds.RANGE - 1)  # not by the places, which order those that are drawn again
        other.statistics = rows.pick(drawn < int(wanted * folds.RANGE / spots.rows)).sorted()
        other.calibrate()
        for name in self.forest:
            setattr(self, name, getattr(other, name))
        return True

    def _known_trees(self, z: Tensor, rows: Any, loss: trees.Loss) -> Found:
        """The trees of :meth:`_learn_from_some`; their moves, from z ``(n, C)`` on, are fitted to the rows of all ranks."""
        assert isinstance(self.learn, Trees)
        columns, splits = looked_at(rows.features, rows.z, rows.member), (self.tree_column, self.tree_cut, self.tree_kind)
        moves, after = trees.refit(columns, splits, self.tree_leaf, z, loss, self.learn.rate, self.learn.ridge)
        none = self.tree_column[:0]
        return Found(*splits, moves, after, none, 0, [], z, after, self.line_weight, self.line_center, none, none)

    def _draw_line(self, learn: Linear, columns: Tensor, ends: Ends, loss: LossOf, division: Division, cross: bool) -> Found:
        """A linear function in place of trees; see :meth:`grow_trees`. Its rules are the features that matter most."""
        (part, order, held, spots), (start, final) = division, ends
        features = columns[:, : columns.shape[1] - self.tree_leaf.shape[2] - self.num_groups]
        x, mean, deviation = linear.standard(features)
        few = learn.penalty == "l1"
        line = linear.fit(x[order], start[order], final[order], loss(order), held, learn.steps, learn.ridge, few)
        z = final - x @ line.weight
        unseen = z.clone()
        for k in range(PARTS if cross and line.steps else 0):
            rows, rest = order[part[order] != k], part == k
            own = linear.descend(x[rows], final[rows], loss(rows), 0, line.steps, line.ridge, few)
            unseen[rest] = final[rest] - x[rest] @ own.weight
        size = line.weight.abs().amax(1)
        most = size.argsort(descending=True, stable=True)[:RULES]
        column = most[size[most] > 0][:, None]
        kind = 4 * (over_ranks(features.isnan().any(0).long()) > 0)[column].long()
        leaf = z.new_zeros(len(column), 2, z.shape[1])  # rules that move nothing: the line does
        weight = line.weight / deviation[:, None]
        cut = mean.float().double()[column]
        place = trees.places(columns[order], column, cut, kind).T.to(torch.uint8)
        return Found(column, cut, kind, leaf, z, order, held, line.history, final, unseen, weight, mean, place, spots)

    def write_trees(self, found: Found | None, width: int, known: bool = False) -> None:
        """The fitted trees, or the line, become buffers; their rules are those ``known`` already, or none yet."""
        self.tree_width.fill_(width)
        self.num_features = width
        for name in self.forest:
            own, rule = getattr(self, name), name.startswith("rule_")
            part = (own if known and found is not None else None) if rule else getattr(found, name.partition("_")[2], None)
            self._buffers[name] = own[:0] if part is None else part.to(self.tree_width.device)

    def mark_fitted(self, report: Report | None, everyone: bool = False) -> None:
        """With a sentence where more trees might help."""
        most, enough = (self.learn.trees, math.ceil(trees.PATIENCE / self.learn.rate)) if isinstance(self.learn, Trees) else (0, 0)
        if report is not None and self.exclusive and len(self.tree_column) > max(0, most - enough) and most:
            more = f" Trees ended at `trees` = {most} while held-out loss fell: more of them, or a larger `depth`, may help."
            report = dataclasses.replace(report, message=report.message + more)
        super().mark_fitted(report, everyone)

    def write_rules(self, found: Found, values: Sequence[Tensor], rows: Any, bounds: tuple[Any, Any]) -> None:
        """The rules that change most on the rows searched, judged on the others.

        ``found``: the trees. ``values``: change of the output, s of the model's own output, and s of the head's; ``(n, C)``
        each. ``rows``: the statistics, for weights and clusters. ``bounds``: range of s.
        """
        effect, before, after = values
        leaves, classes = found.leaf.shape[1], effect.shape[1]
        cut = len(found.order) - found.held
        if not len(found.column) or not int(over_ranks(torch.tensor(found.held))):
            return
        seen, unseen = (found.order[at][: leading(found.spots[at], MOST_ROWS)] for at in (slice(cut), slice(cut, None)))
        place = found.place[:, : len(seen)]  # (T, n)
        weight = (rows.weight[seen] / over_ranks(rows.weight[seen].sum()))[:, None]
        known = torch.cat([weight, effect[seen] * weight], 1)
        mass = over_ranks(torch.stack([search.sums(tree.long(), known, leaves) for tree in place])).flatten(0, 1)
        size = mass[:, 1:].abs().amax(1) / mass[:, 0].clamp_min(1e-300).sqrt()  # in units of its noise, up to a factor
        chosen: dict[str, int] = {}
        for k in size.float().argsort(descending=True, stable=True)[: 20 * RULES].tolist():  # ties stay ties on any ranks
            t, leaf = divmod(k, leaves)
            words = self._rule(found.column[t], found.cut[t], found.kind[t], leaf)
            if words and float(size[k]) > 0:
                chosen.setdefault(words, k)
            if len(chosen) == RULES:
                break
        index = torch.tensor(list(chosen.values()), dtype=torch.int64, device=place.device)
        who = (found.place[index // leaves, cut : cut + len(unseen)] == index[:, None] % leaves).T
        fine = over_ranks(who.sum(0)) > 1  # else there is nobody to judge it on
        index, who = index[fine], who[:, fine]
        if not len(index):
            return
        column = mass[index, 1:].abs().argmax(1)
        judged = [mass[index, 0], mass[index, 1:].gather(1, column[:, None])[:, 0] / mass[index, 0]]
        both = torch.cat([before[unseen], after[unseen]], 1)  # at once: each end has its part of twice the probability
        low, high = (torch.as_tensor(end, dtype=torch.float64).expand(classes).repeat(2) for end in bounds)
        parts = (both, who, rows.weight[unseen], rows.cluster[unseen], found.spots[cut : cut + len(unseen)])
        s, inside, heavy, cluster, spots = (collected(part)[0] for part in parts)
        many = int(over_ranks(torch.tensor(len(found.order)))) > folds.EXACT  # then whatever the last bits of s
        with alone(), torch.inference_mode():  # a tenth faster
            judges = Rows.of(s, inside, heavy, cluster, (low, high), order=spots.argsort() if many else None)
            found_out = judges.at_once(2 * DELTA)
        for at in (column, column + classes):
            judged += [value.gather(1, at[:, None])[:, 0] for value in found_out]
        self.rule_place = torch.stack([index // leaves, index % leaves, column], 1).to(self.tree_width.device)
        self.rule_values = torch.stack(judged, 1).to(self.tree_width.device)

    # -- the rules in words --------------------------------------------------------------------------------------------

    @property
    def learned(self) -> list[tuple[str, float, float]]:
        """The rules found, those that change most first: (rule in words, share of the rows, mean change of the output there).

        Several rules may hold for a row, and its change is the sum over all trees. See :meth:`learned_table` for what was
        wrong before and after, on rows that the search did not see.
        """
        return [(row[0], row[1], row[2]) for row in self._rules()]

    def learned_table(self) -> Table:
        """Rule, share, effect, and the mean of s there before and after with intervals.

        The last are of the fifth of the calibration rows that neither the search nor the choice of these rules saw (the number
        of trees, offsets and rounds did): intervals that hold for all rules at once with confidence 95 %. An audit of fresh
        data needs no such reservation.
        """
        what, factor = self.effect_unit
        columns = ["rule", "share", f"effect{what}", "before", "after"]
        rows = []
        for words, share, *values in self._rules():
            effect, *shown = (f"{factor * value:+.3g}" for value in values)
            ends = (f"{mean} [{low}, {high}]" for mean, low, high in (shown[:3], shown[3:]))
            rows.append([words, f"{100 * share:.1f} %", effect, *ends])
        caption = "Rules that were learned, judged on calibration rows that the search did not see"
        return Table(columns, rows, columns[1:], columns[:1], caption)

    def tables(self, audit: Audit | None) -> list[Table]:
        """The rules, for the report."""
        return [*super().tables(audit), *([self.learned_table()] if len(self.rule_place) else [])]

    def _rules(self) -> list[list[Any]]:
        found = []
        for (tree, leaf, column), values in zip(self.rule_place.tolist(), self.rule_values.tolist(), strict=True):
            words = self._rule(self.tree_column[tree], self.tree_cut[tree], self.tree_kind[tree], leaf)
            name = self.class_names()[column]
            found.append([f"{words}, {name}" if name else words, *values])
        return found

    def _rule(self, column: Tensor, cut: Tensor, kind: Tensor, leaf: int) -> str:
        """The conditions of a leaf in words."""
        named = self.num_features + self.tree_leaf.shape[2]
        return rules.words(column, cut, kind, leaf, self._column_name, self._level, lambda j: j >= named and not self.fractional)

    def _column_name(self, j: int) -> str:
        wide, classes = self.num_features, self.tree_leaf.shape[2]
        if j < wide:
            return self.learn.names[j] if self.learn is not None and self.learn.names else f"x{j}"
        if j < wide + classes:
            return f"model's output for {self.class_names()[j - wide]}".removesuffix(" for ")
        return self.groups[j - wide - classes]

    def shown_output(self, value: float) -> float:
        """A value of the model's output column as users know it."""
        return value

    def _level(self, j: int, value: float) -> str:
        value = self.shown_output(value) if 0 <= j - self.num_features < self.tree_leaf.shape[2] else value
        labels = self.learn.categorical.get(str(j)) if self.learn is not None else None
        if labels is not None and float(value).is_integer() and 0 <= value < len(labels):
            return str(labels[int(value)])
        return f"{value:.{4 if abs(value) < 1e4 else 8}g}"


def looked_at(features: Tensor, own: Tensor, member: Tensor) -> Tensor:
    """What trees look at: features, the model's own output (or start) ``(n, C)``, groups; float32 ``(n, d + C + a)``."""
    return torch.cat([features.to(torch.float32), own.to(torch.float32), member.to(torch.float32)], 1)


def _last(chosen: Tensor) -> Tensor:
    """Places of all rows, the chosen ones last."""
    return chosen.to(torch.uint8).argsort(stable=True)


def _code_of(label: Any, levels: Sequence[str] | None) -> float | None:
    """Of a label: its place among the levels, or the number it is."""
    if levels is not None:
        text = str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)
        return float(levels.index(text)) if text in levels else None
    return float(label) if isinstance(label, int | float | np.number | np.bool_) else None
