"""Calibration as part of training with Lightning (extra ``lightning``)."""

import contextlib
import itertools
import json
import logging
import os
import pickle
import re
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed as dist, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from torchgmc import distributed, plots
from torchgmc.deploy import io
from torchgmc.deploy.adapters import INPUTS, Adapter, Batch, adapt
from torchgmc.deploy.attach import CalibratedModel, ManyHeads, first_input
from torchgmc.engine import checks
from torchgmc.engine.extras import require
from torchgmc.engine.modes import evaluating
from torchgmc.heads.base import Head
from torchgmc.monitor import Monitor

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from matplotlib.figure import Figure
else:
    Callback = require("lightning.pytorch", extra="lightning").Callback

__all__ = ["CalibrationCallback", "MonitorCallback", "head_from_checkpoint", "restore"]

#: Violations are logged one by one up to this many; the worst always.
MAX_LOGGED = 64
log = logging.getLogger(__name__)


class CalibrationCallback(Callback):
    """Calibrates a module when its training ends.

    The calibration loader goes through the module in eval and inference mode, under the trainer's precision, on every rank of
    the strategy (each example once); ``head`` observes, calibrates, and is attached: ``pl_module.calibrated``. Violations
    before and after go to every logger, with a figure if the logger takes one. The head is saved in and restored from
    checkpoints; checkpoints that already hold the final weights are rewritten with the fitted head. Without a trainer,
    ``gmc.lightning.restore(Module.load_from_checkpoint(path), path)`` attaches it again.

    Several callbacks need different names: ``pl_module.calibrated`` then has all heads (as :func:`torchgmc.attach` of several),
    ``pl_module.calibrations[name]`` each. One batch is read before training starts, so that a wrong adapter is found then.

    It runs in ``on_train_end``, where the module is still on its device and the process group is alive.

    Args:
        head: the head to fit.
        dataloader: calibration data: a loader, or None for ``calibration_dataloader()`` of the datamodule or the module.
        adapter: how to read scores from the output and how to split a batch; see :class:`~torchgmc.Adapter`.
        groups: a batch key, or a module that computes the membership from the model's input; by default the batch's ``groups``.
        clusters: a batch key: which examples belong together (:meth:`Head.fit`'s ``clusters``), e.g. the patient of each image.
            The model does not see it.
        features: for a head made with ``learn``: a batch key, or a module or function that computes them from the model's
            (first) input. The model does not see the key, unless it is its input.
        replace_forward: make ``pl_module(...)`` itself return the calibrated result.
        monitor: also measure the violations in each validation epoch, and log ``"<name>/worst"`` for EarlyStopping or
            ModelCheckpoint to watch.
        sharded: the loader already gives every rank its own examples; by default each rank takes its share of them.
        name: prefix of what is logged.
        options: of ``head.fit_batches``, e.g. ``solver="paper"``.

    Example:
        >>> callback = CalibrationCallback(gmc.ThresholdHead(0.075, 0.005, ["female", "male"]), monitor=True)
        >>> callback.state_key
        'CalibrationCallback[calibration]'
    """

    def __init__(
        self,
        head: Head,
        dataloader: Iterable[Any] | None = None,
        adapter: Adapter | None = None,
        groups: str | nn.Module | None = None,
        replace_forward: bool = False,
        monitor: bool = False,
        sharded: bool = False,
        name: str = "calibration",
        clusters: str | None = None,
        features: str | Callable[..., Tensor] | None = None,
        **options: Any,
    ) -> None:
        checks.kind("head", head, Head, "a torchgmc head")
        if unknown := set(options) - {"solver", "eta", "max_iter"}:
            raise TypeError(f"unknown arguments {sorted(unknown)}; `head.calibrate` takes solver, eta and max_iter.")
        checks.kind("dataloader", dataloader, Iterable | None, "a loader of batches")
        checks.kind("adapter", adapter, Adapter | None, "an Adapter")
        checks.kind("groups", groups, str | nn.Module | None, "a batch key or a module")
        checks.kind("clusters", clusters, str | None, "a batch key")
        checks.kind("features", features, str | Callable | None, "a batch key, a module or a function")
        checks.text("name", name)
        head.check_solver(options.get("solver", "exact"), options.get("eta"), options.get("max_iter"))
        self._head, self.dataloader, self.groups, self.clusters, self.features = head, dataloader, groups, clusters, features
        self.adapter = adapter or Adapter()
        self.replace_forward, self.monitor, self.sharded = replace_forward, monitor, sharded
        self.name, self.options = name, options
        self.metric: Any = None
        self._captured: Any = None
        self._hook: Any = None
        self._handover: Path | None = None
        self._owner = os.getpid()

    @property
    def head(self) -> Head:
        """The head; fitted after ``trainer.fit``, by spawned processes too."""
        if os.getpid() == self._owner and self._handover is not None and self._handover.is_file():
            self.load_state_dict(torch.load(self._handover, weights_only=True))
            self._handover.unlink()
        return self._head

    def __getstate__(self) -> dict[str, Any]:
        """Pickled to start a process: agree on where it leaves the fitted head."""
        if self._handover is None:
            folder = tempfile.mkdtemp(prefix="torchgmc-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self._handover = Path(folder) / "head.pt"
        return self.__dict__.copy()

    # -- training ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Own memory in a spawned process (all of them share the parent's), and the restored head attached."""
        for name, buffer in list(self._head.named_buffers(recurse=False)):
            if buffer.is_shared():  # type: ignore[no-untyped-call]
                setattr(self._head, name, buffer.clone())
        self._head.to(pl_module.device)
        if self._head.is_fitted:
            self.attach(pl_module)

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Raise early if something is missing: one batch as far as the statistics, of a loader that can be read again."""
        loader = self._find_loader(trainer, pl_module)
        pl_module.__dict__.pop("forward", None)  # of an earlier fit, or of the checkpoint: training is of the module's own
        self._head.to(pl_module.device)
        kinds = require("lightning.pytorch.strategies", extra="lightning")
        whole = isinstance(trainer.strategy, kinds.SingleDeviceStrategy | kinds.DDPStrategy)  # each process has all weights
        sharded = isinstance(trainer.strategy, kinds.DeepSpeedStrategy)  # a DDPStrategy too
        if not whole or sharded or not isinstance(loader, DataLoader | Sequence):
            return
        twin = self._head.twin()
        twin.reset()
        with torch.random.fork_rng(devices=[]), evaluating(pl_module):
            for batch in itertools.islice(iter(loader), 1):
                twin.observe(**self._observation(trainer, pl_module, batch))

    def on_validation_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """A restored head follows the module to its device."""
        self._head.to(pl_module.device)

    on_test_start = on_predict_start = on_validation_start

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Calibrate; rewrite checkpoints of these very weights."""
        loader = self._find_loader(trainer, pl_module)
        data = getattr(loader, "dataset", None)
        if data is not None and data is getattr(trainer.train_dataloader, "dataset", None):
            warnings.warn(
                "the calibration loader holds the training data, where the model is overconfident, so what is fitted there "
                "does not hold on fresh data. Pass CalibrationCallback a `dataloader` of held-out examples.",
                stacklevel=1,
            )
        self.calibrate(trainer, pl_module, loader)
        now = [one for one in trainer.checkpoint_callbacks if getattr(one, "_last_global_step_saved", -1) == trainer.global_step]
        paths = dict.fromkeys(getattr(one, name, "") for one in now for name in ("_last_checkpoint_saved", "last_model_path"))
        for path in paths:  # on any logger's folder
            if path and os.path.isfile(path) and not os.path.islink(path):
                trainer.save_checkpoint(path)

    def on_fit_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """A restored head answers again, where nothing was left to train."""
        if self.replace_forward and self._head.is_fitted:
            self.attach(pl_module)

    def calibrate(self, trainer: "Trainer", pl_module: "LightningModule", dataloader: Iterable[Any] | None = None) -> Head:
        """Calibrate on demand, e.g. after loading the best weights; returns the fitted head."""
        loader = self._find_loader(trainer, pl_module) if dataloader is None else dataloader
        pl_module.__dict__.pop("forward", None)
        head = self._head.to(pl_module.device)
        tqdm = require("tqdm", extra="lightning").tqdm
        shown = trainer.is_global_zero and trainer.progress_bar_callback is not None

        def batches() -> Iterator[dict[str, Any]]:  # sharded inside the fit, where an error is raised on all ranks
            for batch in tqdm(loader if self.sharded else shard(loader), self.name.capitalize(), disable=not shown, leave=False):
                yield self._observation(trainer, pl_module, batch)

        with evaluating(pl_module):
            head.fit_batches(batches(), **self.options)
        if head.report is not None:
            log.info("%s", head.report)
        self.attach(pl_module)
        self._log(trainer)
        if os.getpid() != self._owner and trainer.is_global_zero and self._handover is not None:
            torch.save(self.state_dict(), self._handover)
        return head

    def attach(self, pl_module: "LightningModule") -> CalibratedModel:
        """``pl_module.calibrated`` (and its ``forward``, if asked); returns the calibrated model."""
        usual = self.adapter.groups if isinstance(self.adapter.groups, str) else None
        groups = usual if self.groups is None else self.groups
        features = None if isinstance(self.features, str) else self.features
        model = CalibratedModel(_Plain(pl_module), self.head, groups, adapt(pl_module, self.head, self.adapter), features)
        _remember(pl_module, self.name, model)
        if self.replace_forward:
            pl_module.__dict__["forward"] = model.forward
        return model

    def _observation(self, trainer: "Trainer", pl_module: "LightningModule", batch: Any, prepared: bool = False) -> Any:
        """Arguments of ``observe`` for one batch; the trainer has ``prepared`` those of its own loops."""
        together = {} if self.clusters is None else {"clusters": _entry(batch, "clusters", self.clusters)}
        if not prepared:
            batch = pl_module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch))
            batch = trainer.strategy.batch_to_device(batch, pl_module.device, 0)
        divided = self._divide(batch, pl_module.device)
        with torch.inference_mode(), trainer.precision_plugin.forward_context():
            output = _Plain(pl_module)(*divided.args, **divided.kwargs)
        found = self._arguments(pl_module, batch, divided, output)
        # Statistics may not keep a tensor made in inference mode.
        kept = {key: value.clone() if isinstance(value, Tensor) and value.is_inference() else value for key, value in found.items()}
        return kept | together

    def _arguments(self, pl_module: "LightningModule", batch: Any, divided: Batch, output: Any) -> dict[str, Any]:
        """What the head takes of a batch and the module's output."""
        found = adapt(pl_module, self._head, self.adapter).observation(self._head, output, divided)
        if self.features is not None:
            found["features"] = _entry(batch, "features", self.features, divided)
        return found

    def _divide(self, batch: Any, device: torch.device) -> Batch:
        if isinstance(batch, Mapping):
            inputs = INPUTS if self.adapter.inputs is None else self.adapter.inputs
            shown = [inputs] if isinstance(inputs, str | int) else inputs
            unseen = [key for key in (self.clusters, self.features) if isinstance(key, str) and key not in shown]
            batch = {key: value for key, value in batch.items() if key not in unseen} if unseen else batch
        divided = self.adapter.split(batch)
        if not self._head.needs_groups and not self._head.may_take_groups:
            return divided
        source = self.groups.to(device) if isinstance(self.groups, nn.Module) else self.groups
        groups = divided.groups if source is None else _entry(batch, "groups", source, divided)
        if groups is None and self._head.needs_groups:
            seen = f"the keys {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else f"{len(batch)} entries"
            raise ValueError(
                f"no groups for the {self._head.num_groups} groups of the head: the batch has {seen}. Pass the membership as "
                "third entry or under 'groups', name its key with groups='key', or pass a module that computes it."
            )
        return divided._replace(groups=groups)

    def _find_loader(self, trainer: "Trainer", pl_module: "LightningModule") -> Iterable[Any]:
        if self.dataloader is not None:
            return self.dataloader
        for owner in (getattr(trainer, "datamodule", None), pl_module):
            make = getattr(owner, "calibration_dataloader", None)
            if make is not None:
                return make()  # type: ignore[no-any-return]
        raise ValueError(
            "no calibration data: pass `dataloader` to CalibrationCallback, or give the datamodule (or the module) a method "
            "`calibration_dataloader`. Do not use the training data: the model is overconfident there."
        )

    # -- watching ----------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Start monitoring; the forward hook saves a second pass through the model."""
        if not self.monitor or trainer.sanity_checking:
            return
        from torchgmc.metrics import for_head

        self.metric = for_head(self._head).to(pl_module.device)
        self._hook = pl_module.register_forward_hook(lambda _, __, output: setattr(self, "_captured", output))

    def on_validation_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        """Add a batch to the monitor."""
        if not self.monitor or trainer.sanity_checking:
            return
        divided = self._divide(batch, pl_module.device)
        output, self._captured = self._captured, None
        if output is None:  # validation_step did not call the module itself
            with trainer.precision_plugin.forward_context():
                output = _Plain(pl_module)(*divided.args, **divided.kwargs)
        self.metric.update(**self._arguments(pl_module, batch, divided, output))

    def on_validation_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Log the worst violation of the epoch."""
        if not self.monitor or trainer.sanity_checking:
            return
        self._hook.remove()
        pl_module.log(f"{self.name}/worst", self.metric.compute(), rank_zero_only=False)
        self.metric.reset()

    # -- logs ----------------------------------------------------------------------------------------------------------

    def _log(self, trainer: "Trainer") -> None:
        """Violations before and after to every logger; a figure to those that take one."""
        report = self._head.report
        if report is None:
            return
        values: dict[str, float] = {f"{self.name}/converged": float(report.converged)}
        for when, table in (("before", report.violations_before), ("after", report.violations_after)):
            values[f"{self.name}/worst_{when}"] = float(table.abs().max())
            if table.numel() <= MAX_LOGGED:
                named = zip(self._head.test_functions().all(), table.flatten().tolist(), strict=True)
                values |= {f"{self.name}/{when}/{label}": value for label, value in named}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
            if trainer.is_global_zero:
                add = getattr(getattr(logger, "experiment", None), "add_figure", None)
                if add is not None and report.violations_before.numel() <= MAX_LOGGED:
                    with contextlib.suppress(ImportError):  # without matplotlib there is no figure
                        add(f"{self.name}/violations", _figure(self._head), trainer.global_step)
            logger.save()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """Key of the head in a checkpoint."""
        return f"{type(self).__name__}[{self.name}]"

    def state_dict(self) -> dict[str, Any]:
        """The head: kind, configuration and fitted state; plain types and tensors only."""
        body, tensors = io.pack(self._head)
        about = {"adapter": self.adapter.options(), "groups": self.groups if isinstance(self.groups, str) else None}
        return body | {"config": json.dumps(body["config"], default=str), "state": tensors, "attached": json.dumps(about)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The head of a checkpoint into this callback's own."""
        io.check_schema("the checkpoint", state_dict.get("schema", 0))
        kind = self._head.kind()
        if state_dict["head"] != kind:
            raise ValueError(f"the checkpoint holds a {state_dict['head']}, but this callback has a {kind}.")
        own = json.dumps(self._head.config(), sort_keys=True, default=str)
        if json.dumps(json.loads(state_dict["config"]), sort_keys=True) != own:  # an order that matters is in the state
            raise ValueError(f"the head of the checkpoint was made with {state_dict['config']}, but this callback's with {own}.")
        self._head.load_state_dict(state_dict["state"])

    def on_load_checkpoint(self, trainer: "Trainer", pl_module: "LightningModule", checkpoint: dict[str, Any]) -> None:
        """Attach the head that came with the checkpoint."""
        saved = checkpoint.get("callbacks", {}).get(self.state_key)
        if saved is not None:
            self.load_state_dict(saved)
            self.setup(trainer, pl_module, "")


