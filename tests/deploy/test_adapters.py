"""Adapters: models with several outputs."""

import collections
import dataclasses
import types

import pytest
import torch

import torchgmc as gmc
from gmctest.examples import even_and_odd


class TwoOutputs(torch.nn.Module):
    """Logits of two classes for each pixel, and of three for the picture."""

    def __init__(self):
        super().__init__()
        self.pixels, self.picture = torch.nn.Conv2d(1, 2, 3, padding=1), torch.nn.Linear(1, 3)

    def forward(self, x):
        return self.pixels(x), self.picture(x.mean((2, 3)))


@pytest.mark.parametrize("format", ["torchscript", "torch.export", "onnx"])
def test_a_model_with_two_outputs(format, tmp_path):
    (head, who), net, x = even_and_odd(), TwoOutputs().eval(), torch.randn(6, 1, 8, 8)
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

    head, who = even_and_odd()
    made = gmc.attach(Named(), head, adapter=gmc.Adapter(field=0))(torch.rand(6, 8, 8), who[:6])
    assert isinstance(made, torch.nn.utils.rnn.PackedSequence) and made.data.dtype == torch.bool


def test_fields_of_a_named_tuple_and_of_a_dataclass_by_name():
    head, who = even_and_odd()
    x = torch.rand(6, 8, 8)
    pair, record = collections.namedtuple("Pair", "other scores"), dataclasses.make_dataclass("Record", ["other", "scores"])
    for sort in (pair, record, lambda other, scores: types.SimpleNamespace(other=other, scores=scores)):
        net = torch.nn.Identity()
        net.forward = lambda x, sort=sort: sort("as it was", x)
        named = {"adapter": gmc.Adapter(field="scores")}
        assert torch.equal(gmc.attach(net, head, **named, returns="result")(x, who[:6]), head(x, who[:6]))
        if sort in (pair, record):
            made = gmc.attach(net, head, **named)(x, who[:6])
            assert isinstance(made, sort) and made.other == "as it was" and torch.equal(made.scores, head(x, who[:6]))
            with pytest.raises(ValueError, match=f"no field 'out'; it is a {sort.__name__}"):
                gmc.attach(net, head, adapter=gmc.Adapter(field="out"))(x, who[:6])
        else:
            with pytest.raises(TypeError, match="into a SimpleNamespace; use returns='result' or override Adapter.replace"):
                gmc.attach(net, head, **named)(x, who[:6])


# -- label maps ----------------------------------------------------------------------------------------------------------------


