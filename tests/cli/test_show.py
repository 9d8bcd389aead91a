"""What the command line shows, on a terminal and in a pipe."""

import sys
from pathlib import Path

import numpy as np
import pytest

from gmctest.cli_files import FNR, N, calibrated, images
from torchgmc.cli import main


def test_the_table_is_whole_and_needs_no_colour(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = images(N, 0)
    arrays["site"] = np.array(["a clinic with a very long name [north], building 3, second floor", "b", "c"])[arrays["site"] - 1]
    calibrated(tmp_path, arrays, *FNR[:-1], "0.01", "--groups", "sex,site")  # fewer examples than would certify it
    shown = capsys.readouterr().out
    assert "site=a clinic with a very long name [north], building 3, second floor" in shown and "\x1b" not in shown
    words = [str(tmp_path / "h.safetensors"), str(tmp_path / "d.npz"), "--rows", "2", "--require", "nothing"]
    assert main(["audit", *words]) == 0
    shown = capsys.readouterr().out
    assert "and 4 more" in shown and "With 95 % confidence" in shown and "that would certify" in shown


def test_a_bar_on_a_terminal_and_none_in_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from torchgmc.cli import show

    with show.progress("observe", 3) as advance:
        advance(3)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with show.progress("observe", 3) as advance:
        advance(3)
    printed = capsys.readouterr()
    assert printed.out == "" and "observe" in printed.err
