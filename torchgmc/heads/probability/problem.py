"""The problem of offsets and slopes, and its optimum for given prices.

Columns are groups (everyone first), and what else may move z. The potential is convex: Newton steps, and plainer ones where
these fail, lead to its optimum. That is checked, not assumed: a fit ends when the slope of every column is within a part of its
price. All sums are over the examples of all ranks.
"""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchgmc.distributed import total as over_ranks
from torchgmc.engine.clusters import adder
from torchgmc.engine.folds import EXACT, Places, places, relative
from torchgmc.engine.lasso import solve_lasso
from torchgmc.heads.levelsets import steps as levelsets
from torchgmc.heads.levelsets.steps import LARGEST, ROWS, Members, Membership, blocks

#: Rows whose numbers are worked on at a time, where they are not multiplied with membership.
BLOCK = 1 << 17
#: Logits beyond it have no say in a slope.
FAR = 16.0
#: From so many examples on, up to ``EXACT``, those without a fold are worked on in float32: enough to tell ridges apart.
MANY = 1 << 12
#: Up to so many examples all columns are laid out once, and a step is two products.
WHOLE = 1 << 10
#: Halvings of a step.
HALVINGS = 8
#: Rows that a Hessian is estimated from (the slope itself always uses every row).
SAMPLE = 1 << 13
#: With more columns at work a Hessian costs more than it saves.
MOST_COLUMNS = 2000
#: Times that columns left out may join.
JOINS = 8
#: Steps with a Hessian from nearby that problems side by side are given.
CHORDS = 15


def curvature(z: Tensor, f: Tensor, euclidean: bool, apart: bool = False) -> Tensor:
    """Derivative of f_c in z_c, ``(n, C)``; for classes it leaves out the cross terms, which line searches make up for."""
    if euclidean:
        return ((z > 0) & (z < 1)).to(f.dtype) if apart or z.shape[1] == 1 else (f > 0).to(f.dtype)
    return torch.rsub(f, 1.0).mul_(f)


def loss(z: Tensor, f: Tensor, y: Tensor, euclidean: bool, apart: bool = False) -> Tensor:
    """Potential of each example, psi(z) - <y, z>, up to a constant; ``(n, 1)``, of columns apart ``(n, C)``."""
    if apart or z.shape[1] == 1:
        return (f * (z - 0.5 * f) if euclidean else torch.nn.functional.softplus(z)) - y * z
    if euclidean:  # the convex function whose gradient is the projection
        return (f * z - 0.5 * f.square() - y * z).sum(1, keepdim=True)
    return torch.logsumexp(z, 1, keepdim=True) - (y * z).sum(1, keepdim=True)


