"""Is TorchScript compiling, or tracing, or has a tensor no values to look at? One place that asks."""

import torch
from torch import Tensor
from torch.jit import is_scripting  # type: ignore[attr-defined]  # documented, but not in torch.jit.__all__

__all__ = ["has_values", "is_scripting", "is_tracing"]


def is_tracing() -> bool:
    """Is a TorchScript trace being recorded?"""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def has_values(value: Tensor) -> bool:
    """Can the values of a tensor be looked at? Not while a graph is recorded, nor under ``vmap``, nor of fake tensors."""
    if torch.compiler.is_compiling() or is_tracing() or value.device.type == "meta":
        return False
    try:
        bool(value.detach()[(slice(1),) * value.dim()].ne(0).any())
    except RuntimeError:  # what torch raises for each of the others
        return False
    return True
