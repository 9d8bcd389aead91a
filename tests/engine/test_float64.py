"""A device without float64, which is pretended to be another one."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torchgmc as gmc
from gmctest.heads_zoo import ENTRIES, ZOO, Entry
from torchgmc.engine import float64, hashing


@pytest.fixture
def pretend(monkeypatch):
    """Say which type of device has no float64."""

    def lack(kind: str) -> None:
        monkeypatch.setattr(float64, "lacks", lambda device: device.type == kind)
        monkeypatch.setattr(hashing, "lacks", float64.lacks)

    return lack


class Without(TorchDispatchMode):
    """Raises where a float64 tensor is made on a device of this type."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(one, torch.Tensor) and one.device.type == self.kind and one.dtype == torch.float64:
                raise TypeError(f"{func} makes float64 on {self.kind}")
        return out


def modes(entry: Entry) -> list[str]:
    return ["hard"] if entry.name.startswith("gmc") else ["hard", "soft", "straight_through"]


@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_forward_of_every_head_makes_no_float64(entry: Entry, pretend):
    """On "meta", whose tensors have a type and a shape and no values."""
    head, data = entry.fitted(), entry.data(20, 1)
    pretend("meta")
    with Without("meta"):
        head.to("meta")
        for mode in modes(entry):
            out = head(*(t.to("meta") for t in data.inputs), **({} if mode == "hard" else {"mode": mode}))
            assert out.device.type == "meta" and out.dtype != torch.float64


@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_answers_in_float32_are_those_in_float64(entry: Entry, pretend):
    head, inputs = entry.fitted(), entry.data(300, 1).inputs
    expected = [head(*inputs, **({} if mode == "hard" else {"mode": mode})) for mode in modes(entry)]
    pretend("cpu")
    head.to("cpu")
    assert not any(buffer.dtype == torch.float64 for buffer in head.buffers())
    for mode, want in zip(modes(entry), expected, strict=True):
        with Without("cpu"):
            found = head(*inputs, **({} if mode == "hard" else {"mode": mode}))
        if want.is_floating_point() and mode != "straight_through":
            torch.testing.assert_close(found.double(), want.double(), rtol=1e-4, atol=1e-4)
        else:  # a decision at the very edge may turn
            assert float(((found.double() - want.double()).abs() > 1e-4).double().mean()) < 0.002


def test_noise_and_keys_are_the_same_bits(pretend):
    x = torch.randn(200, 7, 9) * torch.tensor([1.0, 1e4, 1e-4])[torch.arange(200) % 3][:, None, None]
    expected = [(hashing.keys(x, version), hashing.noise(x, version)) for version in hashing.VERSIONS]
    pretend("cpu")
    with Without("cpu"):
        found = [(hashing.keys(x, version), hashing.noise(x, version)) for version in hashing.VERSIONS]
    for (key, noise), (want_key, want_noise) in zip(found, expected, strict=True):
        assert torch.equal(key, want_key.long()) and torch.equal(noise, want_noise)


def test_certain_probabilities_in_float32(pretend):
    head, (probs, _, member) = ENTRIES["probability"].fitted(), ENTRIES["probability"].data(40, 2).observe
    probs[:10], probs[10:20] = 1.0, 0.0
    expected = head(probs, member)
    pretend("cpu")
    torch.testing.assert_close(head.to("cpu")(probs, member), expected, rtol=1e-4, atol=1e-6)


class Elsewhere(torch.Tensor):
    """A tensor that says it is on a device without float64."""

    @property
    def device(self):
        return torch.device("mps")

    def cpu(self):
        return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs)
        if isinstance(out, cls) and out.dtype == torch.float64:
            raise TypeError(f"{func} makes float64 on {out.device}")
        return out


@pytest.fixture
def moved(monkeypatch):
    """Move a head to a device without float64: of its buffers, the one that says where it is."""

    def to(self, place):
        if "fitted" in self._buffers:
            self._buffers["fitted"] = self._buffers["fitted"].as_subclass(Elsewhere if str(place) == "mps" else torch.Tensor)
        return self

    monkeypatch.setattr(float64.Float64Module, "to", to)
    monkeypatch.setattr(float64, "sent", lambda x, device: x.float().as_subclass(Elsewhere) if device.type == "mps" else x)
    return lambda head: head.to("mps")


def away(data):
    return [t.as_subclass(Elsewhere) for t in data]


@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_what_is_observed_goes_to_the_cpu_and_gives_its_state(entry: Entry):
    data = entry.data(80, 0).observe
    head = entry.make().fit(*(t.as_subclass(Elsewhere) for t in data), **entry.options)
    for (name, found), want in zip(head.named_buffers(), entry.fitted().buffers(), strict=True):
        assert torch.equal(found, want) and type(found) is torch.Tensor, name


