"""GMCHead and all code that belongs to it."""

from torchgmc.heads.custom.head import GMCHead

__all__ = ["GMCHead"]
