"""Does it pay to train for the promise? Three ways to a calibrated model, compared at equal worst-group violation.

    python -m benchmarks.training                       # 5 seeds, writes benchmarks/results/training.md and .png
    python -m benchmarks.training --seeds 2 --small     # a minute; prints only

(a) a plain model, calibrated afterwards; (b) the same with a `GMCPenalty` added to its loss, calibrated afterwards too; (c) a
model trained through the calibration: half of a batch is calibrated on with `solve_differentiably`, and the loss is that of
the other half *after* calibration. All are calibrated by the same head on the same data in the end, so all keep the same
promise, and what is compared is what is left: Dice or log loss on fresh data. Controls tell what the calibration in (c)
adds: the loss of (c) without calibration, and groups as inputs of the model.
"""

import argparse
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import torchgmc as gmc
from benchmarks.timing import machine

RESULTS = Path(__file__).parent / "results"
#: Softness of thresholds, in units of a probability.
SOFTNESS = 0.1
NOTE = """Means and standard errors over seeds; "better than (a)" is the mean difference at the same seed. All methods take the
same number of steps on the same batches: gains are gains at equal steps. In the segmentation (c) learns faster, not better:
with four times as many steps (`--longer 4`, seeds 0 to 2) (a) reached a Dice of 0.5520 and (c) 0.5527, +0.0007 ±
0.0014. The worst violation is measured on fresh data: of each group's own miss rate, and of its sum of f - y."""
Batch = tuple[Tensor, Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
Table = dict[str, dict[str, dict[str, tuple[float, float]]]]


@dataclass(frozen=True)
class Size:
    """Examples to train, calibrate and test on, steps and examples of a batch."""

    train: int
    calibrate: int
    test: int
    steps: int
    batch: int


SIZES = {
    ("segmentation", False): Size(400, 1000, 1500, 300, 64),
    ("segmentation", True): Size(80, 120, 120, 12, 40),
    ("outcome", False): Size(2000, 10000, 20000, 300, 250),
    ("outcome", True): Size(300, 400, 1000, 20, 150),
}


def fit(model: nn.Module, loss: Loss, data: Batch, size: Size, rate: float, seed: int) -> nn.Module:
    """Adam with a rate that falls to 0; batches depend only on the seed, so that every method sees the same ones."""
    rng = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, size.steps)
    for _ in range(size.steps):
        rows = torch.randperm(len(data[0]), generator=rng)[: size.batch]
        value = loss(model, (data[0][rows], data[1][rows], data[2][rows]))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


# -- segmentation ------------------------------------------------------------------------------------------------------------


def pictures(n: int, rng: torch.Generator, side: int = 20) -> Batch:
    """Pictures (n, 1, side, side) of one or two blobs on a grained ground, masks, and groups: dark, light, old camera.

    Blobs of dark pictures stand out less, and an old camera adds noise: the miss rate at one threshold differs by group.
    """
    groups = torch.stack([torch.rand(n, generator=rng) < 0.3, torch.rand(n, generator=rng) < 0.35], 1)
    axis = torch.arange(side) / side
    masks = torch.zeros(n, side, side, dtype=torch.bool)
    for _ in range(2):
        x, y = 0.2 + 0.6 * torch.rand(2, n, 1, 1, generator=rng)
        radius = 0.09 + 0.13 * torch.rand(n, 1, 1, generator=rng)
        stretch = 0.6 + 0.8 * torch.rand(n, 1, 1, generator=rng)
        masks |= (axis - x).square() * stretch + (axis[:, None] - y).square() / stretch < radius.square()
    contrast = (1.3 - 0.6 * groups[:, 0].float() + 0.25 * torch.randn(n, generator=rng))[:, None, None]
    ground = functional.avg_pool2d(torch.randn(n, 1, side, side, generator=rng), 5, 1, 2)[:, 0] * 2.5
    noise = torch.randn(n, side, side, generator=rng) * (0.5 + 0.6 * groups[:, 1].float())[:, None, None]
    member = torch.stack([groups[:, 0], ~groups[:, 0], groups[:, 1]], 1)
    return (masks * contrast + ground + noise)[:, None], masks, member


def dice(mask: Tensor, truth: Tensor) -> Tensor:
    """Of each picture, (n,)."""
    both = (mask * truth).flatten(1).sum(1)
    return (2 * both + 1e-6) / ((mask + truth).flatten(1).sum(1) + 1e-6)


