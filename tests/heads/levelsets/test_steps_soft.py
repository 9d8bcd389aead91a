"""Soft level sets: a partition, and the replay by its definition."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

import torchgmc as gmc
from gmctest.heads_zoo import GROUPS, events
from gmctest.soft_heads import fitted, inputs_of, sigmoid
from torchgmc.heads.levelsets.steps import level_sets


@settings(deadline=None, max_examples=60)
@given(n=st.integers(0, 6), bins=st.integers(1, 6), columns=st.integers(1, 3), seed=st.integers(0, 2**16))
def test_level_sets_are_a_partition(n, bins, columns, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, columns, generator=g, dtype=torch.float64)
    edges = torch.arange(1, bins, dtype=torch.float64) / bins
    inside = level_sets(x, edges, 0.1)
    assert inside.shape == (n, bins, columns)
    assert bool((inside >= 0).all())
    torch.testing.assert_close(inside.sum(1), torch.ones(n, columns).double())
    sharp = level_sets(x, edges, 1e-12)
    assert torch.equal(sharp.argmax(1), torch.bucketize(x, edges, right=True))


def soft_probability(head: gmc.ProbabilityHead, p: float, member: list[float], temperature: float) -> float:
    """The soft replay of one event's probability, from the definition."""
    everyone = [1.0, *member]
    kl = head.geometry == "kl"
    z = math.log(p / (1 - p)) if kl else p
    z -= sum(a * b for a, b in zip(everyone, head.offsets[:, 0].tolist(), strict=True))

    def project(z: float) -> float:
        return z if kl else min(max(z, 0.0), 1.0)

    def inside(z: float) -> list[float]:
        rise = [1.0, *(sigmoid((z - e) / temperature) for e in head.edges.tolist()), 0.0]
        return [a - b for a, b in itertools.pairwise(rise)]

    for table in head.rounds[..., 0].tolist():  # (a, b)
        z = project(z)
        z -= sum(w * sum(m * row[k] for m, row in zip(everyone, table, strict=True)) for k, w in enumerate(inside(z)))
    for who, step in zip(head.log_who.tolist(), head.log_step.tolist(), strict=True):
        z = project(z - sum(w * step[k] * member[who[k]] for k, w in enumerate(inside(z))))
    return sigmoid(z) if kl else project(z)


@pytest.mark.parametrize("geometry", ["kl", "euclidean"])
@pytest.mark.parametrize("solver", ["exact", "paper"])
def test_probabilities_are_the_definition(geometry, solver):
    probs, y, member = events(300, 3).observe
    head = gmc.ProbabilityHead(0.004, GROUPS, bins=4, geometry=geometry, noise_floor=False)
    head.fit(probs, y, member, solver=solver, max_iter=20)
    assert len(head.rounds) + len(head.log_who) > 0
    found = head(probs[:20].double(), member[:20], "soft", 0.3)
    wanted = [soft_probability(head, float(p), m, 0.3) for p, m in zip(probs[:20], member[:20].double().tolist(), strict=True)]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_nothing_to_soften_without_level_sets():
    head, inputs = fitted("probability"), inputs_of("probability", 20)
    assert torch.equal(head(*inputs, mode="soft"), head(*inputs))


def test_quantiles_are_the_definition():
    head, (member, base) = fitted("quantile-bins+paper"), inputs_of("quantile-bins", 12)
    unit, edges = float(head.unit), head.edges.tolist()

    def one(q: float, member: list[float]) -> float:
        q = round(q / unit) * unit - sum(a * b for a, b in zip(member, head.offsets.tolist(), strict=True))
        for who, step in zip(head.log_who.tolist(), head.log_step.tolist(), strict=True):
            rise = [1.0, *(sigmoid((q - e) / 0.2) for e in edges), 0.0]
            q -= sum((a - b) * step[k] * member[who[k]] for k, (a, b) in enumerate(itertools.pairwise(rise)))
        return q

    wanted = [one(q, m) for q, m in zip(base.tolist(), member.double().tolist(), strict=True)]
    torch.testing.assert_close(head(member, base, "soft", 0.2), torch.tensor(wanted, dtype=torch.float64))
