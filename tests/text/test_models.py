"""Generation, masked prediction and outputs with real (small, random) transformers models."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchgmc as gmc
from gmctest.bert import wordpiece
from torchgmc.text import apply_to_output, calibrate_masked_lm, masked_logits

transformers = pytest.importorskip("transformers")

VOCABULARY = 40
LISTS = {"jobs": [7, 8], "arts": [8, 9, 10]}
FEMALE, MALE = 3, 4  # tokens that put a prompt into a group


class TwoTokens(torch.nn.Module):
    """Groups by single tokens, without a tokenizer."""

    names = ("female", "male")

    def forward(self, input_ids):
        return torch.stack([(input_ids == token).any(1) for token in (FEMALE, MALE)], 1)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, pad_token_id=1
    )
    config.loss_type = None
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # far from uniform
    return model


def prompts(n=200, length=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(11, VOCABULARY, (n, length), generator=g)
    ids[: n // 2, 1] = FEMALE
    ids[n // 2 :, 1] = MALE
    return ids[torch.randperm(n, generator=g)]


def fit(model, alpha=0.001, planted=0.0, **options):
    ids = prompts()
    with torch.no_grad():
        logits = model(ids).logits[:, -1]
    logits[:, 7:9] += planted * TwoTokens()(ids)[:, :1]
    return gmc.DistributionHead(LISTS, alpha, ["female", "male"], **options).fit(logits, TwoTokens()(ids))


def generate(model, ids, processor=None, **options):
    torch.manual_seed(1)
    processors = transformers.LogitsProcessorList([] if processor is None else [processor])
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), logits_processor=processors, max_new_tokens=6, eos_token_id=None, **options
    )


MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 0},
    "beams": {"do_sample": False, "num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "beam samples": {"do_sample": True, "num_beams": 2},
}


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("geometry", ["kl", "euclidean"])
def test_an_idle_head_changes_no_token(model, mode, geometry):
    head = fit(model, alpha=1.0, geometry=geometry)
    ids = prompts(6)
    for when in ("prompt", "all"):
        processor = gmc.text.GMCLogitsProcessor(head, TwoTokens(), when=when)
        assert torch.equal(generate(model, ids, processor, **MODES[mode]), generate(model, ids, **MODES[mode]))


@pytest.mark.parametrize("mode", list(MODES))
def test_membership_follows_the_rows(model, mode):
    """Beams and samples of a prompt have its group, by module and by table."""
    head = fit(model)
    ids = prompts(4)
    by_module = gmc.text.GMCLogitsProcessor(head, TwoTokens())
    by_table = gmc.text.GMCLogitsProcessor(head, TwoTokens()(ids))
    by_length = gmc.text.GMCLogitsProcessor(head, TwoTokens(), prompt_length=5)
    texts = [generate(model, ids, processor, **MODES[mode]) for processor in (by_module, by_table, by_length)]
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
    rows = len(by_module.membership)
    assert torch.equal(by_module.membership, TwoTokens()(ids).repeat_interleave(rows // 4, 0))


def test_beams_score_calibrated_sequences(model):
    """The score of a beam is the sum of calibrated log-probabilities of its tokens."""
    head = fit(model, 0.0005, planted=2.0)
    ids = prompts(3)
    processor = gmc.text.GMCLogitsProcessor(head, TwoTokens())
    out = generate(
        model,
        ids,
        processor,
        num_beams=3,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        length_penalty=0.0,
    )
    total = torch.zeros(3)
    with torch.no_grad():
        for t in range(5, out.sequences.shape[1]):
            log_p = head(model(out.sequences[:, :t]).logits[:, -1], TwoTokens()(ids))
            total += log_p.gather(1, out.sequences[:, t : t + 1])[:, 0]
    torch.testing.assert_close(out.sequences_scores, total, rtol=1e-4, atol=1e-4)


def test_when_the_group_is_decided(model):
    head = fit(model)
    ids = torch.tensor([[12, 13, 14]])
    scores = torch.randn(1, VOCABULARY)
    grown = torch.cat([ids, torch.tensor([[FEMALE]])], 1)
    prompt, everything = (gmc.text.GMCLogitsProcessor(head, TwoTokens(), when=when) for when in ("prompt", "all"))
    for processor in (prompt, everything):
        processor(ids, scores)
        assert processor.membership.tolist() == [[False, False]]
        processor(grown, scores)
    assert prompt.membership.tolist() == [[False, False]]
    assert everything.membership.tolist() == [[True, False]]
    prompt(torch.tensor([[12, MALE, 14, 15, 16]]), scores)  # another prompt, though one token longer
    assert prompt.membership.tolist() == [[False, True]]
    prompt(grown, scores)  # shorter: a new text
    assert prompt.membership.tolist() == [[True, False]]
    prompt.reset()
    prompt(torch.cat([grown, grown], 1), scores)
    assert prompt.membership.tolist() == [[True, False]]


def test_sampled_words_have_the_calibrated_frequencies(model):
    head = fit(model, 0.0005, planted=2.0)
    ids = prompts(2)
    many = ids.repeat_interleave(6000, 0)
    processor = gmc.text.GMCLogitsProcessor(head, TwoTokens())
    torch.manual_seed(3)
    out = model.generate(
        many, attention_mask=torch.ones_like(many), logits_processor=[processor], max_new_tokens=1, do_sample=True, top_k=0
    )[:, -1]
    with torch.no_grad():
        logits = model(ids).logits[:, -1]
    p = head(logits, TwoTokens()(ids)).exp()
    plain = torch.softmax(logits, 1)
    for i in range(2):
        for tokens in LISTS.values():
            share = torch.isin(out[6000 * i : 6000 * (i + 1)], torch.tensor(tokens)).double().mean()
            want = float(p[i, tokens].sum())
            assert abs(float(share) - want) <= 4.5 * (want * (1 - want) / 6000) ** 0.5 + 1e-4
    assert float((p - plain).abs().max()) > 0.02  # the head does something


def test_processor_refuses_what_it_cannot_use(model):
    head = fit(model)
    with pytest.raises(TypeError, match="DistributionHead"):
        gmc.text.GMCLogitsProcessor(model, TwoTokens())
    with pytest.raises(ValueError, match="not fitted"):
        gmc.text.GMCLogitsProcessor(gmc.DistributionHead(LISTS, 0.1, ["a"]), TwoTokens())
    with pytest.raises(ValueError, match="`when`"):
        gmc.text.GMCLogitsProcessor(head, TwoTokens(), when="now")
    with pytest.raises(ValueError, match="shape"):
        gmc.text.GMCLogitsProcessor(head, torch.ones(3, 5).bool())
    other = TwoTokens()
    other.names = ("x", "y")
    with pytest.raises(ValueError, match="made for"):
        gmc.text.GMCLogitsProcessor(head, other)
    processor = gmc.text.GMCLogitsProcessor(head, torch.ones(3, 2).bool())
    with pytest.raises(ValueError, match="one row per prompt"):
        processor(torch.zeros(4, 2).long(), torch.zeros(4, VOCABULARY))


# -- masked models ---------------------------------------------------------------------------------------------------------

WORDS = {"female": ["she", "woman"], "male": ["he", "man"]}
JOBS = {"jobs": ["doctor", "engineer"], "care": ["nurse"]}


@pytest.fixture(scope="module")
def masked():
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


SENTENCES = [
    f"{start} {verb} {rest}"
    for start in ("she", "he", "the woman", "the man", "mary")
    for verb in ("met the [MASK]", "[MASK] and saw", "said the [MASK] work")
    for rest in ("at the manor .", ".", "and the doctor met the nurse at the manor")
]


def plain_loop(model, tokenizer, sentences):
    rows = []
    for sentence in sentences:
        ids = torch.tensor([tokenizer.encode(sentence)])
        with torch.no_grad():
            rows.append(model(ids).logits[ids == tokenizer.mask_token_id])
    return torch.cat(rows)


def test_masked_logits_match_one_by_one(masked):
    model, tokenizer = masked
    model.train()
    expected = plain_loop(copy.deepcopy(model).eval(), tokenizer, SENTENCES)
    lengths, logits, order = [], [], []
    for batch in masked_logits(model, tokenizer, SENTENCES, batch_size=7, progress=False):
        lengths.append(batch.input_ids.shape[1])
        logits.append(batch.logits)
        order.append(batch.sentence)
    assert lengths == sorted(lengths)
    assert model.training  # as it was
    model.eval()
    order = torch.cat(order)
    assert sorted(order.tolist()) == list(range(len(SENTENCES)))
    torch.testing.assert_close(torch.cat(logits)[order.argsort()], expected, rtol=1e-4, atol=1e-4)


def test_calibrate_masked_lm(masked):
    model, tokenizer = masked
    head = calibrate_masked_lm(
        model, tokenizer, SENTENCES, groups=WORDS, attributes=JOBS, alpha=1e-4, batch_size=8, progress=False
    )
    logits = plain_loop(model, tokenizer, SENTENCES)
    groups = gmc.TokenGroups(tokenizer, WORDS)
    member = torch.cat([groups(torch.tensor([tokenizer.encode(s)])) for s in SENTENCES])
    assert head.report.converged and head.report.details["examples"] == len(SENTENCES)
    assert float(head.report.violations_before.abs().max()) > 2e-4
    again = gmc.DistributionHead(head.attributes, 1e-4, ["female", "male"]).fit(logits, member)
    torch.testing.assert_close(head(logits, member), again(logits, member), rtol=1e-4, atol=1e-4)
    # A head of one's own, a membership, weights, another solver.
    other = gmc.DistributionHead(head.attributes, 1e-4, ["female", "male"], geometry="euclidean")
    weight = [1.0] * len(SENTENCES)
    calibrate_masked_lm(model, tokenizer, SENTENCES, other, member, weight=weight, solver="paper", progress=False)
    assert other.report.converged
    # Two masks in one sentence are two prompts.
    twice = calibrate_masked_lm(
        model, tokenizer, ["she [MASK] the [MASK]", "he [MASK]"], groups=WORDS, attributes=JOBS, alpha=1.0, progress=False
    )
    assert twice.report.details["examples"] == 3


def test_calibrate_masked_lm_says_what_is_missing(masked):
    model, tokenizer = masked
    good = {"groups": WORDS, "attributes": JOBS, "alpha": 0.1, "progress": False}
    head = gmc.DistributionHead({"a": [1]}, 0.1, ["female", "male"])
    for sentences, options, match in (
        (["she met"], good, r"sentences\[0\] has no mask token"),
        (["she [MASK] " + "man " * 60], good, "more than 40"),
        ([], good, "empty"),
        (SENTENCES, good | {"groups": None}, "`groups` is missing"),
        (SENTENCES, good | {"alpha": None}, "without `head`"),
        (SENTENCES, good | {"head": head}, "already given"),
        (SENTENCES, {"groups": torch.ones(3, 2).bool(), "head": head}, "one row per sentence"),
        (SENTENCES, {"groups": {"x": ["she"]}, "head": head}, "made for"),
        (SENTENCES, good | {"batch_size": 0}, "batch_size"),
    ):
        with pytest.raises(ValueError, match=match):
            calibrate_masked_lm(model, tokenizer, sentences, **options)
    with pytest.raises(TypeError, match="list of strings"):
        calibrate_masked_lm(model, tokenizer, "she [MASK]", **good)


# -- outputs ---------------------------------------------------------------------------------------------------------------


def test_outputs_keep_their_type(masked, model):
    bert, tokenizer = masked
    head = calibrate_masked_lm(bert, tokenizer, SENTENCES, groups=WORDS, attributes=JOBS, alpha=1e-4, progress=False)
    groups = gmc.TokenGroups(tokenizer, WORDS)
    ids = torch.tensor([tokenizer.encode("she met the [MASK]"), tokenizer.encode("he met the [MASK]")])
    labels = ids.clone()
    with torch.no_grad():
        output = bert(ids, labels=labels, output_hidden_states=True)
    places = ids == tokenizer.mask_token_id
    new = apply_to_output(output, head, groups(ids), places)
    assert type(new) is type(output) is transformers.modeling_outputs.MaskedLMOutput
    torch.testing.assert_close(new.logits[places], head(output.logits[places], groups(ids)))
    assert torch.equal(new.logits[~places], output.logits[~places])
    assert torch.equal(new.loss, output.loss) and new.hidden_states is output.hidden_states
    assert not torch.equal(new.logits, output.logits)

    causal = fit(model)
    prompt = prompts(3)
    with torch.no_grad():
        output = model(prompt)
    member = TwoTokens()(prompt)
    new = apply_to_output(output, causal, member)
    assert type(new) is type(output)
    torch.testing.assert_close(new.logits, causal(output.logits, member))
    last = apply_to_output(output, causal, member, "last").logits
    torch.testing.assert_close(last[:, -1], causal(output.logits[:, -1], member))
    assert torch.equal(last[:, :-1], output.logits[:, :-1])
    chosen = apply_to_output(output, causal, member, torch.tensor([0, 2, 4])).logits
    torch.testing.assert_close(chosen[1, 2], causal(output.logits[1:2, 2], member[1:2])[0])
    # Plain containers too.
    assert torch.equal(apply_to_output(output.logits, causal, member, "last"), last)
    assert torch.equal(apply_to_output({"logits": output.logits}, causal, member, "last")["logits"], last)
    assert torch.equal(apply_to_output((None, output.logits), causal, member, "last")[1], last)
    for bad, match in ((torch.tensor([True]), "`positions`"), ("first", "`positions`")):
        with pytest.raises(ValueError, match=match):
            apply_to_output(output, causal, member, bad)
    with pytest.raises(ValueError, match="logits must have shape"):
        apply_to_output(output, causal, member[:2])
    with pytest.raises(ValueError, match="no `logits`"):
        apply_to_output({"scores": output.logits}, causal, member)
    with pytest.raises(TypeError, match="language model"):
        apply_to_output(3, causal, member)


# -- quality ---------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 1000), cut=st.integers(0, 30))
def test_quality_matches_a_loop(seed, cut):
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(30, 12, generator=g, dtype=torch.float64)
    member = torch.arange(30)[:, None] % 2 == torch.arange(2)
    logits[:, 7] += 2 * member[:, 0]
    labels = torch.randint(12, (30,), generator=g)
    for geometry in ("kl", "euclidean"):
        head = gmc.DistributionHead(LISTS, 1e-3, ["a", "b"], geometry=geometry).fit(logits, member)
        quality = gmc.text.Quality()
        for part in (slice(0, cut), slice(cut, 30)):
            quality.update(head, logits[part], member[part], labels[part])
        found = quality.compute()
        p, q = torch.softmax(logits, 1), head(logits, member).exp()
        rows = range(30)
        assert found["NLL before"] == pytest.approx(sum(-float(p[i, labels[i]].log()) for i in rows) / 30)
        assert found["KL"] == pytest.approx(
            sum(float(b * (b / a).log()) for i in rows for a, b in zip(p[i], q[i], strict=True) if b > 0) / 30,
            rel=1e-6,
            abs=1e-12,
        )
        assert found["zeros"] == pytest.approx(sum(int((q[i] == 0).sum()) for i in rows) / 30)
        assert found["printed after"] == pytest.approx(sum(-float(torch.log_softmax(q[i], 0)[labels[i]]) for i in rows) / 30)
        assert found["infinite"] == pytest.approx(sum(float(q[i, labels[i]]) == 0 for i in rows) / 30)
        assert found["perplexity before"] == pytest.approx(2.718281828459045 ** found["NLL before"])


def test_bias_table_is_the_reports():
    logits = torch.randn(40, 12, dtype=torch.float64)
    member = torch.arange(40)[:, None] % 2 == torch.arange(2)
    head = gmc.DistributionHead(LISTS, 1e-4, ["a", "b"]).fit(logits, member)
    table = gmc.text.bias_table(head, logits, member)
    assert table["group"] == ["a", "a", "b", "b"] and table["list"] == ["jobs", "arts"] * 2
    torch.testing.assert_close(
        torch.tensor(table["before"]).double(), head.report.violations_before.flatten(), rtol=1e-5, atol=1e-9
    )
    torch.testing.assert_close(
        torch.tensor(table["after"]).double(), head.report.violations_after.flatten(), rtol=1e-4, atol=1e-9
    )
    assert table["P(U) before"][0] == pytest.approx(float(torch.softmax(logits, 1)[:, [7, 8]].sum(1).mean()))


def test_quality_needs_labels():
    head = gmc.DistributionHead(LISTS, 1.0, ["a"]).fit(torch.randn(9, 12), torch.arange(9)[:, None] < 4)
    with pytest.raises(ValueError, match="`labels`"):
        gmc.text.Quality().update(head, torch.randn(3, 12), torch.ones(3, 1).bool(), torch.zeros(2).long())
    with pytest.raises(ValueError, match="no tokens"):
        gmc.text.Quality().compute()
