"""A layer of the drawing in CONTRIBUTING.md imports what is below it, never what is above."""

import ast
import re
from pathlib import Path

import torchgmc
from gmctest.drawing import layers

ROOT = Path(torchgmc.__file__).parent
#: From the bottom to the top: folders, and the public files of the root.
LAYERS = layers()
#: What a method may ask for when it is called: figures and pages are made on demand, by the layers that can.
ON_DEMAND = {"plots", "report"}


def layer(module: str) -> int:
    first, *rest = module.split(".")
    if rest and rest[-1] == "plot":  # a head's own figure
        first = "plots"
    found = [level for level, names in enumerate(LAYERS) if first in names]
    assert found, f"{module} belongs to no layer: add it to the drawing in CONTRIBUTING.md"
    return found[0]


def imports(path: Path):
    """Modules of the package that a file imports, and whether a function does so when it is called."""
    tree = ast.parse(path.read_text())
    typing = {id(n) for top in ast.walk(tree) if isinstance(top, ast.If) and "TYPE_CHECKING" in ast.unparse(top.test)
              for body in top.body for n in ast.walk(body)}  # fmt: skip
    later = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torchgmc":
            parent = (node.module or "").removeprefix("torchgmc").lstrip(".")
            for name in node.names:
                whole = f"{parent}.{name.name}".lstrip(".")
                inside = (ROOT / whole.replace(".", "/")).with_suffix(".py").is_file() or (ROOT / whole.replace(".", "/")).is_dir()
                if parent or inside:
                    yield (whole if inside else parent), id(node) in later
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.startswith("torchgmc."):
                    yield name.name.removeprefix("torchgmc."), id(node) in later


def files():
    for path in sorted(ROOT.rglob("*.py")):
        yield path, ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_imports_go_down():
    wrong = []
    for path, module in files():
        for target, later in imports(path):
            if layer(target) > layer(module) and not (later and target.split(".")[0] in ON_DEMAND):
                wrong.append(f"{module} imports {target}")
    assert not wrong


def test_few_doors_lead_to_the_second_package():
    """`torchgmc_paper` imports torchgmc; the way back: the list of commands and three names, all through `find_paper`."""
    doors = [module for path, module in files() if re.search(r"^\s*(from|import) torchgmc_paper", path.read_text(), re.MULTILINE)]
    assert doors == ["cli.app", "datasets", "demo", "reproduce"]


def test_the_drawing_has_every_part_of_the_package():
    parts = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    drawn = [name for level in LAYERS for name in level]
    assert sorted(drawn) == sorted(parts)
    assert len({path.stem for path in ROOT.glob("*.py")} - {"__init__", "__main__"}) <= 16  # a file in the root is public


def test_no_module_has_the_name_of_a_public_function():
    modules = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path.is_dir() and (path / "__init__.py").is_file())}
    objects = {name for name in torchgmc.__all__ if not hasattr(getattr(torchgmc, name), "__path__")}
    functions = {name for name in objects if callable(getattr(torchgmc, name))}
    assert not modules & functions


def test_nobody_reaches_into_a_head_from_outside():
    """Private members of heads are used in the folder of the heads only, and no head is typed Any."""
    wrong = []
    for path, module in files():
        text = path.read_text()
        if "head: Any" in text:
            wrong.append(f"{module} types a head as Any")
        if module.split(".")[0] == "heads":
            continue
        for node in ast.walk(ast.parse(text)):
            private = isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
            if private and ast.unparse(node.value).split(".")[-1].strip("()") in ("head", "_head", "fitted"):
                wrong.append(f"{module}:{node.lineno} {ast.unparse(node)}")
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance" and module.split(".")[0] not in ("text",):
                kinds = ast.unparse(node.args[1])
                if any(f"{kind}Head" in kinds for kind in ("Threshold", "Tree", "Distribution", "Probability", "Quantile", "GMC")):
                    wrong.append(f"{module}:{node.lineno} {ast.unparse(node)}")
    assert not wrong
