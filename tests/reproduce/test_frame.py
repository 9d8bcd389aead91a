"""``torchgmc reproduce``: the frame (resuming, refusing, processes), and what it makes of the rows."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gmctest import made_up_data, subprocess_env

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from torchgmc.cli import main
from torchgmc.reproduce import EXPERIMENTS, frame, tables, tree
from torchgmc.reproduce.measures import measure
from torchgmc.reproduce.tables import WORST, summarize


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return made_up_data.hierarchy(tmp_path_factory.mktemp("data"))


LOOSE = ["--set", "alpha=0.1", "--set", "tight=0.08", "--set", "steps=10"]  # fits of a few steps


def command(data, out, *words, seeds=3):
    return ["reproduce", "tree", "--data", str(data), "--out", str(out), "--quick", *LOOSE, "--seeds", str(seeds), *words]


def run(data, out, *words, seeds=3):
    return main(command(data, out, *words, seeds=seeds))


def kept(out, name="tree"):
    return {path.name: path.read_text() for path in sorted((out / name / "seeds").glob("seed-*.json"))}


@pytest.fixture(scope="module")
def done(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("done")
    assert run(data, out) == 0
    return out


# -- the command ---------------------------------------------------------------------------------------------------------


def test_page_and_tables_hold_what_the_seeds_hold(done):
    page = (done / "tree.md").read_text()
    assert (
        "torchgmc reproduce tree --data DIR --seeds 3 --quick --set alpha=0.1" in page and "torch " in page and "cores" in page
    )
    assert "/tmp" not in page and str(done) not in page and os.uname().nodename not in page
    with (done / "tree.csv").open() as file:
        table = list(csv.DictReader(file))
    rows = [row for text in kept(done).values() for row in json.loads(text)["rows"]]
    for line in (table[0], table[-2]):
        same = [r for r in rows if all(r[k] == line[k] for k in ("part", "measure", "method", "group"))]
        size = np.abs([r["deviation"] for r in same])
        assert len(same) == 3
        np.testing.assert_allclose([float(line["mean"]), float(line["sd"])], [size.mean(), size.std(ddof=1)], rtol=1e-4)
        np.testing.assert_allclose(float(line["se"]), size.std(ddof=1) / 3**0.5, rtol=1e-4)
    png = (done / "tree.png").read_bytes()
    assert png[:4] == b"\x89PNG" and len(png) < 200_000
    assert {row["method"] for row in table} == set(tree.METHODS)


def test_finished_seeds_are_kept_and_missing_ones_run_again(data, done, tmp_path):
    out = tmp_path
    assert run(data, out, seeds=2) == 0
    before = kept(out)
    stamp = (out / "tree/seeds/seed-0000.json").stat().st_mtime_ns
    (out / "tree/seeds/seed-0001.json").unlink()
    assert run(data, out, seeds=3) == 0
    assert (out / "tree/seeds/seed-0000.json").stat().st_mtime_ns == stamp
    assert kept(out) == kept(done) and kept(out).items() >= before.items()


def test_processes_find_what_one_process_finds(data, done, tmp_path):
    assert run(data, tmp_path, "--jobs", "2") == 0
    assert kept(tmp_path) == kept(done)
    assert (tmp_path / "tree.csv").read_text() == (done / "tree.csv").read_text()


def test_other_settings_are_refused_not_mixed(data, tmp_path, capsys):
    assert run(data, tmp_path, seeds=1) == 0
    before = kept(tmp_path)
    assert run(data, tmp_path, "--set", "alpha=0.05", seeds=1) == 2
    error = capsys.readouterr().err
    assert "setting.alpha" in error and "--redo" in error and kept(tmp_path) == before
    other = made_up_data.hierarchy(tmp_path / "other", seed=1)
    assert run(other, tmp_path, seeds=1) == 2
    assert "data.wos" in capsys.readouterr().err
    assert run(data, tmp_path, "--set", "alpha=0.05", "--redo", seeds=2) == 0
    assert len(kept(tmp_path)) == 2 and kept(tmp_path)["seed-0000.json"] != before["seed-0000.json"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["reproduce", "weather"], "there is fnr, tree, text"),
        (["reproduce", "tree", "--data", "nowhere"], "does not exist"),
        (["reproduce", "tree"], "TORCHGMC_DATA"),
        (["reproduce", "tree", "--set", "alpha"], "NAME=VALUE"),
        (["reproduce", "tree", "--set", "steps=many"], "is no int"),
        (["reproduce", "tree", "--set", "target=true"], "is no float"),
        (["reproduce", "all", "--set", "alpha=1"], "one experiment"),
    ],
)
def test_mistakes_are_one_line(words, hint, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHGMC_DATA", raising=False)
    if "--set" in words:
        monkeypatch.setenv("TORCHGMC_DATA", str(data))
    assert main(words) == 2
    error = capsys.readouterr().err
    assert hint in error and error.count("\n") == 1


def test_settings_change_by_name():
    changed = frame._changed(tree.Setting(), ["alpha=1", 'parts=["wos"]', "kind=crossfit", "limit=7"])
    assert (changed.alpha, changed.parts, changed.kind, changed.limit) == (1.0, ("wos",), "crossfit", 7)
    assert isinstance(changed.alpha, float)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGINT])
def test_a_blow_in_the_middle_costs_nothing_but_time(blow, data, done, tmp_path):
    words = command(data, tmp_path, "--jobs", "2", seeds=400)
    environment = subprocess_env()
    process = subprocess.Popen(
        [sys.executable, "-m", "torchgmc.cli", *words],
        env=environment,
        start_new_session=True,
        stderr=subprocess.PIPE,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    try:
        while len(kept(tmp_path)) < 2:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        workers = _children(process.pid)
        assert len(workers) >= 2
        process.send_signal(blow)
        process.communicate(timeout=60)
        assert process.returncode == (-signal.SIGKILL if blow == signal.SIGKILL else 130)
        end = time.monotonic() + 30
        while any(map(_alive, workers)) and time.monotonic() < end:
            time.sleep(0.05)
        assert not any(map(_alive, workers)), "a worker outlived its parent"
    finally:
        if process.poll() is None:
            process.kill()
    assert 2 <= len(kept(tmp_path)) < 400
    assert run(data, tmp_path) == 0
    assert {name: kept(tmp_path)[name] for name in kept(done)} == kept(done)
    assert not list(tmp_path.rglob("*.part")) or blow == signal.SIGKILL


def _children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=True)
    return [int(word) for word in found.stdout.split()]


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_classifier_is_trained_once_where_scores_are_missing(tmp_path, monkeypatch):
    from torchgmc.demo.stage import Bar
    from torchgmc.reproduce import classifier

    data = made_up_data.hierarchy(tmp_path / "data")
    (data / "hierarchy/scores.npz").unlink()
    prepared = tree.prepare(data, tmp_path, Bar(None), tree.QUICK)
    probs, labels = prepared.tensors["wos.probs"], prepared.tensors["wos.labels"]
    assert 190 < len(probs) < 210 and "trained here" in prepared.notes[0]
    torch.testing.assert_close(probs.sum(1), torch.ones(len(probs)))
    assert (probs.argmax(1) == labels).double().mean() > 0.8  # the topic is written in the text
    monkeypatch.setattr(classifier, "scores", lambda *_: pytest.fail("trained again"))
    assert torch.equal(tree.prepare(data, tmp_path, Bar(None), tree.QUICK).tensors["wos.probs"], probs)


def test_every_experiment_keeps_the_contract():
    for name in EXPERIMENTS:
        module = frame.load(name)
        assert name == module.NAME and module.SEEDS in (10, 50) and set(module.OURS) < set(module.METHODS)
        assert isinstance(module.QUICK, module.Setting) and isinstance(module.Setting().alpha, float)


# -- one seed ------------------------------------------------------------------------------------------------------------


def measure_loop(who, s):
    """Deviations and the oracle's noise, one example at a time."""
    n, found = len(who), {}
    for j in range(who.shape[1]):
        inside = [float(s[i]) for i in range(n) if who[i, j]]
        mass = len(inside) / n
        mean = sum(inside) / len(inside) if inside else None
        left = [(v - mean) for v in inside]
        if len(inside) == 1:  # one example shows no spread
            found["mass", j], found["conditional", j] = (inside[0] / n, None), (mean, None)
            continue
        variance = sum(v * v for v in left) / max(len(inside) - 1, 1)
        size = (2 / np.pi) ** 0.5 * (mass * variance / n) ** 0.5
        found["mass", j] = (sum(inside) / n, size)
        found["conditional", j] = (mean, size / mass) if inside else (None, None)
    return found


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 12), m=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_measure_matches_a_loop(n, m, seed):
    g = torch.Generator().manual_seed(seed)
    who, s = torch.rand(n, m, generator=g) < 0.6, torch.randn(n, generator=g, dtype=torch.float64)
    names = [str(j) for j in range(m)]
    rows = measure("x", names, who, s, target=0.5, num_calibration=2 * n)
    expected = measure_loop(who, s)
    assert len(rows) == 2 * m
    for row in rows:
        deviation, size = expected[row["measure"], int(row["group"])]
        assert row["deviation"] == (None if deviation is None else pytest.approx(deviation, abs=1e-12))
        assert row["noise"] == (None if size is None else pytest.approx(size, abs=1e-12))
        if size is not None:
            assert row["noise_fitted"] == pytest.approx(size * 1.5**0.5, abs=1e-12)
        assert row["risk"] == (None if row["mass"] == 0 else pytest.approx(expected["conditional", int(row["group"])][0] + 0.5))
    json.dumps(rows, allow_nan=False)


