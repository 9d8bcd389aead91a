"""Crafted files with a right checksum: a ValueError, or a head that answers; never another error, nor minutes of work."""

import collections
import itertools
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

import torchgmc as gmc
from gmctest.crafted import crafted, to_file
from gmctest.fuzz_inputs import TALLY
from gmctest.heads_zoo import ENTRIES, ZOO, Entry
from torchgmc.deploy import io

#: One file in so many is tried every time, all of them in the slow run.
SHARE = 12


def outcome(entry: Entry, path: Path, inputs: tuple[torch.Tensor, ...], want: torch.Tensor) -> str:
    try:
        with warnings.catch_warnings():  # a file that does not say in which order its lists are warns, and loads
            warnings.filterwarnings("ignore", message=".* put word lists into alphabetical order")
            head = gmc.load(path, **entry.loading)
    except ValueError:
        return "error"
    made = entry.make()
    if not head.is_fitted or (head.needs_groups, head.exclusive) != (made.needs_groups, made.exclusive):
        return "right"  # another head, which says what it is
    found = head(*inputs)
    assert found.shape == want.shape and not (found.is_floating_point() and bool(found.isnan().any())), "a silent NaN"
    return "right"


def try_all(entry: Entry, folder: Path, share: int) -> collections.Counter[str]:
    head, inputs = entry.fitted(), entry.data(20, 1).inputs
    path, want = gmc.save(head, folder / "head.safetensors"), head(*inputs)
    tally: collections.Counter[str] = collections.Counter()
    for one in itertools.islice(crafted(path), len(entry.name) % share, None, share):
        (folder / "crafted.safetensors").write_bytes(one.data)
        began = time.process_time()
        try:
            tally[outcome(entry, folder / "crafted.safetensors", inputs, want)] += 1
        except Exception as error:
            raise AssertionError(f"{one.name}: {type(error).__name__}: {error}") from error
        assert time.process_time() - began < 20, f"{one.name} takes long: sizes are compared before anything is made"
    TALLY[f"crafted {entry.name}"].update(tally)
    return tally


@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_an_error_or_a_head_that_answers(entry: Entry, tmp_path: Path) -> None:
    assert set(try_all(entry, tmp_path, SHARE)) == {"error", "right"}


def statistics_of(entry: Entry, folder: Path, share: int) -> collections.Counter[str]:
    """The same of files with statistics: what loads can be calibrated, or says why not."""
    head, tally = entry.fitted(), collections.Counter[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = gmc.save(head, folder / "head.safetensors", statistics=True)
        about = ("statistics", "calibration.keys")
        for one in itertools.islice((c for c in crafted(path) if c.name.startswith(about)), len(entry.name) % share, None, share):
            (folder / "crafted.safetensors").write_bytes(one.data)
            began, answer = time.process_time(), "right"
            try:
                loaded = gmc.load(folder / "crafted.safetensors", **entry.loading)
            except ValueError:
                answer, loaded = "error", None
            try:
                if loaded is not None:
                    loaded.calibrate(**entry.options)
            except (ValueError, TypeError):  # a mapping of the user's says which outcomes it takes
                answer = "error"
            except Exception as error:
                raise AssertionError(f"{one.name}: {type(error).__name__}: {error}") from error
            assert time.process_time() - began < 20, f"{one.name} takes long"
            tally[answer] += 1
    TALLY[f"crafted statistics {entry.name}"].update(tally)
    return tally


KEPT = [ENTRIES[name] for name in ("threshold", "threshold-exact", "probability-bins", "quantile", "distribution", "tree", "gmc")]


@pytest.mark.parametrize("entry", KEPT, ids=lambda e: e.name)
def test_statistics_are_of_the_shapes_the_head_keeps_or_refused(entry: Entry, tmp_path: Path) -> None:
    assert set(statistics_of(entry, tmp_path, SHARE)) == {"error", "right"}


@pytest.mark.slow
@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_every_crafted_file_with_statistics(entry: Entry, tmp_path: Path) -> None:
    assert sum(statistics_of(entry, tmp_path, 1).values()) > 200


def test_statistics_name_no_code(tmp_path: Path) -> None:
    """A class that the head does not keep is not looked for, let alone imported."""
    path = tmp_path / "head.safetensors"
    with pytest.warns(UserWarning, match="row of statistics"):
        gmc.save(gmc.QuantileHead(0.9, 0.1).fit(torch.rand(20)), path, statistics=True)
    body, tensors = io._read(path)
    for name in ("this:QuantileProblem", "antigravity:x", "torchgmc.audits.overlap:Sketch", ""):
        body["statistics"]["tree"]["class"] = name
        path.write_bytes(to_file(body, tensors))
        with pytest.raises(ValueError, match="not a dataclass of statistics"):
            gmc.load(path)
    assert "antigravity" not in sys.modules and "this" not in sys.modules


@pytest.mark.slow
@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_every_crafted_file(entry: Entry, tmp_path: Path) -> None:
    assert sum(try_all(entry, tmp_path, 1).values()) > 300


def test_trees_that_would_take_all_memory_are_refused(tmp_path: Path) -> None:
    """A comb of 16,000 nodes, 200 kB of a file, has paths of 500 MB; names that repeat were counted one by one."""
    body, tensors = io.pack(gmc.TreeHead({"x": ["a", "b"], "y": ["c"]}, 0.9, 0.02))
    half = 8_000
    comb = [half + i for i in range(half)] + [half + i + 1 for i in range(half - 1)] + [-1]
    twice = [half] * half + [-1]
    for parents, names in ((comb, [str(i) for i in range(2 * half)]), (twice, ["x"] * (half + 1))):
        wrong = body | {"config": body["config"] | {"parents": parents, "names": names}}
        (tmp_path / "head.safetensors").write_bytes(to_file(wrong, tensors))
        with pytest.raises(ValueError, match="too deep a tree|repeated names"):
            gmc.load(tmp_path / "head.safetensors")


def test_a_flag_is_true_or_false() -> None:
    """``bool("no")`` is True."""
    for option in ("conditional", "noise_floor", "logits", "finite_sample"):
        with pytest.raises(TypeError, match=f"`{option}` must be True or False, got 'no'"):
            gmc.ThresholdHead(0.1, 0.02, **{option: "no"})


def test_columns_are_not_names_of_groups() -> None:
    with pytest.raises(TypeError, match="Groups.from_columns"):
        gmc.ThresholdHead(0.1, 0.02, groups={"sex": ["f", "m"]})
