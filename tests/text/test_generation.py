"""Generation with a real (small, random) transformers model."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torchgmc as gmc
from benchmarks.reads import Reads
from gmctest.causal_lm import FEMALE, LISTS, MALE, VOCABULARY, TwoTokens, fit, prompts

transformers = pytest.importorskip("transformers")


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


@pytest.fixture(params=["host", "device"])
def where(request, monkeypatch):
    """Numbers that are at hand, and numbers on a device that would be waited for."""
    monkeypatch.setattr("torchgmc.text.generation.ON_HOST", ("cpu",) if request.param == "host" else ())
    return request.param


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("geometry", ["kl", "euclidean"])
def test_an_idle_head_changes_no_token(model, mode, geometry):
    head = fit(model, alpha=1.0, geometry=geometry)
    ids = prompts(6)
    for when in ("prompt", "all"):
        processor = gmc.text.GMCLogitsProcessor(head, TwoTokens(), when=when)
        assert torch.equal(generate(model, ids, processor, **MODES[mode]), generate(model, ids, **MODES[mode]))


@pytest.mark.parametrize("mode", list(MODES))
def test_membership_follows_the_rows(model, mode, where):
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


@pytest.mark.parametrize("mode", ["greedy", "sampling", "samples"])
def test_without_the_normaliser_the_text_is_the_same_and_scores_stay(model, mode):
    head, ids = fit(model, 0.0005, planted=2.0), prompts(4)
    kept, quick = (gmc.text.GMCLogitsProcessor(head, TwoTokens(), normalized=flag) for flag in (True, False))
    out = [generate(model, ids, one, return_dict_in_generate=True, output_logits=True, **MODES[mode]) for one in (kept, quick)]
    assert torch.equal(out[0].sequences, out[1].sequences)
    for one, other in zip(out[0].logits, out[1].logits, strict=True):  # the model's own
        torch.testing.assert_close(one, other)


def test_when_the_group_is_decided(model, where):
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


class Counted(Reads):
    """Reads of values, and the largest number of tokens that are compared at once."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.startswith("eq.Tensor"):
            self.largest = max(self.largest, args[0].numel())
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_a_look_at_the_prompt_is_short_reads_nothing_and_tells_texts_apart(model, where):
    """64 prompts of 500 tokens: no more than 16 tokens of a few rows are compared at each step, and a new text is found."""
    ids = torch.full((64, 500), 12)
    ids[::2, 40] = FEMALE
    processor = gmc.text.GMCLogitsProcessor(fit(model), TwoTokens(), normalized=False)
    scores = torch.randn(64, VOCABULARY)
    with Counted() as counted:
        for step in range(4):
            processor(torch.cat([ids, torch.full((64, step), MALE)], 1), scores)
    assert processor.membership[:2].tolist() == [[True, False], [False, False]]
    assert not counted.found and 0 < counted.largest <= 16 * 16
    other = torch.full((64, 504), 13)
    other[1::2, 40] = MALE
    for step in range(3):
        longer = torch.cat([other, torch.full((64, step), FEMALE)], 1)
        processor(longer, scores)  # another prompt, one token longer than the last call, and two steps
        assert processor.membership[:2].tolist() == [[False, False], [False, True]]
    longer = torch.cat([other.flip(0), torch.full((64, 3), FEMALE)], 1)
    longer[:, 500] = MALE
    processor(longer, scores)  # and another, which ends otherwise
    assert processor.membership.all()


@pytest.mark.parametrize("normalized, geometry", [(False, "kl"), (True, "kl"), (True, "euclidean")])
def test_nothing_is_read_on_a_gpu(model, normalized, geometry):
    """Tensors without values, on a GPU that is not there: whoever looked at a value would fail."""
    head = fit(model, geometry=geometry)
    with FakeTensorMode(allow_non_fake_inputs=True):
        processor = gmc.text.GMCLogitsProcessor(head.to("cuda"), TwoTokens(), normalized=normalized)
        for length in (5, 6, 7, 3):
            found = processor(torch.zeros(6, length, dtype=torch.int64, device="cuda"), torch.zeros(6, VOCABULARY, device="cuda"))
            assert found.shape == (6, VOCABULARY) and processor.membership.device.type == "cuda"


@pytest.mark.parametrize("geometry", ["kl", "euclidean"])
def test_a_device_that_looks_for_nan_itself_reads_nothing_and_says_the_same(model, geometry, monkeypatch):
    """Pretended on the CPU, whose asserts raise at once: the same scores, no read, and NaN is an error on either way."""
    processor = gmc.text.GMCLogitsProcessor(fit(model, geometry=geometry), TwoTokens()(prompts(6)))
    scores, ids = torch.randn(6, VOCABULARY), prompts(6)
    wrong, want = scores.masked_fill(torch.arange(VOCABULARY) == 3, torch.nan), processor(ids, scores)
    with pytest.raises(ValueError, match="must not be NaN"):
        processor(ids, wrong)
    monkeypatch.setattr("torchgmc.text.generation.LOOKS", ("cpu",))
    with Counted() as counted:
        found = processor(ids, scores)
    assert torch.equal(found, want) and not counted.found["value"]
    with pytest.raises(RuntimeError, match="must not be NaN"):
        processor(ids, wrong)


@pytest.mark.parametrize("mode", list(MODES))
def test_texts_one_after_the_other(model, mode, where):
    """The prompts of each text are one token longer than the last call: every text has the groups of its own prompts."""
    head, ids = fit(model, 0.0005, planted=2.0), prompts(4)
    processor = gmc.text.GMCLogitsProcessor(head, TwoTokens())
    for _ in range(3):
        expected = generate(model, ids, gmc.text.GMCLogitsProcessor(head, TwoTokens()(ids)), **MODES[mode])
        assert torch.equal(generate(model, ids, processor, **MODES[mode]), expected)
        rows = len(processor.membership)
        assert torch.equal(processor.membership, TwoTokens()(ids).repeat_interleave(rows // 4, 0))
        ids = torch.cat([ids.flip(0), torch.full((4, 6), 12)], 1)  # others


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
