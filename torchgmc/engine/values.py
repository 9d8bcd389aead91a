"""Values of a mapping s on a batch, who they count for, and what each test function is called."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Names(NamedTuple):
    """Names of the test functions g = 1_A v of a head: its sets A (rows of every table) and its directions v (columns).

    Example:
        >>> Names(["dark", "light"], ["class 0", "class 1"]).label(1, 0)
        "group 'light', class 0"
    """

    who: list[str]
    what: list[str]

    def label(self, who: int, what: int) -> str:
        """The g in row ``who`` and column ``what``, for messages."""
        return f"group {self.who[who]!r}" + (f", {self.what[what]}" if self.what[what] else "")

    def all(self) -> list[str]:
        """Every g in the order of a flattened table, for logs and files."""
        return [f"{who} / {what}" if what else who for who in self.who for what in self.what]


@dataclass(frozen=True)
class Values:
    """What a head's promise is about, on one batch; ``s, who = head.values(...)`` takes the first two.

    The violation of the g in row A and column k is the mean of ``who[:, A] * s[:, k]`` over the examples.

    ``s``: values of the mapping, ``(n, u)``; NaN where an example has none. ``who``: membership in each set, ``(n, a)``.
    ``column``: with level sets, the column in which each example counts, int64 ``(n, C)``; s is 0 in the others. ``inside``:
    where the columns are soft sets themselves, their soft membership ``(n, u)``; its mean is their mass. ``mean``: what was
    subtracted from s, ``(u,)``, where s is a deviation from everybody's mean. Batches add up as ``s + mean``.
    """

    s: Tensor
    who: Tensor
    column: Tensor | None = None
    inside: Tensor | None = None
    mean: Tensor | None = None

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.s, self.who))
