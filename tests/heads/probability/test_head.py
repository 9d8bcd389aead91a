"""ProbabilityHead against loops over examples, and by its properties."""

import copy
import math

import pytest
import torch

import torchgmc as gmc
from gmctest.fake_device import AWAY
from gmctest.oracles_levelsets import classes, events, head_table

NAMES = ["a", "b", "c"]


# -- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fresh_draws_stay_near_alpha():
    """30 draws of 3,000; each head is tested on 20,000 fresh examples from the same distribution.

    A cell's sum on fresh data is its mean on the population plus noise of its own: within 4.5 standard errors except with
    probability 7e-6 (normal law), and the mean on the population is within the tolerance plus as many standard errors of
    the calibration sum. Over 2 x 24 cells x 30 draws the test fails by chance about once in 100 runs; the seed is fixed.
    """
    alpha = 0.005
    for draw in range(30):
        probs, y, member, _ = events(3000, seed=draw)
        head = gmc.ProbabilityHead(alpha, NAMES, bins=5).fit(probs, y, member)
        fresh, outcome, groups, _ = events(20_000, seed=1000 + draw)
        f = head(fresh, groups)
        level = (f * 5).long().clamp(max=4)
        s = (f - outcome.double())[:, None]
        s = torch.cat([s * torch.nn.functional.one_hot(level, 5), s], 1)
        groups = torch.cat([groups, torch.ones_like(groups[:, :1])], 1)
        violation = gmc.violations(groups, s)
        fresh_error = (groups.double().T @ s.square()).sqrt() / 20_000
        fit_error = fresh_error * math.sqrt(20_000 / 3000)
        bound = head.report.details["tolerance"] + 4.5 * (fresh_error + fit_error)
        assert head.report.reached != "no" and bool((violation.abs() <= bound).all())
        assert float((f - outcome.double()).square().mean()) < float((fresh - outcome.double()).square().mean())


def test_the_noise_floor_saves_fresh_data():
    """At an alpha far below the noise, stopping at the noise floor predicts better than chasing it."""
    probs, y, member, _ = events(400, a=8)
    names = [str(i) for i in range(8)]
    fresh, _, groups, truth = events(20_000, seed=5, a=8)
    kept = gmc.ProbabilityHead(1e-4, names).fit(probs, y, member)
    chased = gmc.ProbabilityHead(1e-4, names, noise_floor=False).fit(probs, y, member)
    errors = [float((head(fresh, groups) - truth).square().mean()) for head in (kept, chased)]
    assert errors[0] < 0.7 * errors[1]
    assert kept.report.reached == "noise" and kept.report.details["noise_limited"] > 0
    assert "cells lie above alpha but within their own noise (noise_floor=False chases them)" in kept.report.message


# -- a module --------------------------------------------------------------------------------------------------------


def fitted(**options):
    probs, y, member, _ = events(600)
    return gmc.ProbabilityHead(0.002, NAMES, bins=4, noise_floor=False, **options).fit(probs, y, member), probs, member


@pytest.mark.parametrize("solver", ["exact", "paper"])
def test_files_copies_and_state(tmp_path, solver):
    probs, y, member, _ = events(600)
    head = gmc.ProbabilityHead(0.004, NAMES, bins=4, noise_floor=False).fit(probs, y, member, solver=solver)
    expected = head(probs, member)
    loaded = gmc.load(gmc.save(head, tmp_path / "head.safetensors"))
    fresh = gmc.ProbabilityHead(0.004, NAMES, bins=4)
    fresh.load_state_dict(head.state_dict())
    for other in (loaded, fresh, copy.deepcopy(head), copy.deepcopy(head).half()):
        assert torch.equal(other(probs, member), expected)
    assert f"rounds={len(head.rounds) + len(head.log_who)}" in repr(head) and len(head.rounds) + len(head.log_who) > 0
    head.reset()
    assert not head.is_fitted and head.report is None
    with pytest.raises(RuntimeError, match="not fitted"):
        head(probs, member)


def test_output_keeps_type_and_gradient():
    head, probs, member = fitted()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert head(probs.to(dtype), member).dtype == dtype
    x = probs[:5].clone().requires_grad_()
    head(x, member[:5]).sum().backward()
    f = head(probs[:5], member[:5])
    p = probs[:5]
    torch.testing.assert_close(x.grad, f * (1 - f) / (p * (1 - p)), rtol=1e-6, atol=0)  # d sigmoid(logit p - c) / dp


@pytest.mark.parametrize("geometry", ["kl", "euclidean"])
@pytest.mark.parametrize("num_classes", [None, 3])
@pytest.mark.parametrize("solver", ["exact", "paper"])
def test_script_and_export(geometry, num_classes, solver):
    probs, y, member, _ = events(300) if num_classes is None else classes(300)
    head = gmc.ProbabilityHead(0.02, NAMES, bins=3, num_classes=num_classes, geometry=geometry, noise_floor=False)
    head.fit(probs, y, member, solver=solver, eta=None if solver == "exact" else 0.1, max_iter=6)
    expected = head(probs, member)
    torch.testing.assert_close(torch.jit.script(head)(probs, member), expected, rtol=0, atol=1e-12)
    batch = torch.export.Dim("batch", min=2, max=10_000)
    program = torch.export.export(head, (probs, member), dynamic_shapes=({0: batch}, {0: batch}))
    torch.testing.assert_close(program.module()(probs[:7], member[:7]), expected[:7], rtol=0, atol=1e-12)


