"""Checks of training arguments, for scripts and recipes, before anything is loaded.

They cover settings that ZeRO does not support, and errors that transformers would raise only after the model is
loaded. They do not repeat the checks of `TrainingArguments`.
"""

import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Trainer, get_scheduler
from transformers.integrations import integration_utils
from transformers.training_args import OptimizerNames
from transformers.utils import is_liger_kernel_available

from hf_zero.errors import ConfigError, nearest
from hf_zero.trainer.early_checks import ACTIVATION_CHECKS, SUPPORTED_OPTIMS, Settings


# Reporters that transformers does not check for installation.
UNTOLD = ("azure_ml", "flyte")
NUM_TRIED_STEPS = 1000  # length of a trial schedule if the number of steps is unknown


def check_arguments(settings: Settings) -> None:
    """Raises [`ConfigError`] for the first unsupported setting of parsed training arguments."""
    for check in CHECKS:
        problem = check(settings)
        if problem is not None:
            raise ConfigError(problem)


def check_schedule(settings: Settings) -> None:
    """Creates a trial schedule, because only transformers knows which arguments each kind takes. Call it only if
    Trainer creates the schedule."""
    kind, kwargs = _value(settings["lr_scheduler_type"]), _schedule_kwargs(settings)
    if kwargs and kind in ("constant", "constant_with_warmup"):
        raise ConfigError(f"lr_scheduler_kwargs: {kind} takes none, found {', '.join(kwargs)}; remove them")
    rate = settings["learning_rate"]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
    num_steps = settings["max_steps"] if settings["max_steps"] > 0 else NUM_TRIED_STEPS
    try:
        with warnings.catch_warnings(action="ignore"):  # Trainer's own schedule warns
            get_scheduler(kind, optimizer, 0, num_steps, scheduler_specific_kwargs=kwargs)
    except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
        raise ConfigError(
            f"lr_scheduler_type {kind}: cannot be created with lr_scheduler_kwargs {kwargs} and learning_rate {rate} "
            f"({_reason(error)}); pass the arguments of this schedule only"
        ) from error


def check_output_dir(output_dir: str | None, name: str = "output_dir") -> None:
    """Checks that a folder is writable or can be created, without creating it. Raises [`ConfigError`] otherwise."""
    if not output_dir:
        raise ConfigError(f"{name}: not set; set the folder for the trained model, for example --{name} outputs/mine")
    folder = Path(output_dir).expanduser().absolute()
    try:
        existing = next(path for path in (folder, *folder.parents) if _is_there(path))
    except (OSError, ValueError) as error:  # a name that is too long, or has a null byte
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{name} {output_dir!r}: {reason}; choose another folder") from error
    if not existing.is_dir():
        raise ConfigError(f"{name} {output_dir!r}: {existing} is not a folder; choose a writable folder")
    reason = _unwritable(existing)
    if reason is not None:
        raise ConfigError(
            f"{name} {output_dir!r}: {existing} is not writable for this user ({reason}); choose another folder"
        )


def _supported_optimizer(settings: Settings) -> str | None:
    optim = _value(settings["optim"])
    if optim in SUPPORTED_OPTIMS:
        return None
    return (
        f"optim: {optim} is not known to run on shards; use one of {', '.join(sorted(SUPPORTED_OPTIMS))}, or for Muon "
        "optimizer_cls_and_kwargs=(hf_zero.MuonWithAdamW, {...})"
    )


def _precision(settings: Settings) -> str | None:
    if settings["zero_autocast"] and not (settings["bf16"] or settings["fp16"]):
        return "zero_autocast: requires --bf16 or --fp16, and neither is set; add --bf16"
    return None


def _length(settings: Settings) -> str | None:
    if settings["max_steps"] == 0:
        return "max_steps: 0 means 'use num_train_epochs'; pass a positive number, or omit it"
    if settings["max_steps"] < 0 and not 0 <= settings["num_train_epochs"] < math.inf:
        return f"num_train_epochs: {settings['num_train_epochs']} is out of range; expected 0 or more, or --max_steps"
    return None


