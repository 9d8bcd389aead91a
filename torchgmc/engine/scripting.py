"""Is TorchScript compiling, or tracing? One place that asks, since torch gives the public names no type."""

import torch
from torch.jit import is_scripting  # type: ignore[attr-defined]  # documented, but not in torch.jit.__all__

__all__ = ["is_scripting", "is_tracing"]


def is_tracing() -> bool:
    """Is a TorchScript trace being recorded?"""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]
