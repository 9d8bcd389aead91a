"""The training loop and the clock that demonstrations and experiments share."""

import pytest
import torch
from torch import nn

from torchgmc_paper.demo.progress import Bar, progress_bar, train


@pytest.mark.parametrize("cycle", [False, True])
def test_training_is_adamw_step_by_step(cycle):
    x, y = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 2
    torch.manual_seed(0)
    model, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    batches = torch.arange(64).split(16)
    skipped = batches[2]

    def loss(batch):
        return None if batch is skipped else nn.functional.cross_entropy(model(x[batch]), y[batch])

    assert train(model, batches, loss, 0.1, Bar(), "train", cycle=cycle) is model and not model.training
    optimiser = torch.optim.AdamW(plain.parameters(), 0.1)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.1, total_steps=4) if cycle else None
    for batch in batches:
        optimiser.zero_grad()
        if batch is not skipped:
            nn.functional.cross_entropy(plain(x[batch]), y[batch]).backward()
            optimiser.step()
        if rates is not None:
            rates.step()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(got, want)


def test_without_a_terminal_there_is_only_the_clock(capsys):
    with progress_bar(True) as bar, bar.clock("count"):
        assert list(bar.track((k for k in range(3)), "count", 3)) == [0, 1, 2]
    assert bar.seconds["count"] > 0 and capsys.readouterr().err == ""
