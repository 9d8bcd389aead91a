"""Numbers in float64, whatever the model around them is cast to, and what happens on a device that lacks it."""

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_Same = TypeVar("_Same", bound="Float64Module")
#: Held while statistics are added: several threads may observe.
KEEPING = threading.RLock()


def lacks(device: torch.device) -> bool:
    """Has a device no float64? The one switch: there heads answer in float32, and what is observed goes to the CPU."""
    return device.type == "mps"


def wide(x: Tensor) -> Tensor:
    """In float64; in float32 on a device that lacks it. Scripts and exports."""
    return x.to(torch.float32 if lacks(x.device) else torch.float64)


def at_hand(x: Any) -> Any:
    """On the CPU, if it is a tensor on a device that lacks float64."""
    return x.cpu() if isinstance(x, Tensor) and lacks(x.device) else x


def nearby(method: Any) -> Any:
    """Decorate a head's method that looks at data: on the CPU where their device, or the head's, lacks float64.

    There a twin does it, and what the twin observed or found comes back.
    """

    @functools.wraps(method)
    def found_nearby(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs, place = tuple(map(at_hand, args)), {name: at_hand(one) for name, one in kwargs.items()}, self.fitted.device
        if not lacks(place):
            return method(self, *args, **kwargs)
        with KEEPING:
            twin = self.twin().to("cpu")
            found = method(twin, *args, **kwargs)
            if method.__name__ in ("observe", "calibrate"):
                self.__dict__.update(twin.to(place).__dict__)
        return self if found is twin else found

    return found_nearby


def sent(x: Tensor, device: torch.device) -> Tensor:
    """A result of the CPU to where the question came from; in float32 where there is no float64."""
    return x.float().to(device) if lacks(device) else x


def rounded(x: Tensor) -> Tensor:
    """In float32; a finite number that is too large for it becomes its largest, which infinity is not."""
    most = torch.finfo(torch.float32).max
    return torch.where(x.isinf(), x, x.clamp(-most, most)).float()


def leads_away(fn: Callable[[Tensor], Tensor]) -> bool:
    """Does a function that moves tensors, of ``Module._apply``, move them to a device that lacks float64?"""
    return lacks(fn(torch.zeros(0)).device)


class Float64Module(nn.Module):
    """Its floating buffers stay in float64 where there is one: `.half()` of a model must not round a threshold or a sum."""

    #: Does it stay where it is when the model moves to a device that lacks float64? What only adds up may.
    stays = False

    def _apply(self: _Same, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Same:
        """Move with the model, in the precision of before; rounded where the device lacks float64."""
        away = leads_away(fn)
        if away and self.stays:
            return self

        def able(t: Tensor) -> Tensor:
            return fn(rounded(t) if t.dtype == torch.float64 and away else t)

        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None and buffer.is_floating_point()}
        super()._apply(able, recurse)  # type: ignore[no-untyped-call]  # torch gives it no types
        for name, old in before.items():
            new = self._buffers[name]
            kept = (
                old if new is None else rounded(old) if lacks(new.device) else at_hand(old).double() if lacks(old.device) else old
            )
            if new is not None and new.dtype != kept.dtype:
                self._buffers[name] = kept.to(new.device)
        return self
