"""attach: real models, groups from every source, and everything a module can do."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torchgmc as gmc
from gmctest.fake_device import AWAY
from gmctest.heads_zoo import GROUPS, NAMES, ZOO


def member_of(n: int) -> Tensor:
    return torch.arange(n)[:, None] % 2 == torch.arange(2)


def fit(scores: Tensor, **options) -> gmc.ThresholdHead:
    """A head with two groups, on random masks."""
    masks = torch.rand(scores.shape, generator=torch.Generator().manual_seed(5)) < 0.5
    return gmc.ThresholdHead(0.2, 0.2, ["even", "odd"], **options).fit(scores.detach(), masks, member_of(len(scores)))


@pytest.fixture
def images() -> Tensor:
    return torch.rand(6, 3, 32, 32)


# -- real models -------------------------------------------------------------------------------------------------------------


def test_unet_with_probabilities_and_with_logits(images):
    smp = pytest.importorskip("segmentation_models_pytorch")

    def make(**options):
        return smp.Unet("resnet18", encoder_weights=None, encoder_depth=3, decoder_channels=(16, 8, 8), **options).eval()

    net, groups = make(), member_of(6)
    with torch.no_grad():
        logits = net(images)
        head = fit(logits, logits=True)
        assert torch.equal(gmc.attach(net, head)(images, groups), head(logits, groups))
        head = fit(logits.sigmoid())  # wants probabilities; the model is known to give logits
        mask = gmc.attach(net, head)(images, groups)
        assert torch.equal(mask, head(logits.sigmoid(), groups)) and mask.shape == logits.shape and mask.dtype == torch.bool
        ready = make(activation="sigmoid")
        head = fit(ready(images))
        assert torch.equal(gmc.attach(ready, head)(images, groups), head(ready(images), groups))
        several = make(classes=3)
        head = fit(several(images).softmax(1), num_classes=3)
        with pytest.raises(ValueError, match="logits for 3 classes.*Adapter\\(activation='softmax'\\)"):
            gmc.attach(several, head)
        model = gmc.attach(several, head, adapter=gmc.Adapter(activation="softmax"))
        assert torch.equal(model(images, groups), head(several(images).softmax(1), groups))


def test_torchvision_segmentation(images):
    models = pytest.importorskip("torchvision.models")
    net = models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=2).eval()
    groups = member_of(6)
    with torch.no_grad():
        out = net(images)["out"]
        head = fit(out.softmax(1)[:, 1])
        output = gmc.attach(net, head, adapter=gmc.Adapter(channel=1))(images, groups)
        assert type(output) is OrderedDict and torch.equal(output["out"], head(out.softmax(1)[:, 1], groups))
        both = fit(out.softmax(1), num_classes=2)
        assert torch.equal(gmc.attach(net, both)(images, groups)["out"], both(out.softmax(1), groups))


def test_torchvision_classification(images):
    models = pytest.importorskip("torchvision.models")
    net, groups = models.resnet18(num_classes=3).eval(), member_of(6)
    with torch.no_grad():
        probs = net(images).softmax(1)
        head = gmc.ProbabilityHead(0.01, ["even", "odd"], bins=None, num_classes=3, noise_floor=False)
        head.fit(probs, torch.tensor([0, 1, 2, 0, 1, 2]), groups)
        torch.testing.assert_close(gmc.attach(net, head)(images, groups), head(probs, groups))


def test_one_event_of_two_classes_or_one_output():
    groups, y = member_of(8), torch.tensor([0, 1, 1, 0, 1, 1, 0, 0])
    head = gmc.ProbabilityHead(0.01, ["even", "odd"], bins=None, noise_floor=False).fit(torch.rand(8), y, groups)
    x = torch.randn(8, 4)
    for outputs, activation in ((1, "sigmoid"), (2, "softmax")):
        net = nn.Linear(4, outputs)
        probs = net(x).sigmoid()[:, 0] if outputs == 1 else net(x).softmax(1)[:, 1]
        model = gmc.attach(net, head, adapter=gmc.Adapter(activation=activation))
        torch.testing.assert_close(model(x, groups), head(probs, groups))
    with pytest.raises(ValueError, match="made for one event, but the model outputs 3 classes"):
        gmc.attach(nn.Linear(4, 3), head, adapter=gmc.Adapter(activation="softmax"))(x, groups)


def bert(kind: str = "BertForMaskedLM", **options) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=12,
        **options,
    )
    return getattr(transformers, kind)(config).eval()


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=12, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config).eval()


def gentle(logits: Tensor, groups: Tensor) -> gmc.DistributionHead:
    return gmc.DistributionHead({"jobs": [10, 11]}, 1e-4, ["even", "odd"], noise_floor=False).fit(logits, groups)


@pytest.mark.parametrize("make", [bert, gpt2])
def test_language_models_keep_their_output_type(make):
    net, groups = make(), member_of(8)
    ids = torch.randint(5, 40, (8, 5))
    with torch.no_grad():
        output = net(input_ids=ids, labels=ids)
        head = gentle(output.logits[:, -1], groups)
        model = gmc.attach(net, head)
        for got in (model(ids, groups), model(input_ids=ids, groups=groups), model({"input_ids": ids, "groups": groups})):
            assert type(got) is type(output)
            torch.testing.assert_close(got.logits, head(output.logits, groups))
            torch.testing.assert_close(got.calibrated, got.logits)
            assert not torch.allclose(got.logits, output.logits.log_softmax(-1))
        torch.testing.assert_close(model(input_ids=ids, labels=ids, groups=groups).loss, output.loss)  # the model's own


def test_only_the_position_that_was_calibrated_is_changed():
    net, groups = bert(), member_of(8)
    ids = torch.randint(5, 40, (8, 5))
    place = torch.tensor([1, 2, 3, 1, 2, 3, 1, 2])
    ids[torch.arange(8), place] = 4
    with torch.no_grad():
        logits = net(ids).logits
        head = gentle(logits[torch.arange(8), place], groups)
        got = gmc.attach(net, head, adapter=gmc.Adapter(mask_token_id=4))(ids, groups).logits
        here = ids == 4
        torch.testing.assert_close(got[~here], logits[~here])
        torch.testing.assert_close(got[here], head(logits[here], groups))
        seen = torch.ones_like(ids)
        seen[::2, 4] = 0
        got = gmc.attach(net, head, adapter=gmc.Adapter(position="last"))(input_ids=ids, attention_mask=seen, groups=groups).logits
        logits = net(ids, attention_mask=seen).logits
        here = torch.nn.functional.one_hot(torch.where(seen[:, 4] == 1, 4, 3), 5).bool()
        torch.testing.assert_close(got[~here], logits[~here])
        torch.testing.assert_close(got[here], head(logits[here], groups))


def test_a_tensor_that_is_not_the_models_own_is_left_alone():
    groups, logits = member_of(8), torch.randn(8, 5, 40)
    before = logits.clone()
    head = gentle(logits[:, -1], groups)
    with torch.no_grad():
        got = gmc.attach(nn.Identity(), head, adapter=gmc.Adapter(position="last"))(logits, groups)
    assert torch.equal(logits, before)
    torch.testing.assert_close(got[:, -1], head(before[:, -1], groups))
    torch.testing.assert_close(got[:, :-1], before[:, :-1])


def test_sequence_classification_keeps_its_logits():
    net, groups = bert("BertForSequenceClassification", num_labels=3), member_of(8)
    ids = torch.randint(5, 40, (8, 5))
    with torch.no_grad():
        output = net(ids)
        head = gmc.ProbabilityHead(0.01, ["even", "odd"], bins=None, num_classes=3, noise_floor=False)
        head.fit(output.logits.softmax(1), torch.arange(8) % 3, groups)
        got = gmc.attach(net, head)(ids, groups)
        assert type(got) is type(output)
        torch.testing.assert_close(got.logits, output.logits)  # probabilities are no logits
        torch.testing.assert_close(got.calibrated, head(output.logits.softmax(1), groups))


def test_lightning_module(images, tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Conv2d(3, 1, 1)

        def forward(self, x):
            return {"out": self.net(x).sigmoid(), "other": x}

    net, groups = Lit(), member_of(6)
    head = fit(net(images)["out"])
    output = gmc.attach(net, head)(images, groups)
    assert set(output) == {"out", "other"} and torch.equal(output["out"], head(net(images)["out"], groups))
    model = gmc.attach(net, head, returns="result")  # what a file returns, in Python too
    run = torch.jit.load(model.export(tmp_path / "m.pt", "torchscript", (images, groups)))
    assert torch.equal(model(images, groups), output["out"]) and torch.equal(run(images, groups), output["out"])
    with pytest.raises(ValueError, match="`returns` must be one of 'output', 'result', got 'tensor'"):
        gmc.attach(net, head, returns="tensor")


def test_quantile_head_gives_scores_and_thresholds():
    net, groups = nn.Linear(4, 2), member_of(8)
    head = gmc.QuantileHead(0.8, 0.1, ["even", "odd"]).fit(torch.rand(8), groups)
    x = torch.rand(8, 4)
    output, threshold = gmc.attach(net, head)(x, groups)
    assert torch.equal(output, net(x)) and torch.equal(threshold, head(groups))
    one = gmc.QuantileHead(0.8, 0.1).fit(torch.rand(8))
    assert torch.equal(gmc.attach(net, one)(x)[1], one().expand(8))


# -- groups ------------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return (self.net(x) if scale is None else self.net(x) * scale).sigmoid()


class Bright(nn.Module):
    """Groups from the image."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cut", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        bright = x.flatten(1).mean(1) > self.cut
        return torch.stack([bright, ~bright], 1)


