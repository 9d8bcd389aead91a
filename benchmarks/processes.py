"""Two processes against one: the same state, and what they exchange (gloo, loopback).

python -m benchmarks.processes            # up to 200,000 examples
python -m benchmarks.processes --small    # up to 2,000, where a key of each example is sent too: bytes still grow
"""

import tempfile
from typing import Any

import torch
from torch import Tensor, distributed as dist, multiprocessing as mp

import torchgmc as gmc
from benchmarks.rows import Row, print_table
from torchgmc.distributed import exchanged_bytes

GROUPS = ["a", "b", "c"]
HEADS = ("ThresholdHead, statistics per cell", "DistributionHead, statistics per example")


def data(name: str, n: int) -> tuple[Tensor, ...]:
    """Examples of a head, the same in every process."""
    rng = torch.Generator().manual_seed(n)
    member = torch.rand(n, len(GROUPS), generator=rng) < 0.4
    member[: len(GROUPS)] |= torch.eye(len(GROUPS), dtype=torch.bool)
    if name == HEADS[0]:
        masks = torch.rand(n, 16, generator=rng) < 0.5
        masks[:, 0] = True
        return torch.rand(n, 16, generator=rng) * (1 - 0.3 * member[:, :1]), masks, member
    return 2 * torch.randn(n, 8, generator=rng) + member[:, :1] * torch.eye(8)[1], member


def fit(name: str, parts: tuple[Tensor, ...]) -> gmc.Head:
    """A fitted head; over all ranks where there are several."""
    if name == HEADS[0]:
        return gmc.ThresholdHead(0.1, 0.01, GROUPS).fit(*parts)
    return gmc.DistributionHead({"list": [1, 2]}, 0.002, GROUPS).fit(*parts)


def rank(number: int, store: str, sizes: list[int], found: Any) -> None:
    """One of two ranks, with every second example: difference from the fit of one process, and bytes contributed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=number, world_size=2)
    for name in HEADS:
        for n in sizes:
            whole = data(name, n)
            before = exchanged_bytes()
            shared = fit(name, tuple(t[number::2] for t in whole))
            sent = exchanged_bytes() - before
            with gmc.distributed.local():
                alone = fit(name, whole).state_dict()
            state = shared.state_dict()
            far = max((float((state[k].double() - alone[k].double()).abs().max()) for k in state if state[k].numel()), default=0.0)
            found.put((number, name, n, far, sent))
    dist.barrier()
    dist.destroy_process_group()


def measure(sizes: list[int]) -> list[tuple[int, str, int, float, int]]:
    """Rank, head, n, largest difference in the state, bytes."""
    queue = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (f"{folder}/store", sizes, queue), nprocs=2)
    return [queue.get() for _ in range(2 * len(HEADS) * len(sizes))]


def run(small: bool = False, tiny: bool = False) -> list[Row]:
    """The rows of the speed table."""
    sizes = [40, 200] if tiny else [100, 2_000] if small else [50_000, 200_000]
    found = measure(sizes)
    rows = []
    for name in HEADS:
        mine = [line for line in found if line[1] == name]
        far = max(line[3] for line in mine)
        sent = {n: max(line[4] for line in mine if line[2] == n) for n in sizes}
        growth = sent[sizes[1]] / sent[sizes[0]]
        rows.append(
            Row(
                "processes",
                f"2 processes against 1, {name}, n = {sizes[1]:,}",
                "largest difference in the fitted state",
                far,
                "<= 1e-6",
                far <= 1e-6,
                limit=0.0,
            )
        )
        rows.append(
            Row(
                "processes",
                f"bytes exchanged, {name}, {sizes[1] // sizes[0]} x the examples",
                "x the bytes",
                growth,
                "does not grow with n",
                None if small or tiny else growth <= 1.01,  # a count in the header may have more digits
                naive=sizes[1] / sizes[0],
                limit=1.0,
                note=f"{sent[sizes[0]]:,} and {sent[sizes[1]]:,} bytes per rank; naive exchanges the examples",
            )
        )
    return rows


if __name__ == "__main__":
    print_table(run, __doc__)
