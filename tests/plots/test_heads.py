"""Figures of heads: the numbers read back from the axes are those of a plain recount."""

import math
import sys
from typing import Any

import pytest
import torch
from matplotlib.colors import to_hex

import torchgmc as gmc
from gmctest.heads_zoo import GROUPS, LISTS, ZOO, documents, events, prompts

pytest.importorskip("matplotlib")
from torchgmc import plots
from torchgmc.heads.distribution.plot import mean_probabilities, token_names
from torchgmc.heads.tree.plot import node_coverage
from torchgmc.plots.style import DARK, LIGHT, safe

ENTRIES = {entry.name: entry for entry in ZOO}
SHELVES = {"x": {"x1": ["x1a", "x1b"], "x2": None}, "y": ["y1", "y2", "y3"]}


@pytest.fixture(autouse=True)
def no_pyplot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)


def ticks(axes: Any) -> list[str]:
    return [tick.get_text() for tick in axes.get_yticklabels()]


def texts(figure: Any) -> list[Any]:
    from matplotlib.text import Text

    figure.draw_without_rendering()
    axis = [a for axes in figure.axes for a in (axes.xaxis, axes.yaxis)]
    ticks = {t for a in axis for which in (a.majorTicks, a.minorTicks) for tick in which for t in (tick.label1, tick.label2)}
    drawn = {tick.label1 for a in axis for tick in a._update_ticks()}  # ticks beyond the limits exist and are not drawn
    found = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and (t not in ticks or t in drawn)]
    return [t for t in found if t.axes is None or t.axes.get_visible()]


# -- thresholds ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["threshold", "threshold-exact", "conformal", "quantile", "quantile-bins"])
def test_thresholds_are_those_of_the_head_by_combination(name: str) -> None:
    entry = ENTRIES[name]
    head: Any = entry.fitted()
    member = entry.data(80, 0).observe[-1]
    counts: dict[tuple[bool, ...], int] = {}
    for row in member.tolist():
        counts[tuple(row)] = counts.get(tuple(row), 0) + 1
    axes = plots.thresholds(head).axes[0]
    shown = dict(zip(ticks(axes), axes.lines[0].get_xdata().tolist(), strict=True))
    assert len(shown) == len(counts)
    find = head.threshold if hasattr(head, "threshold") else head
    for row, count in counts.items():
        label = " + ".join(g for g, inside in zip(GROUPS, row, strict=True) if inside and g != "a") or "a"  # all are in "a"
        value = float(find(torch.tensor([row]))[0])
        assert shown[f"{label}  ({100 * count / 80:.0f} %)"] == pytest.approx(value)
    assert sorted(counts.values(), reverse=True) == [
        counts[(True, *(g in tick.split("  ")[0].split(" + ") for g in GROUPS[1:]))] for tick in ticks(axes)
    ]


def test_thresholds_of_given_examples_of_a_loaded_head_and_of_several() -> None:
    entry = ENTRIES["threshold"]
    head: Any = entry.fitted()
    groups = torch.tensor([[True, True, False]] * 3 + [[True, False, False]])
    axes = plots.thresholds(head, groups).axes[0]
    assert ticks(axes) == ["b  (75 %)", "a  (25 %)"]
    assert ticks(plots.thresholds(head, groups, top=1).axes[0]) == ["a + b  (75 %)"]
    assert "1 rarer" in plots.thresholds(head, groups, top=1).axes[0].get_xlabel()
    fresh = gmc.ThresholdHead(0.1, 0.02, GROUPS)
    fresh.load_state_dict(head.state_dict())
    assert ticks(plots.thresholds(fresh).axes[0]) == GROUPS  # no examples known: each group by itself
    figure = plots.thresholds({"one": head, "two": fresh}, groups)
    assert [line.get_label() for line in figure.axes[0].lines] == ["one", "two"]
    assert figure.axes[0].lines[0].get_xdata().tolist() == figure.axes[0].lines[1].get_xdata().tolist()


