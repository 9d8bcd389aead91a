"""Optional packages, imported where they are used, with an error that says what to install."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def require(module: str, *, extra: str = "") -> ModuleType:
    """Imports an optional package, or says how to install it.

    ``module``: name to import, dots allowed. ``extra``: the extra of torchgmc that installs it, if one does.

    Raises:
        ImportError: if the package is not installed. An error raised *inside* an installed package is passed on as it is.

    Example:
        >>> require("math", extra="report").sqrt(4.0)
        2.0
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        wanted = f'"torchgmc[{extra}]"' if extra else package
        raise ImportError(f"`{package}` is needed here and is not installed: pip install {wanted}", name=package) from error


def find_paper() -> None:
    """Makes ``torchgmc_paper`` importable: demos, experiments and data, installed with torchgmc or in its checkout.

    Raises:
        ImportError: it is not there.
    """
    checkout = Path(__file__).parents[2] / "benchmarks" / "paper"
    if (checkout / "torchgmc_paper").is_dir() and str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    if importlib.util.find_spec("torchgmc_paper") is None:
        raise ImportError(
            "`torchgmc_paper` (demos, the paper's experiments, data) is needed here; it comes with torchgmc, yet is missing: "
            "pip install --force-reinstall --no-deps torchgmc, or pip install -e . in a checkout.",
            name="torchgmc_paper",
        )
