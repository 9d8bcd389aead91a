"""Generalised multi-dimensional multicalibration for PyTorch: promises that hold for every group.

The README explains the words and symbols (f, s, g, who, what, mass, alpha) in its last sections.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchgmc import baselines, conformity, distributed, func, projections, theory
    from torchgmc.audits.audit import Audit
    from torchgmc.audits.comparison import Comparison, compare
    from torchgmc.audits.discovery import Discovery, find_groups
    from torchgmc.audits.measure import audit
    from torchgmc.audits.unnamed import Remaining, audit_named
    from torchgmc.deploy.adapters import Adapter
    from torchgmc.deploy.attach import CalibratedModel, attach
    from torchgmc.deploy.io import load, save
    from torchgmc.deploy.sets import Intervals, PredictionSets
    from torchgmc.engine.search import Cells, violations
    from torchgmc.engine.solver import Report
    from torchgmc.groups.groups import Groups
    from torchgmc.heads import DistributionHead, GMCHead, Head, ProbabilityHead, QuantileHead, ThresholdHead, TreeHead
    from torchgmc.heads.custom.solve import Solution, replay, solve
    from torchgmc.heads.learned import Linear, Trees
    from torchgmc.heads.threshold.risks import MonotoneRisk
    from torchgmc.monitor import Monitor, ShiftMonitor
    from torchgmc.penalty import GMCPenalty
    from torchgmc.text.tokens import TokenGroups

__version__ = "0.1.0"

__all__ = [
    "Adapter", "Audit", "CalibratedModel", "Cells", "Comparison", "Discovery", "DistributionHead", "GMCHead",
    "GMCPenalty", "Groups", "Head", "Intervals", "Linear", "Monitor", "MonotoneRisk", "PredictionSets", "ProbabilityHead",
    "QuantileHead", "Remaining", "Report", "ShiftMonitor", "Solution", "ThresholdHead", "TokenGroups", "TreeHead",
    "Trees", "__version__", "attach", "audit", "audit_named", "baselines", "compare", "conformity", "distributed",
    "find_groups", "func", "load", "projections", "replay", "save", "solve", "theory", "violations",
]  # fmt: skip

# Everything is imported when it is first used: importing the package costs nothing (the command line can be interrupted at
# once), integrations need an extra each, and what few programs use should not cost all of them time.
_MODULES = (
    *("baselines", "conformity", "datasets", "distributed", "export", "func", "heads", "lightning", "mappings", "metrics"),
    *("monitor", "penalty", "plots", "projections", "report", "text", "theory"),
)
_LATER = {
    name: module
    for module, names in {
        "audits.audit": ("Audit",),
        "audits.comparison": ("Comparison", "compare"),
        "audits.discovery": ("Discovery", "find_groups"),
        "audits.measure": ("audit",),
        "audits.unnamed": ("Remaining", "audit_named"),
        "deploy.adapters": ("Adapter",),
        "deploy.attach": ("CalibratedModel", "attach"),
        "deploy.io": ("load", "save"),
        "deploy.sets": ("Intervals", "PredictionSets"),
        "engine.search": ("Cells", "violations"),
        "engine.solver": ("Report",),
        "groups.groups": ("Groups",),
        "heads": ("DistributionHead", "GMCHead", "Head", "ProbabilityHead", "QuantileHead", "ThresholdHead", "TreeHead"),
        "heads.custom.solve": ("Solution", "replay", "solve"),
        "heads.learned": ("Linear", "Trees"),
        "heads.threshold.risks": ("MonotoneRisk",),
        "monitor": ("Monitor", "ShiftMonitor"),
        "penalty": ("GMCPenalty",),
        "text.tokens": ("TokenGroups",),
    }.items()
    for name in names
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
    return sorted({*__all__, *_MODULES, *_LATER, *(name for name in globals() if name.startswith("__"))})
