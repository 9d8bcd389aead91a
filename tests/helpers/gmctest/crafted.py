"""Files of heads with a right checksum whose content is wrong in one place: what somebody who knows the format could send."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from torchgmc.deploy import io
from torchgmc.heads.state import ABOUT

Tensors = dict[str, Tensor]
Place = tuple[str, ...]

#: In place of an option of the configuration, or of another part of the description.
VALUES: dict[str, Any] = {
    "null": None,
    "-1": -1,
    "0": 0,
    "1e7": 10_000_000,
    "1e8": 1e8,
    "1e300": 1e300,
    "10**30": 10**30,
    "NaN": math.nan,
    "text": "x",
    "a surrogate": "\ud800",
    "a long text": "x" * 100_000,
    "a list": [],
    "lists": [[[]]],
    "numbers": [1, 2, 3],
    "names": ["a", "b"],
    "names twice": ["a", "a", "a"],
    "an object": {},
    "a deep object": json.loads('{"a":' * 900 + "1" + "}" * 900),
    "true": True,
    "0.5": 0.5,
}
#: In place of a tensor.
TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "empty": lambda x: x.new_zeros(0),
    "a number": lambda x: x.new_zeros(()),
    "one row more": lambda x: torch.cat([x, x[:1]]) if x.dim() else x[None],
    "a column more": lambda x: torch.cat([x, x[..., :1]], -1) if x.dim() else x[None],
    "a dimension more": lambda x: x[None],
    "long": lambda x: x.new_zeros(100_000),
    "float16": lambda x: x.half(),
    "int8": lambda x: x.to(torch.int8),
    "bool": lambda x: x.bool(),
    "NaN": lambda x: torch.full(x.shape, math.nan, dtype=torch.float64),
    "inf": lambda x: torch.full(x.shape, math.inf, dtype=torch.float64),
    "huge": lambda x: x.new_full(x.shape, 1e308) if x.dtype == torch.float64 else x,
    "-1": lambda x: x.new_full(x.shape, -1) if x.dtype not in (torch.bool, torch.uint8) else x,
    "large": lambda x: x.new_full(x.shape, 10**9) if x.dtype in (torch.int64, torch.float64) else x,
    "bytes": lambda x: torch.arange(32, 64, dtype=torch.uint8),
}


class Crafted(NamedTuple):
    """A file, and what is wrong with it."""

    name: str
    data: bytes


def to_file(body: Any, tensors: Tensors) -> bytes:
    """The bytes that `gmc.save` would write for this content."""
    text = json.dumps(body)
    return save(tensors, {"torchgmc": text, "checksum": io._checksum(text, tensors)})


def crafted(path: Path) -> Iterator[Crafted]:
    """Every part, option and tensor of a head's file, replaced by each wrong value; left out; one too many."""
    body, tensors = io._read(path)
    plain = {name: value for name, value in tensors.items() if name != ABOUT}  # it would disagree with the configuration
    places: list[Place] = [(key,) for key in {**body, "groups": 0, "keys": 0, "notes": 0}]
    places += [(part, key) for part in ("config", "notes", "groups", "statistics") for key in body.get(part) or ()]
    tree = body.get("statistics", {}).get("tree")
    places += (
        [("statistics", "tree", *rest) for rest in (("class",), *(("fields", name) for name in tree["fields"]))] if tree else []
    )
    for place in places:
        for kind, value in VALUES.items():
            yield Crafted(f"{'.'.join(place)} = {kind}", to_file(_changed(body, place, [value]), plain))
        yield Crafted(f"{'.'.join(place)} left out", to_file(_changed(body, place, []), plain))
    yield Crafted("an option too many", to_file(_changed(body, ("config", "surprise"), [1]), plain))
    for wrong in (None, [], "x", 1, [body]):
        yield Crafted(f"description {wrong!r:.20}", to_file(wrong, tensors))
    for name, value in tensors.items():
        for kind, change in TENSORS.items():
            yield Crafted(f"{name}: {kind}", to_file(body, tensors | {name: change(value).contiguous()}))
        yield Crafted(f"{name} left out", to_file(body, {key: one for key, one in tensors.items() if key != name}))
    yield Crafted("a tensor too many", to_file(body, tensors | {"surprise": torch.zeros(3)}))
    keys = {"limit": "x", "secret": 3}
    yield Crafted("keys of another type", to_file(body | {"keys": keys}, tensors | {io.KEYS: torch.zeros(2)}))


def _changed(body: dict[str, Any], place: Place, value: list[Any]) -> dict[str, Any]:
    """The description with another value at a place, or with none."""
    key, *below = place
    kept = {name: part for name, part in body.items() if name != key}
    if below:
        return kept | {key: _changed(body[key], tuple(below), value)}
    return kept | ({key: value[0]} if value else {})
