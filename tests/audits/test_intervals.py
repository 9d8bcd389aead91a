"""Audits: estimates by a loop, intervals that hold at once, verdicts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchgmc as gmc
from gmctest.oracles import audit_interval
from torchgmc.audits.audit import summarize
from torchgmc.audits.intervals import Moments


def intervals(who, s, delta=0.05, conditional=False, weight=None, alpha=0.1, bounds=(-0.4, 0.6)):
    weight = torch.ones(len(s), 1) if weight is None else weight[:, None]
    names = [f"g{j}" for j in range(who.shape[1])]
    moments = Moments.of(who, s[:, None], weight)
    return summarize(moments, alpha, delta, conditional, names, [""], torch.zeros(1).double(), bounds, len(s))


def by_group(audit, key):
    return dict(zip(audit.table["group"], audit.table[key], strict=True))


@settings(deadline=None, max_examples=30)
@given(
    n=st.integers(3, 300),
    seed=st.integers(0, 1000),
    conditional=st.booleans(),
    binary=st.booleans(),
    weighted=st.booleans(),
)
def test_table_by_the_loop(n, seed, conditional, binary, weighted):
    rng = torch.Generator().manual_seed(seed)
    who, s = torch.rand(n, 2, generator=rng) < 0.3, torch.rand(n, generator=rng).double()
    s = (s.round() if binary else s) - 0.4
    who[0] = True
    weight = torch.rand(n, generator=rng).double() + 0.1 if weighted else torch.full((n,), 2.0).double()
    audit = intervals(who, s, conditional=conditional, weight=weight)
    for j, name in enumerate(["g0", "g1"]):
        inside = who[:, j].tolist()
        low, high = audit_interval(s.tolist(), inside, weight.tolist(), (-0.4, 0.6), 0.05 / 2, conditional)
        mass, total = float(weight[who[:, j]].sum()), float(weight.sum())
        mean = sum(w * x for w, x, a in zip(weight.tolist(), s.tolist(), inside, strict=True) if a)
        assert by_group(audit, "estimate")[name] == pytest.approx(mean / (mass if conditional else total), abs=1e-12)
        assert by_group(audit, "low")[name] == pytest.approx(low, abs=1e-9)
        assert by_group(audit, "high")[name] == pytest.approx(high, abs=1e-9)
        assert by_group(audit, "mass")[name] == pytest.approx(mass / total)
    assert [abs(v) for v in audit.table["estimate"]] == sorted((abs(v) for v in audit.table["estimate"]), reverse=True)


def test_batches_add_up():
    rng = torch.Generator().manual_seed(0)
    who, s, w = torch.rand(50, 3, generator=rng) < 0.5, torch.rand(50, 2, generator=rng), torch.rand(50, 2, generator=rng)
    whole = Moments.of(who, s, w)
    parts = Moments.of(who[:20], s[:20], w[:20]) + Moments.of(who[20:], s[20:], w[20:])
    for name in whole.__dataclass_fields__:
        torch.testing.assert_close(getattr(whole, name), getattr(parts, name))


def test_verdicts():
    who = torch.ones(100_000, 1).bool()
    holds = intervals(who, torch.zeros(100_000).double(), alpha=0.1)
    assert holds.table["verdict"] == ["holds"] and holds.certified and holds.holds and not holds.violated
    violated = intervals(who, torch.full((100_000,), 0.3).double(), alpha=0.1)
    assert violated.table["verdict"] == ["violated"] and violated.violated and not violated.holds
    few = intervals(who[:10], torch.zeros(10).double(), alpha=0.1)
    assert few.table["verdict"] == ["undecided"] and few.holds and not few.certified
    assert "95 %" in few.certificate and few.certified_alpha > 0.1


def test_weights_shift_the_estimate():
    s = torch.tensor([0.5, 0.0]).double()
    audit = intervals(torch.ones(2, 1).bool(), s, weight=torch.tensor([3.0, 1.0]))
    assert audit.table["estimate"] == [pytest.approx(0.375)]


@pytest.mark.slow
@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("shape", ["bernoulli", "skewed"])
def test_all_intervals_hold_at_once(conditional, shape):
    """1,000 draws of 400 examples with overlapping and rare groups and known truth; delta 0.05, so at least 95 % of draws
    must hold. The bounds are conservative, so the count is far above; a wrong constant shows as a count below 950."""
    rng = torch.Generator().manual_seed(1)
    rates = torch.tensor([1.0, 0.5, 0.3, 0.05])
    bottom = 0.1 if shape == "bernoulli" else 1 / 9

    def hold(who, s):
        moments = Moments.of(who, s[:, None], torch.ones(400, 1))
        low, high = moments.intervals(conditional, (-bottom, 1 - bottom), 0.05)
        return ((low <= 0.0) & (high >= 0.0)).all()

    who = torch.rand(1000, 400, 4, generator=rng) < rates
    x = torch.rand(1000, 400, generator=rng).double()
    s = (x < 0.1).double() - 0.1 if shape == "bernoulli" else x**8 - 1 / 9
    assert int(torch.vmap(hold)(who, s).sum()) >= 950


def test_audit_of_a_head_and_how_it_reads():
    rng = torch.Generator().manual_seed(2)
    masks = torch.rand(300, 8, 8, generator=rng) < 0.4
    scores = torch.sigmoid(2 * masks + torch.randn(300, 8, 8, generator=rng) - 1)
    groups = torch.rand(300, 2, generator=rng) < 0.5
    head = gmc.ThresholdHead(0.1, 0.01, ["old", "<b>new</b>"]).fit(scores, masks, groups)
    audit = head.audit(scores, masks, groups)
    assert audit.holds and set(audit.cost) == {"accuracy before", "accuracy after"}
    predicted = head(scores, groups)
    assert audit.cost["accuracy after"] == pytest.approx(float((predicted == masks).double().mean()))
    assert audit.cost["accuracy before"] == pytest.approx(float(((scores > 0.5) == masks).double().mean()))
    missed = (masks & ~predicted).sum((1, 2)) / masks.sum((1, 2))
    assert by_group(audit, "risk")["old"] == pytest.approx(float(missed[groups[:, 0]].double().mean()))
    text, html = str(audit), audit._repr_html_()
    assert "old" in text and "undecided" in text and "accuracy after" in text
    assert "&lt;b&gt;" in html and "<b>" not in html and "undecided" in html
    assert audit.rows()[0]["group"] == audit.table["group"][0]
