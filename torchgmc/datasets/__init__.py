"""The data of the paper's three experiments, torchvision-style: faces, hierarchical texts, prompts about women and men.

Every class takes ``root`` (or the environment variable ``TORCHGMC_DATA``) and ``download``. Two layouts are read: a compact one
(arrays, tables and JSON lines), and the files as their publishers lay them out, which ``download=True`` fetches and which are
converted to the compact layout once. Nothing is downloaded unless asked for.
"""

from torchgmc.datasets.faces import FASSEG
from torchgmc.datasets.hierarchy import HierarchicalText, Scores
from torchgmc.datasets.prompts import GenderPrompts, WordList

__all__ = ["FASSEG", "GenderPrompts", "HierarchicalText", "Scores", "WordList"]
