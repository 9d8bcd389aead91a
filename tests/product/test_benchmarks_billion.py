"""The model of costs finds the costs that it was made from, and the page has a row for every run."""

from benchmarks import billion, scale


def test_the_model_returns_the_costs_it_was_fitted_to() -> None:
    time, sent = [2e-6, 3e-8, 1e-6, 1e-8, 1e-7, 0.05], [3000.0, 40.0, 16.0]

    def cost(groups: int, n: int, world: int) -> dict[str, float]:
        few = sum(a * b for a, b in zip(time, billion.time_terms(groups, n, world), strict=True))
        little = sum(a * b for a, b in zip(sent, billion.sent_terms(groups), strict=True)) * (1 + (n >= billion.MANY))
        cells = billion.cells(groups, n, world)
        many = groups > billion.SHARED
        exchanged = 20.0 * (1 + groups) ** 2 if many else little
        return {"calibrate": 1.5e-7 * cells if many else few, "peak": 9.0 * cells, "sent": exchanged * (world > 1), "kept": 1.0}

    model = billion.Model({billion.key(*one): cost(*one) for one in billion.FITTED})
    for one in ((30, 200_000, 4), (50, 10**7, 8), (700, 10**6, 2), (1500, 50_000, 64)):
        assert abs(model.seconds(*one) / cost(*one)["calibrate"] - 1) < 0.05
        assert abs(model.bytes_sent(*one) / cost(*one)["sent"] - 1) < 1e-9
    assert model.bytes_sent(50, 10**9, 1) == 0 and abs(model.bytes_peak(700, 1000, 1) / (9.0 * 701_000) - 1) < 1e-9
    assert model.bytes_sent(10**5, 10**9, 64) == model.bytes_sent(10**4, 10**6, 2)  # no more columns at once


def test_the_page_is_that_of_the_runs() -> None:
    runs = scale.load(billion.PATH)
    kept = (scale.RESULTS / "billion.md").read_text(encoding="utf-8").splitlines()
    made = billion.page(runs).splitlines()
    fitted = [line for line in made if line.endswith("| fitted |")]
    assert len(fitted) == len(billion.FITTED) and all(billion.key(*one) in runs for one in (*billion.FITTED, *billion.UNSEEN))
    assert [line.split("|")[1:4] for line in kept if line.startswith("|")] == [
        line.split("|")[1:4] for line in made if line.startswith("|")
    ]
