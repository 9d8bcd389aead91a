"""Audit and monitor: how often they are right where the truth is known, how wide intervals are, what is found, and the time.

    python -m benchmarks.audit            # writes results/audit.md and .json; continues where it was stopped
    python -m benchmarks.audit --restart  # forgets what is there
    python -m benchmarks.audit --small    # fewer draws, written nowhere

Nothing is fitted, but for the demo and the drift. Populations: *miss rates*, mass-weighted and per group (skewed, sd 0.06, six
groups of all to a twentieth); *exponential* errors of the same groups; *coverage*, 90 % in nine groups of which some have 2 %;
*cells*, p - y in 50 groups x 10 level sets; *text*, small probabilities against everybody's mean (the asymptotic method);
*clusters*, ten equal values each. *naive* are the usual intervals of one mean each (estimate +- 1.96 standard errors).
Variances, and how far values lie, come from one more draw, the calibration. The oracle knows the law of all errors and takes
the narrowest intervals, in proportion to their spreads, that hold at once in 95 % of 1,000 other draws.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchgmc as gmc
from benchmarks.rows import Row, as_markdown
from benchmarks.timing import machine
from torchgmc.audits import betting
from torchgmc.audits.intervals import Rows
from torchgmc.engine.clusters import total
from torchgmc.engine.values import Names
from torchgmc.monitor import Watch

RESULTS = Path(__file__).parent / "results"
#: Goals of the guaranteed method: width over the oracle's, of the group in the middle and of the widest.
MIDDLE, WIDEST = 1.35, 1.6
REMARKS = """## What the figures do not reach

- *Widths*: the goals (1.35 in the middle, 1.6 for the widest, set in advance) are reached in every row but *exponential*
  errors (1.69), a population that was added after the others. One allowance for values too rare to be seen serves all groups,
  mass-weighted or per group (`torchgmc.audits.far`; per group it was 1.39 and 1.92 before), and jumps are bet on as Poisson's
  test judges them (cells: 1.93 before). Widths depend on the one draw that gives the variances. With three others (10 draws
  of cells, 25 of the rest, the same oracle) the widest was 1.59, 1.69 and 1.64 in cells, so that 1.6 is just met or just missed
  there; 1.49 to 1.52 per group, 1.53 to 1.57 for miss rates, 1.25 to 1.31 in *coverage*. What is proved, and what was tried
  besides (drawing lots; a test in two parts), is in [notebooks/paper.md](../../notebooks/paper.md). "Median" is the mean of the two
  middle groups where their number is even.
- *Coverage above 99 %* of clusters (99.2 %, goal 95 to 99 %) and of cells (40 of 40 draws): these populations have no values too
  rare to be seen, so that intervals which allow for them hold too often.
- *Text*: 1.8 % of the asymptotic intervals are too skewed for the method, keep the exact ends, and are hundreds of
  times as wide, which is what the mean over draws shows; the median over draws and g was 0.98 times the oracle's in a
  separate run of 600 draws.

Choices were made after looking at such results, on other draws: how much of the capital one value may take (0.97;
0.95 to 0.99 differ by 1 %), the size of the loss that is hedged (third moment over second; of about ten variants); and on
other draws of these populations: the asymptotic ends, the outer of Hall's and the normal ones (of about nine variants), the
constants of `torchgmc.audits.far` (of about seven), and the powers, the aim and the prior of cells in
`torchgmc.audits.betting` and `intervals` (of about 25). *monitor* and *coverage, per group* do not bet like this and are of an
earlier day."""
TARGET, DELTA, ALPHA = 0.075, 0.05, 0.005
RATES = torch.tensor([1.0, 0.5, 0.4, 0.25, 0.1, 0.05]).double()


class Draw(NamedTuple):
    """Values ``(n, u)``, membership ``(n, a)``, true violations ``(a, u)``, and options of the rows."""

    s: Tensor
    who: Tensor
    truth: Tensor
    options: dict[str, object]


def beta(mean: float | Tensor, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Miss rates with this mean and about the spread of the demo's."""
    a = torch.as_tensor(mean).double().expand(shape) * 18.0
    x, y = (torch._standard_gamma(v, generator=rng) for v in (a, 18.0 - a))
    return x / (x + y)


