"""QuantileHead against loops over examples, ThresholdHead, and by its properties."""

import contextlib
import copy
import math

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch.autograd import gradcheck

import torchgmc as gmc
from gmctest import oracles_levelsets as oracle
from gmctest.oracles_levelsets import scores_of
from gmctest.soft_heads import SOFT, fitted, inputs_of
from torchgmc.engine.folds import deal
from torchgmc.heads.quantile.problem import quantile_error

NAMES = ["a", "b", "c"]


def table_of(q, scores, member, target, edges=(), conditional=False):
    s = [[float(score <= limit) - target] for score, limit in zip(scores.tolist(), q.tolist(), strict=True)]
    if not bool(member.all(0).any()):  # the head promises it for everyone too
        member = torch.cat([member, torch.ones_like(member[:, :1])], 1)
    share = member.double().mean(0).tolist() if conditional else None
    return oracle.cell_table(q[:, None].tolist(), s, member.tolist(), list(edges), share=share)


@pytest.mark.parametrize("bins", [None, 4])
@pytest.mark.parametrize("conditional", [False, True])
def test_paper_equals_loop_step_by_step(bins, conditional):
    scores, member = scores_of(400)
    alpha, eta, target = 0.03, 2.0**-3, 0.9
    head = gmc.QuantileHead(target, alpha, NAMES, bins, conditional, init=3.0, range=(0.0, 8.0))
    head.fit(scores, member, solver="paper", eta=eta, max_iter=80)
    final, steps = oracle.algorithm_1(
        [[3.0]] * 400,
        lambda i, row: [float(scores[i] <= row[0]) - target],
        lambda row: row,
        member.tolist(),
        [8.0 * k / (bins or 1) for k in range(1, bins or 1)],
        alpha,
        eta,
        80,
        share=member.double().mean(0).tolist() if conditional else None,
    )
    if len(steps) < 80:  # else a fixed step may cycle, and the solver returns the best f seen
        assert head.report.converged and head.report.iterations == len(steps) > 2
        torch.testing.assert_close(head.report.history[:-1], torch.tensor([s[3] for s in steps]).double(), rtol=0, atol=1e-7)
        expected = torch.tensor([row[0] for row in final], dtype=torch.float64)
        torch.testing.assert_close(head(member), expected, rtol=0, atol=1e-7)
    else:
        assert not head.report.converged


def test_fresh_equals_loop():
    scores, member = scores_of(1200)
    alpha, eta, steps = 0.1, 0.5, 8
    head = gmc.QuantileHead(0.9, alpha, NAMES, init=0.5).fit(scores, member, solver="fresh", eta=eta, max_iter=steps)
    order = deal(2 * steps, *head.statistics.content())
    final, taken = oracle.algorithm_1(
        [[0.5]] * 1200,
        lambda i, row: [float(scores[i] <= row[0]) - 0.9],
        lambda row: row,
        member.tolist(),
        [],
        alpha,
        eta,
        steps,
        splits=order.tolist(),
    )
    assert len(taken) > 1 and head.report.iterations == len(taken)
    torch.testing.assert_close(head(member), torch.tensor([row[0] for row in final], dtype=torch.float64))


def worst_level(audit):
    """Largest |violation| of a level set, which the fit promises; the audit has a row for all of a group's together too."""
    return max(abs(row["estimate"]) for row in audit.rows() if row.get("what") != "all levels")


@pytest.mark.parametrize("bins", [None, 5])
@pytest.mark.parametrize("conditional", [False, True])
def test_exact_keeps_the_promise_and_reports_it(bins, conditional):
    scores, member = scores_of(3000)
    alpha = 0.01 if conditional else 0.004
    head = gmc.QuantileHead(0.9, alpha, NAMES, bins, conditional, noise_floor=False).fit(scores, member)
    q = head(member)
    table = table_of(q, scores, member, 0.9, head.edges.tolist(), conditional)
    assert head.report.converged and oracle.worst_cell(table)[0] <= alpha
    torch.testing.assert_close(head.report.violations_after, torch.tensor(table, dtype=torch.float64), rtol=0, atol=1e-9)
    assert worst_level(head.audit(scores, member)) <= alpha


