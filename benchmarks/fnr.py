"""Miss-rate control: what a fit costs, in passes over the scores.

    python -m benchmarks.fnr            # 118 and 1180 images of 256 x 256
    python -m benchmarks.fnr --small    # 24 and 240 images of 64 x 64

One naive pass evaluates the miss rate of every image at one threshold. Algorithm 1, run naively, makes such a pass for each
of its steps; `fit` makes about one, into statistics, and never looks at a pixel again.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torchgmc as gmc
from benchmarks.rows import Row
from benchmarks.timing import header, median_seconds

TARGET, ALPHA, ETA = 0.075, 0.005, 2.0**-7


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
    """Miss rate of every image at its threshold."""
    missed = masks & (scores <= thresholds[:, None, None])
    return missed.flatten(1).sum(1) / masks.flatten(1).sum(1)


def naive_algorithm_1(scores: Tensor, masks: Tensor, groups: Tensor, max_iter: int = 1000) -> tuple[Tensor, int]:
    """Algorithm 1 with one naive pass a step."""
    thresholds, steps = torch.full((len(scores),), 0.5), 0
    while steps < max_iter:
        table = gmc.violations(groups, naive_pass(scores, masks, thresholds) - TARGET)[:, 0]
        worst = int(table.abs().argmax())
        if abs(float(table[worst])) <= ALPHA:
            break
        thresholds = thresholds - ETA * table[worst].sign() * groups[:, worst]
        steps += 1
    return thresholds, steps


def measure(n: int, size: int, repeat: int = 5) -> dict[str, Any]:
    """Measure one size; the naive algorithm and `solver="paper"` must agree first."""
    scores, masks, groups = problem(n, size)
    names = ["a", "b", "c", "d"]
    expected, steps = naive_algorithm_1(scores, masks, groups)
    paper = gmc.ThresholdHead(TARGET, ALPHA, names).fit(scores, masks, groups, solver="paper", eta=ETA)
    assert paper.report.iterations == steps, (paper.report.iterations, steps)
    torch.testing.assert_close(paper.threshold(groups).float(), expected)
    exact = gmc.ThresholdHead(TARGET, ALPHA, names, noise_floor=False).fit(scores, masks, groups)
    missed = naive_pass(scores, masks, exact.threshold(groups).float())
    assert float(gmc.violations(groups, missed - TARGET).abs().max()) <= ALPHA + 1e-6

    def fit(solver: str, **options: Any) -> Callable[[], object]:
        return lambda: gmc.ThresholdHead(TARGET, ALPHA, names).fit(scores, masks, groups, solver=solver, **options)

    one = median_seconds(lambda: naive_pass(scores, masks, torch.full((n,), 0.5)), repeat)
    rows = {
        "read once (scores.max())": median_seconds(lambda: scores.max(), repeat),
        "one naive pass": one,
        f"naive Algorithm 1 ({steps} steps)": median_seconds(lambda: naive_algorithm_1(scores, masks, groups), 1),
        f"fit, exact ({exact.report.iterations} steps)": median_seconds(fit("exact"), repeat),
        f"fit, paper ({steps} steps)": median_seconds(fit("paper", eta=ETA), repeat),
        "fit, fresh (max_iter=4)": median_seconds(fit("fresh", eta=ETA, max_iter=4), repeat),
        "calibrate alone, exact": median_seconds(lambda: exact.calibrate(), repeat),
    }
    return {
        "images": n,
        "size": size,
        "steps": steps,
        "seconds": rows,
        "fit / pass": rows[list(rows)[3]] / one,
        "naive / pass": rows[list(rows)[2]] / one,
        "calibrate": rows["calibrate alone, exact"],
    }


def show(result: dict[str, Any]) -> dict[str, Any]:
    """Print one size."""
    print(f"\n{result['images']} images of {result['size']} x {result['size']}, 4 overlapping groups")
    for name, seconds in result["seconds"].items():
        print(f"  {name:34s} {1e3 * seconds:10.1f} ms   {seconds / result['seconds']['one naive pass']:8.2f} passes")
    return result


def run(small: bool = False, tiny: bool = False) -> list[Row]:
    """The row of the speed table."""
    n, size = (40, 16) if tiny else (24, 64) if small else (118, 256)
    result = measure(n, size, 1 if tiny else 7)
    row = Row(
        benchmark="fnr",
        work=f"fit, miss rate, {n} images of {size} x {size}, 4 groups",
        unit="passes over the scores",
        ours=result["fit / pass"],
        naive=result["naive / pass"],
        limit=1.0,
        target="<= 3 passes",
        reached=None if small or tiny else result["fit / pass"] <= 3,
        note=f"naive is Algorithm 1 with one pass for each of its {result['steps']} steps; both end with the same thresholds",
    )
    return [row]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Run both sizes and print the two figures asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="seconds instead of a minute")
    small = parser.parse_args(arguments).small
    print(header())
    sizes = [(24, 64), (240, 64)] if small else [(118, 256), (1180, 256)]
    results = [show(measure(n, size)) for n, size in sizes]
    print(f"\nfit, exact: {results[0]['fit / pass']:.2f} and {results[1]['fit / pass']:.2f} naive passes (target: at most 3)")
    growth = results[1]["calibrate"] / results[0]["calibrate"]
    print(f"calibrate with ten times the images: {growth:.2f} x the time (target: at most 1.25)")
    return results


if __name__ == "__main__":
    main()
