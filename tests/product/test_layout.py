"""Where tests lie: beside the module they test, and importable wherever another project installs a package `tests` too."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gmctest import HELPERS, PAPER, ROOT

TESTS = ROOT / "tests"
FILES = sorted(path for path in TESTS.rglob("test_*.py") if path.parent.name != "product")
#: Each imports `gmctest`, the last one `benchmarks` as well.
SAMPLE = [
    "tests/engine/test_search.py",
    "tests/heads/threshold/test_risks.py",
    "tests/test_baselines.py",
    "tests/product/test_soak.py",
]


def module_of(file: Path) -> str | None:
    """Of ``tests/audits/test_audit_files.py``: ``audit``, if ``torchgmc/audits`` has it. What follows is a topic."""
    paper = file.is_relative_to(TESTS / "paper")  # the second package
    folder = PAPER / "torchgmc_paper" / file.parent.relative_to(TESTS / "paper") if paper else None
    modules = {path.stem.lstrip("_") for path in (folder or ROOT / "torchgmc" / file.parent.relative_to(TESTS)).glob("*.py")}
    words = file.stem.split("_")[1:]
    return next((name for k in range(len(words), 0, -1) if (name := "_".join(words[:k])) in modules), None)


def imported(file: Path) -> set[str]:
    """First names of all modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("" if node.level else (node.module or "").split(".")[0])
    return found


def test_every_file_lies_where_its_module_lies() -> None:
    assert len(FILES) > 60
    lost = [str(file.relative_to(ROOT)) for file in FILES if module_of(file) is None]
    assert not lost, f"{lost}: name them after a module of the same folder in torchgmc, or move them to tests/product"
    assert module_of(TESTS / "audits/test_story.py") is None and module_of(TESTS / "audits/test_audit_story.py") == "audit"
    assert module_of(TESTS / "paper/test_story.py") is None and module_of(TESTS / "paper/datasets/test_faces.py") == "faces"


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_what_is_shared_is_imported_from_gmctest(folder: str) -> None:
    for file in (ROOT / folder).rglob("*.py"):
        wrong = {name for name in imported(file) if name in ("", "tests", "conftest") or name.startswith("test_")}
        assert not wrong, f"{file.relative_to(ROOT)} imports {wrong}; what tests share lies in {HELPERS.relative_to(ROOT)}/gmctest"


def test_packages_of_other_projects_are_not_in_the_way(tmp_path: Path) -> None:
    """Some install their `tests` at the top level, and a package there comes before a folder without `__init__.py`."""
    for name in ("tests", "benchmarks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))}
    program = "import sys, pytest; del sys.path[0]; sys.exit(pytest.main())"  # as the command `pytest`: without this folder
    words = ["-q", "-p", "no:cacheprovider", "-k", "errors or lattice or baseline_without", *SAMPLE]
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
