"""One rank of the tests with many processes: ``python -m gmctest.distributed_worker RANK WORLD FOLDER WHAT[,WHAT...]``."""

import importlib.util
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

import torchgmc as gmc
from gmctest.heads_zoo import NAMES, ZOO
from torchgmc.distributed import PeerError, exchanged_bytes, local, together

N = 61
#: Rows of rank 0 and rank 1.
SHARDS = {"even": (0, 30, 60), "uneven": (0, 17, 61), "empty": (0, 61, 61), "empty first": (0, 0, 61)}

#: Solvers with fixed steps; "exact" is tried on every shard.
SOLVERS = {"paper": {"solver": "paper", "eta": 0.02, "max_iter": 15}, "fresh": {"solver": "fresh", "eta": 0.02, "max_iter": 3}}


def rows(rank: int, shard: str) -> slice:
    return slice(*SHARDS[shard][rank : rank + 2])


def fits(rank: int) -> dict:
    """Every head on every kind of shard."""
    found = {}
    for entry in ZOO:
        data = entry.data(N, 3).observe
        for shard in SHARDS:
            head = entry.make().fit(*(t[rows(rank, shard)] for t in data), **entry.options)
            found[entry.name, shard] = head.state_dict()
        # Batches, of which this rank may have none; the local statistics stay local.
        head = entry.make()
        if rank == 0:
            for part in zip(*(t.split(25) for t in data), strict=True):
                head.observe(*part)
        before = head.statistics
        head.calibrate(**entry.options)
        assert head.statistics is before
        found[entry.name, "observe"] = head.state_dict()
        for name, options in SOLVERS.items() if head.alpha is not None else ():  # these go to alpha
            head = entry.make().fit(*(t[rows(rank, "uneven")] for t in data), **options)
            found[entry.name, name] = head.state_dict()
        with local():
            found[entry.name, "local"] = entry.make().fit(*data, **entry.options).state_dict()
    return found


def audits(rank: int) -> dict:
    """An audit and a monitor of every head, over rows of which each rank has its own."""
    found = {}
    for entry in ZOO:
        head = entry.fitted_alone()
        part = tuple(t[rows(rank, "uneven")] for t in entry.data(N, 5).observe)
        audit = head.audit(*part, delta=0.1)
        watch = gmc.Monitor(head, delta=0.1, alpha=0.01) if head.s_range() is not None else None
        if watch is not None:
            watch.update(*part)
        found[entry.name] = {
            "table": {key: torch.tensor(audit.table[key]) for key in ("estimate", "low", "high", "bound")},
            "groups": audit.table["group"],
            "examples": audit.num_examples,
            "cost": audit.cost,
            "evidence": None if watch is None else watch.log_evidence(),
        }
    return found


def traffic(rank: int) -> dict:
    """Bytes contributed to the exchange of one fit, against n."""
    found = {}
    for entry in ZOO:
        sizes = []
        for n in (2200, 2900):  # more than the keys that are kept of the examples
            data = entry.data(n, 4).observe
            before = exchanged_bytes()
            entry.make().fit(*(t[rank::2] for t in data), **entry.options)
            sizes.append(exchanged_bytes() - before)
        found[entry.name] = sizes
    return found


def scattered_learned(rank: int) -> dict:
    """:func:`scattered` of the heads that learn."""
    return scattered(rank, "learned")


def scattered_images(rank: int) -> dict:
    """:func:`scattered` of thresholds of images."""
    return scattered(rank, "images")


def scattered_kind(name: str) -> str:
    """Of a name in :data:`SCATTERED`."""
    return "images" if name.startswith("images") else "learned" if name.endswith("learned") else "plain"


