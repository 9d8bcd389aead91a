"""The heads: one a file."""

from torchgmc.heads.base import Head
from torchgmc.heads.custom import GMCHead
from torchgmc.heads.distribution import DistributionHead
from torchgmc.heads.probability import ProbabilityHead
from torchgmc.heads.quantile import QuantileHead
from torchgmc.heads.threshold import ThresholdHead
from torchgmc.heads.tree import TreeHead

__all__ = ["DistributionHead", "GMCHead", "Head", "ProbabilityHead", "QuantileHead", "ThresholdHead", "TreeHead"]
