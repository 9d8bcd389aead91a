"""ThresholdHead against per-pixel, per-image loops, and by the properties of the theory."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch._subclasses import FakeTensorMode

import torchgmc as gmc
from gmctest.fake_device import AWAY
from gmctest.oracles import algorithm_1, everyone_too, false_alarm_rate, group_violations, miss_rate, pinball
from torchgmc.engine.folds import deal
from torchgmc.heads.threshold.risks import MonotoneRisk


def make(n=40, m=30, a=3, seed=0, dtype=torch.float64):
    """Scores whose difficulty depends on overlapping groups; every group and every image has what it needs."""
    rng = torch.Generator().manual_seed(seed)
    groups = torch.rand(n, a, generator=rng) < 0.5
    groups[:a] |= torch.eye(a, dtype=torch.bool)
    masks = torch.rand(n, m, generator=rng) < 0.4
    masks[:, 0] = True
    shift = groups.double() @ torch.linspace(-1, 1, a).double()
    logits = 2 * masks + torch.randn(n, m, generator=rng, dtype=torch.float64) - 1 + shift[:, None]
    return torch.sigmoid(logits).to(dtype), masks, groups


def recompute(head, scores, masks, groups, target, **options):
    """Violations of a fitted head by the loop."""
    thresholds, asked = head.threshold(groups).tolist(), everyone_too(groups) if head.promises_everyone else groups
    return group_violations(scores.tolist(), masks.tolist(), asked.tolist(), thresholds, target, **options)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("conditional", [False, True])
def test_paper_equals_the_loop(seed, conditional):
    scores, masks, groups = make(n=30, seed=seed)
    alpha, eta, cap = 0.02, [0.01, 0.03, 1 / 64][seed % 3], 300
    head = gmc.ThresholdHead(target=0.1, alpha=alpha, groups=["a", "b", "c"], conditional=conditional, init=0.5)
    head.fit(scores, masks, groups, solver="paper", eta=eta, max_iter=cap)
    expected, steps = algorithm_1(
        scores.tolist(), masks.tolist(), groups.tolist(), 0.1, alpha, eta, 0.5, cap, conditional=conditional
    )
    if steps == cap:  # the loop never stops, and the solver says why
        assert "returns to the same f" in head.report.message
        return
    assert head.report.iterations == steps > 0
    torch.testing.assert_close(head.threshold(groups), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)
    table = recompute(head, scores, masks, groups, 0.1, conditional=conditional)
    torch.testing.assert_close(head.report.violations_after[:, 0], torch.tensor(table, dtype=torch.float64))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("resolution", [None, "exact"])
def test_exact_ends_within_alpha_in_a_fraction_of_the_steps(seed, conditional, resolution):
    scores, masks, groups = make(n=120, m=60, seed=seed)
    alpha = 0.01
    head = gmc.ThresholdHead(0.1, alpha, ["a", "b", "c"], conditional=conditional, resolution=resolution, noise_floor=False).fit(
        scores, masks, groups
    )
    table = recompute(head, scores, masks, groups, 0.1, conditional=conditional)
    assert head.report.converged and len(table) == 4
    assert max(map(abs, table)) <= alpha
    torch.testing.assert_close(head.report.violations_after[:, 0], torch.tensor(table, dtype=torch.float64))
    paper = copy.deepcopy(head).fit(scores, masks, groups, solver="paper", eta=1 / 512, max_iter=5000).report
    assert head.report.iterations <= paper.iterations / 4


def test_false_positive_rate():
    scores, masks, groups = make(n=120, m=60, seed=1)
    head = gmc.ThresholdHead(0.2, 0.01, ["a", "b", "c"], risk="fpr", noise_floor=False).fit(scores, masks, groups)
    table = recompute(head, scores, masks, groups, 0.2, risk=false_alarm_rate)
    assert max(map(abs, table)) <= 0.01
    torch.testing.assert_close(head.report.violations_after[:, 0], torch.tensor(table, dtype=torch.float64))
    audit = head.audit(scores, masks, groups)
    assert audit.max_violation == pytest.approx(max(map(abs, table)))


def test_several_classes_have_their_own_thresholds():
    parts = [make(n=90, m=40, seed=s) for s in (3, 4)]
    scores, masks = torch.stack([p[0] for p in parts], 1), torch.stack([p[1] for p in parts], 1)
    masks[:7, 1] = False  # seven images without class 1
    groups = parts[0][2]
    head = gmc.ThresholdHead([0.1, 0.2], 0.01, ["a", "b", "c"], num_classes=2, noise_floor=False)
    head.fit(scores, masks, groups)
    assert head.threshold(groups).shape == (90, 2) and head(scores, groups).shape == scores.shape
    assert head.report.details["excluded"] == [0, 7]
    for c, target in enumerate([0.1, 0.2]):
        thresholds = head.threshold(groups)[:, c].tolist()
        asked = everyone_too(groups).tolist()
        table = group_violations(scores[:, c].tolist(), masks[:, c].tolist(), asked, thresholds, target)
        assert max(map(abs, table)) <= 0.01
        torch.testing.assert_close(head.report.violations_after[:, c], torch.tensor(table, dtype=torch.float64))


def test_images_without_a_positive_pixel_are_left_out_and_counted():
    scores, masks, groups = make(seed=5)
    masks[10:15] = False
    head = gmc.ThresholdHead(0.1, 0.03, ["a", "b", "c"]).fit(scores, masks, groups)
    kept = torch.cat([torch.arange(10), torch.arange(15, 40)])
    other = gmc.ThresholdHead(0.1, 0.03, ["a", "b", "c"]).fit(scores[kept], masks[kept], groups[kept])
    assert head.report.details["excluded"] == 5 and "5 images" in head.report.message
    torch.testing.assert_close(head.offsets, other.offsets)
    assert head.audit(scores, masks, groups).excluded == 5


@settings(deadline=None, max_examples=25)
@given(cuts=st.lists(st.integers(0, 40), max_size=5), seed=st.integers(0, 100), resolution=st.sampled_from([None, 0.01, "exact"]))
def test_batches_of_any_size_equal_the_whole(cuts, seed, resolution):
    scores, masks, groups = make(seed=seed)
    weight = torch.rand(40, generator=torch.Generator().manual_seed(seed)) + 0.5
    whole = gmc.ThresholdHead(0.1, 0.02, ["a", "b", "c"], resolution=resolution)
    whole.observe(scores, masks, groups, weight)
    parts = copy.deepcopy(whole)
    parts.reset()
    edges = [0, *sorted(cuts), 40]
    for i, j in pairwise(edges):
        parts.observe(scores[i:j], masks[i:j], groups[i:j], weight[i:j])
    torch.testing.assert_close(whole.calibrate().offsets, parts.calibrate().offsets)
    torch.testing.assert_close(whole.report.violations_after, parts.report.violations_after)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), jitter=st.sampled_from([0.0, 0.05]))
def test_order_of_images_and_groups_does_not_matter(seed, jitter):
    scores, masks, groups = make(seed=seed)
    order, columns = torch.randperm(40), torch.randperm(3)
    names = ["a", "b", "c"]
    one = gmc.ThresholdHead(0.1, 0.02, names, jitter=jitter).fit(scores, masks, groups)
    two = gmc.ThresholdHead(0.1, 0.02, names, jitter=jitter).fit(scores[order], masks[order], groups[order])
    torch.testing.assert_close(one.offsets, two.offsets)
    three = gmc.ThresholdHead(0.1, 0.02, [names[i] for i in columns], jitter=jitter).fit(scores, masks, groups[:, columns])
    assert three.report.converged == one.report.converged
    torch.testing.assert_close(one.threshold(groups), three.threshold(groups[:, columns]))


def test_the_potential_never_rises_and_exact_ends_at_its_minimum():
    """Fixed steps go down the pinball loss; "exact" minimises it with a slack for each group, so it lies below all of them."""
    scores, masks, groups = make(n=60, m=40, seed=7)
    names, alpha = ["a", "b", "c"], 1e-3
    exact = gmc.ThresholdHead(0.1, alpha, names, resolution="exact", noise_floor=False).fit(scores, masks, groups)

    def potential(head):
        return pinball(scores.tolist(), masks.tolist(), head.threshold(groups).tolist(), 0.1)

    def price(head):
        return 0.95 * alpha * float(head.offsets.abs().sum())

    values = []
    for cap in range(1, 15):
        head = gmc.ThresholdHead(0.1, alpha, names).fit(scores, masks, groups, solver="paper", max_iter=cap, eta=1 / 256)
        values.append(potential(head))
        assert potential(exact) + price(exact) <= values[-1] + price(head) + 1e-9
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(values))
    for move in torch.eye(3, dtype=torch.float64):  # nor does a small step along one group lead further down
        for step in (1e-4, -1e-4, 1e-2, -1e-2):
            near = copy.deepcopy(exact)
            near.offsets += step * move[:, None]
            assert potential(exact) + price(exact) <= potential(near) + price(near) + 1e-7  # offsets are rounded to 1e-6


def test_restarting_at_a_solution_changes_nothing():
    scores, masks, _ = make(n=100, m=60, seed=8)
    head = gmc.ThresholdHead(0.1, 0.02).fit(scores, masks)
    start = float(head.threshold()[0])
    again = gmc.ThresholdHead(0.1, 0.02, init=start).fit(scores, masks)
    assert again.report.converged and float(again.threshold()[0]) == pytest.approx(start, abs=1 / 4096)
    torch.testing.assert_close(again.report.violations_before, again.report.violations_after)
    paper = gmc.ThresholdHead(0.1, 0.02, init=start).fit(scores, masks, solver="paper")
    assert paper.report.iterations == 0 and paper.report.converged
    assert paper.report.history.shape == (1,)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000))
@example(seed=100)  # offsets of half a step of the lattice
def test_weights_equal_repeated_images(seed):
    scores, masks, groups = make(n=20, seed=seed)
    times = torch.randint(1, 4, (20,), generator=torch.Generator().manual_seed(seed))
    one = gmc.ThresholdHead(0.1, 0.02, ["a", "b", "c"], noise_floor=False).fit(scores, masks, groups, weight=times)
    repeated = torch.arange(20).repeat_interleave(times)
    two = gmc.ThresholdHead(0.1, 0.02, ["a", "b", "c"], noise_floor=False)
    two.fit(scores[repeated], masks[repeated], groups[repeated])
    torch.testing.assert_close(one.report.violations_before, two.report.violations_before)
    torch.testing.assert_close(one.offsets, two.offsets)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("resolution", [None, 0.003, "exact"])
def test_every_floating_type_is_evaluated_as_the_head_applies_it(dtype, resolution):
    scores, masks, groups = make(n=80, m=50, seed=9, dtype=dtype)
    head = gmc.ThresholdHead(0.1, 0.02, ["a", "b", "c"], resolution=resolution).fit(scores, masks, groups)
    missed = (masks & ~head(scores, groups)).sum(1).double() / masks.sum(1).double()
    table = gmc.violations(everyone_too(groups), missed - 0.1)
    torch.testing.assert_close(head.report.violations_after, table, rtol=0, atol=1e-12)


def test_float32_is_close_to_float64():
    scores, masks, groups = make(n=100, m=60, seed=10)
    heads = [gmc.ThresholdHead(0.1, 0.01, ["a", "b", "c"]).fit(s, masks, groups) for s in (scores, scores.float())]
    torch.testing.assert_close(heads[0].offsets, heads[1].offsets, rtol=0, atol=2 / 4096)


def test_logits_and_other_ranges():
    scores, masks, groups = make(n=100, m=60, seed=11)
    logits = torch.logit(scores)
    head = gmc.ThresholdHead(0.1, 0.01, ["a", "b", "c"], logits=True, noise_floor=False).fit(logits, masks, groups)
    table = recompute(head, logits, masks, groups, 0.1)
    assert max(map(abs, table)) <= 0.01 and head.init == 0.0
    wide = gmc.ThresholdHead(0.1, 0.01, ["a", "b", "c"], range=(-50, 250), noise_floor=False)
    wide.fit(scores * 200, masks, groups)
    assert max(map(abs, recompute(wide, scores * 200, masks, groups, 0.1))) <= 0.01


def test_scores_beyond_the_range_count_as_the_head_counts_them():
    scores, masks, groups = make(n=60, m=50, seed=12)
    logits = torch.logit(scores) * 20  # far beyond [-16, 16]
    head = gmc.ThresholdHead(0.3, 0.01, ["a", "b", "c"], logits=True, init=12.0).fit(logits, masks, groups)
    table = recompute(head, logits, masks, groups, 0.3)
    torch.testing.assert_close(head.report.violations_after[:, 0], torch.tensor(table, dtype=torch.float64))


def test_paper_start_outside_the_range():
    """The paper's f0 = 1.5 with probabilities."""
    scores, masks, groups = make(n=60, m=50, seed=13)
    head = gmc.ThresholdHead(0.075, 0.02, ["a", "b", "c"], init=1.5)
    head.fit(scores, masks, groups, solver="paper", eta=0.05, max_iter=500)
    expected, steps = algorithm_1(scores.tolist(), masks.tolist(), groups.tolist(), 0.075, 0.02, 0.05, 1.5, 500)
    assert head.report.iterations == steps
    torch.testing.assert_close(head.threshold(groups), torch.tensor(expected, dtype=torch.float64))
    exact = gmc.ThresholdHead(0.075, 0.02, ["a", "b", "c"], init=1.5, noise_floor=False).fit(scores, masks, groups)
    assert exact.report.converged


