"""A good call, broken in no, one or two ways: what the fuzz tests give to every public entry, and how they judge the outcome.

An :class:`Entry` makes the arguments of a good call, calls, and checks the answer. :data:`BREAKS` change one argument each.
:func:`judge` calls and says what happened: a right answer, a clear error, or a fault.
"""

import atexit
import collections
import dis
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode

import torchgmc as gmc
from gmctest import PAPER, ROOT
from gmctest.fake_device import AWAY

PACKAGES = (str(ROOT / "torchgmc"), str(PAPER))
FAKE = FakeTensorMode(allow_non_fake_inputs=True)
FOLDER = tempfile.TemporaryDirectory(prefix="fuzz")
Arguments = dict[str, Any]


class Entry(NamedTuple):
    """One public entry.

    Attributes:
        name: in the table.
        make: arguments of a good call from a number of examples and a seed.
        call: what is called with them.
        check: raises AssertionError if the answer is wrong for these arguments; they may be broken ones that were accepted.
        fixed: arguments that are never broken (files, modules).
        share: of the cases of an ordinary entry, for one that takes long.
    """

    name: str
    make: Callable[[int, int], Arguments]
    call: Callable[..., Any]
    check: Callable[[Arguments, Any], None]
    fixed: tuple[str, ...] = ()
    share: float = 1.0


# -- breaks: value -> value ---------------------------------------------------------------------------------------------------


