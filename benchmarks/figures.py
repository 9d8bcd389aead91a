"""The two figures of the README, from a run of ``torchgmc demo fnr``: fine on average, wrong for a group; then calibrated.

    python -m benchmarks.figures                                        # runs the demonstration first, some minutes
    python -m benchmarks.figures --results torchgmc-demo/results.json   # draws those of a run of before

Writes ``average.png``, ``groups.png`` and ``fnr.json`` (the numbers that are drawn) to ``notebooks/figures``.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from torchgmc.engine.extras import find_paper

FOLDER = Path(__file__).parents[1] / "notebooks/figures"
#: What each figure shows: the file, the method of the demonstration, the title.
FIGURES = (
    ("average.png", "conformal", "One threshold for all: right on average"),
    ("groups.png", "GMC", "After calibration: right for each group"),
)


def numbers(results: dict[str, Any]) -> dict[str, Any]:
    """What is drawn, from the ``results.json`` of the demonstration: per method and group the miss rate and its interval.

    Deviations are mass-weighted there, share x (rate - target); here they are divided by the share again.
    """
    setting = results["setting"]
    drawn: dict[str, Any] = {"command": f"torchgmc demo fnr --seed {results['seed']}", "torch": results["torch"]}
    drawn |= {name: setting[name] for name in ("target", "alpha", "delta", "num_calibration", "num_test")}
    drawn["accuracy"] = {name: round(value, 4) for name, value in results["pixel_accuracy"].items()}
    drawn["groups"] = [
        {
            "group": row["group"],
            "share": round(row["mass"], 4),
            **{
                method: [round(setting["target"] + row[part][method] / row["mass"], 5) for part in ("deviation", "low", "high")]
                for method in row["risk"]
            },
        }
        for row in results["groups"]
    ]
    return drawn


def draw(drawn: dict[str, Any], method: str, title: str, limit: float) -> bytes:
    """Miss rate of every group with its interval, beside the target and what alpha allows the group; a PNG."""
    from torchgmc import plots

    rows, target, alpha = drawn["groups"], drawn["target"], drawn["alpha"]
    theme = plots.LIGHT
    figure, (axes,) = plots.new_figure(theme, (6.4, 3.9))
    axes.axvline(100 * target, color=theme.ink, lw=1, label=f"target {100 * target:g} %")
    for place, row in enumerate(rows):
        rate, low, high = (100 * value for value in row[method])
        slack = 100 * alpha / row["share"]
        inside = abs(rate - 100 * target) <= slack
        label = "allowed: alpha / share of the group" if place == 0 else None
        axes.barh(place, 2 * slack, left=100 * target - slack, height=0.7, color=theme.band, alpha=0.25, label=label)
        colour, marker = (theme.series[2], "o") if inside else (theme.series[1], "D")
        axes.plot([low, high], [place, place], color=colour, lw=2.5)
        axes.plot([rate], [place], marker, color=colour, ms=9, markeredgecolor=theme.paper)
        end = max(high, 100 * target + slack)
        axes.annotate(f"{rate:.1f}", (end, place), (6, 0), textcoords="offset points", va="center", fontsize=12)
    axes.set_yticks(range(len(rows)), [f"{row['group']} ({100 * row['share']:.0f} %)" for row in rows])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, limit)
    axes.set_xlabel("miss rate on fresh pictures, %")
    plots.set_title(figure, title, theme)
    plots.set_legend(figure, axes, theme)
    return plots.png(figure)


def write(results: dict[str, Any], folder: Path = FOLDER) -> list[Path]:
    """Both figures on one scale, and their numbers."""
    drawn = numbers(results)
    limit = 100 * max(high for row in drawn["groups"] for _, method, _ in FIGURES for high in row[method]) + 3
    folder.mkdir(parents=True, exist_ok=True)
    for name, method, title in FIGURES:
        (folder / name).write_bytes(draw(drawn, method, title, limit))
    (folder / "fnr.json").write_text(json.dumps(drawn, indent=1) + "\n", encoding="utf-8")
    return [folder / name for name in (*(name for name, _, _ in FIGURES), "fnr.json")]


def main(arguments: list[str] | None = None) -> int:
    """Run the demo unless its results are passed, then draw."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, help="results.json of `torchgmc demo fnr`; runs it if omitted")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the figures")
    parser.add_argument("--seed", type=int, default=0, help="of the demo")
    options = parser.parse_args(arguments)
    if options.results is not None:
        results = json.loads(options.results.read_text(encoding="utf-8"))
    else:
        find_paper()
        from torchgmc_paper.demo import fnr

        with tempfile.TemporaryDirectory() as scratch:
            results = fnr.run(scratch, seed=options.seed).to_dict()
    for path in write(results, options.out):
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