def segmentation(seed: int, small: bool = False, longer: int = 1) -> dict[str, dict[str, float]]:
    """Figures of every method at one seed."""
    size = replace(SIZES["segmentation", small], steps=longer * SIZES["segmentation", small].steps)
    rng = torch.Generator().manual_seed(1000 + seed)
    train, held, test = (pictures(n, rng) for n in (size.train, size.calibrate, size.test))
    names, target, alpha = ["dark", "light", "old camera"], 0.1, 0.01

    def head() -> gmc.ThresholdHead:
        return gmc.ThresholdHead(target, alpha, names, conditional=True)

    def model() -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))

    def entropy(logits: Tensor, truth: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(logits, truth.float())

    def plain(net: nn.Module, batch: Batch) -> Tensor:
        return entropy(net(batch[0])[:, 0], batch[1])

    def with_dice(net: nn.Module, batch: Batch) -> Tensor:
        logits = net(batch[0])[:, 0]
        soft = torch.sigmoid((torch.sigmoid(logits) - 0.5) / SOFTNESS)
        return entropy(logits, batch[1]) + 1 - dice(soft, batch[1]).mean()

    def with_penalty(weight: float) -> Loss:
        penalty = gmc.GMCPenalty.for_head(head(), softness=SOFTNESS, kind="squared")

        def loss(net: nn.Module, batch: Batch) -> Tensor:
            logits = net(batch[0])[:, 0]
            return entropy(logits, batch[1]) + weight * penalty(torch.sigmoid(logits), *batch[1:])

        return loss

    def through(net: nn.Module, batch: Batch) -> Tensor:
        logits, truth, groups = net(batch[0])[:, 0], *batch[1:]
        scores, half = torch.sigmoid(logits), len(logits) // 2
        state = head().solve_differentiably(scores[:half], truth[:half], groups[:half], alpha=0.0, temperature=SOFTNESS)
        soft = head().apply_state(state, scores[half:], groups[half:], mode="soft", temperature=SOFTNESS)
        return entropy(logits, truth) + 1 - dice(soft, truth[half:]).mean()

    found = {}
    for name, loss in {
        "(a) plain, calibrated afterwards": plain,
        "(b) penalty x 0.1, calibrated afterwards": with_penalty(0.1),
        "(b) penalty x 1, calibrated afterwards": with_penalty(1.0),
        "(c) through calibration": through,
        "control: Dice loss at the threshold 0.5": with_dice,
    }.items():
        net = fit(model(), loss, train, size, 0.02, seed)
        with torch.no_grad():
            scores = [torch.sigmoid(net(part[0])[:, 0]) for part in (held, test)]
        fitted = head().fit(scores[0], *held[1:])
        mask = fitted(scores[1], test[2])
        before = (scores[1] > 0.5).float()
        found[name] = {
            "Dice": float(dice(mask.float(), test[1].float()).mean()),
            "false positive rate": float((mask & ~test[1]).sum() / (~test[1]).sum()),
            "worst violation": worst_miss(mask, test, target),
            "worst before": worst_miss(before.bool(), test, target),
        }
    return found


def worst_miss(mask: Tensor, data: Batch, target: float) -> float:
    """Largest |miss rate - target| of a group, over pictures with a blob."""
    positives = data[1].flatten(1).sum(1)
    kept = positives > 0
    missed = (data[1] & ~mask).flatten(1).sum(1)[kept] / positives[kept]
    who = data[2][kept]
    share = who.float().mean(0)[:, None]
    return float((gmc.violations(who, missed - target) / share).abs().max())


# -- outcomes ----------------------------------------------------------------------------------------------------------------


def patients(n: int, rng: torch.Generator) -> Batch:
    """Features (n, 6), outcomes, and groups: three sites (one rare) and an age group.

    Sites differ in their base rate and in who comes to them: the first feature is higher where the outcome is rarer, so a
    model blind to the site learns too small a slope for it.
    """
    site = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), n, replacement=True, generator=rng)
    old = torch.rand(n, generator=rng) < 0.4
    x = torch.randn(n, 6, generator=rng)
    x[:, 0] += torch.tensor([-0.6, 0.7, 1.2])[site]
    base = torch.tensor([0.6, -0.7, -1.6])[site] + 0.8 * old
    z = base + 1.2 * x[:, 0] + 0.7 * torch.sin(2 * x[:, 1]) - 0.5 * x[:, 2] * x[:, 3] + 0.4 * old * x[:, 4]
    groups = torch.cat([functional.one_hot(site, 3).bool(), old[:, None]], 1)
    return x, (torch.rand(n, generator=rng) < torch.sigmoid(z)).float(), groups


