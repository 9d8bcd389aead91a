"""Which arrays of a file a task reads."""

import pytest

from gmctest.frames import write_frame
from torchgmc.cli import main


def test_how_columns_make_a_matrix_is_said(tmp_path, capsys):
    pandas = pytest.importorskip("pandas")
    data = write_frame(pandas.DataFrame({"p_cat": [0.5, 0.5], "p_dog": [0.5, 0.5], "label": [0, 1]}), tmp_path / "d.csv")
    (tmp_path / "tree.json").write_text('["cat", "dog"]')
    words = ["tree", "--target", "0.9", "--alpha", "0.1", "--tree", str(tmp_path / "tree.json")]
    assert main(["calibrate", *words, data, "--out", str(tmp_path / "h.safetensors")]) == 2
    assert "--scores NAME (columns NAME[0], NAME[1], ... make a matrix)." in capsys.readouterr().err
