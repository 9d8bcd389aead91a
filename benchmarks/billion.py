"""What a billion rows in many groups would cost `ProbabilityHead` on many machines: a model of its costs, checked by runs.

    python -m benchmarks.billion             # every missing run, for up to 7 minutes, then benchmarks/results/billion.md
    python -m benchmarks.billion --page      # the page only, from the runs there are

The model has three parts, each fitted to small runs of one process or two and then compared with runs that it has not seen: more
rows (up to 1e8, of benchmarks/results/scale.json), more groups, more processes. Runs are kept in benchmarks/results/billion.json.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torchgmc as gmc
from benchmarks import scale
from torchgmc.engine.files import write_json
from torchgmc.heads.probability import static
from torchgmc.heads.probability.problem import MOST_COLUMNS

PATH = scale.RESULTS / "billion.json"
#: Up to so many groups share a ridge; of more, those that earn a column by the l1 price have one: two programs, and two models.
SHARED = static.FEW
#: (groups, rows, processes): the model is fitted to the first, and compared with the second.
FITTED = [(a, n, 1) for a in (10, 50, 200) for n in (100_000, 300_000)] + [(a, 100_000, 2) for a in (10, 50, 200)]
FITTED += [(50, 600_000, 2), (400, 100_000, 1), (400, 100_000, 2), (1000, 100_000, 2)]
UNSEEN = [(50, 800_000, 1), (100, 200_000, 1), (50, 800_000, 2), (50, 800_000, 4), (100, 100_000, 4), (50, 100_000, 8)]
UNSEEN += [(50, 100_000, 16), (400, 300_000, 2), (1000, 300_000, 2), (2000, 100_000, 2), (3000, 100_000, 2)]
UNSEEN += [(5000, 50_000, 2), (10_000, 25_000, 2), (10_000, 25_000, 4)]
#: Rows from which on some of them choose the ridge, and how many.
MANY, CHOSEN = 4 * static.CHOICES, static.CHOICES
BINS = 10


def rows(groups: int) -> Any:
    """Rows like those of `benchmarks.scale`, in so many groups."""

    def draw(n: int, g: torch.Generator) -> tuple[Tensor, ...]:
        member, z = torch.rand(n, groups, generator=g) < 0.2, 1.5 * torch.randn(n, generator=g)
        y = torch.rand(n, generator=g) < torch.sigmoid(z + 0.7 * member[:, 0] - 0.4 * member[:, 1])
        return torch.sigmoid(z), y, member

    return draw


def run(groups: int, n: int, world: int) -> dict[str, float]:
    """Of the rank that needs most: seconds of the processor, bytes kept, at the peak, and sent."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.billion", "--worker", *map(str, (groups, n, world))]
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen([*command, str(rank), f"{folder}/store"], stdout=subprocess.PIPE, text=True, env=env)
            for rank in range(world)
        ]
        texts = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank of {groups} groups, n = {n:,}, {world} processes failed.")
    found = [json.loads(text.splitlines()[-1]) for text in texts]
    return {key: max(one[key] for one in found) for key in ("observe", "calibrate", "kept", "peak", "sent")}


def slices(n: int) -> tuple[int, int]:
    """Rows that choose the ridge, and rows that are fitted."""
    return (n if n < MANY else CHOSEN), n


def time_terms(groups: int, n: int, world: int) -> list[float]:
    """What seconds are a sum of: rows that choose, and rows that are fitted, each alone and for every group; Newton's systems."""
    columns, (choose, fit) = 1 + groups, slices(n)
    return [choose / world, choose * columns / world, fit / world, fit * columns / world, columns**3, 1.0]


def sent_terms(groups: int) -> list[float]:
    """What bytes are a sum of: headers, slopes and cells of every group, and second derivatives of every pair."""
    return [1.0, 1 + groups, (1 + groups) ** 2]


def positive(terms: list[list[float]], values: list[float]) -> np.ndarray:
    """Least squares of relative errors with weights of at least 0: plain projected steps on a few numbers."""
    table = np.array(terms) / np.array(values)[:, None]
    size = np.linalg.norm(table, axis=0)
    table, found = table / size, np.zeros(len(size))
    step = 1.0 / np.linalg.norm(table, 2) ** 2
    for _ in range(200_000):
        found = np.maximum(0.0, found - step * table.T @ (table @ found - 1.0))
    return found / size


