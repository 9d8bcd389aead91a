"""The heads: a folder each, and the contract that they share."""

from torchgmc.heads.base import Head
from torchgmc.heads.custom.head import GMCHead
from torchgmc.heads.distribution.head import DistributionHead
from torchgmc.heads.probability.head import ProbabilityHead
from torchgmc.heads.quantile.head import QuantileHead
from torchgmc.heads.threshold.head import ThresholdHead
from torchgmc.heads.tree.head import TreeHead

__all__ = ["DistributionHead", "GMCHead", "Head", "ProbabilityHead", "QuantileHead", "ThresholdHead", "TreeHead"]
