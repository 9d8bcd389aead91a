"""Small made-up data that tests of several modules use."""

import numpy as np
import torch

import torchgmc as gmc


def _columns(n, seed=0):
    rng = np.random.default_rng(seed)
    return {"camera": rng.choice(["front", "rear"], n), "hour": rng.choice(["day", "night"], n)}


def cameras(n=600, seed=0):
    """Probabilities of three classes, labels, and groups by camera and hour."""
    g = torch.Generator().manual_seed(seed)
    probs = torch.randn(n, 3, generator=g).softmax(1)
    groups = gmc.Groups.from_columns(_columns(n, seed), intersections=2)
    y = torch.multinomial(probs + 0.3 * groups.membership[:, 3, None] * torch.tensor([1.0, 0, 0]), 1, generator=g)[:, 0]
    return probs, y, groups


def even_and_odd():
    """A head with two groups, and a membership of 40 examples."""
    scores, who = torch.rand(40, 8, 8), torch.arange(40)[:, None] % 2 == torch.arange(2)
    return gmc.ThresholdHead(0.1, 0.05, ["even", "odd"]).fit(scores, torch.rand(40, 8, 8) < 0.5, who), who


def threshold_data(n=300, seed=2):
    """Scores, masks, and a large and a small group that overlap."""
    rng = torch.Generator().manual_seed(seed)
    masks = torch.rand(n, 8, 8, generator=rng) < 0.4
    scores = torch.sigmoid(2 * masks + torch.randn(n, 8, 8, generator=rng) - 1)
    return scores, masks, torch.rand(n, 2, generator=rng) < torch.tensor([0.8, 0.1])


def two_audits():
    """Of two methods on the same fresh data; the name of one group is HTML."""
    data, names = threshold_data(), ["old", "<b>new</b>"]
    heads = {"GMC": gmc.ThresholdHead(0.1, 0.01, names), "conformal": gmc.baselines.ConformalRiskControl(0.1, 0.01, names)}
    return {name: gmc.audit(head.fit(*data), threshold_data(200, 3)) for name, head in heads.items()}
