"""``torchgmc reproduce tree``: scores that are missing are those of a classifier trained once."""

import pytest
import torch

from gmctest import made_up_data
from torchgmc_paper import tree


def test_a_classifier_is_trained_once_where_scores_are_missing(tmp_path, monkeypatch):
    from torchgmc_paper.demo.progress import Bar

    data = made_up_data.hierarchy(tmp_path / "data")
    (data / "hierarchy/scores.npz").unlink()
    prepared = tree.prepare(data, tmp_path, Bar(), tree.QUICK)
    probs, labels = prepared.tensors["wos.probs"], prepared.tensors["wos.labels"]
    assert 190 < len(probs) < 210 and "trained here" in prepared.notes[0]
    torch.testing.assert_close(probs.sum(1), torch.ones(len(probs)))
    assert (probs.argmax(1) == labels).double().mean() > 0.8  # the topic is written in the text
    monkeypatch.setattr(tree, "train_scores", lambda *_: pytest.fail("trained again"))
    assert torch.equal(tree.prepare(data, tmp_path, Bar(), tree.QUICK).tensors["wos.probs"], probs)
