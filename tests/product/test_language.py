"""notebooks/language.md: a causal and a masked model from lists of words to counted text, as it stands there."""

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import torchgmc as gmc
from gmctest import ROOT
from gmctest.bert import masked_lm, wordpiece

transformers = pytest.importorskip("transformers")

PAGE = (ROOT / "notebooks" / "language.md").read_text(encoding="utf-8")
VERBS, RESTS = ("met", "saw", "and"), ("the", "a", "his", "her")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def run(blocks: list[str], names: dict[str, Any]) -> dict[str, Any]:
    for block in blocks:
        exec(compile(block, "language.md", "exec"), names)
    return names


@pytest.mark.filterwarnings("ignore:.*represented by their first piece. workman")
def test_a_causal_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = wordpiece()
    torch.manual_seed(0)
    size = {"vocab_size": len(tokenizer), "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    size |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.3}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=2, eos_token_id=3, pad_token_id=0))
    jobs = {"she": ["nurse .", "nurse and", "doctor .", "work .", "work ##man"], "he": ["doctor .", "doctor and", "work ##man"]}
    texts = [(f"{who} {verb} {rest}", job) for who in jobs for verb in VERBS for rest in RESTS for job in jobs[who]]
    ids = torch.tensor([[*tokenizer.encode(text), *tokenizer.convert_tokens_to_ids(job.split()), 3] for text, job in texts])
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(80):
        logits = model(ids).logits[:, 4:-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 5:].flatten()).backward()
        optimiser.step()
        optimiser.zero_grad()
    model.save_pretrained("my-model")
    tokenizer.save_pretrained("my-model")
    names = run(BLOCKS[:3], {})
    assert len([line for line in BLOCKS[1].splitlines() if line.strip()]) <= 10
    head = names["head"]
    assert tokenizer.convert_ids_to_tokens(head.attributes["jobs"]) == ["work", "doctor", "engineer"]
    assert head.report.reached == "alpha" and float(head.report.violations_before.abs().max()) > 0.01
    assert [len(text) for text in names["texts"]] == [1, 1] and names["texts"][0][0]["generated_text"].startswith("she met the")
    before, after = (names["exact"][name].audit(0.005) for name in ("before", "after"))
    # First tokens were calibrated to 0.005. Whole words gain, and the audit tells how little: "work" is a word too.
    assert 0.01 < after.max_violation < 0.7 * before.max_violation
    counted, exact = names["said"]["after"].next, names["exact"]["after"]
    interval = counted.frequencies()["jobs"]["female"]
    assert interval.low < float(exact.rates[exact.member[:, 0]].mean()) < interval.high
    shown = capsys.readouterr().out
    assert shown.count("before") == 2 and f"{interval!r}" in shown


def check(names: dict[str, Any]) -> None:
    head, audit = names["head"], names["audit"]
    assert head.is_fitted and head.groups == ["female", "male"] and len(audit.table["group"]) == 2 * len(head.attributes)
    after = {(row["group"], row["what"]): row["estimate"] for row in audit.rows()}
    columns = (names["table"][key] for key in ("group", "list", "after"))
    for group, name, bias in zip(*columns, strict=True):
        assert after[group, name] == pytest.approx(bias, abs=1e-9)


def test_a_masked_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny model in the place of the one the page was measured on."""
    model, tokenizer = masked_lm()
    model.save_pretrained(tmp_path / "text" / "mlm")
    tokenizer.save_pretrained(tmp_path / "text" / "mlm")
    starts = [f"{who} {verb} {what}" for who in ("she", "he", "mary", "sir") for verb in ("met", "saw") for what in "abcdefgh"]
    with gzip.open(tmp_path / "text" / "prompts.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": f"{start} [MASK]", "word": "doctor"}) + "\n" for start in starts)
    monkeypatch.setenv("TORCHGMC_DATA", str(tmp_path))
    lists = {"jobs": ["doctor", "engineer"], "care": ["nurse"]}
    monkeypatch.setattr(gmc.text.words, "ATTRIBUTES", lists)
    monkeypatch.setattr(gmc.text.words, "INDICATORS", {"female": ["she", "mary"], "male": ["he", "sir"]})
    names = run(BLOCKS[3:], {"torch": torch, "gmc": gmc, "AutoTokenizer": transformers.AutoTokenizer})
    check(names)
    assert sorted(names["halves"][0] + names["halves"][1]) == sorted(f"{start} [MASK]" for start in starts)


@pytest.mark.slow
@pytest.mark.skipif("TORCHGMC_DATA" not in os.environ, reason="TORCHGMC_DATA names the folder of the experiments' data")
@pytest.mark.filterwarnings("ignore:14 words are split")
def test_the_masked_model_of_the_page() -> None:
    names = run(BLOCKS[3:], {"torch": torch, "gmc": gmc, "AutoTokenizer": transformers.AutoTokenizer})
    check(names)