def test_no_groups_is_one_group_of_everyone():
    scores, masks, _ = make(n=100, m=60, seed=14)
    head = gmc.ThresholdHead(0.1, 0.01).fit(scores, masks)
    assert head.threshold(n=3).shape == (3,) and head(scores).shape == scores.shape
    assert head.audit(scores, masks).table["group"] == ["all"]


def test_jitter_is_a_function_of_the_image_and_breaks_an_atom():
    rng = torch.Generator().manual_seed(0)
    scores = (torch.rand(60, 12, 12, generator=rng) * 4).floor() / 4  # four values
    masks = torch.rand(60, 12, 12, generator=rng) < 0.5
    plain = gmc.ThresholdHead(0.1, 0.005).fit(scores, masks)
    assert not plain.report.converged and "atom" in plain.report.message and "jitter" in plain.report.message
    head = gmc.ThresholdHead(0.1, 0.005, jitter=0.1).fit(scores, masks)
    assert head.report.converged
    assert torch.equal(head(scores)[3:5], head(scores[3:5]))
    missed = (masks & ~head(scores)).sum((1, 2)) / masks.sum((1, 2))
    assert abs(float(missed.mean()) - 0.1) <= 0.005 + 1e-6


def test_fresh_splits_keep_the_three_quarter_rule():
    scores, masks, groups = make(n=4000, m=12, seed=15)
    head = gmc.ThresholdHead(0.1, 0.05, ["a", "b", "c"])
    head.fit(scores, masks, groups, solver="fresh", eta=0.02, max_iter=20)
    report = head.report
    assert report.converged and 0 < report.iterations < 20 and "3/4 alpha" in report.message
    # The split that stopped it, measured by the loop with the final thresholds, has no violation above 3/4 alpha.
    split = deal(40, *head.statistics.content())
    chosen = (split == 2 * report.iterations).tolist()
    rows = [i for i, c in enumerate(chosen) if c]
    pick = lambda t: [t.tolist()[i] for i in rows]  # noqa: E731
    table = group_violations(pick(scores), pick(masks), pick(groups), pick(head.threshold(groups)), 0.1)
    assert max(map(abs, table)) <= 0.75 * 0.05
    assert split.bincount(minlength=40).min() > 0


