"""Optional packages: the error names the extra to install."""

import importlib.util
import sys
from pathlib import Path

import pytest

from gmctest import PAPER
from torchgmc.engine import extras
from torchgmc.engine.extras import find_paper, require


def test_require_passes_on_what_it_cannot_explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_inside.py").write_text("import surely_not_installed_anywhere")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed_anywhere"):
        require("broken_inside", extra="report")
    with pytest.raises(ImportError, match=r'`surely_not_installed_anywhere` .* pip install "torchgmc\[text\]"'):
        require("surely_not_installed_anywhere.part", extra="text")


def test_the_second_package_is_found_or_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(PAPER)])
    find_paper()  # in a checkout that was not installed
    assert sys.path[0] == str(PAPER)
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "torchgmc/engine/extras.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"`torchgmc_paper`.* pip install --force-reinstall"):
        find_paper()


def test_demos_and_experiments_have_a_name_in_torchgmc() -> None:
    """Which notebooks use, and programs written before these were a second package."""
    import torchgmc.reproduce.measures
    from torchgmc.demo import DEMOS
    from torchgmc.demo.faces import draw
    from torchgmc.reproduce import EXPERIMENTS

    assert list(EXPERIMENTS) == ["fnr", "tree", "text"] and torchgmc.reproduce.measures
    assert set(DEMOS) == {"fnr", "text", "probability", "tree"} and len(draw(2, size=16).images) == 2
