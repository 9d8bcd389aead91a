"""How the package is built, in figures: those of CONTRIBUTING's table, counted in a checkout.

$ python -m benchmarks.house                 # this checkout
$ git worktree add ../review 16fa66e && python -m benchmarks.house ../review

- Files in the root: modules of ``torchgmc/`` itself, without ``__init__`` and ``__main__``.
- Files that name a head, a task, a risk or a format outside the folder it lives in: what another one would have to touch. Words of
  the code count (names, strings), not docstrings, hints and tests. The most of any head, or of any task.
- Private accesses: ``head._x`` in a file outside ``heads/``, for the names under which heads go (head, self.head, fitted).
- Long functions: more than 60 lines, with and without their docstring.
"""

import ast
import re
import sys
from pathlib import Path

LONG = 60
HEADS = ("Threshold", "Tree", "Distribution", "Probability", "Quantile", "GMC")
#: A name in files -> folder that it lives in.
TASKS = {"fnr": "threshold", "tree": "tree", "text": "distribution", "probability": "probability", "quantile": "quantile"}


def parsed(folder: Path) -> dict[Path, ast.Module]:
    """Every file of a folder."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}


def words(tree: ast.Module) -> set[str]:
    """Words of the code: names, attributes and whole strings, but no docstrings and no hints."""
    apart: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AnnAssign | ast.arg):
            apart += [hint for hint in (getattr(node, "returns", None), getattr(node, "annotation", None)) if hint]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            apart += node.body
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            apart.append(node.value)
    skipped = {id(part) for node in apart for part in ast.walk(node)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) not in skipped:
            values = [getattr(node, field, None) for field in ("id", "attr", "name", "value")]
            found |= {value for value in values if isinstance(value, str)}
    return found


def private(path: Path, tree: ast.Module) -> int:
    """Lines on which a file outside ``heads/`` uses a head's private member."""
    if "heads" in path.parts:
        return 0
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr.startswith("_") and not n.attr.startswith("__")]
    names = ("head", "_head", "fitted")
    return len({n.lineno for n in found if ast.unparse(n.value).split(".")[-1].strip("()") in names})


def lengths(tree: ast.Module) -> list[tuple[int, int]]:
    """Lines of each function, with and without its docstring."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = node.body[0]
            text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
            whole = (node.end_lineno or 0) - node.lineno + 1
            found.append((whole, whole - ((first.end_lineno or 0) - first.lineno + 1 if text else 0)))
    return found


def count(root: Path) -> dict[str, int]:
    """The figures of a checkout, by the names of the rows of CONTRIBUTING's table."""
    package, trees = root / "torchgmc", parsed(root / "torchgmc")
    code = {path.relative_to(package).as_posix(): words(tree) for path, tree in trees.items()}

    def outside(word: str, folder: str) -> int:
        own = (f"heads/{folder}/", f"heads/{folder}.py", "text/")
        return sum(word in known for path, known in code.items() if not path.startswith(own))

    long = [pair for tree in trees.values() for pair in lengths(tree)]
    commands = {path: path.read_text(encoding="utf-8") for path in trees if path.parent == package / "cli"}
    return {
        "files in the root of the package": sum(path.parent == package and "__" not in path.name for path in trees),
        "files of the package that a new head touches outside its folder": max(
            outside(f"{head}Head", folder)
            for head, folder in zip(HEADS, ("threshold", "tree", "distribution", "probability", "quantile", "custom"), strict=True)
        ),
        "files of `cli/` that name a task": sum(
            any(re.search(rf"""(?<!extra=)["']{task}["']""", text) for task in TASKS) for text in commands.values()
        ),
        "files that name the built-in risks": sum({"fnr", "fpr"} <= known for known in code.values()),
        "files that name the file formats": sum({"torchscript", "onnx"} <= known for known in code.values()),
        "lines that use a head's private members outside `heads/`": sum(private(path, tree) for path, tree in trees.items()),
        "`head: Any`": sum(path.read_text(encoding="utf-8").count("head: Any") for path in trees),
        f"functions of more than {LONG} lines": sum(whole > LONG for whole, _ in long),
        "the same without docstrings": sum(bare > LONG for _, bare in long),
        "lines of the package": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in trees),
        "lines of the tests": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (root / "tests").rglob("*.py")),
    }


if __name__ == "__main__":
    for row, number in count(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parents[1]).items():
        print(f"{number:7,} {row}")
