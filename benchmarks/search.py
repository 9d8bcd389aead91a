"""One search over very many intersection groups: time, peak memory, and how both grow.

    python -m benchmarks.search            # a few minutes; 100,000 groups at n = 1,000,000
    python -m benchmarks.search --small    # seconds

Each line is measured in a separate process (with ``--small`` all share one), so that its peak memory is its own. Times
are the best of three. *search* is one call of ``gmc.violations(groups, s)``; *first* is the first call, which also lays out the
tables; *build* is ``Groups.from_columns``. *pass* is the least any search must do: read every code and every s once and
add each s to some cell (numpy, one thread, in blocks whose memory is used again), and *ratio* is search / pass. *peak* is the
memory of the whole process, torch and the data in it; *extra* is by how much the first search raised it. *dense* is the plain
product of a membership table with s, where that fits.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import torchgmc as gmc
from benchmarks.rows import Row
from benchmarks.timing import header, ratios

#: Bytes the membership table and its floating-point copy may take for the dense product to be tried.
DENSE_BYTES = 2**31
HEADER = (
    f"{'n':>9} {'columns':>8} {'groups':>9} {'u':>2} | {'search':>8} {'first':>8} {'build':>8} {'pass':>8} {'ratio':>6} "
    f"{'peak':>8} {'extra':>8} | {'dense':>8} {'peak':>8}"
)


def peak() -> float:
    """Largest resident memory of this process so far, in GB."""
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def best(work: Callable[[], Any], repeats: int = 3) -> float:
    """Shortest time in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def one_pass(codes: torch.Tensor, s: torch.Tensor, block: int = 1 << 14) -> list[Any]:
    """Read every code and every s once, and add each s to a cell; in blocks that stay in the cache, in memory used again."""
    columns, values = codes.T.numpy(), s.T.numpy()
    key, size = np.empty(block, dtype=np.int64), int(columns.max(initial=0)) * len(columns) + 1
    total = np.zeros((len(values), size))
    for start in range(0, values.shape[1], block):
        part = key[: min(block, values.shape[1] - start)]
        columns[:, start : start + block].sum(0, dtype=np.int64, out=part)
        for into, value in zip(total, values[:, start : start + block], strict=True):
            into += np.bincount(part, value, size)
    return [*total]


def reading(codes: torch.Tensor, s: torch.Tensor) -> float:
    """Read all bytes once."""
    return float(np.bitwise_or.reduce(codes.T.numpy().reshape(-1))) + float(s.numpy().sum())


def measure(n: int, columns: int, levels: int, u: int, dense: bool) -> dict[str, Any]:
    """One line, in this process."""
    rng = np.random.default_rng(0)
    data = {f"c{j}": rng.integers(0, levels, n) for j in range(columns)}
    start = time.perf_counter()
    groups = gmc.Groups.from_columns(data, intersections=min(3, columns))
    made = time.perf_counter() - start
    del data
    s = torch.from_numpy(rng.normal(size=(n, u)))
    if dense:
        member = groups.membership
        return {"dense": best(lambda: gmc.violations(member, s), 1), "peak": peak()}
    before = peak()
    start = time.perf_counter()
    table = gmc.violations(groups, s)
    first = time.perf_counter() - start
    extra = peak() - before
    assert np.isclose(sum(map(np.sum, one_pass(groups.codes, s))), float(s.sum()))
    for index in np.linspace(0, len(groups) - 1, 20).astype(int).tolist():  # agreement before time
        torch.testing.assert_close(table[index], s[groups.member(index)].sum(0) / n)
    search = best(lambda: gmc.violations(groups, s))
    return {
        "groups": len(groups), "made": made, "first": first, "search": search, "pass": best(lambda: one_pass(groups.codes, s)),
        "read": best(lambda: reading(groups.codes, s)), "extra": extra, "peak": peak(),
        "passes": ratios(lambda: gmc.violations(groups, s), lambda: one_pass(groups.codes, s), 7 if n > 1000 else 1),
    }  # fmt: skip


