"""Words as a tokenizer writes them: which tokens are a word, and where a word begins and ends in a row of tokens."""

import itertools
import unicodedata
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchgmc.engine import checks
from torchgmc.engine.scripting import is_scripting

CASES = ("smart", "exact")


class TokenGroups(nn.Module):
    r"""Groups from the words of a prompt: input ids in, membership out.

    A prompt belongs to a group when it holds one of the group's words *as a whole word*.

    - *Boundaries*: a match does not count when a letter, digit or accent stands right before or after it: ``man`` is not in
      ``woman`` or ``manly``, however they are cut into pieces. Spaces, punctuation, apostrophes and hyphens are boundaries,
      so ``she`` is in ``she's``.
    - *Case* (``case="smart"``): a word in lower case also counts with a capital letter or in capitals; a word written with
      a capital (``Rose``) counts only as written. ``case="exact"``: every word only as written. An uncased tokenizer
      cannot tell ``Rose`` from ``rose``.
    - Words of several pieces count when all pieces appear in a row. The pieces are those of the word by itself, after a space
      and after a quotation mark. A piece with both punctuation and letters hides a word: GPT-2 splits ``'man`` into
      ``'m`` and ``an``.

    Words are looked up once, here; ``forward`` uses tables and scripts.

    Args:
        tokenizer: of transformers, fast or slow: WordPiece, byte-level BPE or SentencePiece.
        words: name of each group and its words.
        case: ``"smart"`` or ``"exact"``.

    Shapes: ``forward(input_ids (n, t))`` -> bool ``(n, a)``.

    Example:
        >>> groups = gmc.TokenGroups(tokenizer, {"female": ["she", "Mary"], "male": ["he"]})  # doctest: +SKIP
        >>> groups(tokenizer(["She is here"], return_tensors="pt").input_ids)  # doctest: +SKIP
        tensor([[ True, False]])
    """

    joins: Tensor
    ends: Tensor
    first: Tensor
    keys: Tensor
    nodes: Tensor
    final: Tensor

    def __init__(self, tokenizer: Any, words: Mapping[str, Sequence[str]], case: str = "smart") -> None:
        super().__init__()
        lists = _check_words("words", words)
        checks.option("case", case, CASES)
        pieces = _Pieces(tokenizer)
        self.names = checks.names(list(lists))
        self._build(pieces.find(lists, case), pieces)

    def _build(self, found: dict[tuple[int, ...], set[int]], pieces: "_Pieces") -> None:
        """A tree of pieces, level by level: the first by its token, the others by (node before, token)."""
        self.width = width = len(pieces.tokens) + 1  # the last is not a piece: it pads rows
        self.longest = max(map(len, found))
        prefixes = dict.fromkeys(sequence[:k] for sequence in sorted(found) for k in range(1, len(sequence) + 1))
        node = {prefix: index for index, prefix in enumerate(prefixes)}
        first = torch.full((width,), -1)
        level: list[list[tuple[int, int]]] = [[] for _ in range(self.longest)]
        for prefix, index in node.items():
            if len(prefix) == 1:
                first[prefix[0]] = index
            else:
                level[len(prefix) - 1].append((node[prefix[:-1]] * width + prefix[-1], index))
        final = torch.zeros(len(node) + 1, len(self.names), dtype=torch.bool)  # the last row is "no word here"
        for sequence, columns in found.items():
            final[node[sequence], sorted(columns)] = True
        self.starts: list[int] = list(itertools.accumulate(map(len, level), initial=0))
        table = torch.tensor(list(itertools.chain(*level)), dtype=torch.int64).reshape(-1, 2)
        self.register_buffer("first", first)
        self.register_buffer("keys", table[:, 0].clone())
        self.register_buffer("nodes", table[:, 1].clone())
        self.register_buffer("final", final)
        self.register_buffer("joins", torch.tensor([*pieces.joins, False]))
        self.register_buffer("ends", torch.tensor([*pieces.ends, False]))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Membership ``(n, a)``, bool, of the rows of ``input_ids`` ``(n, t)``."""
        return self._places(input_ids).any(1)

    def _places(self, input_ids: Tensor, unfinished: bool = False) -> Tensor:
        """Where a word of each group begins, bool ``(n, t, a)``; ``unfinished``: the last words of rows may go on."""
        if not is_scripting():
            if checks.ordinary("input_ids", input_ids).is_floating_point() or input_ids.is_complex():
                raise TypeError(f"`input_ids` must be token ids, int64, got {input_ids.dtype}; use return_tensors='pt'.")
            if input_ids.device != self.final.device:
                where = f"on {input_ids.device} but the groups are on {self.final.device}"
                raise ValueError(f"`input_ids` is {where}; move both to one device.")
        if input_ids.dim() != 2:
            raise ValueError(f"`input_ids` must have shape (n, t), one row of tokens per prompt, got {input_ids.shape}")
        length = input_ids.shape[1]
        blank = self.width - 1  # padding around every row, not a piece
        ids = nn.functional.pad(input_ids.clamp(0, blank).long(), [1, self.longest], value=float(blank))  # (n, 1 + t + longest)
        joins, ends = self.joins[ids][:, 1:], self.ends[ids]
        before, ids = ends[:, :length], ids[:, 1:]
        if unfinished:
            joins[:, length:] = True
        # A piece that would join what stands before it does not start a word, unless there is nothing it could join.
        begins = ~(joins[:, :length] & before)
        node = torch.where(begins, self.first[ids[:, :length]], torch.full_like(ids[:, :length], -1))  # (n, t)
        # The word ends here if the next piece does not continue it; node -1 is the last row of `final`, no word.
        found = self.final[node] & ~joins[:, 1 : length + 1, None]  # (n, t, a)
        for k in range(1, self.longest):
            low, high = self.starts[k], self.starts[k + 1]
            key = node * self.width + ids[:, k : length + k]
            hit = (key[:, :, None] == self.keys[low:high]) & (node[:, :, None] >= 0)  # (n, t, branches of this level)
            place = hit.to(torch.int64).argmax(2)
            node = torch.where(hit.any(2), self.nodes[low:high][place], torch.full_like(key, -1))
            found = found | (self.final[node] & ~joins[:, k + 1 : length + k + 1, None])
        return found

    def extra_repr(self) -> str:
        """Names of the groups."""
        return f"groups=[{', '.join(self.names)}], sequences of up to {self.longest} pieces"


def attributes_from_words(
    tokenizer: Any, words: Mapping[str, Sequence[str]], case: str = "smart", several: str = "skip"
) -> dict[str, list[int]]:
    """Token ids of word lists, for :class:`~torchgmc.DistributionHead`.

    A word counts through every token that is that word and begins it: in BERT's vocabulary ``doctor``, in GPT-2's ``Ġdoctor`` and
    ``ĠDoctor``, not the bare ``doctor``, which may continue another word. A word of several pieces has no token.

    Args:
        tokenizer: of transformers, fast or slow.
        words: name of each list and its words.
        case: as in :class:`TokenGroups`.
        several: words of several pieces are left out (``"skip"``), stand for their first piece (``"first"``), or raise
            (``"error"``). Other words may share a first piece, so its probability is an upper bound on the word's;
            :func:`word_probabilities` measures whole words. If not an error, a warning names them.

    Returns:
        Name of each list and its token ids, ascending.
    """
    checks.option("several", several, ("skip", "first", "error"))
    checks.option("case", case, CASES)
    pieces = _Pieces(tokenizer)
    found: dict[str, list[int]] = {}
    long: list[str] = []
    for name, entries in _check_words("words", words).items():
        ids: set[int] = set()
        unknown = []
        for word in entries:
            forms = [form for form in pieces.forms(word, case) if not pieces.joins[form[0]]]
            single = {form[0] for form in forms if len(form) == 1}
            if not forms:
                unknown.append(word)
            elif not single:
                long.append(word)
                single = {form[0] for form in forms} if several == "first" else set()
            ids |= single
        if several == "error" and long:
            raise ValueError(f"`words` has words that this tokenizer splits into several tokens: {checks.listing(long, 5)}.")
        _report_unknown(name, unknown, len(entries))
        if not ids:
            raise ValueError(
                f"no word of list {name!r} is a single token for this tokenizer ({', '.join(map(repr, entries[:5]))}, ...); "
                "use several='first' or other words."
            )
        found[name] = sorted(ids)
    if long:
        action = "left out" if several == "skip" else "represented by their first piece"
        warnings.warn(
            f"{len(long)} words are split into several tokens and were {action}: {', '.join(long)}.", UserWarning, stacklevel=2
        )
    return found


class _Pieces:
    """A vocabulary's pieces as text: which of them continue the word before them, and which may be continued."""

    def __init__(self, tokenizer: Any) -> None:
        if not hasattr(tokenizer, "convert_ids_to_tokens") or not hasattr(tokenizer, "encode"):
            raise TypeError(f"`tokenizer` must be a tokenizer from transformers, got {type(tokenizer).__name__}.")
        self.tokenizer = tokenizer
        self.tokens: list[str] = [str(token) for token in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]
        self.special = set(tokenizer.all_special_ids)
        plain = [token for i, token in enumerate(self.tokens) if i not in self.special]
        marks = {"Ġ": "bytes", "▁": "sentencepiece"}
        self.kind = next((marks[mark] for mark in marks if any(token.startswith(mark) for token in plain)), "wordpiece")
        text = [("" if i in self.special else self._text(token)) for i, token in enumerate(self.tokens)]
        begins = [token.startswith("##") or self.kind != "wordpiece" for token in self.tokens]  # may it continue a word?
        self.joins = [bool(t) and _is_word(t[0]) and may for t, may in zip(text, begins, strict=True)]
        self.ends = [bool(t) and _is_word(t[-1]) for t in text]

    def _text(self, token: str) -> str:
        """The piece as it stands in the text, with a space where the marker says so."""
        if self.kind == "wordpiece":
            return token[2:] if token.startswith("##") and len(token) > 2 else token
        if self.kind == "sentencepiece":
            return token.replace("▁", " ")
        data = bytes(_BYTES.get(char, 0x41) for char in token)  # a piece may begin or end inside a character: a letter
        return data.decode("utf-8", errors="surrogateescape")

    def forms(self, word: str, case: str) -> list[tuple[int, ...]]:
        """The word in every case that counts: by itself, after a space and after a quotation mark; without unknown pieces."""
        variants = {word}
        if case == "smart" and word == word.lower():
            variants |= {word.capitalize(), word.upper()}
        found = set()
        for variant in variants:
            for before in ("",) if self.kind == "wordpiece" else ("", " ", '"'):
                tokens = self._encode(before + variant)
                lead = self._encode(before) if before == '"' else []
                if tokens[: len(lead)] == lead:
                    found.add(tuple(tokens[len(lead) :]))
        unknown = self.tokenizer.unk_token_id
        whole = [form for form in found if form and (unknown is None or unknown not in form)]
        # A bare marker by itself would match any word after a space.
        return sorted(form for form in whole if len(form) > 1 or self._text(self.tokens[form[0]]).strip())

    def find(self, lists: Mapping[str, Sequence[str]], case: str) -> dict[tuple[int, ...], set[int]]:
        """Every form of every word, and the lists that it belongs to."""
        found: dict[tuple[int, ...], set[int]] = {}
        for column, (name, entries) in enumerate(lists.items()):
            forms = {word: self.forms(word, case) for word in entries}
            _report_unknown(name, [word for word, tokens in forms.items() if not tokens], len(entries))
            for sequence in (form for tokens in forms.values() for form in tokens):
                found.setdefault(sequence, set()).add(column)
        return found

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []


