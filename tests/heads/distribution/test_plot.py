"""Figures of words: the numbers read back from the axes are those of a plain recount."""

import pytest
import torch

import torchgmc as gmc
from gmctest.figures import ticks
from gmctest.heads_zoo import GROUPS, LISTS, prompts
from torchgmc import plots
from torchgmc.heads.distribution.plot import mean_probabilities, token_names

pytestmark = pytest.mark.usefixtures("no_pyplot")


@pytest.mark.parametrize("geometry", ["kl", "euclidean"])
def test_words_moved_most_are_a_plain_recount(geometry: str) -> None:
    logits, member = prompts(120, 0).observe
    head = gmc.DistributionHead(LISTS, 0.002, GROUPS, geometry=geometry, temperature=1.3).fit(logits, member)
    before, after = torch.softmax(logits / 1.3, 1), head(logits, member).exp()
    means = [[p[member[:, k]].mean(0) for k in range(3)] for p in (before, after)]
    moved = torch.stack([(b - a).abs() for b, a in zip(*means, strict=True)]).amax(0)
    figure = plots.words(head, logits, member, [f"w{i}" for i in range(20)], top=4)
    order = [int(name[1:]) for name in ticks(figure.axes[0])]  # words outside all lists may tie
    assert moved[order].tolist() == pytest.approx(moved.sort(descending=True).values[:4].tolist(), abs=1e-6)
    for k, axes in enumerate(figure.axes):
        assert axes.get_title() == GROUPS[k]
        for line, p in zip(axes.lines, means, strict=True):
            assert line.get_xdata().tolist() == pytest.approx(p[k][order].tolist(), abs=1e-6)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["before", "after"]


def test_words_in_blocks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, member = prompts(60, 0).observe
    head = gmc.DistributionHead(LISTS, 0.002, GROUPS).fit(logits, member)
    whole = mean_probabilities(head, logits, member)
    monkeypatch.setattr("torchgmc.heads.distribution.plot.CHUNK", 7 * 20)
    for a, b in zip(whole, mean_probabilities(head, logits, member), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_names_of_tokens() -> None:
    class Tokenizer:
        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [["Ġdoctor", "▁nurse", "##s", "Ġ"][i] for i in ids]

    assert token_names(Tokenizer(), [0, 1, 2, 3]) == ["doctor", "nurse", "##s", "Ġ"]
    assert token_names({1: "one"}, [1, 2]) == ["one", "token 2"] and token_names(None, [7]) == ["token 7"]
    with pytest.raises(ValueError, match="has 1 names, but token 3"):
        token_names(["a"], [3])
    with pytest.raises(TypeError, match="a tokenizer, a sequence or a mapping"):
        token_names("abc", [0])


def test_words_of_an_empty_group_are_refused() -> None:
    logits, member = prompts(60, 0).observe
    head = gmc.DistributionHead(LISTS, 0.002, GROUPS).fit(logits, member)
    with pytest.raises(ValueError, match="group 'b' has no prompts"):
        plots.words(head, logits, member & torch.tensor([True, False, True]))
