"""Hashes of numbers: tie-breaking noise that is a function of the input, and keys of whole rows.

Noise: whole numbers below 2^53 are exact in float64, so sums, products and floors of them are the same in eager mode,
TorchScript, torch.export and ONNX, on any device and in any order. Noise is arithmetic modulo 2^22 on such numbers.

Keys: 64-bit integers, whose products wrap around, the same on any device.
"""

import functools

import numpy as np
import torch
from torch import Tensor

from torchgmc.engine.float64 import lacks, wide
from torchgmc.engine.scripting import has_values


def wrap(x: Tensor) -> Tensor:
    """x modulo 2^22."""
    return x - torch.floor(x * 2.384185791015625e-07) * 4194304.0 if x.is_floating_point() else x & 4194303


def mix(x: Tensor) -> Tensor:
    """Scramble whole numbers in [0, 2^22): x -> x (2x + 1) is a bijection whose high bits depend on all bits of x.

    Twice, with the halves exchanged between, so that every bit of the result depends on every bit of x. Of int32 or int64
    numbers only the last 22 bits count, and products may wrap around: a third of the work.
    """
    x = wrap(x * (2 * x + 1) + 2654435)
    high = torch.floor(x * 0.00048828125) if x.is_floating_point() else x >> 11
    x = (x - high * 2048) * 2048 + high
    return wrap(x * (2 * x + 1) + 1013904)


def levels(scores: Tensor) -> Tensor:
    """Scores in steps of 2^-20, modulo 2^22: the float16, float32 and float64 copies of one number agree."""
    steps = wrap(torch.floor(wide(scores).clamp(-1.0e9, 1.0e9) * 1048576.0))
    return steps.to(torch.int64) if lacks(scores.device) else steps


def places(count: int, device: torch.device) -> Tensor:
    """0, 1, ... as float64; as int64 where the device lacks it: what is mixed comes to the same."""
    return torch.arange(count, dtype=torch.int64 if lacks(device) else torch.float64, device=device)


#: How :func:`keys` weighs the places of a row. Version 1 gave neighbouring places nearly the same weight, so that short rows
#: shared keys; heads that were fitted with it keep it.
VERSION = 2
#: Those that there are.
VERSIONS = (1, 2)


def keys(scores: Tensor, version: int = 2) -> Tensor:
    """One key per example from all of its scores.

    ``scores``: shape ``(n, ...)``, any floating type. ``version``: 1 or 2, see :data:`VERSION`. Returns: Shape ``(n,)``, whole
    numbers in [0, 2^22). Equal examples have equal keys, whatever the batch.
    """
    flat = levels(scores.flatten(1))  # (n, m)
    weight = key_weights(flat.shape[1], flat.device, version)
    if not flat.is_floating_point():
        return mix((flat * weight).sum(1))
    above, top = torch.floor(weight / 256.0), torch.floor(weight / 65536.0)
    parts = torch.stack([weight - above * 256.0, above - top * 256.0, top])  # of 8 bits: sums are exact up to 2^23 places
    sums = wrap(flat @ parts.t())
    return mix(wrap(sums[:, 0] + 256.0 * sums[:, 1] + 65536.0 * sums[:, 2]))


def key_weights(count: int, device: torch.device, version: int = 2) -> Tensor:
    """Odd weights below 2^23 of the places of a row in :func:`keys`, ``(m,)``, of the type of :func:`places`."""
    place = places(count, device)
    if version > 1:
        place = mix(wrap(place * 2654435 + 40503))
    return 2 * mix(place) + 1


def noise(scores: Tensor, version: int = 2) -> Tensor:
    """Uniform noise in [-1, 1), one value per score, drawn from the example itself.

    ``scores``: shape ``(n, ...)``. ``version``: of :func:`keys`. Returns: The same shape; float64 for float64 scores, else
    float32.

    Example:
        >>> x = torch.rand(2, 3, 3)
        >>> torch.equal(noise(x)[:1], noise(x[:1]))
        True
    """
    flat = scores.flatten(1)
    place = mix(places(flat.shape[1], scores.device))
    bits = mix(wrap(levels(flat) + place + keys(scores, version)[:, None]))
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return (bits.to(dtype) * 4.76837158203125e-07 - 1.0).reshape(scores.shape)


def add(scores: Tensor, width: float, version: int = 2) -> Tensor:
    """Scores plus noise of half-width ``width``; the scores themselves (same dtype) when it is 0."""
    if width == 0.0:
        return scores
    spread = noise(scores.detach(), version)  # a constant to derivatives: it jumps with the scores
    return scores.to(spread.dtype) + width * spread


