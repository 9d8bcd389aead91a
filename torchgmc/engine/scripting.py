"""Is TorchScript compiling? One place that asks, since torch gives the public name no type."""

from torch.jit import is_scripting  # type: ignore[attr-defined]  # documented, but not in torch.jit.__all__

__all__ = ["is_scripting"]