def test_streaming_needs_no_more_memory_for_more_images():
    head = gmc.ThresholdHead(0.1, 0.02, ["a", "b", "c"])
    sizes = set()
    for seed in range(5):
        head.observe(*make(n=60, seed=seed))
        sizes.add(head.statistics.steps.numel())
    assert len(sizes) == 1 and int(head.statistics.examples) == 300


def test_observe_in_slices_of_bounded_size(monkeypatch):
    scores, masks, groups = make(n=40, m=30, seed=16)
    whole = gmc.ThresholdHead(0.1, 0.02, ["a", "b", "c"]).fit(scores, masks, groups)
    monkeypatch.setattr("torchgmc.heads.threshold.problem.MAX_ELEMENTS", 10_000)
    monkeypatch.setattr("torchgmc.heads.threshold.risks.CHUNK", 64)
    sliced = gmc.ThresholdHead(0.1, 0.02, ["a", "b", "c"]).fit(scores, masks, groups)
    torch.testing.assert_close(whole.offsets, sliced.offsets)


def test_n_of_0_and_1():
    head = gmc.ThresholdHead(0.1, 0.02, noise_floor=False)
    with pytest.raises(ValueError, match="no examples observed"):
        head.fit(torch.zeros(0, 4), torch.zeros(0, 4).bool())
    head.fit(torch.tensor([[0.2, 0.6]]), torch.tensor([[True, True]]))
    assert not head.report.converged and "jumps" in head.report.message
    ten = gmc.ThresholdHead(0.1, 0.02).fit(torch.linspace(0.05, 0.95, 10)[None], torch.ones(1, 10).bool())
    assert ten.report.converged


