"""FASSEG as published."""

from collections.abc import Callable
from pathlib import Path


def maker(root: Path, download: bool) -> Callable[[], None] | None:
    """What makes the compact layout, or None if the published files are not there."""
    return None
