"""Argument checks shared by heads, baselines and functions: what is wrong, where, and what to do."""

import math
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


def positive(name: str, value: float, hint: str = "") -> float:
    """A finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"`{name}` must be a finite number above 0, got {value!r}.{hint and ' ' + hint}")
    return float(value)


def softness(value: float | None) -> None:
    """The width of a soft step: None for a hard one."""
    if value is not None:
        positive("softness", value, "It is the width of a soft step; None is a hard step.")


def fraction(name: str, value: float) -> float:
    """A number strictly between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < 1.0:
        raise ValueError(f"`{name}` must lie strictly between 0 and 1, got {value!r}.")
    return float(value)


def interval(name: str, value: Any) -> tuple[float, float]:
    """Two finite numbers, the lower one first."""
    if not isinstance(value, list | tuple) or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in value):
        raise TypeError(f"`{name}` must be two numbers, (low, high), got {value!r:.80}.")
    if len(value) != 2 or not -math.inf < value[0] < value[1] < math.inf:
        raise ValueError(f"`{name}` must be two finite numbers, (low, high) with low < high, got {value!r:.80}.")
    return float(value[0]), float(value[1])


def flag(name: str, value: Any) -> bool:
    """True or False; a text such as "no" would count as True."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` must be True or False, got {value!r:.80}.")
    return bool(value)


def printable(text: str) -> str:
    r"""The text as it may be shown: line breaks, terminal escapes and half characters as ``\n``, ``\x1b`` and ``\ud800``.

    Example:
        >>> printable("north\x1b[2J\n"), printable("Köln, 3\u202f000")
        ('north\\x1b[2J\\n', 'Köln, 3\u202f000')
    """
    if text.isprintable():
        return text
    shown = ("\u200c", "\u200d")  # they join letters and emoji
    return "".join(
        c if c.isprintable() or c in shown or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode() for c in text
    )


def option(name: str, value: Any, known: Sequence[str]) -> str:
    """One of the known words."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, known))}, got {value!r}.")
    return str(value)


def count(name: str, value: int | None, default: int) -> int:
    """A whole number of at least 1, or the default for None."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{name}` must be a whole number of at least 1, got {value!r}.")
    if value > 10**9:
        raise ValueError(f"`{name}` must be a whole number of at most 1e9, got {value!r}.")
    return value


def text(name: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise TypeError(f"`{name}` must be a string, got {type(value).__name__}.")
    return value


def kind(name: str, value: Any, wanted: Any, what: str) -> None:
    """Raise unless the value is of a type, or of one in a union."""
    if not isinstance(value, wanted):
        raise TypeError(f"`{name}` must be {what}, got {type(value).__name__}.")


def path(name: str, value: Any) -> Path:
    """A path in the file system."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str) or not os.fspath(value):
        raise TypeError(f"`{name}` must be a path, a string or a Path, got {value!r}.")
    return Path(value)


def names(groups: Any, called: str = "groups") -> list[str]:
    """Group names from a list of names, a Groups object or nothing (one group, "all"), :func:`printable`."""
    if groups is None:
        return ["all"]
    if isinstance(groups, str):
        raise TypeError(f"`{called}` must be a list of names, got the string {groups!r}; write [{groups!r}].")
    if isinstance(groups, Mapping) or (hasattr(groups, "columns") and not hasattr(groups, "membership")):
        raise TypeError(
            f"`{called}` must be names, or Groups that say how they follow from columns, got {type(groups).__name__}; use "
            "gmc.Groups.from_columns(columns)."
        )
    listed = getattr(groups, "names", groups)
    found = list(listed) if isinstance(listed, Iterable) and not isinstance(groups, Tensor) else []
    if not found or not all(isinstance(name, str) for name in found):
        raise TypeError(
            f"`{called}` must be a non-empty list of names (one per column of the membership), or a Groups object, got "
            f"{type(groups).__name__}; pass the membership itself to `fit`."
        )
    found = [printable(name) for name in found]
    if twice := sorted(name for name, times in Counter(found).items() if times > 1):
        raise ValueError(f"`{called}` has repeated names: {', '.join(map(repr, twice))}; each needs its own name.")
    return found


def tensor_of(value: Any) -> Any:
    """An array, or a column or a frame of numbers of pandas or polars, as a tensor; anything else as it is."""
    if isinstance(value, np.ndarray) or hasattr(value, "to_numpy"):
        array = np.asarray(value if isinstance(value, np.ndarray) else value.to_numpy())
        if array.dtype.kind in "biuf" and array.dtype != np.longdouble:
            return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True))
    return value


def ordinary(name: str, value: Any) -> Tensor:
    """A tensor that is dense and has values; arrays and columns of frames are converted."""
    value = tensor_of(value)
    if not isinstance(value, Tensor):
        raise TypeError(f"`{name}` must be a tensor, got {type(value).__name__}; use torch.as_tensor.")
    if value.layout != torch.strided:
        raise TypeError(f"`{name}` must be a dense tensor, got {value.layout}; use `.to_dense()`.")
    if value.device.type == "meta":
        raise ValueError(f"`{name}` is on the meta device, where tensors have no values; move it to a real one.")
    return value


