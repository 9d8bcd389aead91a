"""Files larger than memory are read in blocks."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gmctest.cli_files import FORMATS, images, write
from torchgmc.cli import tables
from torchgmc.cli.tables import open_table


@pytest.mark.parametrize("suffix", FORMATS)
def test_blocks_are_small_and_add_up_to_the_file(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    arrays = images(500, 0)
    table = open_table(write(tmp_path / f"d.{suffix}", arrays))
    monkeypatch.setattr(tables, "BLOCK", 3000)
    names = ["scores", "masks", "site"]
    assert table.count(names) == 500 and set(names) <= set(table.names)
    for rows in (None, 1, 7, 500, 1000):
        blocks = list(table.blocks(names, [], rows))
        assert [block.start for block in blocks[1:]] == [block.stop for block in blocks[:-1]]
        assert (blocks[0].start, blocks[-1].stop) == (0, 500)
        largest = max(block.stop - block.start for block in blocks)
        assert largest <= (rows or 200)
        for name in names:
            joined = np.concatenate([block.arrays[name] for block in blocks])
            assert joined.shape == arrays[name].shape
            np.testing.assert_array_equal(joined.astype(np.float64), arrays[name].astype(np.float64))


@pytest.mark.parametrize("how", [np.savez, np.savez_compressed])
def test_reading_an_npz_does_not_hold_it_in_memory(how: Any, tmp_path: Path) -> None:
    values = np.tile(np.arange(1000, dtype=np.float32), (5000, 1))  # 20 MB
    how(tmp_path / "d.npz", values=values)
    del values
    table = open_table(tmp_path / "d.npz")
    tracemalloc.start()  # numpy reports to it
    total = sum(float(block.arrays["values"].sum(dtype=np.float64)) for block in table.blocks(["values"], [], 100))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 5000 * 1000 * 999 / 2
    assert peak < 4e6  # blocks are 0.4 MB; one is made while another is looked at


def test_arrays_in_fortran_order_and_of_foreign_bytes(tmp_path: Path) -> None:
    values = np.arange(60.0).reshape(20, 3)
    np.savez(tmp_path / "d.npz", f=np.asfortranarray(values), big=values.astype(">f4"), half=values.astype(np.float16))
    for block in open_table(tmp_path / "d.npz").blocks(["f", "big", "half"], [], 6):
        for name in ("f", "big", "half"):
            np.testing.assert_array_equal(block.arrays[name].astype(np.float64), values[block.start : block.stop])
            torch.from_numpy(block.arrays[name])  # the machine's own bytes
