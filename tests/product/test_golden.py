"""Files written by earlier versions keep loading: one saved head per kind, and a Lightning checkpoint, with their outputs.

``PYTHONPATH=tests/helpers python tests/product/test_golden.py`` writes the files that are missing. A file that exists is never
written again: it stands for the version that wrote it.
"""

import contextlib
import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import torchgmc as gmc
from gmctest import GOLDEN
from gmctest.heads_zoo import ZOO, Entry
from torchgmc.deploy import io

N, SEED = 6, 11
VERSION = "0.1"


def files(name: str) -> tuple[Path, Path]:
    return GOLDEN / f"{name}-{VERSION}.safetensors", GOLDEN / f"{name}-{VERSION}.expected.safetensors"


def write(entry: Entry) -> None:
    head = entry.fitted()
    saved, expected = files(entry.name)
    inputs = entry.data(N, SEED).inputs
    gmc.save(head, saved)
    save_file({f"input_{i}": t.contiguous() for i, t in enumerate(inputs)} | {"output": head(*inputs).contiguous()}, expected)


def write_checkpoint(path: Path) -> None:
    from lightning.pytorch import Trainer

    from gmctest.lightning_models import CalibrationCallback, Segmenter, head, loader, pictures

    callback = CalibrationCallback(head(), loader(pictures(24, 1)))
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[callback],
    )
    module = Segmenter()
    trainer.fit(module, loader(pictures(16)))
    trainer.save_checkpoint(path)
    images, _, member = pictures(N, SEED).tensors
    with torch.no_grad():
        output = module.eval().calibrated(images, member)
    save_file({"images": images, "groups": member, "output": output}, path.with_suffix(".expected.safetensors"))


CHECKPOINT = GOLDEN / f"lightning-{VERSION}.ckpt"


@pytest.mark.parametrize("saved", sorted(p for p in GOLDEN.glob("*.safetensors") if "expected" not in p.name), ids=lambda p: p.stem)
def test_saved_heads_keep_loading(saved: Path):
    options = {e.name: e.loading for e in ZOO}[saved.name.removesuffix(f"-{VERSION}.safetensors")]
    with pytest.warns(UserWarning, match="alphabetical") if "distribution" in saved.name else contextlib.nullcontext():
        head = gmc.load(saved, **options)  # whoever wrote these files may have had the word lists in another order
    expected = load_file(saved.with_suffix(".expected.safetensors"))
    inputs = [expected[f"input_{i}"] for i in range(len(expected) - 1)]
    torch.testing.assert_close(head(*inputs), expected["output"], rtol=1e-6, atol=1e-7)
    again = copy.deepcopy(head)
    again.load_state_dict(head.state_dict())
    torch.testing.assert_close(again(*inputs), expected["output"], rtol=1e-6, atol=1e-7)


def test_there_is_a_file_for_every_kind_of_head():
    kinds = set()
    for entry in ZOO:
        saved, expected = files(entry.name)
        assert saved.is_file() and expected.is_file(), f"this file, run as a script, writes {saved.name}"
        kinds.add(type(entry.make()).__name__)
    missing = {name for name, kind in io.known_heads().items() if kind.__module__.startswith("torchgmc.")} - kinds
    assert not missing, f"no golden file for {sorted(missing)}: add them to gmctest/heads_zoo.py"


@pytest.mark.filterwarnings("ignore:The loaded checkpoint was produced with Lightning v2.6")  # newer than the oldest one
def test_checkpoints_keep_loading():
    pytest.importorskip("lightning.pytorch")
    from gmctest.lightning_models import Segmenter
    from torchgmc.lightning import head_from_checkpoint

    module = Segmenter.load_from_checkpoint(CHECKPOINT, weights_only=True)
    expected = load_file(CHECKPOINT.with_suffix(".expected.safetensors"))
    model = gmc.attach(module.eval(), head_from_checkpoint(CHECKPOINT))
    with torch.no_grad():
        assert torch.equal(model(expected["images"], expected["groups"]), expected["output"])


def test_files_are_small_and_name_no_machine():
    total = 0
    for path in GOLDEN.iterdir():
        data = path.read_bytes()
        total += len(data)
        assert b"/home" not in data and b"/work" not in data and b"/tmp" not in data, path.name
    assert total < 400_000


if __name__ == "__main__":
    torch.manual_seed(0)
    GOLDEN.mkdir(exist_ok=True)
    for one in ZOO:
        if not files(one.name)[0].exists():
            write(one)
            print("wrote", one.name)
    if not CHECKPOINT.exists():
        write_checkpoint(CHECKPOINT)
        print("wrote", CHECKPOINT.name)
