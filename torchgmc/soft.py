r"""Softness: what a head's decision is when it must have a derivative.

A decision :math:`1\{z > 0\}` has the derivative 0 wherever it has one. Three modes say what ``forward`` does about it:

- ``"hard"``: the decision itself;
- ``"soft"``: :math:`\sigma(z / T)` with the temperature T, which tends to the decision as T -> 0 (except at z = 0);
- ``"straight_through"``: the value of ``"hard"`` and the derivative of ``"soft"``.

Plain tensor functions that TorchScript and ``torch.export`` can read.
"""

import torch
from torch import Tensor
from torch._jit_internal import is_scripting

from torchgmc import levelsets

__all__ = ["MODES", "above", "check", "covered_leaves", "level_sets", "path", "straight_through"]

MODES = ("hard", "soft", "straight_through")


def _check_number(temperature: object) -> None:
    if not isinstance(temperature, (int, float, Tensor)):  # a union here would break graphs of torch 2.6
        raise TypeError(f"`temperature` must be a number above 0, got {type(temperature).__name__}.")
    if isinstance(temperature, Tensor) and (temperature.numel() != 1 or temperature.device.type == "meta"):
        raise ValueError(
            f"`temperature` must be one number, got a tensor of shape {temperature.shape} on {temperature.device}."
        )
    if isinstance(temperature, int) and temperature >= 1 << 63:
        raise ValueError(f"`temperature` must be a number that tensors can hold, got {temperature}.")


def check(mode: str, temperature: float) -> None:
    """Raise ValueError for an unknown mode, or a temperature that is not a finite number above 0 (in every mode).

    Example:
        >>> check("soft", 0.1)
        >>> check("softer", 0.1)
        Traceback (most recent call last):
        ValueError: `mode` must be 'hard', 'soft' or 'straight_through', got 'softer'.
    """
    if mode != "hard" and mode != "soft" and mode != "straight_through":
        raise ValueError(f"`mode` must be 'hard', 'soft' or 'straight_through', got '{mode}'.")
    if not is_scripting():
        _check_number(temperature)
    if not (temperature > 0.0 and temperature < float("inf")):
        raise ValueError(f"`temperature` must be a finite number above 0, got {temperature}; it is the width of a soft step.")


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """The value of ``hard``, exactly, and every derivative of ``soft``; of the type of ``soft``, which must be finite."""
    return hard.detach().to(soft.dtype) + (soft - soft.detach())


def above(values: Tensor, level: Tensor, mode: str, temperature: float) -> Tensor:
    r"""Is the value above the level?

    .. math:: 1\{z > 0\} \;\text{(hard)} \qquad \sigma(z / T) \;\text{(soft)}, \qquad z = \text{values} - \text{level}

    Args:
        values, level: shapes that broadcast, of one floating type.
        mode: one of ``MODES``.
        temperature: T, in the units of the values: within 2.2 T of the level soft values lie between 0.1 and 0.9.

    Returns:
        Bool for ``"hard"``, else the type of the values.

    Example:
        >>> above(torch.tensor([0.4, 0.5, 0.9]), torch.tensor(0.5), "soft", 0.1)
        tensor([0.2689, 0.5000, 0.9820])
        >>> x = torch.tensor([0.4], requires_grad=True)
        >>> above(x, torch.tensor(0.5), "straight_through", 0.1).backward()
        >>> x.grad  # sigma' / T = 0.2689 (1 - 0.2689) / 0.1
        tensor([1.9661])
    """
    check(mode, temperature)
    if mode == "hard":
        return values > level
    soft = torch.sigmoid((values - level) / temperature)
    if mode == "soft":
        return soft
    return straight_through(values > level, soft)


# -- trees -----------------------------------------------------------------------------------------------------------------


