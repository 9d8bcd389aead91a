"""What one seed shows on its test examples: deviation of every promise, and how much of it is sampling noise.

A promise j has members (who) and values s_ij whose mean over the members should be 0. Its deviation is

    mass:         mean_i who_ij s_ij                      the paper's measure, P(A) (risk_A - target)
    conditional:  the same divided by mean_i who_ij       the group's own deviation, risk_A - target

Noise. An *oracle* knows the true distribution and meets every promise on it exactly. On a test set of n examples it still shows
a deviation, about normal with mean 0 and standard deviation sd / sqrt(n), where sd is that of who (s - mean of s over the
group): the spread that is left when the group's mean is right, estimated from the method's own test examples. So ``noise`` =
sqrt(2 / pi) sd / sqrt(n) is the mean |deviation| of the oracle. A *fitted* predictor meets its promise at best on its m
calibration examples; its test deviation is a difference of two means: ``noise_fitted`` = sqrt(2 / pi) sd sqrt(1 / n + 1 / m).
``worst_noise`` is the oracle's mean of the largest |deviation| over all promises, from draws of the joint normal distribution
(promises overlap). Where whole subjects are drawn, the spread is that of the sums over subjects.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgmc.engine.files import plain

MEASURES = ("mass", "conditional")
DRAWS = 4000


def measure(
    method: str,
    groups: Sequence[str],
    who: Tensor,
    s: Tensor,
    *,
    target: float | Tensor = 0.0,
    calibration: Mapping[str, Tensor] | None = None,
    num_calibration: int | None = None,
    part: str = "",
    cost: Mapping[str, float] | None = None,
    clusters: Tensor | None = None,
) -> list[dict[str, Any]]:
    """Rows of one method on the test examples: one per measure and promise.

    Args:
        method: name of the method.
        groups: name of each promise, m of them.
        who: membership of the test examples, bool, ``(n, m)``.
        s: values whose mean over the members should be 0, ``(n,)`` or ``(n, m)``.
        target: added to the mean of s to give the column ``risk``; a number, or one per promise.
        calibration: violation of each promise on the calibration examples, ``(m,)``, by measure; left out if unknown.
        num_calibration: number of calibration examples; without it there is no ``noise_fitted``.
        part: which data of the experiment.
        cost: what the method costs, the same in every row: accuracy, set size, ...
        clusters: number of the subject of each test example, ``(n,)``, where whole subjects are drawn: examples of one subject
            vary together. The noise of a group is then that of its subjects' sums.

    Returns:
        JSON rows. ``deviation`` is signed. A group without test examples has mass 0, and None where nothing can be said; so
        has the noise of a group with a single one.

    Example:
        >>> who = torch.tensor([[True, True], [True, False]])
        >>> rows = measure("GMC", ["all", "first"], who, torch.tensor([0.5, -0.1]), target=0.1)
        >>> [(row["measure"], row["group"], round(row["deviation"], 3)) for row in rows]
        [('mass', 'all', 0.2), ('mass', 'first', 0.25), ('conditional', 'all', 0.2), ('conditional', 'first', 0.5)]
    """
    if who.dtype != torch.bool or who.dim() != 2 or who.shape[1] != len(groups):
        raise ValueError(f"`who` must be bool of shape (n, {len(groups)}), got {who.dtype} {tuple(who.shape)}.")
    s = s.double()
    s = s[:, None].expand(-1, len(groups)) if s.dim() == 1 else s
    if s.shape != who.shape:
        raise ValueError(f"`s` must have the same shape as `who`, {tuple(who.shape)}, got {tuple(s.shape)}.")
    member = who.double()
    mass = member.mean(0)  # (m,)
    within = (member * s).mean(0)
    mean = within / mass  # NaN for an empty group
    risk = mean + torch.as_tensor(target, dtype=torch.float64)
    count = _summed(member, clusters).sign().sum(0)  # independent members
    unbiased = (count / (count - 1.0).clamp_min(1.0)).sqrt()  # the group's mean is estimated from its own examples
    centred = member * (s - mean.nan_to_num(0.0)) * unbiased
    rows: list[dict[str, Any]] = []
    for name, scale in zip(MEASURES, (torch.ones_like(mass), mass), strict=True):
        present = count != 1 if name == "mass" else count > 1  # one example shows no spread; an empty group adds 0 to its mass
        found = noise(centred[:, present] / scale[present], num_calibration, clusters)
        oracle, fitted = torch.full_like(mass, math.nan), torch.full_like(mass, math.nan)
        oracle[present], fitted[present] = found[0], found[1]
        known = (calibration or {}).get(name)
        for j, group in enumerate(groups):
            row: dict[str, Any] = {
                "part": part,
                "method": method,
                "measure": name,
                "group": group,
                "deviation": float(within[j] / scale[j]),
                "risk": float(risk[j]),
                "mass": float(mass[j]),
                "calibration": None if known is None else float(known.flatten()[j]),
                "noise": float(oracle[j]),
                "noise_fitted": float(fitted[j]),
                "worst_noise": float(found[2]),
                "cost": {key: float(value) for key, value in (cost or {}).items()},
            }
            rows.append(plain(row))
    return rows


def noise(centred: Tensor, num_calibration: int | None = None, clusters: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean |deviation| due to sampling alone: of an oracle, of a fitted predictor, and the oracle's largest.

    Args:
        centred: contributions of the test examples to each deviation, centred in each group, ``(n, m)``.
        num_calibration: number of calibration examples; the second result is NaN without it.
        clusters: number of the subject of each example, ``(n,)``; every example by itself if omitted.

    Returns:
        Two of shape ``(m,)`` and a number, see the module's text.

    Example:
        >>> oracle, fitted, worst = noise(torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]), 4)
        >>> round(float(oracle), 4), round(float(fitted / oracle), 4)  # sqrt(2 / pi) / sqrt(4), sqrt(2)
        (0.3989, 1.4142)
    """
    n, m = centred.shape
    sums = _summed(centred.double(), clusters)
    mean_size = math.sqrt(2.0 / math.pi)
    oracle = mean_size * sums.square().sum(0).sqrt() / n
    fitted = oracle * (math.sqrt(1.0 + n / num_calibration) if num_calibration else math.nan)
    if m == 0:
        return oracle, fitted, sums.new_tensor(math.nan)
    generator = torch.Generator().manual_seed(0)  # the same rows whatever ran before
    size, axes = torch.linalg.eigh(sums.T @ sums / n**2)  # overlapping promises may make it singular
    draws = torch.randn(DRAWS, m, generator=generator, dtype=torch.float64) * size.clamp_min(0).sqrt()
    return oracle, fitted, (draws @ axes.T).abs().amax(1).mean()


def _summed(values: Tensor, clusters: Tensor | None) -> Tensor:
    """Sums over each cluster, ``(c, m)``."""
    if clusters is None:
        return values
    names, index = torch.unique(clusters, return_inverse=True)
    return values.new_zeros(len(names), values.shape[1]).index_add_(0, index, values)
