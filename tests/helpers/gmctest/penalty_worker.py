"""One of two ranks that train with the penalty: ``python -m gmctest.penalty_worker RANK FOLDER``."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn

import torchgmc as gmc


class Tiny(nn.Module):
    """A classifier blind to the groups, its own loss, and the penalty."""

    def __init__(self, decay: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.penalty = gmc.GMCPenalty("residual", 3, "squared", decay=decay, conditional=True)

    def forward(self, x: Tensor, y: Tensor, groups: Tensor) -> Tensor:
        return self.penalty(torch.sigmoid(self.layers(x))[:, 0], y, groups)


def batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(3)
    double = {"generator": rng, "dtype": torch.float64}
    return [
        (torch.randn(20, 4, **double), torch.rand(20, **double).round(), torch.rand(20, 3, generator=rng) < 0.3) for _ in range(4)
    ]


def train(model: nn.Module, rows: slice) -> dict[str, Tensor]:
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.5), []
    for batch in batches():
        loss = model(*(t[rows] for t in batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    plain = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return {**plain.state_dict(), "losses": torch.stack(losses)}


def worker(rank: int, folder: Path) -> None:
    """One of two ranks, with 6 and 14 of every 20 examples."""
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    rows = slice(0, 6) if rank == 0 else slice(6, 20)
    for decay in (0.0, 0.9):
        model = nn.parallel.DistributedDataParallel(Tiny(decay))
        torch.save(train(model, rows), folder / f"{rank}-{decay}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    worker(int(sys.argv[1]), Path(sys.argv[2]))
