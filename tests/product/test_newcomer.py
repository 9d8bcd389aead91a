"""What someone new stumbled over while following the README with a model of their own."""

import numpy as np
import pytest
import torch

import torchgmc as gmc


def columns(n, seed=0):
    rng = np.random.default_rng(seed)
    return {"camera": rng.choice(["front", "rear"], n), "hour": rng.choice(["day", "night"], n)}


def draw(n=600, seed=0):
    """Probabilities of three classes, labels, and groups by camera and hour."""
    g = torch.Generator().manual_seed(seed)
    probs = torch.randn(n, 3, generator=g).softmax(1)
    groups = gmc.Groups.from_columns(columns(n, seed), intersections=2)
    y = torch.multinomial(probs + 0.3 * groups.membership[:, 3, None] * torch.tensor([1.0, 0, 0]), 1, generator=g)[:, 0]
    return probs, y, groups


def test_groups_are_cut_by_rows():
    groups = draw()[2]
    wanted = torch.tensor([5, 3, 3, 599])
    mask = torch.arange(600) % 3 == 0
    for rows in (slice(None, 200), slice(10, 300, 7), wanted, wanted.tolist(), mask, mask.numpy(), slice(0, 0)):
        part = groups[rows]
        chosen = rows if isinstance(rows, slice) else torch.as_tensor(rows)
        assert torch.equal(part.membership, groups.membership[chosen]) and part.names == groups.names
        assert part.num_rows == len(part.membership) and torch.equal(part.sizes, part.membership.sum(0))
    s = torch.randn(200).double()
    torch.testing.assert_close(gmc.violations(groups[:200], s), gmc.violations(groups.membership[:200], s))
    for rows in (3, "camera", 1.5, [0.5], None):
        with pytest.raises(TypeError):
            groups[rows]
    with pytest.raises(TypeError, match=r"indexed by rows.*groups.member"):
        groups[3]
    with pytest.raises(ValueError, match=r"mask of rows must have shape \(600,\)"):
        groups[mask[:7]]


def test_fit_and_audit_take_groups_cut_by_rows():
    probs, y, groups = draw()
    head = gmc.ProbabilityHead(alpha=0.01, groups=groups.names, num_classes=3, bins=None)
    expected = head.fit(probs[:400], y[:400], groups.membership[:400])(probs[400:], groups.membership[400:])
    assert torch.equal(head.fit(probs[:400], y[:400], groups[:400])(probs[400:], groups[400:].membership), expected)
    audits = [head.audit(probs[400:], y[400:], part) for part in (groups[400:], groups.membership[400:])]
    assert audits[0].table == audits[1].table


def test_a_long_audit_prints_its_worst_rows_with_names_one_can_tell_apart():
    probs, y, groups = draw()
    audit = gmc.ProbabilityHead(alpha=0.01, groups=groups.names, num_classes=3).fit(probs, y, groups).audit(probs, y, groups)
    lines = str(audit).splitlines()
    assert len(audit.rows()) > 100 and len(lines) < 50
    assert any("more with smaller estimates: all are in `audit.table`" in line for line in lines)
    names = [line.split("  ")[0] for line in lines[1:40]]
    assert len(set(names)) == len(names) and any("camera=front & hour=night / f in" in name for name in names)


def test_a_number_is_not_a_list_of_names():
    with pytest.raises(TypeError, match="must be a non-empty list of names"):
        gmc.QuantileHead(target=0.9, alpha=0.01, groups=2)


# -- a model of one's own ----------------------------------------------------------------------------------------------------


class TwoOutputs(torch.nn.Module):
    """Logits of two classes for each pixel, and of three for the picture."""

    def __init__(self):
        super().__init__()
        self.pixels, self.picture = torch.nn.Conv2d(1, 2, 3, padding=1), torch.nn.Linear(1, 3)

    def forward(self, x):
        return self.pixels(x), self.picture(x.mean((2, 3)))


def fitted_head():
    scores, who = torch.rand(40, 8, 8), torch.arange(40)[:, None] % 2 == torch.arange(2)
    return gmc.ThresholdHead(0.1, 0.05, ["even", "odd"]).fit(scores, torch.rand(40, 8, 8) < 0.5, who), who


@pytest.mark.parametrize("format", ["torchscript", "torch.export", "onnx"])
def test_a_model_with_two_outputs(format, tmp_path):
    (head, who), net, x = fitted_head(), TwoOutputs().eval(), torch.randn(6, 1, 8, 8)
    with pytest.raises(TypeError, match=r"a tuple of 2 \(Tensor, Tensor\).*Adapter\(field=0\)"):
        gmc.attach(net, head)(x, who[:6])
    model = gmc.attach(net, head, adapter=gmc.Adapter(field=0, activation="softmax", channel=0))
    assert "field=0, channel=0" in repr(model)
    mask, picture = model(x, who[:6])
    assert torch.equal(mask, head(net(x)[0].softmax(1)[:, 0], who[:6])) and torch.equal(picture, net(x)[1])
    with pytest.raises(ValueError, match="no field 2; it is a tuple of 2"):
        gmc.attach(net, head, adapter=gmc.Adapter(field=2))(x, who[:6])
    path = model.export(tmp_path / "model.bin", format=format, example_inputs=(x, who[:6]))
    assert gmc.export.metadata(path)["format"] == format


