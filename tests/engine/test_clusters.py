"""Sums over clusters, of the rows of one process; over several in tests/test_distributed.py."""

import torch

from torchgmc.engine import clusters
from torchgmc.engine.clusters import Clusters


def test_sums_over_clusters_are_those_of_a_loop(monkeypatch):
    monkeypatch.setattr(clusters, "ROWS", 7)
    g = torch.Generator().manual_seed(0)
    cluster = torch.randint(-5, 5, (60, 1), generator=g) * 10**17
    member, values = torch.rand(60, 3, generator=g) < 0.3, torch.randn(60, generator=g).double()
    rows = [(cluster[:, 0] == key) for key in set(cluster[:, 0].tolist())]
    sums = torch.stack([(member[row] * values[row, None]).sum(0) for row in rows])
    found = Clusters(cluster)
    torch.testing.assert_close(found.sums(member, values), sums.square().sum(0))
    torch.testing.assert_close(found.sums(member, values.abs(), lambda s: (s > 0).double()), (sums != 0).double().sum(0))
    assert found.largest(values.abs()) == max(values[row].abs().sum() for row in rows)
    assert Clusters(cluster[:0]).largest(values[:0]) == 0.0
