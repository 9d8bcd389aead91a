"""Prompts about women and men with one masked word: from five corpora, from templates, and with a random word masked."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgmc.engine import checks
from torchgmc_paper.datasets._files import Texts, data_root, locate, read_npz
from torchgmc_paper.datasets.prepare import prompts as prepare

PARTS = ("prompts", "templates", "random_mask")


class WordList(NamedTuple):
    """One attribute list.

    Attributes:
        words: as printed in the paper.
        token_ids: of the words that are one token of BERT's uncased vocabulary; empty where no tokenizer has been asked.
    """

    words: list[str]
    token_ids: dict[str, int]


class GenderPrompts(Texts):
    """Sentences that mention women, men or both, with one ``[MASK]``.

    Args:
        root: the folder of this data set, or of all data; the environment variable ``TORCHGMC_DATA`` if omitted.
        part: ``"prompts"``: an attribute word is masked; ``"templates"``: the paper's templates; ``"random_mask"``: any
            word but a gendered one is masked, to measure what de-biasing costs.
        download: fetch the corpora (sent_debias and WikiText-2, without its training part) and find the prompts, unless
            they are there. They do not include a model's output.
        transform: applied to a text when it is indexed.

    Attributes:
        texts: per prompt, with one ``[MASK]``.
        groups: bool, ``(n, 2)``: mentions women, mentions men.
        group_names: ``("female", "male")``.
        metadata: the other columns (``id``, ``word``, ``corpus``, ...).
        word_lists: the six attribute lists.

    Example:
        >>> prompts = gmc.datasets.GenderPrompts("data")  # doctest: +SKIP
        >>> head = gmc.DistributionHead(prompts.attributes, 0.001, prompts.group_names)  # doctest: +SKIP
    """

    group_names = ("female", "male")

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        part: str = "prompts",
        download: bool = False,
        transform: Callable[[str], Any] | None = None,
    ) -> None:
        self.part = checks.option("part", part, PARTS)
        self.transform = transform
        top = data_root(root)
        self.root = locate(
            top,
            "text",
            (f"{part}.jsonl.gz", "word_lists.json"),
            prepare.ORIGINAL,
            lambda: prepare.convert(top),
            "gender prompts",
            download,
        )
        self._read(part)
        self.groups = torch.tensor([[g != "male", g != "female"] for g in self.metadata["group"]]).reshape(-1, 2)
        lists = json.loads((self.root / "word_lists.json").read_text(encoding="utf-8"))
        known = lists.get("attribute_token_ids", {})
        self.word_lists = {name: WordList(words, known.get(name, {})) for name, words in lists["attributes"].items()}

    @property
    def attributes(self) -> dict[str, list[int]]:
        """Token ids of each attribute list (BERT's uncased vocabulary), as :class:`torchgmc.DistributionHead` takes them."""
        if not any(words.token_ids for words in self.word_lists.values()):
            raise ValueError(
                "word_lists.json has no token ids: use torchgmc.text.attributes_from_words with the model's tokenizer."
            )
        return {name: list(words.token_ids.values()) for name, words in self.word_lists.items()}

    def outputs(self) -> dict[str, np.ndarray[Any, Any]]:
        """What the compact layout's masked language model says: ``attr_ids``, ``attr_probs``, ``list_probs``, ..."""
        path = self.root / f"h_{self.part}.npz"
        if not path.is_file():
            raise FileNotFoundError(
                f"no {path.name!r} in {str(self.root)!r}: outputs come with the compact layout only; run a masked "
                "language model on `.texts` (torchgmc.text.masked_logits)."
            )
        return read_npz(path)

    @property
    def model_dir(self) -> Path:
        """Folder of the masked language model, for ``BertForMaskedLM.from_pretrained``."""
        path = self.root / "mlm"
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"no model in {str(path)!r}: it comes with the compact layout only; use any masked language model."
            )
        return path

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        text, index = self._text(index)
        return text, self.groups[index]

    def __repr__(self) -> str:
        return f"GenderPrompts({self.part!r}: {len(self)} texts, in {str(self.root)!r})"
