"""ProbabilityHead and everything that is known about it."""

from torchgmc.heads.probability.head import ProbabilityHead

__all__ = ["ProbabilityHead"]
