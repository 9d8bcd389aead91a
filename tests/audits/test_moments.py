"""Moments of the groups that were searched: estimates by a loop, intervals that hold at once."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from gmctest.oracles import audit_interval
from torchgmc.audits.moments import Moments


def of_members(who, s, weight):
    return Moments.of(lambda table: who.double().T @ table, s, weight, torch.zeros(len(s), 0, dtype=torch.int64))


@settings(deadline=None, max_examples=30)
@given(
    n=st.integers(3, 300),
    seed=st.integers(0, 1000),
    conditional=st.booleans(),
    binary=st.booleans(),
    weighted=st.booleans(),
)
def test_intervals_by_the_loop(n, seed, conditional, binary, weighted):
    rng = torch.Generator().manual_seed(seed)
    who, s = torch.rand(n, 2, generator=rng) < 0.3, torch.rand(n, generator=rng).double()
    s = (s.round() if binary else s) - 0.4
    who[0] = True
    weight = torch.rand(n, generator=rng).double() + 0.1 if weighted else torch.full((n,), 2.0).double()
    moments = of_members(who, s, weight)
    ends = moments.intervals(conditional, (-0.4, 0.6), 0.05)
    for j in range(2):
        inside = who[:, j].tolist()
        low, high = audit_interval(s.tolist(), inside, weight.tolist(), (-0.4, 0.6), 0.05 / 2, conditional)
        mass, total = float(weight[who[:, j]].sum()), float(weight.sum())
        mean = sum(w * x for w, x, a in zip(weight.tolist(), s.tolist(), inside, strict=True) if a)
        found = float(moments.estimates(conditional)[j])
        assert found == pytest.approx(mean / (mass if conditional else total), abs=1e-12)
        assert [float(end[j]) for end in ends] == pytest.approx([low, high], abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("shape", ["bernoulli", "skewed"])
def test_all_intervals_hold_at_once(conditional, shape):
    """1,000 draws of 400 examples with overlapping and rare groups and known truth; delta 0.05, so at least 95 % of draws
    must hold. The bounds are conservative, so the count is far above; a wrong constant shows as a count below 950."""
    rng = torch.Generator().manual_seed(1)
    rates = torch.tensor([1.0, 0.5, 0.3, 0.05])
    bottom = 0.1 if shape == "bernoulli" else 1 / 9

    def hold(who, s):
        moments = of_members(who, s, torch.ones(400).double())
        low, high = moments.intervals(conditional, (-bottom, 1 - bottom), 0.05)
        return ((low <= 0.0) & (high >= 0.0)).all()

    who = torch.rand(1000, 400, 4, generator=rng) < rates
    x = torch.rand(1000, 400, generator=rng).double()
    s = (x < 0.1).double() - 0.1 if shape == "bernoulli" else x**8 - 1 / 9
    assert int(torch.vmap(hold)(who, s).sum()) >= 950
