r"""How far a sample can be trusted: the slack of each group, and how much of it, chosen by held-out loss.

One rule for every head. An offset for everyone is free. The offset of a group A pays an l1 price

.. math:: \lambda_A = \Big(k + \frac{2 + 1.2\,|\gamma|}{\sqrt{n_A}}\Big)\, \mathrm{se}_A

where :math:`\mathrm{se}_A` is the standard error of the group's violation at the common f, :math:`n_A` its number of examples
and :math:`\gamma` the skewness of s, on which the error of a standard error depends. By the optimality conditions a group moves
only if its violation is beyond that price, and ends within it. The variance of an example is the group's own or everybody's,
whichever is larger: ten examples that agree by chance are not free of noise.

k is chosen by five-fold cross-validation of the potential that the fit minimises. k = infinity (no group moves by itself) is
among the candidates, and is kept unless another k is better by more than ``KEEP`` standard errors of the paired difference; of
the others the largest within ``WITHIN`` standard errors of the best is taken.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchgmc.distributed import total as over_ranks

#: Slacks tried, in standard errors, of few and of many groups; infinity is always among them, last.
CANDIDATES, OF_MANY = (0.0, 0.5, 1.5, 3.0), (1.0, 2.0, 3.0, 4.0)
#: From so many groups on, the largest of their noises is far out.
MANY = 100
#: Least slack where there is nothing to cross-validate: sets that depend on f, mappings without a potential.
FIXED = 1.5
#: A violation of fewer standard errors counts as noise, and one of more does not, whatever k was chosen.
LEAST, MOST = 2.0, 3.0
FOLDS = 5
#: A group with fewer examples on either side of its threshold is too small to get its own.
FEWEST = 5.0
#: Standard errors by which k = infinity may be worse and is kept.
KEEP = 2.0
#: Standard errors by which a larger finite k may be worse than the best and is taken.
WITHIN = 0.5
#: Of a group of n_A examples another (SMALL + SKEWED |skewness|) / sqrt(n_A) standard errors are not trusted.
SMALL, SKEWED = 2.0, 1.2


def candidates(groups: int) -> tuple[float, ...]:
    """Slacks to try for so many groups."""
    return CANDIDATES if groups < MANY else OF_MANY


def standard_errors(squares: Tensor, count: Tensor, total: Tensor, pooled: Tensor) -> Tensor:
    """Standard error of each violation E[1_A s].

    ``squares``: sum of (w 1_A s)^2 over examples (over clusters: of the squares of their sums), ``(a, u)``. ``count``: sum of
    w^2 1_A, ``(a, u)``. ``total``: sum of w, ``(u,)``. ``pooled``: variance of s of everyone (of a cluster: per w^2), ``(u,)``.
    """
    return torch.maximum(squares, count * pooled).sqrt() / total.clamp_min(1e-300)


def slacks(k: float | Tensor, error: Tensor, examples: Tensor, skewness: float = 0.0) -> Tensor:
    """The price of each offset.

    ``k``: in standard errors. ``error``: standard error of each violation. ``examples``: number of examples (or clusters) of
    each group. ``skewness``: of s.
    """
    return (k + (SMALL + SKEWED * abs(skewness)) / examples.clamp_min(1.0).sqrt()) * error


def bound(k: float, error: Tensor, examples: Tensor, skewness: float = 0.0) -> Tensor:
    """Violation that the sample cannot tell from 0, after a fit with this k (NaN: one that chose none)."""
    k = LEAST if math.isnan(k) else min(max(k, LEAST), max(MOST, among(error.numel())))
    return slacks(k, error, examples, skewness)


def among(count: int) -> float:
    """Standard errors that the largest of so many noises is expected to reach: the slack where k is not cross-validated."""
    return max(FIXED, math.sqrt(2.0 * math.log(max(count, 2))))


def skewness_of(s: Tensor, weight: Tensor) -> float:
    """Skewness of s ``(n,)``; 0 where it does not vary."""
    total, first = over_ranks(torch.stack([weight.sum(), weight @ s]))
    share, centred = weight / total.clamp_min(1e-300), s - first / total.clamp_min(1e-300)
    spread, cubes = over_ranks(torch.stack([share @ centred.square(), share @ centred**3])).tolist()
    return cubes / spread**1.5 if spread > 1e-24 else 0.0


class Choice(NamedTuple):
    """The k chosen (infinity: one f for everyone), its place among the candidates, and each candidate's held-out loss."""

    k: float
    place: int
    loss: Tensor


def choose(loss: Tensor, tried: tuple[float, ...] = CANDIDATES) -> Choice:
    """Choose k from held-out losses.

    ``loss``: mean loss of each candidate on each fold, ``(len(tried) + 1, F)``; k = infinity last. ``tried``: the candidates.

    Example:
        >>> flat = torch.full((5, 5), 0.3)
        >>> choose(flat).k
        inf
        >>> choose(torch.cat([flat[:2] - 0.1, flat[2:]])).k
        0.5
    """
    mean = loss.mean(1)
    best = int(mean.argmin())
    error = (loss - loss[best]).std(1) / math.sqrt(loss.shape[1])
    last = len(loss) - 1
    if bool(mean[last] <= mean[best] + KEEP * error[last]):
        place = last
    else:
        place = int((mean[:last] <= mean[best] + WITHIN * error[:last]).nonzero()[:, 0].max())
    return Choice(tried[place] if place < last else math.inf, place, mean)


def small_groups(names: list[str], count: Tensor, target: float) -> list[str]:
    """Groups of which fewer than ``FEWEST`` examples are expected on one side of the threshold."""
    few = count * min(target, 1.0 - target) < FEWEST
    return [name for name, is_few in zip(names, few.tolist(), strict=True) if is_few]


def explain(k: float, noise_floor: bool, small: list[str]) -> str:
    """What was chosen, and which groups are too small to say anything about, for a report."""
    if not noise_floor:
        text = "The fit goes to alpha on the sample, noise included."
    elif math.isinf(k):
        text = "Held-out loss finds no lasting difference between groups: all are treated alike."
    else:
        text = f"Groups move where they differ by more than {k:g} standard errors (chosen by held-out loss)."
    return text + too_small(small)


def too_small(small: list[str]) -> str:
    """Groups too small to say anything about, and what to do; empty if there are none."""
    shown = ", ".join(map(repr, small[:4])) + (", ..." if len(small) > 4 else "")
    advice = "Merge such groups, collect more data, or compare with a baseline that knows no groups (conformal, Platt)."
    return f" Too small to distinguish from noise: {shown} ({len(small)} in all). {advice}" if small else ""
