"""One seed's measures against a loop, and the noise they state against many draws."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from torchgmc_paper.measures import measure


def measure_loop(who, s):
    """Deviations and the oracle's noise, one example at a time."""
    n, found = len(who), {}
    for j in range(who.shape[1]):
        inside = [float(s[i]) for i in range(n) if who[i, j]]
        mass = len(inside) / n
        mean = sum(inside) / len(inside) if inside else None
        left = [(v - mean) for v in inside]
        if len(inside) == 1:  # one example shows no spread
            found["mass", j], found["conditional", j] = (inside[0] / n, None), (mean, None)
            continue
        variance = sum(v * v for v in left) / max(len(inside) - 1, 1)
        size = (2 / np.pi) ** 0.5 * (mass * variance / n) ** 0.5
        found["mass", j] = (sum(inside) / n, size)
        found["conditional", j] = (mean, size / mass) if inside else (None, None)
    return found


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 12), m=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_measure_matches_a_loop(n, m, seed):
    g = torch.Generator().manual_seed(seed)
    who, s = torch.rand(n, m, generator=g) < 0.6, torch.randn(n, generator=g, dtype=torch.float64)
    names = [str(j) for j in range(m)]
    rows = measure("x", names, who, s, target=0.5, num_calibration=2 * n)
    expected = measure_loop(who, s)
    assert len(rows) == 2 * m
    for row in rows:
        deviation, size = expected[row["measure"], int(row["group"])]
        assert row["deviation"] == (None if deviation is None else pytest.approx(deviation, abs=1e-12))
        assert row["noise"] == (None if size is None else pytest.approx(size, abs=1e-12))
        if size is not None:
            assert row["noise_fitted"] == pytest.approx(size * 1.5**0.5, abs=1e-12)
        assert row["risk"] == (None if row["mass"] == 0 else pytest.approx(expected["conditional", int(row["group"])][0] + 0.5))
    json.dumps(rows, allow_nan=False)


def test_noise_is_what_an_oracle_and_a_fitted_predictor_show():
    """Many test sets of a distribution whose three overlapping groups have mean 0."""
    g = torch.Generator().manual_seed(0)
    n, m, draws = 150, 300, 6000

    def draw(*size):
        first = torch.rand(*size, generator=g) < 0.6
        who = torch.stack([first, ~first, torch.rand(*size, generator=g) < 0.3], -1)
        return who, torch.randn(*size, generator=g) * torch.where(first, 0.3, 0.1)

    who, s = draw(draws, n)
    shown = (who * s[..., None]).mean(1).abs()  # (draws, 3)
    member, before = draw(draws, m)
    inside = member[..., 0]
    shift = (inside * before).sum(1) / inside.sum(1)  # exact on the calibration examples of the first group
    fitted = (who[..., 0] * (s - shift[:, None])).mean(1).abs()
    measured = torch.cat([shown.mean(0), fitted.mean()[None], shown.amax(1).mean()[None]])
    said = []
    for k in range(100):  # what the rows say, averaged over test sets
        rows = measure("x", ["a", "b", "c"], who[k], s[k], num_calibration=m)[:3]
        said.append(torch.tensor([*(row["noise"] for row in rows), rows[0]["noise_fitted"], rows[0]["worst_noise"]]))
    torch.testing.assert_close(measured, torch.stack(said).mean(0), rtol=0.04, atol=0)


def test_copies_of_an_example_add_no_information():
    g = torch.Generator().manual_seed(0)
    who, s = torch.rand(20, 3, generator=g) < 0.6, torch.randn(20, generator=g)
    once = measure("x", ["a", "b", "c"], who, s, num_calibration=40)
    copies = torch.arange(20).repeat(4)
    four = measure("x", ["a", "b", "c"], who[copies], s[copies], num_calibration=160, clusters=copies)
    for one, many in zip(once, four, strict=True):
        for key in ("deviation", "risk", "mass", "noise", "noise_fitted", "worst_noise"):
            assert many[key] == pytest.approx(one[key], abs=1e-9), key


def test_measure_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="`who` must be bool"):
        measure("x", ["a"], torch.ones(2, 1), torch.ones(2))
    with pytest.raises(ValueError, match="`s` must have the same shape"):
        measure("x", ["a"], torch.ones(2, 1).bool(), torch.ones(2, 3))
