r"""Offsets and slopes of all groups at once: Newton steps on a convex potential, with an l1 slack for each column.

.. math:: z(x) = z_0(x)\,\Big(1 - \beta_0 - \sum_{A \ni x} \beta_A\Big)_+ - \theta_0 - \sum_{A \ni x} \theta_A

z_0 is the model's logit (of every class). The offset of everyone is free, and the slope of everyone is drawn to 1 by half an
example. Where no group differs that is all: Platt, temperature and vector scaling.

Of one event everyone has two slopes: with m(x) the part of z_0 that membership explains, one of z_0 - m *within* groups and one
of m *between* them, drawn to 1 and to each other by a few examples. A model is surer than it should be about single examples
long before it is about the mean of a group; one slope for both would take the groups' means with it. Together they are offsets
and a slope again.

Offsets and slopes of groups are drawn to those of everyone. Of few groups (up to ``FEW``) by a ridge, which loses less than an
l1 price where many groups differ a little: fits with several ridges, one of them infinite, are averaged with the weights
:math:`\propto \text{prior} \cdot e^{-L/2}`, L the log loss that the fit has on examples held out (five folds, all examples).
Half of the prior is on no group differing. Averaging costs less than choosing one: a choice is wrong when the sample is small.
Of more groups by the l1 price of :mod:`torchgmc.engine.noise`, whose k is chosen by cross-validation: most columns stay 0.
With ``geometry="euclidean"`` there are no slopes.
"""

import copy
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgmc.distributed import total as over_ranks
from torchgmc.engine import noise
from torchgmc.engine.clusters import codes, deal_clusters
from torchgmc.engine.folds import Places, places
from torchgmc.engine.lasso import solve_lasso
from torchgmc.heads.levelsets import steps as levelsets
from torchgmc.heads.levelsets.steps import LARGEST, ROWS, Members, Membership, blocks

#: Halvings of a step.
HALVINGS = 8
#: Rows that a Hessian is estimated from (the slope itself always uses every row).
SAMPLE = 1 << 13
#: Rows whose numbers are worked on at a time, where they are not multiplied with membership.
BLOCK = 1 << 17
#: Logits beyond it have no say in a slope.
FAR = 16.0
#: Ridges that are tried, in examples: the penalty is ridge / 2 times the square of a group's offset, and so many times that
#: of its slope, for logits of mean square 1 (slopes differ more rarely; infinite: they do not differ). Strongest first.
RIDGES = ((64.0, 13.0), (16.0, 13.0), (4.0, 13.0), (16.0, math.inf), (4.0, math.inf), (1.0, math.inf))
#: The ridge of everyone's slope (within groups), of that between groups, of their difference, and of the logit's means in
#: groups, in examples.
COMMON_RIDGE, BETWEEN_RIDGE, APART_RIDGE, MEANS_RIDGE = 1.0, 8.0, 3.0, 8.0
#: Weights of the fits: exp(-LEARN x held-out loss of all examples).
LEARN = 0.5
#: Up to so many groups share a ridge; of more, those that earn a column by the l1 price have one.
FEW = 300
#: Slopes of groups differ more rarely than their offsets: so many standard errors more.
RARER = 0.75
#: With more columns at work a Hessian costs more than it saves.
MOST_COLUMNS = 2000
#: Times that columns left out may join.
JOINS = 8
#: Entries of membership up to which the fits without a fold are made exactly, not by one step from the fit with all.
EXACT_FOLDS = 1 << 19
#: Examples that choose a ridge, and entries of their membership at most; from four times as many on they choose for all.
CHOICES, ENTRIES = 1 << 17, 1 << 25
#: With fewer examples per column one step is not enough either.
ROOM = 100
#: Steps with a Hessian from nearby that all such fits are given at once, and entries of their Hessians at most.
CHORDS, HESSIANS = 15, 1 << 22
#: From so many examples on, those without a fold are worked on in float32: enough to tell one ridge from another.
MANY = 1 << 12


def curvature(z: Tensor, f: Tensor, euclidean: bool) -> Tensor:
    """Derivative of f_c in z_c, ``(n, C)``; for classes it leaves out the cross terms, which line searches make up for."""
    if euclidean:
        return ((z > 0) & (z < 1)).to(f.dtype) if z.shape[1] == 1 else (f > 0).to(f.dtype)
    return f * (1.0 - f)


