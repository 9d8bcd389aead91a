"""Groups that nobody named: fits, files, doors, rules in words, and errors."""

import math
from pathlib import Path

import pytest
import torch

import torchgmc as gmc
from torchgmc.engine import trees

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


def test_wrong_features_are_named(fitted: gmc.ProbabilityHead) -> None:
    batch, _ = people(60, 0)
    p, y, groups, x = batch.values()
    for wrong, text in (
        (x[:, :2], "must have 3 columns"),
        (x[:5], r"shape \(60, d\)"),
        (x / 0, "finite"),
        (torch.full_like(x, 0.5), "whole numbers"),
    ):
        with pytest.raises(ValueError, match=text):
            make().observe(p, y, groups, features=wrong)
    with pytest.raises(ValueError, match="must have 3 columns"):
        fitted(p, groups, features=x[:, :1])
    with pytest.raises(ValueError, match="does not use them"):
        gmc.ProbabilityHead(None).fit(p, y, features=x)
    with pytest.raises(ValueError, match="solver='exact'"):
        gmc.ProbabilityHead(0.1, learn=gmc.Trees()).fit(p, y, features=x, solver="paper")
    with pytest.raises(ValueError, match="noise_floor"):
        gmc.ProbabilityHead(0.1, noise_floor=False, learn=gmc.Trees())
    with pytest.raises(TypeError, match=r"gmc\.Trees"):
        gmc.ProbabilityHead(0.1, learn=3)
    for options in ({"depth": 0}, {"depth": 9}, {"rate": 2.0}, {"bins": 256}, {"categorical": ["site"]}):
        with pytest.raises(ValueError, match=next(iter(options))):
            gmc.Trees(**options)


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


def test_fresh_data_are_covered_at_the_target() -> None:
    """Trees fit noise of the rows that they see; thresholds are set on what trees that did not see a row leave of it."""
    covered = []
    for seed in range(4):
        data, new = widths(600, seed), widths(4000, 100 + seed)
        head = gmc.QuantileHead(0.9, None, ["women", "urban"], learn=gmc.Trees(trees=20, rate=0.5)).fit(**data)
        covered.append((new["scores"] <= head(new["groups"], features=new["features"])).double().mean())
        assert len(head.tree_column)
    assert abs(float(torch.stack(covered).mean()) - 0.9) < 0.012  # set on the sample that trees saw, it would be 0.87


def test_rows_held_out_have_no_say_in_where_trees_put_them() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, generator=g)
    scores = torch.rand(200, generator=g).double() + 2 * (x[:, 0] > 0)
    z, changed = torch.full((200, 1), 0.5).double(), torch.cat([scores[:150], scores[150:] + 9])
    coded = trees.code(x, torch.zeros(2, dtype=torch.bool), 8)
    found = [
        trees.boost(coded, z, z, trees.pinball(s, torch.ones(200).double(), 0.8), 50, 2, 7, 0.3, 5.0, 1.0, stop=False)
        for s in (scores, changed)
    ]
    assert torch.equal(found[0].z, found[1].z) and not torch.equal(found[0].z, z[150:])


def test_leaves_of_quantiles_take_the_quantile_of_their_residuals() -> None:
    g = torch.Generator().manual_seed(0)
    scores, weight, place = torch.rand(50, generator=g).double(), torch.ones(50).double(), torch.arange(50) % 3
    loss = trees.pinball(scores, weight, 0.8)
    assert loss.steps is not None
    found = loss.steps(torch.full((50, 1), 0.5).double(), place, 4, slice(0, 50))[:, 0]
    for leaf in range(3):
        ordered = (scores[place == leaf] - 0.5).sort().values
        assert float(found[leaf]) == -float(ordered[math.ceil(0.8 * len(ordered)) - 1])
    assert found[3] == 0


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
    ):
        with pytest.raises(ValueError, match=why):
            output(fitted, batch | {"features": columns | change})
    del columns["income"]
    with pytest.raises(ValueError, match=r"`features` has no column 'income'; its columns are unused, site, age"):
        fitted.audit(**batch | {"features": columns})
    with pytest.raises(ValueError, match=r"does not know which columns to take; make it with learn=gmc.Trees\(names="):
        gmc.ProbabilityHead(None, learn=gmc.Trees()).fit(batch["probs"], batch["y"], features=columns)