def test_agrees_with_the_threshold_head_on_one_pixel_per_image():
    """score <= q is a miss of a one-pixel image at threshold q: both heads minimise the same pinball loss."""
    scores, member = scores_of(600)
    scores = scores / scores.max()
    options = {"target": 0.9, "alpha": 0.004, "groups": NAMES, "noise_floor": False}
    quantile = gmc.QuantileHead(**options, init=0.5).fit(scores, member)
    pixels = gmc.ThresholdHead(**options, resolution="exact", init=0.5)
    pixels.fit(scores[:, None], torch.ones(600, 1, dtype=torch.bool), member)
    assert quantile.report.converged and pixels.report.converged
    torch.testing.assert_close(quantile.report.violations_before, pixels.report.violations_before)

    def loss(q):
        return float(((q - scores).clamp_min(0) - 0.9 * q).mean())

    start, ends = loss(torch.full_like(scores, 0.5)), [loss(quantile(member)), loss(pixels.threshold(member))]
    assert abs(ends[0] - ends[1]) < 0.02 * (start - min(ends))  # the last steps may differ: each coverage is hit by many q


def test_one_group_is_the_plain_quantile():
    scores, _ = scores_of(999)
    head = gmc.QuantileHead(0.9, 0.001).fit(scores)
    assert math.isclose(float(head()), float(scores.sort()[0][math.ceil(0.9 * 999) - 1]), abs_tol=1e-9)


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(1, 150),
    bins=st.sampled_from([None, 1, 4]),
    target=st.sampled_from([0.1, 0.5, 0.9]),
    alpha=st.sampled_from([0.003, 0.03]),
    ties=st.booleans(),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    seed=st.integers(0, 2**16),
)
@example(n=102, bins=4, target=0.9, alpha=0.03, ties=True, scale=1.0, seed=281)  # kept at the start; offsets would break it
def test_replay_is_the_fit_and_pinball_loss_does_not_rise(n, bins, target, alpha, ties, scale, seed):
    scores, member = scores_of(n, seed)
    scores = scale * (scores.round() if ties else scores)
    head = gmc.QuantileHead(target, alpha, NAMES, bins, noise_floor=False).fit(scores, member, max_iter=40)
    q = head(member)
    table = torch.tensor(table_of(q, scores, member, target, head.edges.tolist()), dtype=torch.float64)
    torch.testing.assert_close(head.report.violations_after, table, rtol=0, atol=1e-9)
    assert head.report.converged == bool((table.abs() <= alpha).all()) or ties
    start = head.base.expand(n)
    loss = [float(((f - scores).clamp_min(0) - target * f).mean()) for f in (start, q)]
    if bins is None:
        assert loss[1] <= loss[0] + 1e-9 * scale + float(head.unit)
    worst = [float(head.report.history[0]), float(table.abs().max())]
    assert worst[1] <= worst[0] + 1e-9


def test_weights_and_batches():
    scores, member = scores_of(400)
    weight = torch.randint(1, 4, (400,), generator=torch.Generator().manual_seed(1))
    weighted = gmc.QuantileHead(0.8, 0.004, NAMES, 3, noise_floor=False).fit(scores, member, weight=weight.double())
    plain = gmc.QuantileHead(0.8, 0.004, NAMES, 3, noise_floor=False)
    for part in torch.arange(400).split(70):
        plain.observe(scores[part].repeat_interleave(weight[part]), member[part].repeat_interleave(weight[part], 0))
    plain.calibrate()
    torch.testing.assert_close(weighted(member), plain(member))


@pytest.mark.parametrize("own", [False, True])
def test_the_unit_of_weights_does_not_matter(own):
    scores, member = scores_of(400)
    weight = torch.randint(1, 4, (400,), generator=torch.Generator().manual_seed(1)).double()
    base = 0.1 * scores.sin() if own else None
    first, *others = (gmc.QuantileHead(0.8, None, NAMES).fit(scores, member, weight * unit, base) for unit in (1, 4, 0.37, 1e-9))
    assert not math.isinf(first.report.details["slack"])  # folds have a say
    for head in others:
        torch.testing.assert_close(head(member, base), first(member, base), rtol=1e-9, atol=1e-9)


