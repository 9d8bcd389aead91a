"""Fuzz entries of methods: groups, audits, heads beside fit and forward, penalties, metrics, mappings."""

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torchgmc as gmc
from gmctest import fuzz_functions as common, heads_zoo
from gmctest.fuzz_functions import HERE, finite_if_plain, head_of, rng
from gmctest.fuzz_inputs import Arguments, Entry, all_plain
from gmctest.oracles import miss_rate, violations_loop
from gmctest.oracles_tree import SlowTree
from torchgmc import mappings
from torchgmc.heads.learned import learner

SEX, AGE = ["f", "m", "f", "m", "f"], [20.0, 40.0, 61.0, 33.0, 52.0]
GROUPS = gmc.Groups.from_columns({"sex": SEX, "age": AGE}, bins={"age": [30, 50]}, intersections=2)
ROWS = GROUPS.membership.tolist()


# -- groups -------------------------------------------------------------------------------------------------------------------


def check_transform(data: Arguments, groups: gmc.Groups) -> None:
    assert groups.names == GROUPS.names
    if isinstance(data["age"], list) and data["sex"] == SEX:
        member = groups.membership[:, groups.names.index("age<30")]
        assert member.tolist() == [age < 30 for age in data["age"]]


def check_learned(data: Arguments, groups: gmc.Groups) -> None:
    assert groups.num_rows == 0 and len(groups) > 0
    if data["sex"] == SEX and data["age"] == AGE and data["edges"] == [30, 50] and data["intersections"] == 2:
        assert data["min_size"] > 1 or groups.names == GROUPS.names


def check_restored(data: Arguments, groups: gmc.Groups) -> None:
    assert groups.names == GROUPS.names and groups.transform({"sex": SEX, "age": AGE}).membership.tolist() == ROWS


def grouped() -> gmc.Head:
    head = gmc.QuantileHead(0.8, 0.1, GROUPS)
    head.named_groups = GROUPS
    return head


GROUPED = grouped()


def check_rows(data: Arguments, groups: gmc.Groups) -> None:
    rows = data["rows"]
    picked = range(5)[rows] if isinstance(rows, slice) else np.arange(5)[np.asarray(torch.as_tensor(rows))]
    assert groups.membership.tolist() == [ROWS[i] for i in picked]


def check_sums(data: Arguments, sums: Tensor) -> None:
    if all_plain(data) and data["values"].dtype == torch.float64:
        expected = violations_loop(ROWS, data["values"].tolist())
        np.testing.assert_allclose(sums.detach().numpy() / 5, np.array(expected).reshape(sums.shape), atol=1e-9)


# -- audits -------------------------------------------------------------------------------------------------------------------


def an_audit(seed: int) -> gmc.Audit:
    return common.audit_batches(**common.image_data(24, seed), delta=0.1, alpha=0.1)


def check_view(data: Arguments, audit: gmc.Audit) -> None:
    assert audit.conditional == (data["kind"] == "conditional")
    for row in audit.rows():
        own = row["risk"] - 0.1
        assert abs(row["estimate"] - (own if audit.conditional else own * row["mass"])) < 1e-6
        far = max(abs(row["low"]), abs(row["high"]))
        assert (row["verdict"] == "holds") == (far <= audit.alpha)


def check_needed(data: Arguments, needed: int | None) -> None:
    assert needed is None or needed >= 1


def check_merged(data: Arguments, audit: gmc.Audit) -> None:
    assert audit.num_examples == an_audit(1).num_examples + data["other"].num_examples


def watched(n: int, seed: int) -> Arguments:
    scores, masks, groups = heads_zoo.images(n, seed).observe
    return {"scores": scores, "masks": masks, "groups": groups, "delta": 0.1, "alpha": 0.2, "cluster_size": 1.0}


def monitored(scores: Any, masks: Any, groups: Any, **options: Any) -> gmc.Monitor:
    monitor = gmc.Monitor(head_of("threshold"), **options)
    monitor.update(scores, masks, groups)
    return monitor


def check_evidence(data: Arguments, monitor: Any) -> None:
    assert 0.0 < monitor.evidence < float("inf") and int(monitor.batches) <= 1 and len(monitor.message) > 10


def shifted(n: int, seed: int) -> Arguments:
    return {"scores": rows(120, seed, 1)[:, 0], "new": rows(n, seed + 1, 1)[:, 0], "delta": 0.1, "tolerance": 0.1, "bins": 4}


