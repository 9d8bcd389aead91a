"""Words in rows of tokens, for three kinds of tokenizer, against plain regular expressions on the text."""

import os
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

import torchgmc as gmc
from gmctest.bert import wordpiece
from torchgmc.text import words as paper

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEXT = [
    "The woman and the man met her mother, his father and Mary at the manor.",
    "She said: \"women\" (he's late) and Rose saw a rose; woman's work, co-mother!",
    "A superman, manly human workmen; mothers? SHE! Herself shed heroes. café caféman",
    "The doctor nursed the nurse while doctors and engineers slept in the hospital.",
] * 3
GROUPS = {"female": ["she", "woman", "mother", "Rose", "Mary", "stepmother"], "male": ["he", "man", "stepfather", "sir"]}


def bpe(size=420):
    """GPT-2's byte-level BPE, trained on a few sentences: frequent words are one piece, the others several."""
    inner = tokenizers.ByteLevelBPETokenizer()
    inner.train_from_iterator(
        TEXT, vocab_size=size, min_frequency=1, show_progress=False, special_tokens=["<|endoftext|>", "<mask>"]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner._tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>", mask_token="<mask>"
    )


def sentencepiece():
    """Metaspace pieces, as T5 and Llama use them."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    cuts = [tokenizers.pre_tokenizers.Metaspace(), tokenizers.pre_tokenizers.Punctuation()]  # SentencePiece parts scripts
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(cuts)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=150, special_tokens=["<unk>", "<pad>"], show_progress=False)
    inner.train_from_iterator(TEXT, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>")


MAKERS = {
    "wordpiece": wordpiece,
    "wordpiece slow": lambda: wordpiece("slow"),
    "wordpiece cased": lambda: wordpiece(lower=False),
    "bpe": bpe,
    "bpe of bytes": lambda: bpe(260),
    "sentencepiece": sentencepiece,
}


@pytest.fixture(scope="module", params=list(MAKERS))
def tokenizer(request):
    return MAKERS[request.param]()


def uncased(tokenizer):
    return tokenizer.encode("A", add_special_tokens=False) == tokenizer.encode("a", add_special_tokens=False)


def expected(text, words, lower):
    """Whole words by a regular expression over the text itself."""
    for word in words:
        forms = {word} if word != word.lower() else {word, word.capitalize(), word.upper()}
        for form in forms:
            pattern = rf"(?<!\w){re.escape(form.lower() if lower else form)}(?!\w)"
            if re.search(pattern, text.lower() if lower else text):
                return True
    return False


def check(tokenizer, texts):
    groups = gmc.TokenGroups(tokenizer, GROUPS)
    lower = uncased(tokenizer)
    ids = [tokenizer.encode(text) for text in texts]
    width = max(map(len, ids)) + 2
    rows = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in ids])
    member = groups(rows)
    for text, row in zip(texts, member.tolist(), strict=True):
        assert row == [expected(text, GROUPS[name], lower) for name in GROUPS], text
    return groups, rows, member


def test_sentences(tokenizer):
    groups, rows, member = check(
        tokenizer,
        [
            "She met the man.",
            "the woman",
            "a superman, manly",
            "workmen and women",
            "he's late",
            "shed",
            "a rose",
            "a Rose!",
            "stepmother",
            "the stepfather's work",
            '"woman"',
            "(she)",
            "co-mother",
            "human hero",
            "SHE",
            "sHe",
            "man-made",
            "manman he",
            "",
        ],
    )
    assert torch.equal(torch.jit.script(groups)(rows), member)


LETTERS = ["she", "man", "woman", "wo", "step", "mother", "he", "s", "Rose", "Mary", "sir", "ly"]
JOINS = [" ", " ", "", "-", "'s ", ". ", ' "', "("]


@settings(deadline=None, max_examples=30)
@given(parts=st.lists(st.tuples(st.sampled_from(LETTERS), st.sampled_from(JOINS)), min_size=1, max_size=6))
def test_any_join_of_pieces(tokenizer, parts):
    text = "".join(word + join for word, join in parts)
    check(tokenizer, ["the " + text, text])


def test_more_groups_and_shared_words(tokenizer):
    groups = gmc.TokenGroups(tokenizer, {"a": ["man"], "b": ["man", "woman"], "c": ["sir"]})
    ids = torch.tensor([tokenizer.encode("the man")])
    assert groups(ids).tolist() == [[True, True, False]]
    assert groups.names == ["a", "b", "c"]
    assert groups(ids[:, :0]).tolist() == [[False] * 3]
    with pytest.raises(ValueError, match="`input_ids` must have shape"):
        groups(ids[0])


def test_groups_move_and_export(tokenizer):
    groups = gmc.TokenGroups(tokenizer, GROUPS)
    ids = torch.tensor([tokenizer.encode("the stepmother met the man")] * 2)
    n, t = (torch.export.Dim(name, min=2, max=10_000) for name in "nt")  # torch 2.6 wants a largest size
    program = torch.export.export(groups, (torch.cat([ids] * 3, 1),), dynamic_shapes={"input_ids": {0: n, 1: t}})
    assert torch.equal(program.module()(torch.cat([ids] * 2, 1)), groups(torch.cat([ids] * 2, 1)))
    other = gmc.TokenGroups(tokenizer, GROUPS)
    other.load_state_dict(groups.state_dict())
    assert torch.equal(other(ids), groups(ids))


def test_exact_case():
    tokenizer = wordpiece(lower=False)
    groups = gmc.TokenGroups(tokenizer, {"a": ["she"]}, case="exact")
    rows = [tokenizer.encode(text) for text in ("she", "She", "SHE")]
    assert [groups(torch.tensor([row])).item() for row in rows] == [True, False, False]


# -- lists -----------------------------------------------------------------------------------------------------------------


def test_attributes_count_only_tokens_that_begin_a_word():
    for tokenizer in (wordpiece(), wordpiece("slow")):
        with pytest.warns(UserWarning, match="1 words are split into several tokens and were left out: workman"):
            ids = gmc.text.attributes_from_words(tokenizer, {"jobs": ["doctor", "nurse", "workman"], "more": ["nurse"]})
        assert tokenizer.convert_ids_to_tokens(ids["jobs"]) == ["doctor", "nurse"]
        assert tokenizer.convert_ids_to_tokens(ids["more"]) == ["nurse"]
    tokenizer = bpe()
    ids = gmc.text.attributes_from_words(tokenizer, {"jobs": ["man", "mother"]})
    assert "Ġman" in tokenizer.convert_ids_to_tokens(ids["jobs"])
    assert all(token.startswith("Ġ") for token in tokenizer.convert_ids_to_tokens(ids["jobs"]))
    tokenizer = sentencepiece()
    ids = gmc.text.attributes_from_words(tokenizer, {"jobs": ["man"]})
    assert all(token.startswith("▁") for token in tokenizer.convert_ids_to_tokens(ids["jobs"]))


def test_first_pieces_on_request():
    tokenizer = wordpiece()
    with pytest.warns(UserWarning, match="represented by their first piece: workman"):
        ids = gmc.text.attributes_from_words(tokenizer, {"jobs": ["workman"]}, several="first")
    assert tokenizer.convert_ids_to_tokens(ids["jobs"]) == ["work"]


def test_words_that_cannot_be_written():
    tokenizer = wordpiece()
    with pytest.warns(UserWarning, match="cannot write 1 words of 'a': 男"):
        gmc.TokenGroups(tokenizer, {"a": ["she", "男"]})
    with pytest.raises(ValueError, match="cannot write any word of 'a'"):
        gmc.TokenGroups(tokenizer, {"a": ["男"]})
    with pytest.warns(UserWarning, match="cannot write"):
        assert len(gmc.text.attributes_from_words(tokenizer, {"a": ["nurse", "男"]})["a"]) == 1


def test_bad_arguments():
    tokenizer = wordpiece()
    for words in ({}, ["she"], {"a": []}, {"a": "she"}, {"a": [1]}):
        with pytest.raises(TypeError, match="`words`"):
            gmc.TokenGroups(tokenizer, words)
    with pytest.raises(TypeError, match="`tokenizer`"):
        gmc.TokenGroups("bert", GROUPS)
    with pytest.raises(ValueError, match="`case`"):
        gmc.TokenGroups(tokenizer, GROUPS, case="lower")
    with pytest.raises(ValueError, match="`several`"):
        gmc.text.attributes_from_words(tokenizer, GROUPS, several="all")
    with pytest.raises(ValueError, match="no word of list 'a' is a single token"):
        gmc.text.attributes_from_words(tokenizer, {"a": ["workman"]})


@pytest.mark.skipif("TORCHGMC_DATA" not in os.environ, reason="TORCHGMC_DATA names the folder of the experiments' data")
def test_berts_vocabulary_and_the_delivered_groups():
    import gzip
    import json

    folder = Path(os.environ["TORCHGMC_DATA"]) / "text"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "mlm")
    lists = json.loads((folder / "word_lists.json").read_text())
    with pytest.warns(UserWarning, match="14 words are split into several tokens"):
        ids = gmc.text.attributes_from_words(tokenizer, paper.ATTRIBUTES)
    assert ids == {name: sorted(table.values()) for name, table in lists["attribute_token_ids"].items()}
    groups = gmc.TokenGroups(tokenizer, paper.INDICATORS)
    with gzip.open(folder / "prompts.jsonl.gz", "rt") as file:
        prompts = [json.loads(line) for line in file]
    agree = 0
    for prompt in prompts:
        found = groups(torch.tensor([tokenizer.encode(prompt["text"])]))[0].tolist()
        agree += found == [prompt["group"] in ("female", "both"), prompt["group"] in ("male", "both")]
    assert agree / len(prompts) > 0.97  # names must be capitalised there, which an uncased vocabulary cannot see
