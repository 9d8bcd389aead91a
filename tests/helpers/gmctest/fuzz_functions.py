"""Fuzz entries of the functions: search, solver, groups, discovery, files, baselines, theory, metrics, command line."""

import contextlib
import functools
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import torchgmc as gmc
from gmctest import cli_files, heads_zoo
from gmctest.fuzz_inputs import FOLDER, Arguments, Entry, all_plain
from gmctest.oracles import violations_loop
from torchgmc import baselines, conformity, func, mappings, projections, theory
from torchgmc.audits import overlap

HERE = Path(FOLDER.name)
head_of = functools.cache(lambda name: next(e for e in heads_zoo.ZOO if e.name == name).fitted(60, 1))


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def finite(value: Any) -> None:
    """No NaN in what came back."""
    if isinstance(value, Tensor):
        assert not value.is_floating_point() or not value.detach().isnan().any(), "a silent NaN"
    elif isinstance(value, float):
        assert not math.isnan(value), "a silent NaN"
    elif isinstance(value, tuple | list):
        for one in value:
            finite(one)


def finite_if_plain(data: Arguments, answer: Any) -> None:
    if all_plain(data):
        finite(answer)


# -- search and solver --------------------------------------------------------------------------------------------------------


def search(n: int, seed: int) -> Arguments:
    g = rng(seed)
    who = torch.rand(n, 3, generator=g) < 0.5
    what = torch.randn(2, 2, generator=g, dtype=torch.float64) if seed % 2 else None
    weight = torch.rand(n, generator=g, dtype=torch.float64) + 0.1 if seed % 3 else None
    return {"who": who, "s": torch.randn(n, 2, generator=g, dtype=torch.float64), "what": what, "weight": weight}


def check_search(data: Arguments, table: Tensor) -> None:
    who, s = data["who"], data["s"]
    if not all_plain(data) or who.dim() != 2 or s.dtype != torch.float64 or not len(s) or not s.numel() or not who.numel():
        return finite_if_plain(data, table)
    what, weight = data["what"], data["weight"]
    if weight is not None and (weight.dim() != 1 or float(weight.sum()) <= 0):
        return None
    member = who.detach().double()
    assert bool(((member == 0) | (member == 1)).all())
    rows = s.detach() if s.dim() == 2 else s.detach()[:, None]
    expected = violations_loop(
        member.tolist(),
        rows.tolist(),
        None if what is None else what.detach().tolist(),
        None if weight is None else weight.detach().double().tolist(),
    )
    if what is not None and len(what) == 0:
        assert table.shape == (member.shape[1], 0)
        return None
    np.testing.assert_allclose(table.detach().numpy(), np.array(expected).reshape(table.shape), atol=1e-9)
    return None


def problem(n: int, seed: int) -> Arguments:
    g = rng(seed)
    return {
        "f0": torch.rand(n, generator=g, dtype=torch.float64),
        "y": torch.rand(n, 1, generator=g, dtype=torch.float64),
        "who": torch.rand(n, 3, generator=g) < 0.6,
        "weight": None,
        "alpha": 0.02,
        "max_iter": 50,
        "eta": None,
        "solver": "exact",
    }


def solve(y: Any, f0: Any, who: Any, **options: Any) -> gmc.Solution:
    if isinstance(options["max_iter"], int) and options["max_iter"] > 50:
        options["max_iter"] = 50
    return gmc.solve(f0, mappings.Residual(y), who, **options)


def check_solution(data: Arguments, found: gmc.Solution) -> None:
    if not all_plain(data):
        return
    finite(found.f)
    assert found.f.shape == data["f0"].shape
    if found.report.converged:
        assert float(found.report.violations_after.abs().max()) <= data["alpha"] * (1 + 1e-9)


def replayed(n: int, seed: int) -> Arguments:
    data = problem(n, seed)
    return {"f0": data["f0"], "who": data["who"]}


@functools.cache
def solution() -> gmc.Solution:
    data = problem(40, 7)
    return gmc.solve(data["f0"], mappings.Residual(data["y"]), data["who"], alpha=0.02)


# -- groups -------------------------------------------------------------------------------------------------------------------


