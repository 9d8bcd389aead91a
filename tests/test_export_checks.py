"""What exported files check, and that reading their metadata runs nothing."""

import io
import json
import math
import os
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import torchgmc as gmc
from gmctest.heads_zoo import ENTRIES
from torchgmc import export

pytestmark = pytest.mark.usefixtures("operators_read_once")
OPEN = {"torchscript": export.open_torchscript, "torch.export": export._open_export}
READ = OPEN | {"onnx": export._open_onnx}
NAMES = ["threshold", "probability-bins", "quantile", "distribution", "tree-groups", "tree", "gmc"]


def written(name: str, path: Path, format: str, checks: bool) -> tuple[object, tuple[torch.Tensor, ...]]:
    entry = ENTRIES[name]
    head, inputs = entry.fitted(), entry.data(6, 1).inputs
    inputs = inputs if head.takes != "groups" else (torch.rand(6), *inputs)
    inputs = tuple(t.to(torch.uint8) if t.dtype == torch.bool else t for t in inputs)  # as a program without bool would
    model = gmc.attach(nn.Identity(), head, adapter=gmc.Adapter(activation="none"))
    model.export(path, format=format, example_inputs=inputs, checks=checks)
    return READ[format](path), inputs


@pytest.mark.parametrize("format", OPEN)
@pytest.mark.parametrize("name", NAMES)
def test_checks_are_kept_in_the_file(name: str, format: str, tmp_path: Path) -> None:
    head = ENTRIES[name].make()
    program, inputs = written(name, tmp_path / "f", format, True)
    program(*inputs)
    program(*(torch.cat([t, t]) for t in inputs))
    assert export.metadata(tmp_path / "f")["checks"] is True
    if len(inputs) == 2:
        with pytest.raises(Exception, match="`groups` must hold 0 or 1"):
            program(inputs[0], inputs[1] * 255)
    if head.takes != "groups":
        broken = inputs[0].clone()
        broken.view(-1)[3] = math.nan
        with pytest.raises(Exception, match="the scores must hold numbers"):
            program(broken, *inputs[1:])
    if head.takes == "probs":
        with pytest.raises(Exception, match="the scores must hold numbers from 0 to 1"):
            program(inputs[0] + 3.0, *inputs[1:])


@pytest.mark.parametrize("format", OPEN)
def test_without_them_the_documentation_says_what_happens(format: str, tmp_path: Path) -> None:
    program, (scores, member) = written("threshold", tmp_path / "f", format, False)
    assert export.metadata(tmp_path / "f")["checks"] is False
    assert program(scores, member * 255).shape == scores.shape  # wrong, without a word: see `checks`
    with pytest.raises(Exception, match="shape|size|dim|guard|[Gg]uard"):
        program(scores, member[:, :2])
    assert "without a word" in export.export.__doc__


def test_onnx_cannot_stop(tmp_path: Path) -> None:
    model = gmc.attach(nn.Identity(), ENTRIES["threshold"].fitted(), adapter=gmc.Adapter(activation="none"))
    with pytest.raises(ValueError, match="`checks` cannot be kept in ONNX"):
        model.export(tmp_path / "f", format="onnx", example_inputs=ENTRIES["threshold"].data(4, 1).inputs, checks=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["torchscript", "onnx"])  # torch.export looks at sizes itself
@pytest.mark.parametrize("name", ["threshold", "quantile", "gmc"])
def test_files_refuse_another_number_of_rows(name: str, format: str, tmp_path: Path) -> None:
    """One row of groups is not for all: a file says so as the eager model does, ONNX too."""
    program, (scores, member) = written(name, tmp_path / "f", format, False)
    program(scores[:4], member[:4])
    for groups in (member[:1], member[:-1], torch.cat([member, member[:1]])):
        with pytest.raises(Exception, match="(?i)size|shape|dimension"):
            program(scores, groups)


# -- metadata -----------------------------------------------------------------------------------------------------------------


class Trap:
    """Unpickling it leaves a folder behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def trapped(source: Path, target: Path, mark: Path) -> None:
    """The file with every pickle in it replaced by one that runs code."""
    poison = io.BytesIO()
    torch.save(Trap(mark), poison)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for one in old.infolist():
            bad = one.filename.endswith((".pt", ".pkl"))
            new.writestr(one.filename, poison.getvalue() if bad else old.read(one))


@pytest.mark.parametrize("format", OPEN)
def test_metadata_runs_nothing(format: str, tmp_path: Path) -> None:
    written("threshold", tmp_path / "f", format, False)
    mark = tmp_path / "was run"
    trapped(tmp_path / "f", tmp_path / "evil", mark)
    assert export.metadata(tmp_path / "evil") == export.metadata(tmp_path / "f")
    torch.save(Trap(mark), tmp_path / "pickle")
    for content in (b"", b"x" * 100, (tmp_path / "pickle").read_bytes()):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(ValueError, match="holds no metadata of torchgmc"):
            export.metadata(tmp_path / "other")
    assert not mark.exists()
    torch.load(tmp_path / "pickle", weights_only=False)  # the trap works
    assert mark.exists()
    with pytest.raises(FileNotFoundError, match="no file"):
        export.metadata(tmp_path / "none")


@pytest.mark.parametrize(
    "text",
    ["", "x", "[]", "1", "null", "[" * 100_000, '{"a": ' * 100_000],
    ids=["empty", "word", "list", "1", "null", "(", "{"],
)
def test_crafted_metadata(text: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "f", "w") as archive:
        archive.writestr("archive/extra/torchgmc.json", text)
    with pytest.raises(ValueError, match="holds no metadata of torchgmc"):
        export.metadata(tmp_path / "f")


def test_metadata_that_unpacks_to_more_than_a_file_holds(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "f", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/extra/torchgmc.json", json.dumps({"a": " " * export.LONGEST}))
    assert (tmp_path / "f").stat().st_size < 100_000
    with pytest.raises(ValueError, match="bytes"):
        export.metadata(tmp_path / "f")
