"""Groups x level sets as the solver of :mod:`torchgmc.engine.solver` sees them: one cell per step, exactly Algorithm 1."""

import torch
from torch import Tensor

from torchgmc.distributed import total as over_ranks, totals
from torchgmc.engine.folds import Pair
from torchgmc.engine.solver import entry
from torchgmc.engine.values import Names
from torchgmc.heads.levelsets import steps as levelsets
from torchgmc.heads.levelsets.steps import Table, cell_sums, levels_of, project

#: A membership of up to so many entries is also kept in float64 (32 MB), so that no step converts it.
WIDE = 1 << 22


class LevelProblem:
    """f in coordinates z ``(n, C)``; g = 1{x in A, f_c(x) in level set k} e_c / scale_A; violations ``(a, b C)``.

    A subclass defines s, ``line_search`` and ``explain``. The violations are updated from only the examples that moved (see
    :class:`~torchgmc.heads.levelsets.steps.Table`); on a device other than the CPU, where picking rows would wait for the
    device, they are recomputed.

    ``z``: coordinates of f0, float64 ``(n, C)``. ``member``: groups, bool or fractional ``(n, a)``. ``weight``: float64
    ``(n,)``. ``edges``: inner edges of the level sets; empty for static groups. ``names``: of the test functions.
    ``conditional``: divide by P(A). ``euclidean``: project f after every step; None if f is free (quantiles). ``unit``: steps
    are rounded to multiples of it. ``apart``: the columns are events that do not exclude one another.
    """

    #: Rounding of sums is rounded away, so that of equal violations the same is taken however rows are spread over ranks.
    many = False

    def __init__(
        self,
        z: Tensor,
        member: Tensor,
        weight: Tensor,
        edges: Tensor,
        names: Names,
        conditional: bool,
        euclidean: bool | None,
        unit: float,
        apart: bool = False,
    ) -> None:
        self.apart = apart
        self.z, self.member, self.edges, self.names, self.label = z, member, edges, names, names.label
        self.euclidean, self.unit, self.bins = euclidean, unit, len(edges) + 1
        self.dynamic = self.bins > 1
        wide = member.double() if member.numel() <= WIDE else member  # what sums are made from
        total, mass = totals(weight.sum(), cell_sums(wide, weight[:, None])[:, 0, 0])
        self.share, self.mass = weight / total, mass / total  # P(A)
        self.scale = self.mass if conditional else torch.ones_like(self.mass)
        self.sparse = z.device.type == "cpu"
        self.place = self.level(z)
        self.table = Table(wide, self.bins, self.read)
        self.known = self.mass, self.mass  #: the last table that was summed over all ranks, and the sum

    def mapping(self, z: Tensor, rows: Tensor | slice) -> Tensor:
        """s of the rows at z, ``(m, C)``."""
        raise NotImplementedError  # abstract

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """w s and level set of the rows at the current f."""
        return self.mapping(self.z[rows], rows) * self.share[rows, None], self.place[rows]

    def level(self, z: Tensor) -> Tensor:
        """Level set of each coordinate."""
        if self.bins == 1:
            return torch.zeros(1, 1, dtype=torch.int64, device=z.device).expand(z.shape)
        return levels_of(z, self.edges, bool(self.euclidean), self.apart)

    def violations(self, split: Pair | None = None) -> Tensor:
        """Signed violations at the current f, ``(a, b C)``; column k C + c is level set k of class c."""
        if split is None:
            if self.known[0] is not self.table.sums:  # an exchange less
                self.known = self.table.sums, over_ranks(self.table.sums)
            sums = self.known[1]
        else:  # s is not a functional of f: the inner split is not used
            rows = split.outer.nonzero()[:, 0]
            value, level = self.read(rows)
            sums = cell_sums(self.member[rows], value / self.share[rows].sum(), level, self.bins)
        found = sums.flatten(1) / self.scale[:, None]
        return levelsets.snap(found, 2.0**-40) if self.many else found

    def cell(self, who: Tensor, what: Tensor) -> tuple[Tensor, Tensor]:
        """Membership in a cell, bool or fractional ``(n,)``, and its column of z as a one-hot row ``(C,)``."""
        columns = self.z.shape[1]
        here = torch.arange(columns, device=self.z.device) == what % columns
        level = self.place.index_select(1, (what % columns)[None])[:, 0]
        inside = self.member.index_select(1, who[None])[:, 0]
        return inside * (level == what // columns), here

    def length(self, who: Tensor, step: Tensor) -> Tensor:
        """What a step takes off z, on the grid."""
        return levelsets.snap(step / entry(self.scale, who), self.unit)

    def move(self, who: Tensor, what: Tensor, step: Tensor) -> None:
        """f <- Proj(f - step g)."""
        inside, here = self.cell(who, what)
        length = self.length(who, step)
        if not self.sparse:
            moved = project(self.z - length * (inside[:, None] * here), bool(self.euclidean), self.apart)
            self.z = torch.where(inside[:, None] > 0, moved, self.z)
            self.place = self.level(self.z)
            self.table.recompute()
            return
        rows = inside.nonzero()[:, 0]

        def apply() -> None:
            moved = project(self.z[rows] - length * (inside[rows, None] * here), bool(self.euclidean), self.apart)
            self.z = self.z.index_copy(0, rows, moved)
            self.place = self.place.index_copy(0, rows, self.level(moved))

        self.table.update(rows, apply)

    def state(self) -> Tensor:
        """z."""
        return self.z

    def restore(self, state: Tensor) -> None:
        """Set z."""
        self.z, self.place = state, self.level(state)
        self.table.recompute()


def check_masses(mass: Tensor, names: list[str], examples: str = "examples") -> None:
    """Raise for a group without examples, by the name that a head has for them; mass is P(A), ``(a,)``."""
    empty = (mass <= 0).nonzero()
    if len(empty):
        name = names[int(empty[0])]
        raise ValueError(f"group {name!r} has no {examples}, so it cannot be fitted. Drop it (`Groups.drop_small`), or add data.")


class ResidualProblem(LevelProblem):
    """s = f - y, with a fixed step, or with the step that the smoothness of the potential allows.

    ``y``: outcomes, ``(n, C)``. ``smoothness``: K, the largest slope of f in z. ``options``: of :class:`LevelProblem`.
    """

    def __init__(self, y: Tensor, smoothness: float, **options: object) -> None:
        self.y, self.smoothness = y, smoothness
        super().__init__(**options)  # type: ignore[arg-type]  # checked where it is called

    def mapping(self, z: Tensor, rows: Tensor | slice) -> Tensor:
        """s = f - y."""
        return levelsets.probabilities(z, bool(self.euclidean), self.apart) - self.y[rows]

    def line_search(self, who: Tensor, what: Tensor, violation: Tensor) -> Tensor:
        """The step with the largest guaranteed fall of the potential: violation / (K E g^2)."""
        inside, _ = self.cell(who, what)
        norm = self.share @ inside.to(self.share.dtype).square() / entry(self.scale, who).square()
        return violation / (self.smoothness * norm.clamp_min(1e-300))

    def explain(self, who: int, what: int) -> str:
        """A cell that cannot be fixed."""
        return (
            f"No step along {self.label(who, what)} lowers its violation: the prediction may already be at the edge of its "
            "range there. Try a larger `alpha`, fewer `bins` or more data."
        )
