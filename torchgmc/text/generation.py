"""A fitted head inside ``generate``: every next token comes from the calibrated distribution."""

import torch
from torch import Tensor

from torchgmc.engine import checks
from torchgmc.groups.columns import is_frame
from torchgmc.groups.groups import Groups, check_groups
from torchgmc.heads.distribution.head import DistributionHead
from torchgmc.text.tokens import TokenGroups

WHEN = ("prompt", "all")
#: A text goes on if so many rows agree in so many tokens at the end of its prompt: a look costs the same for any prompt.
LOOK = (8, 16)
#: Devices whose numbers are at hand: a look at them waits for nothing.
ON_HOST = ("cpu",)
#: Devices that end the program themselves when they meet NaN, so that nobody waits to look for it.
LOOKS = ("cuda",)


class GMCLogitsProcessor:
    """Calibrates the scores of each next token; greedy search, sampling and beams, any batch.

    ``model.generate(**inputs, logits_processor=[GMCLogitsProcessor(head, groups)])``. transformers calls it before its own
    temperature, top-k and top-p: the promise is about the distribution before those. Where the head changes nothing, the
    scores pass through unchanged, so the text is the same token for token.

    Args:
        head: a fitted head.
        groups: a :class:`TokenGroups` (or another module from input ids to membership), or the membership of the batch
            itself: a :class:`~torchgmc.Groups`, a frame of group columns, or ``(batch, a)``, bool.
        when: with a module, ``"prompt"`` decides the group from the prompt only, ``"all"`` again at each step from
            everything so far, including the generated text.
        prompt_length: tokens of the (padded) prompt. Detected by default: a call that is not the last one and one more token
            starts a new text (the end of the prompt is looked at, in a few rows); ``reset`` starts one explicitly. On a GPU no
            number is read for that: the groups are found at each step, and those of the prompt are kept on the device if it
            is the same. Given, no tokens are compared.
        normalized: keep the log-sum-exp of the scores, which beams need: they add up log-probabilities. False is quicker, and
            right for greedy search and sampling; it does not look for NaN among the scores either. Otherwise NaN is an error: on
            a CUDA device one that the device itself raises (a device-side assert), since a look at each token would wait for it.

    Attributes:
        membership: of the rows of the last call, ``(n, a)``: who was shifted; None before.
    """

    def __init__(
        self,
        head: DistributionHead,
        groups: TokenGroups | torch.nn.Module | Groups | Tensor,
        when: str = "prompt",
        prompt_length: int | None = None,
        normalized: bool = True,
    ) -> None:
        checks.kind("head", head, DistributionHead, "a DistributionHead")
        if not head.is_fitted:
            raise ValueError("`head` is not fitted; call `fit` or `calibrate_masked_lm`, or load its state first.")
        checks.option("when", when, WHEN)
        if isinstance(groups, Groups) or is_frame(groups):
            groups = head.members_of(groups)
        names = None if isinstance(groups, Tensor) else getattr(groups, "names", None)  # older tensors have names too
        if names is not None and list(names) != head.groups:
            raise ValueError(f"`groups` names {list(names)}, but the head was made for {head.groups}.")
        if isinstance(groups, Tensor):
            groups = check_groups(groups, len(groups) if groups.dim() else 0, head.groups)
        elif not callable(groups):
            raise TypeError(f"`groups` must be a module from ids to membership, or a membership, got {type(groups).__name__}.")
        checks.count("prompt_length", prompt_length, 1)
        self.head, self.groups, self.when, self.prompt_length = head, groups, when, prompt_length
        self.normalized = checks.flag("normalized", normalized)
        self.membership: Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """The next call starts a new text."""
        self._shape = (-1, -1)  # of the ids of the last call
        self._text: tuple[Tensor, ...] = ()  # places and tokens of the end of the prompt in a few rows, and membership

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores ``(n, vocabulary)`` of the next token of each row of ``input_ids`` ``(n, t)``, calibrated."""
        checks.ordinary("scores", scores)
        if checks.ordinary("input_ids", input_ids).dim() != 2 or len(input_ids) != len(scores):
            raise ValueError(f"`input_ids` must have shape ({len(scores)}, t), one row per row of scores, got {input_ids.shape}.")
        self.membership = self._membership(input_ids).to(scores.device)
        if not self.normalized:
            return self.head.adjust_(scores.clone(), self.membership)  # transformers may keep the scores it passed
        if scores.device.type not in LOOKS:
            return self.head.adjust(scores, self.membership)
        torch._assert_async(~scores.isnan().any(), "`scores` must not be NaN; check the model for overflow.")
        return self.head.adjusted(scores, self.head.check_member(self.membership))

    def _membership(self, input_ids: Tensor) -> Tensor:
        if isinstance(self.groups, Tensor):
            rows, times = len(input_ids), len(input_ids) // max(len(self.groups), 1)
            if rows != times * len(self.groups):
                raise ValueError(f"`groups` has {len(self.groups)} rows, but `generate` asks for {rows}; pass one row per prompt.")
            return self.groups.repeat_interleave(times, dim=0)  # beams and samples of one prompt are neighbours
        if self.when == "all":
            return self._of(input_ids)
        if self.prompt_length is not None:
            return self._of(input_ids[:, : self.prompt_length])
        (rows, length), (few, last) = input_ids.shape, LOOK
        some, on_host = torch.nn.functional.pad(input_ids[:: max(1, rows // few)], (last, 0)), input_ids.device.type in ON_HOST
        fits = self._shape == (rows, length - 1)
        old = tuple(part.to(input_ids.device) for part in self._text)
        same = some.index_select(1, old[0]) == old[1] if fits else some
        if not on_host or not fits or not same.numpy().all():
            places = torch.arange(length, length + last, device=input_ids.device)
            self._text = places, some.index_select(1, places), self._of(input_ids).to(input_ids.device)
        if fits and not on_host:  # nothing waits for the answer: the device chooses
            self._text = tuple(torch.where(same.all(), one, other) for one, other in zip(old, self._text, strict=True))
        self._shape = (rows, length)
        return self._text[2]

    def _of(self, input_ids: Tensor) -> Tensor:
        member: Tensor = self.groups(input_ids)  # type: ignore[operator]  # a module here
        return member
