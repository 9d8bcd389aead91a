"""GMCHead: a mapping of one's own, against plain loops."""

import copy

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import torchgmc as gmc
from torchgmc.mappings import Pinball, Residual


def expectile(y):
    """s of the expectile of level 0.8."""
    return lambda f: torch.where(y < f, 0.2, 0.8) * (f - y)


def level_sets(f, x):
    return torch.nn.functional.one_hot((f[:, 0] * 4).long().clamp(0, 3), 4).bool()


class Levels(nn.Module):
    """Level sets of f, for those with x above 0 and for the others."""

    def forward(self, f: Tensor, x: Tensor) -> Tensor:
        place = (f[:, 0] * 3).to(torch.int64).clamp(0, 2)
        level = torch.arange(3, device=f.device)[None] == place[:, None]
        high = (x > 0)[:, None]
        return torch.cat([level & high, level & ~high], 1)


class Unit(nn.Module):
    """Projection onto [0, 1]."""

    def forward(self, f: Tensor) -> Tensor:
        return f.clamp(0.0, 1.0)


def draw(n=400, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=g)
    f0 = torch.rand(n, generator=g)
    y = (torch.rand(n, generator=g) < (f0 + 0.2 * x.sign()).clamp(0, 1)).double()
    return f0, y, x


def fitted(who=None, projection=None, **options):
    f0, y, x = draw()
    return gmc.GMCHead(Residual, 0.01, who or Levels(), projection=projection or Unit(), **options).fit(f0, y, x), f0, y, x


def slow_replay(head, f0, x):
    """One example and one step at a time."""
    rows = []
    for i in range(len(f0)):
        f = float(f0[i])
        for who, step in zip(head.log_who.tolist(), head.log_step.tolist(), strict=True):
            place = 3 * (not bool(x[i] > 0)) + min(2, max(0, int(f * 3)))
            f = min(1.0, max(0.0, f - step * (place == who)))
        rows.append(f)
    return rows


def test_replay_matches_loop_and_meets_alpha():
    head, f0, y, x = fitted()
    f = head(f0.double(), x)
    torch.testing.assert_close(f, torch.tensor(slow_replay(head, f0.double(), x), dtype=torch.float64), rtol=0, atol=1e-12)
    assert head.report.converged and head.report.iterations > 1
    for who in range(6):  # every level set of either half, by a plain sum
        inside = [i for i in range(len(f)) if 3 * (not bool(x[i] > 0)) + min(2, max(0, int(f[i] * 3))) == who]
        violation = sum(float(f[i] - y[i]) for i in inside) / len(f)
        assert abs(violation) <= 0.01 + 1e-9
        assert float(head.report.violations_after[who, 0]) == pytest.approx(violation, abs=1e-9)


def test_replay_is_the_solution():
    """The head on the data of the fit is the f that gmc.solve ends with."""
    f0, y, x = (t.double() for t in draw())
    for solver, eta in (("exact", None), ("paper", 0.01)):
        head = gmc.GMCHead(Residual, 0.01, Levels(), projection=Unit(), noise_floor=False)
        head.fit(f0, y, x, solver=solver, eta=eta)
        mapping = Residual(y[:, None])
        who = Levels()
        direct = gmc.solve(f0, mapping, lambda f, who=who: who(f, x), alpha=0.01, projection=Unit(), solver=solver, eta=eta)
        assert torch.equal(head(f0, x), direct.f)