def outcome(seed: int, small: bool = False, longer: int = 1) -> dict[str, dict[str, float]]:
    """Figures of every method at one seed."""
    size = replace(SIZES["outcome", small], steps=longer * SIZES["outcome", small].steps)
    rng = torch.Generator().manual_seed(2000 + seed)
    train, held, test = (patients(n, rng) for n in (size.train, size.calibrate, size.test))
    names = ["site 1", "site 2", "site 3", "old"]

    def head() -> gmc.ProbabilityHead:
        return gmc.ProbabilityHead(0.002, names, bins=None, noise_floor=False)

    def model(inputs: int = 6) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 1))

    def plain(net: nn.Module, batch: Batch) -> Tensor:
        return functional.binary_cross_entropy_with_logits(net(batch[0])[:, 0], batch[1])

    def with_penalty(weight: float) -> Loss:
        penalty = gmc.GMCPenalty.for_head(head(), kind="squared", conditional=True)

        def loss(net: nn.Module, batch: Batch) -> Tensor:
            logits = net(batch[0])[:, 0]
            entropy = functional.binary_cross_entropy_with_logits(logits, batch[1])
            return entropy + weight * penalty(torch.sigmoid(logits), *batch[1:])

        return loss

    def through(net: nn.Module, batch: Batch) -> Tensor:
        probs, half = torch.sigmoid(net(batch[0])[:, 0].double()), len(batch[0]) // 2
        state = head().solve_differentiably(probs[:half], batch[1][:half], batch[2][:half])
        f = head().apply_state(state, probs[half:], batch[2][half:])
        return functional.binary_cross_entropy(f, batch[1][half:].double())

    def groups_too(part: Batch) -> Batch:
        return torch.cat([part[0], part[2].float()], 1), part[1], part[2]

    found = {}
    for name, loss in {
        "(a) plain, calibrated afterwards": plain,
        "(b) penalty x 0.1, calibrated afterwards": with_penalty(0.1),
        "(b) penalty x 1, calibrated afterwards": with_penalty(1.0),
        "(c) through calibration": through,
        "control: groups as inputs": plain,
    }.items():
        given = groups_too if name.startswith("control") else lambda part: part
        net = fit(model(10 if name.startswith("control") else 6), loss, given(train), size, 0.02, seed)
        with torch.no_grad():
            probs = [torch.sigmoid(net(given(part)[0])[:, 0].double()) for part in (held, test)]
        fitted = head().fit(probs[0], *held[1:])
        f = fitted(probs[1], test[2])
        found[name] = {
            "log loss": float(functional.binary_cross_entropy(f, test[1].double())),
            "log loss before": float(functional.binary_cross_entropy(probs[1], test[1].double())),
            "worst violation": worst_error(f, test),
            "worst before": worst_error(probs[1], test),
        }
    return found


def worst_error(f: Tensor, data: Batch) -> float:
    """Largest |E[1_A (f - y)]| of a group."""
    return float(gmc.violations(data[2], f - data[1]).abs().max())


# -- all seeds ---------------------------------------------------------------------------------------------------------------