def test_groups_from_every_source(images):
    net = Net()
    groups = Bright()(images)
    head = fit(net(images))
    want = head(net(images), groups)
    assert torch.equal(gmc.attach(net, head)(images, groups), want)
    assert torch.equal(gmc.attach(net, head)(images, groups=groups), want)
    by_key = gmc.attach(net, head, groups="site")
    assert torch.equal(by_key(x=images, site=groups), want) and torch.equal(by_key({"x": images, "site": groups}), want)
    computed = gmc.attach(net, head, groups=Bright())
    assert torch.equal(computed(images), want) and "group_source.cut" in computed.state_dict()
    assert torch.equal(computed(images, groups=~groups), head(net(images), ~groups))  # given after all
    assert torch.equal(gmc.attach(net, head, groups=lambda x: Bright()(x))(images), want)
    with torch.no_grad():
        assert gmc.attach(net, head)(images, torch.tensor(2.0), groups).shape == want.shape  # other inputs stay the model's


def test_a_head_without_groups_takes_none(images):
    net = Net()
    head = gmc.ThresholdHead(0.2, 0.2).fit(net(images).detach(), torch.rand(6, 1, 32, 32) < 0.5)
    assert torch.equal(gmc.attach(net, head)(images), head(net(images)))


def test_missing_groups_are_explained_once(images):
    net, head = Net(), None
    head = fit(net(images))
    for model, call in ((gmc.attach(net, head), {}), (gmc.attach(net, head, groups="site"), {"scale": torch.ones(())})):
        with pytest.raises(ValueError) as caught:
            model(images, **call)
        text = str(caught.value)
        for part in (
            "`groups` is missing",
            "(n, 2)",
            "even, odd",
            "last positional",
            "groups='key'",
            "groups=module",
            "(6, 3, 32, 32)",
        ):
            assert part in text
    assert "'site'" in text and "scale=" in text


