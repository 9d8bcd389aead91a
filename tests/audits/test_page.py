"""HTML pages: escaped, self-contained, whole or not at all."""

import re
from pathlib import Path

import pytest

from gmctest.pages import NASTY, Balance
from torchgmc.audits.page import Picture, Section, Table, write_html

PNG = b"\x89PNG\r\n\x1a\n not a real one"


@pytest.fixture
def page(tmp_path: Path) -> str:
    sections = [
        Section(NASTY, [NASTY], [Table([NASTY, "b"], [[NASTY, "violated"], ["1", "holds at alpha"]], numeric=["b"])]),
        Section("Pictures", pictures=[Picture(PNG, NASTY, dark=PNG), Picture(PNG, "light only")]),
    ]
    return write_html(tmp_path / "r.html", NASTY, NASTY, sections, lead=NASTY).read_text(encoding="utf-8")


def test_everything_is_escaped_and_nothing_is_lost(page: str) -> None:
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert "script" not in parser.tags
    assert parser.text.count(NASTY) == 9  # title twice, lead, certificate, heading, paragraph, column, cell, caption
    assert page.count("&lt;script&gt;") == 10  # and the alternative text of the picture


def test_nothing_is_fetched(page: str) -> None:
    assert "http" not in page
    assert all(value.startswith("data:") for value in re.findall(r'(?:src|href|srcset)="([^"]*)"', page))
    assert "url(" not in page and "@import" not in page


def test_tables_scroll_and_pictures_follow_the_theme(page: str) -> None:
    assert page.count('<div class="scroll" tabindex="0"><table>') == 1
    assert page.count("(prefers-color-scheme: dark)") == 2  # the style, and one picture
    assert 'name="viewport"' in page
    assert '<span class="violated">violated</span>' in page and '<span class="holds">holds at alpha</span>' in page


def test_a_row_of_the_wrong_length_is_refused_and_nothing_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_html(tmp_path / "r.html", "t", "c", [Section("s", tables=[Table(["a", "b"], [["1"]])])])
    assert list(tmp_path.iterdir()) == []


def test_a_table_is_printed_in_columns() -> None:
    table = Table(["rule", "share"], [["age >= 61", "9 %"], ["site", "13.5 %"]], ["share"], caption="Rules")
    assert str(table).splitlines() == ["Rules", "rule        share", "age >= 61     9 %", "site       13.5 %"]
    assert str(Table(["a"], [])) == "a"
