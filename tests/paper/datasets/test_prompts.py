"""Prompts with a person in them: the compact layout and the corpora."""

import pytest

import torchgmc as gmc
from torchgmc_paper.datasets import GenderPrompts, prepare


def test_prompts(compact):
    prompts = GenderPrompts(compact)
    assert prompts.groups.tolist() == [[True, False], [False, True], [True, True]]
    assert prompts.word_lists["jobs"].words == ["nurse", "governer"] and prompts.attributes == {"jobs": [7]}
    text, member = prompts[0]
    assert text == "She is a [MASK]." and member.tolist() == [True, False]
    assert prompts.outputs()["list_probs"].shape == (3, 1)
    assert prompts.model_dir == compact / "text" / "mlm"
    assert GenderPrompts(compact, transform=str.upper)[1][0] == "HE IS A [MASK]."
    (compact / "text" / "h_prompts.npz").unlink()
    with pytest.raises(FileNotFoundError, match="masked language model"):
        prompts.outputs()


@pytest.fixture
def corpora(tmp_path):
    text, wiki = (tmp_path / name for name in prepare.prompts.ORIGINAL)
    (text / "POM").mkdir(parents=True)
    wiki.mkdir(parents=True)
    (text / "sst.txt").write_text("1\tShe is a strong nurse .\n2\tNobody is strong .\n3\tShe is a strong nurse .\n")
    (text / "reddit.txt").write_text("Man loves his family\nThe price rose, a cool day\n")
    (text / "meld.txt").write_text("Rose and Tom were polite.\n" + "he " * 101 + "cool\n")
    (text / "POM" / "a.txt").write_text("It was fun. The king was rude! Good.")
    (wiki / "valid.txt").write_text(" \n = The king was brave = \n \n His well @-@ known <unk> was brave . It fell . \n")
    (wiki / "test.txt").write_text(" A queen , patient . \n")
    return tmp_path


def test_prompts_from_the_corpora(corpora):
    prompts = GenderPrompts(corpora)
    found = dict(zip(prompts.texts, zip(prompts.metadata["group"], prompts.metadata["word"], strict=True), strict=True))
    assert found == {
        "She is a [MASK] nurse .": ("female", "strong"),
        "She is a strong [MASK] .": ("female", "nurse"),
        "Man loves his [MASK]": ("male", "family"),
        "Rose and Tom were [MASK].": ("both", "polite"),
        "The king was [MASK]!": ("male", "rude"),
        "His well-known [UNK] was [MASK] .": ("male", "brave"),
        "A queen , [MASK] .": ("female", "patient"),
    }
    family = prompts.metadata["lists"][prompts.texts.index("Man loves his [MASK]")]
    assert family == ["female_adj", "pleasant"]
    with pytest.raises(ValueError, match="no token ids: use torchgmc.text.attributes_from_words"):
        prompts.attributes  # noqa: B018
    masks = GenderPrompts(corpora, "random_mask")
    assert len(masks) == 6 and all(text.count("[MASK]") == 1 for text in masks.texts)
    for text, word in zip(masks.texts, masks.metadata["word"], strict=True):
        assert not prepare.prompts.indicators(word) and "unk" not in word, text
    templates = GenderPrompts(corpora, "templates")
    assert len(templates) == 348 and templates.groups.sum(0).tolist() == [178, 170]
    assert sorted(templates.texts) == sorted(gmc.text.words.template_prompts())
