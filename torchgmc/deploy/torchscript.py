"""TorchScript files: the parts of a program are scripted where they can be, and a trace joins them."""

import contextlib
import copy
import inspect
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchgmc.deploy import adapters
from torchgmc.deploy.program import KEY, Flat, Program, first_line

log = logging.getLogger("torchgmc.export")


@contextlib.contextmanager
def _scripting(flat: Flat | None = None) -> Iterator[None]:
    """TorchScript warns about its deprecation at each call; torch.export is the alternative we offer.

    It also reads every property of a module: a deprecated one warns though nobody asked for it, and that of a LightningModule
    without a trainer raises unless its flag is set.
    """
    flag = "_jit_is_scripting"
    modules = flat.modules() if flat is not None else ()
    owners = {kind: vars(kind)[flag] for module in modules for kind in type(module).__mro__ if flag in vars(kind)}
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        for kind in owners:
            setattr(kind, flag, True)
        try:
            yield
        finally:
            for kind, before in owners.items():
                setattr(kind, flag, before)


def write_torchscript(flat: Flat, tensors: tuple[Tensor, ...], path: Path, body: str) -> None:
    with _scripting(flat):
        parts = _parts(flat) | {"source": _script(flat.source)}
        try:
            if flat.below is not None or flat.layers:
                raise TypeError("a model with a head of its own, or a layer that a head looks at, is joined from its parts")
            module = _join(flat, tensors, model=torch.jit.script(flat.model), **parts)
        except Exception as error:  # the compiler raises many kinds
            log.info("%s is traced, not scripted: %s", type(flat.model).__name__, first_line(error))
            module = _join(flat, tensors, **parts)
        buffer = io.BytesIO()  # torch's own writer ends the process when the disk is full
        torch.jit.save(module, buffer, _extra_files={KEY: body})
    path.write_bytes(buffer.getbuffer())


def _parts(flat: Flat) -> dict[str, Any]:
    """What is scripted in place of a program's own parts, those of its heads below and beside it too."""
    parts: dict[str, Any] = {"head": torch.jit.script(flat.head)}
    if flat.guarded:
        parts |= {"of_scores": torch.jit.script(flat.of_scores), "of_groups": torch.jit.script(flat.of_groups)}
    if flat.below is not None:
        parts["below"] = _with(flat.below, _parts(flat.below))
    if len(flat.parts):
        parts["parts"] = torch.nn.ModuleDict({name: _with(one, _parts(one)) for name, one in flat.each().items()})
    return parts


def _with(flat: Flat, parts: dict[str, Any]) -> Flat:
    """A copy with other parts; those not replaced are shared."""
    joined = copy.copy(flat)
    joined._modules = dict(flat._modules)  # its own table of modules
    for name, part in parts.items():
        setattr(joined, name, part)
    return joined


def _script(source: Any) -> Any:
    """The module that computes groups, scripted if it can be."""
    try:
        return None if source is None else torch.jit.script(source)
    except Exception as error:
        log.info("%s, which computes the groups, is traced, not scripted: %s", type(source).__name__, first_line(error))
        return source


def _join(flat: Flat, tensors: tuple[Tensor, ...], **parts: Any) -> Any:
    """A trace of the program with these parts in place of its own; scripted ones keep their branches and loops."""
    from torch.jit._trace import TracerWarning

    joined = _with(flat, parts)

    def forward(*tensors: Tensor) -> Any:
        return Flat.forward(joined, *tensors)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD  # of this signature torch takes the names of the file's inputs
    forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in flat.names])  # type: ignore[attr-defined]
    joined.forward = forward  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TracerWarning)
        traced = torch.jit.trace(joined, tensors, check_trace=False, strict=not len(flat.parts))  # type: ignore[no-untyped-call]
    for one in caught:
        if not issubclass(one.category, TracerWarning):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        elif one.filename != adapters.__file__:  # an adapter fixes the number of channels, as the model does
            log.info("fixed by the trace: %s", str(one.message).splitlines()[0])  # comparing another batch shows if it matters
    return traced


def open_torchscript(path: Path) -> Program:
    """The program in a file."""
    with _scripting():
        return torch.jit.load(str(path))  # type: ignore[no-untyped-call, no-any-return]
