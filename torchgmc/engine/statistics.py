"""Statistics that keep something of every example, how two sets of them are joined, and what they must look like in a file."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from torchgmc import distributed
from torchgmc.engine import folds, hashing
from torchgmc.engine.clusters import total

_Same = TypeVar("_Same", bound="PerExample")
#: Examples summed at a time.
ROWS = 1 << 13


class Bits:
    """Membership ``(n, a)`` as bytes of 8 groups each, uint8 ``(n, 1 + a // 8)``; some of its rows are a bool tensor.

    The first bit is 1: everyone.
    """

    dtype = torch.bool

    def __init__(self, codes: Tensor, groups: int) -> None:
        self.codes, self.shape, self.device = codes, (len(codes), groups), codes.device

    @staticmethod
    def of(member: Tensor) -> Tensor:
        """The bytes of a membership, bool ``(n, a)``."""
        n, a = member.shape
        wide = torch.zeros(min(n, ROWS), 1 + a // 8, 8, dtype=torch.uint8, device=member.device)
        wide[:, 0, 0] = 1
        codes = wide.new_zeros(n, wide.shape[1])
        for some, to in zip(torch.split(member, ROWS), torch.split(codes, ROWS), strict=True):
            wide.flatten(1)[: len(some), 1 : 1 + a] = some
            for bit in range(8):
                to |= wide[: len(some), :, bit] << bit
        return codes

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        return self.wide(rows, torch.bool)[:, 1:]

    def wide(self, rows: slice | Tensor, dtype: torch.dtype, more: int = 0) -> Tensor:
        """Everyone, the groups of some rows, and more columns of 0, ``(n, 1 + a + more)``: eight numbers at a time."""
        width, byte = 1 + self.shape[1] + more, torch.arange(256, device=self.device)
        codes = torch.nn.functional.pad(self.codes[rows], (0, max(0, (width + 7) // 8 - self.codes.shape[1])))
        table, cpu = (byte[:, None] >> byte[:8]).bitwise_and_(1).to(dtype), self.device.type == "cpu"  # numpy takes half the time
        found = torch.from_numpy(table.numpy().take(codes.numpy(), 0)) if cpu else table[codes.long()]
        return found.flatten(1)[:, :width]


class PerExample:
    """Base of a dataclass whose fields are tensors with one row per example.

    Among them are ``member`` ``(n, a)``, ``weight`` ``(n,)`` and ``cluster``, int64 ``(n, 1)`` (``(n, 0)`` if there are none).
    """

    #: What :func:`check_layout` expects of each field.
    layout: ClassVar[dict[str, str]] = {"member": "who n a", "weight": "weight n", "cluster": "int n k"}
    member: Tensor
    weight: Tensor
    cluster: Tensor

    def cells(self) -> tuple[Tensor, Tensor]:
        """Membership and weight of each example."""
        return self.member, self.weight

    def __add__(self: _Same, other: _Same) -> _Same:
        """Both sets of examples."""
        self.check_alike(other)
        return self.joined([other])

    def joined(self: _Same, others: list[_Same]) -> _Same:
        """With all of the others, which are known to be alike: none is copied twice."""
        return type(self)(*(torch.cat([a, *(vars(other)[name] for other in others)]) for name, a in vars(self).items()))

    def check_alike(self, other: Any) -> None:
        """Raise unless other examples can be added to these."""
        for name, mine in vars(self).items():
            got, want = tuple(vars(other)[name].shape[1:]), tuple(mine.shape[1:])
            if got != want and name == "cluster":
                raise ValueError("pass `clusters` with every batch or with none.")
            if got != want:
                raise ValueError(f"`{name}` must have rows of shape {want}, as in the batches before, got {got}.")

    def forget(self: _Same, factor: float) -> _Same:
        """The same examples with this part of their weight."""
        return type(self)(**(vars(self) | {"weight": self.weight * factor}))

    def clone(self: _Same) -> _Same:
        """A copy: the batch it was made from may be overwritten."""
        return type(self)(*(tensor.clone() for tensor in vars(self).values()))

    def group_sizes(self) -> Tensor:
        """Examples of each group after weighting, or clusters it occurs in, ``(a,)``."""
        if self.cluster.shape[1]:
            return distributed.total((total(self.member.double(), self.cluster) > 0).double().sum(0))
        powers = torch.stack([self.weight, self.squared()])  # (2, n)
        inside = powers.new_zeros(2, self.member.shape[1])
        for start in range(0, len(self.weight), ROWS):
            weight, m = powers[:, start : start + ROWS], self.member[start : start + ROWS].double()
            inside += torch.stack([weight[0] @ m, weight[1] @ m.square()])
        inside = distributed.total(inside)
        return inside[0].square() / inside[1].clamp_min(1e-300)

    def squared(self) -> Tensor:
        """Squared weight of each example, ``(n,)``."""
        return self.weight.square()

    def pick(self: _Same, rows: Tensor | slice) -> _Same:
        """Some of the examples."""
        return type(self)(*(tensor[rows] for tensor in vars(self).values()))

    def nobody(self: _Same) -> _Same:
        """No examples, of the same shapes: what ranks whose rows stay tell one another."""
        return self.pick(slice(0))

    def sorted(self: _Same) -> _Same:
        """The same examples in an order that does not depend on how they came."""
        return self.pick(self.order())

    def order(self) -> Tensor:
        """Indices of the examples by their content, int64 ``(n,)``."""
        return hashing.row_keys(*self.content()).argsort(stable=True)

    def content(self) -> tuple[Tensor, ...]:
        """What tells examples apart, whatever the unit of their weights."""
        return tuple((vars(self) | {"weight": folds.relative(self.weight)}).values())

    @property
    def rows(self) -> int:
        """Number of examples."""
        return len(self.weight)


def check_layout(found: Any, sizes: Mapping[str, int]) -> None:
    """Raise unless statistics from a file are what ``layout`` of their class says: a type and a shape for each tensor.

    Types: ``bool``; ``who``, bool, or ``part`` where ``sizes`` has ``fractional``; ``bits``, ``who`` or :class:`Bits` of it;
    ``int``, and ``int<N`` below N (a product too, ``c*C``); ``float``, finite; ``part``, from 0 to 1; ``weight``, from 0 to
    1e100; ``count``, the same of any floating type; ``rise``, the same up to rounding; ``log``, which may be -inf; ``start``,
    which may be NaN; ``any``. In a shape a number or a name of ``sizes`` is that size, ``*`` is anything, and any other name is
    the same number wherever it occurs; ``k`` is 0 or 1. A tensor that ``layout`` does not name has n rows.
    """
    known = dict(sizes)
    for field in dataclasses.fields(found):
        name, value = field.name, getattr(found, field.name)
        if not isinstance(value, Tensor if isinstance(field.type, str) else field.type):
            raise ValueError(f"{name!r} is a {type(value).__name__}")
        if dataclasses.is_dataclass(value):
            check_layout(value, sizes)
        if not isinstance(value, Tensor):
            continue
        kind, *axes = type(found).layout.get(name, "any n *").split()
        if kind == "bits" and value.dtype == torch.uint8 and not known.get("fractional"):
            kind, axes[-1] = "byte", str(1 + known["a"] // 8)
        axes = axes[:-1] + ["*"] * (value.dim() - len(axes) + 1) if axes[-1:] == ["*"] else axes
        if len(axes) != value.dim():
            raise ValueError(f"{name!r} must have {len(axes)} dimensions, got {value.dim()}")
        for axis, size in zip(axes, value.shape, strict=True):
            wanted = int(axis) if axis.isdigit() else known.setdefault(axis, size) if axis != "*" else size
            if size != wanted or (axis == "k" and size > 1):
                raise ValueError(f"{name!r} has a dimension of {size} where {wanted} is needed")
        kind = ("part" if known.get("fractional") else "bool") if kind in ("who", "bits") else kind
        kind, _, limit = kind.partition("<")
        why = _wrong(value, kind, limit, known)
        if why:
            raise ValueError(f"{name!r} {why}")


def _wrong(value: Tensor, kind: str, limit: str, sizes: Mapping[str, int]) -> str:
    wanted = {"bool": torch.bool, "int": torch.int64, "any": value.dtype, "byte": torch.uint8}.get(kind, torch.float64)
    if value.is_complex() or (value.dtype != wanted and not (kind == "count" and value.is_floating_point())):
        return f"must be {wanted}, got {value.dtype}"
    if kind == "byte":
        return "" if bool((value[:, 0] & 1).all()) else "must have a first bit of 1"
    if not value.numel() or kind in ("bool", "any") or (kind == "int" and not limit):
        return ""
    low, high = (v.item() for v in (value.nan_to_num(0.0) if kind == "start" else value).aminmax())  # NaN is not within
    ranges = {
        "int": (0, math.prod(sizes.get(one, 0) for one in limit.split("*")) - 1),
        "part": (-1e-6, 1 + 1e-6),
        "log": (float("-inf"), 1e-6),
    }
    ranges |= {"weight": (0.0, 1e100), "count": (0.0, 1e100), "rise": (-1e-6 * max(high, 1.0), 1e100)}
    least, most = ranges.get(kind, (-1e300, 1e300))
    return "" if least <= low and high <= most else f"must lie between {least:g} and {most:g}, got {low:g} to {high:g}"
