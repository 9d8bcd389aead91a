"""Masked and causal models of transformers: logits at the right places, batched by length, and outputs that keep their type."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgmc.engine import checks
from torchgmc.engine.modes import evaluating
from torchgmc.groups.groups import Groups, check_groups
from torchgmc.heads.distribution.head import DistributionHead
from torchgmc.text.tokens import TokenGroups, attributes_from_words


class MaskedBatch(NamedTuple):
    """Logits at the masks of a batch: one row per mask.

    Attributes:
        logits: ``(k, vocabulary)``.
        input_ids: tokens of the sentence of each row, ``(k, t)``.
        sentence: index of the sentence of each row, ``(k,)``.
    """

    logits: Tensor
    input_ids: Tensor
    sentence: Tensor


def masked_logits(
    model: nn.Module,
    tokenizer: Any,
    sentences: Sequence[str],
    batch_size: int = 32,
    max_length: int | None = None,
    progress: bool = True,
    text: str = "read",
) -> Iterator[MaskedBatch]:
    """Logits at every mask, batch by batch, with sentences of similar length together (so that little is spent on padding).

    Args:
        model: a masked language model, put in evaluation mode while it runs.
        tokenizer: its tokenizer.
        sentences: each with at least one mask token.
        batch_size: sentences at a time.
        max_length: longest sentence in tokens; a longer one raises. By default the model's limit.
        progress: show a progress bar if rich is installed and stderr is a terminal.
        text: what the bar says.
    """
    _check_sentences(sentences)
    batch_size = checks.count("batch_size", batch_size, 32)
    checks.count("max_length", max_length, 1)
    checks.text("text", text)
    mask = getattr(tokenizer, "mask_token_id", None)
    if mask is None:
        raise ValueError("`tokenizer` has no mask token; of a causal model observe the last: head.observe(logits[:, -1], ...).")
    encoded = [tokenizer.encode(sentence) for sentence in sentences]
    limit = max_length or getattr(getattr(model, "config", None), "max_position_embeddings", None) or 10**9
    for i, ids in enumerate(encoded):
        if mask not in ids:
            raise ValueError(f"sentences[{i}] has no mask token {tokenizer.mask_token!r}: {sentences[i][:80]!r}.")
        if len(ids) > limit:
            raise ValueError(f"sentences[{i}] has {len(ids)} tokens, more than {limit}; shorten it.")
    order = sorted(range(len(encoded)), key=lambda i: (len(encoded[i]), i))
    batches = [order[k : k + batch_size] for k in range(0, len(order), batch_size)]
    device = next(model.parameters()).device
    with evaluating(model):
        for rows in _tracked(batches, text) if progress and sys.stderr.isatty() else batches:
            width = len(encoded[rows[-1]])
            pad = tokenizer.pad_token_id or 0
            ids = torch.tensor([encoded[i] + [pad] * (width - len(encoded[i])) for i in rows], device=device)
            attention = torch.tensor([[1] * len(encoded[i]) + [0] * (width - len(encoded[i])) for i in rows], device=device)
            with torch.no_grad():
                logits = model(input_ids=ids, attention_mask=attention).logits
            row, place = (ids == mask).nonzero(as_tuple=True)
            yield MaskedBatch(logits[row, place], ids[row], torch.tensor(rows, device=device)[row])


def calibrate_masked_lm(
    model: nn.Module,
    tokenizer: Any,
    sentences: Sequence[str],
    head: DistributionHead | None = None,
    groups: TokenGroups | Mapping[str, Sequence[str]] | Groups | Tensor | None = None,
    attributes: Mapping[str, Sequence[str]] | None = None,
    alpha: float | None = None,
    batch_size: int = 32,
    max_length: int | None = None,
    progress: bool = True,
    weight: Sequence[float] | None = None,
    solver: str = "exact",
    eta: float | None = None,
    max_iter: int | None = None,
) -> DistributionHead:
    """Fit a head to a masked language model on sentences with masks; returns the head.

    Args:
        model: a masked language model of transformers.
        tokenizer: its tokenizer.
        sentences: each with one or more mask tokens; every mask counts as a separate prompt.
        head: the head to fit; or pass ``attributes`` and ``alpha`` to make one.
        groups: words of each group, a :class:`TokenGroups`, or the membership of the sentences: a :class:`~torchgmc.Groups`,
            or ``(len(sentences), a)``.
        attributes: words of each list (see :func:`attributes_from_words`).
        alpha: largest violation allowed.
        batch_size, max_length, progress: see :func:`masked_logits`.
        weight: weight of each sentence.
        solver, eta, max_iter: see :meth:`DistributionHead.calibrate <torchgmc.DistributionHead.calibrate>`.

    Example:
        >>> head = gmc.text.calibrate_masked_lm(  # doctest: +SKIP
        ...     model, tokenizer, ["[MASK] is what she is."], groups=gmc.text.words.INDICATORS,
        ...     attributes=gmc.text.words.ATTRIBUTES, alpha=0.002)
    """
    if groups is None:
        raise ValueError("`groups` is missing: pass the words of each group, a TokenGroups, or a membership table.")
    _check_sentences(sentences)
    if len(sentences) == 0:
        raise ValueError("`sentences` is empty; pass at least one sentence to calibrate on.")
    names: Sequence[str] | None = None
    if isinstance(groups, Groups):
        check_groups(groups, len(sentences), None if head is None else head.groups)
        names, groups = groups.names, groups.membership
    find: TokenGroups | Tensor = groups if isinstance(groups, TokenGroups | Tensor) else TokenGroups(tokenizer, groups)
    if isinstance(find, TokenGroups):
        names = find.names
    elif find.shape[:1] != (len(sentences),):
        raise ValueError(f"`groups` must have one row per sentence, {len(sentences)}, got shape {tuple(find.shape)}.")
    if head is None:
        if attributes is None or alpha is None or names is None:
            raise ValueError("pass a `head`, or `attributes`, `alpha` and the words of each group in `groups` to make one.")
        head = DistributionHead(attributes_from_words(tokenizer, attributes), alpha, names)
    elif attributes is not None or alpha is not None:
        raise ValueError("`attributes` and `alpha` are already set by `head`; do not pass them too.")
    if isinstance(find, TokenGroups) and find.names != head.groups:
        raise ValueError(f"`groups` names {find.names}, but the head was made for {head.groups}.")
    device = next(model.parameters()).device
    find = find.to(device)
    head.to(device)
    weights = None if weight is None else torch.as_tensor(weight, dtype=torch.float64, device=device)
    batches = (
        (
            batch.logits,
            find[batch.sentence] if isinstance(find, Tensor) else find(batch.input_ids),
            None if weights is None else weights[batch.sentence],
        )
        for batch in masked_logits(model, tokenizer, sentences, batch_size, max_length, progress, "calibrate")
    )
    return head.fit_batches(batches, solver, eta, max_iter)


def apply_to_output(output: Any, head: DistributionHead, membership: Tensor | Groups, positions: Tensor | str = "all") -> Any:
    """The output of a language model with calibrated logits at some positions, of the same type.

    There, ``logits`` become calibrated log-probabilities (logits like any others: their softmax is the calibrated
    distribution); elsewhere they stay. A ``loss`` in the output is the model's own and stays too.

    Args:
        output: a transformers ``ModelOutput`` with ``logits`` ``(n, t, vocabulary)``, a dict or tuple of it, or the tensor.
        head: a fitted head.
        membership: of the rows, ``(n, a)``, bool, or a :class:`~torchgmc.Groups`.
        positions: bool mask ``(n, t)`` (for a masked model ``input_ids == tokenizer.mask_token_id``), one position per row
            ``(n,)`` int, ``"last"`` or ``"all"``.
    """
    logits, rebuild = _logits_of(output)
    checks.ordinary("logits", logits)
    member: Tensor = head.check_member(membership)
    if member.dim() != 2:
        raise ValueError(f"`membership` must have shape (n, {head.num_groups}), got {tuple(member.shape)}.")
    if logits.dim() != 3 or len(logits) != len(member):
        raise ValueError(f"logits must have shape ({len(member)}, t, vocabulary), got {tuple(logits.shape)}.")
    if isinstance(positions, str):
        if positions not in ("all", "last"):
            raise ValueError(f"`positions` must be 'all', 'last' or a tensor, got {positions!r}.")
        if positions == "all":
            return rebuild(head(logits, member))
        positions = torch.full((len(logits),), logits.shape[1] - 1, device=logits.device)
    wrong = checks.ordinary("positions", positions).is_floating_point() or positions.is_complex()
    if wrong or positions.device != logits.device:
        raise TypeError(f"`positions` must be bool or int64 on {logits.device}, got {positions.dtype} on {positions.device}.")
    if positions.dtype == torch.bool and positions.shape == logits.shape[:2]:
        row, place = positions.nonzero(as_tuple=True)
    elif positions.dtype != torch.bool and positions.shape == logits.shape[:1]:
        row, place = torch.arange(len(logits), device=logits.device), positions.long()
        if positions.numel() and (int(place.min()) < -logits.shape[1] or int(place.max()) >= logits.shape[1]):
            raise ValueError(f"`positions` must be below the length {logits.shape[1]} of the texts, got {int(place.max())}.")
    else:
        raise ValueError(
            f"`positions` must be bool of shape {tuple(logits.shape[:2])} or int of shape ({len(logits)},), got "
            f"{positions.dtype} {tuple(positions.shape)}."
        )
    return rebuild(logits.index_put((row, place), head(logits[row, place], member[row])))


def _check_sentences(sentences: Any) -> None:
    listed = isinstance(sentences, Sequence) and not isinstance(sentences, str | bytes)
    if not listed or not all(isinstance(sentence, str) for sentence in sentences):
        raise TypeError(f"`sentences` must be a list of strings, each with a mask token, got {sentences!r:.80}.")


def _logits_of(output: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    if isinstance(output, Tensor):
        return output, lambda new: new
    if isinstance(output, Mapping):  # a ModelOutput is one
        if "logits" not in output:
            raise ValueError(f"the output has no `logits`; it has {', '.join(output)}.")
        kind: Any = type(output)
        return output["logits"], lambda new: kind(**{**output, "logits": new})
    if isinstance(output, tuple):
        place = next((i for i, part in enumerate(output) if isinstance(part, Tensor) and part.dim() == 3), None)
        if place is not None:
            return output[place], lambda new: (*output[:place], new, *output[place + 1 :])
    raise TypeError(f"the output of a language model must have `logits` (n, t, vocabulary), got {type(output).__name__}.")


def _tracked(items: Sequence[Any], text: str) -> Iterable[Any]:
    """The items, with a bar on stderr if rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import track
    except ModuleNotFoundError:
        return items
    return track(items, text, console=Console(stderr=True))
