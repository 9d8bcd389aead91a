"""Memory of many observes, in a separate process: in one that ran other tests before, their memory is measured too.

    python -m gmctest.soak_worker NAME EXAMPLES CALLS RESET [EXAMPLES CALLS RESET ...]

prints for each round its growth in bytes and objects, and the examples, rows and bytes in the statistics after it.
"""

import ctypes
import gc
import json
import sys

from torch import Tensor

import torchgmc as gmc
from gmctest.heads_zoo import ZOO


class Heap(ctypes.Structure):
    """glibc's struct mallinfo2: ten counts, of which the eighth is the bytes in use."""

    _fields_ = (("counts", ctypes.c_size_t * 10),)


def in_use() -> int:
    """Bytes of the heap that somebody holds. What the process has in memory also counts holes, which depend on luck."""
    heap = ctypes.CDLL(None).mallinfo2
    heap.restype = Heap
    return int(heap().counts[7])


def held(head: gmc.Head) -> tuple[int, int]:
    """Tensors that the statistics hold, and their bytes."""
    found = [v for part in head._parts for v in vars(part).values() if isinstance(v, Tensor)]
    return len(found), sum(v.untyped_storage().nbytes() for v in found)


def grown(head: gmc.Head, data: tuple[Tensor, ...], calls: int, reset: int) -> tuple[int, int]:
    """Growth over so many calls, after half as many to warm up: bytes in use, and the objects that live in the process."""
    before = (0, 0)
    for i in range(calls + calls // 2):
        if i == calls // 2:
            gc.collect()
            before = in_use(), len(gc.get_objects())
        if reset and i % reset == 0:
            head.reset()
        head.observe(*data)
    gc.collect()
    return in_use() - before[0], len(gc.get_objects()) - before[1]


def main(name: str, *numbers: str) -> None:
    entry = next(e for e in ZOO if e.name == name)
    head, rounds = entry.make(), []
    for k in range(0, len(numbers), 3):
        examples, calls, reset = map(int, numbers[k : k + 3])
        growth = grown(head, entry.data(examples, 0).observe, calls, reset)
        known = head.statistics
        count = int(getattr(known, "examples", 0)) if entry.per_cell else known.rows
        rounds.append([*growth, count, held(head)[1]])
    print(json.dumps(rounds))


if __name__ == "__main__":
    main(*sys.argv[1:])
