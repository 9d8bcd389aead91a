r"""Groups crossed with level sets of the prediction: the steps that move f, merged, and applied to new examples.

Level sets depend on f, so the fitted state is a log of steps that a new input replays: each step looks at the level
the input is in *now*. f is held in coordinates z in which a step is an addition: the logit (``geometry="kl"``) or f itself
(``"euclidean"``). Coordinates and steps are whole multiples of a power of two, so that sums are exact in float64 in
any order, and an example ends in the same level set in any batch, format or precision of the solver.
"""

import functools
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from torchgmc import projections
from torchgmc.engine.float64 import wide
from torchgmc.engine.statistics import Bits

#: Unit of the coordinates z of a probability, and of the steps taken in it.
FINE, UNIT = 2.0**-40, 2.0**-32
#: Largest |step|; sums of steps on this grid are exact in float64.
LARGEST = 512.0
#: Probabilities nearer to 0 or 1 have no use for a finer logit (float32 cannot hold them near 1).
TINY = 2.0**-40
#: Rows handled at a time, so that temporaries stay in a core's cache.
ROWS = 1 << 13


def snap(x: Tensor, unit: float = FINE) -> Tensor:
    """Nearest multiple of ``unit``; its derivative is taken to be 1."""  # a default, as TorchScript sees no globals
    return x + (torch.round(x.detach() * (1.0 / unit)) * unit - x.detach())


def coordinates(probs: Tensor, euclidean: bool, apart: bool = False, tiny: float = TINY) -> Tensor:
    """z of probabilities ``(n, C)``, float64: events if C = 1 or ``apart`` (several may happen), else classes of a simplex."""
    p, apart = wide(probs), apart or probs.shape[1] == 1
    if euclidean:
        return snap(p)
    p = p.clamp(tiny, 1.0 - tiny) if apart else p.clamp(tiny, 1.0)
    other = torch.log1p(-p) if p.dtype == torch.float64 else torch.log((1.0 - p).clamp_min(tiny))  # float32: p may be 1
    return snap(torch.log(p) - other if apart else torch.log(p))


def probabilities(z: Tensor, euclidean: bool, apart: bool = False) -> Tensor:
    """f of coordinates ``(n, C)``: the inverse of :func:`coordinates`, with the projection onto [0, 1] or the simplex."""
    if apart or z.shape[1] == 1:
        return z.clamp(0.0, 1.0) if euclidean else torch.sigmoid(z)
    return projections.simplex(z) if euclidean else torch.softmax(z, 1)


def project(z: Tensor, euclidean: bool, apart: bool = False) -> Tensor:
    """Nearest coordinates of a probability; logits all are."""
    if not euclidean:
        return z
    return z.clamp(0.0, 1.0) if apart or z.shape[1] == 1 else snap(projections.simplex(z))


def equal_width(bins: int, one_event: bool, euclidean: bool) -> Tensor:
    """Inner edges of equal-width level sets of f, float64 ``(bins - 1,)``: in z for one event, in f for classes."""
    inner = torch.arange(1, bins, dtype=torch.float64) / bins
    return coordinates(inner[:, None], euclidean)[:, 0] if one_event else inner


def levels(z: Tensor, edges: Tensor, euclidean: bool, apart: bool = False) -> Tensor:
    """Level set of each coordinate, int64 ``(n, C)``: the number of inner edges at or below it."""
    x = z.detach() if apart or z.shape[1] == 1 else snap(probabilities(z.detach(), euclidean))
    return (x.unsqueeze(-1) >= edges).to(torch.int64).sum(-1)


def levels_of(z: Tensor, edges: Tensor, euclidean: bool, apart: bool = False) -> Tensor:
    """:func:`levels`, faster for one event; not for scripts."""
    fast = z.shape[1] == 1 and z.device.type == "cpu"
    return torch.bucketize(z.contiguous(), edges, right=True) if fast else levels(z, edges, euclidean, apart)


