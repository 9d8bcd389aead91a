"""Soft modes of an attached model: derivatives reach it, and training through the head works."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgmc as gmc
from gmctest.heads_zoo import GROUPS, images, membership
from gmctest.soft_heads import SOFT, fitted


class Net(nn.Module):
    """One hidden layer."""

    def __init__(self, out: tuple[int, ...], last: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, math.prod(out)), nn.Unflatten(1, out), last)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


NETS: dict[str, Any] = {
    "threshold": lambda: Net((6, 5), nn.Sigmoid()),
    "threshold-classes": lambda: Net((2, 6, 5), nn.Sigmoid()),
    "threshold-jitter": lambda: Net((6, 5), nn.Sigmoid()),
    "probability-bins": lambda: Net((1,), nn.Sequential(nn.Sigmoid(), nn.Flatten(0))),
    "probability-classes": lambda: Net((3,), nn.Softmax(1)),
    "distribution": lambda: Net((20,), nn.Identity()),
    "distribution-euclidean": lambda: Net((20,), nn.Identity()),
    "tree": lambda: Net((5,), nn.Softmax(1)),
    "tree-groups": lambda: Net((5,), nn.Softmax(1)),
    "gmc": lambda: Net((1,), nn.Sequential(nn.Sigmoid(), nn.Flatten(0))),
}


@pytest.mark.parametrize("mode", SOFT)
@pytest.mark.parametrize("name", list(NETS))
def test_gradients_reach_every_parameter_of_an_attached_model(name, mode):
    net, head = NETS[name](), fitted(name)
    model = gmc.attach(net, head, mode=mode, temperature=0.3).train()
    x = torch.randn(16, 6)
    member = membership(16, torch.Generator().manual_seed(3))
    out = model(x, groups=member) if name != "tree" else model(x)
    out = torch.where(out.isfinite(), out, torch.zeros_like(out))
    (out * torch.randn(out.shape)).sum().backward()
    for parameter in net.parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.isfinite().all())
        assert bool((parameter.grad != 0).any())
    assert all(buffer.grad is None for buffer in head.buffers())


def test_training_through_the_threshold_lowers_a_loss_on_the_mask_itself():
    _, masks, member = images(40, 0).observe
    x = torch.randn(40, 6)
    model = gmc.attach(Net((6, 5), nn.Sigmoid()), fitted("threshold")).soften("straight_through", 0.2)
    optimiser = torch.optim.Adam(model.model.parameters(), lr=0.05)
    losses = []
    for _ in range(40):
        loss = (model(x, member) - masks.float()).square().mean()  # share of wrong pixels: no derivative without soft modes
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    hard = model.soften("hard")(x, member)
    assert hard.dtype == torch.bool


def test_autocast():
    net = Net((6, 5), nn.Sigmoid())
    x, member = torch.randn(10, 6), membership(10, torch.Generator().manual_seed(3))
    model = gmc.attach(net, fitted("threshold"), mode="soft", temperature=0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x, member)
    out.float().mean().backward()
    torch.testing.assert_close(out.float(), model(x, member), rtol=0.05, atol=0.05)
    assert all(bool(p.grad.isfinite().all()) for p in net.parameters())


def test_quantile_head_behind_a_model():
    head = fitted("quantile")
    net = Net((1,), nn.Flatten(0))
    model = gmc.attach(net, head, mode="soft", temperature=0.3)
    member = membership(10, torch.Generator().manual_seed(3))
    output, q = model(torch.randn(10, 6), member)
    torch.sigmoid((q - output.abs()) / 0.3).mean().backward()
    assert bool((next(net.parameters()).grad != 0).any())


@pytest.mark.parametrize("position", [None, "last", "mask"])
def test_language_model_positions(position):
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 20)

        def forward(self, input_ids: Tensor) -> Tensor:
            out: Tensor = self.table(input_ids)
            return out

    net = Words()
    adapter = gmc.Adapter(position=position, mask_token_id=0 if position == "mask" else None)
    model = gmc.attach(net, fitted("distribution"), adapter=adapter, mode="soft")
    ids = torch.randint(1, 20, (6, 4))
    ids[:, 2] = 0
    out = model(ids, membership(6, torch.Generator().manual_seed(3)))
    assert torch.equal(out, model.soften("hard")(ids, membership(6, torch.Generator().manual_seed(3))))
    out[:, 2, 3].sum().backward()
    assert bool((net.table.weight.grad != 0).any())


def test_soften_says_what_is_wrong_and_shows_itself():
    model = gmc.attach(Net((6, 5), nn.Sigmoid()), fitted("threshold"))
    assert "mode" not in repr(model).split("(model)")[0]
    with pytest.raises(ValueError, match="`mode` must be"):
        model.soften("warm")
    with pytest.raises(ValueError, match="`temperature` must be"):
        gmc.attach(Net((6, 5), nn.Sigmoid()), fitted("threshold"), mode="soft", temperature=0.0)
    assert (model.mode, model.temperature) == ("hard", 0.1)
    assert "mode='soft', temperature=0.5" in repr(model.soften("soft", 0.5))


def test_files_hold_the_hard_answer(tmp_path):
    model = gmc.attach(Net((6, 5), nn.Sigmoid()), fitted("threshold"), mode="soft")
    x, member = torch.randn(8, 6), membership(8, torch.Generator().manual_seed(3))
    path = model.export(tmp_path / "model.pt2", format="torch.export", example_inputs=(x, member))
    program = torch.export.load(path).module()
    assert torch.equal(program(x, member), model.soften("hard")(x, member))


def test_a_head_without_modes_can_still_be_attached():
    class Plain(gmc.ThresholdHead):
        def forward(self, scores: Tensor, groups: Tensor | None = None) -> Tensor:
            return super().forward(scores, groups)

    head = Plain(0.1, 0.02, GROUPS).fit(*images(80, 0).observe)
    x, member = torch.randn(8, 6), membership(8, torch.Generator().manual_seed(3))
    assert gmc.attach(Net((6, 5), nn.Sigmoid()), head)(x, member).dtype == torch.bool
