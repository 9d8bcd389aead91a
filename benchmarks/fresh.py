"""Promises on fresh data: ours against conformal prediction, Mondrian, CondConf, crepes, mcgrad and one line of scikit-learn.

    python -m benchmarks.fresh                                  # everything, 30 seeds: hours; resumes where it was stopped
    python -m benchmarks.fresh --parts coverage --sets wage --sizes 100 500 --seeds 5 --results /tmp/fresh.json
    python -m benchmarks.fresh --page                           # only write the page from what was measured

Data that PyPI packages ship (:mod:`benchmarks.real`), scikit-learn's digits, and the FASSEG faces where ``TORCHGMC_DATA`` names
their folder. In every seed a model is trained on one part of the rows, calibrated on n others and measured on the rest. Methods
are compared on the same splits, so differences are paired; a verdict is at two standard errors. Sets marked "chosen on" were
looked at while constants or the structure of a rule were chosen; the others were not. Adult and COMPAS are "chosen on": the
rule of ProbabilityHead was rebuilt after its first results on them, and German was looked at once more before its last change.
"""

import argparse
import functools
import importlib.util
import json
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import torchgmc as gmc
from benchmarks import real
from benchmarks.timing import machine
from torchgmc.engine.extras import find_paper

RESULTS = Path(__file__).parent / "results" / "fresh.json"
SEEDS = 30
SIZES = (100, 200, 500, 1000, 2000, 5000, 20000)
#: Looked at while constants, or the structure of a rule (Adult, COMPAS, German), were chosen.
CHOSEN_ON = {"bike", "flights", "k401", "labsup", "late", "participation", "digits", "made-up", "adult", "compas", "german"}
OURS = "ours"
#: The verdict of a cell against all methods of others at once: the worst of the verdicts against each.
EVERY = "every other"
WORDS = ("better", "level", "WORSE")
#: A group is measured if so many fresh examples are in it.
ENOUGH = 100
TARGET = 0.9
#: Combinations of groups for which thresholds with a guarantee are made.
MOST = 800
Figures = dict[str, float]


