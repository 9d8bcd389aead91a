"""What `import torchgmc` loads, counted in modules: a time would depend on the machine."""

import json
import subprocess
import sys

import torchgmc
from gmctest import ROOT

#: Parts of the package that wait for their first use: integrations, commands, and what few programs need.
LATER = (
    *("baselines", "benchmarks", "cli", "comparison", "conformity", "datasets", "demo", "discovery", "export", "func"),
    *("lightning", "metrics", "page", "penalty", "plots", "report", "reproduce", "text", "tree_baselines"),
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


def test_import_brings_the_core_alone():
    modules = loaded("import torchgmc")
    assert {"torchgmc.heads.threshold", "torchgmc.solver", "torchgmc.search"} <= modules
    late = {f"torchgmc.{name}" for name in LATER}
    assert not [name for name in modules if name in late or any(name.startswith(f"{parent}.") for parent in late)]
    assert {name for name in modules if name.split(".")[0] != "torchgmc"} <= OTHERS


def test_every_public_name_is_there_when_asked_for():
    """In a fresh interpreter that begins with a submodule: functions are not hidden by the modules of the same name."""
    check = (
        "import torchgmc.audit, torchgmc.attach, torchgmc; from torchgmc.text import TokenGroups; from torchgmc import *; "
        "assert all(hasattr(torchgmc, name) for name in torchgmc.__all__); "
        "assert type(torchgmc.audit) is type(torchgmc.attach) is type(lambda: 0)"
    )
    assert {"torchgmc.penalty", "torchgmc.comparison", "torchgmc.text.tokens"} <= loaded(check)


def test_late_names_are_public():
    assert set(torchgmc._LATER) <= set(torchgmc.__all__) <= set(dir(torchgmc))
    for module in torchgmc._LATER.values():
        assert (ROOT / "torchgmc" / f"{module.replace('.', '/')}.py").is_file()


def test_lazy():
    code = "import sys, torchgmc; assert 'torchgmc.datasets' not in sys.modules; torchgmc.datasets.FASSEG; "
    code += "assert not {'torchvision', 'PIL', 'pandas', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
