"""Whole words after a prompt, against every continuation written out, and counted in generated text."""

import itertools
import re

import pytest
import torch

import torchgmc as gmc
from gmctest.bert import bert_tokenizer
from torchgmc.text import WordRates, count_generated, word_probabilities
from torchgmc.text.tokens import _Pieces

transformers = pytest.importorskip("transformers")

PIECES = ["she", "he", "man", "wo", "##man", "##s", "a", "-", "doctor"]
LISTS = {"jobs": ["doctor", "womans", "a-man"], "people": ["woman", "man", "a", "a-man"], "doctors": ["doctors"]}
GROUPS = {"female": ["she", "woman"], "male": ["he", "man"]}
PROMPTS = ["she a", "he", "woman a man", "doctor he -", "she - a he"]


def causal(tokenizer, more=0):
    """A small model of random weights, far from uniform; ``more``: of a vocabulary padded by so many."""
    torch.manual_seed(0)
    size = {"vocab_size": len(tokenizer) + more, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = transformers.GPT2Config(**size, **ends)
    config.loss_type = None
    made = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3.0)
    return made


@pytest.fixture(scope="module")
def tokenizer():
    return bert_tokenizer(PIECES)


@pytest.fixture(scope="module")
def model(tokenizer):
    return causal(tokenizer, more=1)


@pytest.fixture(scope="module")
def prompts():
    others = ["a", "man", "doctor", "-", "wo", "a - a"]
    return [" ".join(words) for words in itertools.product(("she", "he"), others, others, others)]


@pytest.fixture(scope="module")
def head(model, tokenizer, prompts):
    """Fitted to a bias that is not in the model, so that it changes much."""
    find = gmc.TokenGroups(tokenizer, GROUPS)
    texts = [p for p in prompts if len(p.split()) == 4]
    ids = torch.tensor([tokenizer.encode(text) for text in texts])
    with pytest.warns(UserWarning, match="represented by their first piece: womans, a-man"):
        attributes = gmc.text.attributes_from_words(tokenizer, {"jobs": LISTS["jobs"]}, several="first")
    assert tokenizer.convert_ids_to_tokens(attributes["jobs"]) == ["wo", "a", "doctor"]
    with torch.no_grad():
        logits = model(ids).logits[:, -1]
    logits[:, attributes["jobs"]] += 2.0 * find(ids)[:, :1]
    return gmc.DistributionHead(attributes, 1e-4, find.names).fit(logits, find(ids))


@torch.no_grad()
def written_out(model, tokenizer, prompt, head=None, member=None, depth=4):
    """P(the text goes on with a word of each list): all continuations of four pieces, searched as text."""
    start, size = tokenizer.encode(prompt), model.config.vocab_size
    rows, log_p = torch.tensor([start]), torch.zeros(1).double()
    for _ in range(depth):
        logits = model(rows).logits[:, -1]
        step = logits.log_softmax(-1) if head is None else head(logits, member.expand(len(rows), -1))
        log_p = (log_p[:, None] + step.double()).flatten()
        rows = torch.cat([rows.repeat_interleave(size, 0), torch.arange(size).repeat(len(rows))[:, None]], 1)
    tokens = [*tokenizer.convert_ids_to_tokens(range(len(tokenizer))), "[MORE]"]
    texts = [" ".join(tokens[i] for i in row).replace(" ##", "").replace(" - ", "-") for row in rows[:, len(start) :].tolist()]
    patterns = [re.compile(rf"({'|'.join(map(re.escape, words))})(?!\w)") for words in LISTS.values()]
    hits = torch.tensor([[bool(pattern.match(text)) for pattern in patterns] for text in texts]).double()
    return log_p.exp() @ hits


@pytest.mark.parametrize("with_head", [False, True])
def test_probabilities_are_those_of_all_continuations(model, tokenizer, head, with_head):
    head = head if with_head else None
    model.train()
    found = word_probabilities(model, tokenizer, PROMPTS, LISTS, GROUPS, head, batch_size=7)
    assert model.training and found.groups == ("female", "male") and found.lists == tuple(LISTS)
    model.eval()
    assert found.member.tolist() == [[True, False], [False, True], [True, True], [False, True], [True, True]]
    for i in (0, 1):
        want = written_out(model, tokenizer, PROMPTS[i], head, found.member[i : i + 1])
        torch.testing.assert_close(found.rates[i], want, rtol=1e-4, atol=1e-7)
        assert want.min() > 1e-4
    words = word_probabilities(model, tokenizer, PROMPTS, ["doctor", "doctors"], found.member, head)
    assert words.lists == ("doctor", "doctors") and words.groups == (("female", "male") if with_head else ("group 0", "group 1"))
    torch.testing.assert_close(words.rates[:, 1:], found.rates[:, 2:])