def level_sets(x: Tensor, edges: Tensor, temperature: float) -> Tensor:
    r"""Soft membership in each level set, :math:`\sigma((x - e_k) / T) - \sigma((x - e_{k+1}) / T)`.

    ``x``: ``(n, C)``. ``edges``: inner edges e of the b level sets, ``(b - 1,)``; the outer ones are infinite. ``temperature``:
    T, in the units of the edges. Returns: Shape ``(n, b, C)``; sums to 1 over the level sets.

    Example:
        >>> level_sets(torch.tensor([[0.2]]), torch.tensor([0.25, 0.5]), 0.05)[0, :, 0]
        tensor([0.7311, 0.2665, 0.0025])
    """
    above = torch.sigmoid((x.unsqueeze(1) - edges[:, None]) / temperature)  # (n, b - 1, C)
    one = torch.ones_like(x).unsqueeze(1)
    return torch.cat([one, above], 1) - torch.cat([above, torch.zeros_like(one)], 1)


def soft_levels(z: Tensor, edges: Tensor, euclidean: bool, apart: bool, temperature: float) -> Tensor:
    """Soft membership in each level set, ``(n, b, C)``: of z for events, of f for classes."""
    return level_sets(z if apart or z.shape[1] == 1 else probabilities(z, euclidean), edges, temperature)


def apply_tables(
    z: Tensor, member: Tensor, tables: Tensor, edges: Tensor, euclidean: bool, apart: bool = False, temperature: float = 0.0
) -> Tensor:
    r"""Rounds that move every cell at once: :math:`z_c \leftarrow \mathrm{Proj}(z)_c - \sum_{A \ni x} \Delta_t[A, k_c(z), c]`.

    ``z``: coordinates ``(n, C)``, float64. ``member``: membership ``(n, a)``, float64. ``tables``: steps of each round, ``(T,
    a, b, C)``, float64. ``edges``: inner edges of the b level sets. ``euclidean``: geometry. ``apart``: the columns are events
    that do not exclude one another. ``temperature``: above 0, level sets are soft, and each round moves by the mean of their steps.
    """
    for t in range(tables.shape[0]):
        z = project(z, euclidean, apart)
        moves = (member @ tables[t].flatten(1)).view(-1, tables.shape[2], tables.shape[3])  # (n, b, C)
        if temperature > 0.0:
            z = z - (moves * soft_levels(z, edges, euclidean, apart, temperature)).sum(1)
        else:
            z = z - moves.gather(1, levels(z, edges, euclidean, apart).unsqueeze(1)).squeeze(1)
    return z


def apply_log(
    z: Tensor,
    member: Tensor,
    who: Tensor,
    step: Tensor,
    column: Tensor,
    edges: Tensor,
    euclidean: bool,
    apart: bool = False,
    temperature: float = 0.0,
) -> Tensor:
    """Rounds that move at most one group per level set, as :func:`merge_log` returns them; f is projected after each.

    ``z``: coordinates ``(n, C)``, float64. ``member``: membership ``(n, a)``. ``who``, ``step``: group and step of each round
    and level set, ``(T, b)``; a step of 0 moves nothing. ``column``: the column of z that a round moves, ``(T,)``. ``edges``:
    inner edges of the b level sets. ``euclidean``: project z after each round (onto [0, 1] or the simplex). ``apart``: the
    columns are events that do not exclude one another. ``temperature``: as for :func:`apply_tables`.
    """
    place = torch.arange(z.shape[1], device=z.device)
    for t in range(who.shape[0]):
        here = place == column[t]  # (C,)
        if temperature > 0.0:
            inside = (soft_levels(z, edges, euclidean, apart, temperature) * here).sum(2)  # (n, b)
            move = (member.index_select(1, who[t]) * step[t] * inside).sum(1)
        else:
            level = (levels(z, edges, euclidean, apart) * here).sum(1)  # (n,)
            move = step[t][level] * member.gather(1, who[t][level].unsqueeze(1)).squeeze(1)
        z = project(z - move.unsqueeze(1) * here, euclidean, apart)
    return z


