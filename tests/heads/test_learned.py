"""Groups that nobody named: fits, files, doors, rules in words, and errors."""

import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import torchgmc as gmc
from torchgmc.deploy.attach import CalibratedModel
from torchgmc.engine import folds, trees

NAMES = ["age", "income", "site"]
LEARN = {"depth": 2, "names": NAMES, "categorical": {"site": ["A", "B", "C", "D"]}, "trees": 40}


def people(n: int, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Batch of a model blind to the old among the women, to those without an age, and to site C; and the true probability."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=g)
    x[:, 2] = torch.randint(0, 4, (n,), generator=g).float()
    x[torch.rand(n, generator=g) < 0.2, 0] = math.nan
    groups = torch.rand(n, 2, generator=g) < 0.5
    logit = torch.randn(n, generator=g)
    hidden = (x[:, 0] > 0.3) & groups[:, 0]
    truth = torch.sigmoid(logit + 1.5 * hidden - 1.5 * x[:, 0].isnan() + (x[:, 2] == 2))
    y = torch.rand(n, generator=g) < truth
    return {"probs": torch.sigmoid(logit), "y": y, "groups": groups, "features": x}, truth


def make(**options) -> gmc.ProbabilityHead:
    return gmc.ProbabilityHead(None, ["women", "urban"], learn=gmc.Trees(**LEARN), **options)


@pytest.fixture(scope="module")
def fitted() -> gmc.ProbabilityHead:
    return make().fit(**people(3000, 0)[0])


def output(head: gmc.Head, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return head(batch["probs"], batch["groups"], features=batch["features"])


def test_it_is_nearer_to_the_truth_and_keeps_named_promises(fitted: gmc.ProbabilityHead) -> None:
    batch, truth = people(5000, 1)
    plain = gmc.ProbabilityHead(None, ["women", "urban"]).fit(*(people(3000, 0)[0][k] for k in ("probs", "y", "groups")))
    off = [(f - truth).square().mean() for f in (plain(batch["probs"], batch["groups"]), output(fitted, batch))]
    assert off[1] < 0.35 * off[0]
    assert fitted.report.reached == "noise"
    audit = fitted.audit(**batch)
    assert audit.max_violation < 0.02
    assert audit.cost["log loss after"] < audit.cost["log loss before"]


def test_rules_are_words_largest_first(fitted: gmc.ProbabilityHead) -> None:
    words = [rule for rule, _, _ in fitted.learned]
    assert "age is missing" in words[0] and len(set(words)) == len(words)
    assert any("women" in rule and "age >= 0." in rule for rule in words) and any("site = C" in rule for rule in words)
    batch, _ = people(20_000, 2)
    x, f = batch["features"], output(fitted, batch)
    rule, share, effect = next(row for row in fitted.learned if row[0] == "age is missing" or "age is missing" in row[0])
    assert effect < -0.1 and 0 < share < 0.25, rule
    assert float((f - batch["probs"])[x[:, 0].isnan()].mean()) < -0.1
    table = fitted.learned_table()
    assert len(table.rows) == len(words) and table.rows[0][0] == words[0]
    before, after = fitted.rule_values[:, 2:5], fitted.rule_values[:, 5:8]
    assert bool((before[:, 1] <= before[:, 0]).all()) and bool((before[:, 0] <= before[:, 2]).all())
    assert float(before[:3, 0].abs().mean()) > 2 * float(after[:3, 0].abs().mean())
    assert table in fitted.tables(None)


def test_batches_in_any_order_give_the_same_state(fitted: gmc.ProbabilityHead) -> None:
    batch, _ = people(3000, 0)
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(4)).split(700)
    again = make().fit_batches([{name: part[rows] for name, part in batch.items()} for rows in order])
    assert torch.equal(output(again, batch), output(fitted, batch))
    assert again.learned == fitted.learned


def test_files_script_and_export_give_the_same(fitted: gmc.ProbabilityHead, tmp_path: Path) -> None:
    batch, _ = people(50, 3)
    expected = output(fitted, batch)
    gmc.save(fitted, tmp_path / "head.safetensors")
    loaded = gmc.load(tmp_path / "head.safetensors")
    assert torch.equal(output(loaded, batch), expected) and loaded.learned == fitted.learned
    scripted = torch.jit.script(fitted)
    assert torch.equal(scripted(batch["probs"], batch["groups"], features=batch["features"]), expected)
    assert torch.equal(output(fitted.half(), batch), expected)  # buffers stay as they are


@pytest.mark.parametrize("format", ["torchscript", "torch.export", "onnx"])
def test_exported_models_take_features_or_compute_them(fitted: gmc.ProbabilityHead, tmp_path: Path, format: str) -> None:
    batch, _ = people(40, 6)
    groups, x = batch["groups"], batch["features"]
    base = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0), torch.nn.Sigmoid())
    filled = x.nan_to_num(0.0)
    model = gmc.attach(base, fitted)
    expected = fitted(base(filled).detach(), groups, features=x)
    assert torch.equal(model(filled, groups, features=x), expected)
    with pytest.raises(ValueError, match="`features` is missing"):
        model(filled, groups)
    path = model.export(tmp_path / "model", format, (filled, groups, x))  # compared with the eager model there
    assert gmc.export.metadata(path)["inputs"][-2:] == ["groups", "features"]
    own = gmc.attach(base, fitted, features=lambda x: x)
    assert torch.equal(own(filled, groups), fitted(base(filled).detach(), groups, features=filled))
    own.export(tmp_path / "own", format, (filled, groups))
    with pytest.raises(TypeError, match="`learn`"):
        gmc.attach(base, gmc.ProbabilityHead(0.1), features=lambda x: x)


