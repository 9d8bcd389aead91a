"""ThresholdHead and all code that belongs to it."""

from torchgmc.heads.threshold.head import ThresholdHead

__all__ = ["ThresholdHead"]