def test_where_a_word_begins_depends_on_the_end_of_the_prompt():
    """GPT-2's pieces: "man" goes on with "wo", but begins a word after a quotation mark; every factor by itself."""
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.ByteLevelBPETokenizer()
    said = ['the man said "man" "woman" woman doctors doctor'] * 3
    inner.train_from_iterator(said, vocab_size=290, min_frequency=1, show_progress=False, special_tokens=["<|endoftext|>"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner._tokenizer, eos_token="<|endoftext|>")
    model = causal(tokenizer)
    joins = torch.tensor(_Pieces(tokenizer).joins)
    for prompt, leads in (("the wo", [" "]), ('the "', ["", " "])):
        found = word_probabilities(model, tokenizer, [prompt], ["doctor"]).rates[0, 0]
        want, start = 0.0, tokenizer.encode(prompt)
        for form in {tuple(tokenizer.encode(lead + "doctor")) for lead in leads}:
            with torch.no_grad():
                p = [model(torch.tensor([[*start, *form[:k]]])).logits[0, -1].softmax(0) for k in range(len(form) + 1)]
            begun = torch.stack([p[k][token] for k, token in enumerate(form)]).prod()
            want += float(begun * (1 - p[-1][joins].sum()))
        assert float(found) == pytest.approx(want, rel=1e-3) and want > 1e-9


def test_counts_agree_with_probabilities(model, tokenizer, head, prompts):
    """Next words: what was counted, and what the model says, before and after; the promise in intervals."""
    state = torch.get_rng_state()
    audits = {}
    for name, used in (("before", None), ("after", head)):
        exact = word_probabilities(model, tokenizer, prompts, LISTS, GROUPS, used, batch_size=1000)
        found = count_generated(model, tokenizer, prompts, LISTS, GROUPS, used, 6, samples=10, batch_size=200, seed=1)
        error = (exact.rates * (1 - exact.rates)).sum(0).div(10).sqrt() / len(prompts)
        assert ((found.next.rates.mean(0) - exact.rates.mean(0)).abs() < 4.5 * error).all()  # 4,320 texts
        assert (found.anywhere.rates >= found.next.rates).all()
        table = found.next.frequencies()
        for k, words in enumerate(LISTS):
            for j, group in enumerate(GROUPS):
                inside = exact.rates[exact.member[:, j], k].mean()
                assert table[words][group].low < inside < table[words][group].high
        assert [len(texts) for texts in found.texts] == [10] * len(prompts)
        audits[name] = found.next.audit(alpha=0.2)
        jobs = exact.audit(0.2).rows()
        shares = [row["risk"] for row in audits[name].rows() if row["what"] == "jobs"]
        assert abs(sum(shares) - sum(row["risk"] for row in jobs if row["what"] == "jobs")) < 0.05
    assert torch.equal(torch.get_rng_state(), state)
    shown = str(gmc.compare(audits))
    assert "before" in shown and "after" in shown
    moved = [{(r["group"], r["what"]): r["risk"] for r in audit.rows()} for audit in audits.values()]
    assert moved[1]["female", "jobs"] < moved[0]["female", "jobs"] - 0.02  # the head does something


class Parrot(torch.nn.Linear):
    """Says what it was given, and notes what it was asked."""

    def __init__(self, lines):
        super().__init__(1, 1)
        self.lines, self.asked = lines, []

    def generate(self, input_ids, attention_mask, **options):
        self.asked.append((input_ids, attention_mask, options))
        return torch.cat([input_ids.repeat_interleave(options["num_return_sequences"], 0), self.lines], 1)


def test_what_counts(tokenizer):
    """Words next and anywhere in what was said, by hand."""
    lines = {
        "doctor - man a": ({"jobs", "people"}, {"jobs"}),  # the last word may go on
        "doctor ##s - a": ({"doctors"}, {"doctors"}),
        "doctor ##s - [PAD]": ({"doctors"}, {"doctors"}),
        "he she wo ##man": (set(), set()),
        "he wo ##man [PAD]": ({"people"}, set()),
        "wo ##man ##s he": ({"jobs"}, {"jobs"}),
        "##man he he a": (set(), set()),
        "a - man -": ({"jobs", "people"}, {"jobs", "people"}),
    }
    rows = torch.tensor([tokenizer.convert_tokens_to_ids(line.split()) for line in lines])
    found = count_generated(Parrot(rows), tokenizer, ["she", "a he wo"], LISTS, GROUPS, samples=4)
    assert [len(texts) for texts in found.texts] == [4, 4] and found.texts[0][0] == tokenizer.decode(rows[0])
    assert found.next.groups == ("female", "male") and found.next.member.tolist() == [[True, False], [False, True]]
    for k, name in enumerate(LISTS):
        for counted, which in ((found.anywhere, 0), (found.next, 1)):
            want = [sum(name in sets[which] for sets in list(lines.values())[i : i + 4]) / 4 for i in (0, 4)]
            assert counted.rates[:, k].tolist() == want, (name, which)


def test_prompts_are_padded_on_the_left(tokenizer, head):
    parrot = Parrot(torch.zeros(2, 4).long())
    count_generated(parrot, tokenizer, ["she", "a he wo"], LISTS, GROUPS, head, temperature=2.0, logits_processor=["mine"])
    ((ids, attention, options),) = parrot.asked
    assert tokenizer.convert_ids_to_tokens(ids[0]) == ["[PAD]", "[PAD]", "[CLS]", "she", "[SEP]"]
    assert attention.tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
    own, other = options["logits_processor"]
    assert other == "mine" and options["temperature"] == 2.0 and options["top_k"] == 0 and options["do_sample"]
    assert own.head is head and own.groups.tolist() == [[True, False], [False, True]]


def test_rates_of_other_programs():
    """One sample per prompt: Clopper and Pearson's intervals; the mass-weighted promise by hand."""
    rates, member = (torch.arange(40) % 4 == 0)[:, None], torch.arange(40)[:, None] % 2 == torch.arange(2)
    made = WordRates(rates, member, ["even", "odd"], ["jobs"])
    table = made.frequencies(0.1)["jobs"]
    high = 1 - (0.1 / 4) ** (1 / 20)  # Clopper and Pearson's, two groups, two sides
    assert table["odd"] == table["odd"].low == 0 and table["odd"].high == pytest.approx(high, abs=1e-4)
    assert table["even"] == 0.5 and table["even"].low + table["even"].high == pytest.approx(1, abs=1e-4)
    audit = made.audit(alpha=0.3)
    assert audit.max_violation == pytest.approx(0.5 * 0.25) and audit.table["low"][0] < 0.125 < audit.table["high"][0]
    assert audit.view("conditional").max_violation == pytest.approx(0.25)
    for bad in ({"rates": 2.0 * rates}, {"rates": rates[:, 0]}, {"member": member[:3]}, {"lists": ["a", "b"]}):
        with pytest.raises(ValueError, match="`rates`|`groups`"):
            WordRates(**{"rates": rates, "member": member, "groups": ["even", "odd"], "lists": ["jobs"]} | bad)


def test_bad_arguments(model, tokenizer, head):
    for count in (word_probabilities, count_generated):
        for bad, match in (
            ({"prompts": "she"}, "`prompts`"),
            ({"prompts": []}, "`prompts`"),
            ({"words": {}}, "`words`"),
            ({"words": "man"}, "`words`"),
            ({"model": torch.nn.Linear(1, 1)}, "`model`"),
            ({"head": gmc.DistributionHead({"a": [1]}, 0.1, ["x"])}, "`head`"),
            ({"head": head}, "`groups`"),
            ({"head": head, "groups": {"x": ["she"], "y": ["he"]}}, "made for"),
            ({"batch_size": 0}, "`batch_size`"),
            ({"prompts": ["she", ""]}, "`prompts`"),
        ):
            with pytest.raises((TypeError, ValueError), match=match):
                count(**{"model": model, "tokenizer": tokenizer, "prompts": PROMPTS, "words": LISTS} | bad)
    with pytest.raises(ValueError, match="`max_new_tokens` must be at least 4, .*, got 3"):
        count_generated(model, tokenizer, PROMPTS, LISTS, max_new_tokens=3)
    with pytest.raises(ValueError, match="`seed`"):
        count_generated(model, tokenizer, PROMPTS, LISTS, seed=-1)
    with pytest.raises(ValueError, match="splits into several tokens: womans, a-man"):
        gmc.text.attributes_from_words(tokenizer, LISTS, several="error")
