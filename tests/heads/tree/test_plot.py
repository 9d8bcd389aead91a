"""Figures of a tree: the numbers read back from the axes are those of a plain recount."""

import math
from typing import Any

import pytest
import torch

import torchgmc as gmc
from gmctest.figures import texts, tree_head
from gmctest.heads_zoo import ENTRIES, documents
from torchgmc import plots
from torchgmc.heads.tree.plot import node_coverage

pytestmark = pytest.mark.usefixtures("no_pyplot")


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
