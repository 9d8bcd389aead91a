"""Risks and the lattice of thresholds."""

import torch
from hypothesis import given, settings, strategies as st

from torchgmc.heads.threshold.risks import Lattice


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    unit=st.sampled_from([2.0**-8, 0.01, 1 / 3, 0.0125]),
    origin=st.sampled_from([0.0, 0.5, 0.3, 1.5]),
    dtype=st.sampled_from([torch.float16, torch.float32, torch.float64]),
)
def test_lattice_index_is_the_first_point_at_or_above(seed, unit, origin, dtype):
    lattice = Lattice.over(-0.1, 1.1, origin, unit)
    points = lattice.points().to(dtype)
    rng = torch.Generator().manual_seed(seed)
    scores = torch.cat([torch.rand(200, generator=rng).to(dtype) * 1.4 - 0.2, points, points.flip(0)])
    expected = (scores[:, None] > points).sum(1)
    assert torch.equal(lattice.index(scores).long(), expected)
