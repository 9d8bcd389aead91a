r"""Conformity scores, and the intervals and sets they stand for: score <= q is the same as y being inside.

Three lines from a regressor to intervals that cover every group::

    scores = conformity.absolute_residual(model(x), y)
    head = gmc.QuantileHead(target=0.9, alpha=0.01, groups=names).fit(scores, groups)
    low, high = conformity.interval(model(new), head(new_groups))

and from a classifier to sets::

    head = gmc.QuantileHead(target=0.9, alpha=0.01, groups=names).fit(conformity.lac(probs, labels), groups)
    sets = conformity.lac_set(new_probs, head(new_groups))  # bool (n, C)
"""

import torch
from torch import Tensor

from torchgmc.engine import checks, hashing
from torchgmc.engine.scripting import has_values

#: How far the sum of a row of probabilities may be from 1; half precision needs so much.
ROUNDING = 0.02

__all__ = ["absolute_residual", "aps", "aps_set", "cqr", "cqr_interval", "interval", "lac", "lac_set"]


def absolute_residual(prediction: Tensor, y: Tensor) -> Tensor:
    """|y - prediction|, ``(n,)``; see :func:`interval`.

    Example:
        >>> absolute_residual(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 0.0]))
        tensor([0.5000, 2.0000])
    """
    _check_rows(prediction=prediction, y=y)
    return (y - prediction).abs()


def interval(prediction: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """[prediction - q, prediction + q], the y with absolute residual at most q.

    Example:
        >>> interval(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 1.0]))
        (tensor([0.5000, 1.0000]), tensor([1.5000, 3.0000]))
    """
    threshold = _like(threshold, prediction)
    return prediction - threshold, prediction + threshold


def cqr(low: Tensor, high: Tensor, y: Tensor) -> Tensor:
    """Conformalised quantile regression: how far y lies outside [low, high], negative inside; ``(n,)``.

    Args:
        low, high: estimated lower and upper quantiles, ``(n,)``.
        y: outcomes, ``(n,)``.

    Example:
        >>> cqr(torch.zeros(3), torch.ones(3), torch.tensor([-0.5, 0.25, 2.0]))
        tensor([ 0.5000, -0.2500,  1.0000])
    """
    _check_rows(low=low, high=high, y=y)
    return torch.maximum(low - y, y - high)


def cqr_interval(low: Tensor, high: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """[low - q, high + q]; empty (low end above the high end) where q is below minus half the width.

    Example:
        >>> cqr_interval(torch.zeros(1), torch.ones(1), torch.tensor([0.25]))
        (tensor([-0.2500]), tensor([1.2500]))
    """
    if checks.ordinary("high", high).shape != checks.ordinary("low", low).shape or high.device != low.device:
        raise ValueError(
            f"`high` must match `low`, {tuple(low.shape)} on {low.device}, got {tuple(high.shape)} on {high.device}."
        )
    if checks.numbers("high", high).dtype == torch.bool:
        raise TypeError(f"`high` must hold numbers, got {high.dtype}.")
    _not_nan(high=high)
    threshold = _like(threshold, low)
    return low - threshold, high + threshold


def lac(probs: Tensor, labels: Tensor) -> Tensor:
    """Least ambiguous classifier: 1 - p of the true class, ``(n,)``.

    Args:
        probs: ``(n, C)``, softmax probabilities.
        labels: class ids, ``(n,)``.

    Example:
        >>> lac(torch.tensor([[0.75, 0.25]]), torch.tensor([1]))
        tensor([0.7500])
    """
    return _of_label(1.0 - _probs(probs), labels)


def lac_set(probs: Tensor, threshold: Tensor) -> Tensor:
    """Classes with 1 - p at most q, bool ``(n, C)``; may be empty.

    Example:
        >>> lac_set(torch.tensor([[0.75, 0.25]]), torch.tensor([0.5]))
        tensor([[ True, False]])
    """
    return 1.0 - _probs(probs) <= _rows(threshold, probs)[:, None]


def aps(probs: Tensor, labels: Tensor, randomized: bool = False, version: int = hashing.VERSION) -> Tensor:
    """Adaptive prediction sets: mass of the classes at least as probable as the true one, ``(n,)``.

    Args:
        probs: ``(n, C)``, softmax probabilities.
        labels: class ids, ``(n,)``.
        randomized: leave out a random part of the class's own mass, which evens out the jumps between set sizes. It is
            drawn from the probabilities themselves: the same input always gets the same set.
        version: of that draw. Scores and sets must share it: with a head of an older file give its ``head.noise_version``.

    Example:
        >>> aps(torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([1]))
        tensor([0.7500])
    """
    return _of_label(_cumulative(probs, randomized, version), labels)


def aps_set(probs: Tensor, threshold: Tensor, randomized: bool = False, version: int = hashing.VERSION) -> Tensor:
    """Classes whose APS score is at most q, bool ``(n, C)``: the most probable ones, as far as q reaches; see :func:`aps`.

    Example:
        >>> aps_set(torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([0.85]))
        tensor([[ True,  True, False]])
    """
    return _cumulative(probs, randomized, version) <= _rows(threshold, probs)[:, None]


def _cumulative(probs: Tensor, randomized: bool, version: int) -> Tensor:
    """APS score of every class, (n, C)."""
    probs = _probs(probs)
    if version not in hashing.VERSIONS:
        raise ValueError(f"`version` must be one of {', '.join(map(str, hashing.VERSIONS))}, got {version!r}.")
    ordered, place = probs.sort(dim=1, descending=True, stable=True)
    mass = ordered.cumsum(1)
    if randomized:
        mass = mass - ordered * (hashing.keys(probs, version) / 4194304.0).to(probs.dtype)[:, None]
    return torch.zeros_like(mass).scatter(1, place, mass)


def _probs(probs: Tensor) -> Tensor:
    probs = checks.ordinary("probs", probs)
    if probs.dim() != 2 or not probs.is_floating_point():
        raise ValueError(f"`probs` must be floating point of shape (n, C), got {probs.dtype} {tuple(probs.shape)}.")
    if probs.numel() and has_values(probs):
        low, high = (float(v) for v in probs.detach().aminmax())
        off = float((probs.detach().sum(1, dtype=torch.float32) - 1.0).abs().max())
        if not (low >= 0.0 and high <= 1.001 and off <= ROUNDING):
            found = (
                "NaN" if low != low else f"numbers from {low:.3g} to {high:.3g} and sums that differ from 1 by up to {off:.3g}"
            )
            raise ValueError(
                f"`probs` must hold probabilities, with rows that sum to 1, got {found}; pass logits as "
                "`logits.softmax(1)`, and treat labels that are not mutually exclusive (sigmoid outputs) one at a time."
            )
    return probs


def _rows(threshold: Tensor, probs: Tensor) -> Tensor:
    threshold = checks.numbers("threshold", checks.ordinary("threshold", threshold))
    if threshold.shape not in (probs.shape[:1], (1,)) or threshold.device != probs.device:
        raise ValueError(
            f"`threshold` must have one entry per row of `probs`, ({len(probs)},) on {probs.device}, got "
            f"{tuple(threshold.shape)} on {threshold.device}."
        )
    _not_nan(threshold=threshold)
    return threshold


def _not_nan(**tensors: Tensor) -> None:
    """NaN would become a set or an interval that nobody asked for; infinity is a threshold like others."""
    for name, value in tensors.items():
        if value.is_floating_point() and has_values(value) and bool(value.detach().isnan().any()):
            row = int(value.isnan().nonzero()[0, 0])
            raise ValueError(f"`{name}` must not be NaN, but {name}[{row}] is; look for overflow in the model.")


def _of_label(scores: Tensor, labels: Tensor) -> Tensor:
    labels = checks.numbers("labels", checks.ordinary("labels", labels))
    if labels.device != scores.device:
        raise ValueError(f"`labels` is on {labels.device} but `probs` is on {scores.device}; move them to one device.")
    if labels.shape != scores.shape[:1] or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            f"`labels` must hold class ids of shape ({len(scores)},), got {labels.dtype} of shape {tuple(labels.shape)}."
        )
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= scores.shape[1]):
        raise ValueError(f"`labels` must hold class ids from 0 to {scores.shape[1] - 1}, got {int(labels.max())}.")
    return scores.gather(1, labels.long()[:, None])[:, 0]


