"""QuantileHead and everything that is known about it."""

from torchgmc.heads.quantile.head import QuantileHead

__all__ = ["QuantileHead"]
