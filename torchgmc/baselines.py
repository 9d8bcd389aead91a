"""Baselines with the calling convention of a head: one answer for everyone, one per combination of groups, and none fitted.

| head | for everyone | each combination by itself | as it is |
|---|---|---|---|
| thresholds of masks | ``ConformalRiskControl`` | ``MondrianRiskControl`` | ``Unprocessed`` |
| quantiles | ``SplitConformal`` | ``MondrianConformal`` | - |
| probabilities | ``Scaling`` | ``MondrianScaling`` | - |
| label trees | ``SplitConformalTree`` | - | ``UnprocessedTree`` |
"""

from torchgmc.heads.probability.baselines import MondrianScaling, Scaling
from torchgmc.heads.quantile.baselines import MondrianConformal, SplitConformal
from torchgmc.heads.threshold.baselines import ConformalRiskControl, MondrianRiskControl, Unprocessed
from torchgmc.heads.tree.baselines import SplitConformalTree, UnprocessedTree

__all__ = [
    "ConformalRiskControl",
    "MondrianConformal",
    "MondrianRiskControl",
    "MondrianScaling",
    "Scaling",
    "SplitConformal",
    "SplitConformalTree",
    "Unprocessed",
    "UnprocessedTree",
]
