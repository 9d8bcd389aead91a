"""``fractional=True``: memberships m from 0 to 1, and a promise about E[m s]."""

import pytest
import torch

import torchgmc as gmc
from torchgmc.audits.intervals import Rows

NAMES = ["dark", "old"]


def make(kind, **options):
    options = {"groups": NAMES, **options}
    if kind == "probability":
        return gmc.ProbabilityHead(alpha=options.pop("alpha", None), **{"bins": 5, **options})
    if kind == "quantile":
        return gmc.QuantileHead(target=0.8, alpha=options.pop("alpha", None), **options)
    return gmc.ThresholdHead(target=0.2, alpha=options.pop("alpha", None), **{"resolution": "exact", **options})


def data(kind, n, seed=0, hard=False):
    """Arguments of ``observe``; the error grows with the first membership."""
    g = torch.Generator().manual_seed(seed)
    member = torch.rand(n, 2, generator=g, dtype=torch.float64)
    member = (member < 0.4).double() if hard else member
    if kind == "probability":
        z = torch.randn(n, generator=g)
        return torch.sigmoid(z), torch.rand(n, generator=g) < torch.sigmoid(z + 2 * member[:, 0]), member
    if kind == "quantile":
        return torch.randn(n, generator=g).abs() * (1 + 2 * member[:, 0]), member
    masks = torch.rand(n, 12, generator=g) < 0.5
    scores = torch.sigmoid(2.0 * masks + torch.randn(n, 12, generator=g) - 2 * member[:, :1])
    return scores, masks, member


KINDS = ("probability", "quantile", "threshold")


@pytest.mark.parametrize("solver", ["exact", "paper", "fresh"])
@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_ones_give_what_they_always_did(kind, solver):
    *first, member = data(kind, 300, hard=True)
    options = {} if solver == "exact" else {"alpha": 0.05}
    plain, soft = make(kind, **options), make(kind, fractional=True, **options)
    run = {} if solver == "exact" else {"max_iter": 20}
    plain.fit(*first, member.bool(), solver=solver, **run)
    soft.fit(*first, member, solver=solver, **run)
    torch.testing.assert_close(soft.report.violations_after, plain.report.violations_after, rtol=0, atol=1e-12)
    for name, value in plain.named_buffers():
        torch.testing.assert_close(soft.get_buffer(name), value, rtol=0, atol=1e-12)
    *fresh, who = data(kind, 200, 1, hard=True)
    one, other = plain.audit(*fresh, who.bool()), soft.audit(*fresh, who)
    assert one.table["count"] == other.table["count"]
    torch.testing.assert_close(torch.tensor(other.table["low"]), torch.tensor(one.table["low"]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "bins"), [("probability", None), ("probability", 4), ("quantile", None), ("quantile", 4), ("threshold", None)]
)
def test_an_example_is_partly_in_and_partly_out(kind, bins):
    """Violations are those of two copies of each example, in and out of the group, with weights m and 1 - m."""
    options = {"groups": ["dark"], **({} if kind == "threshold" else {"bins": bins})}
    *first, member = data(kind, 150)
    m = member[:, :1]
    soft = make(kind, fractional=True, **options).fit(*first, m)
    values = soft.values(*first, m)
    s = values.s.repeat(2, 1)  # of the same output
    copies = torch.cat([torch.ones_like(m), torch.zeros_like(m)])
    weight = torch.cat([m, 1 - m])[:, 0]
    expected = gmc.violations(torch.cat([copies, torch.ones_like(copies)], 1), s, weight=weight)
    torch.testing.assert_close(gmc.violations(values.who, values.s), expected)
    torch.testing.assert_close(soft.report.violations_after.flatten(), expected.flatten(), rtol=0, atol=1e-9)
    audit = soft.audit(*data(kind, 150, 1)[:-1], data(kind, 150, 1)[-1][:, :1]).view("mass-weighted")
    found = {(row["group"], row["what"]): row for row in audit.rows()}
    fresh = soft.values(*data(kind, 150, 1)[:-1], data(kind, 150, 1)[-1][:, :1])
    table = gmc.violations(fresh.who, fresh.s)
    for k, name in enumerate(soft.test_functions().what):
        assert abs(found["dark", name]["estimate"] - float(table[0, k])) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_the_promise_holds_on_fresh_data(kind):
    *first, member = data(kind, 3000)
    head = make(kind, fractional=True).fit(*first, member)
    before = make(kind, groups=None).fit(*first)  # one correction for all
    assert head.report.reached == "noise"
    *fresh, who = data(kind, 3000, 1)
    audit = head.audit(*fresh, who)
    worst = max(abs(e) for e in audit.table["estimate"])
    alike = gmc.violations(who, before.values(*fresh).s).abs().max()
    assert worst < 0.02 < alike
    assert all(low <= e <= high for low, e, high in zip(*(audit.table[c] for c in ("low", "estimate", "high")), strict=True))
    assert audit.table["count"][0] > 0 and 0.3 < audit.table["mass"][audit.table["group"].index("dark")] < 0.7