def test_unreachable_target_says_so():
    scores, masks, _ = make(n=50, seed=17)
    head = gmc.ThresholdHead(0.5, 0.01, range=(0.0, 0.1)).fit(scores, masks)
    assert not head.report.converged and "unreachable" in head.report.message and "range" in head.report.message


def test_a_fixed_step_that_cycles_is_stopped():
    # One image of ten equal pixels on either side of one step: FN is 0 or 1 and the target lies between.
    scores, masks = torch.full((4, 10), 0.501).double(), torch.ones(4, 10).bool()
    head = gmc.ThresholdHead(0.3, 0.01).fit(scores, masks, solver="paper", eta=0.25, max_iter=10_000)
    assert not head.report.converged and "returns to the same f every 2 steps" in head.report.message
    assert "eta" in head.report.message and "atom" in head.report.message
    assert head.report.iterations < 10
    assert head.audit(scores, masks).max_violation == pytest.approx(0.3)  # the better of the two


def test_too_few_steps_says_so():
    scores, masks, groups = make(seed=18)
    head = gmc.ThresholdHead(0.1, 0.01, ["a", "b", "c"]).fit(scores, masks, groups, solver="paper", eta=0.001, max_iter=3)
    assert not head.report.converged and "`max_iter` = 3 reached" in head.report.message


