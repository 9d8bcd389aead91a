"""Level sets with soft edges, and the rounds of a fit replayed on them."""

import torch
from torch import Tensor

from torchgmc.heads.levelsets import steps as levelsets

__all__ = ["apply_log", "apply_tables", "level_sets"]


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


def _leveled(z: Tensor, euclidean: bool, apart: bool) -> Tensor:
    """What the edges cut: z for events, f for classes."""
    return z if apart or z.shape[1] == 1 else levelsets.probabilities(z, euclidean)


def apply_tables(
    z: Tensor, member: Tensor, tables: Tensor, edges: Tensor, euclidean: bool, temperature: float, apart: bool = False
) -> Tensor:
    """:func:`torchgmc.heads.levelsets.steps.apply_tables` with soft level sets: each round moves by the mean of their steps."""
    for t in range(tables.shape[0]):
        z = levelsets.project(z, euclidean, apart)
        moves = (member @ tables[t].flatten(1)).view(-1, tables.shape[2], tables.shape[3])  # (n, b, C)
        z = z - (moves * level_sets(_leveled(z, euclidean, apart), edges, temperature)).sum(1)
    return z


def apply_log(
    z: Tensor,
    member: Tensor,
    log: tuple[Tensor, Tensor, Tensor],
    edges: Tensor,
    euclidean: bool,
    temperature: float,
    apart: bool = False,
) -> Tensor:
    """:func:`torchgmc.heads.levelsets.steps.apply_log` with soft level sets: each round moves by the mean of their steps.

    ``log`` holds its ``who``, ``step`` and ``column``.
    """
    who, step, column = log
    place = torch.arange(z.shape[1], device=z.device)
    for t in range(who.shape[0]):
        here = (place == column[t]).to(z.dtype)  # (C,)
        inside = (level_sets(_leveled(z, euclidean, apart), edges, temperature) * here).sum(2)  # (n, b)
        moves = member.index_select(1, who[t]) * step[t]  # (n, b)
        z = levelsets.project(z - (moves * inside).sum(1).unsqueeze(1) * here, euclidean, apart)
    return z