def scattered(rank: int, kind: str = "plain") -> dict:
    """Fits whose rows stay on three ranks, one without rows: states, the largest sum in bytes, a rank that fails half-way."""
    import inspect

    from torchgmc.engine import folds, offsets, trees
    from torchgmc.heads import learned, quantile, threshold
    from torchgmc.heads.probability import problem, solver, static
    from torchgmc.heads.tree import solver as tree_solver

    # As of many rows: places by a hash, Hessians of some rows, folds by one step.
    folds.EXACT, folds.EQUAL, static.EXACT_FOLDS = 100, 100, 0
    solver.SAMPLE = problem.SAMPLE = tree_solver.SAMPLE = 256
    tree_solver.EXACT, offsets.NEAR, trees.POOL, trees.JUDGES = 100, 64, 800, 200
    learned.MOST_ROWS, quantile.head.CELLS, threshold.head.CELLS = 400, 8, 21  # as many as there are, on each rank
    for calibrate in map(inspect.unwrap, (gmc.TreeHead.calibrate, gmc.QuantileHead.calibrate)):
        calibrate.rows_stay = calibrate.rows_stay[0], 100
    found, sent, plain = {}, [], gmc.distributed._exchange

    def counted(kind: str, text: bytes, size: int = 0) -> list[bytes]:
        sent.extend({"sum": [size], "rows": [len(text)]}.get(kind, []))
        return plain(kind, text, size)

    gmc.distributed._exchange = counted
    for name, (make, data) in SCATTERED.items():
        if scattered_kind(name) != kind:
            continue
        few, static.FEW = static.FEW, 2 if name in ("many groups", "people False") else static.FEW
        rows = data(2600, 7)
        sent.clear()
        state = make().fit(*(t[slice(*(0, 500, 2600, 2600)[rank : rank + 2])] for t in rows)).state_dict()
        found[name] = {"state": state, "largest": max(sent), "sent": [sum(sent)]}
        if name in ("quantile plain True", "quantile levels True", "images True") or name.endswith("learned"):
            sent.clear()
            make().fit(*(t[rank::3] for t in data(4 * 2600, 8)))
            found[name]["sent"].append(sum(sent))
        if rank == 0:
            with local():
                alone = make().fit(*rows)
            found[name] |= {"alone": alone.state_dict(), "steps": alone.report.iterations}
        static.FEW = few
    make, data = SCATTERED["noise"]
    head, rows = make(), data(600, 1)
    if rank == 1:
        solver.Sample.measure = lambda *_: (_ for _ in ()).throw(MemoryError("no room"))
    try:
        head.fit(*(t[rank::3] for t in rows))
    except (PeerError, MemoryError) as error:
        found["failed"] = f"{type(error).__name__}: {error}"
    scores, masks, member = _images(600, 1, "exact")
    try:
        gmc.ThresholdHead(0.2, 0.01, ["a", "nobody"], resolution="exact").fit(
            *(t[rank::3] for t in (scores, masks, (member[:, :2] > 0.4) & torch.tensor([True, False])))
        )
    except ValueError as error:
        found["nobody"] = str(error)
    return found


def _rounded(n: int, seed: int, parts: int = 10) -> tuple[torch.Tensor, ...]:
    """Few distinct rows; with more parts, more kinds than ranks tell one another of, some of them frequent."""
    probs, y, member = ZOO[NAMES.index("probability-noise")].data(n, seed).observe
    return (probs * parts).round() / parts, y, member


