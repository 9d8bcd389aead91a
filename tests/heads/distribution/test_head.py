"""DistributionHead: the promise, both geometries, files, formats, bad input."""

import copy
import math
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import torchgmc as gmc
from gmctest.fake_device import AWAY
from gmctest.heads_zoo import GROUPS, membership
from gmctest.oracles_distribution import draw, numpy_algorithm, violation_loop

NAMES = ["female", "male", "old"]


def make(lists, alpha=0.01, **options):
    return gmc.DistributionHead({f"list {k}": tokens for k, tokens in enumerate(lists)}, alpha, NAMES, **options)


def ones(n):
    return torch.ones(n, dtype=torch.float64)


@pytest.mark.parametrize("solver", ["exact", "paper"])
@pytest.mark.parametrize("geometry", ["kl", "euclidean"])
@pytest.mark.parametrize("conditional", [False, True])
def test_the_promise_holds_for_the_output_itself(solver, geometry, conditional):
    logits, member, lists = draw(n=60)
    weight = torch.rand(60, dtype=torch.float64) + 0.2
    head = make(lists, 0.01, geometry=geometry, conditional=conditional, noise_floor=False)
    head.fit(logits, member, weight=weight, solver=solver)
    p = head(logits, member).exp()
    loop = violation_loop(p, member, lists, weight, conditional)
    before = violation_loop(torch.softmax(logits, 1), member, lists, weight, conditional)
    assert head.report.converged
    assert float(loop.abs().max()) <= 0.01 * (1 + 1e-9)
    torch.testing.assert_close(p.sum(1), torch.ones(60, dtype=torch.float64))
    torch.testing.assert_close(head.report.violations_after, loop, rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(head.report.violations_before, before, rtol=1e-8, atol=1e-11)
    assert len(head.report.history) == head.report.iterations + 1


def test_kl_keeps_ratios_and_every_token_and_is_nearer_than_euclidean():
    logits, member, lists = draw(n=60)
    audits, heads = {}, {}
    for geometry in ("kl", "euclidean"):
        heads[geometry] = make(lists, 0.002, geometry=geometry, noise_floor=False).fit(logits, member, solver="exact")
        audits[geometry] = heads[geometry].audit(logits, member)
    before, after = torch.log_softmax(logits, 1), heads["kl"](logits, member)
    assert torch.isfinite(after).all()
    torch.testing.assert_close((after - before)[:, 1], (after - before)[:, 2])  # same lists
    torch.testing.assert_close((after - before)[:, 0], (after - before)[:, 9])  # in no list
    assert audits["kl"].cost["mean KL"] < audits["euclidean"].cost["mean KL"]
    report = heads["kl"].report
    assert audits["kl"].cost["mean KL"] == pytest.approx(report.details["kl"], rel=1e-6)
    assert 0 <= report.details["duality_gap"] <= 1e-4 * report.details["kl"]


@pytest.mark.parametrize("conditional", [False, True])
def test_paper_solver_is_numpys_algorithm_on_old_and_new_prompts(conditional):
    logits, member, lists = draw(seed=1)
    head = make(lists, 0.01, geometry="euclidean", conditional=conditional).fit(logits, member, solver="paper", eta=0.004)
    p, log = numpy_algorithm(logits, member, lists, 0.01, 0.004, 1000, conditional)
    assert head.report.iterations == len(log)
    torch.testing.assert_close(head(logits, member).exp(), p, rtol=0, atol=1e-12)
    # New prompts get the same steps with their own projections.
    new, groups, _ = draw(seed=2)
    expected = torch.softmax(new, 1)
    share = member.double().mean(0)
    for who, what, size in log:
        v = torch.zeros(new.shape[1], dtype=torch.float64)
        v[lists[what]] = size / (share[who] if conditional else 1.0)
        expected = gmc.projections.simplex(expected - groups[:, who, None] * v)
    torch.testing.assert_close(head(new, groups).exp(), expected, rtol=0, atol=1e-12)


def test_euclidean_with_cells_stays_close_to_exact():
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(80, 3000, generator=g)
    member = torch.arange(80)[:, None] % 3 == torch.arange(3)
    logits[:, :20] += 1.5 * member[:, :1]
    tables = {}
    for cells in (None, 512):
        head = make([list(range(20)), [15, 30]], 0.002, geometry="euclidean", cells=cells).fit(logits, member, solver="paper")
        tables[cells] = violation_loop(head(logits, member).exp().double(), member, [list(range(20)), [15, 30]], ones(80))
        assert head.report.iterations > 2
        torch.testing.assert_close(head.report.violations_after, tables[cells], rtol=0, atol=2e-6)
    torch.testing.assert_close(tables[512], tables[None], rtol=0, atol=2e-6)
    assert head.statistics.counts.shape == (80, 512)


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 1000), geometry=st.sampled_from(["kl", "euclidean"]), cuts=st.lists(st.integers(0, 40), max_size=4))
def test_batches_and_order_do_not_matter(seed, geometry, cuts):
    logits, member, lists = draw(seed=seed)
    whole = make(lists, geometry=geometry).fit(logits, member)
    parts = make(lists, geometry=geometry)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    edges = [0, *sorted(cuts), 40]
    for low, high in pairwise(edges):
        parts.observe(logits[order[low:high]], member[order[low:high]])
    parts.calibrate()
    torch.testing.assert_close(parts(logits, member), whole(logits, member), rtol=1e-5, atol=1e-5)


