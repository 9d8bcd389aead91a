"""Baselines with the calling convention of a head: one answer for everyone, one per combination of groups, and none fitted.

| head | for everyone | each combination by itself | as it is |
|---|---|---|---|
| thresholds of masks | ``ConformalRiskControl`` | ``MondrianRiskControl`` | ``Unprocessed`` |
| quantiles | ``SplitConformal`` | ``MondrianConformal`` | - |
| probabilities | ``Scaling`` | ``MondrianScaling`` | - |
| label trees | ``SplitConformalTree`` | ``MondrianConformalTree`` | ``UnprocessedTree`` |

Text needs none: one answer for everyone is the model as it is, and with groups that do not overlap ``DistributionHead`` itself
fits each of them by itself.
"""

from torchgmc.heads.probability.baselines import MondrianScaling, Scaling
from torchgmc.heads.quantile.baselines import MondrianConformal, SplitConformal
from torchgmc.heads.threshold.baselines import ConformalRiskControl, MondrianRiskControl, Unprocessed
from torchgmc.heads.tree.baselines import MondrianConformalTree, SplitConformalTree, UnprocessedTree

__all__ = [
    "ConformalRiskControl", "MondrianConformal", "MondrianConformalTree", "MondrianRiskControl", "MondrianScaling",
    "Scaling", "SplitConformal", "SplitConformalTree", "Unprocessed", "UnprocessedTree",
]  # fmt: skip