@pytest.mark.parametrize("options", [{"num_classes": 3}, {"geometry": "euclidean"}, {"bins": None}, {"conditional": True}])
def test_classes_and_other_options(options: dict[str, object]) -> None:
    batch, truth = people(1500, 0)
    if "num_classes" in options:
        p = batch["probs"]
        batch["probs"] = torch.stack([p, (1 - p) / 2, (1 - p) / 2], 1)
        batch["y"] = torch.where(batch["y"], 0, torch.randint(1, 3, (1500,), generator=torch.Generator().manual_seed(1)))
    head = make(**options).fit(**batch)
    f = output(head, batch)
    first, before = (f[:, 0], batch["probs"][:, 0]) if f.dim() == 2 else (f, batch["probs"])
    assert (first - truth).square().mean() < 0.5 * (before - truth).square().mean()
    assert head.learned and ("class" in head.learned[0][0]) == ("num_classes" in options)


def test_trees_under_vmap_are_as_in_a_batch(fitted: gmc.ProbabilityHead) -> None:
    batch, _ = people(20, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an operation without a batching rule warns, and takes ten times as long
        rows = torch.func.vmap(lambda p, g, x: fitted(p[None], g[None], features=x[None])[0])(
            batch["probs"], batch["groups"], batch["features"]
        )
    torch.testing.assert_close(rows, output(fitted, batch), rtol=0, atol=1e-12)


def test_labels_have_trees_of_their_own(tmp_path: Path) -> None:
    """Each label is biased in hidden groups of its own; a tree moves one label."""
    batch, second = people(1500, 0)
    g, even = torch.Generator().manual_seed(5), torch.full((1500,), 0.4)
    first = even + 0.4 * (batch["features"][:, 1] > 0.5)
    y = torch.stack([torch.rand(1500, generator=g) < first, batch["y"]], 1)
    both = batch | {"probs": torch.stack([even, batch["probs"]], 1), "y": y}
    head = make(multilabel=True, num_classes=2, bins=None).fit(**both)
    f = output(head, both)
    for k, truth in enumerate((first, second)):
        assert (f[:, k] - truth).square().mean() < 0.3 * (both["probs"][:, k] - truth).square().mean()
    assert head.learned and {rule.rsplit(", ", 1)[1] for rule, _, _ in head.learned} <= {"label 0", "label 1"}
    used = head.tree_leaf.abs().amax(1) > 0  # (T, 2)
    assert bool((used.sum(1) <= 1).all()) and bool(used.any(0).all())
    gmc.save(head, tmp_path / "labels.safetensors")
    assert torch.equal(output(gmc.load(tmp_path / "labels.safetensors"), both), f)
    assert torch.equal(torch.jit.script(head)(both["probs"], both["groups"], features=both["features"]), f)


def test_without_groups_with_weights_and_clusters() -> None:
    batch, truth = people(1500, 0)
    weight, clusters = torch.rand(1500) + 0.5, torch.arange(1500) // 3
    head = gmc.ProbabilityHead(None, learn=gmc.Trees(trees=30))
    head.fit(batch["probs"], batch["y"], features=batch["features"].numpy(), weight=weight, clusters=clusters)
    f = head(batch["probs"], features=batch["features"])
    assert (f - truth).square().mean() < 0.7 * (batch["probs"] - truth).square().mean()


def test_few_rows_learn_nothing_and_still_want_features() -> None:
    batch, _ = people(30, 0)
    head = make().fit(**batch)
    assert head.learned == [] and len(head.tree_column) == 0
    with pytest.raises(ValueError, match="`features` is missing"):
        head(batch["probs"], batch["groups"])


def test_the_report_says_where_more_trees_might_help() -> None:
    x, probs = torch.randn(2000, 2), torch.full((2000,), 0.5)
    y = torch.rand(2000) < 0.5 + 0.4 * torch.sign(x[:, 0] * x[:, 1])
    few, many = (gmc.ProbabilityHead(None, learn=gmc.Trees(trees=most)).fit(probs, y, features=x) for most in (3, 400))
    assert "Trees ended at `trees` = 3 while held-out loss fell" in few.report.message
    assert 3 < len(many.tree_column) < 380 and "Trees ended" not in many.report.message
    plain = gmc.ProbabilityHead(None, learn=gmc.Trees(trees=3)).fit(probs, torch.rand(2000) < 0.5, features=x)
    assert not len(plain.tree_column) and "Trees ended" not in plain.report.message


def test_rows_of_one_cluster_learn_nothing() -> None:
    """All of them were held out, and the fit divided by the number of those that were not."""
    cluster, learn = torch.full((200,), 7), gmc.Trees(trees=5)
    batch = people(200, 0)[0]
    head = make().fit(**batch, clusters=cluster)
    assert head.learned == [] and torch.isfinite(output(head, batch)).all()
    data, some = widths(200, 0), images(200, 0)
    for fitted in (
        gmc.QuantileHead(0.9, None, ["women", "urban"], learn=learn).fit(**data, clusters=cluster),
        gmc.ThresholdHead(0.1, None, ["women", "urban"], learn=gmc.Linear()).fit(**some, clusters=cluster),
    ):
        assert fitted.learned == [] and fitted.is_fitted
    assert make().fit(**batch, clusters=torch.arange(200) % 2).is_fitted
    for row in range(12):  # the same where all weight is held out: of one in five of these
        one = gmc.ProbabilityHead(None, learn=learn)
        assert one.fit(batch["probs"], batch["y"], features=batch["features"], weight=(torch.arange(200) == row).float()).is_fitted


def test_wrong_features_are_named(fitted: gmc.ProbabilityHead) -> None:
    batch, _ = people(60, 0)
    p, y, groups, x = batch.values()
    for wrong, text in (
        (x[:, :2], "must have 3 columns"),
        (x[:5], r"shape \(60, d\)"),
        (x / 0, "finite"),
        (torch.full_like(x, 0.5), "whole numbers"),
        (torch.full_like(x, -1.0), "the code -1, but `categorical` of gmc.Trees names the codes 0 to 3"),
        (torch.full_like(x, math.nan).index_fill(0, torch.tensor(5), 4.0), "column 2 of `features` holds the code 4, but"),
    ):
        with pytest.raises(ValueError, match=text):
            make().observe(p, y, groups, features=wrong)
    with pytest.raises(ValueError, match="must have 3 columns"):
        fitted(p, groups, features=x[:, :1])
    with pytest.raises(ValueError, match="does not use `features`"):
        gmc.ProbabilityHead(None).fit(p, y, features=x)
    with pytest.raises(ValueError, match="solver='exact'"):
        gmc.ProbabilityHead(0.1, learn=gmc.Trees()).fit(p, y, features=x, solver="paper")
    with pytest.raises(ValueError, match="noise_floor"):
        gmc.ProbabilityHead(0.1, noise_floor=False, learn=gmc.Trees())
    for wrong in (3, gmc.Trees, {}):
        with pytest.raises(TypeError, match=r"must be gmc\.Trees\(\.\.\.\), gmc"):
            gmc.ProbabilityHead(0.1, learn=wrong)
    assert gmc.Trees(categorical=None) == gmc.Trees()
    with pytest.raises(ValueError, match="names a level of 'site' twice: A, A"):
        gmc.Trees(names=["site"], categorical={"site": ["A", "A"]})
    wrong_places = [{"categorical": [place]} for place in (-1, 1.5, True, "site")]  # 1.5 was column 1; -1 the last group
    for options in ({"depth": 0}, {"depth": 9}, {"rate": 2.0}, {"bins": 256}, *wrong_places):
        with pytest.raises(ValueError, match=next(iter(options))):
            gmc.Trees(**options)
    with pytest.raises(ValueError, match="`names` has repeated names"):
        gmc.Trees(names=["age", "age"])
    with pytest.raises(ValueError, match="categorical"):
        gmc.Trees(names=["age"], categorical=[1])
    for place in (3, 4, 50):  # 3 and 4 are the model's own output and a group to trees; 50 was an IndexError in `calibrate`
        with pytest.raises(ValueError, match=f"no column {place}, which `categorical`"):
            gmc.ProbabilityHead(0.1, ["a", "b"], learn=gmc.Trees(categorical=[place])).observe(p, y, groups, features=x)
    assert gmc.Trees(names=["age", "site"], categorical=[np.int64(1)]) == gmc.Trees(names=["age", "site"], categorical=["site"])


def test_no_rule_is_told_twice() -> None:
    """Trees that split by the same columns in another order found "a >= 1 and b >= 1", and "b >= 1 and a >= 1"."""
    g = torch.Generator().manual_seed(0)
    x, p = (torch.rand(4000, 4, generator=g) < 0.5).float(), torch.rand(4000, generator=g) * 0.5 + 0.2
    y = torch.rand(4000, generator=g) < p + 0.3 * x[:, 0] * x[:, 1]
    head = gmc.ProbabilityHead(None, learn=gmc.Trees(depth=2, names=["a", "b", "c", "d"])).fit(p, y, features=x)
    found = gmc.find_groups(dict(zip("abcd", x.T, strict=True)), p - y.float(), depth=2, top=8, holdout=0.5)
    for words in ([rule for rule, *_ in head.learned], found.table["group"]):
        said = [tuple(sorted(rule.split(" and "))) for rule in words]
        assert len(said) > 2 and len(set(said)) == len(said) and ("a >= 1", "b >= 1") in said


@pytest.mark.parametrize("shift, warns", [(1_700_000_000, True), (1000, False)])
def test_numbers_that_float32_cannot_tell_apart_warn(shift: int, warns: bool) -> None:
    g = torch.Generator().manual_seed(0)
    seconds = torch.randint(0, 100, (200, 1), generator=g)
    plain = torch.cat([seconds.double() + shift, torch.full((200, 1), 0.1).double()], 1)
    plain[::9, 0] = math.nan
    for features in (shift + seconds, plain):
        head = gmc.ProbabilityHead(None, learn=gmc.Trees())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            head.observe(torch.full((200,), 0.5), seconds[:, 0] > 50, features=features)
        assert ["column 0 of `features` loses" in str(one.message) for one in caught] == [True] * warns
        assert caught == [] or caught[0].filename == __file__


def test_large_numbers_are_told_apart_in_rules() -> None:
    """A postcode of 90210 was 9.021e+04 in words, and all of its neighbours too."""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(90_200, 90_220, (3000, 1), generator=g).float()
    y = torch.rand(3000, generator=g) < torch.where(x[:, 0] >= 90_210, 0.8, 0.2)
    learn = gmc.Trees(depth=1, names=["postcode"], trees=20)
    head = gmc.ProbabilityHead(None, learn=learn).fit(torch.full((3000,), 0.5), y, features=x)
    assert head.learned[0][0] in ("postcode >= 90210", "postcode < 90210")
    found = gmc.find_groups({"postcode": x[:, 0]}, 0.5 - y.float(), depth=1, top=2, holdout=0.5)
    assert sorted(found.table["group"]) == ["postcode < 90210", "postcode >= 90210"]


def test_a_crafted_state_is_refused(fitted: gmc.ProbabilityHead) -> None:
    state = fitted.state_dict()
    state["tree_column"] = state["tree_column"] + 50
    with pytest.raises(RuntimeError, match="tree_column"):
        make().load_state_dict(state)
    state = fitted.state_dict()
    state["tree_leaf"] = state["tree_leaf"][:-1]
    with pytest.raises(RuntimeError, match="differ in length"):
        make().load_state_dict(state)


def widths(n: int, seed: int) -> dict[str, torch.Tensor]:
    """Scores, far larger where income is high or age is missing, and twice as large among women."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=g)
    x[torch.rand(n, generator=g) < 0.15, 0] = math.nan
    groups = torch.rand(n, 2, generator=g) < 0.5
    spread = (1 + groups[:, 0].float()) * torch.exp(0.8 * (x[:, 1] > 0.5) + 0.8 * x[:, 0].isnan())
    return {"scores": 100 * (torch.randn(n, generator=g) * spread).abs(), "groups": groups, "features": x}


def test_thresholds_of_quantiles_follow_features(tmp_path: Path) -> None:
    data, new = widths(2500, 0), widths(10_000, 1)
    plain = gmc.QuantileHead(0.9, None, ["women", "urban"]).fit(data["scores"], data["groups"])
    learn = gmc.Trees(depth=2, names=["age", "income"], trees=40)
    head = gmc.QuantileHead(0.9, None, ["women", "urban"], learn=learn).fit(**data)
    q = head(new["groups"], features=new["features"])

    def loss(q: torch.Tensor) -> float:
        above = new["scores"] - q
        return float(torch.maximum(0.9 * above, -0.1 * above).mean())

    assert loss(q) < 0.85 * loss(plain(new["groups"]))
    hidden = new["features"][:, 0].isnan()
    covered = [(new["scores"] <= t)[hidden].double().mean() for t in (plain(new["groups"]), q)]
    assert covered[0] < 0.8 and abs(covered[1] - 0.9) < 0.04
    assert head.audit(**new).max_violation < 0.02
    assert any("age is missing" in rule for rule, _, _ in head.learned) and head.tables(None)[0].rows
    gmc.save(head, tmp_path / "q.safetensors")
    assert torch.equal(gmc.load(tmp_path / "q.safetensors")(new["groups"], features=new["features"]), q)
    assert torch.equal(torch.jit.script(head)(new["groups"], features=new["features"]), q)
    parts = [{name: part[k::3] for name, part in data.items()} for k in range(3)]
    again = gmc.QuantileHead(0.9, None, ["women", "urban"], learn=learn).fit_batches(parts)
    assert torch.equal(again(new["groups"], features=new["features"]), q)
    for options in ({"bins": 3}, {"finite_sample": True}):
        with pytest.raises(ValueError, match="`learn`"):
            gmc.QuantileHead(0.9, 0.1, learn=learn, **options)
    with pytest.raises(ValueError, match="`features` is missing"):
        head(new["groups"])


def test_thresholds_beside_a_linear_function_do_not_depend_on_the_order_of_many_rows() -> None:
    """Folds were dealt by the content of scores from which the function was taken, so by the last bits of its sums."""
    for seed in range(2):
        g = torch.Generator().manual_seed(2 * seed)
        member, x = torch.rand(40_000, 3, generator=g) < torch.tensor([0.3, 0.5, 0.2]), torch.randn(40_000, 4, generator=g)
        scores = torch.randn(40_000, generator=g).double().abs() * (1.6 + member[:, 0] + 0.5 * x[:, 0].clamp(-1.5, 1.5))
        order = torch.randperm(40_000, generator=g)
        one, two = (
            gmc.QuantileHead(0.9, None, ["a", "b", "c"], learn=gmc.Linear()).fit(scores[at], member[at], features=x[at])
            for at in (slice(None), order)
        )
        assert len(one.line_weight)
        torch.testing.assert_close(one(member, features=x), two(member, features=x), rtol=0, atol=1e-10)


def test_fresh_data_are_covered_at_the_target() -> None:
    """Trees fit noise of the rows that they see; thresholds are set on what trees that did not see a row leave of it."""
    covered = []
    for seed in range(4):
        data, new = widths(600, seed), widths(4000, 100 + seed)
        head = gmc.QuantileHead(0.9, None, ["women", "urban"], learn=gmc.Trees(trees=20, rate=0.5)).fit(**data)
        covered.append((new["scores"] <= head(new["groups"], features=new["features"])).double().mean())
        assert len(head.tree_column)
    assert abs(float(torch.stack(covered).mean()) - 0.9) < 0.012  # set on the sample that trees saw, it would be 0.87


def test_some_of_many_rows_teach_as_much_as_their_number_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were drawn by the places that then order them: every window of rows but the first was empty, and one tree was left."""
    monkeypatch.setattr(folds, "EXACT", 100)
    for name, rows in (("POOL", 800), ("JUDGES", 200)):
        monkeypatch.setattr(trees, name, rows)
    spots, boost = [], trees.boost
    monkeypatch.setattr(trees, "boost", lambda *args, **given: (spots.append(given["spots"]), boost(*args, **given))[1])
    batch, truth = people(16_000, 0)
    head = make().fit(**batch)
    searched = torch.histc(spots[0].float(), 10, 0, 1)
    assert len(spots) == 1 and 900 < len(spots[0]) < 1100 and float(searched.min()) > 0.6 * float(searched.mean())
    error = (output(head, batch) - truth).square().mean()
    assert len(head.tree_column) > 8 and error < 0.25 * (batch["probs"] - truth).square().mean()


def test_rows_held_out_have_no_say_in_where_trees_put_them() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, generator=g)
    scores = torch.rand(200, generator=g).double() + 2 * (x[:, 0] > 0)
    z, changed = torch.full((200, 1), 0.5).double(), torch.cat([scores[:150], scores[150:] + 9])
    coded, goal = trees.code(x, torch.zeros(2, dtype=torch.bool), 8), torch.tensor([0.8]).double()
    found = [
        trees.boost(coded, z, z, trees.pinball(s, torch.ones_like(s), goal), 50, 2, 7, 0.3, 5.0, 1.0, stop=False)
        for s in (scores[:, None, None], changed[:, None, None])
    ]
    assert torch.equal(found[0].z, found[1].z) and not torch.equal(found[0].z, z[150:])


