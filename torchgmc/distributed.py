"""Many processes, one fit: every rank ends with the same state.

Statistics are gathered and added in the order of the ranks; or, where a solver needs only sums over the rows, the rows stay
where they are and the sums are exchanged (:func:`rows_stay`, :func:`total`).

Every exchange starts with a small header, in which a rank may also say that it failed. So an error on one rank is raised on all
of them, with its message, instead of letting the others wait. Only tensors travel, nothing is pickled.
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, distributed as dist

from torchgmc.engine.modes import calm

if TYPE_CHECKING:
    from torchgmc.heads.base import Head

__all__ = [
    *("PeerError", "active", "agree", "alone", "collected", "exchanged_bytes", "extremes", "from_first", "local", "moved", "pack"),
    *("pooled", "reduce", "rows_stay", "signature", "together", "total", "totals", "unpack"),
]

Method = TypeVar("Method", bound=Callable[..., Any])

_KINDS = ("statistics", "signature", "broadcast", "sum", "rows", "end", "failure")
_LOCAL: ContextVar[bool] = ContextVar("torchgmc_local", default=False)
_TOGETHER: ContextVar[bool] = ContextVar("torchgmc_together", default=False)
_SCATTERED: ContextVar[bool] = ContextVar("torchgmc_scattered", default=False)
scattered = _SCATTERED.get  # is this a fit whose rows stay on their ranks, see rows_stay?
_LONGEST_MESSAGE = 1 << 16
#: Bytes that travel with a header: an exchange costs as much time whether it is of 20 bytes or of thousands, so that few is best.
_INLINE = 1 << 12


class PeerError(RuntimeError):
    """Another rank failed or stopped responding; the message is that rank's."""


class _Traffic:
    """Bytes this process has put into exchanges, for `benchmarks/overhead.py` and the tests."""

    sent = 0


def exchanged_bytes() -> int:
    """Bytes this process has contributed to exchanges so far, padding included."""
    return _Traffic.sent


def active() -> bool:
    """Is there a process group of more than one rank to reduce over (and no :func:`local` around)?"""
    return not _LOCAL.get() and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextlib.contextmanager
def _being(variable: ContextVar[bool], value: bool) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def local() -> contextlib.AbstractContextManager[None]:
    """Inside, a fit uses only this process's data, and no other rank needs to take part.

    Example:
        >>> with local():
        ...     active()
        False
    """
    return _being(_LOCAL, True)


def alone() -> contextlib.AbstractContextManager[None]:
    """Inside, sums are of what is at hand: rows that were :func:`collected`."""
    return _being(_SCATTERED, False)


@contextlib.contextmanager
def together(about: Callable[[], str] | None = None) -> Iterator[None]:
    """An error that one rank raises inside is raised on every rank: there as it is, elsewhere as a :class:`PeerError`.

    ``fit`` and the Lightning callback use it. Around your own loop::

        with gmc.distributed.together():
            for scores, masks, groups in loader:
                head.observe(scores, masks, groups)
            head.calibrate()

    ``about``: what all ranks must agree on first, see :func:`agree`.
    """
    tells = active() and not _TOGETHER.get()  # of several the outer one tells the others
    try:
        with _being(_TOGETHER, True) if tells else contextlib.nullcontext():
            if about is not None and active():
                agree(about())
            yield
    except Exception as error:
        if tells and not isinstance(error, PeerError):  # which the others know
            with contextlib.suppress(PeerError):
                _exchange("failure", f"{type(error).__name__}: {error}".encode()[:_LONGEST_MESSAGE])
        raise
    if tells:
        _exchange("end", b"")


def agree(signature: str) -> None:
    """Raise on every rank unless all are at this point with the same signature, e.g. a head and the options of its fit."""
    if active():
        _check_signatures([text.decode() for text in _exchange("signature", signature.encode())])


def from_first(values: Tensor | Callable[[], Tensor], device: torch.device | None = None) -> Tensor:
    """The tensor of the first rank, on every rank, where :func:`rows_stay` too; a function is called there, and others wait."""
    scattered = active() or _SCATTERED.get()
    with alone(), local():
        own = [] if scattered and dist.get_rank() else [values() if callable(values) else values]
    home = values.device if isinstance(values, Tensor) else device or torch.device("cpu")
    return _from_bytes(_exchange("broadcast", _to_bytes(own))[0], home)[1][0] if scattered else own[0]


