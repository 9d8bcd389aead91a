"""TreeHead as a module: files, formats, devices, errors, and what its report and audit say."""

import copy
import json
import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

import torchgmc as gmc
from gmctest.fake_device import AWAY
from gmctest.oracles_tree import TOY, WOS, sample

KINDS = {
    "plain": {},
    "conditional": {"conditional": True},
    "nodes": {"sets": "nodes", "jitter": 0.0},
    "groups": {"groups": ["a", "b"]},
    "named": {"sets": {"left": [0, 1, 2, 12], "rest": [13, 14, 15]}},
}


def fitted(kind, n=300, seed=0):
    probs, labels = sample(n, seed)
    member = torch.rand(n, 2, generator=torch.Generator().manual_seed(seed)) < 0.6
    groups = (member,) if kind == "groups" else ()
    head = gmc.TreeHead(WOS, 0.93, 0.01, **KINDS[kind]).fit(probs, labels, *groups)
    return head, (probs, *groups), labels


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_answers(kind, tmp_path):
    head, inputs, _ = fitted(kind)
    assert len(head.shifts) > 0
    expected = head(*inputs)
    assert torch.equal(torch.jit.script(head)(*inputs), expected)
    small = tuple(t[:7] for t in inputs)
    program = torch.export.export(head, small, dynamic_shapes=tuple({0: torch.export.Dim.DYNAMIC} for _ in inputs))
    assert torch.equal(program.module()(*inputs), expected)
    file = gmc.save(head, tmp_path / "head.safetensors")
    assert torch.equal(gmc.load(file)(*inputs), expected)
    fresh = gmc.TreeHead(**json.loads(json.dumps(head.config())))
    fresh.load_state_dict(head.state_dict())
    assert torch.equal(fresh(*inputs), expected)
    assert torch.equal(copy.deepcopy(head).half()(*inputs), expected)


