"""`torchgmc demo`: the pictures, the run in a tiny setting, the files, the command line."""

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
from torchgmc.demo.faces import CHUNK, GROUPS, draw
from torchgmc.engine.extras import require

pytest.importorskip("segmentation_models_pytorch")
pytest.importorskip("matplotlib")
pytest.importorskip("typer")
from torchgmc.cli import main
from torchgmc.demo import fnr, stage

FILES = {"report.html", "deviation.png", "masks.png", "thresholds.png", "results.json", "head.safetensors"}


# -- pictures ------------------------------------------------------------------------------------------------------------


def test_pictures_have_the_promised_shapes() -> None:
    faces = draw(CHUNK + 5, 24)
    assert faces.images.shape == (CHUNK + 5, 3, 24, 24) and faces.images.dtype == torch.float32
    assert faces.masks.shape == (CHUNK + 5, 24, 24) and faces.masks.dtype == torch.bool
    assert faces.groups.shape == (CHUNK + 5, len(GROUPS)) and faces.groups.dtype == torch.bool
    assert faces.images.min() >= 0 and faces.images.max() <= 1 and faces.images.isfinite().all()
    assert faces.masks.flatten(1).any(1).all() and not faces.masks.flatten(1).all(1).any()


def test_pictures_depend_on_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    first = draw(70, 16, seed=3)
    torch.manual_seed(99)
    again, other = draw(70, 16, seed=3), draw(70, 16, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.images, other.images)
    torch.random.set_rng_state(before)
    draw(3, 16)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_groups_overlap_and_differ_in_size() -> None:
    groups = draw(2000, 8).groups
    assert groups[:, 0].all()
    both = groups[:, 1:].float().T @ groups[:, 1:].float()
    assert (both > 0).all(), "every pair of groups meets somewhere"
    share = groups[:, 1:].float().mean(0)
    assert (share > 0.05).all() and share.max() > 2 * share.min()


def test_the_groups_change_the_picture() -> None:
    faces = draw(400, 16)
    light = faces.images.mean((1, 2, 3))
    dim, contrast = faces.groups[:, 1], faces.groups[:, 4]
    assert light[dim].mean() < 0.7 * light[~dim].mean()
    inside, outside = faces.masks.float(), (~faces.masks).float()
    means = [(faces.images * m[:, None]).sum((2, 3)) / m.sum((1, 2))[:, None] for m in (inside, outside)]
    gap = (means[0] - means[1]).abs().mean(1)
    assert gap[contrast & ~dim].mean() < 0.7 * gap[~contrast & ~dim].mean()


def test_prevalence_thins_the_groups() -> None:
    assert not draw(300, 8, prevalence=0.0).groups[:, 1:].any()
    assert draw(2000, 8, prevalence=0.2).groups[:, 1:].sum() < 0.4 * draw(2000, 8).groups[:, 1:].sum()


def test_no_pictures_and_bad_sizes() -> None:
    assert draw(0, 16).images.shape == (0, 3, 16, 16)
    with pytest.raises(ValueError, match="`num` must be >= 0 and `size` >= 8, got -1 and 64"):
        draw(-1)
    with pytest.raises(ValueError, match="got 1 and 4"):
        draw(1, 4)


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
    assert stage._finite({"a": [float("nan"), 1.0]}) == {"a": [None, 1.0]}


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
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")  # no progress bar in a pipe
    content: dict[str, Any] = json.loads(done.stdout)
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    assert content["worst_deviation"] == pytest.approx(
        {name: audit.max_violation for name, audit in result.audits.items()}, abs=1e-3
    )


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"torchgmc {gmc.__version__}\n"
    assert main([]) == 0 and main(["demo", "--help"]) == 0
    assert "Example: torchgmc demo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo", "nothing"], "there is no demo 'nothing'; there is fnr"),
        (["demo", "--seed", "one"], "'--seed'"),
        (["demo", "--seed", "-1"], "'--seed'"),
        (["demo", "--out"], "--out"),
        (["demo", "--out", __file__], "is a file; give a folder"),
        (["--unknown"], "--unknown"),
        (["unknown"], "unknown"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and message in printed.err
    assert printed.err.startswith("torchgmc: ") and printed.err.count("\n") == 1


def test_an_interruption_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fnr, "run", interrupt)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err.strip() == "torchgmc: interrupted"


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_package_of_the_command_line_names_the_extra(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("torchgmc.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["--version"]) == 2
    assert (
        capsys.readouterr().err == f'torchgmc: `{package}` is needed here and is not installed: pip install "torchgmc[cli]"\n'
    )


def test_a_missing_extra_is_said_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    assert main(["demo", "--out", str(tmp_path / "out")]) == 2
    assert 'pip install "torchgmc[segmentation]"' in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_require_passes_on_what_it_cannot_explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_inside.py").write_text("import surely_not_installed_anywhere")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed_anywhere"):
        require("broken_inside", extra="report")
    with pytest.raises(ImportError, match=r'`surely_not_installed_anywhere` .* pip install "torchgmc\[text\]"'):
        require("surely_not_installed_anywhere.part", extra="text")