def miss_rates(n: int, rng: torch.Generator, off: float = 0.0, conditional: bool = False) -> Draw:
    """Six groups; with ``off``, all members of the fourth, and nobody else, deviate by ``off`` in its (weighted) mean."""
    who = torch.rand(n, 6, generator=rng).double() < RATES
    own = torch.zeros(6).double()
    mean = torch.full((n,), TARGET).double()
    if off:
        shift = off if conditional else off / float(RATES[3])
        mean = mean + shift * who[:, 3]
        own = shift * torch.where(torch.arange(6) == 3, 1.0, RATES[3])
    truth = own if conditional else own * RATES
    return Draw(beta(mean, (n,), rng)[:, None] - TARGET, who, truth[:, None], {"bounds": (-TARGET, 1 - TARGET)})


def exponential(n: int, rng: torch.Generator) -> Draw:
    """Errors of the same groups, with a tail that falls more slowly."""
    who = torch.rand(n, 6, generator=rng).double() < RATES
    s = (-0.06 * torch.rand(n, 1, generator=rng).double().log() - 0.06).clamp_max(0.94)
    return Draw(s, who, torch.zeros(6, 1).double(), {"bounds": (-0.06, 0.94)})


def coverage(n: int, rng: torch.Generator) -> Draw:
    """90 % everywhere; two groups of 2 %."""
    rates = torch.tensor([1.0, 0.5, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.02])
    who = torch.rand(n, 9, generator=rng) < rates
    s = (torch.rand(n, 1, generator=rng) < 0.9).double() - 0.9
    return Draw(s, who, torch.zeros(9, 1).double(), {"bounds": (-0.9, 0.1), "two_valued": True})


def cells(n: int, rng: torch.Generator) -> Draw:
    """f - y of a calibrated f, in 50 groups and 10 level sets."""
    f, who = (
        torch.rand(n, generator=rng).double() ** 2,
        torch.rand(n, 50, generator=rng) < torch.linspace(0.02, 0.62, 50),
    )
    error = f - (torch.rand(n, generator=rng) < f).double()
    s = torch.zeros(n, 10).double().scatter(1, (10 * f).long()[:, None], error[:, None])
    level = torch.arange(10).double()
    return Draw(s, who, torch.zeros(50, 10).double(), {"bounds": (level / 10 - 1, (level + 1) / 10), "levels": True})


def text(n: int, rng: torch.Generator) -> Draw:
    """Probabilities near 0.0015 of six lists, three groups."""
    who = torch.rand(n, 3, generator=rng) < torch.tensor([0.5, 0.3, 0.2])
    s = 0.0015 * torch.exp(0.8 * torch.randn(n, 6, generator=rng).double() - 0.32)
    return Draw(s.clamp_max(1.0), who, torch.zeros(3, 6).double(), {"bounds": (0.0, 1.0), "relative": True})


