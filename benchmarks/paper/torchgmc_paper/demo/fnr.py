"""Miss-rate control in segmentation, end to end, in about a minute and a half.

A U-Net learns to find faces on an archive that has few dim, turned, faint or covered ones. In use they are common, and its
miss rate (false negative rate) differs by group. Three ways to choose the threshold are fitted on calibration pictures and
audited on fresh ones: the model's own 0.5, conformal risk control (right on average), and :class:`torchgmc.ThresholdHead`
(right for every group at once).

    $ torchgmc demo
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgmc as gmc
from torchgmc.engine.extras import require
from torchgmc.report import Section, Table, picture
from torchgmc_paper.demo.faces import GROUPS, Faces, draw
from torchgmc_paper.demo.progress import Bar, train
from torchgmc_paper.demo.stage import Found, Page, Result, by_method, fit_and_audit, meaning, percent, show, trained

METHODS = ("unprocessed", "conformal", "GMC")
_FACES = "The picture with the median miss rate under conformal risk control, for each of six combinations of groups."


@dataclass(frozen=True)
class Setting:
    """Sizes of the demo; the defaults are what ``torchgmc demo`` shows."""

    target: float = 0.075
    alpha: float = 0.005
    delta: float = 0.05
    size: int = 64
    num_train: int = 2000
    num_calibration: int = 2500
    num_test: int = 5000
    prevalence: float = 0.05  # of the groups in the training archive, against 1 in use
    epochs: int = 2
    batch_size: int = 32
    learning_rate: float = 3e-3
    encoder: str = "tu-mobilenetv3_small_100"


QUICK = Setting(size=32, num_train=64, num_calibration=200, num_test=200, epochs=1)
"""Everything once, in seconds; the model learns almost nothing."""


@dataclass(frozen=True, kw_only=True)
class DemoResult(Result):
    """What the demo found, on the test pictures.

    Attributes:
        accuracy: share of pixels that are right, by method.
        thresholds: threshold of each combination of groups, most frequent first.
    """

    demo: ClassVar[str] = "fnr"
    standard: ClassVar[Setting] = Setting()
    quick: ClassVar[Setting] = QUICK
    needs: ClassVar[dict[str, str]] = {"segmentation_models_pytorch": "segmentation"}
    accuracy: dict[str, float]
    thresholds: dict[str, float]

    def rows(self) -> list[dict[str, Any]]:
        """One row per group in the order of the head: mass, and by method the risk, the deviation and the verdict."""
        rows = self.by_method("group", GROUPS, risk="risk")
        return [row | {"mass": row["mass"]["GMC"]} for row in rows]  # every method has the same groups

    def findings(self) -> dict[str, Any]:
        """Groups, accuracy and thresholds."""
        return {"groups": self.rows(), "pixel_accuracy": self.accuracy, "thresholds": self.thresholds}

    def __rich__(self) -> Any:
        setting = self.setting

        def numbers(row: dict[str, Any], name: str) -> str:
            return f"{percent(row['risk'][name], 1)} {row['deviation'][name]:+.4f}"

        rows = [([row["group"], percent(row["mass"], 0).rjust(5)], by_method(row, setting.alpha, numbers)) for row in self.rows()]
        return show(
            f"Miss rate by group, target {percent(setting.target, 1)}",
            ["\ngroup", "\nshare"],
            [f"{name}\nmiss deviation" for name in METHODS],
            rows,
            [
                ["worst", *(f"{self.audits[name].max_violation:.4f}" for name in METHODS)],
                ["accuracy", *(percent(self.accuracy[name], 1) for name in METHODS)],
            ],
            f"deviation = share x (miss rate - target); promised: at most {setting.alpha:g}\n"
            + meaning(f"these {setting.num_test} test pictures", setting.delta),
            self.certificate,
        )

    @staticmethod
    def work(setting: Setting, seed: int, bar: Bar) -> Found:
        def painted(num: int, own: int, used: bool) -> Faces:
            return draw(num, setting.size, seed=own, prevalence=1.0 if used else setting.prevalence)

        model, calibration, test = trained(setting, seed, bar, painted, train_unet)
        with bar.clock("score"):
            known = score(model, calibration.images, bar, "score calibration pictures")
            fresh = score(model, test.images, bar, "score test pictures")
        with bar.clock("calibrate and audit"):
            heads = _heads(setting)
            examples = (known, calibration.masks, calibration.groups), (fresh, test.masks, test.groups)
            audits = fit_and_audit(heads, *examples, setting.delta, bar)
            masks = {name: head(fresh, test.groups) for name, head in heads.items()}
        fields = {
            "accuracy": {name: float((mask == test.masks).float().mean()) for name, mask in masks.items()},
            "thresholds": _thresholds(heads["GMC"], test.groups),
        }
        return Found(heads["GMC"], audits, fields, lambda result: _page(result, heads["GMC"], test, masks))


run = DemoResult.run


def train_unet(data: Faces, setting: Setting, seed: int, bar: Bar) -> nn.Module:
    """A small U-Net from scratch: AdamW, binary cross-entropy, a learning rate that warms up and cools down."""
    smp = require("segmentation_models_pytorch", extra="segmentation")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = smp.Unet(setting.encoder, encoder_weights=None, encoder_depth=4, decoder_channels=(64, 32, 16, 16))
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(data.images), generator=generator) for _ in range(setting.epochs)])
    batches = [batch for batch in torch.split(order, setting.batch_size) if len(batch) == setting.batch_size]

    def loss(batch: Tensor) -> Tensor:
        logits = model(data.images[batch].contiguous(memory_format=torch.channels_last)).squeeze(1)  # (b, S, S)
        return F.binary_cross_entropy_with_logits(logits, data.masks[batch].float())

    model = model.to(memory_format=torch.channels_last)
    return train(model, batches, loss, setting.learning_rate, bar, "train the U-Net", cycle=True)


@torch.inference_mode()
def score(model: nn.Module, images: Tensor, bar: Bar, text: str) -> Tensor:
    """Probability of each pixel, shape ``(n, S, S)``."""
    parts = bar.track(torch.split(images, 20), text)
    return torch.cat([model(part.contiguous(memory_format=torch.channels_last)).squeeze(1).sigmoid() for part in parts])


def _heads(setting: Setting) -> dict[str, gmc.ThresholdHead]:
    options: dict[str, Any] = {"target": setting.target, "alpha": setting.alpha, "groups": list(GROUPS)}
    return {
        "unprocessed": gmc.baselines.Unprocessed(threshold=0.5, **options),
        "conformal": gmc.baselines.ConformalRiskControl(**options),
        "GMC": gmc.ThresholdHead(**options),
    }


def _combination(member: Tensor) -> str:
    """Name of one row of the membership."""
    names = [name for name, inside in zip(GROUPS[1:], member[1:].tolist(), strict=True) if inside]
    return " + ".join(names) or "none of the groups"


def _thresholds(head: gmc.ThresholdHead, groups: Tensor) -> dict[str, float]:
    """Threshold of each combination of groups that occurs, most frequent first."""
    patterns, count = torch.unique(groups, dim=0, return_counts=True)
    patterns = patterns[count.argsort(descending=True, stable=True)]
    return dict(zip(map(_combination, patterns), head.threshold(patterns).flatten().tolist(), strict=True))


def _examples(test: Faces, mask: Tensor) -> list[int]:
    """One picture for each of six combinations: the one with the median miss rate under ``mask``, so none is hand-picked."""
    missed = (test.masks & ~mask).flatten(1).sum(1) / test.masks.flatten(1).sum(1).clamp_min(1)
    wanted = ((), (1,), (3,), (4,), (1, 3), (1, 4))
    chosen = []
    for columns in wanted:
        pattern = torch.zeros(len(GROUPS), dtype=torch.bool)
        pattern[[0, *columns]] = True
        rows = (test.groups == pattern).all(1).nonzero().flatten()
        if len(rows):
            chosen.append(int(rows[missed[rows].argsort(stable=True)[len(rows) // 2]]))
    return chosen


def _page(result: DemoResult, head: gmc.ThresholdHead, test: Faces, masks: dict[str, Tensor]) -> Page:
    from torchgmc import plots

    setting = result.setting
    rows = _examples(test, masks["conformal"])
    shown = {name: mask[rows] for name, mask in masks.items()}
    captions = [_combination(test.groups[row]).replace(" + ", " +\n") for row in rows]

    def faces(dark: bool) -> Any:
        return plots.masks(test.images[rows], test.masks[rows], shown, captions=captions, dark=dark)

    looks = picture(faces, _FACES)
    risks = Table(
        ["group", "share", *METHODS],
        [[row["group"], percent(row["mass"], 0), *(percent(row["risk"][name], 1) for name in METHODS)] for row in result.rows()],
        numeric=["share", *METHODS],
    )
    text = "Share of a face's pixels that the mask misses, mean over pictures."
    bars = plots.deviation(result.audits, setting.alpha, title="Deviation of the miss rate from the target, by group")
    limits = plots.thresholds(head, test.groups, title="Threshold of each combination of groups")
    return {"deviation.png": plots.png(bars), "masks.png": looks.png, "thresholds.png": plots.png(limits)}, {
        "title": f"A miss rate of {percent(setting.target, 1)} for every group, not on average",
        "lead": "A U-Net learned to find faces in drawn pictures, few of them dim, turned, faint or covered; in use such "
        f"pictures are common. Its threshold is chosen in three ways on {setting.num_calibration} calibration pictures, and "
        f"each way is audited on {setting.num_test} fresh ones.",
        "sections": [
            Section("Miss rate of each group", [text], [risks]),
            Section("What it looks like", pictures=[looks]),
        ],
    }
