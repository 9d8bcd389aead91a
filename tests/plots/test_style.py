"""The look of all figures: readable on a slide, in both themes, with any name."""

from typing import Any

import pytest
import torch

import torchgmc as gmc
from gmctest.figures import texts, ticks, tree_head
from gmctest.heads_zoo import ENTRIES, GROUPS, LISTS, prompts
from torchgmc import plots
from torchgmc.plots.style import DARK, LIGHT, safe

pytestmark = pytest.mark.usefixtures("no_pyplot")
to_hex = pytest.importorskip("matplotlib.colors").to_hex


def every_figure(dark: bool) -> dict[str, Any]:
    threshold = ENTRIES["threshold"].fitted()
    audit = threshold.audit(*ENTRIES["threshold"].data(80, 1).observe)
    logits, member = prompts(60, 0).observe
    words = gmc.DistributionHead(LISTS, 0.002, GROUPS).fit(logits, member)
    mask = torch.ones(2, 8, 8, dtype=torch.bool)
    return {
        "deviation": plots.deviation({"a": audit, "b": audit}, title="T", dark=dark),
        "thresholds": plots.thresholds(threshold, title="T", dark=dark),
        "tree": plots.tree(*tree_head(200)[:2], title="T", dark=dark),
        "words": plots.words(words, logits, member, title="T", dark=dark),
        "tradeoff": plots.tradeoff({"x": [(0.1, 1.0), (0.01, 2.0)]}, (0.2, 0.5), title="T", dark=dark),
        "convergence": plots.convergence(threshold, title="T", dark=dark),
        "masks": plots.masks(torch.rand(2, 3, 8, 8), mask, {"x": mask}, captions=["a", "b"], title="T", dark=dark),
    }


@pytest.mark.parametrize("dark", [False, True])
def test_every_figure_is_readable_on_a_slide_in_both_themes(dark: bool) -> None:
    theme = DARK if dark else LIGHT
    for name, figure in every_figure(dark).items():
        assert to_hex(figure.get_facecolor()).upper() == theme.paper, name
        for text in texts(figure):
            assert text.get_fontsize() >= 12, (name, text.get_text())
            assert to_hex(text.get_color()).upper() == theme.ink, (name, text.get_text())
            box = text.get_window_extent()
            inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1
            assert inside, (name, text.get_text())


def test_names_that_matplotlib_would_read_otherwise() -> None:
    assert safe("$a$") == r"\$a\$" and safe("_hidden") == " _hidden"
    table: dict[str, list[Any]] = {
        "group": ["income $20 to $50", "_x"],
        "what": ["", ""],
        "mass": [0.5, 0.001],
        "count": [1, 1],
        "risk": [0.1, 0.1],
        "estimate": [0.0, 0.1],
        "low": [-0.1, 0.0],
        "high": [0.1, 0.2],
        "verdict": ["undecided"] * 2,
    }
    audit = gmc.Audit(table, 0.01, 0.05, False, 10)
    figure = plots.deviation({"_head $1$": audit})
    assert plots.png(figure, dpi=40).startswith(b"\x89PNG")
    assert [t.get_text() for t in figure.legends[0].get_texts()][1].strip() == r"_head \$1\$"
    assert ticks(figure.axes[0])[1].endswith("(<1 %)")