def test_before_groups_are_empty_there_is_an_error():
    with pytest.raises(ValueError, match="has no examples"):
        make("probability", fractional=True).fit(*data("probability", 50)[:2], torch.zeros(50, 2))


def test_intervals_are_those_of_weights():
    """The group's own mean is that of examples of weight m, and the mass-weighted one that of the products m s."""
    g = torch.Generator().manual_seed(3)
    m, s = (torch.rand(120, 1, generator=g, dtype=torch.float64) for _ in range(2))
    ones, none, ends = torch.ones(120, dtype=torch.float64), torch.zeros(120, 0).long(), (torch.zeros(1), torch.ones(1))

    def judged(who, s, weight, conditional):
        return Rows(s, s > -1, who, weight, none, tuple(e.double() for e in ends)).judge(0.6, 0.1, conditional)

    everyone = torch.ones(120, 1, dtype=torch.bool)
    for own, found in ((True, judged(everyone, s, m[:, 0], True)), (False, judged(everyone, m * s, ones, False))):
        for mine, its in zip(vars(judged(m, s, ones, own)).values(), vars(found).values(), strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_files_statistics_metrics_and_monitors(kind, tmp_path):
    *first, member = data(kind, 120)
    head = make(kind, alpha=0.05, fractional=True)
    for rows in (slice(0, 50), slice(50, None)):
        head.observe(*(part[rows] for part in first), member[rows])
    head.calibrate()
    with pytest.warns(UserWarning, match="confidential|rows|examples"):
        gmc.save(head, tmp_path / "head.safetensors", statistics=True)
    loaded = gmc.load(tmp_path / "head.safetensors")
    assert loaded.fractional and loaded.same_state(head)
    assert loaded.calibrate().same_state(head)
    other = make(kind, alpha=0.05)
    other.observe(*first, member > 0.5)
    with pytest.raises(ValueError, match="fractional"):
        head.merge(other)
    metric, monitor = gmc.metrics.for_head(head), gmc.Monitor(head, alpha=0.2)
    metric.update(*first, member)
    monitor.update(*first, member)
    torch.testing.assert_close(metric.violations().double(), head.report.violations_after, rtol=0, atol=1e-4)
    assert not monitor.alarm


@pytest.mark.parametrize("kind", KINDS)
def test_without_it_a_part_is_an_error_at_every_door(kind):
    *first, member = data(kind, 60)
    head = make(kind, alpha=0.05).fit(*first, member > 0.5)
    inputs = (member,) if kind == "quantile" else (first[0], member)
    for door in (lambda: make(kind).fit(*first, member), lambda: head.audit(*first, member), lambda: head(*inputs)):
        with pytest.raises(ValueError, match="memberships"):
            door()
    with pytest.raises(ValueError, match="fractional=True"):
        head(*inputs)
    soft = make(kind, alpha=0.05, fractional=True).fit(*first, member)
    for door in (lambda: soft.audit(*first, 2 * member), lambda: soft(*inputs[:-1], -inputs[-1])):
        with pytest.raises(ValueError, match="from 0 to 1"):
            door()
    assert soft(*inputs).shape == head(*inputs[:-1], inputs[-1] > 0.5).shape


@pytest.mark.parametrize("format", ["torchscript", "torch.export", "onnx"])
def test_files_that_run_without_torchgmc_take_parts(format, tmp_path):
    scores, masks, member = data("threshold", 40)
    head = make("threshold", fractional=True).fit(scores, masks, member)
    model = gmc.attach(torch.nn.Identity(), head)  # `export` compares the file with the model on the example
    path = gmc.export.export(model, tmp_path / "head", format=format, example_inputs=(scores, member.float()))
    assert gmc.export.metadata(path)["heads" if "heads" in gmc.export.metadata(path) else "head"]
    if format == "torchscript":
        found = torch.jit.load(path)(scores[:3], member[:3].float())
        assert torch.equal(found, head(scores[:3], member[:3].float()))
        assert not torch.equal(found, head(scores[:3], torch.zeros(3, 2)))


def test_options_that_cannot_work_say_so():
    with pytest.raises(ValueError, match="finite_sample"):
        make("quantile", finite_sample=True, fractional=True)
    with pytest.raises(ValueError, match="resolution"):
        make("threshold", resolution=0.01, fractional=True)
    with pytest.raises(TypeError, match="fractional"):
        gmc.ProbabilityHead(alpha=None, fractional="yes")


def test_trees_look_at_parts_of_groups():
    g = torch.Generator().manual_seed(1)
    x, m = torch.rand(2000, 1, generator=g), torch.rand(2000, 1, generator=g, dtype=torch.float64)
    probs = torch.full((2000,), 0.4)
    y = torch.rand(2000, generator=g) < 0.4 + 0.4 * ((m[:, 0] > 0.7) & (x[:, 0] > 0.5))
    head = gmc.ProbabilityHead(alpha=None, groups=["dark"], bins=None, learn=gmc.Trees(depth=2), fractional=True)
    head.fit(probs, y, m, features=x)
    assert "dark" in head.learned[0][0]
    f = head(probs, m, features=x)
    assert abs(float((m[:, 0] * (f - y.float())).mean())) < 0.01
