"""Leaf scores of documents that come without them: softmax regression on hashed words, trained once."""

import math
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgmc.demo.progress import Bar

BUCKETS, EPOCHS, BATCH, RATE = 1 << 16, 40, 64, 5.0
SETTINGS = {"buckets": BUCKETS, "epochs": EPOCHS, "batch": BATCH, "rate": RATE, "share": 1 / 3}


def scores(texts: Sequence[str], labels: Tensor, num_leaves: int, bar: Bar) -> dict[str, Tensor]:
    """Trains on a third of the documents of each leaf, scores the others.

    Args:
        texts: n documents.
        labels: leaf of each, ``(n,)``.
        num_leaves: number of leaves K.
        bar: shows how far it is.

    Returns:
        ``probs`` ``(m, K)`` float32 and ``labels`` ``(m,)`` of the m documents that were not trained on.
    """
    generator = torch.Generator().manual_seed(0)
    known = _third(labels, generator)
    ids, weights, starts = _bags(texts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        table = nn.EmbeddingBag(BUCKETS, num_leaves, mode="sum", include_last_offset=True)
    nn.init.zeros_(table.weight)
    bias = nn.Parameter(torch.zeros(num_leaves))
    optimiser = torch.optim.SGD([*table.parameters(), bias], RATE, momentum=0.9)

    def logits(rows: Tensor) -> Tensor:
        length = starts[rows + 1] - starts[rows]
        place = torch.cat([length.new_zeros(1), length.cumsum(0)])
        take = torch.repeat_interleave(starts[rows] - place[:-1], length) + torch.arange(int(place[-1]))
        found: Tensor = table(ids[take], place, per_sample_weights=weights[take])
        return found + bias

    rows = known.nonzero()[:, 0]
    for _ in bar.track(range(EPOCHS), "train a classifier"):
        for batch in torch.split(rows[torch.randperm(len(rows), generator=generator)], BATCH):
            loss = F.cross_entropy(logits(batch), labels[batch])
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            optimiser.step()
    others = (~known).nonzero()[:, 0]
    with torch.inference_mode():
        probs = torch.cat([logits(part).softmax(1) for part in torch.split(others, 1024)])
    return {"probs": probs.clone(), "labels": labels[others].clone()}


def _third(labels: Tensor, generator: torch.Generator) -> Tensor:
    """A random third of the documents of each leaf, bool ``(n,)``; at least one of a leaf with two."""
    order = torch.randperm(len(labels), generator=generator)
    order = order[labels[order].argsort(stable=True)]  # by leaf, at random inside
    count = torch.bincount(labels)
    rank = torch.arange(len(labels)) - (count.cumsum(0) - count)[labels[order]]
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    chosen[order] = rank < ((count + 1) // 3).clamp_min(1)[labels[order]]
    return chosen


def _bags(texts: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Words and pairs of neighbouring words of every document: buckets, TF-IDF weights of length 1, and where each begins."""
    bags = []
    for text in texts:
        words = re.findall(r"[a-z0-9]+", text.lower())
        terms = (*words, *map(" ".join, pairwise(words)))
        bags.append(Counter(zlib.crc32(term.encode()) % BUCKETS for term in terms))
    present = Counter(bucket for bag in bags for bucket in bag)
    ids, weights, starts = [], [], [0]
    for bag in bags:
        values = [(1 + math.log(many)) * math.log((1 + len(bags)) / (1 + present[bucket])) for bucket, many in bag.items()]
        length = math.sqrt(sum(v * v for v in values)) or 1.0
        ids += list(bag)
        weights += [v / length for v in values]
        starts.append(len(ids))
    return torch.tensor(ids), torch.tensor(weights), torch.tensor(starts)
