"""Level sets with soft edges."""

import torch
from torch import Tensor


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
