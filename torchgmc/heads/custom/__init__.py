"""GMCHead and everything that is known about it."""

from torchgmc.heads.custom.head import GMCHead

__all__ = ["GMCHead"]
