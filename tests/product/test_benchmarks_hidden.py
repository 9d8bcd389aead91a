"""Groups that no method was given: triples by plain loops, miss rates by hand."""

import itertools

import numpy as np
import pytest
import torch

from benchmarks import hidden


def test_triples_are_all_that_are_large_enough(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hidden, "LEAST", 12)
    codes = np.random.default_rng(0).integers(0, 3, (300, 4))
    found = {tuple(column) for column in hidden.triples(codes).T.tolist()}
    wanted = set()
    for columns in itertools.combinations(range(4), 3):
        for levels in itertools.product(range(3), repeat=3):
            inside = [all(row[c] == v for c, v in zip(columns, levels, strict=True)) for row in codes.tolist()]
            if sum(inside) >= 12:
                wanted.add(tuple(inside))
    assert found == wanted and wanted


def test_one_threshold_with_the_mean_of_others():
    torch.manual_seed(0)
    masks = torch.rand(40, 5, 5) < 0.5
    scores = torch.rand(40, 5, 5)
    each = hidden.rates(scores, masks, torch.rand(40))
    for i in range(3):
        q = torch.rand(40)
        picture = hidden.rates(scores, masks, q)[i]
        missed = [s <= q[i] for s, m in zip(scores[i].flatten(), masks[i].flatten(), strict=True) if m]
        assert float(picture) == pytest.approx(sum(map(bool, missed)) / len(missed))
    one = hidden.level(scores, masks, float(each.mean()))
    assert float(hidden.rates(scores, masks, torch.tensor([one])).mean()) == pytest.approx(float(each.mean()), abs=0.01)