def path(levels: Tensor, lam: Tensor, temperature: float) -> Tensor:
    r"""Probability of each node of the path from the root to the best leaf to be the answer.

    The answer lies at or above depth k when lambda exceeds the level there, with softness
    :math:`a_k = \sigma((\lambda - r_k) / T)` and 1 at the leaf; levels fall along the path, so a rises, and the answer is the
    node at depth k with probability :math:`a_k - a_{k-1}`.

    Args:
        levels: of :func:`torchgmc.trees.path_levels`, ``(n, height)``; -inf from the leaf on.
        lam: ``(n,)``.
        temperature: T, in the units of the summed scores.

    Returns:
        Shape ``(n, height + 1)``; rows sum to 1.

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
    """Lambda of each example as in :func:`torchgmc.trees.replay`, each round taking off the *mean* shift of its soft answer."""
    lam = torch.zeros_like(levels[:, 0]) + base
    for r in range(shifts.shape[0]):
        moves = (shifts[r][routes] * member[:, None]).sum(2)  # (n, height + 1)
        lam = lam - (path(levels, lam, temperature) * moves).sum(1)
    return lam


def covered_leaves(nodes: Tensor, spans: Tensor, place: Tensor) -> Tensor:
    """Probability that each leaf is covered, ``(n, K)``, from the probability of each node to be the answer, ``(n, V)``.

    Args:
        nodes: ``(n, V)``.
        spans, place: of the :class:`~torchgmc.trees.Tree`: a node covers a run of leaves, so that a running sum is enough.
    """
    ends = nodes.new_zeros([nodes.shape[0], place.shape[0] + 1])
    ends = ends.index_add(1, spans[:, 0], nodes).index_add(1, spans[:, 1], nodes, alpha=-1)
    return ends.cumsum(1).index_select(1, place)


# -- level sets ------------------------------------------------------------------------------------------------------------


def level_sets(x: Tensor, edges: Tensor, temperature: float) -> Tensor:
    r"""Soft membership in each level set, :math:`\sigma((x - e_k) / T) - \sigma((x - e_{k+1}) / T)`.

    Args:
        x: ``(n, C)``.
        edges: inner edges e of the b level sets, ``(b - 1,)``; the outer ones are infinite.
        temperature: T, in the units of the edges.

    Returns:
        Shape ``(n, b, C)``; sums to 1 over the level sets.

    Example:
        >>> level_sets(torch.tensor([[0.2]]), torch.tensor([0.25, 0.5]), 0.05)[0, :, 0]
        tensor([0.7311, 0.2665, 0.0025])
    """
    above = torch.sigmoid((x.unsqueeze(1) - edges[:, None]) / temperature)  # (n, b - 1, C)
    one = torch.ones_like(x).unsqueeze(1)
    return torch.cat([one, above], 1) - torch.cat([above, torch.zeros_like(one)], 1)


def _leveled(z: Tensor, euclidean: bool) -> Tensor:
    """What the edges cut: z for one event, f for classes."""
    return z if z.shape[1] == 1 else levelsets.probabilities(z, euclidean)


def apply_tables(z: Tensor, member: Tensor, tables: Tensor, edges: Tensor, euclidean: bool, temperature: float) -> Tensor:
    """:func:`torchgmc.levelsets.apply_tables` with soft level sets: each round moves by the mean of their steps."""
    for t in range(tables.shape[0]):
        z = levelsets.project(z, euclidean)
        moves = (member @ tables[t].flatten(1)).view(-1, tables.shape[2], tables.shape[3])  # (n, b, C)
        z = z - (moves * level_sets(_leveled(z, euclidean), edges, temperature)).sum(1)
    return z


def apply_log(
    z: Tensor, member: Tensor, log: tuple[Tensor, Tensor, Tensor], edges: Tensor, euclidean: bool, temperature: float
) -> Tensor:
    """:func:`torchgmc.levelsets.apply_log` with soft level sets: each round moves by the mean of their steps.

    ``log`` holds its ``who``, ``step`` and ``column``.
    """
    who, step, column = log
    place = torch.arange(z.shape[1], device=z.device)
    for t in range(who.shape[0]):
        here = (place == column[t]).to(z.dtype)  # (C,)
        inside = (level_sets(_leveled(z, euclidean), edges, temperature) * here).sum(2)  # (n, b)
        moves = member.index_select(1, who[t]) * step[t]  # (n, b)
        z = levelsets.project(z - (moves * inside).sum(1).unsqueeze(1) * here, euclidean)
    return z
