"""Two columns out of a large .xlsx file, with nothing but the standard library (such a file is a zip of XML)."""

import zipfile
from collections.abc import Iterator, Sequence
from typing import IO
from xml.etree import ElementTree

_NAMESPACE = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"


def columns_of(file: IO[bytes], names: Sequence[str]) -> dict[str, list[str]]:
    """The named columns of the first sheet, whose first row holds the names; rows that lack one of them are left out."""
    with zipfile.ZipFile(file) as book:
        entries = book.namelist()
        shared: list[str] = []
        if "xl/sharedStrings.xml" in entries:
            with book.open("xl/sharedStrings.xml") as strings:
                shared = ["".join(t.text or "" for t in item.iter(f"{_NAMESPACE}t")) for item in _elements(strings, "si")]
        sheet = min((e for e in entries if e.startswith("xl/worksheets/sheet")), key=lambda e: (len(e), e))
        found: dict[str, list[str]] = {name: [] for name in names}
        letters: dict[str, str] = {}
        with book.open(sheet) as rows:
            for row in _elements(rows, "row"):
                cells = {cell.get("r", "").rstrip("0123456789"): _value(cell, shared) for cell in row.iter(f"{_NAMESPACE}c")}
                if not letters:
                    letters = {value.strip(): letter for letter, value in cells.items()}
                    missing = [name for name in names if name not in letters]
                    if missing:
                        raise KeyError(f"the sheet has no column {missing[0]!r}; it has {', '.join(letters)}")
                elif all(cells.get(letters[name]) for name in names):
                    for name in names:
                        found[name].append(cells[letters[name]])
    return found


def _elements(file: IO[bytes], tag: str) -> Iterator[ElementTree.Element]:
    """Every element of a kind, one at a time; what has been read is thrown away."""
    for _, element in ElementTree.iterparse(file):
        if element.tag == _NAMESPACE + tag:
            yield element
            element.clear()


def _value(cell: ElementTree.Element, shared: list[str]) -> str:
    if cell.get("t") == "inlineStr":
        return "".join(t.text or "" for t in cell.iter(f"{_NAMESPACE}t"))
    value = cell.findtext(f"{_NAMESPACE}v") or ""
    return shared[int(value)] if cell.get("t") == "s" and value else value
