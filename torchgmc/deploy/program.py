"""The calibrated model as a function of tensors, which is what every format of a file holds."""

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchgmc.deploy.adapters import beside
from torchgmc.deploy.attach import CalibratedModel, ManyHeads, heard, pooled, some
from torchgmc.engine.scripting import is_scripting
from torchgmc.heads.base import ROOM

Program = Callable[..., Any]
#: Key of the metadata inside every format.
KEY = "torchgmc.json"


class Guard(nn.Module):
    """Its input as it is, if every value may be there; raises otherwise, also in a file.

    ``what``: the input, for the message. ``low``, ``high``: where values must lie, up to rounding. ``binary``: they must be the
    one or the other.
    """

    def __init__(self, what: str, low: float, high: float, binary: bool = False) -> None:
        super().__init__()
        room = ROOM * (high - low) if math.isfinite(high - low) and not binary else 0.0
        self.low, self.high, self.binary = low - room, high + room, binary
        kind = "0 or 1" if binary else f"numbers from {low:g} to {high:g}, and never NaN"
        self.message = f"{what} must hold {kind}"

    def forward(self, x: Tensor) -> Tensor:
        fine = ((x == self.low) | (x == self.high)).all() if self.binary else ((x >= self.low) & (x <= self.high)).all()
        if is_scripting():
            if not bool(fine):
                raise ValueError(self.message)
        else:
            torch._assert_async(fine, self.message)  # an operation of the graph, which `if` would not be
        return x