def test_a_base_of_ones_own():
    """Start from thresholds per example, e.g. of a quantile regressor; level sets are those of q itself."""
    g = torch.Generator().manual_seed(0)
    spread = 0.5 + 2 * torch.rand(4000, generator=g, dtype=torch.float64)
    member = torch.rand(4000, 2, generator=g) < 0.5
    scores = (spread * (1 + member[:, 0]) * torch.randn(4000, generator=g, dtype=torch.float64)).abs()
    base = 1.6 * spread
    head = gmc.QuantileHead(0.9, 0.004, ["a", "b"], bins=4, range=(0, 6), noise_floor=False).fit(scores, member, base=base)
    q = head(member, base)
    table = table_of(q, scores, member, 0.9, head.edges.tolist())
    assert head.report.converged and oracle.worst_cell(table)[0] <= 0.004
    assert len(head.log_who) > 0 and len(q.unique()) > 100
    assert math.isclose(worst_level(head.audit(scores, member, base=base)), oracle.worst_cell(table)[0], abs_tol=1e-9)
    with pytest.raises(ValueError, match="with every batch or with none"):
        head.observe(scores, member)


def test_an_atom_is_explained():
    head = gmc.QuantileHead(0.5, 0.01, ["all"]).fit(torch.ones(50), torch.ones(50, 1).bool())
    assert not head.report.converged and "equal scores" in head.report.message


def test_a_target_between_two_examples_ends_the_search_soon():
    g = torch.Generator().manual_seed(4)
    groups = torch.rand(16, 3, generator=g) < 0.5
    groups[:, 0] = True
    head = gmc.QuantileHead(0.8, 0.001, ["a", "b", "c"]).fit(torch.randn(16, generator=g), groups)
    assert not head.report.converged
    assert "max_iter" not in head.report.message and "more data" in head.report.message  # more steps would not help


def test_audit_shows_the_metric_of_quantile_multicalibration():
    scores, member = scores_of(2000)
    head = gmc.QuantileHead(0.9, 0.004, NAMES, bins=4).fit(scores, member)
    fresh, groups = scores_of(2000, seed=3)
    audit = head.audit(fresh, groups)
    q = head(groups)
    level = torch.bucketize(q, head.edges, right=True)
    metric = quantile_error(level, fresh <= q, groups, 0.9)
    found = {(row["group"], row["Q"]) for row in audit.rows() if row["group"] != "everyone"}
    assert found == set(zip(NAMES, metric.tolist(), strict=True))
    worst = float((metric * groups.double().mean(0)).max())
    assert math.isclose(audit.cost["worst mean squared miscoverage"], worst, rel_tol=1e-9)
    table = table_of(q, fresh, groups, 0.9, head.edges.tolist())
    assert math.isclose(worst_level(audit), oracle.worst_cell(table)[0], abs_tol=1e-9)


@pytest.mark.slow
def test_fresh_draws_stay_near_alpha():
    """30 draws of 4,000, each tested on 20,000 fresh scores.

    A group's violation on fresh data differs from that on the calibration data by less than 4.5 standard errors of both sums
    (variance at most P(A) 0.09 each) except with probability 7e-6 by the normal law; over 3 groups and 30 draws the test fails
    by chance about once in 1,600 runs; the seed is fixed.
    """
    for draw in range(30):
        scores, member = scores_of(4000, seed=draw)
        head = gmc.QuantileHead(0.9, 0.003, NAMES, noise_floor=False).fit(scores, member)
        fresh, groups = scores_of(20_000, seed=1000 + draw)
        violation = gmc.violations(groups, (fresh <= head(groups)).double() - 0.9)[:, 0]
        error = (groups.double().mean(0) * 0.09 * (1 / 4000 + 1 / 20_000)).sqrt()
        assert head.report.converged and bool((violation.abs() <= 0.003 + 4.5 * error).all())


@pytest.mark.parametrize("bins", [None, 4])
def test_files_copies_script_and_export(tmp_path, bins):
    scores, member = scores_of(800)
    head = gmc.QuantileHead(0.9, 0.002, NAMES, bins).fit(scores, member)
    expected = head(member)
    loaded = gmc.load(gmc.save(head, tmp_path / "head.safetensors"))
    fresh = gmc.QuantileHead(0.9, 0.002, NAMES, bins)
    fresh.load_state_dict(head.state_dict())
    for other in (loaded, fresh, copy.deepcopy(head), copy.deepcopy(head).half(), torch.jit.script(head)):
        assert torch.equal(other(member), expected)
    program = torch.export.export(head, (member,), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=10_000)},))
    assert torch.equal(program.module()(member[:7]), expected[:7])
    assert torch.equal(torch.cat([head(part) for part in member.split(13)]), expected)
    assert f"rounds={len(head.log_who)}" in repr(head)
    head.reset()
    assert not head.is_fitted and head.report is None and len(head.log_who) == 0


