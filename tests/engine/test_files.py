"""Files: whole or not at all; JSON that every reader takes."""

import json
import math
import os
import stat
from pathlib import Path

import pytest

from torchgmc.engine.files import harmless, plain, write_file, write_json


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


def test_a_file_that_is_there_keeps_its_permissions(tmp_path: Path) -> None:
    path = write_file(tmp_path / "private", b"old")
    path.chmod(0o600)
    assert stat.S_IMODE(write_file(path, b"new").stat().st_mode) == 0o600 and path.read_bytes() == b"new"


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    target, link = tmp_path / "disk" / "real", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(Path("disk") / "real")
    before = target.stat().st_ino
    write_file(link, b"new")
    assert link.is_symlink() and os.readlink(link) == os.path.join("disk", "real")
    assert target.read_bytes() == b"new" and target.stat().st_ino != before  # by a rename, beside the target
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["disk", "link", "real"]
    target.unlink()
    write_file(link, b"again")  # a link to nothing yet
    assert link.is_symlink() and target.read_bytes() == b"again"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")
def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a device or a pipe"):
        write_file(tmp_path / "pipe", b"text")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode) and [p.name for p in tmp_path.iterdir()] == ["pipe"]


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


def test_cells_that_a_spreadsheet_would_run() -> None:
    assert [harmless(cell) for cell in ("\r=x", "\t5", "--5", "-5", "+1e-3", "", "=")] == [
        *("'\r=x", "'\t5", "'--5", "-5", "+1e-3", "", "'="),
    ]
    assert harmless(-5) == -5 and harmless(None) is None
