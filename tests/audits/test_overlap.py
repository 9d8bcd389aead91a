"""An audit on the calibration data says so; an audit on new data does not."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings, strategies as st

import torchgmc as gmc
from gmctest.heads_zoo import ZOO, Entry
from torchgmc.audits import overlap
from torchgmc.audits.overlap import OverlapWarning, Sketch, share
from torchgmc.engine import hashing


def plain_share(seen: list[tuple[float, ...]], audited: list[tuple[float, ...]]) -> float:
    """By sets, not by keys."""
    known = set(seen)
    return sum(row in known for row in audited) / len(audited)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 300), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_few_examples_are_counted_exactly(n, m, common, seed):
    x = torch.rand(n + m, 4, generator=torch.Generator().manual_seed(seed))
    seen, audited = x[:n], x[max(0, n - common) :][:m]
    expected = plain_share([tuple(r.tolist()) for r in seen], [tuple(r.tolist()) for r in audited])
    found = share(Sketch.of(seen), Sketch.of(audited))
    if expected * len(audited) >= 3 and expected > 0.02:
        assert found == pytest.approx(expected)
    else:
        assert found == 0.0


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 1.0])
def test_many_examples_are_estimated(part):
    g = torch.Generator().manual_seed(3)
    seen, fresh = torch.rand(50_000, 3, generator=g), torch.rand(40_000, 3, generator=g)
    audited = torch.cat([seen[: int(part * 40_000)], fresh[int(part * 40_000) :]])
    found = share(Sketch.of(seen), Sketch.of(audited))
    assert found == 0.0 if part == 0.0 else found == pytest.approx(part, abs=0.06)


def test_sketch_does_not_depend_on_batches_order_or_dtype():
    x = torch.rand(3000, 2, 7, dtype=torch.float32)
    y = torch.randint(5, (3000,))
    whole = Sketch.of(x, y).keys
    order = torch.randperm(3000)
    parts = [Sketch.of(a, b) for a, b in zip(x[order].split(700), y[order].split(700), strict=True)]
    total = parts[0]
    for one in parts[1:]:
        total = total + one
    assert torch.equal(total.keys, whole)
    assert torch.equal(Sketch.of(x.double(), y).keys, whole)
    assert whole.shape == (overlap.SIZE,) and bool((whole.diff() >= 0).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int64])
def test_keys_leave_out_last_bits_as_a_plain_loop_does(dtype):
    x = torch.cat([torch.randn(40, 20) * torch.randn(40, 20).exp(), torch.zeros(40, 2), -torch.zeros(40, 2)], 1).to(dtype)
    plain = []
    for row in x.tolist():
        parts = [math.frexp(value) for value in row]
        plain.append([round(1024 * mantissa) + 4096.0 * exponent for mantissa, exponent in parts])
    assert torch.equal(overlap.example_keys(x), hashing.row_keys(torch.tensor(plain, dtype=torch.float64)))


def test_the_smallest_keys_of_many_with_ties():
    keys = torch.randint(900, (5000,), generator=torch.Generator().manual_seed(0))
    found, plain = Sketch.of_keys(keys << 16), sorted(keys.tolist())[: overlap.SIZE]
    assert found.keys.tolist() == plain and found.limit == plain[-1]
    few = found + Sketch.of_keys(torch.tensor([1 << 60]))  # beyond the limit: it does not count
    assert few.keys.tolist() == plain and few.limit == plain[-1]


def plain_keys(*parts: torch.Tensor) -> torch.Tensor:
    """From one table of the numbers, as float64."""
    columns = []
    for part in parts:
        flat = part.flatten(1) if part.dim() > 1 else part[:, None]
        columns.append(flat[:, :: max(1, -(-flat.shape[1] // overlap.COLUMNS))].double())
    x = torch.cat(columns, 1)
    if x.shape[1] >= overlap.MANY:
        mantissa, exponent = torch.frexp(x)
        x = (mantissa * 1024).round() + 4096 * exponent
    return hashing.row_keys(x)


@given(st.integers(0, 40), st.integers(1, 90), st.integers(-30, 30), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_keys_are_those_of_a_table_of_the_numbers(n, m, power, seed):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(n, m, generator=g) * 10.0**power
    scores[: n // 3] = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5])[torch.randint(5, (n // 3, m), generator=g)]
    masks, labels = torch.rand(n, m, generator=g) < 0.4, torch.randint(-5, 5, (n,), generator=g)
    for parts in ((scores, masks), (masks, scores.double()), (scores.bfloat16(), labels), (scores.half(),), (labels, masks[:, :3])):
        before = [part.clone() for part in parts]
        assert torch.equal(overlap.example_keys(*parts), plain_keys(*parts))
        assert all(torch.equal(part, old) for part, old in zip(parts, before, strict=True))


def test_keys_above_the_limit_of_a_sketch_need_not_be_sorted():
    g = torch.Generator().manual_seed(0)
    first, second = (overlap.example_keys(torch.rand(5000, 4, generator=g)) for _ in range(2))
    seen = Sketch.of_keys(first)
    all_of_them, those_below = seen + Sketch.of_keys(second), seen + Sketch.of_keys(second, seen.limit)
    assert torch.equal(all_of_them.keys, those_below.keys) and all_of_them.limit == those_below.limit < seen.limit


def test_keys_are_uniform_and_rarely_collide():
    keys = Sketch.of(torch.arange(1000.0) / 1000).keys[:1000]
    assert keys.unique().numel() == 1000
    assert abs(float(keys.mean()) / 2**48 - 0.5) < 0.04  # four standard errors of a uniform mean


@pytest.mark.parametrize("levels", [2, 20, 300, 5000])
def test_few_distinct_scores_are_no_overlap(levels):
    """Independent examples of a model that knows few scores coincide by chance."""
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        seen, audited = (torch.randint(levels, (2000,), generator=g) / levels for _ in range(2))
        assert share(Sketch.of(seen), Sketch.of(audited)) == 0.0, (levels, seed)


@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_every_head_warns_on_its_calibration_data_and_only_there(entry: Entry, tmp_path):
    head = entry.fitted(80, 0)
    seen, fresh = entry.data(80, 0).observe, entry.data(80, 1).observe
    path = gmc.save(head, tmp_path / "head.safetensors", remember=True)
    secret = gmc.save(head, tmp_path / "secret.safetensors", remember="between us")
    for one in (head, gmc.load(path, **entry.loading), gmc.load(secret, secret="between us", **entry.loading)):
        if "unprocessed" not in entry.name:  # nothing is fitted to the data there
            with pytest.warns(OverlapWarning, match="held-out"):
                audit = one.audit(*seen)
            assert "held-out data" in audit.note and "held-out data" in str(audit) and audit.to_dict()["note"] == audit.note
        with warnings.catch_warnings():
            warnings.simplefilter("error", OverlapWarning)
            assert "held-out data" not in one.audit(*(seen if "unprocessed" in entry.name else fresh)).note


def test_batches_refits_and_resets():
    g = torch.Generator().manual_seed(0)
    first, second, third = (torch.rand(400, generator=g) for _ in range(3))
    y = torch.rand(400, generator=g) < 0.5
    head = gmc.ProbabilityHead(alpha=0.1, bins=2)
    head.observe(first, y)
    head.observe(second, y)
    head.calibrate()
    for seen in (first, second):
        with pytest.warns(OverlapWarning, match="About 100 %"):
            gmc.audit(head, zip(seen.split(90), y.split(90), strict=True))
    with pytest.warns(OverlapWarning, match="About 50 %"):
        gmc.audit(head, [(first, y), (third, y)])
    head.fit(third, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error", OverlapWarning)
        assert head.audit(first, y).note == ""
    head.reset()
    assert head.calibrated_on is None and head.observed is None


def test_failed_observe_remembers_nothing():
    head = gmc.ProbabilityHead(alpha=0.1, bins=2)
    with pytest.raises(ValueError):
        head.observe(torch.tensor([0.2, float("nan")]), torch.tensor([0, 1]))
    assert head.observed is None


def test_rounding_of_a_model_does_not_hide_an_overlap():
    """The same images in batches of other sizes have other last bits."""
    g = torch.Generator().manual_seed(5)
    scores = torch.rand(500, 8, 8, generator=g)
    noisy = scores * (1 + 3e-7 * (torch.rand(500, 8, 8, generator=g) - 0.5))
    assert not torch.equal(scores, noisy)
    assert share(Sketch.of(scores), Sketch.of(noisy)) > 0.95


def test_salted_keys_find_the_same_overlap_and_no_other_salt_does():
    g = torch.Generator().manual_seed(1)
    for n in (300, 30_000):
        x = torch.rand(n, 3, generator=g)
        seen, audited = Sketch.of(x[: n // 2]), Sketch.of(x[n // 4 : n // 4 * 3])
        for salt in (5, overlap.salt_of("a secret")):
            assert share(seen.salted(salt), audited) == pytest.approx(share(seen, audited), abs=0.04)
            other = Sketch(seen.salted(salt).keys, seen.limit, salt + 2)
            assert share(other, audited) == 0.0
        assert not set(seen.salted(5).keys.tolist()) & set(seen.keys.tolist())


@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_nothing_a_head_leaves_behind_tells_who_was_in_the_data(entry: Entry, tmp_path):
    """Neither files, state dicts nor exported programs hold a number that follows from one example."""
    head = entry.fitted(80, 0)
    keys = Sketch.of(*(part.double().flatten(1) if part.dim() > 1 else part for part in entry.data(80, 0).observe[:2])).keys
    files = gmc.load(gmc.save(head, tmp_path / "head.safetensors"), **entry.loading)
    for state in (head.state_dict(), files.state_dict()):
        for name, value in state.items():
            assert not torch.isin(value.double().flatten(), keys).any(), name
            assert value.shape[:1] != (overlap.SIZE,), name
    assert files.calibrated_on is None
    remembered = gmc.save(head, tmp_path / "kept.safetensors", remember=True)
    if entry.name != "unprocessed" and "unprocessed" not in entry.name:
        assert gmc.load(remembered, **entry.loading).calibrated_on is not None
        assert gmc.load(gmc.save(head, tmp_path / "s", remember="x"), **entry.loading).calibrated_on is None  # no secret given