def test_a_named_tuple_keeps_its_type():
    class Named(torch.nn.Module):
        def forward(self, x):
            return torch.nn.utils.rnn.PackedSequence(x, torch.ones(2).long(), None, None)

    head, who = fitted_head()
    made = gmc.attach(Named(), head, adapter=gmc.Adapter(field=0))(torch.rand(6, 8, 8), who[:6])
    assert isinstance(made, torch.nn.utils.rnn.PackedSequence) and made.data.dtype == torch.bool


def test_a_cut_table_is_an_example_like_any_other(tmp_path):
    (head, who), net = fitted_head(), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sigmoid())
    x = torch.rand(6, 8, 9)[..., :-1]  # not contiguous
    path = gmc.attach(net, head).export(tmp_path / "m.pt2", "torch.export", (x, who[:6]))
    assert torch.export.load(path).module()(torch.rand(11, 8, 8), who[:11]).shape == (11, 8, 8)


def test_an_onnx_file_names_its_outputs(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    (head, who), net = fitted_head(), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sigmoid())
    path = gmc.attach(net, head).export(tmp_path / "m.onnx", "onnx", (torch.rand(6, 8, 8), who[:6]))
    assert [one.name for one in runtime.InferenceSession(str(path)).get_outputs()] == ["output"]


def test_prediction_and_width_have_one_shape(tmp_path):
    who, net = torch.rand(50, 2) < 0.5, torch.nn.Linear(3, 1)
    head = gmc.QuantileHead(0.9, 0.05, ["a", "b"]).fit(torch.rand(50), who)
    model = gmc.attach(net, head)
    prediction, width = model(torch.rand(7, 3), who[:7])
    assert (prediction - width).shape == (7, 1) and torch.equal(width[:, 0], head(who[:7]))
    for format in ("torchscript", "torch.export", "onnx"):  # compared with the model when written
        model.export(tmp_path / "m.bin", format, (torch.rand(7, 3), who[:7]))


def test_a_head_alone_is_exported_by_the_command():
    with pytest.raises(TypeError, match=r"got ThresholdHead \(a head alone: gmc.save it, then `torchgmc export`\)"):
        gmc.export.export(fitted_head()[0], "x.pt")


# -- what was taken for something else ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_probabilities_are_not_logits(dtype):
    female = torch.arange(60) % 2 == 0
    logits, who = torch.randn(60, 20) + 3.0 * female[:, None], torch.stack([female, ~female], 1)
    head = gmc.DistributionHead({"jobs": [7, 8]}, 0.002, ["female", "male"])
    with pytest.raises(ValueError, match=r"`logits` are probabilities, it seems.*`.log\(\)`"):
        head.fit(logits.softmax(1).to(dtype), who)
    assert head.fit(logits.log_softmax(1), who).is_fitted and head.fit(logits.abs(), who).is_fitted
    mixed = torch.cat([logits[:1].softmax(1), logits[1:]])
    assert head.fit(mixed, who).is_fitted


def test_logits_without_a_sign_are_no_probabilities():
    tree, labels = {"a": ["x", "y"], "b": ["z"]}, torch.randint(3, (50,))
    with pytest.raises(ValueError, match=r"`probs` must be at most 1, got 6; apply `softmax\(1\)` to logits"):
        gmc.TreeHead(tree, 0.9, 0.05).fit(torch.rand(50, 3).index_fill(0, torch.tensor([3]), 6.0), labels)
    with pytest.raises(ValueError, match="counted from 0 to 2, got 3"):
        gmc.TreeHead(tree, 0.9, 0.05).fit(torch.rand(50, 3), labels.clamp(min=1).index_fill(0, torch.tensor([3]), 2) + 1)


def test_a_path_is_no_string_with_slashes():
    with pytest.raises(ValueError, match=r"a path is a tuple of names, \('animal', 'cat'\), not 'animal/cat'"):
        gmc.TreeHead(["animal/cat", "animal/dog", "car/bus"], 0.9, 0.02)
    assert gmc.TreeHead(["TCP/IP", "cat"], 0.9, 0.02).num_leaves == 2


def test_a_target_below_the_accuracy_is_named():
    labels = torch.arange(2000) % 8
    probs = (torch.randn(2000, 8) + 2.5 * torch.nn.functional.one_hot(labels, 8)).softmax(1)
    head = gmc.TreeHead({"a": ["p", "q", "r", "s"], "b": ["t", "u", "v", "w"]}, target=0.3, alpha=0.01).fit(probs, labels)
    assert not head.report.converged and "Even best leaves alone are right for 0." in head.report.message
    assert "Raise `target`" in head.report.message


