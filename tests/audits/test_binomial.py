"""Clopper and Pearson's intervals against the quantiles of the beta law."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from torchgmc.audits.binomial import Counts, tail

beta = pytest.importorskip("scipy.stats").beta
binom = pytest.importorskip("scipy.stats").binom


@settings(deadline=None, max_examples=60)
@given(data=st.data(), n=st.sampled_from([1, 2, 7, 60, 1000, 100_000]), level=st.sampled_from([0.2, 0.05, 1e-4, 1e-7]))
def test_ends_are_quantiles_of_beta(data, n, level):
    k = data.draw(st.integers(0, n))
    low, high = Counts(torch.tensor([k]).double(), torch.tensor([n]).double()).ends(torch.tensor([level])).flatten().tolist()
    expected = (beta.ppf(level, k, n - k + 1) if k else 0.0, beta.ppf(1 - level, k + 1, n - k) if k < n else 1.0)
    assert low == pytest.approx(expected[0], abs=2e-6) and high == pytest.approx(expected[1], abs=2e-6)
    assert low <= expected[0] + 1e-9 and high >= expected[1] - 1e-9  # outward


@settings(deadline=None, max_examples=100)
@given(n=st.integers(1, 3000), part=st.floats(0, 1), p=st.floats(0.0, 1.0))
def test_tails(n, part, p):
    k = round(part * n)
    found = tail(torch.tensor(float(k)), torch.tensor(float(n)), torch.tensor(p, dtype=torch.float64))
    assert float(found) == pytest.approx(binom.sf(k - 1, n, p), rel=1e-8, abs=1e-13)


def test_tests_agree_with_ends_and_no_trials_say_nothing():
    counts = Counts(torch.tensor([3.0, 0.0]).double(), torch.tensor([50.0, 0.0]).double())
    low, high = counts.ends(torch.tensor([0.05]))[:, 0, 0].tolist()
    mean = torch.tensor([[low - 1e-4, low + 1e-4], [0.5, 0.5]]).double()
    assert counts.rejects(mean, torch.tensor([True, True]), torch.tensor([0.05, 0.05])).tolist() == [
        [True, False],
        [False, False],
    ]
    mean = torch.tensor([[high - 1e-4, high + 1e-4], [0.5, 1.5]]).double()
    assert counts.rejects(mean, torch.tensor([False, False]), torch.tensor([0.05, 0.05])).tolist() == [
        [False, True],
        [False, True],
    ]
