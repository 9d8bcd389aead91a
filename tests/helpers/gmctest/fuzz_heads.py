"""Fuzz entries of every head in the zoo: fit, forward in all modes, audit, observe in two batches, derivatives of the fit."""

import copy
import functools
import inspect
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torchgmc as gmc
from gmctest import heads_zoo
from gmctest.fuzz_inputs import Arguments, Entry, all_plain

N = 24


@functools.cache
def fitted(index: int) -> gmc.Head:
    return heads_zoo.ZOO[index].fitted(60, 3)


def observe_names(head: gmc.Head) -> list[str]:
    return list(inspect.signature(head.observe).parameters)


def weights(n: int, seed: int) -> Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1


# -- right answers: plain formulas over the outputs ---------------------------------------------------------------------------


def shares(head: gmc.Head, member: Any, values: np.ndarray, weight: Any, counted: np.ndarray | None = None) -> np.ndarray:
    """Sum of w 1_A s / sum of w, group by group and, if it is promised, of everyone; of the examples that count."""
    member = (member.detach().bool() if isinstance(member, Tensor) else torch.tensor(member).bool()).numpy()
    if head.promises_everyone:
        member = np.concatenate([member, np.ones((len(member), 1), dtype=bool)], 1)
    w = np.ones(len(values)) if weight is None else np.asarray(torch.as_tensor(weight).detach().double())
    w = w if counted is None else w * counted
    return np.array([sum(w[i] * values[i] for i in range(len(values)) if row[i]) / w.sum() for row in member.T])


def check_range(head: gmc.Head, data: Arguments, output: Tensor) -> None:
    """Shape, type and range of an output of ``forward``."""
    mode = data.get("mode", "hard")
    if isinstance(head, gmc.ThresholdHead):
        assert output.shape == data["scores"].shape and (output.dtype == torch.bool) == (mode == "hard")
    elif isinstance(head, gmc.TreeHead):
        assert output.shape[0] == len(data["probs"])
        if mode == "hard":
            assert not output.numel() or (int(output.min()) >= 0 and int(output.max()) < head.tree.num_nodes)
    elif isinstance(head, gmc.QuantileHead):
        assert output.shape == (len(data["groups"]),)
    elif isinstance(head, gmc.DistributionHead):
        assert output.shape == data["logits"].shape
        if plain_values(data["logits"], 1e4) and output.dtype in (torch.float32, torch.float64) and output.numel():
            torch.testing.assert_close(output.exp().sum(1), torch.ones_like(output[:, 0]), rtol=0, atol=1e-3)
    elif isinstance(head, gmc.ProbabilityHead):
        assert output.shape == data["probs"].shape
        low, high = output.detach().double().aminmax() if output.numel() else (torch.tensor(0.0), torch.tensor(1.0))
        if plain_values(data["probs"], 1.0001):
            assert float(low) >= -1e-6 and float(high) <= 1.0 + 1e-2
    else:
        assert output.shape[0] == len(data["f0"])
    if all(plain_values(v, 1e30) for v in data.values() if isinstance(v, Tensor)) and output.is_floating_point():
        assert not output.isnan().any(), "a silent NaN"


def plain_values(value: Tensor, top: float) -> bool:
    if not value.numel() or not value.is_floating_point():
        return True
    return bool(value.isfinite().all()) and float(value.detach().double().abs().max()) <= top


def check_fit(data: Arguments, head: gmc.Head) -> None:
    report = head.report
    assert head.is_fitted and report is not None
    after = report.violations_after
    assert bool(after.isfinite().all()) and bool(report.violations_before.isfinite().all()), "a silent NaN"
    if report.converged and head.fits and data.get("solver") != "fresh":
        assert float(after.abs().max()) <= head.alpha * (1 + 1e-9) + 1e-12
    for name, buffer in head.named_buffers():
        assert name in ("seen", "limits") or not buffer.is_floating_point() or not buffer.isnan().any(), f"NaN in {name}"
    inputs = {k: v for k, v in data.items() if k in inspect.signature(head.forward).parameters and isinstance(v, Tensor)}
    if len(inputs) < sum(k in data for k in inspect.signature(head.forward).parameters):
        return  # groups as a list: fit takes them, forward wants a tensor
    output = head(**inputs).detach()
    check_range(head, data, output)
    if all_plain(data) and type(head) in ORACLES and head.report is not None:
        expected = ORACLES[type(head)](head, data, output)
        if expected is not None:
            got = after.detach().numpy().reshape(-1)
            np.testing.assert_allclose(got, expected.reshape(-1), atol=2e-6)


