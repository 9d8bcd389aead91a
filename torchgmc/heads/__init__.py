"""The heads: one a file."""

from torchgmc.heads.base import Head
from torchgmc.heads.distribution import DistributionHead
from torchgmc.heads.threshold import ThresholdHead

__all__ = ["DistributionHead", "Head", "ThresholdHead"]
