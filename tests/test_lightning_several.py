"""Lightning with several heads, label maps, and a module loaded without a trainer."""

import functools

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchgmc as gmc

pytest.importorskip("lightning")
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint

from gmctest.lightning_models import trainer
from torchgmc.lightning import CalibrationCallback, restore

pytestmark = [  # Lightning's advice on this machine, and what it uses of torch itself
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty.*"),
]


class Organs(LightningModule):
    """Logits of three classes for each pixel, as a dict."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = torch.nn.Conv2d(1, 3, 3, padding=1)

    def forward(self, images):
        return {"out": self.network(images)}

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self(batch[0])["out"], batch[1], ignore_index=255)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def label_maps(n, seed):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (n, 8, 8), generator=g)
    images = labels[:, None] + torch.randn(n, 1, 8, 8, generator=g)
    labels[torch.rand(labels.shape, generator=g) < 0.1] = 255
    return TensorDataset(images, labels, torch.arange(n)[:, None] % 2 == torch.arange(2))


def callback(name, channel, data, **options):
    head = gmc.ThresholdHead(0.2, None, ["even", "odd"])
    adapter = gmc.Adapter(**({"channel": channel, "activation": "softmax", "ignore_index": 255} | options))
    return CalibrationCallback(head, DataLoader(data, batch_size=16), adapter, name=name)


@pytest.fixture
def trained(tmp_path_factory):
    """Trained once; of function scope, so that the filters above hold."""
    return _train(tmp_path_factory.getbasetemp())


@functools.cache
def _train(folder):
    known = label_maps(40, 1)
    callbacks = [callback("tumour", 1, known), callback("vessel", 2, known)]
    module, saver = Organs(), ModelCheckpoint(folder, save_last=True)
    run = trainer(folder, *callbacks, saver, enable_checkpointing=True)
    run.fit(module, DataLoader(label_maps(32, 0), batch_size=16))
    return module, callbacks, known, folder / "last.ckpt"


def test_two_heads_are_reachable_after_training(trained):
    module, callbacks, known, _ = trained
    images, labels, who = known.tensors
    with torch.no_grad():
        probs, found = module(images)["out"].softmax(1), module.calibrated(images, who)
        assert list(found) == ["tumour", "vessel"]
        for channel, (name, one) in enumerate(zip(found, callbacks, strict=True), 1):
            want = gmc.ThresholdHead(0.2, None, ["even", "odd"])
            want.fit(probs[:, channel], labels == channel, who, pixel_weight=labels != 255)
            assert torch.equal(one.head.threshold(who), want.threshold(who))
            assert torch.equal(found[name], want(probs[:, channel], who))
            assert torch.equal(module.calibrations[name](images, who)["out"], found[name])


def test_a_module_loaded_without_a_trainer_gets_its_heads_back(trained):
    module, _, known, path = trained
    images, _, who = known.tensors
    loaded = Organs.load_from_checkpoint(path).eval()
    again = restore(loaded, path)
    assert again is loaded.calibrated
    with torch.no_grad():
        found, want = again(images, who), module.eval().calibrated(images, who)
    assert list(found) == list(want) and all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("format", ["torchscript", "torch.export", "onnx"])
def test_an_attached_module_in_one_file(trained, format, tmp_path):
    """Eager results and those of the file are dicts from the same names to the same masks."""
    module, _, known, _ = trained
    images, _, who = known.tensors
    path = module.calibrated.export(tmp_path / "organs.bin", format=format, example_inputs=(images[:3], who[:3]))
    assert gmc.export.metadata(path)["outputs"] == ["tumour", "vessel"]
    if format == "torchscript":
        found = torch.jit.load(str(path))(images, who)
        want = module.eval().calibrated(images, who)
        assert type(found) is type(want) is dict and all(torch.equal(found[name], want[name]) for name in want)


def test_a_wrong_adapter_or_name_is_found_before_training(tmp_path):
    known, steps = label_maps(40, 1), []
    for wrong, message in (
        ([callback("a", 1, known, ignore_index=None)], "ignore_index=255"),
        ([callback("a", 7, known)], "`channel` = 7 is out of range"),
        ([callback("a", 1, known, field="logits")], "no field 'logits'"),
        ([callback("a", 1, known), callback("a", 2, known)], "`callback.state_key` must be unique"),
    ):
        module = Organs()
        module.on_train_batch_start = lambda *_: steps.append(1)
        with pytest.raises((ValueError, RuntimeError), match=message):
            trainer(tmp_path, *wrong).fit(module, DataLoader(label_maps(32, 0), batch_size=16))
    assert not steps


class Rows(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.network(x).squeeze(1).sigmoid()

    def training_step(self, batch, index):
        return torch.nn.functional.binary_cross_entropy(self(batch["x"]), batch["y"].float())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_head_that_learns_beside_another(tmp_path):
    """Both in ``module.calibrated`` after training, and in the module that is loaded again."""
    g = torch.Generator().manual_seed(0)
    x = torch.rand(300, 2, generator=g)
    y = torch.rand(300, generator=g) < 0.2 + 0.6 * (x[:, 1] > 0.5)
    known = [{"x": x[i], "y": y[i], "groups": x[i, :1] > 0.5} for i in range(300)]
    heads = {"plain": gmc.ProbabilityHead(None, ["a"]), "learned": gmc.ProbabilityHead(None, learn=gmc.Trees(1, trees=3))}
    callbacks = [
        CalibrationCallback(head, DataLoader(known, 100), name=name, features="x" if name == "learned" else None)
        for name, head in heads.items()
    ]
    module, saver = Rows(), ModelCheckpoint(tmp_path, save_last=True)
    trainer(tmp_path, *callbacks, saver, enable_checkpointing=True).fit(module, DataLoader(known[:100], 100))
    again = Rows.load_from_checkpoint(tmp_path / "last.ckpt").eval()
    restore(again, tmp_path / "last.ckpt")
    with torch.no_grad():
        want = {"plain": heads["plain"](module(x), x[:, :1] > 0.5), "learned": heads["learned"](module(x), features=x)}
        for one in (module, again):
            found = one.calibrated(x, x[:, :1] > 0.5, features=x)
            assert list(found) == list(want) and all(torch.equal(found[name], want[name]) for name in want)
