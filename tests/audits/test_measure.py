"""What an audit knows from calibration: variances of each g, and the largest cluster."""

import inspect
import warnings

import pytest
import torch

import torchgmc as gmc
from gmctest.heads_zoo import ZOO
from torchgmc.audits import measure, overlap
from torchgmc.deploy.program import Flat
from torchgmc.engine.batches import checked_once


def expected(head, tally):
    """n times the squared standard error of each g, as a plain sum of squares at the fitted f."""
    s, who = tally.s, tally.who.double()
    if head.relative:
        s, who = s - s.mean(0), who - who.mean(0)
    s = s.nan_to_num(0.0)
    return torch.stack([(who[:, [k]] * s).square().mean(0) for k in range(who.shape[1])])


@pytest.mark.parametrize("entry", [e for e in ZOO if not e.baseline and not e.options], ids=lambda e: e.name)
def test_a_batch_is_checked_once(entry, monkeypatch):
    """`values`, `audit_sums` and `audit_rows` look at the same batch; only the first of them has it checked."""
    batch = entry.data(100, 0).observe
    head = entry.make().fit(*batch)
    whole = type(head).check_batch
    plain, calls = whole.__wrapped__ if hasattr(whole, "__wrapped__") else whole, []
    assert [*inspect.signature(plain).parameters][1:] == list(head.arguments)  # its arguments by place are those of `observe`

    def counted(self, *args, **kwargs):
        calls.append(args)
        return plain(self, *args, **kwargs)

    tally = measure.Tally.of(head, head.bind(*batch))
    monkeypatch.setattr(type(head), "check_batch", checked_once(counted))
    again = measure.Tally.of(head, head.bind(*batch))
    assert len(calls) == 1 and torch.equal(tally.s.nan_to_num(), again.s.nan_to_num())
    head.values(**{name: part for name, part in head.bind(*batch).items() if name not in ("weight", "clusters")})
    head.values(**{name: part for name, part in head.bind(*batch).items() if name not in ("weight", "clusters")})
    assert len(calls) == 3  # nothing is remembered of a batch that is gone


@pytest.mark.parametrize("entry", [e for e in ZOO if not e.baseline and not e.options], ids=lambda e: e.name)
def test_variances_of_the_calibration_data_are_kept(entry):
    data = entry.data(400, 0).observe
    head = entry.make().fit(*data)
    tally = measure.Tally.of(head, head.bind(*data))
    if head.variance.numel() == 0:
        assert getattr(head, "finite_sample", False)
        return
    found = head.variance.view(tally.who.shape[1], -1)
    often = expected(head, tally)
    often = often[:, : found.shape[1]]
    common = often > 0.1 * often.max()
    ratio = (found / often)[common]
    assert float(ratio.min()) > 0.3 and float(ratio.max()) < 4.0  # at the fitted f, or a common one; pooled with everyone's
    twin = entry.make()
    twin.load_state_dict(head.state_dict(), strict=True)
    assert torch.equal(twin.variance, head.variance) and head.same_state(twin)
    head.reset()
    assert head.variance.numel() == 0


def problem(n, seed):
    g = torch.Generator().manual_seed(seed)
    groups = torch.rand(n, 2, generator=g) < torch.tensor([0.5, 0.05])
    masks = torch.rand(n, 8, 8, generator=g) < 0.5
    return torch.sigmoid(3 * masks + torch.randn(n, 8, 8, generator=g)), masks, groups


def test_a_small_group_gains_by_it_and_calibration_data_do_not():
    head = gmc.ThresholdHead(0.1, 0.01, groups=["half", "few"]).fit(*problem(600, 0))
    fresh = problem(600, 1)
    told = head.audit(*fresh)
    untold = head.twin()
    untold.variance = untold.variance[:0]
    plain = untold.audit(*fresh)
    width = [{r["group"]: r["high"] - r["low"] for r in a.rows()} for a in (told, plain)]
    assert width[0]["few"] < 0.95 * width[1]["few"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", overlap.OverlapWarning)
        same = [h.audit(*problem(600, 0)).table for h in (head, untold)]
        assert "calibrat" in head.audit(*problem(600, 0)).note
    assert same[0] == same[1]


def test_exported_programs_do_not_hold_it():
    head = gmc.ThresholdHead(0.1, 0.01, groups=["half", "few"]).fit(*problem(100, 0))
    flat = Flat(gmc.attach(torch.nn.Identity(), head), ["x"], False, True, False)
    assert flat.head.variance.numel() == 0 and head.variance.numel() == 3


def test_the_largest_cluster_of_calibration_bounds_those_of_an_audit():
    ids = torch.arange(300) // 3
    head = gmc.ThresholdHead(0.1, 0.01, groups=["half", "few"]).fit(*problem(300, 0), clusters=ids)
    assert float(head.largest_cluster) == 3.0
    two, four = (torch.arange(300) // k for k in (2, 4))
    assert measure.UNKNOWN_SIZE not in head.audit(*problem(300, 1), clusters=two).note
    assert head.audit(*problem(300, 1), clusters=two).table == head.audit(*problem(300, 1), clusters=two, cluster_size=3).table
    assert measure.UNKNOWN_SIZE in head.audit(*problem(300, 1), clusters=four).note
    assert gmc.Monitor(head).cluster_size == 3.0
    samples = gmc.ProbabilityHead(0.05, bins=None).fit(torch.rand(90), torch.rand(90) < 0.5, clusters=torch.arange(90) // 5)
    assert float(samples.largest_cluster) == 5.0


@pytest.mark.parametrize("name", ["threshold", "threshold-exact", "probability", "quantile"])
def test_three_times_the_weights_are_the_same_weights(name):
    """In the calibration data or in the audit, whose bets follow the variances of the first."""
    entry = {e.name: e for e in ZOO}[name]
    weight = torch.rand(200, generator=torch.Generator().manual_seed(5)).double() + 0.2
    first, second = (entry.make().fit(*entry.data(200, 0).observe, weight=factor * weight) for factor in (1.0, 3.0))
    torch.testing.assert_close(first.variance, second.variance, rtol=1e-6, atol=0)
    fresh = entry.data(200, 1).observe
    for head, factor in ((first, 3.0), (first, 0.1), (second, 0.1)):
        one, two = first.audit(*fresh, weight=weight).table, head.audit(*fresh, weight=factor * weight).table
        assert one["verdict"] == two["verdict"]
        for key in ("estimate", "low", "high", "bound"):
            assert two[key] == pytest.approx(one[key], abs=1e-6)
