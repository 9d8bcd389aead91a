"""Modes are given back."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torchgmc as gmc
from torchgmc.engine import modes


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_calm_gives_the_threads_back():
    with modes.calm():
        assert torch.get_num_threads() == 1
        with modes.calm():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    with pytest.raises(ValueError, match="inside"), modes.calm():
        raise ValueError("inside")
    assert torch.get_num_threads() == 2


def test_many_statistics_keep_their_threads():
    for count, threads in ((modes.FEW, 1), (modes.FEW + 1, 2)):
        with modes.calm(SimpleNamespace(rows=torch.zeros(1, dtype=torch.int8).expand(count), name="rows")):
            assert torch.get_num_threads() == threads
    with modes.calm(SimpleNamespace(rows=torch.zeros(3, device="meta"))):
        assert torch.get_num_threads() == 2


def test_fits_to_few_rows_are_calm():
    class Watched(gmc.QuantileHead):
        def mark_fitted(self, *args):
            found.append(torch.get_num_threads())
            super().mark_fitted(*args)

    found: list[int] = []
    Watched(0.9, 0.01).fit(torch.rand(100))
    assert found == [1] and torch.get_num_threads() == 2


def test_evaluating_gives_the_modes_back():
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    model[1].eval()
    with modes.evaluating(model):
        assert not any(one.training for one in model.modules())
    assert [one.training for one in model.modules()] == [True, True, False, False]
