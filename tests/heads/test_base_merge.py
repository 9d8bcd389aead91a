"""Parts observed anywhere, merged, kept in files and forgotten: always the state of one head that saw everything at once."""

import copy
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import torchgmc as gmc
from gmctest.heads_zoo import ENTRIES, ZOO, Entry
from gmctest.own_head import MeanHead, Rows
from torchgmc import distributed
from torchgmc.heads.threshold.problem import CurveStatistics

BY_NAME = pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
CONFIDENTIAL = "row of statistics"


def observed(entry: Entry, seed: int, n: int = 40, **more: Any) -> gmc.Head:
    head = entry.make()
    head.prepare(entry.options.get("solver", "exact"), entry.options.get("eta"), entry.options.get("max_iter"))
    head.observe(*entry.data(n, seed).observe, **more)
    return head


def whole(entry: Entry, seeds: tuple[int, ...], n: int = 40, **more: Any) -> gmc.Head:
    data = tuple(torch.cat(parts) for parts in zip(*(entry.data(n, s).observe for s in seeds), strict=True))
    return entry.make().fit(*data, **more, **entry.options)


def same(a: gmc.Head, b: gmc.Head) -> None:
    assert a.is_fitted and b.is_fitted
    for (name, one), two in zip(a.named_buffers(), b.buffers(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(a.report.violations_after, b.report.violations_after, rtol=0, atol=1e-6)


def kept(head: gmc.Head, path: Path, entry: Entry, **more: Any) -> gmc.Head:
    """The head from its file."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f".*{CONFIDENTIAL}")
        gmc.save(head, path, statistics=True, **more)
    return gmc.load(path, **entry.loading)


@BY_NAME
def test_merging_is_commutative_and_gives_the_state_of_one_process(entry: Entry, tmp_path: Path) -> None:
    want = whole(entry, (0, 1, 2))
    parts = [observed(entry, seed) for seed in range(3)]
    parts[1] = kept(parts[1], tmp_path / "part.stats", entry)
    for a, b, c in ((0, 1, 2), (2, 1, 0)):
        head = copy.copy(parts[a])  # merging replaces what a head has, it does not write to it
        assert head.merge(parts[b], parts[c]) is head and not head.is_fitted
        same(head.calibrate(**entry.options), want)


@BY_NAME
def test_batches_that_come_while_heads_are_merged_are_kept(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    head, other, late = observed(entry, 0), observed(entry, 1), entry.data(40, 2).observe
    moved = distributed.moved
    monkeypatch.setattr(distributed, "moved", lambda *args: (head.observe(*late), moved(*args))[1])  # another thread, say
    head.merge(other)
    monkeypatch.undo()
    same(head.calibrate(**entry.options), whole(entry, (0, 2, 1)))


@BY_NAME
def test_a_file_with_statistics_goes_on_as_if_it_had_stayed_in_memory(entry: Entry, tmp_path: Path) -> None:
    head = kept(whole(entry, (0, 1)), tmp_path / "head.safetensors", entry)
    head.observe(*entry.data(40, 2).observe)
    same(head.calibrate(**entry.options), whole(entry, (0, 1, 2)))
    again = kept(head, tmp_path / "again.safetensors", entry)
    same(again.calibrate(**entry.options), head)


@BY_NAME
def test_forgotten_examples_count_less(entry: Entry, tmp_path: Path) -> None:
    if entry.baseline:  # they do not weigh, or count examples whatever they weigh
        return
    head = observed(entry, 0)
    head.observe(*entry.data(40, 1).observe)
    assert head.forget(0.5) is head
    head = kept(head, tmp_path / "head.safetensors", entry)
    head.forget(0.8).observe(*entry.data(40, 2).observe)
    weight = torch.cat([torch.full((80,), 0.4, dtype=torch.float64), torch.ones(40, dtype=torch.float64)])
    same(head.calibrate(**entry.options), whole(entry, (0, 1, 2), weight=weight))


@pytest.mark.parametrize("name", ["threshold-noise", "threshold-exact", "probability-noise", "quantile-noise", "tree-noise"])
def test_clusters_that_are_spread_over_parts_stay_together(name: str, tmp_path: Path) -> None:
    entry = ENTRIES[name]
    ids = [[f"patient {(7 * i + s) % 9}" for i in range(40)] for s in range(3)]
    parts = [observed(entry, s, clusters=ids[s]) for s in range(3)]
    parts[2] = kept(parts[2], tmp_path / "part.stats", entry)
    want = whole(entry, (0, 1, 2), clusters=[one for part in ids for one in part])
    same(parts[0].merge(*parts[1:]).calibrate(), want)
    with pytest.raises(ValueError, match="`clusters` with every batch or with none"):
        parts[0].observe(*entry.data(10, 5).observe)
    with pytest.raises(ValueError, match="`clusters` with every batch or with none"):
        parts[0].merge(observed(entry, 5, 10))
    same(parts[0].calibrate(), want)


def test_keys_of_the_calibration_data_come_along(tmp_path: Path) -> None:
    entry = ENTRIES["quantile-noise"]
    first, second, third = (observed(entry, s, 200) for s in range(3))
    plain = copy.copy(first).merge(second).calibrate()
    salted = kept(first, tmp_path / "1", entry).merge(second, kept(third, tmp_path / "3", entry)).calibrate()
    loaded = kept(salted, tmp_path / "all", entry)
    secret = kept(first, tmp_path / "2", entry, remember="between us")
    assert secret.observed is None and gmc.load(tmp_path / "2", secret="between us").observed is not None
    for head in (plain, salted, loaded):
        for seed in (0, 1):
            with pytest.warns(gmc.audits.overlap.OverlapWarning, match="About 100 %"):
                head.audit(*entry.data(200, seed).observe)
        head.audit(*entry.data(200, 9).observe)


def test_only_heads_with_the_same_options_are_merged() -> None:
    scores, member = torch.rand(50), torch.rand(50, 2) < 0.5
    head = gmc.QuantileHead(0.9, 0.02, ["a", "b"]).fit(scores, member)
    before, state = head.statistics, {k: v.clone() for k, v in head.state_dict().items()}
    good = gmc.QuantileHead(0.9, 0.02, ["a", "b"])
    good.observe(scores, member)
    fixed = copy.copy(good)
    fixed.prepare("paper", 0.1, None)
    based = gmc.QuantileHead(0.9, 0.02, ["a", "b"])
    based.observe(scores, member, base=scores)
    empty = gmc.QuantileHead(0.9, 0.02, ["a", "b"])
    empty.load_state_dict(head.state_dict())
    for other, why in (
        (gmc.QuantileHead(0.9, 0.02, ["b", "a"]), r"its `groups` is \[\"b\", \"a\"\], but this head has .*one `Groups`"),
        (gmc.QuantileHead(0.8, 0.02, ["a", "b"]), "its `target` is 0.8, but this head has 0.9"),
        (gmc.QuantileHead(0.9, None, ["a", "b"]), "its `alpha` is None, but this head has 0.02"),
        (gmc.QuantileHead(0.9, 0.02, ["a", "b"], bins=3), "its `bins` is 3"),
        (gmc.ProbabilityHead(0.02, ["a", "b"]), "it is a ProbabilityHead, and this is a QuantileHead"),
        (fixed, "it observed for solver, eta = .'paper', 0.1."),
        (based, "`base` with every batch or with none"),
        (empty, "it is fitted and has no statistics"),
        (head, "would count twice"),
        (good, "would count twice"),
    ):
        with pytest.raises(ValueError, match=why):
            head.merge(good, other)
        assert head.statistics is before and all(torch.equal(head.state_dict()[k], v) for k, v in state.items())
    with pytest.raises(TypeError, match="takes heads, got str in place 0; load files with gmc.load"):
        head.merge("part.stats")
    assert head.merge(gmc.QuantileHead(0.9, 0.02, ["a", "b"])).statistics is before  # a part without examples


def test_word_lists_in_another_order_are_other_lists() -> None:
    heads = [gmc.DistributionHead({"x": [1], "y": [2]}, 0.1, ["a"]), gmc.DistributionHead({"y": [2], "x": [1]}, 0.1, ["a"])]
    with pytest.raises(ValueError, match="its `attributes` is"):
        heads[0].merge(heads[1])


@pytest.mark.parametrize("factor", [0, -0.1, 1e-7, 1.1, float("nan"), float("inf"), True, "0.9", None])
def test_bad_factors(factor: Any) -> None:
    head = gmc.QuantileHead(0.9, 0.05).fit(torch.rand(30))
    before = head.statistics
    with pytest.raises(ValueError, match="`factor` must be from 1e-6 to 1, got"):
        head.forget(factor)
    assert head.statistics is before


def test_a_guarantee_that_needs_equal_weights_refuses_forgotten_examples() -> None:
    head = gmc.QuantileHead(0.9, 0.05, ["a"], finite_sample=True).fit(torch.rand(60), torch.ones(60, 1).bool())
    before = head.statistics
    with pytest.raises(ValueError, match="`finite_sample` needs examples of equal weight"):
        head.forget(0.5)
    assert head.statistics is before and head.forget(1.0).calibrate().is_fitted


def test_a_head_without_its_statistics_warns_before_it_fits_new_examples_alone(tmp_path: Path) -> None:
    entry = ENTRIES["probability-noise"]
    head = whole(entry, (0, 1))
    loaded, copied = gmc.load(gmc.save(head, tmp_path / "head.safetensors")), entry.make()
    copied.load_state_dict(head.state_dict())
    with pytest.raises(ValueError, match="no statistics to forget"):
        loaded.forget(0.9)
    for one in (loaded, copied, kept(loaded, tmp_path / "empty", entry), entry.make().merge()):
        one.observe(*entry.data(40, 2).observe)
        if one.lacks_statistics:
            other = entry.make().merge(one)  # it lacks them too
            with pytest.warns(UserWarning, match="fits those observed since, and no others"):
                other.calibrate()
            with pytest.warns(UserWarning, match="fits those observed since, and no others"):
                one.calibrate()
        same(one.calibrate(), whole(entry, (2,)))  # once said is enough
    assert not loaded.lacks_statistics
    fresh = gmc.load(tmp_path / "head.safetensors")
    fresh.fit(*entry.data(40, 2).observe)  # meant to start over
    fresh = gmc.load(tmp_path / "head.safetensors")
    fresh.reset()
    fresh.observe(*entry.data(40, 2).observe)
    fresh.calibrate()


def test_what_the_file_holds_is_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="row of statistics for each of the QuantileHead's calibration examples"):
        gmc.save(observed(ENTRIES["quantile"], 0), tmp_path / "a", statistics=True)
    with pytest.warns(UserWarning, match="examples .or clusters."):
        gmc.save(observed(ENTRIES["threshold"], 0, clusters=list(range(40))), tmp_path / "b", statistics=True)
    gmc.save(observed(ENTRIES["threshold"], 0), tmp_path / "c", statistics=True)  # sums
    assert gmc.load(tmp_path / "c").statistics is not None
    with pytest.raises(TypeError, match="`statistics` must be True or False"):
        gmc.save(observed(ENTRIES["threshold"], 0), tmp_path / "c", statistics="no")


def test_a_head_of_ones_own(tmp_path: Path) -> None:
    """What PerExample does for the heads of the package it does for others; a file needs to know the class."""
    g = torch.Generator().manual_seed(0)
    x, y, who = torch.randn(90, generator=g), torch.randn(90, generator=g), torch.rand(90, 2, generator=g) < 0.5
    parts = [MeanHead(0.1, ["a", "b"]) for _ in range(3)]
    for part, (a, b) in zip(parts, pairwise(range(0, 91, 30)), strict=True):
        part.observe(x[a:b], y[a:b], who[a:b])
    with pytest.raises(TypeError, match="a MeanHead does not say in `keeps`"):
        gmc.save(parts[1], tmp_path / "x", statistics=True)

    MeanHead.keeps = (Rows,)
    try:
        with pytest.warns(UserWarning, match=CONFIDENTIAL):
            parts[1] = gmc.load(gmc.save(parts[1], tmp_path / "x", statistics=True))
    finally:
        del MeanHead.keeps
    weight = torch.ones(90).index_fill(0, torch.arange(30), 0.5)
    want = MeanHead(0.1, ["a", "b"]).fit(x, y, who, weight)
    same(parts[0].forget(0.5).merge(*parts[1:]).calibrate(), want)


def test_a_table_of_many_cells_is_not_copied_with_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 overlapping groups: nearly every image has its own combination, and every batch was added to all of them."""
    g = torch.Generator().manual_seed(0)
    scores, masks, member = torch.rand(256, 3, generator=g), torch.ones(256, 3).bool(), torch.rand(256, 16, generator=g) < 0.5
    options = {"groups": [f"g{k}" for k in range(16)], "resolution": 0.25, "noise_floor": False}
    head, copied = gmc.ThresholdHead(0.1, 0.05, **options), 0
    plain = CurveStatistics.__add__

    def counted(one: CurveStatistics, other: CurveStatistics) -> CurveStatistics:
        nonlocal copied
        copied += one.num_cells + other.num_cells
        return plain(one, other)

    monkeypatch.setattr(CurveStatistics, "__add__", counted)
    for some in zip(scores.split(4), masks.split(4), member.split(4), strict=True):
        head.observe(*some)
    assert head.statistics.num_cells > 240 and copied < 256 * 8 < 256 * 32  # each cell log n times, not once for each batch
    assert torch.equal(head.calibrate().offsets, gmc.ThresholdHead(0.1, 0.05, **options).fit(scores, masks, member).offsets)
