"""Fuzz entries of language models: groups and lists from tokens, logits of masks, processors, quality."""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import torchgmc as gmc
from gmctest import bert, heads_zoo
from gmctest.fuzz_functions import finite, head_of, rng
from gmctest.fuzz_inputs import Arguments, Entry, all_plain
from torchgmc import text

WORDS = {"female": ["she", "woman"], "male": ["he", "man"]}
LISTED = {"female": ["she"], "male": ["he", "man"]}
PIECES = ["she", "he", "wo", "##man", "man", "and", "the", "is", "a", ".", "doctor", "nurse", "x", "y", "z"]


@functools.cache
def tokenizer() -> Any:
    return bert.bert_tokenizer(PIECES)


def token_groups(words: Any, case: Any, ids: Any) -> Tensor:
    out: Tensor = gmc.TokenGroups(tokenizer(), words, case)(ids)
    return out


def token_data(n: int, seed: int) -> Arguments:
    ids = torch.randint(len(tokenizer()), (n, 6), generator=rng(seed))
    return {"words": WORDS, "case": "smart", "ids": ids}


def check_tokens(data: Arguments, member: Tensor) -> None:
    """Words of the row, put together again and compared one by one."""
    ids = data["ids"]
    if data["words"] is not WORDS or not all_plain(data) or ids.is_floating_point() or ids.dtype == torch.bool:
        return
    for row, found in zip(ids.tolist(), member.tolist(), strict=True):
        if not row or min(row) < 0 or max(row) >= len(tokenizer()):
            continue
        whole: list[str] = []
        for token in tokenizer().convert_ids_to_tokens(row):
            if token.startswith("##") and whole and whole[-1].isalpha():
                whole[-1] += token[2:]
            else:
                whole.append(token)
        assert found == [any(word in WORDS[name] for word in whole) for name in WORDS]


def check_attributes(data: Arguments, found: dict[str, list[int]]) -> None:
    for ids in found.values():
        assert ids == sorted(set(ids)) and all(0 <= i < len(tokenizer()) for i in ids)
    if data["words"] is LISTED and data["case"] == "smart":
        assert tokenizer().convert_ids_to_tokens(found["male"]) == ["he", "man"]


@functools.cache
def language_model() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=len(tokenizer()), max_position_embeddings=16, **size)
    made: nn.Module = transformers.BertForMaskedLM(config).eval()
    return made


@functools.cache
def causal_model() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    size = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 32, "vocab_size": len(tokenizer())}
    made: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=2, eos_token_id=3)).eval()
    return made


PROMPTS = ["she is", "he is the", "woman and man", "he"]


def counting_data(n: int, seed: int) -> Arguments:
    member = torch.tensor([[True, False], [False, True], [True, True], [False, True]])
    return {"prompts": PROMPTS, "words": {"jobs": ["doctor", "woman"]}, "groups": member, "batch_size": 3}


@torch.no_grad()
def check_probabilities(data: Arguments, found: text.WordRates) -> None:
    """A word by itself: the product of its pieces' chances, and of no "##man" after it."""
    if data["prompts"] is not PROMPTS or data["words"] != {"jobs": ["doctor", "woman"]}:
        return
    for prompt, rate in zip(PROMPTS, found.rates[:, 0].tolist(), strict=True):
        total, joined = 0.0, tokenizer().convert_tokens_to_ids("##man")
        for word in ("doctor", "wo ##man"):
            ids, p = tokenizer().encode(prompt), 1.0
            for token in [*tokenizer().convert_tokens_to_ids(word.split()), None]:
                chances = causal_model()(torch.tensor([ids])).logits[0, -1].softmax(0)
                p *= 1 - float(chances[joined]) if token is None else float(chances[token])
                ids.append(token)
            total += p
        assert abs(rate - total) < 1e-6


def check_counted(data: Arguments, found: text.Counted) -> None:
    assert ((found.anywhere.rates >= found.next.rates) & (found.next.rates >= 0)).all()
    assert len(found.texts) == len(found.next.rates)


def rates_data(n: int, seed: int) -> Arguments:
    rates, member = torch.rand(n, 2, generator=rng(seed)), torch.arange(n)[:, None] % 2 == torch.arange(2)
    return {"rates": rates, "member": member, "groups": ["a", "b"], "lists": ["x", "y"], "delta": 0.1}


def audited_rates(alpha: Any, conditional: Any, method: Any, delta: Any, **given: Any) -> gmc.Audit:
    return text.WordRates(**given).audit(alpha, delta, conditional, method)


def frequencies(delta: Any, **given: Any) -> dict[str, Any]:
    made = text.WordRates(**given)
    return {name: made.frequencies(delta)[name] for name in made.lists}


def check_frequencies(data: Arguments, found: dict[str, Any]) -> None:
    if not all_plain(data) or data["member"].dtype != torch.bool:
        return
    for k, groups in enumerate(found.values()):
        for j, value in enumerate(groups.values()):
            inside = data["rates"].detach().double()[data["member"][:, j], k]
            assert not len(inside) or (value.low <= value <= value.high and abs(float(value) - float(inside.mean())) < 1e-6)


SENTENCES = ["she is a [MASK] .", "he is the [MASK] and [MASK] .", "woman and man [MASK]"]


def masked(sentences: Any, batch_size: Any, max_length: Any, text_: Any) -> list[Any]:
    return list(text.masked_logits(language_model(), tokenizer(), sentences, batch_size, max_length, False, text_))


def check_masked(data: Arguments, batches: list[Any]) -> None:
    sentences = [int(i) for batch in batches for i in batch.sentence]
    if data["sentences"] is SENTENCES:
        assert sorted(sentences) == [0, 1, 1, 2]
    for batch in batches:
        assert batch.logits.shape == (len(batch.sentence), len(tokenizer()))