def columns(n: int, seed: int) -> Arguments:
    g = np.random.default_rng(seed)
    return {
        "sex": torch.from_numpy(g.integers(0, 2, n)),
        "age": torch.from_numpy(g.normal(size=n)),
        "intersections": 2,
        "quantiles": 3,
        "min_size": 1,
    }


def from_columns(sex: Any, age: Any, intersections: Any, quantiles: Any, min_size: Any) -> gmc.Groups:
    return gmc.Groups.from_columns(
        {"sex": sex, "age": age}, intersections=intersections, quantiles={"age": quantiles}, min_size=min_size, small="drop"
    )


def check_groups(data: Arguments, groups: gmc.Groups) -> None:
    member = groups.membership
    assert member.dtype == torch.bool and member.shape == (groups.num_rows, len(groups.names))
    assert len(set(groups.names)) == len(groups.names)


def discovery(n: int, seed: int) -> Arguments:
    g = np.random.default_rng(seed)
    return {
        "sex": torch.from_numpy(g.integers(0, 2, n)),
        "s": torch.from_numpy(g.uniform(-1, 1, n)),
        "depth": 1,
        "top": 3,
        "delta": 0.05,
        "alpha": 0.0,
        "min_size": 2,
        "weight": None,
    }


def find_groups(sex: Any, s: Any, **options: Any) -> Any:
    return gmc.find_groups({"sex": sex}, s, **options)


# -- heads' helpers -----------------------------------------------------------------------------------------------------------


def audit_batches(scores: Any, masks: Any, groups: Any, delta: Any, alpha: Any) -> gmc.Audit:
    return gmc.audit(head_of("threshold"), [(scores, masks, groups)], delta, alpha=alpha)


def audit_named(scores: Any, masks: Any, groups: Any, named: Any, delta: Any) -> gmc.Remaining:
    return gmc.audit_named(head_of("threshold"), (scores, masks, groups), named, delta=delta)


def image_data(n: int, seed: int) -> Arguments:
    return dict(zip(("scores", "masks", "groups"), heads_zoo.images(n, seed).observe, strict=True))


def swept(alphas: Any) -> Any:
    head = head_of("quantile")
    return func.sweep(head, alphas)


