"""Many observes: memory grows by the rows kept, not at all where statistics are sums, and no row is copied often."""

import gc
import math
import os

import pytest
import torch
from torch import Tensor

import torchgmc as gmc
from benchmarks.soak import resident
from gmctest import heads_zoo
from gmctest.heads_zoo import ZOO

ROWS = [entry for entry in ZOO if not entry.per_cell]


def held(head: gmc.Head) -> tuple[int, int]:
    """Tensors that the statistics hold, and their bytes."""
    found = [v for part in head._parts for v in vars(part).values() if isinstance(v, Tensor)]
    return len(found), sum(v.untyped_storage().nbytes() for v in found)


@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_many_small_batches_lie_in_few_pieces_and_are_the_whole(entry: heads_zoo.Entry) -> None:
    n = 60
    data = entry.data(n, 2).observe
    head, whole = entry.make(), entry.make()
    whole.observe(*data)
    for i in range(n):
        head.observe(*(t[i : i + 1] for t in data))
        assert len(head._parts) <= (1 if entry.per_cell else 2 + math.log(i + 1, 1.5))
    fields = len(vars(head._parts[0]))
    count, size = held(head)
    assert count <= fields * len(head._parts)
    ours, theirs = vars(head.statistics), vars(whole.statistics)
    for name, value in ours.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(value, theirs[name], rtol=1e-12, atol=1e-12, equal_nan=True)
    assert size <= 1.1 * held(whole)[1] + 64 * count


@pytest.mark.parametrize("entry", ROWS, ids=lambda e: e.name)
def test_a_row_is_copied_a_logarithmic_number_of_times(entry: heads_zoo.Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes copied by joining grow as n log n: batches of one example may come by the thousand."""
    copied = 0
    cat = torch.cat

    def counting(tensors: list[Tensor], *args: int) -> Tensor:
        nonlocal copied
        out = cat(tensors, *args)
        copied += len(out) if out.dim() and out.dtype == torch.bool and out.dim() == 2 else 0
        return out

    head, (n, data) = entry.make(), (128, entry.data(1, 0).observe)
    head.observe(*data)
    (part,) = head._parts
    monkeypatch.setattr(torch, "cat", counting)
    for _ in range(n):
        head.keep(part)
    assert copied <= 2 * n * math.log2(n), "quadratic: every batch copies all before it"
    assert head.statistics.rows == (n + 1) * part.rows


@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_a_batch_may_be_overwritten_after_observe(entry: heads_zoo.Entry) -> None:
    """A loader that fills one buffer again and again: what was observed stays."""
    data = [t.double().clone() if t.is_floating_point() else t.clone() for t in entry.data(40, 1).observe]
    expected, head = entry.make().fit(*data), entry.make()
    weight = torch.ones(20, dtype=torch.float64)
    buffers = [t[:20].clone() for t in data]
    for start in (0, 20):
        for buffer, t in zip(buffers, data, strict=True):
            buffer.copy_(t[start : start + 20])
        weight.fill_(1.0)
        head.observe(*buffers, weight=weight)
        for buffer in buffers:
            buffer.zero_()
        weight.zero_()
    head.calibrate()
    inputs = entry.data(30, 5).inputs
    torch.testing.assert_close(head(*inputs), expected(*inputs))


def grown(head: gmc.Head, data: tuple[Tensor, ...], calls: int, reset: int | None = None) -> tuple[int, int]:
    """Growth of the process over so many calls, after half as many to warm up: its bytes, and the objects that live in it."""
    before = (0, 0)
    for i in range(calls + calls // 2):
        if i == calls // 2:
            gc.collect()
            before = resident(), len(gc.get_objects())
        if reset and i % reset == 0:
            head.reset()
        head.observe(*data)
    gc.collect()
    return resident() - before[0], len(gc.get_objects()) - before[1]


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
@pytest.mark.parametrize("name", ["threshold", "threshold-classes", "threshold-jitter", "conformal", "unprocessed"])
def test_sums_leave_memory_as_it_is(name: str) -> None:
    """Sums per cell do not grow, not by an object in three calls. ``benchmarks.soak`` makes a million calls."""
    entry = next(e for e in ZOO if e.name == name)
    head = entry.make()
    for examples in (50, 1):
        size, objects = grown(head, entry.data(examples, 0).observe, 120)
        assert size < 8 << 20 and objects < 40, (examples, size, objects)  # the allocator takes a few MB of its own
    assert int(head.statistics.examples) == 51 * 180


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_a_million_examples_leave_memory_as_it_is() -> None:
    """1,050 calls of 1,000 examples, and as many of one."""
    entry = next(e for e in ZOO if e.name == "threshold")
    head = entry.make()
    for examples in (1000, 1):
        size, objects = grown(head, entry.data(examples, 0).observe, 700)
        assert size < 8 << 20 and objects < 40, (examples, size, objects)
    assert int(head.statistics.examples) == 1001 * 1050 > 1_000_000


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
@pytest.mark.parametrize("name", ["probability", "quantile", "distribution", "tree-groups", "gmc"])
def test_rows_of_a_million_examples_grow_by_their_size(name: str) -> None:
    """A million examples, 1,000 a call: the process grows by the rows, and by the room to join them."""
    entry = next(e for e in ZOO if e.name == name)
    head = entry.make()
    growth, objects = grown(head, entry.data(1000, 0).observe, 740)
    rows, (_, size) = head.statistics.rows, held(head)
    assert rows == 1_110_000
    assert growth < 3 * size + (8 << 20) and objects < 100, (growth, size, objects)
    assert size / rows < 200  # bytes of one example
    head.reset()
    growth, objects = grown(head, entry.data(1, 0).observe, 3400, reset=500)
    assert growth < 8 << 20 and objects < 100, (growth, objects)  # observe, reset, observe, ...: nothing is left behind
