"""Adapters: how to read scores from a model's output, put the head's result back, and split a loader's batch."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgmc.engine import checks
from torchgmc.heads.base import Head

ACTIVATIONS = ("auto", "none", "sigmoid", "softmax")
#: Fields of an output that hold scores, by convention: torchvision segmentation, transformers, other detectors.
FIELDS = ("out", "logits", "prediction_logits", "scores")
#: Keys under which a batch usually holds its parts.
INPUTS = ("input_ids", "pixel_values", "image", "images", "input", "inputs", "x", "img", "data")
TARGETS = ("mask", "masks", "label", "labels", "target", "targets", "y")
GROUPS = ("groups", "group", "membership")
PIXELS = ("pixel_weight",)


class Batch(NamedTuple):
    """A loader's batch, split: the model's input, the truth, who is in which group, and how much each pixel counts."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    groups: Any
    pixels: Any = None


class Adapter:
    r"""Scores out of a model's output, and the head's result back into it.

    Without options it keeps to :math:`\text{attach}(m, h)(x, g) = h(m(x), g)`: the head sees what the model returns. What is
    found automatically: the field of a dict (``"out"`` of torchvision) or of a ``ModelOutput`` (``logits``), and, where the
    head needs probabilities and the model is known to return logits (torchvision, transformers, timm,
    segmentation-models-pytorch without an activation), the sigmoid or softmax between. Nothing is guessed from values.

    Args:
        field: key or attribute of the output that holds the scores, or its position in a tuple.
        channel: take this channel (dimension 1) after the activation, e.g. the foreground of a two-class segmentation. Targets
            of an integer type are then label maps (or class ids), compared with it: ``target == channel``; masks are bool, or
            floats of 0 and 1.
        activation: ``"sigmoid"``, ``"softmax"`` (over dimension 1, the last one for 3-d logits of a language model),
            ``"none"``, or ``"auto"`` as above.
        inputs: key (or keys), or position, of the model's input in a loader's batch.
        target: key or position of the truth (masks, labels) in a batch.
        groups: key or position of the membership in a batch.
        position: which position of a language model's logits ``(n, length, vocabulary)`` is calibrated: ``"last"`` (the last
            one attended to), ``"mask"`` (needs ``mask_token_id``) or a number. Without it an attached model is calibrated at
            every position, and calibration learns from the last.
        mask_token_id: the id of the mask token; implies ``position="mask"``.
        conformity: for a :class:`~torchgmc.QuantileHead`, ``(output, target) -> scores (n,)``.
        ignore_index: the value in targets of pixels to leave out, such as 255.
        pixel_weight: how much each pixel counts (:meth:`torchgmc.ThresholdHead.observe`): a key or position in a batch, or a
            function of the target; by default the batch's ``"pixel_weight"``, if it has one.

    Override :meth:`scores`, :meth:`replace` or :meth:`split` for another kind of model or batch.
    """

    def __init__(
        self,
        field: str | int | None = None,
        channel: int | None = None,
        activation: str = "auto",
        inputs: str | int | Sequence[str] | None = None,
        target: str | int | None = None,
        groups: str | int | None = None,
        position: str | int | None = None,
        mask_token_id: int | None = None,
        conformity: Callable[[Any, Any], Tensor] | None = None,
        ignore_index: int | None = None,
        pixel_weight: str | int | Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        places = {"field": field, "target": target, "groups": groups, "position": position}
        for name, value in (places | {"pixel_weight": None if callable(pixel_weight) else pixel_weight}).items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, str | int)):
                raise TypeError(f"`{name}` must be a name or a number, got {value!r:.80}.")
        for name, number in {"channel": channel, "mask_token_id": mask_token_id, "ignore_index": ignore_index}.items():
            if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
                raise TypeError(f"`{name}` must be a whole number, got {number!r:.80}.")
        many = isinstance(inputs, Sequence) and bool(inputs) and all(isinstance(key, str) for key in inputs)
        if inputs is not None and not isinstance(inputs, str | int) and not many:
            raise TypeError(f"`inputs` must be a key, a position or a list of keys, got {inputs!r:.80}.")
        checks.kind("conformity", conformity, Callable | None, "a function of output and target")
        if isinstance(position, str):
            checks.option("position", position, ("last", "mask"))
        if position == "mask" and mask_token_id is None:
            raise ValueError("position='mask' needs `mask_token_id`, e.g. tokenizer.mask_token_id.")
        self.position = "mask" if position is None and mask_token_id is not None else position
        self.mask_token_id, self.conformity = mask_token_id, conformity
        self.binary = self.log_probs = self.own_logits = False  # of head and model; see `adapt`
        self.field, self.channel = field, channel
        self.activation = checks.option("activation", activation, ACTIVATIONS)
        self.inputs, self.target, self.groups = inputs, target, groups
        self.ignore_index, self.pixel_weight = ignore_index, pixel_weight

    def options(self) -> dict[str, Any]:
        """Arguments that make this adapter again; without functions, which no file holds."""
        names = ("field", "channel", "activation", "inputs", "target", "groups", "position", "mask_token_id", "ignore_index")
        found = {name: getattr(self, name) for name in (*names, "pixel_weight")}
        return {name: value for name, value in found.items() if value is not None and not callable(value)}

    def __repr__(self) -> str:
        set_options = {k: v for k, v in vars(self).items() if v is not None and v is not False and v != "auto"}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in set_options.items())})"

    # -- output ------------------------------------------------------------------------------------------------------

    def find(self, output: Any) -> str | int | None:
        """Field of the output that holds the scores; None if the output is the scores."""
        if isinstance(output, Tensor):
            return None
        if isinstance(self.field, int) and isinstance(output, (tuple, list)):  # torch 2.6 does not compile `tuple | list`
            if not -len(output) <= self.field < len(output):
                raise ValueError(f"the model's output has no field {self.field}; it is {_describe(output)}.")
            return self.field
        keys = list(output) if isinstance(output, Mapping) else []
        if self.field is not None:
            if self.field in keys or (not keys and hasattr(output, str(self.field))):
                return self.field
            there = f"has {_keys(keys)}" if keys else f"is {_describe(output)}"
            raise ValueError(f"the model's output has no field {self.field!r}; it {there}.")
        found = [key for key in FIELDS if key in keys]
        if not found:
            example = "0" if isinstance(output, tuple | list) else "..."
            raise TypeError(
                f"the model's output, {_describe(output)}, holds no scores under a known name ({', '.join(FIELDS)}); say which "
                f"field to calibrate with adapter=Adapter(field={example}), or override Adapter.scores."
            )
        return found[0]

    def scores(self, output: Any) -> Tensor:
        """What the head gets, shape ``(n, ...)``."""
        return self.activate(self.raw(output))

    def raw(self, output: Any) -> Tensor:
        """The field of the output that holds the scores, as it is."""
        field = self.find(output)
        if field is None:
            return output  # type: ignore[no-any-return]
        inside = isinstance(output, Mapping) or isinstance(field, int)
        return output[field] if inside else getattr(output, field)  # type: ignore[arg-type, no-any-return]  # a str there

    def activate(self, raw: Tensor) -> Tensor:
        """Activation, then channel."""
        if self.activation == "sigmoid":
            raw = raw.sigmoid()
        elif self.activation == "softmax":
            dim = -1 if raw.dim() == 3 else 1
            raw = raw.softmax(dim) if raw.shape[dim] > 1 else raw.sigmoid()  # of a single class it would be 1
        if self.channel is not None:
            if raw.dim() < 2 or not -raw.shape[1] <= self.channel < raw.shape[1]:
                raise ValueError(f"`channel` = {self.channel} is out of range for scores of shape {tuple(raw.shape)}.")
            return raw[:, self.channel]
        return one_event(raw) if self.binary and raw.dim() == 2 else raw

    def replace(self, output: Any, result: Any) -> Any:
        """The model's output with the head's result in place of the scores, its type kept.

        A tensor is replaced by the result. In a dict, tuple or dataclass it takes the place of the scores. A ``ModelOutput`` keeps
        its fields and gets the result as ``calibrated``; where the result is a distribution (log-probabilities), its
        ``logits`` are replaced by it too, so that whatever reads them (sampling, a loss) works on the calibrated one.
        """
        field = self.find(output)
        if field is None:
            return result
        sort: Any = type(output)
        field = output._fields.index(field) if hasattr(output, "_fields") and isinstance(field, str) else field
        if isinstance(field, int):
            parts = list(output)
            parts[field] = result
            return sort(*parts) if hasattr(output, "_fields") else sort(parts)  # of a named tuple, or a plain one
        if not isinstance(output, Mapping):
            if dataclasses.is_dataclass(output):
                return dataclasses.replace(output, **{field: result})  # type: ignore[type-var]  # no class
            raise TypeError(f"cannot put the result back into a {sort.__name__}; use returns='result' or override Adapter.replace.")
        rich = any(base.__name__ == "ModelOutput" for base in sort.__mro__)
        made = sort(**dict(output)) if rich else sort(output.items())
        if self.log_probs or not rich:
            made[field] = result
        if rich:
            made["calibrated"] = result
        return made

    # -- batch -------------------------------------------------------------------------------------------------------

    def split(self, batch: Any) -> Batch:
        """Split a loader's batch into the model's input, the truth and the membership.

        Accepts dicts with the usual keys (or those set in the options), and tuples ``(input, target)`` or
        ``(input, target, groups)``.
        """
        if isinstance(batch, Mapping):
            return self._split_mapping(batch)
        if isinstance(batch, Tensor):
            return Batch((batch,), {}, None, None)
        if isinstance(batch, list | tuple) and batch:
            places = (self.inputs, self.target, self.groups)
            if any(isinstance(p, str) for p in places):
                raise ValueError(f"the adapter reads keys {places}, but the batch is {_describe(batch)}; use positions instead.")
            place = [default if p is None else p for p, default in zip(places, (0, 1, 2), strict=True)]
            place.append(self.pixel_weight if isinstance(self.pixel_weight, int) else len(batch))
            parts = [batch[p] if isinstance(p, int) and p < len(batch) else None for p in place]
            if isinstance(parts[0], Mapping):
                return Batch((), dict(parts[0]), *parts[1:])
            return Batch((parts[0],), {}, *parts[1:])
        raise TypeError(f"a batch must be a dict or a tuple (input, target, groups), got {_describe(batch)}; override `split`.")

    def _split_mapping(self, batch: Mapping[str, Any]) -> Batch:
        target = _take(batch, self.target, TARGETS)
        groups = _take(batch, self.groups, GROUPS)
        pixels = _take(batch, None if callable(self.pixel_weight) else self.pixel_weight, PIXELS)
        if self.inputs is None:
            names, whole = self._usual_inputs(batch)
        elif isinstance(self.inputs, str | int):
            names, whole = [str(self.inputs)], False
        else:
            names, whole = list(self.inputs), True
        missing = [name for name in names if name not in batch]
        if missing:
            raise ValueError(f"the batch has no key {_keys(missing)}; it has {_keys(batch)}.")
        if whole:
            return Batch((), {name: batch[name] for name in names}, target, groups, pixels)
        return Batch((batch[names[0]],), {}, target, groups, pixels)

    def _usual_inputs(self, batch: Mapping[str, Any]) -> tuple[list[str], bool]:
        """Keys of the model's inputs, and whether they go in by name (a tokenizer's batch does)."""
        found = [key for key in INPUTS if key in batch]
        if not found:
            raise ValueError(
                f"no input for the model in the batch: it has the keys {_keys(batch)}, and none of the usual "
                f"{', '.join(INPUTS)}; say which with adapter=Adapter(inputs='key', target='key', groups='key')."
            )
        if found[0] != "input_ids":
            return found[:1], False
        return [key for key in ("input_ids", "attention_mask", "token_type_ids", "position_ids") if key in batch], True

    # -- calibration -------------------------------------------------------------------------------------------------

    def observation(self, head: Head, output: Any, batch: Batch) -> dict[str, Any]:
        """Arguments of ``head.observe`` for one batch."""
        if head.takes == "groups":
            if self.conformity is None:
                raise ValueError(f"a {type(head).__name__} learns from conformity scores: pass Adapter(conformity=function).")
            first = self.conformity(output, batch.target)
        else:
            first = self.at_position(self.scores(output), batch, head)
        values = {head.arguments[0]: first}
        if head.truth:
            if batch.target is None:
                raise ValueError(
                    f"the batch has no {head.truth} for a {type(head).__name__} to learn from: none under the usual keys "
                    f"({', '.join(TARGETS)}) or as second entry; say where with adapter=Adapter(target=...)."
                )
            values |= self._truth(head, output, first, batch)
        if head.needs_groups or (head.may_take_groups and batch.groups is not None):
            values[head.member_argument] = batch.groups
        return values

    def _truth(self, head: Head, output: Any, scores: Tensor, batch: Batch) -> dict[str, Any]:
        """The target as the head takes it, and the weights of its pixels."""
        target, masks = checks.tensor_of(batch.target), head.truth == "masks"
        labels = isinstance(target, Tensor) and not target.is_floating_point() and target.dtype != torch.bool
        left_out = None
        if masks and labels and target.dim() == scores.dim() and target.shape[1] == 1 < scores.shape[1]:
            target = target.squeeze(1)
        if masks and self.ignore_index is not None:
            left_out = checks.ordinary("target", target) == self.ignore_index
            target = target.masked_fill(left_out, 0)
        if labels and (self.channel is not None or (masks and target.dim() < scores.dim())):
            channels = self.raw(output).shape[1]
            if target.numel() and not 0 <= int(target.min()) <= int(target.max()) < channels:
                wrong = int(target.max()) if int(target.max()) >= channels else int(target.min())
                raise ValueError(
                    f"the target must hold class ids from 0 to {channels - 1}, one per channel of the model, but it holds "
                    f"{wrong}; if that marks what to leave out, pass Adapter(ignore_index={wrong})."
                )
            if self.channel is not None:
                target = target == self.channel % channels
        if not masks:
            return {head.truth: target}
        pixels = self.pixel_weight(batch.target) if callable(self.pixel_weight) else batch.pixels
        if left_out is not None:
            pixels = ~left_out if pixels is None else checks.numbers("pixel_weight", pixels).masked_fill(left_out, 0)
        found = {"masks": like_scores(target, scores)}
        if pixels is None or found["masks"].shape != scores.shape:  # the head says what is wrong with the masks
            return found
        pixels = checks.numbers("pixel_weight", pixels).to(scores.device)
        if pixels.dim() == scores.dim() - 1:
            pixels = pixels.unsqueeze(1)
        same = pixels.numel() == scores.numel() and len(pixels) == len(scores)
        return found | {"pixel_weight": pixels.reshape(scores.shape) if same else pixels.expand(scores.shape)}

    def collate(self, samples: Sequence[Any], multiple: int = 1) -> Any:
        """A batch of samples whose images differ in size: the ``collate_fn`` of a ``DataLoader``.

        Images are padded with 0 at the right and at the bottom, and targets with ``ignore_index``, so that what was added
        counts nothing. (The model sees the zeros; ``batch_size=1`` does without.)

        Args:
            samples: tuples or dicts, as the data set returns them.
            multiple: sizes become multiples of it, which U-Nets need.

        Example:
            >>> samples = [(torch.rand(3, 4, 6), torch.ones(4, 6).long()), (torch.rand(3, 5, 5), torch.ones(5, 5).long())]
            >>> images, labels = gmc.Adapter(channel=1, ignore_index=255).collate(samples)
            >>> images.shape, labels[1, 0]
            (torch.Size([2, 3, 5, 6]), tensor([  1,   1,   1,   1,   1, 255]))
        """
        checks.count("multiple", multiple, 1)
        kinds = {type(sample) for sample in samples} if isinstance(samples, Sequence) else set()
        if len(kinds) != 1 or not issubclass(next(iter(kinds)), Mapping | tuple | list) or len({len(one) for one in samples}) > 1:
            raise TypeError(f"`samples` must be tuples, or dicts, all alike, as a data set returns them, got {samples!r:.80}.")
        first = samples[0]
        names = list(first) if isinstance(first, Mapping) else list(range(len(first)))
        usual = next((name for name in TARGETS if name in names), None) if isinstance(first, Mapping) else 1
        target = usual if self.target is None else self.target
        columns = {name: [checks.tensor_of(sample[name]) for sample in samples] for name in names}
        spatial = max([part[0].dim() for part in columns.values() if isinstance(part[0], Tensor)], default=0) - 1
        for name, parts in columns.items():
            if not isinstance(parts[0], Tensor) or parts[0].dim() < max(spatial, 1):
                continue
            sizes = torch.tensor([part.shape for part in parts]).amax(0)
            place = parts[0].dim() - spatial
            sizes[place:] = -(-sizes[place:] // multiple) * multiple
            ragged = any(part.shape != tuple(sizes.tolist()) for part in parts)
            if ragged and name == target and self.ignore_index is None:
                raise ValueError(f"the targets differ in size: pass Adapter(ignore_index=255) for what is added to {name!r}.")
            fill = self.ignore_index if name == target and ragged else 0
            columns[name] = [_padded(part, sizes.tolist(), fill or 0) for part in parts]
        found = {name: torch.utils.data.default_collate(parts) for name, parts in columns.items()}
        return found if isinstance(first, Mapping) else list(found.values())

    def apply(
        self, head: nn.Module, scores: Tensor, member: Tensor | None, inputs: Mapping[str, Tensor], **softness: Any
    ) -> Tensor:
        """The head's result for these scores; where ``position`` says so, only at one position of a text.

        ``softness``: mode and temperature, if the head should not return its hard answer.
        """
        if not self.log_probs or self.position is None or scores.dim() != 3:
            return head(scores, **softness) if member is None else head(scores, member, **softness)  # type: ignore[no-any-return]
        if self.position == "mask":  # any number of them in a text
            here = torch.eq(inputs["input_ids"], self.mask_token_id)  # type: ignore[arg-type]  # checked in __init__
            if torch.compiler.is_compiling():  # shapes must not depend on values there
                return torch.where(here.unsqueeze(-1), head(scores, member, **softness), scores)
            rows, place = here.nonzero(as_tuple=True)
        else:
            rows, place = torch.arange(scores.shape[0], device=scores.device), self.last(scores, inputs)
        calibrated: Tensor = head(scores[rows, place], None if member is None else member[rows], **softness)
        if self.own_logits and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return scores.index_put_((rows, place), calibrated)  # a copy would cost more than the head
        return scores.index_put((rows, place), calibrated)

    def last(self, scores: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """The one position per text, int64 ``(n,)``."""
        seen = inputs.get("attention_mask")
        if isinstance(self.position, int) or seen is None:
            place = self.position if isinstance(self.position, int) else -1
            return torch.full_like(scores[:, 0, 0], place % scores.shape[1], dtype=torch.int64)
        return (seen * torch.arange(1, seen.shape[1] + 1, device=seen.device)).argmax(1)  # type: ignore[no-any-return]

    def at_position(self, scores: Tensor, batch: Batch, head: Head) -> Tensor:
        """The rows ``(n, vocabulary)`` of a language model's logits that a batch is about."""
        if head.takes != "logits" or scores.dim() != 3:
            return scores
        rows = torch.arange(len(scores), device=scores.device)
        inputs = named(batch.args, batch.kwargs)
        if self.position == "mask":
            here = torch.eq(inputs["input_ids"], self.mask_token_id)  # type: ignore[arg-type]  # checked in __init__
            if not bool(here.any(1).all()):
                raise ValueError(f"`mask_token_id` = {self.mask_token_id} does not occur in every text of the batch.")
            return scores[rows, here.to(torch.uint8).argmax(1)]
        return scores[rows, self.last(scores, inputs)]


def named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a language model by name: usually the ids come first, then the attention mask."""
    return {**dict(zip(("input_ids", "attention_mask"), args, strict=False)), **kwargs}  # torch 2.6 does not compile `|` of dicts


def beside(scores: Tensor, thresholds: Tensor) -> Tensor:
    """Thresholds ``(n,)``, or ``(n, 1)`` beside scores ``(n, 1)``: their difference would be ``(n, n)`` otherwise."""
    thresholds = thresholds.expand(scores.shape[0])
    return thresholds.unsqueeze(1) if scores.dim() == 2 and scores.shape[1] == 1 else thresholds


def _padded(part: Tensor, shape: Sequence[int], fill: int) -> Tensor:
    """The tensor at the beginning of a larger one; a mask that holds more than 0 and 1 then becomes a float."""
    part = part.float() if fill and part.dtype == torch.bool else part
    room = [more for size, own in zip(shape[::-1], part.shape[::-1], strict=True) for more in (0, size - own)]
    return nn.functional.pad(part, room, value=fill)


def like_scores(masks: Tensor, scores: Tensor) -> Tensor:
    """Masks of the shape of the scores: with the channel dimension, and one mask per class from class ids."""
    if checks.ordinary("masks", masks).shape == scores.shape:
        return masks
    if masks.dim() == scores.dim() - 1 and scores.shape[1] > 1 and not masks.is_floating_point():
        classes = torch.arange(scores.shape[1], device=masks.device).view(1, -1, *[1] * (masks.dim() - 1))
        return masks.unsqueeze(1) == classes
    return masks.reshape(scores.shape) if masks.numel() == scores.numel() and len(masks) == len(scores) else masks


def adapt(model: nn.Module, head: Head, adapter: Adapter | None) -> Adapter:
    """The adapter, completed with what is known about model and head."""
    checks.kind("adapter", adapter, Adapter | None, "an Adapter")
    made = copy.copy(adapter or Adapter())
    made.log_probs = head.takes == "logits"
    # A language model of transformers makes new logits in each call; of other modules (the identity!) that is not known.
    made.own_logits = made.activation in ("auto", "none") and type(model).__module__.split(".")[0] == "transformers"
    made.binary = head.one_event
    if made.activation == "auto":
        made.activation = _activation(model, head) if head.takes == "probs" and gives_logits(model) else "none"
    return made


def gives_logits(model: nn.Module) -> bool:
    """Is the model known (by where it comes from, never by values) to return logits?"""
    package = type(model).__module__.split(".")[0]
    if package == "segmentation_models_pytorch":
        last = getattr(model, "segmentation_head", [nn.Identity()])[-1]
        return isinstance(getattr(last, "activation", last), nn.Identity)
    return package in ("torchvision", "timm", "transformers")


def _activation(model: nn.Module, head: Head) -> str:
    if not head.exclusive:
        return "sigmoid"
    if type(model).__module__.split(".")[0] == "segmentation_models_pytorch":
        classes = model.segmentation_head[0].out_channels  # type: ignore[index, union-attr]  # its first layer is a convolution
        if classes == 1:
            return "sigmoid"
        raise ValueError(
            f"the model outputs logits for {classes} classes, but the head needs probabilities: if the classes are "
            "mutually exclusive, use adapter=Adapter(activation='softmax'), else 'sigmoid'; or fit the head on logits."
        )
    return "softmax"


def one_event(probs: Tensor) -> Tensor:
    """Probability of one event ``(n,)`` from ``(n, 1)``, or from the two classes ``(n, 2)`` of which it is the second."""
    if probs.shape[1] > 2:
        raise ValueError(f"the head was made for one event, but the model outputs {probs.shape[1]} classes; set num_classes.")
    return probs[:, -1]


def _take(batch: Mapping[str, Any], key: str | int | None, usual: tuple[str, ...]) -> Any:
    if key is None:
        return next((batch[name] for name in usual if name in batch), None)
    if key not in batch:
        raise ValueError(f"the batch has no key {key!r}; it has {_keys(batch)}.")
    return batch[key]  # type: ignore[index]  # a str by now


def _keys(keys: Iterable[Any]) -> str:
    return checks.listing(map(repr, keys))


def _describe(value: Any) -> str:
    """Type, and keys or lengths, for messages."""
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {_keys(value)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(v).__name__ for v in value[:5])})"
    return f"a {type(value).__name__}"
