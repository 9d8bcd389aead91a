"""Euclidean projections onto the convex sets F of outputs: a box and the probability simplex.

Plain tensor functions that TorchScript and ``torch.export`` can read: shapes and types are checked, values are not.
"""

import torch
from torch import Tensor

from torchgmc.engine.scripting import is_scripting

__all__ = ["box", "simplex"]


def _check(f: Tensor, **bounds: float) -> None:
    """Types of an eager call."""
    if not isinstance(f, Tensor) or f.layout != torch.strided:
        raise TypeError(f"`f` must be a dense tensor, got {f.layout if isinstance(f, Tensor) else type(f).__name__}.")
    for name, value in bounds.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat)):  # torch 2.6 compiles no `|` of types
            raise TypeError(f"`{name}` must be a number, got {type(value).__name__}.")
        if isinstance(value, int) and abs(value) >= 1 << 63:
            raise ValueError(f"`{name}` must be a number that fits in a tensor, got {value}; write it as a float.")
        if isinstance(value, float) and f.is_floating_point() and torch.finfo(f.dtype).max < abs(value) < float("inf"):
            raise ValueError(f"`{name}` = {value:g} is beyond what {f.dtype} can hold; use inf, or a wider type.")


def box(f: Tensor, low: float, high: float) -> Tensor:
    r"""Nearest point of the box :math:`[l, h]^k`.

    .. math:: \mathrm{Proj}(f)_i = \min(\max(f_i, l), h)

    The derivative is 1 on the box, its edges included, and 0 outside. NaN stays NaN.

    Args:
        f: any shape, floating point.
        low: lower bound :math:`l`; may be ``-inf``.
        high: upper bound :math:`h`, at least ``low``; may be ``inf``.

    Example:
        >>> box(torch.tensor([-0.5, 0.25, 1.5]), 0.0, 1.0)
        tensor([0.0000, 0.2500, 1.0000])
    """
    if not is_scripting():
        _check(f, low=low, high=high)
    if not f.is_floating_point():
        raise TypeError(f"`f` must be a floating point tensor, got {f.dtype}; convert it with `f.float()`.")
    if not low <= high:
        raise ValueError(f"`low` must be at most `high`, got low = {low} and high = {high}.")
    return f.clamp(low, high)


def simplex(f: Tensor, total: float = 1.0) -> Tensor:
    r"""Nearest point of the simplex :math:`\{p \ge 0, \sum_i p_i = c\}`, along the last dimension.

    .. math:: \mathrm{Proj}(f)_i = \max(f_i - \tau, 0), \qquad
        \tau = \frac{1}{|S|} \Big(\sum_{i \in S} f_i - c\Big), \qquad S = \{i : f_i > \tau\}

    The support :math:`S` is found by sorting (Held, Wolfe and Crowder, 1974), in :math:`O(k \log k)`. The derivative is exact
    wherever it exists, :math:`\partial_j \mathrm{Proj}(f)_i = 1\{i, j \in S\} (1\{i = j\} - 1/|S|)`, and does not go back through
    the sort. Half precision is computed in float32. An entry of ``-inf`` gets 0; a row with NaN or ``inf`` is NaN.

    Args:
        f: shape ``(..., k)`` with k >= 1, floating point.
        total: the sum :math:`c > 0`.

    Returns:
        Same shape and dtype as ``f``; non-negative, the last dimension sums to ``total``.

    Example:
        >>> simplex(torch.tensor([[0.5, 0.75, -1.0], [0.0, 0.0, 0.0]]))
        tensor([[0.3750, 0.6250, 0.0000],
                [0.3333, 0.3333, 0.3333]])
    """
    if not is_scripting():
        _check(f, total=total)
    if not f.is_floating_point():
        raise TypeError(f"`f` must be a floating point tensor, got {f.dtype}; convert it with `f.float()`.")
    if f.dim() == 0 or f.shape[-1] == 0:
        raise ValueError(f"`f` must have shape (..., k) with k >= 1, got {f.shape}.")
    if not 0.0 < total < float("inf"):
        raise ValueError(f"`total` must be positive and finite, got {total}.")
    dtype = f.dtype
    if dtype == torch.float16 or dtype == torch.bfloat16:
        f = f.float()
    # Adding a constant to a row does not move its projection: with the maximum at 0 the support lies in (-total, 0].
    f = f - f.detach().amax(-1, keepdim=True)  # (..., k)
    ordered = torch.sort(f.detach(), -1, descending=True)[0]  # (..., k)
    excess = ordered.cumsum(-1) - total  # (..., k)
    rank = torch.arange(1, f.shape[-1] + 1, dtype=f.dtype, device=f.device)  # (k,)
    count = (rank * ordered > excess).sum(-1, keepdim=True).clamp(min=1)  # (..., 1)
    tau = excess.gather(-1, count - 1) / count  # (..., 1)
    support = ~(f.detach() <= tau)  # (..., k); written so that NaN is kept
    zero = torch.zeros_like(f)
    # The same tau, now a function of f on the known support: exact derivative, and a sum free of prefix errors.
    tau = (torch.where(support, f, zero).sum(-1, keepdim=True) - total) / support.sum(-1, keepdim=True)
    return torch.where(support, f - tau, zero).clamp(min=0.0).to(dtype)
