"""Fits wait for few values of a device: none in a step with a fixed length, and no more of them for more examples."""

import pytest

from benchmarks.reads import heads, measure


@pytest.mark.parametrize("name", ["threshold", "probability", "quantile", "distribution"])
def test_fixed_steps_read_nothing(name: str):
    """Level sets pick rows on the CPU (a size, not a value), where that waits for nothing."""
    few, many = (measure(name, 200, "paper", steps) for steps in (5, 25))
    assert few[0] == many[0] and many[1] - few[1] in (0, 20)


@pytest.mark.parametrize("name", heads(2))
def test_reads_do_not_grow_with_examples(name: str):
    few, many = (sum(measure(name, n, "exact")) for n in (300, 1200))
    assert many < 2 * few, (few, many)
