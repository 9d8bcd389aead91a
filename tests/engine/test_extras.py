"""Optional packages: the error names the extra to install."""

from pathlib import Path

import pytest

from torchgmc.engine.extras import require


def test_require_passes_on_what_it_cannot_explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_inside.py").write_text("import surely_not_installed_anywhere")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed_anywhere"):
        require("broken_inside", extra="report")
    with pytest.raises(ImportError, match=r'`surely_not_installed_anywhere` .* pip install "torchgmc\[text\]"'):
        require("surely_not_installed_anywhere.part", extra="text")