def test_refit_forgets_and_a_failed_fit_changes_nothing():
    scores, masks, groups = make(seed=19)
    head = gmc.ThresholdHead(0.1, 0.02, ["a", "b", "c"]).fit(scores, masks, groups)
    offsets, report = head.offsets.clone(), head.report
    with pytest.raises(ValueError, match="finite"):
        head.fit(scores * math.nan, masks, groups)
    assert torch.equal(head.offsets, offsets) and head.report is report and head.is_fitted
    head.fit(scores, masks, groups)
    assert torch.equal(head.offsets, offsets)


def test_state_dict_copy_half_and_repr():
    scores, masks, groups = make(seed=20)
    head = gmc.ThresholdHead(0.1, 0.02, ["a", "b", "c"]).fit(scores, masks, groups)
    fresh = gmc.ThresholdHead(0.1, 0.02, ["a", "b", "c"])
    assert "fitted=False" in repr(fresh)
    fresh.load_state_dict(head.state_dict())
    assert torch.equal(fresh(scores, groups), head(scores, groups)) and "fitted=True" in repr(fresh)
    assert torch.equal(copy.deepcopy(head).half()(scores, groups), head(scores, groups))
    assert copy.deepcopy(head).half().offsets.dtype == torch.float64


def test_script_and_export_equal_eager():
    scores, masks, groups = make(n=24, m=16, seed=21, dtype=torch.float32)
    images = scores.view(24, 4, 4)
    for options in ({}, {"jitter": 0.02}, {"conditional": True, "logits": True}):
        head = gmc.ThresholdHead(0.1, 0.05, ["a", "b", "c"], **options).fit(images, masks.view(24, 4, 4), groups)
        expected = head(images, groups)
        assert torch.equal(torch.jit.script(head)(images, groups), expected)
        batch = torch.export.Dim("batch", min=2, max=10_000)
        program = torch.export.export(head, (images, groups), dynamic_shapes=({0: batch}, {0: batch}))
        assert torch.equal(program.module()(images[:7], groups[:7]), expected[:7])


