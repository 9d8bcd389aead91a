"""Shared by tests and doctests: a seed, and the two names every docstring example may use."""

import os
from typing import Any

import pytest
import torch

import torchgmc

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers already fill the cores
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # and so for the processes that tests start


@pytest.fixture(autouse=True)
def seeded_namespace(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace["torch"] = torch
    doctest_namespace["gmc"] = torchgmc
    torch.manual_seed(0)
