"""BERT's tokenizers over a vocabulary of our own, made in ways that transformers 4.48 and 5 both know."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def bert_tokenizer(pieces: list[str], lower: bool = True, slow: bool = False) -> Any:
    """The special tokens, then these pieces; ``slow``: the tokenizer written in Python."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vocab.txt"
        file.write_text("\n".join(SPECIAL + pieces), encoding="utf-8")
        kind = _slow() if slow else transformers.BertTokenizerFast
        return kind(str(file), do_lower_case=lower)


def _slow() -> Any:
    if transformers.__version__.startswith("4."):
        return transformers.BertTokenizer
    from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

    return BertTokenizerLegacy


PIECES = (
    "the a an and met at her his he she man wo ##man ##men ##ly mother father ##s step ##mother ##father mary rose sir ' \" ."
    " , ; ! ? ( ) : - ma ##nor said late saw work co ##work super hu shed doctor nurse ##d engineer cafe"
)


def wordpiece(kind="fast", lower=True):
    """BERT's own classes over a vocabulary in which most words are cut."""
    letters = [chr(c) for c in range(97, 123)] + ([] if lower else [chr(c) for c in range(65, 91)])
    pieces = list(dict.fromkeys(PIECES.split() + letters + ["##" + c for c in letters]))
    return bert_tokenizer(pieces, lower=lower, slow=kind == "slow")


def masked_lm() -> tuple[Any, Any]:
    """A tiny masked language model with random weights, large enough to differ between prompts, and its tokenizer."""
    import torch
    import transformers

    tokenizer = wordpiece()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
    )
    model = transformers.BertForMaskedLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model.eval(), tokenizer