def images(n: int, seed: int, classes: int = 0) -> dict[str, torch.Tensor]:
    """Masks that a model finds less of where income is high, and among women; of two classes, the first."""
    g = torch.Generator().manual_seed(seed)
    x, groups = torch.randn(n, 2, generator=g), torch.rand(n, 2, generator=g) < 0.5
    shape = (n, classes, 8, 8) if classes else (n, 8, 8)
    masks = torch.rand(shape, generator=g) < 0.4
    dark = (1.5 * (x[:, 1] > 0.3) + 0.6 * groups[:, 0]).view(-1, *[1] * (len(shape) - 1))
    if classes:
        dark = dark * torch.tensor([1.0, 0.0]).view(1, 2, 1, 1)
    scores = torch.sigmoid(2.5 * masks - 1 + torch.randn(shape, generator=g) - dark)
    return {"scores": scores, "masks": masks, "groups": groups, "features": x}


def missed(head: gmc.ThresholdHead, data: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of each image, the share of its pixels that is missed."""
    more = {"features": data["features"]} if head.learns else {}
    lost = ~head(data["scores"], data["groups"], **more) & data["masks"]
    return (lost.flatten(-2).sum(-1) / data["masks"].flatten(-2).sum(-1)).double()


@pytest.fixture(scope="module")
def adaptive() -> gmc.ThresholdHead:
    learn = gmc.Trees(depth=2, names=["age", "income"], trees=20, rate=0.4)
    return gmc.ThresholdHead(0.1, None, ["women", "urban"], learn=learn).fit(**images(500, 0))


def test_thresholds_of_masks_follow_features(adaptive: gmc.ThresholdHead, tmp_path: Path) -> None:
    """Adaptive risk control: miss rates of images lie nearer to one another, at the same mean."""
    data, new = images(500, 0), images(3000, 1)
    plain = gmc.ThresholdHead(0.1, None, ["women", "urban"]).fit(*(data[k] for k in ("scores", "masks", "groups")))
    rates = [missed(head, new) for head in (plain, adaptive)]
    assert rates[1].std() < 0.75 * rates[0].std() and abs(float(rates[1].mean()) - 0.1) < 0.01
    assert adaptive.audit(**new).max_violation < 0.015
    assert "income" in adaptive.learned[0][0] and adaptive.tables(None)[0].rows and adaptive.report.reached == "noise"
    before, after = adaptive.rule_values[0, 2], adaptive.rule_values[0, 5]
    assert abs(float(after)) < 0.5 * abs(float(before))
    want = adaptive.threshold(new["groups"], features=new["features"])
    parts = [{name: part[k::3] for name, part in data.items()} for k in range(3)]
    heads = [gmc.ThresholdHead(**adaptive.config()) for _ in parts]
    for head, part in zip(heads, parts, strict=True):
        head.observe(**part)
    with pytest.warns(UserWarning, match="treat it as you treat the data"):
        gmc.save(heads[2], tmp_path / "part.safetensors", statistics=True)
    heads[0].merge(heads[1], gmc.load(tmp_path / "part.safetensors")).calibrate()
    torch.testing.assert_close(heads[0].threshold(new["groups"], features=new["features"]), want, rtol=0, atol=1e-8)
    gmc.save(adaptive, tmp_path / "t.safetensors")
    assert torch.equal(gmc.load(tmp_path / "t.safetensors").threshold(new["groups"], features=new["features"]), want)


@pytest.mark.parametrize("format", ["torchscript", "torch.export", "onnx"])
def test_thresholds_of_masks_are_exported(adaptive: gmc.ThresholdHead, tmp_path: Path, format: str) -> None:
    data = images(6, 2)
    model = gmc.attach(torch.nn.Identity(), adaptive, adapter=gmc.Adapter(activation="none"))
    assert torch.equal(model(*(data[k] for k in ("scores", "groups")), features=data["features"]).bool(), _masks(adaptive, data))
    model.export(tmp_path / "model", format, (data["scores"], data["groups"], data["features"]))  # compared there


def _masks(head: gmc.ThresholdHead, data: dict[str, torch.Tensor]) -> torch.Tensor:
    return head(data["scores"], data["groups"], features=data["features"])


def test_thresholds_of_classes_of_false_alarms_and_of_clusters_follow_features() -> None:
    learn = gmc.Trees(depth=1, trees=10, rate=0.5)
    data, new = images(400, 0, 2), images(2000, 1, 2)
    head = gmc.ThresholdHead([0.1, 0.2], None, num_classes=2, learn=learn)
    del data["groups"], new["groups"]
    head.fit(**data, clusters=torch.arange(400) // 2, weight=torch.rand(400) + 0.5)
    lam = head.threshold(features=new["features"])
    high = new["features"][:, 1] > 0.3
    assert lam.shape == (2000, 2) and lam[high, 0].mean() < lam[~high, 0].mean() - 0.1
    assert (lam[high, 1].mean() - lam[~high, 1].mean()).abs() < 0.05
    risk = head.values(**new).s + torch.tensor([0.1, 0.2])
    assert bool(((risk.mean(0) - torch.tensor([0.1, 0.2])).abs() < 0.015).all())
    alarms = gmc.ThresholdHead(0.05, None, risk="fpr", resolution="exact", learn=learn)
    one, fresh = images(400, 3), images(2000, 4)
    alarms.fit(one["scores"], one["masks"], features=one["features"])
    assert alarms.learned and alarms.audit(fresh["scores"], fresh["masks"], features=fresh["features"]).max_violation < 0.01


def test_thresholds_that_learn_refuse_what_they_cannot_do() -> None:
    data, learn = images(60, 0), gmc.Trees(trees=3)
    for options in ({"finite_sample": True}, {"resolution": 0.01}, {"risk": gmc.MonotoneRisk(lambda s, m, t: t)}):
        with pytest.raises(ValueError, match=r"`learn`|resolution"):
            gmc.ThresholdHead(0.1, None, learn=learn, **options)
    with pytest.raises(ValueError, match="solver='exact'"):
        gmc.ThresholdHead(0.1, 0.1, ["a", "b"], learn=learn).fit(**data, solver="paper")
    with pytest.raises(ValueError, match="`features` is missing"):
        gmc.ThresholdHead(0.1, None, ["a", "b"], learn=learn).fit(data["scores"], data["masks"], data["groups"])
    with pytest.raises(TypeError, match="does not learn"):
        gmc.baselines.ConformalRiskControl(0.1, learn=learn)
    heads = [gmc.ThresholdHead(0.1, None, ["a", "b"], learn=learn) for _ in range(2)]
    heads[0].observe(**data)
    few = {name: value[:10] for name, value in data.items()}  # so few were joined in `calibrate` only, with an error of torch.cat
    heads[1].observe(**few | {"features": few["features"].repeat(1, 2)})
    with pytest.raises(ValueError, match="`features` must have 2 columns, as in the batches before, got 4"):
        heads[0].merge(heads[1])
    assert heads[0].calibrate().num_features == 2


def test_few_scores_of_an_image_give_its_risk() -> None:
    """All of them where there are few enough, means of neighbours where there are more; against plain loops."""
    g = torch.Generator().manual_seed(0)
    scores, masks = torch.rand(7, 90, generator=g).double(), torch.rand(7, 90, generator=g) < 0.5
    masks[3] = False
    head = gmc.ThresholdHead(0.1, None, resolution="exact")
    head.observe(scores, masks)
    for points in (8, 64):
        small = head.statistics.sketched(points)
        assert torch.bincount(small.example, minlength=7).tolist() == [min(points, int(m.sum())) for m in masks]
        for lam in (0.1, 0.35, 0.9):
            found = small.risk(torch.full((7, 1), lam).double())[:, 0]
            for i in range(7):
                inside = scores[i][masks[i]]
                want = float((inside <= lam).double().mean()) if len(inside) else math.nan
                limit = 1 / points if points == 8 else 1e-9
                assert math.isnan(float(found[i])) if math.isnan(want) else abs(float(found[i]) - want) <= limit


class Net(torch.nn.Module):
    """A probability from an embedding, and how often it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last, self.calls = torch.nn.Linear(4, 6), torch.nn.Linear(6, 1), 0
        torch.nn.init.orthogonal_(self.body.weight, generator=torch.Generator().manual_seed(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.sigmoid(0 * self.last(torch.tanh(self.body(x)))).squeeze(1)


@pytest.fixture(scope="module")
def behind() -> CalibratedModel:
    """A model that does not use its own embedding, and a head that does."""
    g = torch.Generator().manual_seed(1)
    net, head = Net(), gmc.ProbabilityHead(None, ["women"], learn=gmc.Linear())
    model = gmc.attach(net, head, features="body")
    x, groups = torch.randn(1500, 4, generator=g), torch.rand(1500, 1, generator=g) < 0.5
    scores, embedding = model.scores_and_features(x)
    assert net.calls == 1 and torch.equal(embedding, net.body(x))
    head.fit(scores, torch.rand(1500, generator=g) < torch.sigmoid(2 * embedding[:, 0]), groups, features=embedding)
    return model


def test_a_head_learns_from_a_layer_of_its_model(behind: CalibratedModel, tmp_path: Path) -> None:
    x, groups = torch.randn(300, 4, generator=torch.Generator().manual_seed(2)), torch.rand(300, 1) < 0.5
    embedding, before = behind.model.body(x).detach(), behind.model.calls
    f = behind(x, groups)
    assert behind.model.calls == before + 1  # no second pass
    assert not behind.model.body._forward_hooks
    assert torch.equal(f, behind.head(torch.full((300,), 0.5), groups, features=embedding))
    assert (f - torch.sigmoid(2 * embedding[:, 0])).abs().mean() < 0.05
    assert behind.head.learned[0][0].startswith("x0 ")
    gmc.save(behind.head, tmp_path / "h.safetensors")
    again = gmc.load(tmp_path / "h.safetensors")
    assert torch.equal(again(torch.full((300,), 0.5), groups, features=embedding), f) and again.learned == behind.head.learned
    with pytest.raises(ValueError, match="must name a layer of the model, got 'bottleneck'; it has body, last"):
        gmc.attach(behind.model, again, features="bottleneck")
    with pytest.raises(ValueError, match="no source of features"):
        gmc.attach(behind.model, again).scores_and_features(x)
    several = gmc.attach(behind.model, [again, behind.head], features="body")
    assert torch.equal(several(x, groups)["probability"], f)
    state = again.state_dict()
    state["line_center"], state["line_weight"] = state["line_center"][:-1], state["line_weight"][:-1]
    with pytest.raises(RuntimeError, match="line_center"):
        again.load_state_dict(state)


@pytest.mark.parametrize("format", ["torchscript", "torch.export", "onnx"])
def test_a_layer_is_looked_at_in_files_too(behind: CalibratedModel, tmp_path: Path, format: str) -> None:
    x, groups = torch.randn(5, 4), torch.rand(5, 1) < 0.5
    path = behind.export(tmp_path / "model", format, (x, groups))  # compared there, on other numbers of rows too
    assert gmc.export.metadata(path)["inputs"] == ["x", "groups"]


def test_threads_look_at_their_own_pass(behind: CalibratedModel) -> None:
    """Each thread has a batch of another size: what a layer returned in another thread would be of the wrong rows."""
    batches = [(torch.randn(50 + k, 4, generator=torch.Generator().manual_seed(k)), torch.ones(50 + k, 1)) for k in range(6)]
    with torch.no_grad():
        want = [behind(*batch) for batch in batches]

    def same(k: int) -> bool:
        with torch.no_grad():
            return all(torch.equal(behind(*batches[k]), want[k]) for _ in range(60))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(same, range(6)))


def test_a_layer_of_images_is_averaged_over_its_pixels() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3, padding=1), torch.nn.Conv2d(3, 1, 1), torch.nn.Sigmoid())
    data = images(120, 0)
    head = gmc.ThresholdHead(0.1, None, learn=gmc.Linear("l1"))
    model = gmc.attach(net, head, features="0")
    pictures = data["scores"][:, None]
    scores, x = model.scores_and_features(pictures)
    torch.testing.assert_close(x, net[0](pictures).mean((2, 3)))
    head.fit(scores, data["masks"][:, None], features=x)
    assert torch.equal(model(pictures), head(net(pictures), features=x))
    with pytest.raises(TypeError, match="must return a tensor"):
        gmc.attach(torch.nn.Sequential(torch.nn.Flatten(0)), head, features="0")(pictures[:, 0, 0, 0])


