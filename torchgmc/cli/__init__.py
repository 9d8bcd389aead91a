"""The command line (extra ``cli``).

    $ torchgmc demo --out torchgmc-demo
    $ torchgmc --version

One file a command in this folder; :mod:`torchgmc.cli.app` lists them. Success is exit code 0; a mistake is one line on
stderr and exit code 2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``torchgmc`` and returns its exit code.

    Args:
        arguments: words after the program's name; those of the process if omitted.
    """
    try:
        from torchgmc.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        print(f'torchgmc: the command line needs `{error.name}`: pip install "torchgmc[cli]"', file=sys.stderr)
        return 2
    return run(arguments)