def case(n: int, columns: int, levels: int, u: int, dense: bool, apart: bool) -> dict[str, Any]:
    """One measurement, in a separate process if ``apart``."""
    if not apart:
        return measure(n, columns, levels, u, dense)
    text = json.dumps({"n": n, "columns": columns, "levels": levels, "u": u, "dense": dense})
    command = [sys.executable, "-m", "benchmarks.search", "--case", text]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)  # type: ignore[no-any-return]


def line(n: int, columns: int, levels: int, u: int = 1, apart: bool = True) -> None:
    """One line, in separate processes if ``apart``."""
    got = case(n, columns, levels, u, False, apart)
    plain = f"{'no room':>8} {'':>8}"
    if n * got["groups"] * 9 <= DENSE_BYTES:  # bool and float64
        other = case(n, columns, levels, u, True, apart)
        plain = f"{other['dense']:7.3f}s {other['peak']:6.2f}GB"
    print(
        f"{n:9,d} {f'{columns}x{levels}':>8} {got['groups']:9,d} {u:2d} | {got['search']:7.3f}s {got['first']:7.3f}s "
        f"{got['made']:7.3f}s {got['pass']:7.4f}s {got['search'] / got['pass']:5.0f}x {got['peak']:6.2f}GB "
        f"{got['extra']:6.2f}GB | {plain}",
        flush=True,
    )


def run(small: bool = False, tiny: bool = False) -> list[Row]:
    """The row of the speed table; the dense product at a size where its table has room."""
    full = not (small or tiny)
    n, columns, levels = (500, 4, 3) if tiny else (20_000, 12, 8) if small else (1_000_000, 12, 8)
    got = case(n, columns, levels, 1, False, full)
    few = n if tiny else 2_000
    fits, plain = case(few, columns, levels, 1, False, full), case(few, columns, levels, 1, True, full)
    row = Row(
        benchmark="search",
        work=f"one search over {got['groups']:,.0f} intersection groups, n = {n:,}",
        unit="passes over codes and s",
        ours=got["passes"][0],
        naive=plain["dense"] / fits["pass"],
        limit=got["read"] / got["pass"],
        target="<= 5 s, <= 4 GB",
        reached=(got["search"] <= 5 and got["peak"] <= 4) if full else None,
        note=f"{got['search']:.3g} s ({got['first']:.3g} s the first time), {got['peak']:.2f} GB in all; naive is the dense "
        f"product, at n = {few:,}, where ours takes {fits['search'] / fits['pass']:.3g} passes",
        spread=got["passes"][1:],
    )
    return [row]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a quick run")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one line, as JSON, in this process
    options = parser.parse_args(arguments)
    if options.case:
        print(json.dumps(measure(**json.loads(options.case))))
        return
    print(f"{header()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("intersections of up to 3 columns (columns x levels); s in float64\n\nthe figure: <= 5 s, <= 4 GB at n = 1,000,000")
    print(HEADER)
    if options.small:
        for n, columns, levels in ((1_000, 8, 5), (20_000, 8, 5), (20_000, 12, 8), (20_000, 3, 4)):
            line(n, columns, levels, apart=False)
        return
    line(1_000_000, 12, 8)
    line(1_000_000, 12, 8, u=4)
    line(1_000_000, 3, 47)  # about as many groups from three columns
    print("\nwith n\n" + HEADER)
    for n in (10_000, 100_000, 1_000_000):
        line(n, 12, 8)
    print("\nwith groups\n" + HEADER)
    for columns, levels in ((3, 4), (5, 4), (8, 5), (12, 8), (16, 10)):
        line(1_000_000, columns, levels)
    print("\ndense product\n" + HEADER)
    for n, columns, levels in ((100_000, 5, 4), (10_000, 8, 5), (2_000, 12, 8)):
        line(n, columns, levels)


if __name__ == "__main__":
    main()
