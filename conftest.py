"""Shared by tests and doctests: a seed, and the two names every docstring example may use."""

import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchgmc

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers already fill the cores
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # and so for the processes that tests start
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes that import torch


@pytest.fixture(autouse=True)
def seeded_namespace(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace["torch"] = torch
    doctest_namespace["gmc"] = torchgmc
    torch.manual_seed(0)


@pytest.fixture
def no_pyplot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn without pyplot, which would keep them and choose a window: importing it fails here."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)


@pytest.fixture(scope="session")
def operators_read_once() -> Iterator[None]:
    """torch.onnx parses the sources of its 500 operators again for every file, in half of an export's time; here once."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    except ImportError:  # a private name of torch: without it the tests are slower, not others
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
        yield