class MonitorCallback(Callback):
    """Feeds a :class:`torchgmc.Monitor` with every test batch (``trainer.test``), and logs its evidence and alarm.

    The monitor keeps its evidence from one call of ``trainer.test`` to the next, and in checkpoints.

    Args:
        monitor: of the head that is attached to the module.
        adapter, groups, features: as for :class:`CalibrationCallback`.
        name: prefix of what is logged: ``"<name>/alarm"`` and ``"<name>/evidence"``.
    """

    def __init__(
        self,
        monitor: Monitor,
        adapter: Adapter | None = None,
        groups: str | nn.Module | None = None,
        name: str = "monitor",
        features: str | Callable[..., Tensor] | None = None,
    ) -> None:
        checks.kind("monitor", monitor, Monitor, "a gmc.Monitor")
        self.monitor, self.name = monitor, checks.text("name", name)
        self._reader = CalibrationCallback(monitor.head, [], adapter, groups, features=features)

    @property
    def state_key(self) -> str:
        """Key of the evidence in a checkpoint."""
        return f"{type(self).__name__}[{self.name}]"

    def state_dict(self) -> dict[str, Any]:
        """The evidence."""
        return dict(self.monitor.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The evidence of a checkpoint."""
        self.monitor.load_state_dict(state_dict)

    def on_test_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        """Add a batch."""
        self.monitor.head.to(pl_module.device)
        self.monitor.to(pl_module.device)
        self.monitor.update(**self._reader._observation(trainer, pl_module, batch, prepared=True))

    def on_test_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Log the evidence, and warn after an alarm."""
        pl_module.log(f"{self.name}/alarm", float(self.monitor.alarm), rank_zero_only=False)
        pl_module.log(f"{self.name}/evidence", self.monitor.evidence, rank_zero_only=False)
        log.log(logging.WARNING if self.monitor.alarm else logging.INFO, "%s", self.monitor.message)


def _saved(path: Path) -> dict[str, Any]:
    """States of calibration callbacks in a checkpoint, by their names; read without unpickling code."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {str(path)!r} to load a head from.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a file of another kind, which raises below
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(f"{path.name!r} is not a readable checkpoint: {str(error).splitlines()[0]}") from error
    found = content.get("callbacks", {}) if isinstance(content, dict) else {}
    named = {str(key): state for key, state in found.items()} if isinstance(found, dict) else {}
    first = "CalibrationCallback["
    return {key[len(first) : -1]: state for key, state in named.items() if key.startswith(first)}


def head_from_checkpoint(path: str | os.PathLike[str], name: str = "calibration", **options: Any) -> Head:
    """The head that a :class:`CalibrationCallback` saved in a Lightning checkpoint, for use without a trainer.

    Args:
        path: the ``.ckpt`` file; read without unpickling code.
        name: the callback's name.
        options: arguments that a file cannot hold, as for :func:`torchgmc.load`.
    """
    checks.text("name", name)
    saved = _saved(checks.path("path", path))
    if name not in saved:
        raise ValueError(
            f"{Path(path).name!r} holds no head named {name!r}; `name` may be {', '.join(map(repr, saved)) or 'nothing'}."
        )
    state = saved[name]
    try:
        body, tensors = {**state, "config": json.loads(state["config"])}, dict(state["state"])
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{Path(path).name!r} holds no usable head: {type(error).__name__}: {error}") from error
    return io.unpack(body, tensors, Path(path).name, **options)


def restore(
    module: "LightningModule",
    path: str | os.PathLike[str],
    adapter: Adapter | None = None,
    groups: str | nn.Module | None = None,
    **options: Any,
) -> CalibratedModel:
    """Attach the heads of a checkpoint to a module that was loaded from it; returns ``module.calibrated``.

    Args:
        module: the result of ``load_from_checkpoint(path)``.
        path: the ``.ckpt`` file; read without unpickling code.
        adapter, groups: as for :class:`CalibrationCallback`, if not those it was saved with (no functions or modules are).
        options: arguments that a file cannot hold, as for :func:`torchgmc.load`.

    Example:
        >>> module = Segmenter.load_from_checkpoint("last.ckpt")  # doctest: +SKIP
        >>> mask = gmc.lightning.restore(module, "last.ckpt")(images, groups)  # doctest: +SKIP
    """
    saved = _saved(checks.path("path", path))
    if not saved:
        raise ValueError(f"{Path(path).name!r} holds no head of a CalibrationCallback.")
    for name, state in saved.items():
        head = head_from_checkpoint(path, name, **options).to(module.device)
        about = json.loads(state.get("attached", "{}"))
        own = adapter or Adapter(**about.get("adapter", {}))
        CalibrationCallback(head, adapter=own, groups=groups or about.get("groups"), name=name).attach(module)
    return module.__dict__["calibrated"]  # type: ignore[no-any-return]


def _remember(module: "LightningModule", name: str, model: CalibratedModel) -> None:
    """``module.calibrations`` and ``module.calibrated``."""
    # Not submodules: they would be part of the module's own state, which must load without this callback.
    known = module.__dict__.setdefault("calibrations", {})
    known[name] = model
    if len(known) > 1:
        parts = {re.sub(r"\W", "_", one): part for one, part in known.items()}
        heads, adapters = ({one: getattr(part, what) for one, part in parts.items()} for what in ("head", "adapter"))
        sources = {part.group_key: part.group_source or part.group_key for part in known.values()}
        features = {one: part.feature_source for one, part in parts.items() if part.takes_features}
        groups = next(iter(sources.values())) if len(sources) == 1 else None
        model = ManyHeads(_Plain(module), heads, adapters, groups, features or None)
    module.__dict__["calibrated"] = model


class _Plain(nn.Module):
    """The module with the ``forward`` of its class, whatever ``replace_forward`` did."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)


def _entry(batch: Any, argument: str, key: Any, divided: Any = None) -> Any:
    """What a batch has under a key, or what a module or function computes from the model's input."""
    if callable(key):
        with torch.no_grad():
            return key(first_input(divided.args, divided.kwargs))
    if not isinstance(batch, Mapping) or key not in batch:
        keys = ", ".join(map(repr, batch)) if isinstance(batch, Mapping) else f"a {type(batch).__name__}, no keys"
        raise ValueError(f"`{argument}` = {key!r} is not a key of the batch, which has {keys}.")
    return batch[key]


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


def _figure(head: Head) -> "Figure":
    """Violations before and after, against the promised band."""
    report, theme, names = head.report, plots.LIGHT, head.test_functions().all()
    assert report is not None
    figure, (axes,) = plots.new_figure(theme, (8, 1.5 + 0.3 * len(names)))
    if head.alpha is not None:
        axes.axvspan(-head.alpha, head.alpha, color=theme.band, alpha=0.16, lw=0, label=f"promised: within {head.alpha:g}")
    for k, (label, table) in enumerate({"before": report.violations_before, "after": report.violations_after}.items()):
        axes.plot(table.flatten().tolist(), range(len(names)), plots.MARKERS[k], color=theme.series[k + 1], label=label)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("violation")
    plots.set_legend(figure, axes, theme)
    return figure
