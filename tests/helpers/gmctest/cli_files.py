"""Data of every task in every format that the command line reads, what Python makes of them, and the program."""

import csv
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import torchgmc as gmc
from gmctest import subprocess_env
from torchgmc.cli import main
from torchgmc.cli.tables import open_table

FORMATS = ("npz", "safetensors", "parquet", "csv")
SEX = np.array(["f", "m"])
TREE = {"x": ["x1", "x2"], "y": ["y1", "y2", "y3"]}
LISTS = {"jobs": [3, 4], "praise": [4, 5, 9]}
N = 240  # rows of a file
Arrays = dict[str, Any]


def people(n: int, seed: int) -> tuple[Arrays, np.random.Generator]:
    rng = np.random.default_rng(seed)
    return {"sex": rng.integers(0, 2, n), "site": rng.integers(1, 4, n)}, rng


def images(n: int, seed: int) -> Arrays:
    who, rng = people(n, seed)
    masks = rng.random((n, 12)) < 0.4
    z = 2.0 * masks + rng.normal(size=masks.shape) - 1.0 - who["sex"][:, None]
    return {"scores": (1 / (1 + np.exp(-z))).astype(np.float32), "masks": masks, **who}


def documents(n: int, seed: int) -> Arrays:
    who, rng = people(n, seed)
    labels = rng.integers(0, 5, n)
    logits = rng.normal(size=(n, 5)) + 1.5 * np.eye(5)[labels]
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return {"probs": probs.astype(np.float32), "labels": labels, **who}


def prompts(n: int, seed: int) -> Arrays:
    who, rng = people(n, seed)
    logits = rng.normal(size=(n, 20))
    logits[:, 3:6] += 1.5 * who["sex"][:, None]
    return {"logits": logits.astype(np.float32), "labels": rng.integers(0, 20, n), **who}


def events(n: int, seed: int) -> Arrays:
    who, rng = people(n, seed)
    logits = rng.normal(size=n) * 1.5
    y = rng.random(n) < 1 / (1 + np.exp(-logits - who["sex"]))
    return {"probs": (1 / (1 + np.exp(-logits))).astype(np.float32), "y": y, **who}


def residuals(n: int, seed: int) -> Arrays:
    who, rng = people(n, seed)
    return {"scores": np.abs(rng.normal(size=n) * (1 + who["sex"])).astype(np.float32), **who}


class Case(NamedTuple):
    """A task: its data, the words of the command line, the head in Python, and the arguments of observe and forward."""

    data: Callable[[int, int], Arrays]
    words: tuple[str, ...]
    make: Callable[[list[str]], gmc.Head]
    observe: tuple[str, ...]
    output: str


CASES: Mapping[str, Case] = {
    "fnr": Case(
        images, ("--target", "0.1", "--alpha", "0.02"), lambda g: gmc.ThresholdHead(0.1, 0.02, g), ("scores", "masks"), "masks"
    ),
    "tree": Case(
        documents,
        ("--target", "0.8", "--alpha", "0.1", "--tree", "tree.json"),
        lambda g: gmc.TreeHead(TREE, 0.8, 0.1, groups=g),
        ("probs", "labels"),
        "nodes",
    ),
    "text": Case(
        prompts,
        ("--alpha", "0.005", "--attributes", "words.json"),
        lambda g: gmc.DistributionHead(LISTS, 0.005, g),
        ("logits",),
        "log_probs",
    ),
    "probability": Case(
        events, ("--alpha", "0.02", "--bins", "4"), lambda g: gmc.ProbabilityHead(0.02, g, bins=4), ("probs", "y"), "probs"
    ),
    "quantile": Case(
        residuals, ("--target", "0.8", "--alpha", "0.02"), lambda g: gmc.QuantileHead(0.8, 0.02, g), ("scores",), "thresholds"
    ),
}


def write(path: Path, arrays: Arrays) -> Path:
    """Arrays in the format of the path's ending."""
    if path.suffix == ".npz":
        np.savez_compressed(path, **arrays)
    elif path.suffix == ".safetensors":
        from safetensors.numpy import save_file

        save_file({name: np.ascontiguousarray(value) for name, value in arrays.items()}, path)
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        columns = {name: list(value) if value.ndim > 1 else value for name, value in arrays.items()}
        pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=50)
    else:
        flat = {}
        for name, value in arrays.items():
            if value.ndim > 1:
                flat |= {f"{name}[{k}]": value[:, k] for k in range(value.shape[1])}
            else:
                flat[name] = value
        with path.open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(flat)
            lines.writerows(zip(*(column.tolist() for column in flat.values()), strict=True))
    return path


def side_files(folder: Path) -> None:
    """The tree and the lists, beside the data."""
    (folder / "tree.json").write_text(json.dumps(TREE))
    (folder / "words.json").write_text(json.dumps(LISTS))


def command(name: str, folder: Path, words: tuple[str, ...]) -> list[str]:
    """The task and its words, with the paths of side files filled in."""
    return [name, *(str(folder / word) if word.endswith(".json") else word for word in words)]


def tensors(arrays: Arrays, names: tuple[str, ...]) -> list[torch.Tensor]:
    return [torch.from_numpy(arrays[name]) for name in names]


def groups(arrays: Arrays, intersections: int = 1) -> gmc.Groups:
    return gmc.Groups.from_columns({k: arrays[k] for k in ("sex", "site")}, intersections=intersections)


def calibrated(tmp_path: Path, arrays: Arrays, *words: str) -> tuple[int, gmc.Head]:
    """Exit code of `torchgmc calibrate` on these arrays, and the head it saved."""
    data = write(tmp_path / "d.npz", arrays)
    code = main(["calibrate", *words, str(data), "--out", str(tmp_path / "h.safetensors")])
    return code, gmc.load(tmp_path / "h.safetensors")


FNR = ("fnr", "--target", "0.1", "--alpha", "0.02")


def program(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The program as a user runs it."""
    line = [sys.executable, "-W", "error", "-m", "torchgmc", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=cwd, env=subprocess_env())


def read_array(path: Path, name: str) -> Any:
    """One array of a file of any format."""
    return np.concatenate([block.arrays[name] for block in open_table(path).blocks([name])])
