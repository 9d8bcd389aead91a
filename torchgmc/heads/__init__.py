"""The heads: one a file."""

from torchgmc.heads.base import Head
from torchgmc.heads.threshold import ThresholdHead

__all__ = ["Head", "ThresholdHead"]
