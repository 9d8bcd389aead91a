r"""How far a sample can be trusted: the slack of each group, and how much of it, chosen by held-out loss.

One rule for every head. An offset for everyone is free. The offset of a group A pays an l1 price

.. math:: \lambda_A = \Big(k + \frac{1 + 1.5\,|\gamma|}{\sqrt{n_A}}\Big)\, \mathrm{se}_A

where :math:`\mathrm{se}_A` is the standard error of the group's violation at the common f, :math:`n_A` its number of examples
and :math:`\gamma` the skewness of s, on which the error of a standard error depends: by the optimality conditions a group moves only if its violation is beyond that, and ends within it. The variance of an
example is the group's own or everybody's, whichever is larger: ten examples that agree by chance are not free of noise. k is
chosen by five-fold cross-validation of the potential that the fit minimises, k = infinity (nobody moves by himself) among the
candidates: it is kept unless another k is better by more than ``KEEP`` standard errors of the paired difference; of the others
the largest within one standard error of the best is taken.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["CANDIDATES", "FIXED", "FOLDS", "Choice", "choose", "skewness_of", "slacks", "standard_errors"]

#: Slacks tried, in standard errors; infinity is always among them, last.
CANDIDATES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
#: Slack where there is nothing to cross-validate: sets that depend on f, mappings without a potential.
FIXED = 1.5
FOLDS = 5
#: Standard errors by which k = infinity may be worse and is kept.
KEEP = 2.0
#: Of a group of n_A examples another (SMALL + SKEWED |skewness|) / sqrt(n_A) standard errors are not trusted.
SMALL, SKEWED = 1.0, 1.5


def standard_errors(squares: Tensor, count: Tensor, total: Tensor, pooled: Tensor) -> Tensor:
    """Standard error of each violation E[1_A s].

    Args:
        squares: sum of (w 1_A s)^2 over examples (over clusters: of the squares of their sums), ``(a, u)``.
        count: sum of w^2 1_A, ``(a, u)``.
        total: sum of w, ``(u,)``.
        pooled: variance of s of everyone (of a cluster: per w^2), ``(u,)``.
    """
    return torch.maximum(squares, count * pooled).sqrt() / total.clamp_min(1e-300)


def slacks(k: float | Tensor, error: Tensor, examples: Tensor, skewness: float = 0.0) -> Tensor:
    """The price of each offset.

    Args:
        k: in standard errors.
        error: standard error of each violation.
        examples: number of examples (or clusters) of each group.
        skewness: of s.
    """
    return (k + (SMALL + SKEWED * abs(skewness)) / examples.clamp_min(1.0).sqrt()) * error


def skewness_of(s: Tensor, weight: Tensor) -> float:
    """Skewness of s ``(n,)``; 0 where it does not vary."""
    share = weight / weight.sum().clamp_min(1e-300)
    centred = s - share @ s
    spread = float(share @ centred.square())
    return float(share @ centred**3) / spread**1.5 if spread > 1e-24 else 0.0


class Choice(NamedTuple):
    """The k chosen (infinity: one f for everyone), its place among the candidates, and each candidate's held-out loss."""

    k: float
    place: int
    loss: Tensor


def choose(loss: Tensor) -> Choice:
    """Choose k from held-out losses.

    Args:
        loss: mean loss of each candidate on each fold, ``(len(CANDIDATES) + 1, F)``; k = infinity last.

    Example:
        >>> flat = torch.full((8, 5), 0.3)
        >>> choose(flat).k
        inf
        >>> choose(torch.cat([flat[:3] - 0.1, flat[3:]])).k
        0.75
    """
    mean = loss.mean(1)
    best = int(mean.argmin())
    error = (loss - loss[best]).std(1) / math.sqrt(loss.shape[1])
    last = len(loss) - 1
    if bool(mean[last] <= mean[best] + KEEP * error[last]):
        place = last
    else:
        place = int((mean[:last] <= mean[best] + error[:last]).nonzero()[:, 0].max())
    return Choice(CANDIDATES[place] if place < last else math.inf, place, mean)
