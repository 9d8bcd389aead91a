"""The drawing of the house in CONTRIBUTING.md."""

import re

from gmctest import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def layers() -> list[list[str]]:
    """Folders and root files of the package by layer, from the lowest up."""
    found = re.search(r"^ front .*?(?=^```)", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert found, "CONTRIBUTING.md has no drawing"
    rows: list[list[str]] = [[]]
    for line in found.group().splitlines():
        if line.startswith(" ---"):
            rows.append([])
        else:
            rows[-1] += re.split(r"\s{2,}", line.split("|", 1)[1].strip())[0].split()
    return rows[::-1]
