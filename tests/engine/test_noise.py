"""The noise rule: prices, the choice of k, and what the report says of it."""

import math

import pytest
import torch

from torchgmc.engine import noise


def test_the_price_is_the_formula():
    error, sizes = torch.tensor([0.01, 0.02]).double(), torch.tensor([100.0, 25.0]).double()
    found = noise.slacks(1.5, error, sizes, skewness=-2.0)
    expected = [(1.5 + (2 + 1.2 * 2) / 10) * 0.01, (1.5 + (2 + 1.2 * 2) / 5) * 0.02]
    torch.testing.assert_close(found, torch.tensor(expected).double())


def test_a_group_that_agrees_by_chance_has_the_noise_of_everybody():
    squares, count, total = torch.tensor([[0.0], [3.0]]).double(), torch.tensor([[4.0], [4.0]]).double(), torch.tensor([100.0])
    found = noise.standard_errors(squares, count, total, torch.tensor([0.25]))
    torch.testing.assert_close(found, torch.tensor([[1.0], [3.0]]).double().sqrt() / 100)


def test_no_difference_keeps_everyone_alike_and_a_clear_one_is_taken():
    rng = torch.Generator().manual_seed(0)
    flat = 0.5 + 0.01 * torch.randn(5, 5, generator=rng)
    flat[-1] = flat[:-1].mean(0)  # infinity is as good as the others
    assert math.isinf(noise.choose(flat).k)
    clear = flat.clone()
    clear[:2] -= 0.2  # the two smallest slacks: of them the larger
    assert noise.choose(clear).k == 0.5
    barely = flat.clone()
    barely[0, 0] -= 0.05  # one fold only: within two standard errors
    assert math.isinf(noise.choose(barely).k)


def test_more_groups_are_allowed_more_noise():
    assert noise.among(2) == noise.FIXED and noise.among(1000) == pytest.approx(math.sqrt(2 * math.log(1000)))
    assert noise.candidates(5) != noise.candidates(500)


def test_skewness_by_its_definition():
    s, weight = torch.tensor([1.0, 0.0, 0.0, 0.0]).double(), torch.ones(4).double()
    p = 0.25
    assert noise.skewness_of(s, weight) == pytest.approx((1 - 2 * p) / math.sqrt(p * (1 - p)))
    assert noise.skewness_of(torch.ones(3).double(), torch.ones(3).double()) == 0.0


def test_small_groups_are_named_with_what_to_do():
    small = noise.small_groups(["a", "b"], torch.tensor([30.0, 500.0]), 0.9)
    assert small == ["a"]
    text = noise.explain(1.5, True, small)
    assert "'a'" in text and "conformal" in text and "1.5 standard errors" in text
