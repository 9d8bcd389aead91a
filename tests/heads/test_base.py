"""What all heads have in common: groups of every form, names, and what is refused."""

import pytest
import torch

import torchgmc as gmc
from gmctest.examples import cameras
from gmctest.heads_zoo import ENTRIES, ZOO


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


REFUSED = (ValueError, RuntimeError, torch.jit.Error)


def other_rows(rows: torch.Tensor) -> list[torch.Tensor]:
    """One row for all, which would be broadcast; one too few; one too many."""
    return [rows[:1], rows[:-1], torch.cat([rows, rows[:1]])]


@pytest.mark.parametrize("name", [entry.name for entry in ZOO if len(entry.data(8, 1).inputs) == 2])
def test_one_row_of_groups_per_row_of_scores(name):
    head, (scores, member) = ENTRIES[name].fitted(), ENTRIES[name].data(8, 1).inputs
    for program in (head, torch.jit.script(head)):
        program(scores, member)
        for groups in other_rows(member):
            with pytest.raises(REFUSED):
                program(scores, groups)
        with pytest.raises(REFUSED):
            program(scores[:1], member)


@pytest.mark.parametrize("name", ["quantile", "quantile-bins", "quantile-conformal"])
def test_one_score_and_one_base_per_row_of_groups(name):
    head, (member,) = ENTRIES[name].fitted(), ENTRIES[name].data(8, 1).inputs
    free, base = gmc.QuantileHead(0.8, 0.02).fit(torch.rand(80), base=torch.zeros(80)), torch.rand(8)
    for program, alone in ((head, free), (torch.jit.script(head), torch.jit.script(free))):
        program(member, base)
        program.covers(base, member)
        assert alone.covers(base).shape == alone.covers(base, base=base).shape == (8,)
        for other in other_rows(base):
            with pytest.raises(REFUSED):
                program(member, other)
            with pytest.raises(REFUSED):
                program.covers(other, member)
            with pytest.raises(REFUSED):
                alone.covers(base, base=other)


@pytest.mark.parametrize("learn", [gmc.Trees(trees=5), gmc.Linear()])
def test_one_row_of_features_per_row_of_scores(learn):
    g = torch.Generator().manual_seed(0)
    x, scores = torch.randn(1000, 2, generator=g), torch.rand(1000, generator=g)
    quantile = gmc.QuantileHead(0.8, None, learn=learn).fit(scores + (x[:, 0] > 0), features=x)
    probability = gmc.ProbabilityHead(None, learn=learn).fit(scores, torch.rand(1000, generator=g) < scores, features=x)
    masks = torch.rand(1000, 6, generator=g) < 0.5
    threshold = gmc.ThresholdHead(0.2, None, learn=learn).fit((scores[:, None] + masks) / 2, masks, features=x)
    for head, given in ((probability, scores[:8]), (threshold, masks[:8] / 2), (quantile, None)):
        for program in (head, torch.jit.script(head)):
            ask = program if given is not None else program.covers
            ask(scores[:8] if given is None else given, features=x[:8])
            for features in other_rows(x[:8]):
                with pytest.raises(REFUSED):
                    ask(scores[:8] if given is None else given, features=features)
