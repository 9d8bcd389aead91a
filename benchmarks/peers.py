"""What the README says about other packages, seen in small runs of those that are installed.

    python -m benchmarks.peers [--markdown benchmarks/results/peers.md]

Each function runs one package on made-up data with two groups that overlap, checks the claim, and says what was seen.
"""

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchgmc as gmc

ROWS, NEW, TARGET = 400, 10, 0.9


def data(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Membership in two groups that overlap, and scores that are wider in both of them; the last rows are new."""
    rng = np.random.default_rng(seed)
    member = (rng.random((ROWS + NEW, 2)) < 0.5).astype(float)
    return member, np.abs(rng.standard_normal(ROWS + NEW)) * (1 + member.sum(1))


def basis(member: np.ndarray) -> np.ndarray:
    member = np.atleast_2d(member)
    return np.concatenate([np.ones((len(member), 1)), member], 1)


@contextlib.contextmanager
def counted(owner: Any, name: str) -> Iterator[list[int]]:
    """How often a function of a package is called."""
    calls, own = [0], getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        return own(*args, **options)

    setattr(owner, name, call)
    try:
        yield calls
    finally:
        setattr(owner, name, own)


def torchgmc() -> str:
    member, scores = data()
    names = ["a", "b"]
    head = gmc.QuantileHead(TARGET, None, names, finite_sample=True)
    head.fit(torch.from_numpy(scores[:ROWS]), torch.from_numpy(member[:ROWS] > 0))
    size = sum(buffer.numel() for buffer in head.buffers())
    torch.jit.script(head)
    return f"fitted once on {ROWS} rows; an nn.Module whose state has {size} numbers, and which scripts"


def mapie() -> str:
    from mapie import conditional_conformal_prediction as module
    from mapie.risk_control.adaptive_conformal_risk_control import ConditionalExpectedRiskController
    from sklearn.dummy import DummyRegressor

    member, scores = data()
    nothing = DummyRegressor(strategy="constant", constant=0.0).fit(member, scores)
    regressor = module.ConditionalSplitConformalRegressor(basis, nothing, TARGET)
    regressor.conformalize(member[:ROWS], scores[:ROWS])
    with counted(module.ConditionalSplitConformalRegressor, "_compute_exact_cutoff") as cutoffs:
        regressor.predict_interval(member[ROWS:])
    images = np.random.default_rng(0).random((ROWS // 10 + NEW, 4, 4))

    def predict(given: Any, parameter: Any = None) -> np.ndarray:
        given = np.asarray(given)
        return given if parameter is None else given >= np.asarray(parameter).reshape(-1, *[1] * (given.ndim - 1))

    def flat(given: Any) -> np.ndarray:
        return np.asarray(given).reshape(-1, 16)

    controller = ConditionalExpectedRiskController(predict, flat, 0.1, "recall")
    controller.conformalize(images[:-NEW], (images[:-NEW] > 0.5).astype(float), n_epochs=2)
    with counted(torch.optim.Adam, "step") as steps:
        controller.predict(images[-NEW:], n_epochs=3)
    assert cutoffs == [NEW] and steps[0] == 3 * NEW
    assert not isinstance(regressor, torch.nn.Module) and not isinstance(controller, torch.nn.Module)
    return (
        f"for {NEW} new inputs the conditional regressor steps through a linear program {cutoffs[0]} times; the conditional "
        f"risk controller, asked for 3 epochs, takes {steps[0]} steps of Adam: it trains again for every input"
    )


def conditionalconformal() -> str:
    from conditionalconformal.condconf import CondConf

    member, scores = data()
    model = CondConf(lambda x, y: y, basis)
    model.setup_problem(member[:ROWS], scores[:ROWS])
    dual, primal = model._get_calibration_solution(TARGET)
    level = np.full(ROWS + 1, TARGET)
    cutoffs = [model._compute_exact_cutoff(level, primal, dual.reshape(-1), basis(row), TARGET) for row in member[ROWS:]]
    found = np.array([float(np.asarray(one).reshape(-1)[0]) for one in cutoffs])
    assert np.isfinite(found).all() and len(model.x_calib) == ROWS
    return f"each new input has its own cutoff, from a linear program over all {ROWS} rows, which the model keeps"


def crepes() -> str:
    from crepes import ConformalRegressor

    member, scores = data()
    cells = member @ [1, 2]
    widths = ConformalRegressor().fit(residuals=scores[:ROWS], bins=cells[:ROWS])
    ends = widths.predict_int(np.zeros(4), bins=np.arange(4.0), confidence=TARGET)[:, 1]
    assert ends[0] < ends[1] and ends[2] < ends[3]
    with contextlib.suppress(IndexError, ValueError, TypeError):
        ConformalRegressor().fit(residuals=scores[:ROWS], bins=member[:ROWS]).predict_int(
            np.zeros(NEW), bins=member[ROWS:], confidence=TARGET
        )
        raise AssertionError("a membership in groups that overlap was accepted")
    return "one width for each of 4 disjoint cells; a membership in 2 groups that overlap is refused"


def torchcp() -> str:
    if importlib.util.find_spec("torchsort") is None:  # compiled on installation; only one of its training losses uses it
        sys.modules["torchsort"] = stand_in = types.ModuleType("torchsort")
        stand_in.soft_rank = stand_in.soft_sort = None  # type: ignore[attr-defined]
    from torchcp.classification import predictor
    from torchcp.classification.score import LAC

    fitted = predictor.SplitPredictor(LAC())
    fitted.calculate_threshold(torch.randn(ROWS, 5), torch.randint(5, (ROWS,)), 0.1)
    kinds = [name for name in dir(predictor) if name.endswith("Predictor")]
    assert not isinstance(fitted, torch.nn.Module) and not hasattr(fitted, "state_dict")
    return f"{len(kinds)} predictors of sets; the threshold is an attribute of an object without a state_dict, not of an nn.Module"


def mcgrad() -> str:
    import pandas as pd
    from mcgrad.methods import MCGrad

    member, scores = data()
    frame = pd.DataFrame(member, columns=["a", "b"]).assign(p=0.5, y=(scores > 1.5).astype(int))
    columns = {"categorical_feature_column_names": [], "numerical_feature_column_names": ["a", "b"]}
    model = MCGrad(num_rounds=2, early_stopping=False)
    model.fit(frame[:ROWS], "p", "y", **columns)
    found = model.predict(frame[ROWS:], "p", **columns)
    assert np.ptp(found) > 0.05 and not isinstance(model, torch.nn.Module)
    return "probabilities from a data frame by boosted trees; the model is not an nn.Module"


def fairlearn() -> str:
    from fairlearn.metrics import MetricFrame, selection_rate

    member, scores = data()
    y = (scores > 1.5).astype(int)
    table = MetricFrame(metrics=selection_rate, y_true=y, y_pred=y, sensitive_features=member[:, 0])
    assert len(table.by_group) == 2
    return "MetricFrame breaks a rate down by the values of columns; every example is in one cell"


def multicalibration() -> str:
    from multicalibration import MulticalibrationPredictor

    rng = np.random.default_rng(0)
    half, y, who = np.full(2 * ROWS, 0.5), (rng.random(2 * ROWS) < 0.5).astype(int), rng.random((2 * ROWS, 20)) < 0.05
    old, new = slice(0, ROWS), slice(ROWS, None)
    model = MulticalibrationPredictor("HKRR")
    params = {"alpha": 0.02, "lambda": 0.1, "max_iter": 1000, "randomized": False, "use_oracle": False}
    model.fit(half[old], y[old], [np.flatnonzero(one) for one in who[old].T], params)
    theirs = model.predict(half[new], [np.flatnonzero(one) for one in who[new].T])
    head = gmc.ProbabilityHead(0.02, [f"g{k}" for k in range(20)])
    ours = head.fit(half[old], y[old], who[old])(half[new], who[new]).numpy()
    brier = [float(np.mean((f - y[new]) ** 2)) for f in (theirs, ours)]
    assert brier[0] > 0.29 and brier[1] < 0.255
    return (
        "where 0.5 is right for everyone, HKRR (alpha 0.02) on 400 rows with 20 groups of 5 % fits their noise: Brier score "
        f"{brier[0]:.2f} on new rows, {brier[1]:.2f} with a ProbabilityHead, 0.25 before"
    )


def torch_uncertainty() -> str:
    from torch.utils.data import DataLoader, TensorDataset
    from torch_uncertainty import post_processing

    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
    scaler = post_processing.TemperatureScaler()
    scaler.fit(DataLoader(TensorDataset(x, (3 * x).softmax(1).argmax(1)), batch_size=100), progress=False)
    assert isinstance(scaler, torch.nn.Module)
    kinds = [kind for kind in vars(post_processing).values() if inspect.isclass(kind)]
    assert not [kind for kind in kinds if any("group" in name for name in inspect.signature(kind.fit).parameters)]
    return f"{len(kinds)} kinds of post-processing, which are nn.Modules; none is fitted with groups"


#: By distribution: its module, and what runs it.
PEERS: dict[str, tuple[str, Callable[[], str]]] = {
    "MAPIE": ("mapie", mapie),
    "conditionalconformal": ("conditionalconformal", conditionalconformal),
    "crepes": ("crepes", crepes),
    "torchcp": ("torchcp", torchcp),
    "mcgrad": ("mcgrad", mcgrad),
    "fairlearn": ("fairlearn", fairlearn),
    "multicalibration": ("multicalibration", multicalibration),
    "torch-uncertainty": ("torch_uncertainty", torch_uncertainty),
}
NOT_RUN = (
    "Not run here: fortuna, which needs versions of NumPy that torchgmc's other peers do not take; its row is from its "
    "documentation. `python -m benchmarks --only multicalibration` runs it where it is installed."
)


def seen() -> dict[str, str]:
    """What was seen of every package that is installed; of the others that they are not."""
    found = {f"torchgmc {gmc.__version__}": torchgmc()}
    for name, (module, run) in PEERS.items():
        if importlib.util.find_spec(module) is None:
            found[name] = "not installed"
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # theirs
            found[f"{name} {version(name)}"] = run()
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="write this page")
    options = parser.parse_args(arguments)
    found = seen()
    page = [f"# {__doc__.splitlines()[0]}", "", "`python -m benchmarks.peers --markdown benchmarks/results/peers.md`", ""]
    page += ["| package | seen |", "|---|---|", *(f"| {name} | {what} |" for name, what in found.items()), "", NOT_RUN, ""]
    if options.markdown:
        options.markdown.write_text("\n".join(page), encoding="utf-8")
    for name, what in found.items():
        print(f"{name}: {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
