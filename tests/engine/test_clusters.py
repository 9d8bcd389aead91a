"""Sums over clusters, of the rows of one process; over several in tests/test_distributed.py."""

import numpy as np
import torch

from torchgmc.engine.clusters import check, total


def test_sums_over_clusters_are_those_of_a_loop():
    g = torch.Generator().manual_seed(0)
    cluster = torch.randint(-5, 5, (60, 1), generator=g) * 10**17
    values = torch.randn(60, 3, generator=g).double()
    sums = torch.stack([values[cluster[:, 0] == key].sum(0) for key in sorted(set(cluster[:, 0].tolist()))])
    torch.testing.assert_close(total(values, cluster), sums)
    torch.testing.assert_close(total(values[:, 0], cluster), sums[:, 0])
    assert total(values, cluster[:, :0]) is values


def test_a_number_as_text_is_the_cluster_of_that_number():
    """A text file has no numbers: the same patient in a .csv part and in a .parquet part was two clusters."""
    ids = check(["5", "-17", "0", "007", "-0", "p5", "5.0", "1234567890123456789", "\u0663"], 9, torch.device("cpu"))[:, 0]
    assert ids[:3].tolist() == check(np.array([5, -17, 0]), 3, torch.device("cpu"))[:, 0].tolist()
    assert len(set(ids.tolist())) == 9 and bool((ids[3:] > 2**32).all())  # codes, and what is not an integer, by their text
    assert ids[5] == check(["p5"], 1, torch.device("cpu"))[0, 0]
