"""Timing shared by the benchmarks: medians after a warm-up, and the machine they were taken on."""

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable

import numpy
import torch

import torchgmc as gmc

#: Other packages that the benchmarks compare with, and what they are called on PyPI.
PEERS = {"mcgrad": "mcgrad", "multicalibration": "multicalibration", "fortuna": "aws-fortuna"}


def median_seconds(work: Callable[[], object], repeat: int = 5) -> float:
    """Median time of ``repeat`` runs after one that does not count."""
    work()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeat // 2]


def quickest(*works: Callable[[], object], repeat: int) -> list[float]:
    """Least seconds of each work; the works take turns, so that a busy machine disturbs all of them alike."""
    times: list[list[float]] = [[] for _ in works]
    for turn in range(repeat + 1):
        for work, found in zip(works, times, strict=True):
            start = time.perf_counter()
            work()
            if turn:  # the first one warms up
                found.append(time.perf_counter() - start)
    return [min(found) for found in times]


def ratios(work: Callable[[], object], unit: Callable[[], object], repeat: int = 15) -> tuple[float, float, float]:
    """Processor time of the work over that of the unit: middle, least and largest of runs that take turns, after one of each."""
    found = []
    for turn in range(repeat + 1):
        marks = [time.process_time()]
        for one in (unit, work):
            one()
            marks.append(time.process_time())
        if turn:
            found.append((marks[2] - marks[1]) / max(marks[1] - marks[0], 1e-9))
    return sorted(found)[repeat // 2], min(found), max(found)


def header() -> str:
    """Versions and machine, for the first line of a result."""
    threads = torch.get_num_threads()
    return f"torch {torch.__version__}, {threads} threads, Python {platform.python_version()}, {platform.machine()}"


def processor() -> str:
    """Name of the processor, as far as the system tells."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def machine() -> dict[str, str]:
    """Where and with what a result was made."""

    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "processor": f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads",
        "load before": f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "torchgmc": gmc.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "peers": ", ".join(f"{name} {version(package)}" for name, package in PEERS.items()),
    }
