"""What `import torchgmc` loads, counted in modules: a time would depend on the machine."""

import importlib
import json
import subprocess
import sys

import torchgmc
from gmctest import ROOT

#: Parts of the package that wait for their first use: integrations, commands, and what few programs need.
LATER = (
    *("audits.comparison", "audits.discovery", "audits.page", "baselines", "cli", "conformity", "datasets", "demo", "export"),
    *("func", "heads.threshold.baselines", "heads.tree.baselines", "lightning", "metrics", "penalty", "plots", "report"),
    *("reproduce", "text"),
)
#: Modules of other packages that importing torch does not bring.
OTHERS = {"numpy._typing._add_docstring", "numpy.typing"}


def loaded(statement: str) -> set[str]:
    """Modules that a fresh interpreter loads for a statement, beyond those that torch and numpy bring."""
    start, end = "import json, sys, torch, numpy; old = set(sys.modules)", "print(json.dumps([*set(sys.modules) - old]))"
    done = subprocess.run(
        [sys.executable, "-c", f"{start}; {statement}; {end}"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def is_module(name: str) -> bool:
    path = ROOT / "torchgmc" / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_import_brings_nothing_and_the_first_use_the_core():
    assert loaded("import torchgmc") == {"torchgmc"}
    modules = loaded("import torchgmc; torchgmc.ThresholdHead, torchgmc.Groups, torchgmc.attach, torchgmc.audit, torchgmc.save")
    assert all(map(is_module, LATER))
    assert {"torchgmc.heads.threshold.head", "torchgmc.engine.solver", "torchgmc.engine.search"} <= modules
    late = {f"torchgmc.{name}" for name in LATER}
    assert not [name for name in modules if name in late or any(name.startswith(f"{parent}.") for parent in late)]
    assert {name for name in modules if name.split(".")[0] != "torchgmc"} <= OTHERS


def test_every_public_name_is_there_when_asked_for():
    """In a fresh interpreter that begins with submodules; a public name that is a module's name as well is that module."""
    check = (
        "import torchgmc.audits.audit, torchgmc.deploy.attach, torchgmc, types; from torchgmc.text import TokenGroups; "
        "from torchgmc import *; assert all(hasattr(torchgmc, name) for name in torchgmc.__all__); "
        "assert type(torchgmc.audit) is type(torchgmc.attach) is types.FunctionType"
    )
    assert {"torchgmc.penalty", "torchgmc.audits.comparison", "torchgmc.text.tokens"} <= loaded(check)
    for name in filter(is_module, torchgmc.__all__):
        assert importlib.import_module(f"torchgmc.{name}") is getattr(torchgmc, name)


def test_late_names_are_public():
    assert set(torchgmc._LATER) | set(torchgmc._MODULES) >= set(torchgmc.__all__) - {"__version__"}
    assert set(torchgmc._LATER) <= set(torchgmc.__all__) <= set(dir(torchgmc))
    assert all(map(is_module, {*torchgmc._LATER.values(), *torchgmc._MODULES}))


def test_the_command_line_begins_without_torch():
    """So that it can be interrupted at once, see tests/cli/test_app.py."""
    code = "import sys, torchgmc.cli; assert not {'torch', 'numpy', 'typer'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_lazy():
    code = "import sys, torchgmc; assert 'torchgmc.datasets' not in sys.modules; torchgmc.datasets.FASSEG; "
    code += "assert not {'torchvision', 'PIL', 'pandas', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
