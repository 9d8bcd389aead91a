"""Files: whole or not at all; JSON that every reader takes."""

import json
import math
import os
from pathlib import Path

import pytest

from torchgmc.engine.files import plain, write_file, write_json


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_file(tmp_path / "f", b"old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_file(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_file_has_the_usual_permissions(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    assert write_file(tmp_path / "f", b"").stat().st_mode == plain.stat().st_mode


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_file(tmp_path / "nowhere" / "f", b"")


def test_json_has_no_nan(tmp_path: Path) -> None:
    content = {"risk": [0.1, math.nan], "cost": {"loss": -math.inf}, "name": "NaN"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "f", content)
    assert list(tmp_path.iterdir()) == []
    found = json.loads(write_json(tmp_path / "f", plain(content)).read_text())
    assert found == {"risk": [0.1, None], "cost": {"loss": None}, "name": "NaN"}
