"""GMCPenalty against plain loops, finite differences, hard violations, one process against two, and a real Trainer."""

import copy
import math
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import torchgmc as gmc
from gmctest import subprocess_env
from gmctest.fake_device import AWAY
from gmctest.penalty_worker import Tiny, train
from torchgmc.heads.threshold.risks import RISKS

KINDS = ("smooth_max", "hinge", "squared")


def loop(who, s, kind: str, alpha: float, temperature: float, reduction: str, conditional: bool, centered: bool = False) -> float:
    """The loss of one batch, one number at a time."""
    n, a, u = len(who), len(who[0]), len(s[0])
    table = []
    for j in range(a):
        for k in range(u):
            mean = sum(row[k] for row in s) / n if centered else 0.0
            inside = [s[i][k] - mean for i in range(n) if who[i][j]]
            table.append(sum(inside) / ((len(inside) or 1) if conditional else n))
    if kind == "smooth_max":
        terms = [math.exp(sign * v / temperature) for v in table for sign in (1, -1)]
        return temperature * math.log(sum(terms) / len(terms))
    costs = [max(abs(v) - alpha, 0.0) if kind == "hinge" else v * v for v in table]
    return {"sum": sum(costs), "mean": sum(costs) / len(costs), "max": max(costs)}[reduction]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    n=st.integers(1, 12),
    a=st.integers(1, 4),
    u=st.integers(1, 3),
    kind=st.sampled_from(KINDS),
    reduction=st.sampled_from(["sum", "mean", "max"]),
    conditional=st.booleans(),
    centered=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_value_against_a_loop(n, a, u, kind, reduction, conditional, centered, seed):
    rng = torch.Generator().manual_seed(seed)
    who, s = torch.rand(n, a, generator=rng) < 0.5, torch.rand(n, u, generator=rng, dtype=torch.float64) - 0.5
    options = {"alpha": 0.05, "temperature": 0.1, "reduction": reduction, "conditional": conditional}
    mapping = "centered" if centered else lambda s: s
    penalty = gmc.GMCPenalty(mapping, a, kind, decay=0.0, **options)
    want = loop(who.tolist(), s.tolist(), kind, centered=centered, **options)
    torch.testing.assert_close(penalty(s, who), torch.tensor(want, dtype=torch.float64))


@settings(deadline=None, max_examples=25, derandomize=True)
@given(kind=st.sampled_from(KINDS), conditional=st.booleans(), centered=st.booleans(), seed=st.integers(0, 2**16))
def test_gradcheck_and_gradgradcheck(kind, conditional, centered, seed):
    rng = torch.Generator().manual_seed(seed)
    who = torch.rand(7, 3, generator=rng) < 0.6
    s = (torch.rand(7, 2, generator=rng, dtype=torch.float64) - 0.3).requires_grad_()
    mapping = "centered" if centered else lambda s: s.square()
    penalty = gmc.GMCPenalty(mapping, 3, kind, alpha=1e-4, temperature=0.1, decay=0.0, conditional=conditional)
    assert torch.autograd.gradcheck(lambda s: penalty(s, who), s)
    assert torch.autograd.gradgradcheck(lambda s: penalty(s, who), s)


def test_smooth_maximum_lies_between_its_bounds():
    who, s = torch.rand(50, 4) < 0.5, torch.randn(50, 3, dtype=torch.float64)
    worst = float(gmc.violations(who, s).abs().max())
    for temperature in (1.0, 0.1, 0.001):
        value = float(gmc.GMCPenalty(lambda s: s, 4, temperature=temperature)(s, who))
        assert worst - temperature * math.log(24) - 1e-9 <= value <= worst + 1e-9
    assert float(gmc.GMCPenalty(lambda s: s, 4)(torch.zeros(50, 3), who)) == pytest.approx(0.0, abs=1e-7)


# -- running sums ------------------------------------------------------------------------------------------------------------


def test_running_sums_are_those_of_a_loop_and_the_derivative_is_the_batches():
    rng = torch.Generator().manual_seed(0)
    decay = 0.7
    penalty = gmc.GMCPenalty(lambda s: s, 2, "squared", decay=decay)
    batches = [(torch.rand(5, 2, generator=rng) < 0.5, torch.randn(5, 1, generator=rng, dtype=torch.float64)) for _ in range(6)]
    sums, total = torch.zeros(2, 1, dtype=torch.float64), 0.0
    for who, s in batches:
        s.requires_grad_()
        loss = penalty(s, who)
        sums = decay * sums + who.double().T @ s.detach()
        total = decay * total + 5
        running = sums / total
        torch.testing.assert_close(loss.detach(), running.square().sum())
        torch.testing.assert_close(penalty.violations(), running)
        (grad,) = torch.autograd.grad(loss, s)
        torch.testing.assert_close(grad, who.double() @ (2 * running) / 5)  # d loss/dV at the running V, dV of the batch
    penalty.reset()
    assert penalty.sums.numel() == 0


