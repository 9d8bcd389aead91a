"""`torchgmc demo` and `torchgmc reproduce`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from torchgmc.cli import main
from torchgmc_paper.demo import fnr


def test_demo_all_runs_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torchgmc_paper.demo import DEMOS

    ran = {}

    class Ran:
        QUICK = "tiny"

        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, out: Path, **options: Any) -> Any:
            ran[self.name] = (out, options)
            return type("Result", (), {"to_dict": lambda _: {"demo": self.name}})()

    monkeypatch.setattr("torchgmc_paper.commands.import_module", lambda module: Ran(module.rsplit(".", 1)[1]))
    assert main(["demo", "all", "--out", str(tmp_path), "--quick", "--seed", "3", "--json"]) == 0
    assert ran == {name: (tmp_path / name, {"seed": 3, "setting": "tiny"}) for name in DEMOS}
    assert json.loads(capsys.readouterr().out) == {name: {"demo": name} for name in DEMOS}


def test_the_help_names_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    from torchgmc_paper import EXPERIMENTS
    from torchgmc_paper.demo import DEMOS

    for command, what, known in (("demo", "demo", DEMOS), ("reproduce", "experiment", EXPERIMENTS)):
        assert main([command, "--help"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        listed = re.search(rf"Which {what}: ([\w, ]+?),? or all", said)
        assert listed is not None and listed[1].split(", ") == list(known)


def test_an_interruption_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fnr, "run", interrupt)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err.strip() == "torchgmc: interrupted"
