"""Hierarchical texts as published."""

from collections.abc import Callable
from pathlib import Path

ORIGINAL = {
    "wos": "WebOfScience/WOS46985",
    "newsgroups": "20news-bydate-train",
    "amazon": "HierarchicalTextClassification/data",
}


def maker(root: Path, name: str, download: bool) -> Callable[[], None] | None:
    """What makes the compact layout, or None if the published files are not there."""
    return None
