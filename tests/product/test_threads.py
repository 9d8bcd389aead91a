"""A program that tells torch to use one thread gets one: numpy's own threads wait for one another where the cores are busy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchgmc as gmc
from gmctest import subprocess_env

TASKS = Path("/proc/self/task")


def ticks() -> int:
    """Processor time of all threads of this process but the first, in hundredths of a second."""
    others = [task for task in TASKS.iterdir() if task.name != str(os.getpid())]
    return sum(sum(map(int, (task / "stat").read_text().rsplit(")", 1)[1].split()[11:13])) for task in others)


def used() -> dict[str, int]:
    """What other threads do while heads of many groups are fitted and audited."""
    torch.set_num_threads(1)
    rng, found = torch.Generator().manual_seed(0), {}
    n, names = 6000, [f"group {k}" for k in range(40)]
    groups = torch.rand(n, 40, generator=rng) < 0.3
    x, z = torch.randn(n, 10, generator=rng), torch.randn(n, generator=rng)
    p, y = torch.sigmoid(z), torch.rand(n, generator=rng) < torch.sigmoid(z + groups[:, 0] + x[:, 0])
    masks = torch.rand(n, 8, 8, generator=rng) < 0.4
    images = torch.sigmoid(2.0 * masks + torch.randn(n, 8, 8, generator=rng) - groups[:, :1, None].float())
    works = {
        "probability": (gmc.ProbabilityHead(None, names), {"probs": p, "y": y, "groups": groups}),
        "trees": (gmc.ProbabilityHead(None, names, learn=gmc.Trees()), {"probs": p, "y": y, "groups": groups, "features": x}),
        "line": (gmc.ProbabilityHead(None, names, learn=gmc.Linear()), {"probs": p, "y": y, "groups": groups, "features": x}),
        "quantile": (gmc.QuantileHead(0.9, None, names), {"scores": z.abs() * (1.0 + groups[:, 0]), "groups": groups}),
        "threshold": (gmc.ThresholdHead(0.1, None, names), {"scores": images, "masks": masks, "groups": groups}),
        "distribution": (gmc.DistributionHead({"a": [1, 2], "b": [3]}, None, names), {"logits": x, "groups": groups}),
        "tree": (gmc.TreeHead([5, 5, 6, 6, 6, 7, 7, -1], 0.9, 0.02), {"probs": x[:, :5].softmax(1), "labels": y + 2 * (z > 0)}),
    }  # fmt: skip
    for name, (head, rows) in works.items():
        before = ticks()
        head.fit(**rows)
        found[name] = ticks() - before
    return found


@pytest.mark.skipif(not TASKS.exists() or (os.cpu_count() or 1) < 2, reason="threads are counted on Linux, with two cores")
def test_fits_stay_on_one_thread() -> None:
    done = subprocess.run([sys.executable, __file__], env=subprocess_env(), capture_output=True, text=True, timeout=300, check=True)
    assert {name: spent for name, spent in json.loads(done.stdout.splitlines()[-1]).items() if spent > 2} == {}


if __name__ == "__main__":
    print(json.dumps(used()))
