"""TreeHead and everything that is known about it."""

from torchgmc.heads.tree.head import TreeHead

__all__ = ["TreeHead"]
