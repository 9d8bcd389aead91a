"""What the command line needs to know about a head. It lives with the head: a new task is one file beside it.

A head with a :class:`Task` (the class attribute ``task``) is calibrated by ``torchgmc calibrate NAME``, and its files are
understood by ``torchgmc audit``, ``apply`` and ``export``. A head without one is used from Python.

The rest is known from the contract of :class:`~torchgmc.Head`: which argument the scores are, which one is the truth, what
``forward`` takes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class Kind(NamedTuple):
    """How the word after a flag becomes a value.

    ``metavar``: what the help shows for the word; empty for a switch, which takes none. ``read``: the value from the flag (for
    messages) and the word.
    """

    metavar: str
    read: Callable[[str, str], Any]


def _kind(metavar: str, what: str, convert: Callable[[str], Any]) -> Kind:
    def read(flag: str, word: str) -> Any:
        try:
            return convert(word)
        except ValueError:
            raise ValueError(f"{flag} must be {what}, got {word!r}.") from None

    return Kind(metavar, read)


def _numbers(word: str) -> list[float]:
    return [float(part) for part in word.split(",")]


def _pair(word: str) -> tuple[float, float]:
    low, high = _numbers(word)
    return low, high


def _json(flag: str, word: str) -> Any:
    if not Path(word).is_file():
        raise FileNotFoundError(f"{flag}: there is no file {word!r}.")
    try:
        return json.loads(Path(word).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag}: {word!r} is not JSON: {error}") from error


SWITCH = Kind("", lambda flag, word: word)
TEXT = Kind("TEXT", lambda flag, word: word)
NUMBER = _kind("NUMBER", "a number", float)
NUMBERS = _kind("NUMBER[,...]", "numbers separated by commas", lambda word: all_[0] if len(all_ := _numbers(word)) == 1 else all_)
PAIR = _kind("LOW,HIGH", "LOW,HIGH", _pair)
JSON = Kind("FILE", _json)


def whole(least: int, none: int | None = None) -> Kind:
    """A whole number; ``none`` stands for None."""

    def convert(word: str) -> int | None:
        number = int(word)
        if number < least:
            raise ValueError
        return None if number == none else number

    return _kind("INTEGER", f"a whole number of at least {least}", convert)


def choice(*words: str) -> Kind:
    """One of the words."""

    def convert(word: str) -> str:
        if word not in words:
            raise ValueError
        return word

    return _kind("|".join(words), " or ".join(words), convert)


def number_or(other: str) -> Kind:
    """A number, or a word."""
    return _kind(f"NUMBER|{other}", f"a number or {other}", lambda word: other if word == other else float(word))


@dataclass(frozen=True)
class Option:
    """A flag of ``torchgmc calibrate NAME``; if omitted, the head's default applies.

    ``argument``: of the head's constructor, unless :attr:`Task.complete` makes something else of it. ``kind``: of the word.
    ``help``: one line. ``named``: the flag, if it is not that of the argument. ``value``: what a switch stands for.
    ``required``: must it be passed?
    """

    argument: str
    kind: Kind
    help: str
    named: str = ""
    value: Any = True
    required: bool = False

    @property
    def flag(self) -> str:
        """As it is written: ``--max-size``."""
        return self.named or f"--{self.argument.replace('_', '-')}"

    def read(self, word: str | bool) -> Any:
        """The value of the argument."""
        return self.value if isinstance(word, bool) else self.kind.read(self.flag, word)


# Options that every head of this package has.
CONDITIONAL = Option("conditional", SWITCH, "Let alpha bound each group's own deviation, not weighted by its share.")
NOISE_FLOOR = Option("noise_floor", SWITCH, "Fit to alpha on the sample, noise included.", named="--no-noise-floor", value=False)
LEARN = Option(
    "learn",
    _kind("DEPTH", "a whole number", lambda word: {"depth": int(word)}),
    "Learn groups from --features, with trees of this depth.",
)
FEATURES = {"features": "Array (n, d) of numbers that groups are learned from, with --learn."}


class Reader(Protocol):
    """What a task may read to complete the arguments of a head.

    ``path``: of the file that is calibrated on. ``names``: of its arrays. ``row``: shape of the scores of one example.
    """

    @property
    def path(self) -> Path: ...
    @property
    def names(self) -> Sequence[str]: ...
    @property
    def row(self) -> tuple[int, ...]: ...

    def integers(self, name: str) -> list[int]:
        """A whole array of integers, whatever its length."""
        ...

    def texts(self, name: str) -> list[str]:
        """A whole array of text."""
        ...

    def token_ids(self, tokenizer: str, words: Mapping[str, Sequence[str]]) -> dict[str, list[int]]:
        """Lists of words as lists of token ids."""
        ...


@dataclass(frozen=True)
class Task:
    """A promise on the command line.

    Attributes:
        name: ``torchgmc calibrate NAME``.
        promise: one line, what is promised.
        example: words after ``torchgmc calibrate NAME``.
        scores: usual names of the array of scores; the first that a file has is read.
        output: name of the array that ``apply`` writes.
        written: one line, what this array holds.
        labels: usual names of the array of the truth; empty if the head takes none, not even to measure costs.
        label_kind: ``"mask"``, of the shape of the scores; ``"class"``, ids of the columns of the scores, or outcomes of one
            event; ``"tokens"``, ids of tokens.
        label_names: from the head to names that may stand in the labels instead of ids.
        options: its own flags.
        arrays: further arguments of ``observe`` that are read from the file if they are named, and a line of help for each.
        in_use: those of them that ``forward`` takes too.
        groups_required: the head needs groups.
        complete: arguments of the constructor, from those passed and from what the reader knows.
        result_names: from the head to the names of results that are ids.
    """

    name: str
    promise: str
    example: str
    scores: tuple[str, ...]
    output: str
    written: str
    labels: tuple[str, ...] = ()
    label_kind: str = ""
    label_names: Callable[[Any], Sequence[str]] | None = None
    options: tuple[Option, ...] = ()
    arrays: Mapping[str, str] = field(default_factory=dict)
    in_use: tuple[str, ...] = ()
    groups_required: bool = False
    complete: Callable[[dict[str, Any], Reader], dict[str, Any]] = lambda given, _: given
    result_names: Callable[[Any], Sequence[str]] | None = None
