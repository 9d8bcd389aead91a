"""Labels of which several may hold: each is calibrated like a single event."""

import numpy as np
import pytest
import torch

import torchgmc as gmc
from gmctest.heads_zoo import GROUPS, tags


@pytest.mark.parametrize(
    "options", [{}, {"bins": None}, {"bins": 4, "geometry": "euclidean"}, {"alpha": 0.02, "noise_floor": False}]
)
def test_every_label_is_fitted_as_by_its_own_head(options):
    probs, y, who = tags(400, 0).observe
    options = {"alpha": None, "groups": GROUPS} | options
    head = gmc.ProbabilityHead(**options, num_classes=3, multilabel=True).fit(probs, y, who)
    ones = [gmc.ProbabilityHead(**options).fit(probs[:, k], y[:, k], who) for k in range(3)]
    assert torch.equal(head(probs, who), torch.stack([one(probs[:, k], who) for k, one in enumerate(ones)], 1))
    soft = torch.stack([one(probs[:, k], who, "soft", 0.01) for k, one in enumerate(ones)], 1)
    torch.testing.assert_close(head(probs, who, "soft", 0.01), soft)
    after = torch.stack([one.report.violations_after for one in ones], -1).flatten(1)
    torch.testing.assert_close(head.report.violations_after, after)
    assert head.report.reached == max((one.report.reached for one in ones), key=("alpha", "noise", "no").index)
    fresh = tags(300, 1).observe
    audit, parts = (
        head.audit(*fresh),
        [one.audit(fresh[0][:, k], fresh[1][:, k], who[:300] * 0 + fresh[2]) for k, one in enumerate(ones)],
    )
    assert audit.max_violation == pytest.approx(max(part.max_violation for part in parts))
    assert audit.cost["log loss after"] == pytest.approx(sum(part.cost["log loss after"] for part in parts))
    assert any(what.endswith("label 2") for what in audit.table["what"])


@pytest.mark.parametrize("geometry", ["kl", "euclidean"])
def test_algorithm_1_takes_its_steps_in_every_label(geometry):
    probs, y, who = tags(300, 0).observe
    options = {"alpha": 0.03, "groups": GROUPS, "bins": 3, "geometry": geometry, "noise_floor": False}
    head = gmc.ProbabilityHead(**options, num_classes=3, multilabel=True).fit(probs, y, who, solver="paper")
    assert head.report.converged and head.report.iterations > 3
    values = head.values(probs, y, who)
    torch.testing.assert_close(gmc.violations(values.who, values.s), head.report.violations_after)
    for k in range(3):  # steps in one label do not move another
        one = gmc.ProbabilityHead(**options).fit(probs[:, k], y[:, k], who, solver="paper", eta=head.report.details["eta"])
        torch.testing.assert_close(one(probs[:, k], who), head(probs, who)[:, k], atol=1e-6, rtol=0)


def test_the_derivative_of_the_fit_is_that_of_every_label():
    probs, y, who = tags(60, 0).observe
    probs = probs.double().requires_grad_()
    states = gmc.ProbabilityHead(0.01, GROUPS, bins=None, num_classes=3, multilabel=True).solve_differentiably(
        probs, y, who, alpha=0.01
    )
    one = gmc.ProbabilityHead(0.01, GROUPS, bins=None).solve_differentiably(probs[:, 1], y[:, 1], who, alpha=0.01)
    torch.testing.assert_close(states["offsets"][:, 1], one["offsets"][:, 0], atol=1e-6, rtol=0)
    (gradient,) = torch.autograd.grad(states["offsets"][:, 1].sum(), probs)
    (alone,) = torch.autograd.grad(one["offsets"].sum(), probs)
    torch.testing.assert_close(gradient, alone, atol=1e-5, rtol=1e-3)


def test_errors_say_multilabel_and_not_softmax():
    probs, y, who = tags(60, 0).observe
    with pytest.raises(ValueError, match="tags.*multilabel=True") as caught:
        gmc.ProbabilityHead(None, GROUPS, num_classes=3).fit(probs, torch.zeros(60).long(), who)
    assert "softmax" not in str(caught.value)
    head = gmc.ProbabilityHead(None, GROUPS, num_classes=3, multilabel=True)
    for wrong, message in ((y[:, 0], "`y` must have the shape of `probs`"), (y * 2, "`y` must be bool, or hold only 0 and 1")):
        with pytest.raises(ValueError, match=message):
            head.fit(probs, wrong, who)
    with pytest.raises(ValueError, match="`multilabel` needs `num_classes`"):
        gmc.ProbabilityHead(None, multilabel=True)
    with pytest.raises(ValueError, match="multilabel=True"):
        gmc.ProbabilityHead(None, GROUPS, num_classes=3).fit(probs / probs.sum(1, keepdim=True), y, who)


def test_a_tagger_gets_a_sigmoid(tmp_path):
    torchvision = pytest.importorskip("torchvision")
    _, y, who = tags(8, 0).observe
    net, images = torchvision.models.squeezenet1_0(num_classes=3).eval(), torch.rand(8, 3, 32, 32)
    with torch.no_grad():
        probs = net(images).sigmoid()
        head = gmc.ProbabilityHead(None, GROUPS, bins=None, num_classes=3, multilabel=True).fit(probs, y, who)
        assert torch.equal(gmc.attach(net, head)(images, who), head(probs, who))


def test_on_the_command_line(tmp_path):
    pytest.importorskip("typer")
    from torchgmc.cli import main

    for name, seed in (("calibration", 0), ("test", 1)):
        probs, y, who = tags(200, seed).observe
        np.savez(tmp_path / f"{name}.npz", probs=probs, y=y, site=np.where(who[:, 1], "A", "B"))
    known, fresh, head, out = (str(tmp_path / name) for name in ("calibration.npz", "test.npz", "h.safetensors", "out.npz"))
    words = ["--multilabel", "--alpha", "0.05", "--groups", "site", "--out", head]
    assert main(["calibrate", "probability", known, *words]) == 0
    assert main(["audit", head, fresh]) in (0, 1)
    assert main(["apply", head, fresh, "--out", out]) == 0
    (probs, _, who), written = tags(200, 1).observe, torch.from_numpy(np.load(out)["probs"])
    torch.testing.assert_close(written, gmc.load(head)(probs, {"site": np.where(who[:, 1], "A", "B")}))
