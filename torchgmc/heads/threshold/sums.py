"""Statistics of one batch of images: their risk curves, summed over cells of equal membership."""

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgmc.engine.clusters import parts_of
from torchgmc.groups.cells import pattern_ids, with_everyone
from torchgmc.heads.threshold import problem as curves, risks
from torchgmc.heads.threshold.problem import POINTS, ClusterSums, CurveStatistics, RiseStatistics

if TYPE_CHECKING:
    from torchgmc.heads.threshold.head import ThresholdHead

#: Elements of a table of curves that is kept even where most of it is 0.
TABLE = 1 << 19
#: Curves of a batch as a table, or places and steps where most would be 0; relevant pixels ``(n, C)``; risks ``(POINTS, C, n)``.
Sums = tuple[Tensor | tuple[Tensor, Tensor], Tensor, Tensor]


class Batch(NamedTuple):
    """Checked arguments of ``observe``: scores and masks ``(n, ...)``, membership ``(n, a)``, weights, clusters ``(n, k)``.

    ``pixels``: weight of each pixel, of the shape of the scores; None where all count alike. ``features``: ``(n, d)``.
    """

    scores: Tensor
    masks: Tensor
    member: Tensor
    weight: Tensor
    cluster: Tensor
    pixels: Tensor | None
    features: Tensor

    def part(self, start: int, rows: int) -> "Batch":
        """So many examples from this one on."""
        return Batch(*(None if t is None else t[start : start + rows] for t in self))  # type: ignore[arg-type]


def coarse(size: int, device: torch.device) -> Tensor:
    """Indices of the thresholds at which the powers of the risk are summed, ``(POINTS,)``."""
    return torch.linspace(0, size - 1, POINTS, device=device).round().long()


def sum_curves(head: "ThresholdHead", batch: Batch, lattice: risks.Lattice, keys: Tensor) -> CurveStatistics:
    """Curves of one batch, summed over cells: as a table, or the points at which they rise where most of it would be 0.

    ``batch``: with scores, masks and pixels ``(n, C, m)``, or ``(n, C, ...)`` for a custom risk. ``keys``: of the examples.
    """
    n, columns, *shape = batch.scores.shape
    device, each = batch.scores.device, math.prod(shape)
    own = batch.cluster[:, 0] if batch.cluster.shape[1] else keys
    cell, patterns = (torch.arange(n, device=device), batch.member.clone()) if head.keeps_apart else pattern_ids(batch.member)
    slot, slots = parts_of(own, head.folds) * len(patterns) + cell, head.folds * len(patterns)
    most = min(curves.MAX_ELEMENTS, max(TABLE, 4 * n * columns * min(each, lattice.size)))
    many = not head.keeps_apart and slots * columns * lattice.size > most
    small = isinstance(head.risk, risks.ShareRisk) and each <= lattice.size
    found, counts, risk = (_of_pixels if small else _of_curves)(head, batch, lattice, slot, slots, many)
    mass, inside = batch.weight[:, None] * (counts > 0), with_everyone(batch.member).double()  # (n, C), (n, a + 1)
    masses = mass.new_zeros(slots, columns).index_add_(0, slot, mass).view(head.folds, -1, columns)
    clusters = None
    if batch.cluster.shape[1]:
        part = inside[:, :, None] * mass[:, None]  # (n, a + 1, C)
        clusters = ClusterSums(own, part[..., None] * risk.permute(2, 1, 0)[:, None], part)
        clusters = clusters + ClusterSums(own[:0], clusters.risk[:0], part[:0])  # which joins those of one cluster
    tail = (masses, _moments(risk, mass.T, inside), torch.tensor(n, device=device), (counts == 0).sum(0), clusters)
    if isinstance(found, tuple):
        place, steps = curves.coalesce(*found)
        return RiseStatistics(patterns, steps, *tail, place=place)
    table = CurveStatistics(patterns, found.view(*masses.shape, lattice.size), *tail, head.keeps_apart)
    return table.rises() if many else table


