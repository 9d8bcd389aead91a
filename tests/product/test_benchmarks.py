"""Every benchmark at tiny sizes, for what it computes: its results against plain versions. No time is looked at."""

import json
import math
import os
import re
import subprocess
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

import torchgmc as gmc
from benchmarks import audit, calibrate, fnr, multicalibration, processes, search, soak, text, timing
from benchmarks.__main__ import BENCHMARKS, KEPT, collect, main
from benchmarks.rows import Row, as_markdown, as_text, number

#: What needs no other process and no large package.
QUICK = [name for name in BENCHMARKS if name not in ("overhead", "processes")]


@pytest.fixture(autouse=True)
def threads():
    """Benchmarks choose one thread; the tests after them have those they had."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.mark.parametrize("name", QUICK)
def test_rows(name):
    rows, errors, _ = collect([name], small=True, tiny=True)
    assert not errors and rows
    for row in rows:
        assert row.benchmark == name and row.ours is not None and math.isfinite(row.ours) and row.ours >= 0
        assert row.work and row.unit and row.target
        assert len(row.cells()) == 7


def test_fnr_same_thresholds():
    scores, masks, groups = fnr.problem(30, 12, seed=3)
    expected, steps = fnr.naive_algorithm_1(scores, masks, groups)
    head = gmc.ThresholdHead(fnr.TARGET, fnr.ALPHA, ["a", "b", "c", "d"])
    head.fit(scores, masks, groups, solver="paper", eta=fnr.ETA)
    assert head.report.iterations == steps > 0
    torch.testing.assert_close(head.threshold(groups).float(), expected)
    loop = [(scores[i][masks[i]] <= expected[i]).float().mean() for i in range(30)]
    torch.testing.assert_close(fnr.naive_pass(scores, masks, expected), torch.stack(loop))
    torch.testing.assert_close(fnr.block_pass(scores, masks, expected), torch.stack(loop))


def test_multicalibration_same_violations():
    data = multicalibration.problem(300, "interactions")
    table = multicalibration.search(data.probs, data.y, data.groups.float())
    level = (data.probs * multicalibration.BINS).long()
    cells = torch.stack([data.groups & (level == k)[:, None] for k in range(multicalibration.BINS)], 2)
    torch.testing.assert_close(table, gmc.violations(cells.flatten(1), data.probs - data.y).reshape(table.shape))
    predict, steps = multicalibration.naive_patches(data, 0.01)
    after = multicalibration.search(predict(data), data.y, data.groups.float())
    assert steps > 0 and float(after.abs().max()) <= 0.01 < float(table.abs().max())
    multicalibration.check(300, 0.01)


def test_multicalibration_line_of_peers():
    """Faster but worse on fresh data does not count; a peer that is missing is named."""
    ours = {"cpu": 1.0, "least": 0.9, "most": 1.5, "worst test": 0.001, "brier test": 0.13}
    peer = {"cpu": 60.0, "worst test": 0.002, "brier test": 0.14}
    found = {"torchgmc": ours, "torchgmc, learned": peer, "mcgrad, default": peer, "HKRR": "not installed"}

    def line(full=True, **changed):
        return multicalibration.against_peers(1000, "additive", found | {"mcgrad, default": changed or peer}, 0.5, full)

    row = line()
    assert row.reached is True and row.ours == 2.0 and row.peers == {"mcgrad, default": 120.0, "HKRR": "not installed"}
    assert row.spread == [1.8, 3.0] and "2 (1.8 to 3) full searches" in row.cells()
    assert "ours with `learn=gmc.Trees()` 60 x our time, worst 0.0020" in row.note
    assert line(**peer | {"brier test": 0.12}).reached is False and line(**peer | {"cpu": 40.0}).reached is False
    assert line(full=False).reached is None
    found["mcgrad, default"] = "not installed"
    assert multicalibration.against_peers(1000, "additive", found, 0.5, True).reached is None


def test_text_same_violations():
    logits, member = text.problem(80, 260)
    head = gmc.DistributionHead(text.lists(), text.ALPHA, ["female", "male"], noise_floor=False).fit(logits, member)
    worst = text.worst_violation(head, logits, member)
    assert worst == pytest.approx(float(head.report.violations_after.abs().max()), abs=1e-6) and worst <= text.ALPHA * 1.001
    before = torch.softmax(logits.double(), 1)
    start = max(
        abs(float(((before[:, t].sum(1) - before[:, t].sum(1).mean()) * g).mean())) for t in text.lists().values() for g in member.T
    )
    assert start > text.ALPHA
    few = gmc.DistributionHead(text.lists(), 0.9 * start, ["female", "male"])  # unprocessed: the two definitions agree
    assert float(few.fit(logits, member).report.violations_before.abs().max()) == pytest.approx(start, rel=1e-5)
    _, steps = text.naive_algorithm_1(logits, member, 1.1 * start, 5)
    assert steps == 0
    assert text.naive_algorithm_1(logits, member, text.ALPHA, 2)[1] == 2


def test_search_agrees_and_counts():
    got, plain = search.case(200, 4, 3, 1, False, False), search.case(200, 4, 3, 1, True, False)
    assert got["groups"] == 4 * 3 + 6 * 9 + 4 * 27 and {"dense", "peak"} == set(plain)


def test_calibrate_same_state():
    calibrate.check(20, 8)
    one, many = calibrate.observed(20, 1, 8), calibrate.observed(20, 7, 8, fresh=False)
    groups = fnr.problem(20, 8)[2]
    assert one.calibrate().threshold(groups).equal(many.calibrate().threshold(groups))
    assert int(many.statistics.examples) == 140


def test_audit_truth():
    """The violations called true are the means of a large sample."""
    rng = torch.Generator().manual_seed(0)
    for conditional in (False, True):
        for draw in (audit.miss_rates(200_000, rng, 0.01, conditional), audit.coverage(200_000, rng), audit.text(100_000, rng)):
            mean, half = audit.plain(draw, conditional)
            assert ((mean - draw.truth).abs() <= 2.5 * half).all()
    draw = audit.cells(100_000, rng)
    mean, half = audit.plain(draw, False)
    assert ((mean - draw.truth).abs() <= 3.0 * half).all()


def test_processes_same_state():
    found = processes.measure([30])
    assert len(found) == 4 and all(far <= 1e-6 and sent > 0 for _, _, _, far, sent in found)


@pytest.mark.slow
def test_overhead_same_output():
    pytest.importorskip("segmentation_models_pytorch")
    pytest.importorskip("transformers")
    rows, errors, _ = collect(["overhead"], small=True, tiny=True)
    assert not errors and len(rows) == 3 and all(0 < row.ours < 100 for row in rows)


def test_command_writes_page_and_json(tmp_path, capsys):
    files = ["--json", str(tmp_path / "new" / "a.json"), "--markdown", str(tmp_path / "new" / "a.md")]
    assert main(["--tiny", "--only", "calibrate", "--only", "fnr", *files]) == 0
    out = capsys.readouterr().out
    page, content = (tmp_path / "new" / "a.md").read_text(), json.loads((tmp_path / "new" / "a.json").read_text())
    assert [row["benchmark"] for row in content["rows"]] == ["calibrate", "fnr", "fnr"] and content["errors"] == {}
    for word in ("command: python -m benchmarks --tiny --only calibrate", "torch: ", "processor: ", "peers: mcgrad", "took: "):
        assert word in page and word in out
    header = "| work | ours | naive | peer | physical limit | target | reached? |"
    assert header in page and "passes over the scores" in page


def test_a_second_run_keeps_its_memory(tmp_path, capsys, monkeypatch):
    file, seen, run = tmp_path / "a.md", [], subprocess.run

    def watched(command, env, **options):
        done = run(command, env=env, **options)
        rows = json.loads(Path(command[command.index("--json") + 1]).read_text())["rows"]
        seen.append((command, env, number(rows[0]["ours"])))
        return done

    monkeypatch.setattr(subprocess, "run", watched)
    assert main(["--tiny", "--only", "calibrate", "--kept", "--markdown", str(file)]) == 0
    ((command, env, kept),) = seen
    assert env.items() >= {**os.environ, **KEPT}.items() and "--kept" not in command
    row = re.search(r"^\| (calibrate.*) \| (\S+) \| (\S+) \| x the time of 16 \|$", file.read_text(), re.MULTILINE)
    assert float(row[2]) > 0 and row[3] == kept and row[0] in capsys.readouterr().out


def test_ratios_take_turns():
    seen = []
    middle, least, most = timing.ratios(lambda: seen.append("work"), lambda: seen.append("unit"), 4)
    assert seen == ["unit", "work"] * 5 and 0 <= least <= middle <= most


def test_a_failure_does_not_stop_the_rest(monkeypatch, capsys):
    def broken(small, tiny):
        raise AssertionError("thresholds differ")

    monkeypatch.setattr(fnr, "run", broken)
    assert main(["--tiny", "--only", "fnr", "--only", "calibrate"]) == 1
    out = capsys.readouterr().out
    assert "fnr FAILED: AssertionError: thresholds differ" in out and "calibrate: calibrate()" in out
    with pytest.raises(SystemExit):
        main(["--only", "nothing"])
    assert "invalid choice" in capsys.readouterr().err


def test_table():
    row = Row("x", "a | b", "passes", 2.5, "<= 3", True, naive=1234.0, peers={"p": "not installed", "q": 0.00001}, limit=1.0)
    assert row.cells() == ["a | b", "2.5 passes", "1,234", "p: not installed; q: 1.0e-05", "1", "<= 3", "yes"]
    assert "| a \\| b | 2.5 passes | 1,234 |" in as_markdown([row])
    assert "peer     p: not installed" in as_text([row])
    missing = Row("x", "w", "%", None, "t", note="y is not installed")
    assert missing.cells()[1] == "not measured" and missing.cells()[-1] == "-" and "- w: y is not" in as_markdown([missing])
    assert [number(v) for v in (0.0, 0.1234, 99.96, 123.4, 5e6, None)] == ["0", "0.123", "100", "123", "5.0e+06", "-"]


def test_watch_ends():
    with multicalibration.Watch() as watch:
        time.sleep(0.01)
    assert watch.added >= 0 and not watch.thread.is_alive()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
@pytest.mark.parametrize("name", ["threshold", "quantile"])
def test_soak_sees_a_head_that_keeps_its_batches(name, monkeypatch):
    """Ten calls of a head as it is, and of one that hoards 40 MB a call: the allocator has no such pieces left from before."""
    console = Console()
    assert soak.soak(name, 10, console).kept
    make, data = soak.HEADS[name]

    def hoarding():
        head, hoard = make(), []
        observe = head.observe
        head.observe = lambda *batch: (observe(*batch), hoard.append(torch.ones(10 << 20)))
        return head

    monkeypatch.setitem(soak.HEADS, name, (hoarding, data))
    outcome = soak.soak(name, 10, console)
    assert not outcome.kept and outcome.grown > 200 << 20