@pytest.mark.parametrize(
    ("options", "data", "match"),
    [
        ({"target": 1.5}, {}, "`target` must lie strictly between 0 and 1"),
        ({"bins": -1}, {}, "`bins`"),
        ({"range": (2, 1)}, {}, "low < high"),
        ({"init": math.inf}, {}, "`init` must be a finite"),
        ({}, {"scores": torch.rand(2, 2)}, "one conformity score per example"),
        ({}, {"scores": torch.tensor([1.0, math.inf])}, "must be finite"),
        ({}, {"groups": torch.tensor([[1, 1, 0], [1, 0, 0]])}, "group 'c' has no examples"),
        ({}, {"base": torch.rand(3)}, "`base` must have shape \\(2,\\)"),
    ],
)
def test_bad_input_is_refused_with_advice(options, data, match):
    values = {"scores": torch.tensor([0.2, 0.4]), "groups": torch.ones(2, 3).bool()} | data
    with pytest.raises(ValueError, match=match):
        gmc.QuantileHead(**({"target": 0.9, "alpha": 0.01, "groups": NAMES} | options)).fit(**values)


@pytest.mark.parametrize("name", ["quantile", "quantile-bins"])
def test_covers(name):
    head, (member, _) = fitted(name), inputs_of(name, 30)
    scores = torch.rand(30, generator=torch.Generator().manual_seed(8)) * 3
    q = head(member)
    assert torch.equal(head.covers(scores, member), scores.double() <= q)
    x = scores.clone().requires_grad_()
    values = head.covers(x, member, mode="straight_through", temperature=0.1)
    assert torch.equal(values, (scores.double() <= q).float())
    (through,) = torch.autograd.grad(values.sum(), x)
    found = head.covers(x, member, mode="soft", temperature=0.1)
    (slope,) = torch.autograd.grad(found.sum(), x)
    assert torch.equal(through, slope)
    assert bool((slope < 0).all())
    if name == "quantile":
        torch.testing.assert_close(found, torch.sigmoid((q - scores) / 0.1).float())
    assert gradcheck(lambda s: head.covers(s, member[:5], None, "soft", 0.2), (scores[:5].double().requires_grad_(),))
    with pytest.raises(ValueError, match="`mode` must be"):
        head.covers(scores, member, mode="warm")
    for mode in ("hard", *SOFT):
        with pytest.raises(ValueError, match="`temperature` must be"):
            head.covers(scores, member, mode=mode, temperature=0.0)


def test_covers_is_scripted():
    head = copy.deepcopy(fitted("quantile-bins"))
    head.statistics = head.report = None
    scores, (member, base) = torch.rand(9), inputs_of("quantile-bins", 9)
    announced = hasattr(torch.compiler, "nested_compile_region")  # recent torch says that TorchScript will end
    with pytest.warns(Warning, match="deprecated|not supported") if announced else contextlib.nullcontext():
        scripted = torch.jit.script(head)
    for mode in ("hard", *SOFT):
        assert torch.equal(scripted.covers(scores, member, base, mode, 0.1), head.covers(scores, member, base, mode, 0.1))


def test_base_has_the_derivative_one():
    head, (member, base) = fitted("quantile"), inputs_of("quantile", 10)
    base[0] = math.inf  # covers everything, as it always did
    x = base.requires_grad_()
    q = head(member, x)
    assert q[0].detach() == math.inf
    assert torch.autograd.grad(q.sum(), x)[0].tolist() == [0.0] + [1.0] * 9


def test_slacks_are_for_the_examples_of_each_group(monkeypatch):
    """What the noise rule is told: how many examples a group has, and the skewness of covered or not."""
    from torchgmc.heads.quantile import head as module

    told, fit = [], module.fit_offsets
    monkeypatch.setattr(module, "fit_offsets", lambda *given: told.append(given) or fit(*given))
    scores, member = scores_of(500)
    gmc.QuantileHead(0.8, None, NAMES).fit(scores, member)
    ((_, _, _, count, skewness, _),) = told
    assert count.tolist() == member.sum(0).tolist()
    covered = [float(score <= scores.sort().values[399]) for score in scores]  # 400 of 500
    mean = sum(covered) / 500
    second, third = (sum((one - mean) ** power for one in covered) / 500 for power in (2, 3))
    assert skewness == pytest.approx(third / second**1.5, rel=1e-12)
