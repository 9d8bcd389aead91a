"""Soft answers of a label tree: the probability of each node to be the answer."""

import torch
from torch import Tensor


def path(levels: Tensor, lam: Tensor, temperature: float) -> Tensor:
    r"""Probability of each node of the path from the root to the best leaf to be the answer.

    The answer lies at or above depth k when lambda exceeds the level there, with softness
    :math:`a_k = \sigma((\lambda - r_k) / T)` and 1 at the leaf; levels fall along the path, so a rises, and the answer is the
    node at depth k with probability :math:`a_k - a_{k-1}`.

    ``levels``: of :func:`torchgmc.heads.tree.tree.path_levels`, ``(n, height)``; -inf from the leaf on. ``lam``: ``(n,)``.
    ``temperature``: T, in the units of the summed scores. Returns: Shape ``(n, height + 1)``; rows sum to 1.

    Example:
        >>> path(torch.tensor([[1.0, 0.7]]), torch.tensor([0.8]), 0.1)
        tensor([[0.1192, 0.6119, 0.2689]])
    """
    leaf = levels == -float("inf")
    gap = (lam[:, None] - torch.where(leaf, torch.zeros_like(levels), levels)) / temperature
    reached = torch.where(leaf, torch.ones_like(levels), torch.sigmoid(gap))  # (n, height)
    edge = torch.zeros_like(lam)[:, None]
    return torch.cat([reached, edge + 1.0], 1) - torch.cat([edge, reached], 1)


def replay_tree(levels: Tensor, routes: Tensor, member: Tensor, shifts: Tensor, base: Tensor, temperature: float) -> Tensor:
    """Lambda as in :func:`torchgmc.heads.tree.tree.replay`, each round taking off the *mean* shift of its soft answer."""
    lam = torch.zeros_like(levels[:, 0]) + base
    for r in range(shifts.shape[0]):
        moves = (shifts[r][routes] * member[:, None]).sum(2)  # (n, height + 1)
        lam = lam - (path(levels, lam, temperature) * moves).sum(1)
    return lam


def covered_leaves(nodes: Tensor, spans: Tensor, place: Tensor) -> Tensor:
    """Probability that each leaf is covered, ``(n, K)``, from the probability of each node to be the answer, ``(n, V)``.

    ``nodes``: ``(n, V)``. ``spans``, ``place``: of the :class:`~torchgmc.heads.tree.tree.Tree`: a node covers a run of leaves,
    so that a running sum is enough.
    """
    ends = nodes.new_zeros([nodes.shape[0], place.shape[0] + 1])
    ends = ends.index_add(1, spans[:, 0], nodes).index_add(1, spans[:, 1], nodes, alpha=-1)
    return ends.cumsum(1).index_select(1, place)
