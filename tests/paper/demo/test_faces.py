"""The demo's pictures: shapes, seeds, groups."""

import pytest
import torch

from torchgmc_paper.demo.faces import CHUNK, GROUPS, draw


def test_pictures_have_the_promised_shapes() -> None:
    faces = draw(CHUNK + 5, 24)
    assert faces.images.shape == (CHUNK + 5, 3, 24, 24) and faces.images.dtype == torch.float32
    assert faces.masks.shape == (CHUNK + 5, 24, 24) and faces.masks.dtype == torch.bool
    assert faces.groups.shape == (CHUNK + 5, len(GROUPS)) and faces.groups.dtype == torch.bool
    assert faces.images.min() >= 0 and faces.images.max() <= 1 and faces.images.isfinite().all()
    assert faces.masks.flatten(1).any(1).all() and not faces.masks.flatten(1).all(1).any()


def test_pictures_depend_on_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    first = draw(70, 16, seed=3)
    torch.manual_seed(99)
    again, other = draw(70, 16, seed=3), draw(70, 16, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.images, other.images)
    torch.random.set_rng_state(before)
    draw(3, 16)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_groups_overlap_and_differ_in_size() -> None:
    groups = draw(2000, 8).groups
    assert groups[:, 0].all()
    both = groups[:, 1:].float().T @ groups[:, 1:].float()
    assert (both > 0).all(), "every pair of groups meets somewhere"
    share = groups[:, 1:].float().mean(0)
    assert (share > 0.05).all() and share.max() > 2 * share.min()


def test_the_groups_change_the_picture() -> None:
    faces = draw(400, 16)
    light = faces.images.mean((1, 2, 3))
    dim, contrast = faces.groups[:, 1], faces.groups[:, 4]
    assert light[dim].mean() < 0.7 * light[~dim].mean()
    inside, outside = faces.masks.float(), (~faces.masks).float()
    means = [(faces.images * m[:, None]).sum((2, 3)) / m.sum((1, 2))[:, None] for m in (inside, outside)]
    gap = (means[0] - means[1]).abs().mean(1)
    assert gap[contrast & ~dim].mean() < 0.7 * gap[~contrast & ~dim].mean()


def test_prevalence_thins_the_groups() -> None:
    assert not draw(300, 8, prevalence=0.0).groups[:, 1:].any()
    assert draw(2000, 8, prevalence=0.2).groups[:, 1:].sum() < 0.4 * draw(2000, 8).groups[:, 1:].sum()


def test_no_pictures_and_bad_sizes() -> None:
    assert draw(0, 16).images.shape == (0, 3, 16, 16)
    with pytest.raises(ValueError, match="`num` must be >= 0 and `size` >= 8, got -1 and 64"):
        draw(-1)
    with pytest.raises(ValueError, match="got 1 and 4"):
        draw(1, 4)
