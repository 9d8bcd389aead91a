"""Who: named groups, their membership, and sums over all their intersections."""

from torchgmc.groups.cells import pattern_ids
from torchgmc.groups.columns import Column
from torchgmc.groups.groups import Groups, check_groups

__all__ = ["Column", "Groups", "check_groups", "pattern_ids"]