@pytest.mark.usefixtures("operators_read_once")
def test_onnx(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    head, inputs, _ = fitted("groups")
    model = gmc.attach(torch.nn.Identity(), head)
    model.export(tmp_path / "tree.onnx", format="onnx", example_inputs=tuple(t[:7] for t in inputs))
    session = onnxruntime.InferenceSession(str(tmp_path / "tree.onnx"), providers=["CPUExecutionProvider"])
    feeds = {i.name: t.numpy() for i, t in zip(session.get_inputs(), inputs, strict=True)}
    assert torch.equal(torch.from_numpy(session.run(None, feeds)[0]), head(*inputs))


def test_tensors_stay_on_the_device():
    with FakeTensorMode():
        head = gmc.TreeHead(WOS, 0.9, 0.02, groups=["a", "b"]).to(AWAY)
        head.is_fitted = True
        head.shifts = torch.zeros(2, 16, 2, dtype=torch.float64, device=AWAY)
        probs, groups = torch.rand(4, 12, device=AWAY), torch.ones(4, 2, device=AWAY).bool()
        nodes = head(probs, groups)
        assert nodes.device == head.leaves(nodes).device == head.threshold(probs, groups).device == AWAY


def test_names_and_repr():
    head = gmc.TreeHead(TOY, 0.9, 0.02)
    assert head.names(torch.tensor([0, 4, 6])) == ["Green Building", "root", "Medical"]
    assert "log=0 rounds, fitted=False" in repr(head)
    head, _, _ = fitted("plain")
    assert f"log={len(head.shifts)} rounds, fitted=True" in repr(head)
    assert len(head.shifts) <= head.report.iterations


def test_report_and_audit_say_how_precise_the_answers_are():
    head, (probs,), _ = fitted("conditional", n=2000)
    details = head.report.details
    nodes = head(probs)
    assert details["answers: root"] == pytest.approx((nodes == 15).double().mean().item())
    assert details["answers: leaf"] == pytest.approx((nodes < 12).double().mean().item())
    assert details["mean set size"] == pytest.approx(head.leaves(nodes).sum(1).double().mean().item())
    assert details["before: mean set size"] < details["mean set size"]
    audit = head.audit(*sample(2000, 5))
    assert sum(v for k, v in audit.cost.items() if k == "answers: root" or "depth" in k) == pytest.approx(1.0)
    assert audit.note == ""


def test_mostly_root_is_called_useless():
    probs, labels = sample(500, 1, signal=0.0)
    head = gmc.baselines.SplitConformal(WOS, 0.95).fit(probs, labels)
    assert "of the answers are the root" in head.report.message
    audit = head.audit(probs, labels)
    assert "of the answers are the root" in str(audit)
    assert "of the answers are the root" in audit._repr_html_()


def test_atom_at_the_root_is_named():
    probs, labels = sample(500, 2, signal=0.5)
    head = gmc.TreeHead(WOS, 0.95, 0.005, jitter=0.0).fit(probs, labels, solver="paper", eta=0.05)
    assert not head.report.converged
    assert "jitter=0.005" in head.report.message and "atom" in head.report.message


def test_empty_set_has_no_violation_and_is_undecided():
    probs, labels = sample(400, 3)
    probs[:, 7:] = 0.0  # nobody answers below node 14 but the root
    head = gmc.TreeHead(WOS, 0.6, 0.1, conditional=True).fit(probs, labels)
    assert float(head.report.violations_after[list(head.sets).index("14"), 0]) == 0.0
    audit = head.audit(probs, labels)
    row = next(r for r in audit.rows() if r["group"] == "14")
    assert (row["count"], row["estimate"], row["verdict"]) == (0, 0.0, "undecided")
    assert math.isfinite(audit.max_violation)


def test_weak_scores_do_not_empty_the_sets():
    """Answering "root" to all would leave every other set without a violation; the solver must not use that."""
    probs, labels = sample(3000, 4, signal=1.0)
    head = gmc.TreeHead(WOS, 0.9, 0.02, conditional=True).fit(probs, labels)
    problem = head._problem()
    problem.restore(head.threshold(probs))
    mass = problem.mass()[0]
    assert bool((mass >= 0.1 * problem.reach[0] * (1 - 1e-9)).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"probs": torch.rand(4, 3)}, "one column per leaf"),
        ({"probs": -torch.rand(4, 12)}, "must not be negative"),
        ({"probs": torch.full((4, 12), math.nan)}, "must be finite"),
        ({"labels": torch.tensor([0, 1, 2])}, "one leaf per example"),
        ({"labels": torch.tensor([0, 1, 2, 12])}, "0 to 11"),
        ({"labels": torch.rand(4)}, "integers"),
        ({"groups": torch.ones(4, 3)}, "groups"),
        ({"weight": torch.ones(3)}, "weight"),
    ],
)
def test_bad_data_leave_the_head_as_it_was(change, message):
    head, inputs, _ = fitted("plain")
    before = head(*inputs)
    data = {"probs": torch.rand(4, 12), "labels": torch.zeros(4, dtype=torch.int64)} | change
    with pytest.raises((ValueError, TypeError), match=message):
        head.fit(**data)
    assert torch.equal(head(*inputs), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 1.0}, "target"),
        ({"alpha": 0.0}, "alpha"),
        ({"sets": "leaves"}, "'nodes'"),
        ({"sets": {"x": []}}, "non-empty"),
        ({"sets": {"x": ["nowhere"]}}, "no node"),
        ({"sets": [1, 2]}, "mapping"),
        ({"names": ["a"]}, "one per node, got 1"),
        ({"init": math.nan}, "init"),
        ({"jitter": -1.0}, "jitter"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        gmc.TreeHead(**({"parents": WOS, "target": 0.9, "alpha": 0.02} | options))


def test_unfitted_head_refuses():
    with pytest.raises(RuntimeError, match="not fitted"):
        gmc.TreeHead(WOS, 0.9, 0.02)(torch.rand(2, 12))
    with pytest.raises(ValueError, match="no examples observed"):
        gmc.TreeHead(WOS, 0.9, 0.02).calibrate()
    with pytest.raises(ValueError, match="groups"):
        fitted("groups")[0](torch.rand(2, 12))


def test_logits_without_a_sign_are_no_probabilities():
    tree, labels = {"a": ["x", "y"], "b": ["z"]}, torch.randint(3, (50,))
    with pytest.raises(ValueError, match=r"`probs` must be at most 1, got 6; apply `softmax\(1\)` to logits"):
        gmc.TreeHead(tree, 0.9, 0.05).fit(torch.rand(50, 3).index_fill(0, torch.tensor([3]), 6.0), labels)
    with pytest.raises(ValueError, match="counted from 0 to 2, got 3"):
        gmc.TreeHead(tree, 0.9, 0.05).fit(torch.rand(50, 3), labels.clamp(min=1).index_fill(0, torch.tensor([3]), 2) + 1)


def test_a_target_below_the_accuracy_is_named():
    labels = torch.arange(2000) % 8
    probs = (torch.randn(2000, 8) + 2.5 * torch.nn.functional.one_hot(labels, 8)).softmax(1)
    head = gmc.TreeHead({"a": ["p", "q", "r", "s"], "b": ["t", "u", "v", "w"]}, target=0.3, alpha=0.01).fit(probs, labels)
    assert not head.report.converged and "Answering only the best leaf is already right for 0." in head.report.message
    assert "Raise `target`" in head.report.message
