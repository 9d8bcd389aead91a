r"""The potentials of the heads as smooth functions of their scores: what ``solve_differentiably`` minimises.

========================  ============================================  =======================================================
head                      potential of an example                       smoothing
========================  ============================================  =======================================================
``DistributionHead``      log Z of the tilted distribution              none: the fit itself (``geometry="kl"``)
``ProbabilityHead``       log loss of the shifted logit                 none: the offsets of the fit (``kl``, ``bins=None``)
``ThresholdHead``,        T softplus((lambda - h) / T) - sigma lambda   the step 1{h <= lambda} becomes sigma((lambda - h) / T):
``QuantileHead``          (mean over the scores h that count)           a pinball loss rounded over a width T
========================  ============================================  =======================================================
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchgmc.engine import checks, hashing
from torchgmc.engine.implicit import CellProblem, optimum
from torchgmc.groups.groups import pattern_ids
from torchgmc.heads.distribution.tilt import INSIDE
from torchgmc.heads.probability.solver import STATIC_SLACK
from torchgmc.heads.quantile import problem as quantiles
from torchgmc.heads.threshold.risks import MonotoneRisk

State = dict[str, Tensor]


class TiltPotential(CellProblem):
    r"""E log Z of :math:`p \propto h \exp(-(W - EW) \Theta V)`; the input is the mass of each atom, ``(n, m)``.

    Args:
        lists: is the atom in the list, ``(m, u)``.
        member: bool ``(n, a)``.
        weight: ``(n,)``.
    """

    def __init__(self, lists: Tensor, member: Tensor, weight: Tensor) -> None:
        self.lists, self.weight = lists.to(torch.float64), weight / weight.sum()
        self.cell, patterns = pattern_ids(member)
        self.mean = self.weight @ member.to(torch.float64)  # P(A), (a,)
        super().__init__(patterns.to(torch.float64) - self.mean, lists.shape[1])

    def _tilted(self, shift: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
        """log Z ``(n,)`` and masses of the atoms under p ``(n, m)``."""
        change = shift @ self.lists.T  # (c, m)
        least = change.amin(1, keepdim=True).detach()
        q = mass.to(torch.float64) * (least - change).exp()[self.cell]
        z = q.sum(1)
        return z.log() - least[self.cell, 0], q / z[:, None]

    def measure(self, shift: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """E log Z, and minus the weighted mass of the lists in each cell."""
        log_z, p = self._tilted(shift, *inputs)
        return self.weight @ log_z, _sums(-(p @ self.lists) * self.weight[:, None], self.cell, shift)

    def spread(self, shift: Tensor, *inputs: Tensor) -> Tensor:
        """Covariance of the lists under p, summed over the examples of a cell."""
        p = self._tilted(shift, *inputs)[1]
        lists = p @ self.lists  # (n, u)
        pairs = torch.einsum("nm,mu,mv->nuv", p, self.lists, self.lists)
        values = (pairs - lists[:, :, None] * lists[:, None, :]) * self.weight[:, None, None]
        return _sums(values.flatten(1), self.cell, shift).view(-1, self.columns, self.columns)


class LogLoss(CellProblem):
    """E of the log loss at z - shift; the input is z, ``(n, C)``: logits of an event (C = 1) or of classes.

    Args:
        y: outcomes, ``(n, C)``.
        member: bool ``(n, a)``; offset 0 is everyone's.
        weight: ``(n,)``.
    """

    def __init__(self, y: Tensor, member: Tensor, weight: Tensor) -> None:
        self.y, self.share = y, (weight / weight.sum())[:, None]
        self.cell, patterns = pattern_ids(member)
        everyone = torch.ones(len(patterns), 1, dtype=torch.float64, device=member.device)
        super().__init__(torch.cat([everyone, patterns.to(torch.float64)], 1), y.shape[1])

    def _probs(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z) if self.columns == 1 else torch.softmax(z, 1)

    def measure(self, shift: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean log loss, and minus the sums of f - y in each cell."""
        z = inputs[0] - shift[self.cell]
        normal = torch.nn.functional.softplus(z) if self.columns == 1 else torch.logsumexp(z, 1, keepdim=True)
        value = ((normal.sum(1) - (self.y * z).sum(1)) * self.share[:, 0]).sum()
        return value, _sums((self.y - self._probs(z)) * self.share, self.cell, shift)

    def spread(self, shift: Tensor, *inputs: Tensor) -> Tensor:
        """Covariance of the outcome under f, summed over the examples of a cell."""
        f = self._probs(inputs[0] - shift[self.cell])
        values = (torch.diag_embed(f) - f[:, :, None] * f[:, None, :]) * self.share[:, :, None]
        return _sums(values.flatten(1), self.cell, shift).view(-1, self.columns, self.columns)

    def error(self, z: Tensor) -> Tensor:
        """Standard error of the sum of f - y over each group at z, ``(1 + a, C)``."""
        square = ((self._probs(z) - self.y) * self.share).square()
        sums = square.new_zeros(len(self.tilt), self.columns).index_add(0, self.cell, square)
        # Where every f equals its y the root has no derivative; nothing is to be learnt there either.
        return (self.tilt.T @ sums).clamp_min(1e-30).sqrt()


