"""What is public, and which of it the fuzz entries call: found out by watching their calls, not by a list."""

import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torchgmc as gmc

ROOT = Path(gmc.__file__).parent
#: Modules that users are sent to by README, notebooks and docstrings, beside the names of ``torchgmc`` itself.
MODULES = (
    *("baselines", "conformity", "datasets", "distributed", "export", "func", "lightning", "mappings", "metrics"),
    *("plots", "projections", "report", "text", "theory"),
)
#: Public and without an entry of its own, and why.
EXEMPT = {
    "abstract": "Contract.calibrate Contract.observe Contract.solve_differentiably Contract.values Mapping.potential Mapping.value",
    "called by the package, on arguments that are checked before; public so that it can be overridden, scripted or read": (
        "Adapter.activate Adapter.apply Adapter.at_position Adapter.find Adapter.last Adapter.replace Adapter.scores "
        "Adapter.raw CalibratedModel.run PredictionSets.check_output _Conformal.__init__ _Conformal.check_output "
        "_Conformal.thresholds CalibratedModel.features "
        "CalibratedModel.__init__ CalibratedModel.apply_head CalibratedModel.placed DistributionHead.shift GMCHead.direction "
        "State.differences State.same_state Watch.__init__ CalibratedModel.answers DistributionHead.adjusted "
        "Groups.__init__ Contract.__init__ Head.membership MonotoneRisk.curves MonotoneRisk.values ProbabilityHead.calibrated "
        "ProbabilityHead.coordinates TreeHead.answer_levels Centered.potential Centered.value MissRate.potential "
        "MissRate.value Pinball.potential Pinball.value Residual.potential Residual.value mappings.mean"
    ),
    "a checkpoint of a whole training run, read as by head_from_checkpoint": "lightning.restore",
    "called by Lightning's trainer": (
        "MonitorCallback.load_state_dict MonitorCallback.on_test_batch_end MonitorCallback.on_test_epoch_end "
        "CalibrationCallback.attach CalibrationCallback.calibrate CalibrationCallback.load_state_dict "
        "CalibrationCallback.on_fit_start CalibrationCallback.on_fit_end CalibrationCallback.on_load_checkpoint "
        "CalibrationCallback.on_train_end "
        "CalibrationCallback.on_validation_batch_end CalibrationCallback.on_validation_epoch_end "
        "CalibrationCallback.on_validation_epoch_start CalibrationCallback.on_validation_start CalibrationCallback.setup"
    ),
    "between processes": (
        "distributed.agree distributed.collected distributed.extremes distributed.from_first distributed.moved "
        "distributed.pack distributed.pooled distributed.reduce distributed.rows_stay distributed.signature "
        "distributed.together distributed.total distributed.totals distributed.unpack"
    ),
    "parts of figures and pages, for those who build their own": (
        "plots.new_figure plots.png plots.set_legend plots.set_title report.fitted report.picture report.remake "
        "report.write_file report.write_html"
    ),
    "what CalibratedModel.export passes its arguments to": "export.export",
}
#: Methods that a head gives the package, which calls them on arguments that are checked before.
CONTRACT = (
    "audit_rows audit_summary audit_sums bind bind_batch bind_each check_batch check_groups check_input class_names "
    "check_member check_solver check_state figures flat group_thresholds hold keep lacks_everyone mark_fitted measure members_of "
    "prepare promised register_buffer seen set_extra_state soft start tables write "
    "audit_measures by_name check_features check_use divide grow_trees learned_move misfit prepare_learning problem_of "
    "shown_output finish write_rules write_trees"
)
#: Frames between a caller and the function called: they pass arguments on as they are.
WRAPPERS = ("over_all_ranks", "found_nearby", "__call__")


def public() -> dict[CodeType, str]:
    """Every public function and method that takes an argument, by its code: what has none has nothing to be broken."""
    found: dict[CodeType, str] = {}
    for name in gmc.__all__:
        _add(found, name, getattr(gmc, name))
    for module in MODULES:
        content = importlib.import_module(f"torchgmc.{module}")
        own = [n for n, v in vars(content).items() if not n.startswith("_") and getattr(v, "__module__", "") == content.__name__]
        for name in getattr(content, "__all__", own):
            _add(found, f"{module}.{name}", getattr(content, name))
    for command in ("apply", "audit", "calibrate", "export", "monitor"):
        _add(found, f"cli {command}", getattr(importlib.import_module(f"torchgmc.cli.{command}"), command))
    return found


def _add(found: dict[CodeType, str], name: str, thing: Any) -> None:
    if inspect.isclass(thing):
        for kind in thing.__mro__:
            if kind.__module__.startswith("torchgmc"):
                for method, value in vars(kind).items():
                    shown = method in ("__init__", "__call__", "__getitem__") or not method.startswith("_")
                    _add_function(found, f"{kind.__name__}.{method}", getattr(value, "__func__", value) if shown else None, 1)
    else:
        _add_function(found, name, thing, 0)


def _add_function(found: dict[CodeType, str], name: str, function: Any, own: int) -> None:
    if isinstance(function, types.FunctionType):
        code = inspect.unwrap(function).__code__
        takes = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS))
        if takes > own and code.co_filename.startswith(str(ROOT)):  # not the constructor that a dataclass writes itself
            found.setdefault(code, name)


def not_called(names: dict[CodeType, str], calls: Iterator[Callable[[], Any]]) -> set[str]:
    """Names of the code that no fuzz entry calls itself: calls through other code of the package do not count."""
    left = set(names)

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in left and _from_a_test(frame.f_back):
            left.discard(frame.f_code)

    for call in calls:
        sys.setprofile(watch)
        try:
            call()
        finally:
            sys.setprofile(None)
    return {names[code] for code in left}


def _from_a_test(frame: FrameType | None) -> bool:
    """Is the nearest caller, of torch's and typer's own frames none, in a file of fuzz entries?"""
    while frame is not None:
        file = frame.f_code.co_filename
        passing = frame.f_code.co_name in WRAPPERS or file.startswith(
            tuple(str(ROOT / "cli" / name) for name in ("__init__", "app", "options"))
        )
        if file.startswith(str(ROOT)) and not passing:
            return False
        if Path(file).name.startswith("fuzz_") and Path(file).name != "fuzz_surface.py":
            return True
        frame = frame.f_back
    return False
