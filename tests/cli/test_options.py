"""Functions that take options in bundles."""

import inspect
from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from torchgmc.cli import apply, audit, calibrate, export, options
from torchgmc.cli.options import told
from torchgmc_paper import commands


@dataclass(frozen=True)
class Bundle:
    size: Annotated[int, told("How large.", "INTEGER")] = 3
    name: Annotated[str | None, told("How called.", "TEXT")] = None


def test_a_bundle_stands_for_its_options() -> None:
    seen: list[Any] = []

    def function(kind: str, data: str, own: dict[str, Any], bundle: Bundle, more: bool = False) -> None:
        seen.append((kind, data, own, bundle, more))

    own = [options.option("width", "--width", "", "NUMBER"), options.option("name", "--name", "", required=True)]
    made = options.command(function, own, kind="fixed")
    assert list(inspect.signature(made).parameters) == ["data", "width", "size", "name", "more"]
    assert inspect.signature(made).parameters["name"].default is inspect.Parameter.empty  # not that of the bundle
    made(data="d", width="1", size=4, name="n", more=True)
    assert seen == [("fixed", "d", {"width": "1"}, Bundle(4, "n"), True)]


def test_lists_and_pairs() -> None:
    assert options.words(" a, b,,c ") == ["a", "b", "c"] and options.words(None) == []
    assert options.cuts(["age=30,50", "bmi = 25"]) == {"age": [30.0, 50.0], "bmi": [25.0]}
    for wrong in ("age", "age=", "age=x"):
        with pytest.raises(ValueError, match=f"as in age=30,50, got '{wrong}'"):
            options.cuts([wrong])


def test_no_function_takes_a_dozen_options() -> None:
    for module in (apply, audit, calibrate, commands, export, options):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__:
                assert len(inspect.signature(function).parameters) <= 12, name
