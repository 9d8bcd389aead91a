"""Adapters: models with several outputs."""

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
