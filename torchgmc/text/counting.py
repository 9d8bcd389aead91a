"""Whole words after a prompt: their exact probability, and how often they are written, counted in generated text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgmc.audits.audit import Audit, Evidence
from torchgmc.audits.intervals import METHODS, Rows
from torchgmc.audits.measures import Measures
from torchgmc.engine import checks
from torchgmc.engine.modes import evaluating
from torchgmc.groups.groups import Groups, check_groups
from torchgmc.heads.distribution.head import DistributionHead
from torchgmc.text.generation import GMCLogitsProcessor
from torchgmc.text.tokens import TokenGroups, _check_words, _Pieces


@dataclass(frozen=True)
class WordRates:
    """How often a word of each list follows each prompt. A prompt is one draw, however many samples it has.

    Attributes:
        rates: ``(n, u)``, from 0 to 1: a probability, or the share of a prompt's samples.
        member: whom the prompts are about, ``(n, a)``, bool.
        groups, lists: names of the a groups and the u lists.
    """

    rates: Tensor
    member: Tensor
    groups: Sequence[str]
    lists: Sequence[str]

    def __post_init__(self) -> None:
        rates, groups, lists = checks.numbers("rates", self.rates), checks.names(self.groups), checks.names(self.lists)
        if rates.dim() != 2 or not len(rates) or rates.shape[1] != len(lists) or not ((rates >= 0) & (rates <= 1)).all():
            raise ValueError(f"`rates` must be from 0 to 1 and of shape (n, {len(lists)}), got {tuple(rates.shape)}.")
        member = check_groups(self.member, len(rates), groups).to(rates.device)
        vars(self).update(rates=rates.double(), member=member, groups=tuple(groups), lists=tuple(lists))

    def audit(self, alpha: float | None = None, delta: float = 0.05, conditional: bool = False, method: str = "exact") -> Audit:
        """Is each list as frequent in each group as in all prompts? The promise of :class:`~torchgmc.DistributionHead`.

        Args:
            alpha: largest violation allowed; None for no verdicts.
            delta, conditional, method: as in :func:`torchgmc.audit`.
        """
        checks.option("method", method, METHODS)
        alpha = None if alpha is None else checks.positive("alpha", alpha, "It is the largest violation allowed.")
        rows = self._rows(delta, relative=True)
        evidence = Evidence(rows, tuple(self.groups), tuple(self.lists), rows.mean)
        table = evidence.table(alpha, delta, checks.flag("conditional", conditional), method)
        return Audit(table, alpha, delta, conditional, len(self.rates), name="WordRates", evidence=evidence, method=method)

    def frequencies(self, delta: float = 0.05) -> Measures:
        """Mean rate of each list (a measure) by group; all intervals hold at once with confidence 1 - delta.

        They are Clopper and Pearson's where every rate is 0 or 1 (one sample per prompt), by betting elsewhere.

        Example:
            >>> found = gmc.text.WordRates(torch.eye(2), [[True]] * 2, ["all"], ["jobs", "arts"]).frequencies()
            >>> found["jobs"]["all"]
            0.5 [0.00627, 0.9937]
        """
        rows = self._rows(delta, two_valued=bool(((self.rates == 0) | (self.rates == 1)).all()))
        judged, empty = rows.judge(None, delta, True), rows.count == 0
        values = (t.masked_fill(empty, torch.nan).T.flatten().tolist() for t in (judged.estimate, judged.low, judged.high))
        names = zip(*((group, name) for name in self.lists for group in self.groups), strict=True)
        table = dict(zip(("group", "measure", "value", "low", "high"), [*map(list, names), *values], strict=True))
        return Measures(table, delta, {})

    def _rows(self, delta: float, **options: Any) -> Rows:
        checks.fraction("delta", delta)
        alike = self.rates.new_ones(len(self.rates))
        return Rows.of(self.rates, self.member, alike, self.member.new_zeros(len(alike), 0).long(), (0.0, 1.0), **options)


class Counted(NamedTuple):
    """How often the next word of a text is in each list (``next``), or any word (``anywhere``), and the texts of each prompt."""

    next: WordRates
    anywhere: WordRates
    texts: list[list[str]]


@torch.no_grad()
def word_probabilities(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    words: Mapping[str, Sequence[str]] | Sequence[str],
    groups: TokenGroups | Mapping[str, Sequence[str]] | Groups | Tensor | None = None,
    head: DistributionHead | None = None,
    batch_size: int = 32,
) -> WordRates:
    r"""Exact probability that a causal model goes on with a word of each list, as a whole word.

    A word of pieces :math:`t_1 \dots t_k` has the probability :math:`\prod_j p(t_j \mid x, t_1 \dots t_{j-1})`, times that of
    a next piece that does not continue it: *doctor* is not the beginning of *doctors*. Words count in the forms of
    :class:`TokenGroups`, in the tokenizer's own pieces. The model reads every form after each prompt.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer.
        prompts: texts to continue, of at least one token each.
        words: words of each list, or words, each of which is then a list.
        groups: whom the prompts are about: words of each group, a :class:`TokenGroups`, a :class:`~torchgmc.Groups` or
            ``(n, a)``, bool. None: everyone.
        head: a fitted head, applied to every token as :class:`GMCLogitsProcessor` does.
        batch_size: texts at a time.

    Example:
        >>> gmc.text.word_probabilities(model, tokenizer, ["She is a"], ["accountant"]).rates  # doctest: +SKIP
        tensor([[0.0021]], dtype=torch.float64)
    """
    batch_size = checks.count("batch_size", batch_size, 32)
    job = _Job.of(model, tokenizer, prompts, words, groups, head)
    pieces, device = _Pieces(tokenizer), job.length.device
    found = pieces.find(job.words, "smart")
    listed = torch.zeros(len(found), len(job.words), dtype=torch.float64, device=device)
    for k, (sequence, columns) in enumerate(found.items()):
        inner = [found.get(sequence[:j], set()) for j in range(1, len(sequence)) if not pieces.joins[sequence[j]]]
        listed[k, sorted(columns.difference(*inner))] = 1.0  # "co-worker" is "co" already, if both are in a list
    size, count, longest = torch.tensor([*map(len, found)], device=device), len(found), max(map(len, found))
    forms = torch.tensor([[*form, *[0] * (longest - len(form))] for form in found], device=device)
    joins, ends = torch.tensor([pieces.joins, pieces.ends], device=device)
    ids = torch.nn.functional.pad(job.ids, [0, longest], value=job.pad)
    begins = ~(joins[forms[:, 0]] & ends[ids.gather(1, job.length[:, None] - 1)])  # (n, forms)
    chance = torch.zeros(len(ids), count, dtype=torch.float64, device=device)
    step, order = torch.arange(longest + 1, device=device), job.length.argsort()  # texts of similar length together
    with evaluating(model):
        for part in torch.split(torch.arange(len(ids) * count, device=device), batch_size):
            row, form, text = order[part // count], part % count, torch.arange(len(part), device=device)
            length, width = job.length[row, None], int(job.length[row].max()) + longest
            tokens = ids[row, :width].scatter(1, length + step[:-1], forms[form])
            attention = torch.arange(width, device=device) < length + size[form, None]
            logits = model(input_ids=tokens, attention_mask=attention.long()).logits[text[:, None], length - 1 + step]
            logits = logits if logits.dtype == torch.float64 else logits.float()
            log_p = logits.log_softmax(-1) if head is None else head(logits, job.member[row])
            each = log_p[:, :-1].gather(2, forms[form][:, :, None])[:, :, 0].masked_fill(step[:-1] >= size[form, None], 0.0)
            after = log_p[text, size[form]].double().exp()
            goes_on = after[:, : len(joins)] @ joins[: after.shape[1]].double()
            chance[row, form] = each.double().sum(1).exp() * (1.0 - goes_on)
    return job.rates((chance * begins) @ listed)


@torch.no_grad()
def count_generated(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    words: Mapping[str, Sequence[str]] | Sequence[str],
    groups: TokenGroups | Mapping[str, Sequence[str]] | Groups | Tensor | None = None,
    head: DistributionHead | None = None,
    max_new_tokens: int = 20,
    samples: int = 1,
    batch_size: int = 32,
    seed: int = 0,
    **options: Any,
) -> Counted:
    """Let a causal model continue prompts, and count how often a word of each list comes next, and anywhere.

    Tokens are drawn from the whole distribution, unless ``options`` say otherwise. A word at the very end does not count, as
    it might go on. For before and after, call it without and with a head, and :func:`torchgmc.compare` the audits.

    Args:
        model: a causal language model of transformers.
        tokenizer, prompts, words, groups, batch_size: as in :func:`word_probabilities`.
        head: a fitted head, applied to every token; None for the model as it is.
        max_new_tokens: length of the continuations, more than the pieces of the longest word.
        samples: continuations of each prompt.
        seed: of the draws; the global random numbers stay as they are.
        options: of ``model.generate``, e.g. ``temperature`` or ``logits_processor``.

    Example:
        >>> found = gmc.text.count_generated(model, tokenizer, prompts, lists, groups, head, samples=8)  # doctest: +SKIP
        >>> found.next.frequencies()["jobs"]["female"], found.anywhere.audit(alpha=0.01).certified  # doctest: +SKIP
        (0.02 [0.014, 0.029], True)
    """
    batch_size, samples = checks.count("batch_size", batch_size, 32), checks.count("samples", samples, 1)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise ValueError(f"`seed` must be a whole number from 0, got {seed!r}.")
    job = _Job.of(model, tokenizer, prompts, words, groups, head)
    find, device = TokenGroups(tokenizer, job.words).to(job.length.device), job.length.device
    if checks.count("max_new_tokens", max_new_tokens, 20) <= find.longest:
        raise ValueError(f"`max_new_tokens` must be at least {find.longest + 1}, beyond the longest word, got {max_new_tokens}.")
    settings: dict[str, Any] = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
    settings |= {"num_return_sequences": samples, "pad_token_id": job.pad, "max_new_tokens": max_new_tokens} | options
    given = list(options.get("logits_processor") or [])
    first, anywhere = torch.zeros(2, len(prompts), len(job.words), dtype=torch.float64, device=device)
    texts: list[list[str]] = [[] for _ in prompts]
    with evaluating(model), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for row in torch.split(job.length.argsort(), batch_size):  # prompts of similar length together
            width = int(job.length[row].max())
            place = torch.arange(width, device=device) - (width - job.length[row, None])  # padded on the left
            ids = job.ids[row].gather(1, place.clamp_min(0)).masked_fill(place < 0, job.pad)
            settings["logits_processor"] = [*([] if head is None else [GMCLogitsProcessor(head, job.member[row])]), *given]
            out = model.generate(input_ids=ids, attention_mask=(place >= 0).long(), **settings)  # type: ignore[operator]
            found = find._places(out[:, width - 1 :], unfinished=True)[:, 1:]
            found = found.reshape(len(row), -1, *found.shape[1:])  # (n, samples, t, u)
            first[row], anywhere[row] = found[:, :, 0].double().mean(1), found.any(2).double().mean(1)
            said = iter(tokenizer.batch_decode(out[:, width:], skip_special_tokens=True))
            for i in row.tolist():
                texts[i] = [next(said) for _ in range(found.shape[1])]
    return Counted(job.rates(first), job.rates(anywhere), texts)


class _Job(NamedTuple):
    """Checked arguments: prompts as tokens, padded on the right, their lengths and groups, and lists of words."""

    ids: Tensor
    length: Tensor
    member: Tensor
    groups: Sequence[str]
    words: dict[str, list[str]]
    pad: int

    @classmethod
    def of(cls, model: Any, tokenizer: Any, prompts: Any, words: Any, groups: Any, head: DistributionHead | None) -> "_Job":
        listed = isinstance(prompts, Sequence) and not isinstance(prompts, str | bytes)
        if not listed or not prompts or not all(isinstance(prompt, str) and prompt.strip() for prompt in prompts):
            raise TypeError(f"`prompts` must be a list of texts, at least one and none empty, got {prompts!r:.80}.")
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False) or not hasattr(model, "generate"):
            raise TypeError(f"`model` must be a causal language model of transformers, got {type(model).__name__}.")
        if head is not None and not (isinstance(head, DistributionHead) and head.is_fitted):
            raise TypeError(f"`head` must be a fitted DistributionHead, got {type(head).__name__}.")
        if isinstance(words, Sequence) and not isinstance(words, str):
            words = {str(word): [word] for word in words}
        lists = _check_words("words", words)
        encoded = [list(tokenizer.encode(prompt)) for prompt in prompts]
        pad = next((int(i) for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        device, width = next(model.parameters()).device, max(map(len, encoded))
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in encoded], device=device)
        names = None if head is None else head.groups
        if groups is None and names is None:
            groups, names = torch.ones(len(ids), 1, dtype=torch.bool), ["everyone"]
        if isinstance(groups, Mapping):
            groups = TokenGroups(tokenizer, groups)
        own = getattr(groups, "names", None) if isinstance(groups, nn.Module | Groups) else None
        if own is not None and names is not None and list(own) != list(names):
            raise ValueError(f"`groups` names {list(own)}, but the head was made for {names}.")
        member = check_groups(groups.to(device)(ids) if isinstance(groups, nn.Module) else groups, len(ids), own or names)
        names = own or names or [f"group {k}" for k in range(member.shape[1])]
        return cls(ids, torch.tensor([len(row) for row in encoded], device=device), member.to(device), names, lists, pad)

    def rates(self, rates: Tensor) -> WordRates:
        return WordRates(rates.clamp(0.0, 1.0), self.member, self.groups, list(self.words))