def numbers(name: str, value: Any) -> Tensor:
    """A tensor of real numbers from a tensor, an array or nested lists; arrays are copied."""
    if not isinstance(value, Tensor):
        try:
            array = np.asarray(value)
        except (TypeError, ValueError):  # ragged lists
            array = np.asarray(None)
        if array.dtype.kind not in "biuf" or array.dtype == np.longdouble:
            raise TypeError(f"`{name}` must be a tensor of numbers, got {type(value).__name__}; use torch.as_tensor.")
        value = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True))
    if ordinary(name, value).is_complex():
        raise TypeError(f"`{name}` must hold real numbers, got {value.dtype}; take `.real` or `.abs()`.")
    return value  # type: ignore[no-any-return]


def scores(name: str, given: Any) -> Tensor:
    """A floating-point tensor with examples first and only finite values."""
    return bounded(name, given)[0]


def bounded(name: str, given: Any, detach: bool = False) -> tuple[Tensor, float, float]:
    """:func:`scores`, the least and the largest of them."""
    value = ordinary(name, given)
    value = value.detach() if detach and value.requires_grad else value
    if not value.is_floating_point():
        raise TypeError(f"`{name}` must be floating point, got {value.dtype}; convert it with `.float()`.")
    if value.dim() == 0:
        raise ValueError(f"`{name}` must have one entry per example, shape (n, ...), got a single number.")
    return value, *finite(name, value)


def finite(name: str, value: Tensor) -> tuple[float, float]:
    """No NaN and no infinity; says where the first one is. Returns the least and the largest number, 0 and 1 of none."""
    if value.numel() == 0:
        return 0.0, 1.0
    low, high = (float(end) for end in ordinary(name, value).detach().aminmax())  # NaN propagates; one pass when all is well
    if math.isfinite(low) and math.isfinite(high):
        return low, high
    place = (~value.isfinite()).nonzero()[0].tolist()
    raise ValueError(
        f"`{name}` must be finite, but {name}{place} is {float(value.detach()[tuple(place)])}; "
        "check the model for overflow or division by zero."
    )


def binary(name: str, given: Any, like: Tensor, other: str = "scores") -> Tensor:
    """A bool tensor of the shape of ``like`` (the argument ``other``), from bool or from numbers that are only 0 and 1."""
    value = ordinary(name, given)
    if value.shape != like.shape:
        raise ValueError(
            f"`{name}` must have the shape of `{other}`, {tuple(like.shape)}, got {tuple(value.shape)}"
            f"{_about_channels(name, value, like)}."
        )
    if value.device != like.device:
        raise ValueError(f"`{name}` is on {value.device} but `{other}` is on {like.device}; move them to one device.")
    if value.dtype == torch.bool:
        return value
    one = value == 1
    if not bool((one | (value == 0)).all()):
        wrong = value[~(one | (value == 0))][0]
        if other != "scores":
            raise ValueError(f"`{name}` must be bool, or hold only 0 and 1, but it holds {wrong.item()}.")
        raise ValueError(
            f"`{name}` must be bool, or hold only 0 and 1, but it holds {wrong.item()}; compare it with the value that is "
            f"positive, e.g. `{name} == {wrong.item():g}`. If it marks pixels to leave out, pass those that are 1 and "
            f"`pixel_weight=({name} != {wrong.item():g})`, or use Adapter(ignore_index={wrong.item():g})."
        )
    return one


def _about_channels(name: str, value: Tensor, like: Tensor) -> str:
    """What to do when shapes differ only in a channel dimension, or in height and width."""
    more = like.dim() - value.dim()
    if more == 1 and like.shape[1] == 1:
        return "; drop the channel with `scores.squeeze(1)`"
    if more == -1 and value.shape[1] == 1:
        return f"; drop the channel with `{name}.squeeze(1)`"
    if (more == 1 or (more == 0 and value.dim() > 1 and value.shape[1] == 1)) and like.shape[1] > 1:
        channel = "1:2" if more == 0 else "1"
        return f"; take the channel of one class, `scores[:, {channel}]`, or make the head with `num_classes`"
    if more == 0 and value.dim() > 2 and value.shape[:-2] == like.shape[:-2]:
        return f"; bring the model's output to the size of `{name}`, e.g. with torch.nn.functional.interpolate"
    return ""


def weights(value: Any, n: int, like: Tensor) -> Tensor:
    """Float64 weights (n,), finite, not negative, not all 0; ones for None."""
    if value is None:
        return torch.ones(n, dtype=torch.float64, device=like.device)
    value = numbers("weight", value).to(like.device, torch.float64)
    if value.shape != (n,):
        raise ValueError(f"`weight` must have shape ({n},), one weight per example, got {tuple(value.shape)}.")
    low, high = finite("weight", value)
    if low < 0 or high <= 0:
        raise ValueError(f"`weight` must be non-negative and not all zero; smallest value: {low}.")
    if not 1e-100 <= high <= 1e100:  # the squares of weights are summed
        raise ValueError(f"the largest `weight` must lie between 1e-100 and 1e100, got {high}; rescale it.")
    return value  # type: ignore[no-any-return]


def listing(items: Iterable[Any], limit: int = 12) -> str:
    """The first of some names, for a message."""
    found = list(items)
    more = f" and {len(found) - limit} more" if len(found) > limit else ""
    return ", ".join(map(str, found[:limit])) + more
