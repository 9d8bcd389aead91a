"""Masked prediction and outputs with real (small, random) transformers models."""

import copy

import pytest
import torch

import torchgmc as gmc
from gmctest.bert import masked_lm
from gmctest.causal_lm import TwoTokens, fit, prompts
from torchgmc.text import apply_to_output, calibrate_masked_lm, masked_logits

transformers = pytest.importorskip("transformers")


# -- masked models ---------------------------------------------------------------------------------------------------------

WORDS = {"female": ["she", "woman"], "male": ["he", "man"]}
JOBS = {"jobs": ["doctor", "engineer"], "care": ["nurse"]}


@pytest.fixture(scope="module")
def masked():
    return masked_lm()


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
    head = calibrate_masked_lm(model, tokenizer, SENTENCES, groups=WORDS, attributes=JOBS, alpha=1e-4, batch_size=8, progress=False)
    logits = plain_loop(model, tokenizer, SENTENCES)
    groups = gmc.TokenGroups(tokenizer, WORDS)
    member = torch.cat([groups(torch.tensor([tokenizer.encode(s)])) for s in SENTENCES])
    assert head.report.reached == "noise" and head.report.details["examples"] == len(SENTENCES)
    assert float(head.report.violations_before.abs().max()) > 2e-4
    for noise_floor in (True, False):
        options = {"alpha": 1e-4, "groups": ["female", "male"], "noise_floor": noise_floor}
        given = gmc.DistributionHead(head.attributes, **options)
        calibrate_masked_lm(model, tokenizer, SENTENCES, given, member, batch_size=8, progress=False)
        again = gmc.DistributionHead(head.attributes, **options).fit(logits, member)
        torch.testing.assert_close(given(logits, member), again(logits, member), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close((given if noise_floor else head)(logits, member), head(logits, member), rtol=0, atol=1e-6)
        assert noise_floor or (given.report.converged and not torch.allclose(given(logits, member), head(logits, member)))
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
        (SENTENCES, good | {"alpha": None}, "pass a `head`, or `attributes`"),
        (SENTENCES, good | {"head": head}, "already set by `head`"),
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
