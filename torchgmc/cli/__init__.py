"""The command line (extra ``cli``).

    $ torchgmc demo --out torchgmc-demo
    $ torchgmc --version

One file a command in this folder; :mod:`torchgmc.cli.app` lists them. Success is exit code 0; a mistake is one line on
stderr and exit code 2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchgmc._extras import require

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``torchgmc`` and returns its exit code.

    Args:
        arguments: words after the program's name; those of the process if omitted.
    """
    try:
        for package in ("typer", "rich"):
            require(package, extra="cli")
    except ImportError as error:
        print(f"torchgmc: {error}", file=sys.stderr)
        return 2
    from torchgmc.cli.app import run

    return run(arguments)
