"""Quality and bias of a language model, against loops."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

import torchgmc as gmc
from gmctest.causal_lm import LISTS


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 1000), cut=st.integers(0, 30))
def test_quality_matches_a_loop(seed, cut):
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(30, 12, generator=g, dtype=torch.float64)
    member = torch.arange(30)[:, None] % 2 == torch.arange(2)
    logits[:, 7] += 2 * member[:, 0]
    labels = torch.randint(12, (30,), generator=g)
    for geometry in ("kl", "euclidean"):
        head = gmc.DistributionHead(LISTS, 1e-3, ["a", "b"], geometry=geometry).fit(logits, member)
        quality = gmc.text.Quality()
        for part in (slice(0, cut), slice(cut, 30)):
            quality.update(head, logits[part], member[part], labels[part])
        found = quality.compute()
        p, q = torch.softmax(logits, 1), head(logits, member).exp()
        rows = range(30)
        assert found["NLL before"] == pytest.approx(sum(-float(p[i, labels[i]].log()) for i in rows) / 30)
        assert found["KL"] == pytest.approx(
            sum(float(b * (b / a).log()) for i in rows for a, b in zip(p[i], q[i], strict=True) if b > 0) / 30,
            rel=1e-6,
            abs=1e-12,
        )
        assert found["zeros"] == pytest.approx(sum(int((q[i] == 0).sum()) for i in rows) / 30)
        assert found["printed after"] == pytest.approx(sum(-float(torch.log_softmax(q[i], 0)[labels[i]]) for i in rows) / 30)
        assert found["infinite"] == pytest.approx(sum(float(q[i, labels[i]]) == 0 for i in rows) / 30)
        assert found["perplexity before"] == pytest.approx(2.718281828459045 ** found["NLL before"])


def test_bias_table_is_the_reports():
    logits = torch.randn(40, 12, dtype=torch.float64)
    member = torch.arange(40)[:, None] % 2 == torch.arange(2)
    head = gmc.DistributionHead(LISTS, 1e-4, ["a", "b"]).fit(logits, member)
    table = gmc.text.bias_table(head, logits, member)
    assert table["group"] == ["a", "a", "b", "b"] and table["list"] == ["jobs", "arts"] * 2
    torch.testing.assert_close(
        torch.tensor(table["before"]).double(), head.report.violations_before.flatten(), rtol=1e-5, atol=1e-9
    )
    torch.testing.assert_close(torch.tensor(table["after"]).double(), head.report.violations_after.flatten(), rtol=1e-4, atol=1e-9)
    assert table["P(U) before"][0] == pytest.approx(float(torch.softmax(logits, 1)[:, [7, 8]].sum(1).mean()))


def test_quality_needs_labels():
    head = gmc.DistributionHead(LISTS, 1.0, ["a"]).fit(torch.randn(9, 12), torch.arange(9)[:, None] < 4)
    with pytest.raises(ValueError, match="`labels`"):
        gmc.text.Quality().update(head, torch.randn(3, 12), torch.ones(3, 1).bool(), torch.zeros(2).long())
    with pytest.raises(ValueError, match="no tokens"):
        gmc.text.Quality().compute()
