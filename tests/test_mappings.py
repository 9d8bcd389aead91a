"""Mappings and their potentials."""

import pytest
import torch

import torchgmc as gmc
from torchgmc.mappings import Centered, MissRate, Pinball, Residual


@pytest.mark.parametrize("mapping", ["residual", "pinball", "missrate", "centered"])
def test_s_is_the_gradient_of_the_potential(mapping):
    rng = torch.Generator().manual_seed(0)
    f = torch.rand(7, 1 if mapping == "missrate" else 3, generator=rng).double().requires_grad_()
    data = torch.rand(7, 3, generator=rng).double()
    masks = torch.tensor([[True, False, True]] * 7)
    s = {
        "residual": Residual(data),
        "pinball": Pinball(data, 0.7),
        "missrate": MissRate(data, masks, 0.3),
        "centered": Centered(),
    }[mapping]
    weight = torch.rand(7, generator=rng).double() + 0.1
    (slope,) = torch.autograd.grad(s.potential(f, weight), f)
    torch.testing.assert_close(slope, s.value(f, weight).detach() * (weight / weight.sum())[:, None])


def test_miss_rate_mapping_agrees_with_the_head():
    rng = torch.Generator().manual_seed(0)
    scores, masks = torch.rand(50, 20, generator=rng).double(), torch.rand(50, 20, generator=rng) < 0.5
    masks[:, 0] = True
    who = torch.rand(50, 2, generator=rng) < 0.6
    solution = gmc.solve(
        torch.full((50, 1), 0.5).double(), MissRate(scores, masks, 0.1), who, alpha=0.01, solver="paper", eta=1 / 64
    )
    head = gmc.ThresholdHead(0.1, 0.01, ["a", "b"]).fit(scores, masks, who, solver="paper", eta=1 / 64)
    assert solution.report.iterations == head.report.iterations
    torch.testing.assert_close(solution.f[:, 0], head.threshold(who))
