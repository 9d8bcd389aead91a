"""Evidence over batches: by the loop, over cuts, states and clusters; false alarms in many quiet runs; found drift."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

import torchgmc as gmc
from gmctest.heads_zoo import ZOO
from torchgmc.engine.values import Names
from torchgmc.monitor import BETS, Watch


def fitted(alpha=0.05, **options):
    rng = torch.Generator().manual_seed(0)
    probs, groups = torch.rand(600, generator=rng), torch.rand(600, 2, generator=rng) < 0.5
    y = torch.rand(600, generator=rng) < probs
    return gmc.ProbabilityHead(alpha=alpha, groups=["a", "b"], bins=None, **options).fit(probs, y, groups)


def batch(n, seed, shift=0.0):
    rng = torch.Generator().manual_seed(seed)
    probs, groups = torch.rand(n, generator=rng), torch.rand(n, 2, generator=rng) < 0.5
    return probs, torch.rand(n, generator=rng) < probs - shift * groups[:, 0], groups


def evidence_loop(batches, alpha, low, high):
    """e for "above alpha" and "below -alpha" of one sequence of x, one example at a time."""
    found = []
    for sign in (1.0, -1.0):
        bottom = alpha - low if sign > 0 else high + alpha
        capital = [0.0] * BETS
        for t, values in enumerate(batches):
            for k in range(BETS):
                capital[k] += 1 / ((t + 1) * (t + 2))
                for x in values:
                    capital[k] *= 1 + 0.9 * 0.5**k / bottom * (sign * x - alpha)
        found.append(sum(capital) / BETS + 1 / (len(batches) + 1))
    return found


@settings(deadline=None, max_examples=20)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4), seed=st.integers(0, 99), conditional=st.booleans())
def test_evidence_by_the_loop(sizes, seed, conditional):
    head = fitted()
    monitor = gmc.Monitor(head, alpha=0.02, conditional=conditional)
    batches = [batch(n, seed + 7 * k) for k, n in enumerate(sizes)]
    for part in batches:
        monitor.update(*part)
    for g in range(3):
        xs = []
        for part in batches:
            s, who = head.values(*part)
            x = (s[:, 0] * who[:, g]).tolist()
            xs.append([v for v, inside in zip(x, who[:, g].tolist(), strict=True) if inside or not conditional])
        expected = evidence_loop(xs, 0.02, -1.0, 1.0)
        assert monitor.log_evidence()[g].exp().tolist() == pytest.approx(expected, rel=1e-6)
    assert monitor.evidence == pytest.approx(float(monitor.log_evidence().exp().mean()))


@pytest.mark.parametrize("entry", ZOO, ids=[entry.name for entry in ZOO])
def test_every_head_can_be_watched(entry):
    head, data = entry.fitted(), entry.data(90, 5).observe
    if head.s_range() is None:
        with pytest.raises(ValueError, match="needs the range of s"):
            gmc.Monitor(head, alpha=0.5)
        return
    monitor = gmc.Monitor(head, alpha=0.4)
    monitor.update(*data)
    assert not monitor.alarm and int(monitor.examples) == 90 and len(monitor.rows()) == len(head.test_functions().all())
    estimates = {(r["group"], r["what"]): r["estimate"] for r in head.audit(*data).rows()}
    for row in monitor.rows():
        assert row["estimate"] == pytest.approx(estimates[row["group"], row["what"]], abs=1e-9)


def test_drift_is_found_and_named_and_a_state_goes_on():
    head = fitted()
    whole, first = gmc.Monitor(head), gmc.Monitor(head)
    parts = [batch(100, k, 0.0 if k < 10 else 0.5) for k in range(30)]
    for part in parts:
        whole.update(*part)
    for part in parts[:12]:
        first.update(*part)
    second = gmc.Monitor(head)
    second.load_state_dict(first.state_dict())
    good = first.state_dict()
    for name in ("log_capital", "highest", "sums", "history"):  # NaN would never become an alarm
        with pytest.raises(RuntimeError, match=f"{name!r} holds NaN"):
            second.load_state_dict(good | {name: good[name] * torch.nan})
    with pytest.raises(RuntimeError, match="'history' has the shape"):
        second.load_state_dict(good | {"history": good["history"][:, :1]})
    assert all(torch.equal(value, good[name]) for name, value in second.state_dict().items())
    for part in parts[12:]:
        second.update(*part)
    assert whole.alarm and whole.named[0] == "a" and 1000 < int(whole.alarmed) < 2000 and "ALARM" in str(whole)
    assert second.compute() == whole.compute() and torch.equal(second.history, whole.history) and second.table == whole.table
    assert len(whole.history) == 30 and whole.message.count("a") and whole.to_pandas is not None
    whole.reset()
    assert not whole.alarm and int(whole.examples) == 0 and whole.evidence == pytest.approx(1.0) and whole.named == []
    assert "No alarm" in whole.message


def test_an_alarm_without_a_certain_group_names_the_one_with_most_evidence():
    monitor = Watch(Names([f"g{k}" for k in range(40)], [""]), 0.1, 0.05, False)
    monitor.alarmed.fill_(10)
    monitor.highest[7] = 5.0
    assert monitor.named == ["g7 (most evidence, but not certain by itself)"]


def test_the_history_stays_short():
    monitor = gmc.Monitor(fitted())
    monitor.history = torch.zeros(4096, 2).double()
    monitor.update(*batch(5, 0))
    assert len(monitor.history) == 2049


def test_clusters_and_weights():
    head = fitted()
    probs, y, groups = batch(40, 1)
    ids = torch.arange(40) // 4
    with pytest.raises(ValueError, match="`cluster_size` = 1 must bound"):
        gmc.Monitor(head).update(probs, y, groups, clusters=ids)
    with pytest.raises(ValueError, match="`cluster_size`"):
        gmc.Monitor(head).update(probs, y, groups, weight=torch.full((40,), 2.0))
    one = gmc.Monitor(head, cluster_size=4)
    one.update(probs, y, groups, clusters=ids)
    s, who = head.values(probs, y, groups)
    sums = ((s[:, 0] * who[:, 0]).view(10, 4)).mean(1).tolist()  # each cluster is one x, of mean 4 examples
    assert one.log_evidence()[0].exp().tolist() == pytest.approx(evidence_loop([sums], 0.05, -1.0, 1.0), rel=1e-6)


def test_what_is_refused():
    with pytest.raises(TypeError, match="`head` must be"):
        gmc.Monitor(torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="not fitted"):
        gmc.Monitor(gmc.ThresholdHead(0.1, 0.01))
    with pytest.raises(ValueError, match="`alpha` is missing"):
        gmc.Monitor(fitted(None))
    with pytest.raises(ValueError, match="`delta`"):
        gmc.Monitor(fitted(), delta=0.0)
    monitor = gmc.Monitor(fitted())
    probs, y, groups = batch(10, 0)
    probs[3] = torch.nan
    with pytest.raises(ValueError, match="must be finite"):
        monitor.update(probs, y, groups)
    assert int(monitor.batches) == 0
    with pytest.raises(ValueError, match="no batch"):
        monitor.plot()


def quiet_runs(runs, batches, x):
    """Alarms of independent monitors of two g each, worked on at once; ``x(n)`` draws values with means at alpha."""
    watch = Watch(Names([f"{k}" for k in range(2 * runs)], [""]), 0.05, 0.1, False)
    ever = torch.zeros(runs, dtype=torch.bool)
    for _ in range(batches):
        s = x(2 * runs)
        watch._add(
            watch._rows(s, torch.ones(len(s), 1).bool(), torch.ones(len(s)).double(), torch.zeros(len(s), 0).long(), (-1.0, 1.0))
        )
        log_e = watch.log_evidence().view(runs, 4)
        ever |= log_e.logsumexp(1) - math.log(4) >= -math.log(0.1)
    return float(ever.double().mean())


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["coin", "skewed"])
def test_false_alarms_over_quiet_runs(shape):
    """400 runs of 60 batches with both means exactly at alpha = 0.05, delta 0.1: at most 10 % (and 3 standard errors)."""
    rng = torch.Generator().manual_seed(0)

    def draw(count):
        u = torch.rand(20, count, generator=rng).double()
        return torch.where(u < 0.525, 1.0, -1.0) if shape == "coin" else u**4 - 0.15

    assert quiet_runs(400, 60, draw) <= 0.1 + 3 * (0.09 / 400) ** 0.5


class TestShift:
    def test_shares_of_groups_and_scores(self):
        rng = torch.Generator().manual_seed(0)
        scores, groups = torch.rand(3000, generator=rng), torch.rand(3000, 1, generator=rng) < 0.3
        for moved, name in ((0, None), (1, "share of a"), (2, "scores below")):
            watch = gmc.ShiftMonitor(scores, groups, ["a"])
            for _ in range(20):
                new, who = torch.rand(100, generator=rng), torch.rand(100, 1, generator=rng) < (0.6 if moved == 1 else 0.3)
                watch.update(new**3 if moved == 2 else new, who)
            assert watch.alarm is (name is not None), moved
            if name:
                assert watch.named[0].startswith(name) and "moved by more than" in watch.message

    def test_pictures_and_state(self):
        watch, again = (gmc.ShiftMonitor(torch.rand(200, 4, 4), bins=4) for _ in range(2))
        watch.update(torch.rand(50, 4, 4))
        again.load_state_dict(watch.state_dict())
        assert again.evidence == watch.evidence and len(watch.rows()) == 4

    def test_groups_by_name_and_columns(self):
        """Frames of columns and Groups of the same names are one membership; other names and other numbers are refused."""
        pd = pytest.importorskip("pandas")
        scores, sex = torch.rand(300), ["f", "m", "f"] * 100
        groups = gmc.Groups.from_columns({"sex": sex})
        watches = [gmc.ShiftMonitor(scores, groups) for _ in range(3)]
        frame = pd.DataFrame({"sex": ["f", "m"] * 20})
        new = groups.transform(frame)
        for watch, who in zip(watches, (frame, new, new.membership), strict=True):
            watch.update(scores[:40], who)
        assert len({watch.evidence for watch in watches}) == 1
        assert {row["group"] for row in watches[0].rows()} > {f"share of {name}" for name in groups.names}
        other = gmc.Groups.from_levels({"sex": ["m", "f"]}).transform(frame)
        with pytest.raises(ValueError, match="in another order"):
            watches[0].update(scores[:40], other)
        with pytest.raises(ValueError, match="memberships, True or False"):
            watches[0].update(scores[:40], 255 * new.membership.byte())
        with pytest.raises(ValueError, match="came without `Groups`"):
            gmc.ShiftMonitor(scores, groups.membership).update(scores[:40], frame)

    def test_a_state_of_other_groups_is_refused(self):
        """In another order, the evidence against one group would be held against the other."""
        scores, member = torch.rand(200), torch.rand(200, 2) < 0.5
        one, same, other = (gmc.ShiftMonitor(scores, member, names) for names in (["a", "b"], ["a", "b"], ["b", "a"]))
        one.update(scores[:50], member[:50])
        same.load_state_dict(one.state_dict())
        with pytest.raises(RuntimeError, match="their order"):
            other.load_state_dict(one.state_dict())
        assert same.evidence == one.evidence and int(other.examples) == 0
        old = {name: value for name, value in one.state_dict().items() if name != "promises"}  # of an earlier version
        same.load_state_dict(old)

    def test_what_is_refused(self):
        with pytest.raises(ValueError, match="at least 100"):
            gmc.ShiftMonitor(torch.rand(5))
        with pytest.raises(ValueError, match="`names`"):
            gmc.ShiftMonitor(torch.rand(200), torch.ones(200, 2).bool(), ["a"])
        watch = gmc.ShiftMonitor(torch.rand(200))
        with pytest.raises(ValueError, match="`groups` must have the same columns"):
            watch.update(torch.rand(20), torch.ones(20, 1).bool())
        with pytest.raises(ValueError, match="`scores`"):
            watch.update(torch.full((20,), math.nan))
