"""Multicalibration: ProbabilityHead against HKRR, HJZ (`multicalibration`), MCGrad (`mcgrad`) and Fortuna, same data, one run.

    python -m benchmarks.multicalibration                        # n = 1e4, 1e5; add --sizes 1e4 1e5 1e6 for all
    python -m benchmarks.multicalibration --only torchgmc        # without the other packages (extra `bench`)

50 overlapping groups, 10 level sets. Two problems: in the first the model's logit is wrong by a sum of group effects; in
the second there are also 40 effects of pairs of groups and slopes that differ by group, which no sum of group effects
expresses and boosted trees can learn. For every method: seconds to fit (on the wall, and of all processors: the
latter suffers less from a busy machine), peak memory added, worst |violation| over group x
level set on the calibration data and on 200,000 fresh examples (20,000 for HKRR and HJZ, which predict in Python loops), and
Brier score on both. Violations are mass-weighted, of each method's own output. A method that does not finish within
`--limit` seconds is stopped and says so.
"""

import argparse
import contextlib
import importlib
import importlib.util
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from queue import Empty
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchgmc as gmc
from benchmarks.rows import Row
from benchmarks.timing import header, ratios

GROUPS, BINS, TEST = 50, 10, 200_000
#: Rows of a block of a search.
BLOCK = 1 << 12
NAMES = [f"g{j}" for j in range(GROUPS)]
#: What is wrong with the model of each problem; only the first is of the family that a fit without learned groups has.
KINDS = {"additive": "errors that are sums over groups", "interactions": "errors of pairs of groups"}
STARTUP = 300.0  # seconds for a process to import what it needs and make its data, which are not counted


class Problem(NamedTuple):
    """Probabilities h ``(n,)``, outcomes ``(n,)`` float, membership ``(n, 50)``."""

    probs: Tensor
    y: Tensor
    groups: Tensor


Predict = Callable[[Problem], Tensor]
Fit = Callable[[Problem, float], Predict]


def problem(n: int, kind: str = "additive", seed: int = 0, draw: int = 0) -> Problem:
    """``draw`` numbers the samples of one population (``seed``)."""
    world = torch.Generator().manual_seed(seed)
    share = 0.05 + 0.45 * torch.rand(GROUPS, generator=world)
    effect = 0.35 * torch.randn(GROUPS, generator=world)
    pairs = torch.randint(0, GROUPS, (40, 2), generator=world)
    pair_effect = 0.6 * torch.randn(40, generator=world)
    slope = 0.09 * torch.randn(GROUPS, generator=world)
    rng = torch.Generator().manual_seed(1000 * seed + draw + 1)
    groups = torch.rand(n, GROUPS, generator=rng) < share
    base = 1.8 * torch.randn(n, generator=rng) - 1.0  # the model's logit
    logit = base + groups.float() @ effect - share @ effect
    if kind == "interactions":
        both = (groups[:, pairs[:, 0]] & groups[:, pairs[:, 1]]).float()
        logit += (both - share[pairs].prod(1)) @ pair_effect + base.clamp(-2, 2) * (groups.float() @ slope - share @ slope)
    y = (torch.rand(n, generator=rng) < logit.sigmoid()).float()
    return Problem(base.sigmoid(), y, groups)


def search(f: Tensor, y: Tensor, member: Tensor) -> Tensor:
    """One full search: violations of every group x level set, ``(50, 10)``; member is floating.

    In blocks of rows that stay in the cache, in memory that is used again.
    """
    total, spread = torch.zeros(member.shape[1], BINS), torch.empty(BLOCK, BINS)
    for p, truth, inside in zip(f.split(BLOCK), y.split(BLOCK), member.split(BLOCK), strict=True):
        level = (p * BINS).long().clamp(max=BINS - 1)
        room = spread[: len(p)].zero_().scatter_(1, level[:, None], (p - truth)[:, None])
        total.addmm_(inside.T, room)
    return total / len(f)


def fit_torchgmc(data: Problem, alpha: float) -> Predict:
    head = gmc.ProbabilityHead(alpha, NAMES, bins=BINS).fit(data.probs, data.y, data.groups)
    return lambda new: torch.cat([head(p, g) for p, g in zip(new.probs.split(50_000), new.groups.split(50_000), strict=True)])


