"""From a trained model and a fitted head to one module."""

import functools
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchgmc.deploy.adapters import Adapter, adapt, beside, named
from torchgmc.engine import checks, soft
from torchgmc.groups.columns import is_frame
from torchgmc.groups.groups import Groups
from torchgmc.heads.base import Head


def attach(
    model: nn.Module,
    head: Head | Sequence[Head] | Mapping[str, Head],
    groups: str | nn.Module | Callable[..., Tensor] | None = None,
    adapter: Any = None,
    mode: str = "hard",
    temperature: float = 0.1,
    features: str | nn.Module | Callable[..., Tensor] | Mapping[str, Any] | None = None,
    returns: str = "output",
) -> "CalibratedModel":
    """Attach a head to a trained model, or several.

    Args:
        model: any module whose output is scores: a tensor, a dict with ``"out"`` (torchvision segmentation), a transformers
            ``ModelOutput``, a LightningModule's output. A model that already has a head may get another: the new
            head sees the result of the first, and both get the groups.
        head: a head, fitted, or to be fitted on this model's output. Several, as a list or by name, see the output of one pass
            of the model; the result is a dict from their names ("threshold", "probability", ... of a list) to their results.
        groups: where the membership ``(n, a)`` comes from at a call:

            - None: an argument, the last positional one or ``groups=`` (for a :class:`~torchgmc.GMCHead` whose sets depend on f
              only ``groups=``: what its ``who`` looks at);
            - a str: the key of a batch, ``model(**batch)`` or ``model(batch)``;
            - a module or function: computed from the model's own (first) input, e.g. ``TokenGroups`` or a classifier.
        adapter: how to read scores from the output and put the result back; automatic for the models above. Of several heads
            one for all, or one each (a list, or by name).
        mode: what the head returns: ``"hard"`` (its answer), ``"soft"`` or ``"straight_through"`` (see its ``forward``),
            through which the model can be trained. :meth:`CalibratedModel.soften` changes it later. Files hold ``"hard"``.
        temperature: of the soft modes.
        features: for a head made with ``learn``: the name of a layer of the model (as in ``named_modules()``), whose output in
            the same pass they are, averaged over all but its first two dimensions; or a module or function that computes them
            from the model's own (first) input (for a model of tables the input itself, ``features=lambda x: x``); None: the
            argument ``features=`` of each call (the last of ``example_inputs`` when it is exported). To fit the head,
            :meth:`CalibratedModel.scores_and_features` gives what it sees. Of several heads one for all that learn, or by name.
        returns: ``"output"``, the model's own type of output with the head's result in it, or ``"result"``, only the result: a
            tensor, as exported files return it. (Several heads return a dict of results, here and in files.)

    Returns:
        A module with the head's result in the model's own type of output: the mask of a
        :class:`~torchgmc.ThresholdHead`, calibrated probabilities or log-probabilities, node ids of a tree;
        for a :class:`~torchgmc.QuantileHead`, which does not change the output, the pair (output, threshold), ``(n, 1)`` for
        an output ``(n, 1)`` (among several heads the threshold).
        Several heads may have different groups: the membership then has a column for each name, in the order of first mention
        (``model.reader.groups``).

    Example:
        >>> unet = torch.nn.Sequential(torch.nn.Conv2d(3, 1, 3, padding=1), torch.nn.Sigmoid())
        >>> images, masks = torch.rand(20, 3, 8, 8), torch.rand(20, 1, 8, 8) < 0.5
        >>> groups = torch.arange(20)[:, None] % 2 == torch.arange(2)
        >>> head = gmc.ThresholdHead(target=0.1, alpha=0.02, groups=["even", "odd"])
        >>> head = head.fit(unet(images).detach(), masks, groups)
        >>> model = attach(unet, head)
        >>> model(images, groups).equal(head(unet(images), groups))
        True

        Train through the thresholds: the calibrated mask itself, with a derivative.

        >>> loss = torch.nn.functional.binary_cross_entropy(model.soften("soft")(images, groups), masks.float())
        >>> loss.backward()
        >>> bool(unet[0].weight.grad.abs().sum() > 0)
        True
    """
    checks.kind("model", model, nn.Module, "an nn.Module")
    checks.option("returns", returns, ("output", "result"))
    several = isinstance(head, Sequence | Mapping) and not isinstance(head, str)
    for one in (head.values() if isinstance(head, Mapping) else head) if several else [head]:  # type: ignore[union-attr]
        checks.kind("head", one, Head, "a torchgmc head, or several in a list")
    if groups is not None and not isinstance(groups, str) and not callable(groups):
        raise TypeError(
            f"`groups` must be None (passed at each call), a batch key, or a module that computes the membership from "
            f"the input, got {type(groups).__name__}; pass a fixed membership when you call the model."
        )
    if several:
        return ManyHeads(model, *_named(model, head, adapter), groups, features).soften(mode, temperature)
    assert isinstance(head, Head)
    made = CalibratedModel(model, head, groups, adapt(model, head, adapter), features)
    made.returns = returns
    return made.soften(mode, temperature)


