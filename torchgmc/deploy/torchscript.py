"""The calibrated model as a function of tensors, and its TorchScript form: scripted where it can be, else traced."""

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchgmc.deploy.adapters import Adapter, beside
from torchgmc.deploy.attach import CalibratedModel

Program = Callable[..., Any]
#: Key of the metadata inside every format.
KEY = "torchgmc.json"
log = logging.getLogger("torchgmc.export")


def first_line(error: Exception) -> str:
    """Enough of a compiler's error for a log."""
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


class Scorer(nn.Module):
    """Model and adapter: tensors in, scores out."""

    def __init__(self, calibrated: CalibratedModel, names: list[str], keywords: bool) -> None:
        super().__init__()
        self.model, self.adapter, self.names, self.keywords = calibrated.model, calibrated.adapter, names, keywords

    def forward(self, *tensors: Tensor) -> Tensor:
        if self.keywords:
            return self.adapter.scores(self.model(**dict(zip(self.names, tensors, strict=True))))
        return self.adapter.scores(self.model(*tensors))


class Flat(nn.Module):
    """The calibrated model with positional tensors alone; groups, where they are given, come last."""

    def __init__(self, calibrated: CalibratedModel, names: list[str], keywords: bool, grouped: bool) -> None:
        super().__init__()
        self.scorer, self.adapter = Scorer(calibrated, names, keywords), calibrated.adapter
        self.head = copy.deepcopy(calibrated.head)
        self.head.statistics = None  # a file holds the state, not the data
        self.head.report = None
        for name, buffer in self.head._buffers.items():  # torch.export warns of views, e.g. of a transposed table
            self.head._buffers[name] = None if buffer is None else buffer.detach().clone(memory_format=torch.contiguous_format)
        self.source = None if grouped else calibrated.group_source
        self.main = names.index("input_ids") if "input_ids" in names else 0
        self.grouped, self.threshold_only = grouped, calibrated.wants == "groups"
        self.names = [*names, "groups"] if grouped else names

    def forward(self, *tensors: Tensor) -> Any:
        inputs = tensors[:-1] if self.grouped else tensors
        return self.finish(self.scorer(*inputs), self.groups(tensors), inputs)

    def groups(self, tensors: tuple[Tensor, ...]) -> Tensor | None:
        """The membership: given last, computed, or not needed."""
        if self.grouped:
            return tensors[-1]
        return None if self.source is None else self.source(tensors[self.main])

    def finish(self, scores: Tensor, member: Tensor | None, inputs: tuple[Tensor, ...]) -> Any:
        """The head's result."""
        if self.threshold_only:
            return scores, beside(scores, self.head(member))
        return self.adapter.apply(
            self.head, scores, member, dict(zip(self.names[: len(inputs)], inputs[: len(self.names)], strict=True))
        )