def miss_rates(head: Any, data: Arguments, mask: Tensor) -> np.ndarray | None:
    if head.per_class or head.conditional or head.config()["risk"] != "fnr":
        return None
    true = data["masks"].detach().numpy().astype(bool).reshape(len(mask), -1)
    found = mask.numpy().reshape(len(mask), -1)
    counts = true.sum(1)
    rate = np.where(counts > 0, (true & ~found).sum(1) / np.maximum(counts, 1), 0.0)
    return shares(head, data["groups"], rate - head.target, data["weight"], counts > 0)


def residuals(head: Any, data: Arguments, output: Tensor) -> np.ndarray | None:
    if head.bins is not None or data["probs"].dtype not in (torch.float32, torch.float64):
        return None
    return shares(head, data["groups"], output.double().numpy() - data["y"].detach().double().numpy(), data["weight"])


def coverage(head: Any, data: Arguments, output: Tensor) -> np.ndarray | None:
    if head.bins is not None or data.get("base") is not None:
        return None
    inside = data["scores"].detach().double().numpy() <= output.double().numpy()
    return shares(head, data["groups"], inside - head.target, data["weight"])


def list_masses(head: Any, data: Arguments, output: Tensor) -> np.ndarray | None:
    if data["logits"].dtype != torch.float64 or head.euclidean:
        return None
    p = output.double().exp().numpy()
    mass = np.stack([p[:, ids].sum(1) for ids in heads_zoo.LISTS.values()], 1)
    w = np.ones(len(p)) if data["weight"] is None else np.asarray(torch.as_tensor(data["weight"]).detach().double())
    mean = (w[:, None] * mass).sum(0) / w.sum()
    return np.stack([shares(head, data["groups"], mass[:, k] - mean[k], data["weight"]) for k in range(mass.shape[1])], 1)


def differences(head: Any, data: Arguments, output: Tensor) -> np.ndarray | None:
    if data["f0"].dtype != torch.float64 or data["y"].dim() != 1 or data["f0"].dim() != 1:
        return None
    rows = output.numpy().reshape(len(output)) - data["y"].detach().double().numpy()
    return shares(head, data["x"], rows, data["weight"])


ORACLES: dict[type, Any] = {
    gmc.ThresholdHead: miss_rates,
    gmc.ProbabilityHead: residuals,
    gmc.QuantileHead: coverage,
    gmc.DistributionHead: list_masses,
    gmc.GMCHead: differences,
}


# -- entries ------------------------------------------------------------------------------------------------------------------


def fit_entry(zoo: heads_zoo.Entry) -> Entry:
    names = observe_names(zoo.make())

    def make(n: int, seed: int) -> Arguments:
        data = dict(zip(names, zoo.data(n, seed).observe, strict=False))
        data["weight"] = weights(n, seed) if seed % 2 else None
        return data | {"solver": "exact", "eta": None, "max_iter": None}

    def call(**arguments: Any) -> gmc.Head:
        # A cap, so that a case is quick: a search cut short is a right answer that says so.
        if arguments["solver"] in ("paper", "fresh") or isinstance(arguments["max_iter"], int):
            arguments["max_iter"] = min(arguments["max_iter"], 50) if isinstance(arguments["max_iter"], int) else 50
        head = zoo.make()
        return head.fit(**arguments)

    return Entry(f"fit {zoo.name}", make, call, check_fit)


def batches_entry(zoo: heads_zoo.Entry) -> Entry:
    names = observe_names(zoo.make())

    def make(n: int, seed: int) -> Arguments:
        return dict(zip(names, zoo.data(n, seed).observe, strict=False)) | {"weight": None}

    def call(**arguments: Any) -> gmc.Head:
        head = zoo.make()
        head.observe(*zoo.data(N, 5).observe)
        before = head.statistics
        try:
            head.observe(**arguments)
        except Exception:
            assert head.statistics is before, "a batch that was refused left a trace"
            raise
        head.calibrate(max_iter=50)
        return head

    def check(data: Arguments, head: gmc.Head) -> None:
        assert head.is_fitted and head.report is not None and bool(head.report.violations_after.isfinite().all())

    return Entry(f"observe {zoo.name}", make, call, check)


