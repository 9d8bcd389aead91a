import math
import struct

import pytest
import torch

from torchgmc.engine import hashing


def test_uniform_and_independent_of_the_score():
    x = torch.rand(40, 64, 64, generator=torch.Generator().manual_seed(0))
    noise = hashing.noise(x)
    assert noise.shape == x.shape and noise.dtype == torch.float32
    assert noise.min() >= -1 and noise.max() < 1
    shares = torch.histc(noise, 20, -1, 1) / noise.numel()
    assert (shares - 0.05).abs().max() < 0.002  # 163,840 draws: standard error 0.0005
    assert abs(float(torch.corrcoef(torch.stack([noise.flatten(), x.flatten()]))[0, 1])) < 0.01


def test_equal_scores_get_different_noise_and_equal_images_the_same():
    flat = torch.ones(2, 32, 32)
    noise = hashing.noise(flat)
    assert torch.equal(noise[0], noise[1])
    assert noise[0].unique().numel() > 1000
    pair = torch.stack([torch.zeros(50), torch.zeros(50)])
    pair[1, 7] = 0.25  # one other score changes the noise of all
    a, b = hashing.noise(pair)
    assert (a != b).double().mean() > 0.9


def test_does_not_depend_on_the_batch_or_the_type():
    x = (torch.rand(10, 30, generator=torch.Generator().manual_seed(1)) * 1024).round() / 1024  # exact in float16
    noise = hashing.noise(x)
    assert torch.equal(hashing.noise(x[3:4]), noise[3:4])
    assert torch.equal(hashing.noise(x.half()), noise)
    torch.testing.assert_close(hashing.noise(x.double()).float(), noise)
    assert torch.equal(hashing.keys(x.double()), hashing.keys(x.half()))


def test_keys_are_spread():
    keys = hashing.keys(torch.rand(4000, 6, generator=torch.Generator().manual_seed(2)))
    assert keys.unique().numel() > 3950
    assert ((keys / 2**22).histc(8, 0, 1) / 4000 - 0.125).abs().max() < 0.03
    assert torch.equal(keys, keys.floor())


def test_mix_is_a_bijection_of_22_bits():
    x = torch.arange(2**22, dtype=torch.float64)
    assert hashing.mix(x).unique().numel() == 2**22


def test_script_equals_eager_for_huge_and_negative_scores():
    x = torch.tensor([[-1e30, 1e30, -3.7, 0.0, 12345.678]])
    assert torch.equal(torch.jit.script(hashing.noise)(x), hashing.noise(x))
    assert hashing.noise(x).isfinite().all()


def test_width_0_changes_nothing():
    x = torch.rand(3, 4).half()
    assert hashing.add(x, 0.0) is x


def test_short_rows_have_keys_of_their_own_and_the_old_version_stays():
    """Softmax rows of three classes: 400,000 of them had 2,578 keys, and a quarter of the draws lay below .219."""
    probs = torch.randn(100_000, 3, generator=torch.Generator().manual_seed(0)).softmax(1)
    keys = hashing.keys(probs)
    expected = 2**22 * (1 - math.exp(-100_000 / 2**22))
    assert len(keys.unique()) > 0.99 * expected
    for share in (0.25, 0.5, 0.75):
        assert abs(float((keys / 2**22 < share).double().mean()) - share) < 0.006
    old = hashing.keys(probs, 1)
    assert len(old.unique()) < 5000
    first = [[0.5, 0.25, 0.25], [0.75, 0.125, 0.125]]
    assert hashing.keys(torch.tensor(first), 1).tolist() == [2120096, 2120096]  # as version 0.1 drew them


def test_keys_of_rows_do_not_depend_on_the_pieces_they_are_made_in():
    x, y = torch.randn(70_000, 5, generator=torch.Generator().manual_seed(0)), torch.arange(70_000)
    keys = hashing.row_keys(x, y)
    assert torch.equal(keys[60_000:60_010], hashing.row_keys(x[60_000:60_010], y[60_000:60_010])) and len(keys.unique()) == 70_000


def test_mixing_whole_numbers_of_any_type_is_the_same():
    x = torch.arange(2**22)
    assert torch.equal(hashing.mix(x.to(torch.int32)), hashing.mix(x)) and torch.equal(
        hashing.mix(x).double(), hashing.mix(x.double())
    )
    more = torch.arange(2**31 - 5, 2**31 - 1)  # only the last 22 bits count
    assert torch.equal(hashing.mix(more.to(torch.int32)).double(), hashing.mix((more % 2**22).double()))


def test_keys_of_rows_are_those_of_whole_numbers_in_python():
    def mix64(code: int, times: int = 1) -> int:
        code = code * hashing.FIRST % 2**64
        return (code ^ code >> 32) * hashing.SECOND * times % 2**64

    x, y = torch.tensor([[0.5, -0.0, 3e-40], [1e300, -7.25, 0.1]], dtype=torch.float64), torch.tensor([3, -4])
    weights, expected = hashing.places64(4, x.device).tolist(), []
    for row in torch.cat([x, y[:, None]], 1).tolist():
        bits = [struct.unpack("<Q", struct.pack("<d", value + 0.0))[0] for value in row]
        key = mix64(sum(mix64(one, weight) for one, weight in zip(bits, weights, strict=True)))
        expected.append(key - 2**64 * (key >= 2**63))
    assert hashing.row_keys(x, y).tolist() == expected
    assert hashing.row_keys(torch.tensor([[0.5, 2.0]])).tolist() == [6341129219527175273]  # as version 0.1 made them


@pytest.mark.parametrize("width", [0, 1, 7, 8, 31, 32])
@pytest.mark.parametrize("coarse", [False, True])
def test_keys_of_bool_are_those_of_numbers(width, coarse):
    g = torch.Generator().manual_seed(width)
    x, y = torch.rand(9000, 2, generator=g), torch.rand(9000, 2 * width, generator=g) < 0.4
    some = y[:, ::2]  # a view
    assert torch.equal(hashing.row_keys(x, some, coarse=coarse), hashing.row_keys(x, some.double(), coarse=coarse))
