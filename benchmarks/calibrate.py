"""`calibrate` against the number of images: the statistics are per cell of equal group membership, so it must not grow.

    python -m benchmarks.calibrate            # 100 and 10,000 images of 64 x 64
    python -m benchmarks.calibrate --small    # 20 and 2,000 images of 16 x 16

Images come in batches of the first size; before anything is timed, the thresholds of three batches are compared with those of
all their images at once, and with the definition of the miss rate.
"""

import torch

import torchgmc as gmc
from benchmarks.fnr import ALPHA, TARGET, naive_pass, problem
from benchmarks.rows import Row, print_table
from benchmarks.timing import median_seconds, quickest

NAMES = ["a", "b", "c", "d"]


def observed(batch: int, times: int, size: int, fresh: bool = True, noise_floor: bool = False) -> gmc.ThresholdHead:
    """A head that has seen ``times`` batches, new ones or the same one again."""
    head = gmc.ThresholdHead(TARGET, ALPHA, NAMES, noise_floor=noise_floor)
    same = problem(batch, size)
    for seed in range(times):
        head.observe(*(problem(batch, size, seed) if fresh else same))
    return head


def check(batch: int, size: int) -> None:
    """Three batches give the state of one fit over all, and the promise holds by the definition."""
    parts = [problem(batch, size, seed) for seed in range(3)]
    scores, masks, groups = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    head = observed(batch, 3, size)
    head.calibrate()
    whole = gmc.ThresholdHead(TARGET, ALPHA, NAMES, noise_floor=False).fit(scores, masks, groups)
    torch.testing.assert_close(head.threshold(groups), whole.threshold(groups))
    missed = naive_pass(scores, masks, head.threshold(groups).float())
    for member in groups.T:
        assert abs(float(((missed - TARGET) * member).mean())) <= ALPHA + 1e-6


def run(small: bool = False, tiny: bool = False) -> list[Row]:
    """The row of the speed table."""
    batch, size, repeat = (16, 8, 1) if tiny else (20, 16, 15) if small else (100, 64, 25)
    more = 5 if tiny else 100
    check(batch, size)
    heads = [observed(batch, 1, size), observed(batch, more, size, fresh=False), observed(batch, more, size)]
    heads += [observed(batch, 1, size, noise_floor=True), observed(batch, more, size, noise_floor=True)]
    data = problem(batch, size)
    start = torch.full((batch,), 0.5)
    one = median_seconds(lambda: naive_pass(data[0], data[1], start), repeat)
    all_of = median_seconds(lambda: [naive_pass(data[0], data[1], start) for _ in range(more)], min(repeat, 5))
    times = quickest(*(head.calibrate for head in heads), repeat=repeat)
    torch.testing.assert_close(heads[1].threshold(data[2]), heads[0].threshold(data[2]))  # the same images, the same state
    steps = [head.report.iterations for head in heads]  # type: ignore[union-attr]
    ratio = times[1] / times[0]
    row = Row(
        benchmark="calibrate",
        work=f"calibrate() after observe, {more * batch:,} against {batch:,} images of {size} x {size}",
        unit=f"x the time of {batch:,}",
        ours=ratio,
        naive=all_of / one,
        limit=1.0,
        target="<= 1.25 x",
        reached=None if small or tiny else ratio <= 1.25,
        note=f"the same images {more} times, hence the same {steps[0]} steps; with {more * batch:,} different images "
        f"{times[2] / times[0]:.3g} x, {steps[2]} steps; with the noise rule {times[4] / times[3]:.3g} x; naive is one step "
        "over all scores",
    )
    return [row]


if __name__ == "__main__":
    print_table(run, __doc__)