def forward_entry(index: int) -> Entry:
    zoo = heads_zoo.ZOO[index]
    names = list(inspect.signature(zoo.make().forward).parameters)

    def make(n: int, seed: int) -> Arguments:
        data = dict(zip(names, zoo.data(n, seed).inputs, strict=False))
        return data | {"mode": ("hard", "soft", "straight_through")[seed % 3], "temperature": 0.1}

    def call(**arguments: Any) -> Any:
        return fitted(index)(**arguments)

    return Entry(f"forward {zoo.name}", make, call, lambda data, out: check_range(fitted(index), data, out.detach()))


def audit_entry(index: int) -> Entry:
    zoo = heads_zoo.ZOO[index]
    names = zoo.make().arguments

    def make(n: int, seed: int) -> Arguments:
        data = dict(zip(names, zoo.data(n, seed).observe, strict=False))
        return data | {"weight": weights(n, seed) if seed % 2 else None, "delta": 0.05}

    def call(**arguments: Any) -> Any:
        return fitted(index).audit(**arguments)

    def check(data: Arguments, audit: gmc.Audit) -> None:
        assert audit.table["estimate"] and math.isfinite(audit.max_violation), "a silent NaN"
        for low, value, high in zip(*(audit.table[k] for k in ("low", "estimate", "high")), strict=True):
            assert low - 1e-9 <= value <= high + 1e-9

    return Entry(f"audit {zoo.name}", make, call, check)


def values_entry(index: int) -> Entry:
    zoo = heads_zoo.ZOO[index]
    names = [name for name in zoo.make().arguments if name not in ("weight", "clusters")]

    def make(n: int, seed: int) -> Arguments:
        return dict(zip(names, zoo.data(n, seed).observe, strict=False)) | {"softness": (None, 0.1)[seed % 2]}

    def call(**arguments: Any) -> Any:
        return fitted(index).values(**arguments)

    def check(data: Arguments, found: Any) -> None:
        s, who = found
        rows, columns = map(len, fitted(index).test_functions())
        assert len(who) == len(s) and who.shape[1] * s.shape[1] == rows * columns
        assert found.inside is None or found.inside.shape == s.shape  # soft sets are columns

    return Entry(f"values {zoo.name}", make, call, check)


def loop_entry(zoo: heads_zoo.Entry) -> Entry:
    """``fit_batches`` of two batches, of which the second is broken."""

    def make(n: int, seed: int) -> Arguments:
        return dict(zip(zoo.make().arguments, zoo.data(n, seed).observe, strict=False))

    def call(**arguments: Any) -> gmc.Head:
        good = dict(zip(arguments, zoo.data(N, 5).observe, strict=False))
        return zoo.make().fit_batches([good, arguments])

    def check(data: Arguments, head: gmc.Head) -> None:
        assert head.is_fitted and head.report is not None and bool(head.report.violations_after.isfinite().all())

    return Entry(f"fit_batches {zoo.name}", make, call, check)


def implicit_entry(zoo: heads_zoo.Entry) -> Entry:
    names = observe_names(zoo.make())

    def make(n: int, seed: int) -> Arguments:
        data = list(zoo.data(n, seed).observe)
        data[0] = data[0].double().requires_grad_()
        return dict(zip(names, data, strict=False)) | {"weight": None, "alpha": None}

    def call(**arguments: Any) -> dict[str, Tensor]:
        return copy.deepcopy(zoo.make()).solve_differentiably(**arguments)

    def check(data: Arguments, state: dict[str, Tensor]) -> None:
        assert state and not any(bool(v.isnan().any()) for v in state.values()), "a silent NaN"

    return Entry(f"solve_differentiably {zoo.name}", make, call, check)


SMOOTH = ("threshold", "quantile", "distribution", "probability")
ENTRIES = [
    *(fit_entry(zoo) for zoo in heads_zoo.ZOO),
    *(batches_entry(zoo) for zoo in heads_zoo.ZOO),
    *(forward_entry(i) for i in range(len(heads_zoo.ZOO))),
    *(audit_entry(i) for i in range(len(heads_zoo.ZOO))),
    *(values_entry(i) for i in range(len(heads_zoo.ZOO))),
    *(loop_entry(zoo) for zoo in heads_zoo.ZOO if not zoo.baseline),
    *(implicit_entry(zoo) for zoo in heads_zoo.ZOO if zoo.name in SMOOTH),
]
