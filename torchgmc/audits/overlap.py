"""Were these examples used to calibrate? A sketch of fixed size remembers which examples a head has seen."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchgmc.engine import hashing

__all__ = ["OverlapWarning", "Sketch", "share", "warning_text"]

#: Keys kept. An audit finds an overlap when about three or more of its examples have a key among the smallest.
SIZE = 1024
#: Scores of an example that make its key; evenly spaced, so the work does not grow with pixels or vocabulary.
COLUMNS = 32
#: From so many numbers per example on, their last bits are left out: a model gives other ones for other sizes of batches.
MANY = 16


class OverlapWarning(UserWarning):
    """An audit looks at examples that the head was calibrated on."""


@dataclass
class Sketch:
    """The smallest keys of a set of examples: the same whatever the batches and their order.

    A key is a hash of an example's scores and labels, uniform on the whole numbers below 2^48. Of two sets of examples, the
    keys below a common limit are a random sample of both, so the overlap is seen without keeping the examples.

    Attributes:
        keys: shape ``(SIZE,)``, float64, ascending; inf where there are fewer examples.

    Example:
        >>> x = torch.rand(100, 5)
        >>> parts = Sketch.of(x[:30]) + Sketch.of(x[30:])
        >>> torch.equal(parts.keys, Sketch.of(x.flip(0)).keys), share(parts.keys, Sketch.of(x[:50]).keys)
        (True, 1.0)
    """

    keys: Tensor

    @classmethod
    def of(cls, *parts: Tensor) -> "Sketch":
        """Sketch of n examples, each described by its row of every part, ``(n, ...)``."""
        x = torch.cat([_columns(part) for part in parts], 1)
        if x.shape[1] >= MANY:
            mantissa, exponent = torch.frexp(x)
            x = torch.round(mantissa * 1024.0) + 4096.0 * exponent
        return cls(_smallest((hashing.row_keys(x) >> 16).bitwise_and_((1 << 48) - 1).to(torch.float64)))

    def __add__(self, other: "Sketch") -> "Sketch":
        """Sketch of both sets of examples."""
        return Sketch(_smallest(torch.cat([self.keys, other.keys.to(self.keys.device)])))


def nothing(device: torch.device | None = None) -> Tensor:
    """Keys of no examples."""
    return torch.full((SIZE,), torch.inf, dtype=torch.float64, device=device)


def share(seen: Tensor, audited: Tensor) -> float:
    r"""Estimated share of the audited examples that were seen before; 0 where it cannot be told from chance.

    Below the limit up to which both sketches are complete, let p be the share of audited keys that were seen, and r the share
    of seen keys that occur more than once. Among independent examples that coincide by chance (few distinct scores), both
    estimate the same number, so :math:`(p - r) / (1 - r)` estimates the overlap. Nothing is concluded from r > 1/2 or from
    fewer than three matches.

    Args:
        seen, audited: keys of two sketches.
    """
    for name, keys in (("seen", seen), ("audited", audited)):
        if (
            not isinstance(keys, Tensor)
            or keys.shape != (SIZE,)
            or keys.dtype != torch.float64
            or keys.layout != torch.strided
            or keys.device.type == "meta"
        ):
            raise TypeError(f"`{name}` must be the {SIZE} keys of a sketch, got {type(keys).__name__}.")
    audited = audited.to(seen.device)
    limit = torch.minimum(seen[-1], audited[-1])
    seen, audited = (keys[(keys <= limit) & keys.isfinite()] for keys in (seen, audited))
    found = int(torch.isin(audited, seen).sum())
    if found < 3:
        return 0.0
    twice = torch.unique(seen, return_counts=True)[1]
    chance = float(twice[twice > 1].sum()) / len(seen)
    part = found / len(audited)
    spread = (chance * (1.0 - chance) / len(audited)) ** 0.5
    if chance > 0.5 or part <= chance + 0.02 + 4.0 * spread:
        return 0.0
    return (part - chance) / (1.0 - chance)


def warning_text(seen: Tensor, audited: Tensor) -> str:
    """What to say of an audit's data; empty if they look new."""
    found = share(seen, audited)
    if not found:
        return ""
    return (
        f"About {100 * found:.0f} % of the audited examples were also used to calibrate this head: the figures say how well it "
        "fits those data, not what holds for new ones. Audit on held-out data."
    )


def _columns(part: Tensor) -> Tensor:
    flat = part.detach().flatten(1) if part.dim() > 1 else part.detach()[:, None]
    step = max(1, -(-flat.shape[1] // COLUMNS))
    return flat[:, ::step].to(torch.float64)


def _smallest(keys: Tensor) -> Tensor:
    if len(keys) > SIZE:
        return keys.topk(SIZE, largest=False, sorted=True).values
    return torch.cat([keys.sort().values, nothing(keys.device)[len(keys) :]])
