"""Options that several commands share, and how lists and pairs are written on a command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["numbers", "words"]

Head = Annotated[Path, typer.Argument(help="File that `torchgmc calibrate` or gmc.save wrote.", show_default=False)]
Data = Annotated[
    Path, typer.Argument(help="Arrays with one row per example: .npz, .safetensors, .parquet or .csv.", show_default=False)
]
Scores = Annotated[str | None, typer.Option(help="Name of the array of scores.", show_default=False)]
Labels = Annotated[str | None, typer.Option(help="Name of the array of masks, labels or outcomes.", show_default=False)]
Weight = Annotated[str | None, typer.Option(help="Name of an array of weights.", show_default=False)]
Base = Annotated[str | None, typer.Option(help="For quantiles: array of starting thresholds.", show_default=False)]
Groups = Annotated[
    str | None,
    typer.Option(help="Group columns, by commas: text, integers, booleans, or a membership matrix.", show_default=False),
]
Unknown = Annotated[
    str, typer.Option(help="A value of a group column never seen: `error`, or `none`: in no group of that column.")
]
Delta = Annotated[float, typer.Option(help="1 - confidence of all intervals together.")]
Report = Annotated[Path | None, typer.Option(help="Write a page to show, .html.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]
Chunk = Annotated[
    int | None, typer.Option(min=1, help="Rows read at a time; by default about 32 MB of them.", show_default=False)
]
Most = Annotated[int, typer.Option("--rows", min=1, help="Rows of the table to print, worst first.")]


def words(text: str | None) -> list[str]:
    """``a,b`` -> ``["a", "b"]``."""
    return [] if text is None else [word.strip() for word in text.split(",") if word.strip()]


def numbers(option: str, text: str) -> list[float]:
    """``1,2.5`` -> ``[1.0, 2.5]``."""
    try:
        return [float(word) for word in words(text)]
    except ValueError:
        raise ValueError(f"{option} must be numbers with commas between, got {text!r}.") from None


def cuts(given: Sequence[str]) -> dict[str, list[float]]:
    """``["age=30,50"]`` -> ``{"age": [30.0, 50.0]}``."""
    found = {}
    for text in given:
        name, equals, edges = text.partition("=")
        if not equals or not numbers("--cut", edges):
            raise ValueError(f"--cut must be a column and its edges, as in age=30,50, got {text!r}.")
        found[name.strip()] = numbers("--cut", edges)
    return found