class Model:
    """Fitted to the first runs; answers for any size."""

    def __init__(self, runs: dict[str, Any]) -> None:
        known = {one: runs[key(*one)] for one in FITTED}
        few, many = ({one: found for one, found in known.items() if (one[0] > SHARED) == side} for side in (False, True))
        self.time = positive([time_terms(*one) for one in few], [found["calibrate"] for found in few.values()])
        several = [one for one in few if one[2] > 1 and one[1] < MANY]
        table = np.array([sent_terms(one[0]) for one in several])
        self.sent = np.linalg.solve(table, np.array([few[one]["sent"] for one in several]))
        again = (50, 600_000, 2)
        self.again = few[again]["sent"] / float(self.sent @ np.array(sent_terms(50)))
        self.cell = float(np.mean([found["calibrate"] / cells(*one) for one, found in many.items()]))
        self.room = max(found["peak"] / cells(*one) for one, found in many.items())
        self.pair = max(found["sent"] / (1 + one[0]) ** 2 for one, found in many.items() if one[2] > 1)

    def seconds(self, groups: int, n: int, world: int) -> float:
        """Of the processor, of a rank, in `calibrate`."""
        if groups > SHARED:
            return self.cell * cells(groups, n, world)
        return float(self.time @ np.array(time_terms(groups, n, world)))

    def bytes_sent(self, groups: int, n: int, world: int) -> float:
        """Of a rank: one of two numbers, whatever the number of rows is; the larger where some rows choose the ridge for all.

        Of many groups a bound: second derivatives of all pairs of columns that are solved for at once.
        """
        if world == 1:
            return 0.0
        if groups > SHARED:
            return self.pair * (1 + min(groups, MOST_COLUMNS)) ** 2
        return float(self.sent @ np.array(sent_terms(groups))) * (1.0 if n < MANY else self.again)

    def bytes_kept(self, groups: int, n: int, world: int) -> float:
        """Of a rank: three numbers, and a bit for each group."""
        return (24 + 1 + groups // 8) * n / world

    def bytes_peak(self, groups: int, n: int, world: int) -> float:
        """Of a rank, of many groups: numbers in place of bits. Of few groups rows are looked at in blocks: see scale.md."""
        return self.room * cells(groups, n, world) if groups > SHARED else math.nan


def cells(groups: int, n: int, world: int) -> float:
    """Rows x groups of a rank."""
    return (1 + groups) * n / world


def key(groups: int, n: int, world: int) -> str:
    """Of a run in the file."""
    return f"{groups} {n} {world}"


def large() -> list[tuple[tuple[int, int, int], dict[str, float]]]:
    """Runs of up to 1e8 rows that `benchmarks.scale` kept; at 1e8 reading the file is part of the time."""
    kept = scale.load(scale.RESULTS / "scale.json")
    found = [((50, 10_000_000, 1), kept["probability 10000000 1"][0])] if "probability 10000000 1" in kept else []
    for n, one in kept.get("parquet", {}).items():
        found += [((50, int(n), 1), {"calibrate": one["processor"], "peak": one["peak"]})] if int(n) > 10_000_000 else []
    return found


def page(runs: dict[str, Any]) -> str:
    """The page: the model, the runs it has not seen, and what it says of a billion rows."""
    model, lines = Model(runs), [*HEAD.splitlines(), ""]
    lines += ["## Checked: measured / predicted", ""]
    lines += ["| groups | rows | processes | seconds | kB sent | MB kept | MB at the peak | |", "|---|---|---|---|---|---|---|---|"]
    seen = [(one, runs[key(*one)], "fitted") for one in FITTED if key(*one) in runs]
    seen += [(one, runs[key(*one)], "") for one in UNSEEN if key(*one) in runs] + [(*one, "") for one in large()]
    for one, found, note in seen:
        pairs = [f"{found['calibrate']:.2f} / {model.seconds(*one):.2f}"]
        for part, unit, said in (("sent", 1e3, model.bytes_sent), ("kept", 1e6, model.bytes_kept), ("peak", 1e6, model.bytes_peak)):
            known = bool(found.get(part)) and not math.isnan(said(*one))
            pairs.append(f"{found[part] / unit:,.0f} / {said(*one) / unit:,.0f}" if known else "-")
        lines.append(f"| {one[0]:,} | {one[1]:,} | {one[2]} | {' | '.join(pairs)} | {note} |")
    lines += ["", "## Predicted: a billion rows, 64 workers of one core each", ""]
    lines += ["| groups | GB kept | GB at the peak | MB sent | hours in calibrate |", "|---|---|---|---|---|"]
    for a in (50, 300, 1000, 10_000, 100_000):
        size = (a, 10**9, 64)
        peak = "-" if math.isnan(model.bytes_peak(*size)) else f"{model.bytes_peak(*size) / 1e9:,.0f}"
        spent = model.seconds(*size) / 3600
        lines.append(
            f"| {a:,} | {model.bytes_kept(*size) / 1e9:,.1f} | {peak} | {model.bytes_sent(*size) / 1e6:,.1f} | {spent:,.2g} |"
        )
    return "\n".join([*lines, "", *NOTES.splitlines()]) + "\n"


HEAD = """\
# A billion rows

`python -m benchmarks.billion`: a model of what `ProbabilityHead` costs, fitted to the runs marked "fitted" (1e5 to 6e5 rows, 10 to
1,000 groups, one process or two) and compared with all others. Seconds are of the processor of one rank in `calibrate`; bytes are
of one rank. Rows are drawn from a logistic model: they show costs, not quality. Runs beyond 1e6 rows are those of
[scale.md](scale.md); the one of 1e8 counts the reading of its file too.

Up to 300 groups share a ridge, and rows are looked at in blocks (135 bytes a row at the peak with 50 groups). Of more groups those
that earn a column by the l1 price have one. These are two programs, and the model has a part for each:

- up to 300 groups: seconds are a sum of rows, rows x groups and the solution of Newton's systems, groups^3; what is sent is a sum
  of headers, slopes and second derivatives of all pairs of groups;
- more: seconds and the peak are proportional to rows x groups of a rank; what is sent is at most the second derivatives of all
  pairs, of at most 2,000 columns, since no more are solved for at once."""
NOTES = """\
## How far to trust it

- Runs but those of 1e7 and more rows are of the code before sums became float64: a fit of 50 groups now sends 0.6 MB up to 524,288
  rows and 0.9 MB beyond (scale.md), where 0.2 and 0.5 stand here; fits of hundreds of groups take some 10 to 16 % longer.
- Up to 300 groups, up to 4 processes: within a fifth, but for 1e7 rows, which took three quarters of the prediction. What is
  sent depends neither on the rows nor on the ranks: it has one value up to 524,288 rows, and a larger one beyond, where some
  rows choose the ridge and all are fitted after that. With 100 groups it was a sixth more than predicted (more Newton steps).
- 8 and 16 processes of 1e5 rows took 2 and 4 times the prediction: the collectives themselves, of many processes on two cores,
  which the model leaves out (about 0.05 s for each process more). Beside the hours below that is nothing; beside a second it
  is the reason not to use 16 processes for 1e5 rows.
- More than 300 groups: seconds within a fifth, up to ten times the groups and three times the rows that it was fitted to. What is
  sent is a bound, met within a fifth at 1,000 groups and seven to nine times too large where few groups earn a column. So is
  the peak, but for the smallest run of a rank (6,250 rows), where what every process holds once counts. Kept tables have
  room to grow: up to a third more than the rows need.

## Where it breaks, and what would repair it

64 workers as they are hold a billion rows in up to 300 groups, in minutes. Of 1,000 groups a worker needs 220 GB at the peak,
and of 1e5 groups it would need 22 TB and three days. In the order in which they break:

1. *The peak*: more than 300 groups are widened from bits to numbers, some 10 bytes for each row and group. In blocks, as for fewer
   groups, the peak would be what is kept.
2. *Kept*: a bit for each row and group: 0.2 TB a worker with 1e5 groups. Kept as codes of the columns that groups are made of
   (some 100 bytes a row), it would be 1.6 GB, and sums over all intersections are made from codes already
   (`gmc.violations` with `Groups`: 116,960 groups of 1e6 rows in one search).
3. *Computed*: about 160 ns for each row and group: 70 hours with 1e5 groups. Each row is in few of them; over those it is in
   (sparse, or by counting over codes), 100 groups a row would take some minutes. Some of the rows, as with few groups, could
   choose the price for all.
4. *Sent*: no obstacle: at most about 80 MB whatever the rows are. Slopes are 16 (1 + a) + 8 bytes, 1.6 MB a step with 1e5 groups;
   sums of all groups and 10 level sets are 24 MB. But no run here had to move level sets by themselves: for each one that must
   move the second derivatives of all groups, 8 (1 + a)^2 bytes, are summed, 80 GB with 1e5 groups. The groups that move only
   (as in the first fit) would do."""


def main() -> None:
    """Runs what is missing, then writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the page from the runs there are")
    parser.add_argument("--minutes", type=float, default=7.0, help="start no run after so many minutes")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        groups, n, world, rank = map(int, given.worker[:4])
        scale.HEADS["many"] = (lambda: gmc.ProbabilityHead(0.005, scale._names(groups), bins=BINS), rows(groups))
        print(json.dumps(scale.worker("many", n, world, rank, given.worker[4])))
        return
    runs, start = scale.load(PATH), time.monotonic()
    for one in () if given.page else (*FITTED, *UNSEEN):
        if key(*one) not in runs and time.monotonic() - start < 60 * given.minutes:
            runs[key(*one)] = run(*one)
            write_json(PATH, runs)
            print(key(*one), {name: round(value, 2) for name, value in runs[key(*one)].items()}, flush=True)
    (scale.RESULTS / "billion.md").write_text(page(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
