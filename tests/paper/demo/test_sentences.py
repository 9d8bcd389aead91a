"""The sentences of the text demo."""

import pytest

from torchgmc_paper.demo import sentences


def test_sentences_have_the_planted_bias():
    corpus = sentences.draw(20_000, 0)
    jobs = set(sentences.JOBS["female jobs"])
    rate = {}
    for group in ("female", "male"):
        people = set(sentences.PEOPLE[group])
        chosen = [s[k] in jobs for s, k in zip(corpus.sentences, corpus.job, strict=True) if people & set(s)]
        rate[group] = sum(chosen) / len(chosen)
    assert rate["female"] == pytest.approx(0.55, abs=0.02)
    assert rate["male"] == pytest.approx(0.10, abs=0.02)
    known = set(sentences.vocabulary())
    assert all(word in known for s in corpus.sentences for word in s)
