"""Statistics that keep something of every example, and how two sets of them are joined."""

from typing import TypeVar

import torch
from torch import Tensor

from torchgmc.engine import hashing
from torchgmc.engine.clusters import total

_Same = TypeVar("_Same", bound="PerExample")


class PerExample:
    """Base of a dataclass whose fields are tensors with one row per example.

    Among them are ``member`` ``(n, a)``, ``weight`` ``(n,)`` and ``cluster``, int64 ``(n, 1)`` (``(n, 0)`` if there are none).
    """

    member: Tensor
    weight: Tensor
    cluster: Tensor

    def cells(self) -> tuple[Tensor, Tensor]:
        """Membership and weight of each example."""
        return self.member, self.weight

    def __add__(self: _Same, other: _Same) -> _Same:
        """Both sets of examples."""
        return type(self)(*(torch.cat([a, vars(other)[name]]) for name, a in vars(self).items()))

    def clone(self: _Same) -> _Same:
        """A copy: the batch it was made from may be overwritten."""
        return type(self)(*(tensor.clone() for tensor in vars(self).values()))

    def group_sizes(self) -> Tensor:
        """Examples of each group after weighting, or clusters it occurs in, ``(a,)``."""
        member = self.member.double()
        if self.cluster.shape[1]:
            return (total(member, self.cluster) > 0).double().sum(0)
        inside = self.weight @ member
        return inside.square() / (self.weight.square() @ member).clamp_min(1e-300)

    def sorted(self: _Same) -> _Same:
        """The same examples in an order that does not depend on how they came."""
        order = self.order()
        return type(self)(*(tensor[order] for tensor in vars(self).values()))

    def order(self) -> Tensor:
        """Indices of the examples by their content, int64 ``(n,)``."""
        return hashing.row_keys(*self.content()).argsort(stable=True)

    def content(self) -> tuple[Tensor, ...]:
        """What tells examples apart."""
        return tuple(vars(self).values())

    @property
    def rows(self) -> int:
        """Number of examples."""
        return len(self.weight)
