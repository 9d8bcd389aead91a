r"""Mappings s(f, x, h, y, D) with their potentials: s is the gradient of E L in f.

A mapping holds its data (h and y) and is evaluated at f. The distribution D is given by the weights of the examples, so
that a functional mapping (:class:`Centered`) takes its expectation over whatever part of the data the solver says:
Algorithm 2 measures a violation on one split with the expectation from another.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from torchgmc.engine import checks


@runtime_checkable
class Mapping(Protocol):
    """What the solver needs to know about s: its value, and the potential whose gradient it is."""

    def value(self, f: Tensor, weight: Tensor) -> Tensor:
        """s of every example, shape ``(n, l)``, with expectations under ``weight`` (n,)."""

    def potential(self, f: Tensor, weight: Tensor) -> Tensor:
        """The potential E L, a scalar, under ``weight`` (n,)."""


def _dense(name: str, value: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_complex() or value.dtype == torch.bool:
        kind = getattr(value, "dtype", type(value).__name__)
        raise TypeError(f"`{name}` must be a dense tensor of numbers, got {kind}; use `{name}.double()`.")
    return value


def _beside(name: str, value: Tensor, f: Tensor) -> Tensor:
    """The data of a mapping, which must fit the f it is evaluated at."""
    if value.device != f.device:
        raise ValueError(f"`{name}` is on {value.device} but f is on {f.device}; move them to one device.")
    if len(value.shape) != len(f.shape) or value.shape[0] != f.shape[0] or (value.shape[1] != f.shape[1] and f.shape[1] != 1):
        raise ValueError(f"`{name}` must have one row per example, like f of shape {tuple(f.shape)}, got {tuple(value.shape)}.")
    return value


def mean(values: Tensor, weight: Tensor) -> Tensor:
    """Weighted mean over the first dimension."""
    total: Tensor = torch.tensordot(weight, values, 1)
    return total / weight.sum()


class Residual:
    r"""Means: s = f - y, L = |f - y|^2 / 2 (multiaccuracy, multicalibration, outcome indistinguishability).

    Args:
        y: outcomes, shape ``(n, l)``; class ids become one-hot rows before they come here.

    Example:
        >>> mapping = Residual(torch.tensor([[1.0], [0.0]]))
        >>> mapping.value(torch.tensor([[0.5], [0.5]]), torch.ones(2))
        tensor([[-0.5000],
                [ 0.5000]])
    """

    def __init__(self, y: Tensor) -> None:
        self.y = _dense("y", y)

    def value(self, f: Tensor, weight: Tensor) -> Tensor:
        """s = f - y, shape ``(n, l)``."""
        return f - _beside("y", self.y, f)

    def potential(self, f: Tensor, weight: Tensor) -> Tensor:
        """Half the weighted mean squared error."""
        return 0.5 * mean((f - self.y).square().sum(1), weight)


class Pinball:
    r"""Quantiles: s = 1{score <= f} - target, L = (f - score)_+ - target f (multivalid coverage).

    Args:
        scores: conformity scores, shape ``(n, l)``.
        target: the quantile level in (0, 1).
    """

    def __init__(self, scores: Tensor, target: float) -> None:
        self.scores = _dense("scores", scores)
        self.target = checks.fraction("target", target)

    def value(self, f: Tensor, weight: Tensor) -> Tensor:
        """s = 1{score <= f} - target, shape ``(n, l)``."""
        return (_beside("scores", self.scores, f) <= f).to(f.dtype) - self.target

    def potential(self, f: Tensor, weight: Tensor) -> Tensor:
        """Weighted mean pinball loss, up to a term without f."""
        return mean(((f - self.scores).clamp_min(0) - self.target * f).sum(1), weight)


class MissRate:
    r"""False negatives of a threshold: s = FN(f) - target with FN the share of positive pixels with h <= f.

    The plain form, over all pixels (:class:`~torchgmc.ThresholdHead` works on statistics instead).
    L = mean over positives of (f - h)_+ - target f.

    Args:
        scores: shape ``(n, m)``, one row of pixels per image.
        masks: positive pixels, bool, shape ``(n, m)``; at least one per row.
        target: the target miss rate.
    """

    def __init__(self, scores: Tensor, masks: Tensor, target: float) -> None:
        self.scores = checks.scores("scores", scores)
        if self.scores.dim() != 2:
            raise ValueError(f"`scores` must have shape (n, m), one row of pixels per image, got {tuple(scores.shape)}.")
        masks = checks.binary("masks", masks, scores)
        if not bool(masks.any(1).all()):
            raise ValueError("`masks` must have at least one positive pixel in every row; drop the other rows.")
        self.share = masks.to(scores.dtype) / masks.sum(1, keepdim=True)
        self.target = checks.fraction("target", target)

    def value(self, f: Tensor, weight: Tensor) -> Tensor:
        """s = FN(f) - target, shape ``(n, 1)``; f has shape ``(n, 1)``."""
        return ((_beside("scores", self.scores, f) <= f) * self.share).sum(1, keepdim=True) - self.target

    def potential(self, f: Tensor, weight: Tensor) -> Tensor:
        """Weighted mean pinball loss over the positive pixels."""
        return mean(((f - self.scores).clamp_min(0) * self.share).sum(1) - self.target * f[:, 0], weight)


class Centered:
    r"""A functional of f: s = f - E f, L = |f - E f|^2 / 2 (de-biased distributions)."""

    def value(self, f: Tensor, weight: Tensor) -> Tensor:
        """s = f - E f, shape ``(n, l)``, the expectation under ``weight``."""
        return f - mean(f, weight)

    def potential(self, f: Tensor, weight: Tensor) -> Tensor:
        """Half the total variance of f."""
        return 0.5 * mean(self.value(f, weight).square().sum(1), weight)
