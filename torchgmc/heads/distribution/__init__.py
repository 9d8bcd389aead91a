"""DistributionHead and all code that belongs to it."""

from torchgmc.heads.distribution.head import DistributionHead

__all__ = ["DistributionHead"]
