"""The notebooks run from top to bottom, and what is committed is what they show."""

import os
import re
import subprocess
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from gmctest import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

FOLDER = ROOT / "notebooks"
NAMES = [
    "1_quickstart",
    "2_segmentation",
    "3_label_tree",
    "4_language_model",
    "5_multicalibration_and_quantiles",
    "6_bring_your_own_s",
    "7_train_through_the_promise",
]
SECONDS = 600  # for a notebook, on a machine that does other things too


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def images(notebook: Any) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def text(output: Any) -> str:
    """Everything an output shows, but images."""
    data = output.get("data", {})
    return "".join([output.get("text", ""), *(str(v) for kind, v in data.items() if kind.startswith("text/"))])


def test_every_notebook_is_listed() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES
    index = (FOLDER / "README.md").read_text()
    assert all(f"({name}.ipynb)" in index for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_committed_outputs_are_clean(name: str) -> None:
    """Images in them, no error, no warning, no path or time of the machine that ran them; small."""
    notebook = read(name)
    nbformat.validate(notebook)
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 400_000
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run from top to bottom, once"
    assert all("execution" not in cell.metadata for cell in notebook.cells)
    assert images(notebook) >= 3
    for output in outputs(notebook):
        assert output.output_type != "error" and output.get("name") != "stderr", output
        assert not re.search(r"Warning|Traceback|/(home|tmp|root|work|usr|opt)/", text(output)), text(output)
        if "image/png" in output.get("data", {}):
            assert b64decode(output.data["image/png"]).startswith(b"\x89PNG")


@pytest.mark.parametrize("name", NAMES)
def test_links_between_notebooks_lead_somewhere(name: str) -> None:
    for cell in read(name).cells:
        for link in re.findall(r"\]\(([^)#:]+)\)", cell.source if cell.cell_type == "markdown" else ""):
            assert (FOLDER / link).exists(), link


@pytest.fixture(scope="module")
def fonts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of matplotlib's with a list of fonts made now: an old one names fonts that are gone, which is said on stderr."""
    folder = tmp_path_factory.mktemp("matplotlib")
    env = {**os.environ, "MPLCONFIGDIR": str(folder)}
    subprocess.run([sys.executable, "-c", "import matplotlib.font_manager"], env=env, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs(name: str, fonts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell without an error or a warning, in an empty folder, without data; the same outputs in kind as committed."""
    committed = read(name)
    fresh = read(name)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    monkeypatch.delenv("TORCHGMC_DATA", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("MPLCONFIGDIR", str(fonts))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # other tests run beside it
    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):  # nothing of the user's own, nothing left behind
        monkeypatch.setenv(variable, str(tmp_path / variable))
    work = tmp_path / "work"
    work.mkdir()
    options = {
        "timeout": SECONDS,
        "kernel_name": "python3",
        "coalesce_streams": True,
    }  # a busy machine flushes prints in pieces
    client = nbclient.NotebookClient(fresh, resources={"metadata": {"path": str(work)}}, **options)
    client.execute()  # raises CellExecutionError with the traceback

    assert [cell.source for cell in fresh.cells] == [cell.source for cell in committed.cells]
    noisy = [text(output) for output in outputs(fresh) if output.output_type == "error" or output.get("name") == "stderr"]
    assert not noisy
    for again, before in zip(fresh.cells, committed.cells, strict=True):
        if before.cell_type == "code":
            kinds = [[sorted(set(o.get("data", {})) - {"text/plain"}) for o in cell.outputs] for cell in (again, before)]
            assert kinds[0] == kinds[1], before.source