@pytest.mark.parametrize("penalty", ["l1", "l2"])
def test_linear_functions_of_features_in_every_head(penalty: str, tmp_path: Path) -> None:
    learn = gmc.Linear(penalty, names=["age", "income"])
    data, new = widths(800, 0), widths(4000, 1)
    head = gmc.QuantileHead(0.9, None, ["women", "urban"], learn=learn).fit(**data)
    plain = gmc.QuantileHead(0.9, None, ["women", "urban"]).fit(data["scores"], data["groups"])
    high = new["features"][:, 1] > 0.5
    q = [plain(new["groups"]), head(new["groups"], features=new["features"])]
    covered = [float((new["scores"] <= t).double().mean()) for t in q]
    assert abs(covered[1] - 0.9) < 0.025 and q[1][high].mean() > 1.3 * q[0][high].mean()
    gmc.save(head, tmp_path / "q.safetensors")
    assert torch.equal(gmc.load(tmp_path / "q.safetensors")(new["groups"], features=new["features"]), q[1])
    masks, fresh = images(400, 0), images(2000, 1)
    masker = gmc.ThresholdHead(0.1, None, ["women", "urban"], learn=learn).fit(**masks)
    one = gmc.ThresholdHead(0.1, None, ["women", "urban"]).fit(*(masks[k] for k in ("scores", "masks", "groups")))
    rates = [missed(h, fresh) for h in (one, masker)]
    assert rates[1].std() < 0.9 * rates[0].std() and abs(float(rates[1].mean()) - 0.1) < 0.015
    batch, _ = people(800, 0)
    labels = batch | {"probs": batch["probs"][:, None].expand(-1, 2), "y": torch.stack([batch["y"], ~batch["y"]], 1)}
    both = gmc.ProbabilityHead(None, ["women", "urban"], num_classes=2, multilabel=True, learn=gmc.Linear(penalty)).fit(**labels)
    scripted = torch.jit.script(both)(labels["probs"], labels["groups"], features=labels["features"])
    assert torch.equal(scripted, output(both, labels)) and both.line_weight.shape == (3, 2)
    for options in ({"penalty": "l0"}, {"ridge": 0.0}, {"steps": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            gmc.Linear(**options)


def test_leaves_of_quantiles_take_the_quantile_of_their_residuals() -> None:
    g = torch.Generator().manual_seed(0)
    scores, place = torch.rand(50, 2, 3, generator=g).double(), torch.arange(50) % 3  # two columns, three scores of each row
    loss = trees.pinball(scores, torch.ones_like(scores), torch.tensor([0.8, 0.3]).double())
    assert loss.steps is not None
    found = loss.steps(torch.full((50, 2), 0.5).double(), place, 4, slice(0, 50))
    for column, target in enumerate((0.8, 0.3)):
        for leaf in range(3):
            ordered = (scores[place == leaf, column] - 0.5).flatten().sort().values
            assert float(found[leaf, column]) == -float(ordered[math.ceil(target * len(ordered)) - 1])
    assert bool((found[3] == 0).all())
    slope, _ = loss.slopes(torch.full((50, 2), 0.5).double(), slice(0, 50))
    assert float(slope[7, 1]) == pytest.approx(float((scores[7, 1] <= 0.5).sum()) - 0.3 * 3)


@pytest.mark.parametrize("kind", ["pandas", "polars", "dict"])
def test_features_come_by_name_from_a_frame(kind: str, fitted: gmc.ProbabilityHead) -> None:
    """In any order, with other columns, None for missing values, labels for codes: the same as the array of numbers."""
    batch = people(300, 2)[0]
    age, income, site = batch["features"].unbind(1)
    columns = {
        "unused": ["x"] * 300,
        "site": ["ABCD"[int(v)] for v in site],
        "income": income.double().numpy(),
        "age": [None if math.isnan(v) else v for v in age.tolist()],
    }
    frame = columns if kind == "dict" else pytest.importorskip(kind).DataFrame(columns)
    want = output(fitted, batch)
    assert torch.equal(output(fitted, batch | {"features": frame}), want)
    again = make().fit(**people(300, 2)[0])
    assert torch.equal(output(make().fit(**batch | {"features": frame}), batch), output(again, batch))
    model = gmc.attach(torch.nn.Identity(), fitted, adapter=gmc.Adapter(activation="none"))
    assert torch.equal(model(batch["probs"], groups=batch["groups"], features=frame), want)
    numbered = gmc.ProbabilityHead(None, learn=gmc.Trees(depth=1, names=["site"], categorical={"site": ["3", "1"]}))
    assert numbered.by_name({"site": torch.tensor([1, 3, 1])})[:, 0].tolist() == [1.0, 0.0, 1.0]  # labels, not codes
    assert numbered.by_name({"site": [3.0, None, 1.0]})[:, 0].isnan().tolist() == [False, True, False]
    for change, why in (
        ({"site": ["E"] * 300}, "column `site` of `features` must hold one of its levels, got 'E'"),
        ({"age": ["old"] * 300}, r"column `age` of `features` must hold a number \(for labels: .*'old'"),
        ({"age": [1.0]}, "same length"),
        ({"age": [1e300] * 300}, "finite as float32"),
    ):
        with pytest.raises(ValueError, match=why):
            output(fitted, batch | {"features": columns | change})
    del columns["income"]
    with pytest.raises(ValueError, match=r"`features` has no column 'income'; its columns are unused, site, age"):
        fitted.audit(**batch | {"features": columns})
    with pytest.raises(ValueError, match=r"does not know which columns to take; make it with learn=gmc.Trees\(names="):
        gmc.ProbabilityHead(None, learn=gmc.Trees()).fit(batch["probs"], batch["y"], features=columns)
