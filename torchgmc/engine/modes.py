"""Training and eval mode."""

import contextlib
from collections.abc import Iterator

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