def test_a_long_memory_reduces_the_bias_of_rare_groups():
    """At true violations of 0, what is left of the loss and of its pull is noise; a memory of 20 batches leaves far less."""
    rng = torch.Generator().manual_seed(0)
    found = {}
    for decay in (0.0, 0.95):
        penalty = gmc.GMCPenalty(lambda s: s, 1, "squared", decay=decay, conditional=True)
        losses, pulls = [], []
        for step in range(400):
            s = torch.randn(32, generator=rng, dtype=torch.float64).requires_grad_()
            loss = penalty(s, torch.rand(32, 1, generator=rng) < 0.05)
            (grad,) = torch.autograd.grad(loss, s)
            if step >= 100:
                losses.append(float(loss.detach()))
                pulls.append(float((grad * s.detach()).sum()))  # along s itself: the bias shrinks every s
        found[decay] = sum(losses) / len(losses), sum(pulls) / len(pulls)
    assert found[0.95][0] < 0.2 * found[0.0][0]
    assert abs(found[0.95][1]) < 0.3 * abs(found[0.0][1])


def test_a_batch_without_a_group_neither_fails_nor_pulls():
    penalty = gmc.GMCPenalty(lambda s: s, ["a", "b"], "squared", conditional=True)
    penalty(torch.tensor([1.0, 1.0]), torch.tensor([[1, 0], [0, 1]]))
    s = torch.tensor([0.0, 0.0], requires_grad=True)
    loss = penalty(s, torch.tensor([[1, 0], [1, 0]]))
    loss.backward()
    assert bool(s.grad.isfinite().all()) and float(penalty.violations()[1]) == 1.0  # remembered
    alone = gmc.GMCPenalty(lambda s: s, ["a", "b"], "squared", conditional=True, decay=0.0)
    assert float(alone(torch.tensor([1.0]), torch.tensor([[1, 0]]))) == 1.0


def test_an_empty_batch_has_the_loss_of_what_is_remembered():
    penalty = gmc.GMCPenalty(lambda s: s, 1, "squared")
    penalty(torch.tensor([0.5, 0.5]), torch.ones(2, 1))
    s = torch.zeros(0, requires_grad=True)
    loss = penalty(s, torch.ones(0, 1))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.25)
    assert float(gmc.GMCPenalty(lambda s: s, 1)(torch.zeros(0), torch.ones(0, 1))) == pytest.approx(0.0, abs=1e-9)


def test_evaluation_uses_the_sums_and_does_not_change_them():
    penalty = gmc.GMCPenalty(lambda s: s, 1)
    who = torch.ones(3, 1).bool()
    penalty(torch.rand(3), who)
    before = copy.deepcopy(penalty.state_dict())
    penalty.eval()
    assert float(penalty(torch.rand(3), who)) > 0
    assert all(torch.equal(v, before[k]) for k, v in penalty.state_dict().items())


def test_checkpoint_goes_on_where_it_stopped():
    rng = torch.Generator().manual_seed(0)
    batches = [(torch.rand(4, 2, generator=rng), torch.rand(4, 3, generator=rng) < 0.5) for _ in range(4)]
    penalty, fresh = (gmc.GMCPenalty(lambda s: s, 3) for _ in range(2))
    for batch in batches[:2]:
        penalty(*batch)
    fresh.load_state_dict(copy.deepcopy(penalty.state_dict()))
    for batch in batches[2:]:
        assert torch.equal(penalty(*batch), fresh(*batch))
    assert penalty.half().sums.dtype == torch.float64 and copy.deepcopy(penalty).sums.shape == (3, 2)


