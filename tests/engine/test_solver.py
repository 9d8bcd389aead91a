"""The solver: states told apart; steps that wait for no value."""

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import torchgmc as gmc
from gmctest.fake_device import AWAY
from torchgmc.engine import solver as engine
from torchgmc.engine.solver import entry, fingerprint


def test_fingerprints_tell_states_apart():
    """All states of four levels in -3..3, and no two alike (linear weights fail this: 1, -2, 1)."""
    grid = torch.cartesian_prod(*[torch.arange(-3, 4)] * 4)
    prints = {int(fingerprint(state, torch.tensor(0.01))) for state in grid}
    assert len(prints) == 7**4
    near = torch.tensor([0.1, 0.7]).double()
    assert fingerprint(near, torch.tensor(0.05)) == fingerprint(near - 0.05 + 0.05, torch.tensor(0.05))


def test_an_entry_is_what_indexing_gives():
    table, where = torch.randn(4, 3), torch.tensor([2, 0])
    assert torch.equal(entry(table, torch.tensor(2), torch.tensor(1)), table[2, 1])
    assert torch.equal(entry(table, torch.tensor(2)), table[2]) and torch.equal(entry(table, where), table[where])


def elsewhere(value: Any, known: dict[int, Any]) -> Any:
    """The same object with all its tensors on a device without values."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device=AWAY)
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, elsewhere(value.__self__, known))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(elsewhere(part, known) for part in value))
    if type(value).__module__.startswith("torchgmc.") and hasattr(value, "__dict__"):
        if id(value) not in known:
            known[id(value)] = made = copy.copy(value)
            for name, part in vars(value).items():
                object.__setattr__(made, name, elsewhere(part, known))
        return known[id(value)]
    return value


def problem_of(fit: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a fit gives the solver."""
    found, begin = [], engine._Search.__init__

    def note(self: Any, problem: Any, *rest: Any) -> None:
        found.append(problem)
        begin(self, problem, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(engine._Search, "__init__", note)
        fit()
    return found[0]


def fits() -> dict[str, tuple[str, Callable[[], Any]]]:
    """The solvers of each problem whose steps wait for nothing, and a fit."""
    torch.manual_seed(0)
    groups, y = torch.rand(60, 2) < 0.5, torch.rand(60) < 0.5
    scores, masks, logits = torch.rand(60, 4), torch.rand(60, 4) < 0.5, torch.randn(60, 9)
    names, words = ["a", "b"], {"w": [3, 4], "v": [5]}

    def fit(head: gmc.Head, *data: Tensor) -> Callable[[], Any]:
        return lambda: head.fit(*data, solver="paper", max_iter=2)

    def custom() -> Any:
        mapping = gmc.mappings.Residual(y.double()[:, None])
        return gmc.solve(scores[:, :1].double(), mapping, who=groups, alpha=1e-4, solver="paper", max_iter=2)

    static, free = {"noise_floor": False}, {"noise_floor": False, "resolution": None}
    return {
        "threshold": ("paper", fit(gmc.ThresholdHead(0.1, 1e-4, names, **static), scores, masks, groups)),
        "threshold, any": ("paper", fit(gmc.ThresholdHead(0.1, 1e-4, names, **free), scores, masks, groups)),
        "probability": ("paper", fit(gmc.ProbabilityHead(1e-4, names, bins=3), scores[:, 0], y, groups)),
        "euclidean": ("paper", fit(gmc.ProbabilityHead(1e-4, names, geometry="euclidean"), scores[:, 0], y, groups)),
        "quantile": ("paper", fit(gmc.QuantileHead(0.9, 1e-4, names, bins=3), scores[:, 0], groups)),
        "distribution": ("paper", fit(gmc.DistributionHead(words, 1e-5, names), logits, groups)),
        "simplex": ("paper", fit(gmc.DistributionHead(words, 1e-5, names, geometry="euclidean"), logits, groups)),
        "custom": ("paper", custom),
    }


@pytest.mark.parametrize("name", fits())
def test_steps_wait_for_no_value(name: str, monkeypatch: pytest.MonkeyPatch):
    """On a device without values: a step that reads one (0-d indexing does), or picks rows by a mask, raises."""
    solvers, fit = fits()[name]
    for solver in solvers.split():
        problem = problem_of(fit, monkeypatch)
        with FakeTensorMode(allow_non_fake_inputs=True):
            there = elsewhere(problem, {})
            if hasattr(there, "sparse"):
                there.sparse = False
            before = there.violations()
            search = engine._Search(there, torch.full_like(before, 1e-4), solver, 0.01, before, None)
            for t in range(3):
                search.step(t)
            assert search.log[-1][2].device == AWAY == there.state().device
            with pytest.raises(DataDependentOutputException):
                before[search.log[0][0]]


def test_a_violation_that_exceeds_alpha_by_rounding_is_at_alpha():
    """One that is alpha on paper may be a bit more or less in another order of sums; the fit must not depend on it."""
    f, member = torch.full((1, 1), 0.1 + 0.2, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    assert float(f) > 0.3

    def solved(solver: str, start: torch.Tensor = f, **options: Any):
        return gmc.solve(start, lambda now: now, member, alpha=0.3, solver=solver, **options).report

    assert solved("exact").iterations == 0 and solved("exact").converged
    assert solved("exact", f * (1 + 1e-8)).iterations == 1
    assert solved("paper", eta=0.1).iterations == 1  # to the letter
