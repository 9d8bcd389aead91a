"""How often a fit waits for a value: on a GPU every such read lets the device stand still.

$ python -m benchmarks.reads

Counted on the CPU, where tensors have values: numbers taken out of tensors, and results whose size depends on values (rows
picked by a mask, distinct values). Solver "paper" is run for 200 and for 400 steps: the difference is what a step reads. On a
device other than the CPU steps of level sets do not pick rows, and 16 steps share one look at what they did.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchgmc as gmc

#: Operations that read.
VALUES = {"_local_scalar_dense", "equal", "is_nonzero"}
SIZES = {"nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "repeat_interleave"}


class Reads(TorchDispatchMode):
    """Counts reads of values, and results whose size depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in VALUES or name in SIZES:
            self.found["value" if name in VALUES else "size"] += 1
        elif name in ("index", "index_put", "index_put_"):
            masks = [t for t in args[1] if isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8)]
            self.found["size"] += bool(masks)
        return func(*args, **(kwargs or {}))


def heads(n: int) -> dict[str, tuple[gmc.Head, tuple[Tensor, ...]]]:
    """A head of each kind, and data."""
    torch.manual_seed(0)
    groups, names = torch.rand(n, 6) < 0.4, list("abcdef")
    probs, scores = torch.rand(n), torch.rand(n) * (1.0 + groups[:, 0])
    y, labels = torch.rand(n) < probs * (0.5 + 0.5 * groups[:, 0]), torch.randint(4, (n,))
    images, masks = torch.rand(n, 16) * (1.0 - 0.1 * groups[:, :1].float()), torch.rand(n, 16) < 0.4
    logits = torch.randn(n, 40) + 2.0 * (groups[:, :1] & (torch.arange(40) == 7))
    return {
        "threshold": (gmc.ThresholdHead(0.1, 1e-4, names), (images, masks, groups)),
        "probability": (gmc.ProbabilityHead(1e-4, names), (probs, y, groups)),
        "quantile": (gmc.QuantileHead(0.9, 1e-4, names), (scores, groups)),
        "distribution": (gmc.DistributionHead({"x": [7, 8], "z": [3]}, 1e-6, names), (logits, groups)),
        "tree": (gmc.TreeHead([4, 4, 5, 5, 6, 6, -1], 0.9, 1e-4), (torch.randn(n, 4).softmax(1), labels)),
    }


def reads(work: Callable[[], object]) -> tuple[int, int]:
    """Of values, and of sizes."""
    with Reads() as mode:
        work()
    return mode.found["value"], mode.found["size"]


def measure(name: str, n: int, solver: str, steps: int | None = None) -> tuple[int, int]:
    """Reads of one calibration."""
    head, data = heads(n)[name]
    head.observe(*data)
    return reads(lambda: head.calibrate(solver, max_iter=steps))


def main() -> None:
    print("| head | exact, n = 1,000: values, sizes | n = 4,000 | paper: values, sizes per step |\n|---|---|---|---|")
    for name in heads(2):
        small, large = (measure(name, n, "exact") for n in (1000, 4000))
        few, many = (measure(name, 1000, "paper", steps) for steps in (200, 400))
        step = [(b - a) / 200 for a, b in zip(few, many, strict=True)]
        print(f"| {name} | {small[0]}, {small[1]} | {large[0]}, {large[1]} | {step[0]:.2g}, {step[1]:.2g} |", flush=True)


if __name__ == "__main__":
    main()