def calibrated_lm(sentences: Any, groups: Any, attributes: Any, alpha: Any, batch_size: Any, weight: Any, solver: Any) -> gmc.Head:
    return text.calibrate_masked_lm(
        language_model(), tokenizer(), sentences, None, groups, attributes, alpha, batch_size, None, False, weight, solver
    )


def lm_data(n: int, seed: int) -> Arguments:
    data: Arguments = {"sentences": SENTENCES, "groups": WORDS, "attributes": {"jobs": ["doctor", "nurse"]}, "alpha": 0.01}
    return data | {"batch_size": 2, "weight": None, "solver": "exact"}


def prompt_data(n: int, seed: int) -> Arguments:
    logits, groups = heads_zoo.prompts(n, seed).observe
    return {"logits": logits, "groups": groups}


def check_bias(data: Arguments, table: dict[str, list[Any]]) -> None:
    if not all_plain(data) or data["logits"].dtype != torch.float64 or data["weight"] is not None:
        return
    p = data["logits"].detach().softmax(1).numpy()
    member = np.asarray(data["groups"]).astype(float)
    rows = zip(table["group"], table["list"], table["before"], strict=True)
    for group, name, bias in rows:
        mass = p[:, heads_zoo.LISTS[name]].sum(1)
        inside = member[:, heads_zoo.GROUPS.index(group)]
        assert abs(bias - float((inside * (mass - mass.mean())).mean())) < 1e-9


def quality(logits: Any, groups: Any, labels: Any) -> dict[str, float]:
    measure = text.Quality()
    measure.update(head_of("distribution"), logits, groups, labels)
    return measure.compute()


def check_quality(data: Arguments, found: dict[str, float]) -> None:
    if all_plain(data) and data["logits"].dtype in (torch.float32, torch.float64):
        loss = nn.functional.cross_entropy(data["logits"].detach(), data["labels"].long())
        assert abs(found["NLL before"] - float(loss)) < 1e-4


def processed(ids: Any, scores: Any, groups: Any, when: Any, prompt_length: Any) -> Tensor:
    return text.GMCLogitsProcessor(head_of("distribution"), groups, when, prompt_length)(ids, scores)


def processor_data(n: int, seed: int) -> Arguments:
    scores, groups = heads_zoo.prompts(n, seed).observe
    ids = torch.randint(20, (n, 5), generator=rng(seed))
    return {"ids": ids, "scores": scores, "groups": groups, "when": "prompt", "prompt_length": None}


def check_processed(data: Arguments, scores: Tensor) -> None:
    if all_plain(data) and scores.dtype in (torch.float32, torch.float64):
        expected = head_of("distribution")(data["scores"], data["groups"])
        torch.testing.assert_close(scores.log_softmax(1), expected, rtol=1e-3, atol=1e-4)


def output_data(n: int, seed: int) -> Arguments:
    logits = torch.randn(n, 3, 20, generator=rng(seed))
    return {"output": {"logits": logits}, "membership": heads_zoo.membership(n, rng(seed)), "positions": "last"}


def check_output(data: Arguments, output: dict[str, Tensor]) -> None:
    logits = data["output"]["logits"]
    if isinstance(data["positions"], str) and data["positions"] == "last" and all_plain(data):
        expected = head_of("distribution")(logits[:, -1], data["membership"])
        torch.testing.assert_close(output["logits"][:, -1], expected.to(output["logits"].dtype))
        assert output["logits"][:, :-1].equal(logits[:, :-1])


def attributes(words: Any, case: Any, several: Any) -> dict[str, list[int]]:
    return text.attributes_from_words(tokenizer(), words, case, several)


ENTRIES = [
    Entry("TokenGroups", token_data, token_groups, check_tokens),
    Entry(
        "attributes_from_words",
        lambda n, s: {"words": LISTED, "case": "smart", "several": "first"},
        lambda **a: attributes(**a),
        check_attributes,
    ),
    Entry(
        "masked_logits",
        lambda n, s: {"sentences": SENTENCES, "batch_size": 2, "max_length": None, "text_": "read"},
        masked,
        check_masked,
    ),
    Entry("calibrate_masked_lm", lm_data, calibrated_lm, lambda d, h: finite(h.offsets), share=0.5),
    Entry(
        "bias_table",
        lambda n, s: prompt_data(n, s) | {"weight": None},
        lambda **a: text.bias_table(head_of("distribution"), **a),
        check_bias,
    ),
    Entry(
        "text.Quality",
        lambda n, s: prompt_data(n, s) | {"labels": torch.randint(20, (n,), generator=rng(s))},
        quality,
        check_quality,
    ),
    Entry(
        "word_probabilities",
        counting_data,
        lambda **a: text.word_probabilities(causal_model(), tokenizer(), **a),
        check_probabilities,
        share=0.5,
    ),
    Entry(
        "count_generated",
        lambda n, s: counting_data(n, s) | {"max_new_tokens": 4, "samples": 2, "seed": 0},
        lambda **a: text.count_generated(causal_model(), tokenizer(), **a),
        check_counted,
        share=0.5,
    ),
    Entry(
        "WordRates.audit",
        lambda n, s: rates_data(n, s) | {"alpha": 0.1, "conditional": False, "method": "exact"},
        audited_rates,
        lambda d, audit: finite(torch.tensor(audit.table["estimate"])),
    ),
    Entry("WordRates.frequencies", rates_data, frequencies, check_frequencies),
    Entry("GMCLogitsProcessor", processor_data, processed, check_processed),
    Entry("apply_to_output", output_data, lambda **a: text.apply_to_output(head=head_of("distribution"), **a), check_output),
]
