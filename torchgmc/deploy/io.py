"""Save and load heads: safetensors with a schema, the configuration and a checksum; nothing is ever unpickled."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchgmc.engine import checks
from torchgmc.engine.files import write_atomically
from torchgmc.heads.base import Head

#: Version of the file layout. A file of a later schema is refused.
SCHEMA = 1
_KEY = "torchgmc"


def save(head: Head, path: str | os.PathLike[str], notes: Mapping[str, Any] | None = None) -> Path:
    """Write a head's configuration and fitted state to one safetensors file.

    The file appears whole or not at all: it is written beside ``path`` and renamed.

    Args:
        head: any head of this package.
        path: by custom ``*.safetensors``.
        notes: what else belongs to the head, in JSON types, e.g. how its groups follow from the columns of a table (the command
            line does so); :func:`read_notes` gives it back.

    Returns:
        The path written.

    Example:
        >>> import tempfile, pathlib
        >>> head = gmc.ThresholdHead(target=0.1, alpha=0.01).fit(torch.rand(50, 9), torch.ones(50, 9).bool())
        >>> file = gmc.save(head, pathlib.Path(tempfile.mkdtemp()) / "head.safetensors")
        >>> gmc.load(file).threshold().equal(head.threshold())
        True
    """
    from safetensors.torch import save_file

    if not isinstance(head, Head):
        raise TypeError(f"`head` must be a head of torchgmc, got {type(head).__name__}.")
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in head.state_dict().items()}
    body = {"schema": SCHEMA, "head": type(head).__name__, "config": head.config(), "fitted": bool(head.is_fitted)}
    if notes is not None and not isinstance(notes, Mapping):
        raise TypeError(f"`notes` must be a mapping of names to JSON values, got {type(notes).__name__}.")
    if notes:
        body["notes"] = dict(notes)
    text = json.dumps(body, sort_keys=True)
    metadata = {_KEY: text, "checksum": _checksum(text, tensors)}
    target = checks.path("path", path)
    write_atomically(target, lambda part: save_file(tensors, str(part), metadata=metadata))
    return target


def load(path: str | os.PathLike[str], **options: Any) -> Head:
    """Read a head that :func:`save` wrote.

    Args:
        path: the file.
        options: arguments that a file cannot hold, e.g. ``risk=MonotoneRisk(...)``; they replace the saved ones.

    Raises:
        ValueError: the file is truncated, changed, of another program or of a later version.
    """
    path = checks.path("path", path)
    body, tensors = _read(path)
    kinds = _kinds()
    if body.get("head") not in kinds:
        raise ValueError(f"{path.name!r} holds a head of unknown kind {body.get('head')!r}; known: {', '.join(sorted(kinds))}.")
    head = kinds[body["head"]].from_config(body["config"] | options)
    head.load_state_dict(tensors)
    return head


def read_notes(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What :func:`save` was given as ``notes``; empty if nothing."""
    notes: dict[str, Any] = _read(checks.path("path", path))[0].get("notes", {})
    return notes


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of a file, checked."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"no file {str(path)!r} to load a head from.")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    except (SafetensorError, OSError, ValueError, RuntimeError, OverflowError, MemoryError) as error:
        raise ValueError(f"{path.name!r} is no readable safetensors file (truncated or damaged?): {error}") from error
    if _KEY not in metadata:
        raise ValueError(f"{path.name!r} was not written by torchgmc.save: it has no head's configuration.")
    if metadata.get("checksum") != _checksum(metadata[_KEY], tensors):
        raise ValueError(f"{path.name!r} has been changed since it was saved (checksum differs); save it anew.")
    try:
        body = json.loads(metadata[_KEY])
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name!r} holds a configuration that is no JSON: {error}") from error
    if body.get("schema", 0) > SCHEMA:
        raise ValueError(
            f"{path.name!r} has file schema {body['schema']}, this version of torchgmc reads up to {SCHEMA}; upgrade torchgmc."
        )
    return body, tensors


def _checksum(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()


def _kinds() -> dict[str, type[Head]]:
    """Every head by its name: the subclasses of Head, baselines included."""
    import torchgmc.baselines  # noqa: F401  # registers its subclasses

    def below(kind: type[Head]) -> list[type[Head]]:
        return [kind, *(k for sub in kind.__subclasses__() for k in below(sub))]

    return {kind.__name__: kind for kind in below(Head)[1:]}
