"""Same input, same state: bit by bit across runs and thread counts, to a stated tolerance across batches and orders.

Fits that move along one test function at a time may break a tie in another order of sums the other way; the promise is kept
just as well. So states are compared to 1e-6, and where a fit is a sequence of jumps (level sets, trees) what is compared after
a permutation is the promise itself.
"""

import hashlib
import json
import subprocess
import sys

import pytest
import torch

import torchgmc as gmc
from gmctest import heads_zoo, subprocess_env
from gmctest.heads_zoo import ZOO

TOLERANCE = 1e-6
#: A permutation changes the order of sums alone: these states do not depend on ties.
SMOOTH = (
    *("threshold", "threshold-classes", "threshold-jitter", "threshold-exact", "conformal", "unprocessed", "probability"),
    *("quantile", "distribution", "tree-conformal", "tree-unprocessed"),
)


def digest(head: gmc.Head) -> str:
    """All buffers, bit by bit."""
    found = hashlib.sha256()
    for name, value in sorted(head.state_dict().items()):
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()


def digests(n: int = 80) -> dict[str, str]:
    return {entry.name: digest(entry.fitted(n)) for entry in ZOO}


def in_a_new_process(threads: int, seed: str) -> dict[str, str]:
    # Threads that wait sleep: other tests have the cores, and threads that spin there take about three times as long.
    env = subprocess_env(OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="passive", PYTHONHASHSEED=seed)
    line = [sys.executable, __file__, str(threads)]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300, check=True)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_runs_and_thread_counts_give_the_same_bits() -> None:
    """Two processes with other hash seeds and other numbers of threads: the state of every head, bit by bit."""
    first, second = in_a_new_process(1, "1"), in_a_new_process(2, "2")
    assert first.keys() == {entry.name for entry in ZOO}
    assert {name for name in first if first[name] != second[name]} == set()


@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_fitting_twice_gives_the_same_bits(entry: heads_zoo.Entry) -> None:
    head = entry.fitted()
    before = digest(head)
    assert digest(head.fit(*entry.data(80, 0).observe, **entry.options)) == before


@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_batches_give_the_state_of_the_whole(entry: heads_zoo.Entry) -> None:
    data, whole, head = entry.data(80, 0).observe, entry.fitted(), entry.make()
    for start, end in ((0, 1), (1, 30), (30, 30), (30, 80)):
        head.observe(*(t[start:end] for t in data))
    head.calibrate(**entry.options)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(head.state_dict()[name], value, rtol=0, atol=TOLERANCE, equal_nan=True)


@pytest.mark.parametrize("entry", [e for e in ZOO if not e.baseline], ids=lambda e: e.name)
def test_the_zoo_holds_heads_that_do_something(entry: heads_zoo.Entry) -> None:
    """A head that changes nothing would be the same in every format and order."""
    report = entry.fitted().report
    assert report is not None and report.reached == ("alpha" if entry.make().alpha else "noise") and report.iterations > 0


@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_the_order_of_the_examples_does_not_matter(entry: heads_zoo.Entry) -> None:
    data, whole = entry.data(80, 0).observe, entry.fitted()
    order = torch.randperm(80, generator=torch.Generator().manual_seed(1))
    head = entry.make().fit(*(t[order] for t in data), **entry.options)
    if entry.name in SMOOTH:
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(head.state_dict()[name], value, rtol=0, atol=TOLERANCE, equal_nan=True)
    assert head.report is not None and whole.report is not None
    assert head.report.converged == whole.report.converged
    worst = [float(h.report.violations_after.abs().max()) for h in (head, whole) if h.report is not None]
    assert max(worst) <= max(head.alpha or 0.0, min(worst) + TOLERANCE) + 1e-9
    ours, theirs = head.calibrated_on, whole.calibrated_on  # the sketch of the data: no order at all
    assert (ours is not None) == (theirs is not None) == head.fits
    assert ours is None or (torch.equal(ours.keys, theirs.keys) and ours.limit == theirs.limit)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    print(json.dumps(digests()))
