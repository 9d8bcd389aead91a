"""Many fitted states of one head at once: one per alpha from the same statistics, and one vectorised forward for all of them.

Heads and :func:`torchgmc.violations` are plain functions of tensors, so they work with ``torch.func``:
``vmap(lambda w: gmc.violations(who, s, weight=w))(weights)`` measures every bootstrap resample, ``grad`` and ``jacrev`` go
through a soft ``forward``, and ``functional_call`` runs a head with your own buffers.
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchgmc.engine import checks
from torchgmc.heads.base import Head

__all__ = ["apply", "stack", "sweep"]

H = TypeVar("H", bound=Head)


def sweep(head: H, alphas: Sequence[float], **options: Any) -> list[H]:
    """Calibrate once per alpha on the statistics the head has observed; no data is looked at again.

    Every fit goes to its alpha on the sample (``noise_floor=False``): under the noise rule alpha would make no difference.

    Args:
        head: a head after ``observe`` (or ``fit``); it does not change.
        alphas: the alphas.
        options: of ``calibrate``.

    Example:
        >>> probs, groups = torch.rand(500), torch.rand(500, 2) < 0.5
        >>> y = torch.rand(500) < probs * (0.4 + 0.6 * groups[:, 0])
        >>> head = gmc.ProbabilityHead(0.01, ["a", "b"], bins=None).fit(probs, y, groups)
        >>> heads = gmc.func.sweep(head, [0.1, 0.05, 0.01])
        >>> gmc.func.apply(heads, probs, groups).shape
        torch.Size([3, 500])
    """
    if not isinstance(alphas, Sequence | Tensor) or isinstance(alphas, str) or (isinstance(alphas, Tensor) and not alphas.dim()):
        raise TypeError(f"`alphas` must be a list of numbers, got {type(alphas).__name__}.")
    if len(alphas) == 0:
        raise ValueError("`alphas` is empty; pass at least one.")
    given = alphas.tolist() if isinstance(alphas, Tensor) else alphas
    checked = [checks.positive("alphas", alpha, "Each is the largest violation allowed.") for alpha in given]
    made = [head.twin() for _ in checked]
    for one, alpha in zip(made, checked, strict=True):
        one.alpha, one.noise_floor = alpha, False
        one.calibrate(**options)
    return made


def stack(heads: Sequence[Head]) -> dict[str, Tensor]:
    """The fitted buffers of all heads with a first dimension for the heads, for ``torch.func.vmap``.

    Logs of different lengths are padded with steps of 0, which change nothing (a projection is applied once more).

    Args:
        heads: fitted heads of the same class that differ only in what was fitted: other alphas, targets or data.
    """
    if not isinstance(heads, Sequence) or not all(isinstance(head, Head) for head in heads):
        raise TypeError(f"`heads` must be a list of heads, got {type(heads).__name__}.")
    if not heads:
        raise ValueError("`heads` is empty; pass at least one.")
    first = heads[0]
    for i, head in enumerate(heads):
        if type(head) is not type(first):
            raise TypeError(f"`heads` must have one class, but heads[{i}] is a {type(head).__name__}, not {type(first).__name__}.")
        if not head.is_fitted:
            raise RuntimeError(f"heads[{i}] is not fitted; call `fit`, or `observe` and `calibrate`, or load its state.")
        if other := [name for name in first.differences(head) if name not in head.fit_only]:
            raise ValueError(f"`heads` must have the same forward, but heads[{i}] was made with a different `{other[0]}`.")
    buffers = [dict(head.named_buffers()) for head in heads]
    listed = {name: [one[name] for one in buffers] for name in buffers[0]}
    return {name: pad_sequence(of, batch_first=True) if of[0].dim() else torch.stack(of) for name, of in listed.items()}


def apply(heads: Sequence[Head], *inputs: Any, chunk_size: int | None = None, **options: Any) -> Tensor:
    """``torch.stack([head(*inputs, **options) for head in heads])`` in one pass: what does not depend on the fit is done once.

    Args:
        heads: as for :func:`stack`.
        inputs, options: of ``forward``.
        chunk_size: heads at a time; all of them by default.
    """
    state = stack(heads)
    checks.count("chunk_size", chunk_size, 1)
    forward = functools.partial(torch.func.functional_call, heads[0], args=inputs, kwargs=options)
    return torch.func.vmap(forward, chunk_size=chunk_size)(state)  # type: ignore[no-any-return]
