"""The data of the paper's three experiments, torchvision-style: faces, hierarchical texts, prompts about women and men.

Every class takes ``root`` (or the environment variable ``TORCHGMC_DATA``) and ``download``. Two layouts are read: a compact one
(arrays, tables and JSON lines), and the files as their publishers lay them out, which ``download=True`` fetches and which are
converted to the compact layout once. Nothing is downloaded unless asked for.
"""

from torchgmc.engine.extras import find_paper

find_paper()  # the classes are in a second package, which comes with this one

from torchgmc_paper.datasets import FASSEG, GenderPrompts, HierarchicalText, Scores, WordList  # noqa: E402

__all__ = ["FASSEG", "GenderPrompts", "HierarchicalText", "Scores", "WordList"]