def merge_log(
    who: Tensor, level: Tensor, column: Tensor, step: Tensor, edges: Tensor, num_columns: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Merge consecutive steps that commute for every possible input.

    A step on level set k can carry an input only to level sets within its length. A later step joins the round if its level
    set is none of these, nor one that the round moves already: then all steps of the round see the input where it was at
    the round's start. With several columns (classes) a step moves every probability, and nothing is merged.

    ``who``, ``level``, ``column``, ``step``: the log, each ``(T,)``. ``edges``: inner edges of the b level sets, in the
    coordinates in which a step is an addition. ``num_columns``: C. Returns: ``who`` and ``step`` of each round and level set
    ``(R, b)``, and its ``column`` ``(R,)``.

    Example:
        >>> log = torch.tensor([0, 1, 0]), torch.tensor([0, 3, 1]), torch.tensor([0, 0, 0]), torch.tensor([-0.1, 0.1, 0.1])
        >>> merge_log(*log, edges=torch.tensor([0.25, 0.5, 0.75]))[1]
        tensor([[-0.1000,  0.0000,  0.0000,  0.1000],
                [ 0.0000,  0.1000,  0.0000,  0.0000]])
    """
    bins = len(edges) + 1
    low = torch.cat([edges.new_full((1,), -torch.inf), edges])
    high = torch.cat([edges, edges.new_full((1,), torch.inf)])
    # Where an input that starts in its level set can be afterwards (an end just at an edge counts on both sides).
    lowest = torch.bucketize(torch.minimum(low[level] - step, low[level]), edges).tolist()
    highest = torch.bucketize(torch.maximum(high[level] - step, high[level]), edges, right=True).tolist()
    places, rounds = level.tolist(), []
    count, taken = -1, set(range(bins))
    for k, first, last in zip(places, lowest, highest, strict=True):
        if num_columns > 1 or k in taken:
            count, taken = count + 1, set()
        rounds.append(count)
        taken.update(range(first, last + 1))
    index = torch.tensor(rounds, dtype=torch.int64, device=who.device)
    table_who, table_step = who.new_zeros(count + 1, bins), step.new_zeros(count + 1, bins)
    table_who[index, level], table_step[index, level] = who, step
    return table_who, table_step, column.new_zeros(count + 1).scatter_(0, index, column)


class Table:
    r"""Sums of w s over every (group, level set, column), kept while f moves.

    After a step only the examples that moved have another s or level set: their old part is taken off and their new part is
    added. Every ``REFRESH`` updates, or when more than a quarter moved, the table is recomputed, so rounding does not add up.

    ``member``: membership ``(n, a)``, bool or floating. ``bins``: level sets b. ``read``: rows -> (s ``(m, C)``, level ``(m,
    C)``) at the current f, with weights in s already.
    """

    REFRESH = 256

    def __init__(self, member: Tensor, bins: int, read: Callable[[Tensor | slice], tuple[Tensor, Tensor]]) -> None:
        self.member, self.bins, self.read = member, bins, read
        self.recompute()

    def recompute(self) -> None:
        """Make the table from all examples."""
        count, self.age = len(self.member), 0
        parts = blocks(count, ROWS if self.member.device.type == "cpu" else max(count, 1)) or [slice(0)]
        self.sums = functools.reduce(torch.add, (cell_sums(self.member[one], *self.read(one), self.bins) for one in parts))

    def update(self, rows: Tensor, move: Callable[[], None]) -> None:
        """Call ``move``, which changes f of ``rows`` only, and keep the table up to date."""
        self.age += 1
        if self.age >= self.REFRESH or 4 * len(rows) > len(self.member):
            move()
            self.recompute()
            return
        some = self.member[rows]
        before = cell_sums(some, *self.read(rows), self.bins)
        move()
        self.sums = self.sums + (cell_sums(some, *self.read(rows), self.bins) - before)


class Membership:
    """Groups ``(n, 1 + a + k)``, everyone first and other columns last, as bits: rows of floats are made a block at a time.

    ``more``: those columns, ``(n, k)``; ``own``: the groups of ``member``, ``(n, a)``, that there are; None for all.
    """

    def __init__(self, member: Tensor | Bits, dtype: torch.dtype, more: Tensor | None = None, own: Tensor | None = None) -> None:
        self.member, self.dtype, self.own, self.device = member, dtype, own, member.device
        self.more = torch.empty(len(member), 0, dtype=dtype, device=member.device) if more is None else more
        self.groups = 1 + (member.shape[1] if own is None else len(own))
        self.shape = (len(member), self.groups + self.more.shape[1])

    def __len__(self) -> int:
        return len(self.member)

    def __getitem__(self, rows: "slice | Tensor") -> Tensor:
        more, groups, own = self.more[rows], self.groups, self.own
        if isinstance(self.member, Bits) and own is None:
            table = self.member.wide(rows, self.dtype, more.shape[1])
        else:
            table = torch.ones(len(more), self.shape[1], dtype=self.dtype, device=self.device)
            if groups > 1:
                table[:, 1:groups] = self.member[rows] if own is None else self.member[rows][:, own]
        table[:, groups:] = more
        return table

    def pick(self, rows: Tensor) -> "Membership":
        """Some of the rows."""
        member = Bits(self.member.codes[rows], self.member.shape[1]) if isinstance(self.member, Bits) else self.member[rows]
        return Membership(member, self.dtype, self.more[rows], self.own)

    def __matmul__(self, table: Tensor) -> Tensor:
        out = torch.empty(len(self), table.shape[1], dtype=self.dtype, device=self.device)
        for one in blocks(len(self)):
            out[one] = self[one] @ table
        return out

    def some(self, columns: Tensor) -> "Membership":
        """Some of the columns, in their order; everyone is the first."""
        groups, rest = columns[(columns > 0) & (columns < self.groups)] - 1, columns[columns >= self.groups] - self.groups
        own = groups if self.own is None else self.own[groups]
        more = self.more if len(rest) == self.more.shape[1] else self.more[:, rest]
        return Membership(self.member, self.dtype, more, own)

    def beside(self, more: Tensor) -> "Membership":
        """With more columns."""
        more = more.to(self.dtype)
        return Membership(self.member, self.dtype, torch.cat([self.more, more], 1) if self.more.numel() else more, self.own)


def blocks(count: int, rows: int = ROWS) -> list[slice]:
    """Slices of so many rows each."""
    return [slice(start, start + rows) for start in range(0, count, rows)]


Members: TypeAlias = Tensor | Membership


def cell_sums(member: Members, values: Tensor, level: Tensor | None = None, bins: int = 1, start: int = 0) -> Tensor:
    """Sum of ``values`` (n, C) over every group and level set of each column: ``(a, b, C)``, float64.

    One matrix product with the values spread over their level sets, in pieces that stay in the cache. Their groups are the
    rows of ``member`` from ``start`` on. Without ``level`` there is one level set.
    """
    columns = values.shape[1]
    total = torch.zeros(member.shape[1], bins * columns, dtype=torch.float64, device=values.device)
    dtype = member.dtype if member.dtype.is_floating_point else torch.float64
    column = torch.arange(columns, device=values.device)
    step = len(values) if values.device.type != "cpu" else ROWS
    for one in blocks(len(values), max(step, 1)):
        part = values[one].to(dtype)
        if level is not None:
            part = part.new_zeros(len(part), bins * columns).scatter_(1, level[one].long() * columns + column, part)
        total += (member[start + one.start : start + one.start + len(part)].to(dtype).T @ part).to(torch.float64)
    return total.view(-1, bins, columns)


def exact_product(member: Members, table: Tensor) -> Tensor:
    """``member @ table`` for 0/1 members and a table of multiples of UNIT below LARGEST: exact, float64.

    A float32 member (n, a) is multiplied with three pieces of 14 bits, whose sums over up to 1,024 groups are whole
    numbers below 2^24: exact in float32 too, at the cost of one pass over the members.
    """
    if member.dtype == torch.float64:
        return member @ table
    if member.device.type == "cpu" and len(member) > ROWS:  # pieces that stay in the cache
        out = torch.empty(len(member), table.shape[1], dtype=torch.float64)
        for one in blocks(len(member)):
            out[one] = exact_product(member[one], table)
        return out
    member = member[:]
    if member.shape[1] > 1024:
        return member.double() @ table
    whole = table / UNIT
    high = torch.round(whole / 2.0**28)
    rest = whole - high * 2.0**28
    middle = torch.round(rest / 2.0**14)
    pieces = torch.stack([high, middle, rest - middle * 2.0**14], -1).flatten(1)  # (a, 3 u)
    parts = (member @ pieces.to(member.dtype)).view(len(member), table.shape[1], 3).double()
    return (parts[..., 0] * 2.0**28 + parts[..., 1] * 2.0**14 + parts[..., 2]) * UNIT
