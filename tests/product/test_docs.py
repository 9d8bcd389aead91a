"""The documentation: built by one command, without a warning; files of a public project say what is so."""

import importlib.util
import re

import pytest

import torchgmc
from gmctest import ROOT

yaml = pytest.importorskip("yaml")
pytest.importorskip("pdoc")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("build", ROOT / "docs/build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    out = tmp_path_factory.mktemp("site")
    assert build.main(str(out)) == 0
    return out


def test_every_public_name_is_in_the_reference(site):
    page = (site / "torchgmc.html").read_text(encoding="utf-8")
    modules = {name for name in torchgmc.__all__ if name in torchgmc._MODULES}
    for name in set(torchgmc.__all__) - modules - {"__version__"}:
        assert f'id="{name}"' in page, name
    for name in torchgmc._MODULES:
        assert (site / "torchgmc" / f"{name}.html").is_file(), name
    assert "Arguments:" in page and "$$" in page and "`~" not in page and ":class:" not in page


def test_pages_and_their_links(site):
    for name in ("index", "glossary", "paper", "changelog", "1_quickstart"):
        page = (site / f"{name}.html").read_text(encoding="utf-8")
        for link in re.findall(r'href="([^":#]+)(?:#[^"]*)?"', page if name == "index" else ""):
            assert (site / link).is_file(), link
    assert "the largest violation allowed" in (site / "glossary.html").read_text(encoding="utf-8")
    assert "data:image/png;base64" in (site / "1_quickstart.html").read_text(encoding="utf-8")


def test_workflows_run_commands_that_exist():
    ci, release = (
        yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text(encoding="utf-8")) for name in ("ci", "release")
    )
    tests = ci["jobs"]["test"]
    assert [step["run"] for step in tests["steps"] if "run" in step] == ["bash tests/run"]
    assert {"", "tests/oldest.txt"} == {one["constraints"] for one in tests["strategy"]["matrix"]["include"]}
    assert "python docs/build.py site" in [step.get("run") for step in ci["jobs"]["docs"]["steps"]]
    assert release["jobs"]["publish"]["needs"] == "build" and release[True]["push"]["tags"] == ["v*"]  # YAML reads `on` as True
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == torchgmc.__version__ and citation["license"] == "Apache-2.0"


def test_security_names_what_exists():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for name in set(re.findall(r"`gmc\.([\w.]+)", text)):
        thing = torchgmc
        for part in name.split("."):
            thing = getattr(thing, part)
    for path in re.findall(r"`(tests/[\w/.]+)`", text):
        assert (ROOT / path).is_file(), path


def test_badges_say_what_is_so():
    """The versions that are required and tried, and the licence; the host draws that of the workflow."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    oldest = re.search(r'^requires-python = ">=([\d.]+)"', project, flags=re.MULTILINE).group(1)
    versions = re.search(r"^\| Python \| ([\d.]+) \| ([\d.]+) \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M)
    licence = re.search(r'^license = "(.*)"', project, flags=re.MULTILINE).group(1)
    ci = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    run = [one["python"] for one in ci["jobs"]["test"]["strategy"]["matrix"]["include"]]
    assert list(versions.groups()) == run and oldest == run[0]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, said in (("python", f"{run[0]} to {run[1]}"), ("licence", licence)):
        drawn = (ROOT / f"notebooks/figures/{name}.svg").read_text(encoding="utf-8")
        (alt,) = re.findall(rf"!\[(.*)\]\(notebooks/figures/{name}\.svg\)", readme)
        assert re.findall(r">([^<>\n]+)</text>", drawn)[1] == said and alt.lower() == f"{name} {said}".lower()
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8") and licence == "Apache-2.0"
