"""Parts of the Lightning callback: a rank's share of a loader, a progress bar, the figure, the checkpoints of now."""

import itertools
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from torchgmc import distributed
from torchgmc.engine.extras import require
from torchgmc.heads.base import Head

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from matplotlib.figure import Figure


def shard(loader: Iterable[Any]) -> Iterable[Any]:
    """This rank's share of a loader: over all ranks, every example once (DistributedSampler repeats some to even out).

    The order is that of the first rank's sampler. Of a stream, which has no indices, each rank takes every world-th batch.
    """
    if not distributed.active():
        return loader
    share = slice(dist.get_rank(), None, dist.get_world_size())
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return itertools.islice(loader, share.start, None, share.step)
    how: dict[str, Any]
    if isinstance(loader.sampler, DistributedSampler):
        how = {"batch_size": loader.batch_size, "sampler": range(len(loader.sampler.dataset))[share]}  # type: ignore[arg-type]
    elif loader.batch_size is None and loader.batch_sampler is not None:
        batches = [list(batch) for batch in loader.batch_sampler]
        lengths = distributed.from_first(torch.tensor([len(batch) for batch in batches], dtype=torch.int64)).tolist()
        indices = distributed.from_first(torch.tensor([i for batch in batches for i in batch], dtype=torch.int64))
        how = {"batch_sampler": [part.tolist() for part in torch.split(indices, lengths)][share]}
    else:
        indices = distributed.from_first(torch.tensor(list(loader.sampler), dtype=torch.int64))
        how = {"batch_size": loader.batch_size, "sampler": indices.tolist()[share]}
    same = ("num_workers", "collate_fn", "pin_memory", "worker_init_fn", "multiprocessing_context")
    return DataLoader(loader.dataset, **how, **{name: getattr(loader, name) for name in same})


def figure(head: Head) -> "Figure":
    """Violations before and after, against the promised band."""
    matplotlib = require("matplotlib.figure", extra="report")
    report = head.report
    assert report is not None
    names = head.test_functions().all()
    made: Figure = matplotlib.Figure(figsize=(8, 1.5 + 0.3 * len(names)), layout="constrained")
    axes = made.add_subplot()
    if head.alpha is not None:
        axes.axvspan(-head.alpha, head.alpha, color="#009E73", alpha=0.16, lw=0, label=f"promised: within {head.alpha:g}")
    for table, mark, color, label in (
        (report.violations_before, "o", "#D55E00", "before"),
        (report.violations_after, "s", "#0072B2", "after"),
    ):
        axes.plot(table.flatten().tolist(), range(len(names)), mark, color=color, label=label)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("violation")
    axes.legend()
    return made


def progress(trainer: "Trainer", batches: Iterable[Any], name: str) -> Iterable[Any]:
    tqdm = require("tqdm", extra="lightning").tqdm
    shown = trainer.is_global_zero and trainer.progress_bar_callback is not None
    bar: Iterable[Any] = tqdm(batches, desc=name.capitalize(), disable=not shown, leave=False)
    return bar


def checkpoints_of_now(trainer: "Trainer") -> list[str]:
    """Files that hold the weights of this very step, on any logger's folder."""
    now = [one for one in trainer.checkpoint_callbacks if getattr(one, "_last_global_step_saved", -1) == trainer.global_step]
    paths = dict.fromkeys(getattr(one, name, "") for one in now for name in ("_last_checkpoint_saved", "last_model_path"))
    return [path for path in paths if path and os.path.isfile(path) and not os.path.islink(path)]
