r"""The information projection: the smallest change of a distribution over the vocabulary that meets every constraint.

Of all p, the one nearest to h in :math:`E\,KL(p \| h)` under :math:`|E\langle p - Ep, 1_A v\rangle| \le \alpha` is

.. math:: p(x) \propto h(x) \exp\big(-\sum_{A,k} (1_A(x) - P(A))\, \theta_{Ak} v_k\big)

because :math:`E\langle p - Ep, g\rangle = E\langle p, g - Eg\rangle` is linear in p. Theta minimises the convex dual

.. math:: D(\theta) = E \log Z_\theta(x) + \alpha \|\theta\|_1

whose smooth part has minus the violation as its gradient, so that its optimality conditions are |violation| <= alpha. Tokens
with the same list memberships (an *atom*) move together: D depends on h only through the mass of each atom.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchgmc.distributed import total as over_ranks
from torchgmc.engine.implicit import CellProblem, cell_sums
from torchgmc.engine.orthant import Point, minimise
from torchgmc.engine.search import MAX_ELEMENTS
from torchgmc.groups.cells import pattern_ids

#: Elements of a block of logits that stays in the cache (1 MB in float32).
CHUNK = 1 << 18
#: The dual is solved at this share of alpha, so that rounding never leaves a violation above alpha itself.
INSIDE = 1.0 - 1e-6
#: Relative accuracy of the optimality conditions, in units of alpha.
PRECISION = 2e-7


class Atoms(NamedTuple):
    """Tokens by the lists they are in.

    ``ids``: tokens that are in some list, ascending, shape ``(J,)``. ``atom``: the atom of each of them, ``(J,)``, from 1 on;
    atom 0 is all other tokens. ``lists``: is the atom in the list, bool, ``(m, u)``; row 0 is all False.
    """

    ids: Tensor
    atom: Tensor
    lists: Tensor


def atoms(attributes: Sequence[Sequence[int]]) -> Atoms:
    """Atoms of u lists of token ids.

    Example:
        >>> found = atoms([[5, 7], [7, 9]])
        >>> found.ids.tolist(), found.atom.tolist(), found.lists.int().tolist()
        ([5, 7, 9], [2, 3, 1], [[0, 0], [0, 1], [1, 0], [1, 1]])
    """
    ids = sorted({token for tokens in attributes for token in tokens})
    place = {token: j for j, token in enumerate(ids)}
    member = torch.zeros(len(ids), len(attributes), dtype=torch.bool)
    for k, tokens in enumerate(attributes):
        member[[place[token] for token in tokens], k] = True
    patterns, atom = torch.unique(member, dim=0, return_inverse=True)
    rest = torch.zeros(1, len(attributes), dtype=torch.bool)
    return Atoms(torch.tensor(ids, dtype=torch.int64), atom + 1, torch.cat([rest, patterns]))


def log_masses(logits: Tensor, ids: Tensor, atom: Tensor, num_atoms: int, temperature: float = 1.0) -> Tensor:
    """Log of the mass of each atom, from one pass over the logits in blocks that stay in the cache.

    ``logits``: shape ``(n, vocabulary)``; -inf is a token that cannot occur. ``ids``, ``atom``: of :class:`Atoms`, on the same
    device. ``num_atoms``: m. ``temperature``: divides the logits. Returns: Shape ``(n, m)``, float64; the masses of a row sum
    to 1. NaN for a row that is not a distribution.

    Example:
        >>> found = atoms([[0]])
        >>> log_masses(torch.tensor([[0.0, 0.0, 0.0, 0.0]]), *found[:2], 2).exp()
        tensor([[0.7500, 0.2500]], dtype=torch.float64)
    """
    rows = max(1, CHUNK // max(1, logits.shape[1]))
    return torch.cat([_log_masses(part, ids, atom, num_atoms, temperature) for part in torch.split(logits, rows)])


def _log_masses(logits: Tensor, ids: Tensor, atom: Tensor, num_atoms: int, temperature: float) -> Tensor:
    x = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    words = x[:, ids].double()  # (n, J); in float64, so that a rare word keeps its mass
    # Every atom has its own scale: next to a word that leads by more than 745 (in float32 104) it would be 0.
    best = words.new_full((len(x), num_atoms), -math.inf).scatter_reduce(1, atom.expand_as(words), words, "amax")
    best = _finite(best)
    sums = torch.zeros_like(best).index_add_(1, atom, ((words - best[:, atom]) / temperature).exp())
    found = sums.log() + best / temperature
    others = x.index_fill(1, ids, -math.inf)
    top = _finite(others.amax(1, keepdim=True))
    others.sub_(top)
    if temperature != 1.0:
        others.div_(temperature)
    found[:, 0] = others.exp_().sum(1).double().log() + top[:, 0].double() / temperature
    return found - found.logsumexp(1, keepdim=True)


def _finite(top: Tensor) -> Tensor:
    """The largest logit of each row, or 0 where no token can occur."""
    return torch.where(top == -math.inf, 0.0, top)


class Dual(CellProblem):
    r"""The smooth part of the dual, E log Z, with its derivatives; memory n x m. As a problem its input is ``log_mass``.

    Prompts may be on several ranks: expectations are over all of them (:func:`torchgmc.distributed.total`).

    ``log_mass``: ``(n, m)``, of :func:`log_masses`. ``lists``: ``(m, u)``, of :class:`Atoms`. ``member``: membership, bool,
    ``(n, a)``. ``weight``: of each prompt, ``(n,)``. ``conditional``: divide the violation of a group by its share P(A).
    """

    def __init__(self, log_mass: Tensor, lists: Tensor, member: Tensor, weight: Tensor, conditional: bool = False) -> None:
        self.log_mass, self.lists = log_mass, lists.to(torch.float64)
        self.weight = weight / over_ranks(weight.sum())
        self.cell, self.patterns = pattern_ids(member)  # examples alike in their groups
        inside = self.patterns.to(torch.float64)  # (c, a)
        self.mean = over_ranks(cell_sums(self.weight[:, None], self.cell, inside)[:, 0] @ inside)  # P(A), (a,)
        self.scale = self.mean if conditional else torch.ones_like(self.mean)
        super().__init__((inside - self.mean) / self.scale, lists.shape[1])
        self.shape = (inside.shape[1], lists.shape[1])

    def tilted(self, shift: Tensor, log_mass: Tensor) -> tuple[Tensor, Tensor]:
        """log Z, ``(n,)``, and the masses of the atoms under p, ``(n, m)``."""
        z = log_mass - (shift @ self.lists.T)[self.cell]
        log_z = torch.logsumexp(z, 1)
        return log_z, (z - log_z[:, None]).exp()

    def at(self, theta: Tensor) -> Point:
        """E log Z, minus the violations, and the masses under p."""
        log_z, p = self.tilted(self.tilt @ theta, self.log_mass)
        sums = over_ranks(torch.cat([(self.weight @ log_z)[None], (self.tilt.T @ self._slope(p)).flatten()]))
        return Point(sums[0], sums[1:].view(self.shape), p)

    def measure(self, shift: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """E log Z, and minus the weighted mass of the lists in each cell."""
        log_z, p = self.tilted(shift, *inputs)
        return self.weight @ log_z, self._slope(p)

    def spread(self, shift: Tensor, *inputs: Tensor) -> Tensor:
        """Covariance of the lists under p, summed over the examples of a cell."""
        return self.covariance(self.tilted(shift, *inputs)[1])

    def _slope(self, p: Tensor) -> Tensor:
        return cell_sums(-(p @ self.lists) * self.weight[:, None], self.cell, self.tilt)

    def covariance(self, p: Tensor) -> Tensor:
        """:meth:`spread` at the masses p."""
        pairs = (self.lists[:, :, None] * self.lists[:, None, :]).flatten(1)  # (m, u u)
        total = p.new_zeros(len(self.tilt), self.columns**2)
        rows = max(1, MAX_ELEMENTS // max(1, self.columns**2))
        for part, cell, weight in zip(*(torch.split(t, rows) for t in (p, self.cell, self.weight)), strict=True):
            lists = part @ self.lists  # (n, u)
            values = part @ pairs - (lists[:, :, None] * lists[:, None, :]).flatten(1)
            total = total + cell_sums(values * weight[:, None], cell, self.tilt)
        return total.view(-1, self.columns, self.columns)


class Projection(NamedTuple):
    """What :func:`project` found.

    ``theta``: offsets, ``(a, u)``. ``violation``: at theta, ``(a, u)``. ``history``: worst |violation| before each step and at
    the end. ``kl``: E KL(p || h) of a p within alpha, an upper bound on the smallest possible. ``bound``: value of the dual, a
    lower bound on the smallest possible. ``stalled``: no step lowers the dual further although its optimality conditions are
    not met.
    """

    theta: Tensor
    violation: Tensor
    history: Tensor
    kl: float
    bound: float
    stalled: bool


def project(dual: Dual, slack: float | Tensor, max_iter: int = 100) -> Projection:
    r"""Minimise :math:`D(\theta) = E \log Z + \sum \lambda |\theta|` by Newton steps, see :mod:`torchgmc.engine.orthant`.

    ``dual``: the problem. ``slack``: lambda, the largest violation of each g, ``(a, u)`` or one number. ``max_iter``: maximum
    number of steps.
    """
    start = dual.log_mass.new_zeros(dual.shape)
    slack = torch.as_tensor(slack, dtype=start.dtype, device=start.device).expand(dual.shape)
    bar = max(PRECISION * float(slack.min()), 1e-14)  # sums are no more exact

    def hessian(p: Tensor) -> Tensor:
        return over_ranks(dual.assemble(dual.covariance(p)))

    found = minimise(dual.at, hessian, slack * INSIDE, start, bar, max_iter)
    theta, point = found.theta, found.point
    # E KL(p || h), after mixing p with its mean just enough that every violation is within its slack.
    mix = (1.0 - slack / point.gradient.abs().clamp_min(1e-300)).clamp_min(0.0).max()
    p = (1 - mix) * point.memory + mix * over_ranks(dual.weight @ point.memory)
    terms = torch.where(p > 0, p * (p.log() - dual.log_mass), torch.zeros_like(p))
    kl = float(over_ranks(dual.weight @ terms.sum(1)))
    bound = float(-point.value - (slack * theta.abs()).nan_to_num(0.0).sum())
    return Projection(theta, -point.gradient, found.history, kl, bound, found.stalled)
