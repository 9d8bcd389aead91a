"""The command line (extra ``cli``).

    $ torchgmc calibrate fnr scores.npz --target 0.075 --alpha 0.005 --groups sex,site --out head.safetensors
    $ torchgmc audit head.safetensors test.npz --report audit.html
    $ torchgmc apply head.safetensors new.npz --out masks.npz
    $ torchgmc export head.safetensors --format onnx --out head.onnx
    $ torchgmc demo all --out torchgmc-demo

Each command is a file in this folder; :mod:`torchgmc.cli.app` lists them. Files are read in blocks of rows
(:mod:`torchgmc.cli.tables` says which formats), so they may be larger than memory; pickles are never loaded. Output files
are written completely or not at all.

Exit codes: 0 is success; 1, the audit found a violation; 2, a mistake, one line on stderr and nothing written; 130, interrupted.
"""

import sys
from collections.abc import Sequence

from torchgmc.engine.extras import require


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``torchgmc`` and returns its exit code.

    ``arguments``: words after the program's name; those of the process if omitted.
    """
    try:  # nothing has been imported yet: torch takes a second or more, in which a user may change their mind
        for package in ("typer", "rich"):
            require(package, extra="cli")
        from torchgmc.cli.app import run
    except ImportError as error:
        print(f"torchgmc: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        exec("")  # interrupted inside an `exec`, as of a dataclass, `python -m` would end by the signal; this resets that
        print("torchgmc: interrupted", file=sys.stderr)
        return 130
    return run(arguments)
