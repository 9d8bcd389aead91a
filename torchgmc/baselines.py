"""Baselines with the calling convention of a head: one threshold for everyone, and none fitted at all."""

from torchgmc.heads.threshold.baselines import ConformalRiskControl, Unprocessed
from torchgmc.heads.tree.baselines import SplitConformal, UnprocessedTree

__all__ = ["ConformalRiskControl", "SplitConformal", "Unprocessed", "UnprocessedTree"]
