"""Options that several commands share, and functions that take them in bundles.

A command is a function; a parameter whose type is a dataclass stands for the options that are its fields (:func:`command`).
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

Parameter = inspect.Parameter


def told(help: str, metavar: str | None, *flags: str, **more: Any) -> Any:
    """What typer is told about an option."""
    return typer.Option(*flags, metavar=metavar, help=help, **more)


# The same, for the sections of the help that commands share.
_ARRAYS, _GROUPS, _FIT, _AUDIT, _OUTPUT = (
    partial(told, rich_help_panel=title) for title in ("Arrays", "Groups", "Fit", "Audit", "Output")
)

Head = Annotated[Path, typer.Argument(help="File that `torchgmc calibrate` or gmc.save wrote.")]
Data = Annotated[Path, typer.Argument(help="Arrays with one row per example: .npz, .safetensors, .parquet or .csv.")]
Alpha = Annotated[
    float | None,
    told("Largest violation allowed: a group's share times its deviation; if omitted, what the sample can tell.", "NUMBER"),
]
GroupColumns = Annotated[str | None, _GROUPS("Group columns: text, integers, booleans, or a membership matrix.", "NAME[,...]")]
Unknown = Annotated[str, _GROUPS("Unseen group values: stop, or leave such rows out of the column's groups.", "error|none")]
Delta = Annotated[float, _AUDIT("1 minus the joint confidence of all intervals.", "NUMBER")]
Conditional = Annotated[
    bool | None,
    told("Judge each group's own deviation, or the deviation weighted by its share.", None, "--conditional/--mass-weighted"),
]
Report = Annotated[Path | None, _AUDIT("Write a report, .html.", "FILE")]
ClusterSize = Annotated[
    float | None, _AUDIT("Largest number of rows of a cluster; by default that of the calibration data.", "NUMBER")
]
Chunk = Annotated[int | None, _ARRAYS("Rows read at a time; by default about 32 MB.", "INTEGER", min=1)]
Json = Annotated[bool, _OUTPUT("Print only JSON on stdout.", None, "--json")]


@dataclass(frozen=True)
class Showing:
    """What is printed."""

    most: Annotated[int, _OUTPUT("Rows of the table to print, worst first.", "INTEGER", "--rows", min=1)] = 20
    as_json: Json = False


@dataclass(frozen=True)
class Grouping:
    """How groups are made from columns; see :meth:`torchgmc.Groups.from_columns`."""

    groups: GroupColumns = None
    group_names: Annotated[str | None, _GROUPS("Names of the columns of a membership matrix.", "NAME[,...]")] = None
    intersections: Annotated[int, _GROUPS("Largest number of columns a group may combine.", "INTEGER", min=1)] = 1
    cut: Annotated[list[str] | None, _GROUPS("Bins of a column of numbers: age=30,50. Repeatable.", "NAME=EDGES")] = None
    min_size: Annotated[int, _GROUPS("Smallest number of rows in a group.", "INTEGER", min=1)] = 1
    small: Annotated[str, _GROUPS("How to treat groups smaller than --min-size.", "error|drop|merge")] = "error"
    missing: Annotated[str, _GROUPS("Missing values: stop, or make them a group.", "error|level")] = "error"
    overall: Annotated[bool, _GROUPS("Add a group of everyone.", None, "--overall")] = False


@dataclass(frozen=True)
class Steps:
    """Options of :meth:`torchgmc.Head.fit_batches`."""

    solver: Annotated[str, _FIT("paper and fresh are the paper's Algorithms 1 and 2.", "exact|paper|fresh")] = "exact"
    eta: Annotated[float | None, _FIT("Fixed step of paper and fresh.", "NUMBER")] = None
    max_iter: Annotated[int | None, _FIT("Maximum number of steps.", "INTEGER", min=1)] = None


@dataclass(frozen=True)
class Solving(Steps):
    """And what to do about a fit that does not reach alpha."""

    strict: Annotated[bool, _FIT("Exit code 1 if the fit does not reach alpha.", None, "--strict")] = False


@dataclass(frozen=True)
class HoldingOut:
    """Rows that are held out and audited."""

    holdout: Annotated[float, _AUDIT("Share of the rows held out for the audit.", "NUMBER")] = 0.0
    seed: Annotated[int, _AUDIT("Random seed for the rows held out.", "INTEGER", min=0)] = 0
    delta: Delta = 0.05
    report: Report = None
    remember: Annotated[
        bool, _AUDIT("Store keys of the calibration rows, so that a later audit can warn if it reuses them.", None, "--remember")
    ] = False


def option(name: str, flag: str, help: str, metavar: str = "TEXT", required: bool = False, section: str | None = None) -> Parameter:
    """A parameter of a command; one without a metavar is a switch, and is None if omitted."""
    kind: Any = str if metavar else bool
    note: Any = Annotated[kind if required else kind | None, told(help, metavar or None, flag, rich_help_panel=section)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=Parameter.empty if required else None, annotation=note)


def arrays(roles: Mapping[str, str]) -> list[Parameter]:
    """Options that name arrays of the data file: from what they are for to a line of help."""
    return [option(role, f"--{role.replace('_', '-')}", text, "NAME", section="Arrays") for role, text in roles.items()]


def command(function: Callable[..., None], own: Iterable[Parameter] = (), **fixed: Any) -> Callable[..., None]:
    """The function as typer reads it.

    ``function``: a parameter that is a dataclass stands for its fields; the one named ``own``, for options made at run time, of
    which it gets a dictionary. ``own``: these options; one that a field is named after replaces it. ``fixed``: arguments that
    are not options.
    """
    hints = get_type_hints(function, include_extras=True)
    kinds: dict[str, type[Any]] = {name: hint for name, hint in hints.items() if is_dataclass(hint) and isinstance(hint, type)}
    bundles = {name: [field.name for field in fields(kind)] for name, kind in kinds.items()}
    more = {parameter.name: parameter for parameter in own}
    shared = {name: more.pop(name) for name in list(more) if any(name in members for members in bundles.values())}
    flat: list[Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "own":
            flat += more.values()
        elif parameter.name in kinds:
            kind = kinds[parameter.name]
            notes = get_type_hints(kind, include_extras=True)
            members = [Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=notes[f.name]) for f in fields(kind)]
            flat += [shared.get(member.name, member) for member in members]
        elif parameter.name not in fixed:
            flat.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[parameter.name]))
    if "own" in hints:
        bundles["own"] = list(more)

    def run(**given: Any) -> None:
        for bundle, members in bundles.items():
            values = {name: given.pop(name) for name in members}
            given[bundle] = kinds[bundle](**values) if bundle in kinds else values
        function(**given, **fixed)

    run.__doc__ = function.__doc__
    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    return run


class Command(TyperCommand):
    """A command whose help has a section for each kind of option."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, options of the task, and then those that tasks share."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            title = "Arguments" if parameter.param_type_name == "argument" else "Options"
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def words(text: str | None) -> list[str]:
    """``a,b`` -> ``["a", "b"]``."""
    return [] if text is None else [word.strip() for word in text.split(",") if word.strip()]


def cuts(given: Sequence[str]) -> dict[str, list[float]]:
    """``["age=30,50"]`` -> ``{"age": [30.0, 50.0]}``."""
    found = {}
    for text in given:
        name, _, edges = text.partition("=")
        try:
            found[name.strip()] = [float(word) for word in words(edges)]
        except ValueError:
            edges = ""
        if not words(edges):
            raise ValueError(f"--cut must be a column and its edges, as in age=30,50, got {text!r}.")
    return found