def fit_learned(data: Problem, alpha: float) -> Predict:
    """Trees over the named groups and the model's output; no other features."""
    head = gmc.ProbabilityHead(alpha, NAMES, bins=BINS, learn=gmc.Trees())
    head.fit(data.probs, data.y, data.groups, features=torch.zeros(len(data.y), 0))
    return lambda new: head(new.probs, new.groups, features=torch.zeros(len(new.y), 0))


def fit_mcgrad(data: Problem, alpha: float, **options: Any) -> Predict:
    """Every group is a 0/1 column; alpha has no counterpart."""
    import pandas as pd
    from mcgrad.methods import MCGrad

    def frame(part: Problem) -> "pd.DataFrame":
        table = pd.DataFrame(part.groups.numpy().astype("int8"), columns=NAMES)
        return table.assign(h=part.probs.double().numpy(), y=part.y.int().numpy())

    model = MCGrad(**options)
    model.fit(frame(data), "h", "y", categorical_feature_column_names=[], numerical_feature_column_names=NAMES)
    return lambda new: torch.from_numpy(
        model.predict(frame(new), "h", categorical_feature_column_names=[], numerical_feature_column_names=NAMES)
    ).float()


def fit_mcgrad_fast(data: Problem, alpha: float) -> Predict:
    return fit_mcgrad(data, alpha, num_rounds=5, early_stopping=False)


def fit_hkrr(data: Problem, alpha: float) -> Predict:
    params = {"lambda": 1 / BINS, "alpha": alpha, "max_iter": 30, "randomized": True, "use_oracle": False}
    return fit_package("HKRR", data, params)


def fit_hjz(data: Problem, alpha: float) -> Predict:
    params = {"algorithm": "Hedge", "other_algorithm": "None", "lr": 0.9, "other_lr": 0.9, "n_bins": BINS, "iterations": 30}
    return fit_package("HJZ", data, params)


def fit_fortuna(data: Problem, alpha: float) -> Predict:
    """Level sets as ours, cells from 0.1 % on (its default finds none large enough). It stops on the loss, not on alpha."""
    import jax.numpy as jnp
    from fortuna.conformal.multivalid.iterative.multicalibrator import Multicalibrator

    model = Multicalibrator()

    def arrays(part: Problem) -> dict[str, Any]:
        return {"groups": jnp.array(part.groups.numpy()), "values": jnp.array(part.probs.numpy())}

    model.calibrate(scores=jnp.array(data.y.numpy()), n_buckets=BINS, bucket_types=("=",), min_prob_b=0.001, **arrays(data))

    def predict(new: Problem) -> Tensor:
        return torch.tensor(model.apply_patches(**arrays(new)).tolist())

    return predict


def naive_patches(data: Problem, alpha: float, max_iter: int = 10_000) -> tuple[Predict, int]:
    """Plain greedy patching: one full search a step, the worst cell is moved by its mean deviation. The fit, and its steps."""
    f, member = data.probs.clone(), data.groups.float()
    log: list[tuple[int, int, float]] = []
    while len(log) < max_iter:
        table = search(f, data.y, member)
        worst = int(table.abs().argmax())
        group, level = divmod(worst, BINS)
        if abs(float(table[group, level])) <= alpha:
            break
        log.append((group, level, float((f - data.y)[in_cell(data, f, group, level)].mean())))
        f = patched(data, f, *log[-1])

    def predict(new: Problem) -> Tensor:
        out = new.probs
        for patch in log:
            out = patched(new, out, *patch)
        return out

    return predict, len(log)


def in_cell(data: Problem, f: Tensor, group: int, level: int) -> Tensor:
    """Who is in a group and a level set."""
    return data.groups[:, group] & ((f * BINS).long().clamp(max=BINS - 1) == level)


def patched(data: Problem, f: Tensor, group: int, level: int, shift: float) -> Tensor:
    """One patch."""
    return torch.where(in_cell(data, f, group, level), (f - shift).clamp(0, 1), f)


def fit_package(name: str, data: Problem, params: dict[str, Any]) -> Predict:
    from multicalibration import MulticalibrationPredictor

    def members(part: Problem) -> list[Any]:
        return [part.groups[:, j].nonzero()[:, 0].numpy() for j in range(GROUPS)]

    model = MulticalibrationPredictor(name)
    model.fit(data.probs.double().numpy(), data.y.int().numpy(), members(data), params)
    return lambda new: torch.from_numpy(model.predict(new.probs.double().numpy(), members(new))).float()


