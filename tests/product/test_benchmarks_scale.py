"""The benchmark of scale: ranks share the rows, one rank's figures, a page of what there is."""

import pytest
import torch

from benchmarks import scale


@pytest.mark.parametrize("n", [1000, 250_000])
def test_ranks_share_the_rows(n, monkeypatch):
    monkeypatch.setattr(scale, "BATCH", 100_000)
    whole = torch.cat([rows[0] for rows in scale.batches("quantile", n, 0, 1)])
    parts = torch.cat([rows[0] for rank in range(3) for rows in scale.batches("quantile", n, rank, 3)])
    assert len(whole) == n and torch.equal(whole.sort().values, parts.sort().values)


def test_a_page_holds_what_was_measured_and_no_more():
    alone = scale.worker("quantile", 500, 1, 0, "")
    assert alone["kept"] == 500 * (24 + 5) and alone["sent"] == 0 and alone["calibrate"] > 0
    ranks = [alone | {"sent": 7_000}, alone | {"sent": 9_000, "state": [value + 1e-9 for value in alone["state"]]}]
    text = scale.page({"machine": {"cores": "two"}, "quantile 500 1": [alone], "quantile 500 2": ranks})
    assert "| quantile | 500 | 29 |" in text and "| quantile | 500 | 2 | 9 |" in text and "| 1e-09 |" in text
    assert "tree | 500" not in text and "one pass" not in text
