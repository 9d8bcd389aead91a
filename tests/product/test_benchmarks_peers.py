"""What the README says of other packages, and the page of what was seen of them."""

import re
import subprocess
import sys

import pytest

from benchmarks import peers
from gmctest import ROOT, subprocess_env

PAGE = (ROOT / "benchmarks/results/peers.md").read_text(encoding="utf-8")


def rows(page):
    """What was seen by package, without versions."""
    found = dict(re.findall(r"^\| (\S+)(?: [\d.]+)? \| (.+) \|$", page, flags=re.MULTILINE))
    del found["package"]
    return found


def test_the_page_has_every_package_of_the_table():
    table = re.search(r"^## Other packages.*?^## ", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S).group()
    packages = [name.lower() for name in re.findall(r"^\| \[([\w-]+)\]", table, flags=re.MULTILINE)]
    assert {name.lower() for name in peers.PEERS} <= set(packages)
    assert list(rows(PAGE)) == ["torchgmc", *peers.PEERS] and "not installed" not in PAGE
    assert all(name in PAGE.lower() for name in packages)


def test_ours_is_as_the_page_says():
    assert peers.torchgmc() == rows(PAGE)["torchgmc"]


def test_a_function_is_counted_and_put_back():
    before = re.escape
    with peers.counted(re, "escape") as calls:
        assert re.escape("a.b") == before("a.b") and re.escape("c") == "c"
    assert calls == [2] and re.escape is before


@pytest.mark.slow
def test_what_is_installed_is_as_the_page_says(tmp_path):
    """In its own process: these packages bring many others."""
    words = [sys.executable, "-W", "ignore", "-m", "benchmarks.peers", "--markdown", str(tmp_path / "peers.md")]
    subprocess.run(words, cwd=ROOT, env=subprocess_env(), check=True, capture_output=True, timeout=300)
    for name, seen in rows((tmp_path / "peers.md").read_text(encoding="utf-8")).items():
        assert seen in ("not installed", rows(PAGE)[name])
