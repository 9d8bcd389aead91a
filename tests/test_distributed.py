"""Two processes (gloo, loopback) against one: the same state, whatever the shards; failures reach everyone."""

import fcntl
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torchgmc as gmc
from gmctest import subprocess_env
from gmctest.distributed_worker import SCATTERED, SHARDS, SOLVERS, N, scattered_kind
from gmctest.heads_zoo import NAMES, ZOO
from torchgmc import distributed
from torchgmc.deploy import io


def launch(what: str, folder: Path, world: int = 2, seconds: float = 150) -> list[dict]:
    """Run the worker on every rank; all have ended when this returns, by themselves or by us."""
    env = subprocess_env(GLOO_SOCKET_IFNAME="lo")
    worker = [sys.executable, "-m", "gmctest.distributed_worker"]
    ranks = [
        subprocess.Popen([*worker, str(r), str(world), str(folder), what], env=env, stderr=subprocess.PIPE, text=True)
        for r in range(world)
    ]
    stop = time.monotonic() + seconds
    try:
        errors = [rank.communicate(timeout=max(1.0, stop - time.monotonic()))[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for r, (rank, error) in enumerate(zip(ranks, errors, strict=True)):
        assert rank.returncode == 0 or (what == "killed" and r == 1), error
    return [torch.load(folder / f"{r}.pt") if (folder / f"{r}.pt").exists() else {} for r in range(world)]


#: What one pair of processes does one after the other.
TOGETHER = ("fits", "audits", "traffic", "shares", "failures")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """By rank and task. Workers of pytest-xdist share what the first of them has launched."""
    parts = tmp_path_factory.getbasetemp().parts
    folder = Path(*parts[:-1] if parts[-1].startswith("popen-") else parts) / "two-ranks"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "done").exists():
            return [torch.load(folder / f"{r}.pt") for r in range(2)]
        ranks = launch(",".join(TOGETHER), folder)
        (folder / "done").touch()
        return ranks


@pytest.fixture(scope="module")
def fits(found) -> list[dict]:
    return [rank["fits"] for rank in found]


def close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=0, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(
    ("entry", "shard"),
    [
        pytest.param(entry, shard, id=f"{entry.name}-{shard}")
        for entry in ZOO
        for shard in [*SHARDS, *SOLVERS, "observe", "local"]
        if shard not in SOLVERS or entry.make().alpha is not None  # those solvers go to alpha
    ],
)
def test_two_processes_end_with_the_state_of_one(entry, shard: str, fits):
    rows = 60 if shard == "even" else N
    options = SOLVERS.get(shard, entry.options)
    alone = entry.make().fit(*(t[:rows] for t in entry.data(N, 3).observe), **options).state_dict()
    assert bool(alone["fitted"])
    for rank in (0, 1):
        close(fits[rank][entry.name, shard], alone)
    for key, value in fits[0][entry.name, shard].items():  # and with the same state as each other, to the bit
        assert torch.equal(value, fits[1][entry.name, shard][key])


def test_two_processes_audit_and_watch_like_one(found):
    found = [rank["audits"] for rank in found]
    for entry in ZOO:
        head, data = entry.fitted(), entry.data(N, 5).observe
        audit = head.audit(*data, delta=0.1)
        for got in (rank[entry.name] for rank in found):
            assert got["examples"] == N and got["groups"] == audit.table["group"]
            assert got["cost"] == pytest.approx(audit.cost, abs=1e-9, nan_ok=True)
            for key, value in got["table"].items():
                torch.testing.assert_close(value, torch.tensor(audit.table[key]), rtol=0, atol=1e-9)
        if head.s_range() is not None and not head.relative:  # of a relative promise, pairs are made on each rank
            watch = gmc.Monitor(head, delta=0.1, alpha=0.01)
            watch.update(*data)
            torch.testing.assert_close(found[1][entry.name]["evidence"], watch.log_evidence(), rtol=0, atol=1e-6)


def test_bytes_do_not_grow_with_n_where_statistics_are_per_cell(found):
    for rank in found:
        for entry in ZOO:
            if hasattr(type(entry.make()).calibrate, "rows_stay") and not entry.per_cell:  # see below
                continue
            small, large = rank["traffic"][entry.name]
            assert small > 0
            assert (large <= small * 1.01) == entry.per_cell, (entry.name, small, large)


@pytest.mark.parametrize("kind", ["plain", "learned", "images"])
def test_rows_stay_on_their_ranks(kind: str, tmp_path):
    """Three ranks, one without rows: the state of one process, from sums whose size does not depend on n."""
    found = launch("scattered" if kind == "plain" else f"scattered_{kind}", tmp_path, 3, 300)
    names = [name for name in SCATTERED if scattered_kind(name) == kind]
    for name in names:
        for rank in found:
            close(rank[name]["state"], found[0][name]["alone"])
            if name.startswith("tree"):  # all that it decides by are exact sums
                assert all(torch.equal(value, found[0][name]["alone"][key]) for key, value in rank[name]["state"].items())
            assert all(torch.equal(value, found[0][name]["state"][key]) for key, value in rank[name]["state"].items())
            # Bytes that do not depend on n: a tree's promises are measured after each of 128 shifts of up to 16 moves at once, and
            # scores are counted in 8 patterns x 2 sides x 192 distances, by fold, with their sum and number. Trees are counted
            # as C x 4 x cells x codes, rules judged on about 400 rows, each with 2 C values.
            most = {"tree": 16 * 128 * 500, "quant": 8 * (6 * 3072 + 192), "learn": 4 * 4 * 1100}.get(name[:5].rstrip("-"), 2600)
            most = {"classes learned": 8 * 3 * 4 * 9 * 64, "labels learned": 8 * 12 * 500, "line learned": 8 * 12 * 500}.get(
                name, most
            )
            most = {"score": 8 * (2 * 6 * 384 + 192), "clust": 8 * (2 * 6 * 384 + 192)}.get(name[:5], most)
            if name.startswith("images"):  # in 2 patterns, or 21
                most = 8 * ((2 if name.endswith("learned") else 21) * 6 * 384 + 192)
            if name.startswith("people"):  # sums over up to 400 clusters
                most = max(most, 8 * 400 * 4)
            assert 24 < rank[name]["largest"] <= most, name  # 24: only their numbers, and the rows were sent
            assert rank[name]["sent"][-1] <= 1.5 * rank[name]["sent"][0]  # of 4 n rows, of n: looks may be a few more
    grown = ("learned", "classes learned", "labels learned", "scores learned", "clusters learned", "people learned")
    for name in {"learned": grown, "images": ("images trees learned", "images clusters learned")}.get(kind, ()):
        sizes = {part: len(found[0][name]["state"][part]) for part in ("tree_column", "rule_place")}
        assert min(sizes.values()) > 3, (name, sizes)
        for part in ("tree_column", "tree_cut", "tree_kind"):  # to the bit
            assert torch.equal(found[0][name]["state"][part], found[0][name]["alone"][part])
    for name in (name for name in names if name.endswith("line learned")):
        assert len(found[0][name]["state"]["line_weight"])
    rounds = sum(one["steps"] for one in (found[0][name] for name in names))
    assert kind == "images" or rounds > len(names)  # rounds are taken too; of thresholds there are none
    assert {"'nobody' has no examples with a fnr" in rank["nobody"] for rank in found} == {True}
    assert len({rank["nobody"] for rank in found}) == 1 and "of 600 images" in found[0]["nobody"]
    assert found[1]["failed"] == "MemoryError: no room"
    for rank in (0, 2):
        assert found[rank]["failed"].startswith("PeerError") and "rank 1: MemoryError: no room" in found[rank]["failed"]


def test_every_example_of_a_loader_goes_to_one_rank(found):
    pytest.importorskip("lightning.pytorch")
    first, second = (rank["shares"] for rank in found)
    for name in first:
        assert sorted(first[name] + second[name]) == list(range(7)), name
        assert first[name] and second[name], name


def test_a_failing_rank_fails_the_others_with_its_message(found):
    first, second = (rank["failures"] for rank in found)
    for name in ("bad batch in fit", "own loop"):
        assert second[name].startswith("ValueError: `scores` must be finite")
        assert first[name].startswith("PeerError: ") and "rank 1: ValueError: `scores` must be finite" in first[name]
    for name, why in {
        "no masks": "TypeError: `masks` is missing",
        "audit without masks": "TypeError: `masks` is missing",
        "audit before a fit": "RuntimeError: this head is not fitted",
        "sets of other numbers": "ValueError: `probs` must hold probabilities",
    }.items():
        assert second[name].startswith(why) and first[name].startswith("PeerError: ") and f"rank 1: {why}" in first[name]
    for found in (first, second):
        assert "different points of the program" in found["wrong points"]
        others = ("audits at other alphas", "monitors at other alphas")
        for name in ("other heads", "other solvers", "other solvers in a loop", *others):
            assert "the heads of the ranks differ" in found[name], name
        assert found["classes"] == ["class 0", "class 1", "class 2"]
        assert found["no data anywhere"].startswith("ValueError: no examples observed")
        assert found["unchanged"]
        close(found["afterwards"], ZOO[0].make().fit(*ZOO[0].data(N, 3).observe).state_dict())


def test_a_killed_rank_fails_the_other_cleanly(tmp_path):
    survivor, gone = launch("killed", tmp_path)
    assert "rank 0 lost another process" in survivor["error"] and not survivor["fitted"]
    assert gone == {}


# -- without processes -----------------------------------------------------------------------------------------------------


def test_without_a_process_group_nothing_is_exchanged():
    statistics = ZOO[0].make()
    statistics.observe(*ZOO[0].data(9, 0).observe)
    before = distributed.exchanged_bytes()
    assert distributed.reduce(statistics.statistics) is statistics.statistics
    distributed.agree("anything")
    assert not distributed.active() and distributed.exchanged_bytes() == before


@pytest.mark.parametrize("entry", ZOO, ids=NAMES)
def test_statistics_survive_packing(entry):
    head = entry.make()
    head.observe(*entry.data(12, 1).observe)
    tensors: list[Tensor] = []
    tree = distributed.pack(head.statistics, tensors)
    about, parts = distributed._from_bytes(distributed._to_bytes(tensors, json.dumps(tree)), torch.device("cpu"))
    assert about == tree
    back = distributed.unpack(about, parts)
    assert type(back) is type(head.statistics)
    again: list[Tensor] = []
    assert distributed.pack(back, again) == tree
    torch.testing.assert_close(again, tensors, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", io.known_heads().values(), ids=lambda kind: kind.__name__)
def test_every_head_pools_its_statistics(kind):
    assert hasattr(kind.calibrate, "__wrapped__"), "decorate `calibrate` with torchgmc.distributed.pooled"


def test_statistics_of_other_types_are_refused():
    with pytest.raises(TypeError, match="hold a set cannot be exchanged"):
        distributed.pack({"a": {1, 2}}, [])