def test_statistics_do_not_grow_with_the_vocabulary():
    for vocabulary in (50, 5000):
        for geometry, width in (("kl", 4), ("euclidean", 3 + 4 + 2 * 40)):
            head = make([[1, 2], [2, 3]], geometry=geometry, cells=40)
            head.observe(torch.randn(10, vocabulary), torch.arange(10)[:, None] % 3 == torch.arange(3))
            kept = sum(getattr(head.statistics, name).shape[1] for name in ("log_mass", "words", "counts", "masses"))
            assert kept == width


def test_temperature_and_half_precision():
    logits, member, lists = draw()
    hot = make(lists, temperature=2.0).fit(logits, member)
    plain = make(lists).fit(logits / 2, member)
    torch.testing.assert_close(hot(logits, member), plain(logits / 2, member))
    for geometry in ("kl", "euclidean"):
        head = make(lists, geometry=geometry).fit(logits, member)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            low = head(logits.to(dtype), member)
            assert low.dtype == dtype
            torch.testing.assert_close(low.double(), head(logits.to(dtype).double(), member), rtol=2e-2, atol=2e-2)


def test_sequences_get_the_shift_of_their_prompt():
    logits, member, lists = draw()
    for geometry in ("kl", "euclidean"):
        head = make(lists, geometry=geometry).fit(logits, member)
        sequence = torch.stack([logits, logits.flip(0), 2 * logits], 1)  # (n, 3, v)
        out = head(sequence, member)
        for t in range(3):
            torch.testing.assert_close(out[:, t], head(sequence[:, t], member))


def test_impossible_tokens_stay_impossible():
    logits, member, lists = draw()
    logits[:, 11] = -torch.inf
    head = make(lists, noise_floor=False).fit(logits, member)
    assert bool((head(logits, member)[:, 11] == -torch.inf).all())
    assert head.report.converged


def test_adjust_keeps_the_normaliser_and_is_the_identity_without_offsets():
    logits, member, lists = draw()
    head = make(lists, 0.003).fit(logits, member)
    out = head.adjust(logits, member)
    torch.testing.assert_close(torch.log_softmax(out, 1), head(logits, member))
    torch.testing.assert_close(torch.logsumexp(out, 1), torch.logsumexp(logits, 1))
    for geometry in ("kl", "euclidean"):
        idle = make(lists, 1.0, geometry=geometry, noise_floor=False).fit(logits, member)
        assert torch.equal(idle.adjust(logits.float(), member), logits.float())


def by_hand(head, logits, member):
    """Log-probabilities in plain steps: softmax at the temperature, then the tilt, or every step with its projection."""
    p = (logits.double() / head.temperature).softmax(1)
    lists = [torch.zeros(p.shape[1], dtype=torch.float64).index_fill(0, torch.tensor(ids), 1.0) for ids in head.attributes.values()]
    if head.geometry == "kl":
        p = p * torch.exp(-(member.double() - head.mean_membership) @ head.offsets @ torch.stack(lists))
        return (p / p.sum(1, keepdim=True)).log()
    for who, what, size in zip(head.log_who, head.log_what, head.log_step, strict=True):
        p = gmc.projections.simplex(p - size * member[:, who, None] * lists[what])
    return p.log()


