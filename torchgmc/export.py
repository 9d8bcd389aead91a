"""Files that run without torchgmc: TorchScript, torch.export and ONNX, each read back and compared."""

import io
import json
import logging
import os
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from torchgmc.deploy.attach import CalibratedModel
from torchgmc.deploy.program import KEY, Flat, Program, first_line, flatten
from torchgmc.deploy.torchscript import open_torchscript, write_torchscript
from torchgmc.engine import checks as asked
from torchgmc.engine.extras import require
from torchgmc.engine.files import write_atomically
from torchgmc.engine.modes import evaluating
from torchgmc.heads.base import Head

__all__ = ["FORMATS", "export", "metadata"]

FORMATS = ("torchscript", "torch.export", "onnx")
#: Largest relative difference between a file and the eager model.
RTOL = 1e-4
#: Bytes of metadata that are read.
LONGEST = 1 << 24
log = logging.getLogger(__name__)


def export(
    model: CalibratedModel,
    path: str | os.PathLike[str],
    format: str = "torchscript",
    example_inputs: tuple[Any, ...] | dict[str, Any] = (),
    checks: bool = False,
) -> Path:
    """Write a calibrated model to one file that runs without torchgmc.

    The file maps the inputs of the example, in their order, to the head's result: mask, probabilities, log-probabilities or
    nodes (for a :class:`~torchgmc.QuantileHead`: scores and thresholds). The number of examples is dynamic; so is the image
    size, or the length of a text, where the model allows it. Afterwards the file is read back and compared with the eager
    model on the example and on another number of examples; if they differ, it is removed and an error raised.

    Args:
        model: the result of :func:`torchgmc.attach`, with a fitted head.
        path: the file; replaced only when the new one is complete and verified.
        format: ``"torchscript"`` (scripted; traced where the model cannot be scripted, which is logged), ``"torch.export"`` or
            ``"onnx"`` (extra ``onnx``).
        example_inputs: arguments of a call ``model(*example_inputs)``, groups included, or a dict for ``model(**...)``.
        checks: a file checks the shape of the membership, and no value: memberships other than 0 and 1 (a mask of 0 and 255),
            NaN, and logits where the head was fitted on probabilities give wrong answers without a word. True keeps these
            checks in the file, for a pass over scores and membership: a call then raises, as the eager model does. ONNX has
            no operation that stops, so this is for the other two formats.

    Returns:
        The path. :func:`metadata` reads what was promised to whom back out of it.
    """
    asked.option("format", format, FORMATS)
    target = asked.path("path", path)
    suffix = target.suffix.lower()
    if format != (meant := {".onnx": "onnx", ".pt2": "torch.export"}.get(suffix, format)):
        raise ValueError(f"a file in {suffix} is of format {meant!r}, but {format!r} was asked for; change the name or the format.")
    if asked.flag("checks", checks) and format == "onnx":
        raise ValueError("`checks` cannot be kept in ONNX, which has no operation that stops; use another format, or check before.")
    if not isinstance(model, CalibratedModel):
        alone = " (for a head without a model: gmc.save it, then `torchgmc export`)" if isinstance(model, Head) else ""
        raise TypeError(f"`model` must come from torchgmc.attach, got {type(model).__name__}{alone}.")
    for name, head in model.heads().items():
        if not head.is_fitted:
            raise RuntimeError(f"the head{' ' + repr(name) if name else ''} is not fitted; fit it before exporting.")
    flat, tensors = flatten(model, example_inputs)
    if checks:
        flat.guard()
    body = _describe(flat, format)
    write, read = {
        "torchscript": (write_torchscript, open_torchscript),
        "torch.export": (_write_export, _open_export),
        "onnx": (_write_onnx, _open_onnx),
    }[format]
    with torch.no_grad(), evaluating(flat):

        def write_and_verify(part: Path) -> None:
            write(flat, tensors, part, body)
            program = _try(lambda: read(part), format, "cannot be read back; it was removed.")
            for example in (tensors, tuple(torch.cat([t, t[:1]]) for t in tensors)):
                task = f"does not run on {len(example[0])} examples; it was removed. Is their number fixed?"
                _compare(flat, example, _try(lambda example=example: program(*example), format, task), format)  # type: ignore[misc]

        write_atomically(target, write_and_verify)
    return target


def metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What an exported file says of itself: version, head, alpha, target, groups, names of the inputs, checks and format.

    The file is not loaded, and nothing in it is run: it may come from anybody.
    """
    path = asked.path("path", path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {str(path)!r} to read metadata from.")
    try:
        found = json.loads(_read_archive(path) if zipfile.is_zipfile(path) else _read_onnx(path))
    except ImportError:
        raise
    except Exception as error:  # a crafted file can fail anywhere
        raise ValueError(f"`path` = {path.name!r} holds no metadata of torchgmc: {first_line(error)}") from error
    if not isinstance(found, dict):
        raise ValueError(f"`path` = {path.name!r} holds no metadata of torchgmc: {found!r:.80}")
    return found


def _read_archive(path: Path) -> bytes:
    """The metadata of a TorchScript or torch.export file: a member of the archive, which is unpacked and not loaded."""
    with zipfile.ZipFile(path) as archive:
        for one in archive.infolist():
            if PurePosixPath(one.filename).parts[-2:] in (("extra", KEY), ("extra_files", KEY)):
                if one.file_size > LONGEST:
                    raise ValueError(f"{one.filename!r} has {one.file_size} bytes")
                return archive.read(one)
    raise ValueError(f"it has no {KEY!r}")


def _describe(flat: Flat, format: str) -> str:
    from torchgmc import __version__

    about: dict[str, dict[str, Any]] = {}
    for name, part in flat.each().items():
        head, config = part.head, json.loads(json.dumps(part.head.config(), default=str))
        about[name] = {"head": type(head).__name__, "alpha": head.alpha, "target": config.get("target"), "config": config}
        about[name]["groups"] = list(head.groups) if head.grouped else None
    own = about.get("", {"heads": about})
    file = {"version": __version__, "format": format, "inputs": flat.names, "outputs": flat.outputs, "checks": flat.guarded}
    return json.dumps(own | file, sort_keys=True)


def _dynamic(flat: Flat, tensors: tuple[Tensor, ...], others: bool) -> tuple[Any, ...]:
    """The number of examples is free, always; so are image sizes (n, c, *size*) and text lengths (n, *length*) if asked."""
    dim = torch.export.Dim
    shapes: list[dict[int, Any]] = [{0: dim.DYNAMIC} for _ in tensors]
    for shape, tensor in zip(shapes, flat.inputs(tensors) if others else (), strict=False):
        shape |= dict.fromkeys(range(2 if tensor.is_floating_point() else 1, tensor.dim()), dim.AUTO)
    return (tuple(shapes),)  # of *tensors


def _freest(flat: Flat, tensors: tuple[Tensor, ...], work: Callable[[Any], Any]) -> Any:
    """``work`` on the exported program, with every size free that the model and ``work`` can take so."""
    how: dict[str, Any] = {} if not flat.layers else {"strict": False}  # a hook looks at the layer
    try:
        return work(torch.export.export(flat, tensors, dynamic_shapes=_dynamic(flat, tensors, True), **how))
    except Exception as error:  # the exporters raise many kinds
        log.info("only the number of examples is free in this export: %s", first_line(error))
        return work(torch.export.export(flat, tensors, dynamic_shapes=_dynamic(flat, tensors, False), **how))


def _write_export(flat: Flat, tensors: tuple[Tensor, ...], path: Path, body: str) -> None:
    buffer = io.BytesIO()  # torch wants a certain ending of a path's name
    program = _freest(flat, tensors, lambda program: program)
    # torch keeps the example inputs in the file, with all that their storage holds: nobody's data belongs in a model's file.
    program._example_inputs = (tuple(torch.zeros_like(t) for t in tensors), {})
    torch.export.save(program, buffer, extra_files={KEY: body})
    path.write_bytes(buffer.getvalue())


def _open_export(path: Path) -> Program:
    with path.open("rb") as file:
        return torch.export.load(file).module()


def _write_onnx(flat: Flat, tensors: tuple[Tensor, ...], path: Path, body: str) -> None:
    require("onnxscript", extra="onnx")

    def convert(program: Any) -> Any:
        return torch.onnx.export(program, tensors, dynamo=True, input_names=flat.names, output_names=flat.outputs, verbose=False)

    try:
        program = _freest(flat, tensors, convert)
        program.model.metadata_props[KEY] = body
        program.save(str(path))
    except OSError:  # of the disk, not of the converter
        raise
    except Exception as error:  # the converter raises many kinds
        raise RuntimeError(
            f"torch {torch.__version__} cannot write this model as ONNX; use 'torch.export' or 'torchscript', or newer "
            f"versions of torch and onnxscript, which convert more models. {first_line(error)}"
        ) from error


def _open_onnx(path: Path) -> Program:
    session = require("onnxruntime", extra="onnx").InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def program(*example: Tensor) -> Any:
        feeds = {one.name: value.cpu().numpy() for one, value in zip(session.get_inputs(), example, strict=True)}
        found = [torch.from_numpy(value).to(example[0].device) for value in session.run(None, feeds)]
        return found[0] if len(found) == 1 else tuple(found)

    return program


def _read_onnx(path: Path) -> str:
    onnx = require("onnx", extra="onnx")
    found = {one.key: one.value for one in onnx.load(str(path), load_external_data=False).metadata_props}
    if KEY not in found:
        raise ValueError(f"it has no {KEY!r}")
    return str(found[KEY])


def _try(work: Callable[[], Any], format: str, task: str) -> Any:
    try:
        return work()
    except ImportError:
        raise
    except Exception as error:  # every runtime has its own
        raise RuntimeError(f"the {format} file {task} {first_line(error)}") from error


def _compare(flat: Flat, example: tuple[Tensor, ...], found: Any, format: str) -> None:
    """The file against the eager model.

    Another program computes the model's scores up to rounding. So numbers must agree within RTOL; of answers (masks, nodes)
    those must agree that no change of the scores by so much (and by the jitter, which such a change re-draws) can turn.
    """
    for name, part, given in flat.read(example):
        expected, got = part.finish(*given), found
        if name:  # one of several heads; ONNX returns all in order
            by_name = found if isinstance(found, dict) else dict(zip(flat.outputs, _tuple(found), strict=True))
            expected, got = expected[1] if isinstance(expected, tuple) else expected, by_name[name]
        _compare_part(part, given, list(zip(_tuple(expected), _tuple(got), strict=True)), format)


def _compare_part(part: Flat, given: tuple[Any, ...], pairs: list[tuple[Tensor, Tensor]], format: str) -> None:
    inputs = given[2]
    for want, got in pairs:
        if want.shape != got.shape or want.dtype != got.dtype:
            raise RuntimeError(
                f"the {format} file returns {got.dtype} {tuple(got.shape)}, but the model returns {want.dtype} "
                f"{tuple(want.shape)} for {len(inputs[0])} examples; it was removed. Try another format."
            )
        if want.is_floating_point():
            bound = RTOL * (1.0 + want[want.isfinite()].abs().max()) if want.isfinite().any() else RTOL
            off = ((want - got).abs() > bound) | (want.isfinite() != got.isfinite())
        else:
            off = want != got
            if bool(off.any()):
                off &= _settled(part, given, want)
        if bool(off.any()):
            raise RuntimeError(
                f"the {format} file disagrees with the model in {int(off.sum())} of {off.numel()} values on {len(inputs[0])} "
                "examples; it was removed. Try another format, or report this with the model."
            )


def _settled(flat: Flat, given: tuple[Any, ...], result: Tensor) -> Tensor:
    """Which entries of the result a small change of the scores does not change, bool."""
    scores, *others = given
    size = RTOL * (1.0 + float(scores.abs().max())) + 2.0 * flat.head.jitter
    draws = torch.Generator().manual_seed(0)
    steps = [torch.ones_like(scores), -torch.ones_like(scores)]
    steps += [(torch.rand(scores.shape, generator=draws) * 2 - 1).sign().to(scores) for _ in range(8)]
    same = torch.ones_like(result, dtype=torch.bool)
    for step in steps:
        moved = scores + size * step
        same &= flat.finish(moved.clamp(0.0, 1.0) if flat.head.takes == "probs" else moved, *others) == result
    return same


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
