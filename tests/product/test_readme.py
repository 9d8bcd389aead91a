"""Every block of the README works as it stands, in order; names, links, options and numbers in its text are real."""

import inspect
import json
import re
import shlex

import pytest
import torch

import torchgmc as gmc
from benchmarks import figures, readme
from gmctest import ROOT
from torchgmc.cli import main

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_every_block_runs_in_order(tmp_path, monkeypatch, capsys):
    """Python blocks share their names, as in a notebook; commands run in the same folder after them."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    torch.manual_seed(0)
    commands = 0
    for number, (kind, block) in enumerate(BLOCKS):
        if kind == "python":
            exec(compile(block, f"README block {number}", "exec"), names)
        elif kind == "text":
            for line in block.splitlines():
                program, *words = shlex.split(line.removeprefix("$ "), comments=True)
                assert line.startswith("$ ") and program == "torchgmc"
                assert main(words) == 0, (line, capsys.readouterr().err)
                commands += 1
        elif kind == "output":
            shown = capsys.readouterr().out.splitlines()
            assert [line.split()[0] for line in block.splitlines()] == [line.split()[0] for line in shown]
            assert block.splitlines()[0] == shown[0] and len(block) == len("\n".join(shown)) + 1  # numbers of this size
        else:
            assert kind == "bash"  # two of them, see test_package.py
    assert commands == 4 and [kind for kind, _ in BLOCKS].count("python") == 8
    check(names, tmp_path)


def check(names, folder):
    """What the text says of the blocks is so."""
    assert names["head"].is_fitted and names["audit"].max_violation < 0.05
    for file in ("head.safetensors", "calibrated.pt2", "fnr.safetensors", "audit.html", "masks.npz", "fnr.pt"):
        assert (folder / file).stat().st_size > 0, file
    assert names["mask2"].shape == (1, 32, 32) and len(names["named"]) == 8
    assert "site = B" in names["finder"].learned[0][0]
    site, y, probs, calibrated = (names[key] for key in ("site_b", "y", "probs", "calibrated"))
    off = [abs(float((p - y.float())[site[:, 0]].mean())) for p in (probs, calibrated)]
    assert off[1] < 0.02 < 0.1 < off[0]
    inside = (names["residuals"] <= names["width"]).double()
    assert abs(float(inside[site[:, 0]].mean()) - 0.9) < 0.03
    assert (
        abs(float(gmc.violations(names["who"], names["debias"](names["logits"], names["who"]).exp()[:, 7:9].sum(1)).diff(dim=0)))
        < 0.01
    )
    assert all(parameter.grad is not None and bool((parameter.grad != 0).any()) for parameter in names["unet"].parameters())
    exported = torch.export.load(folder / "calibrated.pt2").module()
    assert torch.equal(exported(names["images"], names["groups"][:8]), names["mask"])


def test_the_first_example_has_fifteen_lines():
    first = next(block for kind, block in BLOCKS if kind == "python")
    code = [line for line in first.splitlines() if line.strip() and not line.startswith("#")]
    assert len(code) <= 15


def test_every_name_exists():
    """Names in backticks that start with gmc. can be reached; heads in the table too; options belong to somebody."""
    for name in set(re.findall(r"`gmc\.([\w.]+)", README)):
        thing = gmc
        for part in name.split("."):
            thing = getattr(thing, part)
    heads = re.findall(r"^\| `(\w+Head)` \|", README, flags=re.MULTILINE)
    assert set(heads) == {name for name in gmc.__all__ if name.endswith("Head") and name != "Head"}
    assert all("conditional" in inspect.signature(getattr(gmc, head)).parameters for head in heads)


def test_links_files_and_modules_exist():
    paths = [*re.findall(r"\]\(([^)#]+)\)", README), *re.findall(r'src="([^"]+)"', README)]
    for path in (path for path in paths if not path.startswith("http")):
        path = re.sub(r"^\.\./\.\./actions/(workflows/\w+\.yml)(/badge\.svg)?$", r".github/\1", path)  # where the host shows it
        assert (ROOT / path).exists(), path
    for module in re.findall(r"`python -m (benchmarks[.\w]*)", README):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file() or (ROOT / module / "__main__.py").is_file(), module
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for extra in ("lightning", "segmentation", "text", "report", "cli", "tables", "onnx", "datasets", "all", "test", "bench"):
        assert extra in extras and f"`{extra}`" in README


def test_commands_named_in_the_text_exist(capsys):
    for command in sorted(set(re.findall(r"torchgmc (calibrate|audit|apply|export|demo|reproduce)\b", README))):
        assert main([command, "--help"]) == 0
    assert "--data" in capsys.readouterr().out


def test_numbers_of_the_figures():
    """The text beside the figures says what ``notebooks/figures/fnr.json`` holds."""
    drawn = json.loads((ROOT / "notebooks/figures/fnr.json").read_text(encoding="utf-8"))
    rates = {method: [100 * row[method][0] for row in drawn["groups"]] for method in ("conformal", "GMC")}
    text = README.split("## Try it")[0]
    for value in (rates["conformal"][0], max(rates["conformal"]), min(rates["GMC"]), max(rates["GMC"])):
        assert text.count(f"{value:.1f} %") >= 2, value  # in the text and in the description of the picture
    for method in ("conformal", "GMC"):
        assert f"{100 * drawn['accuracy'][method]:.1f} %" in text
    assert f"{drawn['num_test']:,} fresh pictures" in text


def test_figures_are_drawn_from_results(tmp_path):
    row = {
        "group": "a",
        "mass": 0.5,
        **{key: {m: value for m in ("conformal", "GMC")} for key, value in (("risk", 0.1), ("deviation", 0.0125), ("low", 0.01))},
        "high": {"conformal": 0.02, "GMC": 0.015},
    }
    setting = {"target": 0.075, "alpha": 0.005, "delta": 0.05, "num_calibration": 1, "num_test": 2}
    results = {"seed": 3, "torch": "x", "setting": setting, "pixel_accuracy": {"GMC": 0.5}, "groups": [row]}
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert figures.main(["--results", str(tmp_path / "results.json"), "--out", str(tmp_path / "out")]) == 0
    drawn = json.loads((tmp_path / "out/fnr.json").read_text())
    assert drawn["groups"][0]["GMC"] == pytest.approx([0.1, 0.095, 0.105])  # target + deviation / share
    for name in ("average.png", "groups.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_the_table_is_written_by_command(tmp_path, capsys):
    row = {"benchmark": "fnr", "work": "fit | all", "unit": "passes", "ours": 1.5, "target": "<= 3", "naive": 40.0}
    row |= {"limit": 0.25, "spread": [1.25, 2.0]}
    other = {**row, "benchmark": "audit", "work": "not shown"}
    peers = {"a peer": 60.0, "another": "not installed"}
    beside = {**row, "work": "race", "naive": None, "peers": peers, "note": "a peer 40 x our time"}
    run = {"small": False, "machine": {"processor": "one core", "torch": "2.15"}, "rows": [row]}
    (tmp_path / "README.md").write_text(README, encoding="utf-8")
    for rows, table in (
        ([row, other], "| fit \\| all | 1.5 (1.25 to 2) passes | 0.25 | 40 | - |\n\nMeasured on: one core; torch 2.15.\n"),
        ([beside], "| race | 1.5 (1.25 to 2) passes | 0.25 | - | a peer: 60 |\n\n- race: a peer 40 x our time.\n\nMeasured on"),
    ):
        (tmp_path / "run.json").write_text(json.dumps(run | {"rows": rows}))
        assert readme.main([str(tmp_path / "run.json"), "--readme", str(tmp_path / "README.md")]) == 0
        written = (tmp_path / "README.md").read_text(encoding="utf-8")
        assert table in written and "not shown" not in written
        assert [part.split(readme.END)[-1] for part in written.split(readme.START)] == [
            part.split(readme.END)[-1] for part in README.split(readme.START)
        ]
    run["small"] = True
    (tmp_path / "run.json").write_text(json.dumps(run))
    with pytest.raises(SystemExit):
        readme.main([str(tmp_path / "run.json"), "--readme", str(tmp_path / "README.md")])
    assert "small sizes" in capsys.readouterr().err
