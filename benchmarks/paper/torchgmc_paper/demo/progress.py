"""Long work of the demos and of :mod:`torchgmc_paper`: a progress bar with a clock, and a training loop."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchgmc.engine.extras import require


class Bar:
    """A progress bar (or nothing with the same face) and a clock.

    Attributes:
        seconds: how long each stage took.
    """

    def __init__(self, bars: Any = None) -> None:
        self.bars = bars
        self.seconds: dict[str, float] = {}

    def track(self, items: Iterable[Any], text: str, total: int | None = None) -> Iterable[Any]:
        """The items, one after the other; ``total``: how many, where they have no length."""
        tracked: Iterable[Any] = items if self.bars is None else self.bars.track(items, total, description=text)
        return tracked

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        """Notes how long the block took."""
        start = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - start


@contextmanager
def progress_bar(wanted: bool) -> Iterator[Bar]:
    """A bar on the terminal; none when the output goes elsewhere."""
    if not (wanted and sys.stdout.isatty()):
        yield Bar()
        return
    console = require("rich.console", extra="cli").Console(stderr=True)
    with require("rich.progress", extra="cli").Progress(console=console) as bars:
        yield Bar(bars)


def train(
    model: nn.Module,
    batches: Sequence[Tensor],
    loss: Callable[[Tensor], Tensor | None],
    learning_rate: float,
    bar: Bar,
    text: str,
    *,
    cycle: bool = False,
) -> nn.Module:
    """AdamW, one step per batch (a tensor of rows); returns the same model, in evaluation mode.

    Args:
        loss: of a batch; None where there is nothing to learn.
        cycle: the learning rate warms up to ``learning_rate`` and cools down.
    """
    optimiser = torch.optim.AdamW(model.parameters(), learning_rate)
    steps = max(len(batches), 2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, learning_rate, total_steps=steps) if cycle else None
    model.train()
    for batch in bar.track(batches, text):
        value = loss(batch)
        if value is not None:
            optimiser.zero_grad()
            torch.autograd.backward(value)
            optimiser.step()
        if schedule is not None:
            schedule.step()
    return model.eval()