def shift(scores: Any, new: Any, **options: Any) -> gmc.ShiftMonitor:
    monitor = gmc.ShiftMonitor(scores, **options)
    monitor.update(new)
    return monitor


def check_file(data: Arguments, path: Any) -> None:
    text = path.read_text()
    assert text.startswith("<!doctype html>") if path.suffix == ".html" else json.loads(text)


def figure(data: Arguments, drawn: Any) -> None:
    from torchgmc.plots import png

    assert drawn.axes and (data.get("drawn") is None or png(drawn).startswith(b"\x89PNG"))


def observed_head(n: int, seed: int) -> gmc.Head:
    head = gmc.QuantileHead(0.8, 0.1, heads_zoo.GROUPS)
    head.observe(*heads_zoo.residuals(n, seed).observe)
    return head


def check_joined(data: Arguments, head: gmc.Head) -> None:
    assert head.calibrate().report.details["examples"] == 40 + len(data["other"].statistics.scores)


def check_forgotten(data: Arguments, head: gmc.Head) -> None:
    assert abs(float(head.statistics.weight.sum()) - 40 * data["factor"]) < 1e-6


def check_learner(data: Arguments, learn: gmc.Trees | gmc.Linear) -> None:
    assert learner(learn.to_dict()) == learn


LOOK = {"title": None, "dark": False}


# -- heads --------------------------------------------------------------------------------------------------------------------


def check_threshold(data: Arguments, lam: Tensor) -> None:
    """The thresholds of the audit: the risk at them, counted by a loop, is the audit's."""
    finite_if_plain(data, lam)
    if all_plain(data) and isinstance(data["groups"], Tensor) and data["groups"].equal(CHECKED[2]):
        scores, masks = (value.flatten(1).tolist() for value in CHECKED[:2])
        risks = [miss_rate(*row, float(t)) for row, t in zip(zip(scores, masks, strict=True), lam, strict=True)]
        risk = [r for r in risks if r is not None]
        audit = head_of("threshold").audit(*CHECKED)
        rows = {row["group"]: row for row in audit.rows()}
        assert abs(rows["a"]["estimate"] - (sum(risk) / len(risk) - 0.1)) < 1e-6  # everyone is in a


CHECKED = heads_zoo.images(16, 5).observe
SLOW = SlowTree(head_of("tree").tree.parents)


def check_answer(data: Arguments, nodes: Tensor) -> None:
    probs, lam = data["probs"], data["lam"]
    if all_plain(data) and probs.dtype == torch.float64 and lam.shape == probs.shape[:1] and probs.dim() == 2:
        for row, t, node in zip(probs.tolist(), lam.tolist(), nodes.tolist(), strict=True):
            sums = [sum(row[k] for k in SLOW.leaves[v]) for v in range(8)]
            if min(abs(s - t) for s in sums) > 0.05:  # else the noise against ties may decide
                assert node == SLOW.answer(row, t)


def check_leaves(data: Arguments, leaves: Tensor) -> None:
    nodes = torch.as_tensor(data["nodes"]).flatten().tolist()
    assert [set(row.nonzero()[:, 0].tolist()) for row in leaves.reshape(-1, 5)] == [SLOW.leaves[int(v)] for v in nodes]


def tree() -> Any:
    return head_of("tree")


def check_covers(data: Arguments, inside: Tensor) -> None:
    finite_if_plain(data, inside)
    if data["mode"] == "hard" and all_plain(data):
        assert inside.equal(data["scores"].double() <= head_of("quantile")(data["groups"]))


def check_state(data: Arguments, out: Tensor) -> None:
    assert out.shape == data["scores"].shape


def apply_state(offsets: Any, scores: Any, groups: Any) -> Tensor:
    return head_of("threshold").apply_state({"offsets": offsets}, scores, groups)


# -- training -----------------------------------------------------------------------------------------------------------------


def penalty_of(softness: Any, alpha: Any, kind: Any, **data: Any) -> Tensor:
    loss = gmc.GMCPenalty.for_head(head_of("probability"), softness, alpha=alpha, kind=kind)
    value: Tensor = loss(*data.values())
    return value


def penalty(**options: Any) -> gmc.GMCPenalty:
    return gmc.GMCPenalty(**options)


def metric(groups: Any, num_outputs: Any, mapping: Any, conditional: Any, s: Any, member: Any, weight: Any) -> Tensor:
    measure = gmc.metrics.GroupViolation(groups, num_outputs, mapping, conditional)
    measure.accumulate(s, member, weight)
    return measure.violations()