@pytest.mark.parametrize("geometry", ["kl", "euclidean"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_every_way_to_ask_against_plain_steps(geometry, temperature):
    """`forward` normalises, `adjust` keeps the log-sum-exp that the scores had (of beams: 0), `adjust_` keeps the softmax."""
    logits, member, lists = draw()
    head = make(lists, 0.003, geometry=geometry, temperature=temperature, noise_floor=False).fit(logits, member)
    scripted = torch.jit.script(head)
    for dtype, atol in ((torch.float64, 1e-9), (torch.float32, 1e-4), (torch.float16, 0.05)):
        for asked in (logits.to(dtype), logits.log_softmax(1).to(dtype)):
            want, close = by_hand(head, asked, member), {"rtol": 0.0, "atol": atol}
            finite = want.exp() > 1e-4  # a token next to 0 has any logarithm
            for found in (head(asked, member), scripted(asked, member), head.adjust_(asked.clone(), member).log_softmax(1)):
                assert found.dtype == dtype
                torch.testing.assert_close(found[finite].double(), want[finite], **close)
            found, level = head.adjust(asked, member), asked.double().logsumexp(1, keepdim=True)
            assert found.dtype == dtype
            torch.testing.assert_close(found[finite].double(), (want + level)[finite], **close)
            torch.testing.assert_close(found.double().logsumexp(1, keepdim=True), level, **close)
            plain = gmc.text.GMCLogitsProcessor(head, member)(torch.zeros(len(asked), 3, dtype=torch.int64), asked)
            assert torch.equal(plain, found)


@pytest.mark.parametrize("geometry", ["kl", "euclidean"])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_adjusted_in_place_the_softmax_is_calibrated_at_every_position(geometry, temperature):
    logits, member, lists = draw()
    head = make(lists, 0.003, geometry=geometry, temperature=temperature, noise_floor=False).fit(logits, member)
    sequence = torch.stack([logits, logits.roll(1, 1), logits * 2], 1)
    sequence[0, 0, 11] = -torch.inf
    want, given = head(sequence, member), sequence.clone()
    assert head.adjust_(given, member) is given
    torch.testing.assert_close(torch.log_softmax(given, -1), want)
    if geometry == "kl" and temperature == 1.0:
        rest = torch.ones(logits.shape[1], dtype=torch.bool).index_fill(0, head.ids, False)
        assert torch.equal(given[..., rest], sequence[..., rest])  # nobody else is touched
    half = head.adjust_(logits.half(), member)
    assert half.dtype == torch.float16
    for wrong, groups in ((logits.long(), member), (logits[0], member), (logits[:, :5], member), (logits[:3], member)):
        before = wrong.clone()
        with pytest.raises(ValueError, match="`logits` must be floating|`groups` must have 3 rows"):
            head.adjust_(wrong, groups)
        assert torch.equal(wrong, before)
    before = logits.clone()
    for groups, why in ((member * 255, "0 or 1"), (torch.cat([member, member], 1), "columns|shape")):
        with pytest.raises(ValueError, match=why):
            head.adjust_(logits, groups)
        assert torch.equal(logits, before)


def test_derivative_in_the_logits():
    logits, member, lists = draw(n=6)
    for geometry in ("kl", "euclidean"):
        head = make(lists, 0.02, geometry=geometry).fit(logits, member)
        x = logits.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x, head=head: head(x, member).exp(), x)


def test_fresh_splits():
    g = torch.Generator().manual_seed(0)
    logits, member, lists = draw(n=4000, seed=5)
    for geometry in ("kl", "euclidean"):
        head = make(lists, 0.03, geometry=geometry).fit(logits, member, solver="fresh", max_iter=15)
        worst = head.report.violations_after.abs().max()
        assert float(worst) < float(head.report.violations_before.abs().max())
        order = torch.randperm(4000, generator=g)
        again = make(lists, 0.03, geometry=geometry).fit(logits[order], member[order], solver="fresh", max_iter=15)
        torch.testing.assert_close(again(logits[:50], member[:50]), head(logits[:50], member[:50]))
    with pytest.raises(ValueError, match="2 T = 40 splits, but there are 5 examples"):
        make(lists).fit(logits[:5], member[:5], solver="fresh", max_iter=20)


# -- audit -----------------------------------------------------------------------------------------------------------------


def test_audit_measures_what_a_loop_measures():
    logits, member, lists = draw(n=60)
    labels = torch.arange(60) % 12
    for conditional in (False, True):
        head = make(lists, 0.01, conditional=conditional).fit(logits, member)
        new, groups, _ = draw(n=60, seed=9)
        audit = head.audit(new, groups, labels=labels)
        loop = violation_loop(head(new, groups).exp(), groups, lists, ones(60), conditional)
        for row in audit.rows():
            a, k = NAMES.index(row["group"]), int(row["what"][-1])
            assert row["estimate"] == pytest.approx(float(loop[a, k]), abs=1e-9)
            p = head(new, groups).exp()[groups[:, a]][:, lists[k]].sum(1).mean()
            assert row["risk"] == pytest.approx(float(p), abs=1e-9)
            assert row["low"] <= row["estimate"] <= row["high"]
        nll = -head(new, groups)[torch.arange(60), labels].mean()
        assert audit.cost["NLL after"] == pytest.approx(float(nll), rel=1e-6)


@pytest.mark.slow
def test_audit_intervals_hold_at_once():
    """The true violation of a fixed head, from a large sample, lies in all intervals in at least 95 % of draws."""
    logits, member, lists = draw(n=60_000, seed=1)
    for conditional in (False, True):
        head = make(lists, 0.01, conditional=conditional).fit(logits[:500], member[:500])
        truth = {(r["group"], r["what"]): r["estimate"] for r in head.audit(logits, member).rows()}
        held = 0
        for k in range(100):
            part = torch.randint(60_000, (150,), generator=torch.Generator().manual_seed(k))
            rows = head.audit(logits[part], member[part]).rows()
            held += all(r["low"] <= truth[r["group"], r["what"]] <= r["high"] for r in rows)
        assert held >= 95


# -- a module like any other -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", ["kl", "euclidean"])
def test_save_load_copy_state(tmp_path, geometry):
    logits, member, lists = draw()
    head = make(lists, geometry=geometry, conditional=True, temperature=1.5).fit(logits, member, solver="paper", eta=0.01)
    want = head(logits, member)
    loaded = gmc.load(gmc.save(head, tmp_path / "head.safetensors"))
    assert torch.equal(loaded(logits, member), want)
    assert loaded.config() == head.config()
    fresh = make(lists, geometry=geometry, conditional=True, temperature=1.5)
    fresh.load_state_dict(head.state_dict())
    assert torch.equal(fresh(logits, member), want)
    assert torch.equal(copy.deepcopy(head)(logits, member), want)
    assert torch.equal(head.half()(logits, member), want)  # the state stays in float64
    assert "geometry=" + geometry in repr(head)
    head.reset()
    with pytest.raises(RuntimeError, match="not fitted"):
        head(logits, member)


@pytest.mark.parametrize("geometry", ["kl", "euclidean"])
def test_formats_agree(tmp_path, geometry):
    logits, member, lists = draw()
    logits = logits.float()
    head = make(lists, 0.02, geometry=geometry).fit(logits, member)
    if geometry == "euclidean":
        assert 1 <= len(head.log_step) <= 30
    want = head(logits, member)
    torch.testing.assert_close(torch.jit.script(head)(logits, member), want)
    n = torch.export.Dim("n", min=2, max=10_000)  # torch 2.6 wants a largest size
    shape = {"logits": {0: n}, "groups": {0: n}}
    program = torch.export.export(head, (logits, member), dynamic_shapes=shape)
    torch.testing.assert_close(program.module()(logits[:7], member[:7]), want[:7])


@pytest.mark.usefixtures("operators_read_once")
@pytest.mark.parametrize("geometry", ["kl", "euclidean"])
def test_onnx_agrees(tmp_path, geometry):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    logits, member, lists = draw()
    logits = logits.float()
    head = make(lists, 0.02, geometry=geometry).fit(logits, member)
    path = tmp_path / "head.onnx"
    n = torch.export.Dim("n", min=2, max=10_000)  # torch 2.6 wants a largest size
    shape = {"logits": {0: n}, "groups": {0: n}}
    program = torch.export.export(head.eval(), (logits, member), dynamic_shapes=shape)
    torch.onnx.export(program, (logits, member), str(path), dynamo=True, verbose=False)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {"logits": logits[:9].numpy(), "groups": member[:9].numpy()})
    np.testing.assert_allclose(out, head(logits[:9], member[:9]).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("geometry", ["kl", "euclidean"])
def test_forward_stays_on_its_device(geometry):
    """With fake CUDA tensors any step over the CPU raises."""
    logits, member, lists = draw()
    head = make(lists, 0.02, geometry=geometry).fit(logits, member)
    fake = copy.deepcopy(head)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        for name, buffer in head.named_buffers():
            fake._buffers[name] = mode.from_tensor(buffer).to(AWAY)
        out = fake(torch.empty(5, 12, device=AWAY), torch.empty(5, 3, device=AWAY, dtype=torch.bool))
        assert out.device == AWAY and out.shape == (5, 12)


# -- bad input ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"attributes": {}}, TypeError, "name of each list"),
        ({"attributes": ["doctor"]}, TypeError, "name of each list"),
        ({"attributes": {"jobs": []}}, ValueError, "at least one token id"),
        ({"attributes": {"jobs": ["doctor"]}}, TypeError, "attributes_from_words"),
        ({"attributes": {"jobs": [-1]}}, TypeError, "got -1"),
        ({"alpha": 0}, ValueError, "`alpha`"),
        ({"groups": None}, ValueError, "name the groups"),
        ({"geometry": "KL"}, ValueError, "'kl', 'euclidean'"),
        ({"temperature": 0.0}, ValueError, "`temperature`"),
        ({"cells": 0}, ValueError, "`cells`"),
    ],
)
def test_bad_options(change, error, match):
    with pytest.raises(error, match=match):
        gmc.DistributionHead(**({"attributes": {"jobs": [1]}, "alpha": 0.01, "groups": ["a", "b"]} | change))