def test_noise_is_what_an_oracle_and_a_fitted_predictor_show():
    """Many test sets of a distribution whose three overlapping groups have mean 0."""
    g = torch.Generator().manual_seed(0)
    n, m, draws = 150, 300, 6000

    def draw(*size):
        first = torch.rand(*size, generator=g) < 0.6
        who = torch.stack([first, ~first, torch.rand(*size, generator=g) < 0.3], -1)
        return who, torch.randn(*size, generator=g) * torch.where(first, 0.3, 0.1)

    who, s = draw(draws, n)
    shown = (who * s[..., None]).mean(1).abs()  # (draws, 3)
    member, before = draw(draws, m)
    inside = member[..., 0]
    shift = (inside * before).sum(1) / inside.sum(1)  # exact on the calibration examples of the first group
    fitted = (who[..., 0] * (s - shift[:, None])).mean(1).abs()
    measured = torch.cat([shown.mean(0), fitted.mean()[None], shown.amax(1).mean()[None]])
    said = []
    for k in range(100):  # what the rows say, averaged over test sets
        rows = measure("x", ["a", "b", "c"], who[k], s[k], num_calibration=m)[:3]
        said.append(torch.tensor([*(row["noise"] for row in rows), rows[0]["noise_fitted"], rows[0]["worst_noise"]]))
    torch.testing.assert_close(measured, torch.stack(said).mean(0), rtol=0.04, atol=0)