def test_state_of_a_head_that_promises_everyone_loads():
    penalty, fresh = (gmc.GMCPenalty.for_head(gmc.ThresholdHead(0.1, 0.01, ["dark", "light"])) for _ in range(2))
    penalty(torch.rand(6, 4), torch.rand(6, 4) < 0.5, torch.arange(6)[:, None] % 2 == torch.arange(2))
    fresh.load_state_dict(penalty.state_dict())
    assert torch.equal(fresh.violations(), penalty.violations()) and len(fresh.sums) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"sums": torch.zeros(5, 2)},  # of another penalty
        {"sums": torch.zeros(3, 4)},  # wider than the masses
        {"total": torch.zeros(0, 0)},
        {"total_sums": None},
        {"mass": torch.full((3, 2), torch.nan)},
        {"directions": torch.zeros(2, 2)},
        {"sums": torch.zeros(5, 2), "mass": torch.zeros(5, 2)},
        {name: torch.zeros(2) for name in ("sums", "mass", "total_sums", "total")},
    ],
)
@pytest.mark.parametrize("used", [True, False])
def test_refused_state_changes_nothing(change, used):
    batch = torch.rand(4, 2), torch.rand(4, 3) < 0.5
    saved, penalty = (gmc.GMCPenalty(lambda s: s, 3) for _ in range(2))
    saved(*batch)
    if used:
        penalty(torch.rand(4, 2), batch[1])
    before = copy.deepcopy(penalty.state_dict())
    state = {name: value for name, value in (saved.state_dict() | change).items() if value is not None}
    with pytest.raises(RuntimeError, match="cannot be loaded: .*(size mismatch|not finite)"):
        torch.nn.ModuleDict({"penalty": penalty}).load_state_dict({f"penalty.{name}": part for name, part in state.items()})
    assert all(torch.equal(part, before[name]) for name, part in penalty.state_dict().items())


def test_weights_nan_and_directions():
    who, s = torch.rand(8, 2) < 0.5, torch.randn(8, 3, dtype=torch.float64)
    weight, what = torch.rand(8, dtype=torch.float64), torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 2.0]])
    penalty = gmc.GMCPenalty(lambda s: s, 2, "squared", what=what)
    want = gmc.violations(who, s, what.double(), weight).square().sum()
    torch.testing.assert_close(penalty(s, who, weight=weight), want)
    holes = s.clone()
    holes[0, 1] = torch.nan
    holes.requires_grad_()
    loss = gmc.GMCPenalty(lambda s: s, 2, "squared")(holes, who)
    keep = torch.ones(8, 3, dtype=torch.float64)
    keep[0, 1] = 0
    torch.testing.assert_close(loss.detach(), gmc.violations(who, s, weight=keep).square().sum())
    loss.backward()
    assert float(holes.grad[0, 1]) == 0.0 and bool(holes.grad.isfinite().all())


# -- the mappings of the heads -----------------------------------------------------------------------------------------------


def test_training_with_the_penalty_meets_the_promise():
    torch.manual_seed(0)
    groups = torch.rand(600, 3) < torch.tensor([0.5, 0.3, 0.05])
    x = torch.cat([torch.randn(600, 2), groups.float()], 1)
    y = torch.rand(600) < torch.sigmoid(x[:, 0] + groups[:, 2] * 3.0 - groups[:, 0].float())
    model = nn.Linear(5, 1)
    penalty = gmc.GMCPenalty("residual", 3, "squared", conditional=True)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)

    def worst() -> float:
        with torch.no_grad():
            return float(
                (gmc.violations(groups, torch.sigmoid(model(x))[:, 0] - y.float())[:, 0] / groups.float().mean(0)).abs().max()
            )

    before = worst()
    for step in range(300):
        rows = torch.arange(40) + 40 * (step % 15)
        loss = penalty(torch.sigmoid(model(x[rows]))[:, 0], y[rows].float(), groups[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert before > 0.3 and worst() < 0.1


# -- precision, devices, processes, Lightning ----------------------------------------------------------------------------------


def test_autocast_does_not_reach_the_sums():
    torch.manual_seed(0)
    model, x, who = nn.Linear(4, 1), torch.randn(4096, 4), torch.rand(4096, 3) < 0.5
    penalty, plain = (gmc.GMCPenalty("residual", 3, "squared") for _ in range(2))
    y = (torch.rand(4096) < 0.5).float()
    with torch.autocast("cpu", torch.bfloat16):
        f = torch.sigmoid(model(x))[:, 0]
        loss = penalty(f, y, who)
    assert f.dtype == torch.bfloat16 and loss.dtype == torch.float32
    torch.testing.assert_close(penalty.violations(), gmc.violations(who, f.double() - y))  # exact for what the model gave
    loss.backward()
    half = model.weight.grad.clone()
    model.weight.grad = None
    plain(torch.sigmoid(model(x))[:, 0], y, who).backward()
    torch.testing.assert_close(half, model.weight.grad, rtol=0.05, atol=1e-4)


@pytest.mark.skipif(AWAY.type == "lazy", reason="autocast does not know the device that stands in for CUDA on torch 2.6")
def test_stays_on_the_device_without_looking():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        s = torch.empty(5, 2, device=AWAY, requires_grad=True)
        who = torch.empty(5, 3, device=AWAY, dtype=torch.bool)
        penalty = gmc.GMCPenalty("centered", 3, conditional=True).to(AWAY)
        assert penalty(s, who).device == AWAY and penalty.sums.device == AWAY
        risk = RISKS["fnr"].soft(s[:, :, None], who[:, :2, None], torch.empty(5, 2, device=AWAY), 0.1)
        assert risk.device == AWAY


def test_two_processes_train_as_one(tmp_path: Path):
    env = subprocess_env(GLOO_SOCKET_IFNAME="lo")
    command = [sys.executable, "-m", "gmctest.penalty_worker"]
    ranks = [subprocess.Popen([*command, str(r), str(tmp_path)], env=env, stderr=subprocess.PIPE, text=True) for r in (0, 1)]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    for decay in (0.0, 0.9):
        alone = train(Tiny(decay), slice(0, 20))
        for r in (0, 1):
            got = torch.load(tmp_path / f"{r}-{decay}.pt")
            assert got.keys() == alone.keys()
            for key in alone:
                torch.testing.assert_close(got[key], alone[key], rtol=0, atol=1e-10)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_in_a_lightning_training_step(precision: str, tmp_path: Path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(4, 1)
            self.penalty = gmc.GMCPenalty("residual", ["a", "b", "c"])

        def training_step(self, batch, index):
            x, y, groups = batch
            logits = self.model(x)[:, 0]
            loss = nn.functional.binary_cross_entropy_with_logits(logits, y) + self.penalty(torch.sigmoid(logits), y, groups)
            self.log("worst", self.penalty.violations().abs().max().float())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), (torch.rand(64) < 0.5).float(), torch.rand(64, 3) < 0.5)
    module = Module()
    before = module.model.weight.detach().clone()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        precision=precision,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        log_every_n_steps=1,
        enable_checkpointing=False,
    )
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on workers
        trainer.fit(module, loader)
    assert not torch.equal(module.model.weight, before)
    assert float(trainer.logged_metrics["worst"]) > 0
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    torch.testing.assert_close(saved["penalty.sums"], module.penalty.sums)
    assert saved["penalty.sums"].shape == (3, 1) and saved["penalty.sums"].dtype == torch.float64


