r"""Conformity scores, and the intervals and sets they stand for: score <= q is the same as y being inside.

Three lines from a regressor to intervals that cover every group::

    scores = conformity.absolute_residual(model(x), y)
    head = gmc.QuantileHead(target=0.9, alpha=0.01, groups=names).fit(scores, groups)
    low, high = conformity.interval(model(new), head(new_groups))

and from a classifier to sets::

    head = gmc.QuantileHead(target=0.9, alpha=0.01, groups=names).fit(conformity.lac(probs, labels), groups)
    sets = conformity.lac_set(new_probs, head(new_groups))  # bool (n, C)

:class:`torchgmc.Intervals` and :class:`torchgmc.PredictionSets` put both behind a model, as one module.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchgmc.engine import checks, hashing
from torchgmc.engine.scripting import has_values

#: How far the sum of a row of probabilities may be from 1; half precision needs so much.
ROUNDING = 0.02

#: Scores of classes, see :func:`class_scores`.
SCORES = ("lac", "aps", "raps", "saps", "topk")

__all__ = [
    *("absolute_residual", "aps", "aps_set", "class_scores", "covgap", "cqr", "cqr_interval", "interval", "lac"),
    *("lac_set", "sscv"),
]


def absolute_residual(prediction: Tensor, y: Tensor) -> Tensor:
    """|y - prediction|, ``(n,)``; see :func:`interval`.

    Example:
        >>> absolute_residual(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 0.0]))
        tensor([0.5000, 2.0000])
    """
    prediction, y = _check_alike(prediction=prediction, y=y)
    return (y - prediction).abs()


def interval(prediction: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """[prediction - q, prediction + q], the y with absolute residual at most q.

    Example:
        >>> interval(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 1.0]))
        (tensor([0.5000, 1.0000]), tensor([1.5000, 3.0000]))
    """
    threshold, prediction = _check_alike(False, threshold=threshold, prediction=prediction)
    move = threshold.to(prediction.dtype)
    return prediction - move, prediction + move


def cqr(low: Tensor, high: Tensor, y: Tensor) -> Tensor:
    """Conformalised quantile regression: how far y lies outside [low, high], negative inside; ``(n,)``.

    Args:
        low, high: estimated lower and upper quantiles, ``(n,)``.
        y: outcomes, ``(n,)``.

    Example:
        >>> cqr(torch.zeros(3), torch.ones(3), torch.tensor([-0.5, 0.25, 2.0]))
        tensor([ 0.5000, -0.2500,  1.0000])
    """
    low, high, y = _check_alike(low=low, high=high, y=y)
    return torch.maximum(low - y, y - high)


def cqr_interval(low: Tensor, high: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """[low - q, high + q]; empty (low end above the high end) where q is below minus half the width.

    Example:
        >>> cqr_interval(torch.zeros(1), torch.ones(1), torch.tensor([0.25]))
        (tensor([-0.2500]), tensor([1.2500]))
    """
    threshold, low, high = _check_alike(False, threshold=threshold, low=low, high=high)
    move = threshold.to(low.dtype)
    return low - move, high + move


def lac(probs: Tensor, labels: Tensor) -> Tensor:
    """Least ambiguous classifier: 1 - p of the true class, ``(n,)``.

    Args:
        probs: ``(n, C)``, softmax probabilities.
        labels: class ids, ``(n,)``.

    Example:
        >>> lac(torch.tensor([[0.75, 0.25]]), torch.tensor([1]))
        tensor([0.7500])
    """
    return of_label(1.0 - check_probs(probs), labels)


def lac_set(probs: Tensor, threshold: Tensor) -> Tensor:
    """Classes with 1 - p at most q, bool ``(n, C)``; may be empty.

    Example:
        >>> lac_set(torch.tensor([[0.75, 0.25]]), torch.tensor([0.5]))
        tensor([[ True, False]])
    """
    return 1.0 - check_probs(probs) <= _rows(threshold, probs)[:, None]


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
    return of_label(class_scores(probs, "aps", randomized, version=version), labels)


def aps_set(probs: Tensor, threshold: Tensor, randomized: bool = False, version: int = hashing.VERSION) -> Tensor:
    """Classes whose APS score is at most q, bool ``(n, C)``: the most probable ones, as far as q reaches; see :func:`aps`.

    Example:
        >>> aps_set(torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([0.85]))
        tensor([[ True,  True, False]])
    """
    return class_scores(probs, "aps", randomized, version=version) <= _rows(threshold, probs)[:, None]


def class_scores(
    probs: Tensor, score: str = "aps", randomized: bool = False, penalty: float = 0.1, free: int = 1, version: int = hashing.VERSION
) -> Tensor:
    """Score of every class, ``(n, C)``; the set are the classes with a score of at most q (:class:`torchgmc.PredictionSets`).

    With r the rank of a class (1 for the most probable):

    - ``"lac"``: 1 - p. The smallest sets on average; hard examples get few classes, or none.
    - ``"aps"``: the mass of the classes up to this one.
    - ``"raps"``: the same + ``penalty`` for each rank beyond ``free``. Fewer large sets.
    - ``"saps"``: the largest p + ``penalty`` for each rank beyond the first: only the best p counts, the others by their order.
    - ``"topk"``: r: as many classes for everybody.

    Args:
        probs: ``(n, C)``, softmax probabilities.
        score: see above.
        randomized: subtract a random part of the class's own step, drawn from the probabilities (:func:`aps`); not for
            ``"lac"``.
        penalty, free: of ``"raps"`` and ``"saps"``.
        version: of the draw.

    Example:
        >>> class_scores(torch.tensor([[0.5, 0.25, 0.25]]), "topk")
        tensor([[1., 2., 3.]])
        >>> class_scores(torch.tensor([[0.25, 0.5, 0.25]]), "saps", penalty=0.1)
        tensor([[0.6000, 0.5000, 0.7000]])
    """
    check_score(score, randomized, penalty, free)
    if version not in hashing.VERSIONS:
        raise ValueError(f"`version` must be one of {', '.join(map(str, hashing.VERSIONS))}, got {version!r}.")
    return unchecked_scores(check_probs(probs), score, randomized, penalty, free, version)


def check_score(score: str, randomized: bool, penalty: float, free: int) -> None:
    """The options of :func:`class_scores`."""
    checks.option("score", score, SCORES)
    checks.flag("randomized", randomized)
    checks.positive("penalty", penalty, "It is what each further class adds to the score.")
    checks.count("free", free, 1)


def unchecked_scores(probs: Tensor, score: str, randomized: bool, penalty: float, free: int, version: int) -> Tensor:
    """:func:`class_scores` without a look at the values."""
    if score == "lac":
        return 1.0 - probs
    if torch.compiler.is_compiling():  # ONNX has no stable sort, but its sort is one
        ordered, place = probs.sort(dim=1, descending=True)
    else:
        ordered, place = probs.sort(dim=1, descending=True, stable=True)
    rank = torch.ones_like(probs).cumsum(1)
    step = ordered
    found = ordered.cumsum(1)
    if score == "raps":
        found = found + penalty * (rank - free).clamp_min(0.0)
    elif score == "saps":
        found = ordered[:, :1] + penalty * (rank - 1.0)
        step = torch.where(rank == 1.0, ordered, torch.full_like(rank, penalty))
    elif score == "topk":
        found, step = rank, torch.ones_like(rank)
    if randomized:
        found = found - step * (hashing.keys(probs, version) / 4194304.0).to(probs.dtype)[:, None]
    return torch.zeros_like(found).scatter(1, place, found)


def covgap(covered: Tensor, labels: Tensor, target: float) -> float:
    """Mean over the classes that occur of |coverage - target|.

    Args:
        covered: is the truth in the set? ``(n,)``, bool or 0 and 1.
        labels: class ids, ``(n,)``.
        target: coverage asked for.

    Example:
        >>> covgap(torch.tensor([True, True, True, False]), torch.tensor([0, 0, 1, 1]), 0.9)
        0.25
    """
    return float(_gaps(covered, checks.numbers("labels", labels), "labels", target).mean())


def sscv(covered: Tensor, size: Tensor, target: float, edges: Sequence[float] = (1, 3, 10, 100)) -> float:
    """Size-stratified coverage violation: the largest |coverage - target| among sets of similar size.

    Args:
        covered: is the truth in the set, or in the interval? ``(n,)``.
        size: number of classes, or width, ``(n,)``.
        target: coverage asked for.
        edges: largest size of each stratum but the last.

    Example:
        >>> round(sscv(torch.tensor([True, False, True]), torch.tensor([1.0, 1.0, 5.0]), 0.9), 4)
        0.4
    """
    size = checks.numbers("size", size)
    if size.dim() != 1 or bool(size.isnan().any()):
        raise ValueError(f"`size` must have shape (n,), without NaN, got {tuple(size.shape)}.")
    place = torch.bucketize(size.double(), torch.tensor(edges, dtype=torch.float64, device=size.device))
    return float(_gaps(covered, place, "size", target).max())


def _gaps(covered: Tensor, place: Tensor, name: str, target: float) -> Tensor:
    """|coverage - target| of each stratum that occurs."""
    hit = checks.numbers("covered", covered)
    wrong = place.is_floating_point() or place.dtype == torch.bool or (place.numel() and int(place.min()) < 0)
    if wrong or place.dim() != 1 or hit.shape != place.shape or hit.device != place.device or not len(hit):
        raise ValueError(
            f"`covered` and `{name}` must have the same shape (n,) on one device, with n > 0, and labels be class ids; got "
            f"{tuple(hit.shape)} and {place.dtype} {tuple(place.shape)}."
        )
    if not bool(((hit == 0) | (hit == 1)).all()):
        raise ValueError("`covered` must be bool, or hold only 0 and 1.")
    values, group = torch.unique(place, return_inverse=True)  # of any size
    count = torch.bincount(group, minlength=len(values))
    return (torch.bincount(group, hit.double(), minlength=len(values)) / count - checks.fraction("target", target)).abs()


def check_probs(probs: Tensor) -> Tensor:
    probs = checks.ordinary("probs", probs)
    if probs.dim() != 2 or not probs.is_floating_point():
        raise ValueError(f"`probs` must be floating point of shape (n, C), got {probs.dtype} {tuple(probs.shape)}.")
    if probs.numel() and has_values(probs):
        low, high = (float(v) for v in probs.detach().aminmax())
        off = float((probs.detach().sum(1, dtype=torch.float32) - 1.0).abs().max())
        if not (low >= 0.0 and high <= 1.001 and off <= ROUNDING):
            found = "NaN" if low != low else f"numbers from {low:.3g} to {high:.3g} and sums that differ from 1 by up to {off:.3g}"
            advice = "pass logits as `logits.softmax(1)`, or attach with Adapter(activation='softmax')."
            if low >= 0.0 and high <= 1.001:
                advice = "labels of which several may hold (sigmoid outputs) have no sets: calibrate them with "
                advice += "ProbabilityHead(multilabel=True)."
            raise ValueError(f"`probs` must hold probabilities, with rows that sum to 1, got {found}; {advice}")
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


def of_label(scores: Tensor, labels: Tensor) -> Tensor:
    """The entry of each row that belongs to its label, ``(n,)``."""
    labels = checks.numbers("labels", checks.ordinary("labels", labels))
    if labels.device != scores.device:
        raise ValueError(f"`labels` is on {labels.device} but `probs` is on {scores.device}; move them to one device.")
    if labels.shape != scores.shape[:1] or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"`labels` must hold class ids of shape ({len(scores)},), got {labels.dtype} {tuple(labels.shape)}.")
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= scores.shape[1]):
        raise ValueError(f"`labels` must hold class ids from 0 to {scores.shape[1] - 1}, got {int(labels.max())}.")
    return scores.gather(1, labels.long()[:, None])[:, 0]


def _check_alike(rows: bool = True, **given: Tensor) -> Sequence[Tensor]:
    """Numbers of one shape, ``(n,)`` if they must be ``rows``, on one device and without NaN."""
    tensors = {name: checks.numbers(name, checks.ordinary(name, value)) for name, value in given.items()}
    for name, value in tensors.items():
        if value.dtype == torch.bool:
            raise TypeError(f"`{name}` must hold numbers, got {value.dtype}.")
    if len({value.device for value in tensors.values()}) > 1:
        listed = ", ".join(f"`{name}` on {value.device}" for name, value in tensors.items())
        raise ValueError(f"all arguments must be on one device, got {listed}.")
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    if len(set(shapes.values())) > 1 or (rows and any(len(shape) != 1 for shape in shapes.values())):
        listed = ", ".join(f"`{name}` {shape}" for name, shape in shapes.items())
        raise ValueError(
            f"all arguments must have the same shape{' (n,)' if rows else ''}, got {listed}; pass one number per example "
            "(squeeze a trailing dimension)."
        )
    _not_nan(**tensors)
    return list(tensors.values())
