"""``torchgmc demo probability``: it runs, writes its files, and says what it measured."""

import json

import pytest
import torch

import torchgmc as gmc


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    from torchgmc_paper.demo import probability

    return probability.run(tmp_path_factory.mktemp("demo"), progress=False, setting=probability.QUICK)


def test_files_hold_what_was_measured(result):
    written = json.loads(result.files["results.json"].read_text())
    assert written["worst_deviation"]["GMC"] == result.audits["GMC"].max_violation
    assert written["fit"]["converged"] == result.report.converged
    assert "A probability that means the same in every group" in result.files["report.html"].read_text()
    assert result.files["reliability.png"].read_bytes()[:4] == b"\x89PNG"
    head = gmc.load(result.files["head.safetensors"])
    assert head.is_fitted and head.groups[1] == "young"


def test_the_audit_of_raw_probabilities_changes_nothing(result):
    """An audit by an identity head shows the probabilities' own Brier score."""
    from torchgmc_paper.demo import probability

    test = probability.draw(300, 5, 1.0)
    f = torch.rand(300, generator=torch.Generator().manual_seed(0))
    audit = probability._audit(f, test, probability.QUICK)
    assert abs(audit.cost["Brier score after"] - float((f - test.y.float()).square().mean())) < 1e-6


def test_command_line_lists_it(result):
    import io

    from rich.console import Console

    from torchgmc_paper.demo import DEMOS

    console = Console(width=80, record=True, file=io.StringIO())
    console.print(result)
    assert "rural at night" in console.export_text() and DEMOS["probability"] == "torchgmc_paper.demo.probability"