class SoftPinball(CellProblem):
    r"""Mean over the scores that count of T softplus((lambda - h)/T) - sigma lambda, with lambda = base - shift.

    Its derivative in lambda is :math:`\sigma((\lambda - h)/T) - \sigma`. Inputs are the scores h and their bases, ``(N,)``.

    Args:
        row: cell * C + class of each score, ``(N,)``.
        share: weight of each score, ``(N,)``; those of one class sum to 1.
        target: of each score, ``(N,)``.
        tilt: membership of the cells, ``(c, a)``.
        columns: C.
        temperature: T.
        widest: temperature at which the fit begins (it cools down to T).
    """

    def __init__(
        self, row: Tensor, share: Tensor, target: Tensor, tilt: Tensor, columns: int, temperature: float, widest: float
    ) -> None:
        super().__init__(tilt, columns)
        self.row, self.share, self.target, self.temperature, self.widest = row, share, target, temperature, widest

    def _excess(self, shift: Tensor, scores: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
        """lambda and (lambda - h) / T of each score."""
        lam = base.to(torch.float64) - shift.flatten()[self.row]
        return lam, (lam - scores.to(torch.float64)) / self.temperature

    def measure(self, shift: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean smooth pinball loss, and minus the excess of the risk in each cell."""
        lam, x = self._excess(shift, *inputs)
        value = (self.share * (self.temperature * torch.nn.functional.softplus(x) - self.target * lam)).sum()
        return value, _sums((self.share * (self.target - torch.sigmoid(x)))[:, None], self.row, shift.flatten()).view_as(shift)

    def spread(self, shift: Tensor, *inputs: Tensor) -> Tensor:
        """Density of the smoothed scores at the thresholds; classes do not mix."""
        _, x = self._excess(shift, *inputs)
        values = self.share * torch.sigmoid(x) * torch.sigmoid(-x) / self.temperature
        return torch.diag_embed(_sums(values[:, None], self.row, shift.flatten()).view_as(shift))

    def stages(self) -> Iterator[CellProblem]:
        """From a temperature as wide as the scores down to T: far from its scores a sharp step has no slope to follow."""
        width = self.widest
        while width > 2 * self.temperature:
            yield SoftPinball(self.row, self.share, self.target, self.tilt, self.columns, width, width)
            width /= 4
        yield self


def _sums(values: Tensor, place: Tensor, shift: Tensor) -> Tensor:
    """Sums of rows ``(n, k)`` by place, ``(len(shift), k)``."""
    return torch.zeros(len(shift), values.shape[1], dtype=values.dtype, device=values.device).index_add(0, place, values)


# -- by head -----------------------------------------------------------------------------------------------------------------


def _slack(head: Any, alpha: Any, like: Tensor) -> Tensor:
    """alpha as a float64 scalar tensor; a tensor keeps its derivative."""
    if isinstance(alpha, Tensor):
        if alpha.dim() != 0 or not alpha.is_floating_point():
            raise ValueError(f"`alpha` must be a number or a floating tensor of shape (), got shape {tuple(alpha.shape)}.")
        return alpha.to(like.device, torch.float64)
    if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha < float("inf")):
        raise ValueError(f"`alpha` must be a finite number of at least 0, got {alpha!r}.")
    return torch.tensor(head.alpha if alpha is None else alpha, dtype=torch.float64, device=like.device)


def _check_members(head: Any, share: Tensor) -> None:
    empty = (share.detach() <= 0).flatten(1).any(1).nonzero() if share.dim() > 1 else (share.detach() <= 0).nonzero()
    if len(empty):
        raise ValueError(
            f"group {head.groups[int(empty[0])]!r} has no examples in this batch ({len(empty)} such in all): its offset has "
            "nothing to be fitted to. Use larger (or stratified) batches, or leave the group out."
        )


def _plain(value: Any) -> Any:
    """The same numbers for checks that look at them."""
    return value.detach() if isinstance(value, Tensor) else value


def _check_some(name: str, tensor: Tensor) -> None:
    if len(tensor) == 0:
        raise ValueError(f"`{name}` holds no examples: there is nothing to fit.")


def solve_distribution(head: Any, logits: Tensor, groups: Any, weight: Any, alpha: Any) -> State:
    """State of a :class:`~torchgmc.DistributionHead`: see its ``solve_differentiably``."""
    if head.euclidean:
        raise ValueError(
            "geometry='euclidean' is a sequence of projections, not the optimum of a smooth problem: it has no derivative to "
            "give. Train with geometry='kl'."
        )
    _, member, weights = head._check_batch(_plain(logits), groups, weight)
    _check_some("logits", logits)
    problem = TiltPotential(head.atom_lists.to(logits.device), member, weights)
    _check_members(head, problem.mean)
    scale = problem.mean if head.conditional else torch.ones_like(problem.mean)
    slack = _slack(head, alpha, logits) * INSIDE * scale[:, None].expand(-1, problem.columns)
    mass = atom_masses(logits, head.ids.to(logits.device), head.atom.to(logits.device), len(head.atom_lists), head.temperature)
    return {"offsets": optimum(problem, slack, mass), "mean_membership": problem.mean}


def atom_masses(logits: Tensor, ids: Tensor, atom: Tensor, num_atoms: int, temperature: float) -> Tensor:
    """Mass of each atom, float64 ``(n, m)``, differentiable in the logits; see

    :func:`torchgmc.heads.distribution.tilt.log_masses`.
    """
    x = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    top = x.detach().amax(1, keepdim=True)
    words = ((x.index_select(1, ids) - top).double() / temperature).exp()
    mass = words.new_zeros(len(x), num_atoms).index_add(1, atom, words)
    others = ((x - top) / temperature).index_fill(1, ids, -torch.inf).exp().sum(1).double()
    first = torch.zeros(num_atoms, dtype=torch.bool, device=x.device)
    first[0] = True
    mass = torch.where(first, others[:, None], mass)
    return mass / mass.sum(1, keepdim=True)


def solve_probability(head: Any, probs: Tensor, y: Tensor, groups: Any, weight: Any, alpha: Any) -> State:
    """State of a :class:`~torchgmc.ProbabilityHead`: see its ``solve_differentiably``."""
    if head.euclidean:
        raise ValueError(
            "geometry='euclidean' clips at 0 and 1 and has no smooth optimum to differentiate at; train with geometry='kl'."
        )
    if head.bins is not None:
        raise ValueError(
            f"with bins={head.bins} examples jump between level sets as f moves, so that the fit is no smooth function of the "
            "scores. Train through a head with bins=None (its offsets), and calibrate one with `bins` afterwards."
        )
    _, outcome, member, weights = head._check_batch(_plain(probs), y, groups, weight)
    _check_some("probs", probs)
    problem = LogLoss(outcome, member, weights)
    mass = problem.tilt.T @ problem.share.new_zeros(len(problem.tilt), 1).index_add(
        0, problem.cell, problem.share
    )  # (1 + a, 1)
    _check_members(head, mass[1:])
    z = head.coordinates(probs)
    if alpha is None and head.noise_floor:
        slack = STATIC_SLACK * problem.error(z)
    else:
        scale = mass if head.conditional else torch.ones_like(mass)
        slack = (0.95 / (head.high - head.low) * _slack(head, alpha, probs)) * scale.expand(-1, problem.columns)
    state = {"offsets": optimum(problem, slack, z)}
    return state | {name: getattr(head, name)[:0] for name in ("tables", "log_who", "log_step", "log_column")}


def solve_threshold(
    head: Any, scores: Tensor, masks: Tensor, groups: Any, weight: Any, alpha: Any, temperature: float
) -> State:
    """State of a :class:`~torchgmc.ThresholdHead`: see its ``solve_differentiably``."""
    checks.positive("temperature", temperature, "It is the width over which the step 1{h <= lambda} is smoothed.")
    risk = head._risk
    if isinstance(risk, MonotoneRisk):
        raise ValueError(
            f"the risk {risk.name!r} of your own is known at hard thresholds alone; 'fnr' and 'fpr' have a smooth form. Train "
            "with one of them, and calibrate with your own risk afterwards."
        )
    _, flags, member, weights = head._check_batch(_plain(scores), masks, groups, weight)
    _check_some("scores", scores)
    chosen = risk.relevant(head._flat(flags))  # (n, C, m)
    counts = chosen.sum(-1)
    cell, patterns = pattern_ids(member)
    tilt, columns = patterns.to(torch.float64), head.columns
    example, label, _ = chosen.nonzero(as_tuple=True)
    mass = weights[:, None] * (counts > 0)  # (n, C)
    total = mass.sum(0)
    scale = member.double().T @ mass / total.clamp_min(torch.finfo(torch.float64).tiny)  # (a, C): P(A)
    _check_members(head, scale)
    share = (weights[:, None] / counts.clamp_min(1) / total)[example, label]
    target = head._targets().to(scores.device)
    target = target if risk.increasing else 1.0 - target
    values = head._flat(hashing.add(scores, head.jitter))[chosen]
    widest = float((values.detach() - head.init).abs().max()) + temperature
    problem = SoftPinball(cell[example] * columns + label, share, target[label], tilt, columns, temperature, widest)
    slack = _slack(head, alpha, scores) * (scale if head.conditional else torch.ones_like(scale))
    base = torch.full((columns,), head.init, dtype=torch.float64, device=scores.device)
    ends = torch.tensor([-torch.inf, torch.inf], dtype=torch.float64, device=scores.device)
    return {"offsets": optimum(problem, slack, values, base[label]), "base": base, "limits": ends}


def solve_quantile(head: Any, scores: Tensor, groups: Any, weight: Any, base: Any, alpha: Any, temperature: float) -> State:
    """State of a :class:`~torchgmc.QuantileHead`: see its ``solve_differentiably``."""
    checks.positive("temperature", temperature, "It is the width over which the step 1{score <= q} is smoothed.")
    if head.bins is not None:
        raise ValueError(
            f"with bins={head.bins} examples jump between level sets as q moves, so that the fit is no smooth function of the "
            "scores. Train through a head with bins=None, and calibrate one with `bins` afterwards."
        )
    batch = head._check_batch(_plain(scores), groups, weight, _plain(base))
    _check_some("scores", scores)
    share = batch.weight / batch.weight.sum()
    _check_members(head, share @ batch.member.double())
    target = torch.full_like(share, head.target)
    values = scores.to(torch.float64)
    spread = float((batch.scores.max() - batch.scores.min()).abs())
    if base is not None:
        start = values.new_zeros(())
        origins = base.to(torch.float64)
        spread += float((batch.base - batch.scores).abs().max())
    elif head.init is not None:
        start = values.new_full((), head.init)
        origins = start.expand_as(values)
        spread += float((start - batch.scores).abs().max())
    else:  # the common threshold is itself a (smoothed) quantile of the scores
        one = share.new_ones(1, 1)
        everyone = SoftPinball(torch.zeros_like(share).long(), share, target, one, 1, temperature, spread + temperature)
        middle = torch.full_like(values, quantiles.weighted_quantile(batch.scores, batch.weight, head.target))
        start = middle[0] - optimum(everyone, torch.zeros_like(one), values, middle)[0, 0]
        origins = start.expand_as(values)
    cell, patterns = pattern_ids(batch.member)
    problem = SoftPinball(cell, share, target, patterns.to(torch.float64), 1, temperature, spread + temperature)
    scale = (share @ batch.member.double())[:, None]
    slack = _slack(head, alpha, scores) * (scale if head.conditional else torch.ones_like(scale))
    state = {"offsets": optimum(problem, slack, values, origins)[:, 0], "base": start}
    return state | {name: getattr(head, name)[:0] for name in ("log_who", "log_step", "log_column")}