def metric_data(n: int, seed: int) -> Arguments:
    member = heads_zoo.membership(n, rng(seed))
    s = torch.randn(n, generator=rng(seed), dtype=torch.float64)
    data = {"groups": heads_zoo.GROUPS, "num_outputs": 1, "mapping": "residual", "conditional": False}
    return data | {"s": s, "member": member, "weight": None}


def check_metric(data: Arguments, table: Tensor) -> None:
    if not all_plain(data) or data["conditional"] or data["mapping"] != "residual" or not len(data["s"]):
        return
    member = torch.as_tensor(np.asarray(data["member"]) if not isinstance(data["member"], Tensor) else data["member"])
    w = None if data["weight"] is None else torch.as_tensor(data["weight"]).double().tolist()
    expected = violations_loop(
        member.bool().tolist(), torch.as_tensor(data["s"]).detach().double().reshape(-1, 1).tolist(), weight=w
    )
    np.testing.assert_allclose(table.detach().numpy(), np.array(expected), rtol=1e-4, atol=1e-5)


WATCHED = ["threshold", "threshold-classes", "probability", "probability-classes"]
WATCHED += ["quantile", "distribution", "tree-groups", "gmc"]


def watched_data(name: str) -> Any:
    entry = next(e for e in heads_zoo.ZOO if e.name == name)

    def make(n: int, seed: int) -> Arguments:
        *data, groups = entry.data(n, seed).observe
        return {f"data{k}": value for k, value in enumerate(data)} | {"groups": groups, "weight": None}

    return make


def watch(name: str) -> Any:
    def call(groups: Any, weight: Any, **data: Any) -> Tensor:
        measure = gmc.metrics.for_head(head_of(name))
        measure.update(*data.values(), groups, weight=weight)
        value: Tensor = measure.compute()
        return value

    return call


def check_watched(name: str) -> Any:
    def check(data: Arguments, worst: Tensor) -> None:
        groups = data["groups"]
        if (
            all_plain(data)
            and data["weight"] is None
            and not any(isinstance(v, Tensor) and v.dtype in (torch.float16, torch.bfloat16) for v in data.values())
            and isinstance(groups, Tensor)
            and len(groups)
            and groups.bool().any(0).all()
        ):
            *values, groups, _ = data.values()
            audit = head_of(name).audit(*values, groups)
            assert "classes" in name or abs(float(worst) - audit.max_violation) < 1e-4  # level sets are not watched

    return check


def mapped(make: Any) -> Any:
    """Value of s and potential of a mapping whose data may be broken."""

    def call(f: Any, weight: Any, **data: Any) -> Any:
        mapping = make(**data)
        everyone = torch.ones(len(f) if isinstance(f, Tensor) and f.dim() else 1, 1).bool()
        return gmc.solve(f, mapping, everyone, alpha=0.3, weight=weight, max_iter=20).f

    return call


def rows(n: int, seed: int, columns: int) -> Tensor:
    return torch.rand(n, columns, generator=rng(seed), dtype=torch.float64)


def head_arguments(head: gmc.Head) -> Any:
    return lambda n, s: dict(head.config())


def check_config(data: Arguments, head: gmc.Head) -> None:
    assert not head.is_fitted and head.alpha == (None if data["alpha"] is None else float(data["alpha"]))


def indexed(index: Any, ask: str) -> Any:
    return getattr(GROUPS, ask)(index)


def check_index(data: Arguments, found: Any) -> None:
    place = int(data["index"])
    if data["ask"] == "name":
        assert found == GROUPS.names[place]
    elif data["ask"] == "member":
        assert found.tolist() == [row[place] for row in ROWS]


