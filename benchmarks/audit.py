"""Audit: in how many of many draws all intervals hold at once (the truth is known), and how wide they are.

    python -m benchmarks.audit            # 1,000 draws of 2,000 examples
    python -m benchmarks.audit --small    # 100 draws

A fixed threshold is audited (nothing is fitted) for groups of all, a half, a quarter and a twentieth of the examples.
Three populations: independent groups; nested groups, in which the miss rate falls to the inside; a skewed miss rate of 16
pixels, mostly near 0. *naive* are the usual intervals of one mean each (estimate +- 1.96 standard errors), which are not
meant to hold at once. The oracle knows the law of all errors and takes the narrowest intervals, in proportion to their
spreads, that hold at once in 95 % of these draws.
"""

import torch
from torch import Tensor

import torchgmc as gmc
from benchmarks.rows import Row, print_table

RATES = torch.tensor([1.0, 0.5, 0.25, 0.05]).double()
NAMES = ["all", "half", "quarter", "twentieth"]
SHAPES = ("independent groups", "nested groups", "skewed risk")
TARGET, DELTA, PIXELS = 0.1, 0.05, 16


def draw(shape: str, n: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Scores ``(n, p)`` of positive pixels (missed if below 0.5), membership ``(n, 4)``, and the true violations ``(4,)``."""
    u, x = torch.rand(n, generator=rng).double(), torch.rand(n, generator=rng).double()
    if shape == "nested groups":  # missed with probability u, inside {u < rate}
        return (x > u).double()[:, None], u[:, None] < RATES, RATES * (RATES / 2 - TARGET)
    who = torch.rand(n, 4, generator=rng).double() < RATES
    if shape == "skewed risk":  # pixel j is missed if j/16 < x^8
        place = torch.arange(PIXELS).double() / PIXELS
        risk = float((1 - place ** (1 / 8)).mean())
        return (place >= x[:, None] ** 8).double(), who, RATES * (risk - TARGET)
    return (x > 0.12).double()[:, None], who, RATES * (0.12 - TARGET)


def intervals(head: gmc.Head, scores: Tensor, who: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Estimate, low and high of each group in their order, ``(4,)`` each, from the audit's table."""
    table = head.audit(scores, torch.ones_like(scores, dtype=torch.bool), who, delta=DELTA).table
    place = [table["group"].index(name) for name in NAMES]
    estimate, low, high = (torch.tensor([table[key][k] for k in place]).double() for key in ("estimate", "low", "high"))
    return estimate, low, high


def plain(scores: Tensor, who: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and 1.96 standard errors of 1_A s, group by group."""
    s = (scores <= 0.5).double().mean(1) - TARGET
    terms = who * s[:, None]
    return terms.mean(0), 1.96 * terms.std(0) / len(s) ** 0.5


def simulate(shape: str, draws: int, n: int, seed: int = 4) -> dict[str, float]:
    """Shares of draws in which all intervals hold, and the width beside the oracle's."""
    rng = torch.Generator().manual_seed(seed)
    head = gmc.baselines.Unprocessed(TARGET, alpha=0.01, groups=NAMES)
    first = draw(shape, 20, torch.Generator().manual_seed(0))
    first[1][:4] |= torch.eye(4, dtype=torch.bool)
    head.fit(first[0], torch.ones_like(first[0], dtype=torch.bool), first[1])  # no threshold depends on it
    errors, widths, held, naive = [], [], 0, 0
    for _ in range(draws):
        scores, who, truth = draw(shape, n, rng)
        estimate, low, high = intervals(head, scores, who)
        mean, half = plain(scores, who)
        torch.testing.assert_close(estimate, mean)  # the audit measures what it says
        held += bool(((low <= truth) & (truth <= high)).all())
        naive += bool(((mean - truth).abs() <= half).all())
        errors.append((mean - truth).abs())
        widths.append((high - low) / 2)
    error = torch.stack(errors)
    spread = error.square().mean(0).sqrt()
    oracle = float((error / spread).amax(1).quantile(1 - DELTA)) * spread
    return {"ours": held / draws, "naive": naive / draws, "width": float((torch.stack(widths).mean(0) / oracle).median())}


def run(small: bool = False, tiny: bool = False) -> list[Row]:
    """The row of the speed table. No time is measured, so it is judged at every size."""
    draws, n = (20, 400) if tiny else (100, 2000) if small else (1000, 2000)
    rows = []
    for shape in SHAPES:
        found = simulate(shape, draws, n)
        rows.append(
            Row(
                benchmark="audit",
                work=f"audit, {shape}: {draws:,} draws of {n:,}, delta {DELTA}",
                unit="% of draws in which all intervals hold",
                ours=100 * found["ours"],
                naive=100 * found["naive"],
                target=">= 95 %",
                reached=found["ours"] >= 1 - DELTA,
                note=f"intervals {found['width']:.2f} x as wide as an oracle's (median over groups)",
            )
        )
    return rows


if __name__ == "__main__":
    print_table(run, __doc__)
