"""Membership in bits: the same groups in an eighth of the memory, also from files that hold a byte for each."""

from pathlib import Path

import pytest
import torch

import torchgmc as gmc
from torchgmc.engine.statistics import Bits


@pytest.mark.parametrize("groups", [1, 7, 8, 20])
def test_bits_are_the_membership(groups: int) -> None:
    member = torch.rand(9000, groups, generator=torch.Generator().manual_seed(groups)) < 0.4
    codes = Bits.of(member)
    assert codes.dtype == torch.uint8 and codes.shape == (9000, 1 + groups // 8)
    for row in (0, 8191, 8192, 8999):  # the k-th bit is group k - 1, the first everyone
        number = sum(int(byte) << 8 * place for place, byte in enumerate(codes[row]))
        assert number == 1 + sum(2 << k for k in range(groups) if member[row, k])
    bits, rows = Bits(codes, groups), torch.tensor([8999, 3, 3])
    assert bits.shape == member.shape and len(bits) == 9000
    assert bits[:].equal(member) and bits[rows].equal(member[rows]) and bits[8190:8195].equal(member[8190:8195])
    assert bits[:0].shape == (0, groups)
    for more, dtype in ((0, torch.float32), (2, torch.float64), (9, torch.float32)):
        want = torch.cat([torch.ones(9000, 1), member, torch.zeros(9000, more)], 1).to(dtype)
        assert bits.wide(slice(None), dtype, more).equal(want) and bits.wide(rows, dtype, more).equal(want[rows])


def _parts() -> tuple[gmc.ProbabilityHead, gmc.ProbabilityHead, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    member, p = torch.rand(3000, 50, generator=generator) < 0.3, torch.rand(3000, generator=generator)
    y = torch.rand(3000, generator=generator) < p
    names = [str(k) for k in range(50)]
    heads = [gmc.ProbabilityHead(0.01, names) for _ in range(2)]
    for head, rows in zip(heads, torch.arange(3000).split(1500), strict=True):
        for some in rows.split(400):
            head.observe(p[some], y[some], member[some])
    return heads[0], heads[1], [p, y, member]


def test_bytes_kept_a_row() -> None:
    head = _parts()[0]
    assert sum(tensor.nbytes for tensor in vars(head.statistics).values()) == (3 * 8 + 7) * 1500


@pytest.mark.filterwarnings("ignore:the file holds a row")
def test_statistics_with_a_byte_a_group_still_load_and_merge(tmp_path: Path) -> None:
    """That is how they were kept before; the state is that of one head that saw all rows."""
    early, late, rows = _parts()
    early.statistics = early.statistics.unpacked(50)
    assert early.statistics.member.dtype == torch.bool
    gmc.save(early, tmp_path / "early", statistics=True)
    joined = gmc.load(tmp_path / "early").merge(late).calibrate()
    whole = gmc.ProbabilityHead(0.01, early.groups).fit(*rows)
    assert all(a.equal(b) for a, b in zip(joined.buffers(), whole.buffers(), strict=True))


@pytest.mark.filterwarnings("ignore:the file holds a row")
@pytest.mark.parametrize("wrong", [torch.ones(1500, 6), torch.zeros(1500, 7)])
def test_bits_of_other_groups_are_refused(tmp_path: Path, wrong: torch.Tensor) -> None:
    head = _parts()[0]
    head.statistics.member = wrong.to(torch.uint8)
    gmc.save(head, tmp_path / "head", statistics=True)
    with pytest.raises(ValueError, match="'member' (has a dimension of 6|must have a first bit)"):
        gmc.load(tmp_path / "head")
