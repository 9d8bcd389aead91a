"""A small causal language model of random weights, prompts with a group each, and a head for them."""

import pytest
import torch

import torchgmc as gmc

transformers = pytest.importorskip("transformers")

VOCABULARY = 40
LISTS = {"jobs": [7, 8], "arts": [8, 9, 10]}
FEMALE, MALE = 3, 4  # tokens that put a prompt into a group


class TwoTokens(torch.nn.Module):
    """Groups by single tokens, without a tokenizer."""

    names = ("female", "male")

    def forward(self, input_ids):
        return torch.stack([(input_ids == token).any(1) for token in (FEMALE, MALE)], 1)


def causal_model():
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
