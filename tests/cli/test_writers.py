"""What a command writes: in blocks, whole or not at all."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchgmc.cli.tables import open_table
from torchgmc.cli.writers import write_rows


@pytest.mark.parametrize("suffix", ["npz", "safetensors", "parquet", "csv"])
def test_what_is_written_in_blocks_is_read_back(suffix: str, tmp_path: Path) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    rng = np.random.default_rng(0)
    for values in (rng.random((50, 3)).astype(np.float32), rng.integers(0, 9, 50), rng.random(50), rng.random((50, 2)) < 0.5):
        path = tmp_path / f"o.{suffix}"
        assert write_rows(path, "out", np.array_split(values, 7), 50) == values.shape
        joined = np.concatenate([block.arrays["out"] for block in open_table(path).blocks(["out"])])
        np.testing.assert_array_equal(joined.astype(values.dtype), values)
        assert suffix == "csv" or joined.dtype == values.dtype
    if suffix == "npz":
        np.testing.assert_array_equal(np.load(path)["out"], values)
    if suffix == "safetensors":
        from safetensors.numpy import load_file

        np.testing.assert_array_equal(load_file(path)["out"], values)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "o.npz"
    path.write_bytes(b"old")

    def broken() -> Any:
        yield np.zeros(3)
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        write_rows(path, "out", broken(), 6)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
