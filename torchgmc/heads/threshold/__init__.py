"""ThresholdHead and everything that is known about it."""

from torchgmc.heads.threshold.head import ThresholdHead

__all__ = ["ThresholdHead"]