METHODS: dict[str, tuple[str | None, Fit, float, int | None]] = {
    # name: (package, fit, largest n worth waiting for, rows to predict, None for all)
    "torchgmc": (None, fit_torchgmc, float("inf"), None),
    "torchgmc, learned": (None, fit_learned, float("inf"), None),
    "mcgrad, 5 rounds": ("mcgrad", fit_mcgrad_fast, float("inf"), None),
    "mcgrad, default": ("mcgrad", fit_mcgrad, 1e5, None),
    "HKRR": ("multicalibration", fit_hkrr, 1e5, 20_000),
    "HJZ": ("multicalibration", fit_hjz, 1e5, 20_000),
    "fortuna": ("fortuna", fit_fortuna, 1e5, 20_000),
}
#: What a package's fit imports, done before the clock starts.
MODULES = {
    "mcgrad": ["pandas", "mcgrad.methods"],
    "multicalibration": ["multicalibration"],
    "fortuna": ["jax.numpy", "fortuna.conformal.multivalid.iterative.multicalibrator"],
}
#: How many times faster than each we want to be.
TARGETS = {"mcgrad, 5 rounds": 10, "mcgrad, default": 50, "HKRR": 200, "fortuna": 200}


class Watch:
    """Peak resident memory above the start, in MB, sampled every 5 ms."""

    def __enter__(self) -> "Watch":
        self.start = self.peak = self._now()
        self.going = True
        self.thread = threading.Thread(target=self._loop, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.going = False
        self.thread.join()
        self.added = (self.peak - self.start) / 2**20

    def _loop(self) -> None:
        while self.going:
            self.peak = max(self.peak, self._now())
            time.sleep(0.005)

    @staticmethod
    def _now() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _timed(fit: Fit, data: Problem, alpha: float) -> tuple[Predict, tuple[float, float]]:
    """The fitted method, and the seconds on the wall and of all processors that it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    predict = fit(data, alpha)
    return predict, (time.perf_counter() - wall, time.process_time() - cpu)


def measure(name: str, kind: str, n: int, alpha: float, threads: int, fresh: int, out: Any) -> None:
    """One method on one problem, in a separate process; numbers go to the queue ``out``."""
    torch.set_num_threads(threads)
    package, fit, _, rows = METHODS[name]
    for module in MODULES.get(package or "", []):
        importlib.import_module(module)
    data, test = problem(n, kind), problem(fresh, kind, draw=1)
    if package is None:
        fit(problem(2000, kind, draw=2), alpha)  # the first call of anything is slow
    out.put(None)  # ready: the limit counts from here
    with Watch() as watch:
        predict, times = _timed(fit, data, alpha)
    every = [times] if name != "torchgmc" else [times, *(_timed(fit, data, alpha)[1] for _ in range(4))]
    seconds, cpu = (sorted(column)[len(every) // 2] for column in zip(*every, strict=True))  # the median of short ones
    row: dict[str, float] = {"seconds": seconds, "cpu": cpu, "memory": watch.added}
    row |= {"least": min(own for _, own in every), "most": max(own for _, own in every)}
    out.put(row)
    few = [Problem(*(t[:rows] for t in part)) for part in (data, test)]
    for part, where in zip(few, ("cal", "test"), strict=True):
        f = predict(part)
        row[f"worst {where}"] = float(search(f, part.y, part.groups.float()).abs().max())
        row[f"brier {where}"] = float((f - part.y).square().mean())
    out.put(row)


def run_one(name: str, kind: str, n: int, alpha: float, threads: int, limit: float, fresh: int = TEST) -> dict[str, float] | None:
    """`measure` in a separate process, stopped after ``limit`` seconds; what is known by then."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    os.environ["OMP_NUM_THREADS"] = str(threads)  # of the child, and so of every method
    os.environ["TQDM_DISABLE"] = "1"
    process = context.Process(target=measure, args=(name, kind, n, alpha, threads, fresh, queue), daemon=True)
    process.start()
    with contextlib.suppress(Empty):
        queue.get(timeout=STARTUP)
    row, end = None, time.monotonic() + limit
    while (process.is_alive() or not queue.empty()) and time.monotonic() < end and (row is None or "worst test" not in row):
        with contextlib.suppress(Empty):
            row = queue.get(timeout=0.2)
    process.kill()
    process.join()
    return row


def one_search(n: int, threads: int) -> float:
    """Median processor time of one full search over all cells."""
    torch.set_num_threads(threads)
    data = problem(n)
    member = data.groups.float()
    times = []
    for _ in range(8):
        start = time.process_time()
        search(data.probs, data.y, member)
        times.append(time.process_time() - start)
    return sorted(times[1:])[3]


def reading(data: Problem) -> float:
    """Read every byte once."""
    words = data.groups.flatten()
    return float(words[: len(words) // 8 * 8].view(torch.int64).sum()) + float(data.probs.sum()) + float(data.y.sum())


def show(row: dict[str, float] | None, name: str, limit: float) -> str:
    if row is None:
        return f"{name:18s} stopped after {limit:g} s"
    tail = (
        f"{row['worst cal']:10.4f} {row['worst test']:10.4f} {row['brier cal']:10.4f} {row['brier test']:10.4f}"
        if "worst test" in row
        else f"  (prediction stopped after {limit:g} s)"
    )
    return f"{name:18s} {row['seconds']:9.3f} {row['cpu']:9.3f} {row['memory']:9.0f} {tail}"


def check(n: int, alpha: float) -> None:
    """The promise by the definition, cell by cell, and the search against a plain loop."""
    data = problem(n)
    f = fit_torchgmc(data, alpha)(data)
    table = search(f, data.y, data.groups.float())
    level = (f * BINS).long().clamp(max=BINS - 1)
    for group in range(0, GROUPS, 7):
        for k in range(BINS):
            inside = data.groups[:, group] & (level == k)
            expected = float(((f - data.y) * inside).double().sum() / n)
            assert abs(float(table[group, k]) - expected) <= 1e-5, (group, k)
    floor = 4 / n**0.5  # the solver stops at the noise of a cell
    assert float(table.abs().max()) <= max(alpha, floor) + 1e-6


def compare(n: int, kind: str, alpha: float, threads: int, limit: float, fresh: int) -> dict[str, dict[str, float] | str]:
    """Every method once: its numbers, or why there are none."""
    found: dict[str, dict[str, float] | str] = {}
    for name, (package, _, largest, _) in METHODS.items():
        if package is not None and importlib.util.find_spec(package) is None:
            found[name] = "not installed"
        elif package is not None and os.environ.get("TORCHGMC_BENCHMARKS") == "ours":
            found[name] = "not run"
        elif n <= largest:
            got = run_one(name, kind, n, alpha, threads, limit if package else STARTUP, fresh)
            found[name] = got if got is not None else f"stopped after {limit:g} s"
    return found


def run(small: bool = False, tiny: bool = False) -> list[Row]:
    """The rows of the speed table: against the peers, and in searches at a large n. Processor time of one thread."""
    full, alpha = not (small or tiny), 0.005
    n, large = (400, 400) if tiny else (4_000, 20_000) if small else (100_000, 1_000_000)
    check(n, alpha)
    rows = []
    kinds = [("interactions", n), ("additive", n), ("interactions", large)]
    for kind, size in () if tiny else kinds if full else kinds[:1]:  # other processes, other packages
        found = compare(size, kind, alpha, 1, *((8.0, 5_000) if small else (900.0, TEST)))
        rows.append(against_peers(size, kind, found, one_search(size, 1), full))
    torch.set_num_threads(1)
    data = problem(large)
    member, repeat = data.groups.float(), 1 if tiny else 5

    def passes(work: Callable[[], Any], often: int = repeat) -> tuple[float, float, float]:
        return ratios(work, lambda: search(data.probs, data.y, member), often)

    (middle, *spread), (read, *_) = passes(lambda: fit_torchgmc(data, alpha)), passes(lambda: reading(data))
    greedy, steps = naive_patches(data, alpha, 1000)
    fresh = problem(TEST if full else 20_000, draw=1)
    quality = {
        name: (float(search(f, fresh.y, fresh.groups.float()).abs().max()), float((f - fresh.y).square().mean()))
        for name, f in (("ours", fit_torchgmc(data, alpha)(fresh)), ("naive", greedy(fresh)))
    }
    rows.append(
        Row(
            benchmark="multicalibration",
            work=f"multicalibration, n = {large:,}, {GROUPS} groups, {BINS} bins, alpha {alpha}",
            unit="full searches",
            ours=middle,
            naive=passes(lambda: naive_patches(data, alpha, 1000), 1)[0],
            limit=read,
            target="<= 25 searches",
            reached=middle <= 25 if full else None,
            note=f"naive is greedy patching with one search for each of its {steps} steps; worst violation and Brier on fresh "
            "data: " + "; ".join(f"{name} {worst:.4f}, {brier:.4f}" for name, (worst, brier) in quality.items()),
            spread=spread,
        )
    )
    return rows


def against_peers(n: int, kind: str, found: dict[str, dict[str, float] | str], once: float, full: bool) -> Row:
    """One line: times beside ours, and who has the smaller worst violation and Brier score on fresh data."""
    ours = found["torchgmc"]
    assert isinstance(ours, dict) and "worst test" in ours, ours
    peers: dict[str, float | str] = {}
    reached: list[bool] = []
    notes = [f"ours {ours['cpu']:.3g} s, on fresh data worst {ours['worst test']:.4f}, Brier {ours['brier test']:.4f}"]
    for name, got in found.items():
        if name == "torchgmc":
            continue
        own = name.startswith("torchgmc")
        if isinstance(got, str):
            peers |= {} if own else {name: got}
            continue
        peers |= {} if own else {name: got["cpu"] / once}
        ratio = got["cpu"] / ours["cpu"]
        fresh = f", worst {got['worst test']:.4f}, Brier {got['brier test']:.4f}" if "worst test" in got else ""
        notes.append(f"{'ours with `learn=gmc.Trees()`' if own else name} {ratio:.3g} x our time{fresh}")
        if name in TARGETS:
            better = "worst test" not in got or all(ours[key] <= got[key] for key in ("worst test", "brier test"))
            reached.append(ratio >= TARGETS[name] and better)
    return Row(
        benchmark="multicalibration",
        work=f"multicalibration of a model with {KINDS[kind]}, n = {n:,}, {GROUPS} groups, {BINS} bins, alpha 0.005",
        unit="full searches",
        ours=ours["cpu"] / once,
        peers=peers,
        target=">= 50 x faster than mcgrad (10 x than its fastest setting), >= 200 x than HKRR and fortuna; "
        "smaller worst violation and Brier",
        reached=all(reached) if full and reached else None,
        note="; ".join(notes),
        spread=[ours[end] / once for end in ("least", "most") if end in ours] or None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=float, default=[1e4, 1e5])
    parser.add_argument("--alphas", nargs="+", type=float, default=[0.005, 0.001])
    parser.add_argument("--kinds", nargs="+", default=["additive", "interactions"])
    parser.add_argument("--only", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one method on one problem")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(header(), f"load {os.getloadavg()[0]:.1f}", sep=", ")
    for n in (int(size) for size in options.sizes):
        once = one_search(n, options.threads)
        print(f"\nn = {n}: one full search {once * 1e3:.1f} ms")
        for kind in options.kinds:
            start = problem(TEST, kind, draw=1)
            worst = float(search(start.probs, start.y, start.groups.float()).abs().max())
            brier = float((start.probs - start.y).square().mean())
            print(f"\n{kind}: unprocessed on fresh data: worst {worst:.4f}, Brier {brier:.4f}")
            titles = ("seconds", "cpu s", "MB", "worst cal", "worst new", "Brier cal", "Brier new")
            print(" " * 18 + "".join(f"{title:>{10 + (k > 2)}s}" for k, title in enumerate(titles)))
            own = None
            for name in options.only:
                package, _, largest, _ = METHODS[name]
                if package is not None and importlib.util.find_spec(package) is None:
                    print(f'{name:18s} not installed: pip install "torchgmc[bench]"')
                    continue
                for alpha in options.alphas if name in ("torchgmc", "HKRR") else options.alphas[:1]:
                    if n > largest:
                        continue
                    row = run_one(name, kind, n, alpha, options.threads, options.limit)
                    label = f"{name} {alpha:g}" if name in ("torchgmc", "HKRR") else name
                    ratio = ""
                    if row is not None and name == "torchgmc":
                        own = own or row
                        ratio = f"  = {row['cpu'] / once:.1f} searches"
                    elif row is not None and own is not None:
                        ratio = f"  = {row['seconds'] / own['seconds']:.0f} x torchgmc ({row['cpu'] / own['cpu']:.0f} x its cpu)"
                    print(show(row, label, options.limit) + ratio, flush=True)


if __name__ == "__main__":
    main()
