"""Masks on pictures: what is drawn, what is refused."""

import pytest
import torch

from gmctest.figures import is_png
from torchgmc import plots
from torchgmc.plots.pictures import _mark

pytestmark = pytest.mark.usefixtures("no_pyplot")


@pytest.mark.parametrize("channels", [1, 3])
def test_masks_say_what_share_is_missed(channels: int) -> None:
    truth = torch.zeros(2, 8, 8, dtype=torch.bool)
    truth[:, :4] = True
    half = truth.clone()
    half[:, :2] = False
    figure = plots.masks(
        torch.rand(2, channels, 8, 8), truth, {"all": truth, "half": half}, captions=["first", "second"], title="Title"
    )
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", *["misses 0 %"] * 2, *["misses 50 %"] * 2]
    assert [axes.get_title() for axes in figure.axes[:2]] == ["first", "second"]
    assert [axes.get_ylabel() for axes in figure.axes[::2]] == ["picture", "all", "half"]
    assert is_png(figure)


def test_masks_of_an_empty_truth_miss_nothing() -> None:
    none = torch.zeros(1, 8, 8, dtype=torch.bool)
    assert plots.masks(torch.rand(1, 3, 8, 8), none, {"x": ~none}).axes[1].get_xlabel() == "misses 0 %"


def test_marked_pixels_have_their_colours() -> None:
    truth, mask = torch.tensor([[True, True, False, False]]), torch.tensor([[True, False, True, False]])
    marked, missed = _mark(torch.full((1, 4, 3), 0.5), truth, mask)
    found, lost, extra, plain = marked[0]
    assert missed == 0.5
    assert found[2] > found[0] and lost[0] > lost[2] and extra[:2].min() > extra[2]
    assert plain.unique().numel() == 1


def test_masks_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`truth` must have shape \(1, 8, 8\), got \(1, 8, 9\)"):
        plots.masks(torch.rand(1, 3, 8, 8), torch.zeros(1, 8, 9).bool(), {"x": torch.zeros(1, 8, 8).bool()})
    with pytest.raises(ValueError, match="must not be empty"):
        plots.masks(torch.rand(1, 3, 8, 8), torch.zeros(1, 8, 8).bool(), {})
