"""Batches of data: one after the other, and each checked once."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from torch import Tensor

from torchgmc.engine.float64 import at_hand

Method = TypeVar("Method", bound=Callable[..., Any])
_CHECKED: ContextVar[dict[Any, Any] | None] = ContextVar("torchgmc_checked", default=None)


@contextmanager
def one_batch() -> Iterator[None]:
    """Inside, methods of a head look at one batch, which only the first of them checks, see :func:`checked_once`."""
    token = _CHECKED.set({})
    try:
        yield
    finally:
        _CHECKED.reset(token)


def checked_once(check: Method) -> Method:
    """Decorate a head's ``check_batch``, whose arguments are those of ``observe``: inside :func:`one_batch` once for each."""

    @functools.wraps(check)
    def remembered(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen, found = _CHECKED.get(), ([at_hand(value) for value in args], {name: at_hand(one) for name, one in kwargs.items()})
        if seen is None:
            return check(self, *found[0], **found[1])
        given = dict(zip(self.arguments, args, strict=False)) | kwargs
        key = id(self), frozenset((name, id(value)) for name, value in given.items() if value is not None)
        if key not in seen:
            seen[key] = check(self, *found[0], **found[1]), self, given  # which are kept, and so their ids
        return seen[key][0]

    return cast(Method, remembered)


def each(batches: Any) -> Iterable[Any]:
    """The batches one by one; a single batch is accepted too."""
    if isinstance(batches, Mapping) or (isinstance(batches, tuple | list) and batches and isinstance(batches[0], Tensor)):
        return [batches]
    if isinstance(batches, Tensor | str) or not isinstance(batches, Iterable):
        raise TypeError(f"`batches` must be an iterable of batches, or a tuple of tensors for one, got {type(batches).__name__}.")
    return batches
