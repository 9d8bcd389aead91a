"""Were these examples used to calibrate? A sketch of fixed size remembers which examples a head has seen."""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchgmc.engine import hashing

#: Keys kept. An audit finds an overlap when about three or more of its examples have a key among the smallest.
SIZE = 1024
#: Scores of an example that make its key; evenly spaced, so the work does not grow with pixels or vocabulary.
COLUMNS = 32
#: From so many numbers per example on, their last bits are left out: a model returns different ones for different batch sizes.
MANY = 16


class OverlapWarning(UserWarning):
    """An audit looks at examples that the head was calibrated on."""


@dataclass(frozen=True)
class Sketch:
    """The smallest keys of a set of examples: the same whatever the batches and their order.

    A key is a hash of an example's scores and labels, uniform on the whole numbers below 2^48. Of two sets of examples, the
    keys below a common limit are a random sample of both, so the overlap is seen without keeping the examples.

    ``keys``: float64, ascending, at most ``SIZE`` of them. ``limit``: keys are complete up to here. ``salt``: 0, or what the
    keys were scrambled with before they went into a file. Without it nobody can test whether a given example was among them.
    ``part``: of scrambled keys, they are complete up to here: of many files only the smallest are kept.

    Example:
        >>> x = torch.rand(100, 5)
        >>> parts = Sketch.of(x[:30]) + Sketch.of(x[30:])
        >>> torch.equal(parts.keys, Sketch.of(x.flip(0)).keys), share(parts, Sketch.of(x[:50]))
        (True, 1.0)
        >>> share(parts.salted(7), Sketch.of(x[:50])), share(Sketch.of(x[:30]).salted(7) + Sketch.of(x[30:]), Sketch.of(x[:50]))
        (1.0, 1.0)
    """

    keys: Tensor
    limit: float = math.inf
    salt: int = 0
    part: float = math.inf

    @classmethod
    def of(cls, *parts: Tensor) -> "Sketch":
        """Sketch of n examples, each described by its row of every part, ``(n, ...)``."""
        return cls.of_keys(example_keys(*parts))

    @classmethod
    def of_keys(cls, keys: Tensor, limit: float = math.inf) -> "Sketch":
        """Sketch of examples with these :func:`example_keys`; of those up to a limit, for one that is complete up to there."""
        return cls._smallest((keys >> 16).bitwise_and_((1 << 48) - 1).to(torch.float64), limit)

    @classmethod
    def _smallest(cls, keys: Tensor, limit: float) -> "Sketch":
        keys = keys if limit == math.inf else keys[keys <= limit]
        if len(keys) > SIZE:
            limit = float(keys.kthvalue(SIZE).values)
            keys = keys[keys <= limit]
        return cls(keys.sort().values[:SIZE], limit)

    def __add__(self, other: "Sketch") -> "Sketch":
        """Sketch of both sets of examples; of two salted ones the salts must be equal."""
        if self.salt != other.salt and self.salt and other.salt:
            raise ValueError("the keys of two sets of calibration data have different salts and cannot be joined.")
        salt = self.salt or other.salt
        first, second = (one if one.salt == salt else one.salted(salt) for one in (self, other))
        both = torch.cat([first.keys, second.keys.to(first.keys.device)])
        limit, part = min(first.limit, second.limit), min(first.part, second.part)
        if not salt:
            return Sketch._smallest(both, limit)
        kept = Sketch._smallest(both, part)  # their order is not that of the plain keys
        return Sketch(kept.keys, limit, salt, kept.limit)

    def salted(self, salt: int) -> "Sketch":
        """The same examples under scrambled keys, for a file; the limit is rounded down, so that it names nobody."""
        limit = self.limit if math.isinf(self.limit) else float(f"{self.limit * 0.999:.2e}")
        return Sketch(_scramble(self.keys[self.keys <= limit], salt), limit, salt)


def example_keys(*parts: Tensor) -> Tensor:
    """A 64-bit key of each example from some of its scores and labels, int64 ``(n,)``; the work does not grow with pixels."""
    some = [columns(part) for part in parts]
    return hashing.row_keys(*some, coarse=sum(part.shape[1] for part in some) >= MANY)


def _scramble(keys: Tensor, salt: int) -> Tensor:
    code = hashing.mix64(keys.to(torch.int64) ^ (salt & ((1 << 62) - 1)))
    return (code >> 16).bitwise_and_((1 << 48) - 1).to(torch.float64).sort().values


def salt_of(text: str) -> int:
    """A number other than 0 that follows from a text: a secret, or a head's configuration."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") | 1


def share(seen: Sketch, audited: Sketch) -> float:
    r"""Estimated share of the audited examples that were seen before; 0 where it could be chance.

    Below the limit up to which both sketches are complete, let p be the share of audited keys that were seen, and r the share
    of seen keys that occur more than once. Among independent examples that coincide by chance (few distinct scores), both
    estimate the same number, so :math:`(p - r) / (1 - r)` estimates the overlap. Nothing is concluded from r > 1/2 or from
    fewer than three matches.

    ``seen``: of the calibration data, plain or salted. ``audited``: plain.
    """
    for name, sketch in (("seen", seen), ("audited", audited)):
        if not isinstance(sketch, Sketch):
            raise TypeError(f"`{name}` must be a Sketch, got {type(sketch).__name__}.")
    limit = min(seen.limit, audited.limit)
    new = audited.keys.to(seen.keys.device)
    new = new[new <= limit]
    old = seen.keys
    if seen.salt:  # of salted keys it is not known which lie below a lower limit: then they are a superset, which does no harm
        new = _scramble(new, seen.salt)
        new = new[new <= seen.part]
    else:
        old = old[old <= limit]
    found = int(torch.isin(new, old).sum())
    if found < 3:
        return 0.0
    twice = torch.unique(old, return_counts=True)[1]
    chance = float(twice[twice > 1].sum()) / len(old)
    part = found / len(new)
    spread = (chance * (1.0 - chance) / len(new)) ** 0.5
    return 0.0 if chance > 0.5 or part <= chance + 0.02 + 4.0 * spread else (part - chance) / (1.0 - chance)


def warning_text(seen: Sketch, audited: Sketch) -> str:
    """The warning about an audit's data; empty if they look new."""
    found = share(seen, audited)
    if not found:
        return ""
    return (
        f"About {100 * found:.0f} % of the audited examples were also used to calibrate this head: the figures show how well "
        "it fits those data, not what holds for new ones. Audit on held-out data."
    )


def columns(part: Tensor) -> Tensor:
    """The scores of each example that make its key, ``(n, k)``: a view."""
    flat = part.detach().flatten(1) if part.dim() > 1 else part.detach()[:, None]
    step = max(1, -(-flat.shape[1] // COLUMNS))
    return flat[:, ::step]
