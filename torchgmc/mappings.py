r"""Mappings s(f, x, h, y, D) with their potentials: s is the gradient of E L in f.

A mapping holds its data (h and y) and is evaluated at f. The distribution D is given by the weights of the examples, so
that a functional mapping (:class:`Centered`) takes its expectation over whatever part of the data the solver says:
Algorithm 2 measures a violation on one split with the expectation from another.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Mapping(Protocol):
    """What the solver needs of s: its value, and the potential whose gradient it is."""

    def value(self, f: Tensor, weight: Tensor) -> Tensor:
        """s of every example, shape ``(n, l)``, with expectations under ``weight`` (n,)."""
        ...

    def potential(self, f: Tensor, weight: Tensor) -> Tensor:
        """The potential E L, a scalar, under ``weight`` (n,)."""
        ...


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
        if not isinstance(y, Tensor) or y.layout != torch.strided or y.is_complex() or y.dtype == torch.bool:
            raise TypeError(
                f"`y` must be a dense tensor of numbers, got {getattr(y, 'dtype', type(y).__name__)}; use `y.double()`."
            )
        self.y = y

    def value(self, f: Tensor, weight: Tensor) -> Tensor:
        """s = f - y, shape ``(n, l)``."""
        return f - self.y

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
        self.scores = scores
        self.target = target

    def value(self, f: Tensor, weight: Tensor) -> Tensor:
        """s = 1{score <= f} - target, shape ``(n, l)``."""
        return (self.scores <= f).to(f.dtype) - self.target

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
        target: the miss rate wished for.
    """

    def __init__(self, scores: Tensor, masks: Tensor, target: float) -> None:
        self.scores = scores
        self.share = masks.to(scores.dtype) / masks.sum(1, keepdim=True)
        self.target = target

    def value(self, f: Tensor, weight: Tensor) -> Tensor:
        """s = FN(f) - target, shape ``(n, 1)``; f has shape ``(n, 1)``."""
        return ((self.scores <= f) * self.share).sum(1, keepdim=True) - self.target

    def potential(self, f: Tensor, weight: Tensor) -> Tensor:
        """Weighted mean pinball loss over the positive pixels."""
        loss = ((f - self.scores).clamp_min(0) * self.share).sum(1) - self.target * f[:, 0]
        return mean(loss, weight)


class Centered:
    r"""A functional of f: s = f - E f, L = |f - E f|^2 / 2 (de-biased distributions)."""

    def value(self, f: Tensor, weight: Tensor) -> Tensor:
        """s = f - E f, shape ``(n, l)``, the expectation under ``weight``."""
        return f - mean(f, weight)

    def potential(self, f: Tensor, weight: Tensor) -> Tensor:
        """Half the total variance of f."""
        return 0.5 * mean((f - mean(f, weight)).square().sum(1), weight)