class Split(NamedTuple):
    """Rows of one seed: calibration rows in the order they are taken, and fresh ones."""

    pool: dict[str, Any]
    fresh: dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One table of the page.

    Attributes:
        title: of the table; ``about``: what is measured.
        sets: names of the data.
        make: data and seed to a split.
        methods: from a name to a function of the calibration rows that gives one of the fresh rows.
        measure: output on fresh rows to figures.
        figures: their names: the first one decides.
        simple: methods that a sceptic tries first; ours is compared with the best of them.
        largest: of a method that is slow, the largest n.
    """

    title: str
    about: str
    sets: tuple[str, ...]
    make: Callable[[str, int], Split]
    methods: dict[str, Callable[[dict[str, Any]], Callable[[dict[str, Any]], Any]]]
    measure: Callable[[dict[str, Any], Any], Figures]
    figures: tuple[str, ...]
    simple: tuple[str, ...]
    largest: dict[str, int]
    sizes: tuple[int, ...] = SIZES


def cut(rows: dict[str, Any], place: Any) -> dict[str, Any]:
    """Some of the rows."""
    return {name: value[place] for name, value in rows.items()}


def one_hot(groups: Any) -> tuple[list[str], np.ndarray]:
    """Every level of every column as a group."""
    columns = [(f"{name}={level}", groups[name].to_numpy() == level) for name in groups for level in sorted(groups[name].unique())]
    return [name for name, _ in columns], np.stack([inside for _, inside in columns], 1)


@functools.lru_cache(maxsize=2)
def table(name: str) -> tuple[real.Table, np.ndarray]:
    """A set and its groups."""
    found = (real.VALUES | real.OUTCOMES)[name]()
    return found, one_hot(found.groups)[1]


def deal(rows: int, seed: int, train: int = 3000, fresh: int = 20000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows to train on, to calibrate on and to measure on."""
    order = np.random.default_rng(seed).permutation(rows)
    train, fresh = min(rows // 4, train), min(rows * 2 // 5, fresh)
    return order[:train], order[train : rows - fresh], order[rows - fresh :]


def worst(values: np.ndarray, member: np.ndarray, mass: bool = False) -> float:
    """Largest |mean of the group| of the groups with enough rows, everyone among them; times its share with ``mass``."""
    member = np.concatenate([member, np.ones_like(member[:, :1])], 1).astype(float)
    size = member.sum(0)
    off = np.abs(member.T @ values) / (len(values) if mass else np.maximum(size, 1))
    return float(off[size >= ENOUGH].max())


def some_groups(member: np.ndarray) -> np.ndarray:
    """Groups that have examples and do not have all: what a head can be made for."""
    inside = member.sum(0)
    return np.flatnonzero((inside > 0) & (inside < len(member)))


def patterns(*members: np.ndarray) -> list[np.ndarray]:
    """A number for each combination of groups, the same in all tables."""
    place = np.unique(np.concatenate(members), axis=0, return_inverse=True)[1].reshape(-1)
    return np.split(place, np.cumsum([len(m) for m in members])[:-1])


# -- coverage ----------------------------------------------------------------------------------------------------------------


def make_scores(name: str, seed: int) -> Split:
    """Absolute residuals of boosted trees."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    data, member = table(name)
    train, pool, fresh = deal(len(member), seed)
    x = data.features.to_numpy()
    model = HistGradientBoostingRegressor(max_iter=60, random_state=0).fit(x[train], data.target[train])
    parts = []
    for rows in (pool, fresh):
        score = np.abs(data.target[rows] - model.predict(x[rows]))
        # A grain of noise, the same for all methods: ties would make coverage jump.
        score = score + 1e-6 * score.std() * np.random.default_rng(seed + 1).random(len(rows))
        parts.append({"scores": score, "member": member[rows]})
    return Split(*parts)


def quantile_head(rows: dict[str, Any], **options: Any) -> Callable[[dict[str, Any]], np.ndarray]:
    columns = some_groups(rows["member"])
    head = gmc.QuantileHead(TARGET, options.pop("alpha", None), [f"g{c}" for c in columns], **options)
    head.fit(torch.tensor(rows["scores"]), torch.tensor(rows["member"][:, columns]))
    return lambda new: head(torch.tensor(new["member"][:, columns])).numpy()


def finite_sample(rows: dict[str, Any]) -> Callable[[dict[str, Any]], np.ndarray]:
    """With every combination that may come, as a user who knows the columns names them."""
    names = [f"g{c}" for c in some_groups(rows["member"])]

    def thresholds(new: dict[str, Any]) -> np.ndarray:
        kinds = np.unique(new["member"][:, some_groups(rows["member"])], axis=0)
        if len(kinds) > MOST:
            return np.full(len(new["member"]), math.nan)  # a table of hundreds of combinations is not what it is for
        asked = [[name for name, inside in zip(names, kind, strict=True) if inside] for kind in kinds]
        return quantile_head(rows, finite_sample=True, patterns=asked)(new)

    return thresholds


def crepes_conformal(rows: dict[str, Any]) -> Callable[[dict[str, Any]], np.ndarray]:
    from crepes import ConformalRegressor

    model = ConformalRegressor().fit(residuals=rows["scores"])
    return lambda new: model.predict_int(np.zeros(len(new["member"])), confidence=TARGET)[:, 1]


def crepes_mondrian(rows: dict[str, Any]) -> Callable[[dict[str, Any]], np.ndarray]:
    """One threshold per combination of groups; a combination without examples has none (infinite)."""
    from crepes import ConformalRegressor

    def thresholds(new: dict[str, Any]) -> np.ndarray:
        here, there = patterns(rows["member"], new["member"])
        model = ConformalRegressor().fit(residuals=rows["scores"], bins=here)
        kinds = np.unique(here)
        per = dict(zip(kinds, model.predict_int(np.zeros(len(kinds)), bins=kinds, confidence=TARGET)[:, 1], strict=True))
        return np.array([per.get(kind, math.inf) for kind in there])

    return thresholds


def condconf(rows: dict[str, Any], each: bool = False) -> Callable[[dict[str, Any]], np.ndarray]:
    """Gibbs, Cherian and Candes; its threshold depends on the groups only, so each combination is solved once.

    With ``each`` every row is, as its own interface does.
    """
    from conditionalconformal.condconf import CondConf

    columns = some_groups(rows["member"])

    def features(x: np.ndarray) -> np.ndarray:
        x = np.atleast_2d(x)
        return np.concatenate([np.ones((len(x), 1)), x[:, columns]], 1)

    def thresholds(new: dict[str, Any]) -> np.ndarray:
        model = CondConf(lambda x, y: y, features)
        model.setup_problem(rows["member"].astype(float), rows["scores"])
        kinds, place = np.unique(new["member"][:, columns], axis=0, return_inverse=True)
        if each:
            kinds, place = new["member"], np.arange(len(new["member"]))
        elif len(kinds) > MOST:
            return np.full(len(new["member"]), math.nan)
        else:
            kinds = new["member"][np.unique(place.reshape(-1), return_index=True)[1]]
        dual, primal = model._get_calibration_solution(TARGET)
        level, found = np.full(len(rows["scores"]) + 1, TARGET), []

        def features_of(kind: np.ndarray) -> np.ndarray:
            return model.Phi_fn(kind.astype(float)[None])

        for kind in kinds:
            try:
                # What its `predict(exact=True)` calls, with flat arrays: newer versions of numpy refuse its own.
                cutoff = model._compute_exact_cutoff(level, primal, dual.reshape(-1), features_of(kind), TARGET)
                found.append(float(np.asarray(cutoff).reshape(-1)[0]))
            except (ValueError, np.linalg.LinAlgError, IndexError):
                found.append(math.nan)  # its exact path fails on some ties of the basis
        return np.array(found)[place.reshape(-1)]

    return thresholds


def measure_coverage(rows: dict[str, Any], thresholds: np.ndarray) -> Figures:
    if np.isnan(thresholds).mean() > 0.01:
        return {}
    off = (rows["scores"] <= np.nan_to_num(thresholds, nan=math.inf)) - TARGET
    finite = np.isfinite(thresholds)
    return {
        "worst group": worst(off, rows["member"]),
        "coverage": float(off.mean()) + TARGET,
        "width": float(thresholds[finite].mean() / rows["scores"].mean()) if finite.any() else math.nan,
        "infinite": float(1 - finite.mean()),
    }


COVERAGE = Part(
    "Coverage of every group",
    "QuantileHead on |residuals| of boosted trees, target 0.9, groups: every level of every column. Worst group: the largest "
    "|coverage - 0.9| over groups with at least 100 fresh rows, and everyone. Width: the mean threshold over the mean score, "
    "of the rows with a finite one.",
    tuple(real.VALUES),
    make_scores,
    {
        OURS: quantile_head,
        "ours, finite_sample": finite_sample,
        "conformal (crepes)": crepes_conformal,
        "Mondrian (crepes)": crepes_mondrian,
        "CondConf": condconf,
    },
    measure_coverage,
    ("worst group", "coverage", "width", "infinite"),
    ("conformal (crepes)",),
    {"CondConf": 1000, "ours, finite_sample": 1000},
    (100, 200, 300, *SIZES[2:]),
)

# -- probabilities -----------------------------------------------------------------------------------------------------------


def base_model(kind: str) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.naive_bayes import GaussianNB
    from sklearn.tree import DecisionTreeClassifier

    return {
        "boosted": HistGradientBoostingClassifier(max_iter=60, random_state=0),
        "bayes": GaussianNB(),
        "tree": DecisionTreeClassifier(max_depth=12, random_state=0),
        "logistic": LogisticRegression(max_iter=500),
    }[kind]


def make_probabilities(name: str, seed: int) -> Split:
    """Probabilities of a model, by default boosted trees; ``"adult, tree"`` names another, ``x 2`` doubles logits."""
    name, _, kind = name.partition(", ")
    if name == "made-up":
        return made_up_probabilities(kind, seed)
    data, member = table(name)
    train, pool, fresh = deal(len(member), seed)
    x = data.features.to_numpy()
    model = base_model(kind or "boosted").fit(x[train], data.target[train])
    p = model.predict_proba(x)[:, 1].clip(1e-6, 1 - 1e-6)
    frame = data.groups.apply(lambda column: column.astype("category").cat.codes).to_numpy()
    rows = {"p": p, "y": data.target, "member": member, "codes": frame}
    return Split(cut(rows, pool), cut(rows, fresh))


def made_up_probabilities(kind: str, seed: int) -> Split:
    from benchmarks.multicalibration import problem

    both = []
    for n, part in ((20000, 0), (50000, 1)):
        found = problem(n, "interactions" if "interactions" in kind else "additive", seed, part)
        p = found.probs.double().clamp(1e-6, 1 - 1e-6)
        p = torch.sigmoid(2 * p.logit()) if "x 2" in kind else p
        member = found.groups.numpy()
        both.append({"p": p.numpy(), "y": found.y.double().numpy(), "member": member, "codes": member.astype(int)})
    return Split(*both)


def logit(p: np.ndarray) -> np.ndarray:
    return np.log(p / (1 - p))


def probability_head(rows: dict[str, Any], **options: Any) -> Callable[[dict[str, Any]], np.ndarray]:
    columns = some_groups(rows["member"])
    head = gmc.ProbabilityHead(options.pop("alpha", None), [f"g{c}" for c in columns], **options)
    head.fit(torch.tensor(rows["p"]), torch.tensor(rows["y"]), torch.tensor(rows["member"][:, columns]))
    return lambda new: head(torch.tensor(new["p"]), torch.tensor(new["member"][:, columns])).double().numpy()


def sklearn_model(kind: str, rows: dict[str, Any]) -> Callable[[dict[str, Any]], np.ndarray]:
    from sklearn.isotonic import IsotonicRegression
    from sklearn.linear_model import LogisticRegression

    if len(np.unique(rows["y"])) < 2:
        return lambda new: np.full(len(new["p"]), rows["y"].mean())
    if kind == "isotonic":
        model = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(rows["p"], rows["y"])
        return lambda new: model.predict(new["p"])

    def features(part: dict[str, Any]) -> np.ndarray:
        z = logit(part["p"])[:, None]
        return np.concatenate([z, part["member"].astype(float)], 1) if kind == "logistic" else z

    options: dict[str, Any] = {} if kind == "logistic" else {"C": 1e6}
    found = LogisticRegression(max_iter=2000, **options).fit(features(rows), rows["y"])
    return lambda new: found.predict_proba(features(new))[:, 1]


def mcgrad(rows: dict[str, Any], **options: Any) -> Callable[[dict[str, Any]], np.ndarray]:
    """Every column is a categorical feature, as its users give them."""
    import logging

    import pandas as pd
    from mcgrad.methods import MCGrad

    logging.getLogger("mcgrad").setLevel(logging.ERROR)
    names = [f"c{k}" for k in range(rows["codes"].shape[1])]

    def frame(part: dict[str, Any]) -> Any:
        return pd.DataFrame(part["codes"], columns=names).astype(str).assign(h=part["p"], y=part["y"].astype(int))

    model = MCGrad(**options)
    lists = {"categorical_feature_column_names": names, "numerical_feature_column_names": []}
    model.fit(frame(rows), "h", "y", **lists)
    return lambda new: model.predict(frame(new), "h", **lists)


def measure_probabilities(rows: dict[str, Any], f: np.ndarray) -> Figures:
    off = f - rows["y"]
    sure = f.clip(1e-6, 1 - 1e-6)
    level = np.minimum((f * 10).astype(int), 9)
    cells = np.abs(np.stack([rows["member"].T.astype(float) @ np.where(level == k, off, 0.0) for k in range(10)])) / len(off)
    figures = {
        "Brier": float((off**2).mean()),
        "log loss": float(-(rows["y"] * np.log(sure) + (1 - rows["y"]) * np.log(1 - sure)).mean()),
        "worst group": worst(off, rows["member"], mass=True),
        "worst cell": float(cells.max()),
    }
    if importlib.util.find_spec("mcgrad") is not None:
        import pandas as pd
        from mcgrad.metrics import MulticalibrationError

        names = [f"c{k}" for k in range(min(rows["codes"].shape[1], 8))]
        part = slice(0, 8000)
        frame = pd.DataFrame(rows["codes"][part, : len(names)], columns=names).astype(str)
        frame = frame.assign(f=f[part], y=rows["y"][part].astype(int))
        error = MulticalibrationError(frame, "y", "f", categorical_segment_columns=names, max_depth=1)
        figures["MCE"] = float(error.mce_sigma)
    return figures


PROBABILITY_METHODS: dict[str, Any] = {
    OURS: probability_head,
    "nothing": lambda rows: lambda new: new["p"],
    "Platt": functools.partial(sklearn_model, "platt"),
    "isotonic": functools.partial(sklearn_model, "isotonic"),
    "logistic [logit, groups]": functools.partial(sklearn_model, "logistic"),
    "mcgrad, 5 rounds": lambda rows: mcgrad(rows, num_rounds=5, early_stopping=False),
    "mcgrad": mcgrad,
}
SIMPLE_PROBABILITIES = ("Platt", "isotonic", "logistic [logit, groups]")

PROBABILITY = Part(
    "Probabilities",
    "ProbabilityHead(alpha=None) behind boosted trees, groups: every level of every column. Simple: Platt, isotonic, logistic; "
    "doing nothing is a column by itself (the mean of a model trained on thousands of rows is better known than that of few "
    "calibration rows). Worst group: the largest share x |mean of f - y|; worst cell: the same on ten level sets of f; MCE: "
    "mcgrad's own measure, in sigmas (single columns).",
    tuple(real.OUTCOMES),
    make_probabilities,
    PROBABILITY_METHODS,
    measure_probabilities,
    ("Brier", "log loss", "worst group", "worst cell", "MCE"),
    SIMPLE_PROBABILITIES,
    {"mcgrad": 5000, "mcgrad, 5 rounds": 20000},
)
OVER_SURE = Part(
    "Models that are over-sure",
    "As above, behind naive Bayes, trees of depth 12, and made-up models whose logits are doubled.",
    ("adult, bayes", "adult, tree", "compas, bayes", "compas, tree", "made-up, additive x 2", "made-up, interactions x 2"),
    make_probabilities,
    PROBABILITY_METHODS,
    measure_probabilities,
    PROBABILITY.figures,
    SIMPLE_PROBABILITIES,
    PROBABILITY.largest,
    (500, 2000, 10000),
)

# -- masks -------------------------------------------------------------------------------------------------------------------

MISS = 0.1


@functools.lru_cache(maxsize=1)
def digits() -> dict[str, np.ndarray]:
    from sklearn.datasets import load_digits

    found = load_digits()
    return {"images": found.images / 16.0, "digit": found.target}


def make_digits(name: str, seed: int) -> Split:
    """Ink of the digits, found in a blurred and noisy picture by a linear model per pixel; the digit and its ink are groups."""
    from sklearn.linear_model import LinearRegression

    data = digits()
    rng = np.random.default_rng(seed)
    n = len(data["digit"])
    truth = data["images"] > 0.45
    seen = data["images"] + 0.35 * rng.standard_normal(truth.shape)
    train, pool, fresh = deal(n, seed, 400, 600)
    model = LinearRegression().fit(seen[train].reshape(len(train), -1), truth[train].reshape(len(train), -1))
    scores = 1 / (1 + np.exp(-6 * (model.predict(seen.reshape(n, -1)).reshape(truth.shape) - 0.5)))
    ink = truth.sum((1, 2))
    thirds = np.searchsorted(np.quantile(ink, [1 / 3, 2 / 3]), ink)
    real_groups = np.concatenate([data["digit"][:, None] == np.arange(10), thirds[:, None] == np.arange(3)], 1)
    member = real_groups if name == "digits" else rng.permutation(real_groups)  # "null": groups that mean nothing
    rows = {"scores": scores, "masks": truth, "member": member}
    return Split(cut(rows, pool), cut(rows, fresh))


def threshold_head(kind: str, rows: dict[str, Any], **options: Any) -> Callable[[dict[str, Any]], np.ndarray]:
    """Miss rate of each fresh image."""
    columns = some_groups(rows["member"])
    names = [f"g{c}" for c in columns]
    target = rows.get("target", [MISS])[0]
    clusters = options.pop("clusters", None)
    if kind == "conformal":
        head = gmc.baselines.ConformalRiskControl(target, groups=names, **options)
    elif kind == "nothing":
        head = gmc.baselines.Unprocessed(target, groups=names, threshold=0.5, **options)
    else:
        head = gmc.ThresholdHead(target, alpha=None, groups=names, **options)
    data = (
        torch.as_tensor(rows["scores"]).float(),
        torch.as_tensor(rows["masks"]),
        torch.as_tensor(rows["member"][:, columns]),
    )
    head.fit(*data, clusters=clusters)

    def found(new: dict[str, Any]) -> np.ndarray:
        masks = torch.as_tensor(new["masks"])
        out = head(torch.as_tensor(new["scores"]).float(), torch.as_tensor(new["member"][:, columns]))
        missed = (masks & ~out).flatten(1).sum(1) / masks.flatten(1).sum(1)
        marked = (out & ~masks).flatten(1).double().mean(1)
        return torch.stack([missed.double(), marked], 1).numpy()

    return found


def measure_masks(rows: dict[str, Any], out: np.ndarray) -> Figures:
    return {
        "worst group": worst_small(out[:, 0] - MISS, rows["member"]),
        "miss rate": float(out[:, 0].mean()),
        "false alarms": float(out[:, 1].mean()),
    }


def worst_small(values: np.ndarray, member: np.ndarray, least: int = 30) -> float:
    size = member.sum(0)
    return float((np.abs(member.T.astype(float) @ values) / np.maximum(size, 1))[size >= least].max())


MASKS = Part(
    "Miss rate of masks: digits",
    "ThresholdHead on scikit-learn's digits as 8 x 8 masks, target 0.10, 13 groups (the digit, thirds of its ink). Null: the "
    "same groups dealt at random. Worst group: the largest |miss rate - 0.10| of groups with at least 30 fresh images.",
    ("digits", "digits, null"),
    make_digits,
    {
        OURS: functools.partial(threshold_head, "ours"),
        "conformal risk control": functools.partial(threshold_head, "conformal"),
        "nothing": functools.partial(threshold_head, "nothing"),
    },
    measure_masks,
    ("worst group", "miss rate", "false alarms"),
    ("conformal risk control", "nothing"),
    {},
    (120, 300, 790),
)


@functools.lru_cache(maxsize=1)
def faces() -> Any:
    find_paper()
    from torchgmc_paper import fnr
    from torchgmc_paper.demo.progress import Bar

    folder = Path(os.environ["TORCHGMC_DATA"])
    kept = Path(os.environ.get("TORCHGMC_FRESH_KEPT", Path(__file__).parent / "results" / ".kept"))
    kept.mkdir(parents=True, exist_ok=True)
    return fnr.prepare(folder, kept, Bar(), fnr.Setting())


def make_faces(name: str, seed: int) -> Split:
    find_paper()
    from torchgmc_paper import fnr

    prepared = faces()
    tensors = prepared.tensors
    chosen = tensors[name]
    subjects = None if name == "118 images" else tensors["subjects"][chosen]
    here = tensors["member"][chosen].any(0)
    rows = {
        "scores": tensors["values"], "masks": tensors["masks"], "member": tensors["member"][:, here].numpy(),
        "subjects": tensors["subjects"], "target": np.full(len(tensors["masks"]), 0.075),
    }  # fmt: skip
    sides = fnr.split(len(chosen), 0.7, seed, subjects)
    return Split(*(cut(rows, chosen[side]) | {"together": np.full(len(side), subjects is not None)} for side in sides))


def face_head(kind: str, rows: dict[str, Any]) -> Callable[[dict[str, Any]], np.ndarray]:
    clusters = rows["subjects"] if kind == "ours" and rows["together"][0] else None
    return threshold_head(kind, rows, range=(-0.1, 1.1), clusters=clusters)


def measure_faces(rows: dict[str, Any], out: np.ndarray) -> Figures:
    off = out[:, 0] - 0.075
    member = rows["member"].astype(float)
    return {
        "worst group": float(np.abs(member.T @ off).max() / len(off)),
        "own deviation": float((np.abs(member.T @ off) / member.sum(0).clip(1)).max()),
        "miss rate": float(out[:, 0].mean()),
        "false alarms": float(out[:, 1].mean()),
    }


FACES = Part(
    "Miss rate of masks: the faces of the paper",
    "FASSEG, U-Net and splits of `torchgmc reproduce fnr`, target 0.075. Worst group: the largest share x |miss rate - 0.075| "
    "(the paper's measure). 345 images are split by subject, and the head is told the subjects (`clusters`).",
    ("118 images", "345 images"),
    make_faces,
    {
        OURS: functools.partial(face_head, "ours"),
        "conformal risk control": functools.partial(face_head, "conformal"),
        "nothing": functools.partial(face_head, "nothing"),
    },
    measure_faces,
    ("worst group", "own deviation", "miss rate", "false alarms"),
    ("conformal risk control",),
    {},
    (10**9,),
)


# -- the finite-sample guarantee ---------------------------------------------------------------------------------------------

SHARES = {4: (0.25, 0.4, 0.5, 0.15), 10: tuple(np.linspace(0.05, 0.5, 10))}
EFFECTS = {4: (0.6, -0.4, 0.3, 0.8), 10: tuple(np.linspace(0.8, -0.4, 10))}
DRAWS, CLUSTER_DRAWS = 1000, 200


class World(NamedTuple):
    """Overlapping groups and the scale (or shift) of scores in each combination; risks of thresholds are known exactly."""

    member: np.ndarray  # (2^a, a)
    chance: np.ndarray  # of each combination
    effect: np.ndarray


def world(groups: int) -> World:
    member = (np.arange(2**groups)[:, None] >> np.arange(groups)) & 1
    share = np.array(SHARES[groups])
    return World(member > 0, np.prod(np.where(member, share, 1 - share), 1), 0.5 * member @ np.array(EFFECTS[groups]))


def normal(x: np.ndarray) -> np.ndarray:
    return torch.special.ndtr(torch.as_tensor(x)).numpy()


def draw_scores(of: World, n: int, seed: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    kind = rng.choice(len(of.chance), n, p=of.chance)
    return torch.tensor(np.abs(rng.standard_normal(n)) * np.exp(of.effect[kind])), torch.tensor(of.member[kind])


def draw_masks(of: World, n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images of 20 relevant pixels with a common part of their own: the risk of a threshold follows from one pixel's law."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(len(of.chance), n, p=of.chance)
    z = of.effect[kind][:, None] + 0.7 * rng.standard_normal((n, 1)) + rng.standard_normal((n, 20))
    return torch.sigmoid(torch.tensor(z)), torch.ones(n, 20, dtype=torch.bool), torch.tensor(of.member[kind])


def risks(of: World, risk: np.ndarray) -> list[float]:
    """Mean risk of every group, and of everyone, from that of each combination."""
    inside = np.concatenate([of.member, np.ones_like(of.member[:, :1])], 1).astype(float) * of.chance[:, None]
    return [float(v) for v in inside.T @ risk / inside.sum(0)]


def guarantee_draw(kind: str, n: int, seed: int) -> list[float]:
    """Miss of every group (miscoverage, or miss rate) of the table of one draw; its target is 0.1."""
    of = world(4)
    names = [f"g{k}" for k in range(4)]
    if kind == "coverage":
        head: Any = gmc.QuantileHead(0.9, None, names, finite_sample=True).fit(*draw_scores(of, n, seed))
        q = head(torch.tensor(of.member)).numpy()
        return risks(of, 2 * (1 - normal(q / np.exp(of.effect))))
    head = gmc.ThresholdHead(0.1, None, names, finite_sample=True).fit(*draw_masks(of, n, seed))
    lam = head.threshold(torch.tensor(of.member)).clamp(1e-9, 1 - 1e-9)
    return risks(of, normal((torch.logit(lam).numpy() - of.effect) / math.sqrt(1.49)))


def guarantee_against(groups: int, n: int, seed: int, fresh: int = 1000) -> dict[str, float]:
    """Seconds and widths of ours and of CondConf, both asked for the thresholds of ``fresh`` rows."""
    of = world(groups)
    scores, member = draw_scores(of, n, seed)
    new = draw_scores(of, fresh, seed + 10**6)[1]
    rows = {"scores": scores.numpy(), "member": member.numpy()}
    began = time.perf_counter()
    kinds = None  # all of them, while they are few
    if 2**groups > 256:
        kinds = [[f"g{k}" for k in np.flatnonzero(kind)] for kind in np.unique(new.numpy(), axis=0)]
    head = gmc.QuantileHead(0.9, None, [f"g{k}" for k in range(groups)], finite_sample=True, patterns=kinds)
    ours = head.fit(scores, member)(new).numpy()
    middle = time.perf_counter()
    theirs = condconf(rows, each=True)({"member": new.numpy()})
    done = time.perf_counter()
    fine = np.isfinite(ours) & np.isfinite(theirs)
    same = float((np.abs(ours - theirs) <= 1e-6 * np.abs(ours))[fine].mean()) if fine.any() else math.nan
    return {
        "ours": middle - began, "CondConf": done - middle, "same": same,
        "width": float(ours[fine].mean()), "width, CondConf": float(theirs[fine].mean()),
        "infinite": float(np.isinf(ours).mean()), "infinite, CondConf": float(np.isinf(theirs).mean()),
    }  # fmt: skip


def exported_agrees(folder: Path) -> bool:
    """The scripted head, written and read, gives the thresholds of the head to the bit."""
    of = world(4)
    scores, member = draw_scores(of, 300, 0)
    head = gmc.QuantileHead(0.9, None, [f"g{k}" for k in range(4)], finite_sample=True).fit(scores, member)
    every = torch.tensor(of.member)
    path = folder / "table.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces the end of TorchScript
        torch.jit.script(head).save(path)
        return torch.equal(torch.jit.load(path)(every), head(every))


def fill_guarantee(kept: dict[str, Any], seeds: int, save: Callable[[], None]) -> None:
    for kind in ("coverage", "miss rate"):
        for n in (100, 300, 1000):
            cell = kept.setdefault(f"{kind}, {n}", [])
            while len(cell) < DRAWS * seeds // SEEDS:
                cell += [guarantee_draw(kind, n, 7919 * n + len(cell) + k) for k in range(25)]
                save()
            print(f"guarantee, {kind}, n = {n}: {len(cell)} draws", file=sys.stderr, flush=True)
    if importlib.util.find_spec("conditionalconformal") is not None:
        for groups in (4, 10):
            for n in (300, 1000):
                cell = kept.setdefault(f"against, {groups} groups, {n}", [])
                while len(cell) < seeds:
                    cell.append(guarantee_against(groups, n, len(cell)))
                    save()
    with tempfile.TemporaryDirectory() as folder:
        kept["file agrees"] = exported_agrees(Path(folder))
    save()


def show_guarantee(kept: dict[str, Any]) -> list[str]:
    lines = ["## `finite_sample=True`: the guarantee, on made-up data with 4 overlapping groups", ""]
    lines += ["Mean risk (target 0.1) over draws of the calibration set ± standard error; the risks of a table are exact."]
    head = ["what", "n", "draws", "g0 (25 %)", "g1 (40 %)", "g2 (50 %)", "g3 (15 %)", "everyone", "all at most 0.1 + 2 s.e."]
    lines += ["Proof: `notebooks/paper.md`.", "", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for name, cell in kept.items():
        if name.startswith("against") or name == "file agrees":
            continue
        kind, n = name.split(", ")
        table = np.array(cell)
        average, error = table.mean(0), table.std(0, ddof=1) / math.sqrt(len(table))
        shown = [f"{m:.4f} ± {e:.4f}" for m, e in zip(average, error, strict=True)]
        within = "yes" if bool((average <= 0.1 + 2 * error).all()) else "NO"
        lines.append(f"| {'miscoverage' if kind == 'coverage' else kind} | {n} | {len(table)} | {' | '.join(shown)} | {within} |")
    head = ["groups", "n", "draws", "seconds, ours", "CondConf", "times faster", "mean width, ours", "CondConf"]
    head += ["infinite, ours", "CondConf", "same threshold"]
    lines += ["", "Against CondConf (thresholds of 1,000 fresh rows; it solves a problem per row):", ""]
    lines += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for name, cell in kept.items():
        if not name.startswith("against"):
            continue
        _, groups, n = name.split(", ")
        m = {key: float(np.nanmean([one[key] for one in cell])) for key in cell[0]}
        ratio = float(np.median([one["CondConf"] / one["ours"] for one in cell]))
        lines.append(
            f"| {groups.split()[0]} | {n} | {len(cell)} | {m['ours']:.3f} | {m['CondConf']:.3f} | {ratio:.1f} (median) | "
            f"{m['width']:.3f} | {m['width, CondConf']:.3f} | {m['infinite']:.3f} | {m['infinite, CondConf']:.3f} | "
            f"{m['same']:.2f} |"
        )
    agrees = "the same thresholds" if kept.get("file agrees") else "NOT the same thresholds"
    return [*lines, "", f"A head scripted to a file and loaded gives {agrees}.", ""]


# -- clusters ----------------------------------------------------------------------------------------------------------------


def cluster_draw(size: int, seed: int) -> dict[str, float]:
    """600 scores in clusters of a size that share half of their variance, of groups that do not differ.

    The noise floor: does the bound that the report calls noise hold the group's deviation, and do groups stay together? The
    audit: do its intervals hold the truth (0 by construction, of a threshold that is the true quantile)? Both with and without
    being told the clusters.
    """
    rng = np.random.default_rng(seed)
    n = 600
    place = np.arange(n) // size
    z = math.sqrt(0.5) * rng.standard_normal(n // size + 1)[place] + math.sqrt(0.5) * rng.standard_normal(n)
    of_cluster = rng.random((n // size + 1, 4)) < 0.4  # a cluster is in a group as a whole
    scores, member = torch.tensor(np.abs(z)), torch.tensor(of_cluster[place])
    names = [f"g{k}" for k in range(4)]
    truth = 1.6448536269514722
    found = {}
    for told, clusters in (("told", place), ("not told", None)):
        head = gmc.QuantileHead(0.9, None, names).fit(scores, member, clusters=clusters)
        found[f"moved, {told}"] = float(bool((head.offsets != 0).any()))
        report = head.report
        assert report is not None
        off = ((np.abs(z) <= truth) - 0.9) @ of_cluster[place] / n  # what sampling alone does at the true threshold
        found[f"noise holds, {told}"] = float(bool((np.abs(off) <= report.details["noise"][:4, 0].numpy()).all()))
        scaled, pixel = 1 - (scores / 8)[:, None], torch.ones(n, 1, dtype=torch.bool)  # a miss: beyond the true quantile
        known = gmc.baselines.Unprocessed(0.1, 0.01, names, threshold=1 - truth / 8).fit(scaled, pixel, member)
        audit = known.audit(scaled, pixel, member, clusters=clusters)
        found[f"intervals hold, {told}"] = float(all(row["low"] <= 0 <= row["high"] for row in audit.rows()))
    return found


def fill_clusters(kept: dict[str, Any], seeds: int, save: Callable[[], None]) -> None:
    for size in (1, 5, 20):
        cell = kept.setdefault(str(size), [])
        while len(cell) < CLUSTER_DRAWS * seeds // SEEDS:
            cell += [cluster_draw(size, 104729 * size + len(cell) + k) for k in range(10)]
            save()
        print(f"clusters of {size}: {len(cell)} draws", file=sys.stderr, flush=True)


def show_clusters(kept: dict[str, Any]) -> list[str]:
    lines = ["## Clusters", "", (cluster_draw.__doc__ or "").replace("\n\n", " ").replace("\n    ", " "), ""]
    names = [f"{what}, {told}" for what in ("noise holds", "moved", "intervals hold") for told in ("told", "not told")]
    lines += ["| clusters of | draws | " + " | ".join(names) + " |", "|" + " --- |" * (2 + len(names))]
    for size in sorted(kept, key=int):
        shares = [f"{100 * np.mean([one[name] for one in kept[size]]):.1f} %" for name in names]
        lines.append(f"| {size} | {len(kept[size])} | " + " | ".join(shares) + " |")
    return [*lines, ""]


PARTS: dict[str, Part] = {
    "coverage": COVERAGE, "probability": PROBABILITY, "over-sure": OVER_SURE, "masks": MASKS, "faces": FACES,
}  # fmt: skip

# -- running -----------------------------------------------------------------------------------------------------------------


def sizes_of(part: Part, pool: int) -> list[int]:
    """Sizes that there are rows for, and all of them."""
    sizes = [n for n in part.sizes if n < pool]
    return [*sizes, pool] if not sizes or pool >= 1.3 * sizes[-1] else sizes


def label(n: int, pool: int) -> str:
    return "all" if n == pool else str(n)


def run(
    part_name: str,
    sets: Sequence[str],
    seeds: int,
    sizes: Sequence[str],
    methods: Sequence[str],
    done: dict[str, Any],
    save: Any,
) -> None:
    """Measure what is not there yet; ``done`` is part -> "set, n" -> method -> seed -> figures."""
    part = PARTS[part_name]
    kept = done.setdefault(part_name, {})
    for name in sets:
        for seed in range(seeds):
            began = time.perf_counter()
            wanted = [m for m in part.methods if not methods or m in methods]
            known = kept.setdefault(name, {})
            pool = known.get("pool")
            if pool is not None and not any(
                _todo(known, part, n, pool, m, seed, sizes) for n in sizes_of(part, pool) for m in wanted
            ):
                continue
            split = part.make(name, seed)
            pool = len(split.pool["member"])
            known["pool"] = pool if seed == 0 or "pool" not in known else known["pool"]
            for n in sizes_of(part, pool):
                rows = cut(split.pool, slice(0, n))
                for method in wanted:
                    if not _todo(known, part, n, pool, method, seed, sizes):
                        continue
                    start = time.perf_counter()
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        try:
                            figures = part.measure(split.fresh, part.methods[method](rows)(split.fresh))
                        except ImportError:
                            continue
                        except ValueError as error:  # a method that refuses this sample
                            figures = {"refused": 1.0}
                            print(f"{name}, n = {n}, {method}: {error}", file=sys.stderr)
                    figures["seconds"] = time.perf_counter() - start
                    rounded = {key: float(f"{value:.5g}") for key, value in figures.items()}
                    known.setdefault(label(n, pool), {}).setdefault(method, {})[str(seed)] = rounded
            save()
            print(f"{part_name}, {name}, seed {seed}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)


def _todo(known: dict[str, Any], part: Part, n: int, pool: int, method: str, seed: int, sizes: Sequence[str]) -> bool:
    wanted = not sizes or label(n, pool) in sizes
    return wanted and n <= part.largest.get(method, n) and str(seed) not in known.get(label(n, pool), {}).get(method, {})


# -- the page ----------------------------------------------------------------------------------------------------------------


def paired(a: dict[str, Figures], b: dict[str, Figures], figure: str) -> tuple[float, float, int]:
    """Mean of a - b over the seeds of both, its standard error, and how many there are."""
    both = [a[s][figure] - b[s][figure] for s in a if s in b and figure in a[s] and figure in b[s]]
    values = np.array([v for v in both if math.isfinite(v)])
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
    return (float(values.mean()) if len(values) else math.nan), error, len(values)


def verdict(difference: float, error: float) -> str:
    """Of ours minus another: smaller is better."""
    if not math.isfinite(error):
        return "?"
    return "level" if abs(difference) <= 2 * error else "better" if difference < 0 else "WORSE"


def mean(found: dict[str, Figures], figure: str) -> float:
    values = [f[figure] for f in found.values() if math.isfinite(f.get(figure, math.nan))]
    return float(np.mean(values)) if values else math.nan


def show(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}" if abs(value) < 10 else f"{value:.1f}"


def best_simple(part: Part, cell: dict[str, Any], figure: str) -> str | None:
    """The simple alternative with the smallest mean."""
    there = [m for m in part.simple if m in cell and not math.isnan(mean(cell[m], figure))]
    return min(there, key=lambda m: mean(cell[m], figure)) if there else None


def cells_of(part: Part, kept: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name in part.sets:
        sizes = [n for n in kept.get(name, {}) if n != "pool"]
        for n in sorted(sizes, key=lambda text: math.inf if text == "all" else int(text)):
            if OURS in kept[name][n]:
                yield name, n, kept[name][n]


def marked(name: str) -> str:
    return f"{name} *" if name.split(",")[0] in CHOSEN_ON else name


def tally(words: Sequence[str]) -> list[str]:
    """How many cells are better, level and worse."""
    return [str(sum(w == word for w in words)) for word in WORDS]


def part_page(part: Part, kept: dict[str, Any]) -> tuple[list[str], dict[tuple[bool, str, str], list[str]]]:
    """The table of one part, and its verdicts: by (untouched, figure, other) the cells' words."""
    lines = [f"## {part.title}", "", part.about, ""]
    counts: dict[tuple[bool, str, str], list[str]] = {}
    figure = part.figures[0]
    others = [m for m in part.methods if m != OURS]
    head = ["set", "n", "seeds", f"**ours: {figure}**", *others, "ours - best simple", "verdict"]
    lines += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for name, n, cell in cells_of(part, kept):
        untouched = name.split(",")[0] not in CHOSEN_ON
        best = best_simple(part, cell, figure)
        difference, error, seeds = paired(cell[OURS], cell[best], figure) if best else (math.nan, math.nan, 0)
        row = [marked(name), n, str(seeds), f"**{show(mean(cell[OURS], figure))}**"]
        figures = part.figures[: 3 if "Brier" in part.figures else 1]
        found: dict[str, list[str]] = {one: [] for one in figures}
        for other in others:
            if other not in cell:
                row.append("")
                continue
            said = verdict(*paired(cell[OURS], cell[other], figure)[:2])
            unanswered = mean(cell[other], "infinite")
            if unanswered > 0.02:  # an infinite threshold covers, and says nothing
                row.append(f"{show(mean(cell[other], figure))} (infinite: {100 * unanswered:.0f} %)")
                continue
            row.append(f"{show(mean(cell[other], figure))} ({said})")
            for one in figures:
                word = verdict(*paired(cell[OURS], cell[other], one)[:2])
                counts.setdefault((untouched, one, other), []).append(word)
                found[one] += [] if other.startswith(OURS) else [word]
        said = verdict(difference, error)
        for one in figures:
            if known := [word for word in found[one] if word in WORDS]:
                counts.setdefault((untouched, one, EVERY), []).append(max(known, key=WORDS.index))
            rival = best_simple(part, cell, one)
            if rival:
                counts.setdefault((untouched, one, "best simple"), []).append(verdict(*paired(cell[OURS], cell[rival], one)[:2]))
        row += [f"{difference:+.4f} ± {error:.4f} ({best})", said]
        lines.append("| " + " | ".join(row) + " |")
    lines += ["", "What it cost and the other figures (means over seeds):", ""]
    head = ["set", "n", "method", *part.figures[1:], "seconds"]
    lines += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for name, n, cell in cells_of(part, kept):
        for method in part.methods:
            if method in cell:
                row = [marked(name), n, method, *(show(mean(cell[method], f)) for f in (*part.figures[1:], "seconds"))]
                lines.append("| " + " | ".join(row) + " |")
    return [*lines, ""], counts


def page(done: dict[str, Any]) -> str:
    """The whole page."""
    lines = ["# Promises on fresh data", "", "- command: `python -m benchmarks.fresh`"]
    lines += [f"- {name}: {value}" for name, value in done.get("machine", {}).items()]
    lines += ["", (__doc__ or "").split("\n\n")[2].replace("\n", " "), ""]
    lines += ["Sets marked * were looked at while constants or rules were chosen. A verdict of ours against another is at two "
              "standard errors of the paired difference; of many cells some are beyond two by chance alone.", ""]  # fmt: skip
    lines += [line for note in done.get("notes", []) for line in (f"Note: {note}", "")]
    body: list[str] = []
    total = ["| part | figure | sets | against | better | level | worse |", "|" + " --- |" * 7]
    all_words: dict[str, list[str]] = {}
    deciding: dict[str, list[str]] = {}
    for name, part in PARTS.items():
        if not done.get(name):
            continue
        text, counts = part_page(part, done[name])
        body += text
        for (untouched, figure, other), words in counts.items():
            sets = "untouched" if untouched else "chosen on"
            total.append("| " + " | ".join([name, figure, sets, other, *tally(words)]) + " |")
            all_words.setdefault(other, []).extend(words)
            if figure == part.figures[0]:
                deciding.setdefault(other, []).extend(words)
    for name, section in SECTIONS.items():
        if done.get(name):
            body += section.page(done[name])
    lines += ["## In short: cells", "", "Better / level / worse over all parts and data sets, by the figure that decides (the "
              f"first of each part) and by every figure counted below. \"{EVERY}\": the worst verdict of a cell against all "
              "methods of others that were measured there, doing nothing among them.", ""]  # fmt: skip
    lines += ["| against | the figure that decides | every figure |", "|" + " --- |" * 3]
    for other, words in sorted(all_words.items(), key=lambda pair: pair[0] not in ("best simple", EVERY)):
        lines.append(f"| {other} | {' / '.join(tally(deciding[other]))} | {' / '.join(tally(words))} |")
    lines.append("")
    return "\n".join([*lines, *total, "", *body]) + "\n"


def in_readme(done: dict[str, Any], readme: str) -> str:
    """The README with its table of cells from these figures."""
    rows = ["| promise | figure | data sets | against | better | level | worse |", "|---|---|---|---|---|---|---|"]
    against = {"best simple": "the best simple alternative", "nothing": "doing nothing", "mcgrad": "mcgrad"}
    words = {
        "coverage": "coverage",
        "probability": "probabilities",
        "over-sure": "probabilities of over-sure models",
        "faces": "faces",
    }
    for name, title in words.items():
        if not done.get(name):
            continue
        for (untouched, figure, other), said in part_page(PARTS[name], done[name])[1].items():
            if figure in (PARTS[name].figures[0], "worst group") and other in against:
                sets = "untouched" if untouched else "chosen on"
                rows.append("| " + " | ".join([title, figure, sets, against[other], *tally(said)]) + " |")
    before, _, rest = readme.partition("<!-- fresh -->\n")
    return before + "<!-- fresh -->\n" + "\n".join(rows) + "\n<!-- /fresh -->" + rest.partition("<!-- /fresh -->")[2]


class Section(NamedTuple):
    """A part with a protocol of its own: it fills its figures piece by piece, and shows them."""

    fill: Callable[[dict[str, Any], int, Callable[[], None]], None]
    page: Callable[[dict[str, Any]], list[str]]


SECTIONS: dict[str, Section] = {
    "guarantee": Section(fill_guarantee, show_guarantee),
    "clusters": Section(fill_clusters, show_clusters),
}


def main(arguments: list[str] | None = None) -> int:
    """Measure what is missing, and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fresh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*PARTS, *SECTIONS]
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--sets", nargs="+", help="some of the data sets of a part")
    parser.add_argument("--sizes", nargs="+", default=[], help="sizes of the calibration set, or 'all'")
    parser.add_argument("--methods", nargs="+", default=[], help="some of the methods")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--again", nargs="+", default=[], metavar="METHOD", help="forget what was measured of these methods")
    parser.add_argument("--results", type=Path, default=RESULTS, help="kept figures; the page is written beside them")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    parser.add_argument("--readme", action="store_true", help="write the table of the README too")
    options = parser.parse_args(arguments)
    done: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {}
    for part in options.parts:
        for name, cells in done.get(part, {}).items() if part in PARTS else ():
            if options.sets and name not in options.sets:
                continue
            for cell in (c for n, c in cells.items() if n != "pool" and (not options.sizes or n in options.sizes)):
                for method in options.again:
                    cell.pop(method, None)

    def save() -> None:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        partial = options.results.with_suffix(".partial")
        partial.write_text(json.dumps(done, separators=(",", ":"), sort_keys=True) + "\n")
        partial.replace(options.results)

    if not options.page:
        torch.set_num_threads(1)
        done["machine"] = machine()
        for part in options.parts:
            if part == "faces" and "TORCHGMC_DATA" not in os.environ:
                print("faces: set TORCHGMC_DATA to the folder of the data", file=sys.stderr)
            elif part in SECTIONS:
                SECTIONS[part].fill(done.setdefault(part, {}), options.seeds, save)
            else:
                chosen = [name for name in PARTS[part].sets if not options.sets or name in options.sets]
                run(part, chosen, options.seeds, options.sizes, options.methods, done, save)
        save()
    options.results.with_suffix(".md").write_text(page(done), encoding="utf-8")
    if options.readme:
        path = Path(__file__).parent.parent / "README.md"
        path.write_text(in_readme(done, path.read_text(encoding="utf-8")), encoding="utf-8")
    print(page(done).split("\n## ", 2)[1])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