def test_wrong_arguments(images):
    net = Net()
    head = fit(net(images))
    with pytest.raises(ValueError, match="`groups` has 5 rows, but the model returned scores for 6"):
        gmc.attach(net, head)(images, member_of(5))
    with pytest.raises(TypeError, match="must be a membership tensor"):
        gmc.attach(net, head)(images, "female")
    with pytest.raises(TypeError, match="bool membership, got torch.float32"):
        gmc.attach(net, head, groups=lambda x: torch.rand(len(x), 2))(images)
    with pytest.raises(TypeError, match="`model` must be an nn.Module"):
        gmc.attach(lambda x: x, head)
    with pytest.raises(TypeError, match="`head` must be a torchgmc head"):
        gmc.attach(net, net)
    with pytest.raises(TypeError, match="pass a fixed membership when you call the model"):
        gmc.attach(net, head, groups=[[True]])
    with pytest.raises(TypeError, match="`adapter` must be an Adapter"):
        gmc.attach(net, head, adapter="softmax")
    with pytest.raises(ValueError, match="`activation` must be one of"):
        gmc.Adapter(activation="relu")
    with pytest.raises(ValueError, match="needs `mask_token_id`"):
        gmc.Adapter(position="mask")
    with pytest.raises(ValueError, match="needs probabilities in \\[0, 1\\], but the model returned -?[0-9.]+ to"):
        gmc.attach(nn.Conv2d(3, 1, 1), head)(images * 9, member_of(6))
    with pytest.raises(RuntimeError, match="not fitted"):
        gmc.attach(net, gmc.ThresholdHead(0.1, 0.1, ["a", "b"]))(images, member_of(6))

    class Odd(nn.Module):
        def forward(self, x):
            return {"picture": x}

    with pytest.raises(TypeError, match="the keys 'picture', holds no scores under a known name"):
        gmc.attach(Odd(), head)(images, member_of(6))
    with pytest.raises(ValueError, match="no field 'mask'; it has 'picture'"):
        gmc.attach(Odd(), head, adapter=gmc.Adapter(field="mask"))(images, member_of(6))
    assert gmc.attach(Odd(), fit(images), adapter=gmc.Adapter(field="picture"))(images, member_of(6))["picture"].dtype == torch.bool


