"""Reports in a real browser, at desktop and phone width, light and dark: nothing cut off, no error, every figure there."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
import torchgmc as gmc
from gmctest.browser import CHROMIUM, Browser
from gmctest.heads_zoo import ENTRIES
from torchgmc.audits.page import Picture, Section, Table, write_html
from torchgmc_paper.demo import DEMOS

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here (chromium, chromium-browser or google-chrome): apt-get install chromium"
)

KINDS = ("threshold", "probability-bins", "quantile", "distribution", "tree-groups", "gmc")
WINDOWS = [(width, dark) for width in (1280, 390) for dark in (False, True)]
NEEDS = {"fnr": "segmentation_models_pytorch", "text": "transformers"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as chromium:
        yield chromium


def troubles(found: dict[str, Any], dark: bool) -> list[str]:
    """What a reader would complain about."""
    bad = [*found["errors"], *(f"fetched {url}" for url in found["requests"])]
    bad += [f"cut off: {text}" for text in found["clipped"]] + [f"faint: {text}" for text in found["faint"]]
    if found["scroll"] > found["width"]:
        bad.append(f"the page is {found['scroll']} wide in a window of {found['width']}")
    bad += ["an image is missing" for image in found["images"] if not image["loaded"]]
    bad += ["an image of the other theme" for image in found["images"] if image["dark"] != dark]
    if (found["background"] == "rgb(255, 255, 255)") == dark:
        bad.append(f"background {found['background']} with dark={dark}")
    return bad


def check(browser: Browser, page: Path, figures: int) -> None:
    for width, dark in WINDOWS:
        found = browser.look(page, width, dark)
        assert found["width"] == width
        assert troubles(found, dark) == [], (page.name, width, dark)
        assert len(found["images"]) >= figures


@pytest.mark.parametrize("name", KINDS)
def test_the_report_of_every_kind_of_head(name: str, browser: Browser, tmp_path: Path) -> None:
    entry = ENTRIES[name]
    head = entry.fitted(120)
    audit = head.audit(*entry.data(150, 5).observe)
    page = audit.to_html(tmp_path / "report.html", head=head, settings={"command": "torchgmc calibrate " + "data.npz " * 30})
    check(browser, page, figures=1)


def test_long_names_and_many_rows(browser: Browser, tmp_path: Path) -> None:
    entry = ENTRIES["threshold"]
    names = ["<script>alert('x')</script>", "a name that is long " * 8, "W" * 300]
    head = gmc.ThresholdHead(0.1, 0.02, names).fit(*entry.data(120, 0).observe)
    audits = {name: head.audit(*entry.data(150, 5).observe) for name in (*names, "fourth", "$fifth$")}
    page = gmc.compare(audits).to_html(tmp_path / "report.html", title="M" * 200, head=head, lead="lead" * 100)
    check(browser, page, figures=2)


@pytest.mark.slow  # trains their models
@pytest.mark.parametrize("name", list(DEMOS))
def test_the_reports_of_the_demos(name: str, browser: Browser, tmp_path: Path) -> None:
    pytest.importorskip("rich")
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    module = import_module(DEMOS[name])
    result = module.run(tmp_path, progress=False, setting=module.QUICK)
    check(browser, result.files["report.html"], figures=2)


def test_what_is_wrong_is_seen(browser: Browser, tmp_path: Path) -> None:
    """The checks themselves: a page with every fault, and which of them are found."""
    page = tmp_path / "bad.html"
    page.write_text(
        """<!doctype html><meta name="viewport" content="width=device-width"><body style="background: #fff">
        <div style="width: 900px">wide</div><div style="width: 40px; overflow: hidden; white-space: nowrap">cut off here</div>
        <p style="position: absolute; left: -200px">out on the left</p><p style="color: #ccc">pale</p>
        <img src="none.png"><script>console.error("oh"); undefined_function()</script>"""
    )
    found = browser.look(page, 390)
    bad = " | ".join(troubles(found, dark=False))
    for fault in ("console", "script: Uncaught", "fetched", "loading", "wide in a window", "an image is missing"):
        assert fault in bad, fault
    assert "cut off: div: cut off here" in bad and "cut off: p: out on the left" in bad and "faint: p: pale" in bad
    assert "background" in " ".join(troubles(browser.look(page, 390, dark=True), dark=True))


def test_a_broken_picture_and_a_picture_without_a_dark_one_are_seen(browser: Browser, tmp_path: Path) -> None:
    section = Section("s", tables=[Table(["a"], [["1"]])], pictures=[Picture(b"\x89PNG no more", "broken")])
    page = write_html(tmp_path / "r.html", "t", "c", [section])
    assert "an image is missing" in troubles(browser.look(page, 1280), dark=False)
    assert "an image of the other theme" in troubles(browser.look(page, 1280, dark=True), dark=True)