def total(values: Tensor, always: bool = False) -> Tensor:
    """Sum over all ranks, in a fit whose rows stay on their ranks (:func:`rows_stay`); anywhere else the values themselves."""
    if not ((_SCATTERED.get() and values.numel()) or always):
        return values
    if values.nbytes <= _INLINE:
        said = _exchange("sum", _raw(values), values.nbytes)
        return _from_raw(said, values).view(len(said), *values.shape).sum(0, dtype=values.dtype)
    _exchange("sum", b"", values.nbytes)
    moved = values.to(_device(), copy=True).contiguous()
    _collective(lambda: dist.all_reduce(moved), moved)
    return moved.to(values.device)


def totals(*values: Tensor) -> list[Tensor]:
    """:func:`total` of several tensors of one type, in one exchange."""
    if not _SCATTERED.get():
        return [*values]
    sums = torch.split(total(torch.cat([one.flatten() for one in values])), [one.numel() for one in values])
    return [part.view(one.shape) for part, one in zip(sums, values, strict=True)]


def collected(values: Tensor, always: bool = False) -> tuple[Tensor, int]:
    """Values ``(n, ...)`` of all ranks in the order of the ranks, and where this rank's begin; see :func:`total`."""
    if not (_SCATTERED.get() or always):
        return values, 0
    width = values.element_size() * math.prod(values.shape[1:])
    if not width:  # rows without columns still have a number
        every, start = collected(torch.zeros(len(values), dtype=torch.uint8), always)
        return values.new_empty(len(every), *values.shape[1:]), start
    said = _exchange("rows", _raw(values), width)
    return _from_raw(said, values).view(-1, *values.shape[1:]), sum(map(len, said[: dist.get_rank()])) // width


def extremes(values: Tensor) -> tuple[float, float]:
    """Smallest and largest of the values ``(n,)`` of all ranks; see :func:`total`."""
    low, high = (float(end) for end in values.aminmax()) if len(values) else (math.inf, -math.inf)
    lows, highs = collected(torch.tensor([[low, high]], dtype=torch.float64))[0].T
    return float(lows.min()), float(highs.max())


def _raw(values: Tensor) -> bytes:
    """The bytes of a tensor."""
    return values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if values.numel() else b""


def _from_raw(texts: list[bytes], like: Tensor) -> Tensor:
    """Tensors of such bytes, one after the other, ``(k,)``, of this type and on this device."""
    data = bytearray(b"".join(texts))
    return torch.frombuffer(data, dtype=like.dtype).to(like.device) if data else like.new_empty(0)


def rows_stay(where: Callable[..., bool], above: int = 0) -> Callable[[Method], Method]:
    """Decorate a head's ``calibrate`` below :func:`pooled`: rows need not move, as it sums over them by :func:`total`.

    ``where`` says for which fits, from the head, statistics without rows, and the arguments of ``calibrate``; only those of
    more than ``above`` examples. There ``self`` has the statistics of its own rank, without rows where it has none; all else is
    as for :func:`pooled`.
    """

    def mark(calibrate: Method) -> Method:
        calibrate.rows_stay = where, above  # type: ignore[attr-defined]
        return calibrate

    return mark


def pooled(calibrate: Method) -> Method:
    """Decorate a head's ``calibrate``: inside, ``self`` is a twin, and its statistics are the sum over all ranks.

    What it finds becomes the head's state at once when it returns; an error changes nothing, and another thread never sees half
    of it. The head keeps the statistics of its rank. A rank without examples (``statistics`` None) takes part like the others.
    """

    @functools.wraps(calibrate)
    def over_all_ranks(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False):  # buffers made in inference mode are copied to ordinary ones
            known = self.statistics is not None  # joined before there is a twin, which would keep the parts
            twin = self.twin()
            if self.lacks_statistics and known:
                warnings.warn(
                    "this head was loaded without the statistics of the examples it was fitted on: `calibrate` fits those "
                    "observed since, and no others. Save with gmc.save(head, path, statistics=True) to add to a fit; to start "
                    "over, call `fit` or `reset`.",
                    UserWarning,
                    stacklevel=2,
                )
            twin.lacks_statistics = False
            stays = False
            if active():
                twin.statistics, stays = _pool(self, getattr(calibrate, "rows_stay", None), args, kwargs)
                twin.observed = reduce(self.observed, "", self.fitted.device)
            # A calibrate that calls another's must not add the ranks up twice.
            stays = stays or _SCATTERED.get()  # or the rows of the one that calls stay
            with together() if stays else contextlib.nullcontext(), local(), _being(_SCATTERED, stays), calm(twin.statistics):
                calibrate(twin, *args, **kwargs)
        # What was observed stays the head's own: another thread may have added to it meanwhile.
        self.__dict__.update({name: value for name, value in twin.__dict__.items() if name not in ("_parts", "observed")})
        return self

    return cast(Method, over_all_ranks)