class Linear(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.layout != torch.strided or x.device.type != "cpu":
            raise TypeError("`x` is nothing for this model")  # the user's model, not ours
        return torch.sigmoid(x)


def attached(head: Any, groups: Any, mode: Any, temperature: Any, x: Any, member: Any) -> Tensor:
    out: Tensor = gmc.attach(Linear(), head, groups, mode=mode, temperature=temperature)(x, member)
    return out


def attach_arguments(n: int, seed: int) -> Arguments:
    scores, _, member = heads_zoo.images(n, seed).observe
    return {"head": head_of("threshold"), "groups": None, "mode": "hard", "temperature": 0.1, "x": scores, "member": member}


def round_trip(head: Any, notes: Any) -> gmc.Head:
    return gmc.load(gmc.save(head, HERE / "head.safetensors", notes))


def penalty(probs: Any, y: Any, groups: Any, weight: Any, kind: Any, alpha: Any, temperature: Any) -> Tensor:
    loss = gmc.GMCPenalty("residual", heads_zoo.GROUPS, kind=kind, alpha=alpha, temperature=temperature)
    value: Tensor = loss(probs, y, groups, weight=weight)
    return value


def event_data(n: int, seed: int) -> Arguments:
    probs, y, member = heads_zoo.means(n, seed).observe
    return {"probs": probs, "y": y, "groups": member, "weight": None}


def metric(probs: Any, y: Any, groups: Any, weight: Any) -> Tensor:
    measure = gmc.metrics.GroupViolation(heads_zoo.GROUPS)
    measure.update(probs, y, groups, weight)
    value: Tensor = measure.compute()
    return value


# -- baselines, projections, theory, conformity ------------------------------------------------------------------------------


def conformal(scores: Any, masks: Any, groups: Any, target: Any) -> Tensor:
    head = baselines.ConformalRiskControl(target, 0.05, heads_zoo.GROUPS).fit(scores, masks, groups)
    value: Tensor = head.threshold(groups)
    return value


def check_simplex(data: Arguments, p: Tensor) -> None:
    if not all_plain(data):
        return
    assert p.shape == data["f"].shape and p.dtype == data["f"].dtype
    if p.dtype in (torch.float32, torch.float64) and 1e-3 < data["total"] < 1e3 and p.numel():
        np.testing.assert_allclose(p.detach().sum(-1).numpy(), float(data["total"]), rtol=1e-4)
        assert float(p.detach().min()) >= 0


def check_box(data: Arguments, p: Tensor) -> None:
    if all_plain(data):
        assert not p.numel() or (float(p.detach().min()) >= data["low"] - 1e-2 and float(p.detach().max()) <= data["high"] + 1e-2)


def classes(n: int, seed: int) -> Arguments:
    probs, labels, _ = heads_zoo.events(n, seed, 4).observe
    return {"probs": probs, "labels": labels}


def check_aps(data: Arguments, value: Tensor) -> None:
    finite_if_plain(data, value)
    assert value.shape == data["labels"].shape


def pair(n: int, seed: int) -> Arguments:
    g = rng(seed)
    return {"prediction": torch.randn(n, generator=g), "y": torch.randn(n, generator=g)}


def triple(n: int, seed: int) -> Arguments:
    g = rng(seed)
    return {"low": torch.randn(n, generator=g), "high": torch.randn(n, generator=g) + 1, "y": torch.randn(n, generator=g)}


def check_interval(data: Arguments, ends: tuple[Tensor, Tensor]) -> None:
    if all_plain(data) and all(v.dtype in (torch.float32, torch.float64) for v in data.values()):
        prediction, threshold = (v.detach().double().numpy() for v in data.values())
        np.testing.assert_allclose(ends[0].detach().double().numpy(), prediction - threshold, atol=1e-4)
        np.testing.assert_allclose(ends[1].detach().double().numpy(), prediction + threshold, atol=1e-4)


def check_lac_set(data: Arguments, inside: Tensor) -> None:
    probs, threshold = data["probs"], data["threshold"]
    assert inside.dtype == torch.bool and inside.shape == probs.shape
    if all_plain(data) and probs.dtype == torch.float64 and threshold.dim() == 1:
        expected = [[1 - p <= t for p in row] for row, t in zip(probs.tolist(), threshold.tolist(), strict=True)]
        assert inside.tolist() == expected


def missed(scores: Tensor, masks: Tensor, thresholds: Tensor) -> Tensor:
    return ((scores <= thresholds[:, :, None, None]) & masks).sum((2, 3)) / 30


def own_risk(scores: Any, masks: Any, groups: Any, function: Any, increasing: Any, name: Any) -> gmc.Head:
    risk = gmc.MonotoneRisk(function, increasing, name)
    head = gmc.ThresholdHead(0.1, 0.05, heads_zoo.GROUPS, risk=risk, resolution=0.05)
    return head.fit(scores, masks, groups, max_iter=20)


def number(data: Arguments, value: float) -> None:
    assert value > 0 and not math.isnan(value)


# -- command line -------------------------------------------------------------------------------------------------------------


def calibrate(alpha: Any, target: Any, task: Any, solver: Any, groups: Any) -> int:
    from torchgmc.cli import main

    path = HERE / "images.npz"
    if not path.exists():
        cli_files.write(path, cli_files.images(40, 0))
    words = ["calibrate", task, str(path), "--groups", groups, "--alpha", alpha, "--target", target]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main([str(word) for word in [*words, "--solver", solver, "--out", HERE / "cli.safetensors"]])
        except SystemExit as end:
            code = end.code  # type: ignore[assignment]
    if code not in (0, None):
        assert said.getvalue().startswith("torchgmc: ") and len(said.getvalue().splitlines()) <= 3, said.getvalue()
    return int(code or 0)


def check_code(data: Arguments, code: int) -> None:
    assert code in (0, 1, 2)
    if code == 0:
        gmc.load(HERE / "cli.safetensors")


ENTRIES = [
    Entry("violations", search, gmc.violations, check_search),
    Entry("solve", problem, solve, check_solution),
    Entry("replay", replayed, lambda **a: gmc.replay(solution(), **a), finite_if_plain),
    Entry("Groups.from_columns", columns, from_columns, check_groups),
    Entry("find_groups", discovery, find_groups, lambda data, found: None),
    Entry(
        "audit_named",
        lambda n, s: image_data(n, s) | {"named": torch.ones(n, 1, dtype=torch.bool), "delta": 0.05},
        audit_named,
        lambda d, found: finite(found.table["after"][0]),
    ),
    Entry(
        "audit",
        lambda n, s: image_data(n, s) | {"delta": 0.05, "alpha": 0.02},
        audit_batches,
        lambda d, a: finite(a.max_violation),
    ),
    Entry(
        "compare",
        lambda n, s: {"audits": {}},
        lambda audits: gmc.compare(audits or {"a": audit_batches(**image_data(9, 1), delta=0.1, alpha=0.1)}),
        lambda d, a: None,
    ),
    Entry("save and load", lambda n, s: {"head": head_of(heads_zoo.NAMES[s % 18]), "notes": None}, round_trip, lambda d, h: None),
    Entry("func.sweep", lambda n, s: {"alphas": [0.1, 0.05]}, swept, lambda d, heads: finite([h.offsets for h in heads])),
    Entry(
        "func.apply",
        lambda n, s: {"groups": heads_zoo.residuals(n, s).inputs[0], "chunk_size": None},
        lambda groups, chunk_size: func.apply([head_of("quantile")] * 2, groups, chunk_size=chunk_size),
        finite_if_plain,
    ),
    Entry("attach", attach_arguments, attached, finite_if_plain),
    Entry(
        "GMCPenalty",
        lambda n, s: event_data(n, s) | {"kind": "smooth_max", "alpha": 0.0, "temperature": 0.01},
        penalty,
        finite_if_plain,
    ),
    Entry("metrics.GroupViolation", event_data, metric, finite_if_plain),
    Entry("ConformalRiskControl", lambda n, s: image_data(24, s) | {"target": 0.2}, conformal, finite_if_plain),
    Entry(
        "projections.simplex",
        lambda n, s: {"f": torch.randn(n, 4, generator=rng(s)), "total": 1.0},
        projections.simplex,
        check_simplex,
    ),
    Entry(
        "projections.box",
        lambda n, s: {"f": torch.randn(n, 4, generator=rng(s)), "low": 0.0, "high": 1.0},
        projections.box,
        check_box,
    ),
    Entry("theory.step_size", lambda n, s: {"alpha": 0.1, "smoothness": 1.0, "bound": 1.0}, theory.step_size, number),
    Entry(
        "theory.iteration_bound",
        lambda n, s: {"alpha": 0.1, "smoothness": 1.0, "bound": 1.0, "gap": 1.0},
        theory.iteration_bound,
        lambda d, v: finite(float(v)),
    ),
    Entry(
        "theory.sample_size",
        lambda n, s: {"alpha": 0.1, "delta": 0.1, "num_functions": 4, "iterations": 2},
        theory.sample_size,
        number,
    ),
    Entry(
        "theory.threshold_constants",
        lambda n, s: {"target": 0.1, "density": 1.0, "span": 1.0, "mass": 0.5},
        theory.threshold_constants,
        lambda d, v: finite(tuple(v)),
    ),
    Entry(
        "theory.distribution_constants",
        lambda n, s: {"list_size": 4, "mass": 0.5},
        theory.distribution_constants,
        lambda d, v: finite(tuple(v)),
    ),
    Entry("conformity.absolute_residual", pair, conformity.absolute_residual, finite_if_plain),
    Entry("conformity.cqr", triple, conformity.cqr, finite_if_plain),
    Entry("conformity.lac", classes, conformity.lac, check_aps),
    Entry(
        "conformity.class_scores",
        lambda n, s: (
            {"probs": classes(n, s)["probs"], "score": conformity.SCORES[s % 5], "randomized": bool(s % 2)}
            | {"penalty": 0.1, "free": 1}
        ),
        conformity.class_scores,
        finite_if_plain,
    ),
    Entry(
        "conformity.covgap",
        lambda n, s: {"covered": torch.rand(n, generator=rng(s)) < 0.8, "labels": classes(n, s)["labels"], "target": 0.9},
        conformity.covgap,
        lambda d, v: finite((v,)),
    ),
    Entry(
        "conformity.sscv",
        lambda n, s: {"covered": torch.rand(n, generator=rng(s)) < 0.8, "size": torch.rand(n, generator=rng(s)), "target": 0.9},
        conformity.sscv,
        lambda d, v: finite((v,)),
    ),
    Entry("conformity.aps", lambda n, s: classes(n, s) | {"randomized": bool(s % 2)}, conformity.aps, check_aps),
    Entry(
        "conformity.aps_set",
        lambda n, s: {"probs": classes(n, s)["probs"], "threshold": torch.rand(n, generator=rng(s))},
        conformity.aps_set,
        lambda d, v: None,
    ),
    Entry(
        "conformity.interval",
        lambda n, s: {"prediction": pair(n, s)["prediction"], "threshold": torch.rand(n, generator=rng(s))},
        conformity.interval,
        check_interval,
    ),
    Entry(
        "conformity.cqr_interval",
        lambda n, s: {"low": triple(n, s)["low"], "high": triple(n, s)["high"], "threshold": torch.rand(n, generator=rng(s))},
        conformity.cqr_interval,
        lambda d, v: finite_if_plain(d, list(v)),
    ),
    Entry(
        "conformity.lac_set",
        lambda n, s: {"probs": classes(n, s)["probs"], "threshold": torch.rand(n, generator=rng(s))},
        conformity.lac_set,
        check_lac_set,
    ),
    Entry(
        "theory.split_size",
        lambda n, s: {"alpha": 0.1, "delta": 0.1, "num_functions": 4, "iterations": 2, "magnitude": 1.0, "functional": False},
        theory.split_size,
        number,
    ),
    Entry("func.stack", lambda n, s: {"heads": [head_of("quantile")] * 2}, func.stack, lambda d, v: finite(list(v.values()))),
    Entry(
        "MonotoneRisk",
        lambda n, s: image_data(n, s) | {"function": missed, "increasing": True, "name": "missed"},
        own_risk,
        lambda d, head: finite_if_plain(d, head.offsets),
        share=0.5,
    ),
    Entry(
        "overlap.share",
        lambda n, s: {"seen": overlap.Sketch.of(torch.rand(n, 3)), "audited": overlap.Sketch.of(torch.rand(n, 3))},
        overlap.share,
        lambda d, v: None,
    ),
    Entry(
        "ThresholdHead",
        lambda n, s: {
            "target": 0.1,
            "alpha": 0.1,
            "groups": None,
            "num_classes": None,
            "init": None,
            "jitter": 0.0,
            "resolution": None,
            "range": None,
            "risk": "fnr",
        },
        gmc.ThresholdHead,
        lambda d, h: None,
    ),
    Entry(
        "TreeHead",
        lambda n, s: {
            "parents": heads_zoo.TREE,
            "target": 0.9,
            "alpha": 0.1,
            "sets": None,
            "groups": None,
            "init": 0.5,
            "jitter": 0.0,
        },
        gmc.TreeHead,
        lambda d, h: None,
    ),
    Entry(
        "DistributionHead",
        lambda n, s: {
            "attributes": heads_zoo.LISTS,
            "alpha": 0.1,
            "groups": ["a"],
            "geometry": "kl",
            "temperature": 1.0,
            "cells": 512,
        },
        gmc.DistributionHead,
        lambda d, h: None,
    ),
    Entry(
        "ProbabilityHead",
        lambda n, s: {"alpha": 0.1, "groups": None, "bins": 4, "num_classes": None, "geometry": "kl", "range": None},
        gmc.ProbabilityHead,
        lambda d, h: None,
    ),
    Entry(
        "QuantileHead",
        lambda n, s: {"target": 0.9, "alpha": 0.1, "groups": None, "bins": None, "init": None, "range": None},
        gmc.QuantileHead,
        lambda d, h: None,
    ),
    Entry(
        "GMCHead",
        lambda n, s: {"mapping": mappings.Residual, "alpha": 0.1, "who": None, "what": None, "groups": None, "bounds": None},
        gmc.GMCHead,
        lambda d, h: None,
    ),
    Entry(
        "cli calibrate",
        lambda n, s: {"alpha": 0.02, "target": 0.1, "task": "fnr", "solver": "exact", "groups": "sex"},
        calibrate,
        check_code,
    ),
]