def _named(model: nn.Module, heads: Any, adapter: Any) -> tuple[dict[str, Head], dict[str, Adapter]]:
    """Heads and adapters by name."""
    if not len(heads):
        raise ValueError("`head` must be a head, or at least one in a list, got none.")
    if isinstance(heads, Mapping):
        named = {checks.text("head", name): one for name, one in heads.items()}
    else:
        kinds = [type(one).__name__.removesuffix("Head").lower() for one in heads]
        named = {kind + (f"_{kinds[:k].count(kind) + 1}" if kind in kinds[:k] else ""): heads[k] for k, kind in enumerate(kinds)}
    if isinstance(adapter, Sequence):
        adapter = dict(zip(named, adapter, strict=False)) if len(adapter) == len(named) else {}
    if isinstance(adapter, Mapping) and set(adapter) != set(named):
        raise ValueError(f"`adapter` must be one Adapter, or one for each of {', '.join(map(repr, named))}.")
    return named, {
        name: adapt(model, one, adapter[name] if isinstance(adapter, Mapping) else adapter) for name, one in named.items()
    }


class Readers:
    """Groups of several heads: a membership has a column for each name, in the order of first mention."""

    groups: list[str]
    grouped: bool

    def __init__(self, heads: "Sequence[Head | Readers]") -> None:
        self.heads = [head for head in heads if head.grouped]
        self.groups = list(dict.fromkeys(name for head in self.heads for name in head.groups))
        self.num_groups, self.grouped = len(self.groups), bool(self.heads)

    def columns(self, head: "Head | Readers") -> list[int] | None:
        """Places of a head's groups among all; None for all of them in order."""
        return None if not head.grouped or head.groups == self.groups else [self.groups.index(name) for name in head.groups]

    def members_of(self, groups: Any) -> Tensor:
        """From Groups that have all names, or from columns by the Groups that each head was made with."""
        if isinstance(groups, Groups):
            lost = [name for name in self.groups if name not in groups.names]
            if lost:
                names = checks.listing(map(repr, lost), 4)
                raise ValueError(f"`groups` lacks {names}; the heads need {checks.listing(self.groups, 8)}.")
            return groups.membership[:, [groups.names.index(name) for name in self.groups]]
        found = {name: who for head in self.heads for name, who in zip(head.groups, head.members_of(groups).T, strict=True)}
        return torch.stack([found[name] for name in self.groups], 1)