def test_bad_batches_change_nothing():
    logits, member, lists = draw()
    head = make(lists).fit(logits, member)
    want = head(logits, member)
    nan, empty = logits.clone(), logits.clone()
    nan[3, 5], empty[2] = torch.nan, -torch.inf
    cases = [
        (logits.tolist(), member, TypeError, "must be a tensor"),
        (logits.long(), member, TypeError, "floating point"),
        (logits[:, None], member, ValueError, "one row per prompt"),
        (logits[:, :5], member, ValueError, "name token 6"),
        (logits, None, ValueError, "`groups` is missing"),
        (logits, member[:, :2], ValueError, "groups"),
        (logits, member[:9], ValueError, "groups"),
        (nan, member, ValueError, r"logits\[3\] has nan"),
        (empty, member, ValueError, r"logits\[2\] has -inf"),
        (logits, member & False, ValueError, "'female' has no prompts"),
        (logits[:0], member[:0], ValueError, "no prompts observed"),
    ]
    for x, groups, error, match in cases:
        with pytest.raises(error, match=match):
            head.fit(x, groups)
        assert torch.equal(head(logits, member), want)
    with pytest.raises(ValueError, match="`weight`"):
        head.fit(logits, member, weight=torch.ones(3))
    with pytest.raises(ValueError, match="one row per example"):
        head(logits[:3], member)
    with pytest.raises(ValueError, match="name token 6"):
        head(logits[:, :5], member)
    with pytest.raises(ValueError, match="`labels`"):
        head.audit(logits, member, labels=torch.zeros(3))
    with pytest.raises(ValueError, match="no examples to audit"):
        head.audit(logits[:0], member[:0])


