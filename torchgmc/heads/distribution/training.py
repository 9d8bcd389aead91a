"""The offsets as a differentiable function of the logits they are fitted to; ``geometry="kl"``, no smoothing."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchgmc.engine import checks
from torchgmc.engine.implicit import CellProblem, cell_sums, check_members, check_some, optimum, slack_of
from torchgmc.groups.cells import pattern_ids
from torchgmc.heads.distribution.tilt import INSIDE

if TYPE_CHECKING:
    from torchgmc.heads.distribution.head import DistributionHead


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
        return self.weight @ log_z, cell_sums(-(p @ self.lists) * self.weight[:, None], self.cell, shift)

    def spread(self, shift: Tensor, *inputs: Tensor) -> Tensor:
        """Covariance of the lists under p, summed over the examples of a cell."""
        p = self._tilted(shift, *inputs)[1]
        lists = p @ self.lists  # (n, u)
        pairs = torch.einsum("nm,mu,mv->nuv", p, self.lists, self.lists)
        values = (pairs - lists[:, :, None] * lists[:, None, :]) * self.weight[:, None, None]
        return cell_sums(values.flatten(1), self.cell, shift).view(-1, self.columns, self.columns)


def solve(head: "DistributionHead", logits: Tensor, groups: Any, weight: Any, alpha: Any) -> dict[str, Tensor]:
    """See :meth:`torchgmc.DistributionHead.solve_differentiably`."""
    if head.euclidean:
        raise ValueError(
            "geometry='euclidean' is a sequence of projections, not the optimum of a smooth problem: it has no derivative to "
            "give. Train with geometry='kl'."
        )
    batch = head.check_batch(checks.detached(logits), groups, weight)
    check_some("logits", logits)
    problem = TiltPotential(head.atom_lists.to(logits.device), batch.member, batch.weight)
    check_members(head.groups, problem.mean)
    scale = problem.mean if head.conditional else torch.ones_like(problem.mean)
    slack = slack_of(head.alpha or 0.0, alpha, logits) * INSIDE * scale[:, None].expand(-1, problem.columns)
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
