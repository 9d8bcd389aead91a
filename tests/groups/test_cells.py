"""Cells of equal membership."""

import torch
from hypothesis import given, settings, strategies as st

from torchgmc.groups.cells import pattern_ids


@settings(deadline=None)
@given(n=st.integers(0, 30), a=st.sampled_from([0, 1, 5, 61, 62, 63, 130]), seed=st.integers(0, 2**16))
def test_pattern_ids_match_unique(n: int, a: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    base = torch.rand(4, a, generator=generator) < 0.5
    membership = base[torch.randint(0, 4, (n,), generator=generator)]
    ids, patterns = pattern_ids(membership)
    assert torch.equal(patterns[ids], membership)
    assert len(patterns) == len({tuple(row) for row in membership.tolist()})
    if n and a:
        assert torch.equal(patterns, torch.unique(membership, dim=0))