def _conforming(n: int, seed: int, kind: str) -> tuple[torch.Tensor, ...]:
    """Scores of groups that differ, with or without weights and starts; or few distinct ones."""
    g = torch.Generator().manual_seed(seed)
    member = torch.rand(n, 3, generator=g) < 0.4
    scores = torch.randn(n, generator=g).double().abs() * (1 + member[:, 0])
    if kind == "equal":
        return (2 * scores).round() / 2, member
    if kind in ("plain", "levels", "paper"):
        return scores, member
    rows = scores, member, *torch.rand(2, n, generator=g).double()
    if kind == "clusters":  # of which some are on several ranks; equal scores there
        return (scores * scores[:300].repeat(n // 300 + 1)[:n], *rows[1:], torch.randint(300, (n,), generator=g))
    return rows


class _Paper(gmc.QuantileHead):
    """Takes fixed steps."""

    def fit(self, *rows):
        return super().fit(*rows, solver="paper", eta=0.02, max_iter=40)


class _Learned(gmc.ProbabilityHead):
    """Takes features third, then weights and clusters."""

    def fit(self, probs, y, features, weight=None, clusters=None):
        return super().fit(probs, y, features[:, :1] > 0, weight, clusters=clusters, features=features)


class _LearnedThresholds(gmc.QuantileHead):
    """Takes features second, then weights and clusters."""

    def fit(self, scores, features, weight=None, clusters=None):
        return super().fit(scores, features[:, :1] > 0, weight, clusters=clusters, features=features)


def _hidden_scores(n: int, seed: int, clusters: bool = False) -> tuple[torch.Tensor, ...]:
    """Scores that are larger where two features are large; with weights, and clusters some of which are on several ranks."""
    g = torch.Generator().manual_seed(seed)
    x, who = torch.randn(n, 4, generator=g), torch.randint(400, (n,), generator=g)
    scores = torch.randn(n, generator=g).double().abs() * (1 + 3.0 * ((x[:, 1] > 0) & (x[:, 2] > 0)))
    return (scores, x, torch.rand(n, generator=g).double(), who) if clusters else (scores, x)


class _LearnedMasks(gmc.ThresholdHead):
    """Takes features third, then weights and clusters."""

    def fit(self, scores, masks, features, weight=None, clusters=None):
        return super().fit(scores, masks, features[:, :1] > 0, weight, clusters=clusters, features=features)


def _images(n: int, seed: int, kind: str = "") -> tuple[torch.Tensor, ...]:
    """Masks of 3 x 3 pixels whose scores are lower where two features are large; some have no pixel."""
    g = torch.Generator().manual_seed(seed)
    x, who, classes = torch.randn(n, 4, generator=g), torch.randint(400, (n,), generator=g), 2 if kind == "classes" else 1
    masks = torch.rand(n, classes, 9, generator=g) < 0.3
    lower = 1.0 * (x[:, 0] > 0) + 3.0 * ((x[:, 1] > 0) & (x[:, 2] > 0)) * (kind != "exact")
    scores = torch.sigmoid(2.0 * masks + torch.randn(masks.shape, generator=g) - lower[:, None, None])
    if classes == 1:
        scores, masks = scores[:, 0], masks[:, 0]
    if kind == "exact":
        return scores.double(), masks, (x[:, :3] > 0.0) / 2 + (x[:, 1:] > 0.5) / 2
    return scores, masks, x, *((torch.rand(n, generator=g), who) if kind == "clusters" else ())


def _hidden_classes(n: int, seed: int, labels: bool = False) -> tuple[torch.Tensor, ...]:
    """Three classes, or labels, that differ where two features are large."""
    g = torch.Generator().manual_seed(seed)
    x, z, u = torch.randn(n, 4, generator=g), torch.randn(n, 3, generator=g), torch.rand(n, 3, generator=g)
    moved = z + ((x[:, 1] > 0) & (x[:, 2] > 0))[:, None] * torch.tensor([2.0, 0.0, -2.0])
    if labels:
        return torch.sigmoid(z), u < torch.sigmoid(moved), x
    return z.softmax(1), (u[:, :1] > moved.softmax(1).cumsum(1)[:, :2]).sum(1), x


def _hidden(n: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Outcomes that differ where two features are large."""
    g = torch.Generator().manual_seed(seed)
    x, z = torch.randn(n, 4, generator=g), torch.randn(n, generator=g)
    p = torch.sigmoid(z + 3.0 * ((x[:, 1] > 0) & (x[:, 2] > 0)) - 1.0)
    return torch.sigmoid(z), torch.rand(n, generator=g) < p, x


def _people(rows: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The same rows with weights, and clusters some of which are on several ranks."""
    g = torch.Generator().manual_seed(len(rows[0]))
    return *rows, torch.rand(len(rows[0]), generator=g), torch.randint(400, (len(rows[0]),), generator=g)


#: Heads whose rows stay on their ranks, and data.
SCATTERED = {
    "noise": (lambda: gmc.ProbabilityHead(None, ["a", "b", "c"], bins=4), lambda n, s: ZOO[7].data(n, s).observe),
    "many groups": (lambda: gmc.ProbabilityHead(None, ["a", "b", "c"], bins=4), lambda n, s: ZOO[7].data(n, s).observe),
    **{
        f"people {few}": (
            lambda: gmc.ProbabilityHead(None, ["a", "b", "c"], bins=4),
            lambda n, s: _people(ZOO[7].data(n, s).observe),
        )
        for few in (True, False)
    },
    "people classes": (
        lambda: gmc.ProbabilityHead(0.02, ["positive"], num_classes=3, noise_floor=False),
        lambda n, s: _people((*_hidden_classes(n, s)[:2], _hidden_classes(n, s)[2][:, :1] > 0)),
    ),
    "people learned": (
        lambda: _Learned(None, ["positive"], learn=gmc.Trees(2, trees=12)),
        lambda n, s: _people(_hidden(n, s)),
    ),
    "equal rows": (lambda: gmc.ProbabilityHead(None, ["b", "c"], bins=5), _rounded),
    "rows alike": (lambda: gmc.ProbabilityHead(None, ["b", "c"], bins=5), lambda n, s: _rounded(n, s, 40)),
    **{
        name: (ZOO[NAMES.index(name)].make, lambda n, s, name=name: ZOO[NAMES.index(name)].data(n, s).observe)
        for name in ("probability-euclidean", "probability-classes", "distribution", "distribution-noise", "tree-groups")
    },
    "learned": (lambda: _Learned(None, ["positive"], learn=gmc.Trees(2, trees=12)), _hidden),
    "classes learned": (lambda: _Learned(None, ["positive"], num_classes=3, learn=gmc.Trees(2, trees=12)), _hidden_classes),
    "labels learned": (
        lambda: _Learned(None, ["positive"], num_classes=3, multilabel=True, learn=gmc.Trees(2, trees=12)),
        lambda n, s: _hidden_classes(n, s, True),
    ),
    "scores learned": (lambda: _LearnedThresholds(0.8, 0.02, ["positive"], learn=gmc.Trees(2, trees=5)), _hidden_scores),
    "clusters learned": (
        lambda: _LearnedThresholds(0.8, 0.02, ["positive"], learn=gmc.Trees(2, trees=5)),
        lambda n, s: _hidden_scores(n, s, True),
    ),
    "scores line learned": (lambda: _LearnedThresholds(0.8, 0.02, ["positive"], learn=gmc.Linear(steps=8)), _hidden_scores),
    **{
        f"images {kind} learned": (
            lambda learn=learn, classes=classes: _LearnedMasks(0.2, 0.02, ["positive"], num_classes=classes, learn=learn),
            lambda n, s, kind=kind: _images(n, s, kind),
        )
        for kind, learn, classes in (
            *(("trees", gmc.Trees(2, trees=4), None), ("clusters", gmc.Trees(2, trees=4), None)),
            *(("classes", gmc.Trees(1, trees=2), 2), ("line", gmc.Linear(steps=6), None)),
        )
    },
    **{
        f"images {floor}": (
            lambda floor=floor: gmc.ThresholdHead(
                0.2, 0.01, ["a", "b", "c"], resolution="exact", fractional=True, noise_floor=floor
            ),
            lambda n, s: _images(n, s, "exact"),
        )
        for floor in (True, False)
    },
    "line learned": (lambda: _Learned(None, ["positive"], learn=gmc.Linear(steps=20)), _hidden),
    **{
        f"quantile {kind} {floor}": (
            lambda floor=floor: gmc.QuantileHead(0.8, 0.01, ["a", "b", "c"], noise_floor=floor),
            lambda n, s, kind=kind: _conforming(n, s, kind),
        )
        for kind, floor in (("plain", True), ("equal", True), ("weights", False), ("clusters", True))
    },
    **{
        f"quantile {kind} {floor}": (
            lambda kind=kind, floor=floor: {"paper": _Paper}.get(kind, gmc.QuantileHead)(
                0.8, 0.004, ["a", "b", "c"], bins=4, noise_floor=floor
            ),
            lambda n, s, kind=kind: _conforming(n, s, "equal" if kind == "levels of equals" else kind),
        )
        for kind, floor in (
            *(("levels", True), ("levels", False), ("levels of equals", False), ("weights", True)),
            *(("clusters", False), ("paper", False)),
        )
    },
}


def shares(rank: int) -> dict:
    """What of seven numbers this rank is given, by kind of loader."""
    from torch.utils.data import (
        BatchSampler,
        DataLoader,
        DistributedSampler,
        IterableDataset,
        RandomSampler,
        SubsetRandomSampler,
    )

    from torchgmc.lightning import shard

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(7))

    torch.manual_seed(rank)  # samplers that draw differ between the ranks
    data = list(range(7))
    loaders = {
        "in order": DataLoader(data, batch_size=2),
        "shuffled": DataLoader(data, batch_size=2, shuffle=True),
        "padded": DataLoader(data, batch_size=2, sampler=DistributedSampler(data)),
        "subset": DataLoader(data, batch_size=2, sampler=SubsetRandomSampler(range(7))),
        "batches": DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 3, False)),
        "single": DataLoader(data, batch_size=None),
        "stream": DataLoader(Stream(), batch_size=2),
        "list": [torch.tensor([0, 1, 2]), torch.tensor([3, 4]), torch.tensor([5, 6])],
    }
    return {name: [int(i) for batch in shard(one) for i in torch.as_tensor(batch).reshape(-1)] for name, one in loaders.items()}


