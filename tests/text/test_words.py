"""The paper's word lists."""

import unicodedata

from torchgmc.text import words as paper


def test_paper_lists():
    assert [len(v) for v in paper.INDICATORS.values()] == [79, 75]
    assert [len(v) for v in paper.ATTRIBUTES.values()] == [13, 11, 13, 32, 25, 25]
    assert len(paper.TEMPLATES) == 22 and all(t.count("{}") == 1 == t.count("[MASK]") for t in paper.TEMPLATES)
    assert len(paper.template_prompts()) == 348
    assert all(w == unicodedata.normalize("NFC", w) for v in paper.INDICATORS.values() for w in v)
