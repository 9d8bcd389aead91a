"""What several tests share: heads with data, oracles, files, workers. pyproject.toml puts it on the path of pytest."""

import os
from pathlib import Path

HELPERS = Path(__file__).parents[1]
ROOT = HELPERS.parents[1]
PAPER = ROOT / "benchmarks/paper"  # the folder of the second package
GOLDEN = ROOT / "tests/golden"  # heads saved by earlier versions


def subprocess_env(**more: str) -> dict[str, str]:
    """The environment of a process that a test starts: it imports this copy of our packages, benchmarks and gmctest."""
    path = [str(ROOT), str(HELPERS), str(PAPER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"} | more