class CalibratedModel(nn.Module):
    """A model with a head attached; made by :func:`attach`. Trains, moves, saves and compiles like any module.

    Attributes:
        model, head: the parts; ``group_source``: the module that computes the membership, or None.
        mode, temperature: what the head returns, see :meth:`soften`.
    """

    reader: Any  # a head, or Readers

    def __init__(self, model: nn.Module, head: Head, groups: Any, adapter: Adapter, features: Any = None) -> None:
        super().__init__()
        self.model, self.head, self.adapter = model, head, adapter
        self.__dict__["reader"] = head  # whose groups a call passes
        self.ending: Any = None  # from scores and thresholds to an answer, and thresholds by class: see torchgmc.deploy.sets
        self.by_class: Any = None
        self.group_key = groups if isinstance(groups, str) else None
        self.group_source = groups if callable(groups) else None
        self.takes_groups, self.may_take_groups = head.needs_groups, head.may_take_groups
        self.takes_features = bool(getattr(head, "learns", False))
        if features is not None and (not self.takes_features or not (callable(features) or isinstance(features, str))):
            why = "be a module or function of the model's input" if self.takes_features else "come with a head made with `learn`"
            raise TypeError(f"`features` must {why}, got {type(features).__name__}; a layer of the model is given by its name.")
        self.layer = features if isinstance(features, str) else None
        layers = [name for name, _ in model.named_modules() if name]
        if self.layer is not None and self.layer not in layers:
            raise ValueError(f"`features` must name a layer of the model, got {features!r}; it has {checks.listing(layers, 8)}.")
        self.feature_source, self.layers = None if self.layer else features, [self.layer] if self.layer else []
        if isinstance(model, CalibratedModel) and model.takes_features:
            raise TypeError("a head made with `learn` needs features, which a head after it does not pass on; attach it last.")
        self.columns: list[int] | None = None  # of the membership that the head takes
        self.below_columns: list[int] | None = None
        self.below = isinstance(model, CalibratedModel) and model.takes_groups and model.group_source is None
        if isinstance(model, CalibratedModel) and self.below:
            self.__dict__["reader"] = reader = Readers([model.reader, head] if head.needs_groups else [model.reader])
            self.columns, self.below_columns = reader.columns(head), reader.columns(model.reader)
            self.takes_groups = True
        self.wants, self.returns = head.takes, "output"
        self.mode, self.temperature = "hard", 0.1
        self._looked = False  # at the range of the first scores

    def soften(self, mode: str = "straight_through", temperature: float = 0.1) -> "CalibratedModel":
        """From now on, return the head's result in this mode; returns the model. ``soften("hard")`` goes back.

        The mode does not follow ``train()`` and ``eval()``, and is not part of the state: an exported file always returns the
        hard answer. To cool the model down, call it again with a lower temperature.

        Args:
            mode: ``"hard"``, ``"soft"`` or ``"straight_through"``, see the head's ``forward``.
            temperature: width of a soft step, in the units of the scores.
        """
        soft.check(mode, temperature)
        self.mode, self.temperature = mode, temperature
        return self

    def forward(self, *inputs: Any, groups: Any = None, **kwargs: Any) -> Any:
        """The model's output, calibrated."""
        output, (result,) = self.answers([self], inputs, groups, kwargs)
        return result if self.returns == "result" else self.adapter.replace(output, result)

    def answers(self, parts: Iterable[Any], inputs: tuple[Any, ...], groups: Any, kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
        """The model's output, from one pass, and the result of each part's head."""
        args, kwargs, member = self.divide(inputs, groups, kwargs)
        given = kwargs.pop("features", None) if self.takes_features else None
        output, seen = heard(self.model, self.layers, lambda: self.run(args, kwargs, member))
        texts = named(args, kwargs)
        return output, [part.apply_head(output, member, texts, part.features(args, kwargs, given, seen)) for part in parts]

    @property
    def needs_features(self) -> bool:
        """Whether a call must pass them."""
        return self.takes_features and self.feature_source is None and self.layer is None

    def features(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any, seen: Mapping[str, Any]) -> Any:
        """What a head made with ``learn`` looks at: passed, a layer's output, or computed from the model's input."""
        if given is not None or not self.takes_features or self.needs_features:
            return given
        return pooled(seen, self.layer) if self.layer is not None else self.feature_source(first_input(args, kwargs))  # type: ignore[misc]

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], member: Tensor | None) -> Any:
        """The model's output; a model with a head of its own gets its groups too."""
        if not self.below:
            return self.model(*args, **kwargs)
        return self.model(*args, groups=some(member, self.below_columns), **kwargs)

    def scores(self, *inputs: Any, **kwargs: Any) -> Tensor:
        """What the head sees of the model's output for these inputs (without groups)."""
        return self.adapter.scores(self.model(*inputs, **kwargs))

    def scores_and_features(self, *inputs: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """What the head sees of these inputs (without groups), from one pass: to fit a head that learns from a layer."""
        if self.needs_features or not self.takes_features:
            raise ValueError("this model has no source of features; attach the head with features='layer name' or a function.")
        with torch.no_grad():
            scores, seen = heard(self.model, self.layers, lambda: self.scores(*inputs, **kwargs))
            return scores, self.features(inputs, kwargs, None, seen)

    def apply_head(self, output: Any, member: Tensor | None, inputs: Mapping[str, Any], features: Any = None) -> Any:
        """The head's result for a model's output."""
        more = {} if self.mode == "hard" else {"mode": self.mode, "temperature": self.temperature}  # own heads may lack both
        more |= {"features": features} if self.takes_features else {}
        member = some(member, self.columns) if self.head.needs_groups or self.head.may_take_groups else None
        scores = self.adapter.scores(output)
        self._look(scores)
        member = self.placed(member, scores)
        if self.wants == "groups":
            return scores, beside(scores, self.head(member, **more))
        return self.adapter.apply(self.head, scores, member, inputs, **more)

    def placed(self, member: Tensor | None, scores: Tensor) -> Tensor | None:
        """A membership where the scores are; an error if it does not have one row for each of them."""
        if member is None:
            return None
        if member.dim() == 0 or member.shape[0] != scores.shape[0]:
            raise ValueError(
                f"`groups` has {member.shape[0] if member.dim() else 'no'} rows, but the model returned scores for "
                f"{scores.shape[0]} examples (shape {tuple(scores.shape)}); pass one row per example."
            )
        if member.device.type == "meta" and scores.device.type != "meta":
            raise ValueError("`groups` is on the meta device, where tensors have no values; move it to a real one.")
        return member.to(scores.device)

    def divide(
        self, inputs: tuple[Any, ...], groups: Any, kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Tensor | None]:
        """Inputs of the model, and the membership, from the arguments of a call."""
        kwargs = dict(kwargs)
        batch = inputs[0] if len(inputs) == 1 else None
        if isinstance(batch, Mapping):  # model(batch)
            inputs, kwargs = (), {**batch, **kwargs}
        if not self.takes_groups and not self.may_take_groups:
            return inputs, kwargs, None
        key = self.group_key or "groups"
        if groups is None and key in kwargs:
            groups = kwargs.pop(key)
        elif groups is None and self.group_source is not None:
            groups = self.group_source(first_input(inputs, kwargs))
        elif groups is None and self.group_key is None and len(inputs) > 1 and self.takes_groups:
            inputs, groups = inputs[:-1], inputs[-1]
        if groups is None and not self.takes_groups:
            return inputs, kwargs, None
        if groups is None:
            raise ValueError(self._missing(inputs, kwargs))
        member = checks.tensor_of(self.reader.members_of(groups) if isinstance(groups, Groups) or is_frame(groups) else groups)
        if not isinstance(member, Tensor):
            raise TypeError(f"`groups` must be a membership tensor of shape (n, {self.reader.num_groups}), got {_shape(member)}.")
        fractional = getattr(self.head, "fractional", None)
        if self.group_source is not None and self.takes_groups and member.is_floating_point() and not fractional:
            kind = f"got {member.dtype}; threshold its scores"
            raise TypeError(f"the module that computes groups must return a bool membership, {kind}.")
        return inputs, kwargs, member

    def _missing(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        given = [_shape(value) for value in inputs] + [f"{name}={_shape(value)}" for name, value in kwargs.items()]
        names = self.reader.groups
        return (
            f"`groups` is missing: the head needs a membership of shape (n, {len(names)}) for the groups "
            f"{checks.listing(names, 4)}. Pass it as the last positional argument or as `groups=`"
            + (f" (or under the batch key {self.group_key!r}, which this model was attached with)" if self.group_key else "")
            + "; or attach with groups='key' to read it from a batch, or with groups=module to compute it from the input. "
            f"This call passed: {'; '.join(given) or 'nothing'}."
        )

    def _look(self, scores: Tensor) -> None:
        """Once, in eager mode: are these the probabilities the head needs? (If not, raise; never guess at logits.)"""
        if self._looked or self.wants != "probs" or torch.compiler.is_compiling() or torch._C._is_tracing():
            return
        low, high = (float(v) for v in scores.detach().aminmax()) if scores.numel() else (0.0, 1.0)
        if low < -1e-3 or high > 1.0 + 1e-3:
            raise ValueError(
                f"the head needs probabilities in [0, 1], but the model returned {low:.4g} to {high:.4g}: if these are logits, "
                "attach with adapter=Adapter(activation='sigmoid') or 'softmax', or fit a head with logits=True on them."
            )
        self._looked = True

    def heads(self) -> dict[str, Head]:
        """By name; the only one has none."""
        return {"": self.head}

    def export(
        self,
        path: str | os.PathLike[str],
        format: str = "torchscript",
        example_inputs: tuple[Any, ...] | dict[str, Any] = (),
        checks: bool = False,
    ) -> Path:
        """Write model and head to one file that runs without torchgmc; see :func:`torchgmc.export.export`."""
        from torchgmc.export import export

        return export(self, path, format, example_inputs, checks)

    def extra_repr(self) -> str:
        """Where groups come from, and the adapter."""
        source = "an argument" if self.takes_groups else "nowhere (none needed)"
        if self.group_key:
            source = f"batch key {self.group_key!r}"
        elif self.group_source is not None:
            source = type(self.group_source).__name__
        softness = "" if self.mode == "hard" else f", mode={self.mode!r}, temperature={self.temperature:g}"
        return f"groups from {source}, {self.adapter}{softness}"


class ManyHeads(CalibratedModel):
    """Several heads behind one pass of a model; made by :func:`attach`. Its result is a dict from names to results.

    Attributes:
        parts: a :class:`CalibratedModel` per name, which share the model.
        reader: ``reader.groups`` are the names of the columns of a membership.
    """

    def __init__(
        self, model: nn.Module, heads: Mapping[str, Head], adapters: Mapping[str, Adapter], groups: Any, features: Any = None
    ) -> None:
        if any("." in name or not name.isidentifier() for name in heads):
            raise ValueError(f"names of heads must be words, as they name outputs, got {', '.join(map(repr, heads))}.")
        first = next(iter(heads))
        learning = [name for name, one in heads.items() if getattr(one, "learns", False)]
        if features is not None and (not learning or (isinstance(features, Mapping) and not set(features) <= set(learning))):
            raise TypeError(f"`features` must be for heads made with `learn`, which are {', '.join(learning) or 'none'}.")
        sources = features if isinstance(features, Mapping) else dict.fromkeys(learning, features)
        super().__init__(model, heads[first], groups, adapters[first])
        self.parts = nn.ModuleDict(
            {name: CalibratedModel(model, one, None, adapters[name], sources.get(name)) for name, one in heads.items()}
        )
        self.takes_features = bool(learning)
        self.layers = list({part.layer for part in self.parts.values() if part.layer is not None})  # type: ignore[misc]
        below = [model.reader] if isinstance(model, CalibratedModel) and self.below else []
        self.__dict__["reader"] = reader = Readers([*below, *heads.values()])
        self.takes_groups, self.may_take_groups = reader.grouped, any(one.may_take_groups for one in heads.values())
        self.below_columns = reader.columns(below[0]) if below else None
        for name, part in self.parts.items():
            part.__dict__["columns"] = reader.columns(heads[name])

    def soften(self, mode: str = "straight_through", temperature: float = 0.1) -> "ManyHeads":
        """See :meth:`CalibratedModel.soften`; of all heads."""
        super().soften(mode, temperature)
        for part in self.parts.values():
            part.soften(mode, temperature)  # type: ignore[operator]
        return self

    @property
    def needs_features(self) -> bool:
        """Whether a call must pass them: some head looks at them, and nothing computes them."""
        return any(part.needs_features for part in self.parts.values())

    def heads(self) -> dict[str, Head]:
        """By name."""
        return {name: part.head for name, part in self.parts.items()}  # type: ignore[misc]

    def forward(self, *inputs: Any, groups: Any = None, **kwargs: Any) -> dict[str, Any]:
        """The result of every head, by name."""
        _, found = self.answers(self.parts.values(), inputs, groups, kwargs)
        return {name: one[1] if isinstance(one, tuple) else one for name, one in zip(self.parts, found, strict=True)}


def heard(model: nn.Module, layers: Sequence[str], work: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """What ``work``, a pass of the model in this thread, returns, and what these layers of it (last) return, by name."""
    if not layers:
        return work(), {}
    seen: dict[str, Any] = {}
    thread = threading.get_ident()

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if threading.get_ident() == thread:  # other threads may run the same model, and look for themselves
            seen[name] = output

    handles = [model.get_submodule(name).register_forward_hook(functools.partial(look, name)) for name in layers]
    try:
        return work(), seen
    finally:
        for handle in handles:
            handle.remove()


def pooled(seen: Mapping[str, Any], layer: str) -> Tensor:
    """A layer's output as features ``(n, d)``: averaged over all but its first two dimensions."""
    found = seen.get(layer)
    if not isinstance(found, Tensor) or found.dim() < 2:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(f"the layer {layer!r} of `features` must return a tensor (n, d, ...), got {got}; name another.")
    return found.flatten(2).mean(2) if found.dim() > 2 else found


def some(member: Tensor | None, columns: list[int] | None) -> Tensor | None:
    """Columns of a membership."""
    return member if member is None or columns is None else member[:, columns]


def first_input(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model's main input."""
    return inputs[0] if inputs else kwargs.get("input_ids", next(iter(kwargs.values()), None))


def _shape(value: Any) -> str:
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}" if isinstance(value, Tensor) else type(value).__name__