def clusters(n: int, rng: torch.Generator) -> Draw:
    """Ten equal values in each cluster."""
    found = miss_rates(n // 10, rng)
    ids = torch.arange(n // 10).repeat_interleave(10)
    return Draw(found.s[ids], found.who[ids], found.truth, found.options | {"cluster": ids[:, None]})


def rows_of(draw: Draw, calibration: Draw | None = None) -> Rows:
    """As an audit keeps them, with the variances of other data."""
    n, more = len(draw.s), dict(draw.options)
    cluster = more.pop("cluster", torch.zeros(n, 0, dtype=torch.int64))
    if calibration is not None:
        more |= {"variance": variance_of(calibration), "tail": calibration.s.abs().amax(0)}
    return Rows.of(draw.s, draw.who, torch.ones(n).double(), cluster, more.pop("bounds"), **more)  # type: ignore[arg-type]


def variance_of(draw: Draw) -> Tensor:
    """n times the squared standard error of each mass-weighted mean, as a head keeps it, ``(a, u)``."""
    s, who, relative = draw.s, draw.who.double(), bool(draw.options.get("relative"))
    s, who = (s - s.mean(0), who - who.mean(0)) if relative else (s, who)
    values = (who[:, :, None] * s[:, None]).flatten(1)
    cluster = draw.options.get("cluster", torch.zeros(len(s), 0, dtype=torch.int64))
    return total(values, cluster).square().sum(0).view(who.shape[1], -1) / len(s)  # type: ignore[arg-type]


def means(draw: Draw, conditional: bool) -> Tensor:
    """Violation of each g, ``(a, u)``."""
    s = draw.s - draw.s.mean(0) if draw.options.get("relative") else draw.s
    who = draw.who.double()
    return (who.T @ s) / (who.sum(0)[:, None] if conditional else len(s))


def plain(draw: Draw, conditional: bool) -> tuple[Tensor, Tensor]:
    """Mean and 1.96 standard errors, g by g, as if alone and normal."""
    s = draw.s - draw.s.mean(0) if draw.options.get("relative") else draw.s
    terms, share = draw.who.double()[:, :, None] * s[:, None], draw.who.double().mean(0)[:, None]
    mean = terms.mean(0) / (share if conditional else 1.0)
    rest = terms - (draw.who.double()[:, :, None] if conditional else 1.0) * mean
    return mean, 1.96 * rest.std(0) / (share if conditional else 1.0) / len(s) ** 0.5


def oracle_of(make: Callable[[torch.Generator], Draw], draws: int, conditional: bool) -> Tensor:
    """Half-widths of the narrowest intervals, in proportion to their spreads, that hold at once in 95 % of other draws."""
    rng = torch.Generator().manual_seed(7)
    found = (make(rng) for _ in range(draws))
    error = torch.stack([(means(draw, conditional) - draw.truth).nan_to_num(0.0).abs().flatten() for draw in found])
    spread = error.square().mean(0).sqrt().clamp_min(1e-12)
    return float((error / spread).amax(1).quantile(1 - DELTA)) * spread


def least_of(draw: Draw, conditional: bool, level: Tensor) -> Tensor:
    """About the least length of ends that hold with probability 1 - level for every law, ``(2, G)``: low and high.

    The proof is in notebooks/paper.md ("How narrow a guaranteed interval can be"). It is that of the end in the middle of all
    samples, from the law of one unit as the draw shows it; the sum of n logarithms is taken as normal. Level: ``(2, G)``.
    """
    count, columns = draw.who.shape[1], draw.s.shape[1]
    low, high = (torch.as_tensor(end).double().expand(columns).repeat(count) for end in draw.options["bounds"])  # type: ignore[attr-defined]
    low, high = low.clamp_max(0.0), high.clamp_min(0.0)
    who, s, cluster = draw.who.double(), draw.s, draw.options.get("cluster")
    if cluster is not None:  # of equal values: one of each
        first = torch.unique(cluster, return_inverse=True)[1].flatten().diff(prepend=torch.tensor([-1])) != 0  # type: ignore[no-untyped-call]
        who, s = who[first], s[first]
    member = who[:, :, None].expand(-1, -1, columns).flatten(1)
    share = member / member.sum(0) if conditional else torch.full_like(member, 1.0 / len(s))  # (n, G)
    units = member.sum(0) if conditional else torch.full((member.shape[1],), float(len(s))).double()
    x = (who[:, :, None] * s[:, None]).flatten(1)
    y = ((x - (share * x).sum(0) - low) / (high - low)).clamp(0.0, 1.0)  # the truth is 0
    zero = -low / (high - low)
    found = []
    for z, d, at in ((1.0 - y, level[0], 1.0 - zero), (y, level[1], zero)):
        rare = (1.0 - at) * (1.0 - (2.0 * d) ** (1.0 / units))  # too rare to be seen, at the end of the range
        jumps = draw.options.get("levels") or draw.options.get("two_valued")  # whose sums are not normal for few values
        found.append(rare if jumps else torch.maximum(rare, least_end(z, share, units, d, at)))
    return torch.stack(found) * (high - low)


def least_end(y: Tensor, share: Tensor, n: Tensor, level: Tensor, mean: Tensor) -> Tensor:
    """The same for high ends of means of n values in [0, 1], whose law has these shares at y, ``(k, G)``; others ``(G,)``."""
    near, far = mean, torch.ones_like(mean)
    for _ in range(30):
        m = (near + far) / 2
        step = (m - y) / (1.0 - m)
        least, most = torch.zeros_like(m), torch.ones_like(m)
        for _ in range(20):  # all on it, or where the other law has no need of the end of the range
            bet = (least + most) / 2
            fits = (share / (1.0 + bet * step).clamp_min(1e-12)).sum(0) < 1.0
            least, most = torch.where(fits, bet, least), torch.where(fits, most, bet)
        ratio = (1.0 + least * step).clamp_min(1e-12)  # of the two laws
        log = ratio.log()
        spread = (n * ((share * log.square()).sum(0) - (share * log).sum(0).square()).clamp_min(0.0)).sqrt()
        seen = (n * (share / ratio).sum(0).clamp_max(1.0).log()).exp() * torch.special.ndtr(-spread)
        near, far = torch.where(seen > level, m, near), torch.where(seen > level, far, m)
    return far - mean


def simulate(
    make: Callable[[torch.Generator], Draw], draws: int, conditional: bool, method: str = "exact", others: int = 1000
) -> dict[str, float]:
    """Shares of draws in which all intervals hold and in which the worst g is within its bound; widths beside the oracle's."""
    rng = torch.Generator().manual_seed(4)
    halves, held, naive, worst, alphas = [], 0, 0, 0, []
    calibration = make(torch.Generator().manual_seed(99))
    for _ in range(draws):
        draw = make(rng)
        found = rows_of(draw, calibration).judge(None, DELTA, conditional, method)
        mean, half = plain(draw, conditional)
        torch.testing.assert_close(found.estimate, mean.nan_to_num(0.0), atol=1e-9, rtol=0)  # it measures what it says
        held += bool(((found.low <= draw.truth) & (draw.truth <= found.high)).all())
        naive += bool(((mean - draw.truth).abs() <= half).all())
        worst += float(found.bound.max()) >= float(draw.truth.abs().max())
        halves.append(((found.high - found.low) / 2).flatten())
        alphas.append(float(found.bound.max()))
    oracle = oracle_of(make, others, conditional)
    ratio, least = torch.stack(halves).mean(0) / oracle, torch.full((2, len(oracle)), math.nan).double()
    if method == "exact":
        tests, _, _ = rows_of(calibration, calibration)._tests(conditional)
        equal = torch.full((2, len(oracle)), 0.5 / len(oracle)).double()
        levels = (equal, tests.shares(DELTA) if isinstance(tests, betting.Units) else equal)
        least = torch.stack([least_of(calibration, conditional, DELTA * part).mean(0) / oracle for part in levels])
    middle = torch.tensor(0.5).double()
    return {
        "held": 100 * held / draws,
        "naive": 100 * naive / draws,
        "worst": 100 * worst / draws,
        "width": float(ratio.quantile(middle)),
        "widest": float(ratio.max()),
        "least": float(least[1].quantile(middle)),
        "least widest": float(least[1].max()),
        "least equal": float(least[0].max()),
        "alpha": sum(alphas) / draws,
    }


def verdicts(off: float, draws: int, n: int) -> tuple[float, float]:
    """Percent of draws in which a group off by this much is called violated, and in which all is certified."""
    rng = torch.Generator().manual_seed(5)
    violated = certified = 0
    calibration = miss_rates(n, torch.Generator().manual_seed(99))
    for _ in range(draws):
        found = rows_of(miss_rates(n, rng, off), calibration).judge(ALPHA, DELTA, False)
        violated += bool(found.verdict[3, 0] == 2)
        certified += bool((found.bound <= ALPHA).all())
    return 100 * violated / draws, 100 * certified / draws


def monitor(runs: int, batches: int, off: float, quiet: int = 0, group: bool = False) -> tuple[float, float]:
    """Percent of runs with an alarm (delta 0.01), and the median number of examples from the change to it.

    Batches of 100, six g: everyone and five disjoint groups of a sixth. From batch ``quiet`` on everyone, or only the first
    group, deviates by ``off``, weighted by mass; before, nobody.
    """
    rng = torch.Generator().manual_seed(6)
    watch = Watch(Names([str(k) for k in range(6 * runs)], [""]), ALPHA, 0.01, False)
    when = torch.full((runs,), math.inf)
    for batch in range(batches):
        place = torch.randint(6, (100, runs), generator=rng)
        shift = 0.0 if batch < quiet else (6 * off * (place == 0).double() if group else off)
        s = beta(TARGET + shift, (100, runs), rng) - TARGET  # sd about 0.06
        inside = torch.cat([torch.ones(100, runs, 1), torch.nn.functional.one_hot(place, 6)[:, :, :5]], 2)
        x = (s[:, :, None] * inside).flatten(1)
        ones = torch.ones(100).double()
        rows = watch._rows(x, torch.ones(100, 1).bool(), ones, torch.zeros(100, 0).long(), (-TARGET, 1 - TARGET))
        watch._add(rows)
        log_e = watch.log_evidence().view(runs, 12).logsumexp(1) - math.log(12)
        when = torch.where((log_e >= math.log(100)) & when.isinf(), 100.0 * (batch + 1 - quiet), when)
    return 100 * float(when.isfinite().double().mean()), float(when.median())


Cell = Callable[[], list[Row]]


def run(small: bool = False, tiny: bool = False) -> list[Row]:
    """Coverage, width, power, false certificates, the monitor, and the time of one audit."""
    return [row for cell in cells_of(small, tiny).values() for row in cell()]


def cells_of(small: bool, tiny: bool) -> dict[str, Cell]:
    """What is measured, by name; each takes at most some minutes, so that an interruption costs no more."""
    found: dict[str, Cell] = dict(widths(small, tiny))
    found |= {"power": lambda: power(small, tiny), "monitor": lambda: watching(small, tiny)}
    found |= {"time": lambda: timing(small, tiny), "drift": drift}
    return found if small or tiny else found | {"demo": demo}


def widths(small: bool, tiny: bool) -> Iterator[tuple[str, Cell]]:
    """How often intervals hold, and how wide they are."""
    draws, n = (3, 300) if tiny else (40, 2000) if small else (400, 2000)
    others = 3 if tiny else 300 if small else 1000
    few = max(3, draws // 10)
    big = 300 if tiny else 5000
    cases: list[tuple[str, Callable[[torch.Generator], Draw], int, bool, str, int]] = [
        ("miss rates", lambda rng: miss_rates(n, rng), draws, False, "exact", n),
        ("miss rates", lambda rng: miss_rates(big, rng), draws, False, "exact", big),
        ("miss rates, per group", lambda rng: miss_rates(n, rng), draws, True, "exact", n),
        ("exponential errors", lambda rng: exponential(n, rng), draws, False, "exact", n),
        ("coverage, per group", lambda rng: coverage(n, rng), draws, True, "exact", n),
        ("coverage", lambda rng: coverage(n, rng), draws, False, "exact", n),
        (f"{n:,} clusters of 10", lambda rng: clusters(10 * n, rng), draws, False, "exact", 10 * n),
        ("50 x 10 cells", lambda rng: cells(big, rng), few, False, "exact", big),
        ("text, asymptotic", lambda rng: text(n // 2, rng), draws, False, "asymptotic", n // 2),
    ]
    for case in cases:
        yield f"{case[0]}, {case[5]}", lambda case=case: width_row(*case, others, tiny)  # type: ignore[misc]


def width_row(
    name: str,
    make: Callable[[torch.Generator], Draw],
    count: int,
    conditional: bool,
    method: str,
    size: int,
    others: int,
    tiny: bool,
) -> list[Row]:
    """One population."""
    found = simulate(make, count, conditional, method, others)
    error = math.sqrt(DELTA * (1 - DELTA) / count)
    exact = method == "exact"
    narrow = tiny or not exact or (found["width"] <= MIDDLE and found["widest"] <= WIDEST)
    right = min(found["held"], found["worst"]) >= 100 * (1 - DELTA - 3 * error)
    limit = ""
    if exact and found["widest"] > WIDEST:
        away = found["widest"] / found["least widest"] - 1
        limit = (
            f"; the least at the levels of these ends is about {found['least']:.2f} and {found['least widest']:.2f}, so the "
            f"widest is {100 * max(away, 0.0):.0f} % above it"
        )
        if found["least equal"] > WIDEST:
            limit += f"; with equal levels for all ends {WIDEST} is out of reach: least {found['least equal']:.2f}"
    return [
        Row(
            "audit",
            f"audit, {name}: {count} draws of {size:,}, delta {DELTA}",
            "% of draws in which all intervals hold",
            found["held"],
            f">= 95 % (less 3 standard errors of {100 * error:.1f})"
            + (f", width <= {MIDDLE} (median) and {WIDEST} (widest)" if exact else ""),
            bool(right and narrow),
            found["naive"],
            note=(
                f"intervals {found['width']:.2f} x as wide as an oracle's (median over g; "
                f"widest {found['widest']:.2f}{limit}); "
                f"the certificate is right in {found['worst']:.1f} %, mean certified alpha {found['alpha']:.4f}"
            ),
        )
    ]


def power(small: bool, tiny: bool) -> list[Row]:
    """What is found, and what is falsely certified."""
    draws, n, big = (3, 300, 300) if tiny else (40, 2000, 5000) if small else (200, 2000, 5000)
    off, _ = verdicts(2 * ALPHA, draws, n)
    rows = [
        Row(
            "audit",
            f"audit, a group at 2 alpha: {draws} draws of {n:,}",
            "% found violated",
            off,
            ">= 95 %",
            None if tiny else off >= 95,
        )
    ]
    called, wrong = verdicts(ALPHA, draws, big)
    note = f"called violated in {called:.1f} %"
    text_of = f"audit, a group exactly at alpha: {draws} draws of {big:,}"
    rows.append(Row("audit", text_of, "% falsely certified", wrong, f"<= {100 * DELTA:g} %", wrong <= 100 * DELTA, note=note))
    return rows


def watching(small: bool, tiny: bool) -> list[Row]:
    """False alarms, and how long a change stays unnoticed."""
    runs, batches = (3, 10) if tiny else (200, 200) if small else (1000, 200)
    alarms, _ = monitor(runs, batches, ALPHA)
    work = f"monitor, everyone exactly at alpha: {runs} runs of {100 * batches:,} examples, delta 0.01"
    rows = [Row("audit", work, "% false alarms", alarms, "<= 1 %", alarms <= 1.0)]
    times = {}
    for name, by, group in (("everyone", 2, False), ("everyone", 5, False), ("a sixth", 2, True), ("a sixth", 5, True)):
        quiet = batches // 2
        at_once = monitor(max(3, runs // 20), batches, by * ALPHA, 0, group)
        later = monitor(max(3, runs // 20), batches + quiet, by * ALPHA, quiet, group)
        times[f"{name} at {by} alpha"] = (at_once[1], later[1], later[0])
    shown = "; ".join(
        f"{name}: {a:,.0f} at once, {b:,.0f} after {100 * (batches // 2):,} quiet ones (found in {c:.0f} % of runs)"
        for name, (a, b, c) in times.items()
    )
    delay = times["a sixth at 5 alpha"][0]
    rows.append(Row("audit", "monitor, median delay", "examples", delay, "-", None, note=f"(group of a sixth, 5 alpha); {shown}"))
    return rows


def timing(small: bool, tiny: bool) -> list[Row]:
    """One audit of many g."""
    big = 300 if tiny else 5000
    draw = cells(10 * big, torch.Generator().manual_seed(0))
    start = time.perf_counter()
    rows_of(draw).judge(ALPHA, DELTA, False)
    spent = time.perf_counter() - start
    start = time.perf_counter()
    plain(draw, False)
    note = f"naive: means and standard errors of the same {10 * big:,} x 500"
    return [Row("audit", f"audit, 50 x 10 cells, n = {10 * big:,}", "s", spent, "-", None, time.perf_counter() - start, note=note)]


def pictures(n: int, seed: int, drift: float = 0.0) -> tuple[Tensor, Tensor, gmc.Groups]:
    """The README's pictures; those of a new camera, which is used in the dark, are fainter by ``drift``."""
    rng = torch.Generator().manual_seed(seed)
    masks = torch.rand(n, 32, 32, generator=rng) < 0.3
    dark, old = torch.rand(n, generator=rng) < 0.3, torch.rand(n, generator=rng) < 0.5
    logits = 3 * masks + torch.randn(n, 32, 32, generator=rng) - 1.5 - (1.0 + drift) * dark[:, None, None]
    columns = {"light": ["dark" if d else "bright" for d in dark], "age": ["old" if o else "young" for o in old]}
    return torch.sigmoid(logits), masks, gmc.Groups.from_columns(columns)


def drift() -> list[Row]:
    """A camera that fails in the dark, 200 pictures later: does the gate shut?"""
    scores, masks, groups = pictures(200, 0)
    head = gmc.ThresholdHead(target=TARGET, alpha=ALPHA, groups=groups.names).fit(scores, masks, groups)
    found = head.audit(*pictures(200, 2, 0.65))
    place = found.table["group"].index("light=dark")
    low, high, risk = (found.table[key][place] for key in ("low", "high", "risk"))
    note = (
        f"dark pictures: miss rate {100 * risk:.0f} % instead of {100 * TARGET:g} %, interval of the mass-weighted deviation "
        f"[{low:+.3f}, {high:+.3f}]; so `torchgmc audit` exits with 1. The bounds used before (empirical Bernstein, union) "
        "gave [-0.005, +0.130], all groups undecided, exit code 0"
    )
    work = "audit, 200 pictures of a camera that fails in the dark"
    count = found.table["verdict"].count("violated")
    return [Row("audit", work, "of 5 groups found violated", count, ">= 1", found.violated, note=note)]


def demo() -> list[Row]:
    """The demo's 5,000 drawn pictures, with the network that it trains."""
    from torchgmc.demo import fnr

    with tempfile.TemporaryDirectory() as folder:
        found = fnr.run(folder, progress=False).audits
    ours = found["GMC"]
    note = (
        f"measured {ours.max_violation:.4f}, promised {ours.alpha:g}: "
        f"{'certified' if ours.certified else 'not certified'}; the bounds used before certified 0.0093"
    )
    reached = ours.certified and ours.certified_alpha <= 0.0042
    work = "`torchgmc demo fnr`, 5,000 pictures"
    return [Row("audit", work, "certified alpha", ours.certified_alpha, "<= 0.0042", reached, note=note)]


def page(kept: dict[str, Any]) -> str:
    """The Markdown page of all cells that are there."""
    cells = [kept["cells"][name] for name in cells_of(False, False) if name in kept["cells"]]
    rows = [Row(**row) for cell in cells for row in cell["rows"]]
    seconds = sum(cell["seconds"] for cell in cells)
    lines = ["# Audits and the monitor: `python -m benchmarks.audit`", "", *(__doc__ or "").strip().splitlines()[6:], ""]
    lines += [*(f"- {name}: {value}" for name, value in kept["machine"].items()), f"- took: {seconds:.0f} s in all", ""]
    return "\n".join([*lines, as_markdown(rows), "", REMARKS]) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Measure what is not there yet, cell by cell, and write the page after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--restart", action="store_true", help="forget what was measured")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.small:
        print(as_markdown(run(small=True)))
        return
    file = RESULTS / "audit.json"
    kept = json.loads(file.read_text()) if file.is_file() and not given.restart else {"machine": machine(), "cells": {}}
    for name, cell in cells_of(False, False).items():
        if name in kept["cells"]:
            continue
        start = time.perf_counter()
        rows = [asdict(row) for row in cell()]
        kept["cells"][name] = {"seconds": round(time.perf_counter() - start, 1), "rows": rows}
        file.write_text(json.dumps(kept, indent=1) + "\n")
        print(name, f"{kept['cells'][name]['seconds']:.0f} s", file=sys.stderr, flush=True)
        (RESULTS / "audit.md").write_text(page(kept))
    (RESULTS / "audit.md").write_text(page(kept))
    print(page(kept))


if __name__ == "__main__":
    main()
