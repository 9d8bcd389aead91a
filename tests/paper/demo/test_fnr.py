"""``torchgmc demo fnr``: the run in a tiny setting, the files, the command."""

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch

import torchgmc as gmc
from gmctest import subprocess_env
from torchgmc_paper.demo.faces import GROUPS

pytest.importorskip("segmentation_models_pytorch")
pytest.importorskip("matplotlib")
pytest.importorskip("typer")
from torchgmc.cli import main
from torchgmc_paper.demo import fnr

FILES = {"report.html", "deviation.png", "masks.png", "thresholds.png", "results.json", "head.safetensors"}


# -- the run -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> fnr.DemoResult:
    threads = torch.get_num_threads()
    done = fnr.run(tmp_path_factory.mktemp("demo") / "new" / "folder", seed=1, setting=fnr.QUICK)
    assert torch.get_num_threads() == threads
    return done


def test_every_file_is_written_and_nothing_else(result: fnr.DemoResult) -> None:
    assert {path.name for path in result.out.iterdir()} == FILES == set(result.files)
    for name in ("deviation.png", "masks.png", "thresholds.png"):
        assert result.files[name].read_bytes().startswith(b"\x89PNG")


def test_the_report_has_the_certificate_and_fetches_nothing(result: fnr.DemoResult) -> None:
    page = result.files["report.html"].read_text(encoding="utf-8")
    assert escape(result.audits["GMC"].certificate) in page
    assert "http" not in page
    assert all(value.startswith("data:") for value in re.findall(r'(?:src|href|srcset)="([^"]*)"', page))
    assert all(escape(group) in page for group in GROUPS)


def test_the_audits_are_of_the_test_pictures(result: fnr.DemoResult) -> None:
    assert list(result.audits) == ["unprocessed", "conformal", "GMC"]
    for row in result.rows():
        for name, risk in row["risk"].items():
            assert row["deviation"][name] == pytest.approx(row["mass"] * (risk - result.setting.target), abs=1e-6)
    assert all(audit.num_examples == result.setting.num_test for audit in result.audits.values())
    assert all(0 <= value <= 1 for value in result.accuracy.values())


def test_the_saved_head_gives_the_thresholds_of_the_report(result: fnr.DemoResult) -> None:
    head = gmc.load(result.files["head.safetensors"])
    alone = torch.zeros(1, len(GROUPS), dtype=torch.bool)
    alone[0, 0] = True
    assert head.threshold(alone).item() == pytest.approx(result.thresholds["none of the groups"])


def test_results_are_strict_json(result: fnr.DemoResult) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    content = json.loads(result.files["results.json"].read_text(encoding="utf-8"), parse_constant=refuse)
    assert content["certificate"] == result.certificate
    assert [row["group"] for row in content["groups"]] == list(GROUPS)
    assert replace(result, accuracy={"GMC": float("nan")}).to_dict()["pixel_accuracy"] == {"GMC": None}


def test_the_table_fits_eighty_columns_and_needs_no_colour(result: fnr.DemoResult) -> None:
    from rich.console import Console

    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(result)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert all(group in text for group in GROUPS) and "!!" in text and "accuracy" in text


@pytest.mark.slow
def test_the_story(tmp_path: Path) -> None:
    """Conformal control breaks the promise for some group and the head comes much nearer, in a smaller setting."""
    done = fnr.run(tmp_path, setting=replace(fnr.Setting(), size=32, num_train=960, num_calibration=1500, num_test=2000))
    assert done.report.converged
    assert not done.audits["unprocessed"].holds and not done.audits["conformal"].holds
    assert not done.audits["GMC"].violated
    assert done.audits["GMC"].max_violation < 0.75 * done.audits["conformal"].max_violation


# -- the command line ----------------------------------------------------------------------------------------------------


def test_the_command_gives_the_same_result_as_the_function(result: fnr.DemoResult, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "torchgmc.cli"]
    command += ["demo", "fnr", "--quick", "--json", "--seed", "1", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=subprocess_env())
    assert (done.returncode, done.stderr) == (0, "")  # no progress bar in a pipe
    content: dict[str, Any] = json.loads(done.stdout)
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    assert content["worst_deviation"] == pytest.approx(
        {name: audit.max_violation for name, audit in result.audits.items()}, abs=1e-3
    )


def test_a_missing_extra_is_said_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    assert main(["demo", "--out", str(tmp_path / "out")]) == 2
    assert 'pip install "torchgmc[segmentation]"' in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