#: Characters by which byte-level BPE writes bytes: printable ones as themselves, the others from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(b): b for b in _PRINTABLE} | {chr(0x100 + i): b for i, b in enumerate(sorted({*range(256)} - {*_PRINTABLE}))}


def _is_word(char: str) -> bool:
    """Letters, digits, accents and half characters; not spaces, punctuation or symbols."""
    return char == "_" or 0xDC80 <= ord(char) <= 0xDCFF or unicodedata.category(char)[0] in "LNM"


def _check_words(argument: str, words: Any) -> dict[str, list[str]]:
    if not isinstance(words, Mapping) or not words:
        raise TypeError(f"`{argument}` must map each name to a list of words, got {type(words).__name__}.")
    found: dict[str, list[str]] = {}
    for name, entries in words.items():
        listed = isinstance(entries, Iterable) and not isinstance(entries, str)
        if not listed or not all(isinstance(word, str) and word.strip() for word in entries) or not len(entries):
            raise TypeError(f"`{argument}`[{name!r}] must be a list of words, got {entries!r}.")
        found[str(name)] = list(dict.fromkeys(word.strip() for word in entries))
    return found


def _report_unknown(name: str, missing: list[str], total: int) -> None:
    if len(missing) == total:
        raise ValueError(f"this tokenizer cannot write any word of {name!r}: {', '.join(missing[:5])}; pass other words.")
    if missing:
        which = f"{len(missing)} words of {name!r}: {', '.join(missing)}"
        warnings.warn(f"this tokenizer cannot write {which}.", UserWarning, stacklevel=4)