def test_a_head_elsewhere_is_fitted_on_the_cpu_and_comes_back(monkeypatch):
    entry, went = ENTRIES["tree"], []
    head, data = entry.make(), entry.data(80, 0).observe
    head.fitted = head.fitted.as_subclass(Elsewhere)

    def to(self, place):
        went.append(str(place))
        self._buffers["fitted"] = self._buffers["fitted"].as_subclass(torch.Tensor)
        return self

    monkeypatch.setattr(gmc.TreeHead, "to", to)
    head.fit(*data)
    assert went == ["cpu", "mps"] and torch.equal(head.shifts, entry.fitted().shifts)


@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_audits_of_what_is_elsewhere_are_those_of_the_cpu(entry: Entry):
    head, data = entry.fitted(), entry.data(120, 3).observe
    found, want = (head.audit(*(t.as_subclass(kind) for t in data)) for kind in (Elsewhere, torch.Tensor))
    assert found.max_violation == want.max_violation and found.cost == want.cost


def test_observing_batches_of_another_device():
    entry = ENTRIES["probability"]
    head = entry.make()
    for part in zip(*(t.split(30) for t in entry.data(80, 0).observe), strict=True):
        head.observe(*(t.as_subclass(Elsewhere) for t in part))
    torch.testing.assert_close(head.calibrate().offsets, entry.fitted().offsets, rtol=0, atol=1e-12)


@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_observe_and_calibrate_of_a_head_elsewhere(entry: Entry, moved):
    head, want = moved(entry.make()), entry.make()
    for part in zip(*(t.split(45) for t in entry.data(80, 0).observe), strict=True):
        head.observe(*away(part), **entry.options)
        want.observe(*part, **entry.options)
    head.calibrate(), want.calibrate()
    assert head.fitted.device.type == "mps" and head.is_fitted
    for (name, found), right in zip(head.named_buffers(), want.buffers(), strict=True):
        assert torch.equal(found.as_subclass(torch.Tensor), right), name


@pytest.mark.parametrize("name", ["threshold", "probability", "quantile", "distribution", "tree"])
def test_monitors_penalties_and_metrics_of_a_head_elsewhere(name: str, moved):
    entry = ENTRIES[name]
    head, data = entry.fitted(), entry.data(120, 3).observe
    found = []
    for kind in (list, away):
        monitor, metric = gmc.Monitor(head, alpha=0.01), gmc.metrics.for_head(head)
        penalty, inputs = gmc.GMCPenalty.for_head(head), kind(data)
        for part in (monitor, metric):
            part.update(*inputs)
        first = inputs[0].detach().requires_grad_()
        loss = penalty(first, *inputs[1:])
        (slope,) = torch.autograd.grad(loss, first)
        found.append((monitor.log_capital, metric.compute(), penalty.violations(), loss, slope))
        moved(head)
    assert found[1][3].dtype == torch.float32
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b.as_subclass(torch.Tensor).to(a.dtype), a, rtol=1e-5, atol=1e-7)


def test_what_adds_up_stays_where_there_is_float64(pretend):
    made = [gmc.ShiftMonitor(torch.rand(200)), gmc.GMCPenalty(groups=2), gmc.metrics.GroupViolation(2)]
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), *made])
    pretend("meta")
    with Without("meta"):
        model.to("meta")
    assert model[0].weight.device.type == "meta" and made[0].sums.dtype == made[1].sums.dtype == made[2].sums.dtype == torch.float64
    assert {one.sums.device.type for one in made} == {"cpu"}


def test_shifts_penalties_and_metrics_of_what_is_elsewhere(moved):
    scores, target, member = torch.rand(300), torch.rand(300), torch.arange(300)[:, None] % 2 == torch.arange(2)
    found = []
    for kind in (list, away):
        (s, y, m), penalty, metric = kind([scores, target, member]), gmc.GMCPenalty(groups=2), gmc.metrics.GroupViolation(2)
        watch = gmc.ShiftMonitor(s[:200], m[:200])
        watch.update(s[200:], m[200:])
        metric.update(s, y, m)
        s = s.detach().requires_grad_()
        loss = penalty(s, y, m)
        found.append((watch.log_capital, metric.compute(), metric.violations(), loss, *torch.autograd.grad(loss, s)))
    assert found[1][3].device.type == "mps"
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b.as_subclass(torch.Tensor), a, rtol=1e-6, atol=1e-9)


def test_casts_still_do_not_round_where_there_is_float64():
    head = ENTRIES["quantile"].fitted()
    want = head.offsets.clone()
    for cast in (head.half, head.float, head.bfloat16, lambda: head.to(torch.float16)):
        cast()
        assert head.offsets.dtype == torch.float64 and torch.equal(head.offsets, want)


def test_buffers_are_float64_again_where_there_is_float64():
    head = ENTRIES["quantile"].fitted()
    head.offsets = head.offsets.float().as_subclass(Elsewhere)
    assert head.cpu().offsets.dtype == torch.float64