def _pool(head: "Head", stays: tuple[Callable[..., bool], int] | None, args: Any, kwargs: Any) -> tuple[Any, bool]:
    """Statistics to calibrate with, and whether they are this rank's only."""
    own, about, device = head.statistics, signature(head, *args, **kwargs), head.fitted.device
    if stays is not None and head.keeps_rows:
        shapes = reduce(None if own is None else own.nobody(), about, device)
        where, above = stays
        many = above == 0 or int(total(torch.tensor(0 if own is None else own.rows), True)) > above
        if shapes is None or (many and where(head, shapes, *args, **kwargs)):
            return (shapes if own is None else own), shapes is not None
    return reduce(own, about, device), False


def reduce(statistics: Any, signature: str = "", device: torch.device | None = None) -> Any:
    """Sum of the statistics of all ranks, in the order of the ranks; the same on every rank.

    ``statistics``: a dataclass with ``+`` whose fields are tensors, types, plain values, or lists, dicts and dataclasses of
    them; None for a rank without examples. ``signature``: must be equal on all ranks, e.g. a head's configuration. ``device``:
    where a rank without statistics puts the sum. Returns: The sum, or None if no rank has any. Without a process group,
    ``statistics`` itself.
    """
    if not active():
        return statistics
    tensors: list[Tensor] = []
    tree = None if statistics is None else pack(statistics, tensors)
    spec = json.dumps({"signature": signature, "tree": tree})
    home = next((t.device for t in tensors), device or torch.device("cpu"))
    said = [_from_bytes(data, home) for data in _exchange("statistics", _to_bytes(tensors, spec))]
    _check_signatures([about["signature"] for about, _ in said])
    every = [unpack(about["tree"], parts) for about, parts in said if about["tree"] is not None]
    return functools.reduce(lambda sums, part: sums + part, every) if every else None


def _exchange(kind: str, text: bytes, size: int = 0) -> list[bytes]:
    """What every rank says at this point. Raises if one says that it failed, or stands at another point of the program."""
    header, inline = _raw(torch.tensor([_KINDS.index(kind), len(text), size])), text if len(text) <= _INLINE else b""
    frames = _all_gather((header + inline).ljust(len(header) + _INLINE))
    headers = _from_raw([frame[: len(header)] for frame in frames], torch.zeros(0, dtype=torch.int64)).view(-1, 3).tolist()
    width = max(length for _, length, _ in headers)  # if one does not fit, all are padded to the longest
    texts = _all_gather(text.ljust(width)) if width > _INLINE else [frame[len(header) :] for frame in frames]
    texts = [row[:length] for (_, length, _), row in zip(headers, texts, strict=True)]
    kinds = [_KINDS[code] for code, _, _ in headers]
    if "failure" in kinds and kind != "failure":
        failed = [f"rank {rank}: {texts[rank].decode(errors='replace')}" for rank, k in enumerate(kinds) if k == "failure"]
        raise PeerError(f"this fit was stopped by another process; {'; '.join(failed)}")
    if "failure" not in kinds and len({(code, size) for code, _, size in headers}) > 1:
        raise PeerError(
            f"the processes are at different points of the program (rank by rank: {', '.join(kinds)}): every rank must "
            "call `fit` (or `calibrate`) equally often; to fit on one rank only, use `torchgmc.distributed.local()`."
        )
    return texts


def _all_gather(text: bytes) -> list[bytes]:
    sent = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(_device())
    rows = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    _collective(lambda: dist.all_gather(rows, sent), sent)
    return [_raw(row) for row in rows]