def _of_pixels(head: "ThresholdHead", batch: Batch, lattice: risks.Lattice, slot: Tensor, slots: int, many: bool) -> Sums:
    """Of images with few pixels: one by one those that count."""
    n, columns, _ = batch.scores.shape
    device, size, label = slot.device, lattice.size, torch.arange(columns, device=slot.device)
    which, number, share, counts = head.risk.shares().pixels(batch.masks, batch.pixels)
    place = lattice.index(batch.scores.flatten().index_select(0, which))
    first = torch.searchsorted(coarse(size, device), torch.arange(size + 1, device=device)).int()  # of the POINTS, at or above
    at = risks.repeat((label * n + torch.arange(n, device=device)[:, None]).flatten(), number)
    at += first.index_select(0, place) * (columns * n)  # the last row is of scores above the lattice
    risk = share.new_zeros((POINTS + 1) * columns * n).index_add_(0, at, share).view(POINTS + 1, columns, n)
    for last, this in itertools.pairwise(risk):  # in a fifth of the time of cumsum
        this += last
    if bool((batch.weight != 1).any()):
        share = share * risks.repeat(batch.weight.repeat_interleave(columns), number)
    at = risks.repeat(((slot[:, None] * columns + label) * (1 if many else size)).flatten(), number)
    at = at.add_(place, alpha=slots * columns if many else 1)
    if bool((place >= size).any()):
        at, share = at[place < size], share[place < size]
    found = (at, share) if many else share.new_zeros(slots * columns * size).index_add_(0, at, share)
    return found, counts, risk[:POINTS]


def _of_curves(head: "ThresholdHead", batch: Batch, lattice: risks.Lattice, slot: Tensor, slots: int, many: bool) -> Sums:
    """Of images with many pixels, or a custom risk: the whole curve of each."""
    n, columns, size = len(batch.scores), batch.scores.shape[1], lattice.size
    wide = columns * max(batch.scores.shape[2], 2 * size + 2)
    rows = n if isinstance(head.risk, risks.MonotoneRisk) else max(1, risks.CHUNK // wide)
    table, at, parts = batch.weight.new_zeros(slots, columns, size), coarse(size, slot.device), []
    first = np.append(0, at[:-1].cpu().numpy() + 1)
    for start in range(0, n, rows):
        some = slice(start, start + rows)
        pixels = None if batch.pixels is None else batch.pixels[some]
        steps, total = head.risk.curves(batch.scores[some], batch.masks[some], lattice, pixels)
        part = batch.weight[some, None] / torch.where(total > 0, total.double(), torch.inf)
        table.index_add_(0, slot[some], steps * part[..., None])
        fast = steps.device.type == "cpu" and size > 2 * POINTS  # numpy takes a third of the time
        risen = torch.from_numpy(np.add.reduceat(steps.numpy(), first, -1)).cumsum(-1) if fast else steps.cumsum(-1)[..., at]
        parts.append((total, risen))
    counts, risk = (torch.cat(part) for part in zip(*parts, strict=True))
    risk = risk / torch.where(counts > 0, counts.double(), torch.inf)[..., None]  # (n, C, POINTS)
    return table, counts, risk.permute(2, 1, 0).contiguous()


def _moments(risk: Tensor, mass: Tensor, inside: Tensor) -> Tensor:
    """Sums of w^2 R^p over sets, ``(5, a + 1, C, POINTS)``, from risks ``(POINTS, C, n)``, masses ``(C, n)`` and members."""
    square, power, fast = mass.square(), risk, risk.device.type == "cpu"
    found = [(square @ inside).expand(*risk.shape[:2], -1)]
    for last, p in itertools.pairwise(curves.POWERS):
        if last or bool((square != 1).any()):
            power = power * (risk ** (p - last) if last else square)
        flat = power.reshape(-1, risk.shape[2])
        sums = torch.from_numpy(flat.numpy() @ inside.numpy()) if fast else flat @ inside  # numpy takes half the time
        found.append(sums.view(*risk.shape[:2], -1))
    return torch.stack(found).permute(0, 3, 2, 1)
