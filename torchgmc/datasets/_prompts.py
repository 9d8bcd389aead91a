"""The corpora of the prompts as published."""

from collections.abc import Callable
from pathlib import Path

ORIGINAL = ("sent_debias/debias-BERT/text_corpus", "examples/word_language_model/data/wikitext-2")


def maker(root: Path, download: bool) -> Callable[[], None] | None:
    """What makes the compact layout, or None if the published files are not there."""
    return None
