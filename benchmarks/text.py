"""De-biasing: what a fit costs, in softmax passes over the logits.

    python -m benchmarks.text            # 2,000 prompts x 30,522 tokens; memory over 20,000 prompts
    python -m benchmarks.text --small    # 200 prompts x 5,000 tokens; 1,000 prompts

One pass is one softmax over all logits. Algorithm 1, run naively, projects every row of the vocabulary in each of its
steps; `fit` reads the logits once into a few numbers per prompt. Times are those of all processors (a busy machine
disturbs them less than it does the clock).
"""

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torchgmc as gmc

ALPHA = 0.0005


def problem(n: int, vocabulary: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits with a planted bias, and two groups."""
    g = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, vocabulary, generator=g)
    female = torch.rand(n, generator=g) < 0.4
    logits[:, 100:125] += 2.0 * female[:, None] + 3.0
    logits[:, 160:185] += 3.0 - 1.5 * female[:, None]
    return logits, torch.stack([female, ~female], 1)


def lists() -> dict[str, list[int]]:
    """Six lists of 25 tokens that overlap in fives."""
    return {f"list {k}": list(range(100 + 20 * k, 125 + 20 * k)) for k in range(6)}


def seconds(work: Callable[[], Any], repeat: int = 3) -> float:
    """Least processor time of several runs."""
    times = []
    for _ in range(repeat):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def naive_iteration(p: Tensor, member: Tensor, tokens: list[int]) -> Tensor:
    """One step of Algorithm 1 over the whole vocabulary."""
    step = torch.zeros(p.shape[1])
    step[tokens] = 1e-4
    return torch.where(member[:, :1], gmc.projections.simplex(p - step), p)


def peak() -> float:
    """Peak memory of this process, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    n, vocabulary, many = (200, 5000, 1000) if options.small else (2000, 30_522, 20_000)

    stream = gmc.DistributionHead(lists(), ALPHA, ["female", "male"])
    block, member = problem(100, vocabulary)
    stream.observe(block, member)
    before = peak()
    for k in range(many // 100):
        stream.observe(block + 0.01 * k, member)
    grown = peak() - before
    print(f"torch {torch.__version__}, {options.threads} threads; {n} prompts x {vocabulary} tokens, alpha {ALPHA}")
    print(f"observe over {many} prompts: peak memory + {grown:.1f} MB (their logits: {many * vocabulary * 4 / 2**20:.0f} MB)")

    logits, member = problem(n, vocabulary)
    one = seconds(lambda: torch.softmax(logits, 1))
    rows = [("one softmax over the logits", one, "")]
    p = torch.softmax(logits, 1)
    rows.append(("naive euclidean, one iteration", seconds(lambda: naive_iteration(p, member, lists()["list 0"]), 1), ""))
    for geometry, solver in (("kl", "exact"), ("euclidean", "paper"), ("euclidean", "exact")):
        head = gmc.DistributionHead(lists(), ALPHA, ["female", "male"], geometry=geometry)
        used = seconds(lambda head=head, solver=solver: head.fit(logits, member, solver=solver), 3 if geometry == "kl" else 1)
        report = head.report
        assert report is not None and report.converged
        worst = f"{float(report.violations_before.abs().max()):.5f} -> {float(report.violations_after.abs().max()):.5f}"
        rows.append((f"fit, {geometry}, solver={solver}", used, f"{report.iterations} steps, {worst}"))
        part = slice(0, n // 10)
        apply = seconds(lambda head=head, part=part: head(logits[part], member[part]), 1) * 10
        rows.append((f"apply, {geometry}", apply, ""))
    for name, used, note in rows:
        print(f"{name:34s} {used:8.3f} s  {used / one:7.2f} softmax passes  {note}")


if __name__ == "__main__":
    main()
