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
