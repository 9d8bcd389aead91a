"""The offsets as a differentiable function of the logits they are fitted to; ``geometry="kl"``, no smoothing."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchgmc.engine.implicit import check_members, check_some, optimum, slack_of
from torchgmc.heads.distribution.tilt import INSIDE, Dual

if TYPE_CHECKING:
    from torchgmc.heads.distribution.head import DistributionHead


def solve(head: "DistributionHead", logits: Tensor, groups: Any, weight: Any, alpha: Any) -> dict[str, Tensor]:
    """See :meth:`torchgmc.DistributionHead.solve_differentiably`."""
    if head.euclidean:
        raise ValueError("geometry='euclidean' is a sequence of projections, which has no derivative. Train with geometry='kl'.")
    batch = head.check_batch(logits, groups, weight)
    check_some("logits", logits)
    lists, ids, atom = (t.to(logits.device) for t in (head.atom_lists, head.ids, head.atom))
    log_mass = log_masses(logits, ids, atom, len(lists), head.temperature)
    dual = Dual(log_mass.detach(), lists, batch.member, batch.weight, head.conditional)
    check_members(head.groups, dual.mean)
    slack = (slack_of(head.alpha or 0.0, alpha, logits) * INSIDE).expand(len(head.groups), dual.columns)
    return {"offsets": optimum(dual, slack, log_mass) / dual.scale[:, None], "mean_membership": dual.mean}


def log_masses(logits: Tensor, ids: Tensor, atom: Tensor, num_atoms: int, temperature: float) -> Tensor:
    """:func:`torchgmc.heads.distribution.tilt.log_masses`, differentiable in the logits."""
    x = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    top = x.detach().amax(1, keepdim=True)
    words = ((x.index_select(1, ids) - top).double() / temperature).exp()
    mass = words.new_zeros(len(x), num_atoms).index_add(1, atom, words)
    others = ((x - top) / temperature).index_fill(1, ids, -torch.inf).exp().sum(1).double()
    mass = torch.cat([others[:, None], mass[:, 1:]], 1)  # no listed token is in atom 0
    mass = mass / mass.sum(1, keepdim=True)
    here = mass > 0  # an atom that cannot occur stays so: no derivative
    return torch.where(here, torch.where(here, mass, 1.0).log(), -torch.inf)
