"""Many observes: memory grows by the rows kept, not at all where statistics are sums, and no row is copied often."""

import ctypes
import json
import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from gmctest import heads_zoo, subprocess_env
from gmctest.heads_zoo import ZOO
from gmctest.soak_worker import held

ROWS = [entry for entry in ZOO if not entry.per_cell and entry.name != "quantile-counts"]  # there equal rows become one


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


needs_glibc = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "mallinfo2"),
    reason="needs glibc's counts",
)


def measured(name: str, *rounds: tuple[int, int, int]) -> list[list[int]]:
    """Growth in bytes and objects, examples, and bytes of the statistics: (examples, calls, reset) after (examples, ...)."""
    numbers = [str(number) for one in rounds for number in one]
    words = [sys.executable, "-m", "gmctest.soak_worker", name, *numbers]
    # One heap, with large tensors in it too, so that its own count of bytes in use is of all of them.
    env = subprocess_env(MALLOC_MMAP_THRESHOLD_=str(1 << 30), MALLOC_TRIM_THRESHOLD_=str(1 << 32), MALLOC_ARENA_MAX="1")
    done = subprocess.run(words, env=env, check=True, capture_output=True, text=True, timeout=600)
    return json.loads(done.stdout)


@pytest.mark.slow
@needs_glibc
@pytest.mark.parametrize("name", ["threshold", "threshold-classes", "threshold-jitter", "conformal", "unprocessed"])
def test_sums_leave_memory_as_it_is(name: str) -> None:
    """Sums per cell do not grow, not by an object in three calls. ``benchmarks.soak`` makes a million calls."""
    rounds = measured(name, (50, 120, 0), (1, 120, 0))
    for size, objects, _, _ in rounds:
        assert size < 1 << 18 and objects < 40, rounds
    assert rounds[-1][2] == 51 * 180


@pytest.mark.slow
@needs_glibc
def test_a_million_examples_leave_memory_as_it_is() -> None:
    """1,050 calls of 1,000 examples, and as many of one."""
    rounds = measured("threshold", (1000, 700, 0), (1, 700, 0))
    for size, objects, _, _ in rounds:
        assert size < 1 << 18 and objects < 40, rounds
    assert rounds[-1][2] == 1001 * 1050 > 1_000_000


@pytest.mark.slow
@needs_glibc
@pytest.mark.parametrize("name", ["probability", "quantile", "distribution", "tree-groups", "gmc"])
def test_rows_of_a_million_examples_grow_by_their_size(name: str) -> None:
    """A million examples, 1,000 a call: what is in use grows by the rows."""
    (growth, objects, rows, size), (later, left, _, _) = measured(name, (1000, 740, 0), (1, 3400, 500))
    assert rows == 1_110_000
    assert size / 2 < growth < size + (1 << 18) and objects < 100, (growth, size, objects)
    assert size / rows < 200  # bytes of one example
    assert later < 1 << 18 and left < 100, (later, left)  # observe, reset, observe, ...: nothing is left behind