def test_masks_of_another_shape_or_of_0_and_255():
    head, scores, masks = gmc.ThresholdHead(0.1, 0.05), torch.rand(9, 1, 4, 4), (torch.rand(9, 1, 4, 4) < 0.5).float()
    for wrong in (255 * masks, (255 * masks).byte()):
        with pytest.raises(
            ValueError, match=r"hold only 0 and 1, but it holds 255(.0)?; if all but 0 is positive, `masks > 0`"
        ):
            head.fit(scores, wrong)
    for s, m, advice in (
        (scores[:, 0], masks, r"`masks.squeeze\(1\)`"),
        (scores, masks[:, 0], r"`scores.squeeze\(1\)`"),
        (scores.expand(9, 2, 4, 4), masks, r"`scores\[:, 1:2\]`, or make the head with `num_classes`"),
        (scores.expand(9, 2, 4, 4), masks[:, 0], r"`scores\[:, 1\]`, or make the head with `num_classes`"),
        (scores[:, 0], masks[:8, 0], r"got \(8, 4, 4\)\."),
    ):
        with pytest.raises(ValueError, match=advice):
            head.fit(s, m)


# -- what an audit says ------------------------------------------------------------------------------------------------------


def test_an_audit_names_target_and_risk_and_counts_promises():
    probs, y, groups = draw()
    thresholds = gmc.QuantileHead(0.9, 0.05, groups.names).fit(probs[:, 0], groups).audit(probs[:, 1], groups)
    assert "of every one of 8 groups is within" in thresholds.certificate and "of the target 0.9 on" in thresholds.certificate
    head, first, *_ = str(thresholds).splitlines()
    assert head.split()[:4] == ["group", "mass", "risk", "estimate"] and f" {thresholds.table['risk'][0]:.4f} " in first
    events = gmc.ProbabilityHead(0.01, groups.names, bins=3).fit(probs[:, 0], y == 0, groups)
    assert "of every one of 24 promises is within" in events.audit(probs[:, 0], y == 0, groups).certificate


def test_audits_judged_by_different_alphas_say_so():
    probs, _, groups = draw()
    heads = [gmc.QuantileHead(0.9, alpha, groups.names).fit(probs[:, 0], groups) for alpha in (0.01, 1.0)]
    ours, asis = (head.audit(probs[:, 0], groups) for head in heads)
    assert "asked alpha" in str(gmc.compare({"ours": ours, "as it is": asis})).replace("\n", " ")
    same = gmc.compare({"ours": ours, "as it is": gmc.audit(heads[1], (probs[:, 0], groups), alpha=0.01)})
    assert "asked alpha" not in str(same)


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*`isinstance\\(treespec, LeafSpec\\)`.*")
def test_the_training_data_are_no_calibration_data(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Conv2d(1, 1, 1)

        def forward(self, x):
            return self.net(x).sigmoid()

        def training_step(self, batch, index):
            return torch.nn.functional.binary_cross_entropy(self(batch[0]), batch[1].float())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def data():
        return torch.utils.data.TensorDataset(torch.randn(16, 1, 4, 4), torch.rand(16, 1, 4, 4) < 0.5)

    train, held_out = data(), data()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    for calibration in (train, held_out):
        callback = gmc.lightning.CalibrationCallback(
            gmc.ThresholdHead(0.1, 0.2), torch.utils.data.DataLoader(calibration, batch_size=8)
        )
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=1, log_every_n_steps=1, default_root_dir=tmp_path, callbacks=[callback], **quiet
        )
        loader = torch.utils.data.DataLoader(train, batch_size=8)  # warnings are errors here: the second round gives none
        if calibration is train:
            with pytest.warns(UserWarning, match="the calibration loader holds the training data"):
                trainer.fit(Module(), loader)
        else:
            trainer.fit(Module(), loader)
        assert callback.head.is_fitted


def test_a_baseline_without_groups_says_how_to_audit_it_by_groups():
    probs, y, groups = draw()
    scores, masks = probs[:, None], torch.nn.functional.one_hot(y, 3)[:, None].bool()
    baseline = gmc.baselines.ConformalRiskControl(target=0.4).fit(scores, masks)
    with pytest.raises(ValueError, match=r"has camera=front, .*made without groups; make it with groups=groups.names"):
        baseline.audit(scores, masks, groups)
    again = gmc.baselines.ConformalRiskControl(target=0.4, groups=groups.names).fit(scores, masks, groups)
    assert len(again.audit(scores, masks, groups).rows()) == len(groups) and torch.equal(
        again.threshold(groups.membership).unique(), baseline.threshold().unique()
    )


def test_the_top_of_a_page_with_several_heads_says_whose_certificate_it_shows(tmp_path):
    probs, _, groups = draw()
    audits = {
        name: gmc.QuantileHead(0.9, 0.01, groups.names, init=init).fit(probs[:, 0], groups).audit(probs[:, 1], groups)
        for name, init in (("theirs", 0.1), ("ours", None))
    }
    page = gmc.compare(audits).to_html(tmp_path / "p.html").read_text()
    assert f"ours: {audits['ours'].certificate}" in page and f"theirs: {audits['theirs'].certificate}" not in page
    assert "ours: With" not in audits["ours"].to_html(tmp_path / "q.html").read_text()
