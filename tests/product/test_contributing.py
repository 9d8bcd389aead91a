"""CONTRIBUTING.md: its example is short and right, what it names exists, a head costs what it says, its versions are ours."""

import ast
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import torchgmc as gmc
from benchmarks import house
from gmctest import ROOT
from gmctest.drawing import PAGE
from torchgmc.engine import solver

PACKAGE = ROOT / "torchgmc"


def test_a_mapping_of_ones_own_takes_30_lines(tmp_path, monkeypatch, capsys):
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip()]) <= 30
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(block, "CONTRIBUTING", "exec"), names)
    assert "verdict" in capsys.readouterr().out
    head, loaded, predicted, price, groups = (names[k] for k in ("head", "loaded", "predicted", "price", "groups"))
    assert head.report.reached == "noise" and float(head.report.violations_before.abs().max()) > 0.05
    assert torch.equal(loaded(predicted, groups), head(predicted, groups))
    to_alpha = gmc.GMCHead(names["Huber"], alpha=0.005, groups=head.groups, bounds=(-1, 1), noise_floor=False)
    to_alpha.fit(predicted[:2000], price[:2000], groups[:2000])
    for one in (head, to_alpha):
        f = one(predicted, groups)[:2000].tolist()
        for j in range(3):  # the promise by a plain loop
            total = sum(max(-1.0, min(1.0, f[i] - float(price[i]))) for i in range(2000) if groups[i, j])
            assert abs(total / 2000 - float(one.report.violations_after[j])) <= 1e-6
            assert one is head or abs(total / 2000) <= 0.005 + 1e-6
    point = torch.linspace(-3, 3, 11).double()[:, None].requires_grad_()  # s is the slope of the potential
    mapping, weight = names["Huber"](torch.zeros(11, 1).double()), torch.ones(11).double()
    (slope,) = torch.autograd.grad(mapping.potential(point, weight), point)
    torch.testing.assert_close(slope * 11, mapping.value(point.detach(), weight))
    assert names["audit"].max_violation < 0.05


#: Applications of one head: a new head needs none.
APPLICATIONS = ("text",)
#: Each head, and the folder that holds all it needs.
FOLDERS = {name: getattr(gmc, name).__module__.split(".")[2] for name in gmc.__all__ if name.endswith("Head") and name != "Head"}


def named_in_code(path: Path) -> set[str]:
    """Words of a file's code: names, attributes, imports and strings, but no docstrings, no hints."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {word for value in house.words(tree) for word in re.findall(r"\w+", value)}


@pytest.mark.parametrize("head", FOLDERS)
def test_few_files_name_a_head(head: str):
    """What a new head costs outside its folder (about 18 files once): its two lists of names, the zoo, and at most one more."""
    assert len(FOLDERS) == 6
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in APPLICATIONS]
    outside = [path for path in files if not path.is_relative_to(PACKAGE / "heads" / FOLDERS[head])]
    files = [*outside, ROOT / "tests/helpers/gmctest/heads_zoo.py"]
    touched = {str(path.relative_to(ROOT)) for path in files if head in named_in_code(path)}
    assert {"torchgmc/__init__.py", "torchgmc/heads/__init__.py", "tests/helpers/gmctest/heads_zoo.py"} <= touched
    assert len(touched) <= 4, touched


def test_formats_risks_and_tasks_are_named_in_one_file_each():
    files = {str(path.relative_to(PACKAGE)): named_in_code(path) for path in PACKAGE.rglob("*.py")}
    assert [name for name, words in files.items() if {"torchscript", "onnx"} <= words] == ["export.py"]
    assert [name for name, words in files.items() if {"fnr", "fpr"} <= words] == ["heads/threshold/risks.py"]
    tasks = {getattr(gmc, head).task.name: folder for head, folder in FOLDERS.items() if getattr(gmc, head).task is not None}
    assert len(tasks) == 5
    for task, folder in tasks.items():
        assert task in files[f"heads/{folder}/task.py"]
        whole = re.compile(rf"""(?<!extra=)["']{task}["']""")  # an extra may have such a name
        commands = [path.name for path in (PACKAGE / "cli").glob("*.py") if whole.search(path.read_text(encoding="utf-8"))]
        assert {*commands} <= {"demo.py"}, (task, commands)  # whose names they are too


def test_the_example_of_a_head_is_named_nowhere():
    """`own_head.py` is all there is to a head: every door takes it (tests/heads), and no file of the package knows it."""
    assert "MeanHead" in named_in_code(ROOT / "tests/helpers/gmctest/own_head.py")
    assert not [path for path in PACKAGE.rglob("*.py") if "MeanHead" in path.read_text(encoding="utf-8")]
    assert len((ROOT / "tests/helpers/gmctest/own_head.py").read_text(encoding="utf-8").splitlines()) <= 65


def test_the_house_in_figures():
    """The table says how the package is built today: what `python -m benchmarks.house` counts, or a bound on it."""
    rows = re.findall(
        r"^\| ([^|]+) \| [\d,]+ \| ([^|]+) \|$", PAGE.split("### The house in figures")[1].split("## ")[0], re.MULTILINE
    )
    found = house.count(ROOT)
    assert [name for name, _ in rows] == list(found)
    for name, said in rows:
        if said.startswith("at most"):
            assert found[name] <= int(said.removeprefix("at most ").replace(",", "")), name
        elif said != "not limited":
            assert found[name] <= int(said), name


def test_the_table_of_solvers_names_what_exists():
    names = re.findall(r"``((?:heads|engine)\.[\w.]+)``", solver.__doc__)
    assert len(names) > 10
    for name in names:
        parent, last = f"torchgmc.{name}".rsplit(".", 1)
        assert find_spec(f"torchgmc.{name}") if not hasattr(import_module(parent), last) else True, name
    for head in FOLDERS:
        assert head.removesuffix("Head") in solver.__doc__, head


def test_torch_still_has_torchscript():
    assert hasattr(torch.jit, "script"), "torch has dropped TorchScript: do what CONTRIBUTING.md says of its end"


def test_oldest_versions_are_those_of_pyproject():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| [\d.]+ \|$", PAGE, flags=re.MULTILINE)
    assert len(rows) > 5
    for package, oldest in rows:
        wanted = f'requires-python = ">={oldest}"' if package == "Python" else f'"{package}>={oldest}"'
        assert wanted in project, package


def test_files_and_commands_exist():
    for path in re.findall(r"`((?:torchgmc|tests|benchmarks|notebooks)/[\w./]*)`", PAGE):
        assert (ROOT / path).exists() or path.startswith("torchgmc/heads/yours/"), path
    for module in re.findall(r"`python -m (benchmarks[.\w]*)", PAGE):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file() or (ROOT / module / "__main__.py").is_file(), module
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / link).exists(), link
    named = re.findall(r"`(test_\w+)` of `(tests/[\w/]+\.py)`", PAGE)
    assert named
    for name, path in named:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), (name, path)