#: Odd multipliers of :func:`mix64`.
FIRST, SECOND = -4417276706812531889, -7046029254386353131


def mix64(code: Tensor, last: int | None = SECOND) -> Tensor:
    """Scramble int64 numbers in place: each bit of the high half depends on all bits. ``last``: their last factor; None: later."""
    if code.device.type == "cpu":  # numpy takes half of the time
        bits = code.numpy().view(np.uint64)
        bits *= np.uint64(FIRST % (1 << 64))
        bits ^= bits >> np.uint64(32)
    else:
        code.mul_(FIRST)
        code.bitwise_xor_((code >> 32).bitwise_and_(0xFFFFFFFF))
    return code if last is None else code.mul_(last)


def places64(count: int, device: torch.device) -> Tensor:
    """Odd int64 multipliers without a pattern, one for each of ``count`` places."""
    place = torch.arange(1, count + 1, device=device) * -7046029254386353131
    place = (place ^ (place >> 30)) * -4658895280553007687  # the finaliser of splitmix64
    place = (place ^ (place >> 27)) * -7723592293110705685
    return (place ^ (place >> 31)) | 1


def row_keys(*parts: Tensor, coarse: bool = False) -> Tensor:
    """A 64-bit key of each example from all of its numbers; equal examples have equal keys.

    ``parts``: tensors with one row per example, ``(n, ...)``, of any real type. ``coarse``: leave out the last bits of numbers.
    Returns: int64, ``(n,)``.

    Example:
        >>> x = torch.rand(5, 3)
        >>> torch.equal(row_keys(x)[2:3], row_keys(x[2:3].double()))
        True
    """
    total = torch.zeros(len(parts[0]), dtype=torch.int64, device=parts[0].device)
    place, tables = 0, [part.detach().flatten(1) if part.dim() > 1 else part.detach()[:, None] for part in parts]
    if 0 < sum(flat.numel() for flat in tables) <= 1 << 17:  # few: at once
        tables = [torch.cat([flat.to(torch.float64) for flat in tables], 1)]
    for flat in tables:
        for some in torch.split(flat, 1 << 12, 1):
            width, fast = some.shape[1], flat.device.type == "cpu"  # numpy takes half of the time
            made = _weights if fast and has_values(flat) else _weights.__wrapped__  # a cache must not keep pretended tensors
            weight, keys = made(place, width, coarse, flat.device, fast and some.dtype == torch.bool)
            rows = max(1, (1 << 18) // max(width, 1))  # numbers that stay in the cache
            for piece, to in zip(torch.split(some, rows), torch.split(total, rows), strict=True):
                if keys is not None:  # the key of 0 is 0: eight at a time
                    row = np.packbits(np.ascontiguousarray(piece.numpy()), axis=None if width % 8 == 0 else 1)
                    to += torch.from_numpy(keys.take(row.reshape(len(piece), -(-width // 8)) + np.arange(0, len(keys), 256))).sum(1)
                else:
                    code = mix64(_bits(piece, coarse), None)
                    to += torch.from_numpy(np.einsum("ij,j->i", code.numpy(), weight.numpy())) if fast else (code * weight).sum(1)
            place += width
    return mix64(total)


@functools.lru_cache(maxsize=8)  # the same ones for every batch
def _weights(place: int, count: int, coarse: bool, device: torch.device, packed: bool) -> tuple[Tensor, np.ndarray | None]:
    """What a row is multiplied by from this place on; if ``packed``, the keys of each eight bool too, 256 of them."""
    weight = places64(place + count, device)[place:] * SECOND
    ones = torch.nn.functional.pad(mix64(_bits(torch.ones_like(weight), coarse), None) * weight, (0, -count % 8)).view(-1, 8)
    return weight, (ones.numpy() @ np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).T).reshape(-1) if packed else None


def _bits(x: Tensor, coarse: bool) -> Tensor:
    """The bits of numbers as float64, with one zero, int64; of their exponents and first 10 bits as whole numbers."""
    if coarse:
        x = x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float64)
        fast = x.device.type == "cpu"  # numpy takes a tenth of the time
        mantissa, exponent = map(torch.from_numpy, np.frexp(np.ascontiguousarray(x.numpy()))) if fast else torch.frexp(x)
        x = mantissa.mul_(1024.0).round_().add_(exponent.to(x.dtype), alpha=4096)
    return x.to(torch.float64, copy=not coarse).add_(0.0).view(torch.int64)