#: Figure by which methods are compared, and whether more is better.
TASKS = {"segmentation": (segmentation, "Dice", True), "outcome": (outcome, "log loss", False)}


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and standard error (0 for one value)."""
    spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), spread


def measure(task: str, seed: int, small: bool, longer: int) -> tuple[dict[str, dict[str, float]], float]:
    """Figures of one task at one seed, and the seconds of a core they took."""
    torch.set_num_threads(1)  # as in every worker, so that figures do not depend on their number
    began = time.process_time()
    return TASKS[task][0](seed, small, longer), time.process_time() - began


def compare(seeds: int, small: bool, workers: int = 1, longer: int = 1) -> tuple[Table, float]:
    """By task and method: every figure, and "gain", what it is better by than (a) at the same seed; means and errors.

    Also the seconds of a core that all took.
    """
    jobs = [(task, seed, small, longer) for task in TASKS for seed in range(seeds)]
    if workers > 1:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            done = list(pool.map(measure, *zip(*jobs, strict=True)))
    else:
        done = [measure(*job) for job in jobs]
    table: Table = {}
    for task, (_, main, more) in TASKS.items():
        runs = [figures for (name, *_), (figures, _) in zip(jobs, done, strict=True) if name == task]
        first = next(iter(runs[0]))
        table[task] = {
            name: {key: mean_and_error([r[name][key] for r in runs]) for key in runs[0][name]}
            | {"gain": mean_and_error([(1 if more else -1) * (r[name][main] - r[first][main]) for r in runs])}
            for name in runs[0]
        }
    return table, sum(seconds for _, seconds in done)


def markdown(table: Table) -> str:
    """One table a task; each figure with its standard error over the seeds."""
    lines = []
    for task, methods in table.items():
        keys = [key for key in next(iter(methods.values())) if key != "gain"]
        keys.insert(1, "gain")
        title = {"gain": "better than (a), same seed", "worst before": "worst violation before calibration"}
        lines += [f"## {task}", "", "| method | " + " | ".join(title.get(key, key) for key in keys) + " |"]
        lines.append("|" + " --- |" * (len(keys) + 1))
        for name, figures in methods.items():
            cells = [f"{figures[key][0]:{'+' if key == 'gain' else ''}.4f} ± {figures[key][1]:.4f}" for key in keys]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def draw(table: Table) -> bytes:
    """Gain over (a) of every method, one panel a task, as PNG."""
    from torchgmc.plots import LIGHT, new_figure, png, set_title

    figure, panels = new_figure(LIGHT, (14.0, 5.0), 1, 2)
    units = {"segmentation": "gain in Dice over (a)", "outcome": "fall of the log loss below (a)"}
    for axes, (task, methods) in zip(panels, table.items(), strict=True):
        names = list(methods)[::-1]
        for row, name in enumerate(names):
            value, error = methods[name]["gain"]
            color = LIGHT.series[2] if name.startswith("(") else LIGHT.series[0]
            axes.errorbar(value, row, xerr=error, fmt="o" if name.startswith("(") else "s", markersize=9, capsize=5, color=color)
        axes.axvline(0.0, color="#999999", linewidth=1)
        labels = [
            f"{name.replace(', calibrated afterwards', '')}\nworst violation {methods[name]['worst violation'][0]:.3f}"
            for name in names
        ]
        axes.set_yticks(range(len(names)), labels, fontsize=12)
        axes.set_ylim(-0.5, len(names) - 0.3)
        axes.margins(x=0.25)
        axes.set_xlabel(units[task])
        axes.set_title(task, fontsize=14)
    set_title(figure, "After calibration, at equal worst-group violation (mean and standard error over seeds)", LIGHT)
    return png(figure)


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write the page and its figure at full size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="independent repetitions, at least 1")
    parser.add_argument("--workers", type=int, default=1, help="processes; the figures do not depend on it")
    parser.add_argument("--longer", type=int, default=1, help="times as many steps")
    parser.add_argument("--small", action="store_true", help="small sizes; writes nothing without --output")
    parser.add_argument("--output", type=Path, help=f"folder for training.md and training.png (full size: {RESULTS.name})")
    options = parser.parse_args(arguments)
    if min(options.seeds, options.workers, options.longer) < 1:
        parser.error("--seeds, --workers and --longer must be at least 1")
    threads = torch.get_num_threads()
    table, seconds = compare(options.seeds, options.small, options.workers, options.longer)
    torch.set_num_threads(threads)
    command = f"python -m benchmarks.training --seeds {options.seeds}{' --small' if options.small else ''}"
    command += f" --longer {options.longer}" if options.longer > 1 else ""
    where = {"command": command, **machine(), "took": f"{seconds:.0f} s of one core"}
    where = {key: value for key, value in where.items() if key not in ("load before", "peers")}
    page = "\n".join(["# Training for the promise", "", *(f"- {k}: {v}" for k, v in where.items()), "", NOTE, "", markdown(table)])
    print(page)
    folder = options.output or (None if options.small else RESULTS)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "training.png").write_bytes(draw(table))
        (folder / "training.md").write_text(page + "\n![Gain over the plain model](training.png)\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
