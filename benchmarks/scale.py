"""What heads cost as examples and processes grow: bytes and time a row, bytes exchanged, memory and processor time of a rank.

    python -m benchmarks.scale                       # every missing measurement, for up to 7 minutes; run it again for the rest
    python -m benchmarks.scale --heads probability --sizes 100000 1000000 --processes 1 2
    python -m benchmarks.scale --page                # writes benchmarks/results/scale.md from what there is
    python -m benchmarks.scale --parquet 100000000 --folder DIR   # `torchgmc calibrate` of a file of so many rows, made in DIR

Each measurement is a process (or several, over gloo) by itself, kept in benchmarks/results/scale.json at once: the command may
be stopped and started again. Every rank makes its own rows, in batches. Memory is the largest resident set beyond that before
the first row, so it contains the rows; times are of the processor.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed as dist

import torchgmc as gmc
from benchmarks import fnr, overhead
from benchmarks.timing import machine
from torchgmc.distributed import exchanged_bytes

RESULTS = Path(__file__).parent / "results"
BATCH = 100_000
SIZES, PROCESSES = (100_000, 1_000_000, 10_000_000), (1, 2, 4)
TREE = {"x": ["x1", "x2"], "y": ["y1", "y2", "y3"]}
#: What a page says of the state before rows stayed on their ranks: measured at commit 16fa66e, with the machine busy.
BEFORE = """\
| head | bytes a row at the peak | exchanged | processor time of a rank, 1 / 2 / 4 processes (1 = alone) |
|---|---|---|---|
| probability, 50 groups | 786 to 860 | all rows | 1 / 1.16 / 1.00 |
| quantile | - | all rows | 1 / 1.04 / 1.04 |
| tree | - | all rows | 1 / 1.00 / 1.10 |"""


def probability(n: int, g: torch.Generator) -> tuple[Tensor, ...]:
    """One event, 50 groups."""
    member = torch.rand(n, 50, generator=g) < 0.2
    z = 1.5 * torch.randn(n, generator=g)
    y = torch.rand(n, generator=g) < torch.sigmoid(z + 0.7 * member[:, 0] - 0.4 * member[:, 1])
    return torch.sigmoid(z), y, member


def hidden(n: int, g: torch.Generator) -> tuple[Tensor, ...]:
    """One event, 5 groups, 20 features of which two matter together."""
    x, z, member = torch.randn(n, 20, generator=g), torch.randn(n, generator=g), torch.rand(n, 5, generator=g) < 0.3
    truth = z + 1.5 * ((x[:, 0] > 0) & (x[:, 1] > 0.5)) - 0.5 * member[:, 0]
    return torch.sigmoid(z), torch.rand(n, generator=g) < torch.sigmoid(truth), member, x


def distribution(n: int, g: torch.Generator) -> tuple[Tensor, ...]:
    """Logits of 100 tokens, 3 lists, 10 groups."""
    member = torch.rand(n, 10, generator=g) < 0.3
    return torch.randn(n, 100, generator=g) + member[:, :1] * torch.eye(100)[3], member


def quantile(n: int, g: torch.Generator) -> tuple[Tensor, ...]:
    """Conformity scores, 5 groups."""
    member = torch.rand(n, 5, generator=g) < 0.3
    return torch.randn(n, generator=g).abs() * (1 + 0.4 * member[:, 0]), member


def threshold(n: int, g: torch.Generator) -> tuple[Tensor, ...]:
    """Images of 8 x 8, 4 groups."""
    member = torch.rand(n, 4, generator=g) < 0.3
    masks = torch.rand(n, 8, 8, generator=g) < 0.4
    return torch.sigmoid(2.0 * masks + torch.randn(n, 8, 8, generator=g) - member[:, 0, None, None].float()), masks, member


def tree(n: int, g: torch.Generator) -> tuple[Tensor, ...]:
    """Five leaves under two branches."""
    probs = (1.5 * torch.randn(n, 5, generator=g)).softmax(1)
    return probs, torch.multinomial(probs, 1, generator=g)[:, 0]


def _names(count: int) -> list[str]:
    return [f"group {k}" for k in range(count)]


HEADS: dict[str, tuple[Callable[[], gmc.Head], Callable[[int, torch.Generator], tuple[Tensor, ...]]]] = {
    "probability": (lambda: gmc.ProbabilityHead(0.005, _names(50)), probability),
    "probability-trees": (lambda: gmc.ProbabilityHead(None, _names(5), learn=gmc.Trees()), hidden),
    "distribution": (lambda: gmc.DistributionHead({"a": [3, 4], "b": [4, 5], "c": [9]}, 0.002, _names(10)), distribution),
    "quantile": (lambda: gmc.QuantileHead(0.9, 0.01, _names(5)), quantile),
    "quantile-bins": (lambda: gmc.QuantileHead(0.9, 0.01, _names(5), bins=5, range=(0.0, 5.0)), quantile),
    "quantile-counts": (lambda: gmc.QuantileHead(0.9, 0.01, _names(5), resolution=0.001), quantile),
    "quantile-levels": (lambda: gmc.QuantileHead(0.9, 0.01, _names(5), bins=5, range=(0.0, 5.0), resolution=0.001), quantile),
    "threshold": (lambda: gmc.ThresholdHead(0.1, 0.01, _names(4)), threshold),
    "tree": (lambda: gmc.TreeHead(TREE, 0.9, 0.02), tree),
}


#: Bytes kept a row, by the formulas of the notes.
KEPT = {"probability": 24 + 7, "distribution": 8 * 4 + 16 + 10, "quantile": 24 + 5, "quantile-bins": 24 + 5, "tree": 8 * 2 + 40 + 1}


def _resident() -> int:
    """Largest resident set so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def batches(name: str, n: int, rank: int, world: int) -> Iterator[tuple[Tensor, ...]]:
    """This rank's part of n rows, the same rows for any number of ranks."""
    for place in range(-(-n // BATCH)):
        if place % world == rank or n <= BATCH:
            rows = HEADS[name][1](min(BATCH, n - place * BATCH), torch.Generator().manual_seed(place))
            yield rows if n > BATCH else tuple(t[rank::world] for t in rows)


def _named(rows: tuple[Tensor, ...]) -> Any:
    """The rows of a head that learns by the names of its arguments; others as they are."""
    return dict(zip(("probs", "y", "groups", "features"), rows, strict=True)) if len(rows) == 4 else rows


def worker(name: str, n: int, world: int, rank: int, store: str) -> dict[str, Any]:
    """One rank: the same fit of 1,000 rows first, so that what is loaded once does not count."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    HEADS[name][0]().fit_batches(map(_named, batches(name, 1000, rank, world)))
    base, head, sent = _resident(), HEADS[name][0](), exchanged_bytes()
    observed = 0.0
    for rows in batches(name, n, rank, world):
        start = time.process_time()
        head.observe(**_named(rows)) if len(rows) == 4 else head.observe(*rows)
        observed += time.process_time() - start
    kept = sum(t.nbytes for t in _tensors(head.statistics))
    start, wall = time.process_time(), time.perf_counter()
    head.calibrate()
    found = {"observe": observed, "calibrate": time.process_time() - start, "wall": time.perf_counter() - wall, "kept": kept}
    found |= {"peak": _resident() - base, "sent": exchanged_bytes() - sent, "reached": head.report.reached}
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    state = [t.double().flatten()[:200].tolist() for key, t in head.state_dict().items() if t.is_floating_point()]
    return found | {"state": [value for part in state for value in part]}


def _tensors(value: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    gmc.distributed.pack(value, tensors)
    return tensors


def measure(name: str, n: int, world: int) -> list[dict[str, Any]]:
    """Every rank's figures."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.scale", "--worker", name, str(n), str(world)]
        ranks = [
            subprocess.Popen([*command, str(rank), f"{folder}/store"], stdout=subprocess.PIPE, text=True, env=env)
            for rank in range(world)
        ]
        texts = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank of {name}, n = {n:,}, {world} processes failed.")
    return [json.loads(text.splitlines()[-1]) for text in texts]


def write_rows(path: Path, n: int) -> None:
    """The rows of ``probability`` as a parquet file: a probability, a label, and a column for each of the 50 groups."""
    import pyarrow
    from pyarrow import parquet

    with contextlib.ExitStack() as stack:
        file = None
        for p, y, member in batches("probability", n, 0, 1):
            groups = member.T.contiguous()
            columns = {"p": p.numpy(), "y": y.numpy()} | {f"member[{k}]": one.numpy() for k, one in enumerate(groups)}
            table = pyarrow.table(columns)
            file = file or stack.enter_context(parquet.ParquetWriter(path, table.schema))
            file.write_table(table)


def from_parquet(folder: Path, n: int) -> dict[str, Any]:
    """``torchgmc calibrate`` of a file of n rows in a process by itself: its memory and time, and how good the head is."""
    folder.mkdir(parents=True, exist_ok=True)
    path, out, said = folder / f"rows_{n}.parquet", folder / f"head_{n}.safetensors", folder / f"head_{n}.json"
    made = multiprocessing.get_context("spawn").Process(target=write_rows, args=(path, n))  # this process stays small, since
    made.start()  # the largest resident set of the next contains what this one has when it starts
    made.join()
    command = [sys.executable, "-m", "torchgmc", "calibrate", "probability", str(path), "--groups", "member"]
    start = time.perf_counter()
    with said.open("w", encoding="utf-8") as text:
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        child = subprocess.Popen([*command, "--alpha", "0.005", "--out", str(out), "--json"], stdout=text, env=env)
        _, status, used = os.wait4(child.pid, 0)
    if status:
        raise RuntimeError(f"`{' '.join(command)}` ended with {status}.")
    found = {"file": path.stat().st_size, "peak": used.ru_maxrss * 1024, "processor": used.ru_utime + used.ru_stime}
    found |= {"wall": time.perf_counter() - start, "fit": json.loads(said.read_text(encoding="utf-8"))["fit"]["seconds"]}
    path.unlink()
    return found | fresh(gmc.load(out))


def fresh(head: gmc.Head, n: int = 1_000_000) -> dict[str, float]:
    """Brier score on new rows, and the largest mean difference of a group and level set, before and after."""
    p, y, member = probability(n, torch.Generator().manual_seed(1 << 40))
    found, inside = {}, torch.cat([member, torch.ones(n, 1, dtype=torch.bool)], 1).float()
    for name, f in (("before", p), ("after", head(p, member))):
        level = torch.nn.functional.one_hot((10 * f).long().clamp_max(9), 10).float()
        cells = inside.T @ (level * (f - y.float())[:, None])
        found |= {
            f"brier_{name}": float((f.double() - y.double()).square().mean()),
            f"worst_{name}": float(cells.abs().max()) / n,
        }
    return found


def unit(images: int = 118, size: int = 256, block: int = 1 << 16) -> dict[str, list[float]]:
    """Milliseconds of the processor for one naive pass over scores of 118 images of 256 x 256: least, middle, largest of 15.

    With fresh temporaries, in blocks whose temporaries are used again, and plain reading; and for a fit of the miss rate.
    """
    torch.set_num_threads(1)
    pictures = fnr.problem(images, size)
    scores, masks = (t.flatten() for t in pictures[:2])
    low, missed = torch.empty(block, dtype=torch.bool), torch.empty(block, dtype=torch.bool)

    def fresh() -> float:
        return float(((scores <= 0.5) & masks).sum() / masks.sum())

    def blocks() -> float:
        count = total = 0
        for one, mask in zip(scores.split(block), masks.split(block), strict=True):
            torch.le(one, 0.5, out=low[: len(one)])
            torch.logical_and(low[: len(one)], mask, out=missed[: len(one)])
            count, total = count + int(torch.count_nonzero(missed[: len(one)])), total + int(torch.count_nonzero(mask))
        return count / total

    assert abs(fresh() - blocks()) < 1e-5  # the same number before any time is taken

    def fit() -> gmc.Head:
        return gmc.ThresholdHead(fnr.TARGET, fnr.ALPHA, list("abcd"), noise_floor=False).fit(*pictures)

    found, reading = {}, ("plain reading", lambda: float(scores.sum()))
    for name, work in (
        ("fresh temporaries", fresh),
        ("in blocks", blocks),
        reading,
        ("fit to alpha, miss rate, 4 groups", fit),
    ):
        times = []
        for _ in range(15):
            start = time.process_time()
            work()
            times.append(1e3 * (time.process_time() - start))
        found[name] = [min(times), sorted(times)[7], max(times)]
    return found


def _cost(work: Callable[..., Any], *arguments: Any) -> float:
    """Milliseconds of the processor."""
    start = time.process_time()
    work(*arguments)
    return 1e3 * (time.process_time() - start)


def images() -> list[dict[str, float]]:
    """ThresholdHead by the size of images and the number of combinations of groups: bytes an image, times of batches."""
    torch.set_num_threads(1)
    found = []
    for groups, n, size, batch in ((4, 100_000, 8, 5000), (4, 200, 512, 10), (16, 3000, 32, 50), (50, 20_000, 8, 1000)):
        head, times, g = gmc.ThresholdHead(0.1, 0.01, _names(groups)), [], torch.Generator().manual_seed(0)
        for _ in range(n // batch):
            member, masks = (torch.rand(batch, *shape, generator=g) < 0.4 for shape in ((groups,), (size, size)))
            scores = torch.sigmoid(2.0 * masks + torch.randn(batch, size, size, generator=g) - member[:, :1, None].float())
            times.append(_cost(head.observe, scores, masks, member))
        half = len(times) // 2
        one = {"groups": groups, "images": n, "size": size, "batch": batch, "cells": len(head.statistics.member)}
        one |= {"kept": sum(t.nbytes for t in _tensors(head.statistics)) / n, "pixel": 1e6 * sum(times) / (n * size**2)}
        one |= {"first": sum(times[:half]) / half, "last": sum(times[half:]) / (len(times) - half), "largest": max(times)}
        found.append(one | {"calibrate": _cost(head.calibrate) / 1e3})
    return found


def softmaxes() -> list[list[float]]:
    """TreeHead.observe: leaves, rows, milliseconds of a softmax in blocks of the same matrix and of observe, middle of 9."""
    torch.set_num_threads(1)
    found = []
    for leaves, n in ((134, 46_985), (1000, 20_000)):
        probs, labels = torch.randn(n, leaves).mul_(3.0).softmax(1), torch.randint(leaves, (n,))
        head, out = (
            gmc.TreeHead([(f"branch {k % 7}", f"leaf {k}") for k in range(leaves)], 0.9, 0.02),
            torch.empty(2048, leaves),
        )

        def blocks(probs: Tensor = probs, out: Tensor = out) -> None:
            for some in probs.split(len(out)):
                torch.softmax(some, 1, out=out[: len(some)])

        def observe(head: gmc.Head = head, batch: tuple[Tensor, ...] = (probs, labels)) -> None:
            head.reset()
            head.observe(*batch)

        found.append([leaves, n, *(sorted(_cost(work) for _ in range(9))[4] for work in (blocks, observe))])
    return found


def load(path: Path) -> dict[str, Any]:
    """What was measured so far."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def page(found: dict[str, Any]) -> str:
    """The page: only what was measured."""
    cells = {
        tuple(key.split()): value
        for key, value in found.items()
        if key not in ("unit", "machine", "parquet", "images", "softmaxes", "positions")
    }
    lines = ["# Scale", "", "`python -m benchmarks.scale`, one thread per process."]
    lines += [f"- {name}: {value}" for name, value in found.get("machine", {}).items()]
    lines += ["", "## One process", "", "Processor time in microseconds, memory in bytes, each per row.", ""]
    lines[-1:] = ["`predicted`: processor time of calibrate and the peak from the same head's next smaller n, per row, divided by"]
    lines += ["those measured; bytes kept from the formula of the notes, divided by those kept.", ""]
    lines += [
        "| head | n | kept | peak | observe | calibrate | predicted: kept, peak, calibrate |",
        "|---|---|---|---|---|---|---|",
    ]
    last: dict[str, dict[str, float]] = {}
    for (name, n, world), ranks in sorted(cells.items(), key=lambda item: (item[0][0], int(item[0][1]))):
        if world == "1":
            one, rows = ranks[0], int(n)
            line = [name, f"{rows:,}", f"{one['kept'] / rows:.0f}", f"{one['peak'] / rows:.0f}"]
            line += [f"{1e6 * one[key] / rows:.2f}" for key in ("observe", "calibrate")]
            ratios = [KEPT[name] * rows / one["kept"]] if name in KEPT else []
            ratios += [last[name][key] * rows / one[key] for key in ("peak", "calibrate")] if name in last else []
            lines.append(f"| {' | '.join([*line, ', '.join(f'{ratio:.2f}' for ratio in ratios) or '-'])} |")
            last[name] = {key: one[key] / rows for key in ("peak", "calibrate")}
    lines += ["", "## Several processes", "", "Of the rank that needs most; `state`: largest difference from one process.", ""]
    lines += ["| head | n | processes | kB sent | MB at the peak | calibrate, s | state |", "|---|---|---|---|---|---|---|"]
    for (name, n, world), ranks in sorted(cells.items(), key=lambda item: (item[0][0], int(item[0][1]), int(item[0][2]))):
        if (name, n, "1") not in cells:
            continue
        most = {key: max(rank[key] for rank in ranks) for key in ("sent", "peak", "calibrate")}
        alone = cells[name, n, "1"][0]["state"]
        far = max((abs(a - b) for rank in ranks for a, b in zip(rank["state"], alone, strict=False)), default=0.0)
        same = all(len(rank["state"]) == len(alone) for rank in ranks)
        lines.append(
            f"| {name} | {int(n):,} | {world} | {most['sent'] / 1e3:,.0f} | {most['peak'] / 1e6:,.0f} | "
            f"{most['calibrate']:.2f} | {f'{far:.1g}' if same else 'other rounds'} |"
        )
    lines += ["", "Before rows stayed on their ranks (commit 16fa66e, a busy machine):", "", BEFORE]
    if "parquet" in found:
        lines += ["", "## From a parquet file", "", PARQUET, "| rows | file, GB | peak, GB | bytes a row | processor, s |"]
        lines[-1] += " microseconds a row | Brier | worst cell |"
        lines += ["|---|---|---|---|---|---|---|---|"]
        for n, one in sorted(found["parquet"].items(), key=lambda item: int(item[0])):
            line = [f"{int(n):,}", *(f"{one[key] / 1e9:.2f}" for key in ("file", "peak")), f"{one['peak'] / int(n):.0f}"]
            line += [f"{one['processor']:,.0f}", f"{1e6 * one['processor'] / int(n):.2f}"]
            line += [f"{one[f'{key}_before']:.5f}, {one[f'{key}_after']:.5f}" for key in ("brier", "worst")]
            lines.append(f"| {' | '.join(line)} |")
    if "unit" in found:
        lines += ["", "## The unit: one pass over the scores of 118 images of 256 x 256", ""]
        lines += ["Milliseconds of the processor, 15 runs.", "", "| | least | middle | largest |", "|---|---|---|---|"]
        lines += [f"| {name} | {' | '.join(f'{value:.1f}' for value in times)} |" for name, times in found["unit"].items()]
        fresh, blocks, reading, fit = (times[1] for times in found["unit"].values())
        passes = f"{fit / fresh:.2g} passes with fresh temporaries, {fit / blocks:.2g} in blocks, {fit / reading:.2g} readings"
        lines += ["", f"The fit is {passes} (the middle of each); some 1.5 of those in blocks to observe, 0.5 to calibrate."]
    if "images" in found:
        lines += ["", "## ThresholdHead: sizes of images and combinations of groups", ""]
        lines += ["Milliseconds of the processor a batch: mean of the first and of the second half, and the largest.", ""]
        lines += [
            "| groups | images | combinations | batch | bytes an image | first | second | largest | ns a pixel | calibrate, s |"
        ]
        lines += ["|" + "---|" * 10]
        for one in found["images"]:
            what = [
                f"{one['groups']}",
                f"{one['images']:,} of {one['size']} x {one['size']}",
                f"{one['cells']:,}",
                f"{one['batch']:,}",
            ]
            what += [f"{one['kept']:,.0f}", *(f"{one[key]:.1f}" for key in ("first", "last", "largest", "pixel", "calibrate"))]
            lines.append(f"| {' | '.join(what)} |")
    if "softmaxes" in found:
        lines += ["", "## TreeHead.observe in softmaxes of the same matrix", ""]
        lines += ["| leaves | rows | a softmax in blocks, ms | observe, ms | softmaxes |", "|---|---|---|---|---|"]
        for leaves, n, one, all_of_it in found["softmaxes"]:
            lines.append(f"| {leaves:,} | {n:,} | {one:.1f} | {all_of_it:.1f} | {all_of_it / one:.1f} |")
    if "positions" in found:
        lines += ["", "## A language model at every position", ""]
        lines += ["A GPT-2 of 6 layers at random, 50,257 tokens, 2 texts of 64; parts of the pass and the head together.", ""]
        lines += ["| width | pass, ms | `adjust_`, % | `head(logits, groups)`, % |", "|---|---|---|---|"]
        lines += [f"| {w} | {ms:.0f} | {100 * ours:.2f} | {100 * whole:.1f} |" for w, ms, ours, whole in found["positions"]]
    return "\n".join([*lines, "", *NOTES.splitlines()]) + "\n"


PARQUET = """\
`torchgmc calibrate probability rows.parquet --groups member --alpha 0.005`, 50 groups, one process and one thread.
The peak is all that the process holds, Python and torch too; Brier score and worst cell are of 1,000,000 new rows, before and
after.
"""
NOTES = """\
## How to read it

- A peak contains the batch of rows that is being made and what every fit needs once: at n = 100,000 that is most of it.
- Kept a row, of a groups: `probability` 24 + 1 + a // 8 bytes (a bit for each group), `quantile` 24 + a, `distribution` 16 + a
  and 8 for each atom of its lists, `tree` 40 + a and 8 for each edge of the longest path; `threshold` keeps tables.
- `probability` and `distribution` keep their rows on their ranks: what is sent does not depend on n beyond 32,768 examples
  (up to there each example sends a key of 8 bytes too, and a rank up to 4,097 of them beyond); `tree` and `quantile` do so
  from 32,769 examples on, and send their rows before. `quantile` also sends them with `finite_sample`, `solver="fresh"`, or
  more than 1,024 combinations of groups; with clusters it sends their ids, 8 bytes each, some 6 times (2 more for each level
  set), and the sums of clusters whose rows are on several ranks: keep the rows of a cluster on one rank. Its level sets
  (`quantile-bins`, 5 of them) add counts
  in 512 buckets, some 20 kB a step.
  `threshold` sends its tables. With `learn=gmc.Trees()`, `probability` sends its rows
  up to 32,768 of them, and so it does with clusters; from then on the sums of slopes and curvatures that trees are grown from,
  some 32,768 rows of features that say where to cut, and the 8,192 held-out values that rules are judged on, whatever n is
  (with clusters their ids too). `quantile` does the same with `learn`, with clusters too; a tree's leaves find their quantiles by
  counts of bytes, 9 sums each time they are fitted, some 100 kB with 4 leaves. So does `threshold` with `learn` (and with
  `fractional` or `resolution="exact"`, for which it keeps scores): those of up to 32,768 images are sent, those of more stay.
- With a fit of up to 2^23 entries of membership `probability` holds it as floats (8 bytes an entry; 4 where up to
  32,768 rows have more than 2^20 entries), with more as bits.
- Rows of up to 1e6, the unit, the images and the softmaxes were measured last (2026-11-19, an AMD EPYC of two cores, nothing
  beside them), after numpy's threads were gone from fits: `probability` took 5.7 s at 1e6 before, and 2.0 a rank of 4. Rows of
  1e7 are older: those of `probability` and `probability-trees` of an Intel Xeon of 2.1 GHz, the others beside other work.
- Before scores were counted in blocks `quantile` took 1.78 / 1.50 / 1.65 s at 1e6 with 1 / 2 / 4 processes, and 409 bytes a row
  in one; 27.8 s and 283 bytes a row at 1e7.
- Of 10 batches a rank of 4 has 2 or 3, and the first rank also searches the offsets from about 10,000 scores, while the others
  wait: the table says what the first needs, most often more than others. What is left of an exchange is waking: 1 to 2 ms
  of the processor each with four processes on the two cores of this virtual machine, nearly all in the kernel and in gloo's
  thread, whatever is sent (0.2 to 0.4 ms with two). A fit of `quantile` has 38 or 40 of them, `quantile-bins` 45 at 1e5 and 62
  at 1e6, `tree` 5 for each step (212 and 342); before sums that are needed together travelled together, and before what is known
  was kept, these were 64 and 67, 72 and 92, and 276 and 432. So at 1e5, where rows cost little, time of a rank does not fall from
  two processes to four (missed; that of the first may be a third above one process); at 1e6 it does.
- `quantile` sends 1 MB for each look at the scores near its thresholds: 2 looks at 1e5 and 1e6, 4 at
  1e7 (some 12, which is as many as it takes at most, before thresholds that stay ended them).
- `quantile-counts` and `quantile-levels` (5 level sets) keep counts (`resolution=0.001`): what they keep, and send, stops growing
  when every value that occurs has been seen; a rank sends all of its counts.
- `tree` sends the sums of every promise after each of 256 shifts of the moves it tries: the bytes follow the number of steps, not
  n (7 MB in those of 1e5 rows, 12 MB in those of 1e6). Sums are exact in any order, so that the state is the same to the bit.
  Before sums were exact and one sweep served all moves of a step: 7.4 / 9.3 / 13.3 s at 1e5, 108 / 50 / 39 s at 1e6, 27 MB, 598
  bytes a row at the peak.
- No figure above is of a size, or a number of processes, that is not in the tables.
- `threshold` keeps a table of 8 x 4,098 x folds bytes (5 folds; 1 without the noise rule) for each combination of groups and
  class. Where most of it would be 0, or it would exceed 128 MB, it keeps 16 bytes for each point of the lattice at which the
  curve of a combination rises (at most 66 kB an image and class, 16 bytes a relevant pixel) and a + 40 bytes a combination;
  no result changes. A batch is then joined with others when they are half as many: each entry is copied O(log n) times.
- Images of 8 x 8 have fixed costs: a key of each image, its risk at 65 thresholds and their powers, and a table for each batch.
- 1e5 images of 8 x 8 in 50 random groups (1e5 combinations) ran once: 497 bytes an image, 1.9 s to observe, 173 s and 2.8 GB
  to calibrate.
- `TreeHead.observe` passes over the scores to check them, for the best leaf, to put two rows at a time in the order of the
  tree, for sums of paths in float64 (a third to a half of the time, with the order) and for the key of the noise (a fifth),
  and makes a key of each row (a twelfth to a sixth).
- No head's `fit` runs under `FakeTensorMode`: `observe` looks at values (finite, in range, which groups there are) and
  `calibrate` at violations, to end. The steps of the fixed-step solvers between two looks do (`tests/engine/test_solver.py`).
- Thresholds, offsets and sums are float64 on the device of the input. On one that lacks it (MPS), heads answer in float32, with
  the same noise, and fits, audits, monitors, penalties and metrics run on the CPU in float64: tested with devices that are
  pretended, not on such a device.
- Missed here: images of 8 x 8 at 3 times the cost a pixel of 512 x 512: in the table it is 5 times, and by hand, with batches of
  20,000 and of 16 observed again and again, 6.5 times (23 at first). The parts of it, timed by hand each by itself in memory that
  stays in the cache, take 380 ns an image (pixels, places, shares and counts 130, a key 80, checks 10, powers of the risk at 65
  thresholds 60, their sums over groups 100): 4 times. Less needs fewer parts, or a compiled kernel.
- A fit of the miss rate takes 2.0 to 2.3 passes in blocks here (goal 2; 4.6 before), `TreeHead.observe` 4.5 and 3.7 softmaxes
  (goal 5; 10 and 8 before).
- `torch.compile` is not used in fits. Of the longest chain of elementwise steps (places on the lattice, 15 blocks of 524,288
  scores, one thread) it made 31 ms of 36, after 17 s of compiling; the rest of a fit is products, sorts and counts.

## Predicted: `ProbabilityHead`, 50 groups, one process

- Kept: 31 bytes a row, and 62 while rows that came in batches are joined. `calibrate` adds 8 bytes each for a share, a place, z
  before and after a step and the columns of the slopes, a byte each for levels and folds, and for a moment some 50 for sorted
  keys: 100 to 110 bytes a row beside what every process needs, 10 to 11 GB at 1e8 rows. Measured at 1e8: 12.2 GB in all, 684 s
  of one core, beside other work. (At 1e7, twice as many rows as now chose the ridge.)
- From 524,288 rows on, 131,072 of them, by a hash of their content, choose the ridge; the fits with it, of every kind one, see
  all rows. A fit with every ridge on 1e6 rows has the same Brier score on new rows to 1e-7 and the same worst cell to 5e-6.
- Rows are read once and must fit in memory as above; on several machines they stay on their ranks.

## A billion rows

[billion.md](billion.md) has a model of these costs, checked by runs, and what it says of 1e9 examples x 1e5 groups over 64
workers."""


def main(arguments: list[str] | None = None) -> int:
    """Measure what is missing, write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--processes", nargs="+", type=int, default=PROCESSES)
    parser.add_argument("--minutes", type=float, default=7.0, help="start no measurement after so long")
    parser.add_argument("--page", action="store_true", help="write the page only")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of scale.json and scale.md")
    parser.add_argument("--parquet", type=int, help="rows of a parquet file to calibrate on, nothing else")
    parser.add_argument("--folder", type=Path, default=Path("parquet"), help="where that file is made and deleted")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        name, n, world, rank, store = options.worker
        print(json.dumps(worker(name, int(n), int(world), int(rank), store)))
        return 0
    path, began = options.results / "scale.json", time.perf_counter()
    found = load(path) or {"machine": machine()}
    if options.parquet:
        measured = from_parquet(options.folder, options.parquet)
        found = load(path) or {"machine": machine()}  # others may have been added meanwhile
        found.setdefault("parquet", {})[str(options.parquet)] = measured
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (options.results / "scale.md").write_text(page(found), encoding="utf-8")
        print(measured)
        return 0
    wanted = [(name, n, world) for n in options.sizes for name in options.heads for world in options.processes]
    for name, n, world in [] if options.page else wanted:
        key = f"{name} {n} {world}"
        if key in found or time.perf_counter() - began > 60 * options.minutes:
            continue
        found[key] = measure(name, n, world)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(key, {k: v for k, v in found[key][0].items() if k != "state"}, flush=True)
    for key, work in (("unit", unit), ("images", images), ("softmaxes", softmaxes), ("positions", overhead.positions)):
        if key not in found:
            found[key] = work()
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (options.results / "scale.md").write_text(page(found), encoding="utf-8")
    left = sum(f"{name} {n} {world}" not in found for name, n, world in wanted)
    print(f"{left} measurements are left." if left else "all is measured.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