def _collective(run: Callable[[], Any], sent: Tensor) -> None:
    try:
        run()
    except RuntimeError as error:  # what gloo and nccl raise for a lost connection or a timeout
        raise PeerError(
            f"rank {dist.get_rank()} lost another process while statistics were exchanged: it was killed, ran out of memory, "
            f"or did not reach this fit within the timeout of the process group. ({error})"
        ) from error
    _Traffic.sent += sent.numel() * sent.element_size()


def _device() -> torch.device:
    """Where the process group takes tensors: the accelerator, or the CPU for gloo and mpi."""
    backend = str(dist.get_backend()).lower()
    if backend in ("gloo", "mpi", "ucc", "fake") or "cpu:gloo" in backend:
        return torch.device("cpu")
    if hasattr(torch, "accelerator") and torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        return torch.device("cuda" if kind is None else kind.type, torch.accelerator.current_device_index())
    return torch.device("cuda", torch.cuda.current_device())


def _check_signatures(signatures: list[str]) -> None:
    for rank, other in enumerate(signatures):
        if other != signatures[0]:
            raise PeerError(f"the heads of the ranks differ: rank 0 has {signatures[0]}, rank {rank} has {other}; make them alike.")


def signature(head: "Head", solver: str = "exact", eta: float | None = None, max_iter: int | None = None) -> str:
    """What must be the same on all ranks of a fit: the head and the options of ``calibrate``."""
    config = json.dumps(head.config(), default=str)
    return f"{head.kind()} {config}, solver={solver!r}, eta={eta!r}, max_iter={max_iter!r}"


def moved(statistics: Any, device: torch.device) -> Any:
    """The same statistics on a device."""
    tensors: list[Tensor] = []
    tree = pack(statistics, tensors)
    there = all(t.device == device for t in tensors)
    return statistics if there else unpack(tree, [t.to(device) for t in tensors])


def pack(value: Any, tensors: list[Tensor]) -> Any:
    """JSON that describes a value; its tensors are appended to the list."""
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        fields = {f.name: pack(getattr(value, f.name), tensors) for f in dataclasses.fields(value)}
        return {"class": f"{kind.__module__}:{kind.__qualname__}", "fields": fields}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: pack(one, tensors) for key, one in value.items()}}
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [pack(one, tensors) for one in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(f"statistics that hold a {type(value).__name__} cannot be exchanged between processes; use tensors.")


def unpack(tree: Any, tensors: list[Tensor], known: tuple[type, ...] | None = None) -> Any:
    """The value that :func:`pack` described. From a file: only of the ``known`` classes, and nothing is imported."""
    ((tag, body),) = ((k, v) for k, v in tree.items() if k != "fields")
    if tag == "tensor":
        return tensors[body]
    if tag == "dtype":
        return getattr(torch, body)
    if tag == "class":
        module, _, name = body.partition(":")
        if known is None:
            kind: Any = importlib.import_module(module)
            for part in name.split("."):
                kind = getattr(kind, part)
        else:
            kind = next((one for one in known if one.__qualname__ == name), None)
        if not dataclasses.is_dataclass(kind) or set(tree["fields"]) != {f.name for f in dataclasses.fields(kind)}:
            raise TypeError(f"{body} is not a dataclass of statistics, or has other fields.")
        made: Any = object.__new__(cast(type, kind))  # the fields as they were, whatever the constructor would do
        for key, one in tree["fields"].items():
            object.__setattr__(made, key, unpack(one, tensors, known))
        return made
    if tag == "dict":
        return {key: unpack(one, tensors, known) for key, one in body.items()}
    if tag in ("list", "tuple"):
        parts = [unpack(one, tensors, known) for one in body]
        return parts if tag == "list" else tuple(parts)
    return body


def _to_bytes(tensors: list[Tensor], about: str = "{}") -> bytes:
    """Tensors and JSON as a safetensors file."""
    from safetensors.torch import save

    named = {str(place): tensor.detach().contiguous().clone() for place, tensor in enumerate(tensors)}
    return save(named, {"about": about})


def _from_bytes(data: bytes, device: torch.device) -> tuple[Any, list[Tensor]]:
    """What :func:`_to_bytes` was given."""
    from safetensors.torch import load

    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    named = load(data)
    return json.loads(header["__metadata__"]["about"]), [named[str(place)].to(device) for place in range(len(named))]
