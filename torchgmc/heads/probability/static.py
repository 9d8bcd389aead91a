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

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchgmc.distributed import total as over_ranks
from torchgmc.engine import noise
from torchgmc.engine.clusters import deal_clusters
from torchgmc.heads.levelsets import steps as levelsets
from torchgmc.heads.levelsets.steps import ROWS, Membership, blocks
from torchgmc.heads.probability import problem
from torchgmc.heads.probability.problem import FAR, MOST_COLUMNS, Columns, factored, flattened, minimise, solve, tolerance, working

#: The ridge of everyone's slope (within groups), of that between groups, of their difference, and of the logit's means in
#: groups, in examples.
COMMON_RIDGE, BETWEEN_RIDGE, APART_RIDGE, MEANS_RIDGE = 1.0, 8.0, 3.0, 8.0
#: Up to so many groups share a ridge; of more, those that earn a column by the l1 price have one.
FEW = 300
#: Slopes of groups differ more rarely than their offsets: so many standard errors more.
RARER = 0.75
#: Ridges that are tried, in examples: the penalty is ridge / 2 times the square of a group's offset, and so many times that
#: of its slope, for logits of mean square 1 (slopes differ more rarely; infinite: they do not differ). Strongest first.
RIDGES = ((64.0, 13.0), (16.0, 13.0), (4.0, 13.0), (16.0, math.inf), (4.0, math.inf), (1.0, math.inf))
#: Weights of the fits: exp(-LEARN x held-out loss of all examples).
LEARN = 0.5
#: Entries of membership up to which the fits without a fold are made exactly, not by one step from the fit with all.
EXACT_FOLDS = 1 << 19
#: Examples that choose a ridge, and entries of their membership at most; from four times as many on they choose for all.
CHOICES, ENTRIES = 1 << 17, 1 << 25
#: With fewer examples per column one step is not enough either; entries of all Hessians, where such fits are made at once.
ROOM, HESSIANS = 100, 1 << 22


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
        theta, optimal = solve(columns, theta, price, 0.02)
        return Found(theta, math.nan, torch.zeros(0), optimal)
    # Everyone first: an offset, and a slope.
    unit = _one_example(columns, cluster)
    between = None
    if apart and columns.slopes and columns.shape[2] == 1 and 1 < columns.shape[1] <= FEW + 1:
        given, between = columns, _between(columns, unit)
        a, b, d = COMMON_RIDGE, BETWEEN_RIDGE, APART_RIDGE  # of combinations for which ridges are sums of squares, (2, 2)
        mix = torch.as_tensor(torch.linalg.inv(torch.linalg.cholesky(between.new_tensor([[a + d, -d], [-d, b + d]])))).T
        more = torch.empty(len(columns.z), 2, dtype=columns.member.dtype, device=columns.z.device)
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
        sure = max(1.0, 0.5 * float(mean_squares(columns)) ** 0.5)  # the surer a model is, the less its logits are to be believed
        theta[0, -2:] = torch.linalg.solve(mix, torch.full_like(mix[:, :1], 1.0 - 1.0 / sure))
    columns = columns.but(ridge=ridge)
    free, p = (none[0, :, 0] == 0).nonzero()[:, 0], len(theta) if between is None else 1
    part = columns.some(free).but(slopes=p > 1, ridge=ridge[:p, free])
    theta[:p, free] = minimise(part, theta[:p, free], none[:p, free], None, 30, 1e-3)
    if between is not None:
        if bool((mix @ theta[0, -2:] > 1.0).any()):
            return fit_static(given, sizes, cluster, None, False)
        return average(columns, theta, none, _folds(given, cluster), unit, (given, between, mix))
    worthless = theta[1:, 0] > 1.0  # (p - 1, C): the more sure, the less often right; a slope of 0 is as low as slopes go
    if bool(worthless.any()):
        flat = fit_static(columns.but(z=columns.z.masked_fill(worthless[0], 0.0)), sizes, cluster, None)
        flat.theta[1, 0] = torch.where(worthless[0], 1.0, flat.theta[1, 0])
        return flat
    if columns.shape[1] == 1:
        return Found(theta, math.inf, torch.zeros(0), True)
    fold = _folds(columns, cluster)
    if columns.shape[1] - 1 <= FEW:
        return average(columns, theta, none, fold, unit)
    tried = noise.candidates(columns.shape[1] - 1)
    prices = _prices(columns, theta, sizes, cluster, none, tried)
    heads, met = [theta], [True]
    for price in reversed(prices):  # from the largest slack to the smallest, each from the one before
        if len(heads) > 1 and columns.shape[0] * len(working(heads[0], columns.slope(heads[0])[0], price)) > MOST_COLUMNS:
            break  # a smaller slack would let in more columns than a sample can tell apart
        found, fine = solve(columns, heads[0], price)
        heads, met = [found, *heads], [fine, *met]
    prices, tried = prices[len(prices) - len(heads) + 1 :], tried[len(tried) - len(heads) + 1 :]
    losses = [held_out(columns, one, price, fold) for one, price in zip(heads, [*prices, none], strict=True)]
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
    for member, z, _, share in columns.parts():
        wide = torch.cat([member.double(), z.clamp(-FAR, FAR)], 1)
        sums += (wide[:, :-1] * share).T @ wide
    sums = over_ranks(sums)
    return torch.as_tensor(torch.linalg.solve(sums[:, :-1] + paid, sums[:, -1:]))


