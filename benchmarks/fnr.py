"""Miss-rate control: what a fit costs, in passes over the scores.

    python -m benchmarks.fnr            # 118 and 1180 images of 256 x 256
    python -m benchmarks.fnr --small    # 24 and 240 images of 64 x 64

One pass evaluates the miss rate of every image at one threshold, in blocks that stay in the cache and whose memory is used
again: a pass that makes new temporaries takes several times as long, for page faults and not for its work. Algorithm 1, run
naively, makes a pass for each of its steps; `fit` reads the scores once, into statistics, and never looks at a pixel again.
Times are of the processor, of one thread.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torchgmc as gmc
from benchmarks.rows import Row
from benchmarks.timing import header, ratios

TARGET, ALPHA, ETA = 0.075, 0.005, 2.0**-7
#: Pixels of a block of a pass.
BLOCK = 1 << 16
NAMES = ["a", "b", "c", "d"]


def problem(n: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [n, size, size], masks, and four overlapping groups that differ in contrast."""
    rng = torch.Generator().manual_seed(seed)
    masks = torch.rand(n, size, size, generator=rng) < 0.45
    groups = torch.rand(n, 4, generator=rng) < torch.tensor([0.5, 0.5, 0.7, 0.3])
    groups[:4] |= torch.eye(4, dtype=torch.bool)
    shift = groups.float() @ torch.tensor([0.6, -0.4, 0.2, 0.5])
    logits = 3 * masks - 1.5 + torch.randn(n, size, size, generator=rng) - shift[:, None, None]
    return torch.sigmoid(logits), masks, groups


def naive_pass(scores: Tensor, masks: Tensor, thresholds: Tensor) -> Tensor:
    """Miss rate of every image at its threshold, in plain torch: each step makes a new tensor."""
    missed = masks & (scores <= thresholds[:, None, None])
    return missed.flatten(1).sum(1) / masks.flatten(1).sum(1)


