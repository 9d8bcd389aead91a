"""Generalised multi-dimensional multicalibration for PyTorch: promises that hold for every group."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchgmc import distributed, projections, theory
from torchgmc.audits.audit import Audit
from torchgmc.audits.measure import audit
from torchgmc.deploy.adapters import Adapter
from torchgmc.deploy.attach import CalibratedModel, attach
from torchgmc.deploy.io import load, save
from torchgmc.engine.search import Cells, violations
from torchgmc.engine.solver import Report
from torchgmc.groups.groups import Groups
from torchgmc.heads import DistributionHead, GMCHead, Head, ProbabilityHead, QuantileHead, ThresholdHead, TreeHead
from torchgmc.heads.custom.solve import Solution, replay, solve
from torchgmc.heads.threshold.risks import MonotoneRisk

if TYPE_CHECKING:
    from torchgmc import baselines, conformity, func
    from torchgmc.audits.comparison import Comparison, compare
    from torchgmc.audits.discovery import Discovery, find_groups
    from torchgmc.penalty import GMCPenalty
    from torchgmc.text.tokens import TokenGroups

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "Audit",
    "CalibratedModel",
    "Cells",
    "Comparison",
    "Discovery",
    "DistributionHead",
    "GMCHead",
    "GMCPenalty",
    "Groups",
    "Head",
    "MonotoneRisk",
    "ProbabilityHead",
    "QuantileHead",
    "Report",
    "Solution",
    "ThresholdHead",
    "TokenGroups",
    "TreeHead",
    "__version__",
    "attach",
    "audit",
    "baselines",
    "compare",
    "conformity",
    "distributed",
    "find_groups",
    "func",
    "load",
    "projections",
    "replay",
    "save",
    "solve",
    "theory",
    "violations",
]

# Imported when first used: integrations need an extra each, and what few programs use should not cost all of them time.
_MODULES = ("baselines", "conformity", "datasets", "func", "lightning", "metrics", "text")
_LATER = {
    "Comparison": "audits.comparison",
    "Discovery": "audits.discovery",
    "GMCPenalty": "penalty",
    "TokenGroups": "text.tokens",
    "compare": "audits.comparison",
    "find_groups": "audits.discovery",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        if name in _LATER:
            value = globals()[name] = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
            return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_LATER})
