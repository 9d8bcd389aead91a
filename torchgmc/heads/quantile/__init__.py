"""QuantileHead and all code that belongs to it."""

from torchgmc.heads.quantile.head import QuantileHead

__all__ = ["QuantileHead"]
