"""Modes that are as they were before, afterwards: training or not, and how many threads torch uses."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

#: Bytes of statistics that one thread takes.
FEW = 1 << 24


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode inside; every submodule's own mode afterwards."""
    modes = [(one, one.training) for one in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for one, mode in modes:
            one.training = mode


@contextlib.contextmanager
def calm(found: object = None) -> Iterator[None]:
    """One thread inside, unless these statistics are many or on another device: a fit is thousands of short operations.

    They gain little from a second thread, and on a busy machine each may wait for it: a fit of 0.1 s then takes seconds.
    """
    tensors = [t for t in getattr(found, "__dict__", {}).values() if isinstance(t, Tensor)]
    before = torch.get_num_threads()
    wanted = before > 1 and sum(t.nbytes for t in tensors) <= FEW and all(t.device.type == "cpu" for t in tensors)
    if wanted:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if wanted:
            torch.set_num_threads(before)
