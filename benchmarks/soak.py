"""A million calls of `observe`, one example each: what the process holds must not grow, or by the rows that a head keeps.

    python -m benchmarks.soak                                    # every head, a million calls each: hours
    python -m benchmarks.soak --heads threshold tree             # about 15 minutes a head
    python -m benchmarks.soak --calls 20000                      # a first look

Every call brings another example. Heads whose statistics are sums per cell of equal group membership (`threshold`, `conformal`)
must stay as they are after the first tenth, up to 8 MB of the allocator's own; the others keep a row per example, and may hold
three times those rows (joining two pieces needs both and their sum). The exit code is 1 if one grows more.
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import torchgmc as gmc
from benchmarks.timing import header
from torchgmc.mappings import Residual

NAMES = ["all", "b", "c"]
TREE = {"x": ["x1", "x2"], "y": ["y1", "y2", "y3"]}
EXAMPLES = 1000  # different ones, again and again: making a million would take longer than observing them
ROOM = 8 << 20  # bytes that the allocator may take for itself


def groups(generator: torch.Generator) -> Tensor:
    """(EXAMPLES, 3) memberships that overlap, the first of them everyone."""
    member = torch.rand(EXAMPLES, 3, generator=generator) < 0.5
    member[:, 0] = True
    return member


def images(g: torch.Generator) -> tuple[Tensor, ...]:
    """Scores and masks, (EXAMPLES, 8, 8)."""
    masks = torch.rand(EXAMPLES, 8, 8, generator=g) < 0.4
    return torch.sigmoid(2.0 * masks + torch.randn(EXAMPLES, 8, 8, generator=g) - 1), masks, groups(g)


def events(g: torch.Generator) -> tuple[Tensor, ...]:
    """Probabilities and outcomes, (EXAMPLES,)."""
    probs = torch.rand(EXAMPLES, generator=g)
    return probs, torch.rand(EXAMPLES, generator=g) < probs, groups(g)


def means(g: torch.Generator) -> tuple[Tensor, ...]:
    """Predictions and outcomes, (EXAMPLES,)."""
    probs, y, member = events(g)
    return probs, y.float(), member


def residuals(g: torch.Generator) -> tuple[Tensor, ...]:
    """Conformity scores, (EXAMPLES,)."""
    return torch.rand(EXAMPLES, generator=g), groups(g)


def prompts(g: torch.Generator) -> tuple[Tensor, ...]:
    """Logits over a vocabulary, (EXAMPLES, 50)."""
    return torch.randn(EXAMPLES, 50, generator=g), groups(g)


def documents(g: torch.Generator) -> tuple[Tensor, ...]:
    """Probabilities of five leaves, (EXAMPLES, 5), and labels."""
    return torch.randn(EXAMPLES, 5, generator=g).softmax(1), torch.randint(5, (EXAMPLES,), generator=g)


Make = Callable[[], gmc.Head]
Data = Callable[[torch.Generator], tuple[Tensor, ...]]
HEADS: dict[str, tuple[Make, Data]] = {
    "threshold": (lambda: gmc.ThresholdHead(0.1, 0.02, NAMES), images),
    "conformal": (lambda: gmc.baselines.ConformalRiskControl(0.1, 0.02, NAMES), images),
    "probability": (lambda: gmc.ProbabilityHead(0.02, NAMES), events),
    "quantile": (lambda: gmc.QuantileHead(0.8, 0.02, NAMES), residuals),
    "distribution": (lambda: gmc.DistributionHead({"jobs": [3, 4]}, 0.01, NAMES), prompts),
    "tree": (lambda: gmc.TreeHead(TREE, 0.9, 0.05), documents),
    "gmc": (lambda: gmc.GMCHead(Residual, 0.02, groups=NAMES), means),
}
PER_CELL = ("threshold", "conformal")


@dataclass(frozen=True)
class Outcome:
    """What became of one head.

    Attributes:
        head: its name.
        calls: calls of observe.
        seconds: all of them together.
        grown: bytes by which the process grew after the first tenth.
        rows: bytes of the statistics at the end.
        allowed: what it may grow by.
    """

    head: str
    calls: int
    seconds: float
    grown: int
    rows: int
    allowed: int

    @property
    def kept(self) -> bool:
        """Whether memory stayed within what is allowed."""
        return self.grown <= self.allowed


def resident() -> int:
    """Private bytes of this process in memory (Linux), without the files it maps, which the system may drop."""
    gc.collect()
    with open("/proc/self/statm") as file:
        _, pages, shared, *_ = (int(value) for value in file.read().split())
    return (pages - shared) * os.sysconf("SC_PAGE_SIZE")


def soak(name: str, calls: int, console: Console) -> Outcome:
    """So many calls of one head; ``calls`` examples are in its statistics at the end."""
    make, data = HEADS[name]
    head, examples = make(), data(torch.Generator().manual_seed(0))
    start, before = time.perf_counter(), 0
    for i in track(range(calls), description=f"{name:12s}", console=console, disable=not console.is_terminal):
        if i == calls // 10:
            before = resident()
        at = i % EXAMPLES
        head.observe(*(t[at : at + 1] for t in examples))
    seconds, grown = time.perf_counter() - start, resident() - before
    tensors = [v for v in vars(head.statistics).values() if isinstance(v, Tensor)]
    rows = sum(v.untyped_storage().nbytes() for v in tensors)
    return Outcome(name, calls, seconds, grown, rows, ROOM if name in PER_CELL else ROOM + 3 * rows)


def table(outcomes: list[Outcome]) -> Table:
    """One line a head."""
    out = Table(title=f"{outcomes[0].calls:,} calls of observe, one example each")
    for title in ("head", "calls / s", "statistics at the end", "process grew by", "may grow by", "kept"):
        out.add_column(title, justify="right" if title != "head" else "left")
    for o in outcomes:
        sizes = (f"{size / 1e6:.2f} MB" for size in (o.rows, o.grown, o.allowed))
        out.add_row(o.head, f"{o.calls / o.seconds:,.0f}", *sizes, "yes" if o.kept else "NO")
    return out


def main() -> int:
    """Run it, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    args = parser.parse_args()
    if args.calls < 10:
        parser.error(f"--calls must be at least 10, so that a tenth of them can warm up; got {args.calls}")
    console = Console()
    console.print(header())
    outcomes: list[Outcome] = []
    for name in args.heads:
        outcomes.append(soak(name, args.calls, console))
        console.print(f"{name}: {outcomes[-1].seconds:.0f} s, grew by {outcomes[-1].grown / 1e6:.2f} MB")  # minutes apart
    console.print(table(outcomes))
    return 0 if all(o.kept for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
