"""A batch that several methods of a head look at is checked once."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

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
        seen = _CHECKED.get()
        if seen is None:
            return check(self, *args, **kwargs)
        given = dict(zip(self.arguments, args, strict=False)) | kwargs
        key = id(self), frozenset((name, id(value)) for name, value in given.items() if value is not None)
        if key not in seen:
            seen[key] = check(self, *args, **kwargs), self, given  # which are kept, and so their ids
        return seen[key][0]

    return cast(Method, remembered)
