"""Several heads behind one model: side by side, and one after another."""

import pytest
import torch

import torchgmc as gmc

FORMATS = ["torchscript", "torch.export", "onnx"]


def organs():
    """A network of three classes, and heads of two of them with groups that differ."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3, padding=1), torch.nn.Softmax(1)).eval()
    x, who, y = torch.randn(40, 1, 8, 8), torch.rand(40, 3) < 0.5, torch.randint(3, (40, 8, 8))
    with torch.no_grad():
        probs = net(x)
    heads = {
        "tumour": gmc.ThresholdHead(0.1, None, ["a", "b"]).fit(probs[:, 1], y == 1, who[:, :2]),
        "vessel": gmc.ThresholdHead(0.1, None, ["b", "c"], risk="fpr").fit(probs[:, 2], y == 2, who[:, 1:]),
        "size": gmc.QuantileHead(0.9, None).fit(torch.rand(40)),
    }
    adapters = {"tumour": gmc.Adapter(channel=1), "vessel": gmc.Adapter(channel=2), "size": gmc.Adapter()}
    return net, x, who, probs, heads, adapters


@pytest.mark.parametrize("format", FORMATS)
def test_one_pass_one_file_named_outputs(format, tmp_path):
    net, x, who, probs, heads, adapters = organs()
    model = gmc.attach(net, heads, adapter=adapters)
    assert model.reader.groups == ["a", "b", "c"]
    passes = []
    net.register_forward_hook(lambda *_: passes.append(1))
    found = model(x, who)
    assert len(passes) == 1 and list(found) == ["tumour", "vessel", "size"]
    assert torch.equal(found["tumour"], heads["tumour"](probs[:, 1], who[:, :2]))
    assert torch.equal(found["vessel"], heads["vessel"](probs[:, 2], who[:, 1:]))
    assert torch.equal(found["size"], heads["size"]().expand(40))
    columns = {"k": ["a", "b", "c"]}
    named = gmc.Groups.from_columns(columns)  # "k=a", ...
    with pytest.raises(ValueError, match="`groups` lacks 'a', 'b', 'c'"):
        model(x[:3], groups=named)
    path = model.export(tmp_path / "model.bin", format=format, example_inputs=(x[:3], who[:3]))
    about = gmc.export.metadata(path)
    assert about["outputs"] == list(found) and about["heads"]["vessel"]["groups"] == ["b", "c"]
    if format == "onnx":
        runtime = pytest.importorskip("onnxruntime")
        session = runtime.InferenceSession(str(path))
        assert [one.name for one in session.get_outputs()] == list(found)
    elif format == "torchscript":
        loaded = torch.jit.load(str(path))(x, who)
        assert isinstance(loaded, dict) and all(torch.equal(loaded[name], value) for name, value in found.items())


def test_a_list_of_heads_has_names_and_shares_groups_and_softness():
    net, x, who, probs, heads, _ = organs()
    two = [heads["tumour"], gmc.ThresholdHead(0.3, None, ["a", "b"]).fit(probs[:, 1], probs[:, 1] > 0.3, who[:, :2])]
    model = gmc.attach(net, two, adapter=gmc.Adapter(channel=1))
    found = model(x, who[:, :2])
    assert list(found) == ["threshold", "threshold_2"]
    assert torch.equal(found["threshold_2"], two[1](probs[:, 1], who[:, :2]))
    soft = model.soften("soft", 0.05)(x, who[:, :2])
    torch.testing.assert_close(soft["threshold_2"], two[1](net(x)[:, 1], who[:, :2], "soft", 0.05))
    assert set(model.state_dict()) >= {"parts.threshold.head.offsets", "parts.threshold_2.head.offsets"}
    for wrong, message in (
        ([], "at least one"),
        ([net], "must be a torchgmc head, or several"),
        ({"a b": two[0]}, "must be words"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            gmc.attach(net, wrong)
    with pytest.raises(ValueError, match="one for each of 'threshold', 'threshold_2'"):
        gmc.attach(net, two, adapter=[gmc.Adapter()])
    with pytest.raises(RuntimeError, match="the head 'threshold_2' is not fitted"):
        gmc.attach(net, [two[0], gmc.ThresholdHead(0.1, None, ["a"])]).export("x", example_inputs=(x, who[:, :2]))


@pytest.mark.parametrize("format", FORMATS)
def test_one_head_after_another(format, tmp_path):
    """attach(attach(m, a), b)(x, g) = b(a(m(x), g), g), each head with its own groups."""
    torch.manual_seed(1)
    probs, who = torch.rand(300), torch.rand(300, 2) < 0.5
    y = torch.rand(300) < probs**2
    first = gmc.ProbabilityHead(None, ["a", "b"], bins=3).fit(probs, y, who)
    second = gmc.ThresholdHead(0.2, None, ["b"]).fit(first(probs, who)[:, None], y[:, None], who[:, 1:])
    model = gmc.attach(gmc.attach(torch.nn.Identity(), first), second)
    assert torch.equal(model(probs, who), second(first(probs, who), who[:, 1:]))
    assert torch.equal(model(probs, groups=who), model(probs, who))
    model.export(tmp_path / "model.bin", format=format, example_inputs=(probs[:3], who[:3]))


@pytest.fixture(scope="module")
def rows():
    """Rows of a model blind to its second input, and heads for it: two that learn, and one with groups."""
    g = torch.Generator().manual_seed(2)
    x, who = torch.rand(800, 2, generator=g), torch.rand(800, 1, generator=g) < 0.5
    net = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(0), torch.nn.Sigmoid()).requires_grad_(False)
    net[0].weight.copy_(torch.tensor([[1.0, 0.0]]))
    y = torch.rand(800, generator=g) < torch.sigmoid(x[:, 0] + 3 * (x[:, 1] > 0.5) - 1)
    options = {"alpha": None, "learn": gmc.Trees(depth=1, trees=5)}
    return net, x, who, {
        "learned": gmc.ProbabilityHead(**options).fit(net(x), y, features=x),
        "named": gmc.ProbabilityHead(None, ["a"]).fit(net(x), y, who),
        "miss": gmc.QuantileHead(0.9, **options).fit(torch.rand(800, generator=g) * (1 + 4 * (x[:, 1] > 0.5)), features=x),
    }  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_heads_that_learn_beside_others(rows, format, tmp_path):
    net, x, who, heads = rows
    want = {
        "learned": heads["learned"](net(x), features=x),
        "named": heads["named"](net(x), who),
        "miss": heads["miss"](features=x),
    }
    assert float(want["learned"].std()) > 2 * float(net(x).std()) and len(heads["miss"].learned)  # they did learn
    passed, computed = gmc.attach(net, heads), gmc.attach(net, heads, features=torch.nn.Identity())
    half = gmc.attach(net, heads, features={"miss": torch.nn.Identity()})
    for model, keywords in ((passed, {"features": x}), (computed, {}), (half, {"features": x})):
        found = model(x, who, **keywords)
        assert all(torch.equal(found[name], want[name]) for name in want)
    path = half.export(tmp_path / "model.bin", format, (x[:3], who[:3], x[:3]))  # compared with the model in writing
    if format == "torchscript":
        loaded = torch.jit.load(str(path))(x, who, x)
        assert all(torch.equal(loaded[name], want[name]) for name in want)


def test_features_of_several_heads_are_for_those_that_learn(rows):
    net, x, who, heads = rows
    with pytest.raises(ValueError, match="`features` is missing"):
        gmc.attach(net, heads)(x, who)
    with pytest.raises(TypeError, match="`features` must be for heads made with `learn`, which are none"):
        gmc.attach(net, [heads["named"]], features=torch.nn.Identity())
    with pytest.raises(TypeError, match="which are learned, miss"):
        gmc.attach(net, heads, features={"named": torch.nn.Identity()})
    with pytest.raises(TypeError, match="`features` must be a module or function of the model's input, got Tensor"):
        gmc.attach(net, heads, features=x)
    for kind in (gmc.PredictionSets, gmc.Intervals):  # and says what to do instead
        with pytest.raises(ValueError, match="gmc.attach.model, head, features=...."):
            kind(net, heads["miss"])
