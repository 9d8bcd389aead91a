"""The package as a whole: what importing it costs, and that README, .ci/run and the version agree."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import torchgmc
from gmctest import PAPER, ROOT

OPTIONAL = [
    "lightning",
    "matplotlib",
    "onnx",
    "onnxruntime",
    "pandas",
    "polars",
    "pytorch_lightning",
    "rich",
    "scipy",
    "segmentation_models_pytorch",
    "torchmetrics",
    "torchvision",
    "transformers",
    "typer",
]


SOURCE = {path: path.read_text(encoding="utf-8") for folder in (ROOT / "torchgmc", PAPER) for path in folder.rglob("*.py")}


def shell_commands(readme: str) -> list[str]:
    """Every line of every shell block; a comment is no command."""
    blocks = re.findall(r"^```(?:bash|sh|shell|console)\n(.*?)^```", readme, flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip() and not line.startswith("#")]


def test_import_leaves_optional_packages_out() -> None:
    code = f"import sys, torchgmc; print([name for name in {OPTIONAL} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_attribute_is_named() -> None:
    with pytest.raises(AttributeError, match="module 'torchgmc' has no attribute 'lightening'"):
        torchgmc.lightening  # noqa: B018


def test_integrations_are_listed_before_they_are_imported() -> None:
    assert {"lightning", "metrics", "text"} <= set(dir(torchgmc))
    assert set(torchgmc.__all__) <= set(dir(torchgmc))


def test_readme_has_two_commands_and_ci_calls_the_test_one() -> None:
    commands = shell_commands((ROOT / "README.md").read_text())
    assert len(commands) == 2
    demo, test = commands
    assert demo.endswith("torchgmc demo")
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert lines[-1] == test  # the very command, so that they cannot drift apart
    script = test.split()[-1]
    assert (ROOT / script).is_file()


@pytest.mark.parametrize("tool", ["ruff check", "ruff format --check", "mypy", "pytest"])
def test_test_command_runs_every_check(tool: str) -> None:
    assert f"-m {tool}" in (ROOT / "tests/run").read_text()


@pytest.mark.parametrize("script", [".ci/run", "tests/run"])
def test_scripts_stop_at_the_first_failure(script: str) -> None:
    subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)
    assert "set -euo pipefail" in (ROOT / script).read_text().splitlines()


def test_version_is_consistent() -> None:
    assert f"## [{torchgmc.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    try:
        installed = metadata.version("torchgmc")
    except metadata.PackageNotFoundError:
        pytest.skip("torchgmc runs from the checkout, not installed")
    assert installed == torchgmc.__version__


def test_types_are_shipped() -> None:
    assert (Path(torchgmc.__file__).parent / "py.typed").is_file()


def project() -> dict[str, Any]:
    toml = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return toml.loads((ROOT / "pyproject.toml").read_text())["project"]


def extras() -> dict[str, list[str]]:
    """What each extra for users asks for, by the names of packages."""
    listed = project()["optional-dependencies"].items()
    return {extra: [re.split("[>\\[]", entry)[0] for entry in entries] for extra, entries in listed if extra not in TOOLS}


#: Extras for development: no promise to a user.
TOOLS = ("test", "bench", "notebooks", "docs", "all")


def test_errors_name_an_extra_that_brings_the_package() -> None:
    calls = re.findall(r'require\("(\w+)[\w.]*", extra="(\w+)"\)', "".join(SOURCE.values()))
    assert len(calls) > 10
    installed = metadata.packages_distributions()
    for module, extra in set(calls) - {("math", "report")}:  # a doctest
        if module not in installed:
            continue
        brought = {*extras()[extra], *(one for name in extras()[extra] for one in metadata.requires(name) or ())}
        names = {re.split(r"[^\w-]", one)[0].replace("_", "-") for one in brought}
        assert {name.replace("_", "-") for name in installed[module]} & names, (module, extra)
    assert set(re.findall(r'require\("(\w+)"\)', "".join(SOURCE.values()))) == {"pandas"}  # in no extra


def test_every_package_of_an_extra_is_used() -> None:
    installed = metadata.packages_distributions()
    for name in {name for listed in extras().values() for name in listed}:
        modules = [module for module, owners in installed.items() if name in owners] or [name.replace("-", "_")]
        assert any(re.search(rf"""["' ]{module}\b""", text) for module in modules for text in SOURCE.values()), name


def stated_minimums() -> dict[str, str]:
    """Of pyproject.toml: what the package and its extras ask for; tools of development are no promise to a user."""
    found = project()
    listed = [entry for name, listed in found["optional-dependencies"].items() if name not in ("test", "bench") for entry in listed]
    pairs = [entry.split(">=") for entry in [*found["dependencies"], *listed] if ">=" in entry]
    return {"Python": found["requires-python"].removeprefix(">="), **dict(pairs)}


def test_oldest_versions_are_stated_alike_and_tested() -> None:
    stated = stated_minimums()
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "tests/oldest.txt").read_text().split("# Not ours")[0], re.MULTILINE))
    assert set(pins) == set(stated) - {"Python"}
    for name, version in pins.items():
        assert version == stated[name] or version == stated[name] + ".0", name
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Supported versions")[1]
    table = dict(re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", section, re.MULTILINE))
    assert table == stated
    assert f"Python {stated['Python']} and torch {stated['torch']} or newer" in (ROOT / "README.md").read_text()
