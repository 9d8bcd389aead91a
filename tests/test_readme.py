"""Every Python block of the README runs as it stands."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs(number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(BLOCKS[number], f"README block {number}", "exec"), names)
    if number == 0:
        assert "verdict" in capsys.readouterr().out
        assert names["head"].is_fitted and (tmp_path / "head.safetensors").is_file()
        assert names["audit"].max_violation < 0.05


def test_every_name_exists():
    """Names in backticks that start with gmc. can be reached."""
    import torchgmc

    for name in set(re.findall(r"`gmc\.([\w.]+)", README)):
        thing = torchgmc
        for part in name.split("."):
            thing = getattr(thing, part)


def test_there_are_blocks():
    assert len(BLOCKS) == 1
