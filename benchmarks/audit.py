"""Audit and monitor: how often they are right where the truth is known, how wide intervals are, what is found, and the time.

    python -m benchmarks.audit            # 100 draws of 2,000 examples, 1,000 quiet runs of the monitor (some minutes)
    python -m benchmarks.audit --small    # 40 draws, 200 runs

Nothing is fitted. Populations: *miss rates*, mass-weighted and per group (skewed, sd 0.06, six groups of all to a twentieth);
*coverage*, 90 % in nine groups of which some have 2 %; *cells*, p - y in 50 groups x 10 level sets; *text*, small probabilities
against everybody's mean (the asymptotic method); *clusters*, ten equal values each. *naive* are the usual intervals of one mean
each (estimate +- 1.96 standard errors). Variances come from one more draw, the calibration. The oracle knows the law of all
errors and takes the narrowest intervals, in proportion to their spreads, that hold at once in 95 % of 1,000 other draws.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.rows import Row, as_markdown
from benchmarks.timing import header
from torchgmc.audits.intervals import Rows
from torchgmc.engine.clusters import total
from torchgmc.engine.values import Names
from torchgmc.monitor import Watch

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
        more["variance"] = variance_of(calibration)
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


def least_of(draw: Draw, conditional: bool, oracle: Tensor) -> Tensor:
    """About the least that a guaranteed interval can be, beside the oracle's: ``(G,)``.

    A population may have values at the end of the range that are so rare that none is seen with probability d: an upper end
    that holds with probability 1 - d cannot be nearer than (top - mean) (1 - d^(1/n)), and a lower end likewise.
    """
    n, a, u = len(draw.s), draw.who.shape[1], draw.s.shape[1]
    low, high = (torch.as_tensor(end).double().expand(u).repeat(a) for end in draw.options["bounds"])  # type: ignore[attr-defined]
    if draw.options.get("relative"):
        return torch.full_like(oracle, math.nan)
    cluster = draw.options.get("cluster")
    units = torch.full((a * u,), float(n if cluster is None else len(torch.unique(cluster))))  # type: ignore[call-overload]
    if conditional:
        units = units * draw.who.double().mean(0).repeat_interleave(u)
    unseen = 1.0 - (DELTA / (2 * a * u)) ** (1.0 / units)
    ends = [unseen * high.clamp_min(0) / oracle, -unseen * low.clamp_max(0) / oracle]
    return torch.stack(ends).clamp_min(1.0).mean(0)


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
    ratio, least = torch.stack(halves).mean(0) / oracle, least_of(calibration, conditional, oracle)
    return {
        "held": 100 * held / draws,
        "naive": 100 * naive / draws,
        "worst": 100 * worst / draws,
        "width": float(ratio.median()),
        "widest": float(ratio.max()),
        "least": float(least.median()),
        "least widest": float(least.max()),
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


def run(small: bool = False, tiny: bool = False, only: str = "", tell: bool = False) -> list[Row]:
    """Coverage, width, power, false certificates, the monitor, and the time of one audit; or one part of that."""
    rows = []
    for name, part in {"widths": widths, "power": power, "monitor": watching, "time": timing}.items():
        for row in part(small, tiny) if only in ("", name) else ():
            rows.append(row)
            if tell:
                print(as_markdown([row]).splitlines()[2], row.note, sep="\n", file=sys.stderr, flush=True)
    return rows


def widths(small: bool, tiny: bool) -> Iterator[Row]:
    """How often intervals hold, and how wide they are."""
    draws, n = (3, 300) if tiny else (40, 2000) if small else (100, 2000)
    others = 3 if tiny else 300 if small else 1000
    few = max(3, draws // 5)
    big = 300 if tiny else 5000
    cases: list[tuple[str, Callable[[torch.Generator], Draw], int, bool, str, int]] = [
        ("miss rates", lambda rng: miss_rates(n, rng), draws, False, "exact", n),
        ("miss rates", lambda rng: miss_rates(big, rng), draws, False, "exact", big),
        ("miss rates, per group", lambda rng: miss_rates(n, rng), draws, True, "exact", n),
        ("coverage, per group", lambda rng: coverage(n, rng), draws, True, "exact", n),
        ("coverage", lambda rng: coverage(n, rng), draws, False, "exact", n),
        ("2,000 clusters of 10" if n == 2000 else "clusters", lambda rng: clusters(10 * n, rng), draws, False, "exact", 10 * n),
        ("50 x 10 cells", lambda rng: cells(big, rng), few, False, "exact", big),
        ("text, asymptotic", lambda rng: text(n // 2, rng), draws, False, "asymptotic", n // 2),
    ]
    for name, make, count, conditional, method, size in cases:
        found = simulate(make, count, conditional, method, others)
        least = 100 * (1 - DELTA - 3 * math.sqrt(DELTA * (1 - DELTA) / count))
        judged = method == "exact"
        narrow = tiny or not judged or (found["width"] <= 1.35 and found["widest"] <= 1.6)
        right = bool(found["held"] >= least and found["worst"] >= least and narrow)
        limit = (
            f"; the least any guaranteed method can have is about {found['least']:.2f} and {found['least widest']:.2f}" * judged
        )
        yield Row(
            "audit",
            f"audit, {name}: {count} draws of {size:,}, delta {DELTA}",
            "% of draws in which all intervals hold",
            found["held"],
            f">= 95 % (less 3 standard errors){', width <= 1.35 (median) and 1.6 (widest)' if judged else ''}",
            right,
            found["naive"],
            note=(
                f"intervals {found['width']:.2f} x as wide as an oracle's (median over g; "
                f"widest {found['widest']:.2f}{limit}); "
                f"the certificate is right in {found['worst']:.1f} %, mean certified alpha {found['alpha']:.4f}"
            ),
        )


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
    rows.append(
        Row("audit", "monitor, median delay", "examples", delay, "-", None, note=f"(group of a sixth, 5 alpha); {shown}")
    )
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
    return [
        Row("audit", f"audit, 50 x 10 cells, n = {10 * big:,}", "s", spent, "-", None, time.perf_counter() - start, note=note)
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument(
        "--only", default="", choices=("widths", "power", "monitor", "time"), help="one part; all give the whole"
    )
    given = parser.parse_args()
    print(header())
    print(as_markdown(run(given.small, only=given.only, tell=True)))
