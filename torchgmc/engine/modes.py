"""Modes that are as they were before, afterwards: training or not, and how many threads torch uses."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


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
def one_thread(wanted: bool = True) -> Iterator[None]:
    """One thread inside, for thousands of short operations on the CPU.

    They gain little from a second thread, and on a busy machine each may wait for it: a fit of 0.1 s then takes seconds.
    """
    before = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if wanted:
            torch.set_num_threads(before)
