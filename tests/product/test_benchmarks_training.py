"""The comparison of ways to train, at its small size: it runs, every method keeps the same promise, and the page says so."""

import math
import statistics

import pytest
import torch

from benchmarks import training


@pytest.fixture(scope="module")
def table():
    threads = torch.get_num_threads()
    found, seconds = training.compare(seeds=1, small=True)
    torch.set_num_threads(threads)
    assert seconds > 0
    return found


def test_every_method_is_measured_on_both_tasks(table):
    assert list(table) == ["segmentation", "outcome"]
    for methods in table.values():
        names = list(methods)
        assert [name[:3] for name in names] == ["(a)", "(b)", "(b)", "(c)", "con"]
        assert methods[names[0]]["gain"] == (0.0, 0.0)
        for figures in methods.values():
            assert all(math.isfinite(v) and math.isfinite(e) for v, e in figures.values())
            assert figures["worst violation"][0] < 0.2  # few examples, but calibrated
    for figures in table["segmentation"].values():
        assert 0.0 < figures["Dice"][0] < 1.0
        assert figures["worst violation"][0] <= figures["worst before"][0]
    for figures in table["outcome"].values():
        assert figures["log loss"][0] < math.log(2)


def test_the_same_seed_gives_the_same_figures(table):
    again = training.outcome(0, small=True)
    for name, figures in again.items():
        assert figures["log loss"] == pytest.approx(table["outcome"][name]["log loss"][0], abs=1e-9)


def test_page_and_figure(table, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(training, "compare", lambda seeds, small, workers, longer: (table, 7.0))
    assert training.main(["--seeds", "1", "--small", "--output", str(tmp_path)]) == 0
    page = (tmp_path / "training.md").read_text()
    assert page.splitlines()[2] == "- command: python -m benchmarks.training --seeds 1 --small"
    assert page.count("| (c) through calibration |") == 2 and "+0.0000 ± 0.0000" in page
    assert page.split("![")[0].strip() in capsys.readouterr().out
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        training.main(["--seeds", "0"])


def test_means_errors_and_measures_by_hand():
    values = [1.0, 2.0, 4.0]
    mean, error = training.mean_and_error(values)
    assert mean == pytest.approx(7 / 3) and error == pytest.approx(statistics.stdev(values) / math.sqrt(3))
    truth = torch.tensor([[[True, True], [False, False]], [[True, False], [False, False]], [[False, False], [False, False]]])
    mask = torch.tensor([[[True, False], [True, False]], [[True, False], [False, False]], [[False, False], [False, False]]])
    torch.testing.assert_close(training.dice(mask.float(), truth.float()), torch.tensor([0.5, 1.0, 1.0]))
    groups = torch.tensor([[True, False], [False, True], [True, True]])  # the empty picture counts for nobody
    assert training.worst_miss(mask, (truth, truth, groups), 0.1) == pytest.approx(0.4)  # miss rates 1/2 and 0


def test_tasks_differ_by_group_as_described():
    rng = torch.Generator().manual_seed(0)
    pictures, masks, groups = training.pictures(800, rng)
    inside = torch.stack([p[0][m].mean() for p, m in zip(pictures, masks, strict=True)])
    assert float(inside[groups[:, 1]].mean() - inside[groups[:, 0]].mean()) > 0.4  # dark blobs stand out less
    x, y, who = training.patients(5000, rng)
    first, third = who[:, 0], who[:, 2]
    assert float(x[third, 0].mean() - x[first, 0].mean()) > 1.5
    assert bool((who[:, :3].sum(1) == 1).all()) and set(y.tolist()) == {0.0, 1.0}
