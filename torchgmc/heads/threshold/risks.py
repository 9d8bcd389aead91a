"""Risks of a threshold, and the lattice of thresholds on which they are known exactly."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

#: Pixels turned into lattice indices at a time: small enough to stay in a core's cache.
CHUNK = 1 << 19


@dataclass(frozen=True)
class Lattice:
    """The thresholds ``origin + k unit`` for k = first, ..., first + size - 1.

    The solver moves in whole units from ``origin`` = f0, so that each threshold it visits is evaluated exactly.
    """

    origin: float
    unit: float
    first: int
    size: int
    #: No score lies beyond it.
    whole: bool = False

    @classmethod
    @functools.lru_cache(maxsize=64)  # a fit asks for the same one again and again
    def over(cls, low: float, high: float, origin: float, unit: float, whole: bool = False) -> "Lattice":
        """Cover [low, high] with one point strictly below ``low``, where nothing is missed."""
        first = math.floor((low - origin) / unit) - 1
        last = math.ceil((high - origin) / unit)
        return cls(origin, unit, first, last - first + 1, whole)

    def points(self, device: torch.device | str | None = None) -> Tensor:
        """All thresholds, float64, shape ``(size,)``."""
        k = torch.arange(self.first, self.first + self.size, dtype=torch.float64, device=device)
        return self.origin + k * self.unit

    def index(self, scores: Tensor, start: Tensor | int = 0) -> Tensor:
        """Index of the lowest threshold at or above each score (``size`` if none), int32, same shape.

        h <= points[index] and h > points[index - 1], compared in the type of the scores, as the head itself does. ``start``: what
        to add, int32.
        """
        if scores.dtype in (torch.float16, torch.bfloat16):
            exact, values = False, scores.float()
        else:
            exact, values = self._is_dyadic(scores.dtype), scores
        if exact:  # scaling by a power of two is exact, so is the ceiling
            first = self.first + round(self.origin / self.unit)
            places = values.mul(1.0 / self.unit).ceil_()
            places = places if self.whole else places.clamp_(first, first + self.size)
            room = places.view(torch.int32) if places.element_size() == 4 else torch.empty_like(places, dtype=torch.int32)
            return room.copy_(places).add_(start - first)
        index = values.sub(self.origin).div_(self.unit).ceil_().sub_(self.first).clamp_(0, self.size).to(torch.int32)
        points = self.points(scores.device).to(scores.dtype)
        bounds = torch.cat([points.new_full((1,), -math.inf), points, points.new_full((1,), math.inf)])
        # Rounding (of the quotient, and of the points to the scores' type) can be off by a place or more: for float16
        # several points coincide, hence the search.
        wrong = (scores > bounds[index + 1]) | (scores <= bounds[index])
        index[wrong] = torch.searchsorted(points, scores[wrong], side="left").to(torch.int32)
        return index.add_(start)

    def _is_dyadic(self, dtype: torch.dtype) -> bool:
        """Are all points, and scaled scores near them, exact in this type?"""
        mantissa, _ = math.frexp(self.unit)
        whole = self.origin / self.unit
        largest = max(abs(self.first + whole), abs(self.first + whole + self.size))
        return mantissa == 0.5 and whole == round(whole) and largest < 1.0 / torch.finfo(dtype).eps


@dataclass(frozen=True)
class ShareRisk:
    """Share of an image's relevant pixels on the wrong side of the threshold.

    ``fnr``: positive pixels with h <= lambda; it rises with lambda. ``fpr``: negative pixels with h > lambda; it falls.
    """

    name: str
    of_positives: bool
    increasing: bool

    def relevant(self, masks: Tensor) -> Tensor:
        """The pixels that count."""
        return masks if self.of_positives else ~masks

    def values(self, scores: Tensor, masks: Tensor, thresholds: Tensor, pixels: Tensor | None = None) -> Tensor:
        """Risk of each image: scores and masks ``(n, C, m)``, thresholds ``(n, C)`` -> ``(n, C)``; NaN if none counts.

        ``pixels``: weight of each pixel, ``(n, C, m)``; None for 1.
        """
        chosen = self.relevant(masks)
        wrong = chosen & ((scores <= thresholds[..., None].to(scores.dtype)) == self.increasing)
        if pixels is not None:
            return (wrong * pixels).sum(-1) / (chosen * pixels).sum(-1)
        return wrong.sum(-1).double() / chosen.sum(-1).double()

    def shares(self) -> "ShareRisk":
        """This risk, where a share of pixels is needed."""
        return self

    def soft(self, scores: Tensor, masks: Tensor, thresholds: Tensor, temperature: float, pixels: Tensor | None = None) -> Tensor:
        r"""The risk with soft sides, differentiable in the scores: :math:`\sigma((\lambda - h_i) / T)` for 1{h_i <= lambda}.

        Shapes as in :meth:`values`; float32 or float64, as the scores. NaN where no pixel counts.

        Example:
            >>> scores, masks = torch.tensor([[[0.9, 0.4, 0.1]]]), torch.tensor([[[True, True, False]]])
            >>> RISKS["fnr"].soft(scores, masks, torch.tensor([[0.5]]), 0.01)
            tensor([[0.5000]])
        """
        scores = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
        chosen = self.relevant(masks)
        gap = (thresholds.to(scores.dtype)[..., None] - scores) / temperature
        wrong = torch.sigmoid(gap if self.increasing else -gap)
        part = chosen.to(wrong.dtype) if pixels is None else chosen * pixels.to(wrong.dtype)
        count = part.sum(-1)
        return torch.where(count > 0, (part * wrong).sum(-1) / torch.where(count > 0, count, 1.0), torch.nan)

    def curves(self, scores: Tensor, masks: Tensor, lattice: Lattice, pixels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Numbers of relevant scores per image: at each threshold ``(n, C, size)``, and (weighted) of all ``(n, C)``."""
        n, num_classes, m = scores.shape
        rows, bins = n * num_classes, lattice.size + 1  # one bin above the lattice
        start = torch.arange(0, 2 * rows * bins, 2 * bins, dtype=torch.int32, device=scores.device)[:, None]
        index = lattice.index(scores.reshape(rows, m), start)
        index.add_(self.relevant(masks).reshape(rows, m), alpha=bins)  # those that do not count by themselves: no branch
        weight = None if pixels is None else pixels.flatten()
        counts = torch.bincount(index.flatten(), weight, 2 * rows * bins).view(n, num_classes, 2, bins)[:, :, 1]
        return counts[..., :-1], counts.sum(-1)

    def pixels(self, masks: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Flat index of each relevant pixel, how many each image and class has, each one's share, and their weight ``(n, C)``."""
        chosen = self.relevant(masks) if weights is None else self.relevant(masks) & (weights > 0)
        number = chosen.sum(-1)
        flat = chosen.flatten()  # numpy finds them in a tenth of the time
        found = torch.from_numpy(np.flatnonzero(flat.numpy())) if flat.device.type == "cpu" else flat.nonzero()[:, 0]
        total = number if weights is None else (chosen * weights).sum(-1)
        share = repeat(total.double().reciprocal().flatten(), number.flatten())
        return found, number.flatten(), share if weights is None else share * weights.flatten()[found], total


def repeat(values: Tensor, times: Tensor) -> Tensor:
    """Each value ``(n,)`` so many times ``(n,)``."""
    if values.device.type == "cpu":  # numpy takes a quarter of the time
        return torch.from_numpy(np.repeat(values.numpy(), times.numpy()))
    return values.repeat_interleave(times)


@dataclass(frozen=True)
class MonotoneRisk:
    """A custom risk in [0, 1], monotone in the threshold.

    Args:
        function: ``(scores (n, C, ...), masks (n, C, ...), thresholds (n, C)) -> risk (n, C)``; NaN excludes an image.
        increasing: the risk rises with the threshold.
        name: for reports and files.
        weighted: the function takes the weight of each pixel ``(n, C, ...)`` as a fourth argument (``pixel_weight`` of
            :meth:`torchgmc.ThresholdHead.observe`; ones where none is given): 0 for pixels to leave out.

    Example:
        >>> def missed_pixels(scores, masks, thresholds):
        ...     missed = masks & (scores <= thresholds[:, :, None, None])
        ...     return (missed.sum((2, 3)) / 100).clamp(max=1)
        >>> MonotoneRisk(missed_pixels).name
        'missed_pixels'
    """

    function: Callable[..., Tensor]
    increasing: bool = True
    name: str = ""
    weighted: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"`function` must be a function of scores, masks, thresholds, got {type(self.function).__name__}.")
        if not self.name:
            object.__setattr__(self, "name", getattr(self.function, "__name__", "custom"))

    def values(self, scores: Tensor, masks: Tensor, thresholds: Tensor, pixels: Tensor | None = None) -> Tensor:
        """Risk of each image, float64, shape ``(n, C)``; checked to lie in [0, 1]."""
        more = () if not self.weighted else (torch.ones_like(scores) if pixels is None else pixels.to(scores.dtype),)
        risk = self.function(scores, masks, thresholds.to(scores.dtype), *more).double()
        if risk.shape != thresholds.shape:
            raise ValueError(f"risk {self.name!r} must return shape {tuple(thresholds.shape)}, got {tuple(risk.shape)}.")
        if bool(((risk < 0) | (risk > 1)).any()):
            raise ValueError(f"risk {self.name!r} must lie in [0, 1], got {risk.min():.4g} to {risk.max():.4g}; scale it.")
        return risk

    def shares(self) -> "ShareRisk":
        """Not a share of pixels."""
        raise ValueError(
            f"the custom risk {self.name!r} is only defined at hard thresholds and has no gradient; 'fnr' and 'fpr' have a "
            "smooth form. Train with one of them, and calibrate with the custom risk afterwards."
        )

    def curves(self, scores: Tensor, masks: Tensor, lattice: Lattice, pixels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Increments of (1 -) risk along the lattice ``(n, C, size)``, and 1 for the images it is defined on."""
        shape = scores.shape[:2]
        points = [self.values(scores, masks, p.expand(shape), pixels) for p in lattice.points(scores.device)]
        risk = torch.stack(points, -1)  # (n, C, size)
        defined = ~risk.isnan().any(-1)
        rising = risk if self.increasing else 1.0 - risk
        steps = rising.diff(dim=-1, prepend=rising.new_zeros(1).expand(*shape, 1))
        falls = (steps[..., 1:] < -1e-9) & defined[..., None]
        if bool(falls.any()):
            i, c, k = (int(v) for v in falls.nonzero()[0])
            raise ValueError(
                f"risk {self.name!r} must be {'increasing' if self.increasing else 'decreasing'} in the threshold, but for "
                f"example {i}, class {c} it goes from {risk[i, c, k]:.4g} to {risk[i, c, k + 1]:.4g} between thresholds "
                f"{float(lattice.points()[k]):.4g} and {float(lattice.points()[k + 1]):.4g}."
            )
        return steps.nan_to_num(0.0), defined.long()


RISKS = {"fnr": ShareRisk("fnr", of_positives=True, increasing=True), "fpr": ShareRisk("fpr", of_positives=False, increasing=False)}
Risk = ShareRisk | MonotoneRisk