def _saving(settings: Settings) -> str | None:
    if _value(settings["save_strategy"]) == "steps" and settings["save_steps"] <= 0:
        return f"save_steps: {settings['save_steps']:g} saves nothing; pass a positive number, or --save_strategy no"
    return None


def _gathered_objects(settings: Settings) -> str | None:
    """Rejects the concatenation of gathered objects: transformers zips the rows of two batches, and drops rows of the
    longer one."""
    if settings["eval_use_gather_object"] and settings["eval_do_concat_batches"]:
        return (
            "eval_use_gather_object: with eval_do_concat_batches (the default), rows are dropped from the evaluation; "
            "set eval_do_concat_batches to false, or remove eval_use_gather_object if all outputs are tensors"
        )
    return None


def _reporters(settings: Settings) -> str | None:
    given = settings["report_to"] or []
    names = [given] if isinstance(given, str) else given
    if names in (["all"], ["none"]):
        return None
    known = integration_utils.INTEGRATION_TO_CALLBACK
    installed = {*integration_utils.get_available_reporting_integrations(), *UNTOLD}
    for name in names:
        if name not in known:
            found = nearest(name, known)
            hint = f"did you mean {found}?" if found else f"expected one of {', '.join(sorted(known))}, all, none"
            return f"report_to: {name!r} is not known; {hint}"
        is_theirs = known[name].__module__ == integration_utils.__name__  # a replacement callback needs no package
        if is_theirs and name not in installed:
            return f"report_to: {name} is not installed; pip install {name}, or pass --report_to none"
    return None


def _liger(settings: Settings) -> str | None:
    if settings["use_liger_kernel"] and not is_liger_kernel_available():
        return "use_liger_kernel: liger-kernel is not installed; pip install liger-kernel, or remove the flag"
    return None


def _schedule(settings: Settings) -> str | None:
    try:
        _schedule_kwargs(settings)
    except (TypeError, ValueError):
        given = settings["lr_scheduler_kwargs"]
        return f"lr_scheduler_kwargs: {given!r} is not a JSON object; write it as '{{\"num_cycles\": 2}}'"
    return None


def _schedule_kwargs(settings: Settings) -> dict[str, Any]:
    given = settings["lr_scheduler_kwargs"] or {}
    kwargs = json.loads(given) if isinstance(given, str) else given
    if not isinstance(kwargs, Mapping):
        raise TypeError(kwargs)
    return dict(kwargs)


def _optimizer(settings: Settings) -> str | None:
    """Checks with transformers that the optimizer's package is installed and its arguments can be parsed."""
    try:
        Trainer.get_optimizer_cls_and_kwargs(
            SimpleNamespace(**{**settings, "optim": OptimizerNames(settings["optim"])})
        )
    except (ValueError, ImportError, RuntimeError) as error:
        arguments = f" with optim_args {settings['optim_args']!r}" if settings["optim_args"] else ""
        return f"optim {_value(settings['optim'])}{arguments}: {_reason(error)}"
    return None


def _offload_folder(settings: Settings) -> str | None:
    given = settings["zero_offload_dir"]
    if given is None:
        return None
    folder = Path(given).expanduser().absolute()
    if not folder.is_dir():
        return f"zero_offload_dir {given!r}: no such folder; create it, preferably on a local NVMe disk"
    reason = _unwritable(folder)
    return None if reason is None else f"zero_offload_dir {given!r}: not writable ({reason}); choose another folder"


# The order matters: later checks rely on earlier ones.
CHECKS: tuple[Callable[[Settings], str | None], ...] = (
    _supported_optimizer,
    *ACTIVATION_CHECKS,
    _precision,
    _length,
    _saving,
    _gathered_objects,
    _reporters,
    _liger,
    _schedule,
    _optimizer,
    _offload_folder,
)


def _value(choice: Any) -> str:
    """Returns the value of an enum member, or the given text."""
    return str(getattr(choice, "value", choice))


def _is_there(path: Path) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _unwritable(folder: Path) -> str | None:
    """Returns the reason why a folder is not writable, or `None`. Tries to write an unnamed file."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return "no permission"
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:  # a read-only file system, or one that maps root to an unprivileged user
        return error.strerror


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
