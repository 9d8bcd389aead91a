"""Damaged files: every truncation and many flips of heads of every kind are refused, or change nothing; nothing is run."""

import os
import pickle
import random
from pathlib import Path

import pytest
import torch

import torchgmc as gmc
from gmctest import GOLDEN
from gmctest.heads_zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore:.*alphabetical order:UserWarning")
FILES = sorted(p for p in GOLDEN.glob("*.safetensors") if "expected" not in p.name)
SMALLEST = min(FILES, key=lambda p: p.stat().st_size)
OPTIONS = {entry.name: entry.loading for entry in ZOO}


def options(path: Path) -> dict[str, object]:
    return dict(OPTIONS[path.name.removesuffix("-0.1.safetensors")])


def same(a: gmc.Head, b: gmc.Head) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    equal = ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    return type(a) is type(b) and a.config() == b.config() and equal


def refused_or_same(path: Path, head: gmc.Head, extra: dict[str, object]) -> bool:
    """Was it refused? Any other error, or another head, is a fault."""
    try:
        loaded = gmc.load(path, **extra)
    except ValueError:
        return True
    assert same(loaded, head)
    return False


@pytest.mark.parametrize("saved", FILES, ids=lambda p: p.stem)
def test_flipped_bits_are_refused_or_harmless(saved: Path, tmp_path: Path) -> None:
    head, data, path = gmc.load(saved, **options(saved)), saved.read_bytes(), tmp_path / "head.safetensors"
    dice = random.Random(saved.name)
    refused = 0
    for _ in range(150):
        changed = bytearray(data)
        for _ in range(dice.choice((1, 1, 2, 8))):
            changed[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(changed)
        refused += refused_or_same(path, head, options(saved))
    assert refused > 100


@pytest.mark.parametrize("saved", FILES, ids=lambda p: p.stem)
def test_other_damage_is_refused(saved: Path, tmp_path: Path) -> None:
    data, path, extra = saved.read_bytes(), tmp_path / "head.safetensors", options(saved)
    head = gmc.load(saved, **extra)
    dice = random.Random(saved.name)
    for _ in range(40):
        start, end = sorted(dice.sample(range(len(data)), 2))
        for damaged in (
            data[:start] + data[end:],  # a piece lost
            data[:end] + data[start:],  # a piece twice
            data[:start] + bytes(end - start) + data[end:],  # a piece of zeros
            data + dice.randbytes(dice.randrange(1, 9)),  # more at the end
            (dice.getrandbits(64)).to_bytes(8, "little") + data[8:],  # another length of the header
        ):
            path.write_bytes(damaged)
            refused_or_same(path, head, extra)


@pytest.mark.parametrize("saved", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] * (p != SMALLEST)) for p in FILES])
def test_every_truncation(saved: Path, tmp_path: Path) -> None:
    data, path = saved.read_bytes(), tmp_path / "head.safetensors"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match="damaged"):
            gmc.load(path, **options(saved))


class Trap:
    """Unpickling it would leave a file behind."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def test_a_pickle_under_another_name_is_refused_and_not_run(tmp_path: Path) -> None:
    mark, path = tmp_path / "was run", tmp_path / "head.safetensors"
    path.write_bytes(pickle.dumps(Trap(str(mark))))
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        gmc.load(path)
    torch.save(Trap(str(mark)), path)
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        gmc.load(path)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Trap(str(mark))))  # the trap works
    assert mark.exists()