def _prices(
    columns: Columns, theta: Tensor, sizes: Tensor, cluster: Tensor, none: Tensor, tried: tuple[float, ...]
) -> list[Tensor]:
    """Slack of every column for each candidate k."""
    squares = columns.squares(theta, cluster)
    s = levelsets.probabilities(columns.at(theta, columns.member, columns.z), columns.euclidean) - columns.y
    # The variance of an example is the group's own or everybody's, whichever is larger.
    ours = columns.weights(columns.share.square().expand_as(s), columns.z).abs().to(columns.member.dtype)
    ours = over_ranks((columns.member[:].square().T @ ours).double())
    ours = ours.view(columns.shape[1], columns.shape[0], -1).transpose(0, 1)
    error = torch.maximum(squares, ours / ours[:, :1].clamp_min(1e-300) * squares[:, :1]).sqrt()[:, 1:]
    skewness = noise.skewness_of(s[:, 0], columns.share[:, 0])
    rarer = torch.cat([torch.zeros_like(error[:1]), RARER * error[1:]])
    prices = (noise.slacks(k, error, sizes[None, :, None], skewness) + rarer for k in tried)
    return [torch.cat([none[:, :1], price], 1) for price in prices]


def average(
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
    ridges, prices, size = [columns.ridge], [none], mean_squares(columns)
    for strength, steeper in RIDGES:
        ridge, price = columns.ridge.clone(), none.clone()
        ridge[0, own], price[0, own] = strength * unit, 0.0
        if not math.isinf(steeper):
            ridge[1:, own], price[1:, own] = strength * unit * steeper * size, 0.0
        ridges, prices = [*ridges, ridge], [*prices, price]
    heads, held, total, fine = _tried(columns, theta, ridges, prices, fold, unit)
    weight = torch.exp(-LEARN * (total - total.min()))
    weight[0] *= len(total) - 1  # half of the prior
    weight = weight / weight.sum()
    mixed = (heads * weight[:, None, None, None]).sum(0)
    if within is not None:  # as offsets and slopes
        columns, between, mix = within
        slopes = mix @ mixed[0, -2:]
        mixed = mixed[:, :-2].clone()
        mixed[1, 0] = slopes[0]
        mixed[0] += (slopes[1] - slopes[0]) * between
    # The mean of everyone stays a promise: its offset once more, with the others as they are.
    ones = columns.some(torch.zeros(1, dtype=torch.int64, device=mixed.device))
    moved = torch.empty_like(columns.z)
    for one in blocks(len(moved), ROWS if isinstance(columns.member, Membership) else max(len(moved), 1)):
        moved[one] = columns.at(mixed, columns.member[one], columns.z[one], 0.0)
    zero = torch.zeros_like(mixed[:1, :1])
    mixed[0, :1] += minimise(ones.but(z=moved, slopes=False, ridge=None), zero, zero.clone(), None, 30, 1e-3)[0]
    return Found(mixed, math.nan, held.mean(1), fine, float(weight[0]))


def _tried(
    columns: Columns, theta: Tensor, ridges: list[Tensor], prices: list[Tensor], fold: Tensor, unit: float
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Fits with each ridge, their held-out losses ``(fits, F)`` and that of all examples, and whether they are optimal.

    Of very many examples some choose one ridge with slopes of groups and one without, and fits with these are made on all.
    How much less they lose on examples that they saw than on others is their number of free columns, less what ridges hold:
    with so many examples per column, that is what a fold held out would say.
    """
    most, spots = min(CHOICES, ENTRIES // columns.shape[1]), columns.places()
    few = None if columns.euclidean or spots.rows < 4 * most else spots.few(most, spots.rows)
    if few is None:
        heads, held, fine = _at_once(columns, theta, ridges, prices, fold) or _one_by_one(columns, theta, ridges, prices, fold)
        return heads, held, held.nan_to_num(0.0) @ _masses(columns, fold) / unit, fine
    rows, none = few.nonzero()[:, 0], torch.zeros_like(theta)
    count, part = int(over_ranks(torch.tensor(len(rows)))), float(over_ranks(columns.share[rows].sum()))
    some, shrunk = columns.pick(rows, ridges[0] / part), [ridge / part for ridge in ridges]
    some.spots = spots._replace(place=spots.place[rows], limit=most * spots.limit // spots.rows, rows=count)  # keys see last bits
    heads, held, total, fine = _tried(some, solve(some, theta, prices[0])[0], shrunk, prices, fold[rows], unit / part)
    steep = [k for k, (_, steeper) in enumerate(RIDGES, 1) if not math.isinf(steeper)]
    flat = [k for k in range(1, len(ridges)) if k not in steep]
    chosen = [0, *(min(kind, key=lambda k: float(total[k])) for kind in (steep, flat))]
    found, totals = list[Tensor](), list[Tensor]()
    for k in chosen:
        plain, price = some.but(ridge=none).hessian(heads[k]), prices[k]
        one, met = solve(columns.but(ridge=ridges[k]), heads[k], price, hessian=plain) if k else (theta, True)
        keep = ~flattened(price).isinf()
        moved = torch.cholesky_solve(plain * keep[..., None], factored(plain, flattened(shrunk[k]), keep))
        columns_free = moved.diagonal(dim1=1, dim2=2)[keep].sum()
        totals.append(columns.but(ridge=none).slope(one)[1] / unit + 0.5 * (1.0 + noise.FOLDS / (noise.FOLDS - 1)) * columns_free)
        found, fine = [*found, one], fine and met
    return torch.stack(found), held[chosen], torch.stack(totals), fine


def _one_by_one(
    columns: Columns, theta: Tensor, ridges: list[Tensor], prices: list[Tensor], fold: Tensor
) -> tuple[Tensor, Tensor, bool]:
    """Fits with each ridge, their held-out losses ``(fits, F)``, and whether they are optimal."""
    plain = columns.but(ridge=torch.zeros_like(theta)).thin(problem.SAMPLE).hessian(theta)
    heads, fine = _side_by_side(columns, theta, ridges, prices, plain) or ([theta], True)
    for ridge, price in zip(ridges[len(heads) :], prices[len(heads) :], strict=True):  # each from the one before
        found, met = solve(columns.but(ridge=ridge), heads[-1].masked_fill(price.isinf(), 0.0), price, hessian=plain)
        heads, fine = [*heads, found], fine and met
    each = zip(heads, ridges, prices, strict=True)
    losses = [held_out(columns.but(ridge=ridge), head, price, fold, plain) for head, ridge, price in each]
    return torch.stack(heads), torch.stack(losses), fine


def _side_by_side(
    columns: Columns, theta: Tensor, ridges: list[Tensor], prices: list[Tensor], plain: Tensor
) -> tuple[list[Tensor], bool] | None:
    """Fits of one event with each ridge, all steps at once; None where it is not one event, or they do not end."""
    if columns.shape[2] > 1 or columns.shape[0] * columns.shape[1] > MOST_COLUMNS:
        return None
    ridge, price = torch.cat(ridges, 2), torch.cat(prices, 2)
    free, bar = ~flattened(price).isinf(), tolerance(flattened(price), 0.1)
    every = columns.side_by_side(ridge, columns.share)
    heads, _ = problem.chords(every, theta.expand_as(ridge), factored(plain, flattened(ridge), free), bar, 1)
    near = columns.but(ridge=None).thin(problem.SAMPLE).hessian(heads.mean(2, keepdim=True))  # where most are after a step
    heads, met = problem.chords(every, heads, factored(near, flattened(ridge), free), bar)
    return (list(torch.split(heads, 1, 2)), True) if met else None


def _at_once(
    columns: Columns, theta: Tensor, ridges: list[Tensor], prices: list[Tensor], fold: Tensor
) -> tuple[Tensor, Tensor, bool] | None:
    """As :func:`_one_by_one`, of a small problem of one event: all steps at once. None where it is not, or they do not end."""
    wide, parts, count, rows = columns.shape[0] * columns.shape[1], noise.FOLDS, len(ridges), columns.places().rows
    exact = rows <= ROOM * wide or rows * columns.shape[1] <= EXACT_FOLDS
    if columns.shape[2] > 1 or not exact or count * (1 + parts) * wide**2 > HESSIANS:
        return None
    ridge, price = torch.cat(ridges, 2), torch.cat(prices, 2)
    free, grow = ~flattened(price).isinf(), parts / (parts - 1)
    every, heads, bar = columns.side_by_side(ridge, columns.share), theta.expand_as(ridge), tolerance(flattened(price), 0.1)
    plain = columns.but(ridge=None).hessian(theta)
    heads, _ = problem.chords(every, heads, factored(plain, flattened(ridge), free), bar, 1)
    blocks = columns.hessians(heads.mean(2, keepdim=True), fold, parts)  # where most of them are after a step
    heads, met = problem.chords(every, heads, factored(blocks.sum(0)[None], flattened(ridge), free), bar)
    rests = (blocks.sum(0) - blocks) / (1.0 - _masses(columns, fold)).clamp_min(1e-300)[:, None, None]
    if met:
        factor = factored(rests, flattened(ridge) * grow, free)
        apart = columns.folds(fold, parts, ridge * grow)
        found, met = problem.chords(apart, heads.repeat_interleave(parts, 2), factor, 2.0 * bar.repeat_interleave(parts, 0))
    if not met:
        return None
    at = fold.long()
    moved = columns.at(found, columns.member[:], columns.z, 0.0).view(-1, count, parts)
    moved = moved.gather(2, at[:, None, None].expand(-1, count, 1))[..., 0]  # of each example by fits without its fold
    f = levelsets.probabilities(moved, columns.euclidean, True)
    each = problem.loss(moved, f, columns.y, columns.euclidean, True) * columns.share
    losses = over_ranks(each.new_zeros(parts, count).index_add_(0, at, each)) / _masses(columns, fold).clamp_min(1e-300)[:, None]
    return heads.permute(2, 0, 1)[..., None], losses.T, True


def mean_squares(columns: Columns) -> Tensor:
    """Mean square of the logits, ``(C,)``: a slope moves large ones far."""
    return over_ranks(columns.z.clamp(-FAR, FAR).square_().mul_(columns.share).sum(0))


def _masses(columns: Columns, fold: Tensor) -> Tensor:
    """Mass of each fold."""
    return over_ranks(columns.z.new_zeros(noise.FOLDS).index_add_(0, fold.long(), columns.share[:, 0]))


def without(columns: Columns, found: Found, rows: Tensor) -> Tensor:
    """Theta as if only ``rows`` had been seen: it moves as a fit with a ridge moves when the others leave."""
    unit = float(over_ranks(columns.share.square().sum()))
    ridge = torch.full_like(found.theta, 16.0 * unit)
    ridge[1:] = 16.0 * unit * 13.0 * mean_squares(columns)  # slopes of groups differ more rarely, see RIDGES
    ridge[0, 0], ridge[1:, 0] = 0.0, COMMON_RIDGE * unit
    free, share = torch.zeros_like(ridge), float(over_ranks(columns.share[rows].sum()))
    whole = columns.but(ridge=ridge)
    hessian = whole.thin(problem.SAMPLE).hessian(found.theta)
    if columns.shape[2] == 1:
        part = torch.zeros_like(columns.share).index_fill_(0, rows, 1.0 / share) * columns.share
        both = columns.side_by_side(torch.cat([ridge, ridge / share], 2), torch.cat([columns.share, part], 1))
        factor = factored(hessian, torch.zeros_like(hessian[:, 0]), torch.ones_like(hessian[:, 0])).expand(2, -1, -1)
        bar = tolerance(flattened(free), 0.1) * max(1.0, 1e4 * unit)
        ends, met = problem.chords(both, found.theta.expand(both.shape), factor, bar)
        if met:
            return found.theta + (1.0 - found.alike) * (ends[..., 1:] - ends[..., :1])
    before = minimise(whole, found.theta, free, hessian, 10, 0.1)
    after = minimise(columns.pick(rows, ridge / share), before, free, hessian, 10, 0.1)
    return found.theta + (1.0 - found.alike) * (after - before)


def held_out(columns: Columns, theta: Tensor, price: Tensor, fold: Tensor, plain: Tensor | None = None) -> Tensor:
    """Mean loss of each fold by the fit without it, ``(F,)``; of the columns that are nearly needed with all.

    Of a small problem each such fit is made; of a large one it is a step from the fit with all, from sums by fold.
    """
    parts = noise.FOLDS
    paid = bool(((price > 0) & ~price.isinf()).any())  # columns that are free are needed whatever their slope
    groups = working(theta, columns.slope(theta)[0] if paid else torch.ones_like(theta), price)
    plain = plain if len(groups) == columns.shape[1] else None
    columns, theta, price = columns.some(groups), theta[:, groups], price[:, groups]
    grown = price * math.sqrt(parts / (parts - 1))
    ridge = columns.ridge * (parts / (parts - 1)) if columns.ridge is not None else torch.zeros_like(theta)
    wide, count = columns.shape[0] * columns.shape[1], columns.places().rows
    hessian = problem.nearby(columns, theta, plain) if wide <= MOST_COLUMNS else None
    if hessian is None or count <= ROOM * wide or count * columns.shape[1] <= EXACT_FOLDS:
        if hessian is not None and columns.shape[2] == 1:
            every = columns.folds(fold, parts, ridge)
            start, slack = (part.expand(-1, -1, parts) for part in (theta, grown))
            return columns.losses(minimise(every, start, slack, hessian, 20, 0.2).permute(2, 0, 1)[..., None], fold)
        rests = [columns.pick((fold != k).nonzero()[:, 0], ridge) for k in range(parts)]
        if hessian is None:
            found = [problem.descend(rest, theta, grown, tolerance(grown, 0.5), 40) for rest in rests]
        else:
            found = [minimise(rest, theta, grown, hessian, 5, 0.2) for rest in rests]
        return columns.losses(torch.stack(found), fold)
    sums, mass = columns.slopes_by_part(theta, fold, parts), _masses(columns, fold)
    outside = [
        problem.aim(columns, theta, (sums.sum(0) - sums[k]) / (1.0 - mass[k]).clamp_min(1e-300) - ridge * theta, grown, hessian)
        for k in range(parts)
    ]
    return columns.losses(torch.stack(outside), fold)
