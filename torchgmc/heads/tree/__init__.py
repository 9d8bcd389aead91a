"""TreeHead and all code that belongs to it."""

from torchgmc.heads.tree.head import TreeHead

__all__ = ["TreeHead"]