def failures(rank: int) -> dict:
    """A rank that fails takes the others with it, and leaves them able to go on."""
    entry = ZOO[NAMES.index("threshold")]
    scores, masks, member = entry.data(N, 3).observe
    head, found = entry.fitted_alone(), {}
    state = {k: v.clone() for k, v in head.state_dict().items()}
    bad = scores.clone()
    bad[-1] = float("nan")
    for name, run in {
        "bad batch in fit": lambda: head.fit(bad if rank else scores, masks, member),
        "own loop": lambda: _own_loop(entry.make(), bad if rank else scores, masks, member),
        "wrong points": lambda: entry.make().fit(scores, masks, member) if rank else entry.make().calibrate(),
        "other heads": lambda: gmc.ThresholdHead(0.1 + 0.1 * rank, 0.02, ["a", "b", "c"]).fit(scores, masks, member),
        "other solvers": lambda: entry.make().fit(scores, masks, member, solver="paper" if rank else "exact"),
        "other solvers in a loop": lambda: _own_loop(
            entry.make(), scores, masks, member, solver="paper" if rank else "exact", max_iter=3
        ),
        "no data anywhere": lambda: entry.make().fit(scores[:0], masks[:0], member[:0]),
        "no masks": lambda: entry.make().fit(*(scores, masks, member)[: 1 if rank else 3]),
        "audit without masks": lambda: head.audit(*(scores, masks, member)[: 1 if rank else 3]),
        "audit before a fit": lambda: (entry.make() if rank else head).audit(scores, masks, member),
        "audits at other alphas": lambda: gmc.audit(head, (scores, masks, member), alpha=0.1 + rank),
        "monitors at other alphas": lambda: gmc.Monitor(head, alpha=0.1 + rank).update(scores, masks, member),
        "sets of other numbers": lambda: gmc.PredictionSets(None, gmc.QuantileHead(0.8, 0.02)).fit(*_classes(1.0 + rank)),
    }.items():
        try:
            run()
            found[name] = "nothing was raised"
        except (ValueError, TypeError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    found["unchanged"] = all(torch.equal(v, state[k]) for k, v in head.state_dict().items()) and head.is_fitted
    probs, labels = _classes()
    sets = gmc.PredictionSets(None, gmc.QuantileHead(0.8, 0.02), class_conditional=True)
    found["classes"] = sets.fit(probs[labels != rank], labels[labels != rank]).class_names  # of which a rank lacks one
    found["afterwards"] = entry.make().fit(scores[rank::2], masks[rank::2], member[rank::2]).state_dict()
    return found


def _classes(factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities, or a multiple of them, and labels."""
    probs, labels, _ = ZOO[NAMES.index("probability-classes")].data(N, 3).observe
    return factor * probs, labels


def _own_loop(head, *data, **options):
    with together():
        for part in zip(*(t.split(10) for t in data), strict=True):
            head.observe(*part)
        head.calibrate(**options)


def killed(rank: int) -> dict:
    """Rank 1 is killed between two batches; rank 0 must not wait for it for ever."""
    entry = ZOO[NAMES.index("threshold")]
    data = entry.data(N, 3).observe
    head = entry.make()
    head.observe(*(t[:10] for t in data))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        head.calibrate()
    except PeerError as error:
        return {"error": str(error), "fitted": head.is_fitted}
    return {"error": "nothing was raised"}


if __name__ == "__main__":
    rank, world, folder, what = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=40))
    runs = (fits, audits, traffic, scattered, scattered_learned, scattered_images, shares, failures, killed)
    tasks = {run.__name__: run for run in runs}
    found = {name: tasks[name](rank) for name in what.split(",") if name != "shares" or importlib.util.find_spec("lightning")}
    torch.save(found if "," in what else found[what], folder / f"{rank}.pt")
    if what != "killed":
        dist.barrier()
    dist.destroy_process_group()