def test_copies_of_an_example_add_no_information():
    g = torch.Generator().manual_seed(0)
    who, s = torch.rand(20, 3, generator=g) < 0.6, torch.randn(20, generator=g)
    once = measure("x", ["a", "b", "c"], who, s, num_calibration=40)
    copies = torch.arange(20).repeat(4)
    four = measure("x", ["a", "b", "c"], who[copies], s[copies], num_calibration=160, clusters=copies)
    for one, many in zip(once, four, strict=True):
        for key in ("deviation", "risk", "mass", "noise", "noise_fitted", "worst_noise"):
            assert many[key] == pytest.approx(one[key], abs=1e-9), key


def test_measure_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="`who` must be bool"):
        measure("x", ["a"], torch.ones(2, 1), torch.ones(2))
    with pytest.raises(ValueError, match="`s` must have shape"):
        measure("x", ["a"], torch.ones(2, 1).bool(), torch.ones(2, 3))


# -- all seeds -----------------------------------------------------------------------------------------------------------


def made_up_rows(seeds=8, part=""):
    random = np.random.default_rng(0)
    rows = []
    for seed in range(seeds):
        for method, size in (("GMC", 0.01), ("conformal", 0.1)):
            for measure_ in ("mass", "conditional"):
                for group in ("a", "b"):
                    value = float(random.normal(scale=size))
                    missing = measure_ == "conditional" and group == "b" and seed == 0
                    rows.append(
                        {
                            "seed": seed,
                            "part": part,
                            "method": method,
                            "measure": measure_,
                            "group": group,
                            "deviation": None if missing else value,
                            "risk": 0.5,
                            "mass": 0.4,
                            "calibration": 0.001,
                            "noise": 0.002,
                            "noise_fitted": 0.003,
                            "worst_noise": 0.004,
                            "cost": {"accuracy": 0.9 + 0.001 * seed},
                        }
                    )
    return rows


