"""The audit's benchmark: the least that an interval can be, and that a run can be stopped and continued."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from benchmarks import audit
from benchmarks.rows import Row
from torchgmc.audits.betting import Units

VALUES, LAW, SIZE, LEVEL = torch.tensor([0.0, 0.25, 0.5, 1.0]).double(), torch.tensor([0.6, 0.3, 0.1, 0.0]).double(), 5, 0.2
#: Every sample of that size, (1024, 5).
SAMPLES = torch.tensor(list(itertools.product(range(4), repeat=SIZE)))


def chance(law: torch.Tensor) -> torch.Tensor:
    return law[SAMPLES].prod(1)


def other_law(m: float) -> torch.Tensor:
    """The paper's law of mean m: all on it, or the bet at which nothing is left for the end of the range."""
    t = (m - VALUES[:3]) / (1 - m)
    least, most = 0.0, 1.0
    for _ in range(60):
        bet = (least + most) / 2
        least, most = (bet, most) if float((LAW[:3] / (1 + bet * t)).sum()) < 1 else (least, bet)
    density = LAW[:3] / (1 + least * t)
    return torch.cat([density, 1 - density.sum()[None]])


def power(q: torch.Tensor, level: float) -> float:
    """Of the most powerful test of q against the law: samples in the order of the ratio, the last one in part."""
    p, q = chance(LAW), chance(q)
    order = (p / q.clamp_min(1e-300)).argsort(descending=True)
    before = q[order].cumsum(0) - q[order]
    part = ((level - before) / q[order].clamp_min(1e-300)).clamp(0, 1)
    return float((part * p[order]).sum())


def test_no_guaranteed_end_is_nearer_than_the_paper_says():
    """All samples of five, one by one: our own ends hold for the other law, and are no nearer than its test allows."""
    g, row = (SAMPLES > 0).nonzero().unbind(1)
    count = len(SAMPLES)
    units = Units.of(
        torch.ones(SIZE, 1).double(), torch.zeros(count).long(), torch.zeros(count).double(), g, row, VALUES[SAMPLES[g, row]]
    )
    high = units.ends(torch.tensor([LEVEL]).double())[1, :, 0]
    mean = float(LAW @ VALUES)
    tight = []
    for m in torch.linspace(mean + 0.02, 0.7, 12).double().tolist():
        q = other_law(m)
        assert float(q.sum()) == pytest.approx(1) and float(q @ VALUES) == pytest.approx(m) and float(q.min()) > -1e-9
        nearer = (high < m - 1e-9).double()
        assert float(chance(q) @ nearer) <= LEVEL + 1e-9  # it is guaranteed ...
        assert float(chance(LAW) @ nearer) <= power(q, LEVEL) + 1e-9  # ... so it cannot often be below m
        rare = (m - mean) / (1 - mean)
        assert float(chance(LAW) @ nearer) <= LEVEL / (1 - rare) ** SIZE + 1e-9
        tight.append(power(q, LEVEL))
    assert tight[0] < 0.5 < tight[-1]  # the claim says something here


def test_the_least_end_is_that_of_the_exact_test():
    """Of 500 values of which 30 % are 0.1: the level at which a test finds m in half of all samples, by counting."""
    n, p, level = 500, 0.3, 0.004
    k = torch.arange(n + 1).double()
    ways = torch.lgamma(torch.tensor(n + 1.0).double()) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)

    def needed(m: float) -> float:
        a, b = 1 / (1 + m / (1 - m)), 1 / (1 + (m - 0.1) / (1 - m))  # all on it
        assert (1 - p) * a + p * b <= 1
        ours, other = ((ways + k * torch.tensor(y).log() + (n - k) * torch.tensor(x).log()).exp() for x, y in
                       ((1 - p, p), ((1 - p) * a, p * b)))  # fmt: skip
        part = ((0.5 - (ours.cumsum(0) - ours)) / ours).clamp(0, 1)
        return float((part * other).sum())

    near, far = 0.0325, 0.2
    for _ in range(40):
        m = (near + far) / 2
        near, far = (near, m) if needed(m) <= level else (m, far)
    y, share = torch.tensor([[0.0], [0.1]]).double(), torch.tensor([[1 - p], [p]]).double()
    mean = torch.tensor([0.1 * p]).double()
    found = audit.least_end(y, share, torch.tensor([float(n)]).double(), torch.tensor([level]).double(), mean)
    assert float(found) == pytest.approx(far - 0.1 * p, rel=0.03)


def test_a_run_continues_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []

    def cell(name: str) -> list[Row]:
        calls.append(name)
        if calls == ["a", "b"]:
            raise KeyboardInterrupt
        return [Row("audit", name, "%", 95.0, ">= 95 %", True)]

    monkeypatch.setattr(audit, "RESULTS", tmp_path)
    monkeypatch.setattr(audit, "cells_of", lambda *_: {name: lambda name=name: cell(name) for name in "abc"})
    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        audit.main([])
    audit.main([])
    torch.set_num_threads(threads)
    assert calls == ["a", "b", "b", "c"]
    assert list(json.loads((tmp_path / "audit.json").read_text())["cells"]) == ["a", "b", "c"]
    page = (tmp_path / "audit.md").read_text()
    assert all(f"| {name} | 95 % |" in page for name in "abc")
