"""Generalised multi-dimensional multicalibration for PyTorch: promises that hold for every group."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchgmc import baselines, conformity, distributed, func, projections, theory
from torchgmc.adapters import Adapter
from torchgmc.attach import CalibratedModel, attach
from torchgmc.audit import Audit, audit
from torchgmc.comparison import Comparison, compare
from torchgmc.dense import Solution, replay, solve
from torchgmc.discovery import Discovery, find_groups
from torchgmc.groups import Groups
from torchgmc.heads import DistributionHead, GMCHead, Head, ProbabilityHead, QuantileHead, ThresholdHead, TreeHead
from torchgmc.io import load, save
from torchgmc.penalty import GMCPenalty
from torchgmc.risks import MonotoneRisk
from torchgmc.search import Cells, violations
from torchgmc.solver import Report
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

# Integrations need an extra each, so they are imported when first used.
_INTEGRATIONS = ("datasets", "lightning", "metrics", "text")

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _INTEGRATIONS:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_INTEGRATIONS})
