"""Figures for slides and reports (extra ``report``).

Every function returns a new :class:`matplotlib.figure.Figure` and never touches pyplot, so no backend is chosen, no window opens
and nothing leaks between threads. Colours are those of Okabe and Ito, which colour-blind readers can tell apart, and each series
has its own marker. Text is 12 points or more at slide size. ``dark=True`` draws for a dark page.

==================  ====================================================  ==============================================
figure              shows                                                 of
==================  ====================================================  ==============================================
:func:`deviation`   deviation of each group with its interval             audits, a comparison (``audit.plot()``)
:func:`thresholds`  threshold of each combination of groups               ``ThresholdHead``, ``QuantileHead``, baselines
:func:`reliability` observed against predicted, group by group            ``ProbabilityHead`` and its audit
:func:`tree`        coverage of the answers at each node                  ``TreeHead`` and its audit
:func:`words`       words whose probability moved most                    ``DistributionHead`` and prompts
:func:`tradeoff`    worst violation against cost, over alphas             any head (``gmc.func.sweep``)
:func:`convergence` worst violation after each step                       any fitted head (``head.report.plot()``)
:func:`evidence`    evidence after each batch, and the alarm              ``Monitor``, ``ShiftMonitor`` (``.plot()``)
:func:`masks`       found, missed and falsely marked pixels               pictures and masks
==================  ====================================================  ==============================================
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchgmc.plots.curves import convergence, evidence, tradeoff
from torchgmc.plots.groups import deviation, thresholds
from torchgmc.plots.pictures import masks
from torchgmc.plots.style import DARK, LIGHT, MARKERS, Theme, new_figure, png, set_legend, set_title

if TYPE_CHECKING:
    from torchgmc.heads.distribution.plot import words
    from torchgmc.heads.probability.plot import reliability
    from torchgmc.heads.tree.plot import tree

__all__ = [
    "DARK", "LIGHT", "MARKERS", "Theme", "convergence", "deviation", "evidence", "masks", "new_figure", "png",
    "reliability", "set_legend", "set_title", "thresholds", "tradeoff", "tree", "words",
]  # fmt: skip

#: Figures of one head lie with it and are drawn with what is here: they are imported when first used.
_OF_HEADS = {"words": "distribution", "tree": "tree", "reliability": "probability"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _OF_HEADS:
            value = globals()[name] = getattr(import_module(f"torchgmc.heads.{_OF_HEADS[name]}.plot"), name)
            return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
