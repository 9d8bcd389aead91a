"""What a fit of thresholds tells audits."""

import pytest
import torch

import torchgmc as gmc


@pytest.mark.parametrize("classes", [None, 2])
def test_the_tail_bounds_the_largest_deviation_in_calibration(classes: int | None):
    g = torch.Generator().manual_seed(0)
    shape = (400, 12, 12) if classes is None else (400, classes, 12, 12)
    dark, masks = torch.rand(400, generator=g) < 0.3, torch.rand(shape, generator=g) < 0.5
    shift = dark.view(-1, *[1] * (len(shape) - 1)).float()
    scores = torch.sigmoid(3 * masks + torch.randn(shape, generator=g) - 1.5 - shift)
    groups = torch.stack([dark, ~dark], 1)
    head = gmc.ThresholdHead(0.1, 0.01, ["dark", "bright"], num_classes=classes).fit(scores, masks, groups)
    found = scores <= head.threshold(groups).view(400, *([1] if classes is None else [classes]), 1, 1).view(*shape[:-2], 1, 1)
    risk = (found & masks).flatten(-2).sum(-1) / masks.flatten(-2).sum(-1)
    largest = (risk - 0.1).abs().amax(0).reshape(-1)
    assert head.tail.shape == (classes or 1,)
    assert bool((head.tail >= largest).all()) and bool((head.tail <= 1.6 * largest).all())
    again = gmc.ThresholdHead(0.1, 0.01, ["dark", "bright"], num_classes=classes)
    again.load_state_dict(head.state_dict())
    assert torch.equal(again.tail, head.tail) and len(head.reset() or head.tail) == 0