@settings(deadline=None, max_examples=15)
@given(n=st.integers(20, 80), a=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_static_sets_collapse_to_one_line_per_set(n, a, seed):
    g = torch.Generator().manual_seed(seed)
    member = torch.rand(n, a, generator=g) < 0.5
    member[:a] |= torch.eye(a, dtype=torch.bool)
    f0, y = torch.rand(n, generator=g).double(), torch.randint(2, (n,), generator=g).double()
    head = gmc.GMCHead(Residual, 0.005, groups=[f"g{j}" for j in range(a)], noise_floor=False).fit(f0, y, member)
    assert len(head.log_step) <= a
    shift = torch.zeros(n, dtype=torch.float64)
    for who, step in zip(head.log_who.tolist(), head.log_step.tolist(), strict=True):
        shift += step * member[:, who]
    torch.testing.assert_close(head(f0, member), f0 - shift)
    for j in range(a):
        violation = sum(float(f0[i] - shift[i] - y[i]) for i in range(n) if member[i, j]) / n
        assert abs(violation) <= 0.005 + 1e-9 or not head.report.converged


def test_expectiles_in_every_level_set():
    """s-HappyMap: at the fitted f the weighted residuals of each level set balance, and f is the expectile of constant f0."""
    g = torch.Generator().manual_seed(1)
    x = torch.rand(4000, generator=g).double()
    y = x + 0.3 * torch.randn(4000, generator=g)
    head = gmc.GMCHead(expectile, 0.002, level_sets).fit(x, y)
    assert head.report.converged
    f = head(x)
    s = torch.where(y < f, 0.2, 0.8) * (f - y)
    for level in range(4):
        inside = (f * 4).long().clamp(0, 3) == level
        assert abs(float(s[inside].sum()) / 4000) <= 0.002 + 1e-9
    flat = gmc.GMCHead(expectile, 1e-6).fit(torch.zeros(4000).double(), y)(torch.zeros(4000).double())[0]
    low, high = -5.0, 5.0  # the expectile by bisection
    for _ in range(60):
        middle = (low + high) / 2
        slope = sum(((0.2 if v < middle else 0.8) * (middle - v)) for v in y.tolist())
        low, high = (low, middle) if slope > 0 else (middle, high)
    assert float(flat) == pytest.approx(low, abs=1e-4)


def test_outcome_indistinguishability_against_sampled_outcomes():
    """Outcomes drawn from the fitted p fool the distinguishers: acceptance rates agree within alpha + 5 standard errors."""
    g = torch.Generator().manual_seed(2)
    n = 4000
    x = torch.randn(n, generator=g)
    p = (2 * torch.randn(n, 3, generator=g)).softmax(1).double()
    y = torch.multinomial(p + 0.3 * (x > 0)[:, None], 1, generator=g)[:, 0]

    def distinguishers(f, x):
        top = torch.nn.functional.one_hot(f.argmax(1), 3).double()
        return torch.stack([top * (x > 0)[:, None], top * (x <= 0)[:, None]], 1)

    onehot = torch.nn.functional.one_hot(y, 3)
    head = gmc.GMCHead(Residual, 0.003, distinguishers, projection=gmc.projections.simplex, noise_floor=False)
    head.fit(p, onehot, x)
    assert head.report.converged and float(head.report.violations_before.abs().max()) > 0.02
    f = head(p, x)
    torch.testing.assert_close(f.sum(1), torch.ones(n, dtype=torch.float64))
    drawn = torch.multinomial(f, 1, generator=g)[:, 0]
    for half in (x > 0, x <= 0):
        true, fake = (((labels == f.argmax(1)) & half).double().mean() for labels in (y, drawn))
        assert abs(float(true - fake)) <= 0.003 + 5 * (0.5 / n) ** 0.5


def test_quantile_mapping_and_directions():
    g = torch.Generator().manual_seed(3)
    scores = torch.randn(1000, 2, generator=g).double()
    what = [[1.0, 0.0], [0.0, 1.0]]
    head = gmc.GMCHead(lambda y: Pinball(y, 0.9), 0.005, what=what).fit(torch.zeros(1000, 2).double(), scores)
    f = head(torch.zeros(5, 2).double())
    torch.testing.assert_close(f[0], torch.quantile(scores, 0.9, dim=0), atol=0.05, rtol=0)
    assert head.report.violations_after.shape == (1, 2)


def test_formats_and_files(tmp_path):
    head, f0, _, x = fitted(groups=[f"g{j}" for j in range(6)])
    expected = head(f0, x)
    assert torch.equal(torch.jit.script(head)(f0, x), expected)
    program = torch.export.export(head, (f0[:9], x[:9]), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},) * 2)
    assert torch.equal(program.module()(f0, x), expected)
    file = gmc.save(head, tmp_path / "head.safetensors")
    loaded = gmc.load(file, mapping=Residual, who=Levels(), projection=Unit())
    assert torch.equal(loaded(f0, x), expected)
    for missing in ({"mapping": Residual}, {"mapping": Residual, "who": Levels()}, {"who": Levels(), "projection": Unit()}):
        with pytest.raises(ValueError, match="pass it again"):
            gmc.load(file, **missing)
    assert torch.equal(copy.deepcopy(head).half()(f0, x), expected)
    assert f"log={len(head.log_step)} steps" in repr(head)


def test_a_python_function_does_not_script_and_says_so():
    head, f0, _, x = fitted(who=lambda f, x: Levels()(f, x))
    assert head(f0, x).shape == f0.shape
    with pytest.raises(TypeError, match="`who` is a Python function"):
        torch.jit.script(head)


def test_batches_and_gradients():
    head, f0, y, x = fitted()
    parts = gmc.GMCHead(Residual, 0.01, Levels(), projection=Unit())
    for i in range(0, 400, 150):
        parts.observe(f0[i : i + 150], y[i : i + 150], x[i : i + 150])
    assert torch.equal(parts.calibrate()(f0, x), head(f0, x))
    leaf = f0.clone().requires_grad_()
    head(leaf, x).sum().backward()
    assert bool((leaf.grad >= 0).all()) and float(leaf.grad.max()) == 1.0


