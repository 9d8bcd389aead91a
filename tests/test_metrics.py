"""GroupViolation: sums of fixed size against plain loops; what a head would report, watched batch by batch."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

import torchgmc as gmc
from gmctest.heads_zoo import GROUPS, NAMES, ZOO

pytest.importorskip("torchmetrics")
from torchgmc.metrics import GroupViolation, for_head

WATCHED = ZOO


def loop(s, member, weight, conditional, centered):
    """Every group and column by itself."""
    n, u = s.shape
    table = torch.zeros(member.shape[1], u)
    for a in range(member.shape[1]):
        for k in range(u):
            rows = [i for i in range(n) if not math.isnan(s[i, k])]
            total = sum(float(weight[i]) for i in rows)
            mean = sum(float(weight[i] * s[i, k]) for i in rows) / total if centered and total else 0.0
            inside = [i for i in rows if member[i, a]]
            mass = sum(float(weight[i]) for i in inside)
            part = sum(float(weight[i]) * (float(s[i, k]) - mean) for i in inside)
            divisor = mass if conditional else total
            table[a, k] = part / divisor if divisor else 0.0
    return table


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(1, 12),
    u=st.integers(1, 3),
    conditional=st.booleans(),
    centered=st.booleans(),
    cut=st.integers(0, 12),
    seed=st.integers(0, 2**16),
)
def test_batches_match_the_loop(n, u, conditional, centered, cut, seed):
    g = torch.Generator().manual_seed(seed)
    preds, target = torch.rand(n, u, generator=g), torch.rand(n, u, generator=g)
    member, weight = torch.rand(n, 3, generator=g) < 0.5, torch.rand(n, generator=g) + 0.1
    target[torch.rand(n, u, generator=g) < 0.2] = math.nan
    if centered:
        preds = torch.where(target.isnan(), target, preds)
    metric = GroupViolation(GROUPS, u, "centered" if centered else "residual", conditional)
    for one in (slice(0, cut), slice(cut, n)):
        metric.update(preds[one], target[one], member[one], weight[one])
    want = loop(preds if centered else preds - target, member, weight, conditional, centered)
    torch.testing.assert_close(metric.violations(), want, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(metric.compute(), want.abs().max(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("entry", WATCHED, ids=lambda e: e.name)
def test_a_head_is_watched_before_and_after_its_fit(entry):
    data = entry.data(80, 0).observe
    head = entry.make()
    before = for_head(head)
    head.observe(*data)
    quantile = isinstance(head, gmc.QuantileHead)  # its f0 is a quantile of what it is given
    for part in zip(*(t.split(80 if quantile else 33) for t in data), strict=True):
        before.update(*part)
    head.calibrate(**entry.options)
    after = for_head(head)
    after.update(*data)
    found, known = before.violations().double(), len(head.report.violations_before)
    torch.testing.assert_close(found[:known], head.report.violations_before, atol=1e-4, rtol=0)
    if len(found) > known:  # before the data are seen, no group is known to be everyone; here the first is
        torch.testing.assert_close(found[known:], found[:1])
    torch.testing.assert_close(after.violations().double(), head.report.violations_after, atol=1e-4, rtol=0)


def test_state_is_of_fixed_size_and_survives_what_torchmetrics_does():
    metric = GroupViolation(3, 2)
    sizes = {k: getattr(metric, k).shape for k in metric._defaults}
    value = metric(torch.rand(50, 2), torch.rand(50, 2), torch.rand(50, 3) < 0.5)
    assert value.dim() == 0 and {k: getattr(metric, k).shape for k in metric._defaults} == sizes
    copy = metric.clone()
    assert torch.equal(copy.compute(), metric.compute())
    metric.reset()
    assert metric.sums.abs().sum() == 0 and not metric.higher_is_better


def test_one_group_of_everyone_needs_no_groups():
    metric = GroupViolation(1)
    metric.update(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0]))
    assert float(metric.compute()) == 0.5


def test_class_ids_are_one_hot_rows():
    probs, ids = torch.rand(20, 3).softmax(1), torch.arange(20) % 3
    plain, by_id = GroupViolation(1, num_outputs=3), GroupViolation(1, num_outputs=3)
    plain.update(probs, torch.nn.functional.one_hot(ids, 3))
    by_id.update(probs, ids)
    assert torch.equal(plain.violations(), by_id.violations())


def test_errors():
    metric = GroupViolation(GROUPS)
    with pytest.raises(ValueError, match="`target` must have the same shape as `preds`"):
        metric.update(torch.rand(3), torch.rand(2), torch.ones(3, 3))
    with pytest.raises(ValueError, match="`groups` is missing"):
        metric.update(torch.rand(3), torch.rand(3))
    with pytest.raises(ValueError, match="num_outputs=1"):
        metric.update(torch.rand(3, 2), torch.rand(3, 2), torch.ones(3, 3))
    with pytest.raises(ValueError, match="`mapping` must be one of"):
        GroupViolation(2, mapping="other")

    class Unknown(gmc.Head):
        pass

    with pytest.raises(NotImplementedError, match="Unknown does not say what its promise is about; implement `values`"):
        for_head(Unknown(0.1, GROUPS)).update(torch.rand(3), torch.ones(3, 3))
    with pytest.raises(TypeError, match="got Linear"):
        for_head(torch.nn.Linear(1, 1))
    assert len(NAMES) == len(set(NAMES))