class _Pick(nn.Module):
    """The adapter as a scriptable module, for tensors."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self.activation, self.channel, self.whole = adapter.activation, adapter.channel or 0, adapter.channel is None
        self.binary = adapter.binary

    def forward(self, raw: Tensor) -> Tensor:
        if self.activation == "sigmoid":
            raw = raw.sigmoid()
        elif self.activation == "softmax":
            dim = -1 if raw.dim() == 3 else 1
            raw = raw.softmax(dim) if raw.shape[dim] > 1 else raw.sigmoid()
        if not self.whole:
            return raw[:, self.channel]
        if self.binary and raw.dim() == 2:
            return raw[:, -1]
        return raw


class _ScoreTensor(nn.Module):
    """One input, a tensor out."""

    def __init__(self, model: nn.Module, pick: nn.Module) -> None:
        super().__init__()
        self.model, self.pick = model, pick

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.pick(self.model(x))
        return scores


class _ScoreField(nn.Module):
    """One input, a dict out."""

    def __init__(self, model: nn.Module, pick: nn.Module, field: str | int) -> None:
        super().__init__()
        self.model, self.pick, self.field = model, pick, field

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.pick(self.model(x)[self.field])
        return scores


class _WithGroups(nn.Module):
    def __init__(self, scorer: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.scorer, self.head = scorer, head

    def forward(self, x: Tensor, groups: Tensor) -> Tensor:
        result: Tensor = self.head(self.scorer(x), groups)
        return result


class _WithoutGroups(nn.Module):
    def __init__(self, scorer: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.scorer, self.head = scorer, head

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.scorer(x))
        return result


class _WithSource(nn.Module):
    def __init__(self, scorer: nn.Module, head: nn.Module, source: nn.Module) -> None:
        super().__init__()
        self.scorer, self.head, self.source = scorer, head, source

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.scorer(x), self.source(x))
        return result


@contextlib.contextmanager
def _deprecated_jit() -> Iterator[None]:
    """TorchScript announces its end at each call: we know, and offer torch.export beside it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+` is (deprecated|not supported)")
        yield


def write_torchscript(flat: Flat, tensors: tuple[Tensor, ...], path: Path, body: str) -> None:
    with _deprecated_jit():
        module = _script(flat, tensors)
        torch.jit.save(module, str(path), _extra_files={KEY: body})


def _script(flat: Flat, tensors: tuple[Tensor, ...]) -> Any:
    """Scripted as a whole; or scripted parts under a trace; or the model traced."""
    inputs = tensors[:-1] if flat.grouped else tensors
    scorer, scripted = _script_scorer(flat, inputs)
    head = torch.jit.script(flat.head)
    source = None if flat.source is None else _script_source(flat.source, inputs[flat.main])
    if len(inputs) == 1 and scripted and not flat.threshold_only and flat.adapter.position is None:
        whole = _WithGroups(scorer, head) if flat.grouped else _WithoutGroups(scorer, head)
        return torch.jit.script(whole if source is None else _WithSource(scorer, head, source))
    joined = copy.copy(flat)  # its own table of modules; the parts are shared
    joined._modules = dict(flat._modules)
    joined.scorer, joined.head, joined.source = scorer, head, source  # type: ignore[assignment]
    return _trace(joined, tensors)


def _script_scorer(flat: Flat, inputs: tuple[Tensor, ...]) -> tuple[Any, bool]:
    scorer = flat.scorer
    reason = f"it takes {len(inputs)} inputs" if len(inputs) > 1 else "its adapter is a user's own"
    if len(inputs) == 1 and type(scorer.adapter).__name__ == "Adapter":
        pick = _Pick(scorer.adapter)
        try:
            field = scorer.adapter.find(scorer.model(inputs[0]))
            whole = _ScoreTensor(scorer.model, pick) if field is None else _ScoreField(scorer.model, pick, field)
            return torch.jit.script(whole), True
        except Exception as error:  # the compiler raises many kinds
            reason = first_line(error)
    log.info("%s is traced, not scripted: %s", type(scorer.model).__name__, reason)
    return _trace(scorer, inputs), False


def _script_source(source: Any, example: Tensor) -> Any:
    try:
        return torch.jit.script(source)
    except Exception as error:
        log.info("%s, which computes the groups, is traced, not scripted: %s", type(source).__name__, first_line(error))
        return _trace(source, (example,))


def _trace(module: Any, example: tuple[Tensor, ...]) -> Any:
    """A trace; what it fixes goes to the log (the comparison on another batch shows whether that matters)."""
    from torch.jit._trace import TracerWarning

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TracerWarning)
        traced = torch.jit.trace(module, example, check_trace=False)  # type: ignore[no-untyped-call]
    for one in caught:
        if issubclass(one.category, TracerWarning):
            log.info("fixed by the trace: %s", str(one.message).splitlines()[0])
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return traced


def open_torchscript(path: Path) -> Program:
    """The program in a file."""
    with _deprecated_jit():
        return torch.jit.load(str(path))  # type: ignore[no-untyped-call, no-any-return]


def read_torchscript(path: str) -> str:
    files = {KEY: ""}
    with _deprecated_jit():
        torch.jit.load(path, _extra_files=files, map_location="cpu")  # type: ignore[no-untyped-call]
    found: Any = files[KEY]
    return found.decode() if isinstance(found, bytes) else str(found)
