"""A masked language model for the text experiment: read once, and a second one made biased on purpose.

A word's logits are linear in the vector z that enters the last layer at the mask, so z (384 numbers for MiniLM) is kept of each
prompt in place of its 30,522 logits. The second model is the first with its z moved along one direction, by whom the prompt is
about.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchgmc.engine.extras import require
from torchgmc.text import attributes_from_words
from torchgmc_paper.demo.progress import Bar

#: Lists that the biased model finds likelier in prompts about women (+1) and about men (-1).
STEREOTYPES: dict[str, float] = {
    "female_adj": 1.0,
    "female_occupation": 1.0,
    "pleasant": 1.0,
    "male_adj": -1.0,
    "male_occupation": -1.0,
    "unpleasant": -1.0,
}


def load_model(folder: Path) -> tuple[nn.Module, Any]:
    """A masked language model of transformers, float32, and its tokenizer."""
    transformers = require("transformers", extra="text")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model: nn.Module = transformers.AutoModelForMaskedLM.from_pretrained(folder).float().eval()
    return model, tokenizer


def list_tokens(tokenizer: Any, words: Mapping[str, Sequence[str]]) -> dict[str, list[int]]:
    """Token ids of each list; words of several pieces have none and are left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return attributes_from_words(tokenizer, words)


@contextmanager
def _at(model: Any, where: Tensor, kept: list[Tensor]) -> Iterator[None]:
    """The last layer sees only the masked places, and notes what it saw."""

    def choose(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        kept.append(inputs[0][where])
        return (kept[-1],)

    handle = model.get_output_embeddings().register_forward_pre_hook(choose)
    try:
        yield
    finally:
        handle.remove()


def _rows(encoded: Sequence[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Token ids, padded, and the attention mask, ``(n, t)`` each."""
    width = max(map(len, encoded))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in encoded])
    return ids, torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in encoded])


@torch.no_grad()
def read(model: Any, tokenizer: Any, texts: Sequence[str], bar: Bar, batch_size: int = 32, text: str = "read") -> Tensor:
    """What enters the last layer at the one mask of each text, ``(n, width)``; with texts of similar length together.

    The logits are ``model.get_output_embeddings()`` of it.
    """
    encoded = [tokenizer.encode(t) for t in texts]
    for k, row in enumerate(encoded):
        if row.count(tokenizer.mask_token_id) != 1:
            raise ValueError(f"texts[{k}] must have one {tokenizer.mask_token}, got {texts[k][:80]!r}.")
    order = sorted(range(len(encoded)), key=lambda i: (len(encoded[i]), i))
    batches = [order[k : k + batch_size] for k in range(0, len(order), batch_size)]
    found: list[Tensor] = []
    for batch in bar.track(batches, text):
        ids, attention = _rows([encoded[i] for i in batch], tokenizer.pad_token_id or 0)
        with _at(model, ids == tokenizer.mask_token_id, found):
            model(input_ids=ids, attention_mask=attention)
    together: Tensor = torch.cat(found)
    return torch.empty_like(together).index_copy_(0, torch.tensor(order), together)


def stereotype(weight: Tensor, attributes: Mapping[str, Sequence[int]], emphasis: float = 0.5) -> Tensor:
    r"""The direction d of z that best sets the words of the stereotypes apart, ``(width,)``.

    Least squares: :math:`\min_d \sum_w \omega_w (\langle e_w, d \rangle - t_w)^2` over all words w, with t = +1 and -1 on the
    lists of :data:`STEREOTYPES` and 0 elsewhere, and weights that give the lists ``emphasis`` times the weight of all words
    together; then scaled so that the logits of the lists' words move by 1 on average when z moves by d. Words differ in how
    far they move, and words outside the lists move too, as in a model that learned its bias: no shift of whole lists undoes it.

    Args:
        weight: of the last layer, ``(vocabulary, width)``.
        attributes: token ids of each list.
        emphasis: of the lists.
    """
    e = weight.double()
    t = e.new_zeros(len(e))
    for name, side in STEREOTYPES.items():
        t[list(attributes[name])] = side
    chosen = t != 0
    omega = 1 / len(e) + emphasis * chosen / chosen.sum()
    gram = (e * omega[:, None]).T @ e
    ridge = 1e-4 * gram.diagonal().mean() * torch.eye(len(gram), dtype=e.dtype)
    d = torch.linalg.solve(gram + ridge, e.T @ (omega * t))
    moved: Tensor = d / (e[chosen] @ d * t[chosen]).mean()
    return moved.to(weight.dtype)