def loss(z: Tensor, f: Tensor, y: Tensor, euclidean: bool) -> Tensor:
    """Potential of each example, psi(z) - <y, z>, up to a constant; ``(n,)``."""
    if z.shape[1] == 1:
        if euclidean:
            return (f * (z - 0.5 * f) - y * z)[:, 0]
        return (torch.nn.functional.softplus(z) - y * z)[:, 0]
    if euclidean:  # the convex function whose gradient is the projection
        return (f * z - 0.5 * f.square() - y * z).sum(1)
    return torch.logsumexp(z, 1) - (y * z).sum(1)


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
        self.shape = (1 + slopes, member.shape[1], z.shape[1])

    def _but(self, **changed: Any) -> "Columns":
        """The problem with some of its parts replaced."""
        other = copy.copy(self)
        vars(other).update(changed)
        other.shape = (1 + other.slopes, other.member.shape[1], self.shape[2])
        return other

    def pick(self, rows: Tensor, ridge: Tensor | None = None) -> "Columns":
        """Some of the examples."""
        share = self.share[rows]
        share = share / over_ranks(share.sum())
        ridge = self.ridge if ridge is None else ridge
        return self._but(member=self.member[rows], z=self.z[rows], y=self.y[rows], share=share, ridge=ridge, spots=None)

    def folds(self, fold: Tensor, parts: int, ridge: Tensor) -> "Columns":
        """The problems of one event with each ridge, without each part of the examples, side by side: ridge by ridge."""
        share = self.share * (fold[:, None] != torch.arange(parts, device=fold.device))
        share = (share / over_ranks(share.sum(0))).repeat(1, ridge.shape[2])
        dtype = torch.float32 if len(fold) >= MANY else self.z.dtype
        member, z, y, share = (part.to(dtype) for part in (self.member[:], self.z, self.y, share))
        return self._but(member=member, z=z, y=y).side_by_side(ridge.repeat_interleave(parts, 2), share)

    def side_by_side(self, ridge: Tensor, share: Tensor) -> "Columns":
        """Problems of one event, one for each column of the ridge, ``(p, 1 + a, K)``; with shares ``(n, 1)`` or ``(n, K)``."""
        other = self._but(share=share, ridge=ridge, apart=True)
        other.shape = (*self.shape[:2], ridge.shape[2])
        return other

    def some(self, groups: Tensor) -> "Columns":
        """The problem with some of the groups only."""
        if len(groups) == self.member.shape[1]:  # all of them, in their order
            return self
        member = self.member[:, groups] if isinstance(self.member, Tensor) else self.member.some(groups)
        return self._but(member=member, ridge=None if self.ridge is None else self.ridge[:, groups])

    def shrunk(self, ridge: Tensor) -> "Columns":
        """The problem with another ridge."""
        return self._but(ridge=ridge)

    def beside(self, more: Tensor) -> "Columns":
        """The problem with more columns ``(n, k)``; it has no ridge."""
        if isinstance(self.member, Membership):
            return self._but(member=self.member.beside(more), ridge=None)
        return self._but(member=torch.cat([self.member, more.to(self.member.dtype)], 1), ridge=None)

    def places(self) -> Places:
        """Of the examples."""
        self.spots = self.spots or places(self.z, self.y, self.member[:])
        return self.spots

    def thin(self, rows: int) -> "Columns":
        """About ``rows`` of the examples, chosen by their places."""
        few = self.places().few(rows, self.places().rows)
        return self if few is None else self.pick(few.nonzero()[:, 0])

    def at(self, theta: Tensor, member: Members, z: Tensor, least: float = -math.inf) -> Tensor:
        """z after Theta, with slopes of at least ``least``.

        A fit has no least slope, or its potential would not be convex: behind a model that is very sure the first Newton step
        lands far below 0, where a bounded slope is flat. A head has 0.
        """
        moves = (member @ theta.transpose(0, 1).flatten(1).to(member.dtype)).to(z.dtype)  # (n, p C)
        moves = moves.view(len(z), theta.shape[0], theta.shape[2])
        if not self.slopes:
            return z - moves[:, 0]
        slope = 1.0 - moves[:, 1]
        return z * (slope if least == -math.inf else slope.clamp_min(least)) - moves[:, 0]

    def _parts(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        rows = ROWS >> 3 if self.apart else ROWS  # temporaries stay in the cache
        for one in blocks(len(self.z), rows if self.z.device.type == "cpu" else max(len(self.z), 1)):
            yield self.member[one], self.z[one], self.y[one], self.share[one]

    def weights(self, values: Tensor, z: Tensor) -> Tensor:
        """Values ``(n, C)`` for the offsets, and times z for the slopes: ``(n, p C)``."""
        return torch.cat([values, values * z.clamp(-FAR, FAR)], 1) if self.slopes else values

    def _losses(self, moved: Tensor, f: Tensor, y: Tensor) -> Tensor:
        """Of each example, ``(n, 1)``, or by each problem."""
        if not self.apart:
            return loss(moved, f, y, self.euclidean)[:, None]
        return (f * (moved - 0.5 * f) if self.euclidean else torch.nn.functional.softplus(moved)) - y * moved

    def slope(self, theta: Tensor, valued: bool = True) -> tuple[Tensor, float]:
        """Minus the derivative, ``(p, 1 + a, C)`` (the violations, and their like for slopes), and the potential at Theta."""
        total = torch.zeros(self.shape[1], self.shape[0] * self.shape[2], dtype=torch.float64, device=self.z.device)
        value = total[0, 0].clone()
        for member, z, y, share in self._parts():
            moved = self.at(theta, member, z)
            f = levelsets.probabilities(moved, self.euclidean, self.apart)
            total += member.T @ self.weights((f - y) * share, z).to(member.dtype)
            if valued:
                value += (self._losses(moved, f, y) * share).sum()
        everything = over_ranks(torch.cat([total.flatten(), value[None]]))
        found = everything[:-1].view(self.shape[1], self.shape[0], -1).transpose(0, 1)
        found = found if self.ridge is None else found - self.ridge * theta
        held = 0.5 * (self.ridge * theta.square()).sum() if valued and self.ridge is not None else 0.0
        return found.contiguous(), float(everything[-1] + held)

    def slopes_by_part(self, theta: Tensor, part: Tensor, parts: int) -> Tensor:
        """The slope of each part of the examples, ``(parts, p, 1 + a, C)``; they sum to that of all."""
        wide = self.shape[0] * self.shape[2]
        total = torch.zeros(self.shape[1], parts * wide, dtype=torch.float64, device=self.z.device)
        start = 0
        for member, z, y, share in self._parts():
            f = levelsets.probabilities(self.at(theta, member, z), self.euclidean)
            values = self.weights((f - y) * share, z)  # (n, p C)
            here = torch.nn.functional.one_hot(part[start : start + len(z)].long(), parts).to(values.dtype)
            total += (member.T @ (here[:, :, None] * values[:, None]).flatten(1).to(member.dtype)).double()
            start += len(z)
        return over_ranks(total).view(self.shape[1], parts, self.shape[0], -1).permute(1, 2, 0, 3).contiguous()

    def losses(self, theta: Tensor, part: Tensor) -> Tensor:
        """Mean loss of each part of the examples with its own Theta, ``(parts, p, 1 + a, C)``: ``(parts,)``."""
        parts = len(theta)
        found = self.z.new_zeros(parts, 2)  # the mass, and sums of the loss
        for k in range(parts):
            rows = (part == k).nonzero()[:, 0]
            for some in torch.split(rows, BLOCK >> 2):
                moved = self.at(theta[k], self.member[some], self.z[some], 0.0)
                each = self._losses(moved, levelsets.probabilities(moved, self.euclidean), self.y[some])
                found[k] += (torch.cat([torch.ones_like(each), each], 1) * self.share[some]).sum(0)
        mass, total = over_ranks(found).unbind(1)
        return total / mass.clamp_min(1e-300)

    def hessian(self, theta: Tensor) -> Tensor:
        """One block per class, ``(C, p (1 + a), p (1 + a))``, float64 (collinear columns need it)."""
        p, size, columns = self.shape
        total = torch.zeros(columns, p * size, p * size, dtype=torch.float64, device=theta.device)
        for member, z, _, share in self._parts():
            moved = self.at(theta, member, z)
            if self.apart:  # each column by itself
                moved = moved.reshape(-1, 1)
            curve = curvature(moved, levelsets.probabilities(moved, self.euclidean), self.euclidean)
            weight = curve.view(len(z), columns) * share
            wide = member.double()
            for column in range(columns):
                own = z[:, column % z.shape[1], None]
                design = wide if p == 1 else torch.cat([wide, wide * own.clamp(-FAR, FAR)], 1)
                total[column] += design.T @ (design * weight[:, column : column + 1])
        total = over_ranks(total)
        return total if self.ridge is None else total + torch.diag_embed(_flat(self.ridge))

    def hessians(self, theta: Tensor, fold: Tensor, parts: int) -> Tensor:
        """Of one event, its share of each part of the examples, ``(parts, p (1 + a), p (1 + a))``, without ridge."""
        moved, found = self.at(theta, self.member[:], self.z), []
        weight = curvature(moved, levelsets.probabilities(moved, self.euclidean), self.euclidean) * self.share
        for rows in torch.split(fold.argsort(stable=True), torch.bincount(fold, minlength=parts).tolist()):
            design = self.member[rows].double()
            design = torch.cat([design, design * self.z[rows].clamp(-FAR, FAR)], 1) if self.slopes else design
            found.append(design.T @ (design * weight[rows]))
        return over_ranks(torch.stack(found))

    def chords(self, theta: Tensor, factor: Tensor, bar: Tensor, steps: int = 0) -> tuple[Tensor, bool]:
        """Steps of problems side by side with Cholesky's factors of Hessians nearby; whether they end, slopes within ``bar``."""
        free = ~bar.isinf()[..., None]
        last: tuple[Tensor, Tensor, Tensor] | None = None
        for _ in range(steps or CHORDS):
            slope = _flat(self.slope(theta, False)[0])[..., None]  # (K, p (1 + a), 1)
            if bool((slope[..., 0].abs() <= bar).all()):
                return theta, True
            step = goal = torch.cholesky_solve(slope * free, factor)
            if last is not None:  # Anderson's acceleration: as far along the last step as a linear slope would be least
                fall, bend = last[0] - slope, last[1] - goal
                part = (fall * goal).sum(1, keepdim=True) / (fall * bend).sum(1, keepdim=True).clamp_min(1e-30)
                step = goal + part.clamp(-1.0, 2.0) * (last[2] - bend)
            last = slope, goal, step
            theta = (theta + _unflat(step[..., 0], self.shape)).clamp(-LARGEST / 2, LARGEST / 2)
        return theta, False

    def squares(self, theta: Tensor, cluster: Tensor) -> Tensor:
        """Sum of the squares of what each example (or cluster) adds to the slopes at Theta, ``(p, 1 + a, C)``."""
        f = levelsets.probabilities(self.at(theta, self.member, self.z), self.euclidean)
        values = self.weights((f - self.y) * self.share, self.z)
        if cluster.shape[1] == 0:
            total = over_ranks((self.member[:].square().T @ values.square().to(self.member.dtype)).double())
        else:
            place, count = codes(cluster)
            none, member = values.new_zeros(count, self.shape[1]), self.member[:].double()
            total = torch.stack([none.index_add(0, place, member * v[:, None]).square().sum(0) for v in values.T], 1)
        return total.view(self.shape[1], self.shape[0], -1).transpose(0, 1).contiguous()

    def minimise(self, theta: Tensor, slack: Tensor, hessian: Tensor | None, steps: int, precision: float) -> Tensor:
        """Newton steps until the optimality conditions hold to ``precision`` of the slack; plainer ones where they fail.

        A Hessian that is passed in is kept as long as steps made with it lower the objective as they should.
        """
        slope, value = self.slope(theta)
        value += float((slack * theta.abs()).nan_to_num(0.0).sum())
        bar, noise_of_sums = _bar(slack, precision), 1e-7 if self.member.dtype == torch.float32 else 1e-12
        for _ in range(steps):
            if bool((_residual(theta, slope, slack) <= bar).all()):
                return theta
            goal = self.goal(theta, slope, slack, hessian)
            for halving in range(HALVINGS + 1):
                trial = theta + (goal - theta) * 0.5**halving
                trial_slope, trial_value = self.slope(trial)
                trial_value += float((slack * trial.abs()).nan_to_num(0.0).sum())
                if trial_value <= value + noise_of_sums * abs(value) or (hessian is not None and halving == 1):
                    break
            if trial_value > value + noise_of_sums * abs(value):
                if hessian is None:
                    return self.descend(theta, slack, bar)
                hessian = None
                continue
            theta, slope, value = trial, trial_slope, trial_value
        return theta

    def goal(self, theta: Tensor, slope: Tensor, slack: Tensor, hessian: Tensor | None) -> Tensor:
        """Minimum of the quadratic model at Theta, with its slack."""
        matrix = self.hessian(theta) if hessian is None else hessian
        flat = [_flat(t) for t in (theta, slope, slack)]  # (C, p (1 + a))
        model = (matrix @ flat[0][..., None])[..., 0] + flat[1]
        free = ~flat[2].isinf()
        keep = free.double()
        if len(matrix) == 1 and not bool((flat[2][free] > 0).any()):  # one matrix for all
            ridge = 1e-10 * matrix[0].diagonal().max().clamp_min(1e-200) + (1.0 - keep[0])  # all at an end: no curvature
            matrix = keep[0, :, None] * matrix[0] * keep[0] + torch.diag(ridge)
            found = flat[0] + torch.linalg.solve(matrix, (flat[1] * keep).T).T
            return _unflat(found, self.shape).clamp(-LARGEST / 2, LARGEST / 2)
        matrix = keep[:, :, None] * matrix * keep[:, None] + torch.diag_embed(1.0 - keep)
        goal = solve_lasso(matrix, model * keep, torch.where(free, flat[2], 1.0), flat[0])
        return _unflat(goal * keep, self.shape).clamp(-LARGEST / 2, LARGEST / 2)

    def descend(self, theta: Tensor, slack: Tensor, bar: Tensor, steps: int = 300) -> Tensor:
        """Accelerated proximal steps: no Hessian, no trouble with collinear columns, many more steps."""
        size = self.squares_of_columns()
        length = 1.0 / (size * max(2, self.member.shape[1]) ** 0.5).clamp_min(1e-300)  # halved below where too long
        moved, ahead, speed = theta, theta, 1.0
        value = self._objective(theta, slack)
        scale = 1.0
        for _ in range(steps):
            slope, _ = self.slope(ahead)
            step = length * scale
            trial, by = ahead + step * slope, step * slack
            trial = torch.where(by.isinf(), torch.zeros_like(trial), trial.sign() * (trial.abs() - by).clamp_min(0.0))
            new = self._objective(trial, slack)
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

    def _objective(self, theta: Tensor, slack: Tensor) -> float:
        return self.slope(theta)[1] + float((slack * theta.abs()).nan_to_num(0.0).sum())

    def squares_of_columns(self) -> Tensor:
        """Bound on the curvature along each column, ``(p, 1 + a, C)``."""
        weights = self.weights(self.share.expand(-1, self.shape[2]), self.z)
        if self.slopes:
            half = self.shape[2]
            weights = torch.cat([weights[:, :half], weights[:, half:].abs() * self.z.clamp(-FAR, FAR).abs()], 1)
        total = over_ranks((self.member[:].T @ weights.to(self.member.dtype)).double())
        total = total.view(self.shape[1], self.shape[0], -1).transpose(0, 1).contiguous() * (1.0 if self.euclidean else 0.25)
        return total if self.ridge is None else total + self.ridge


def _flat(table: Tensor) -> Tensor:
    """From ``(p, 1 + a, C)`` to one row per class, ``(C, p (1 + a))``."""
    return table.permute(2, 0, 1).flatten(1)


def _unflat(rows: Tensor, shape: tuple[int, int, int]) -> Tensor:
    return rows.view(shape[2], shape[0], shape[1]).permute(1, 2, 0).contiguous()


def _bar(slack: Tensor, precision: float) -> Tensor:
    """By how much the conditions of the optimum may be missed: a part of the slack, of a free column that of the smallest."""
    paid = slack[(slack > 0) & ~slack.isinf()]
    least = float(paid.min()) if len(paid) else 1e-5
    return torch.where(slack.isinf(), torch.inf, precision * slack.clamp_min(max(least, 1e-6)))


def _residual(theta: Tensor, slope: Tensor, slack: Tensor) -> Tensor:
    """How far the conditions of the optimum are missed, per column."""
    off = (slope.abs() - slack).clamp_min(0.0)
    on = (slope - slack * theta.sign()).abs()
    return torch.where((theta == 0) & (slack > 0), off, on)


class Found(NamedTuple):
    """Theta ``(p, 1 + a, C)``, the slack k, its held-out losses, and whether the conditions of the optimum hold.

    Where fits were averaged, k is NaN and ``alike`` is the weight of the one in which no group differs.
    """

    theta: Tensor
    k: float
    loss: Tensor
    optimal: bool
    alike: float = math.nan


def fit_static(columns: Columns, sizes: Tensor, cluster: Tensor, slack: Tensor | None, apart: bool = True) -> Found:
    """Offsets and slopes by the noise rule, or with this slack ``(1 + a, C)`` of the offsets (and no slopes).

    ``columns``: the problem. ``sizes``: examples (or clusters) of each group, ``(a,)``. ``cluster``: of each example, ``(n,
    1)`` or ``(n, 0)``. ``slack``: largest violation of each offset; None for the noise rule. ``apart``: events have a slope
    within groups and one between them.
    """
    theta = torch.zeros(columns.shape, dtype=torch.float64, device=columns.z.device)
    if slack is not None:
        price = torch.full_like(theta, math.inf)
        price[0] = slack
        theta, optimal = _solve(columns, theta, price, 0.02)
        return Found(theta, math.nan, torch.zeros(0), optimal)
    # Everyone first: an offset, and a slope.
    unit = _one_example(columns, cluster)
    between = None
    if apart and columns.slopes and columns.shape[2] == 1 and 1 < columns.shape[1] <= FEW + 1:
        given, between = columns, _between(columns, unit)
        mix, more = _mix(between), torch.empty(len(columns.z), 2, dtype=columns.member.dtype, device=columns.z.device)
        for one in blocks(len(more)):
            middle = columns.member[one].double() @ between
            more[one] = torch.cat([columns.z[one].clamp(-FAR, FAR) - middle, middle], 1) @ mix
        columns = columns.beside(more)
        theta = torch.zeros(columns.shape, dtype=torch.float64, device=theta.device)
    none, ridge = torch.full_like(theta, math.inf), torch.zeros_like(theta)
    none[: 1 if between is not None else None, 0] = 0.0
    ridge[1:, 0] = COMMON_RIDGE * unit
    if between is not None:
        none[0, -2:], ridge[0, -2:] = 0.0, unit
        sure = max(1.0, 0.5 * float(_mean_squares(columns)) ** 0.5)  # the surer a model is, the less its logits are to be believed
        theta[0, -2:] = torch.linalg.solve(mix, torch.full_like(mix[:, :1], 1.0 - 1.0 / sure))
    columns = columns.shrunk(ridge)
    free, p = (none[0, :, 0] == 0).nonzero()[:, 0], len(theta) if between is None else 1
    part = columns.some(free)._but(slopes=p > 1, ridge=ridge[:p, free])
    theta[:p, free] = part.minimise(theta[:p, free], none[:p, free], None, 30, 1e-3)
    if between is not None:
        if bool((mix @ theta[0, -2:] > 1.0).any()):
            return fit_static(given, sizes, cluster, None, False)
        return _average(columns, theta, none, _folds(given, cluster), unit, (given, between, mix))
    worthless = theta[1:, 0] > 1.0  # (p - 1, C): the more sure, the less often right; a slope of 0 is as low as slopes go
    if bool(worthless.any()):
        flat = fit_static(columns._but(z=columns.z.masked_fill(worthless[0], 0.0)), sizes, cluster, None)
        flat.theta[1, 0] = torch.where(worthless[0], 1.0, flat.theta[1, 0])
        return flat
    if columns.shape[1] == 1:
        return Found(theta, math.inf, torch.zeros(0), True)
    fold = _folds(columns, cluster)
    if columns.shape[1] - 1 <= FEW:
        return _average(columns, theta, none, fold, unit)
    tried = noise.candidates(columns.shape[1] - 1)
    prices = _prices(columns, theta, sizes, cluster, none, tried)
    heads, met = [theta], [True]
    for price in reversed(prices):  # from the largest slack to the smallest, each from the one before
        if len(heads) > 1 and columns.shape[0] * len(_working(heads[0], columns.slope(heads[0])[0], price)) > MOST_COLUMNS:
            break  # a smaller slack would let in more columns than a sample can tell apart
        found, fine = _solve(columns, heads[0], price)
        heads, met = [found, *heads], [fine, *met]
    prices, tried = prices[len(prices) - len(heads) + 1 :], tried[len(tried) - len(heads) + 1 :]
    losses = [_held_out(columns, one, price, fold) for one, price in zip(heads, [*prices, none], strict=True)]
    choice = noise.choose(torch.stack(losses), tried)
    return Found(heads[choice.place], choice.k, choice.loss, met[choice.place])


def _folds(columns: Columns, cluster: Tensor) -> Tensor:
    """Fold of each example, int64 ``(n,)``; clusters stay together."""
    if cluster.shape[1]:
        return deal_clusters(noise.FOLDS, cluster)
    return (columns.places().place % noise.FOLDS).to(torch.uint8)


def _one_example(columns: Columns, cluster: Tensor) -> float:
    """What one example weighs in the mean; of clusters as much more as their sums vary more than those of single examples."""
    unit = float(over_ranks(columns.share.square().sum()))
    if cluster.shape[1] == 0:
        return unit
    nothing = torch.zeros(columns.shape, dtype=torch.float64, device=columns.z.device)
    apart = columns.squares(nothing, cluster[:, :0])[0, 0].mean()
    return unit * max(1.0, float(columns.squares(nothing, cluster)[0, 0].mean() / apart.clamp_min(1e-300)))


def _between(columns: Columns, unit: float) -> Tensor:
    """What each group (and everyone) adds to the model's logit, ``(1 + a, 1)``: a ridge regression on membership."""
    paid = MEANS_RIDGE * unit * torch.eye(columns.shape[1], dtype=torch.float64, device=columns.z.device)
    paid[0, 0] = 0.0
    sums = paid.new_zeros(columns.shape[1], columns.shape[1] + 1)
    for member, z, _, share in columns._parts():
        wide = torch.cat([member.double(), z.clamp(-FAR, FAR)], 1)
        sums += (wide[:, :-1] * share).T @ wide
    sums = over_ranks(sums)
    return torch.as_tensor(torch.linalg.solve(sums[:, :-1] + paid, sums[:, -1:]))


def _mix(like: Tensor) -> Tensor:
    """Combinations of the slopes within and between groups for which their ridges are sums of squares, ``(2, 2)``."""
    a, b, d = COMMON_RIDGE, BETWEEN_RIDGE, APART_RIDGE
    return torch.as_tensor(torch.linalg.inv(torch.linalg.cholesky(like.new_tensor([[a + d, -d], [-d, b + d]])))).T


def _average(
    columns: Columns, theta: Tensor, none: Tensor, fold: Tensor, unit: float, within: tuple[Columns, Tensor, Tensor] | None = None
) -> Found:
    """The fits with each ridge, averaged by their held-out loss.

    ``columns``: the problem, with the ridge of everyone's slope. ``theta``: the fit in which no group differs; ``none``: its
    price. ``fold``: of each example. ``unit``: what one example weighs. ``within``: where the last two columns are mixed from
    the logit around its mean in the groups and that mean: the problem without them, what each group adds to the mean, and the
    mixture.
    """
    assert columns.ridge is not None
    own = slice(1, columns.shape[1] if within is None else -2)
    size = _mean_squares(columns)
    ridges, prices = [columns.ridge], [none]
    for strength, steeper in RIDGES:
        ridge, price = columns.ridge.clone(), none.clone()
        ridge[0, own], price[0, own] = strength * unit, 0.0
        if not math.isinf(steeper):
            ridge[1:, own], price[1:, own] = strength * unit * steeper * size, 0.0
        ridges, prices = [*ridges, ridge], [*prices, price]
    heads, held, total, fine = _tried(columns, theta, ridges, prices, fold, unit)
    prior = torch.ones_like(total)
    prior[0] = len(total) - 1
    weight = prior * torch.exp(-LEARN * (total - total.min()))
    weight = weight / weight.sum()
    mixed = (heads * weight[:, None, None, None]).sum(0)
    if within is not None:  # as offsets and slopes
        columns, between, mix = within
        slopes = mix @ mixed[0, -2:]
        mixed = mixed[:, :-2].clone()
        mixed[1, 0] = slopes[0]
        mixed[0] += (slopes[1] - slopes[0]) * between
    # The mean of everyone stays a promise: its offset once more, with the others as they are.
    ones = columns.some(torch.zeros(1, dtype=torch.int64, device=mixed.device)).member
    moved = torch.empty_like(columns.z)
    for one in blocks(len(moved), ROWS if isinstance(columns.member, Membership) else max(len(moved), 1)):
        moved[one] = columns.at(mixed, columns.member[one], columns.z[one], 0.0)
    rest = Columns(ones, moved, columns.y, columns.share, columns.euclidean, False)
    zero = torch.zeros_like(mixed[:1, :1])
    mixed[0, :1] += rest.minimise(zero, zero.clone(), None, 30, 1e-3)[0]
    return Found(mixed, math.nan, held.mean(1), fine, float(weight[0]))


def _tried(
    columns: Columns, theta: Tensor, ridges: list[Tensor], prices: list[Tensor], fold: Tensor, unit: float
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Fits with each ridge, their held-out losses ``(fits, F)`` and that of all examples, and whether they are optimal.

    Of very many examples some choose one ridge with slopes of groups and one without, and fits with these are made on all.
    How much less they lose on examples that they saw than on others is their number of free columns, less what ridges hold:
    with so many examples per column, that is what a fold held out would say.
    """
    most, every = min(CHOICES, ENTRIES // columns.shape[1]), columns.places().rows
    few = None if columns.euclidean or every < 4 * most else columns.places().few(most, every)
    if few is None:
        heads, held, fine = _at_once(columns, theta, ridges, prices, fold) or _one_by_one(columns, theta, ridges, prices, fold)
        return heads, held, held.nan_to_num(0.0) @ _masses(columns, fold) / unit, fine
    rows, none = few.nonzero()[:, 0], torch.zeros_like(theta)
    part = float(over_ranks(columns.share[rows].sum()))
    some, shrunk = columns.pick(rows, ridges[0] / part), [ridge / part for ridge in ridges]
    heads, held, total, fine = _tried(some, _solve(some, theta, prices[0])[0], shrunk, prices, fold[rows], unit / part)
    steep = [k for k, (_, steeper) in enumerate(RIDGES, 1) if not math.isinf(steeper)]
    flat = [k for k in range(1, len(ridges)) if k not in steep]
    chosen = [0, *(min(kind, key=lambda k: float(total[k])) for kind in (steep, flat))]
    found: list[Tensor] = []
    totals: list[Tensor] = []
    for k in chosen:
        plain, price = some.shrunk(none).hessian(heads[k]), prices[k]
        one, met = _solve(columns.shrunk(ridges[k]), heads[k], price, hessian=plain) if k else (theta, True)
        keep = ~_flat(price).isinf()
        moved = torch.cholesky_solve(plain * keep[..., None], _factor(plain, _flat(shrunk[k]), keep))
        columns_free = moved.diagonal(dim1=1, dim2=2)[keep].sum()
        totals.append(columns.shrunk(none).slope(one)[1] / unit + 0.5 * (1.0 + noise.FOLDS / (noise.FOLDS - 1)) * columns_free)
        found, fine = [*found, one], fine and met
    return torch.stack(found), held[chosen], torch.stack(totals), fine


def _one_by_one(
    columns: Columns, theta: Tensor, ridges: list[Tensor], prices: list[Tensor], fold: Tensor
) -> tuple[Tensor, Tensor, bool]:
    """Fits with each ridge, each from the one before, their held-out losses ``(fits, F)``, and whether they are optimal."""
    plain = columns.shrunk(torch.zeros_like(theta)).thin(SAMPLE).hessian(theta)
    heads, losses, fine = [theta], [_held_out(columns, theta, prices[0], fold, plain)], True
    for ridge, price in zip(ridges[1:], prices[1:], strict=True):
        part = columns.shrunk(ridge)
        found, met = _solve(part, heads[-1].masked_fill(price.isinf(), 0.0), price, hessian=plain)
        losses.append(_held_out(part, found, price, fold, plain))
        heads, fine = [*heads, found], fine and met
    return torch.stack(heads), torch.stack(losses), fine


def _at_once(
    columns: Columns, theta: Tensor, ridges: list[Tensor], prices: list[Tensor], fold: Tensor
) -> tuple[Tensor, Tensor, bool] | None:
    """As :func:`_one_by_one`, of a small problem of one event: all steps at once. None where it is not, or they do not end."""
    wide, parts, count = columns.shape[0] * columns.shape[1], noise.FOLDS, len(ridges)
    rows = columns.places().rows
    exact = rows <= ROOM * wide or rows * columns.shape[1] <= EXACT_FOLDS
    if columns.shape[2] > 1 or not exact or count * (1 + parts) * wide**2 > HESSIANS:
        return None
    ridge, price = torch.cat(ridges, 2), torch.cat(prices, 2)
    free, grow = ~_flat(price).isinf(), parts / (parts - 1)
    every, heads, bar = columns.side_by_side(ridge, columns.share), theta.expand_as(ridge), _bar(_flat(price), 0.1)
    plain = columns._but(ridge=None).hessian(theta)
    heads, _ = every.chords(heads, _factor(plain, _flat(ridge), free), bar, 1)
    blocks = columns.hessians(heads.mean(2, keepdim=True), fold, parts)  # where most of them are after a step
    heads, met = every.chords(heads, _factor(blocks.sum(0)[None], _flat(ridge), free), bar)
    rests = (blocks.sum(0) - blocks) / (1.0 - _masses(columns, fold)).clamp_min(1e-300)[:, None, None]
    if met:
        factor = _factor(rests, _flat(ridge) * grow, free)
        apart = columns.folds(fold, parts, ridge * grow)
        found, met = apart.chords(heads.repeat_interleave(parts, 2), factor, 2.0 * bar.repeat_interleave(parts, 0))
    if not met:
        return None
    at = fold.long()
    moved = columns.at(found, columns.member[:], columns.z, 0.0).view(-1, count, parts)
    moved = moved.gather(2, at[:, None, None].expand(-1, count, 1))[..., 0]  # of each example by fits without its fold
    each = every._losses(moved, levelsets.probabilities(moved, columns.euclidean, True), columns.y) * columns.share
    losses = over_ranks(each.new_zeros(parts, count).index_add_(0, at, each)) / _masses(columns, fold).clamp_min(1e-300)[:, None]
    return heads.permute(2, 0, 1)[..., None], losses.T, True


def _factor(matrix: Tensor, ridge: Tensor, free: Tensor) -> Tensor:
    """Cholesky's factors ``(K m, d, d)`` of matrices ``(m, d, d)`` with each ridge ``(K, d)``; 1 where a column is not free."""
    keep, size = free.double()[:, None], matrix.diagonal(dim1=1, dim2=2) + ridge[:, None]  # (K, m, d)
    least = 1e-10 * size.amax(2, keepdim=True).clamp_min(1e-200) + (1.0 - keep)
    found = (matrix * (keep[..., None] * keep[:, :, None])).flatten(0, 1)
    found.diagonal(dim1=1, dim2=2).copy_((size * keep + least).flatten(0, 1))
    return torch.as_tensor(torch.linalg.cholesky_ex(found).L)


def _mean_squares(columns: Columns) -> Tensor:
    """Mean square of the logits, ``(C,)``: a slope moves large ones far."""
    return over_ranks(columns.z.clamp(-FAR, FAR).square_().mul_(columns.share).sum(0))


def _masses(columns: Columns, fold: Tensor) -> Tensor:
    """Mass of each fold."""
    return over_ranks(columns.z.new_zeros(noise.FOLDS).index_add_(0, fold.long(), columns.share[:, 0]))


def without(columns: Columns, found: Found, rows: Tensor) -> Tensor:
    """Theta as if only ``rows`` had been seen: it moves as a fit with a ridge moves when the others leave."""
    unit = float(columns.share.square().sum())
    ridge = torch.full_like(found.theta, 16.0 * unit)
    size = _mean_squares(columns)
    ridge[1:] = 16.0 * unit * 13.0 * size  # slopes of groups differ more rarely, see RIDGES
    ridge[0, 0], ridge[1:, 0] = 0.0, COMMON_RIDGE * unit
    free, share = torch.zeros_like(ridge), float(columns.share[rows].sum())
    whole = columns.shrunk(ridge)
    hessian = whole.thin(SAMPLE).hessian(found.theta)
    if columns.shape[2] == 1:
        part = torch.zeros_like(columns.share).index_fill_(0, rows, 1.0 / share) * columns.share
        both = columns.side_by_side(torch.cat([ridge, ridge / share], 2), torch.cat([columns.share, part], 1))
        factor = _factor(hessian, torch.zeros_like(hessian[:, 0]), torch.ones_like(hessian[:, 0])).expand(2, -1, -1)
        ends, met = both.chords(found.theta.expand(both.shape), factor, _bar(_flat(free), 0.1) * max(1.0, 1e4 * unit))
        if met:
            return found.theta + (1.0 - found.alike) * (ends[..., 1:] - ends[..., :1])
    before = whole.minimise(found.theta, free, hessian, 10, 0.1)
    after = columns.pick(rows, ridge / share).minimise(before, free, hessian, 10, 0.1)
    return found.theta + (1.0 - found.alike) * (after - before)


def _prices(
    columns: Columns, theta: Tensor, sizes: Tensor, cluster: Tensor, none: Tensor, tried: tuple[float, ...]
) -> list[Tensor]:
    """Slack of every column for each candidate k."""
    squares = columns.squares(theta, cluster)
    f = levelsets.probabilities(columns.at(theta, columns.member, columns.z), columns.euclidean)
    s = f - columns.y
    pooled = squares[:, :1]
    # The variance of an example is the group's own or everybody's, whichever is larger.
    weight = columns.share.square()
    ours = columns.weights(weight.expand_as(s), columns.z).abs().to(columns.member.dtype)
    ours = (columns.member[:].square().T @ ours).double()
    ours = over_ranks(ours).view(columns.shape[1], columns.shape[0], -1).transpose(0, 1)
    share = ours / ours[:, :1].clamp_min(1e-300)
    error = torch.maximum(squares, share * pooled).sqrt()
    skewness = noise.skewness_of(s[:, 0], columns.share[:, 0])
    sizes = sizes[None, :, None].expand(columns.shape[0], -1, columns.shape[2])
    found = []
    for k in tried:
        price = none.clone()
        price[:, 1:] = noise.slacks(k, error[:, 1:], sizes, skewness)
        price[1:, 1:] += RARER * error[1:, 1:]
        found.append(price)
    return found


def _working(theta: Tensor, slope: Tensor, price: Tensor) -> Tensor:
    """Groups that may need a column: those that have one, or nearly earn it; everyone first."""
    work = (theta != 0) | (slope.abs() > 0.7 * price)
    work[:, 0] = True
    return work.any(2).any(0).nonzero()[:, 0]


def _solve(
    columns: Columns, theta: Tensor, price: Tensor, precision: float = 0.1, hessian: Tensor | None = None
) -> tuple[Tensor, bool]:
    """The optimum for one price, to a part of it.

    Groups far from earning their column are left out, and join if they turn out to. ``hessian``: of all, nearby, without ridge.
    """
    bar = _bar(price, 2.0 * precision)
    fine = False
    for _ in range(JOINS):
        slope, _ = columns.slope(theta)
        groups = _working(theta, slope, price)
        part = columns.some(groups)
        if part.shape[0] * part.shape[1] > MOST_COLUMNS:
            found = part.descend(theta[:, groups], price[:, groups], bar[:, groups])
        else:
            known = _nearby(part, theta[:, groups], hessian if part.shape == columns.shape else None)
            found = part.minimise(theta[:, groups], price[:, groups], known, 50, precision)
        theta = theta.clone()
        theta[:, groups] = found
        slope, _ = columns.slope(theta)
        fine = bool((_residual(theta, slope, price) <= bar).all())
        if fine or not bool(((theta == 0) & (slope.abs() > price + bar)).any()):
            break
    return theta, fine


def _nearby(columns: Columns, theta: Tensor, plain: Tensor | None) -> Tensor:
    """A Hessian, from one without a ridge if there is one."""
    if plain is None or columns.ridge is None:
        return columns.thin(SAMPLE).hessian(theta)
    return plain + torch.diag_embed(_flat(columns.ridge))


def _held_out(columns: Columns, theta: Tensor, price: Tensor, fold: Tensor, plain: Tensor | None = None) -> Tensor:
    """Mean loss of each fold by the fit without it, ``(F,)``; of the columns that are nearly needed with all.

    Of a small problem each such fit is made; of a large one it is a step from the fit with all, from sums by fold.
    """
    parts = noise.FOLDS
    groups = _working(theta, columns.slope(theta)[0], price)
    plain = plain if len(groups) == columns.shape[1] else None
    columns, theta, price = columns.some(groups), theta[:, groups], price[:, groups]
    grown = price * math.sqrt(parts / (parts - 1))
    ridge = columns.ridge * (parts / (parts - 1)) if columns.ridge is not None else torch.zeros_like(theta)
    wide = columns.shape[0] * columns.shape[1]
    hessian = _nearby(columns, theta, plain) if wide <= MOST_COLUMNS else None
    count = columns.places().rows
    if hessian is None or count <= ROOM * wide or count * columns.shape[1] <= EXACT_FOLDS:
        if hessian is not None and columns.shape[2] == 1:
            every = columns.folds(fold, parts, ridge)
            start, slack = (part.expand(-1, -1, parts) for part in (theta, grown))
            return columns.losses(every.minimise(start, slack, hessian, 20, 0.2).permute(2, 0, 1)[..., None], fold)
        rests = [columns.pick((fold != k).nonzero()[:, 0], ridge) for k in range(parts)]
        if hessian is None:
            found = [rest.descend(theta, grown, _bar(grown, 0.5), 40) for rest in rests]
        else:
            found = [rest.minimise(theta, grown, hessian, 5, 0.2) for rest in rests]
        return columns.losses(torch.stack(found), fold)
    sums = columns.slopes_by_part(theta, fold, parts)
    mass = _masses(columns, fold)
    outside = [
        columns.goal(theta, (sums.sum(0) - sums[k]) / (1.0 - mass[k]).clamp_min(1e-300) - ridge * theta, grown, hessian)
        for k in range(parts)
    ]
    return columns.losses(torch.stack(outside), fold)
