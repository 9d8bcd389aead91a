"""The offsets as a differentiable function of the probabilities they are fitted to; ``geometry="kl"``, ``bins=None``."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchgmc.engine import noise
from torchgmc.engine.implicit import CellProblem, cell_sums, check_members, check_some, optimum, slack_of
from torchgmc.groups.cells import pattern_ids

if TYPE_CHECKING:
    from torchgmc.heads.probability.head import ProbabilityHead


class LogLoss(CellProblem):
    """E of the log loss at z - shift; the input is z, ``(n, C)``: logits of an event (C = 1) or of classes.

    ``y``: outcomes, ``(n, C)``. ``member``: bool ``(n, a)``; offset 0 is everyone's. ``weight``: ``(n,)``. ``apart``: the
    columns are events that do not exclude one another.
    """

    def __init__(self, y: Tensor, member: Tensor, weight: Tensor, apart: bool = False) -> None:
        self.apart = apart or y.shape[1] == 1
        self.y, self.share = y, (weight / weight.sum())[:, None]
        self.cell, patterns = pattern_ids(member)
        everyone = torch.ones(len(patterns), 1, dtype=torch.float64, device=member.device)
        super().__init__(torch.cat([everyone, patterns.to(torch.float64)], 1), y.shape[1])

    def _probs(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z) if self.apart else torch.softmax(z, 1)

    def measure(self, shift: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean log loss, and minus the sums of f - y in each cell."""
        z = inputs[0] - shift[self.cell]
        normal = torch.nn.functional.softplus(z) if self.apart else torch.logsumexp(z, 1, keepdim=True)
        value = ((normal.sum(1) - (self.y * z).sum(1)) * self.share[:, 0]).sum()
        return value, cell_sums((self.y - self._probs(z)) * self.share, self.cell, shift)

    def spread(self, shift: Tensor, *inputs: Tensor) -> Tensor:
        """Covariance of the outcome under f, summed over the examples of a cell."""
        f = self._probs(inputs[0] - shift[self.cell])
        together = torch.diag_embed(f.square()) if self.apart else f[:, :, None] * f[:, None, :]
        values = (torch.diag_embed(f) - together) * self.share[:, :, None]
        return cell_sums(values.flatten(1), self.cell, shift).view(-1, self.columns, self.columns)

    def error(self, z: Tensor) -> Tensor:
        """Standard error of the sum of f - y over each group at z, ``(1 + a, C)``."""
        square = ((self._probs(z) - self.y) * self.share).square()
        sums = square.new_zeros(len(self.tilt), self.columns).index_add(0, self.cell, square)
        # Where every f equals its y the root has no derivative; nothing is to be learnt there either.
        return (self.tilt.T @ sums).clamp_min(1e-30).sqrt()


def solve(head: "ProbabilityHead", probs: Tensor, y: Tensor, groups: Any, weight: Any, alpha: Any) -> dict[str, Tensor]:
    """See :meth:`torchgmc.ProbabilityHead.solve_differentiably`."""
    if head.euclidean:
        raise ValueError(
            "geometry='euclidean' clips at 0 and 1 and has no smooth optimum to differentiate; train with geometry='kl'."
        )
    if head.bins is not None:
        raise ValueError(
            f"with bins={head.bins} examples jump between level sets as f moves, so the fit is not a smooth function of the "
            "scores. Train through a head with bins=None (its offsets), and calibrate one with `bins` afterwards."
        )
    batch = head.check_batch(probs, y, groups, weight)
    check_some("probs", probs)
    problem = LogLoss(batch.y, batch.member, batch.weight, head.multilabel)
    mass = problem.tilt.T @ problem.share.new_zeros(len(problem.tilt), 1).index_add(0, problem.cell, problem.share)  # (1 + a, 1)
    check_members(head.groups, mass[1:])
    z = head.coordinates(probs)
    if alpha is None and head.noise_floor:
        slack = noise.FIXED * problem.error(z)
    else:
        scale = mass if head.conditional else torch.ones_like(mass)
        slack = (0.95 / (head.high - head.low) * slack_of(head.alpha or 0.0, alpha, probs)) * scale.expand(-1, problem.columns)
    slack = slack * (torch.arange(len(mass), device=slack.device) > 0)[:, None]  # everyone moves freely
    offsets = optimum(problem, slack, z)
    state = {"offsets": offsets, "slopes": torch.zeros_like(offsets)}
    return state | {name: getattr(head, name)[:0] for name in ("rounds", "log_who", "log_step", "log_column")}