ENTRIES = [
    Entry(
        "Groups.transform",
        lambda n, s: {"sex": SEX, "age": AGE, "unknown": "none" if s % 2 else "error"},
        lambda sex, age, unknown: GROUPS.transform({"sex": sex, "age": age}, unknown),
        check_transform,
    ),
    Entry(
        "Groups.learn",
        lambda n, s: {"sex": SEX, "age": AGE, "intersections": 2, "edges": [30, 50], "min_size": 1, "spelled": s % 2 == 0},
        lambda sex, age, edges, **more: gmc.Groups.learn([{"sex": sex, "age": age}] * 2, bins={"age": edges}, **more),
        check_learned,
    ),
    Entry("Groups.from_dict", lambda n, s: GROUPS.to_dict(), lambda **d: gmc.Groups.from_dict(d), check_restored),
    Entry(
        "Head.transform",
        lambda n, s: {"sex": SEX, "age": AGE, "unknown": "error"},
        lambda unknown, **columns: GROUPED.transform(columns, unknown),
        lambda data, member: check_transform(data, GROUPS.transform({"sex": data["sex"], "age": data["age"]}, "none")),
    ),
    Entry("Groups.to", lambda n, s: {"device": "cpu"}, GROUPS.to, lambda d, g: None),
    Entry(
        "Groups.name",
        lambda n, s: {"index": s % 5},
        lambda index: indexed(index, "name"),
        lambda d, v: check_index(d | {"ask": "name"}, v),
    ),
    Entry(
        "Groups.member",
        lambda n, s: {"index": s % 5},
        lambda index: indexed(index, "member"),
        lambda d, v: check_index(d | {"ask": "member"}, v),
    ),
    Entry("Groups[rows]", lambda n, s: {"rows": torch.randint(5, (3,), generator=rng(s))}, lambda rows: GROUPS[rows], check_rows),
    Entry("Groups.sums", lambda n, s: {"values": rows(5, s, 2)}, lambda values: GROUPS.sums(values), check_sums),
    Entry(
        "Audit.view",
        lambda n, s: {"kind": ("conditional", "mass-weighted")[s % 2], "alpha": 0.05},
        lambda **a: an_audit(1).view(**a),
        check_view,
    ),
    Entry("Audit.examples_needed", lambda n, s: {"alpha": 0.4}, lambda alpha: an_audit(1).examples_needed(alpha), check_needed),
    Entry("Audit.merge", lambda n, s: {"other": an_audit(1)}, lambda other: an_audit(1).merge(other), check_merged),
    Entry(
        "Head.merge",
        lambda n, s: {"other": observed_head(n, s)},
        lambda other: observed_head(40, 1).merge(other),
        check_joined,
    ),
    Entry("Head.forget", lambda n, s: {"factor": 0.5}, lambda factor: observed_head(40, 1).forget(factor), check_forgotten),
    Entry(
        "Trees",
        lambda n, s: {"depth": 2, "trees": 9, "rate": 0.5, "bins": 8, "ridge": 2.0, "smallest": 1.0, "names": ["x", "y"]},
        gmc.Trees,
        check_learner,
    ),
    Entry(
        "Linear",
        lambda n, s: {"penalty": "l1" if s % 2 else "l2", "names": ["x", "y"], "steps": 9, "ridge": 2.0},
        gmc.Linear,
        check_learner,
    ),
    Entry("Monitor", watched, monitored, check_evidence),
    Entry("Monitor.plot", lambda n, s: LOOK, lambda **a: monitored(**watched(40, 1)).plot(**a), figure, share=0.3),
    Entry("plots.evidence", lambda n, s: LOOK, lambda **a: gmc.plots.evidence(monitored(**watched(40, 1)), **a), figure),
    Entry("ShiftMonitor", shifted, shift, check_evidence),
    Entry("Audit.to_json", lambda n, s: {"path": HERE / "audit.json"}, lambda path: an_audit(1).to_json(path), check_file),
    Entry(
        "Audit.to_html",
        lambda n, s: {"path": HERE / "audit.html", "title": "A", "head": None, "settings": {"seed": s}},
        lambda **a: an_audit(1).to_html(**a),
        check_file,
        share=0.3,
    ),
    Entry("Audit.plot", lambda n, s: LOOK | {"alpha": 0.1, "top": 3}, lambda **a: an_audit(1).plot(**a), figure, share=0.3),
    Entry("Report.plot", lambda n, s: LOOK | {"alpha": 0.1}, lambda **a: head_of("threshold").report.plot(**a), figure, share=0.3),
    Entry(
        "Comparison.plot",
        lambda n, s: LOOK | {"top": 3},
        lambda **a: gmc.compare({"a": an_audit(1), "b": an_audit(2)}).plot(**a),
        figure,
        share=0.3,
    ),
    Entry(
        "Comparison.to_json",
        lambda n, s: {"path": HERE / "both.json"},
        lambda path: gmc.compare({"a": an_audit(1)}).to_json(path),
        check_file,
        share=0.5,
    ),
    Entry(
        "Comparison.to_html",
        lambda n, s: {"path": HERE / "both.html", "title": "A", "head": None, "lead": "b"},
        lambda **a: gmc.compare({"a": an_audit(1), "b": an_audit(2)}).to_html(**a),
        check_file,
        share=0.3,
    ),
    Entry(
        "ThresholdHead.threshold",
        lambda n, s: {"groups": CHECKED[2], "n": 16},
        lambda groups, n: head_of("threshold").threshold(groups, n),
        check_threshold,
    ),
    Entry(
        "TreeHead.threshold",
        lambda n, s: {"probs": heads_zoo.documents(n, s).observe[0]},
        lambda probs: tree().threshold(probs),
        finite_if_plain,
    ),
    Entry(
        "TreeHead.answer",
        lambda n, s: {"probs": heads_zoo.documents(n, s).observe[0].double(), "lam": rows(n, s, 1)[:, 0]},
        lambda probs, lam: tree().answer(probs, lam),
        check_answer,
    ),
    Entry(
        "TreeHead.leaves",
        lambda n, s: {"nodes": torch.randint(8, (n,), generator=rng(s))},
        lambda nodes: tree().leaves(nodes),
        check_leaves,
    ),
    Entry(
        "TreeHead.names",
        lambda n, s: {"nodes": torch.randint(8, (n,), generator=rng(s))},
        lambda nodes: tree().names(nodes),
        lambda d, v: None,
    ),
    Entry(
        "QuantileHead.covers",
        lambda n, s: (
            dict(zip(("scores", "groups"), heads_zoo.residuals(n, s).observe, strict=True)) | {"mode": "hard", "temperature": 0.1}
        ),
        lambda **a: head_of("quantile").covers(**a),
        check_covers,
    ),
    Entry(
        "DistributionHead.adjust",
        lambda n, s: dict(zip(("scores", "groups"), heads_zoo.prompts(n, s).observe, strict=True)),
        lambda **a: head_of("distribution").adjust(**a),
        finite_if_plain,
    ),
    Entry(
        "DistributionHead.adjust_",
        lambda n, s: dict(zip(("logits", "groups"), heads_zoo.prompts(n, s).observe, strict=True)),
        lambda logits, groups: head_of("distribution").adjust_(logits.clone() if isinstance(logits, Tensor) else logits, groups),
        finite_if_plain,
    ),
    Entry(
        "Head.apply_state",
        lambda n, s: {
            "offsets": head_of("threshold").offsets,
            **dict(zip(("scores", "groups"), heads_zoo.images(n, s).inputs, strict=True)),
        },
        apply_state,
        check_state,
    ),
    *(
        Entry(
            f"from_config {name}",
            head_arguments(head_of(name)),
            lambda n=name, **a: type(head_of(n)).from_config(a),
            check_config,
        )
        for name in (
            "threshold",
            "tree",
            "distribution",
            "probability",
            "quantile",
            "quantile-conformal",
            "conformal",
            "unprocessed",
            "tree-conformal",
            "tree-unprocessed",
        )
    ),
    Entry(
        "GMCPenalty.for_head",
        lambda n, s: (
            {"softness": 0.1, "alpha": 0.0, "kind": "smooth_max"}
            | dict(zip(("probs", "y", "groups"), heads_zoo.events(n, s).observe, strict=True))
        ),
        penalty_of,
        finite_if_plain,
    ),
    Entry(
        "GMCPenalty options",
        lambda n, s: {
            "mapping": "residual",
            "groups": ["a"],
            "kind": "smooth_max",
            "alpha": 0.0,
            "temperature": 0.01,
            "reduction": "sum",
            "decay": 0.9,
            "conditional": False,
            "what": None,
        },
        penalty,
        lambda d, p: None,
    ),
    Entry("metrics.accumulate", metric_data, metric, check_metric),
    *(Entry(f"metrics.for_head {name}", watched_data(name), watch(name), check_watched(name)) for name in WATCHED),
    Entry(
        "mappings.Residual",
        lambda n, s: {"f": rows(n, s, 2), "weight": None, "y": rows(n, s + 1, 2)},
        mapped(mappings.Residual),
        finite_if_plain,
    ),
    Entry(
        "mappings.Pinball",
        lambda n, s: {"f": rows(n, s, 1), "weight": None, "scores": rows(n, s + 1, 1), "target": 0.8},
        mapped(mappings.Pinball),
        finite_if_plain,
    ),
    Entry(
        "mappings.MissRate",
        lambda n, s: {
            "f": rows(n, s, 1),
            "weight": None,
            "scores": rows(n, s + 1, 6),
            "masks": rows(n, s + 2, 6) < 0.9,
            "target": 0.2,
        },
        mapped(mappings.MissRate),
        finite_if_plain,
    ),
    Entry("mappings.Centered", lambda n, s: {"f": rows(n, s, 2), "weight": None}, mapped(mappings.Centered), finite_if_plain),
]
