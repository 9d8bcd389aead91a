"""Statistics of one batch of images: their risk curves, summed over cells of equal membership."""

import math
import sys
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
#: Risks at the POINTS that are summed at a time, and pixels of small images: few enough for a core's cache.
RISKS, PIXELS = 1 << 16, 1 << 19
#: Relevant pixels ``(n, C)``, those up to the POINTS ``(n, C, POINTS)``, the risk of one ``(n, C)``; without table places, steps.
Sums = tuple[Tensor, ...]


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
        if rows >= len(self.scores):
            return self
        return Batch(*(None if t is None else t[start : start + rows] for t in self))  # type: ignore[arg-type]


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
    small = not isinstance(head.risk, risks.MonotoneRisk) and each <= lattice.size
    rows = max(1, min(8 * RISKS // POINTS, PIXELS // max(each, 1)) // columns) if small else n
    table = batch.weight.new_zeros(0 if many and small else slots * columns * lattice.size)
    inside, found = with_everyone(batch.member).T.to(torch.float64, memory_format=torch.contiguous_format), []  # (a + 1, n)
    moments = inside.new_zeros(5, columns, len(inside), POINTS)
    for start in range(0, n, rows):
        some, at = batch.part(start, rows), slice(start, start + rows)
        one = (_of_pixels if small else _of_curves)(head, some, lattice, slot[at], slots, table)
        moments += _moments(one[1], one[2], inside[:, at] * some.weight.square())
        found.append((one[0], one[1] * one[2][..., None] if batch.cluster.shape[1] else one[2][:0], *one[3:]))
    counts, risk, *rises = (torch.cat(part) for part in zip(*found, strict=True))
    mass = batch.weight[:, None] * (counts > 0)  # (n, C)
    masses = mass.new_zeros(slots, columns).index_add_(0, slot, mass).view(head.folds, -1, columns)
    clusters = None
    if batch.cluster.shape[1]:
        part = inside.T[:, :, None] * mass[:, None]  # (n, a + 1, C)
        clusters = ClusterSums(own, part[..., None] * risk[:, None], part)
        clusters = clusters + ClusterSums(own[:0], clusters.risk[:0], part[:0])  # which joins those of one cluster
    tail = (masses, moments.transpose(1, 2).contiguous(), torch.tensor(n, device=device), (counts == 0).sum(0), clusters)
    if not len(table):
        place, steps = curves.coalesce(*rises)
        return RiseStatistics(patterns, steps, *tail, place=place)
    whole = CurveStatistics(patterns, table.view(*masses.shape, lattice.size), *tail, head.keeps_apart)
    return whole.rises() if many else whole


def _of_pixels(head: "ThresholdHead", batch: Batch, lattice: risks.Lattice, slot: Tensor, slots: int, table: Tensor) -> Sums:
    """Of images with few pixels: one by one those that count."""
    n, columns, each = batch.scores.shape
    device, size, label = slot.device, lattice.size, torch.arange(columns, device=slot.device)
    which, number, share, counts = head.risk.shares().pixels(batch.masks, batch.pixels)
    place = lattice.index(batch.scores.flatten().index_select(0, which))
    part = torch.where(counts > 0, counts.double().reciprocal(), 0.0)
    fast = batch.pixels is None and device.type == "cpu" and each < 1 << 15 and sys.byteorder == "little"
    kind, lanes = (torch.uint8, 8) if each < 1 << 8 else (torch.int16, 4)  # counts in a word of 64 bits
    width = -(-(POINTS + 1) // lanes) * lanes if fast else POINTS + 1  # scores above the lattice come after the POINTS
    at = risks.repeat(torch.arange(0, n * columns * width, width, dtype=torch.int32, device=device), number)
    at = at.add_(curves.coarse(size, device)[1].index_select(0, place))
    if fast:
        one, steps = (torch.full((size,), k, dtype=kind, device=device) for k, size in ((1, 1), (0, n * columns * width)))
        steps.scatter_add_(0, at.long(), one.expand(len(at)))
        words, ones = steps.numpy().view(np.uint64), np.uint64(((1 << 64) - 1) // ((1 << 64 // lanes) - 1))
        words *= ones  # makes the running sums in each word
        sums = words >> np.uint64(64 - 64 // lanes)
        sums.reshape(n * columns, -1)[:, -1] -= number.numpy().view(np.uint64)  # rows add to 0: one running sum serves for all
        words[1:] += np.cumsum(sums)[:-1] * ones
        risen = steps.view(n, columns, width)[..., :POINTS]
    else:
        steps = share.new_zeros(n * columns * width).index_add_(0, at, share)
        risen, part = steps.view(n, columns, width).cumsum(-1)[..., :POINTS], (counts > 0).double()
    if bool((batch.weight != 1).any()):
        share = share * risks.repeat(batch.weight.repeat_interleave(columns), number)
    row = (slot[:, None] * columns + label).flatten() * (size if len(table) else 1)
    row = row.int() if 0 < len(table) < 1 << 31 else row
    at = risks.repeat(row, number).add_(place, alpha=1 if len(table) else slots * columns)
    if not lattice.whole and bool((place >= lattice.size).any()):
        at, share = at[place < lattice.size], share[place < lattice.size]
    if not len(table):
        return counts, risen, part, at, share
    table.scatter_add_(0, at.long(), share) if fast else table.index_add_(0, at, share)  # two thirds of the time on a CPU
    return counts, risen, part


def _of_curves(head: "ThresholdHead", batch: Batch, lattice: risks.Lattice, slot: Tensor, slots: int, table: Tensor) -> Sums:
    """Of images with many pixels, or a custom risk: the whole curve of each."""
    n, columns, size = len(batch.scores), batch.scores.shape[1], lattice.size
    wide = columns * max(batch.scores.shape[2], 2 * size + 2)
    rows = n if isinstance(head.risk, risks.MonotoneRisk) else max(1, risks.CHUNK // wide)
    at, parts = curves.coarse(size, slot.device)[0], []
    first = np.append(0, at[:-1].cpu().numpy() + 1)
    for start in range(0, n, rows):
        some = batch.part(start, rows)
        steps, counts = head.risk.curves(some.scores, some.masks, lattice, some.pixels)
        total = torch.where(counts > 0, counts.double(), torch.inf)[..., None]
        shares = steps.double().mul_(some.weight[:, None, None] / total)
        table.view(slots, columns, size).index_add_(0, slot[start : start + rows], shares)
        fast = steps.device.type == "cpu" and size > 2 * POINTS  # numpy takes a third of the time
        risen = torch.from_numpy(np.add.reduceat(steps.numpy(), first, -1)).cumsum(-1) if fast else steps.cumsum(-1)[..., at]
        parts.append((counts, risen / total, (counts > 0).double()))
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def _moments(risen: Tensor, part: Tensor, sets: Tensor) -> Tensor:
    """Sums of w^2 R^p over sets, ``(5, C, a + 1, POINTS)``, from R = risen part and w^2 of members ``(a + 1, n)``."""
    n, columns, _ = risen.shape
    rows = max(1, RISKS // (POINTS * columns))
    room, sums = sets.new_empty(min(rows, n), 4, columns, POINTS), sets.new_zeros(len(sets), 4 * columns * POINTS)
    for start in range(0, n, rows):
        at, some = slice(start, start + rows), room[: n - start]
        risk, square, cube, large = some.unbind(1)
        torch.mul(risk.copy_(risen[at]), part[at, :, None], out=risk)
        torch.mul(torch.mul(risk, risk, out=square), risk, out=cube)
        torch.mul(square, square, out=large).square_().square_()  # R^LARGE
        sums += sets[:, at] @ some.flatten(1)
    known = (sets @ (part > 0).double()).T[..., None].expand(-1, -1, POINTS)  # (C, a + 1, POINTS)
    return torch.cat([known[None], sums.view(-1, 4, columns, POINTS).permute(1, 2, 0, 3)])
