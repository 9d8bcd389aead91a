"""De-biasing: what a fit costs, in softmax passes over the logits.

    python -m benchmarks.text            # 2,000 prompts x 30,522 tokens; memory over 20,000 prompts
    python -m benchmarks.text --small    # 200 prompts x 5,000 tokens; 1,000 prompts

One pass is one softmax over all logits, in blocks whose memory is used again: a softmax into a new tensor takes longer, for
page faults. Algorithm 1, run naively, projects every row of the vocabulary in each of its steps; `fit` reads the logits once
into a few numbers per prompt. Times are of the processor.
"""

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torchgmc as gmc
from benchmarks.rows import Row
from benchmarks.timing import ratios

ALPHA = 0.0005
#: Logits of a block of a pass.
BLOCK = 1 << 16


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


def one_pass(logits: Tensor) -> float:
    """A softmax of all logits in blocks of prompts, in memory that is used again; the sum of the probabilities of one token."""
    rows = max(1, BLOCK // logits.shape[1])
    room, total = torch.empty(rows, logits.shape[1]), 0.0
    for part in logits.split(rows):
        total += float(torch.softmax(part, 1, out=room[: len(part)])[:, 0].sum())
    return total


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


def worst_violation(head: gmc.DistributionHead, logits: Tensor, member: Tensor) -> float:
    """Recomputed plainly, list by list and group by group, over the whole vocabulary."""
    p = head(logits, member).double().exp()
    found = 0.0
    for tokens in lists().values():
        mass = p[:, tokens].sum(1)
        for group in member.T:
            found = max(found, abs(float(((mass - mass.mean()) * group).mean())))
    return found


def naive_algorithm_1(logits: Tensor, member: Tensor, alpha: float, max_iter: int) -> tuple[float, int]:
    """Seconds and steps of Algorithm 1 over the whole vocabulary, of at most ``max_iter`` steps."""
    p = torch.softmax(logits, 1)
    sets = list(lists().values())
    start, steps = time.process_time(), 0
    while steps < max_iter:
        mass = torch.stack([p[:, tokens].sum(1) for tokens in sets], 1)
        table = gmc.violations(member, mass - mass.mean(0))
        worst = int(table.abs().argmax())
        group, chosen = divmod(worst, len(sets))
        if abs(float(table[group, chosen])) <= alpha:
            break
        step = torch.zeros(p.shape[1])
        step[sets[chosen]] = 1e-4 * float(table[group, chosen].sign())
        p = torch.where(member[:, group, None], gmc.projections.simplex(p - step), p)
        steps += 1
    return time.process_time() - start, steps


def run(small: bool = False, tiny: bool = False) -> list[Row]:
    """The row of the speed table."""
    n, vocabulary = (60, 300) if tiny else (200, 5000) if small else (2000, 30_522)
    torch.set_num_threads(1)
    logits, member = problem(n, vocabulary)
    head = gmc.DistributionHead(lists(), ALPHA, ["female", "male"], noise_floor=False).fit(logits, member)
    assert head.report is not None and head.report.converged
    assert worst_violation(head, logits, member) <= ALPHA * 1.001 + 1e-7
    torch.testing.assert_close(one_pass(logits), float(torch.softmax(logits, 1)[:, 0].sum()), rtol=1e-4, atol=1e-6)
    default, repeat = gmc.DistributionHead(lists(), ALPHA, ["female", "male"]), 1 if tiny else 7

    def passes(work: Callable[[], Any]) -> tuple[float, float, float]:
        return ratios(work, lambda: one_pass(logits), repeat)

    one = seconds(lambda: one_pass(logits), repeat)
    used, steps = naive_algorithm_1(logits, member, ALPHA, 3)
    (read, *_), (new, *_) = passes(lambda: logits.sum()), passes(lambda: torch.softmax(logits, 1))
    notes = {
        True: f"naive is one step of Algorithm 1 (mean of {steps}) over the whole vocabulary; it needs many; a softmax into a "
        f"new tensor is {new:.2g} of these",
        False: "with the noise rule: cross-validated offsets of groups",
    }
    rows = []
    for to_alpha, fitted in ((True, head), (False, default)):
        middle, *spread = passes(lambda fitted=fitted: fitted.fit(logits, member))
        rows.append(
            Row(
                benchmark="text",
                work=f"fit {'to alpha' if to_alpha else 'as it comes'}, de-bias (kl), {n:,} prompts x {vocabulary:,} tokens",
                unit="softmax passes",
                ours=middle,
                naive=used / max(steps, 1) / max(one, 1e-9) if to_alpha else None,
                limit=read,
                target="<= 3 softmax passes",
                reached=None if small or tiny else middle <= 3,
                note=notes[to_alpha],
                spread=spread,
            )
        )
    return rows


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
    one = seconds(lambda: one_pass(logits))
    rows = [("one softmax over the logits, in blocks", one, "")]
    rows.append(("one softmax into a new tensor", seconds(lambda: torch.softmax(logits, 1)), ""))
    p = torch.softmax(logits, 1)
    rows.append(("naive euclidean, one iteration", seconds(lambda: naive_iteration(p, member, lists()["list 0"]), 1), ""))
    for geometry, solver in (("kl", "exact"), ("euclidean", "paper"), ("euclidean", "exact")):
        head = gmc.DistributionHead(lists(), ALPHA, ["female", "male"], geometry=geometry, noise_floor=False)
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
