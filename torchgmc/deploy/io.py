"""Save and load heads: safetensors with a schema, the configuration and a checksum; nothing is ever unpickled."""

import copy
import hashlib
import json
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchgmc import distributed
from torchgmc.audits.overlap import Sketch, salt_of
from torchgmc.engine import checks
from torchgmc.engine.files import write_file
from torchgmc.engine.statistics import check_layout
from torchgmc.groups.groups import Groups
from torchgmc.heads.base import Head

#: Version of the file layout. A file with a later schema raises.
SCHEMA = 1
_KEY = "torchgmc"
#: Name of the tensor of keys of the calibration data, in files saved with ``remember``.
KEYS = "calibration.keys"
#: First letters of the names of tensors of statistics; the keys of what was observed are among them.
STATISTICS = "statistics."
_OBSERVED = f"{STATISTICS}keys"


def save(
    head: Head,
    path: str | os.PathLike[str],
    notes: Mapping[str, Any] | None = None,
    remember: bool | str = False,
    groups: Groups | None = None,
    statistics: bool = False,
) -> Path:
    """Write a head's configuration and fitted state to one safetensors file.

    The file is written completely or not at all: it is written next to ``path`` and renamed. Without ``remember`` and
    ``statistics`` it reveals nothing about who was in the data.

    Args:
        head: any head.
        path: usually ``*.safetensors``.
        notes: anything else about the head, in JSON types; :func:`read_notes` returns it.
        remember: keep up to 1,024 keys of the calibration examples, so that an audit of the loaded head can warn when it meets
            them again. True scrambles them with the head's configuration: whoever has the file and an example can test whether
            it was used. A string is a secret that scrambles them instead and is not in the file; pass it to :func:`load`.
        groups: the :class:`~torchgmc.Groups` that the head was fitted with: the file then records how to compute them from
            columns (no row is stored), and ``load(path).transform(columns)`` is the membership of new rows. A loaded head
            keeps its own.
        statistics: keep what the head observed, so that ``load(path)`` can ``observe`` more, ``merge`` and ``calibrate`` as if
            it had never left memory. Most heads keep a row per example (its scores, truth, groups, weight and cluster): such a
            file is as confidential as the data, and a warning says so. Implies ``remember``. Under ``torch.distributed`` each
            rank saves its own part.

    Example:
        >>> import tempfile, pathlib
        >>> head = gmc.ThresholdHead(target=0.1, alpha=0.01).fit(torch.rand(50, 9), torch.ones(50, 9).bool())
        >>> file = gmc.save(head, pathlib.Path(tempfile.mkdtemp()) / "head.safetensors")
        >>> gmc.load(file).threshold().equal(head.threshold())
        True

        With groups that were made of columns:

        >>> groups = gmc.Groups.from_columns({"site": ["a", "b"] * 25})
        >>> head = gmc.ThresholdHead(0.1, 0.05, groups).fit(torch.rand(50, 9), torch.ones(50, 9).bool(), groups)
        >>> file = gmc.save(head, file, groups=groups)
        >>> gmc.load(file).transform({"site": ["b", "a"]})
        tensor([[False,  True],
                [ True, False]])
    """
    from safetensors.torch import save as to_bytes

    body, tensors = pack(head)
    checks.kind("notes", notes, Mapping | None, "a mapping of names to JSON values")
    if notes:
        body["notes"] = dict(notes)
    named = head.named_groups if groups is None else _check_names(head, groups)
    if named is not None:
        body["groups"] = named.to_dict()
    secret = isinstance(remember, str)
    if (remember or statistics) and head.calibrated_on is not None:
        body["keys"] = _sketch(KEYS, head.calibrated_on, _salt(body, remember), secret, tensors)
    if checks.flag("statistics", statistics):
        body["statistics"] = _statistics(head, _salt(body, remember), secret, tensors)
    text = json.dumps(body)
    return write_file(path, to_bytes(tensors, {_KEY: text, "checksum": _checksum(text, tensors)}))


