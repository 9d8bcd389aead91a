"""The benchmark of learned groups: its splits, its figures and its page."""

import itertools

import numpy as np
import pytest

from benchmarks import fresh, learned


def test_a_made_up_split_is_measured_and_shown(monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(learned, "SIZES", (600,))
    monkeypatch.setattr(fresh, "measure_probabilities", lambda rows, f: {"Brier": float(((f - rows["y"]) ** 2).mean())})
    kept, saved = {}, []
    learned.fill(kept, ["made-up"], [600], 2, [learned.OURS, learned.STATIC, "nothing"], lambda: saved.append(1))
    cell = kept["made-up"]["600"]
    assert len(saved) == 6 and all(set(found) == {"0", "1"} for found in cell.values())
    assert cell[learned.OURS]["0"]["Brier"] < cell["nothing"]["0"]["Brier"]
    learned.fill(kept, ["made-up"], [600], 2, [learned.OURS], lambda: saved.append(1))
    assert len(saved) == 6  # nothing is measured twice
    text = learned.page(kept)
    assert "made-up, n = 600 (2 seeds)" in text and "| nothing |" in text and np.isfinite(cell["nothing"]["1"]["AUC"])


def test_the_worst_triple_is_that_of_plain_loops():
    draw = np.random.default_rng(0)
    rows = {"member": draw.random((300, 5)) < 0.5, "y": draw.random(300)}
    f, worst = draw.random(300), 0.0
    for a, b, c in itertools.combinations(range(5), 3):
        inside = rows["member"][:, a] & rows["member"][:, b] & rows["member"][:, c]
        if inside.sum() >= 35:
            worst = max(worst, abs(float((f - rows["y"])[inside].mean())))
    assert learned.worst_triple(rows, f, 35) == pytest.approx(worst, abs=1e-5) and worst > 0
