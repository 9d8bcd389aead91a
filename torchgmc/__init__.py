"""Generalised multi-dimensional multicalibration for PyTorch: promises that hold for every group."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["__version__"]

# Integrations need an extra each, so they are imported when first used.
_INTEGRATIONS = ("lightning", "metrics", "text")

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _INTEGRATIONS:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_INTEGRATIONS})
