"""Tasks of the command line, which live with their heads."""

import ast
import inspect
import json
from pathlib import Path

import pytest

import torchgmc as gmc
from gmctest import ROOT
from torchgmc.heads import task as tasks
from torchgmc.heads.task import Option

HEADS = [getattr(gmc, name) for name in gmc.__all__ if name.endswith("Head") and name not in ("Head", "GMCHead")]


@pytest.mark.parametrize("kind", HEADS, ids=lambda kind: kind.__name__)
def test_a_task_fits_its_head(kind):
    task, known = kind.task, inspect.signature(kind).parameters
    assert "task" in vars(kind) and gmc.Head.task is None and gmc.GMCHead.task is None
    completed = {"tree": {"tree"}, "text": {"tokenizer"}}.get(task.name, set())  # what `complete` makes something else of
    assert {o.argument for o in task.options} - completed <= set(known)
    required = {name for name, p in known.items() if p.default is p.empty} - {"alpha", "groups", "parents"}
    assert required == {o.argument for o in task.options if o.required}
    assert task.groups_required == (known["groups"].default is inspect.Parameter.empty)
    assert bool(task.labels) == bool(kind.truth or kind.audit_only)
    assert set(task.arrays) == set(kind.arguments) - {kind.arguments[0], kind.truth, "groups", "weight", "clusters"}
    assert task.label_kind in ("", "mask", "class", "tokens") and bool(task.label_kind) == bool(task.labels)
    words = task.example.split()
    assert all(o.flag in words for o in task.options if o.required) and {"--alpha", "--out"} <= set(words)


def test_tasks_know_nothing_of_the_command_line():
    for path in [ROOT / "torchgmc/heads/task.py", *(ROOT / "torchgmc/heads").glob("*/task.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None) or ""]
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not {"typer", "click"} & {name.split(".")[0] for name in names} and "torchgmc.cli" not in names


@pytest.mark.parametrize(
    ("kind", "word", "value"),
    [
        (tasks.NUMBER, "0.5", 0.5),
        (tasks.NUMBERS, "0.5", 0.5),
        (tasks.NUMBERS, "0.5,1", [0.5, 1.0]),
        (tasks.PAIR, "-1,2.5", (-1.0, 2.5)),
        (tasks.TEXT, "a b", "a b"),
        (tasks.whole(0, none=0), "0", None),
        (tasks.whole(0, none=0), "7", 7),
        (tasks.choice("kl", "euclidean"), "kl", "kl"),
        (tasks.number_or("exact"), "exact", "exact"),
        (tasks.number_or("exact"), "0.25", 0.25),
    ],
)
def test_words_become_values(kind, word, value):
    assert Option("max_size", kind, "").read(word) == value


@pytest.mark.parametrize(
    ("kind", "word", "message"),
    [
        (tasks.NUMBER, "much", "--max-size must be a number, got 'much'"),
        (tasks.NUMBERS, "1,", "--max-size must be numbers separated by commas, got '1,'"),
        (tasks.PAIR, "1", "--max-size must be LOW,HIGH, got '1'"),
        (tasks.PAIR, "1,2,3", "--max-size must be LOW,HIGH"),
        (tasks.whole(1), "0", "--max-size must be a whole number of at least 1, got '0'"),
        (tasks.whole(1), "1.5", "--max-size must be a whole number"),
        (tasks.choice("kl", "euclidean"), "x", "--max-size must be kl or euclidean, got 'x'"),
        (tasks.number_or("exact"), "x", "--max-size must be a number or exact, got 'x'"),
    ],
)
def test_wrong_words(kind, word, message):
    with pytest.raises(ValueError, match=message):
        Option("max_size", kind, "").read(word)


def test_switches_and_files(tmp_path: Path):
    assert Option("floor", tasks.SWITCH, "", named="--no-floor", value=False).read(True) is False
    (tmp_path / "x.json").write_text(json.dumps({"a": [1]}))
    option = Option("lists", tasks.JSON, "")
    assert option.read(str(tmp_path / "x.json")) == {"a": [1]}
    with pytest.raises(FileNotFoundError, match="--lists: there is no file"):
        option.read(str(tmp_path / "y.json"))
    (tmp_path / "x.json").write_bytes(b"\xff{")
    with pytest.raises(ValueError, match="--lists: .* is not JSON"):
        option.read(str(tmp_path / "x.json"))