def test_not_reaching_alpha_is_said():
    logits = torch.zeros(12, 4)
    member = torch.arange(12)[:, None] % 3 == torch.arange(3)
    logits[member[:, 0], 0] = -torch.inf
    logits[~member[:, 0], 1:] = -torch.inf
    head = make([[0]], 0.01, noise_floor=False).fit(logits, member)
    assert not head.report.converged
    assert "> 0.01 in group" in head.report.message
    many = make([[0]], 0.01).fit(logits.repeat(9, 1), member.repeat(9, 1))  # now the sample can tell
    assert many.report.reached == "no" and re.search(r"is 0.2\d* > 0.\d+ in group", many.report.message)
    _, member, lists = draw()
    short = make(lists, 1e-5, noise_floor=False).fit(draw()[0], member, max_iter=1)
    assert not short.report.converged and "Raise `max_iter`" in short.report.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_probabilities_are_not_logits(dtype):
    female = torch.arange(60) % 2 == 0
    logits, who = torch.randn(60, 20) + 3.0 * female[:, None], torch.stack([female, ~female], 1)
    head = gmc.DistributionHead({"jobs": [7, 8]}, 0.002, ["female", "male"])
    with pytest.raises(ValueError, match=r"`logits` look like probabilities .*`probs.log\(\)`"):
        head.fit(logits.softmax(1).to(dtype), who)
    assert head.fit(logits.log_softmax(1), who).is_fitted and head.fit(logits.abs(), who).is_fitted
    mixed = torch.cat([logits[:1].softmax(1), logits[1:]])
    assert head.fit(mixed, who).is_fitted


