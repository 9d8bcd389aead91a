"""The classes that :mod:`torchgmc.datasets` shows."""

from torchgmc_paper.datasets.faces import FASSEG
from torchgmc_paper.datasets.hierarchy import HierarchicalText, Scores
from torchgmc_paper.datasets.prompts import GenderPrompts, WordList

__all__ = ["FASSEG", "GenderPrompts", "HierarchicalText", "Scores", "WordList"]
