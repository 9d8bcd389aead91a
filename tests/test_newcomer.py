"""What someone new stumbled over while following the README with a model of their own."""

import numpy as np
import pytest
import torch

import torchgmc as gmc


def columns(n, seed=0):
    rng = np.random.default_rng(seed)
    return {"camera": rng.choice(["front", "rear"], n), "hour": rng.choice(["day", "night"], n)}


def draw(n=600, seed=0):
    """Probabilities of three classes, labels, and groups by camera and hour."""
    g = torch.Generator().manual_seed(seed)
    probs = torch.randn(n, 3, generator=g).softmax(1)
    groups = gmc.Groups.from_columns(columns(n, seed), intersections=2)
    y = torch.multinomial(probs + 0.3 * groups.membership[:, 3, None] * torch.tensor([1.0, 0, 0]), 1, generator=g)[:, 0]
    return probs, y, groups


def test_groups_are_cut_by_rows():
    groups = draw()[2]
    wanted = torch.tensor([5, 3, 3, 599])
    mask = torch.arange(600) % 3 == 0
    for rows in (slice(None, 200), slice(10, 300, 7), wanted, wanted.tolist(), mask, mask.numpy(), slice(0, 0)):
        part = groups[rows]
        chosen = rows if isinstance(rows, slice) else torch.as_tensor(rows)
        assert torch.equal(part.membership, groups.membership[chosen]) and part.names == groups.names
        assert part.num_rows == len(part.membership) and torch.equal(part.sizes, part.membership.sum(0))
    s = torch.randn(200).double()
    torch.testing.assert_close(gmc.violations(groups[:200], s), gmc.violations(groups.membership[:200], s))
    for rows in (3, "camera", 1.5, [0.5], None):
        with pytest.raises(TypeError):
            groups[rows]
    with pytest.raises(TypeError, match=r"indexed by rows.*groups.member"):
        groups[3]
    with pytest.raises(ValueError, match=r"mask of rows must have shape \(600,\)"):
        groups[mask[:7]]


def test_fit_and_audit_take_groups_cut_by_rows():
    probs, y, groups = draw()
    head = gmc.ProbabilityHead(alpha=0.01, groups=groups.names, num_classes=3, bins=None)
    expected = head.fit(probs[:400], y[:400], groups.membership[:400])(probs[400:], groups.membership[400:])
    assert torch.equal(head.fit(probs[:400], y[:400], groups[:400])(probs[400:], groups[400:].membership), expected)
    audits = [head.audit(probs[400:], y[400:], part) for part in (groups[400:], groups.membership[400:])]
    assert audits[0].table == audits[1].table


def test_a_long_audit_prints_its_worst_rows_with_names_one_can_tell_apart():
    probs, y, groups = draw()
    audit = gmc.ProbabilityHead(alpha=0.01, groups=groups.names, num_classes=3).fit(probs, y, groups).audit(probs, y, groups)
    lines = str(audit).splitlines()
    assert len(audit.rows()) > 100 and len(lines) < 50
    assert any("more with smaller estimates: all are in `audit.table`" in line for line in lines)
    names = [line.split("  ")[0] for line in lines[1:40]]
    assert len(set(names)) == len(names) and any("camera=front & hour=night / f in" in name for name in names)


def test_a_number_is_not_a_list_of_names():
    with pytest.raises(TypeError, match="must be a non-empty list of names"):
        gmc.QuantileHead(target=0.9, alpha=0.01, groups=2)