# -- a module like any other ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ZOO, ids=NAMES)
def test_every_head_attached(entry):
    head, inputs = entry.fitted(), entry.data(7, 3).inputs
    model = gmc.attach(nn.Identity(), head)
    if model.wants == "groups":
        assert torch.equal(model(torch.rand(7, 2), *inputs)[1], head(*inputs))
        return
    assert torch.equal(model(*inputs), head(*inputs))


def test_modes_types_state_and_copies(images):
    net = nn.Sequential(Net(), nn.Dropout(0.0))
    head = fit(net(images))
    model, groups = gmc.attach(net, head), member_of(6)
    want = model(images, groups)
    assert model.train().model.training and model.head.training and not model.eval().model.training
    twin = copy.deepcopy(model)
    twin.head.offsets.add_(0.3)
    assert torch.equal(model(images, groups), want)
    fresh = gmc.attach(nn.Sequential(Net(), nn.Dropout(0.0)), gmc.ThresholdHead(0.2, 0.2, ["even", "odd"]))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(images, groups), want)
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert half.head.offsets.dtype == torch.float64
    assert (half(images.to(torch.bfloat16), groups) == want).float().mean() > 0.9
    assert "groups from an argument" in repr(model)


def test_compile(images):
    net = Net().eval()
    head, groups = fit(net(images)), member_of(6)
    compiled, scores = torch.compile(head, backend="eager", fullgraph=True), net(images).detach()
    assert torch.equal(compiled(scores, groups), head(scores, groups))
    model = gmc.attach(net, head).eval()
    whole = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(whole(images, groups), model(images, groups))


def test_nothing_leaves_the_device():
    head = ZOO[NAMES.index("threshold")].fitted()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = gmc.attach(nn.Sigmoid(), head)
        head._buffers = {name: torch.empty_like(value, device=AWAY) for name, value in head._buffers.items()}
        model._looked = True  # a look at values has no place among fakes
        scores, groups = torch.randn(4, 6, 5, device=AWAY), torch.ones(4, len(GROUPS), dtype=torch.bool, device=AWAY)
        assert model(scores, groups).device == AWAY


def test_gradients_reach_the_model():
    entry = ZOO[NAMES.index("distribution")]
    logits, groups = entry.data(5, 0).inputs
    net = nn.Linear(20, 20)
    gmc.attach(net, entry.fitted())(logits, groups)[:, 3].sum().backward()
    assert net.weight.grad.abs().sum() > 0


def test_a_head_with_sets_of_its_own_may_be_given_something_to_look_at():
    def halves(f: Tensor, x: Tensor) -> Tensor:
        return torch.stack([x[:, 0] > 0, x[:, 0] <= 0], 1)

    from torchgmc.mappings import Residual

    x, probs, y = torch.randn(60, 1), torch.rand(60), (torch.rand(60) < 0.5).float()
    head = gmc.GMCHead(Residual, 0.01, who=halves).fit(probs, y, x)
    assert torch.equal(gmc.attach(nn.Identity(), head)(probs, groups=x), head(probs, x))
    levels = gmc.GMCHead(Residual, 0.01, who=lambda f, x: torch.cat([f > 0.5, f <= 0.5], 1)).fit(probs, y)
    assert torch.equal(gmc.attach(nn.Identity(), levels)(probs), levels(probs))


def test_prediction_and_width_have_one_shape(tmp_path):
    who, net = torch.rand(50, 2) < 0.5, torch.nn.Linear(3, 1)
    head = gmc.QuantileHead(0.9, 0.05, ["a", "b"]).fit(torch.rand(50), who)
    model = gmc.attach(net, head)
    prediction, width = model(torch.rand(7, 3), who[:7])
    assert (prediction - width).shape == (7, 1) and torch.equal(width[:, 0], head(who[:7]))
    for format in ("torchscript", "torch.export", "onnx"):  # compared with the model when written
        model.export(tmp_path / "m.bin", format, (torch.rand(7, 3), who[:7]))
