"""A real Trainer.fit with the callback: segmentation, classification, language model; checkpoints; two processes."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torchgmc as gmc
from gmctest import subprocess_env

pytest.importorskip("lightning.pytorch")
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from gmctest.lightning_models import GROUPS, Segmenter, Validated, head, language_model, loader, pictures, trainer
from torchgmc.lightning import CalibrationCallback, MonitorCallback, head_from_checkpoint, shard

pytestmark = [
    # Lightning's advice on this machine, and what it uses of torch itself.
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty.*"),
]


def fitted_by_hand(module: LightningModule, data: TensorDataset, dtype: torch.dtype | None = None) -> gmc.Head:
    images, masks, member = data.tensors
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        return head().fit(type(module).forward(module.eval(), images), masks, member)


def same(a: nn.Module, b: nn.Module) -> bool:
    """Equal states, but for the keys of the calibration data: scores of other batch sizes differ in the last bit."""
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(
        torch.allclose(ours[k].double(), theirs[k].double(), atol=1e-6) for k in ours if not k.endswith("seen")
    )


def test_segmentation(tmp_path):
    smp = pytest.importorskip("segmentation_models_pytorch")
    net = smp.Unet("resnet18", encoder_weights=None, encoder_depth=3, decoder_channels=(16, 8, 8))
    module, data = Segmenter(net), pictures(24, 1)
    callback = CalibrationCallback(head(), loader(data))
    saver = ModelCheckpoint(tmp_path, save_last=True)
    trainer(tmp_path, callback, saver, enable_checkpointing=True).fit(module, loader(pictures(16)))
    assert callback.head.is_fitted and module.training  # the mode it was in
    assert same(callback.head, fitted_by_hand(module, data))
    images, _, member = data.tensors
    want = module.eval().calibrated(images, member)
    assert want.dtype == torch.bool and want.shape == (24, 1, 8, 8)
    assert "calibrated" not in dict(module.named_modules()) and not any(key.startswith("calibrated") for key in module.state_dict())
    # The checkpoint of the final weights holds the head; both come back with a trainer, and without.
    again = Segmenter.load_from_checkpoint(saver.last_model_path, network=net).eval()
    restored = head_from_checkpoint(saver.last_model_path)
    assert torch.equal(gmc.attach(again, restored)(images, member), want)
    fresh, other = CalibrationCallback(head(), loader(data)), Validated(net)
    run = trainer(tmp_path, fresh, ModelCheckpoint(tmp_path), enable_checkpointing=True)
    run.validate(other, loader(pictures(8)), ckpt_path=saver.last_model_path, verbose=False)
    assert torch.equal(other.eval().calibrated(images, member), want)


class Classifier(LightningModule):
    """Probabilities of three classes from a torchvision network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images).softmax(1)

    def training_step(self, batch, index) -> Tensor:
        images, labels, _ = batch
        return nn.functional.nll_loss(self(images).log(), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("num_classes", [3, None])
def test_classification(num_classes, tmp_path):
    """Several classes; and one of them against the rest, by its channel."""
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    module = Classifier(torchvision.models.resnet18(num_classes=3))
    g = torch.Generator().manual_seed(3)
    labels = torch.randint(3, (60,), generator=g)
    images = torch.randn(60, 3, 32, 32, generator=g) + labels[:, None, None, None]
    member = torch.arange(60)[:, None] % 2 == torch.arange(2)
    truth = labels if num_classes else (labels == 2).double()
    options = {"bins": None, "noise_floor": False, "num_classes": num_classes}
    adapter = None if num_classes else gmc.Adapter(channel=2)
    known = loader(TensorDataset(images, truth, member), 16)
    callback = CalibrationCallback(gmc.ProbabilityHead(0.01, GROUPS, **options), known, adapter)
    saver = ModelCheckpoint(tmp_path, save_last=True)
    trainer(tmp_path, callback, saver, enable_checkpointing=True).fit(module, loader(TensorDataset(images, labels, member), 20))
    with torch.no_grad():
        probs = module.eval()(images)
        probs = probs if num_classes else probs[:, 2]
        want = gmc.ProbabilityHead(0.01, GROUPS, **options).fit(probs, truth, member)
        assert same(callback.head, want)
        torch.testing.assert_close(module.calibrated(images, member), want(probs, member))
    restored = head_from_checkpoint(tmp_path / "last.ckpt")
    torch.testing.assert_close(restored(probs, member), want(probs, member))


def test_forward_is_replaced_if_asked_and_calibration_can_be_repeated(tmp_path):
    module, data = Segmenter(), pictures(24, 1)
    callback, images, member = CalibrationCallback(head(), loader(data), replace_forward=True), *data.tensors[::2]
    run = trainer(tmp_path, callback)
    run.fit(module, loader(pictures(16)))
    assert torch.equal(module(images, member), callback.head(Segmenter.forward(module, images), member))
    first = {k: v.clone() for k, v in callback.head.state_dict().items()}
    assert callback.calibrate(run, module) is callback.head  # sees the scores, not the masks of the replaced forward
    assert all(torch.equal(v, first[k]) for k, v in callback.head.state_dict().items())
    callback.calibrate(run, module, loader(pictures(24, 5)))
    assert same(callback.head, fitted_by_hand(module, pictures(24, 5)))


def test_a_replaced_forward_is_the_modules_own_while_it_trains_again(tmp_path):
    """In a second fit, and in one that goes on from a checkpoint; the end of each replaces it again, whether it trained or not."""
    module, data = Validated(), pictures(24, 1)
    images, _, member = data.tensors

    def fit(epochs, **options):
        callback = CalibrationCallback(head(), loader(data), replace_forward=True)
        saver = ModelCheckpoint(tmp_path, save_last=True)
        run = trainer(tmp_path, callback, saver, max_epochs=epochs, enable_checkpointing=True)
        run.fit(module, loader(pictures(16)), loader(pictures(8)), **options)
        assert torch.equal(module.eval()(images, member), callback.head(Segmenter.forward(module, images), member))
        module.train()

    fit(1)
    fit(2)
    fit(3, ckpt_path=tmp_path / "last.ckpt")
    fit(3, ckpt_path=tmp_path / "last.ckpt")  # nothing is left to train


@pytest.mark.parametrize("options", [{"precision": "bf16-mixed"}, {"accumulate_grad_batches": 3}, {"max_epochs": 2}], ids=str)
def test_trainer_options(options, tmp_path):
    module, data, callback = Segmenter(), pictures(30, 2), CalibrationCallback(head(), loader(pictures(30, 2), 7))
    trainer(tmp_path, callback, **options).fit(module, loader(pictures(16)))
    assert same(callback.head, fitted_by_hand(module, data, torch.bfloat16 if "precision" in options else None))


class Prepared(Validated):
    """Its hooks add 1 to the images before they move to the device, and double them there."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 1, *batch[1:]]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] * 2, *batch[1:]]

    def test_step(self, batch, index) -> None:
        self.log("loss", self.step(batch))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "64-true"])
def test_batches_are_prepared_as_in_the_trainers_own_loops(precision, tmp_path):
    """Once each: in the precision of the module, and by its hooks, for calibration and for a monitor."""
    module, data = Prepared(), pictures(40, 1)
    callback = CalibrationCallback(head(), loader(data, 10))
    trainer(tmp_path, callback, precision=precision).fit(module, loader(pictures(16)), loader(pictures(16)))
    dtype = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "64-true": torch.float64}[precision]
    images, masks, member = data.tensors
    with torch.no_grad():
        scores = module.eval().to(dtype)((images.to(dtype) + 1) * 2)
    assert same(callback.head, head().fit(scores, masks, member))
    monitor, alone = gmc.Monitor(callback.head, alpha=0.05), gmc.Monitor(callback.head, alpha=0.05)
    trainer(tmp_path, MonitorCallback(monitor), precision=precision).test(module, loader(data, 10), verbose=False)
    for part in zip(*(t.split(10) for t in (scores, masks, member)), strict=True):
        alone.update(*part)
    torch.testing.assert_close(monitor.log_evidence(), alone.log_evidence())


def test_loggers_get_numbers_and_a_figure(tmp_path):
    pytest.importorskip("tensorboard")
    loggers = [CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "tb")]
    callback = CalibrationCallback(head(), loader(pictures(24, 1)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="tensorboard|google|tensorflow|numpy")
        trainer(tmp_path, callback, logger=loggers).fit(Segmenter(), loader(pictures(16)))
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(loggers[1].log_dir)
        events.Reload()
    text = (Path(loggers[0].log_dir) / "metrics.csv").read_text()
    for key in ("calibration/worst_before", "calibration/worst_after", "calibration/before/left", "calibration/after/right"):
        assert key in text and key in events.Tags()["scalars"]
    worst = events.Scalars("calibration/worst_after")[0].value
    assert worst == pytest.approx(float(callback.head.report.violations_after.abs().max()), rel=1e-5)
    assert "calibration/violations" in events.Tags()["images"]


def test_the_worst_group_can_be_watched(tmp_path):
    callback = CalibrationCallback(head(), loader(pictures(24, 1)), monitor=True)
    stop = EarlyStopping("calibration/worst", patience=1, min_delta=10.0)
    saver = ModelCheckpoint(tmp_path, monitor="calibration/worst")
    module, validation = Validated(), pictures(20, 3)
    run = trainer(tmp_path, callback, stop, saver, max_epochs=5, enable_checkpointing=True, num_sanity_val_steps=1)
    run.fit(module, loader(pictures(16)), loader(validation, 6))
    assert run.current_epoch == 2 and saver.best_model_score is not None  # stopped: nothing improves by 10
    metric = gmc.metrics.for_head(head())
    images, masks, member = validation.tensors
    with torch.no_grad():
        metric.update(module.eval()(images), masks, member)
    assert float(run.callback_metrics["calibration/worst"]) == pytest.approx(float(metric.compute()), abs=1e-5)


def test_a_monitor_is_fed_with_test_batches(tmp_path):
    class Tested(Segmenter):
        def test_step(self, batch, index) -> None:
            self.log("loss", self.step(batch))

    module, data = Tested(), pictures(40, 1)
    images, masks, member = data.tensors
    with torch.no_grad():
        fitted = head().fit(module(images), masks, member)
    monitor, alone = gmc.Monitor(fitted, alpha=0.05), gmc.Monitor(fitted, alpha=0.05)
    callback = MonitorCallback(monitor)
    run = trainer(tmp_path, callback)
    run.test(module, loader(data, 10), verbose=False)
    for part in zip(*(t.split(10) for t in data.tensors), strict=True):
        with torch.no_grad():
            alone.update(module(part[0]), *part[1:])
    torch.testing.assert_close(monitor.log_evidence(), alone.log_evidence())
    assert float(run.callback_metrics["monitor/evidence"]) == pytest.approx(alone.evidence, rel=1e-5)
    again = MonitorCallback(gmc.Monitor(fitted, alpha=0.05))
    again.load_state_dict(callback.state_dict())
    assert int(again.monitor.examples) == 40 and callback.state_key == "MonitorCallback[monitor]"
    with pytest.raises(TypeError, match="`monitor` must be"):
        MonitorCallback(fitted)


@pytest.mark.parametrize("key", [True, False])
def test_a_monitor_of_learned_groups_takes_their_features(tmp_path, key):
    """By the batch's key, or by a function of the inputs; without them an error says so."""

    class Scored(LightningModule):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full((len(x),), 0.5)

        def test_step(self, batch, index) -> None:
            pass

    x = torch.rand(400, 2, generator=torch.Generator().manual_seed(0))
    y = torch.rand(400, generator=torch.Generator().manual_seed(1)) < torch.where(x[:, 0] < 0.3, 0.9, 0.3)
    fitted = gmc.ProbabilityHead(alpha=0.05, learn=gmc.Trees(1)).fit(torch.full((400,), 0.5), y, features=x)
    rows = [{"input": a, "labels": b, "about": a} for a, b in zip(x, y, strict=True)]
    monitor, alone = gmc.Monitor(fitted), gmc.Monitor(fitted)
    callback = MonitorCallback(monitor, features="about" if key else lambda inputs: inputs)
    trainer(tmp_path, callback).test(Scored(), loader(rows, 100), verbose=False)
    for a, b in zip(x.split(100), y.split(100), strict=True):
        alone.update(torch.full((100,), 0.5), b, features=a)
    torch.testing.assert_close(monitor.log_evidence(), alone.log_evidence())
    assert int(monitor.examples) == 400
    with pytest.raises(ValueError, match="features"):
        trainer(tmp_path, MonitorCallback(gmc.Monitor(fitted))).test(Scored(), loader(rows, 100), verbose=False)


def test_the_loader_may_come_from_the_datamodule(tmp_path):
    class Data(LightningDataModule):
        def train_dataloader(self):
            return loader(pictures(16))

        def calibration_dataloader(self):
            return loader(pictures(24, 1))

    callback, module = CalibrationCallback(head()), Segmenter()
    trainer(tmp_path, callback).fit(module, datamodule=Data())
    assert same(callback.head, fitted_by_hand(module, pictures(24, 1)))
    with pytest.raises(ValueError, match="no calibration data: .*calibration_dataloader"):
        trainer(tmp_path, CalibrationCallback(head())).fit(Segmenter(), loader(pictures(16)))


class Rows(torch.utils.data.Dataset):
    """Examples as dicts."""

    def __init__(self, **columns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, i: int) -> dict:
        return {key: value[i] for key, value in self.columns.items()}


def test_a_batch_that_is_not_understood_is_named(tmp_path):
    images, masks, member = pictures(8).tensors
    for columns, message in [
        ({"foto": images, "mask": masks}, "no input for the model in the batch: it has the keys 'foto', 'mask'"),
        ({"image": images, "groups": member}, "the batch has no masks for a ThresholdHead"),
        ({"image": images, "mask": masks}, "the batch has the keys 'image', 'mask'. Pass the membership"),
    ]:
        callback = CalibrationCallback(head(), loader(Rows(**columns)))
        with pytest.raises(ValueError, match=message):
            callback.calibrate(trainer(tmp_path), Segmenter())
        assert not callback.head.is_fitted
    callback = CalibrationCallback(
        head(), loader(Rows(foto=images, mask=masks, site=member)), gmc.Adapter(inputs="foto"), groups="site"
    )
    assert callback.calibrate(trainer(tmp_path), Segmenter()).is_fitted
    with pytest.raises(ValueError, match="`groups` = 'side' is not a key of the batch, which has 'foto', 'mask', 'site'"):
        CalibrationCallback(head(), callback.dataloader, gmc.Adapter(inputs="foto"), groups="side").calibrate(
            trainer(tmp_path), Segmenter()
        )


def test_a_failed_calibration_leaves_the_head_as_it_was(tmp_path):
    callback, module = CalibrationCallback(head(), loader(pictures(24, 1))), Segmenter()
    callback.calibrate(trainer(tmp_path), module)
    before = {k: v.clone() for k, v in callback.head.state_dict().items()}
    with pytest.raises(ValueError, match="no input"):
        callback.calibrate(trainer(tmp_path), module, loader(Rows(foto=torch.rand(4, 3, 8, 8))))
    assert callback.head.is_fitted and all(torch.equal(v, before[k]) for k, v in callback.head.state_dict().items())


def test_checkpoints_of_other_heads_are_refused(tmp_path):
    callback = CalibrationCallback(head(), loader(pictures(24, 1)))
    run = trainer(tmp_path, callback)
    run.fit(Segmenter(), loader(pictures(16)))
    run.save_checkpoint(tmp_path / "m.ckpt")
    with pytest.raises(ValueError, match="was made with"):
        CalibrationCallback(head(jitter=0.1)).load_state_dict(callback.state_dict())
    with pytest.raises(ValueError, match="holds a ThresholdHead, but this callback has a"):
        CalibrationCallback(gmc.baselines.Unprocessed(0.1, groups=GROUPS)).load_state_dict(callback.state_dict())
    with pytest.raises(ValueError, match="reads up to"):
        CalibrationCallback(head()).load_state_dict(callback.state_dict() | {"schema": 99})
    with pytest.raises(ValueError, match="no head named 'other'"):
        head_from_checkpoint(tmp_path / "m.ckpt", "other")
    with pytest.raises(TypeError, match="unknown arguments"):
        CalibrationCallback(head(), steps=3)
    assert same(head_from_checkpoint(tmp_path / "m.ckpt"), callback.head)


class Reader(LightningModule):
    """A masked or causal language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None):
        return self.model(input_ids=input_ids, attention_mask=attention_mask)

    def training_step(self, batch, index) -> Tensor:
        return self.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("kind", ["masked", "causal"])
def test_language_model(kind, tmp_path):
    module = Reader(language_model(kind))
    ids = torch.randint(5, 50, (40, 6))
    ids[:, 3] = 4  # the mask
    member = torch.arange(40)[:, None] % 2 == torch.arange(2)
    ids[member[:, 0], 1] = 7
    seen = torch.ones_like(ids)
    seen[::3, 5] = 0
    training, data = (loader(Rows(input_ids=ids, attention_mask=seen, groups=member)) for _ in range(2))
    gentle = gmc.DistributionHead({"jobs": [10, 11, 12]}, 1e-4, GROUPS)
    adapter = gmc.Adapter(mask_token_id=4) if kind == "masked" else gmc.Adapter(position="last")
    callback = CalibrationCallback(gentle, data, adapter)
    run = trainer(tmp_path, callback)
    run.fit(module, training)
    with torch.no_grad():
        logits = module.eval()(ids, seen).logits
        place = torch.full((40,), 3) if kind == "masked" else torch.where(seen[:, 5] == 1, 5, 4)
        want = gmc.DistributionHead({"jobs": [10, 11, 12]}, 1e-4, GROUPS).fit(logits[torch.arange(40), place], member)
        assert same(callback.head, want)
        output = module.calibrated(ids, seen, member)
        assert type(output) is type(module(ids, seen))
        here = nn.functional.one_hot(place, 6).bool()
        torch.testing.assert_close(output.logits[here], want(logits[here], member))
        torch.testing.assert_close(output.logits[~here], logits[~here])  # no promise was made for other positions
    run.save_checkpoint(tmp_path / "lm.ckpt")
    assert same(head_from_checkpoint(tmp_path / "lm.ckpt"), want)


def test_the_training_data_are_no_calibration_data(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Conv2d(1, 1, 1)

        def forward(self, x):
            return self.net(x).sigmoid()

        def training_step(self, batch, index):
            return torch.nn.functional.binary_cross_entropy(self(batch[0]), batch[1].float())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def data():
        return torch.utils.data.TensorDataset(torch.randn(16, 1, 4, 4), torch.rand(16, 1, 4, 4) < 0.5)

    train, held_out = data(), data()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    for calibration in (train, held_out):
        callback = gmc.lightning.CalibrationCallback(
            gmc.ThresholdHead(0.1, 0.2), torch.utils.data.DataLoader(calibration, batch_size=8)
        )
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=1, log_every_n_steps=1, default_root_dir=tmp_path, callbacks=[callback], **quiet
        )
        loader = torch.utils.data.DataLoader(train, batch_size=8)  # warnings are errors here: the second round gives none
        if calibration is train:
            with pytest.warns(UserWarning, match="the calibration loader holds the training data"):
                trainer.fit(Module(), loader)
        else:
            trainer.fit(Module(), loader)
        assert callback.head.is_fitted


# -- two processes -----------------------------------------------------------------------------------------------------------


def test_a_share_of_a_loader_alone_is_the_loader():
    data = loader(pictures(5))
    assert shard(data) is data


def spawn(what: str, folder: Path, seconds: float = 170) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "gmctest.lightning_models", what, str(folder)]
    started = subprocess.Popen(
        command,
        env=subprocess_env(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = started.communicate(timeout=seconds)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, 9)  # our own session: the trainer and its ranks
            started.wait()
    return subprocess.CompletedProcess(command, started.returncode, out, err)


def test_ddp_spawn_ends_with_the_state_of_one_process(tmp_path):
    """25 examples on 2 ranks: DistributedSampler would repeat one. A stream has no indices to share out."""
    done = spawn("spawn", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    weights, states, metrics = torch.load(tmp_path / "out.pt")
    module = Segmenter()
    module.load_state_dict(weights)
    want = fitted_by_hand(module, pictures(25, 2)).state_dict()
    assert len(states) == 4
    for found in states:
        for key in want:
            torch.testing.assert_close(found[key], want[key], rtol=0, atol=1e-6)
    metric = gmc.metrics.for_head(head())
    images, masks, member = pictures(8, 4).tensors
    with torch.no_grad():
        metric.update(module(images), masks, member)
    torch.testing.assert_close(metrics["calibration/worst"], metric.compute(), atol=1e-5, rtol=0)


def test_ddp_with_a_killed_rank_ends(tmp_path):
    done = spawn("killed", tmp_path)
    assert done.returncode != 0 and "SIGKILL" in done.stderr
    assert not (tmp_path / "out.pt").exists()


class Keyed(torch.utils.data.Dataset):
    """Batches with keys: the model's inputs, the truth, groups, and who was photographed."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, object]:
        images, masks, member = self.data[index]
        return {"x": images, "masks": masks, "groups": member, "patient": f"p{index // 3}"}


def test_clusters_are_a_batch_key(tmp_path):
    smp = pytest.importorskip("segmentation_models_pytorch")
    module = Segmenter(smp.Unet("resnet18", encoder_weights=None, encoder_depth=3, decoder_channels=(16, 8, 8)))
    data = pictures(24, 1)
    keyed = torch.utils.data.DataLoader(Keyed(data), batch_size=8)
    adapter = gmc.Adapter(inputs="x", target="masks")
    callback = CalibrationCallback(gmc.ThresholdHead(0.1, None, GROUPS), keyed, adapter, clusters="patient")
    trainer(tmp_path, callback).fit(module, loader(pictures(16)))
    images, masks, member = data.tensors
    with torch.no_grad():
        scores = type(module).forward(module.eval(), images)
    told = gmc.ThresholdHead(0.1, None, GROUPS).fit(scores, masks, member, clusters=[f"p{i // 3}" for i in range(24)])
    assert same(callback.head, told)
    wrong = CalibrationCallback(head(), loader(data), clusters="patient")
    with pytest.raises(ValueError, match="`clusters` = 'patient' is not a key of the batch"):
        trainer(tmp_path, wrong).fit(module.train(), loader(pictures(16)))
    with pytest.raises(TypeError, match="`clusters` must be a batch key"):
        CalibrationCallback(head(), clusters=3)