def test_stays_on_the_device():
    with FakeTensorMode():
        head = gmc.ThresholdHead(0.1, 0.02, ["a", "b"], jitter=0.1).to(AWAY)
        head.is_fitted = True
        scores, groups = torch.rand(4, 8, 8, device=AWAY), torch.ones(4, 2, device=AWAY).bool()
        assert head(scores, groups).device == AWAY
        assert head.threshold(groups).device == AWAY
        assert head.offsets.device == AWAY


def test_masks_on_fresh_images_stay_near_the_target():
    """Fresh draws: with 2000 calibration and 2000 test images the deviation of each of 3 groups stays within alpha +
    4 standard errors; under normality each comparison fails with probability 6e-5, so the test with 1e-3."""
    scores, masks, groups = make(n=4000, m=20, seed=22)
    head = gmc.ThresholdHead(0.1, 0.005, ["a", "b", "c"]).fit(scores[:2000], masks[:2000], groups[:2000])
    missed = (masks & ~head(scores, groups)).sum(1) / masks.sum(1)
    s = (missed - 0.1)[2000:, None] * groups[2000:]
    calibration = (missed - 0.1)[:2000, None] * groups[:2000]
    error = (s.var(0) / 2000 + calibration.var(0) / 2000).sqrt()
    assert (s.mean(0).abs() <= 0.005 + 4 * error).all()


def test_the_loop_itself():
    """The oracle on a case done by hand: two positive pixels, one missed."""
    assert miss_rate([0.2, 0.8, 0.9], [True, True, False], 0.5) == 0.5
    assert miss_rate([0.2], [False], 0.5) is None


@pytest.mark.parametrize("batch", [2, 5, 64])
@pytest.mark.parametrize("solver", ["exact", "paper", "fresh"])
def test_many_steps_between_two_looks_change_nothing(monkeypatch, batch, solver):
    """On a GPU the solver looks at its result once in a batch of steps."""
    scores, masks, groups = make(n=200, m=40, seed=24)
    options = {} if solver == "exact" else {"eta": 1 / 128, "max_iter": 8 if solver == "fresh" else 500}
    one = gmc.ThresholdHead(0.1, 0.02, ["a", "b", "c"]).fit(scores, masks, groups, solver=solver, **options)
    monkeypatch.setattr("torchgmc.engine.solver.steps_per_sync", lambda device: batch)
    many = gmc.ThresholdHead(0.1, 0.02, ["a", "b", "c"]).fit(scores, masks, groups, solver=solver, **options)
    assert many.report.iterations == one.report.iterations and many.report.converged == one.report.converged
    torch.testing.assert_close(many.offsets, one.offsets)
    torch.testing.assert_close(many.report.history, one.report.history)


def test_a_risk_of_ones_own():
    scores, masks, groups = make(n=80, m=16, seed=2)
    scores, masks = scores.view(80, 4, 4), masks.view(80, 4, 4)

    def missed(scores, masks, thresholds):  # of the image's centre, as a user might write it
        inside = masks & (scores <= thresholds[:, :, None, None])
        return (inside[:, :, 1:3, 1:3].sum((2, 3)) / 4).double()

    head = gmc.ThresholdHead(0.1, 0.02, ["a", "b", "c"], risk=MonotoneRisk(missed), noise_floor=False)
    head.fit(scores, masks, groups)
    risk = missed(scores[:, None], masks[:, None], head.threshold(groups)[:, None])
    assert gmc.violations(everyone_too(groups), risk - 0.1).abs().max() <= 0.02
    assert head.audit(scores, masks, groups).holds


def test_monotone_risk_is_checked():
    scores, masks, groups = make(seed=23)
    head = gmc.ThresholdHead(0.1, 0.02, ["a", "b", "c"], risk=MonotoneRisk(lambda s, m, t: (t * 6).sin().abs(), name="wave"))
    with pytest.raises(ValueError, match="'wave' must be increasing in the threshold, but for example 0, class 0"):
        head.fit(scores, masks, groups)
    bad = gmc.ThresholdHead(0.1, 0.02, ["a", "b", "c"], risk=MonotoneRisk(lambda s, m, t: t * 7 + 3, name="big"))
    with pytest.raises(ValueError, match=r"'big' must lie in \[0, 1\]"):
        bad.fit(scores, masks, groups)
