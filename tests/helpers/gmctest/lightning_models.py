"""What is trained with the callback: a segmenter on made-up pictures, language models, and the trainer.

``python -m gmctest.lightning_models (spawn|killed) FOLDER`` trains with two ranks.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import torchgmc as gmc

pytest.importorskip("lightning.pytorch")
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from torchgmc.lightning import CalibrationCallback, head_from_checkpoint

GROUPS = ["left", "right"]


def pictures(n: int, seed: int = 0) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    member = torch.arange(n)[:, None] % 2 == torch.arange(2)
    masks = torch.rand(n, 1, 8, 8, generator=g) < 0.4
    images = masks + 0.7 * torch.randn(n, 3, 8, 8, generator=g) - member[:, :1, None, None] * 0.5
    return TensorDataset(images, masks, member)


class Segmenter(LightningModule):
    def __init__(self, network: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = network or nn.Conv2d(3, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images).sigmoid()

    def step(self, batch) -> Tensor:
        images, masks, _ = batch
        return nn.functional.binary_cross_entropy(self(images).float(), masks.float())

    def training_step(self, batch, index) -> Tensor:
        return self.step(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Validated(Segmenter):
    def validation_step(self, batch, index) -> None:
        self.log("loss", self.step(batch))


def trainer(folder: Path, *callbacks, **options) -> Trainer:
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False} | options
    return Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        enable_model_summary=False,
        log_every_n_steps=1,
        callbacks=list(callbacks),
        **options,
    )


def head(**options) -> gmc.ThresholdHead:
    return gmc.ThresholdHead(0.1, 0.02, GROUPS, **options)


def loader(data, batch_size: int = 8) -> DataLoader:
    return DataLoader(data, batch_size=batch_size)


def language_model(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "masked":
        config = transformers.BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=16,
        )
        return transformers.BertForMaskedLM(config)
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


class Stream(IterableDataset):
    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self):
        return iter([self.data[i] for i in range(len(self.data))])


class Doomed(Validated):
    """Rank 1 dies in the middle of the calibration."""

    def forward(self, images: Tensor) -> Tensor:
        if self.trainer.fit_loop.done and self.global_rank == 1:
            os.kill(os.getpid(), 9)
        return super().forward(images)


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, folder = sys.argv[1], Path(sys.argv[2])
    module, data = Doomed() if what == "killed" else Validated(), pictures(25, 2)
    callbacks = [
        CalibrationCallback(head(), loader(data, 4), monitor=True),
        CalibrationCallback(head(), loader(Stream(data), 4), name="stream"),
    ]
    saver = ModelCheckpoint(folder, save_last=True)
    strategy = "ddp_fork" if what == "killed" else "ddp_spawn"  # forked ranks need not import everything again
    run = trainer(folder, *callbacks, saver, enable_checkpointing=True, strategy=strategy, devices=2, num_sanity_val_steps=0)
    run.fit(module, loader(pictures(16)), loader(pictures(8, 4)))
    found = [callback.head.state_dict() for callback in callbacks]
    found += [head_from_checkpoint(folder / "last.ckpt", name).state_dict() for name in ("calibration", "stream")]
    torch.save([module.state_dict(), found, run.callback_metrics], folder / "out.pt")
