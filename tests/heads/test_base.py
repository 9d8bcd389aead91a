"""What all heads have in common: groups of every form, names, and what is refused."""

import pytest
import torch

import torchgmc as gmc
from gmctest.examples import cameras


def test_fit_and_audit_take_groups_cut_by_rows():
    probs, y, groups = cameras()
    head = gmc.ProbabilityHead(alpha=0.01, groups=groups.names, num_classes=3, bins=None)
    expected = head.fit(probs[:400], y[:400], groups.membership[:400])(probs[400:], groups.membership[400:])
    assert torch.equal(head.fit(probs[:400], y[:400], groups[:400])(probs[400:], groups[400:].membership), expected)
    audits = [head.audit(probs[400:], y[400:], part) for part in (groups[400:], groups.membership[400:])]
    assert audits[0].table == audits[1].table


def test_a_number_is_not_a_list_of_names():
    with pytest.raises(TypeError, match="must be a non-empty list of names"):
        gmc.QuantileHead(target=0.9, alpha=0.01, groups=2)


def test_groups_where_a_membership_belongs():
    groups = gmc.Groups.from_columns({"site": ["a", "b"] * 50})
    probs = torch.rand(100)
    head = gmc.ProbabilityHead(0.1, groups.names).fit(probs, probs > 0.5, groups)
    assert torch.equal(head(probs, groups), head(probs, groups.membership))
    other = gmc.Groups.from_columns({"place": ["a", "b"] * 50})
    with pytest.raises(ValueError, match="place=a"):
        head(probs, other)


def test_heads_without_alpha_say_so():
    heads = [
        gmc.ThresholdHead(0.1, None),
        gmc.QuantileHead(0.9, None),
        gmc.ProbabilityHead(None, ["a"]),
        gmc.TreeHead([2, 2, -1], 0.9, None),
        gmc.DistributionHead({"one": [0]}, None, ["a", "b"]),
        gmc.GMCHead(lambda f, y: f - y, None),
    ]
    for head in heads:
        assert "alpha=None" in repr(head)
