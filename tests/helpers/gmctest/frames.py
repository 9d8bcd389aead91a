"""Tables that pandas wrote, as the command line reads them."""

from pathlib import Path

import numpy as np
import pytest


def houses(n=400, seed=0):
    """A frame with text, numbers and booleans, values missing in the first two."""
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(seed)
    frame = pandas.DataFrame(
        {
            "city": rng.choice(["Lyon", "Nice", None], n, p=[0.6, 0.3, 0.1]),
            "age": rng.normal(40, 15, n).round(1),
            "garden": rng.random(n) < 0.3,
        }
    )
    frame.loc[rng.random(n) < 0.1, "age"] = np.nan
    frame.loc[3, ["city", "age"]] = ["Nice", np.nan]
    frame["residual"] = np.abs(rng.normal(size=n))
    return frame


def write_frame(frame, path: Path) -> str:
    frame.to_csv(path, index=False) if path.suffix == ".csv" else frame.to_parquet(path)
    return str(path)


QUANTILE = ["quantile", "--target", "0.9", "--alpha", "0.02", "--scores", "residual"]
