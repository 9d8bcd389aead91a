"""Timing shared by the benchmarks: medians after a warm-up, and the machine they were taken on."""

import platform
import time
from collections.abc import Callable

import torch


def median_seconds(work: Callable[[], object], repeat: int = 5) -> float:
    """Median time of ``repeat`` runs after one that does not count."""
    work()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeat // 2]


def header() -> str:
    """Versions and machine, for the first line of a result."""
    threads = torch.get_num_threads()
    return f"torch {torch.__version__}, {threads} threads, Python {platform.python_version()}, {platform.machine()}"