class Columns:
    """The static problem: min E[psi(z) - <y, z>] + sum slack |Theta|, Theta of shape ``(p, 1 + a, C)``.

    Theta[0] are offsets, Theta[1] slopes (p = 1 without).

    ``member``: ``(n, 1 + a)``, the first column ones. ``z``, ``y``: ``(n, C)``; ``share``: ``(n, 1)``, sums to 1.
    ``euclidean``: geometry. ``slopes``: with slopes. ``spots``: places of the examples, which say how some of them are chosen,
    if they are known.

    Examples may be on several ranks: all sums are over all of them (:func:`torchgmc.distributed.total`). ``ridge``: rho >= 0,
    of a term sum rho Theta^2 / 2 more, of the shape of Theta; None for 0. ``apart``: the columns of Theta are problems of their
    own, of one event and shares that differ.
    """

    def __init__(
        self, member: Members, z: Tensor, y: Tensor, share: Tensor, euclidean: bool, slopes: bool, spots: Places | None = None
    ) -> None:
        self.member, self.euclidean, self.slopes, self.spots = member, euclidean, slopes, spots
        self.z, self.y, self.share = z, y, share
        self.ridge: Tensor | None = None
        self.apart = False
        self.made: list[Tensor | None] = []
        self.last: tuple[Tensor, Tensor, float] | None = None
        self.shape = (1 + slopes, member.shape[1], z.shape[1])

    def but(self, **changed: Any) -> "Columns":
        """The problem with some of its parts replaced."""
        other = copy.copy(self)
        vars(other).update(changed, last=None)
        if changed.keys() & {"member", "z", "slopes"}:
            other.made = []
        other.shape = (1 + other.slopes, other.member.shape[1], self.shape[2])
        return other

    def pick(self, rows: Tensor, ridge: Tensor | None = None) -> "Columns":
        """Some of the examples."""
        share = self.share[rows]
        share = share / over_ranks(share.sum())
        ridge = self.ridge if ridge is None else ridge
        member = self.member[rows] if isinstance(self.member, Tensor) or len(rows) <= EXACT else self.member.pick(rows)
        return self.but(member=member, z=self.z[rows], y=self.y[rows], share=share, ridge=ridge, spots=None)

    def folds(self, fold: Tensor, parts: int, ridge: Tensor) -> "Columns":
        """The problems of one event with each ridge, without each part of the examples, side by side: ridge by ridge."""
        share = self.share * (fold[:, None] != torch.arange(parts, device=fold.device))
        share = (share / over_ranks(share.sum(0))).repeat(1, ridge.shape[2])
        ridge = ridge.repeat_interleave(parts, 2)
        if not MANY <= self.places().rows <= EXACT:
            return self.side_by_side(ridge, share)
        member, z, y, share = (part.float() for part in (self.member[:], self.z, self.y, share))
        return self.but(member=member, z=z, y=y).side_by_side(ridge, share)

    def side_by_side(self, ridge: Tensor, share: Tensor) -> "Columns":
        """Problems of one event, one for each column of the ridge, ``(p, 1 + a, K)``; with shares ``(n, 1)`` or ``(n, K)``."""
        other = self.but(share=share, ridge=ridge, apart=True)
        other.shape = (*self.shape[:2], ridge.shape[2])
        return other

    def some(self, groups: Tensor) -> "Columns":
        """The problem with some of the groups only."""
        if len(groups) == self.member.shape[1]:  # all of them, in their order
            return self
        member = self.member[:, groups] if isinstance(self.member, Tensor) else self.member.some(groups)
        return self.but(member=member, ridge=None if self.ridge is None else self.ridge[:, groups])

    def beside(self, more: Tensor) -> "Columns":
        """The problem with more columns ``(n, k)``; it has no ridge."""
        if isinstance(self.member, Membership):
            return self.but(member=self.member.beside(more), ridge=None)
        return self.but(member=torch.cat([self.member, more.to(self.member.dtype)], 1), ridge=None)

    def places(self) -> Places:
        """Of the examples."""
        self.spots = self.spots or places(self.z, self.y, self.member[:], relative(self.share) - 1.0)
        return self.spots

    def thin(self, rows: int) -> "Columns":
        """About ``rows`` of the examples, chosen by their places."""
        few = self.places().few(rows, self.places().rows)
        return self if few is None else self.pick(few.nonzero()[:, 0])

    def design(self) -> Tensor | None:
        """Of a small problem of one event, all that Theta multiplies, ``(n, p (1 + a))``; made once."""
        if not self.made:
            same = {part.dtype for part in (self.member, self.z, self.y, self.share)} == {torch.float64}
            plain = same and isinstance(self.member, Tensor) and len(self.z) <= WHOLE and self.z.shape[1] == 1
            near = plain and (not self.slopes or bool((self.z.abs() <= FAR).all()))
            self.made.append(self._wide(self.member[:], self.z) if near else None)
        return self.made[0]

    def _wide(self, member: Tensor, z: Tensor) -> Tensor:
        """Columns ``(n, p (1 + a))`` of rows of one event, float64."""
        member = member.double()
        return torch.cat([member, member * z.clamp(-FAR, FAR)], 1) if self.slopes else member

    def at(self, theta: Tensor, member: Members, z: Tensor, least: float = -math.inf, of: Tensor | None = None) -> Tensor:
        """z after Theta, or ``of`` which Theta ``(n,)`` each is, with slopes of at least ``least``.

        A fit has no least slope, or its potential would not be convex: behind a model that is very sure the first Newton step
        lands far below 0, where a bounded slope is flat. A head has 0.
        """
        moves = (member @ theta.movedim(-2, 0).flatten(1).to(member.dtype)).to(z.dtype)  # (n, p C), of some Theta (n, parts p C)
        moves = moves.view(len(z), math.prod(theta.shape[:-3]), theta.shape[-3], theta.shape[-1])
        moves = moves[:, 0] if of is None else moves[torch.arange(len(z), device=z.device), of]
        if not self.slopes:
            return z - moves[:, 0]
        slope = 1.0 - moves[:, 1]
        return z * (slope if least == -math.inf else slope.clamp_min(least)) - moves[:, 0]

    def parts(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        rows = ROWS >> 3 if self.apart else ROWS  # temporaries stay in the cache
        for one in blocks(len(self.z), rows if self.z.device.type == "cpu" else max(len(self.z), 1)):
            yield self.member[one], self.z[one], self.y[one], self.share[one]

    def weights(self, values: Tensor, z: Tensor) -> Tensor:
        """Values ``(n, C)`` for the offsets, and times z for the slopes: ``(n, p C)``."""
        return torch.cat([values, values * z.clamp(-FAR, FAR)], 1) if self.slopes else values

    def slope(self, theta: Tensor, valued: bool = True) -> tuple[Tensor, float]:
        """Minus the derivative, ``(p, 1 + a, C)`` (the violations, and their like for slopes), and the potential at Theta."""
        if self.last is not None and torch.equal(theta, self.last[0]):  # a fit ends where what follows it begins
            return self.last[1:]
        if (design := self.design()) is not None:
            moved = self.z - design @ theta.flatten(0, 1)
            f = levelsets.probabilities(moved, self.euclidean, self.apart)
            found = design.T @ ((f - self.y) * self.share)
            value = (loss(moved, f, self.y, self.euclidean, self.apart) * self.share).sum() if valued else found[0, 0]
        else:
            total = torch.zeros(self.shape[1], self.shape[0] * self.shape[2], dtype=torch.float64, device=self.z.device)
            value = total[0, 0].clone()
            for member, z, y, share in self.parts():
                moved = self.at(theta, member, z)
                f = levelsets.probabilities(moved, self.euclidean, self.apart)
                total += member.T @ self.weights((f - y) * share, z).to(member.dtype)
                if valued:
                    value += (loss(moved, f, y, self.euclidean, self.apart) * share).sum()
            found = total.view(self.shape[1], self.shape[0], -1).transpose(0, 1)
        everything = over_ranks(torch.cat([found.flatten(), value[None]]))
        found, value = everything[:-1].view(self.shape), everything[-1]
        if self.ridge is not None:
            found, value = found - self.ridge * theta, value + 0.5 * (self.ridge * theta.square()).sum() if valued else value
        self.last = (theta, found, float(value)) if valued else None
        return found, math.nan if self.last is None else self.last[2]

    def slopes_by_part(self, theta: Tensor, part: Tensor, parts: int) -> Tensor:
        """The slope of each part of the examples, ``(parts, p, 1 + a, C)``; they sum to that of all."""
        wide = self.shape[0] * self.shape[2]
        total = torch.zeros(self.shape[1], parts * wide, dtype=torch.float64, device=self.z.device)
        start = 0
        for member, z, y, share in self.parts():
            f = levelsets.probabilities(self.at(theta, member, z), self.euclidean)
            values = self.weights((f - y) * share, z)  # (n, p C)
            here = torch.nn.functional.one_hot(part[start : start + len(z)].long(), parts).to(values.dtype)
            total += (member.T @ (here[:, :, None] * values[:, None]).flatten(1).to(member.dtype)).double()
            start += len(z)
        return over_ranks(total).view(self.shape[1], parts, self.shape[0], -1).permute(1, 2, 0, 3).contiguous()

    def losses(self, theta: Tensor, part: Tensor) -> Tensor:
        """Mean loss of each part of the examples with its own Theta, ``(parts, p, 1 + a, C)``: ``(parts,)``."""
        found, start = self.z.new_zeros(len(theta), 2), 0  # the mass, and sums of the loss
        for member, z, y, share in self.parts():
            of, start = part[start : start + len(z)].long(), start + len(z)
            moved = self.at(theta, member, z, 0.0, of)
            each = loss(moved, levelsets.probabilities(moved, self.euclidean), y, self.euclidean)
            found.index_add_(0, of, torch.cat([torch.ones_like(each), each], 1) * share)
        mass, total = over_ranks(found).unbind(1)
        return total / mass.clamp_min(1e-300)

    def hessian(self, theta: Tensor) -> Tensor:
        """One block per class, ``(C, p (1 + a), p (1 + a))``, float64 (collinear columns need it)."""
        p, size, columns = self.shape
        total = torch.zeros(columns, p * size, p * size, dtype=torch.float64, device=theta.device)
        whole = self.design() if columns == 1 else None
        for member, z, _, share in self.parts():
            moved = self.at(theta, member, z) if whole is None else z - whole @ theta.flatten(0, 1)
            f = levelsets.probabilities(moved, self.euclidean, self.apart)
            weight = curvature(moved, f, self.euclidean, self.apart) * share
            for column in range(columns):
                design = self._wide(member, z[:, column % z.shape[1], None]) if whole is None else whole
                total[column] += design.T @ (design * weight[:, column : column + 1])
        total = over_ranks(total)
        return total if self.ridge is None else total + torch.diag_embed(flattened(self.ridge))

    def hessians(self, theta: Tensor, fold: Tensor, parts: int) -> Tensor:
        """Of one event, its share of each part of the examples, ``(parts, p (1 + a), p (1 + a))``, without ridge."""
        moved, found = self.at(theta, self.member[:], self.z), []
        weight = curvature(moved, levelsets.probabilities(moved, self.euclidean), self.euclidean) * self.share
        for rows in torch.split(fold.argsort(stable=True), torch.bincount(fold, minlength=parts).tolist()):
            design = self._wide(self.member[rows], self.z[rows])
            found.append(design.T @ (design * weight[rows]))
        return over_ranks(torch.stack(found))

    def squares(self, theta: Tensor, cluster: Tensor) -> Tensor:
        """Sum of the squares of what each example (or cluster) adds to the slopes at Theta, ``(p, 1 + a, C)``."""
        f = levelsets.probabilities(self.at(theta, self.member, self.z), self.euclidean)
        values = self.weights((f - self.y) * self.share, self.z)
        if cluster.shape[1] == 0:
            total = over_ranks((self.member[:].square().T @ values.square().to(self.member.dtype)).double())
        else:
            total = over_clusters(torch.square, values, self.member[:], adder(cluster))
        return total.view(self.shape[1], self.shape[0], -1).transpose(0, 1).contiguous()

    def squares_of_columns(self) -> Tensor:
        """Bound on the curvature along each column, ``(p, 1 + a, C)``."""
        share = self.share.expand(-1, self.shape[2])
        weights = torch.cat([share, share * self.z.clamp(-FAR, FAR).square()], 1) if self.slopes else share
        total = over_ranks((self.member[:].T @ weights.to(self.member.dtype)).double())
        total = total.view(self.shape[1], self.shape[0], -1).transpose(0, 1).contiguous() * (1.0 if self.euclidean else 0.25)
        return total if self.ridge is None else total + self.ridge


def over_clusters(how: Callable[[Tensor], Tensor], values: Tensor, member: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
    """Square or sign (``how``) of the sums over clusters (by ``add``) of values ``(n, k)`` in each group, added: ``(1 + a, k)``."""
    member = member.double() if values.is_floating_point() else member > 0
    return over_ranks(torch.stack([how(add(member * v[:, None])).sum(0, dtype=torch.float64) for v in values.T], 1))


def flattened(table: Tensor) -> Tensor:
    """From ``(p, 1 + a, C)`` to one row per class, ``(C, p (1 + a))``."""
    return table.permute(2, 0, 1).flatten(1)


def unflattened(rows: Tensor, shape: tuple[int, int, int]) -> Tensor:
    return rows.view(shape[2], shape[0], shape[1]).permute(1, 2, 0).contiguous()


def chords(columns: Columns, theta: Tensor, factor: Tensor, bar: Tensor, steps: int = 0) -> tuple[Tensor, bool]:
    """Steps of problems side by side with Cholesky's factors of Hessians nearby; whether they end, slopes within ``bar``."""
    free = ~bar.isinf()[..., None]
    last: tuple[Tensor, Tensor, Tensor] | None = None
    for _ in range(steps or CHORDS):
        slope = flattened(columns.slope(theta, False)[0])[..., None]  # (K, p (1 + a), 1)
        if bool((slope[..., 0].abs() <= bar).all()):
            return theta, True
        step = goal = torch.cholesky_solve(slope * free, factor)
        if last is not None:  # Anderson's acceleration: as far along the last step as a linear slope would be least
            fall, bend = last[0] - slope, last[1] - goal
            part = (fall * goal).sum(1, keepdim=True) / (fall * bend).sum(1, keepdim=True).clamp_min(1e-30)
            step = goal + part.clamp(-1.0, 2.0) * (last[2] - bend)
        last = slope, goal, step
        theta = (theta + unflattened(step[..., 0], columns.shape)).clamp(-LARGEST / 2, LARGEST / 2)
    return theta, False


def minimise(columns: Columns, theta: Tensor, slack: Tensor, hessian: Tensor | None, steps: int, precision: float) -> Tensor:
    """Newton steps until the optimality conditions hold to ``precision`` of the slack; plainer ones where they fail.

    A Hessian that is passed in is kept as long as steps made with it lower the objective as they should.
    """
    bar, noise_of_sums = tolerance(slack, precision), 1e-7 if columns.member.dtype == torch.float32 else 1e-12
    paid = slack if bool(slack.any()) else None
    slope, value = _objective(columns, theta, paid)
    for _ in range(steps):
        if bool((_residual(theta, slope, paid) <= bar).all()):
            return theta
        goal = aim(columns, theta, slope, paid, hessian)
        for halving in range(HALVINGS + 1):
            trial = theta + (goal - theta) * 0.5**halving if halving else goal
            trial_slope, trial_value = _objective(columns, trial, paid)
            if trial_value <= value + noise_of_sums * abs(value) or (hessian is not None and halving == 1):
                break
        if trial_value > value + noise_of_sums * abs(value):
            if hessian is None:
                return descend(columns, theta, slack, bar)
            hessian = None
            continue
        theta, slope, value = trial, trial_slope, trial_value
    return theta


def aim(columns: Columns, theta: Tensor, slope: Tensor, slack: Tensor | None, hessian: Tensor | None) -> Tensor:
    """Minimum of the quadratic model at Theta, with its slack (None for 0)."""
    matrix = columns.hessian(theta) if hessian is None else hessian
    free = torch.ones_like(theta, dtype=torch.bool) if slack is None else ~slack.isinf()
    if len(matrix) == 1 and (slack is None or not bool(slack[free].any())):  # one matrix for all
        keep = free.flatten(0, 1).double()
        ridge = 1e-10 * matrix[0].diagonal().max().clamp_min(1e-200) + (1.0 - keep[:, 0])  # all at an end: no curvature
        matrix = keep[:, :1] * matrix[0] * keep[:, 0] + torch.diag(ridge)
        goal: Tensor = theta + torch.linalg.solve(matrix, slope.flatten(0, 1) * keep).view(theta.shape)
    else:
        slack = torch.zeros_like(theta) if slack is None else slack.masked_fill(~free, 1.0)
        at, model, price, keep = (flattened(t) for t in (theta, slope, slack, free.double()))  # (C, p (1 + a))
        model = (matrix @ at[..., None])[..., 0] + model
        matrix = keep[:, :, None] * matrix * keep[:, None] + torch.diag_embed(1.0 - keep)
        goal = unflattened(solve_lasso(matrix, model * keep, price, at) * keep, columns.shape)
    return goal.clamp(-LARGEST / 2, LARGEST / 2)


def descend(columns: Columns, theta: Tensor, slack: Tensor, bar: Tensor, steps: int = 300) -> Tensor:
    """Accelerated proximal steps: no Hessian, no trouble with collinear columns, many more steps."""
    length = columns.squares_of_columns() * max(2, columns.member.shape[1]) ** 0.5
    length = 1.0 / length.clamp_min(1e-300)  # halved below where too long
    moved, ahead, speed, scale = theta, theta, 1.0, 1.0
    value = _objective(columns, theta, slack)[1]
    for _ in range(steps):
        slope, _ = columns.slope(ahead)
        step = length * scale
        trial, by = ahead + step * slope, step * slack
        trial = torch.where(by.isinf(), torch.zeros_like(trial), trial.sign() * (trial.abs() - by).clamp_min(0.0))
        new = _objective(columns, trial, slack)[1]
        if new > value + 1e-12 * abs(value):
            if torch.equal(ahead, moved):
                scale /= 2.0
                if scale < 1e-6:
                    break
            ahead, speed = moved, 1.0
            continue
        faster = (1.0 + math.sqrt(1.0 + 4.0 * speed**2)) / 2.0
        ahead = trial + (speed - 1.0) / faster * (trial - moved)
        moved, speed, value = trial, faster, new
        if bool((_residual(moved, slope, slack) <= bar).all()):
            break
    return moved


def _objective(columns: Columns, theta: Tensor, slack: Tensor | None) -> tuple[Tensor, float]:
    """Slope of the potential, and its value with the slack."""
    slope, value = columns.slope(theta)
    return slope, value if slack is None else value + float((slack * theta.abs()).nan_to_num(0.0).sum())


def tolerance(slack: Tensor, precision: float) -> Tensor:
    """By how much the conditions of the optimum may be missed: a part of the slack, of a free column that of the smallest."""
    paid = slack[(slack > 0) & ~slack.isinf()]
    least = float(paid.min()) if len(paid) else 1e-5
    return torch.where(slack.isinf(), torch.inf, precision * slack.clamp_min(max(least, 1e-6)))


def _residual(theta: Tensor, slope: Tensor, slack: Tensor | None) -> Tensor:
    """How far the conditions of the optimum are missed, per column."""
    if slack is None:
        return slope.abs()
    off = (slope.abs() - slack).clamp_min(0.0)
    on = (slope - slack * theta.sign()).abs()
    return torch.where((theta == 0) & (slack > 0), off, on)


def factored(matrix: Tensor, ridge: Tensor, free: Tensor) -> Tensor:
    """Cholesky's factors ``(K m, d, d)`` of matrices ``(m, d, d)`` with each ridge ``(K, d)``; 1 where a column is not free."""
    keep, size = free.double()[:, None], matrix.diagonal(dim1=1, dim2=2) + ridge[:, None]  # (K, m, d)
    least = 1e-10 * size.amax(2, keepdim=True).clamp_min(1e-200) + (1.0 - keep)
    found = (matrix * (keep[..., None] * keep[:, :, None])).flatten(0, 1)
    found.diagonal(dim1=1, dim2=2).copy_((size * keep + least).flatten(0, 1))
    return torch.as_tensor(torch.linalg.cholesky_ex(found).L)


def solve(
    columns: Columns, theta: Tensor, price: Tensor, precision: float = 0.1, hessian: Tensor | None = None
) -> tuple[Tensor, bool]:
    """The optimum for one price, to a part of it.

    Groups far from earning their column are left out, and join if they turn out to. ``hessian``: of all, nearby, without ridge.
    """
    bar, fine = tolerance(price, 2.0 * precision), False
    for _ in range(JOINS):
        slope, _ = columns.slope(theta)
        groups = working(theta, slope, price)
        part = columns.some(groups)
        if part.shape[0] * part.shape[1] > MOST_COLUMNS:
            found = descend(part, theta[:, groups], price[:, groups], bar[:, groups])
        else:
            known = nearby(part, theta[:, groups], hessian if part.shape == columns.shape else None)
            found = minimise(part, theta[:, groups], price[:, groups], known, 50, precision)
        theta = theta.clone()
        theta[:, groups] = found
        slope, _ = columns.slope(theta)
        fine = bool((_residual(theta, slope, price) <= bar).all())
        if fine or not bool(((theta == 0) & (slope.abs() > price + bar)).any()):
            break
    return theta, fine


def working(theta: Tensor, slope: Tensor, price: Tensor) -> Tensor:
    """Groups that may need a column: those that have one, or nearly earn it; everyone first."""
    work = (theta != 0) | (slope.abs() > 0.7 * price)
    work[:, 0] = True
    return work.any(2).any(0).nonzero()[:, 0]


def nearby(columns: Columns, theta: Tensor, plain: Tensor | None) -> Tensor:
    """A Hessian, from one without a ridge if there is one."""
    if plain is None or columns.ridge is None:
        return columns.thin(SAMPLE).hessian(theta)
    return plain + torch.diag_embed(flattened(columns.ridge))
