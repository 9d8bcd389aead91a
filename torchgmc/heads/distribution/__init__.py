"""DistributionHead and everything that is known about it."""

from torchgmc.heads.distribution.head import DistributionHead

__all__ = ["DistributionHead"]
