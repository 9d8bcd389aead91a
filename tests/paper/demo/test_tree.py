"""``torchgmc demo tree``: it runs, writes its files, and says what it measured."""

import io
import json

import pytest
import torch

import torchgmc as gmc


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    from torchgmc_paper.demo import tree

    return tree.run(tmp_path_factory.mktemp("demo"), progress=False, setting=tree.QUICK)


def test_files_hold_what_was_measured(result):
    written = json.loads(result.files["results.json"].read_text())
    assert written["worst_deviation"]["GMC"] == result.audits["GMC"].max_violation
    assert written["fit"]["converged"] == result.report.converged
    assert "whatever the answer" in result.files["report.html"].read_text()
    assert result.files["deviation.png"].read_bytes()[:4] == b"\x89PNG"
    head = gmc.load(result.files["head.safetensors"])
    assert head.is_fitted and head.names(torch.tensor([0])) == ["Cancer"]


def test_rows_are_the_coverage_of_the_saved_head(result):
    from torchgmc_paper.demo import tree
    from torchgmc_paper.demo.progress import Bar

    head = gmc.load(result.files["head.safetensors"])
    setting = result.setting
    train = tree.draw(setting.num_train, 0, 0, setting.features, used=False)
    test = tree.draw(setting.num_test, 2, 0, setting.features)
    model = tree.train_network(train, setting, 0, Bar())
    with torch.inference_mode():
        probs = model(test[0]).softmax(1)
        nodes = head(probs)
    covered = head.leaves(nodes).gather(1, test[1][:, None])[:, 0]
    for row in result.rows():
        inside = torch.isin(nodes, torch.tensor(head.sets[row["set"]]))
        assert row["mass"]["GMC"] == pytest.approx(inside.double().mean().item())
        assert row["coverage"]["GMC"] == pytest.approx(covered[inside].double().mean().item())


def test_terminal_table(result):
    from rich.console import Console

    console = Console(width=80, record=True, file=io.StringIO())
    console.print(result)
    shown = console.export_text()
    assert "Psychology" in shown and "answers the root" in shown


def test_command_line_lists_it():
    from torchgmc_paper.demo import DEMOS

    assert DEMOS["tree"] == "torchgmc_paper.demo.tree"