class Flat(nn.Module):
    """The calibrated model with positional tensors only; groups and features, if passed, come last."""

    def __init__(self, calibrated: CalibratedModel, names: list[str], keywords: bool, grouped: bool, featured: bool) -> None:
        super().__init__()
        self.model, self.adapter, self.keywords = calibrated.model, calibrated.adapter, keywords
        self.below = Flat(self.model, names, keywords, grouped, False) if isinstance(self.model, CalibratedModel) else None
        self.columns, self.below_columns = calibrated.columns, calibrated.below_columns
        parts: Any = calibrated.parts if isinstance(calibrated, ManyHeads) else {}
        each = {name: Flat(part, names, keywords, grouped, part.needs_features) for name, part in parts.items()}
        self.parts = nn.ModuleDict(each)
        self.head = copy.deepcopy(calibrated.head)
        self.head.statistics = None  # a file holds the state, not the data
        self.head.report = None
        for name, buffer in list(self.head.named_buffers(recurse=False)):  # torch.export warns of views, e.g. transposed tables
            setattr(self.head, name, buffer.detach().clone(memory_format=torch.contiguous_format))
        self.head.variance = self.head.tail = self.head.variance.new_zeros(0)
        self.head.largest_cluster = torch.zeros_like(self.head.largest_cluster)
        self.source = None if grouped else calibrated.group_source
        self.main = names.index("input_ids") if "input_ids" in names else 0
        self.takes_member = calibrated.head.needs_groups or calibrated.head.may_take_groups or calibrated.by_class is not None
        self.grouped, self.threshold_only = grouped, calibrated.wants == "groups"
        self.featured, self.feature_source = featured, None if featured else calibrated.feature_source
        self.layer, self.layers = calibrated.layer, calibrated.layers
        self.names = [*names, *(["groups"] if grouped else []), *(["features"] if featured else [])]
        self.ending, self.by_class = calibrated.ending, calibrated.by_class
        named = ["scores", "threshold"] if self.threshold_only else ["output"]
        self.outputs: list[str] = list(self.parts) or (named if self.ending is None else [self.ending.output])
        self.guarded = False
        self.of_scores: nn.Module = nn.Identity()
        self.of_groups: nn.Module = nn.Identity()

    def guard(self) -> None:
        """Keep checks of values in the graph."""
        self.guarded = True
        for part in filter(None, (self.below, *self.parts.values())):
            part.guard()  # type: ignore[operator]
        if not self.threshold_only:  # else the head does not look at them
            self.of_scores = Guard("the scores", *self.head.input_range())
        if self.head.static or "groups" in self.head.arguments:
            self.of_groups = Guard("`groups`", 0.0, 1.0, binary=not getattr(self.head, "fractional", None))

    def forward(self, *tensors: Tensor) -> Any:
        found = {name: part.finish(*given) for name, part, given in self.read(tensors)}
        if not len(self.parts):
            return found[""]
        return {name: value[1] if isinstance(value, tuple) else value for name, value in found.items()}

    def read(self, tensors: tuple[Tensor, ...]) -> "list[tuple[str, Flat, tuple[Any, ...]]]":
        """The parts that answer, by name (the only one has none), and what each one's :meth:`finish` takes."""
        inputs, member = self.inputs(tensors), self.groups(tensors)
        raw, seen = heard(self.model, self.layers, lambda: self.raw(inputs, member))
        return [
            (name, part, (part.adapter.scores(raw), member, inputs, part.features(tensors, seen)))
            for name, part in self.each().items()
        ]

    def inputs(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the model takes."""
        return tensors[: len(tensors) - self.grouped - self.featured]

    def raw(self, inputs: tuple[Tensor, ...], member: Tensor | None) -> Any:
        """The model's output; that of a model with a head of its own is its result."""
        if self.below is None:
            return self.model(**dict(zip(self.names, inputs, strict=False))) if self.keywords else self.model(*inputs)
        below, own = self.below, some(member, self.below_columns)
        return below.finish(below.adapter.scores(below.raw(inputs, own)), own, inputs)

    def each(self) -> dict[str, "Flat"]:
        """The parts that answer, by name; the only one has none."""
        return {name: part for name, part in self.parts.items()} or {"": self}  # type: ignore[misc]

    def groups(self, tensors: tuple[Tensor, ...]) -> Tensor | None:
        """The membership: passed last, computed, or not needed."""
        if self.grouped:
            return tensors[-1 - self.featured]
        return None if self.source is None else self.source(tensors[self.main])

    def features(self, tensors: tuple[Tensor, ...], seen: Mapping[str, Any]) -> Tensor | None:
        """What a head that learns looks at: passed last, a layer's output, computed, or not needed."""
        if self.featured:
            return tensors[-1]
        if self.layer is not None:
            return pooled(seen, self.layer)
        return None if self.feature_source is None else self.feature_source(tensors[self.main])

    def finish(self, scores: Tensor, member: Tensor | None, inputs: tuple[Tensor, ...], features: Tensor | None = None) -> Any:
        """The head's result."""
        more = {} if features is None else {"features": _beside(scores, features)}
        scores = self.of_scores(scores)
        member = some(member, self.columns) if self.takes_member else None
        member = None if member is None else self.of_groups(_beside(scores, member))
        if self.ending is not None:
            if self.by_class is None:
                return self.ending(scores, self.head(member).expand(scores.shape[0]))
            return self.ending(scores, self.by_class(torch.ones_like(scores[:, :1]) if member is None else member))
        if self.threshold_only:
            return scores, beside(scores, self.head(member, **more))
        return self.adapter.apply(self.head, scores, member, dict(zip(self.names, inputs, strict=False)), **more)


def _beside(scores: Tensor, rows: Tensor) -> Tensor:
    """``rows`` as they are: joined to scores and cut off again, which stops where there are more or fewer, in every format."""
    while scores.dim() > 1:
        scores = scores[:, 0]
    return torch.cat([scores.unsqueeze(1).to(rows.dtype), rows], 1)[:, 1:]


def flatten(model: CalibratedModel, example: Any) -> tuple[Flat, tuple[Tensor, ...]]:
    """The flat model, and its example of at least two rows (a single row would be taken for a constant)."""
    inputs = () if isinstance(example, Mapping) else tuple(example) if isinstance(example, list | tuple) else (example,)
    kwargs = dict(example) if isinstance(example, Mapping) else {}
    if not inputs and not kwargs:
        raise ValueError("`example_inputs` is empty; pass the arguments of one call, e.g. (images, groups).")
    given = "groups" in kwargs or (model.group_key or "groups") in kwargs
    asked = (model.takes_groups and model.group_source is None) or (given and (model.takes_groups or model.may_take_groups))
    featured = model.needs_features
    features = kwargs.pop("features", None) if featured else None
    if featured and features is None and len(inputs) > 1:
        inputs, features = inputs[:-1], inputs[-1]
    args, kwargs, member = model.divide(inputs, None, kwargs)
    names = list(kwargs) if kwargs else _names(model.model, len(args))
    values = [*args, *kwargs.values(), *([member] if asked else []), *([features] if featured else [])]
    for name, value in zip([*names, *(["groups"] if asked else []), "features"], values, strict=False):
        if not isinstance(value, Tensor):
            raise TypeError(f"`example_inputs`: {name!r} must be a tensor to be exported, got {type(value).__name__}.")
        if value.is_complex() or value.layout != torch.strided:
            raise TypeError(f"`example_inputs`: {name!r} must be dense and real, got {value.dtype}, {value.layout}.")
    rows = {len(value) for value in values if value.dim()}
    if len(rows) != 1 or 0 in rows:
        shapes = ", ".join(str(tuple(value.shape)) for value in values)
        raise ValueError(f"`example_inputs` must all have one row per example, and at least one row, got shapes {shapes}.")
    if rows == {1}:
        values = [torch.cat([value, value]) for value in values]
    # Contiguous: torch.export takes the strides of an example, say a cut table, for a demand on all inputs.
    return Flat(model, names, bool(kwargs), asked, featured), tuple(value.detach().contiguous() for value in values)


def _names(model: nn.Module, count: int) -> list[str]:
    """Of the model's positional inputs, as it calls them; `groups` is the membership's name."""
    known = [
        p.name if p.name != "groups" else "model_groups"
        for p in inspect.signature(model.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return [known[i] if i < len(known) else f"input_{i}" for i in range(count)]


def first_line(error: Exception) -> str:
    """Enough of a compiler's error for a log."""
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
