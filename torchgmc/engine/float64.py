"""A module whose buffers keep their precision whatever the model around it is cast to."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

_Same = TypeVar("_Same", bound="Float64Module")


class Float64Module(nn.Module):
    """Its floating buffers stay in float64: `.half()` of a whole model must not round a threshold or a sum."""

    def _apply(self: _Same, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Same:
        """Move with the model, in the precision of before (mps has no float64)."""
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch gives it no types
        for name, old in before.items():
            new = self._buffers[name]
            if new is not None and old.is_floating_point() and new.dtype != old.dtype and new.device.type != "mps":
                self._buffers[name] = old.to(new.device)
        return self