def label_maps(n=60, seed=0):
    """Logits of four classes, label maps with pixels of no class (255), and two groups."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (n, 6, 7), generator=g)
    logits = torch.randn(n, 4, 6, 7, generator=g) + 2.0 * torch.nn.functional.one_hot(labels, 4).movedim(3, 1)
    labels[torch.rand(labels.shape, generator=g) < 0.2] = 255
    return logits, labels, torch.arange(n)[:, None] % 2 == torch.arange(2)


def observed(adapter, head, output, *batch):
    return gmc.deploy.adapters.adapt(torch.nn.Identity(), head, adapter).observation(head, output, adapter.split(batch))


@pytest.mark.parametrize("resolution", [None, "exact"])
def test_label_maps_and_pixels_to_leave_out(resolution):
    """Against a loop that looks at the labelled pixels of class 2 only."""
    logits, labels, who = label_maps()
    adapter = gmc.Adapter(channel=2, activation="softmax", ignore_index=255)
    head = gmc.ThresholdHead(0.2, None, ["even", "odd"], resolution=resolution, noise_floor=True)
    batch = observed(adapter, head, logits, logits, labels, who)
    assert torch.equal(batch["masks"], labels == 2) and torch.equal(batch["pixel_weight"], labels != 255)
    probs = logits.softmax(1)[:, 2]
    for risk, want in (("fnr", lambda p, y, t: p[y == 2] <= t), ("fpr", lambda p, y, t: p[(y != 2) & (y != 255)] > t)):
        twin = gmc.ThresholdHead(0.2, None, ["even", "odd"], risk=risk, resolution=resolution).fit(**batch)
        found, lam = twin.values(**batch).s[:, 0] + 0.2, twin.threshold(who)
        loop = torch.stack([want(p, y, t).double().mean() for p, y, t in zip(probs, labels, lam, strict=True)])
        torch.testing.assert_close(found, loop, equal_nan=True)
        torch.testing.assert_close(
            twin.report.violations_after[:2, 0], gmc.violations(who, (loop - 0.2)[:, None])[:, 0], atol=2e-3, rtol=0
        )
    # Of every class at once, and labels with a channel dimension of one.
    every = gmc.ThresholdHead(0.2, None, ["even", "odd"], num_classes=4)
    batch = observed(gmc.Adapter(activation="softmax", ignore_index=255), every, logits, logits, labels[:, None], who)
    counted = batch["pixel_weight"] > 0
    assert torch.equal(batch["masks"] & counted, labels[:, None] == torch.arange(4)[:, None, None])
    assert torch.equal(counted, (labels != 255)[:, None].expand(-1, 4, -1, -1))
    every.fit(**batch)
    with pytest.raises(ValueError, match=r"class ids from 0 to 3.* but it holds 255; .*ignore_index=255"):
        observed(gmc.Adapter(channel=2, activation="softmax"), head, logits, logits, labels, who)


@pytest.mark.parametrize("options", [{"channel": 2, "ignore_index": 255}, {"channel": 0}, {"ignore_index": 255}], ids=str)
def test_label_maps_may_be_arrays(options):
    logits, labels, who = label_maps()
    labels = labels if "ignore_index" in options else labels.clamp_max(1)  # 0 and 1: an array of masks, too, if it were not a map
    head, adapter = gmc.ThresholdHead(0.2, None, ["even", "odd"]), gmc.Adapter(activation="softmax", **options)
    want, found = (observed(adapter, head, logits, logits, one, who) for one in (labels, labels.numpy()))
    assert want.keys() == found.keys() and all(torch.equal(want[key], found[key]) for key in want)


def test_weights_of_pixels_for_built_in_and_own_risks():
    logits, labels, who = label_maps(30)
    probs, masks = logits.softmax(1)[:, 2], labels == 2
    weight = 1.0 + 4.0 * (probs < 0.3)

    def missed(scores, masks, thresholds, weights):
        wrong = masks & (scores <= thresholds[:, :, None, None])
        return (wrong * weights).sum((2, 3)) / (masks * weights).sum((2, 3))

    own = gmc.MonotoneRisk(missed, weighted=True)
    heads = [gmc.ThresholdHead(0.2, None, ["even", "odd"], risk=risk, resolution=2**-7, init=0.4) for risk in ("fnr", own)]
    found = [head.values(probs, masks, who, pixel_weight=weight).s for head in heads]
    loop = torch.stack([w[m & (p <= 0.4)].sum() / w[m].sum() for p, m, w in zip(probs, masks, weight, strict=True)])
    torch.testing.assert_close(found[0][:, 0], loop.double() - 0.2)
    torch.testing.assert_close(found[1], found[0])
    fitted = [head.fit(probs, masks, who, pixel_weight=weight).threshold(who) for head in heads]
    torch.testing.assert_close(fitted[0], fitted[1])
    assert not torch.equal(
        fitted[0],
        gmc.ThresholdHead(0.2, None, ["even", "odd"], resolution=2**-7, init=0.4).fit(probs, masks, who).threshold(who),
    )
    audit = heads[0].audit(probs.flip(0) * 0.99, masks.flip(0), who, pixel_weight=weight.flip(0))
    assert audit.num_examples == 30 and 0 < audit.cost["accuracy after"] < 1
    soft = heads[0].values(probs, masks, who, softness=1e-5, pixel_weight=weight).s
    torch.testing.assert_close(soft.double(), heads[0].values(probs, masks, who, pixel_weight=weight).s, atol=1e-4, rtol=0)
    plain = gmc.ThresholdHead(0.2, None, risk=gmc.MonotoneRisk(lambda s, m, t: t * 0 + 0.5))
    for head, wrong, message in (
        (plain, weight, "does not take weights of pixels; .*weighted=True"),
        (heads[0], weight[:, 0], "`pixel_weight` must have one weight per pixel"),
        (heads[0], -weight, "`pixel_weight` must not be negative"),
    ):
        with pytest.raises(ValueError, match=message):
            head.fit(probs, masks, who if head.grouped else None, pixel_weight=wrong)


def test_images_of_varying_size_in_a_loader():
    """Padded batches give the thresholds of images taken one by one."""
    g = torch.Generator().manual_seed(1)
    sizes = [(5, 9), (7, 6), (6, 6), (8, 4)] * 5
    samples = [
        {
            "image": torch.randn(1, h, w, generator=g),
            "mask": torch.randint(3, (h, w), generator=g),
            "groups": torch.arange(2) == k % 2,
        }
        for k, (h, w) in enumerate(sizes)
    ]
    net = torch.nn.Conv2d(1, 3, 1)
    adapter = gmc.Adapter(channel=1, activation="softmax", ignore_index=255)

    def fitted(**options):
        loader = torch.utils.data.DataLoader(samples, **options)
        head = gmc.ThresholdHead(0.2, None, ["even", "odd"], risk="fpr")
        batches = (adapter.observation(head, net(batch["image"]), adapter.split(batch)) for batch in loader)
        return head.fit_batches(batches).threshold(torch.eye(2) > 0)

    with torch.no_grad():
        torch.testing.assert_close(fitted(batch_size=4, collate_fn=adapter.collate), fitted(batch_size=1))
    masks = [(sample["image"], sample["mask"] == 1) for sample in samples]
    images, targets = adapter.collate(masks, 4)
    assert images.shape == (20, 1, 8, 12) and targets.shape == (20, 8, 12) and targets.is_floating_point()
    with pytest.raises(ValueError, match="the targets differ in size: pass Adapter"):
        gmc.Adapter(channel=1).collate(masks)