def test_summary_is_numpys():
    rows = made_up_rows()
    summary = summarize(rows, ["GMC", "conformal"], ["GMC"], alpha=0.02)

    def values(method, measure_, group):
        found = [r["deviation"] for r in rows if (r["method"], r["measure"], r["group"]) == (method, measure_, group)]
        return np.array([np.nan if v is None else v for v in found])

    for row in summary.groups:
        if row["group"] == WORST:
            both = np.abs([values(row["method"], row["measure"], g) for g in "ab"])
            size = np.nanmax(both, 0)
            assert row["noise"] == pytest.approx(0.004)
        else:
            signed = values(row["method"], row["measure"], row["group"])
            size = np.abs(signed[~np.isnan(signed)])
            assert row["signed"] == pytest.approx(np.nanmean(signed))
        expected = [len(size), size.mean(), size.std(ddof=1), size.std(ddof=1) / len(size) ** 0.5, (size > 0.02).mean()]
        assert [row[k] for k in ("seeds", "mean", "sd", "se", "beyond")] == pytest.approx(expected)
    pair = next(row for row in summary.pairs if row["measure"] == "mass")
    worst = {m: np.max(np.abs([values(m, "mass", g) for g in "ab"]), 0) for m in ("GMC", "conformal")}
    difference = worst["conformal"] - worst["GMC"]
    assert pair["mean"] == pytest.approx(difference.mean())
    assert pair["se"] == pytest.approx(difference.std(ddof=1) / 8**0.5)
    assert (pair["ours"], pair["other"], pair["verdict"]) == ("GMC", "conformal", "ours smaller")
    cost = summary.costs[0]
    assert cost["mean"] == pytest.approx(0.9035) and cost["seeds"] == 8


def test_a_difference_within_two_standard_errors_is_undecided():
    rows = [dict(row, deviation=0.01 * (1 + (row["seed"] + (row["method"] == "GMC")) % 2)) for row in made_up_rows()]
    (mass, _) = summarize(rows, ["GMC", "conformal"], ["GMC"], 0.02).pairs
    assert mass["mean"] == pytest.approx(0) and mass["verdict"] == "undecided"
    rows = [
        dict(row, deviation=row["deviation"] and row["deviation"] * (9 if row["method"] == "GMC" else 0.1))
        for row in made_up_rows()
    ]
    assert summarize(rows, ["GMC", "conformal"], ["GMC"], 0.02).pairs[0]["verdict"] == "ours larger"


def test_one_seed_has_no_standard_error():
    summary = summarize(made_up_rows(1), ["GMC", "conformal"], ["GMC"], 0.02)
    assert all(row["se"] is None for row in summary.groups) and summary.pairs[0]["verdict"] == "undecided"
    assert "GMC" in tables.brief(summary, "title")


def test_cache_survives_nothing_half_written(tmp_path):
    path = tmp_path / "scores.safetensors"
    with pytest.raises(RuntimeError, match="power"):
        frame.cached(path, {"a": 1}, _no_power)
    assert not list(tmp_path.iterdir())
    assert torch.equal(frame.cached(path, {"a": 1}, lambda: {"x": torch.arange(3)})["x"], torch.arange(3))
    assert torch.equal(frame.cached(path, {"a": 1}, _no_power)["x"], torch.arange(3))
    with pytest.raises(RuntimeError, match="power"):
        frame.cached(path, {"a": 2}, _no_power)


def _no_power():
    raise RuntimeError("power failed")
