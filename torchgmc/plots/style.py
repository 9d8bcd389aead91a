"""Colours, sizes and the small parts that every figure shares."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING

from torchgmc.engine import checks
from torchgmc.engine.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
MARKERS = ("o", "s", "D", "^", "v", "P")
#: Points; the smallest text of any figure, readable from the back of a room at 10 x 5.6 inches.
SMALL = 12.0


@dataclass(frozen=True)
class Theme:
    """Colours of a page; ``series`` are Okabe-Ito colours that stand out on it."""

    paper: str
    ink: str
    faint: str
    band: str
    series: tuple[str, ...]


LIGHT = Theme("#FFFFFF", "#1F2430", "#D9DDE5", GREEN, (ORANGE, VERMILLION, BLUE, PURPLE, GREEN, SKY))
DARK = Theme("#14171F", "#E8EAF0", "#3A4152", GREEN, (ORANGE, VERMILLION, SKY, PURPLE, GREEN, YELLOW))


def new_figure(theme: Theme, size: tuple[float, float], rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure in the theme's colours, and its axes row by row."""
    figure: Figure = require("matplotlib.figure", extra="report").Figure(figsize=size, layout="constrained", facecolor=theme.paper)
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    # Notebooks show only the name of a figure made without pyplot, unless it can draw itself.
    figure._repr_png_ = partial(png, figure, dpi=80)  # type: ignore[attr-defined]
    panels: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).ravel())
    for axes in panels:
        axes.set(facecolor=theme.paper, axisbelow=True)
        axes.tick_params(which="both", colors=theme.ink, labelsize=13)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set(color=theme.ink, fontsize=13)
        for name, spine in axes.spines.items():
            spine.set(color=theme.ink, visible=name == "bottom")
    return figure, panels


def set_title(figure: Figure, text: str | None, theme: Theme) -> None:
    """The figure's title, if there is one."""
    if text is not None and checks.text("title", text):
        figure.suptitle(safe(text), fontsize=17, color=theme.ink, fontweight="bold")


def set_legend(figure: Figure, axes: Axes, theme: Theme) -> None:
    """Every labelled series, below the axes."""
    handles, names = axes.get_legend_handles_labels()
    wide = max((len(name) for name in names), default=0)
    columns = max(1, min(len(names), 4, 100 // max(wide + 6, 1)))
    rows = -(-len(names) // columns)
    wide = max(1, -(-len(names) // max(rows, 1)))  # rows of equal length
    figure.legend(handles, names, loc="outside lower center", ncols=wide, frameon=False, fontsize=13, labelcolor=theme.ink)


def finished(figure: Figure, axes: Axes, theme: Theme, title: str | None, grid: str = "both") -> Figure:
    """The figure with a grid, its title and its legend."""
    axes.grid(axis=grid, color=theme.faint, lw=0.8)  # type: ignore[arg-type]  # matplotlib lists the words
    set_title(figure, title, theme)
    set_legend(figure, axes, theme)
    return figure


def png(figure: Figure, *, dpi: int = 144) -> bytes:
    """The figure as a PNG file in memory."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor=figure.get_facecolor())
    return buffer.getvalue()


def safe(text: str) -> str:
    """Text that matplotlib shows as it is: dollar signs start no formula, a leading underscore hides no series."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def shorten(text: str, length: int = 38) -> str:
    """A name that leaves room for the figure."""
    return text if len(text) <= length else f"{text[: length - 1].rstrip()}\N{HORIZONTAL ELLIPSIS}"


def folded(text: str, length: int = 30) -> str:
    """A long name on several lines, whole unless there are more than six."""
    return "\n".join(textwrap.wrap(shorten(text, 6 * length - 12), length)) or text


def signed(value: float, _: int | None = None) -> str:
    """A tick's label; rounding never gives -0."""
    return f"{value:+.3g}".replace("-", "\N{MINUS SIGN}") if abs(value) > 1e-12 else "0"


def share(value: float) -> str:
    """0.123 -> 12 %; only 0 is shown as 0 %."""
    return "<1 %" if 0 < value < 0.005 else f"{100 * value:.0f} %"


def spread(values: Sequence[float], room: float = 0.08) -> tuple[float, float]:
    """Limits of an axis with some margin around the values."""
    low, high = min(values), max(values)
    air = room * max(high - low, 1e-3 * max(abs(low), abs(high), 1e-9))
    return low - air, high + air