def _check_rows(**tensors: Tensor) -> None:
    for name, value in tensors.items():
        checks.numbers(name, checks.ordinary(name, value))
        if value.dtype == torch.bool:
            raise TypeError(f"`{name}` must hold numbers, got {value.dtype}.")
    if len({value.device for value in tensors.values()}) > 1:
        listed = ", ".join(f"`{name}` on {value.device}" for name, value in tensors.items())
        raise ValueError(f"all arguments must be on one device, got {listed}.")
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) > 1:
        listed = ", ".join(f"`{name}` {shape}" for name, shape in shapes.items())
        raise ValueError(
            f"all arguments must have the same shape (n,), got {listed}; pass one number per example (squeeze a "
            f"trailing dimension)."
        )
    _not_nan(**tensors)


def _like(threshold: Tensor, prediction: Tensor) -> Tensor:
    threshold, prediction = checks.ordinary("threshold", threshold), checks.ordinary("prediction", prediction)
    checks.numbers("threshold", threshold)
    checks.numbers("prediction", prediction)
    if prediction.dtype == torch.bool:
        raise TypeError(f"the prediction must hold numbers, got {prediction.dtype}.")
    if threshold.device != prediction.device:
        raise ValueError(f"`threshold` is on {threshold.device} but the prediction is on {prediction.device}; use `.to(...)`.")
    if threshold.shape != prediction.shape:
        raise ValueError(
            f"`threshold` must have one entry per prediction, shape {tuple(prediction.shape)}, got {tuple(threshold.shape)}."
        )
    _not_nan(threshold=threshold, prediction=prediction)
    return threshold.to(prediction.dtype)
