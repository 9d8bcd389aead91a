"""Sums over clusters, of the rows of one process; over several in tests/test_distributed.py."""

import torch

from torchgmc.engine.clusters import total


def test_sums_over_clusters_are_those_of_a_loop():
    g = torch.Generator().manual_seed(0)
    cluster = torch.randint(-5, 5, (60, 1), generator=g) * 10**17
    values = torch.randn(60, 3, generator=g).double()
    sums = torch.stack([values[cluster[:, 0] == key].sum(0) for key in sorted(set(cluster[:, 0].tolist()))])
    torch.testing.assert_close(total(values, cluster), sums)
    torch.testing.assert_close(total(values[:, 0], cluster), sums[:, 0])
    assert total(values, cluster[:, :0]) is values