def load(path: str | os.PathLike[str], secret: str | None = None, **options: Any) -> Head:
    """Read a head that :func:`save` wrote.

    Args:
        path: the file.
        secret: the secret that scrambled its keys of the calibration data; without it audits cannot warn about them.
        options: arguments that a file cannot hold, e.g. ``risk=MonotoneRisk(...)``; they replace the saved ones.

    Raises:
        ValueError: the file is truncated, changed, of another program or of a later version.
    """
    path = checks.path("path", path)
    body, tensors = _read(path)
    kept = {name: tensors.pop(name) for name in list(tensors) if name == KEYS or name.startswith(STATISTICS)}
    head = unpack(body, tensors, path.name, **options)
    try:
        if "groups" in body:
            head.named_groups = _check_names(head, Groups.from_dict(body["groups"]))
        head.calibrated_on = _read_sketch(KEYS, body.get("keys"), body, kept, secret)
        if "statistics" in body:
            _read_statistics(head, body["statistics"], kept)
            head.observed = _read_sketch(_OBSERVED, body["statistics"].get("keys"), body, kept, secret)
    except (TypeError, KeyError, AttributeError, ValueError, RuntimeError, IndexError, RecursionError, OverflowError) as error:
        raise ValueError(f"{path.name!r} holds groups, keys or statistics that cannot be used: {error}") from error
    return head


def _sketch(name: str, keys: Sketch, salt: int, secret: bool, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Keys under a salt go to the tensors; the rest is JSON."""
    kept = keys if keys.salt else keys.salted(salt)
    tensors[name] = kept.keys.cpu().clone()
    ends = {key: None if math.isinf(value) else value for key, value in (("limit", kept.limit), ("part", kept.part))}
    return ends | {"secret": secret}


def _read_sketch(name: str, known: Any, body: Any, tensors: Mapping[str, Tensor], secret: str | None) -> Sketch | None:
    if known is None or name not in tensors or (known["secret"] and secret is None):
        return None
    limit, part = (math.inf if known.get(key) is None else float(known[key]) for key in ("limit", "part"))
    keys = tensors[name]
    if keys.dim() != 1 or keys.dtype != torch.float64:
        raise ValueError(f"{name!r} must hold float64 keys, got {keys.dtype} of shape {tuple(keys.shape)}")
    return Sketch(keys, limit, _salt(body, secret if known["secret"] and secret else True), part)


def _statistics(head: Head, salt: int, secret: bool, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What the head observed: tensors, and the JSON that describes them."""
    found = head.statistics
    own: list[Tensor] = []
    if not head.keeps:
        raise TypeError(f"a {type(head).__name__} does not say in `keeps` which classes its statistics are of.")
    tree = None if found is None else distributed.pack(found, own)
    tensors |= {f"{STATISTICS}{place}": tensor.cpu().contiguous().clone() for place, tensor in enumerate(own)}
    about: dict[str, Any] = {"prepared": list(head.prepared_for), "lacks": head.lacks_statistics, "tree": tree}
    if head.observed is not None:
        about["keys"] = _sketch(_OBSERVED, head.observed, salt, secret, tensors)
    if getattr(found, "rows", 0) or getattr(found, "clusters", None) is not None:
        warnings.warn(
            f"the file holds a row of statistics for each of the {type(head).__name__}'s calibration examples (or clusters): "
            "treat it as you treat the data. Save without `statistics=True` what is deployed.",
            UserWarning,
            stacklevel=3,
        )
    return about


def _read_statistics(head: Head, about: Any, tensors: Mapping[str, Tensor]) -> None:
    """Statistics of a file, of the classes and shapes that the head keeps."""
    solver, eta, max_iter = about["prepared"]
    head.check_solver(solver, eta, max_iter)
    head.prepare(solver, eta, max_iter)
    head.lacks_statistics = checks.flag("lacks", about["lacks"])
    if about["tree"] is None:
        return
    own = [tensors[f"{STATISTICS}{place}"] for place in range(len(tensors) - (KEYS in tensors) - (_OBSERVED in tensors))]
    found = distributed.unpack(about["tree"], own, head.keeps)
    if type(found) not in head.keeps:
        raise TypeError(f"statistics of another kind, {type(found).__name__}")
    check_layout(found, head.sizes())
    head.statistics = found.packed() if hasattr(found, "packed") else found  # files of version 0.1 hold a byte a group


def _check_names(head: Head, groups: Groups) -> Groups:
    """The groups, if they are those of the head."""
    checks.kind("groups", groups, Groups, "Groups, made by `Groups.from_columns`")
    if list(groups.names) != head.groups:
        own, got = (checks.listing(names, 4) for names in (head.groups, groups.names))
        raise ValueError(f"`groups` must be the head's groups, {own}, got {got}.")
    return groups


def _salt(body: Mapping[str, Any], remember: bool | str) -> int:
    own = json.dumps([body["head"], body["config"]], sort_keys=True)
    return salt_of(remember if isinstance(remember, str) else own)


def pack(head: Head) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a file stores about a head: a description in JSON types, and tensors on the CPU."""
    checks.kind("head", head, Head, "a torchgmc head")
    head = copy.copy(head)  # another thread may fit it meanwhile, or observe
    head.check_state()
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in head.state_dict().items()}
    about = {"schema": SCHEMA, "ordered": True, "head": head.kind(), "config": head.config(), "fitted": bool(head.is_fitted)}
    return about, tensors


def unpack(body: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str, **options: Any) -> Head:
    """The head that :func:`pack` described.

    ``body``, ``tensors``: of :func:`pack`. ``source``: where they come from, for messages. ``options``: as for :func:`load`.
    """
    if not isinstance(body, Mapping) or not isinstance(body.get("config"), Mapping) or not isinstance(body.get("schema"), int):
        raise ValueError(f"{source!r} holds no description of a head: `schema`, `head` and `config` are needed.")
    check_schema(repr(source), body["schema"])
    kind = _class_of(body.get("head"), source)
    if "ordered" not in body and len(body["config"].get("attributes") or ()) > 1:
        warnings.warn(
            f"{source!r} was written by a version that put word lists into alphabetical order: if they were not, the head's "
            "lists are exchanged. Check its `attributes`, or fit it again.",
            UserWarning,
            stacklevel=3,
        )
    try:
        for name, buffer in kind.sized.items():  # before anything so large is made
            size, there = body["config"].get(name), tensors[buffer].numel() if buffer in tensors else 0
            if isinstance(size, int | float) and size > there + 1:
                raise ValueError(f"{name} = {size!r}, but {buffer!r} has {there} numbers")
        head = kind.from_config(body["config"] | options)
        head.load_state_dict(dict(tensors))
    except Exception as error:  # a crafted configuration can fail anywhere
        raise ValueError(f"{source!r} does not hold a usable {kind.__name__}: {error}") from error
    return head


def check_schema(source: str, schema: int) -> None:
    """Raise for a file of a later version."""
    if schema > SCHEMA:
        raise ValueError(f"{source} has file schema {schema}, but this version of torchgmc reads up to {SCHEMA}; upgrade torchgmc.")


def read_notes(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The ``notes`` passed to :func:`save`; empty if there were none."""
    body = _read(checks.path("path", path))[0]
    notes = body.get("notes", {}) if isinstance(body, dict) else {}
    return notes if isinstance(notes, dict) else {}


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of a file, checked."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"no file {str(path)!r} to load a head from.")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            # Copies: what is mapped from a file ends with it, if another process writes over it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # not a dict
    except (SafetensorError, OSError, ValueError, RuntimeError, OverflowError, MemoryError) as error:
        raise ValueError(f"{path.name!r} is not a readable safetensors file (truncated or damaged?): {error}") from error
    if _KEY not in metadata:
        raise ValueError(f"{path.name!r} was not written by torchgmc.save: it has no head configuration.")
    if metadata.get("checksum") != _checksum(metadata[_KEY], tensors):
        raise ValueError(f"{path.name!r} has changed since it was saved (checksum differs); save it again.")
    try:
        body = json.loads(metadata[_KEY])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name!r} holds a configuration that is not valid JSON: {error}") from error
    return body, tensors