def test_tokens_without_mass_do_not_spoil_a_loss():
    member = membership(60, torch.Generator().manual_seed(0))
    logits = torch.randn(60, 12, generator=torch.Generator().manual_seed(1)) * 3
    logits[:, 2] += 3.0 * member[:, 1]
    head = gmc.DistributionHead({"jobs": [2, 3]}, 0.002, GROUPS, geometry="euclidean").fit(logits, member)
    x = logits.clone().requires_grad_()
    out = head(x, member)
    assert bool((out == -math.inf).any())
    (slope,) = torch.autograd.grad(-out.amax(1).sum(), x)
    assert bool(slope.isfinite().all())
    assert bool((slope != 0).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lead", [120.0, 300.0, 3000.0, 1e4])
def test_a_model_that_is_very_sure(lead, dtype):
    """Words that lead by hundreds: the report is what the output has, and logits for decoding have the same distribution."""
    g = torch.Generator().manual_seed(0)
    member = torch.rand(200, 2, generator=g) < 0.5
    logits = torch.randn(200, 20, generator=g).to(dtype)
    logits[member[:, 0], 3] += lead  # a listed word, and one of another list in the other group
    logits[~member[:, 0], 5] += lead
    lists = {"jobs": [3, 4], "praise": [4, 5, 9]}
    head = gmc.DistributionHead(lists, alpha=0.005, groups=["a", "b"], noise_floor=False).fit(logits, member)
    out = head(logits, member).double().exp()
    assert bool(out.isfinite().all()) and bool(head.offsets.isfinite().all())
    mass = torch.stack([out[:, ids].sum(1) for ids in lists.values()], 1)
    found = member.double().T @ (mass - mass.mean(0)) / 200
    torch.testing.assert_close(found, head.report.violations_after, rtol=0, atol=lead * torch.finfo(dtype).eps * 10)
    assert head.report.converged and found.abs().max() < 0.0055
    adjusted = head.adjust(logits, member)
    torch.testing.assert_close(adjusted.log_softmax(1).double().exp(), out, rtol=0, atol=lead * torch.finfo(dtype).eps * 10)


def test_a_fit_that_cannot_be_reached_ends_at_a_finite_state_no_worse_than_the_model():
    member = torch.arange(40)[:, None] % 2 == torch.arange(2)
    logits = torch.zeros(40, 10)
    logits[:, 3] = torch.where(member[:, 0], 1e30, -1e30)
    head = gmc.DistributionHead({"jobs": [3]}, 0.001, ["a", "b"], noise_floor=False).fit(logits, member)
    assert not head.report.converged and bool(head.offsets.isfinite().all())
    assert not head(logits, member).isnan().any()
    assert head.report.violations_after.abs().max() <= head.report.violations_before.abs().max() + 1e-12


def test_lists_with_next_to_no_mass_are_named():
    logits, who = torch.randn(40, 12), torch.arange(40)[:, None] % 2 == torch.arange(2)
    logits[:, 5] -= 30.0
    with pytest.warns(UserWarning, match=r"next to no probability to 'rare' \("):
        gmc.DistributionHead({"common": [1, 2], "rare": [5]}, None, ["even", "odd"]).fit(logits, who)
