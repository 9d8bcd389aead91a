r"""Softness: what a head's decision is when it must have a derivative.

A decision :math:`1\{z > 0\}` has the derivative 0 wherever it has one. Three modes say what ``forward`` does about it:

- ``"hard"``: the decision itself;
- ``"soft"``: :math:`\sigma(z / T)` with the temperature T, which tends to the decision as T -> 0 (except at z = 0);
- ``"straight_through"``: the value of ``"hard"`` and the derivative of ``"soft"``.

Plain tensor functions that TorchScript and ``torch.export`` can read.
"""

import torch
from torch import Tensor

from torchgmc.engine.scripting import is_scripting


def _check_number(temperature: object) -> None:
    if not isinstance(temperature, (int, float, Tensor)):  # a union here would break graphs of torch 2.6
        raise TypeError(f"`temperature` must be a number above 0, got {type(temperature).__name__}.")
    if isinstance(temperature, Tensor) and (temperature.numel() != 1 or temperature.device.type == "meta"):
        raise ValueError(f"`temperature` must be one number, got a tensor of shape {temperature.shape} on {temperature.device}.")
    if isinstance(temperature, int) and temperature >= 1 << 63:
        raise ValueError(f"`temperature` must be a number that fits in a tensor, got {temperature}.")


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

    ``values``, ``level``: shapes that broadcast, of one floating type. ``mode``: one of ``MODES``. ``temperature``: T, in the
    units of the values: within 2.2 T of the level soft values lie between 0.1 and 0.9. Returns: Bool for ``"hard"``, else the
    type of the values.

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
    return soft if mode == "soft" else straight_through(values > level, soft)