def test_thresholds_of_classes_have_a_row_each() -> None:
    head: Any = ENTRIES["threshold-classes"].fitted()
    groups = torch.tensor([[True, False, False]])
    axes = plots.thresholds(head, groups).axes[0]
    assert ticks(axes) == ["a / class 0  (100 %)", "a / class 1  (100 %)"]
    assert axes.lines[0].get_xdata().tolist() == pytest.approx(head.threshold(groups)[0].tolist())


def test_an_infinite_threshold_is_named() -> None:
    head = gmc.QuantileHead(0.9, 0.05).fit(torch.rand(50))
    head.base.fill_(math.inf)
    assert "∞" in [t.get_text() for t in plots.thresholds(head).axes[0].texts]


def test_thresholds_of_another_head_are_refused() -> None:
    with pytest.raises(TypeError, match="ThresholdHead or a QuantileHead, got ProbabilityHead"):
        plots.thresholds(gmc.ProbabilityHead(0.1))
    with pytest.raises(ValueError, match="at least one head"):
        plots.thresholds({})


# -- tree ----------------------------------------------------------------------------------------------------------------------


def tree_head(n: int = 400) -> tuple[gmc.TreeHead, gmc.Audit, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(6, (n,), generator=g)
    probs = (torch.randn(n, 6, generator=g) + 2 * torch.nn.functional.one_hot(labels, 6)).softmax(1)
    head = gmc.TreeHead(SHELVES, 0.9, 0.02).fit(probs, labels)
    return head, head.audit(probs, labels), head(probs), labels


@pytest.mark.parametrize("below", [True, False])
def test_the_coverage_of_nodes_is_a_plain_recount(below: bool) -> None:
    head, audit, nodes, labels = tree_head()
    mass, coverage = node_coverage(head.tree, audit, below)
    for v in range(head.num_nodes):
        family = head.tree.below(v) if below else [v]
        right = [y in head.tree.below(o) for o, y in zip(nodes.tolist(), labels.tolist(), strict=True) if o in family]
        assert float(mass[v]) == pytest.approx(len(right) / len(nodes))
        if right:
            assert float(coverage[v]) == pytest.approx(sum(right) / len(right))
        else:
            assert math.isnan(coverage[v])


@pytest.mark.parametrize("dark", [False, True])
def test_the_tree_shows_coverage_share_and_promises(dark: bool) -> None:
    head, audit, _, _ = tree_head()
    figure = plots.tree(head, audit, dark=dark, title="Title")
    mass, coverage = node_coverage(head.tree, audit)
    axes = figure.axes[0]
    shown = {t.get_text().split("  ")[0]: t.get_text() for t in axes.texts}
    assert set(shown) == {"all" if name == "root" else name for name in head.tree.names}
    used = [v for v in range(head.num_nodes) if mass[v] > 0]
    for v in used:
        name = "all" if v == head.tree.root else head.tree.names[v]
        assert f"{100 * float(coverage[v]):.1f} %" in shown[name]
    points = axes.collections[0]
    assert points.get_array().tolist() == pytest.approx([float(coverage[v]) - 0.9 for v in used])
    sizes = points.get_sizes()
    assert sizes[used.index(head.tree.root)] == max(sizes)  # with all below it, the root has every answer
    assert [x for x, _ in points.get_offsets().tolist()] == [float(head.tree.depths[v]) for v in used]
    figure.draw_without_rendering()
    box = figure.bbox
    for t in texts(figure):
        extent = t.get_window_extent()
        assert extent.x0 >= box.x0 - 1 and extent.x1 <= box.x1 + 1, t.get_text()
    bar = figure.axes[1].get_window_extent()
    assert max(t.get_window_extent().x1 for t in axes.texts) <= bar.x0


def test_thick_edges_mark_promises_beyond_alpha() -> None:
    head, audit, _, _ = tree_head()
    strict = audit.view("mass-weighted", alpha=1e-9)
    mass, _ = node_coverage(head.tree, audit)
    used = [v for v in range(head.num_nodes) if mass[v] > 0]
    wide = plots.tree(head, strict).axes[0].collections[0].get_linewidths()
    beyond = {r["group"] for r in strict.rows() if abs(r["estimate"]) > 1e-9}
    names = {v: "all" if v == head.tree.root else head.tree.names[v] for v in used}
    assert {names[v] for v, w in zip(used, wide, strict=True) if w > 1} == beyond & set(names.values())
    assert max(plots.tree(head, audit.view("mass-weighted", alpha=1.0)).axes[0].collections[0].get_linewidths()) < 1


def test_large_and_deep_trees_fold() -> None:
    g = torch.Generator().manual_seed(0)

    def shown(shape: Any, leaves: int, **options: Any) -> tuple[list[str], str]:
        labels = torch.randint(leaves, (300,), generator=g)
        probs = (torch.randn(300, leaves, generator=g) + 3 * torch.nn.functional.one_hot(labels, leaves)).softmax(1)
        head = gmc.TreeHead(shape, 0.8, 0.1).fit(probs, labels, max_iter=3)
        figure = plots.tree(head, head.audit(probs, labels), **options)
        return [t.get_text().split("  ")[0] for t in figure.axes[0].texts], figure._supxlabel.get_text()

    wos = {f"P{i}": [f"{i}.{j}" for j in range(19)] for i in range(7)}
    names, caption = shown(wos, 133)
    assert sorted(names) == sorted(["all", *(f"P{i} (19 leaves)" for i in range(7))]) and "folded" in caption
    names, caption = shown({f"P{i}": [f"{i}a", f"{i}b"] for i in range(40)}, 80, rows=5)
    assert len(names) == 6 and "35 rarer" in caption
    deep: Any = ["leaf a", "leaf b"]
    for k in range(8):
        deep = {f"level {8 - k}": deep, f"side {8 - k}": None}
    names, caption = shown(deep, 10)
    assert "level 4 (6 leaves)" in names and "level 5" not in " ".join(names)


def test_a_tree_wants_its_own_audit() -> None:
    head, _, _, _ = tree_head()
    other = ENTRIES["quantile"]
    audit = other.fitted().audit(*other.data(50, 1).observe)
    with pytest.raises(ValueError, match="an audit of this head"):
        plots.tree(head, audit)
    with pytest.raises(TypeError, match="TreeHead, got QuantileHead"):
        plots.tree(other.fitted(), audit)  # type: ignore[arg-type]


def test_audits_in_batches_count_the_same_answers() -> None:
    probs, labels = documents(90, 3).observe
    head = ENTRIES["tree"].fitted()
    whole, parts = head.audit(probs, labels), gmc.audit(head, zip(probs.split(32), labels.split(32), strict=True))
    for key in ("answered", "covered"):
        torch.testing.assert_close(whole.details[key], parts.details[key])


# -- words ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", ["kl", "euclidean"])
def test_words_moved_most_are_a_plain_recount(geometry: str) -> None:
    logits, member = prompts(120, 0).observe
    head = gmc.DistributionHead(LISTS, 0.002, GROUPS, geometry=geometry, temperature=1.3).fit(logits, member)
    before, after = torch.softmax(logits / 1.3, 1), head(logits, member).exp()
    means = [[p[member[:, k]].mean(0) for k in range(3)] for p in (before, after)]
    moved = torch.stack([(b - a).abs() for b, a in zip(*means, strict=True)]).amax(0)
    figure = plots.words(head, logits, member, [f"w{i}" for i in range(20)], top=4)
    order = [int(name[1:]) for name in ticks(figure.axes[0])]  # words outside all lists may tie
    assert moved[order].tolist() == pytest.approx(moved.sort(descending=True).values[:4].tolist(), abs=1e-6)
    for k, axes in enumerate(figure.axes):
        assert axes.get_title() == GROUPS[k]
        for line, p in zip(axes.lines, means, strict=True):
            assert line.get_xdata().tolist() == pytest.approx(p[k][order].tolist(), abs=1e-6)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["before", "after"]


def test_words_in_blocks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, member = prompts(60, 0).observe
    head = gmc.DistributionHead(LISTS, 0.002, GROUPS).fit(logits, member)
    whole = mean_probabilities(head, logits, member)
    monkeypatch.setattr("torchgmc.plots.vocabulary.CHUNK", 7 * 20)
    for a, b in zip(whole, mean_probabilities(head, logits, member), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_names_of_tokens() -> None:
    class Tokenizer:
        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [["Ġdoctor", "▁nurse", "##s", "Ġ"][i] for i in ids]

    assert token_names(Tokenizer(), [0, 1, 2, 3]) == ["doctor", "nurse", "##s", "Ġ"]
    assert token_names({1: "one"}, [1, 2]) == ["one", "token 2"] and token_names(None, [7]) == ["token 7"]
    with pytest.raises(ValueError, match="has 1 names, but token 3"):
        token_names(["a"], [3])
    with pytest.raises(TypeError, match="a tokenizer, a sequence or a mapping"):
        token_names("abc", [0])


def test_words_of_an_empty_group_are_refused() -> None:
    logits, member = prompts(60, 0).observe
    head = gmc.DistributionHead(LISTS, 0.002, GROUPS).fit(logits, member)
    with pytest.raises(ValueError, match="group 'b' has no prompts"):
        plots.words(head, logits, member & torch.tensor([True, False, True]))


# -- trade-off, convergence ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, cost",
    [
        ("threshold", "accuracy after"),
        ("tree", "mean set size"),
        ("distribution", "mean KL"),
        ("probability-bins", "Brier score after"),
    ],
)
def test_tradeoff_of_a_sweep(name: str, cost: str) -> None:
    entry = ENTRIES[name]
    fresh = entry.data(60, 1).observe
    audits = [gmc.audit(head, fresh) for head in gmc.func.sweep(entry.fitted(60), [0.2, 0.01])]
    axes = plots.tradeoff({"GMC": audits}, start=audits[0]).axes[0]
    assert axes.get_ylabel().split(" (")[0] == cost.removesuffix(" after")
    assert axes.lines[0].get_xdata().tolist() == [a.max_violation for a in audits]
    assert axes.lines[0].get_ydata().tolist() == [a.cost[cost] for a in audits]
    assert axes.lines[1].get_ydata().tolist() == [audits[0].cost[cost]]


def test_what_a_tradeoff_refuses() -> None:
    known = events(50, 0).observe
    audits = [gmc.audit(gmc.ProbabilityHead(0.1, GROUPS).fit(*known), known)]
    with pytest.raises(ValueError, match=r"`cost` must be one of 'Brier score before'.*got 'price'"):
        plots.tradeoff(audits, cost="price")
    with pytest.raises(ValueError, match="at least one method"):
        plots.tradeoff({})


def test_a_violation_of_zero_has_a_linear_axis() -> None:
    assert plots.tradeoff({"x": [(0.0, 1.0), (0.1, 2.0)]}).axes[0].get_xscale() == "linear"


def test_convergence_of_heads_and_of_their_reports() -> None:
    head = ENTRIES["threshold"].fitted()
    assert head.report is not None
    figure = plots.convergence({"head": head})
    assert figure.axes[0].lines[0].get_ydata().tolist() == pytest.approx(head.report.history.tolist())
    assert figure.axes[0].lines[1].get_ydata()[0] == head.alpha
    assert [line.get_label() for line in head.report.plot(title="Title").axes[0].lines] == ["worst violation"]
    fresh = ENTRIES["threshold"].make()
    with pytest.raises(ValueError, match="fit the head first"):
        plots.convergence(fresh)


# -- all -----------------------------------------------------------------------------------------------------------------------


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


def test_deviation_shows_the_worst_rows_and_says_what_is_left_out() -> None:
    entry = ENTRIES["probability-bins"]
    audit = entry.fitted(80).audit(*entry.data(200, 1).observe)
    rows = audit.rows()
    figure = plots.deviation(audit, top=3)
    assert {t.split("  (")[0] for t in ticks(figure.axes[0])} == {f"{r['group']} / {r['what']}" for r in rows[:3]}
    assert f"{len(rows) - 3} more rows" in figure.axes[0].get_xlabel()
    assert len(ticks(gmc.compare({"x": audit}).plot(top=None).axes[0])) == len(rows)