def test_stays_on_the_device_of_its_input():
    from torch._subclasses import FakeTensorMode

    head, _, _ = fitted()
    away = copy.deepcopy(head)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        away._buffers = {k: mode.from_tensor(b).to(AWAY) for k, b in away._buffers.items()}
        out = away(torch.empty(5, device=AWAY), torch.empty(5, 3, dtype=torch.bool, device=AWAY))
        assert out.device == AWAY


def test_audit_is_the_loop_and_tells_the_cost():
    probs, y, member, _ = events(1500)
    head = gmc.ProbabilityHead(0.004, NAMES, bins=4).fit(probs, y, member)
    fresh, outcome, groups, _ = events(1500, seed=7)
    audit = head.audit(fresh, outcome, groups)
    table = head_table(head, fresh, outcome, groups)
    found = {(r["group"], r["what"]): r for r in audit.rows()}
    assert len(found) == 20
    groups_and_all = torch.cat([groups, torch.ones_like(groups[:, :1])], 1)
    levels = ["f in [0, 0.25)", "f in [0.25, 0.5)", "f in [0.5, 0.75)", "f in [0.75, 1]", "all levels"]
    for j, name in enumerate([*NAMES, "everyone"]):
        for k, what in enumerate(levels):
            row = found[name, what]
            assert math.isclose(row["estimate"], float(table[j, k]), abs_tol=1e-7)
            assert row["low"] <= row["estimate"] <= row["high"]
            level = (head(fresh, groups) * 4).long().clamp(max=3)
            inside = groups_and_all[:, j] & ((level == k) | (k == 4))
            assert row["count"] == int(inside.sum())
    brier = [float((p - outcome.double()).square().mean()) for p in (fresh, head(fresh, groups))]
    assert math.isclose(audit.cost["Brier score before"], brier[0], abs_tol=1e-9)
    assert math.isclose(audit.cost["Brier score after"], brier[1], abs_tol=1e-9) and brier[1] < brier[0]


def test_conditional_audit_divides_by_the_group():
    probs, y, member, _ = events(1000)
    head = gmc.ProbabilityHead(0.02, NAMES, bins=3, conditional=True).fit(probs, y, member)
    table = head_table(head, probs, y, member, conditional=True)
    assert math.isclose(head.audit(probs, y, member).max_violation, float(table.abs().max()), abs_tol=1e-7)


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "data", "match"),
    [
        ({"bins": 0}, {}, "`bins` must be a whole number"),
        ({"geometry": "l2"}, {}, "`geometry` must be one of 'kl', 'euclidean'"),
        ({"num_classes": 1}, {}, "at least 2"),
        ({"range": (1, 0)}, {}, "low < high"),
        ({"range": (0, 1), "num_classes": 3}, {}, "`range` is for a real outcome"),
        ({}, {"probs": torch.tensor([0.2, 1.4])}, "apply sigmoid or softmax to logits"),
        ({}, {"probs": torch.rand(2, 3)}, "num_classes=C"),
        ({}, {"probs": torch.tensor([0.2, math.nan])}, "must be finite"),
        ({}, {"y": torch.tensor([0, 2])}, "only 0 and 1, but it holds 2"),
        ({}, {"y": torch.tensor([0, 1, 1])}, "`y` must have shape \\(2,\\)"),
        ({}, {"groups": torch.ones(2, 2)}, "`groups` must have shape"),
        ({}, {"groups": torch.tensor([[1, 1, 0], [1, 0, 0]])}, "group 'c' has no examples"),
        ({"num_classes": 3}, {"probs": torch.full((2, 3), 0.5)}, "sum to 1"),
        ({"num_classes": 3}, {"probs": torch.full((2, 3), 1 / 3), "y": torch.tensor([0, 3])}, "from 0 to 2, got 0 to 3"),
        ({"range": (0, 2)}, {"y": torch.tensor([0.5, 2.5])}, "`range` = \\[0, 2\\]"),
    ],
)
def test_bad_input_is_refused_with_advice(options, data, match):
    values = {"probs": torch.tensor([0.2, 0.4]), "y": torch.tensor([0, 1]), "groups": torch.ones(2, 3).bool()} | data
    with pytest.raises(ValueError, match=match):
        gmc.ProbabilityHead(0.01, NAMES, **options).fit(**values)


def test_a_failed_fit_leaves_the_head_as_it_was():
    head, probs, member = fitted()
    expected = head(probs, member)
    with pytest.raises(ValueError, match="no examples observed"):
        head.fit(probs[:0], torch.zeros(0), member[:0])
    assert torch.equal(head(probs, member), expected) and head.report is not None


@pytest.mark.parametrize("classes", [None, 3])
def test_intervals_of_level_sets_hold_their_estimates(classes):
    """f - y in the level set k of b lies in [k/b - 1, (k + 1)/b]: over-sure where f is large, too."""
    rng = torch.Generator().manual_seed(0)
    probs = torch.rand(300, generator=rng) if classes is None else torch.rand(300, classes, generator=rng).softmax(1) ** 8
    probs = probs if classes is None else probs / probs.sum(1, keepdim=True)
    y = torch.zeros(300) if classes is None else torch.full((300,), 2)
    head = gmc.ProbabilityHead(alpha=1.0, bins=10, num_classes=classes).fit(probs, y.long() if classes else y)
    for view in ("conditional", "mass-weighted"):
        for row in head.audit(probs, y.long() if classes else y).view(view).rows():
            assert row["low"] - 1e-9 <= row["estimate"] <= row["high"] + 1e-9
