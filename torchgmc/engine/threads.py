"""How many threads torch uses."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
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
