"""Tables of columns: what a csv file may look like, and which errors name the row."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from torchgmc.cli.arrow import CsvTable
from torchgmc.cli.tables import open_table


def table(tmp_path: Path, text: str | bytes) -> CsvTable:
    (tmp_path / "d.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    found = open_table(tmp_path / "d.csv")
    assert isinstance(found, CsvTable)
    return found


def values(found: CsvTable, numbers: list[str], labels: list[str], rows: int | None = None) -> dict[str, list[Any]]:
    blocks = list(found.blocks(numbers, labels, rows))
    return {name: [v for block in blocks for v in block.arrays[name].tolist()] for name in (*numbers, *labels)}


@pytest.mark.parametrize(
    "text",
    [
        "x,name\n1,a\n2,b\n",
        "x,name\n1,a\n2,b",
        "x,name\r\n1,a\r\n2,b\r\n",
        b"\xef\xbb\xbfx,name\n1,a\n2,b\n",
        ' x , name\n1,"a"\n\n2,b\n\n',
        '"x",name\n" 1","a"\n"2",b\n',
    ],
)
def test_forms_of_a_file(tmp_path: Path, text: str | bytes) -> None:
    found = table(tmp_path, text)
    assert found.names == ["x", "name"] and found.count(["x"]) == 2
    assert values(found, ["x"], ["name"]) == {"x": [1.0, 2.0], "name": ["a", "b"]}


def test_cells(tmp_path: Path) -> None:
    found = table(tmp_path, 'x,name\n1e-3,"a, ""b""\nc"\n-inf,\ntrue,""\n +4 ,=1+1\n')
    assert found.count(["x"]) == 4
    for rows in (None, 1, 3):
        assert values(found, ["x"], ["name"], rows) == {
            "x": [1e-3, -np.inf, 1.0, 4.0],
            "name": ['a, "b"\nc', None, None, "=1+1"],
        }
    assert values(found, [], ["x"])["x"] == ["1e-3", "-inf", "true", " +4 "]  # labels as they are written


def test_a_header_over_two_lines(tmp_path: Path) -> None:
    found = table(tmp_path, '"x\ny",z\n1,2\n3\n')
    assert found.names == ["x\ny", "z"]
    with pytest.raises(ValueError, match="has 1 cells in row 1, but 2 columns"):
        found.count(["z"])


@pytest.mark.parametrize("text", ["x,y\n", "x,y", "x,y\n\n\n"])
def test_no_rows(tmp_path: Path, text: str) -> None:
    found = table(tmp_path, text)
    assert found.count(["x"]) == 0 and list(found.blocks(["x"], ["y"])) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x,y\n1,2\n3,4\n5\n", "'.*d.csv' has 1 cells in row 2, but 2 columns"),
        ("x,y\n1,2\n\n3,4,5\n", "'.*d.csv' has 3 cells in row 1, but 2 columns"),
        ("x,y\n1,2\n3,4\nfive,6\n", "'x' has 'five' in row 2; it must hold numbers"),
        ("x,y\n1,2\n3,4\n,6\n", "'x' has no value in row 2; it must hold numbers"),
        (b"x,y\n1,2\n\xff,4\n", "d.csv' cannot be read .*row #3.*UTF8|d.csv' is not UTF-8 text"),
        (b"\xff,y\n1,2\n", "d.csv' is not UTF-8 text"),
        ("\n1,2\n", "is empty; its first line must name the columns"),
        ("x,x\n1,2\n", "has two columns named 'x'"),
    ],
)
def test_errors_name_the_row(tmp_path: Path, text: str | bytes, message: str) -> None:
    for rows in (None, 1, 2):
        with pytest.raises(ValueError, match=message):
            values(table(tmp_path, text), ["x"], ["y"], rows)


def test_a_long_line(tmp_path: Path) -> None:
    """Logits of a vocabulary: 50,000 cells, more than a megabyte, in each line."""
    width = 50_000
    row = np.random.default_rng(0).random(width)
    lines = [",".join(f"logits[{k}]" for k in range(width)), *[",".join(map(repr, row.tolist()))] * 2]
    found = table(tmp_path, "\n".join(lines))
    (block,) = found.blocks(["logits"])
    assert block.arrays["logits"].shape == (2, width) and np.array_equal(block.arrays["logits"][1], row)


def test_a_line_that_is_too_long_is_said(tmp_path: Path) -> None:
    found = table(tmp_path, "x,y\n1,2\n3," + "z" * (3 << 20) + "\n")
    with pytest.raises(ValueError, match="d.csv' has a line longer than 1048576 bytes; write .parquet or .npz"):
        found.count(["x"])


def test_a_large_file_is_not_held_in_memory(tmp_path: Path) -> None:
    line = ",".join(["0.123456789"] * 20) + "\n"
    with (tmp_path / "d.csv").open("w") as file:
        file.write(",".join(f"x[{k}]" for k in range(20)) + "\n")
        for _ in range(20):
            file.write(line * 20_000)  # 96 MB in all
    import pyarrow

    found = open_table(tmp_path / "d.csv")
    before = pyarrow.total_allocated_bytes()
    tracemalloc.start()
    total = most = 0
    for block in found.blocks(["x"], [], 10_000):
        total += len(block.arrays["x"])
        most = max(most, pyarrow.total_allocated_bytes() - before)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 400_000 and peak < 16e6  # numpy: blocks of 1.6 MB
    assert most < 60e6  # pyarrow: it reads 32 MB ahead, and keeps offsets of cells


def test_lists_in_a_parquet_file(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    def write(column: list[Any]) -> Any:
        pyarrow.parquet.write_table(pyarrow.table({"x": column}), tmp_path / "d.parquet")
        return open_table(tmp_path / "d.parquet")

    (block,) = write([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]).blocks(["x"])
    assert block.arrays["x"].tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    with pytest.raises(ValueError, match="'x' holds lists of different lengths"):
        list(write([[1, 2], [3]]).blocks(["x"]))
    with pytest.raises(ValueError, match="'x' has no value in row 1"):
        list(write([1.0, None]).blocks(["x"]))


def test_a_wrong_row_is_told_whatever_its_text_and_wherever_it_is(tmp_path: Path) -> None:
    odd = "Row #9: Expected 3 columns; got 7 straddling"
    found = table(tmp_path, "x,y\n" + f"1.25,{odd}\n" * 60_000 + f"2,{odd},Row #9: Expected 3 columns, got 7\n" + "3,4\n" * 300_000)
    with pytest.raises(ValueError, match="d.csv' has 4 cells in row 60000, but 2 columns"):
        found.count(["x"])


def test_csv_files_are_read_without_a_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads ahead may still hold one when Python exits, which ends the process: "terminate called ..."."""
    import pyarrow
    import pyarrow.csv

    options = []
    opened = pyarrow.csv.open_csv
    monkeypatch.setattr(pyarrow.csv, "open_csv", lambda *parts: options.append(parts[2]) or opened(*parts))
    assert table(tmp_path, "x,y\n1,2\n").count(["x"]) == 1
    assert [one.invalid_row_handler for one in options] == [None]

    def fails(*_: Any) -> None:
        raise pyarrow.ArrowInvalid("CSV parse error: Expected 2 columns, got 1: 5")  # no row is told

    monkeypatch.setattr(pyarrow.csv, "open_csv", fails)
    with pytest.raises(ValueError, match="d.csv' cannot be read .truncated or damaged.*Expected 2 columns, got 1"):
        table(tmp_path, "x,y\n1,2\n").count(["x"])