def block_pass(scores: Tensor, masks: Tensor, thresholds: Tensor) -> Tensor:
    """The same in blocks of images, in memory that is used again."""
    rows = max(1, BLOCK // scores[0].numel())
    missed, found = torch.empty(rows, *scores.shape[1:], dtype=torch.bool), []
    for one, mask, at in zip(scores.split(rows), masks.split(rows), thresholds.split(rows), strict=True):
        room = missed[: len(one)]
        torch.le(one, at[:, None, None], out=room)
        torch.logical_and(room, mask, out=room)
        found.append(torch.count_nonzero(room, (1, 2)) / torch.count_nonzero(mask, (1, 2)))
    return torch.cat(found)


def naive_algorithm_1(scores: Tensor, masks: Tensor, groups: Tensor, max_iter: int = 1000) -> tuple[Tensor, int]:
    """Algorithm 1 with one pass a step."""
    thresholds, steps = torch.full((len(scores),), 0.5), 0
    while steps < max_iter:
        table = gmc.violations(groups, block_pass(scores, masks, thresholds) - TARGET)[:, 0]
        worst = int(table.abs().argmax())
        if abs(float(table[worst])) <= ALPHA:
            break
        thresholds = thresholds - ETA * table[worst].sign() * groups[:, worst]
        steps += 1
    return thresholds, steps


def measure(n: int, size: int, repeat: int = 15) -> dict[str, Any]:
    """Costs in passes, each with its spread; the naive algorithm and `solver="paper"` must agree first."""
    torch.set_num_threads(1)
    scores, masks, groups = problem(n, size)
    expected, steps = naive_algorithm_1(scores, masks, groups)
    paper = gmc.ThresholdHead(TARGET, ALPHA, NAMES).fit(scores, masks, groups, solver="paper", eta=ETA)
    assert paper.report.iterations == steps, (paper.report.iterations, steps)
    torch.testing.assert_close(paper.threshold(groups).float(), expected)
    torch.testing.assert_close(block_pass(scores, masks, expected), naive_pass(scores, masks, expected))
    exact = gmc.ThresholdHead(TARGET, ALPHA, NAMES, noise_floor=False).fit(scores, masks, groups)
    missed = naive_pass(scores, masks, exact.threshold(groups).float())
    assert float(gmc.violations(groups, missed - TARGET).abs().max()) <= ALPHA + 1e-6

    def fit(solver: str, noise_floor: bool = False, **options: Any) -> Callable[[], object]:
        return lambda: gmc.ThresholdHead(TARGET, ALPHA, NAMES, noise_floor=noise_floor).fit(
            scores, masks, groups, solver=solver, **options
        )

    start = torch.full((n,), 0.5)
    works = {
        "plain reading (scores.sum())": lambda: scores.sum(),
        "a pass that makes new tensors": lambda: naive_pass(scores, masks, start),
        f"naive Algorithm 1 ({steps} steps)": lambda: naive_algorithm_1(scores, masks, groups),
        f"fit to alpha ({exact.report.iterations} steps)": fit("exact"),
        "fit as it comes (noise rule)": fit("exact", noise_floor=True),
        f"fit, paper ({steps} steps)": fit("paper", eta=ETA),
        "fit, fresh (max_iter=4)": fit("fresh", eta=ETA, max_iter=4),
        "calibrate, to alpha": lambda: exact.calibrate(),
    }
    once = {"naive": 2, "fit,": 3}  # what takes long is measured less often

    def often(name: str) -> int:
        return min(repeat, next((k for start, k in once.items() if name.startswith(start)), repeat))

    found = {name: ratios(work, lambda: block_pass(scores, masks, start), often(name)) for name, work in works.items()}
    read, new, naive, to_alpha, default, *_ = found.values()
    return {
        "images": n, "size": size, "steps": steps, "passes": found, "read": read[0], "new": new[0], "naive": naive[0],
        "to alpha": to_alpha, "default": default, 
    }  # fmt: skip


def show(result: dict[str, Any]) -> dict[str, Any]:
    """Print one size."""
    print(f"\n{result['images']} images of {result['size']} x {result['size']}, 4 groups; passes: middle, least, most")
    for name, passes in result["passes"].items():
        print(f"  {name:34s} " + " ".join(f"{value:8.2f}" for value in passes))
    return result


def run(small: bool = False, tiny: bool = False) -> list[Row]:
    """The rows of the speed table."""
    n, size = (40, 16) if tiny else (24, 64) if small else (118, 256)
    result = measure(n, size, 1 if tiny else 15)
    about = f"a pass that makes new tensors is {result['new']:.2g} of these"
    notes = {
        "to alpha": f"naive is Algorithm 1 with one pass for each of its {result['steps']} steps; both end with the same "
        f"thresholds; {about}",
        "default": "with the noise rule: cross-validated offsets of groups",
    }
    rows = []
    for name, target in (("to alpha", 2.0), ("default", None)):
        middle, *spread = result[name]
        rows.append(
            Row(
                benchmark="fnr",
                work=f"fit {'to alpha' if target else 'as it comes'}, miss rate, {n} images of {size} x {size}, 4 groups",
                unit="passes over the scores",
                ours=middle,
                naive=result["naive"] if target else None,
                limit=result["read"],
                target=f"<= {target:g} passes" if target else "-",
                reached=None if small or tiny or target is None else middle <= target,
                note=notes[name],
                spread=spread,
            )
        )
    return rows


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Run both sizes; `benchmarks.calibrate` says how `calibrate` grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="seconds instead of a minute")
    small = parser.parse_args(arguments).small
    print(header())
    sizes = [(24, 64), (240, 64)] if small else [(118, 256), (1180, 256)]
    results = [show(measure(n, size)) for n, size in sizes]
    one, two = (result["to alpha"][0] for result in results)
    print(f"\nfit to alpha: {one:.2f} and {two:.2f} passes (target: at most 2)")
    return results


if __name__ == "__main__":
    main()
