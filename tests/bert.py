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
