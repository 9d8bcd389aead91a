"""Scores of the FASSEG faces: a U-Net trained here, so that no image is scored by a model that saw it or its subject."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgmc.demo.progress import Bar
from torchgmc.demo.progress import train as train_model
from torchgmc.engine.extras import require

DECODER = (128, 64, 32, 32, 16)


def fold_of(faces: Any, folds: int) -> Tensor:
    """Fold that scores each image, ``(n,)``: subjects stay together, and each fold has its share of both sets of photographs.

    With ``folds=1`` the images of the multipose training part, none of whose subjects is among the paper's 118, are fold -1:
    they train one model that scores all the others, and are scored by none.
    """
    subjects = faces.subjects
    if folds == 1:
        outside = [
            s == "multipose" and p == "train" for s, p in zip(faces.metadata["set"], faces.metadata["split"], strict=True)
        ]
        return torch.where(torch.tensor(outside), -1, 0)
    frontal = torch.tensor([name == "frontal" for name in faces.metadata["set"]])
    fold = torch.zeros(len(subjects), dtype=torch.int64)
    for rows in (frontal, ~frontal):
        _, rank = torch.unique(subjects[rows], return_inverse=True)
        fold[rows] = rank % folds
    return fold


def fold_scores(faces: Any, fold: Tensor, k: int, setting: Any, bar: Bar) -> dict[str, Tensor]:
    """Probability of the face at each pixel of the images of fold k, by a model trained on all the others: float16,
    shape ``(n_k, S, S)``."""
    rows, others = (fold == k).nonzero()[:, 0], (fold != k).nonzero()[:, 0]
    text = f"train U-Net {k + 1} of {int(fold.max()) + 1}"
    model = train(faces.images, faces.face, faces.valid, others, setting, bar, text)
    return {"scores": score(model, faces.images, rows, setting.size).half()}


def train(images: Tensor, masks: Tensor, valid: Tensor, rows: Tensor, setting: Any, bar: Bar, text: str) -> nn.Module:
    """A U-Net by AdamW and binary cross-entropy over the pixels of the photographs (what pads them to a square is left out).

    Pictures are mirrored, zoomed, moved and made brighter or darker at random. Same data, setting and number of threads: same
    model.
    """
    smp = require("segmentation_models_pytorch", extra="segmentation")
    weights = None if setting.encoder_weights == "none" else setting.encoder_weights
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setting.training_seed)
        model: nn.Module = smp.Unet(setting.encoder, encoder_weights=weights, decoder_channels=DECODER)
    generator = torch.Generator().manual_seed(setting.training_seed)
    order = torch.cat([rows[torch.randperm(len(rows), generator=generator)] for _ in range(setting.epochs)])
    batches = [batch for batch in torch.split(order, setting.batch_size) if len(batch) == setting.batch_size]

    def loss(batch: Tensor) -> Tensor:
        pictures, target, weight = _augmented(images[batch], masks[batch], valid[batch], setting.size, generator)
        logits = model(pictures.contiguous(memory_format=torch.channels_last))[:, 0]
        return F.binary_cross_entropy_with_logits(logits, target, weight, reduction="sum") / weight.sum()

    return train_model(model.to(memory_format=torch.channels_last), batches, loss, setting.learning_rate, bar, text, cycle=True)


def _augmented(images: Tensor, masks: Tensor, valid: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Pictures (b, 3, size, size), soft masks and weights of the pixels (b, size, size)."""
    n = len(images)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    zoom = 0.6 + 0.4 * draw(n)
    move = torch.zeros(n, 2, 3)
    move[:, 0, 0] = torch.where(draw(n) < 0.5, -zoom, zoom)  # mirrored or not
    move[:, 1, 1] = zoom
    move[:, :, 2] = (2 * draw(n, 2) - 1) * (1 - zoom)[:, None]
    grid = F.affine_grid(move, [n, 1, size, size], align_corners=False)
    pictures = _pixels(images)
    pictures = (pictures - 0.5) * (0.7 + 0.6 * draw(n, 1, 1, 1)) + 0.5 + 0.3 * (draw(n, 1, 1, 1) - 0.5)
    pictures = F.grid_sample(pictures, grid, align_corners=False)
    maps = F.grid_sample(torch.stack([masks, valid], 1).float(), grid, align_corners=False)
    return pictures, maps[:, 0], maps[:, 1]


@torch.inference_mode()
def score(model: nn.Module, images: Tensor, rows: Tensor, size: int) -> Tensor:
    """Probability of each pixel, ``(n, S, S)``: the model works at ``size``, its logits are enlarged."""
    parts = []
    for batch in torch.split(rows, 16):
        small = F.interpolate(_pixels(images[batch]), size=(size, size), mode="bilinear", antialias=True)
        logits = model(small.contiguous(memory_format=torch.channels_last))
        parts.append(F.interpolate(logits, size=images.shape[-2:], mode="bilinear")[:, 0].sigmoid())
    return torch.cat(parts)


def _pixels(images: Tensor) -> Tensor:
    return images.float() / 255