def test_audit_on_fresh_data():
    """With bounds known the intervals are simultaneous: at delta 0.05 the population value 0 of a perfect f lies in all of
    them but once in 20 draws; the seed is fixed."""
    head, *_ = fitted(bounds=(-1.0, 1.0))
    audit = head.audit(*draw(5000, 9))
    assert audit.note == "" and len(audit.table["group"]) == 6
    f0, y, x = draw(5000, 9)
    f = head(f0.double(), x)
    inside = Levels()(f[:, None], x)
    table = {f"set {j}": float((f - y)[inside[:, j]].sum() / 5000) for j in range(6)}
    assert {r["group"]: pytest.approx(r["estimate"], abs=1e-6) for r in audit.rows()} == table
    unknown = gmc.GMCHead(Residual, 0.01, Levels(), projection=Unit()).fit(*draw())
    assert "guide" in str(unknown.audit(*draw(500, 10)))
    narrow, *_ = fitted(bounds=(-0.1, 0.1))
    with pytest.raises(ValueError, match="`bounds` = .* must hold for every example, but s ranges from -"):
        narrow.audit(*draw(500, 10))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"f0": torch.rand(4, 2, 2)}, "must have shape"),
        ({"f0": torch.tensor([0.1, float("nan"), 0.2, 0.3])}, "finite"),
        ({"y": torch.rand(3)}, "rows, one per example, got shape"),
        ({"x": torch.rand(3)}, "rows, one per example, got shape"),
        ({"weight": -torch.ones(4)}, "weight"),
    ],
)
def test_bad_data_leave_the_head_as_it_was(change, message):
    head, f0, _, x = fitted()
    before = head(f0, x)
    with pytest.raises((ValueError, TypeError), match=message):
        head.fit(**({"f0": torch.rand(4), "y": torch.rand(4), "x": torch.rand(4)} | change))
    assert torch.equal(head(f0, x), before)


def test_bad_options():
    with pytest.raises(TypeError, match="`mapping` must be a function"):
        gmc.GMCHead(3, 0.01)
    with pytest.raises(TypeError, match="`who` must be a function"):
        gmc.GMCHead(Residual, 0.01, who=torch.ones(2, 2))
    with pytest.raises(ValueError, match="low < high"):
        gmc.GMCHead(Residual, 0.01, bounds=(1.0, 0.0))
    with pytest.raises(ValueError, match="`who` returned 6 sets"):
        fitted(groups=["a", "b"])
    with pytest.raises(RuntimeError, match="not fitted"):
        gmc.GMCHead(Residual, 0.01)(torch.rand(3))
    with pytest.raises(ValueError, match="`who` must return a membership"):
        gmc.GMCHead(Residual, 0.01, who=lambda f, x: f[:, 0]).fit(torch.rand(4), torch.rand(4))
    with pytest.raises(ValueError, match="`what` has directions of length 2"):
        gmc.GMCHead(Residual, 0.01, what=[[1.0, 0.0]]).fit(torch.rand(4), torch.rand(4))


def test_batches_of_another_width_are_refused_and_leave_no_trace():
    head = gmc.GMCHead(Residual, 0.02, groups=["a"])
    head.observe(torch.rand(5), torch.rand(5), torch.ones(5, 1).bool())
    before = head.statistics
    with pytest.raises(ValueError, match=r"`f0` must have rows of shape \(1,\), as in the batches before, got \(2,\)"):
        head.observe(torch.rand(5, 2), torch.rand(5, 2), torch.ones(5, 1).bool())
    assert head.statistics is before


@pytest.mark.parametrize("floor", [True, False])
def test_sets_with_fewer_than_ten_examples_are_named_with_what_to_do(floor):
    f0, y, x = draw()
    member = torch.stack([x > 0, torch.arange(400) < 9, torch.arange(400) < 10], 1)
    head = gmc.GMCHead(Residual, 0.01, groups=["a", "nine", "ten"], noise_floor=floor)
    report = head.fit(f0, y, member).report
    assert report.details["small"] == ["nine"]
    assert "Too small to distinguish from noise: 'nine' (1 in all). Merge such groups" in report.message
    together = head.fit(f0, y, member, clusters=torch.arange(400) // 2).report
    assert together.details["small"] == ["nine", "ten"]
    unnamed = gmc.GMCHead(Residual, 0.01, who=lambda f, x: (f[:, :1] * 40).long() == torch.arange(40)).fit(f0, y)
    few = torch.bincount((f0 * 40).long(), minlength=40) < 10
    assert few.any() and unnamed.report.details["small"] == [f"set {j}" for j in few.nonzero()[:, 0].tolist()]
    large = head.fit(*(t.repeat(2, *([1] * (t.dim() - 1))) for t in (f0, y, member)))
    assert "Too small" not in large.report.message and large.report.details["small"] == []
