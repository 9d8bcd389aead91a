"""ProbabilityHead and all code that belongs to it."""

from torchgmc.heads.probability.head import ProbabilityHead

__all__ = ["ProbabilityHead"]
