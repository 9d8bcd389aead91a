"""The command line needs packages of its extra."""

import pytest


@pytest.fixture(autouse=True)
def extra_of_the_command_line() -> None:
    pytest.importorskip("typer")
    pytest.importorskip("rich")