# -- errors ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"kind": "cubed"}, ValueError, "`kind`.*'smooth_max'"),
        ({"mapping": "risk"}, ValueError, "`mapping`.*'residual'"),
        ({"alpha": -1.0}, ValueError, "`alpha`"),
        ({"temperature": 0.0}, ValueError, "`temperature`"),
        ({"decay": 1.0}, ValueError, "`decay`.*0 measures each batch"),
        ({"reduction": "median"}, ValueError, "`reduction`"),
        ({"groups": "women"}, TypeError, "`groups`"),
        ({"groups": 0}, ValueError, "`groups`"),
        ({"what": torch.zeros(3)}, ValueError, "`what`"),
    ],
)
def test_bad_options(options, error, match):
    with pytest.raises(error, match=match):
        gmc.GMCPenalty(**options)


def test_bad_batches_leave_the_sums_alone():
    penalty = gmc.GMCPenalty("residual", ["a", "b"])
    f, y, groups = torch.rand(4), torch.ones(4), torch.ones(4, 2)
    penalty(f, y, groups)
    before = copy.deepcopy(penalty.state_dict())
    for batch, error, match in [
        ((), TypeError, "no arguments: call it with"),
        ((f, y, groups[:3]), ValueError, "`groups`"),
        ((f, y, groups[:, :1]), ValueError, "`groups`"),
        ((f, groups), ValueError, "`target` is missing"),
        ((f, y[:3], groups), ValueError, "`target` must have the same shape"),
        ((f.tolist(), y, groups), TypeError, "must be tensors"),
        ((torch.rand(4, 2), torch.ones(4, 2), groups), ValueError, "call `reset`"),
        ((torch.rand(4, 2), torch.tensor([0, 1, 2, 0]), groups), ValueError, "class ids"),
    ]:
        with pytest.raises(error, match=match):
            penalty(*batch)
    assert all(torch.equal(v, before[k]) for k, v in penalty.state_dict().items())
    with pytest.raises(ValueError, match="the mapping must return"):
        gmc.GMCPenalty(lambda s: s.sum())(f)
    with pytest.raises(ValueError, match="`what` has 3 columns"):
        gmc.GMCPenalty(lambda s: s, what=torch.eye(3))(torch.rand(4, 2))
    with pytest.raises(ValueError, match="`weight`"):
        penalty(f, y, groups, weight=-torch.ones(4))
