"""CONTRIBUTING.md: its example is short and right, its drawing is how the modules import each other, its versions are ours."""

import ast
import re

import torch

from gmctest import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "torchgmc"


def test_a_mapping_of_ones_own_takes_30_lines(tmp_path, monkeypatch, capsys):
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip()]) <= 30
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(block, "CONTRIBUTING", "exec"), names)
    assert "verdict" in capsys.readouterr().out
    head, loaded, predicted, price, groups = (names[k] for k in ("head", "loaded", "predicted", "price", "groups"))
    assert head.report.converged and float(head.report.violations_before.abs().max()) > 0.05
    assert torch.equal(loaded(predicted, groups), head(predicted, groups))
    f = head(predicted, groups)[:2000].tolist()
    for j in range(3):  # the promise by a plain loop
        total = sum(max(-1.0, min(1.0, f[i] - float(price[i]))) for i in range(2000) if groups[i, j])
        assert abs(total / 2000) <= 0.005 + 1e-6
    point = torch.linspace(-3, 3, 11).double()[:, None].requires_grad_()  # s is the slope of the potential
    mapping, weight = names["Huber"](torch.zeros(11, 1).double()), torch.ones(11).double()
    (slope,) = torch.autograd.grad(mapping.potential(point, weight), point)
    torch.testing.assert_close(slope * 11, mapping.value(point.detach(), weight))
    assert names["audit"].max_violation < 0.05


def layers():
    """Names of each layer of the drawing, from the lowest up."""
    drawing = re.search(r"^ users .*?(?=^```)", PAGE, flags=re.MULTILINE | re.DOTALL).group()
    found: list[list[str]] = [[]]
    for line in drawing.splitlines():
        if line.startswith(" ---"):
            found.append([])
        else:
            found[-1] += re.split(r"\s{2,}", line.split("|", 1)[1].strip())[0].split()
    return found[::-1]


def imports(name):
    """Parts of the package that a part imports when it is imported itself."""
    path = PACKAGE / name
    for file in path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module == "torchgmc":
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchgmc."):
                yield node.module.split(".")[1]
            elif isinstance(node, ast.Import):
                yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("torchgmc."))


def test_the_drawing_is_how_modules_import_each_other():
    level = {name: height for height, names in enumerate(layers()) for name in names}
    assert len(level) > 40 and max(level.values()) == 4
    for name in level:
        assert (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file(), name
        upward = [other for other in imports(name) if level.get(other, 0) > level[name]]
        assert not upward, f"{name} imports {upward}, which the drawing puts above it"
    missing = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()} - set(level)
    assert {name for name in missing if not name.startswith("_")} <= HELPERS


#: Parts of a module beside them that are too small for the drawing.
HELPERS = {
    *("distribution_problems", "distributions_euclidean", "implicit_problems", "lasso", "levelproblem", "overlap"),
    *("penalty_mappings", "tree_baselines"),
}


def test_oldest_versions_are_those_of_pyproject():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| [\d.]+ \|$", PAGE, flags=re.MULTILINE)
    assert len(rows) > 5
    for package, oldest in rows:
        wanted = f'requires-python = ">={oldest}"' if package == "Python" else f'"{package}>={oldest}"'
        assert wanted in project, package


def test_files_and_commands_exist():
    for path in re.findall(r"`((?:torchgmc|tests|benchmarks|notebooks)/[\w./]*)`", PAGE):
        assert (ROOT / path).exists() or path == "torchgmc/heads/yours.py", path
    for module in re.findall(r"`python -m (benchmarks[.\w]*)", PAGE):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file() or (ROOT / module / "__main__.py").is_file(), module
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / link).exists(), link
    named = re.findall(r"`(test_\w+)` of `(tests/[\w/]+\.py)`", PAGE)
    assert named
    for name, path in named:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), (name, path)