def _checksum(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()


def known_heads() -> dict[str, type[Head]]:
    """Every class of heads by what files call it: those of this package, and the user's that have been imported."""
    import torchgmc.baselines
    import torchgmc.heads  # noqa: F401  # both register their classes

    def below(one: type[Head]) -> list[type[Head]]:
        return [one, *(k for sub in one.__subclasses__() for k in below(sub))]

    found: dict[str, type[Head]] = {}
    for one in below(Head)[1:]:
        kind = one.kind()
        # torch.export leaves subclasses behind that have the name and module of the class they stand for.
        if one.observe is not Head.observe and not (kind in found and issubclass(one, found[kind])):
            found[kind] = one
    return found


def _class_of(kind: Any, source: str) -> type[Head]:
    """The class that a file names. Nothing is imported for it."""
    known = known_heads()
    if isinstance(kind, str) and kind in known:
        return known[kind]
    own = [one for name, one in known.items() if ":" in name and one.__name__ == kind]  # a file of version 0.1
    if len(own) == 1:
        return own[0]
    hint = f"import {kind.partition(':')[0]} first" if isinstance(kind, str) and ":" in kind else "import its module first"
    raise ValueError(f"{source!r} holds a head of unknown kind {kind!r}; {hint}. Known: {', '.join(sorted(known))}.")