def put(number: float) -> Callable[[Tensor], Tensor]:
    """One entry replaced."""

    def change(x: Tensor) -> Tensor:
        x = x.detach().clone(memory_format=torch.contiguous_format)
        if not x.numel():
            return x
        if not math.isfinite(number) and not (x.is_floating_point() or x.is_complex()):
            x = x.double()
        value: Any = number
        if x.is_floating_point() and math.isfinite(number):
            value = min(max(number, torch.finfo(x.dtype).min), torch.finfo(x.dtype).max)
        elif x.dtype == torch.bool:
            value = number != 0
        elif not x.is_complex() and not x.is_floating_point():
            value = min(max(int(number), torch.iinfo(x.dtype).min), torch.iinfo(x.dtype).max)
        x.view(-1)[x.numel() // 2] = value
        return x

    return change


def memory_mapped(x: Tensor) -> Tensor:
    """The same values, from a file that may not be written to."""
    if x.dtype == torch.bfloat16 or not x.numel():
        return x
    path = Path(FOLDER.name) / "mapped"
    array = np.ascontiguousarray(x.detach().resolve_conj().numpy())
    path.unlink(missing_ok=True)
    path.write_bytes(array.tobytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it cannot know of read-only memory
        return torch.from_numpy(np.memmap(path, dtype=array.dtype, mode="r", shape=array.shape))


def fake(x: Tensor) -> Tensor:
    """On another device, without values."""
    with FAKE:
        return torch.empty(x.shape, dtype=x.dtype, device=AWAY)


def rows_scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor if x.is_floating_point() else x


def strangers(x: Tensor) -> Any:
    """Groups of other names, as many; a mask of 255 where this is no membership."""
    if x.dim() != 2 or x.dtype != torch.bool or not x.numel() or len(x) < x.shape[1]:
        return x.to(torch.uint8) * 255 if x.dtype == torch.bool else x
    return gmc.Groups.from_columns({"stranger": [f"u{i % x.shape[1]}" for i in range(len(x))]})


def columns(x: Tensor) -> Any:
    """A dict of columns, which a head without Groups cannot read."""
    if x.dim() != 2 or x.dtype != torch.bool:
        return x
    return {f"column {k}": x[:, k].tolist() for k in range(x.shape[1])}


HARMLESS: dict[str, Callable[[Tensor], Tensor]] = {
    "not contiguous": lambda x: torch.stack([x, x], -1)[..., 0],
    "flipped strides": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x,
    "requires grad": lambda x: x.detach().clone().requires_grad_() if x.is_floating_point() else x,
    "memory-mapped": memory_mapped,
    "a view": lambda x: torch.cat([x, x])[: len(x)] if x.dim() else x,
}
TENSOR_BREAKS: dict[str, Callable[[Tensor], Any]] = {
    **HARMLESS,
    **{
        f"as {str(dtype).removeprefix('torch.')}": (lambda x, d=dtype: (x.real if x.is_complex() else x).detach().to(d))
        for dtype in (
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
            torch.int8,
            torch.uint8,
            torch.int32,
            torch.int64,
            torch.bool,
        )
    },
    "as complex": lambda x: x.detach().to(torch.complex64),
    "no rows": lambda x: x[:0] if x.dim() else x,
    "one row": lambda x: x[:1] if x.dim() else x,
    "a row less": lambda x: x[1:] if x.dim() else x,
    "no columns": lambda x: x[..., :0] if x.dim() else x,
    "a column less": lambda x: x[..., 1:] if x.dim() else x,
    "a column more": lambda x: torch.cat([x, x[..., :1]], -1) if x.dim() else x,
    "a dimension more": lambda x: x.unsqueeze(-1),
    "a dimension before": lambda x: x.unsqueeze(0),
    "a dimension less": lambda x: x[..., 0] if x.dim() and x.shape[-1] else x,
    "transposed": lambda x: x.transpose(0, -1) if x.dim() > 1 else x,
    "a single number": lambda x: x.flatten()[0] if x.numel() else x.new_zeros(()),
    "one row for all": lambda x: x[:1].expand_as(x) if x.dim() else x,
    "all 0": torch.zeros_like,
    "all 1": torch.ones_like,
    "nan": put(math.nan),
    "inf": put(math.inf),
    "-inf": put(-math.inf),
    "-1": put(-1.0),
    "2": put(2.0),
    "huge": put(1e300),
    "large": put(1e30),
    "tiny": put(1e-300),
    "all huge": rows_scaled(1e30),
    "all tiny": rows_scaled(1e-40),
    "all negative": lambda x: -x if x.is_floating_point() else x,
    "0 and 255": lambda x: x.to(torch.uint8) * 255 if x.dtype == torch.bool else x,
    "0 and 2 as int64": lambda x: x.long() * 2 if x.dtype == torch.bool else x,
    "0 and -1": lambda x: -x.long() if x.dtype == torch.bool else x,
    "halves": lambda x: x.double() / 2 if x.dtype == torch.bool else x,
    "strangers": strangers,
    "columns": columns,
    "up to 1e4": lambda x: x * (1e4 / x.detach().abs().max().clamp_min(1e-9)) if x.is_floating_point() and x.numel() else x,
    "meta device": lambda x: x.detach().to("meta"),
    "fake cuda": fake,
    "numpy": lambda x: x.detach().float().numpy() if x.dtype == torch.bfloat16 else x.detach().numpy(),
    "read-only numpy": lambda x: np.lib.stride_tricks.as_strided(x.detach().float().numpy(), writeable=False),
    "a list": lambda x: x.detach().tolist(),
    "sparse": lambda x: x.detach().to_sparse() if x.dim() else x,
}
OTHER_BREAKS: dict[str, Callable[[Any], Any]] = {
    "None": lambda _: None,
    "a string": lambda _: "x",
    "an empty list": lambda _: [],
    "an object": lambda _: object(),
    "a dict": lambda _: {"a": 1},
    "True": lambda _: True,
    "0": lambda _: 0,
    "-1 alone": lambda _: -1,
    "0.5": lambda _: 0.5,
    "nan alone": lambda _: math.nan,
    "inf alone": lambda _: math.inf,
    "1e300": lambda _: 1e300,
    "1e-300": lambda _: 1e-300,
    "10**30": lambda _: 10**30,
    "complex alone": lambda _: 1j,
    "a tuple": lambda _: (0.5, "x"),
    "bytes": lambda _: b"x",
    "of numpy": lambda value: np.asarray(value)[()] if isinstance(value, int | float | str) else np.float32(0.5),
    "a tensor alone": lambda value: torch.tensor(value if isinstance(value, float) else 2),
}
BREAKS = [*TENSOR_BREAKS, *OTHER_BREAKS]


def broken(arguments: Arguments, fixed: Iterable[str], places: list[tuple[int, str]]) -> Arguments:
    """The arguments with each break applied to the argument at its place (modulo their number)."""
    names = [name for name in arguments if name not in fixed]
    changed = dict(arguments)
    for place, kind in places:
        name = names[place % len(names)]
        changed[name] = _break(changed[name], kind, place)
    return changed


def _break(value: Any, kind: str, place: int) -> Any:
    """The value broken; in a tuple, list or dict of tensors, one of them."""
    if kind in OTHER_BREAKS:
        return OTHER_BREAKS[kind](value)
    if isinstance(value, Tensor):
        array = kind in ("numpy", "read-only numpy", "memory-mapped") and value.is_complex()
        ordinary = value.layout == torch.strided and value.device.type == "cpu" and not array
        return TENSOR_BREAKS[kind](value) if ordinary and not isinstance(value, FakeTensor) else value
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, tuple | list) else []
    inside = [key for key in keys if isinstance(value[key], Tensor)]
    if inside:
        parts = {key: value[key] for key in keys}
        chosen = inside[place % len(inside)]
        parts[chosen] = _break(parts[chosen], kind, place)
        return parts if isinstance(value, dict) else type(value)(parts.values())
    others = list(OTHER_BREAKS.values())  # nothing here that a tensor's break could change
    return others[BREAKS.index(kind) % len(others)](value)


# -- judging an outcome -------------------------------------------------------------------------------------------------------


#: A message names what is wrong: an argument in backticks, or one of these.
NAMED = ("group ", "call ", "must", "needs", "the model's output", "the model returned", "the batch has", "adapter reads")


class Fault(AssertionError):
    """Neither a right answer nor a clear error."""


TALLY: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
atexit.register(lambda: print("\n" + table()) if TALLY else None)


def judge(entry: Entry, arguments: Arguments, spoiled: bool) -> str:
    """Call the entry; "right" or "error", else raises :class:`Fault`. Files without a folder go to a temporary one."""
    before = os.getcwd()
    os.chdir(FOLDER.name)
    try:
        outcome = _judge(entry, arguments, spoiled)
    except Fault:
        TALLY[entry.name]["fault"] += 1
        raise
    finally:
        os.chdir(before)
    TALLY[entry.name][outcome] += 1
    return outcome


def _judge(entry: Entry, arguments: Arguments, spoiled: bool) -> str:
    shown = {name: _show(value) for name, value in arguments.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings(
                "ignore", message="About \\d+ % of the audited|left out groups|the model gives next to no|`torch.jit"
            )
            answer = entry.call(**arguments)
    except Exception as error:
        if not spoiled:
            raise Fault(f"{entry.name}: a good call raised {error!r}; {shown}") from error
        unclear = _unclear(error, arguments)
        if unclear:
            raise Fault(f"{entry.name}: {unclear}: {type(error).__name__}: {error}; {shown}") from error
        return "error"
    try:
        if not has_fake(arguments):
            entry.check(arguments, answer)
    except Exception as error:
        raise Fault(f"{entry.name}: wrong answer: {type(error).__name__}: {error}; {shown}") from error
    return "right"


def _unclear(error: Exception, arguments: Arguments) -> str:
    """Why an error is not a clear one; empty if it is."""
    if has_fake(arguments) and (
        isinstance(error, DataDependentOutputException | DynamicOutputShapeException | NotImplementedError)
        or ".numpy() is not supported" in str(error)
        or "Found no NVIDIA driver" in str(error)  # a tensor made on the input's device, as it should be
    ):
        return ""  # a fake tensor has no values to check
    if isinstance(error, OSError) and (error.filename is not None or _on_purpose(error)):
        return ""  # of a file, with its name
    if isinstance(error, IndexError) and _on_purpose(error) and str(error).startswith("`index` must be from 0 to"):
        return ""  # by which Python ends a loop over a data set
    told = isinstance(error, RuntimeError) and "the optimum was not reached" in str(error)  # numerical, and says what to do
    if not isinstance(error, ValueError | TypeError) and not told:
        return "neither ValueError nor TypeError"
    frame = _last(error)
    file = frame.tb_frame.f_code.co_filename
    if file == __file__ or Path(file).name.startswith(("test_", "fuzz_")):
        return "" if isinstance(error, TypeError) else "raised by the test"  # Python's own check of a signature
    if not file.startswith(PACKAGES):
        return f"raised in {Path(file).name}"
    if not _on_purpose(error):
        return f"not raised on purpose ({Path(file).name}:{frame.tb_lineno})"
    if "`" not in str(error) and not any(word in str(error) for word in NAMED):
        return "no argument named"
    return ""


def _last(error: Exception) -> TracebackType:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    assert frame is not None
    return frame


def _on_purpose(error: Exception) -> bool:
    """By a ``raise`` of the package."""
    frame = _last(error)
    code = frame.tb_frame.f_code
    return code.co_filename.startswith(PACKAGES) and dis.opname[code.co_code[frame.tb_lasti]] == "RAISE_VARARGS"


def has_fake(value: Any) -> bool:
    """Is there a fake tensor anywhere in these arguments?"""
    if isinstance(value, dict | tuple | list):
        return any(map(has_fake, value.values() if isinstance(value, dict) else value))
    return isinstance(value, FakeTensor)


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}@{value.device.type}"
    return f"{type(value).__name__} {value!r}"[:60]


def plain(value: Any) -> bool:
    """A tensor on the CPU, with ordinary finite values: worth a comparison by value."""
    if isinstance(value, dict | tuple | list):
        return all(map(plain, value.values() if isinstance(value, dict) else value))
    if not isinstance(value, Tensor):
        return not isinstance(value, float) or math.isfinite(value)
    if value.device.type != "cpu" or value.layout != torch.strided or value.is_complex():
        return False
    if not value.is_floating_point() or not value.numel():
        return True
    return bool(value.isfinite().all()) and float(value.detach().double().abs().max()) < 1e6


def all_plain(arguments: Arguments) -> bool:
    return all(plain(value) for value in arguments.values())


def table() -> str:
    """What happened, entry by entry."""
    rows = [f"{'entry':34} {'cases':>7} {'right':>7} {'errors':>7} {'faults':>7}"]
    total: collections.Counter[str] = collections.Counter()
    for name, counts in [*sorted(TALLY.items()), ("all", total)]:
        total.update(counts if name != "all" else {})
        rows.append(f"{name:34} {sum(counts.values()):7} {counts['right']:7} {counts['error']:7} {counts['fault']:7}")
    return "\n".join(rows)
