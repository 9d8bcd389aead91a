"""The text demo, in its smallest size, and on a model folder."""

import io
import json

import pytest
import torch

import torchgmc as gmc
from gmctest.bert import bert_tokenizer

transformers = pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from rich.console import Console  # noqa: E402

from torchgmc_paper.demo import text  # noqa: E402


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return text.run(tmp_path_factory.mktemp("demo"), setting=text.QUICK, progress=False)


def test_files_and_figures(result):
    for path in result.files.values():
        assert path.stat().st_size > 0
    found = json.loads(result.files["results.json"].read_text())
    assert found["fit"]["converged"] is True
    assert found["worst_deviation"]["kl"] == result.audits["kl"].max_violation
    assert found["quality"]["kl"]["zeros"] == 0
    assert found["quality"]["unprocessed"]["KL"] == pytest.approx(0.0, abs=1e-6)
    head = gmc.load(result.files["head.safetensors"])
    assert head.attributes.keys() == {"male jobs", "female jobs"}
    assert "<img" in result.files["report.html"].read_text()
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(result)
    shown = console.export_text()
    assert "unprocessed" in shown and "NLL of masked words" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_same_seed_gives_the_same_result(result, tmp_path):
    again = text.run(tmp_path, setting=text.QUICK, progress=False)
    assert again.rows() == result.rows()


def test_a_model_folder(tmp_path):
    words = gmc.text.words
    every = {w.lower() for lists in (words.INDICATORS, words.ATTRIBUTES) for v in lists.values() for w in v}
    every |= {w.strip(".").lower() for t in words.TEMPLATES for w in t.split()} | {"."}
    tokenizer = bert_tokenizer(sorted(every - {"[mask]", "{}"}))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    tokenizer.save_pretrained(tmp_path / "model")
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "model")
    result = text.run(tmp_path / "out", setting=text.QUICK, progress=False, model=tmp_path / "model")
    assert result.model == "model" and len(result.rows()) == 12
    assert result.report.details["examples"] == 174
    with pytest.raises(FileNotFoundError, match="`model`"):
        text.run(tmp_path / "out", setting=text.QUICK, progress=False, model=tmp_path / "none")
