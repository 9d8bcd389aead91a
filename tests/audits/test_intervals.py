"""Audits: estimates by a loop, intervals that hold at once, verdicts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gmctest.oracles import audit_interval
from gmctest.tables import summarize
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


def population(shape, draws, n, rng):
    """who (draws, n, 4), s (draws, n), mean of s in each group and mass of each group, known exactly."""
    u, x = torch.rand(draws, n, 1, generator=rng), torch.rand(draws, n, generator=rng).double()
    if shape == "rare groups":  # disjoint, 1 % and 3 % of the examples, each with a mean of its own
        edges, means = torch.tensor([0.0, 0.01, 0.04, 0.5, 1.0]), torch.tensor([0.3, 0.05, 0.1, 0.2]).double()
        who = (u >= edges[:-1]) & (u < edges[1:])
        return who, (x < means[who.long().argmax(2)]).double() - 0.1, means - 0.1, edges.diff().double()
    rates = torch.tensor([1.0, 0.5, 0.25, 0.05])
    if shape == "overlapping":  # nested, the mean rises to the inside: P(s = 1 | u) = 1 - u
        return u < rates, (x < 1 - u[..., 0].double()).double() - 0.1, 0.9 - rates.double() / 2, rates.double()
    who = torch.rand(draws, n, 4, generator=rng) < rates  # "skewed": most s near 0, few near 1
    return who, x**8 - 1 / 9, torch.zeros(4).double(), rates.double()


@pytest.mark.slow
@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("shape", ["rare groups", "skewed", "overlapping"])
def test_coverage_and_width(shape, conditional):
    """1,000 draws of 2,000 examples, truth known: all intervals hold at once in at least 95 % of draws at delta 0.05.

    Not needlessly wide: beside the oracle's, who knows the spread of every estimate and the joint law of the errors and takes
    the narrowest half-widths, in proportion to the spreads, that hold at once in 95 % of these draws. The bounds hold for every
    distribution and every n, which has its price: 1.2 to 1.6 times the oracle's for s of two values conditional on the group,
    up to 3.2 times for skewed s of a group of 100 (measured; printed with ``-s``).
    """
    rng = torch.Generator().manual_seed(4)
    bottom = 1 / 9 if shape == "skewed" else 0.1

    def audit(who, s):
        moments = Moments.of(who, s[:, None], torch.ones(2000, 1))
        return moments.estimates(conditional), *moments.intervals(conditional, (-bottom, 1 - bottom), 0.05)

    who, s, means, masses = population(shape, 1000, 2000, rng)
    truth = means if conditional else means * masses
    estimate, low, high = (part[..., 0] for part in torch.vmap(audit, chunk_size=200)(who, s))  # (1000, 4) each
    error, half = (estimate - truth).abs(), (high - low) / 2
    held = int(((low <= truth) & (truth <= high)).all(1).sum())
    assert held >= 950
    spread = error.square().mean(0).sqrt()
    oracle = float((error / spread).amax(1).quantile(0.95)) * spread
    ratio = half.mean(0) / oracle
    print(f"{shape}, conditional={conditional}: held in {held} of 1000, width / oracle {[round(r, 2) for r in ratio.tolist()]}")
    assert float(ratio.min()) >= 1.0 and float(ratio.max()) <= 3.3 and float(ratio.median()) <= 2.5
